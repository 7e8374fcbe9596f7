"""The policy of SAC: a Gaussian whose draws are squashed by tanh (Haarnoja et al., appendix C)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forethought.agents.sac.config import ClampedLogStd, SquashedLogStd
from forethought.nets.relu import ReluMLP

LOG_2PI = math.log(2 * math.pi)
LOG_2 = math.log(2)


class Draw(NamedTuple):
    """Actions of the policy and how likely they were."""

    action: Tensor  # [B, A], from -1 to 1
    log_prob: Tensor  # [B]


class GaussianPolicy(nn.Module):
    """pi(a | s): u ~ N(mean(s), std(s)), a = tanh(u)."""

    def __init__(
        self,
        obs_dim: int,
        action_dim: int,
        hidden: tuple[int, ...],
        log_std: ClampedLogStd | SquashedLogStd,
        log_units: float = 0.0,
    ) -> None:
        """`log_units` is the sum of log half-ranges, where densities are per environment's unit."""
        super().__init__()
        self.net = ReluMLP(obs_dim, hidden, 2 * action_dim)
        self.bounds, self.log_units = log_std, log_units

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log standard deviation of u, [B, A] both."""
        return self.bounded(self.net(obs))

    def bounded(self, raw: Tensor) -> tuple[Tensor, Tensor]:
        """The same from what the network gives, [B, 2 A]."""
        mean, log_std = raw.chunk(2, dim=-1)
        low, high = self.bounds.min, self.bounds.max
        if isinstance(self.bounds, SquashedLogStd):
            return mean, low + 0.5 * (high - low) * (torch.tanh(log_std) + 1)
        return mean, log_std.clamp(low, high)

    def draw(self, obs: Tensor, noise: Tensor) -> Draw:
        """The actions that standard normal `noise` [B, A] stands for; differentiable."""
        return self.drawn(*self.forward(obs), noise)

    def drawn(self, mean: Tensor, log_std: Tensor, noise: Tensor) -> Draw:
        """The same from mean and log standard deviation."""
        u = torch.addcmul(mean, log_std.exp(), noise)
        # log pi(a) = log N(u) - log |da/du|, and (u - mean) / std is the noise itself.
        constant = (0.5 * (noise.square() + LOG_2PI)).sum(-1) + self.log_units
        log_prob = -(log_std + log_tanh_slope(u)).sum(-1) - constant
        return Draw(torch.tanh(u), log_prob)

    def act(self, obs: Tensor, noise: Tensor | None) -> Tensor:
        """An action, or the one of the mean where there is no noise."""
        mean, log_std = self.forward(obs)
        return torch.tanh(mean if noise is None else mean + log_std.exp() * noise)


def log_tanh_slope(u: Tensor) -> Tensor:
    """log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2u)): exact where 1 - tanh(u)^2 rounds to 0."""
    return 2.0 * (LOG_2 - u - F.softplus(-2.0 * u))
