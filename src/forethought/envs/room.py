"""Memory that a worker and its parent share: large arrays travel here, the pipe says where.

It is an unnamed file: it goes away with its last process, however that ends, and nothing has to be
cleaned up. Only one side writes and only between a request and its answer, so that no lock is
needed; the reader copies at once.
"""

from __future__ import annotations

import math
from multiprocessing.context import BaseContext
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from forethought.spaces import nested
from forethought.spaces.nested import Tree

ROOM_BYTES = 2**18
"""What does not fit goes through the pipe."""
LEAST_BYTES = 2**12
"""Smaller arrays go through the pipe, which is then as fast."""


class Place(NamedTuple):
    """Where an array lies in the room."""

    offset: int
    shape: tuple[int, ...]
    dtype: str


class Room:
    """One side's view of the memory; `memory` is what `new_memory` gave, to be sent to a process
    at its start."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory

    def put(self, tree: Tree) -> Tree:
        """The same tree with a Place instead of each large array, which is written there."""
        end = 0

        def put(leaf: Any) -> Any:
            nonlocal end
            size = leaf.nbytes if isinstance(leaf, np.ndarray) else 0
            if size < LEAST_BYTES or end + size > ROOM_BYTES or leaf.dtype.hasobject:
                return leaf
            place = Place(end, leaf.shape, leaf.dtype.str)
            self._at(place)[...] = leaf
            end += -(-size // 64) * 64  # the next one begins where any dtype may
            return place

        return nested.tree_map(put, tree)

    def get(self, tree: Tree) -> Tree:
        """The tree that was put, in arrays of its own."""
        return nested.tree_map(
            lambda leaf: self._at(leaf).copy() if isinstance(leaf, Place) else leaf, tree
        )

    def _at(self, place: Place) -> NDArray[Any]:
        count = math.prod(place.shape)
        flat = np.frombuffer(self._memory, place.dtype, count, place.offset)
        return flat.reshape(place.shape)


def new_memory(context: BaseContext) -> Any:
    """Memory for the room of a process that this context will start."""
    return context.RawArray("B", ROOM_BYTES)
