"""Checkpoints of a run: written whole or not at all, listed, pruned, found again.

    checkpoints/step-000123456/   agent.safetensors   weights, optimisers, running scales, streams
                                  agent.json          the agent's counters; which replay blocks
                                  replay.safetensors  the replay's open tail and sampler
                                  loop.safetensors    last observations and actions of open episodes
                                  loop.json           counters, updates owed, streams, CSV positions
                                  manifest.json       sizes and sha256 of all of them; written last
    checkpoints/catalog.json      an index of them

Strategy: a checkpoint on the way that cannot be written warns, is counted and training goes on
(the loop tries again at the next interval); the last one raises. A loader takes the newest that
verifies, replay blocks included, and says what it skipped.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from forethought import files
from forethought.agents.base import Agent
from forethought.config import ConfigError
from forethought.files import FileError, reach
from forethought.tracking import Catalog, RunDirectory

State = tuple[dict[str, Any], dict[str, Tensor]]
"""JSON and tensors."""


class Checkpoints:
    """The checkpoints of one run directory: the newest `keep`, and the best besides."""

    def __init__(self, run: RunDirectory, keep: int = 1) -> None:
        self.run = run
        self.folder = run.checkpoints
        self.keep = keep
        self.catalog = Catalog(run.checkpoints)

    def save(
        self, agent: Agent, loop: State, counters: Mapping[str, int], score: float | None
    ) -> Path:
        """Publishes a checkpoint, then forgets what need not be kept; FileError if it cannot.

        `score` is the mean return of the evaluation at this very step, if there was one.
        """
        self._forget_deleted()
        step = counters["agent_steps"]
        path = self.folder / f"step-{step:09d}"
        agent_json, agent_tensors = agent.state()
        replay_json, replay_tensors = agent.replay.state()
        meta = {**counters, "eval_score": score, "replay_blocks": block_hashes(replay_json)}
        with files.publish(path, meta) as folder:
            files.save_tensors(folder / "agent.safetensors", agent_tensors)
            files.save_tensors(folder / "replay.safetensors", replay_tensors)
            reach(f"save-{step}")
            files.write_json(folder / "agent.json", {**agent_json, "replay": replay_json})
            files.save_tensors(folder / "loop.safetensors", loop[1])
            files.write_json(folder / "loop.json", loop[0])
        self.catalog.add(path, counters["env_frames"], score)
        self._prune()
        return path

    def newest(self) -> tuple[Path, list[str]]:
        """The newest that can be resumed from, and a sentence for each that was skipped."""
        skipped: list[str] = []
        for path in reversed(files.published(self.folder)):
            try:
                for name, digest in files.verify(path).meta["replay_blocks"].items():
                    self._check_block(name, digest)
            except FileError as error:
                skipped.append(f"Skipped {path.name}: {error}")
            else:
                return path, skipped
        reason = f" {' '.join(skipped)}" if skipped else ""
        raise FileError(f"{self.folder} holds no complete checkpoint.{reason}")

    def find(self, which: str) -> tuple[Path, list[str]]:
        """The folder of `latest`, `best` or a number of agent steps, verified; for acting, so
        replay blocks do not matter. With it, a sentence for each that was skipped."""
        if which == "latest":
            return files.newest_verified(self.folder)
        if which == "best":
            best = self.catalog.best()
            if best is None:
                raise FileError(f"{self.run.path} has no evaluated checkpoint yet; use latest.")
            path = self.folder / best.path
        elif which.isdigit():
            path = self.folder / f"step-{int(which):09d}"
            if not path.is_dir():
                found = ", ".join(str(entry.step) for entry in self.catalog.entries())
                raise ConfigError(
                    f"{self.run.path} has no checkpoint at step {which}; it has: {found or 'none'}."
                )
        else:
            raise ConfigError(f"checkpoint is {which}, but must be latest, best or a step.")
        files.verify(path)
        return path, []

    def needed_blocks(self) -> set[str]:
        """Names of the replay blocks that the checkpoints here need."""
        paths = [self.folder / entry.path for entry in self.catalog.entries()]
        return {name for path in paths for name in files.read_manifest(path).meta["replay_blocks"]}

    def _forget_deleted(self) -> None:
        """Takes checkpoints that somebody deleted out of the catalog: the others go on as usual."""
        present = {path.name for path in files.published(self.folder)}
        gone = {entry.path for entry in self.catalog.entries()} - present
        if gone:
            self.catalog.remove(gone)
        for name in sorted(gone):
            note = f"{name} was taken out of the catalog: it is missing."
            self.run.event("checkpoints-mended", note=note)

    def _prune(self) -> None:
        entries, best = self.catalog.entries(), self.catalog.best()
        kept = {entry.path for entry in entries[-self.keep :]} | ({best.path} if best else set())
        going = {entry.path for entry in entries} - kept
        if not going:
            return
        self.catalog.remove(going)
        for name in going:
            # A rename first: half a deletion must not look like a damaged checkpoint.
            hidden = self.folder / f".tmp-pruned-{name}"
            (self.folder / name).rename(hidden)
            shutil.rmtree(hidden)

    def _check_block(self, name: str, digest: str) -> None:
        file = self.run.replay / name
        if not file.is_file():
            raise FileError(f"{file} is missing.")
        if files.sha256(file) != digest:
            raise FileError(f"{file} is damaged: its sha256 does not fit.")


def block_hashes(replay_json: Mapping[str, Any]) -> dict[str, str]:
    """sha256 by name of the sealed blocks that a replay's saved state refers to."""
    return {
        block["name"]: block["sha256"]
        for stream in replay_json["streams"]
        for block in stream["blocks"]
    }
