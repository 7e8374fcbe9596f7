"""Importing what others have recorded: which importer a path is for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from forethought import files
from forethought.config import ConfigError, unknown
from forethought.data.archives import refuse_archive
from forethought.data.dataset import Dataset
from forethought.data.layout import META, DatasetError
from forethought.data.minari import METADATA, import_minari
from forethought.data.tdmpc2_chunks import import_tdmpc2
from forethought.data.writer import check_share
from forethought.spaces.spec import EnvSpec

FORMATS = ("auto", "minari", "tdmpc2")


def import_dataset(
    source: Path,
    out: Path,
    *,
    format: str = "auto",
    task: str | None = None,
    tasks: Sequence[str] | None = None,
    only: Sequence[str] | None = None,
    held_out: float = 0.0,
    spec_of: Callable[[str], EnvSpec] | None = None,
) -> Dataset:
    """Packs a Minari folder, or official TD-MPC2 chunks, into a new dataset.

    `task` names the one task of a Minari dataset; `tasks` and `only` are for chunks. The share
    `held_out` of each task's episodes is marked as never to be learned from. `spec_of`
    (such as `forethought.envs.spec_of`) tells how wide the tasks of chunks are, by their names;
    without it that is guessed from the data.
    """
    if format not in FORMATS:
        raise unknown("format", format, FORMATS, f"Choose from {', '.join(FORMATS)}.")
    check_share(held_out)
    kind = detect(source) if format == "auto" else format
    if kind == "minari":
        if tasks or only:
            raise ConfigError("--tasks and --only are for TD-MPC2 chunks; use --task NAME here.")
        return import_minari(source, out, task=task, held_out=held_out)
    if task is not None:
        raise ConfigError("--task is for Minari datasets; chunks have --tasks and --only.")
    return import_tdmpc2(source, out, tasks=tasks, only=only, spec_of=spec_of, held_out=held_out)


def detect(source: Path) -> str:
    """minari or tdmpc2; anything else is refused by what it is, unopened."""
    if not source.exists():
        raise ConfigError(f"There is no {source} to import.")
    if any((folder / METADATA).is_file() for folder in (source, source / "data")):
        return "minari"
    if source.suffix == ".pt" or (source.is_dir() and any(source.glob("*.pt"))):
        return "tdmpc2"
    if source.is_file():
        refuse_archive(source)
    if (source / META).is_file() and (source / files.MANIFEST).is_file():
        raise DatasetError(f"{source} is a dataset already: give it to --offline.data as it is.")
    raise DatasetError(
        f"{source} is neither a Minari folder (data/{METADATA} and data/main_data.hdf5) nor "
        "TD-MPC2 chunks (*.pt): refused, and nothing was run or written."
    )
