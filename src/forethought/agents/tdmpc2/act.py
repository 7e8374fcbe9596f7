"""Acting: plan in latent space, or let the policy act alone (TD-MPC2, section 3.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forethought.agents.tdmpc2.actions import Actions
from forethought.agents.tdmpc2.config import TDMPC2Config
from forethought.agents.tdmpc2.model import WorldModel
from forethought.agents.tdmpc2.noise import PlanNoise
from forethought.config import ForethoughtError
from forethought.envs import multi
from forethought.planning.categorical import CategoricalPlan
from forethought.planning.mppi import Plan
from forethought.replay.stacks import FrameStacker
from forethought.spaces.action_codec import is_discrete
from forethought.spaces.masks import legal_actions
from forethought.spaces.nested import Tree
from forethought.spaces.spec import EnvSpec

PLAN_VALUES = ("plan_value_max", "plan_value_mean", "plan_value_std")
"""Of the elites in a plan's last iteration."""


@dataclass
class ActState:
    """What one caller's environments carry from decision to decision; the caller owns it."""

    mean: Tensor  # [T, E, A], the last plan; of discrete actions their probabilities
    generator: torch.Generator
    plan: Plan | CategoricalPlan | None = None
    """The last one, to look at; the future does not depend on it."""
    frames: FrameStacker | None = None
    """The last frames, where observations are stacked."""


class LatentScorer:
    """Values of action sequences, imagined from z0: the planner's `score`.

    Two savings leave the result as it is: what the first layers of dynamics and reward make of z0
    is computed once and not once per sample (and what they make of each action, where actions are
    rows of a table), and only the two Q heads drawn are evaluated.
    (Keeping the policy's rollouts from iteration to iteration was tried: no gain, because matrix
    products over 488 rows take as long as over 512.)
    """

    def __init__(
        self,
        model: WorldModel,
        z0: Tensor,
        noise: PlanNoise,
        gamma: float | Tensor,
        mask: Tensor | None = None,
    ) -> None:
        """With several tasks gamma is [E, 1] and the actions' mask [E, 1, A]."""
        self.model, self.noise, self.gamma, self.mask = model, noise, gamma, mask
        z0 = z0.unsqueeze(1)  # [E, 1, Z], broadcasts against [E, N, A]
        self.z0 = z0
        self.dynamics_part = model.dynamics.latent_part(z0)  # [E, 1, H]
        self.reward_part = model.reward.latent_part(z0)  # [E, 1, H]
        self.dynamics_table = model.dynamics.action_table()
        self.reward_table = model.reward.action_table()
        heads = sorted({head for pair in noise.heads for head in pair})
        self.q_tables = {head: model.q[head].action_table() for head in heads}  # type: ignore[operator]

    def __call__(self, actions: Tensor, iteration: int) -> Tensor:
        """[T, E, N, A], or rows of the table of actions [T, E, N], -> [E, N]."""
        model, noise = self.model, self.noise
        dynamics, reward = model.dynamics, model.reward
        dtype = noise.bootstrap.dtype
        total = torch.zeros(actions.shape[1:3], dtype=dtype, device=actions.device)
        alive = torch.ones_like(total)
        z: Tensor | None = None
        for t, a in enumerate(actions):
            if z is None:
                logits = reward.from_latent_part(self.reward_part, a, None, self.reward_table)
                state = dynamics.from_latent_part(self.dynamics_part, a, None, self.dynamics_table)
                z = model.beside_task_of(self.z0, state)  # [E, N, Z]
            elif a.is_floating_point():
                za = torch.cat((z, a), dim=-1)  # [E, N, Z+A]
                logits = reward.joined(za)  # [E, N, K]
                z = model.beside_task_of(z, dynamics.joined(za))
            else:
                part = dynamics.latent_part(z)  # [E, N, H]
                logits = reward.from_latent_part(reward.latent_part(z), a, None, self.reward_table)
                z = dynamics.from_latent_part(part, a, None, self.dynamics_table)
            total += self.gamma**t * alive * model.decode(logits)
            if model.termination is not None:
                # Once the model says that it is over, no later step counts.
                alive *= model.termination_probability(z) <= 0.5
        assert z is not None
        a = model.policy_action(z, noise.bootstrap[iteration], self.mask)  # [E, N, A]
        q = model.values(model.q, z, a, noise.heads[iteration], self.q_tables)  # [2, E, N]
        return total + self.gamma ** len(actions) * alive * q.mean(0)


def plan(
    model: WorldModel,
    obs: Tree,
    mean: Tensor,
    first: Tensor,
    noise: PlanNoise,
    gamma: float,
    explore: bool,
    legal: Tensor | None = None,
    task: Tensor | None = None,
) -> Plan | CategoricalPlan:
    """One decision for every environment: obs [E, O], last plan `mean` [T, E, A], `first` [E].

    Of discrete actions, some may be `legal` now [E, N]; what will be legal later is not known. With
    several tasks, `task` [E] says which one each plays, and brings its discount and its mask.
    """
    z0 = model.encode(obs, task=task)  # [E, Z]
    mask = legal if task is None else model.mask_of(task)
    policy_actions = propose(model, z0, noise.policy, mask)  # [T, E, P, A]
    if model.tasks is None or task is None:
        score = LatentScorer(model, z0, noise, gamma)
    else:
        gammas = model.tasks.discount(task, z0.dtype)[:, None]  # [E, 1]
        score = LatentScorer(model, z0, noise, gammas, model.tasks.masks[task][:, None])
    return model.actions.search(score, policy_actions, mean, first, noise, mask, explore)


def propose(model: WorldModel, z0: Tensor, noise: Tensor, mask: Tensor | None = None) -> Tensor:
    """Action sequences of the stochastic policy, imagined with the dynamics: [T, E, P, A]."""
    horizon, _, count, _ = noise.shape
    if count == 0:
        return model.actions.no_sequences(noise)
    own = None if mask is None else mask.unsqueeze(1)  # [E, 1, N]
    later = own if model.actions.masks_stay else None
    z = z0.unsqueeze(1).expand(-1, count, -1)  # [E, P, Z]
    actions = []
    for t in range(horizon):
        actions.append(model.policy_action(z, noise[t], own if t == 0 else later))
        if t + 1 < horizon:
            z = model.next(z, actions[-1])
    return torch.stack(actions)


def decide(
    model: WorldModel,
    config: TDMPC2Config,
    obs: Tree,
    state: ActState,
    first: Tensor,
    gamma: float,
    explore: bool,
    legal: Tensor | None = None,
    task: Tensor | None = None,
) -> tuple[Tensor, ActState]:
    """Actions [E, A], or rows of the table of actions [E], and the next state.

    `legal` and `task` are as in `plan`.
    """
    envs, actions = len(first), model.actions
    if not config.mpc:
        shape = (envs, actions.noise_dim)
        device, dtype = state.mean.device, state.mean.dtype
        noise = actions.draw(shape, generator=state.generator, device=device, dtype=dtype)
        mask = legal if task is None else model.mask_of(task)
        output = model.pi(model.encode(obs, task=task), noise, mask)
        return (output.action if explore else output.mean), state
    drawn = actions.plan_noise(state.generator, config.horizon, envs, len(model.q))
    result = plan(model, obs, state.mean, first, drawn, gamma, explore, legal, task)
    return result.action, replace(state, mean=result.mean, plan=result)


def tasks_of(info: Sequence[dict[str, Any]], spec: EnvSpec, device: torch.device) -> Tensor | None:
    """Which of several tasks each environment plays: [E]; None where there is one."""
    if not spec.tasks:
        return None
    if any("task" not in own for own in info):
        raise ForethoughtError(
            f"This agent plays {len(spec.tasks)} tasks, and must be told which one this is: "
            "act(obs, task=NAME) for the task's own observations and actions, or info as the "
            "environments of several tasks give it."
        )
    if any(np.ndim(own["task"]) for own in info):
        raise ForethoughtError(
            "info['task'] holds the tasks of several environments, but must be the number of one: "
            "act(obs, info=...) is for one environment, act_batch for those of make_env."
        )
    return torch.tensor([multi.number_of(own["task"], spec) for own in info], device=device)


def legal_of(info: Sequence[dict[str, Any]], spec: EnvSpec, device: torch.device) -> Tensor | None:
    """Which actions of the table each environment allows now [E, N]; None: all of them."""
    source = spec.mask_source
    if source is None or not is_discrete(spec.action_space):
        return None
    if any(source not in own for own in info):
        raise ForethoughtError(
            f"{spec.task} says in info which actions are legal, but there is no '{source}' in the "
            "info given: pass what reset and step return, as in act(obs, info=info)."
        )
    mask = np.stack([own[source] for own in info])
    legal = legal_actions(mask, (len(info), spec.action_codec.size))
    return torch.from_numpy(legal).to(device)


def plan_metrics(spread: str) -> tuple[str, ...]:
    """What is reported of plans; `spread` is the metric of the first action's distribution."""
    return (*PLAN_VALUES, spread)


def plan_statistics(actions: Actions, plan: Plan | CategoricalPlan | None) -> dict[str, float]:
    """What a person may want to know about a plan; nothing where there was none."""
    if plan is None:
        return {}
    values = plan.values
    found = (values.max(), values.mean(), values.std(correction=0), actions.plan_spread(plan))
    names = plan_metrics(actions.plan_metric)
    return {name: value.item() for name, value in zip(names, found, strict=True)}
