"""The TD3 agent: its networks and random numbers; the rest is in actor_critic."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from forethought.agents.actor_critic.agent import ActorCritic
from forethought.agents.td3.config import TD3Config
from forethought.agents.td3.update import METRICS, Actor, TD3Learner, TD3Model
from forethought.nets.relu import MLPEnsemble


class TD3(ActorCritic):
    """Twin delayed DDPG for vectors of observations and continuous actions."""

    name: ClassVar[str] = "td3"
    config: TD3Config
    model: TD3Model
    metric_names = METRICS
    owners: ClassVar[dict[str, str]] = {
        "actor": "actor",
        "target_actor": "actor",
        "critic": "critic",
        "target_critic": "critic",
    }

    def make_model(self) -> TD3Model:
        config, sizes = self.config, (self.obs_dim + self.action_dim, self.config.hidden, 1)
        actors = [Actor(self.obs_dim, self.action_dim, config.hidden) for _ in range(2)]
        critics = [MLPEnsemble(config.critics, *sizes) for _ in range(2)]
        return TD3Model(actors[0], actors[1], critics[0], critics[1])

    def make_learner(self) -> TD3Learner:
        return TD3Learner(self.model, self.config)

    def decide(self, obs: Tensor, noise: Tensor | None) -> Tensor:
        action: Tensor = self.model.actor(obs)
        if noise is None:
            return action
        return (action + self.config.exploration_noise * noise).clamp(-1, 1)

    def draw_noise(self, actor_turn: bool) -> Tensor:
        """Standard normal [B, A], for the target actor's actions."""
        stream, shape = self.update_stream, (self.config.batch_size, self.action_dim)
        return torch.randn(shape, generator=stream, device=stream.device)
