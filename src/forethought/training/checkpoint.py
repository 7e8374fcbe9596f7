"""Checkpoints of a run: written whole or not at all, listed, pruned, found again.

    checkpoints/step-000123456/   agent.safetensors   weights, optimisers, running scales, streams
                                  agent.json          the agent's counters; which replay blocks
                                  replay.safetensors  the replay's open tail and sampler
                                  loop.safetensors    last observations and actions of open episodes
                                  loop.json           counters, updates owed, streams, CSV positions
                                  manifest.json       sizes and sha256 of all of them; written last
    checkpoints/catalog.json      an index of them

Strategy: a checkpoint on the way that cannot be written warns, is counted and training goes on
(the loop tries again at the next interval); the last one raises. Nothing is begun for which the
disk has no room. A loader takes the newest that verifies, replay blocks included, whose content
makes sense, and says what it skipped; a run that goes on from there sets the newer ones aside. A
file in a checkpoint that its manifest does not name is never read, and goes with the checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from forethought import files
from forethought.agents.base import Agent
from forethought.config import ConfigError
from forethought.files import FileError, Manifest, reach
from forethought.tracking import Catalog, RunDirectory
from forethought.training.contents import block_hashes, check_for_acting, check_for_resuming

log = logging.getLogger("forethought")
State = tuple[dict[str, Any], dict[str, Tensor]]
"""JSON and tensors."""


class Checkpoints:
    """The checkpoints of one run directory: the newest `keep`, and the best besides."""

    def __init__(
        self, run: RunDirectory, keep: int = 1, config: dict[str, Any] | None = None
    ) -> None:
        """`config` is the run's whole configuration, for the manifests of those that are saved."""
        self.run = run
        self.folder = run.checkpoints
        self.keep = keep
        self.config = config
        self.catalog = Catalog(run.checkpoints)
        self._size_told = False

    def save(
        self,
        agent: Agent,
        loop: State,
        counters: Mapping[str, int],
        score: float | None,
        unit: str = "agent_steps",
    ) -> Path:
        """Publishes a checkpoint, then forgets what need not be kept; FileError if it cannot.

        `score` is the mean return of the evaluation at this very step, if there was one; `unit` is
        the counter that the step is of.
        """
        self._forget_deleted()
        step = counters[unit]
        path = self.folder / f"step-{step:09d}"
        agent_json, agent_tensors = agent.state()
        replay_json, replay_tensors = agent.replay.state()
        agent_json = {**agent_json, "replay": replay_json}
        meta: dict[str, Any] = {
            **counters,
            "eval_score": score,
            "replay_blocks": block_hashes(replay_json),
        }
        meta |= agent.origin() | agent.facts()
        if unit != "agent_steps":
            meta["step_unit"] = unit
        if self.config is not None:
            meta |= {"config": self.config, "config_sha256": config_hash(self.config)}
        sizes = {
            "agent_bytes": files.tensor_bytes(agent_tensors) + len(files.json_text(agent_json)),
            "replay_tail_bytes": files.tensor_bytes(replay_tensors),
            "loop_bytes": files.tensor_bytes(loop[1]) + len(files.json_text(loop[0])),
            "manifest_bytes": len(files.json_text(meta)) + 2000,  # and five files' names and hashes
        }
        self._tell_size(sizes, agent)
        with files.publish(path, meta, sum(sizes.values())) as folder:
            files.save_tensors(folder / "agent.safetensors", agent_tensors)
            files.save_tensors(folder / "replay.safetensors", replay_tensors)
            reach(f"save-{step}")
            files.write_json(folder / "agent.json", agent_json)
            files.save_tensors(folder / "loop.safetensors", loop[1])
            files.write_json(folder / "loop.json", loop[0])
        self.catalog.add(path, counters["env_frames"], score)
        self._prune()
        return path

    def newest(self, unfit: Mapping[str, str] | None = None) -> tuple[Path, list[str]]:
        """The newest that can be resumed from, and a sentence for each that was skipped.

        `unfit` are those that the caller could not use: why, by name.
        """
        skipped: list[str] = []
        for path in reversed(files.published(self.folder)):
            try:
                if unfit and path.name in unfit:
                    raise FileError(unfit[path.name])
                manifest = files.verify(path)
                self._check_run(path, manifest)
                for name, digest in check_for_resuming(path, manifest).items():
                    self._check_block(name, digest)
            except FileError as error:
                skipped.append(f"Skipped {path.name}: {error}")
            else:
                return path, skipped
        reason = f" {' '.join(skipped)}" if skipped else ""
        raise FileError(f"{self.folder} holds no usable checkpoint.{reason} Train anew.")

    def set_aside_newer(self, than: Path) -> None:
        """Takes the checkpoints after `than`, which were skipped, out of the way of the run that
        goes on from it: what made one of them useless may come right again (a replay block is
        written anew), and it would be the newest, though its CSV rows are gone."""
        numbered = files.published(self.folder)
        newer = numbered[numbered.index(than) + 1 :]
        if not newer:
            return
        for path in newer:
            aside = path.with_name(f"{path.name}.skipped")
            try:
                if os.path.lexists(aside):
                    files.remove(aside)
                path.rename(aside)
                files.fsync_dir(self.folder)
            except OSError as error:
                raise FileError(
                    f"{path} could not be renamed to {aside.name} ({error.strerror}): check the "
                    "permissions there."
                ) from error
            self.run.event("checkpoint-set-aside", checkpoint=path.name, now=aside.name)
        self.catalog.remove({path.name for path in newer})

    def find(self, which: str | int) -> tuple[Path, list[str]]:
        """The folder of `latest`, `best` or a number of agent steps, verified; for acting, so
        replay blocks do not matter. With it, a sentence for each that was skipped, also told."""
        which = str(which)
        if which == "latest":
            path, skipped = files.newest_verified(self.folder, self._check_playable)
            for reason in skipped:
                log.warning("%s", reason)
            return path, skipped
        if which == "best":
            best = self.catalog.best()
            if best is None:
                raise ConfigError(f"{self.run.path} has no evaluated checkpoint yet; use latest.")
            path = self.folder / best.path
        elif which.isdigit():
            path = self.folder / f"step-{int(which[:18]):09d}"
            if not path.is_dir():
                found = ", ".join(str(entry.step) for entry in self.catalog.entries())
                raise ConfigError(
                    f"{self.run.path} has no checkpoint at step {which}; it has: {found or 'none'}."
                )
        else:
            raise ConfigError(f"checkpoint is {which}, but must be latest, best or a step.")
        self._check_playable(path, files.verify(path))
        return path, []

    def needed_blocks(self) -> set[str]:
        """Names of the replay blocks that the checkpoints here need."""
        needed: set[str] = set()
        for entry in self.catalog.entries():
            try:
                needed |= set(files.read_manifest(self.folder / entry.path).meta["replay_blocks"])
            except (FileError, KeyError, TypeError) as error:  # damaged: nobody can resume from it
                note = f"The replay blocks of {entry.path} are not kept for it: {error}"
                self.run.event("checkpoints-mended", note=note)
        return needed

    def _forget_deleted(self) -> None:
        """Takes checkpoints that somebody deleted out of the catalog: the others go on as usual.

        A catalog that cannot be read is made anew.
        """
        present = {path.name for path in files.published(self.folder)}
        try:
            gone = {entry.path for entry in self.catalog.entries()} - present
        except FileError:
            for note in self.catalog.sync():
                self.run.event("checkpoints-mended", note=note)
            return
        if gone:
            self.catalog.remove(gone)
        for name in sorted(gone):
            note = f"{name} was taken out of the catalog: it is missing."
            self.run.event("checkpoints-mended", note=note)

    def _tell_size(self, sizes: Mapping[str, int], agent: Agent) -> None:
        """Once, before the first is written: what a checkpoint takes, and what replay will take."""
        if not self._size_told:
            full = agent.replay.bytes_total
            self.run.event("checkpoint-size", **sizes, replay_bytes_when_full=full)
        self._size_told = True

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
            files.remove(hidden)

    def _check_playable(self, path: Path, manifest: Manifest) -> None:
        self._check_run(path, manifest)
        check_for_acting(path, manifest)

    def _check_run(self, path: Path, manifest: Manifest) -> None:
        """Refuse a checkpoint of another run that was put here."""
        about, meta = self.run.run_json, manifest.meta
        here = about["agent"], about["task"]
        there = meta.get("agent", here[0]), meta.get("task", here[1])  # older ones do not tell
        if there != here:
            raise FileError(
                f"{path} was written by {there[0]} for {there[1]}, but this run is {here[0]} for "
                f"{here[1]}: use the agent and task that it was trained with."
            )

    def _check_block(self, name: str, digest: str) -> None:
        file = self.run.replay / name
        if re.fullmatch(r"[a-z0-9-]+\.safetensors", name) is None:
            raise FileError(f"It names a replay block {name[:200]!r}, which lies outside: refused.")
        if not os.path.lexists(file):
            raise FileError(f"{file} is missing.")
        if files.sha256(file) != digest:
            raise FileError(f"{file} is damaged: its sha256 does not fit.")


def config_hash(config: Mapping[str, Any]) -> str:
    """The sha256 of a configuration, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
