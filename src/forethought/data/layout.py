"""What a dataset on disk looks like: packed episodes, one folder, one row index for all columns.

    DATASET/
      manifest.json              sha256 and size of every file; written last, checks itself
      meta.json                  columns, shards, and per task its spaces and the recorded returns
      shard-00000/obs.npy        [rows, ...], memory-mapped; a dict has obs.KEY.npy for each key
      shard-00000/action.npy     the action that led to the row; zeros in an episode's first row
      shard-00000/reward.npy     received on arriving at the row
      shard-00000/...            action_valid, reward_valid, terminated, truncated, is_first,
                                 frame_id, task, and info.NAME for each declared extra column
      shard-00000/episodes.npy   the shard's episodes: where each begins, its length and return

Row t of every column belongs together, so a window is one slice of all of them and there is no
second index to go wrong. An episode lies in one shard, its rows one after the other, and episodes
fill a shard without gaps.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forethought.config import ConfigError
from forethought.data.space_json import space_from_json, space_to_json
from forethought.files import FileError
from forethought.replay.rows import RowSpec
from forethought.spaces.spec import Column, EnvSpec
from forethought.spaces.structure import Leaf

SCHEMA = 1
"""Version of this layout; a reader refuses a newer one."""
KIND = "forethought-packed-episodes"
META = "meta.json"
EPISODES = "episodes.npy"
CONVENTION = (
    "row t holds the observation x_t, the action that led to it, and the reward, terminated and "
    "truncated received on arriving; row 0 of an episode has neither action nor reward"
)
SPLITS = ("train", "held-out")
MAX_WORDS = 1000
"""Characters of a name or remark."""
EPISODE = np.dtype(
    [
        ("episode_id", "<i8"),  # counts the episodes of the dataset
        ("task", "<i4"),  # which of the dataset's tasks
        ("row_start", "<i8"),  # its first row in the shard
        ("length", "<i8"),  # rows: decisions + 1
        ("start_frame", "<i8"),  # frame_id of its first row
        ("split", "i1"),  # place in SPLITS
        ("relevant", "?"),  # whether it achieves its task, where somebody said so
        ("return", "<f8"),  # undiscounted sum of the rewards as they are stored
        ("success", "<f8"),  # the environment's own verdict; nan where it has none
    ]
)
OWN = (
    Leaf("action_valid", (), np.dtype(np.bool_)),
    Leaf("reward_valid", (), np.dtype(np.bool_)),
    Leaf("is_first", (), np.dtype(np.bool_)),
    Leaf("frame_id", (), np.dtype("<i8")),
    Leaf("task", (), np.dtype("<i4")),
)
"""Columns that every dataset has, besides those of its tasks' rows; the writer fills them."""


class DatasetError(FileError):
    """A dataset, or a file to be imported, that does not hold what it must."""


class NoDataset(DatasetError, ConfigError):
    """What was named as a dataset is not there: bad usage, not a damaged file."""


@dataclass(frozen=True)
class Statistics:
    """Of one number per episode."""

    mean: float
    std: float
    """Population standard deviation."""
    min: float
    median: float
    max: float

    @classmethod
    def of(cls, values: NDArray[Any]) -> Statistics:
        """Of at least one value."""
        found = (values.mean(), values.std(), values.min(), np.median(values), values.max())
        return cls(*map(float, found))


@dataclass(frozen=True)
class TaskInfo:
    """One task of a dataset, as it was recorded."""

    spec: EnvSpec
    """What an agent saw of it: spaces without any padding, limits, declared columns."""
    policy: str
    """Who played: random, 'tdmpc2 at step 20000 (latest)', or what an importer found."""
    episodes: int
    rows: int
    returns: Statistics
    """Undiscounted, raw."""
    lengths: Statistics
    """agent_steps: an episode has one row more."""

    @property
    def name(self) -> str:
        """The task, such as dmc:walker-walk."""
        return self.spec.task


def stored_leaves(specs: Sequence[EnvSpec]) -> tuple[Leaf, ...]:
    """The columns that hold the rows of all these tasks.

    Vectors of unequal width get the widest one's, and are padded with zeros; whatever else differs
    between tasks cannot lie in one column and is refused.
    """
    rows = [data_leaves(spec) for spec in specs]
    first = rows[0]
    for spec, leaves in zip(specs, rows):
        if [x.path for x in leaves] != [x.path for x in first]:
            raise ConfigError(
                f"{spec.task} has the columns {_listed(leaves)}, but {specs[0].task} has "
                f"{_listed(first)}: tasks of one dataset must have the same; make two datasets."
            )
    return (*(_widest(specs, [x[i] for x in rows]) for i in range(len(first))), *OWN)


def data_leaves(spec: EnvSpec) -> tuple[Leaf, ...]:
    """The columns of a task's own rows, declared extras as info/NAME."""
    rows = RowSpec.of(spec)
    return tuple(
        Leaf(f"info/{x.path}" if x.path in rows.extras else x.path, x.shape, x.dtype)
        for x in rows.leaves
    )


def _widest(specs: Sequence[EnvSpec], leaves: Sequence[Leaf]) -> Leaf:
    first = leaves[0]
    for spec, leaf in zip(specs, leaves):
        vectors = len(leaf.shape) == len(first.shape) == 1
        if leaf.dtype != first.dtype or not (vectors or leaf.shape == first.shape):
            raise ConfigError(
                f"The column {leaf.path} of {spec.task} is {leaf.dtype} {leaf.shape}, but that of "
                f"{specs[0].task} is {first.dtype} {first.shape}: only vectors of one type can be "
                "padded to one width; make two datasets."
            )
    return Leaf(first.path, max(leaf.shape for leaf in leaves), first.dtype)


def column_files(leaves: Iterable[Leaf]) -> dict[str, str]:
    """The file of each column, by its name; plain, whatever the keys of a space look like."""
    found: dict[str, str] = {}
    for leaf in leaves:
        plain = re.sub(r"[^A-Za-z0-9_.-]", "_", leaf.path.replace("/", "."))
        name, number = f"{plain}.npy", 2
        while name in found.values() or name == EPISODES:
            name, number = f"{plain}-{number}.npy", number + 1
        found[leaf.path] = name
    return found


def printable(text: object) -> str:
    """A name or remark as it may be shown: one line, nothing that a terminal would obey."""
    words = str(text)
    if len(words) > MAX_WORDS or not words.isprintable():
        raise ValueError(f"it has a name or remark that cannot be shown: {ascii(words)[:60]}")
    return words


def spec_to_json(spec: EnvSpec) -> dict[str, Any]:
    """What an agent sees of a task, as JSON."""
    return {
        "task": spec.task,
        "observation_space": space_to_json(spec.observation_space),
        "action_space": space_to_json(spec.action_space),
        "max_episode_steps": spec.max_episode_steps,
        "action_repeat": spec.action_repeat,
        "terminates": spec.terminates,
        "columns": [
            {"name": c.name, "shape": list(c.shape), "dtype": str(c.dtype), "source": c.source}
            for c in spec.columns
        ],
    }


def spec_from_json(data: Any) -> EnvSpec:
    """The inverse of `spec_to_json`."""
    limit = data["max_episode_steps"]
    columns = [
        Column(str(c["name"]), tuple(map(int, c["shape"])), np.dtype(c["dtype"]), str(c["source"]))
        for c in data["columns"]
    ]
    return EnvSpec(
        task=printable(data["task"]),
        observation_space=space_from_json(data["observation_space"]),
        action_space=space_from_json(data["action_space"]),
        max_episode_steps=None if limit is None else int(limit),
        action_repeat=int(data["action_repeat"]),
        terminates=bool(data["terminates"]),
        columns=tuple(columns),
    )


def task_to_json(task: TaskInfo) -> dict[str, Any]:
    """An entry of meta.json."""
    return {
        "spec": spec_to_json(task.spec),
        "policy": task.policy,
        "episodes": task.episodes,
        "rows": task.rows,
        "returns": asdict(task.returns),
        "lengths": asdict(task.lengths),
    }


def task_from_json(data: Any) -> TaskInfo:
    """The inverse of `task_to_json`."""
    return TaskInfo(
        spec=spec_from_json(data["spec"]),
        policy=printable(data["policy"]),
        episodes=int(data["episodes"]),
        rows=int(data["rows"]),
        returns=Statistics(**{key: float(x) for key, x in data["returns"].items()}),
        lengths=Statistics(**{key: float(x) for key, x in data["lengths"].items()}),
    )


def _listed(leaves: Iterable[Leaf]) -> str:
    return ", ".join(leaf.path for leaf in leaves)
