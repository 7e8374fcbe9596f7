"""Reading a dataset: opened without reading its rows, which are mapped into memory.

Opening checks the manifest, the description, the tables of episodes, and place, size and header of
every column. Only `verify` reads all rows to compare their checksums: that takes as long as reading
the files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forethought import files
from forethought.data.layout import (
    EPISODE,
    EPISODES,
    KIND,
    META,
    SCHEMA,
    SPLITS,
    DatasetError,
    NoDataset,
    TaskInfo,
    column_files,
    printable,
    stored_leaves,
    task_from_json,
)
from forethought.data.npy_files import map_column
from forethought.data.writer import shard_name
from forethought.spaces.structure import Leaf

MAX_ROWS = 2**48
"""Of a shard; a greater number is nonsense and would overflow."""


@dataclass(frozen=True)
class Shard:
    """One folder of columns."""

    name: str
    rows: int
    columns: dict[str, NDArray[Any]]
    """By name, [rows, ...], read-only and mapped."""
    episodes: NDArray[Any]
    """A structured array of type layout.EPISODE, in the order of their rows."""


@dataclass(frozen=True)
class Dataset:
    """Packed episodes of one or several tasks."""

    path: Path
    leaves: tuple[Leaf, ...]
    """The stored columns."""
    tasks: tuple[TaskInfo, ...]
    """The place in this tuple is what the column `task` holds."""
    shards: tuple[Shard, ...]
    source: str
    """Where the rows come from."""
    fingerprint: str
    """sha256 of the manifest, which holds those of all files: the identity of the dataset."""
    size_bytes: int
    """Of all files."""

    @classmethod
    def open(cls, path: str | Path) -> Dataset:
        """The dataset in a folder; a sentence if it is none, or damaged where one can see it."""
        path = Path(path)
        manifest = read_dataset_manifest(path)
        files.require_files(path, manifest, [META])
        files.check_file(path, manifest, META)
        described = files.read_json(path / META)
        with files.content_of(path / META):
            _check_schema(path, described)
            tasks = tuple(task_from_json(task) for task in described["tasks"])
            leaves = tuple(_leaf(column) for column in described["columns"])
            if not tasks or leaves != stored_leaves([task.spec for task in tasks]):
                raise ValueError("its columns are not those of its tasks")
            shards = [_sizes(n, shard) for n, shard in enumerate(described["shards"])]
            source = printable(described["source"])
            if not shards:
                raise ValueError("it names no shards")
        return cls(
            path=path,
            leaves=leaves,
            tasks=tasks,
            shards=tuple(
                _open_shard(path, manifest, leaves, len(tasks), *shard) for shard in shards
            ),
            source=source,
            fingerprint=manifest.sha256,
            size_bytes=sum(entry["bytes"] for entry in manifest.files.values()),
        )

    @property
    def rows(self) -> int:
        """Over all shards; an episode of T decisions has T + 1."""
        return sum(shard.rows for shard in self.shards)

    @property
    def episodes(self) -> NDArray[Any]:
        """The tables of all shards, one after the other."""
        return np.concatenate([shard.episodes for shard in self.shards])


def read_dataset_manifest(path: Path) -> files.Manifest:
    """The manifest of a folder that is a dataset; anything else is refused by what it is."""
    if not path.exists():
        raise NoDataset(f"There is no dataset {path}.")
    if not (path / files.MANIFEST).exists():
        raise DatasetError(
            f"{path} is not a dataset: it must be a folder with a {files.MANIFEST}, as "
            "'forethought data record' and 'forethought data import' make it."
        )
    manifest = files.read_manifest(path)
    if manifest.meta.get("kind") != KIND:
        raise DatasetError(f"{path} was published by something else: it is not a dataset.")
    _check_schema(path, manifest.meta)
    return manifest


def _check_schema(path: Path, described: Any) -> None:
    schema = described["dataset_schema"]
    if not isinstance(schema, int) or schema > SCHEMA:
        raise DatasetError(
            f"{path} is a dataset of schema {schema}, but this version reads up to {SCHEMA}: "
            "update forethought to read it."
        )


def _leaf(column: Any) -> Leaf:
    dtype = np.dtype(str(column["dtype"]))
    if dtype.kind not in "biuf":
        raise ValueError(f"a column of {dtype}")
    return Leaf(str(column["name"]), tuple(int(size) for size in column["shape"]), dtype)


def _sizes(number: int, shard: Any) -> tuple[str, int, int]:
    name, rows, episodes = shard["name"], shard["rows"], shard["episodes"]
    counts_are_sound = all(type(n) is int and 0 < n < MAX_ROWS for n in (rows, episodes))
    if name != shard_name(number) or not counts_are_sound:
        raise ValueError(f"shard {number} is {re.sub(r'[^ -~]', '?', str(shard))[:100]}")
    return name, rows, episodes


def _open_shard(
    path: Path,
    manifest: files.Manifest,
    leaves: tuple[Leaf, ...],
    tasks: int,
    name: str,
    rows: int,
    episodes: int,
) -> Shard:
    file_of = {leaf: f"{name}/{file}" for leaf, file in zip(leaves, column_files(leaves).values())}
    table_file = f"{name}/{EPISODES}"
    files.require_files(path, manifest, [*file_of.values(), table_file])
    for file in file_of.values():
        files.check_file(path, manifest, file, content=False)
    files.check_file(path, manifest, table_file)
    table = map_column(path / table_file, EPISODE, (episodes,))
    check_table(path / table_file, table, rows, tasks)
    columns = {
        leaf.path: map_column(path / file, leaf.dtype, (rows, *leaf.shape))
        for leaf, file in file_of.items()
    }
    return Shard(name, rows, columns, table)


def check_table(file: Path, table: NDArray[Any], rows: int, tasks: int) -> None:
    """Episodes of the dataset's `tasks` that fill their shard from the first row to the last, none
    without a decision."""
    ends = table["row_start"] + table["length"]
    starts = np.concatenate([[0], ends[:-1]])
    sound = (
        np.all(table["length"] >= 2)
        and np.array_equal(table["row_start"], starts)
        and int(ends[-1]) == rows
        and np.all((table["split"] >= 0) & (table["split"] < len(SPLITS)))
    )
    if not sound:
        raise DatasetError(f"{file} lists episodes that do not fill the {rows} rows of its shard.")
    if np.any((table["task"] < 0) | (table["task"] >= tasks)):
        raise DatasetError(f"{file} lists episodes of a task that the dataset does not have.")
