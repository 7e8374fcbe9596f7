"""The columns that an agent needs, from shards that may hold them in another width."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from gymnasium.spaces import Box
from numpy.typing import NDArray

from forethought.config import ConfigError
from forethought.data.dataset import Dataset, Shard
from forethought.data.layout import data_leaves
from forethought.data.space_json import space_to_json
from forethought.replay.rows import RowSpec
from forethought.spaces.spec import EnvSpec
from forethought.spaces.structure import Leaf

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Part:
    """A shard as an agent sees it."""

    name: str
    columns: dict[str, NDArray[Any]]
    """By the agent's name of the column."""


def stored_name(path: str, spec: RowSpec) -> str:
    """Where a column of the agent's rows lies in a dataset."""
    return f"info/{path}" if path in spec.extras else path


def is_task(leaf: Leaf, spec: RowSpec) -> bool:
    """Whether a column is filled with the place of the slice's task among the agent's."""
    return leaf.path == "task" and "task" in spec.extras


def check_columns(
    datasets: Sequence[Dataset], spec: EnvSpec, rows: RowSpec, tasks: Sequence[str]
) -> None:
    """Refuse data whose tasks do not fit the agent's rows, before any of them is read.

    A task that the agent's spec describes alone must be in the data exactly as it is there: what
    the data lacks would otherwise be learned from as zeros, and met as numbers in evaluations.
    """
    if not datasets:
        raise ConfigError("No dataset was given to learn from.")
    specs = {own.task: own for own in spec.tasks or (spec,)}
    alone = {name: {x.path: x for x in data_leaves(own)} for name, own in specs.items()}
    for dataset in datasets:
        for task in dataset.tasks:
            if task.name not in tasks:
                continue
            _check_choices(dataset, task.spec, specs.get(task.name))
            there = {leaf.path: leaf for leaf in data_leaves(task.spec)}
            for leaf in rows.leaves:
                if is_task(leaf, rows):
                    continue
                name = stored_name(leaf.path, rows)
                found, own = there.get(name), alone.get(task.name, {}).get(name)
                fits = found is not None and (found == own if own else _fits(found, leaf))
                if not fits:
                    has = "absent" if found is None else f"{found.dtype} {found.shape}"
                    wanted = own or leaf
                    raise ConfigError(
                        f"{dataset.path} does not fit the agent: {leaf.path} of {task.name} is "
                        f"{has}, but {'the task' if own else 'the agent'}'s is {wanted.dtype} "
                        f"{wanted.shape}."
                    )


def _check_choices(dataset: Dataset, found: EnvSpec, own: EnvSpec | None) -> None:
    """Refuse discrete actions of another numbering: the same number would be another action."""
    if own is None or isinstance(own.action_space, Box):
        return
    # As they are written down: a tuple is recorded as the dict that agents see.
    if space_to_json(found.action_space) == space_to_json(own.action_space):
        return
    raise ConfigError(
        f"{dataset.path} does not fit the agent: the actions of {found.task} are "
        f"{found.action_space} there, but {own.action_space} here, where a number may be another "
        "action; give the environment the options that it was recorded with, or record other data."
    )


def check_repeats(datasets: Sequence[Dataset], spec: EnvSpec) -> None:
    """Refuse data in which a decision lasts longer or shorter than it does for the agent."""
    here = {own.task: own.action_repeat for own in spec.tasks or (spec,)}
    for dataset in datasets:
        for task in dataset.tasks:
            repeat = task.spec.action_repeat
            if here.get(task.name, repeat) != repeat:
                raise ConfigError(
                    f"{dataset.path} holds each action of {task.name} for {repeat} frames, but "
                    f"this run for {here[task.name]}: set --env.action_repeat {repeat}, or record "
                    "other data."
                )


def _fits(found: Leaf, wanted: Leaf) -> bool:
    if found.dtype != wanted.dtype:
        return False
    if found.shape == wanted.shape:
        return True
    # Padding: only of observations and actions, and only of vectors.
    is_data = wanted.path.split("/")[0] in ("obs", "action")
    vectors = len(found.shape) == len(wanted.shape) == 1
    return is_data and vectors and found.shape < wanted.shape


def make_parts(shards: Sequence[tuple[Dataset, Shard]], spec: RowSpec, *, copy: bool) -> list[Part]:
    """The mapped columns of each shard, or copies of them in main memory."""
    parts = []
    for dataset, shard in shards:
        columns = {
            leaf.path: shard.columns[stored_name(leaf.path, spec)]
            for leaf in spec.leaves
            if not is_task(leaf, spec)
        }
        if copy:
            columns = {path: np.array(values) for path, values in columns.items()}
        parts.append(Part(f"{dataset.path.name}/{shard.name}", columns))
    return parts


def groups_of(part: Ints) -> list[tuple[int, int, int]]:
    """(shard, begin, end) for each stretch of equal numbers in a sorted array."""
    edges = [0, *(np.flatnonzero(np.diff(part)) + 1).tolist(), len(part)]
    return [(int(part[begin]), begin, end) for begin, end in pairwise(edges)]


def gather(
    parts: Sequence[Part], leaf: Leaf, groups: Sequence[tuple[int, int, int]], rows: Ints
) -> NDArray[Any]:
    """Rows [L, B] of one column; `groups` say which slices come from which shard.

    Vectors are padded with zeros to the agent's width; what a wider file has beyond it is zeros.
    """
    if len(groups) == 1:
        values = parts[groups[0][0]].columns[leaf.path].take(rows, axis=0)
        if values.shape[2:] == leaf.shape:
            return values
    gathered = np.zeros((*rows.shape, *leaf.shape), leaf.dtype)
    for number, begin, end in groups:
        values = parts[number].columns[leaf.path].take(rows[:, begin:end], axis=0)
        if values.shape[2:] != leaf.shape:
            width = min(values.shape[2], leaf.shape[0])
            gathered[:, begin:end, :width] = values[..., :width]
        else:
            gathered[:, begin:end] = values
    return gathered
