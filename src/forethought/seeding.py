"""Named random streams: each purpose draws from its own, so that none can disturb another.

A stream is a pure function of the run's seed, its name and its index. Evaluating more often,
adding an environment or drawing more noise for planning therefore never shifts the numbers that
another purpose sees, and a stream needs no history to be found again after a resume.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from forethought.config import ForethoughtError, require

if TYPE_CHECKING:
    import torch


class Streams:
    """The random streams of one run, by name and index."""

    def __init__(self, seed: int) -> None:
        require(seed >= 0, "seed", seed, "at least 0")
        self.root = seed

    def _sequence(self, name: str, index: tuple[int, ...]) -> np.random.SeedSequence:
        # crc32 and not hash(): Python salts hash() of strings anew in every process.
        return np.random.SeedSequence(self.root, spawn_key=(zlib.crc32(name.encode()), *index))

    def _integer(self, name: str, index: tuple[int, ...], bits: int) -> int:
        return int(self._sequence(name, index).generate_state(1, np.uint64)[0]) % (1 << bits)

    def seed(self, name: str, *index: int) -> int:
        """A seed below 2**31, which every environment's `reset` accepts."""
        return self._integer(name, index, bits=31)

    def numpy(self, name: str, *index: int) -> np.random.Generator:
        """A fresh generator at the beginning of the stream."""
        # PCG64 by name: numpy may one day change what default_rng means.
        return np.random.Generator(np.random.PCG64(self._sequence(name, index)))

    def torch(self, name: str, *index: int, device: str | torch.device = "cpu") -> torch.Generator:
        """A fresh torch generator at the beginning of the stream, on `device`."""
        import torch

        return torch.Generator(device=device).manual_seed(self._integer(name, index, bits=63))


def numpy_state(generator: np.random.Generator) -> dict[str, Any]:
    """The position of `generator` in its stream, as JSON-able integers."""
    return dict(generator.bit_generator.state)


def restore_numpy(generator: np.random.Generator, state: dict[str, Any]) -> None:
    """Put `generator` back where `numpy_state` found it."""
    here = type(generator.bit_generator).__name__
    there = state.get("bit_generator")
    if there != here:
        raise ForethoughtError(
            f"The saved random state is of kind {there}, but this version draws from {here}: "
            "resume with the version of forethought that wrote it."
        )
    generator.bit_generator.state = state
