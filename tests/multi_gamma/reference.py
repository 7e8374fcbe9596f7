"""The slow reference of the auxiliary loss, in float64 and by loops."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from forethought.agents.tdmpc2.config import ModelConfig
from forethought.agents.tdmpc2.discounts import (
    AuxiliaryValues,
)


def slow_two_hot(y: float, bins: int, low: float, high: float) -> list[float]:
    place = math.copysign(math.log1p(abs(y)), y)
    place = (min(max(place, low), high) - low) / ((high - low) / (bins - 1))
    weights = [0.0] * bins
    weights[int(place)] += 1 - (place - int(place))
    weights[(int(place) + 1) % bins] += place - int(place)
    return weights


def slow_loss(
    heads: list[tuple[Tensor, Tensor]],
    z: Tensor,
    reward: Tensor,
    terminated: Tensor,
    value: Tensor,
    gammas: tuple[float, ...],
    rho: float,
    weight: float,
    model: ModelConfig,
) -> tuple[Tensor, list[Tensor]]:
    """weight * sum_i (1/T) sum_t rho^t mean_b CE, with one (W, b) per discount."""
    horizon, batch = reward.shape
    total, ces = torch.zeros((), dtype=z.dtype), []
    for gamma, (w, b) in zip(gammas, heads, strict=True):
        ce = torch.zeros((), dtype=z.dtype)
        for t in range(horizon):
            for i in range(batch):
                v = 0.0 if terminated[t, i] else float(value[t, i])
                y = float(reward[t, i]) + gamma * v
                target = slow_two_hot(y, model.bins, model.bin_low, model.bin_high)
                log_share = torch.log_softmax(w @ z[t, i] + b, dim=0)
                ce = ce - rho**t / horizon / batch * (z.new_tensor(target) * log_share).sum()
        total, ces = total + weight * ce, [*ces, ce]
    return total, ces


def head_weights(heads: AuxiliaryValues) -> list[tuple[Tensor, Tensor]]:
    """One (W, b) per discount, whichever kind of head."""
    found = [(layer.weight, layer.bias) for layer in heads.heads]
    if heads.head == "separate":
        return found  # type: ignore[return-value]
    w, b = found[0]
    return list(zip(w.split(heads.bins), b.split(heads.bins), strict=True))  # type: ignore[operator,arg-type]
