"""SAC and TD3 written slowly from their papers alone: one network, one sample, one formula at a
time, in float64, with gradients by autograd and Adam by hand.

Networks are lists of (weight [out, in], bias [out]).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Net = list[tuple[Tensor, Tensor]]


def forward(net: Net, x: Tensor) -> Tensor:
    """One input vector through one network."""
    for i, (weight, bias) in enumerate(net):
        x = weight @ x + bias
        if i + 1 < len(net):
            x = torch.where(x > 0, x, torch.zeros_like(x))
    return x


def linear_layers(state: dict[str, Tensor], name: str) -> Net:
    """An actor's net: `name.net.weights.0`, `name.net.biases.0`, `name.net.weights.1`, ..."""
    count = len([k for k in state if k.startswith(f"{name}.net.weights.")])
    return [
        (state[f"{name}.net.weights.{i}"], state[f"{name}.net.biases.{i}"]) for i in range(count)
    ]


def member(state: dict[str, Tensor], name: str, number: int) -> Net:
    """One critic of an ensemble."""
    layers = sorted({int(k.split(".")[2]) for k in state if k.startswith(f"{name}.weights.")})
    return [
        (state[f"{name}.weights.{i}"][number], state[f"{name}.biases.{i}"][number, 0])
        for i in layers
    ]


def critics(state: dict[str, Tensor], name: str) -> list[Net]:
    return [member(state, name, n) for n in range(len(state[f"{name}.weights.0"]))]


def squash(raw: Tensor, bounds: Any) -> Tensor:
    """log std within its bounds."""
    if bounds.kind == "tanh":
        return bounds.min + (bounds.max - bounds.min) * (torch.tanh(raw) + 1) / 2
    return torch.clamp(raw, bounds.min, bounds.max)


def sac_draw(net: Net, obs: Tensor, noise: Tensor, config: Any, half: Any) -> tuple[Tensor, Tensor]:
    """One action and the logarithm of its density."""
    out = forward(net, obs)
    size = len(out) // 2
    mean, std = out[:size], torch.exp(squash(out[size:], config.log_std))
    u = mean + std * noise
    action = torch.tanh(u)
    log_prob = torch.zeros((), dtype=obs.dtype)
    for i in range(size):
        z = (u[i] - mean[i]) / std[i]
        gaussian = -(z**2) / 2 - torch.log(std[i]) - math.log(math.sqrt(2 * math.pi))
        slope = 1 - action[i] ** 2
        if config.action_units == "environment":
            slope = slope * half[i]
        log_prob = log_prob + gaussian - torch.log(slope)
    return action, log_prob


def q(net: Net, obs: Tensor, action: Tensor) -> Tensor:
    return forward(net, torch.cat([obs, action]))[0]


def critic_loss(nets: list[Net], batch: Any, y: list[Tensor], form: str) -> Tensor:
    """Mean over the batch of squared errors, for each critic; then joined."""
    per_critic = []
    for net in nets:
        errors = [(q(net, batch.obs[0, i], batch.action[0, i]) - y[i]) ** 2 for i in range(len(y))]
        per_critic.append(sum(errors) / len(errors))
    factor = {"half_sum": 0.5, "sum": 1.0, "mean": 1 / len(nets)}[form]
    return factor * sum(per_critic)


@dataclass
class Adam:
    """Kingma and Ba, algorithm 1, with everything it remembers."""

    count: dict[str, int]
    mean: dict[str, Tensor]
    square: dict[str, Tensor]

    @classmethod
    def new(cls) -> Adam:
        return cls({}, {}, {})

    def step(self, name: str, weight: Tensor, gradient: Tensor, lr: float) -> Tensor:
        t = self.count[name] = self.count.get(name, 0) + 1
        zero = torch.zeros_like(weight)
        m = self.mean[name] = 0.9 * self.mean.get(name, zero) + 0.1 * gradient
        v = self.square[name] = 0.999 * self.square.get(name, zero) + 0.001 * gradient**2
        return weight - lr * (m / (1 - 0.9**t)) / (torch.sqrt(v / (1 - 0.999**t)) + 1e-8)


def step(
    state: dict[str, Tensor], loss_of: Any, which: Any, adam: Adam, lr: float
) -> tuple[dict[str, Tensor], Tensor]:
    """Adam on the parameters of `state` whose names `which` takes, all others held."""
    names = [name for name in state if which(name)]
    leaves = {name: state[name].clone().requires_grad_() for name in names}
    loss = loss_of({**state, **leaves})
    gradients = torch.autograd.grad(loss, [leaves[name] for name in names])
    moved = {
        name: adam.step(name, state[name], gradient, lr)
        for name, gradient in zip(names, gradients, strict=True)
    }
    return {**state, **moved}, loss.detach()


def follow(state: dict[str, Tensor], part: str, tau: float) -> dict[str, Tensor]:
    moved = {
        name: (1 - tau) * value + tau * state[name.removeprefix("target_")]
        for name, value in state.items()
        if name.startswith(f"target_{part}.")
    }
    return {**state, **moved}


def sac_targets(state: dict[str, Tensor], batch: Any, noise: Tensor, c: Any, half: Any) -> Any:
    alpha = torch.exp(state["temperature.log_alpha"])
    actor, targets = linear_layers(state, "actor"), critics(state, "target_critic")
    y = []
    for i in range(len(noise)):
        s = batch.obs[1, i]
        a, log_prob = sac_draw(actor, s, noise[i], c, half)
        value = min(q(net, s, a) for net in targets) - alpha * log_prob
        y.append(batch.reward[0, i] + c.gamma * (1 - batch.terminated[0, i]) * value)
    return y


def sac_actor_loss(state: dict[str, Tensor], batch: Any, noise: Tensor, c: Any, half: Any) -> Any:
    alpha = torch.exp(state["temperature.log_alpha"])
    actor, nets = linear_layers(state, "actor"), critics(state, "critic")
    total = torch.zeros((), dtype=noise.dtype)
    for i in range(len(noise)):
        s = batch.obs[0, i]
        a, log_prob = sac_draw(actor, s, noise[i], c, half)
        total = total + alpha * log_prob - min(q(net, s, a) for net in nets)
    return total / len(noise)


def sac_alpha_loss(
    state: dict[str, Tensor],
    actor: Net,
    batch: Any,
    noise: Tensor,
    c: Any,
    half: Any,
    target: float,
) -> Tensor:
    log_alpha = state["temperature.log_alpha"]
    weight = torch.exp(log_alpha) if c.entropy.loss == "alpha" else log_alpha
    total = torch.zeros((), dtype=noise.dtype)
    for i in range(len(noise)):
        _, log_prob = sac_draw(actor, batch.obs[0, i], noise[i], c, half)
        total = total - weight * (log_prob.detach() + target)
    return total / len(noise)


def sac_update(
    state: dict[str, Tensor], batch: Any, noise: Any, c: Any, half: Any, target: float, adam: Adam
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """One whole update; the actor moves as often as there is noise for it."""
    with torch.no_grad():
        y = sac_targets(state, batch, noise.target, c, half)
    state, loss = step(
        state,
        lambda s: critic_loss(critics(s, "critic"), batch, y, c.critic_loss),
        lambda name: name.startswith("critic."),
        adam,
        c.lr.critic,
    )
    losses = {"critic_loss": loss}
    for draw in noise.policy:
        before = state
        state, losses["actor_loss"] = step(
            before,
            lambda s, draw=draw: sac_actor_loss(s, batch, draw, c, half),
            lambda name: name.startswith("actor."),
            adam,
            c.lr.actor,
        )
        if c.entropy.kind == "auto":
            old = linear_layers(before, "actor")
            state, losses["alpha_loss"] = step(
                state,
                lambda s, draw=draw, old=old: sac_alpha_loss(s, old, batch, draw, c, half, target),
                lambda name: name == "temperature.log_alpha",
                adam,
                c.entropy.lr,
            )
    return follow(state, "critic", c.tau), losses


def td3_targets(state: dict[str, Tensor], batch: Any, noise: Tensor, c: Any) -> list[Tensor]:
    actor, targets = linear_layers(state, "target_actor"), critics(state, "target_critic")
    y = []
    for i in range(len(noise)):
        s = batch.obs[1, i]
        a = torch.tanh(forward(actor, s))
        for j in range(len(a)):
            bump = min(max(c.target_noise * noise[i, j], -c.target_noise_clip), c.target_noise_clip)
            a[j] = min(max(a[j] + bump, -1.0), 1.0)
        value = min(q(net, s, a) for net in targets)
        y.append(batch.reward[0, i] + c.gamma * (1 - batch.terminated[0, i]) * value)
    return y


def td3_actor_loss(state: dict[str, Tensor], batch: Any) -> Tensor:
    actor, first = linear_layers(state, "actor"), member(state, "critic", 0)
    values = [q(first, s, torch.tanh(forward(actor, s))) for s in batch.obs[0]]
    return -sum(values) / len(values)


def td3_update(
    state: dict[str, Tensor], batch: Any, noise: Tensor, c: Any, adam: Adam, number: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Update `number`, counted from 1."""
    with torch.no_grad():
        y = td3_targets(state, batch, noise, c)
    state, loss = step(
        state,
        lambda s: critic_loss(critics(s, "critic"), batch, y, c.critic_loss),
        lambda name: name.startswith("critic."),
        adam,
        c.lr.critic,
    )
    losses = {"critic_loss": loss}
    if number % c.policy_delay == 0:
        state, losses["actor_loss"] = step(
            state,
            lambda s: td3_actor_loss(s, batch),
            lambda name: name.startswith("actor."),
            adam,
            c.lr.actor,
        )
        state = follow(follow(state, "critic", c.tau), "actor", c.tau)
    return state, losses
