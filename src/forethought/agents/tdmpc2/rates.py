"""The optimisers of an agent, and how their learning rates change over updates."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from forethought.agents.tdmpc2.config import CosineRate, LearningRates, LinearRate, TDMPC2Config
from forethought.agents.tdmpc2.model import WorldModel
from forethought.clock import Constant, Cosine, Linear, Schedule
from forethought.nets.optimisers import adam

RATE_OF = {"aux_value": "q", "tasks": "dynamics"}
"""Parts that learn at the rate of another."""


def optimisers_of(
    model: WorldModel, rates: LearningRates, parts: Sequence[str]
) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Of these parts of the model, and of the policy."""
    by_rate: dict[float, list[nn.Parameter]] = {}  # parts with one rate are one step
    for name in parts:
        if (part := getattr(model, name)) is not None:
            rate = getattr(rates, RATE_OF.get(name, name))
            by_rate.setdefault(rate, []).extend(part.parameters())
    groups = [{"params": params, "base_lr": rate} for rate, params in by_rate.items()]
    policy = [{"params": list(model.policy.parameters()), "base_lr": rates.policy}]
    return adam(groups, eps=1e-8), adam(policy, eps=1e-5)


def rate_schedule(config: TDMPC2Config) -> Schedule:
    """The factor of all learning rates, by updates."""
    match config.schedule:
        case LinearRate(duration, end, warmup):
            return Linear(1.0, end, duration, warmup)
        case CosineRate(duration, end, warmup):
            return Cosine(1.0, end, duration, warmup)
        case _:
            return Constant(1.0)
