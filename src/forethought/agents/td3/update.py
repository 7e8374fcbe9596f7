"""One gradient step of TD3, in the order of the paper's algorithm 1 (Fujimoto et al., 2018)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from forethought.agents.actor_critic.update import (
    ACTOR_METRICS,
    CRITIC_METRICS,
    Critics,
    Transitions,
    finite,
    follow,
    gradient_norm,
    numbers,
    q_values,
)
from forethought.agents.base import Metrics
from forethought.agents.td3.config import TD3Config
from forethought.nets.optimisers import adam
from forethought.nets.relu import MLPEnsemble, ReluMLP

METRICS = (*CRITIC_METRICS, *ACTOR_METRICS, "nonfinite")
"""Keys of an update's metrics; those of the actor only where it had its turn."""


class Actor(nn.Module):
    """mu(s), from -1 to 1."""

    def __init__(self, obs_dim: int, action_dim: int, hidden: tuple[int, ...]) -> None:
        super().__init__()
        self.net = ReluMLP(obs_dim, hidden, action_dim)

    def forward(self, obs: Tensor) -> Tensor:
        return torch.tanh(self.net(obs))


class TD3Model(nn.Module):
    """The networks of TD3."""

    def __init__(
        self, actor: Actor, target_actor: Actor, critic: MLPEnsemble, target_critic: MLPEnsemble
    ) -> None:
        super().__init__()
        self.actor, self.target_actor = actor, target_actor
        self.critic, self.target_critic = critic, target_critic


class TD3Learner:
    """The pieces that an update changes: networks and optimisers."""

    def __init__(self, model: TD3Model, config: TD3Config) -> None:
        self.model, self.config = model, config
        self.actor_parameters = list(model.actor.parameters())
        actor = [{"params": self.actor_parameters, "lr": config.lr.actor}]
        critic = [{"params": list(model.critic.parameters()), "lr": config.lr.critic}]
        self.optimisers: dict[str, torch.optim.Optimizer] = {
            "critic": adam(critic, eps=1e-8),
            "actor": adam(actor, eps=1e-8),
        }
        self.critics = Critics(model.critic, model.target_critic, config, self.optimisers["critic"])
        self.online = [*self.critics.parameters, *self.actor_parameters]
        self.target = [*model.target_critic.parameters(), *model.target_actor.parameters()]

    def update(self, batch: Transitions, noise: Tensor, actor_turn: bool) -> Metrics:
        """Critics; then, in its turn, the actor and all targets.

        A step that is not finite is left out, with all that would follow it, and told as
        `nonfinite`.
        """
        y = self.targets(batch, noise)  # [B]
        metrics = self.critics.update(batch, y)
        if actor_turn and metrics["nonfinite"] == 0.0:
            metrics |= self.update_actor(batch.obs)
            if metrics["nonfinite"] == 0.0:
                follow(self.target, self.online, self.config.tau)
        return metrics

    @torch.no_grad()
    def targets(self, batch: Transitions, noise: Tensor) -> Tensor:
        """y = r + gamma (1 - terminated) min Q'(s', a'), a' = mu'(s') with clipped noise: [B]."""
        config, limit = self.config, self.config.target_noise_clip
        # In units of our actions, -1 to 1, and so the same for every range of the environment's.
        smoothing = (config.target_noise * noise).clamp(-limit, limit)
        action = (self.model.target_actor(batch.next_obs) + smoothing).clamp(-1, 1)  # [B, A]
        q = q_values(self.model.target_critic, batch.next_obs, action)  # [N, B]
        return batch.reward + config.gamma * (1 - batch.terminated) * q.amin(0)

    @torch.no_grad()
    def update_actor(self, obs: Tensor) -> Metrics:
        """The actor towards more value, as the first critic sees it."""
        net = self.model.actor.net
        trace = net.trace(obs)
        action = torch.tanh(trace.out)  # [B, A]
        seen = torch.cat((obs, action), dim=-1)
        q, slope = self.model.critic.least(seen, action.shape[-1], count=1)  # [B], [B, A]: dq/da
        loss = -q.mean()
        # Back through the mean and the tanh, whose slope is 1 - tanh^2.
        net.learn(trace, slope * (action.square() - 1) / len(obs))
        metrics = numbers(ACTOR_METRICS, (loss, gradient_norm(self.actor_parameters)))
        if not finite(metrics, *ACTOR_METRICS):
            return metrics | {"nonfinite": 1.0}
        self.optimisers["actor"].step()
        return metrics
