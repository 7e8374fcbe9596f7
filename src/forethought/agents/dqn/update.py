"""One gradient step of the DQN family, in the papers' order: target, loss, step, target network.

    x_t --a_t--> r_{t+1} --> ... --> r_{t+m} --> x_{t+m}         m = min(n, steps to the end)

    y = R + gamma^m (value of x_{t+m}),     R = sum_{k<m} gamma^k r_{t+k+1}

Termination (and a lost life, where the task says so) makes the discount 0; truncation never does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from forethought.agents.dqn import targets
from forethought.agents.dqn.config import C51, IQN, DQNConfig, Munchausen, RMSProp
from forethought.agents.dqn.heads import QNetwork
from forethought.nets.noisy import NetNoise, draw_noise
from forethought.nets.optimisers import DeepMindRMSProp, adam, clip_gradients
from forethought.tracking.columns import VALUE_SHARE

METRICS = (
    "loss",
    "td_error_abs",
    "td_target_mean",
    "q_mean",
    "q_max",
    VALUE_SHARE,
    "grad_norm",
    "lr",
    "nonfinite",
)
"""Keys of every update's metrics."""


@dataclass(frozen=True)
class Transitions:
    """A batch on the agent's device."""

    obs: Tensor  # [B, ...]
    action: Tensor  # [B], rows of the table of actions
    reward: Tensor  # [B], R: the sum of m discounted rewards
    discount: Tensor  # [B], gamma^m, or 0 where the future is cut
    next_obs: Tensor  # [B, ...], x_{t+m}
    weights: Tensor  # [B], importance weights; ones where all are drawn alike
    legal: Tensor | None = None  # [B, A] bool at x_t; None: all
    next_legal: Tensor | None = None  # [B, A] bool at x_{t+m}


@dataclass(frozen=True)
class UpdateNoise:
    """Every random number of an update. The networks never share noise: that of the target would
    otherwise agree with that of the online network by construction (Fortunato et al., 3.1)."""

    online: NetNoise | None = None
    select: NetNoise | None = None
    """Of the online network where it chooses the next action (agent.double)."""
    target: NetNoise | None = None
    tau: Tensor | None = None  # [B, N]
    target_tau: Tensor | None = None  # [B, N']
    select_tau: Tensor | None = None  # [B, K]
    now_tau: Tensor | None = None  # [B, K], of Munchausen's policy at x_t


def draw_update_noise(
    network: QNetwork, config: DQNConfig, rows: int, generator: torch.Generator
) -> UpdateNoise:
    """What the next update of `rows` transitions needs."""

    def layers() -> NetNoise | None:
        return draw_noise(network.noisy_layers, generator) or None

    def fractions(count: int) -> Tensor:
        return torch.rand(rows, count, generator=generator, device=generator.device)

    noise = UpdateNoise(
        online=layers(), target=layers(), select=layers() if config.double else None
    )
    kind = config.distribution
    if not isinstance(kind, IQN):
        return noise
    munchausen = isinstance(config.munchausen, Munchausen)
    return replace(
        noise,
        tau=fractions(kind.taus),
        target_tau=fractions(kind.target_taus),
        select_tau=fractions(kind.policy_taus),
        now_tau=fractions(kind.policy_taus) if munchausen else None,
    )


class Learner:
    """What an update changes: the online network, its optimiser, and now and then the target."""

    def __init__(self, online: QNetwork, target: QNetwork, config: DQNConfig) -> None:
        self.online, self.target, self.config = online, target, config
        target.requires_grad_(False)
        self.sync()
        self.parameters: list[nn.Parameter] = list(online.parameters())
        self.optimiser = make_optimiser(self.parameters, config)
        self.greatest_return = 0.0
        """The greatest |R| of any transition so far."""

    def update(self, batch: Transitions, noise: UpdateNoise) -> tuple[dict[str, float], Tensor]:
        """One step; its metrics, and the new priority of each transition [B].

        A step whose loss, target or gradient is not finite is left out and reported as `nonfinite`.
        """
        y = self.targets(batch, noise)  # [B, N']
        out = self.online(batch.obs, noise.online, noise.tau)  # [B, A, N]
        predicted = targets.taken(out, batch.action)  # [B, N]
        each = self.online.loss(predicted, y, noise.tau)  # [B]
        weighted = batch.weights * each  # before they are brought together, not after
        self.optimiser.zero_grad(set_to_none=True)
        summed = isinstance(self.config.optimiser, RMSProp)  # as the released code
        (weighted.sum() if summed else weighted.mean()).backward()  # type: ignore[no-untyped-call]
        limit = self.config.grad_clip_norm
        norm = clip_gradients(self.parameters, math.inf if limit is None else limit)

        with torch.no_grad():
            q = self.online.expected(out)  # [B, A]
            q_taken = q.gather(1, batch.action[:, None]).squeeze(1)
            goal = (y * self.online.support).sum(-1) if self._categorical else y.mean(-1)
            error = (goal - q_taken).abs()  # [B]
            means = (weighted.mean(), error.mean(), goal.mean(), q_taken.mean(), q.max())
            # The return apart: the projection of C51 clamps an infinite one to a finite one.
            sizes = (q.abs().max(), batch.reward.abs().max())
            *shown, q_size, r_size = torch.stack([*means, *sizes]).tolist()
        names = ("loss", "td_error_abs", "td_target_mean", "q_mean", "q_max")
        metrics = dict(zip(names, shown, strict=True))
        metrics |= {"grad_norm": norm, "lr": self.optimiser.param_groups[0]["lr"]}
        if not all(map(math.isfinite, (*metrics.values(), q_size, r_size))):
            return metrics | {"nonfinite": 1.0}, error
        self.optimiser.step()
        metrics |= self._value_share(q_size, r_size)
        plain = self.online.values == 1 and self.online.embedding is None
        return metrics | {"nonfinite": 0.0}, error if plain else each.detach()

    def _value_share(self, q_size: float, r_size: float) -> dict[str, float]:
        """The greatest |Q| over r_max / (1 - gamma), where there is such a bound.

        r_max is the greatest |R| so far: more than a step pays if n steps are summed, so that the
        bound is rather too wide. Munchausen's bonus is part of what a step pays.
        """
        self.greatest_return = max(self.greatest_return, r_size)
        tricks, pays = self.config.munchausen, self.greatest_return
        if isinstance(tricks, Munchausen):
            pays += tricks.alpha * -tricks.clip
        bound = pays / (1 - self.config.gamma) if self.config.gamma < 1 else 0.0
        return {VALUE_SHARE: q_size / bound} if bound > 0 else {}

    @torch.no_grad()
    def targets(self, batch: Transitions, noise: UpdateNoise) -> Tensor:
        """What the taken action's values shall become: [B, N'] returns, or probabilities."""
        target, tricks = self.target, self.config.munchausen
        legal = batch.next_legal
        features = target.features(batch.next_obs)  # [B, D]
        out = target.head(features, noise.target, noise.target_tau)  # [B, A, N']
        reward = batch.reward
        if isinstance(tricks, Munchausen):
            temperature = tricks.temperature
            q = self._choosing(target, features, out, noise)  # [B, A]
            q_now = target.expected(target(batch.obs, noise.target, noise.now_tau))
            reward = reward + targets.munchausen_bonus(
                q_now, batch.action, tricks.alpha, temperature, tricks.clip, batch.legal
            )
            value = targets.soft_value(out, q, temperature, legal)  # [B, N']
        else:
            if self.config.double:
                q = self.online.expected(
                    self.online(batch.next_obs, noise.select, noise.select_tau)
                )
            else:
                q = self._choosing(target, features, out, noise)
            value = targets.taken(out, targets.greedy(q, legal))  # [B, N']
        if self._categorical:
            chances = torch.softmax(value, -1)
            return targets.project(chances, reward, batch.discount, target.support)
        return reward[:, None] + batch.discount[:, None] * value

    def _choosing(
        self, target: QNetwork, features: Tensor, out: Tensor, noise: UpdateNoise
    ) -> Tensor:
        """The values that the target network chooses by: its own, or at K other fractions."""
        if target.embedding is not None:
            out = target.head(features, noise.target, noise.select_tau)
        return target.expected(out)

    @property
    def _categorical(self) -> bool:
        return isinstance(self.config.distribution, C51)

    @torch.no_grad()
    def sync(self) -> None:
        """target <- online, buffers of the spectral norm included."""
        self.target.load_state_dict(self.online.state_dict())


def make_optimiser(parameters: list[nn.Parameter], config: DQNConfig) -> torch.optim.Optimizer:
    """The optimiser of the configuration."""
    chosen = config.optimiser
    if isinstance(chosen, RMSProp):
        return DeepMindRMSProp(parameters, chosen.lr, chosen.decay, chosen.epsilon)
    return adam([{"params": parameters, "lr": chosen.lr}], chosen.epsilon)
