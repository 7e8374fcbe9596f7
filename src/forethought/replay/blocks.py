"""Sealed blocks: the replay on disk, written while it grows and not at the checkpoint.

Block b of a stream holds its rows [b * R, (b + 1) * R). It is written, made durable and hashed when
its last row arrives, and never changes after. A checkpoint names the blocks it needs and holds only
the rows after them. A block that could not be written (a full disk) is tried again when the next
one fills; until then checkpoints simply hold its rows themselves.
"""

from __future__ import annotations

import logging
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from forethought.config import require
from forethought.files import (
    FileError,
    check_space,
    fsync_dir,
    fsync_file,
    load_tensors,
    remove,
    save_tensors,
    sha256,
    tensor_bytes,
)
from forethought.replay.checks import check_rows
from forethought.replay.rows import ReplayError
from forethought.replay.storage import Storage

TEMPORARY = ".tmp-"
MOST_BLOCKS = 80_000
"""On the disk; a checkpoint tells some 170 bytes of each, in a file of 16 MB."""
log = logging.getLogger("forethought")


@dataclass(frozen=True)
class Block:
    """A file of consecutive rows of one stream."""

    name: str
    sha256: str
    first_row: int
    """Its first row; later than b * R where the ring had lost rows before the block was written."""


def check_number(block_rows: int, rows: int) -> None:
    """Refuse, before anything is learned, blocks so small that no checkpoint could list them."""
    least = math.ceil(rows / MOST_BLOCKS)
    rule = f"at least {least:,}: a checkpoint lists at most {MOST_BLOCKS:,} blocks"
    require(block_rows >= least, "replay.block_rows", block_rows, rule)


class Blocks:
    """The blocks of all streams in one folder; none are written before `seal_to`."""

    def __init__(self, storage: Storage, block_rows: int) -> None:
        self.storage = storage
        self.block_rows = block_rows
        self.folder: Path | None = None
        self.failures = 0
        """Blocks that could not be written at the first try."""
        self._sealed: list[dict[int, Block]] = [{} for _ in range(storage.num_envs)]
        self._sealed_in: Path | None = None

    def seal_to(self, folder: Path) -> None:
        """Write blocks to `folder` from now on, and now those complete ones it does not have."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ReplayError(f"The replay folder {folder} cannot be made ({error}).") from error
        if self._sealed_in is None or self._sealed_in.resolve() != folder.resolve():
            self._sealed = [{} for _ in self._sealed]
        self.folder = self._sealed_in = folder
        for stream in range(self.storage.num_envs):
            self._seal_complete(stream, folder)

    def block_filled(self, stream: int) -> None:
        """Write the block that has just filled. Training goes on without it, but says so once."""
        if self.folder is None:
            return
        try:
            self._seal_complete(stream, self.folder)
        except (OSError, FileError) as error:
            self.failures += 1
            if self.failures == 1:
                log.warning(
                    "A replay block was not written: %s It is tried again when the next one fills, "
                    "and checkpoints are larger until then.",
                    error,
                )

    def named(self, stream: int) -> tuple[list[Block], int]:
        """Blocks that hold the oldest rows of a stream, and the row where they end.

        Without a folder of its own a replay names none: those it was restored from may vanish.
        """
        blocks: list[Block] = []
        oldest = int(self.storage.oldest[stream])
        if self.folder is None:
            return blocks, oldest
        for number in self._complete(stream):
            if number not in self._sealed[stream]:
                return blocks, max(oldest, number * self.block_rows)
            blocks.append(self._sealed[stream][number])
        return blocks, max(oldest, self._complete(stream).stop * self.block_rows)

    def adopt(self, saved: list[list[Block]], folder: Path | None) -> None:
        """Take over the blocks that a checkpoint names, found in `folder`."""
        self._sealed = [
            {block.first_row // self.block_rows: block for block in blocks} for blocks in saved
        ]
        self._sealed_in = folder
        if self.folder is not None:
            self.seal_to(self.folder)

    def prune(self, folder: Path, keep: set[str]) -> list[str]:
        """Delete blocks that neither `keep` nor the living replay names; returns their names.

        Blocks sealed since the last checkpoint are in no checkpoint yet, but the next needs them.
        """
        for stream in range(self.storage.num_envs):
            self._forget(stream)
            keep = keep | {block.name for block in self._sealed[stream].values()}
        # Temporary files (ours and safetensors' own) are those of a writer that was killed.
        found = [*folder.glob("stream*-block*.safetensors"), *folder.glob(".tmp*")]
        gone = sorted(path.name for path in found if path.name not in keep)
        for name in gone:
            remove(folder / name)
        return gone

    def _complete(self, stream: int) -> range:
        """Numbers of the blocks that are whole and not yet wholly overwritten."""
        oldest = int(self.storage.oldest[stream])
        return range(oldest // self.block_rows, self.storage.written[stream] // self.block_rows)

    def _forget(self, stream: int) -> None:
        """Drop what the ring has wholly overwritten."""
        needed = self._complete(stream)
        sealed = self._sealed[stream]
        self._sealed[stream] = {n: block for n, block in sealed.items() if n in needed}

    def _seal_complete(self, stream: int, folder: Path) -> None:
        self._forget(stream)
        for number in self._complete(stream):
            if number not in self._sealed[stream]:
                self._sealed[stream][number] = self._write(stream, number, folder)

    def _write(self, stream: int, number: int, folder: Path) -> Block:
        first = max(number * self.block_rows, int(self.storage.oldest[stream]))
        rows = self.storage.read(stream, first, (number + 1) * self.block_rows)
        name = block_name(stream, number)
        check_space(folder / name, tensor_bytes(rows))
        temporary = folder / (TEMPORARY + name)
        save_tensors(temporary, rows, {"first_row": str(first)})
        fsync_file(temporary)
        block = Block(name, sha256(temporary), first)
        # A file of that name may be left from a run that went on after the checkpoint.
        temporary.replace(folder / name)
        fsync_dir(folder)
        return block


def block_name(stream: int, number: int) -> str:
    """The file of a stream's block."""
    return f"stream{stream:02d}-block{number:08d}.safetensors"


def block_to_json(block: Block) -> dict[str, Any]:
    """For a checkpoint."""
    return asdict(block)


def read_blocks(saved: Any, stream: int, block_rows: int) -> list[Block]:
    """The blocks that a checkpoint names for a stream: each one a file of ours, none left out."""
    try:
        blocks = [Block(**entry) for entry in saved]
        numbers = [block.first_row // block_rows for block in blocks]
        first = numbers[0] if numbers else 0
        sound = (
            [block.name for block in blocks] == [block_name(stream, n) for n in numbers]
            and numbers == list(range(first, first + len(numbers)))
            and all(n * block_rows == b.first_row for n, b in list(zip(numbers, blocks))[1:])
            and all(type(b.first_row) is int and b.first_row >= 0 for b in blocks)
            and all(isinstance(b.sha256, str) for b in blocks)
        )
    except (TypeError, ValueError):
        sound = False
    if not sound:
        raise ReplayError(f"The saved replay names blocks of stream {stream} that cannot be.")
    return blocks


def check_blocks(blocks: list[Block], folder: Path | None) -> None:
    """Refuse, by name, a block that is missing or is not the one that was sealed."""
    for block in blocks:
        if folder is None:
            raise ReplayError(
                f"The checkpoint needs the replay block {block.name}, but no folder was given."
            )
        path = folder / block.name
        if not os.path.lexists(path):
            raise ReplayError(
                f"The replay block {path} is missing; bring it back or resume from a checkpoint "
                "that does not need it."
            )
        if sha256(path) != block.sha256:
            raise ReplayError(
                f"The replay block {path} is not the one that was written (its sha256 differs); "
                "bring it back or resume from a checkpoint that does not need it."
            )


def load_block(storage: Storage, stream: int, block: Block, folder: Path, block_rows: int) -> None:
    """Put the rows of a block back that the ring still held."""
    tensors = open_block(storage, block, folder, block_rows)
    first = max(block.first_row, int(storage.oldest[stream]))
    storage.put(stream, first, {k: v[first - block.first_row :] for k, v in tensors.items()})


def open_block(storage: Storage, block: Block, folder: Path, block_rows: int) -> dict[str, Tensor]:
    """The columns of a block, checked: whoever knows a sha256 may also have made the file."""
    path = folder / block.name
    tensors = load_tensors(path)
    end = (block.first_row // block_rows + 1) * block_rows
    check_rows(tensors, storage.rows, end - block.first_row, f"The replay block {path}")
    return tensors
