"""The sum and the minimum of many priorities, in a tree of 32 children per node.

      one running sum over all roots
        /        |        \\
      root      root      root           at most 2048 of them
    /   |   \\
    32 sums                              level 1: sums, running sums, minima
  /    |    \\
leaves: (|TD error| + epsilon)^alpha     level 0; 0 = cannot be drawn

Everything is float64, and a parent is always made anew from its children, never changed by a
difference: after any number of updates the tree is exactly what a tree built from its leaves would
be. That is also why only the leaves are saved. A leaf of 0 has no share of the mass, so drawing
needs neither rejection nor a fallback.

32 children, because numpy costs about the same for 32 numbers as for 2, and one running sum over
the roots, because it costs less than a level: a million leaves are three steps deep and not twenty.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from forethought.replay.rows import ReplayError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
CHILDREN = 32
MOST_ROOTS = 2048
MOST_UNSETTLED = 4096
"""Changed leaves whose parents may wait; each is a number in a list."""
MOST = 1e280
"""The greatest priority: even of 2^64 of them the sum is finite."""
FEW = 64
"""So many nodes are made anew faster twice than sorted to be made once."""


class PriorityTree:
    """Priorities of `size` slots. All begin at 0: nothing can be drawn."""

    def __init__(self, size: int) -> None:
        nodes = [-(-size // CHILDREN)]
        while nodes[-1] > MOST_ROOTS:
            nodes.append(-(-nodes[-1] // CHILDREN))
        # np.zeros takes memory only when it is touched; all but the leaves is a tenth of them.
        self._sums = [np.zeros((n, CHILDREN)) for n in nodes]
        """Of each child, by level and node; on level 0 the leaves themselves."""
        self._minima = [np.full((n, CHILDREN), np.inf) for n in nodes[1:]]
        """Of each child, from level 1 on."""
        self._ends = [np.zeros((n, CHILDREN + 1)) for n in nodes[1:]]
        """The running sum over the children, beginning with 0, from level 1 on."""
        self._root_sums = np.zeros(nodes[-1])
        self._root_minima = np.full(nodes[-1], np.inf)
        self._root_ends = np.zeros(nodes[-1] + 1)
        self._leaves = self._sums[0].reshape(-1)
        self._minimum = float("inf")
        self._unsettled: list[int] = []

    @property
    def leaves(self) -> Floats:
        """The priority of every slot, padded with zeros; to be read only."""
        return self._leaves

    @property
    def total(self) -> float:
        """The sum of all priorities."""
        self._settle()
        return float(self._root_ends[-1])

    @property
    def minimum(self) -> float:
        """The least priority above 0; infinite where there is none."""
        self._settle()
        return self._minimum

    def put(self, slots: Ints, priorities: Floats) -> None:
        """Set the priorities of slots that can be drawn. Of a slot that comes twice, the last."""
        if not (priorities.min() > 0 and priorities.max() <= MOST):  # false with NaN, too
            bad = priorities[~((priorities > 0) & (priorities <= MOST))][0]
            raise ReplayError(
                f"A priority of {bad} cannot be kept: priorities are above 0 and at most {MOST:g}, "
                "so that their sum is finite."
            )
        self._leaves[slots] = priorities
        self._unsettled += slots.tolist()

    def put_one(self, slot: int, priority: float) -> None:
        """The same for one slot whose priority is known to be sound; 0 takes it out."""
        self._leaves[slot] = priority
        self._unsettled.append(slot)
        if len(self._unsettled) > MOST_UNSETTLED:
            self._settle()

    def fill(self, leaves: Floats) -> None:
        """Set all leaves at once, as when restoring."""
        self._leaves[: len(leaves)] = leaves
        self._rebuild(np.arange(len(self._sums[0])))
        self._unsettled.clear()

    def find(self, mass: Floats) -> Ints:
        """The slots where the running sum of the priorities first exceeds each mass [B].

        A mass lies in [0, total). Rounding can move one onto the end of a node; it is kept inside,
        so that what is found always has a priority above 0.
        """
        self._settle()
        place = np.arange(len(mass))
        ends = self._root_ends
        mass = np.minimum(mass, np.nextafter(ends[-1], 0.0))
        # To the right of what is equal, here and below: a child of 0 ends where the one before it
        # ends.
        node = ends.searchsorted(mass, side="right") - 1
        mass = mass - ends[node]
        for level in reversed(range(len(self._sums))):
            ends = self._ends_of(level, node)  # [B, 33], from 0 to the sum of the node
            mass = np.minimum(mass, np.nextafter(ends[:, -1], 0.0))
            child = (ends > mass[:, None]).argmax(axis=1) - 1
            mass = mass - ends[place, child]
            node = node * CHILDREN + child
        return node

    def draw(self, batch: int, rng: np.random.Generator) -> Ints:
        """Slots in proportion to their priorities, one from each of `batch` equal shares of the
        total (stratified)."""
        mass = (np.arange(batch) + rng.random(batch)) * (self.total / batch)
        return self.find(mass)

    def _ends_of(self, level: int, nodes: Ints) -> Floats:
        """The running sums of nodes, with the 0 before them."""
        if level > 0:
            return self._ends[level - 1].take(nodes, axis=0)
        ends = np.zeros((len(nodes), CHILDREN + 1))
        np.cumsum(self._sums[0].take(nodes, axis=0), axis=1, out=ends[:, 1:])
        return ends

    def _settle(self) -> None:
        """Make the parents of changed leaves anew."""
        if self._unsettled:
            nodes = np.array(self._unsettled) // CHILDREN
            self._rebuild(nodes if len(nodes) <= FEW else np.unique(nodes))
            self._unsettled.clear()

    def _rebuild(self, nodes: Ints) -> None:
        """Make everything above the children of these nodes of level 0 anew."""
        for level, sums in enumerate(self._sums):
            children = sums.take(nodes, axis=0)
            # Not .sum(), which adds in another order: a node's sum must be the end of the running
            # sum over its children, to the last bit.
            ends = children.cumsum(axis=1)
            if level == 0:
                least = np.where(children > 0, children, np.inf).min(axis=1)
            else:
                least = self._minima[level - 1].take(nodes, axis=0).min(axis=1)
                self._ends[level - 1][nodes, 1:] = ends
            top = level + 1 == len(self._sums)
            sums_above = self._root_sums if top else self._sums[level + 1].reshape(-1)
            minima_above = self._root_minima if top else self._minima[level].reshape(-1)
            sums_above[nodes], minima_above[nodes] = ends[:, -1], least
            nodes = nodes // CHILDREN
            if len(nodes) > FEW:
                nodes = np.unique(nodes)
        np.cumsum(self._root_sums, out=self._root_ends[1:])
        self._minimum = float(self._root_minima.min())
