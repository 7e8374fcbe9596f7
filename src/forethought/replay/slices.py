"""Which slices may be drawn, and how likely each one is.

A slice is L consecutive rows of one episode, all of them still in the ring together with the
`history` rows that their frame stacks need. Two rules:

- `EpisodeSampler`: a finished episode, uniformly; then a start in it, uniformly (the official
  TD-MPC2 rule).
- `TransitionSampler`: a start, uniformly over all valid ones, those of the open episode included.
  With `past_ends` also the last starts of an episode that terminated: its rows end before the slice
  does.

With several tasks there is one of them for each, and every slice is of a task that is drawn first,
uniformly: `TaskSampler`.

Neither ever looks at the whole ring nor draws twice: a row costs O(1) amortised, a batch O(batch)
(and O(streams) for the second).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from forethought.replay.checks import check_episodes
from forethought.replay.rows import ReplayError
from forethought.replay.storage import Storage

Ints = NDArray[np.int64]
State = dict[str, NDArray[Any]]


class Sampler(Protocol):
    """What replay tells a sampler, and asks of it."""

    @property
    def count(self) -> int: ...

    def row_added(self, stream: int, row: int, age: int) -> None: ...

    def episode_closed(self, stream: int, first: int, end: int) -> None: ...

    def draw(self, batch: int, rng: np.random.Generator) -> tuple[Ints, Ints]: ...

    def state(self) -> State: ...

    def check(self, state: State, written: list[int]) -> None: ...

    def restore(self, state: State) -> None: ...


class Episode:
    """A finished episode that can be drawn from: rows [first, end) of a stream."""

    __slots__ = ("end", "first", "place", "stream")

    def __init__(self, stream: int, first: int, end: int, place: int) -> None:
        self.stream = stream
        self.first = first
        self.end = end
        self.place = place  # where it stands in the sampler's table


class EpisodeSampler:
    """Uniform over finished episodes, then over the starts that an episode still has.

    The table of episodes has no holes (a leaving episode is replaced by the last one), so one
    random integer picks an episode. Its order decides what a random number means, and is saved.
    """

    def __init__(
        self, storage: Storage, slice_rows: int, history: int, own: Sequence[int] | None = None
    ) -> None:
        """`own` are the streams that it is for; None: all. It hears of no others."""
        self.storage = storage
        self.slice_rows = slice_rows
        self.history = history
        self.table = np.empty((3, 64), np.int64)  # stream, first, end; grows by doubling
        self.episodes: list[Episode] = []
        self.queues: list[deque[Episode]] = [deque() for _ in range(storage.num_envs)]

    @property
    def count(self) -> int:
        """Episodes that can be drawn from."""
        return len(self.episodes)

    def row_added(self, stream: int, row: int, age: int) -> None:
        """The ring may have lost a row: the oldest episode shrinks, and leaves when too short."""
        queue = self.queues[stream]
        while queue and self._starts(queue[0].stream, queue[0].first, queue[0].end) <= 0:
            self._remove(queue.popleft())

    def episode_closed(self, stream: int, first: int, end: int) -> None:
        """Rows [first, end) are an episode; it can be drawn from if enough of it is left."""
        if self._starts(stream, first, end) > 0:
            self._insert(stream, first, end)

    def draw(self, batch: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
        """Streams [B] and first rows [B] of a batch of slices."""
        if not self.episodes:
            raise ReplayError(
                f"Nothing can be sampled yet: no finished episode has {self.slice_rows} rows "
                f"({self.slice_rows - 1} steps) in the replay."
            )
        place = rng.integers(0, len(self.episodes), size=batch)
        stream, first, end = self.table.take(place, axis=1)
        oldest = self.storage.oldest.take(stream)
        low = np.where(first >= oldest, first, oldest + self.history)
        return stream, low + rng.integers(0, end - self.slice_rows + 1 - low)

    def state(self) -> State:
        """The table, in its order."""
        return {"episodes": self.table[:, : len(self.episodes)].copy()}

    def check(self, state: State, written: list[int]) -> None:
        """Refuse a table that cannot be drawn from when the streams have had `written` rows."""
        table = state.get("episodes", np.empty(0))
        check_episodes(table, self.storage, written)
        stream, first, end = table
        oldest = np.maximum(0, np.array(written) - self.storage.capacity).take(stream)
        low = np.where(first >= oldest, first, oldest + self.history)
        if np.any(end - self.slice_rows + 1 - low <= 0):
            raise ReplayError("The saved replay lists episodes that are too short to draw from.")

    def restore(self, state: State) -> None:
        """Take over a saved table."""
        self.episodes = []
        for stream, first, end in state["episodes"].T.tolist():
            self._insert(stream, first, end)
        # The table has forgotten the order of time; the queues need it.
        self.queues = [deque() for _ in self.queues]
        for episode in sorted(self.episodes, key=lambda x: x.first):
            self.queues[episode.stream].append(episode)

    def _starts(self, stream: int, first: int, end: int) -> int:
        """Valid starts left in an episode."""
        oldest = int(self.storage.oldest[stream])
        # Once its first row is gone, the next `history` rows have lost part of their stacks.
        low = first if first >= oldest else oldest + self.history
        return end - self.slice_rows + 1 - low

    def _insert(self, stream: int, first: int, end: int) -> None:
        place = len(self.episodes)
        if place == self.table.shape[1]:
            self.table = np.concatenate([self.table, np.empty_like(self.table)], axis=1)
        self.table[:, place] = (stream, first, end)
        self.episodes.append(Episode(stream, first, end, place))
        self.queues[stream].append(self.episodes[-1])

    def _remove(self, episode: Episode) -> None:
        last = self.episodes.pop()
        if last is not episode:
            self.episodes[episode.place] = last
            self.table[:, episode.place] = (last.stream, last.first, last.end)
            last.place = episode.place


class TransitionSampler:
    """Uniform over all valid starts of all streams.

    Starts become valid in the order of their rows (when the slice's last row arrives) and stop
    being valid in the same order (when the ring overwrites a row that they need): one queue per
    stream, kept in a ring, is the exact set of valid starts.
    """

    def __init__(
        self,
        storage: Storage,
        slice_rows: int,
        history: int,
        own: Sequence[int] | None = None,
        past_ends: bool = False,
    ) -> None:
        """`own` are the streams that it is for; None: all."""
        self.past_ends = past_ends
        self.storage = storage
        self.slice_rows = slice_rows
        self.history = history
        self.own = range(storage.num_envs) if own is None else own
        self.starts = np.empty((storage.num_envs, storage.capacity), np.int64)
        self.head = np.zeros(storage.num_envs, np.int64)  # starts ever removed
        self.tail = np.zeros(storage.num_envs, np.int64)  # starts ever added

    @property
    def count(self) -> int:
        """Valid starts."""
        return int((self.tail - self.head).sum())

    def row_added(self, stream: int, row: int, age: int) -> None:
        """A slice may have become whole, and the oldest ones may have lost a row."""
        storage, capacity = self.storage, self.storage.capacity
        starts = self.starts[stream]
        head, tail = int(self.head[stream]), int(self.tail[stream])
        oldest = int(storage.oldest[stream])
        while head < tail and self._needs(stream, int(starts[head % capacity])) < oldest:
            head += 1
        start = row - self.slice_rows + 1
        if age >= self.slice_rows - 1 and self._needs(stream, start) >= oldest:
            starts[tail % capacity] = start
            self.tail[stream] = tail + 1
        self.head[stream] = head

    def episode_closed(self, stream: int, first: int, end: int) -> None:
        """Whole slices became valid row by row; those that reach past the end do so now."""
        if not self.past_ends or not self._terminated(stream, np.array([end - 1]))[0]:
            return
        oldest = int(self.storage.oldest[stream])
        for start in range(max(first, oldest, end - self.slice_rows + 1), end - 1):
            if self._needs(stream, start) >= oldest:
                self.starts[stream, int(self.tail[stream]) % self.storage.capacity] = start
                self.tail[stream] += 1

    def draw(self, batch: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
        """Streams [B] and first rows [B] of a batch of slices."""
        ends = np.cumsum(self.tail - self.head)
        if ends[-1] == 0:
            also = ", and none has terminated" if self.past_ends else ""
            raise ReplayError(
                f"Nothing can be sampled yet: no episode has {self.slice_rows} rows "
                f"({self.slice_rows - 1} steps) in the replay{also}."
            )
        pick = rng.integers(0, ends[-1], size=batch)
        stream = np.searchsorted(ends, pick, side="right")
        # Counted from the queue's end, so that streams without starts need no special case.
        place = self.tail.take(stream) - ends.take(stream) + pick
        return stream, self.starts[stream, place % self.storage.capacity]

    def state(self) -> State:
        """Nothing: the queues follow from the ages of the rows."""
        return {}

    def check(self, state: State, written: list[int]) -> None:
        """Nothing to refuse: there is no state."""

    def restore(self, state: State) -> None:
        """Find the valid starts among the rows in the ring, in their order."""
        storage, span = self.storage, self.slice_rows - 1
        for stream in self.own:
            oldest = int(storage.oldest[stream])
            written = storage.written[stream]
            rows = np.arange(oldest, written)
            age = storage.age[storage.slots(stream, rows)]
            ends = np.append(rows[age == 0], written)  # of episodes, each where the next begins
            end = ends[np.searchsorted(ends, rows, side="right")]
            valid = rows + span < end
            if self.past_ends:
                valid |= (rows + 1 < end) & self._terminated(stream, end - 1)
            starts = rows[valid & (rows - np.minimum(age, self.history) >= oldest)]
            self.starts[stream, : len(starts)] = starts
            self.head[stream], self.tail[stream] = 0, len(starts)

    def _terminated(self, stream: int, rows: Ints) -> NDArray[np.bool_]:
        """Whether an episode terminated with each of the rows."""
        slots = self.storage.slots(stream, rows)
        return self.storage.columns.gather_array("terminated", slots).astype(bool)

    def _needs(self, stream: int, start: int) -> int:
        """The oldest row that a slice needs, its stacks included."""
        if not self.history or start < self.storage.oldest[stream]:
            return start
        slot = stream * self.storage.capacity + start % self.storage.capacity
        return start - min(int(self.storage.age[slot]), self.history)


class TaskSampler:
    """Every slice is of a task drawn uniformly, however many or long the tasks' episodes are.

    Stream i is of task i modulo the number of tasks. A task without a slice yet is left out.
    """

    def __init__(self, make: Callable[[Sequence[int]], Sampler], tasks: int, streams: int) -> None:
        """`make` gives the sampler of some of the streams."""
        self.parts = [make(range(task, streams, tasks)) for task in range(tasks)]

    @property
    def count(self) -> int:
        """Episodes, or starts, that can be drawn from."""
        return sum(part.count for part in self.parts)

    def row_added(self, stream: int, row: int, age: int) -> None:
        """Tell the sampler of the stream's task."""
        self._of(stream).row_added(stream, row, age)

    def episode_closed(self, stream: int, first: int, end: int) -> None:
        """Tell the sampler of the stream's task."""
        self._of(stream).episode_closed(stream, first, end)

    def draw(self, batch: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
        """Streams [B] and first rows [B] of a batch of slices."""
        ready = [part for part in self.parts if part.count] or self.parts[:1]
        chosen = rng.integers(0, len(ready), size=batch)
        drawn = np.empty((2, batch), np.int64)
        for number, part in enumerate(ready):
            places = np.flatnonzero(chosen == number)
            if len(places):
                drawn[:, places] = part.draw(len(places), rng)
        return drawn[0], drawn[1]

    def state(self) -> State:
        """That of every task's sampler."""
        states = [part.state() for part in self.parts]
        return {f"{i}/{name}": x for i, state in enumerate(states) for name, x in state.items()}

    def check(self, state: State, written: list[int]) -> None:
        """Refuse what the sampler of a task refuses."""
        for part, own in zip(self.parts, self._split(state)):
            part.check(own, written)

    def restore(self, state: State) -> None:
        """Take over what `state` gave."""
        for part, own in zip(self.parts, self._split(state)):
            part.restore(own)

    def _of(self, stream: int) -> Sampler:
        return self.parts[stream % len(self.parts)]

    def _split(self, state: State) -> list[State]:
        return [
            {k.removeprefix(f"{i}/"): x for k, x in state.items() if k.startswith(f"{i}/")}
            for i in range(len(self.parts))
        ]
