"""Which number format the networks compute in."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

from forethought.config import ConfigError

Precision = Literal["fp32", "bf16"]


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """A context in which matrix products run in the chosen precision.

    bf16 is for CUDA only: CPUs without its instructions emulate it 8 to 20 times slower than
    fp32, and MPS has no stable support.
    """
    if precision == "fp32":
        return nullcontext()
    if device.type != "cuda":
        raise ConfigError(
            f"agent.precision is bf16, but the device is {device.type}: bf16 is offered on CUDA "
            "only. Leave agent.precision at fp32."
        )
    return torch.autocast("cuda", dtype=torch.bfloat16)
