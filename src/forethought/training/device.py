"""The one place that turns a device name into a device and sets torch's threads."""

from __future__ import annotations

import torch

from forethought.config import ConfigError

DEVICES = ("auto", "cpu", "cuda", "mps")


def resolve_device(name: str) -> torch.device:
    """The device for `auto`, `cpu`, `cuda`, `cuda:N` or `mps`; auto prefers cuda, then mps."""
    kind, _, index = name.partition(":")
    known = kind in DEVICES and (not index or (kind == "cuda" and index.isdigit()))
    if not known:
        raise ConfigError(f"There is no device {name}. Use one of: {', '.join(DEVICES)}, cuda:N.")
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if kind == "auto":
        return torch.device("cuda" if cuda else "mps" if mps else "cpu")
    if kind == "cuda" and not cuda or kind == "mps" and not mps:
        raise ConfigError(f"The device {name} is not available here. Use --device auto or cpu.")
    if kind == "cuda" and index and int(index) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ConfigError(f"The device {name} does not exist: this machine has {count} (cuda:0 ..).")
    return torch.device(name)


def set_threads(threads: int | None) -> None:
    """Sets torch's threads for this process; None leaves torch's own choice.

    Runs are bitwise repeatable for one thread count only: sums are split by it.
    """
    if threads is not None:
        torch.set_num_threads(threads)
