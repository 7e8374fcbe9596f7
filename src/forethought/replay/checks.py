"""What a saved replay must hold to be restored: a checksum says only that nothing has changed since
somebody wrote it, not that it was us."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forethought.replay.rows import ReplayError, RowSpec
from forethought.replay.storage import Storage

MAX_COUNT = 2**53
"""Rows that any stream has ever had; a greater number is nonsense and would overflow."""


def check_rows(tensors: Mapping[str, Tensor], spec: RowSpec, rows: int, what: str) -> None:
    """Every column with this many rows, in its shape and type; nothing is read to find out."""
    wanted: dict[str, tuple[np.dtype[Any], tuple[int, ...]]]
    wanted = {"age": (np.dtype(np.int32), ())}
    wanted |= {f"column/{leaf.path}": (leaf.dtype, leaf.shape) for leaf in spec.leaves}
    for name, (dtype, shape) in wanted.items():
        found = tensors.get(name)
        kind = torch.from_numpy(np.empty(0, dtype)).dtype
        if found is None or found.dtype != kind or tuple(found.shape) != (rows, *shape):
            there = "absent" if found is None else f"{found.dtype} {tuple(found.shape)}"
            raise ReplayError(
                f"{what} is not of this replay: {name} is {there}, but must be {kind} "
                f"{(rows, *shape)}."
            )


def check_streams(state: Mapping[str, Any], storage: Storage) -> None:
    """The counters of every stream: whole numbers that agree with each other."""
    streams = state.get("streams")
    if not isinstance(streams, list) or len(streams) != storage.num_envs:
        raise ReplayError(f"The saved replay does not describe {storage.num_envs} streams.")
    for index, stream in enumerate(streams):
        counts = [stream.get(key) for key in ("tail_row", "written", "open_rows")]
        if not all(type(count) is int and 0 <= count < MAX_COUNT for count in counts):
            raise ReplayError(f"The saved replay counts rows of stream {index} by {counts}.")
        tail, written, open_rows = counts
        if tail > written or open_rows > written or tail < written - storage.capacity:
            raise ReplayError(
                f"The saved replay cannot be: stream {index} has {written} rows, {open_rows} of "
                f"them in the open episode, and a tail from row {tail} on."
            )


def check_cover(first: int | None, stop: int, stream: Mapping[str, Any], capacity: int) -> None:
    """Blocks from row `first` to row `stop`, then the tail, must hold the whole ring."""
    oldest = max(0, stream["written"] - capacity)
    tail = stream["tail_row"]
    if (tail > oldest) if first is None else (first > oldest or stop != tail):
        raise ReplayError(
            f"The saved replay has a gap: of the rows from {oldest} on, its blocks hold those from "
            f"{first} to {stop} and its tail those from {tail} on."
        )


def check_episodes(table: Any, storage: Storage, written: list[int]) -> None:
    """A table of finished episodes [3, N] whose rows exist."""
    if table.dtype != np.int64 or table.ndim != 2 or len(table) != 3:
        raise ReplayError("The saved replay has no table of episodes.")
    stream, first, end = table
    known = np.array(written)
    if table.shape[1] > storage.num_envs * storage.capacity or np.any(
        (stream < 0) | (stream >= storage.num_envs)
    ):
        raise ReplayError("The saved replay lists episodes of streams that it does not have.")
    if np.any((first < 0) | (first >= end) | (end > known.take(stream))):
        raise ReplayError("The saved replay lists episodes of rows that it does not have.")
