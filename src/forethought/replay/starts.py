"""Which n-step transitions may be drawn, and how likely each one is.

A transition begins at row t and ends at row t + m, m = min(n, steps to the episode's end). It may
be drawn as soon as its last row is there: when row t + n arrives, or when the episode ends. It may
no longer be drawn when the ring has overwritten a row that its first stack needs. Both happen in
the order of the rows, so the valid starts of a stream are a queue, as for slices; the last row of
an episode begins nothing and never enters it.

    rows of a stream   ... 3  4  5 | 6  7  8  9        (| = an episode ended; n = 2)
    valid starts           3  4      6  7              (5 is a last row; 8 waits for row 10)

- `UniformStarts`: every valid start equally often.
- `PrioritizedStarts`: in proportion to its priority. A row has one above 0 in the tree exactly
  while it is in the queue.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from forethought.config import PrioritizedReplayConfig
from forethought.replay.priority_tree import MOST, PriorityTree
from forethought.replay.rows import ReplayError
from forethought.replay.slices import Ints, State, TransitionSampler
from forethought.replay.storage import Storage

Floats = NDArray[np.float64]


class UniformStarts(TransitionSampler):
    """Uniform over all valid starts of all streams."""

    def __init__(self, storage: Storage, n_step: int, history: int) -> None:
        super().__init__(storage, n_step + 1, history)
        self.n_step = n_step
        self.looked_at = np.zeros(storage.num_envs, np.int64)
        """Rows of each stream that have been told whether they are a start."""
        self.times_drawn = np.zeros(storage.num_envs * storage.capacity, np.int32)
        """How often the start in each slot was drawn; for diagnostics alone."""

    def row_added(self, stream: int, row: int, age: int) -> None:
        """What lost a row leaves; the start `n_step` rows ago enters."""
        head, tail = int(self.head[stream]), int(self.tail[stream])
        capacity, oldest = self.storage.capacity, int(self.storage.oldest[stream])
        starts = self.starts[stream]
        while head < tail and self._needs(stream, int(starts[head % capacity])) < oldest:
            self._leave(stream * capacity + int(starts[head % capacity]) % capacity)
            head += 1
        self.head[stream] = head
        if age >= self.n_step:
            self._enter(stream, row - self.n_step)

    def episode_closed(self, stream: int, first: int, end: int) -> None:
        """The last starts enter, with fewer steps than n; the last row is none."""
        for start in range(max(first, end - self.n_step), end - 1):
            self._enter(stream, start)
        self.looked_at[stream] = end

    def draw(self, batch: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
        """Streams [B] and first rows [B] of a batch of transitions."""
        if self.count == 0:
            raise ReplayError(
                "Nothing can be sampled yet: no episode has ended, or gone on for "
                f"{self.n_step} steps, in the replay."
            )
        return super().draw(batch, rng)

    def note_drawn(self, slots: Ints) -> None:
        """Count what training has drawn."""
        np.add.at(self.times_drawn, slots, np.int32(1))  # of its own type: three times as fast

    def valid_slots(self) -> Ints:
        """The slots of all valid starts."""
        slots = [
            self.storage.slots(stream, self._queue(stream))
            for stream in range(self.storage.num_envs)
        ]
        return np.concatenate(slots)

    def state(self) -> State:
        """How far each stream was looked at, and the counts of draws, oldest row first."""
        return {"looked_at": self.looked_at.copy(), "times_drawn": self._unrolled(self.times_drawn)}

    def check(self, state: State, written: list[int]) -> None:
        """Refuse what cannot be after `written` rows."""
        looked, counts = state.get("looked_at", np.empty(0)), np.array(written)
        if looked.dtype != np.int64 or looked.shape != counts.shape:
            raise ReplayError("The saved replay does not tell which rows are starts.")
        if np.any((looked > counts) | (looked < counts - self.n_step)):
            raise ReplayError("The saved replay tells of starts that cannot be.")
        self._check_column(state, "times_drawn", np.dtype(np.int32), written)

    def restore(self, state: State) -> None:
        """Find the valid starts among the rows in the ring, in their order."""
        storage = self.storage
        self.looked_at = state["looked_at"].copy()
        for stream in range(storage.num_envs):
            oldest = int(storage.oldest[stream])
            rows = np.arange(oldest, min(self.looked_at[stream], storage.written[stream] - 1))
            age = storage.age.take(storage.slots(stream, rows)).astype(np.int64)
            goes_on = storage.age.take(storage.slots(stream, rows + 1)) == age + 1
            whole = rows - np.minimum(age, self.history) >= oldest
            found = rows[goes_on & whole]
            self.starts[stream, : len(found)] = found
            self.head[stream], self.tail[stream] = 0, len(found)
        self.times_drawn[:] = self._rolled(state["times_drawn"])

    def _enter(self, stream: int, start: int) -> None:
        """A start becomes valid. The ring is long enough that it still has all it needs."""
        tail, capacity = int(self.tail[stream]), self.storage.capacity
        self.starts[stream, tail % capacity] = start
        self.tail[stream] = tail + 1
        self.looked_at[stream] = start + 1
        self.times_drawn[stream * capacity + start % capacity] = 0

    def _leave(self, slot: int) -> None:
        """A start is no longer valid."""

    def _queue(self, stream: int) -> Ints:
        places = np.arange(self.head[stream], self.tail[stream]) % self.storage.capacity
        found: Ints = self.starts[stream].take(places)
        return found

    def _held(self) -> Ints:
        """The slots of all rows in the ring, stream by stream, oldest first."""
        storage = self.storage
        rows = [np.arange(first, end) for first, end in zip(storage.oldest, storage.written)]
        return np.concatenate([storage.slots(i, own) for i, own in enumerate(rows)])

    def _unrolled(self, values: NDArray[np.generic]) -> NDArray[np.generic]:
        """Per slot -> per row held: what a checkpoint keeps."""
        return values.take(self._held())

    def _rolled(self, values: NDArray[np.generic]) -> NDArray[np.generic]:
        """The reverse; slots without a row are 0."""
        slots = self.storage.num_envs * self.storage.capacity
        rolled = np.zeros(slots, values.dtype)
        rolled[self._held()] = values
        return rolled

    def _check_column(
        self, state: State, name: str, dtype: np.dtype[np.generic], written: list[int]
    ) -> None:
        """One number, 0 or more, for each row that the rings hold."""
        found, held = state.get(name), sum(min(n, self.storage.capacity) for n in written)
        if found is None or found.dtype != dtype or found.shape != (held,):
            raise ReplayError(f"The saved replay has no {name} for each of its {held} rows.")
        if not (np.isfinite(found) & (found >= 0)).all():
            raise ReplayError(f"The saved replay has {name} below 0 or not finite.")


class PrioritizedStarts(UniformStarts):
    """Valid starts in proportion to (|TD error| + epsilon)^alpha, stratified.

    A new one gets the greatest priority so far, so that each is soon drawn once.
    """

    def __init__(
        self, storage: Storage, n_step: int, history: int, config: PrioritizedReplayConfig
    ) -> None:
        super().__init__(storage, n_step, history)
        self.config = config
        self.tree = PriorityTree(storage.num_envs * storage.capacity)
        self.max_priority = 1.0
        """The greatest |TD error| + epsilon so far. Not raised to alpha: that is done once, when a
        new start enters."""
        self.updates_too_late = 0
        """Priorities that came after their row was overwritten; since the process began."""

    def draw(self, batch: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
        if self.count == 0:
            return super().draw(batch, rng)  # says that there is nothing
        streams, starts = self._draw_by_priority(batch, rng)
        if self.config.uniform_mix == 0:
            return streams, starts
        uniform = rng.random(batch) < self.config.uniform_mix
        other_streams, other_starts = super().draw(batch, rng)
        return np.where(uniform, other_streams, streams), np.where(uniform, other_starts, starts)

    def _draw_by_priority(self, batch: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
        slots = self.tree.draw(batch, rng)
        capacity = self.storage.capacity
        streams, place = slots // capacity, slots % capacity
        newest = np.array(self.storage.written).take(streams) - 1
        return streams, newest - (newest - place) % capacity

    def weights(self, slots: Ints, beta: float) -> Floats:
        """Importance weights w = (N P)^-beta [B], divided by the greatest as `is_norm` says.

        The greatest of the whole replay belongs to its least likely start, which the tree knows:
        N and, without a uniform mix, the total cancel. Nothing is clipped: with a million rows a
        usual probability is 1e-6, and any floor would undo the correction.
        """
        leaves, mix = self.tree.leaves.take(slots), self.config.uniform_mix
        if mix == 0 and self.config.is_norm == "global":
            return np.asarray((leaves / self.tree.minimum) ** -beta)
        total, valid = self.tree.total, self.count

        def share(priority: Floats | float) -> Floats | float:
            """N P of a start with this priority."""
            return (1 - mix) * (priority / total) * valid + mix

        if self.config.is_norm == "none":
            scale: Floats | float = 1.0
        elif self.config.is_norm == "batch":
            scale = np.min(share(leaves))
        else:
            scale = share(self.tree.minimum)
        return np.asarray((share(leaves) / scale) ** -beta)

    def update(self, streams: Ints, starts: Ints, errors: Floats) -> None:
        """Set priorities from |TD error| [B]. A start that has left by now is let alone, also when
        its slot holds another: rows are counted from the beginning of the run."""
        if not (errors.min() >= 0 and errors.max() < np.inf):  # false with NaN, too
            bad = errors[~(np.isfinite(errors) & (errors >= 0))][0]
            raise ReplayError(
                f"A TD error of {bad} cannot be a priority: give absolute values that are finite, "
                "and none after an update that was skipped."
            )
        storage = self.storage
        slots = storage.slots(streams, starts)
        there = (starts >= storage.oldest.take(streams)) & (self.tree.leaves.take(slots) > 0)
        if not there.all():
            self.updates_too_late += len(there) - int(there.sum())
            slots, errors = slots[there], errors[there]
        if len(slots):
            priorities = errors + self.config.priority_epsilon
            self.tree.put(slots, priorities**self.config.alpha)  # first: it may be refused
            self.max_priority = max(self.max_priority, float(priorities.max()))

    def priorities(self) -> Floats:
        """|TD error| + epsilon of every valid start; with an alpha of 0 nobody knows: ones."""
        leaves = self.tree.leaves.take(self.valid_slots())
        return leaves ** (1 / self.config.alpha) if self.config.alpha > 0 else leaves

    def state(self) -> State:
        """Also the priorities, of each row held, and the greatest so far."""
        return {
            **super().state(),
            "priority": self._unrolled(self.tree.leaves),
            "max_priority": np.array([self.max_priority]),
        }

    def check(self, state: State, written: list[int]) -> None:
        super().check(state, written)
        self._check_column(state, "priority", np.dtype(np.float64), written)
        greatest = state.get("max_priority", np.empty(0))
        if greatest.dtype != np.float64 or greatest.shape != (1,) or not greatest[0] > 0:
            raise ReplayError("The saved replay has no greatest priority.")
        if not greatest[0] ** self.config.alpha <= MOST:
            raise ReplayError("The saved replay has a greatest priority that is not finite.")
        if len(leaves := state["priority"]) and not leaves.max() <= MOST:
            raise ReplayError("The saved replay has a priority that is not finite.")

    def restore(self, state: State) -> None:
        super().restore(state)
        leaves = np.asarray(self._rolled(state["priority"]), np.float64)
        valid = np.zeros(len(leaves), np.bool_)
        valid[self.valid_slots()] = True
        if not np.array_equal(leaves > 0, valid):
            raise ReplayError("The saved replay has priorities for other rows than can be drawn.")
        self.tree.fill(leaves)
        self.max_priority = float(state["max_priority"][0])

    def _enter(self, stream: int, start: int) -> None:
        super()._enter(stream, start)
        slot = stream * self.storage.capacity + start % self.storage.capacity
        self.tree.put_one(slot, self.max_priority**self.config.alpha)

    def _leave(self, slot: int) -> None:
        self.tree.put_one(slot, 0.0)
