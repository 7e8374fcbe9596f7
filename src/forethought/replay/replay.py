"""The replay of slices: rows in, slices out, exact to restore."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forethought.config import EpisodeReplayConfig, ReplayConfig
from forethought.replay.ring_replay import RingReplay
from forethought.replay.rows import Batch
from forethought.replay.slices import EpisodeSampler, Sampler, TaskSampler, TransitionSampler
from forethought.replay.stacks import sources, windows
from forethought.replay.storage import Ints
from forethought.spaces.nested import unflatten
from forethought.spaces.spec import EnvSpec


class Replay(RingReplay):
    """Experience drawn in slices of `slice_rows` rows, which never cross an episode.

    `config.kind` says how they are drawn (see slices.py).
    """

    def make_sampler(self, spec: EnvSpec, config: ReplayConfig) -> Sampler:
        sampler = functools.partial(
            EpisodeSampler if isinstance(config, EpisodeReplayConfig) else TransitionSampler,
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
        return f"slices of {self.slice_rows} rows, drawn by {self.kind}"

    def sample(self, batch: int, stream: np.random.Generator | None = None) -> Batch:
        """Draw `batch` slices of `slice_rows` rows each.

        With a `stream` of its own it is a look from outside, which training does not notice.
        """
        storage, rows = self._storage, self.row_spec
        streams, starts = self._sampler.draw(batch, stream or self._stream)  # [B], [B]
        if stream is None:
            self._drawn = streams, starts
        slots = starts % storage.capacity + self._offsets  # [L, B]
        slots -= storage.capacity * (slots >= storage.capacity)
        slots += streams * storage.capacity
        age = storage.age.take(slots)  # [L, B]
        columns = {
            leaf.path: self._gather_stack(leaf.path, streams, starts, age[0])
            if leaf.path in rows.stack
            else storage.columns.gather(leaf.path, slots).to(self.device)
            for leaf in rows.leaves
        }
        nested = unflatten(columns)
        return Batch(
            obs=nested["obs"],
            action=_after_first(nested["action"]),
            reward=columns["reward"][1:],
            terminated=columns["terminated"][1:].float(),
            truncated=columns["truncated"][1:],
            is_first=torch.from_numpy(age == 0).to(self.device),
            extras={name: columns[name] for name in rows.extras},
        )

    def _gather_stack(self, path: str, streams: Ints, starts: Ints, age: Ints) -> Tensor:
        """Stacks [L, B, frames, ...]; each frame is gathered once, then seen through windows."""
        frames = self.row_spec.stack[path]
        back, blank = sources(age, frames)  # [frames, B] both
        wanted = np.concatenate([starts - back, starts + self._offsets[1:]])  # [frames-1+L, B]
        slots = self._storage.slots(streams, wanted)
        gathered = self._storage.columns.gather(path, slots).to(self.device)
        zeros = self.row_spec.stack_pad == "zeros"
        return windows(gathered, torch.from_numpy(blank).to(self.device) if zeros else None, frames)


def _after_first(tree: Any) -> Any:
    """Rows 1.. of every leaf."""
    if isinstance(tree, dict):
        return {key: _after_first(child) for key, child in tree.items()}
    return tree[1:]
