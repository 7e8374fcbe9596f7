"""A replay that is a dataset: the same slices for the same agents, drawn from mapped files.

Each batch is O(batch): one random number picks an episode, a second a start in it, and one gather
per column and shard brings the rows. The rows stay where they are (on the disk or in main memory),
the batches come on the agent's device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forethought import files
from forethought.config import ConfigError, require
from forethought.data.columns import (
    Part,
    check_columns,
    check_repeats,
    gather,
    groups_of,
    is_task,
    make_parts,
)
from forethought.data.dataset import Dataset, Shard
from forethought.data.layout import SPLITS
from forethought.files import size_in_words
from forethought.replay.memory import check_room, free_main_memory
from forethought.replay.rows import Batch, ReplayError, RowSpec, as_learned
from forethought.replay.stacks import sources, windows
from forethought.seeding import numpy_state, restore_numpy
from forethought.spaces.nested import tree_map, unflatten
from forethought.spaces.spec import EnvSpec
from forethought.spaces.structure import Leaf

Ints = NDArray[np.int64]


class OfflineReplay:
    """Slices of `slice_rows` rows [L, B] from datasets; it may take the place of an agent's Replay.

    `spec` is what the agent sees and `tasks` are its tasks in its order (by default the spec's
    own): the batches have the columns of `RowSpec.of(spec)`. A task that the spec describes alone
    must be in the data as it is there; a vector that is narrower than the agent's is padded with
    zeros. A declared column named `task` holds the task's place
    in `tasks`; any other must be in the data as info/NAME. Episodes of other tasks, of
    another `split` ("train" or "held-out") and those shorter than a slice are left out.

    `kind` says how slices are drawn: "episodes" an episode uniformly, then a start in it (the
    official TD-MPC2 rule); "transitions" uniformly over all starts. Of several tasks one is drawn
    first, uniformly. `stream` is the only randomness. `storage` is "mapped" (the files as they are)
    or "memory" (copied once, if it fits).
    """

    num_envs = 1
    seal_failures = 0

    def __init__(
        self,
        datasets: Sequence[Dataset],
        spec: EnvSpec,
        slice_rows: int,
        stream: np.random.Generator,
        device: torch.device,
        *,
        tasks: Sequence[str] | None = None,
        kind: str = "episodes",
        storage: Literal["mapped", "memory"] = "mapped",
        split: str = "train",
        stack: Mapping[str, int] | None = None,
        stack_pad: str = "zeros",
    ) -> None:
        require(slice_rows >= 1, "slice_rows", slice_rows, "at least 1")
        require(kind in ("episodes", "transitions"), "replay kind", kind, "episodes or transitions")
        require(storage in ("mapped", "memory"), "storage", storage, "mapped or memory")
        require(split in SPLITS, "split", split, " or ".join(SPLITS))
        self.row_spec = RowSpec.of(spec, stack, stack_pad)
        self.slice_rows, self.device, self.kind, self.storage = slice_rows, device, kind, storage
        self.split = split
        self.tasks = tuple(tasks or (spec.task,))
        self.datasets = tuple(datasets)
        check_columns(self.datasets, spec, self.row_spec, self.tasks)
        check_repeats(self.datasets, spec)
        self._stream = stream
        parts, table, left_out = _select(self.datasets, self.tasks, slice_rows, split)
        self.left_out = left_out
        """Episodes that are never drawn."""
        order = np.argsort(table[1], kind="stable")  # side by side: a task is a range of episodes
        self._part, self._task, self._first, self._starts = (x[order] for x in table)  # [episodes]
        self._bounds = np.searchsorted(self._task, np.arange(len(self.tasks) + 1))  # [tasks + 1]
        self._ends = np.cumsum(self._starts)
        self._starts_before = np.concatenate(([0], self._ends))  # [episodes + 1]
        counts = np.bincount(self._task, minlength=len(self.tasks)).tolist()
        self.episodes_per_task = dict(zip(self.tasks, counts))
        """Episodes that slices are drawn from, by task."""
        _require_all(self.episodes_per_task, self.datasets, slice_rows, split)
        self.rows = sum(shard.rows for _, shard in parts)
        """Rows of the shards that are drawn from."""
        self.bytes_total = self.rows * self.row_spec.row_bytes
        if storage == "memory":
            advice = "leave it on the disk (mapped)"
            check_room("The dataset", self.bytes_total, free_main_memory(), advice)
            for dataset in self.datasets:
                files.verify(dataset.path)  # all is read anyway
        self._parts: list[Part] = make_parts(parts, self.row_spec, copy=storage == "memory")
        self._offsets = np.arange(slice_rows)[:, None]  # [L, 1]
        self._drawn: tuple[Ints, Ints] | None = None  # of the last batch: parts, first rows

    def describe(self) -> str:
        """What is drawn from, in words."""
        told = ", ".join(f"{task} {count:,}" for task, count in self.episodes_per_task.items())
        without = (
            f" ({self.left_out:,} more of other tasks or splits, or too short)"
            if self.left_out
            else ""
        )
        place = "in main memory"
        if self.storage == "mapped":
            place = "mapped from the disk, where 'forethought data verify' checks every byte"
        return (
            f"{self.rows:,} rows of recorded data, {size_in_words(self.bytes_total)} {place}; "
            f"episodes: {told}{without}; slices of {self.slice_rows} rows, drawn by {self.kind}"
        )

    def can_sample(self, batch: int = 1) -> bool:
        """Whether `sample(batch)` works."""
        return batch >= 1

    def sample(self, batch: int, stream: np.random.Generator | None = None) -> Batch:
        """Draw `batch` slices of `slice_rows` rows each; they come in the order of their shards.

        With a `stream` of its own it is a look from outside, which training does not notice.
        """
        episode, start = self._draw(batch, stream or self._stream)  # [B], [B]
        part = self._part.take(episode)
        if len(self._parts) > 1:  # slices of one shard side by side: one gather for all of them
            order = np.argsort(part, kind="stable")
            episode, start, part = episode[order], start[order], part[order]
        first = self._first.take(episode) + start
        if stream is None:
            self._drawn = part, first
        rows = first + self._offsets  # [L, B]
        groups = groups_of(part)
        task = self._task.take(episode)
        columns = {}
        for leaf in self.row_spec.leaves:
            if is_task(leaf, self.row_spec):
                column = torch.from_numpy(np.broadcast_to(task, rows.shape).astype(leaf.dtype))
            elif leaf.path in self.row_spec.stack:
                column = self._gather_stack(leaf, groups, first, start)
            else:
                column = torch.from_numpy(gather(self._parts, leaf, groups, rows))
            columns[leaf.path] = column.to(self.device)
        nested = unflatten(columns)
        is_first = np.zeros(rows.shape, np.bool_)
        is_first[0] = start == 0
        drawn = Batch(
            obs=nested["obs"],
            action=tree_map(lambda leaf: leaf[1:], nested["action"]),
            reward=columns["reward"][1:],
            terminated=columns["terminated"][1:].float(),
            truncated=columns["truncated"][1:],
            is_first=torch.from_numpy(is_first).to(self.device),
            extras={name: columns[name] for name in self.row_spec.extras},
        )
        return as_learned(drawn, self.row_spec)

    def last_draw(self) -> dict[str, Any] | None:
        """Where the slices of the last batch come from; None before the first."""
        if self._drawn is None:
            return None
        part, first = (x.tolist() for x in self._drawn)
        shards = [self._parts[number].name for number in part]
        return {"slice_rows": self.slice_rows, "shard": shards, "first_row": first}

    def _draw(self, batch: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
        """Episodes [B], and the row in each where a slice begins [B].

        Of several tasks one is drawn first, uniformly: however much was recorded of each.
        """
        several = len(self.tasks) > 1
        task = (
            rng.integers(0, len(self.tasks), size=batch) if several else np.zeros(batch, np.int64)
        )
        low, high = self._bounds.take(task), self._bounds.take(task + 1)
        if self.kind == "episodes":
            episode = rng.integers(low, high)
            return episode, rng.integers(0, self._starts.take(episode))
        before = self._starts_before
        pick = rng.integers(before.take(low), before.take(high))
        episode = np.searchsorted(self._ends, pick, side="right")
        return episode, pick - self._ends.take(episode) + self._starts.take(episode)

    def _gather_stack(
        self, leaf: Leaf, groups: Sequence[tuple[int, int, int]], first: Ints, start: Ints
    ) -> Tensor:
        """Stacks [L, B, frames, ...]; each frame is gathered once, then seen through windows."""
        frames = self.row_spec.stack[leaf.path]
        back, blank = sources(start, frames)  # [frames, B] both: a start's age is its place
        wanted = np.concatenate([first - back, first + self._offsets[1:]])  # [frames-1+L, B]
        gathered = torch.from_numpy(gather(self._parts, leaf, groups, wanted)).to(self.device)
        zeros = self.row_spec.stack_pad == "zeros"
        return windows(gathered, torch.from_numpy(blank).to(self.device) if zeros else None, frames)

    # ---- what a replay of experience does, and a dataset need not ----

    def add(self, row: Mapping[str, Any], env_index: int) -> NoReturn:
        """A dataset takes no rows."""
        raise ReplayError("This agent learns from a dataset, which takes no new rows.")

    def close_episode(self, env_index: int) -> NoReturn:
        """A dataset has no open episode."""
        raise ReplayError("This agent learns from a dataset, in which no episode is open.")

    def seal_to(self, folder: Path) -> None:
        """Nothing to write: the rows are on the disk."""

    def prune(self, folder: Path, keep: set[str]) -> list[str]:
        """Nothing to delete: the rows belong to the dataset."""
        return []

    # ---- exact resume ----

    def state(self, whole: bool = False) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What a checkpoint keeps: which data this is, and the random state; no rows."""
        state = {"layout": self._layout(), "streams": [], "rng": numpy_state(self._stream)}
        return state, {}

    def check(
        self, state: Mapping[str, Any], tensors: Mapping[str, Tensor], folder: Path | None = None
    ) -> None:
        """Refuse a state of other data, or of slices that are drawn otherwise."""
        saved = {"split": "train", **state["layout"]}  # as all were before there was a choice
        for key, here in self._layout().items():
            if saved.get(key) != here:
                raise ReplayError(
                    f"The saved replay has {key} {saved.get(key)}, but this one has {here}; "
                    "resume with the configuration and the datasets of the run."
                )
        restore_numpy(np.random.Generator(type(self._stream.bit_generator)()), state["rng"])

    def restore(
        self, state: Mapping[str, Any], tensors: Mapping[str, Tensor], folder: Path | None
    ) -> None:
        """Go on drawing where `state` was saved."""
        self.check(state, tensors)
        restore_numpy(self._stream, state["rng"])

    def _layout(self) -> dict[str, Any]:
        """What must be equal for the random state to mean the same slices."""
        return {
            "kind": self.kind,
            "slice_rows": self.slice_rows,
            "history_rows": self.row_spec.history,
            "columns": {x.path: [str(x.dtype), list(x.shape)] for x in self.row_spec.leaves},
            "tasks": list(self.tasks),
            "datasets": [dataset.fingerprint for dataset in self.datasets],
            "split": self.split,
        }


def _select(
    datasets: Sequence[Dataset], tasks: Sequence[str], slice_rows: int, split: str
) -> tuple[list[tuple[Dataset, Shard]], tuple[Ints, Ints, Ints, Ints], int]:
    """The shards with episodes to draw from; per such episode its shard's place, its task, its
    first row and its number of starts; and how many episodes are left out."""
    parts: list[tuple[Dataset, Shard]] = []
    found: list[list[Ints]] = [[], [], [], []]
    left_out = 0
    for dataset in datasets:
        # The dataset's numbering of tasks to the agent's; -1 is a task that the agent lacks.
        place = [tasks.index(t.name) if t.name in tasks else -1 for t in dataset.tasks]
        for shard in dataset.shards:
            table = shard.episodes
            task = np.array(place, np.int64).take(table["task"])
            starts = table["length"] - slice_rows + 1
            usable = (task >= 0) & (starts > 0) & (table["split"] == SPLITS.index(split))
            left_out += int((~usable).sum())
            if not usable.any():
                continue
            here = np.full(int(usable.sum()), len(parts), np.int64)
            for column, values in zip(found, (here, task, table["row_start"], starts)):
                column.append(values if values is here else values[usable])
            parts.append((dataset, shard))
    empty = np.empty(0, np.int64)
    part, task, first, starts = (np.concatenate([empty, *column]) for column in found)
    return parts, (part, task, first, starts), left_out


def _has_split(task: str, datasets: Sequence[Dataset], split: str) -> bool:
    for dataset in datasets:
        table = dataset.episodes
        for number, own in enumerate(dataset.tasks):
            mine = (table["task"] == number) & (table["split"] == SPLITS.index(split))
            if own.name == task and mine.any():
                return True
    return False


def _require_all(
    episodes: Mapping[str, int], datasets: Sequence[Dataset], slice_rows: int, split: str
) -> None:
    for task, count in episodes.items():
        if count:
            continue
        there = sorted({t.name for dataset in datasets for t in dataset.tasks})
        places = ", ".join(str(dataset.path) for dataset in datasets)
        if task in there and not _has_split(task, datasets, split):
            raise ConfigError(
                f"No episode of {task} in {places} is of the split {split}; record or import with "
                "another --held_out."
            )
        if task in there:
            raise ConfigError(
                f"No {split} episode of {task} in {places} has the {slice_rows} rows of a slice; "
                "record longer episodes or train with a shorter horizon."
            )
        raise ConfigError(
            f"There are no episodes of {task} in {places}, only of {', '.join(there) or 'nothing'};"
            f" record some: forethought data record --agent random --task {task} --out DIR"
        )
