"""How the parameters of a part, their gradients and their optimiser stand, in a few numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


def health(
    parameters: Iterable[nn.Parameter], optimiser: torch.optim.Optimizer
) -> dict[str, float | int]:
    """Norms and counts of entries that are not finite; for a dump, not for every update.

    Gradients are those of the last backward pass: clipped if their norm was over the limit, as they
    came if it was not finite. Of parameters without one, nothing is said; nor of norms where there
    is no parameter at all.
    """
    weights = list(parameters)
    gradients = [p.grad for p in weights if p.grad is not None]
    states = [optimiser.state.get(p, {}) for p in weights]
    found: dict[str, float | int] = {"parameters": sum(p.numel() for p in weights)}
    if weights:
        found |= _norm("parameter", weights)
    if gradients:
        found |= _norm("gradient", gradients)
    for key in ("exp_avg", "exp_avg_sq"):
        if moments := [state[key] for state in states if key in state]:
            found |= _norm(key, moments)
    if steps := [int(state["step"]) for state in states if "step" in state]:
        found["optimiser_steps"] = max(steps)
    return found


def _norm(name: str, tensors: Iterable[Tensor]) -> dict[str, Any]:
    # In float64: a norm that overflows float32 must not look like a broken one. On the CPU, for
    # not every device has float64; one by one, for all together may not fit into memory.
    norms, nonfinite = [], 0
    for tensor in tensors:
        values = tensor.detach().cpu().double()
        norms.append(torch.linalg.vector_norm(values))
        nonfinite += int((~torch.isfinite(values)).sum())
    return {
        f"{name}_norm": torch.linalg.vector_norm(torch.stack(norms)).item(),
        f"{name}_nonfinite": nonfinite,
    }
