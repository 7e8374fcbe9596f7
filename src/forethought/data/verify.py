"""Verifying a dataset: every byte against its checksum, then every row against the rules.

A checksum says only that nothing has changed since somebody wrote it; whoever wrote it may have
shifted a column. So the columns are compared with each other as well.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forethought import files
from forethought.data.dataset import Dataset, Shard, read_dataset_manifest
from forethought.data.layout import DatasetError, Statistics, data_leaves
from forethought.data.writer import MASK, action_ranges, outside, row_without_choice

CHUNK_ROWS = 2**18
"""Read at a time: enough to be quick, little enough for any memory."""
RETURN_TOLERANCE = 1e-9
"""Relative to the sum of the rewards' sizes: another order of summation."""


def verify(path: str | Path) -> Dataset:
    """The dataset, if nothing at all is wrong with it; DatasetError or FileError names what is."""
    path = Path(path)
    read_dataset_manifest(path)
    files.verify(path)
    dataset = Dataset.open(path)
    for shard in dataset.shards:
        _check_shard(dataset, shard)
    _check_statistics(dataset)
    return dataset


def _check_shard(dataset: Dataset, shard: Shard) -> None:
    folder = dataset.path / shard.name
    table, columns = shard.episodes, shard.columns
    first, last = table["row_start"], table["row_start"] + table["length"] - 1
    begins, ends = np.zeros(shard.rows, np.bool_), np.zeros(shard.rows, np.bool_)
    begins[first], ends[last] = True, True

    def agree(name: str, wanted: NDArray[Any], rule: str) -> None:
        wrong = columns[name] != wanted
        if wrong.any():
            row = int(np.argmax(wrong))
            raise DatasetError(f"{folder}: {name} is {columns[name][row]} in row {row}, {rule}.")

    lengths = table["length"]
    age = np.arange(shard.rows) - np.repeat(first, lengths)
    agree("is_first", begins, "but must be true exactly where an episode begins")
    agree("action_valid", ~begins, "but must be false exactly where an episode begins")
    agree("reward_valid", ~begins, "but must be false exactly where an episode begins")
    agree("task", np.repeat(table["task"], lengths), "but its episode is of another task")
    frames = age + np.repeat(table["start_frame"], lengths)
    agree("frame_id", frames, "but the frames of an episode must count up from its start_frame")
    for name in ("terminated", "truncated"):
        agree(name, columns[name] & ends, "but an episode ends in its last row only")
    for name, values in columns.items():
        if name.split("/")[0] in ("action", "reward") and np.any(values[first]):
            raise DatasetError(f"{folder}: {name} is not zero in the first row of an episode.")
        _check_finite(folder, name, values)
    rewards = columns["reward"].astype(np.float64)
    returns = np.add.reduceat(rewards, first)
    slack = RETURN_TOLERANCE * (1 + np.add.reduceat(np.abs(rewards), first))
    wrong = ~(np.abs(returns - table["return"]) <= slack)
    if wrong.any():
        raise DatasetError(
            f"{folder}: the rewards of episode {int(np.argmax(wrong))} sum up to "
            f"{returns[wrong][0]:g}, but its return is {table['return'][wrong][0]:g}."
        )
    _check_padding(dataset, shard)
    _check_actions(dataset, shard)


def _check_finite(folder: Path, name: str, values: NDArray[Any]) -> None:
    if values.dtype.kind != "f":
        return
    for start in range(0, len(values), CHUNK_ROWS):
        finite = np.isfinite(values[start : start + CHUNK_ROWS])
        if not finite.all():
            row = start + int(np.argwhere(~finite)[0][0])
            raise DatasetError(f"{folder}: {name} is not finite in row {row}.")


def _check_padding(dataset: Dataset, shard: Shard) -> None:
    """What a narrower task does not have must be zeros: readers cut or keep it as they need."""
    for number, task in enumerate(dataset.tasks):
        for leaf in data_leaves(task.spec):
            values = shard.columns[leaf.path]
            if values.shape[1:] == leaf.shape:
                continue
            for start in range(0, shard.rows, CHUNK_ROWS):
                part = slice(start, start + CHUNK_ROWS)
                mine = shard.columns["task"][part] == number
                if np.any(values[part][mine][:, leaf.shape[0] :]):
                    raise DatasetError(
                        f"{dataset.path / shard.name}: {leaf.path} of {task.name} is wider than "
                        f"its {leaf.shape[0]} elements."
                    )


def _check_actions(dataset: Dataset, shard: Shard) -> None:
    """Actions inside their spaces, and masks that leave something to do."""
    folder, columns = dataset.path / shard.name, shard.columns
    ranges = [action_ranges(task.spec) for task in dataset.tasks]
    for start in range(0, shard.rows, CHUNK_ROWS):
        part = slice(start, start + CHUNK_ROWS)
        for number, task in enumerate(dataset.tasks):
            mine = (columns["task"][part] == number) & ~columns["is_first"][part]
            for path, bounds in ranges[number].items():
                values, width = columns[path][part], np.shape(bounds[0])[:1]
                own = values[:, : width[0]] if width else values  # the rest is padding
                wrong = outside(own, bounds).reshape(len(own), -1).any(1) & mine
                if wrong.any():
                    row = start + int(np.argmax(wrong))
                    raise DatasetError(
                        f"{folder}: {path} is {columns[path][row]} in row {row}, which lies "
                        f"outside the actions of {task.name}."
                    )
        if MASK in columns:
            stuck = row_without_choice(columns[MASK][part], columns["terminated"][part])
            if stuck is not None:
                row = start + stuck
                raise DatasetError(f"{folder}: {MASK} allows no action at all in row {row}.")


def _check_statistics(dataset: Dataset) -> None:
    table = dataset.episodes
    if not np.array_equal(table["episode_id"], np.arange(len(table))):
        raise DatasetError(f"{dataset.path}: its episodes are not numbered one after the other.")
    for number, task in enumerate(dataset.tasks):
        mine = table[table["task"] == number]
        told = task.episodes, task.rows
        if told != (len(mine), int(mine["length"].sum())) or not len(mine):
            raise DatasetError(
                f"{dataset.path}: {task.name} has {len(mine)} episodes of "
                f"{int(mine['length'].sum())} rows, but is said to have {told[0]} of {told[1]}."
            )
        for what, said, values in (
            ("returns", task.returns, mine["return"]),
            ("lengths", task.lengths, mine["length"] - 1),
        ):
            found = Statistics.of(values)
            if not np.allclose(list(vars(found).values()), list(vars(said).values())):
                raise DatasetError(
                    f"{dataset.path}: the {what} of {task.name} are {found}, but are said to be "
                    f"{said}."
                )
