"""Importing the official TD-MPC2 datasets: *.pt chunks of mt30 and mt80.

A chunk is a TensorDict [episodes, rows] that torch.save wrote: obs and action padded with zeros to
the widest task, reward, task (a number), sometimes terminated; row 0 of an episode has NaN for what
does not exist. It is read by torch's weights-only unpickler, which calls nothing that is not on its
list. To that list come stand-ins for the few names that TensorDicts of all versions are saved
under: they keep what they are given and do nothing else, so tensordict need not be installed, and
whatever else a file names is refused without being imported.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forethought.config import ConfigError, nearest
from forethought.data.archives import check_torch_archive, is_plain_tensor
from forethought.data.dataset import Dataset
from forethought.data.layout import DatasetError, stored_leaves
from forethought.data.tdmpc2_tasks import TASK_SETS, without_environment
from forethought.data.writer import SHARD_BYTES, check_out, write_dataset
from forethought.spaces.spec import EnvSpec

log = logging.getLogger("forethought")
NEEDED = ("obs", "action", "reward", "task")
NUMBERS = (
    *(torch.float64, torch.float32, torch.float16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
"""Types of the columns: those that numpy has too."""
ACTION_REPEAT = 2
"""Frames per decision in all of the official tasks."""
SLACK = 1e-6
"""How far beyond 1 an action may lie: rounding."""
LARGEST_TASK = 100_000
MOST_SHARDS = 60
"""mt80 takes more than a hundred gigabytes, and a dataset may have a thousand files."""


class _SavedTensorDict:
    """Stands for tensordict's TensorDict: holds the saved state."""

    state: dict[str, Any]

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.state = state


class _PlainDict:
    """Stands for tensordict's dict of strings; the unpickler fills only a real dict."""

    def __new__(cls) -> Any:
        return {}


def _make(kind: type, state: dict[str, Any]) -> _SavedTensorDict:
    """Stands for the function that newer versions rebuild a TensorDict with."""
    made = _SavedTensorDict()
    made.state = state
    return made


STAND_INS: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    (_SavedTensorDict, "tensordict.tensordict.TensorDict"),  # 0.1 and 0.2
    (_SavedTensorDict, "tensordict._td.TensorDict"),
    (_PlainDict, "tensordict.utils._StringOnlyDict"),
    (_make, "tensordict._reductions._make_td"),
]


@contextlib.contextmanager
def _only_stand_ins() -> Iterator[None]:
    """For this block the user's own list of safe names is replaced by ours."""
    before = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(STAND_INS)
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def load_chunk(path: Path) -> dict[str, NDArray[Any]]:
    """The columns of a chunk, mapped from the file; nothing in it is ever called."""
    check_torch_archive(path)
    try:
        with _only_stand_ins():
            saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        what = f" ({named[1][:100]})" if named else ""
        raise DatasetError(
            f"{path} holds more than tensors{what}: refused, and nothing in it was run."
        ) from error
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, EOFError) as error:
        reason = (str(error).splitlines() or [""])[0].rstrip(".")[:200]
        raise DatasetError(f"{path} is damaged: torch cannot read it ({reason}).") from error
    table = saved.state.get("_tensordict") if isinstance(saved, _SavedTensorDict) else saved
    if not isinstance(table, dict):
        raise DatasetError(f"{path} holds a {type(table).__name__}, but must hold a TensorDict.")
    return _checked_columns(path, table)


def _checked_columns(path: Path, table: dict[Any, Any]) -> dict[str, NDArray[Any]]:
    missing = [name for name in NEEDED if not isinstance(table.get(name), Tensor)]
    if missing:
        there = ", ".join(str(key)[:40] for key in list(table)[:10])
        raise DatasetError(
            f"{path} has no tensor {missing[0]}, only {there}: it is not a chunk of mt30 or mt80."
        )
    names = [*NEEDED, *(["terminated"] if isinstance(table.get("terminated"), Tensor) else [])]
    for name in names:
        if not is_plain_tensor(table[name]) or table[name].dtype not in NUMBERS:
            raise DatasetError(
                f"{path} has {name} of type {table[name].dtype} ({table[name].layout}, strides "
                f"{_strides(table[name])}), which is no plain tensor of numbers that lie one after "
                "the other."
            )
    columns = {name: table[name].detach().numpy() for name in names}
    shape = columns["reward"].shape
    for name, values in columns.items():
        wide = name in ("obs", "action")
        if values.shape[:2] != shape or values.ndim != 2 + wide or len(shape) != 2:
            raise DatasetError(
                f"{path} has unequal columns: {name} is {values.shape}, beside rewards {shape}."
            )
    if shape[0] < 1 or shape[1] < 2:
        raise DatasetError(f"{path} holds {shape[0]} episodes of {shape[1]} rows.")
    task = columns["task"]
    if task.dtype.kind not in "iu" or task.min() < 0 or task.max() > LARGEST_TASK:
        raise DatasetError(f"{path} has a column task that is not made of task numbers.")
    if np.any(task != task[:, :1]):
        raise DatasetError(f"{path} has an episode in which the task changes.")
    return columns


def import_tdmpc2(
    source: Path,
    out: Path,
    *,
    tasks: Sequence[str] | None = None,
    only: Sequence[str] | None = None,
    spec_of: Callable[[str], EnvSpec] | None = None,
    held_out: float = 0.0,
    shard_bytes: int = SHARD_BYTES,
) -> Dataset:
    """Packs a chunk, or all chunks in a folder, into a dataset of several tasks.

    `tasks` names the tasks by their number; None takes mt30's names for episodes of 501 rows and
    mt80's for 101. `only` leaves all other tasks out. How wide a task's own observations and
    actions are, the files do not say: `spec_of` is asked, and where it is not given or refuses the
    name, it is taken to be as much of them as is ever not zero.
    """
    check_out(out)
    paths = sorted(source.glob("*.pt")) if source.is_dir() else [source]
    if not paths:
        raise DatasetError(f"{source} holds no *.pt files.")
    widths: dict[int, tuple[int, int]] = {}
    stored: set[tuple[int, int]] = set()
    lengths: set[int] = set()
    episodes, terminates = 0, False
    for path in paths:  # once over everything, so that nothing is written of files with a fault
        columns = load_chunk(path)
        lengths.add(columns["reward"].shape[1])
        stored.add((columns["obs"].shape[2], columns["action"].shape[2]))
        episodes += len(columns["reward"])
        terminates = terminates or "terminated" in columns
        _measure(path, columns, widths)
    if len(lengths) != 1:
        told = ", ".join(map(str, sorted(lengths)))
        raise DatasetError(f"The chunks in {source} have episodes of {told} rows: give one set.")
    rows = lengths.pop()
    names = _names(tasks, rows, max(widths))
    wanted = [number for number in sorted(widths) if only is None or names[number] in only]
    for name in only or ():
        if name not in [names[number] for number in widths]:
            here = [names[number] for number in sorted(widths)]
            raise ConfigError(f"There are no episodes of {name} in {source}.{nearest(name, here)}")
    place = {number: i for i, number in enumerate(wanted)}
    if spec_of is not None:
        least = (min(obs for obs, _ in stored), min(action for _, action in stored))
        used = {number: widths[number] for number in wanted}
        widths = _own_widths(source, names, used, least, spec_of)
    specs = [_spec(names[number], *widths[number], rows, terminates) for number in wanted]
    policies = ["replay of TD-MPC2 agents"] * len(specs)
    told = f"official TD-MPC2 chunks in {source.name}"
    row_bytes = sum(leaf.nbytes for leaf in stored_leaves(specs))
    shard_bytes = max(shard_bytes, row_bytes * rows * episodes // MOST_SHARDS)
    with write_dataset(
        out, specs, policies, source=told, held_out=held_out, shard_bytes=shard_bytes
    ) as writer:
        for path in paths:
            columns = load_chunk(path)
            for episode, number in enumerate(columns["task"][:, 0].tolist()):
                if number in place:
                    rows_of = _rows(columns, episode, *widths[number])
                    writer.append_episode(rows_of, place[number])
    return Dataset.open(out)


def _strides(values: Tensor) -> str:
    return str(tuple(values.stride())) if values.layout is torch.strided else "none"


def _measure(
    path: Path, columns: dict[str, NDArray[Any]], widths: dict[int, tuple[int, int]]
) -> None:
    """Widen each task's observations and actions to what is not zero, and check the numbers."""
    tasks = columns["task"][:, 0]
    for number in np.unique(tasks).tolist():
        for episode in np.flatnonzero(tasks == number):
            obs, action = columns["obs"][episode], columns["action"][episode, 1:]
            reward = columns["reward"][episode, 1:]
            sound = all(np.isfinite(values).all() for values in (obs, action, reward))
            if not sound or np.abs(action).max(initial=0) > 1 + SLACK:
                raise DatasetError(
                    f"{path}: episode {episode} has numbers that are not finite, or actions "
                    "outside [-1, 1]."
                )
            before = widths.get(number, (1, 1))
            widths[number] = (max(before[0], _width(obs)), max(before[1], _width(action)))


def _own_widths(
    source: Path,
    names: Sequence[str],
    used: dict[int, tuple[int, int]],
    stored: tuple[int, int],
    spec_of: Callable[[str], EnvSpec],
) -> dict[int, tuple[int, int]]:
    """Elements of each task's observations and actions, of `stored` ones with their padding. Of a
    task that cannot be made here they are guessed, which is told: the `used` ones."""
    found, guessed = {}, {}
    for number, least in used.items():
        try:
            spec = spec_of(names[number])
        except ConfigError as error:  # no such task, or its simulator is not installed
            found[number], guessed[names[number]] = least, str(error)
            continue
        found[number] = _own_width(source, spec, least, stored)
    if guessed:
        known = set(without_environment())
        told = [said for name, said in guessed.items() if name not in known]
        why = " ".join(dict.fromkeys(told)) or "they have no environment here"
        log.warning(
            "How many observations and actions these tasks have is guessed from the data, as many "
            "as are ever not zero: %s (%s)",
            ", ".join(guessed),
            why,
        )
    return found


def _own_width(
    source: Path, spec: EnvSpec, used: tuple[int, int], stored: tuple[int, int]
) -> tuple[int, int]:
    spaces = (spec.observation_space, spec.action_space)
    vectors = [isinstance(x, gymnasium.spaces.Box) and len(x.shape) == 1 for x in spaces]
    if spec.tasks or not all(vectors):
        raise DatasetError(
            f"{source} is not of {spec.task}: chunks hold vectors of single tasks, but that has "
            f"observations {spaces[0]} and actions {spaces[1]}."
        )
    own = (int(np.prod(spaces[0].shape or ())), int(np.prod(spaces[1].shape or ())))
    if not all(least <= mine <= most for least, mine, most in zip(used, own, stored)):
        raise DatasetError(
            f"{source} is not of {spec.task}, which has {own[0]} numbers in an observation and "
            f"{own[1]} in an action: of the {stored[0]} and {stored[1]} in the file {used[0]} and "
            f"{used[1]} are used. Name the tasks in the order of their numbers, "
            "--tasks NAME,NAME,..."
        )
    return own


def _width(values: NDArray[Any]) -> int:
    used = np.flatnonzero(values.any(axis=0))
    return int(used[-1]) + 1 if len(used) else 1


def _names(tasks: Sequence[str] | None, rows: int, largest: int) -> Sequence[str]:
    names = TASK_SETS.get(rows) if tasks is None else tasks
    if names is None:
        known = " and ".join(f"{count} rows" for count in TASK_SETS)
        raise ConfigError(
            f"Episodes of {rows} rows are of no official set (they have {known}): name the tasks "
            "in the order of their numbers, --tasks NAME,NAME,..."
        )
    twice = next((name for name in names if list(names).count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"The task {twice} is named twice; each number is a task of its own.")
    if largest >= len(names):
        raise ConfigError(
            f"The data has a task number {largest}, but {len(names)} tasks are named."
        )
    return names


def _spec(name: str, obs: int, action: int, rows: int, terminates: bool) -> EnvSpec:
    return EnvSpec(
        task=name,
        observation_space=gymnasium.spaces.Box(-np.inf, np.inf, (obs,), np.float32),
        action_space=gymnasium.spaces.Box(-1.0, 1.0, (action,), np.float32),
        max_episode_steps=rows - 1,
        action_repeat=ACTION_REPEAT,
        terminates=terminates,
    )


def _rows(
    columns: dict[str, NDArray[Any]], episode: int, obs: int, action: int
) -> dict[str, NDArray[Any]]:
    """One episode in our rows; theirs differ only in what stands in row 0, and in ends."""
    reward = columns["reward"][episode].astype(np.float32)
    actions = np.clip(columns["action"][episode, :, :action].astype(np.float32), -1.0, 1.0)
    reward[0], actions[0] = 0.0, 0.0
    terminated = np.zeros(len(reward), np.bool_)
    if "terminated" in columns:
        terminated[1:] = columns["terminated"][episode, 1:] > 0.5
    truncated = np.zeros(len(reward), np.bool_)
    truncated[-1] = not terminated[-1]
    return {
        "obs": columns["obs"][episode, :, :obs],
        "action": actions,
        "reward": reward,
        "terminated": terminated,
        "truncated": truncated,
    }
