"""The one place that turns a device name into a device and sets torch's threads."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

import torch

from forethought.config import ConfigError, check_device, memory_refused

OVERFLOW = "Storage size calculation overflowed"
"""Torch's words for a tensor whose bytes cannot even be counted."""


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


def keep_freed_memory() -> None:
    """Let the C library keep what tensors give back, instead of returning it to the system.

    By default glibc hands back blocks of the size of our activations at every free, and the next
    allocation pays a page fault per 4 KB: 4,000 faults and a third of the time of a plan at size 5.
    Other C libraries, which have no `mallopt`, are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3  # names in malloc.h
        mallopt(mmap_threshold, 32 << 20)  # the largest that glibc takes
        mallopt(trim_threshold, 2**31 - 1)


@contextlib.contextmanager
def networks_must_fit(agent: str, device: torch.device) -> Iterator[None]:
    """Memory that is refused while the networks of an agent are built is a sentence.

    Weights are drawn by the CPU, also for an agent that lives elsewhere.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        where = "cpu" if OVERFLOW in str(error) else memory_refused(error)
        if where is None:
            raise
        raise ConfigError(
            f"The networks of {agent} do not fit into the memory of "
            f"{'cpu' if where == 'cpu' else device}: choose smaller sizes, or for a trained agent "
            "a machine with more."
        ) from error
