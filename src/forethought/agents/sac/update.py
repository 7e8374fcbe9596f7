"""One gradient step of SAC, in the order of the paper's algorithm 1 (Haarnoja et al., 2018b)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

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
from forethought.agents.sac.config import AutoEntropy, SACConfig
from forethought.agents.sac.policy import GaussianPolicy
from forethought.nets.optimisers import adam
from forethought.nets.relu import MLPEnsemble

METRICS = (*CRITIC_METRICS, *ACTOR_METRICS, "entropy", "alpha", "alpha_loss", "nonfinite")
"""Keys of an update's metrics; those of the actor only where it had its turn, `alpha_loss` only
where alpha is learned."""


@dataclass(frozen=True)
class SACNoise:
    """Standard normal numbers of one update."""

    target: Tensor  # [B, A]
    policy: Tensor  # [K, B, A], one entry for each step that the actor makes


class Temperature(nn.Module):
    """log alpha: a parameter where it is learned, a constant where it is not."""

    log_alpha: Tensor

    def __init__(self, alpha: float, learned: bool) -> None:
        super().__init__()
        log_alpha = torch.tensor(alpha).log()
        if learned:
            self.log_alpha = nn.Parameter(log_alpha)
        else:
            self.register_buffer("log_alpha", log_alpha)


class SACModel(nn.Module):
    """The networks of SAC."""

    def __init__(
        self, actor: GaussianPolicy, critic: MLPEnsemble, target: MLPEnsemble, alpha: Temperature
    ) -> None:
        super().__init__()
        self.actor, self.critic, self.target_critic, self.temperature = actor, critic, target, alpha


class SACLearner:
    """The pieces that an update changes: networks, alpha, optimisers."""

    def __init__(self, model: SACModel, config: SACConfig, target_entropy: float) -> None:
        self.model, self.config, self.target_entropy = model, config, target_entropy
        self.auto = config.entropy if isinstance(config.entropy, AutoEntropy) else None
        self.actor_parameters = list(model.actor.parameters())
        groups = [{"params": self.actor_parameters, "lr": config.lr.actor}]
        if self.auto is not None:
            groups.append({"params": [model.temperature.log_alpha], "lr": self.auto.lr})
        critic = [{"params": list(model.critic.parameters()), "lr": config.lr.critic}]
        # Actor and alpha share an optimiser: they are moved by the same draws, at the same time.
        self.optimisers: dict[str, torch.optim.Optimizer] = {
            "critic": adam(critic, eps=1e-8),
            "actor": adam(groups, eps=1e-8),
        }
        self.critics = Critics(model.critic, model.target_critic, config, self.optimisers["critic"])
        self.target_parameters = list(model.target_critic.parameters())

    def update(self, batch: Transitions, noise: SACNoise, actor_turn: bool) -> Metrics:
        """Critics, actor, temperature, targets.

        A step that is not finite is left out, with all that would follow it, and told as
        `nonfinite`.
        """
        y = self.targets(batch, noise.target)  # [B]
        metrics = self.critics.update(batch, y)
        if actor_turn:
            for draw in noise.policy:
                if metrics["nonfinite"] == 0.0:
                    metrics |= self.update_actor(batch.obs, draw)
        if metrics["nonfinite"] == 0.0:
            follow(self.target_parameters, self.critics.parameters, self.config.tau)
        return metrics

    @torch.no_grad()
    def targets(self, batch: Transitions, noise: Tensor) -> Tensor:
        """y = r + gamma (1 - terminated) (min Q'(s', a') - alpha log pi(a' | s')), a' ~ pi: [B]."""
        action, log_prob = self.model.actor.draw(batch.next_obs, noise)
        q = q_values(self.model.target_critic, batch.next_obs, action)  # [N, B]
        value = q.amin(0) - self.alpha * log_prob
        return batch.reward + self.config.gamma * (1 - batch.terminated) * value

    @property
    def alpha(self) -> Tensor:
        """The temperature, as a constant."""
        return self.model.temperature.log_alpha.detach().exp()

    def update_actor(self, obs: Tensor, noise: Tensor) -> Metrics:
        """The actor towards more value and entropy, alpha towards the entropy that is wanted."""
        actor, alpha = self.model.actor, self.alpha
        trace = actor.net.trace(obs)
        raw = trace.out.requires_grad_()  # [B, 2 A]
        action, log_prob = actor.drawn(*actor.bounded(raw), noise)
        seen, size = torch.cat((obs, action.detach()), dim=-1), len(obs)
        q, slope = self.model.critic.least(seen, action.shape[-1])  # [B], [B, A]: dq/da
        actor_loss = (alpha * log_prob.detach() - q).mean()
        alpha_loss = self.alpha_loss(log_prob)
        self.model.temperature.log_alpha.grad = None
        # Two losses without a common parameter: one pass makes the gradients of both. That of the
        # actor begins where the critics end: at the action, and at its log-probability.
        ends, slopes = [action, log_prob], [-slope / size, (alpha / size).expand(size)]
        if alpha_loss is not None:
            ends, slopes = [*ends, alpha_loss], [*slopes, torch.ones_like(alpha_loss)]
        torch.autograd.backward(ends, slopes)
        actor.net.learn(trace, cast(Tensor, raw.grad))
        names: tuple[str, ...] = (*ACTOR_METRICS, "entropy", "alpha")
        values = [actor_loss, gradient_norm(self.actor_parameters), -log_prob.mean(), alpha]
        if alpha_loss is not None:
            names, values = (*names, "alpha_loss"), [*values, alpha_loss]
        metrics = numbers(names, values)
        if not finite(metrics, *names):
            return metrics | {"nonfinite": 1.0}
        self.optimisers["actor"].step()
        return metrics

    def alpha_loss(self, log_prob: Tensor) -> Tensor | None:
        """J(alpha) = E[-alpha (log pi + target entropy)]; None where alpha is fixed."""
        if self.auto is None:
            return None
        log_alpha = self.model.temperature.log_alpha
        weight = log_alpha.exp() if self.auto.loss == "alpha" else log_alpha
        return -weight * (log_prob.detach().mean() + self.target_entropy)
