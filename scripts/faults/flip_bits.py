"""Bit flips: one random bit of one random file of a checkpoint, or of a replay block that it needs,
is turned; the loader must notice, and say which file."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import forethought
from forethought import files
from forethought.files import FileError
from forethought.tracking import RunDirectory
from forethought.training.checkpoint import Checkpoints

OPTIONS: dict[str, Any] = {
    "steps": 60,
    "env": {"max_episode_steps": 15},
    "replay": {"block_rows": 16},
    "train": {
        "seed_agent_steps": 20,
        "seed_updates": 4,
        "checkpoint_every_agent_steps": 20,
        "keep_checkpoints": 4,
    },
    "eval": {"every_agent_steps": 60},
    "track": {"console": False},
}
"""A run with four checkpoints and four replay blocks."""


@dataclass(frozen=True)
class Flip:
    """One flipped bit, and what the loader did."""

    file: str
    """Inside the run directory."""
    byte: int
    bit: int
    detected: bool
    outcome: str
    """`older checkpoint` or `refused`, or what went wrong."""
    said: str
    tensors_load: bool | None
    """For a safetensors file: whether safetensors alone would have read it without complaint."""

    @property
    def kind(self) -> str:
        name = Path(self.file)
        return "a replay block" if name.parts[0] == "replay" else f"`{name.name}`"

    def row(self) -> dict[str, Any]:
        return asdict(self)


def make_run(folder: Path, seed: int) -> Path:
    """The finished run whose files are damaged."""
    run = forethought.train(
        "tdmpc2", "gym:Pendulum-v1", presets=["debug"], seed=seed, out=folder, **OPTIONS
    )
    return run.path


@contextmanager
def flipped(file: Path, byte: int, bit: int) -> Iterator[None]:
    """One bit of a file is turned, and turned back."""
    whole = file.read_bytes()
    damaged = bytearray(whole)
    damaged[byte] ^= 1 << bit
    file.write_bytes(damaged)
    try:
        yield
    finally:
        file.write_bytes(whole)


def flip(run: Path, rng: random.Random) -> Flip:
    """Flips a bit, loads as `resume` would (an older checkpoint: as `--checkpoint STEP` would)."""
    checkpoints = Checkpoints(RunDirectory.open(run))
    folders = files.published(checkpoints.folder)
    blocks = sorted(checkpoints.run.replay.glob("*.safetensors"))
    folder = rng.choice([*folders, checkpoints.run.replay])
    file = rng.choice(blocks if folder == checkpoints.run.replay else sorted(folder.iterdir()))
    byte, bit = rng.randrange(file.stat().st_size), rng.randrange(8)
    with flipped(file, byte, bit):
        detected, outcome, said = load(checkpoints, folders, folder, file)
        alone = loads_alone(file) if file.suffix == ".safetensors" else None
    name = file.relative_to(run).as_posix()
    return Flip(name, byte, bit, detected, outcome, said.replace(f"{run}/", ""), alone)


def load(
    checkpoints: Checkpoints, folders: list[Path], folder: Path, file: Path
) -> tuple[bool, str, str]:
    """Whether the loader noticed, what it did then, and its words, which must name the file."""
    older = folder in folders[:-1]
    try:
        if older:
            checkpoints.find(str(int(folder.name.rpartition("-")[2])))
            return False, "loaded", ""
        found, skipped = checkpoints.newest()
    except FileError as error:
        return str(file) in str(error), "refused", str(error)
    said = " ".join(skipped)
    if found == folders[-1]:
        return False, "loaded", said
    return str(file) in said, "older checkpoint", said


def loads_alone(file: Path) -> bool:
    """Without hashes: does safetensors read it?"""
    try:
        files.load_tensors(file)
    except FileError:
        return False
    return True


def check_unhurt(run: Path) -> None:
    """The control: an undamaged run loads from its newest checkpoint, without a word."""
    checkpoints = Checkpoints(RunDirectory.open(run))
    found, skipped = checkpoints.newest()
    assert found == files.published(checkpoints.folder)[-1] and not skipped, (found, skipped)
