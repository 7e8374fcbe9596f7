"""Importing a Minari dataset from its folder, in Minari's HDF5 layout; nothing is downloaded.

    FOLDER/data/metadata.json      spaces, the environment's id, how many episodes
    FOLDER/data/main_data.hdf5     episode_N/observations [T + 1], actions, rewards, ... [T]

HDF5 has its own ways to reach outside: links to other files, columns whose bytes lie in other
files, and columns put together from those of others. All of them are refused.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
from gymnasium import spaces
from numpy.typing import NDArray

from forethought import files
from forethought.config import ConfigError
from forethought.data.archives import refuse_archive
from forethought.data.dataset import Dataset
from forethought.data.layout import DatasetError
from forethought.data.space_json import space_from_json
from forethought.data.writer import SHARD_BYTES, check_out, from_gym_steps, write_dataset
from forethought.extras import install_extra
from forethought.replay.memory import check_room, free_main_memory
from forethought.spaces.agent_view import agent_action, agent_space
from forethought.spaces.spec import EnvSpec

METADATA, MAIN = "metadata.json", "main_data.hdf5"
MAX_EPISODES = 10_000_000
MOST_UNWRITTEN_BYTES = 1_000_000
"""HDF5 gives zeros for chunks that nobody wrote, terabytes of them for nothing."""
COPIES = 2
"""Of an episode in main memory: as it was read, and as it will be written."""
MOST_UNASKED_BYTES = 1_000_000
"""Of an episode, for which nobody asks how much memory is free: that takes longer than to read."""


def import_minari(
    source: Path,
    out: Path,
    *,
    task: str | None = None,
    held_out: float = 0.0,
    shard_bytes: int = SHARD_BYTES,
) -> Dataset:
    """Packs a Minari dataset; `task` names it, by default gym:ID of its environment.

    Actions come as agents see them: a bounded Box is rescaled to [-1, 1].
    """
    check_out(out)
    if source.is_file():
        refuse_archive(source)
    folder = next((f for f in (source, source / "data") if (f / METADATA).is_file()), None)
    if folder is None:
        raise DatasetError(
            f"{source} is not a Minari dataset: it must be a folder with data/{METADATA}."
        )
    described = files.read_json(folder / METADATA)
    with files.content_of(folder / METADATA):
        kind = str(described["data_format"])
        if kind != "hdf5":
            raise DatasetError(f"{folder} is in the format {kind}, but only hdf5 is imported.")
        native_obs = space_from_json(json.loads(described["observation_space"]))
        native_action = space_from_json(json.loads(described["action_space"]))
        about = json.loads(described.get("env_spec") or "{}")
        limit = about.get("max_episode_steps")
        spec = EnvSpec(
            task=task or f"gym:{about['id']}",
            observation_space=agent_space(native_obs, action=False),
            action_space=agent_space(native_action, action=True),
            max_episode_steps=None if limit is None else int(limit),
            action_repeat=1,
            terminates=True,
        )
        total = int(described["total_episodes"])
    told = f"Minari dataset {described.get('dataset_id', source.name)}"
    with _opened(folder / MAIN) as file:
        numbers = _episode_numbers(folder / MAIN, file, total)
        policy = str(described.get("algorithm_name") or "unknown")
        with write_dataset(
            out, [spec], [policy], source=told, held_out=held_out, shard_bytes=shard_bytes
        ) as writer:
            for number in numbers:
                episode = _Episode(folder / MAIN, file[f"episode_{number}"])
                rows = from_gym_steps(
                    episode.read("observations", native_obs),
                    agent_action(native_action, episode.read("actions", native_action)),
                    episode.array("rewards"),
                    episode.array("terminations"),
                    episode.array("truncations"),
                )
                writer.append_episode(rows, success=episode.success())
    return Dataset.open(out)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The HDF5 file; what it trips over on the way is one sentence."""
    try:
        import h5py
    except ImportError:
        raise ConfigError(f"Minari datasets need h5py: run {install_extra('offline')}.") from None
    if not path.is_file():
        raise DatasetError(f"{path} is missing.")
    if not h5py.is_hdf5(path):
        raise DatasetError(
            f"{path} is not an HDF5 file: refused, and nothing in it was run or written."
        )
    try:
        with h5py.File(path, "r") as file:
            yield file
    except (OSError, KeyError, RuntimeError) as error:  # h5py's words for a damaged file
        reason = (str(error).splitlines() or [""])[0].rstrip(".")[:200]
        raise DatasetError(f"{path} is damaged: {reason}.") from error


def _episode_numbers(path: Path, file: Any, total: int) -> list[int]:
    names = list(file.keys())
    matches = [re.fullmatch(r"episode_(\d{1,12})", name) for name in names]
    numbers = sorted(int(match[1]) for match in matches if match)
    if len(numbers) != total or not 0 < total <= MAX_EPISODES:
        raise DatasetError(
            f"{path} holds {len(numbers)} episodes, but its {METADATA} says {total}."
        )
    for number in numbers:
        _refuse_link(path, file, f"episode_{number}")
    return numbers


class _Episode:
    """One group of the file, read member by member."""

    def __init__(self, path: Path, group: Any) -> None:
        self.path, self.group = path, group
        self.bytes = 0
        """Of all columns read so far, which are in main memory together."""
        self.free: int | None = None
        """Bytes that were free before the first of the large ones, once somebody asked."""

    def read(self, name: str, space: gymnasium.Space[Any]) -> Any:
        """A nested value [T, ...] along its space."""
        return self._read(self.group, name, space)

    def array(self, name: str) -> NDArray[Any]:
        """A column of numbers."""
        return self._array(self.group, name)

    def success(self) -> float | None:
        """The verdict beside the last observation, where there is one."""
        if "infos" not in self.group or "success" not in self._child(self.group, "infos"):
            return None
        infos = self._child(self.group, "infos")
        if getattr(self._member(infos, "success"), "shape", None) == ():
            return None  # of what, nobody knows: it has no number for each step
        values = self._array(infos, "success")
        return float(values[-1]) if values.ndim == 1 and len(values) else None

    def _read(self, group: Any, name: str, space: gymnasium.Space[Any]) -> Any:
        if isinstance(space, spaces.Dict):
            inner = self._child(group, name)
            return {key: self._read(inner, key, member) for key, member in space.spaces.items()}
        if isinstance(space, spaces.Tuple):
            inner = self._child(group, name)
            members = enumerate(space.spaces)
            return {str(i): self._read(inner, f"_index_{i}", member) for i, member in members}
        return self._array(group, name)

    def _child(self, group: Any, name: str) -> Any:
        import h5py

        found = self._member(group, name)
        if not isinstance(found, h5py.Group):
            raise DatasetError(f"{self.path}: {group.name}/{name} is not a group.")
        return found

    def _array(self, group: Any, name: str) -> NDArray[Any]:
        import h5py

        found = self._member(group, name)
        if not isinstance(found, h5py.Dataset):
            raise DatasetError(f"{self.path}: {group.name}/{name} is not a column.")
        if found.external or found.is_virtual:
            raise DatasetError(
                f"{self.path}: {found.name} has its numbers in another file: refused, and nothing "
                "was written."
            )
        if found.dtype.kind not in "biuf":
            raise DatasetError(
                f"{self.path}: {found.name} is of type {found.dtype} (text, or pictures as JPEG), "
                "which is not imported."
            )
        if not found.shape:  # one number, or nothing at all
            raise DatasetError(
                f"{self.path}: {found.name} is not a column: it has no number for each step."
            )
        written = _written_bytes(found)
        if found.nbytes > written + MOST_UNWRITTEN_BYTES:
            raise DatasetError(
                f"{self.path}: {found.name} says that it has {found.nbytes:,} bytes, but only "
                f"{written:,} were ever written: refused, and nothing was written."
            )
        self.bytes += found.nbytes
        self._refuse_without_room(found.name)
        values: NDArray[Any] = found[()]
        return values

    def _refuse_without_room(self, column: str) -> None:
        """Packed, a few bytes of a file may stand for terabytes."""
        if self.bytes <= MOST_UNASKED_BYTES:
            return
        if self.free is None:
            self.free = free_main_memory()
        what = f"{self.path}: {self.group.name}, up to its column {column},"
        advice = "import it on a machine that has room for it"
        check_room(what, COPIES * self.bytes, self.free, advice)

    def _member(self, group: Any, name: str) -> Any:
        if name not in group:
            raise DatasetError(f"{self.path}: {group.name} has no {name}.")
        _refuse_link(self.path, group, name)
        return group[name]


def _written_bytes(column: Any) -> int:
    """What was written of a column, unpacked."""
    if column.chunks is None:
        return int(column.id.get_storage_size())
    return int(column.id.get_num_chunks() * math.prod(column.chunks) * column.dtype.itemsize)


def _refuse_link(path: Path, group: Any, name: str) -> None:
    import h5py

    if not isinstance(group.get(name, getlink=True), h5py.HardLink):
        raise DatasetError(
            f"{path}: {group.name.rstrip('/')}/{name} is a link to elsewhere: refused, and nothing "
            "was written."
        )
