"""Optimisers: Adam in its fused form, gradient clipping, and their state as tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


def adam(groups: list[dict[str, Any]], eps: float) -> torch.optim.Adam:
    """Adam with one learning rate per group. Fused: a quarter of the default's time on a CPU."""
    return torch.optim.Adam(groups, eps=eps, fused=True)


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float) -> float:
    """Scale all gradients so that their joint norm is at most `limit`; returns the norm before.

    Nothing is written where nothing has to be scaled, which is nearly always.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = float(nn.utils.get_total_norm(gradients, foreach=True))
    if norm > limit:
        torch._foreach_mul_(gradients, limit / (norm + 1e-6))
    return norm


def optimiser_tensors(
    optimiser: torch.optim.Optimizer, names: dict[Tensor, str]
) -> dict[str, Tensor]:
    """Everything the optimiser remembers, by parameter name: `layer.weight/exp_avg`."""
    return {
        f"{names[parameter]}/{key}": torch.as_tensor(value)
        for parameter, state in optimiser.state.items()
        for key, value in state.items()
    }


def restore_optimiser(
    optimiser: torch.optim.Optimizer, names: dict[Tensor, str], tensors: dict[str, Tensor]
) -> None:
    """The inverse of `optimiser_tensors`."""
    by_name = {name: parameter for parameter, name in names.items()}
    optimiser.state.clear()
    for path, value in tensors.items():
        name, _, key = path.rpartition("/")
        parameter = by_name[name]
        # Adam keeps its step count where it was born; moments live beside their parameter.
        place = parameter.device if value.ndim else value.device
        optimiser.state[parameter][key] = value.clone().to(place)
