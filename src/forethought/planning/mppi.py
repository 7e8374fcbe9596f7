"""Model predictive path integral control (TD-MPC2, section 3.2 and algorithm 1).

E environments are planned for at once, N action sequences each, T steps ahead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

Score = Callable[[Tensor, int], Tensor]
"""(actions [T, E, N, A], iteration) -> values [E, N]."""


@dataclass(frozen=True)
class MPPISettings:
    """What the planner needs to know; the units are those of the agent's options."""

    elites: int
    min_std: float
    max_std: float
    temperature: float


class MPPINoise(NamedTuple):
    """Random numbers of one plan, for I iterations."""

    samples: Tensor  # [I, T, E, N-P, A] standard normal
    gumbel: Tensor  # [E, K], for drawing the elite that acts
    explore: Tensor  # [E, A] standard normal


class Plan(NamedTuple):
    """What came out, and what a person may want to look at."""

    action: Tensor  # [E, A]
    mean: Tensor  # [T, E, A], the next plan's warm start
    std: Tensor  # [T, E, A]
    values: Tensor  # [E, K], of the elites in the last iteration, best first
    elites: Tensor  # [I, E, K], which sequences were kept


def shift(mean: Tensor, first: Tensor) -> Tensor:
    """Warm start: last plan's mean one step on, zero at the end and where an episode begins."""
    ahead = torch.cat((mean[1:], torch.zeros_like(mean[:1])))
    return torch.where(first[None, :, None], torch.zeros_like(ahead), ahead)


def elite_weights(values: Tensor, temperature: float) -> Tensor:
    """exp(temperature * gap to the best), normalised over the elites: [E, K]."""
    weights = torch.exp(temperature * (values - values.amax(-1, keepdim=True)))
    return weights / weights.sum(-1, keepdim=True)


def moments(weights: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted mean and standard deviation over the elites [T, E, K, A] -> [T, E, A]."""
    w = weights[None, :, :, None]
    total = w.sum(2) + 1e-9
    mean = (w * actions).sum(2) / total
    variance = (w * (actions - mean.unsqueeze(2)) ** 2).sum(2) / total
    return mean, variance.sqrt()


def mppi(
    score: Score,
    policy_actions: Tensor,
    warm_mean: Tensor,
    noise: MPPINoise,
    settings: MPPISettings,
    explore: bool,
) -> Plan:
    """Refit a Gaussian over action sequences to the best of its samples, then draw an elite.

    `policy_actions` [T, E, P, A] compete in every iteration. The std always starts wide: only the
    mean is warm-started.
    """
    mean, std = warm_mean, torch.full_like(warm_mean, settings.max_std)
    kept = []
    for i, eps in enumerate(noise.samples):
        sampled = (mean.unsqueeze(2) + std.unsqueeze(2) * eps).clamp(-1, 1)  # [T, E, N-P, A]
        actions = torch.cat((sampled, policy_actions), dim=2)  # [T, E, N, A]
        values = torch.nan_to_num(score(actions, i), nan=0.0)  # [E, N]
        elite_values, index = values.topk(settings.elites, dim=-1)  # [E, K]
        kept.append(index)
        along = index[None, :, :, None].expand(actions.shape[0], -1, -1, actions.shape[-1])
        elite_actions = actions.gather(2, along)  # [T, E, K, A]
        weights = elite_weights(elite_values, settings.temperature)
        mean, std = moments(weights, elite_actions)
        std = std.clamp(settings.min_std, settings.max_std)
    drawn = (weights.log() + noise.gumbel).argmax(-1)  # [E]
    environments = torch.arange(len(drawn), device=drawn.device)
    action = elite_actions[0, environments, drawn]  # [E, A]
    if explore:
        action = action + std[0] * noise.explore
    return Plan(action.clamp(-1, 1), mean, std, elite_values, torch.stack(kept))
