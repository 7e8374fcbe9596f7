"""checkpoints/catalog.json: which checkpoints a run has, when they were made, how good they are."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from forethought.files import FileError, Manifest, read_json, read_manifest, verify, write_json
from forethought.files import published as published_in
from forethought.tracking.run_directory import utc_now


@dataclass(frozen=True)
class Entry:
    """One checkpoint."""

    step: int
    """Agent steps at which it was made."""
    env_frames: int
    """Environment frames at which it was made."""
    path: str
    """Directory, relative to the catalog's own."""
    eval_score: float | None
    """Mean return of the evaluation made at this step; None if there was none."""
    timestamp: str
    """UTC, ISO 8601; never earlier than that of the entry before."""
    sha256: str
    """Of its manifest, which in turn vouches for every file."""

    def __post_init__(self) -> None:
        """Nothing that a hand wrote into the file may lead outside or be no number."""
        counts = all(type(x) is int and x >= 0 for x in (self.step, self.env_frames))
        score = self.eval_score is None or type(self.eval_score) is float
        score = score or (type(self.eval_score) is int and abs(self.eval_score) < 2**63)
        texts = all(isinstance(x, str) for x in (self.path, self.timestamp, self.sha256))
        if not (counts and score and texts and re.fullmatch(r"[a-z]+-\d+", self.path)):
            raise TypeError(f"{self.path!r} is not described as a checkpoint is")


class Catalog:
    """The catalog of one directory of checkpoints; every change is atomic.

    It is an index and not the truth: the checkpoints themselves are. `sync` mends it.
    """

    def __init__(self, checkpoints: Path, now: Callable[[], str] = utc_now) -> None:
        self.folder = checkpoints
        self.file = checkpoints / "catalog.json"
        self._now = now

    def entries(self) -> list[Entry]:
        """All entries, oldest first."""
        if not self.file.exists():
            return []
        data = read_json(self.file)
        try:
            return [Entry(**entry) for entry in data]
        except TypeError as error:
            raise FileError(f"{self.file} is damaged: {error}.") from error

    def add(self, path: Path, env_frames: int, eval_score: float | None) -> Entry:
        """Enter a checkpoint that was just published; one of the same step is replaced."""
        others = [entry for entry in self.entries() if entry.path != path.name]
        entry = self._entry(others, path, read_manifest(path), env_frames, eval_score)
        self._write([*others, entry])
        return entry

    def remove(self, names: set[str]) -> None:
        """Take checkpoints out of the catalog, by directory name."""
        self._write([entry for entry in self.entries() if entry.path not in names])

    def best(self) -> Entry | None:
        """The entry with the highest score, the newest of equals; None if none has a score."""
        scored = [
            (entry.eval_score, index, entry)
            for index, entry in enumerate(self.entries())
            if entry.eval_score is not None and math.isfinite(entry.eval_score)
        ]
        return max(scored)[2] if scored else None

    def sync(self) -> list[str]:
        """Make the catalog agree with the directories; returns a sentence for each difference.

        A process may die between publishing a checkpoint (a second time at the same step, maybe)
        and entering it, or between removing a checkpoint and its entry. `env_frames` and
        `eval_score` of a checkpoint that is not entered are taken from its manifest's meta.
        """
        notes: list[str] = []
        try:
            known = {entry.path: entry for entry in self.entries()}
        except FileError as error:
            notes.append(f"The catalog is made anew: {error}")
            known = {}
        present = {path.name: path for path in published_in(self.folder)}
        for name in sorted(known.keys() - present.keys()):
            notes.append(f"{name} was taken out of the catalog: it is missing.")
        kept: list[Entry] = []
        for name, path in present.items():  # by step, as entries() promises
            entry = known.get(name)
            try:
                if entry is None or read_manifest(path).sha256 != entry.sha256:
                    entry = self._read_entry(kept, path)
                    notes.append(f"{name} was entered in the catalog.")
                earliest = kept[-1].timestamp if kept else ""
                kept.append(replace(entry, timestamp=max(entry.timestamp, earliest)))
            except (FileError, TypeError) as error:
                what = "was not entered in" if name not in known else "was taken out of"
                notes.append(f"{name} {what} the catalog: {error}")
        if notes:
            self._write(kept)
        return notes

    def _read_entry(self, earlier: list[Entry], path: Path) -> Entry:
        """What a checkpoint says of itself; FileError if it is not whole."""
        manifest = verify(path)
        frames, score = manifest.meta.get("env_frames"), manifest.meta.get("eval_score")
        if frames is None:
            raise FileError("its manifest does not tell env_frames.")
        return self._entry(earlier, path, manifest, frames, score)

    def _entry(
        self,
        earlier: list[Entry],
        path: Path,
        manifest: Manifest,
        env_frames: int,
        eval_score: float | None,
    ) -> Entry:
        # The wall clock may jump back; the catalog's order must not.
        timestamp = max([self._now(), *(entry.timestamp for entry in earlier)])
        step = int(path.name.rpartition("-")[2])
        return Entry(step, env_frames, path.name, eval_score, timestamp, manifest.sha256)

    def _write(self, entries: list[Entry]) -> None:
        write_json(self.file, [asdict(entry) for entry in entries])
