"""Acting: plan in latent space, or let the policy act alone (TD-MPC2, section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from forethought.agents.tdmpc2.config import TDMPC2Config
from forethought.agents.tdmpc2.model import LatentActionMLP, WorldModel
from forethought.agents.tdmpc2.noise import PlanNoise, draw_plan_noise
from forethought.planning.mppi import MPPISettings, Plan, mppi, shift


@dataclass
class ActState:
    """What one caller's environments carry from decision to decision; the caller owns it."""

    mean: Tensor  # [T, E, A], the last plan
    generator: torch.Generator
    plan: Plan | None = None
    """The last one, to look at; the future does not depend on it."""


class LatentScorer:
    """Values of action sequences, imagined from z0: the planner's `score`.

    Four savings leave the result as it is. Dynamics and reward see the same input, so their first
    layers are one matrix product; their part that only depends on z0 is computed once and not once
    per sample. The policy's sequences are the same in every iteration, so their rewards and last
    latents are computed once. Only the two Q heads drawn are evaluated.
    """

    def __init__(
        self, model: WorldModel, z0: Tensor, policy_actions: Tensor, noise: PlanNoise, gamma: float
    ) -> None:
        self.model, self.noise, self.gamma = model, noise, gamma
        self.first = SideBySide(model.dynamics, model.reward)
        self.z0_part = self.first.product(z0, slice(0, z0.shape[-1])).unsqueeze(1)  # [E, 1, 2H]
        self.policy_samples = policy_actions.shape[2]
        self.policy_rollout = self._rollout(policy_actions) if self.policy_samples else None

    def __call__(self, actions: Tensor, iteration: int) -> Tensor:
        """[T, E, N, A] -> [E, N]; the last sequences are the policy's."""
        sampled = actions[:, :, : actions.shape[2] - self.policy_samples]
        parts = self._rollout(sampled)
        if self.policy_rollout is not None:
            parts = tuple(
                torch.cat(pair, dim=1) for pair in zip(parts, self.policy_rollout, strict=True)
            )
        total, alive, z = parts
        a = self.model.policy_action(z, self.noise.bootstrap[iteration])  # [E, N, A]
        logits = self.model.q(z, a, self.noise.heads[iteration])  # [2, E, N, K]
        value = self.model.two_hot.decode(logits).mean(0)  # [E, N]
        return total + self.gamma ** len(actions) * alive * value

    def _rollout(self, actions: Tensor) -> tuple[Tensor, ...]:
        """Discounted rewards [E, N], 1 where not terminated [E, N], last latent [E, N, Z]."""
        model, shape = self.model, actions.shape[1:3]
        total = torch.zeros(shape, dtype=actions.dtype, device=actions.device)
        alive = torch.ones_like(total)
        z: Tensor | None = None
        for t, a in enumerate(actions):
            if z is None:
                product = self.first.product(a, slice(model.dynamics.latent, None)) + self.z0_part
            else:
                product = self.first.product(torch.cat((z, a), dim=-1))
            for_dynamics, for_reward = self.first.activate(product)
            z = model.dynamics.after_hidden(for_dynamics).view(*shape, -1)
            reward = model.two_hot.decode(model.reward.after_hidden(for_reward)).view(shape)
            total = total + self.gamma**t * alive * reward
            if model.termination is not None:
                # Once the model says that it is over, no later step counts.
                alive = alive * (model.termination_probability(z) <= 0.5)
        assert z is not None
        return total, alive, z


class SideBySide:
    """The first layers of two networks with the same input, as one matrix product.

    One wide product is faster than two narrow ones. Holds a copy of the weights: make a new one
    after an update.
    """

    def __init__(self, *networks: LatentActionMLP) -> None:
        layers = [network.first for network in networks]
        self.weight = torch.cat([layer.weight for layer in layers])  # [S*H, Z+A]
        self.bias = torch.stack([layer.bias for layer in layers])  # [S, H]
        self.norm_weight = torch.stack([layer.norm.weight for layer in layers])
        self.norm_bias = torch.stack([layer.norm.bias for layer in layers])
        self.kernels = layers[0].kernels

    def product(self, x: Tensor, columns: slice = slice(None)) -> Tensor:
        """Without the bias, of some of the input's columns: [..., S*H]."""
        return F.linear(x, self.weight[:, columns])

    def activate(self, product: Tensor) -> tuple[Tensor, ...]:
        """The layers' outputs, each [rows, H]."""
        sets, units = self.bias.shape
        y = product.reshape(-1, sets, units)
        return self.kernels.norm_mish(y, self.bias, self.norm_weight, self.norm_bias).unbind(1)


def plan(
    model: WorldModel,
    obs: Tensor,
    mean: Tensor,
    first: Tensor,
    noise: PlanNoise,
    gamma: float,
    explore: bool,
) -> Plan:
    """One decision for every environment: obs [E, O], last plan `mean` [T, E, A], `first` [E]."""
    config = model.config
    settings = MPPISettings(
        elites=config.planner.elites,
        min_std=config.planner.min_std,
        max_std=config.planner.max_std,
        temperature=config.planner.temperature,
    )
    z0 = model.encode(obs)  # [E, Z]
    policy_actions = propose(model, z0, noise.policy)  # [T, E, P, A]
    score = LatentScorer(model, z0, policy_actions, noise, gamma)
    return mppi(score, policy_actions, shift(mean, first), noise.mppi, settings, explore)


def propose(model: WorldModel, z0: Tensor, eps: Tensor) -> Tensor:
    """Action sequences of the stochastic policy, imagined with the dynamics: [T, E, P, A]."""
    horizon, _, count, _ = eps.shape
    if count == 0:
        return eps
    z = z0.unsqueeze(1).expand(-1, count, -1)  # [E, P, Z]
    actions = []
    for t in range(horizon):
        actions.append(model.policy_action(z, eps[t]))
        if t + 1 < horizon:
            z = model.next(z, actions[-1])
    return torch.stack(actions)


def decide(
    model: WorldModel,
    config: TDMPC2Config,
    obs: Tensor,
    state: ActState,
    first: Tensor,
    gamma: float,
    explore: bool,
) -> tuple[Tensor, ActState]:
    """Actions [E, A] and the next state."""
    envs, action_dim = len(obs), model.action_dim
    if not config.mpc:
        shape = (envs, action_dim)
        eps = torch.randn(shape, generator=state.generator, device=obs.device, dtype=obs.dtype)
        output = model.pi(model.encode(obs), eps)
        return (output.action if explore else output.mean), state
    planner = config.planner
    noise = draw_plan_noise(
        state.generator,
        horizon=config.horizon,
        envs=envs,
        samples=planner.samples,
        policy_samples=planner.policy_samples,
        elites=planner.elites,
        iterations=planner.iterations_for(action_dim),
        action_dim=action_dim,
        num_q=len(model.q),
    )
    result = plan(model, obs, state.mean, first, noise, gamma, explore)
    return result.action, ActState(result.mean, state.generator, result)
