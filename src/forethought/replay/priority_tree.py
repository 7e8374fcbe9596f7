"""The sum and the minimum of many priorities, in a tree of 32 children per node.

                      total                     level 3
              /         |         \\
          32 sums                               level 2, and as many minima
       /     |     \\
    leaves: (|TD error| + epsilon)^alpha        level 0; 0 = cannot be drawn

Everything is float64, and a parent is always made anew from its children, never changed by a
difference: after any number of updates the tree is exactly what a tree built from its leaves would
be. That is also why only the leaves are saved. A leaf of 0 has no share of the mass, so drawing
needs neither rejection nor a fallback.

32 children, because numpy costs about the same for 32 numbers as for 2: a million leaves are four
steps deep and not twenty.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from forethought.replay.rows import ReplayError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
CHILDREN = 32
MOST_UNSETTLED = 4096
"""Changed leaves whose parents may wait; each is a number in a list."""


class PriorityTree:
    """Priorities of `size` slots. All begin at 0: nothing can be drawn."""

    def __init__(self, size: int) -> None:
        widths = [_padded(size)]
        while widths[-1] > CHILDREN:
            widths.append(_padded(widths[-1] // CHILDREN))
        # np.zeros takes memory only when it is touched; the minima are a 32nd of the leaves.
        self._sums = [np.zeros(width) for width in widths]
        self._minima = [np.full(width, np.inf) for width in widths[1:]]
        self._total, self._minimum = 0.0, float("inf")
        self._unsettled: list[int] = []

    @property
    def leaves(self) -> Floats:
        """The priority of every slot, padded with zeros; to be read only."""
        return self._sums[0]

    @property
    def total(self) -> float:
        """The sum of all priorities."""
        self._settle()
        return self._total

    @property
    def minimum(self) -> float:
        """The least priority above 0; infinite where there is none."""
        self._settle()
        return self._minimum

    def put(self, slots: Ints, priorities: Floats) -> None:
        """Set the priorities of slots that can be drawn. Of a slot that comes twice, the last."""
        if not (np.isfinite(priorities) & (priorities > 0)).all():
            bad = priorities[~(np.isfinite(priorities) & (priorities > 0))][0]
            raise ReplayError(
                f"A priority of {bad} cannot be kept: priorities are finite and above 0."
            )
        self._sums[0][slots] = priorities
        self._unsettled += slots.tolist()

    def put_one(self, slot: int, priority: float) -> None:
        """The same for one slot whose priority is known to be sound; 0 takes it out."""
        self._sums[0][slot] = priority
        self._unsettled.append(slot)
        if len(self._unsettled) > MOST_UNSETTLED:
            self._settle()

    def fill(self, leaves: Floats) -> None:
        """Set all leaves at once, as when restoring."""
        self._sums[0][: len(leaves)] = leaves
        self._rebuild(np.arange(len(self._sums[0]) // CHILDREN))
        self._unsettled.clear()

    def find(self, mass: Floats) -> Ints:
        """The slots where the running sum of the priorities first exceeds each mass [B].

        A mass lies in [0, total). Rounding can move one past the end of a node, by a last bit; it
        is kept inside, so that what is found always has a priority above 0.
        """
        self._settle()
        mass = np.minimum(mass, np.nextafter(self._total, 0.0))
        place = np.arange(len(mass))
        node = np.zeros(len(mass), np.int64)
        for sums in reversed(self._sums):
            children = sums.reshape(-1, CHILDREN).take(node, axis=0)  # [B, 32]
            ends = children.cumsum(axis=1)
            # Not where they are equal: a child of 0 ends where the one before it ends.
            child = (ends <= mass[:, None]).sum(axis=1)
            before = np.where(child > 0, ends[place, child - 1], 0.0)
            mass = np.minimum(mass - before, np.nextafter(children[place, child], 0.0))
            node = node * CHILDREN + child
        return node

    def draw(self, batch: int, rng: np.random.Generator) -> Ints:
        """Slots in proportion to their priorities, one from each of `batch` equal shares of the
        total (stratified)."""
        mass = (np.arange(batch) + rng.random(batch)) * (self.total / batch)
        return self.find(mass)

    def _settle(self) -> None:
        """Make the parents of changed leaves anew."""
        if self._unsettled:
            self._rebuild(np.unique(np.array(self._unsettled) // CHILDREN))
            self._unsettled.clear()

    def _rebuild(self, nodes: Ints) -> None:
        """Make these nodes of level 1 anew from their children, and then everything above."""
        for level, sums in enumerate(self._sums):
            children = sums.reshape(-1, CHILDREN).take(nodes, axis=0)
            # The running sum's end and not .sum(), which adds in another order: `find` compares
            # with the running sum, and both must be the same number.
            total = children.cumsum(axis=1)[:, -1]
            if level == 0:
                least = np.where(children > 0, children, np.inf).min(axis=1)
            else:
                minima = self._minima[level - 1].reshape(-1, CHILDREN)
                least = minima.take(nodes, axis=0).min(axis=1)
            if level + 1 == len(self._sums):
                self._total, self._minimum = float(total[0]), float(least[0])
                return
            self._sums[level + 1][nodes] = total
            self._minima[level][nodes] = least
            nodes = np.unique(nodes // CHILDREN)


def _padded(width: int) -> int:
    return -(-width // CHILDREN) * CHILDREN
