"""Categorical MPPI: search over sequences of actions out of a finite table.

Each step of the plan has a distribution over the A actions of the table; what a Gaussian's mean
and width are to `mppi`, these probabilities are here. E environments, N sequences each, T steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from forethought.maths import draw_index
from forethought.planning.mppi import elite_weights

Score = Callable[[Tensor, int], Tensor]
"""(actions [T, E, N] as rows of the table, iteration) -> values [E, N]."""
WARM = 0.5
"""Share of the last plan, one step on, in the distribution that a plan begins with."""


@dataclass(frozen=True)
class CategoricalSettings:
    """What the planner needs to know; the units are those of the agent's options."""

    elites: int
    min_probability: float
    temperature: float


class CategoricalNoise(NamedTuple):
    """Random numbers of one plan, for I iterations; uniform in [0, 1)."""

    samples: Tensor  # [I, T, E, N-P]
    explore: Tensor  # [E, 1]


class CategoricalPlan(NamedTuple):
    """What came out, and what a person may want to look at."""

    action: Tensor  # [E], rows of the table
    mean: Tensor  # [T, E, A], probabilities; the next plan's warm start
    values: Tensor  # [E, K], of the elites in the last iteration, best first
    elites: Tensor  # [I, E, K], which sequences were kept


def even(legal: Tensor | None, like: Tensor) -> Tensor:
    """Evenly over the actions [T, E, A]: at the first step the legal ones [E, A], later all.

    What will be legal later is not known; the values of imagined sequences have to tell.
    """
    share = torch.full_like(like, 1 / like.shape[-1])
    if legal is not None:
        share[0] = legal / legal.sum(-1, keepdim=True)
    return share


def warm_start(last: Tensor, first: Tensor, base: Tensor) -> Tensor:
    """Half the last plan one step on, half `base`; only `base` at the plan's end, where an episode
    begins, and where nothing of the last plan is legal now."""
    ahead = torch.cat((last[1:], torch.zeros_like(last[:1])))
    ahead = ahead * (base > 0) * ~first[None, :, None]
    mass = ahead.sum(-1, keepdim=True)
    mixed = (1 - WARM) * base + WARM * ahead / mass.clamp(min=1e-9)
    return torch.where(mass > 1e-6, mixed, base)


def refit(weights: Tensor, elites: Tensor, base: Tensor, least: float) -> Tensor:
    """How often the elites [T, E, K] take each action, by weight [E, K], with the share `least`
    spread as `base` is: [T, E, A]."""
    share = torch.zeros_like(base).scatter_add_(-1, elites, weights.expand(elites.shape))
    return (1 - least) * share + least * base


def categorical_mppi(
    score: Score,
    policy_actions: Tensor,
    last: Tensor,
    first: Tensor,
    legal: Tensor | None,
    noise: CategoricalNoise,
    settings: CategoricalSettings,
    explore: bool,
) -> CategoricalPlan:
    """Refit the distribution of every step to the best of its samples, again and again.

    `policy_actions` [T, E, P] compete in every iteration; `last` [T, E, A] is the last plan. The
    first step keeps to the legal actions [E, A]. Without exploration the best sequence acts; with
    it, a draw from the refitted distribution: an elite by its weight, or, with the probability
    that every distribution keeps for that, any legal action.
    """
    base = even(legal, last)
    probability = warm_start(last, first, base)  # [T, E, A]
    kept = []
    for i, uniform in enumerate(noise.samples):
        sampled = draw_index(probability, uniform)  # [T, E, N-P]
        actions = torch.cat((sampled, policy_actions), dim=2)  # [T, E, N]
        values = torch.nan_to_num(score(actions, i), nan=0.0)  # [E, N]
        elite_values, index = values.topk(settings.elites, dim=-1)  # [E, K]
        kept.append(index)
        elites = actions.gather(2, index.expand(actions.shape[0], -1, -1))  # [T, E, K]
        weights = elite_weights(elite_values, settings.temperature)
        probability = refit(weights, elites, base, settings.min_probability)
    if explore:
        action = draw_index(probability[0], noise.explore).squeeze(-1)  # [E]
    else:
        action = elites[0, :, 0]
    return CategoricalPlan(action, probability, elite_values, torch.stack(kept))
