"""The step of the critics, which is the same for SAC and TD3 once the targets are known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from forethought.agents.actor_critic.config import ActorCriticConfig
from forethought.agents.base import Metrics
from forethought.nets.relu import MLPEnsemble
from forethought.replay import Batch

CRITIC_METRICS = (
    "critic_loss",
    "critic_grad_norm",
    "td_target_mean",
    "td_error_abs",
    "q_mean",
    "q_max",
)
ACTOR_METRICS = ("actor_loss", "actor_grad_norm")


@dataclass(frozen=True)
class Transitions:
    """A batch of single steps on the agent's device."""

    obs: Tensor  # [B, O]
    action: Tensor  # [B, A], from -1 to 1
    reward: Tensor  # [B]
    terminated: Tensor  # [B], 0 or 1; truncation is not in here: it never cuts the bootstrap
    next_obs: Tensor  # [B, O], after a truncation the true last one

    @classmethod
    def of(cls, batch: Batch) -> Transitions:
        """Slices of two rows as transitions."""
        seen = batch.obs if batch.obs.is_floating_point() else batch.obs.float()
        obs, next_obs = seen.unbind(0)
        return cls(obs, batch.action[0], batch.reward[0], batch.terminated[0], next_obs)


class Critics:
    """The ensemble of Q functions, their targets and their optimiser."""

    def __init__(
        self,
        online: MLPEnsemble,
        target: MLPEnsemble,
        config: ActorCriticConfig,
        optimiser: torch.optim.Optimizer,
    ) -> None:
        self.online, self.target, self.optimiser = online, target, optimiser
        self.parameters = list(online.parameters())
        # Half the sum: the paper's 1/2 for each critic.
        count = config.critics
        self.loss_factor = {"half_sum": 0.5, "sum": 1.0, "mean": 1 / count}[config.critic_loss]

    @torch.no_grad()
    def update(self, batch: Transitions, y: Tensor) -> Metrics:
        """One step towards the targets y [B]; left out and told as `nonfinite` if not finite."""
        trace = self.online.trace(torch.cat((batch.obs, batch.action), dim=-1))
        q = trace.out.squeeze(-1)  # [N, B]
        error = q - y
        loss = self.loss_factor * error.square().mean(1).sum()
        slope = 2 * self.loss_factor / len(y) * error  # of the loss in q
        self.online.learn(trace, slope.unsqueeze(-1))
        metrics = numbers(
            CRITIC_METRICS,
            (loss, gradient_norm(self.parameters), y.mean(), error.abs().mean()),
            (q.mean(), q.max()),
        )
        if not finite(metrics, "critic_loss", "critic_grad_norm"):
            return metrics | {"nonfinite": 1.0}
        self.optimiser.step()
        return metrics | {"nonfinite": 0.0}


def q_values(critics: MLPEnsemble, obs: Tensor, action: Tensor) -> Tensor:
    """Q of every critic: [N, B]."""
    return critics.forward(torch.cat((obs, action), dim=-1)).squeeze(-1)


def numbers(names: Sequence[str], *values: Sequence[Tensor]) -> Metrics:
    """Scalars on a device as numbers here, fetched all at once: each fetch waits for the device."""
    found = torch.stack([value.detach() for group in values for value in group]).tolist()
    return dict(zip(names, found, strict=True))


def finite(metrics: Metrics, *names: str) -> bool:
    """Whether these metrics are all finite."""
    return all(math.isfinite(metrics[name]) for name in names)


def gradient_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """The joint norm of all gradients."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    return norm


@torch.no_grad()
def follow(target: Sequence[Tensor], online: Sequence[Tensor], tau: float) -> None:
    """target <- (1 - tau) target + tau online."""
    torch._foreach_lerp_(list(target), list(online), tau)
