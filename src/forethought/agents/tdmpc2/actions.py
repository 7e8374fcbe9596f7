"""What depends on the kind of actions: the policy and its entropy, what a state is worth, planning.

`BoxActions` here are the paper's: a squashed Gaussian policy and MPPI. `CategoricalActions`, for
discrete actions, are in categorical.py. Update and acting read the same for both.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from forethought.agents.tdmpc2.config import TDMPC2Config
from forethought.agents.tdmpc2.noise import Draw, PlanNoise, UpdateNoise, draw_plan_noise
from forethought.config import ConfigError, require
from forethought.files import FileError
from forethought.nets.layers import MLP, frozen
from forethought.planning.categorical import CategoricalPlan
from forethought.planning.categorical import Score as TableScore
from forethought.planning.mppi import MPPINoise, MPPISettings, Plan, Score, mppi, shift
from forethought.spaces.action_codec import ActionCodec, is_discrete
from forethought.spaces.spec import EnvSpec
from forethought.spaces.structure import subspaces

if TYPE_CHECKING:
    from forethought.agents.tdmpc2.model import WorldModel

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class PolicyOutput(NamedTuple):
    """The policy's distribution at some latents, one sample of it, and its entropy."""

    action: Tensor  # [B, A], or [B] where actions are rows of a table
    mean: Tensor  # the same; of a table the likeliest row
    entropy: Tensor  # [B]
    scaled_entropy: Tensor  # [B], what the policy's loss uses


class PolicyTerms(NamedTuple):
    """What the policy's loss is made of, all with a gradient into the policy alone."""

    q: Tensor  # [T+1, B]
    entropy: Tensor  # [T+1, B]
    scaled_entropy: Tensor  # [T+1, B]


class Actions(ABC):
    """One kind of actions. A `mask`, where there is one, says what each state allows."""

    config: TDMPC2Config
    noise_dim: int
    """Random numbers per draw from the policy."""
    draw: Draw
    """How they are drawn."""
    plan_width: int
    """Numbers that a plan keeps per step: those that the next plan starts from."""
    plan_metric: str
    """What is reported of the first action's distribution after planning."""
    masks_stay: bool
    """Whether what a state allows holds for the states after it too."""

    @abstractmethod
    def make_policy(self, latent: int, hidden: list[int]) -> nn.Module: ...

    @abstractmethod
    def pi(
        self, policy: Any, z: Tensor, noise: Tensor | None, mask: Tensor | None = None
    ) -> PolicyOutput: ...

    @abstractmethod
    def sample(
        self, policy: Any, z: Tensor, noise: Tensor, mask: Tensor | None = None
    ) -> Tensor: ...

    @abstractmethod
    def no_sequences(self, noise: Tensor) -> Tensor:
        """What a policy proposes that may propose nothing, from its noise [T, E, 0, ...]."""

    @abstractmethod
    def next_value(
        self, model: WorldModel, z: Tensor, noise: UpdateNoise, mask: Tensor | None
    ) -> Tensor:
        """V(x') [T, B] from the target Q functions at z [T, B, Z]."""

    @abstractmethod
    def policy_terms(
        self, model: WorldModel, zs: Tensor, noise: UpdateNoise, mask: Tensor | None
    ) -> PolicyTerms: ...

    @abstractmethod
    def update_noise(self) -> dict[str, Any]:
        """What `draw_update_noise` needs to know beyond sizes."""

    @abstractmethod
    def plan_noise(
        self, generator: torch.Generator, horizon: int, envs: int, num_q: int
    ) -> PlanNoise: ...

    @abstractmethod
    def search(
        self,
        score: Any,
        policy_actions: Tensor,
        last: Tensor,
        first: Tensor,
        noise: PlanNoise,
        mask: Tensor | None,
        explore: bool,
    ) -> Plan | CategoricalPlan: ...

    @abstractmethod
    def plan_spread(self, plan: Any) -> Tensor:
        """The metric that `plan_metric` names."""

    def plan_sizes(self, horizon: int, envs: int, num_q: int) -> dict[str, int]:
        """What the noise of a plan depends on, for every kind of actions."""
        planner = self.config.planner
        return {
            "horizon": horizon,
            "envs": envs,
            "samples": planner.samples,
            "policy_samples": planner.policy_samples,
            "iterations": planner.iterations_for(self.noise_dim),
            "num_q": num_q,
        }


def check_actions(spec: EnvSpec) -> tuple[int, ActionCodec | None]:
    """The length of an action as networks see it, and the table of discrete ones; or a sentence
    that says what does not fit."""
    action = spec.action_space
    if is_discrete(action):
        codec = spec.action_codec
        if codec.size < 2:
            raise ConfigError(f"{spec.task} has a single action: there is nothing to decide.")
        for column in spec.columns:
            if column.name == "action_mask":
                codec.check_mask(column.shape)
        return codec.width, codec
    box = isinstance(action, gymnasium.spaces.Box) and len(action.shape) == 1
    box = box and np.issubdtype(action.dtype, np.floating)
    if not (box and np.all(action.low == -1) and np.all(action.high == 1)):  # type: ignore[attr-defined]
        mixed = subspaces(action) is not None
        raise ConfigError(
            "tdmpc2 takes continuous actions (a bounded Box of one axis) or discrete ones "
            "(Discrete, MultiDiscrete, MultiBinary or a Dict of these"
            + (", but not both together" if mixed else "")
            + f"), but those of {spec.task} are {action}."
        )
    return action.shape[0], None  # type: ignore[index]


def check_same_table(path: Path, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Refuse a file of an agent that told more or fewer actions apart; older ones do not say."""
    own = here.get("distinct_actions")
    saved = there.get("distinct_actions", own)
    if saved != own:
        raise FileError(
            f"{path} was written for {saved} distinct actions, but this agent has {own}: use the "
            "environment that it was trained with."
        )


def refuse_options(config: TDMPC2Config, rules: Mapping[str, str]) -> None:
    """Options that mean nothing for a kind of actions must have their defaults; their rules say
    why."""
    usual = TDMPC2Config()
    for name, rule in rules.items():
        value = attrgetter(name)(config)
        require(value == attrgetter(name)(usual), f"agent.{name}", value, rule)


class BoxActions(Actions):
    """Continuous actions in [-1, 1]. A mask is 1 where a dimension is the task's own and 0 where it
    is padding (see tasks.py): there the action is 0, and adds nothing to the entropy."""

    plan_metric = "plan_std_mean"
    masks_stay = True

    def __init__(self, dim: int, config: TDMPC2Config) -> None:
        self.noise_dim = self.plan_width = dim
        self.config, self.draw = config, torch.randn

    @staticmethod
    def check(config: TDMPC2Config, task: str) -> None:
        """Refuse options that mean something for discrete actions only."""
        why = f"the actions of {task} are continuous, so that they cannot be listed"
        rule = f"policy (or left out): {why}"
        require(config.q_target in (None, "policy"), "agent.q_target", config.q_target, rule)
        least = f"left out: {why}; agent.planner.min_std is what continuous actions have"
        rules = {"q_target_top_k": f"left out: {why}", "planner.min_probability": least}
        refuse_options(config, rules)

    def make_policy(self, latent: int, hidden: list[int]) -> nn.Module:
        return MLP(latent, hidden, 2 * self.noise_dim)

    def pi(
        self, policy: nn.Module, z: Tensor, noise: Tensor | None, mask: Tensor | None = None
    ) -> PolicyOutput:
        """A squashed Gaussian, sampled with standard normal noise; without it, its mean."""
        config, eps = self.config, noise
        mu, raw = policy(z).chunk(2, dim=-1)
        span = config.log_std_max - config.log_std_min
        log_std = config.log_std_min + 0.5 * span * (torch.tanh(raw) + 1)
        if eps is None:
            eps = torch.zeros_like(mu)
        if mask is not None:
            mu, log_std, eps = mu * mask, log_std * mask, eps * mask
        action = torch.tanh(mu + eps * log_std.exp())
        entropy, scaled = self._entropy(eps, log_std, action, mask)
        return PolicyOutput(action, torch.tanh(mu), entropy, scaled)

    def _entropy(
        self, eps: Tensor, log_std: Tensor, action: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        dims = self.noise_dim if mask is None else mask.sum(-1)  # those that there are
        residual = (-0.5 * eps**2 - log_std).sum(-1)
        if self.config.entropy == "jacobian":
            # The formula of 2024 and before: Jacobian of tanh included, Gaussian part times A.
            squash = _sum(torch.log(1 - action**2 + 1e-6), mask)
            entropy = -(dims * (residual - HALF_LOG_2PI) - squash)
            return entropy, entropy
        log_gauss = residual - dims * HALF_LOG_2PI
        squash = _sum(torch.log(torch.relu(1 - action**2) + 1e-6), mask)
        # In today's official code the Jacobian cancels from what the loss uses.
        return -(log_gauss - squash), -dims * log_gauss

    def sample(
        self, policy: nn.Module, z: Tensor, noise: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """The action of `pi` alone, with less to compute."""
        config = self.config
        mu, raw = policy(z).chunk(2, dim=-1)
        span = config.log_std_max - config.log_std_min
        std = (config.log_std_min + 0.5 * span * (torch.tanh(raw) + 1)).exp_()
        action = torch.tanh(std.mul_(noise).add_(mu))
        return action if mask is None else action * mask

    def no_sequences(self, noise: Tensor) -> Tensor:
        return noise

    def next_value(
        self, model: WorldModel, z: Tensor, noise: UpdateNoise, mask: Tensor | None
    ) -> Tensor:
        """The lesser of two target Q at an action of the policy."""
        a = self.sample(model.policy, z, noise.target_policy, mask)  # [T, B, A]
        return model.values(model.target_q, z, a, noise.target_heads).amin(0)

    def policy_terms(
        self, model: WorldModel, zs: Tensor, noise: UpdateNoise, mask: Tensor | None
    ) -> PolicyTerms:
        """Q at an action of the policy, through which the gradient goes."""
        output = self.pi(model.policy, zs, noise.policy, mask)  # [T+1, B, A]
        with frozen(model.q):
            q = self._policy_q(model, zs, output.action, noise)  # [T+1, B]
        return PolicyTerms(q, output.entropy, output.scaled_entropy)

    def _policy_q(self, model: WorldModel, zs: Tensor, a: Tensor, noise: UpdateNoise) -> Tensor:
        """The mean of two heads, with dropout. Only the action's part of layer 1 has a gradient."""
        flat_z, flat_a = zs.flatten(0, 1), a.flatten(0, 1)
        values = []
        for i, head in enumerate(noise.policy_heads):
            keep = None if noise.policy_keep is None else noise.policy_keep[i]
            q = model.q[head]
            logits = q.from_latent_part(q.latent_part(flat_z), flat_a, keep)  # type: ignore[operator]
            values.append(model.decode(logits))
        return (sum(values) / len(values)).view(zs.shape[:2])  # type: ignore[union-attr]

    def update_noise(self) -> dict[str, Any]:
        return {"action_dim": self.noise_dim}

    def plan_noise(
        self, generator: torch.Generator, horizon: int, envs: int, num_q: int
    ) -> PlanNoise:
        sizes = self.plan_sizes(horizon, envs, num_q)
        elites = self.config.planner.elites
        return draw_plan_noise(generator, **sizes, elites=elites, action_dim=self.noise_dim)

    def search(
        self,
        score: Score | TableScore,
        policy_actions: Tensor,
        last: Tensor,
        first: Tensor,
        noise: PlanNoise,
        mask: Tensor | None,
        explore: bool,
    ) -> Plan:
        """MPPI, its mean warm-started by the last plan [T, E, A]."""
        planner = self.config.planner
        settings = MPPISettings(
            elites=planner.elites,
            min_std=planner.min_std,
            max_std=planner.max_std,
            temperature=planner.temperature,
        )
        drawn, warm = noise.mppi, shift(last, first)
        assert isinstance(drawn, MPPINoise)
        if mask is None:
            return mppi(score, policy_actions, warm, drawn, settings, explore)
        # Without noise in padded dimensions every sequence, and so their mean, is zero there.
        drawn = drawn._replace(samples=drawn.samples * mask[:, None], explore=drawn.explore * mask)
        found = mppi(score, policy_actions, warm * mask, drawn, settings, explore)
        return found._replace(std=found.std * mask)

    def plan_spread(self, plan: Plan) -> Tensor:
        """The width of the first action's distribution."""
        return plan.std[0].mean()


def _sum(x: Tensor, mask: Tensor | None) -> Tensor:
    """Over the action's dimensions, where there are any."""
    return (x if mask is None else x * mask).sum(-1)
