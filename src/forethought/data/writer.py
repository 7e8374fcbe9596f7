"""Writing a dataset: whole episodes in, a published folder out.

`from_gym_steps` is the one place where T actions and T + 1 observations become T + 1 rows, and the
writer takes nothing but such rows, all equally long: no reader can join columns wrongly later.
The folder appears when everything in it is on the disk, or not at all.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forethought import files
from forethought.config import ConfigError, require
from forethought.data.layout import (
    CONVENTION,
    EPISODE,
    EPISODES,
    KIND,
    META,
    SCHEMA,
    SPLITS,
    DatasetError,
    Statistics,
    TaskInfo,
    column_files,
    data_leaves,
    printable,
    stored_leaves,
    task_to_json,
)
from forethought.data.npy_files import GrowingColumn
from forethought.replay.rows import join
from forethought.spaces import nested
from forethought.spaces.spec import EnvSpec
from forethought.spaces.structure import Leaf, Structure

log = logging.getLogger("forethought")
Rows = dict[str, NDArray[Any]]
"""Columns by name, [rows, ...] each."""
MASK = "info/action_mask"
"""The column that says which actions are legal, where a task declares one."""
SHARD_BYTES = 2**30
"""Of a shard, about: a new one is begun when the next episode would make it larger."""


def from_gym_steps(
    obs: Any,
    action: Any,
    reward: Any,
    terminated: Any,
    truncated: Any,
    extras: Mapping[str, Any] | None = None,
) -> Rows:
    """The rows of one episode: T + 1 observations (and extras), T of everything else.

    obs        x0   x1   x2   x3        row t holds x_t and what led to it;
    action     -    a0   a1   a2        row 0 has zeros
    reward     -    r1   r2   r3
    """
    rows = {path: np.asarray(x) for path, x in nested.flatten(obs, "obs").items()}
    rows |= {f"info/{name}": np.asarray(x) for name, x in (extras or {}).items()}
    ends = {"reward": reward, "terminated": terminated, "truncated": truncated}
    later = {**nested.flatten(action, "action"), **ends}
    for path, values in later.items():
        values = np.asarray(values)
        rows[path] = np.concatenate([np.zeros_like(values, shape=(1, *values.shape[1:])), values])
    return rows


def check_out(path: Path) -> None:
    """Refuse a place where something is: a dataset never takes the place of another thing."""
    if path.is_symlink() or (path.exists() and not (path.is_dir() and not any(path.iterdir()))):
        raise ConfigError(f"{path} exists already; choose a new folder, or remove it.")


def check_share(held_out: float) -> None:
    """Refuse a share of episodes that cannot be held out."""
    require(0 <= held_out < 1, "held_out", held_out, "a share of the episodes, from 0 to below 1")


@contextlib.contextmanager
def write_dataset(
    path: Path,
    tasks: Sequence[EnvSpec],
    policies: Sequence[str],
    *,
    source: str,
    held_out: float = 0.0,
    shard_bytes: int = SHARD_BYTES,
) -> Iterator[DatasetWriter]:
    """A writer whose dataset is published when the block is left; an error leaves nothing behind.

    `tasks` are those of the dataset, in order, each played by the policy in its place; `source`
    says where the rows come from. The share `held_out` of each task's episodes, spread evenly over
    them, is marked as never to be learned from.
    """
    check_out(path)
    check_share(held_out)
    for words in (source, *policies, *(spec.task for spec in tasks)):
        try:
            printable(words)
        except ValueError as error:
            raise DatasetError(f"{path} was not written: {error}.") from None
    meta: dict[str, Any] = {}
    with files.publish(path, meta) as folder:
        writer = DatasetWriter(folder, tasks, policies, source, held_out, shard_bytes)
        try:
            yield writer
            meta |= writer.finish()
        finally:
            writer.abandon()


class DatasetWriter:
    """Packs episodes into the shards of a folder; made by `write_dataset`."""

    def __init__(
        self,
        folder: Path,
        tasks: Sequence[EnvSpec],
        policies: Sequence[str],
        source: str,
        held_out: float,
        shard_bytes: int,
    ) -> None:
        self.folder, self.tasks, self.policies = folder, tuple(tasks), tuple(policies)
        self.source, self.held_out, self.shard_bytes = source, held_out, shard_bytes
        self.leaves = stored_leaves(self.tasks)
        self.episodes = 0
        """Written so far."""
        self._own_leaves = [{x.path: x for x in data_leaves(spec)} for spec in self.tasks]
        self._ranges = [action_ranges(spec) for spec in self.tasks]
        self._file_of = column_files(self.leaves)
        self._row_bytes = sum(leaf.nbytes for leaf in self.leaves)
        self._shards: list[dict[str, Any]] = []
        self._columns: dict[str, GrowingColumn] = {}  # of the open shard
        self._table: list[tuple[Any, ...]] = []  # its episodes
        self._returns: list[list[float]] = [[] for _ in self.tasks]
        self._held = [0 for _ in self.tasks]  # episodes that are not learned from
        self._lengths: list[list[int]] = [[] for _ in self.tasks]

    def append_episode(
        self,
        rows: Mapping[str, NDArray[Any]],
        task: int = 0,
        *,
        split: str | None = None,
        relevant: bool = False,
        success: float | None = None,
        start_frame: int = 0,
    ) -> None:
        """One episode of a task: every column of its rows, as `from_gym_steps` makes them.

        Without a `split` of its own it is learned from or held out as the dataset's share says.
        """
        split = self._split(len(self._returns[task])) if split is None else split
        require(split in SPLITS, "split", split, " or ".join(SPLITS))
        name = f"Episode {self.episodes} of {self.tasks[task].task}"
        checked = _checked(rows, self._own_leaves[task], self._ranges[task], name)
        length = len(checked["reward"])
        if self._columns and (self._rows + length) * self._row_bytes > self.shard_bytes:
            self._close_shard()
        if not self._columns:
            self._begin_shard()
        start = self._rows
        first = np.arange(length) == 0
        checked |= {
            "action_valid": ~first,
            "reward_valid": ~first,
            "is_first": first,
            "frame_id": np.arange(start_frame, start_frame + length),
            "task": np.full(length, task, np.int32),
        }
        for leaf in self.leaves:
            self._columns[leaf.path].append(_padded(checked[leaf.path], leaf))
        total = float(checked["reward"].sum(dtype=np.float64))
        verdict = np.nan if success is None else float(success)
        where = (start, length, start_frame)
        self._table.append(
            (self.episodes, task, *where, SPLITS.index(split), relevant, total, verdict)
        )
        self._returns[task].append(total)
        self._held[task] += split != "train"
        self._lengths[task].append(length - 1)
        self.episodes += 1

    def _split(self, number: int) -> str:
        """Of the episode of this number of its task, by whole episodes of the share before it."""
        held = [math.floor(count * self.held_out + 1e-9) for count in (number, number + 1)]
        return "held-out" if held[1] > held[0] else "train"

    def finish(self) -> dict[str, Any]:
        """Close the last shard and describe everything; returns what the manifest shall say."""
        self._close_shard()
        for spec, returns in zip(self.tasks, self._returns):
            if not returns:
                raise DatasetError(f"Nothing was written: {spec.task} has no episodes.")
        for spec, returns, held in zip(self.tasks, self._returns, self._held):
            if self.held_out and not held:
                log.warning(
                    "None of the %d episodes of %s is held out, though a share of %g was asked "
                    "for.",
                    len(returns),
                    spec.task,
                    self.held_out,
                )
        about = {
            "kind": KIND,
            "dataset_schema": SCHEMA,
            "rows": sum(shard["rows"] for shard in self._shards),
            "episodes": self.episodes,
        }
        columns = [
            {"name": x.path, "dtype": x.dtype.str, "shape": list(x.shape)} for x in self.leaves
        ]
        described = {
            **about,
            "convention": CONVENTION,
            "source": self.source,
            "columns": columns,
            "shards": self._shards,
            "tasks": [task_to_json(self._info(i)) for i in range(len(self.tasks))],
        }
        files.write_json(self.folder / META, described)
        return about

    def abandon(self) -> None:
        """Close what is still open, as after an error; the folder is about to be deleted."""
        for column in self._columns.values():
            column.abandon()

    @property
    def _rows(self) -> int:
        """Of the open shard."""
        return self._columns["reward"].rows if self._columns else 0

    def _begin_shard(self) -> None:
        files_in_all = (len(self._shards) + 1) * (len(self.leaves) + 1) + 1
        if files_in_all > files.MAX_FILES:
            raise DatasetError(
                f"The dataset would have more than {files.MAX_FILES} files: write larger shards "
                f"than {files.size_in_words(self.shard_bytes)}, or several datasets."
            )
        folder = self.folder / shard_name(len(self._shards))
        folder.mkdir()
        for leaf in self.leaves:
            file = folder / self._file_of[leaf.path]
            self._columns[leaf.path] = GrowingColumn(file, leaf.dtype, leaf.shape)

    def _close_shard(self) -> None:
        if not self._columns:
            return
        folder = self.folder / shard_name(len(self._shards))
        counts = {"rows": self._rows, "episodes": len(self._table)}
        table = GrowingColumn(folder / EPISODES, EPISODE, ())
        table.append(np.array(self._table, EPISODE))
        for column in (*self._columns.values(), table):
            column.close()
        self._shards.append({"name": folder.name, **counts})
        self._columns, self._table = {}, []

    def _info(self, task: int) -> TaskInfo:
        returns, lengths = np.array(self._returns[task]), np.array(self._lengths[task])
        return TaskInfo(
            spec=self.tasks[task],
            policy=self.policies[task],
            episodes=len(returns),
            rows=int(lengths.sum()) + len(lengths),
            returns=Statistics.of(returns),
            lengths=Statistics.of(lengths),
        )


def shard_name(number: int) -> str:
    """The folder of a shard."""
    return f"shard-{number:05d}"


def _checked(
    rows: Mapping[str, NDArray[Any]],
    leaves: Mapping[str, Leaf],
    ranges: Mapping[str, tuple[Any, Any]],
    name: str,
) -> Rows:
    """The columns in their stored types; an episode that breaks a rule is refused by its name."""
    if rows.keys() != leaves.keys():
        raise DatasetError(
            f"{name} has the columns {', '.join(sorted(rows))}, but must have "
            f"{', '.join(sorted(leaves))}."
        )
    lengths = {path: len(values) if np.ndim(values) else 0 for path, values in rows.items()}
    if len(set(lengths.values())) != 1:
        told = ", ".join(f"{path} {length}" for path, length in lengths.items())
        raise DatasetError(f"{name} has columns of unequal length: {told} rows.")
    length = lengths["reward"]
    if length < 2:
        raise DatasetError(f"{name} has {length} rows, but needs a first one and a decision.")
    found = {path: _column(rows[path], leaf, name) for path, leaf in leaves.items()}
    for path, values in found.items():
        if path.split("/")[0] in ("action", "reward") and np.any(values[0]):
            raise DatasetError(
                f"{name} has {path} {values[0]} in its first row, which no action led to; make "
                "its rows with from_gym_steps."
            )
        if path in ("terminated", "truncated") and np.any(values[:-1]):
            raise DatasetError(
                f"{name} is {path} in row {int(np.argmax(values))} of {length}: an episode ends "
                "where it ends; split it there."
            )
        if path in ranges:
            beyond = outside(values[1:], ranges[path])
            if np.any(beyond):
                raise DatasetError(
                    f"{name} has {path} {values[1:][beyond].flat[0]} in row "
                    f"{int(np.argwhere(beyond)[0][0]) + 1}, which lies outside its space."
                )
    if MASK in found:
        row = row_without_choice(found[MASK], found["terminated"])
        if row is not None:
            raise DatasetError(f"{name} has {MASK} in row {row} that allows no action at all.")
    return found


def outside(values: NDArray[Any], bounds: tuple[Any, Any]) -> NDArray[np.bool_]:
    """Which numbers of actions lie outside their space."""
    low, high = bounds
    beyond: NDArray[np.bool_] = (values < low) | (values > high)
    return beyond


def row_without_choice(mask: NDArray[Any], terminated: NDArray[Any]) -> int | None:
    """The first row in which nothing may be done though the episode goes on; None if none is."""
    stuck = ~mask.reshape(len(mask), -1).any(1) & ~terminated.astype(np.bool_)
    return int(np.argmax(stuck)) if stuck.any() else None


def _column(values: NDArray[Any], leaf: Leaf, name: str) -> NDArray[Any]:
    values = np.asarray(values)
    if values.shape[1:] != leaf.shape:
        raise DatasetError(
            f"{name} has {leaf.path} of shape {values.shape[1:]}, but its task says {leaf.shape}."
        )
    if not np.can_cast(values.dtype, leaf.dtype, "same_kind"):
        raise DatasetError(
            f"{name} has {leaf.path} of type {values.dtype}, which cannot be stored as "
            f"{leaf.dtype}."
        )
    with np.errstate(over="ignore"):  # what does not fit is refused below, in words
        stored = values.astype(leaf.dtype)
    if leaf.dtype.kind == "f" and not np.isfinite(stored).all():
        row = int(np.argwhere(~np.isfinite(stored))[0][0])
        raise DatasetError(f"{name} has {leaf.path} that is not finite as float32 in row {row}.")
    return stored


def _padded(values: NDArray[Any], leaf: Leaf) -> NDArray[Any]:
    """Zeros to the right of a vector that is narrower than its column."""
    if values.shape[1:] == leaf.shape:
        return values
    wide = np.zeros((len(values), *leaf.shape), leaf.dtype)
    wide[:, : values.shape[1]] = values
    return wide


def action_ranges(spec: EnvSpec) -> dict[str, tuple[Any, Any]]:
    """What the numbers of a task's actions lie between, by column."""
    ranges = Structure.of(spec.action_space).ranges
    return {join("action", path): bounds for path, bounds in ranges.items()}
