"""The replay of slices: rows in, slices out, exact to restore."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forethought.config import EpisodeReplayConfig, ReplayConfig
from forethought.replay.ring_replay import RingReplay
from forethought.replay.rows import Batch, ReplayError, as_learned
from forethought.replay.slices import EpisodeSampler, Sampler, TaskSampler, TransitionSampler
from forethought.replay.stacks import sources, windows
from forethought.replay.storage import Ints
from forethought.spaces.nested import unflatten
from forethought.spaces.spec import EnvSpec


class Replay(RingReplay):
    """Experience drawn in slices of `slice_rows` rows, which never cross an episode.

    `config.kind` says how they are drawn (see slices.py). With `past_ends` slices may begin in the
    last steps of an episode that terminated; behind its end its last row is repeated, with its
    `terminated`, and is for the caller to leave out.
    """

    def __init__(self, *arguments: Any, past_ends: bool = False, **options: Any) -> None:
        self.past_ends = past_ends
        super().__init__(*arguments, **options)

    def make_sampler(self, spec: EnvSpec, config: ReplayConfig) -> Sampler:
        by_episode = isinstance(config, EpisodeReplayConfig)
        if self.past_ends and by_episode:
            raise ReplayError("Slices drawn per episode are whole: past_ends means nothing there.")
        sampler: Callable[..., Sampler] = functools.partial(
            EpisodeSampler
            if by_episode
            else functools.partial(TransitionSampler, past_ends=self.past_ends),
            self._storage,
            self.slice_rows,
            self.row_spec.history,
        )
        tasks = len(spec.tasks)
        return TaskSampler(sampler, tasks, self.num_envs) if tasks else sampler()

    def sampler_bytes(self, config: ReplayConfig) -> float:
        """A place in the queue of valid starts; there are far fewer episodes than rows."""
        return 0 if isinstance(config, EpisodeReplayConfig) else 8

    @property
    def drawn_as(self) -> str:
        ends = ", which may reach past an end" if self.past_ends else ""
        return f"slices of {self.slice_rows} rows, drawn by {self.kind}{ends}"

    def sample(self, batch: int, stream: np.random.Generator | None = None) -> Batch:
        """Draw `batch` slices of `slice_rows` rows each.

        With a `stream` of its own it is a look from outside, which training does not notice.
        """
        storage, rows = self._storage, self.row_spec
        streams, starts = self._sampler.draw(batch, stream or self._stream)  # [B], [B]
        if stream is None:
            self._drawn = streams, starts
        offsets = self._offsets  # [L, 1]
        if self.past_ends:
            offsets = np.minimum(offsets, self._last_offset(streams, starts))  # [L, B]
        slots = starts % storage.capacity + offsets  # [L, B]
        slots -= storage.capacity * (slots >= storage.capacity)
        slots += streams * storage.capacity
        age = storage.age.take(slots)  # [L, B]
        columns = {
            leaf.path: self._gather_stack(leaf.path, streams, starts + offsets, age[0])
            if leaf.path in rows.stack
            else storage.columns.gather(leaf.path, slots).to(self.device)
            for leaf in rows.leaves
        }
        nested = unflatten(columns)
        drawn = Batch(
            obs=nested["obs"],
            action=_after_first(nested["action"]),
            reward=columns["reward"][1:],
            terminated=columns["terminated"][1:].float(),
            truncated=columns["truncated"][1:],
            is_first=torch.from_numpy(age == 0).to(self.device),
            extras={name: columns[name] for name in rows.extras},
        )
        return as_learned(drawn, rows)

    def _last_offset(self, streams: Ints, starts: Ints) -> Ints:
        """How far behind its start the last row of a slice is that its episode has [B]."""
        rows = starts + self._offsets  # [L, B]
        age = self._storage.age.take(self._storage.slots(streams, rows))
        # The next episode begins at 0 again; behind the newest row lie rows of long ago.
        inside = (age == age[0] + self._offsets) & (rows < np.take(self._storage.written, streams))
        last: Ints = inside.sum(0) - 1
        return last

    def _gather_stack(self, path: str, streams: Ints, rows: Ints, age: Ints) -> Tensor:
        """Stacks [L, B, frames, ...]; each frame is gathered once, then seen through windows."""
        frames = self.row_spec.stack[path]
        back, blank = sources(age, frames)  # [frames, B] both
        wanted = np.concatenate([rows[0] - back, rows[1:]])  # [frames-1+L, B]
        slots = self._storage.slots(streams, wanted)
        gathered = self._storage.columns.gather(path, slots).to(self.device)
        zeros = self.row_spec.stack_pad == "zeros"
        return windows(gathered, torch.from_numpy(blank).to(self.device) if zeros else None, frames)


def _after_first(tree: Any) -> Any:
    """Rows 1.. of every leaf."""
    if isinstance(tree, dict):
        return {key: _after_first(child) for key, child in tree.items()}
    return tree[1:]
