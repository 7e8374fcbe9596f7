"""Rings of rows: in as they happen, held once, exact to restore. What is drawn is up to others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forethought.config import ConfigError, ReplayConfig, require
from forethought.files import size_in_words
from forethought.replay import memory
from forethought.replay.blocks import (
    Block,
    Blocks,
    block_to_json,
    check_blocks,
    check_number,
    load_block,
    open_block,
    read_blocks,
)
from forethought.replay.checks import check_cover, check_rows, check_streams
from forethought.replay.rows import ReplayError, RowSpec
from forethought.replay.slices import Sampler
from forethought.replay.storage import Ints, Storage
from forethought.seeding import numpy_state, restore_numpy
from forethought.spaces.spec import EnvSpec

ABSENT_AT_START = frozenset({"action", "reward"})  # row 0 has neither; zeros are stored


class RingReplay(ABC):
    """Experience of `num_envs` environments, drawn in pieces of at most `slice_rows` rows.

    Each environment has a ring of its own, `capacity_rows // num_envs` rows long. `config.kind`
    says what is drawn and how, `stream` is the only randomness. Rows live on
    `config.storage_device`, batches come on `device`.
    """

    def __init__(
        self,
        spec: EnvSpec,
        config: ReplayConfig,
        num_envs: int,
        slice_rows: int,
        stream: np.random.Generator,
        device: torch.device,
        stack: Mapping[str, int] | None = None,
        stack_pad: str = "zeros",
    ) -> None:
        self.row_spec = RowSpec.of(spec, stack, stack_pad)
        self.slice_rows = slice_rows
        self.device = device
        self.storage_device = _usable_device(config.storage_device)
        self.kind = config.kind
        capacity = config.capacity_rows // num_envs
        least = slice_rows + self.row_spec.history
        require(slice_rows >= 1, "slice_rows", slice_rows, "at least 1")
        require(
            capacity >= least,
            "replay.capacity_rows",
            config.capacity_rows,
            f"at least {num_envs * least}: a slice takes {least} rows in each of {num_envs} "
            "environments",
        )
        # Beside the columns: a row's age, and what the sampler keeps.
        self._row_bytes = self.row_spec.row_bytes + 4 + self.sampler_bytes(config)
        folder = getattr(config, "mapped_folder", None)
        self.mapped_folder = None if folder is None else Path(folder)
        """Where the columns are kept in a file; None keeps them in memory."""
        if self.mapped_folder is not None:
            bytes_on_disk = self.row_spec.row_bytes
            memory.check_disk(bytes_on_disk, num_envs, config.capacity_rows, self.mapped_folder)
        in_memory = self._row_bytes - (self.row_spec.row_bytes if self.mapped_folder else 0)
        memory.check_fits(in_memory, num_envs, config.capacity_rows, self.storage_device)
        self._storage = Storage(
            self.row_spec, num_envs, capacity, self.storage_device, self.mapped_folder
        )
        self._sampler = self.make_sampler(spec, config)
        # A block larger than the ring would have lost rows before it fills.
        self._blocks = Blocks(self._storage, min(config.block_rows, capacity))
        self._stream = stream
        self._open_rows = [0] * num_envs  # rows of the open episode; 0 = the next row begins one
        self._keys = {leaf.path.split("/")[0] for leaf in self.row_spec.leaves} | {"is_first"}
        self._readers = [
            (x.path, tuple(x.path.split("/")), x.shape, x.dtype, np.zeros(x.shape, x.dtype))
            for x in self.row_spec.leaves
        ]
        self._offsets = np.arange(slice_rows)[:, None]  # [L, 1]
        self._drawn: tuple[Ints, Ints] | None = None  # of the last batch: streams, first rows

    @abstractmethod
    def make_sampler(self, spec: EnvSpec, config: ReplayConfig) -> Sampler:
        """What knows which rows may be drawn."""

    @abstractmethod
    def sampler_bytes(self, config: ReplayConfig) -> float:
        """Bytes that it keeps for each row."""

    @property
    @abstractmethod
    def drawn_as(self) -> str:
        """What is drawn, in words."""

    @property
    def num_envs(self) -> int:
        """Environments, each with its own ring."""
        return self._storage.num_envs

    @property
    def rows(self) -> int:
        """Rows held now, over all environments."""
        return sum(self._storage.written) - int(self._storage.oldest.sum())

    @property
    def bytes_total(self) -> int:
        """Bytes when every ring is full."""
        return int(self._row_bytes * self.num_envs * self._storage.capacity)

    @property
    def seal_failures(self) -> int:
        """Blocks that could not be written at the first try."""
        return self._blocks.failures

    def check_new(self, agent_steps: int) -> None:
        """Refuse blocks that a run of so many agent steps would have too many of."""
        rows = min(self._storage.capacity * self.num_envs, 2 * agent_steps)  # and episode starts
        check_number(self._blocks.block_rows, rows)

    def describe(self) -> str:
        """The size in words."""
        rings = "1 ring" if self.num_envs == 1 else f"{self.num_envs} rings"
        where = self.storage_device if self.mapped_folder is None else self.mapped_folder
        return (
            f"{rings} of {self._storage.capacity:,} rows, {size_in_words(int(self._row_bytes))} a "
            f"row, {size_in_words(self.bytes_total)} on {where} when full; {self.drawn_as}"
        )

    # ---- rows in ----

    def add(self, row: Mapping[str, Any], env_index: int) -> None:
        """Append a row of one environment: obs, action, reward, terminated, truncated, is_first and
        the declared extras. Action and reward of an episode's first row are taken as zeros and may
        be left out."""
        if not 0 <= env_index < self.num_envs:
            raise ReplayError(f"There is no environment {env_index}: there are {self.num_envs}.")
        is_first = bool(row.get("is_first"))
        if row.keys() != self._keys:
            self._check_keys(row, env_index, is_first)
        age = self._open_rows[env_index]
        if is_first != (age == 0):
            raise ReplayError(_out_of_order(env_index, is_first, age))
        values = self._read_row(row, env_index, is_first)

        number = self._storage.append(env_index, values, age)
        self._open_rows[env_index] = age + 1
        self._sampler.row_added(env_index, number, age)
        if row["terminated"] or row["truncated"]:
            self.close_episode(env_index)
        if (number + 1) % self._blocks.block_rows == 0:
            self._blocks.block_filled(env_index)

    def close_episode(self, env_index: int) -> None:
        """End the open episode where it is, as when its environment had to be restarted."""
        length, self._open_rows[env_index] = self._open_rows[env_index], 0
        if length:
            end = self._storage.written[env_index]
            self._sampler.episode_closed(env_index, end - length, end)

    def _read_row(
        self, row: Mapping[str, Any], env_index: int, is_first: bool
    ) -> list[tuple[str, NDArray[Any]]]:
        """The row's values by column, all checked before any is written."""
        values = []
        for name, keys, shape, dtype, zeros in self._readers:
            if is_first and keys[0] in ABSENT_AT_START:
                values.append((name, zeros))
                continue
            value: Any = row
            try:
                for key in keys:
                    value = value[key]
            except (KeyError, IndexError, TypeError):
                raise ReplayError(
                    f"The row of environment {env_index} has no column {name}; the run's spaces "
                    "say that it has."
                ) from None
            value = np.asarray(value)
            if value.shape != shape:  # numpy would broadcast it without a word
                raise ReplayError(
                    f"Column {name} in the row of environment {env_index} has shape {value.shape}, "
                    f"but must have {shape}."
                )
            if value.dtype != dtype and not np.can_cast(value.dtype, dtype, "same_kind"):
                raise ReplayError(
                    f"Column {name} in the row of environment {env_index} has dtype {value.dtype}, "
                    f"which cannot be stored as {dtype}."
                )
            values.append((name, value))
        return values

    def _check_keys(self, row: Mapping[str, Any], env_index: int, is_first: bool) -> None:
        optional = ABSENT_AT_START if is_first else frozenset()
        missing = sorted(self._keys - row.keys() - optional)
        foreign = sorted(row.keys() - self._keys)
        if missing or foreign:
            what = f"lacks {', '.join(missing)}" if missing else f"has {', '.join(foreign)} too"
            raise ReplayError(
                f"The row of environment {env_index} {what}; its columns must be "
                f"{', '.join(sorted(self._keys))}."
            )

    # ---- rows out ----

    def can_sample(self, batch: int = 1) -> bool:
        """Whether `sample(batch)` works: one valid draw is enough, draws are with replacement."""
        return batch >= 1 and self._sampler.count > 0

    def last_draw(self) -> dict[str, Any] | None:
        """Where the rows of the last batch come from; None before the first.

        Rows are counted from the start of each environment: one per reset and one per decision.
        """
        if self._drawn is None:
            return None
        env_index, first_row = (x.tolist() for x in self._drawn)
        written = list(self._storage.written)
        return {
            "slice_rows": self.slice_rows,
            "env_index": env_index,
            "first_row": first_row,
            "rows_written": written,
        }

    def episodes(self) -> Iterator[dict[str, NDArray[Any]]]:
        """The rows of every episode that is held from its first row on, environment by environment,
        oldest first: columns by name, [rows, ...]. The open one ends where it is."""
        storage = self._storage
        for stream, written in enumerate(storage.written):
            held = np.arange(storage.oldest[stream], written)
            firsts = held[storage.age[storage.slots(stream, held)] == 0]
            for first, end in pairwise([*firsts.tolist(), written]):
                rows = storage.read(stream, first, end)
                yield {
                    leaf.path: rows[f"column/{leaf.path}"].numpy() for leaf in self.row_spec.leaves
                }

    # ---- on disk ----

    def seal_to(self, folder: Path) -> None:
        """Write blocks of rows to `folder` as they fill; complete ones that it lacks, now."""
        self._blocks.seal_to(Path(folder))

    def state(self, whole: bool = False) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What a checkpoint keeps: JSON that names the sealed blocks, and tensors with the rest.

        With `whole` it names no blocks and the tensors hold every row: larger, but in one piece.
        """
        streams: list[dict[str, Any]] = []
        tensors: dict[str, Tensor] = {}
        for index, written in enumerate(self._storage.written):
            blocks, tail = self._blocks.named(index)
            if whole:
                blocks, tail = [], int(self._storage.oldest[index])
            streams.append(
                {
                    "written": written,
                    "open_rows": self._open_rows[index],
                    "blocks": [block_to_json(block) for block in blocks],
                    "tail_row": tail,
                }
            )
            rows = self._storage.read(index, tail, written)
            tensors |= {f"tail/{index}/{name}": value for name, value in rows.items()}
        sampler = self._sampler.state()
        tensors |= {f"sampler/{name}": torch.from_numpy(x) for name, x in sampler.items()}
        rng = numpy_state(self._stream)
        return {"layout": self._layout(), "streams": streams, "rng": rng}, tensors

    def restore(
        self, state: Mapping[str, Any], tensors: Mapping[str, Tensor], folder: Path | None
    ) -> None:
        """Become the replay that wrote `state`; its blocks are read from `folder` and verified.

        It does not begin to write there: that is what `seal_to` says.
        """
        saved = self.check(state, tensors)
        for blocks in saved:
            check_blocks(blocks, folder)
        for index, (stream, blocks) in enumerate(zip(state["streams"], saved)):
            self._storage.advance(index, stream["written"])
            self._open_rows[index] = stream["open_rows"]
            for block in blocks:
                rows = self._blocks.block_rows
                load_block(self._storage, index, block, Path(folder or "."), rows)
            self._storage.put(index, stream["tail_row"], _below(f"tail/{index}/", tensors))
        self._sampler.restore({k: v.numpy() for k, v in _below("sampler/", tensors).items()})
        restore_numpy(self._stream, state["rng"])
        self._blocks.adopt(saved, None if folder is None else Path(folder))

    def check(
        self, state: Mapping[str, Any], tensors: Mapping[str, Tensor], folder: Path | None = None
    ) -> list[list[Block]]:
        """The blocks per stream that `state` needs; a sentence if it cannot be restored here.

        Nothing is changed. With `folder`, the blocks there are looked into, at their headers only.
        """
        self._check_layout(state["layout"])
        check_streams(state, self._storage)
        block_rows, saved = self._blocks.block_rows, []
        for index, stream in enumerate(state["streams"]):
            blocks = read_blocks(stream["blocks"], index, block_rows)
            first = blocks[0].first_row if blocks else None
            stop = (blocks[-1].first_row // block_rows + 1) * block_rows if blocks else 0
            check_cover(first, stop, stream, self._storage.capacity)
            rows = stream["written"] - stream["tail_row"]
            what = f"The saved tail of stream {index}"
            check_rows(_below(f"tail/{index}/", tensors), self.row_spec, rows, what)
            if folder is not None:
                for block in blocks:
                    open_block(self._storage, block, folder, block_rows)
            saved.append(blocks)
        sampler = {k: v.numpy() for k, v in _below("sampler/", tensors).items()}
        self._sampler.check(sampler, [stream["written"] for stream in state["streams"]])
        restore_numpy(np.random.Generator(type(self._stream.bit_generator)()), state["rng"])
        return saved

    def prune(self, folder: Path, keep: set[str]) -> list[str]:
        """Delete the blocks in `folder` that no kept checkpoint (`keep`: their names) nor this
        replay needs; returns the names of the deleted."""
        return self._blocks.prune(Path(folder), set(keep))

    def _layout(self) -> dict[str, Any]:
        """What must be equal for saved rows to mean the same here."""
        return {
            "kind": self.kind,
            "num_envs": self.num_envs,
            "capacity_rows_per_env": self._storage.capacity,
            "slice_rows": self.slice_rows,
            "block_rows": self._blocks.block_rows,
            "history_rows": self.row_spec.history,
            "columns": {x.path: [str(x.dtype), list(x.shape)] for x in self.row_spec.leaves},
        }

    def _check_layout(self, saved: Mapping[str, Any]) -> None:
        for key, here in self._layout().items():
            if saved.get(key) != here:
                raise ReplayError(
                    f"The saved replay has {key} {saved.get(key)}, but this one has {here}; "
                    "resume with the configuration of the run."
                )


def _out_of_order(env_index: int, is_first: bool, age: int) -> str:
    if is_first:
        return (
            f"Environment {env_index} begins an episode, but its last one is still open after "
            f"{age} rows; end it with terminated, truncated or close_episode({env_index})."
        )
    return (
        f"The row of environment {env_index} must have is_first, because no episode is open; "
        "store the reset observation first."
    )


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def _usable_device(name: str) -> torch.device:
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # torch's words for an absent accelerator
        reason = str(error).splitlines()[0].rstrip(".")
        raise ConfigError(
            f"replay.storage_device is {name}, which cannot be used here ({reason}); use cpu."
        ) from None
