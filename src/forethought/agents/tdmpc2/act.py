"""Acting: plan in latent space, or let the policy act alone (TD-MPC2, section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forethought.agents.tdmpc2.config import TDMPC2Config
from forethought.agents.tdmpc2.model import WorldModel
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

    Two savings leave the result as it is: what the first layers of dynamics and reward make of z0
    is computed once and not once per sample, and only the two Q heads drawn are evaluated.
    (Keeping the policy's rollouts from iteration to iteration was tried: no gain, because matrix
    products over 488 rows take as long as over 512.)
    """

    def __init__(self, model: WorldModel, z0: Tensor, noise: PlanNoise, gamma: float) -> None:
        self.model, self.noise, self.gamma = model, noise, gamma
        z0 = z0.unsqueeze(1)  # [E, 1, Z], broadcasts against [E, N, A]
        self.dynamics_part = model.dynamics.latent_part(z0)  # [E, 1, H]
        self.reward_part = model.reward.latent_part(z0)  # [E, 1, H]

    def __call__(self, actions: Tensor, iteration: int) -> Tensor:
        """[T, E, N, A] -> [E, N]."""
        model = self.model
        total = torch.zeros(actions.shape[1:3], dtype=actions.dtype, device=actions.device)
        alive = torch.ones_like(total)
        z: Tensor | None = None
        for t, a in enumerate(actions):
            if z is None:
                logits = model.reward.from_latent_part(self.reward_part, a)  # [E, N, K]
                z = model.dynamics.from_latent_part(self.dynamics_part, a)  # [E, N, Z]
            else:
                za = torch.cat((z, a), dim=-1)  # [E, N, Z+A]
                logits, z = model.reward.joined(za), model.dynamics.joined(za)
            total += self.gamma**t * alive * model.decode(logits)
            if model.termination is not None:
                # Once the model says that it is over, no later step counts.
                alive *= model.termination_probability(z) <= 0.5
        assert z is not None
        a = model.policy_action(z, self.noise.bootstrap[iteration])  # [E, N, A]
        q = model.values(model.q, z, a, self.noise.heads[iteration])  # [2, E, N]
        return total + self.gamma ** len(actions) * alive * q.mean(0)


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
    score = LatentScorer(model, z0, noise, gamma)
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
