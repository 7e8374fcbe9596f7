"""The one place that turns a device name into a device and sets torch's threads."""

from __future__ import annotations

import torch

from forethought.config import ConfigError, check_device


def resolve_device(name: str) -> torch.device:
    """The device for `auto`, `cpu`, `cuda`, `cuda:N` or `mps`; auto prefers cuda, then mps."""
    check_device("device", name, auto=True)
    kind, _, index = name.partition(":")
    cuda, mps = torch.cuda.device_count(), torch.backends.mps.is_available()
    if kind == "auto":
        return torch.device("cuda" if cuda else "mps" if mps else "cpu")
    missing = (kind == "cuda" and int(index or 0) >= cuda) or (kind == "mps" and not mps)
    if missing:
        raise ConfigError(f"The device {name} is not available here: use --device auto or cpu.")
    return torch.device(name)


def set_threads(threads: int | None) -> None:
    """Sets torch's threads for this process; None leaves torch's own choice.

    Runs are bitwise repeatable for one thread count only: sums are split by it.
    """
    if threads is not None:
        torch.set_num_threads(threads)
