"""The SAC agent: its networks and random numbers; the rest is in actor_critic."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from forethought.agents.actor_critic.agent import ActorCritic
from forethought.agents.sac.config import AutoEntropy, FixedEntropy, SACConfig
from forethought.agents.sac.policy import GaussianPolicy
from forethought.agents.sac.update import METRICS, SACLearner, SACModel, SACNoise, Temperature
from forethought.config import ConfigError
from forethought.nets.relu import MLPEnsemble


class SAC(ActorCritic):
    """Soft actor-critic for vectors of observations and continuous actions."""

    name: ClassVar[str] = "sac"
    config: SACConfig
    model: SACModel
    owners: ClassVar[dict[str, str]] = {
        "actor": "actor",
        "temperature": "actor",
        "critic": "critic",
        "target_critic": "critic",
    }

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        learned = isinstance(self.config.entropy, AutoEntropy)
        self.metric_names = tuple(name for name in METRICS if learned or name != "alpha_loss")
        if learned:
            self.notes += (f"The entropy aims at {self.target_entropy:g} nats.",)

    @property
    def target_entropy(self) -> float:
        """In nats; what a fixed alpha leaves without effect."""
        entropy = self.config.entropy
        target = None if isinstance(entropy, FixedEntropy) else entropy.target
        return -float(self.action_dim) if target is None else target

    def make_model(self) -> SACModel:
        config, sizes = self.config, (self.obs_dim + self.action_dim, self.config.hidden, 1)
        match config.entropy:
            case AutoEntropy(initial=alpha):
                temperature = Temperature(alpha, learned=True)
            case FixedEntropy(alpha):
                temperature = Temperature(alpha, learned=False)
        return SACModel(
            GaussianPolicy(
                self.obs_dim, self.action_dim, config.hidden, config.log_std, self._log_units()
            ),
            MLPEnsemble(config.critics, *sizes),
            MLPEnsemble(config.critics, *sizes),
            temperature,
        )

    def _log_units(self) -> float:
        """log |d(environment's action) / d(our action)|."""
        if self.config.action_units == "normalised":
            return 0.0
        ranges = self.spec.action_half_range
        if ranges is None or min(ranges) <= 0:
            raise ConfigError(
                "agent.action_units is environment, but the actions of "
                f"{self.spec.task} have no range that is known and above 0: leave it at normalised."
            )
        return sum(math.log(half) for half in ranges)

    def make_learner(self) -> SACLearner:
        return SACLearner(self.model, self.config, self.target_entropy)

    def decide(self, obs: Tensor, noise: Tensor | None) -> Tensor:
        return self.model.actor.act(obs, noise)

    def draw_noise(self, actor_turn: bool) -> SACNoise:
        stream, config = self.update_stream, self.config
        steps = config.policy_delay if actor_turn else 0
        shape = (1 + steps, config.batch_size, self.action_dim)
        noise = torch.randn(shape, generator=stream, device=stream.device)
        return SACNoise(noise[0], noise[1:])
