"""Training from recorded data: the loop of any run, in which a step is an update.

There are no training environments, so nothing is collected, no random phase comes first, and the
run is measured in updates: its length, its intervals and the names of its checkpoints. Evaluations,
checkpoints, gates and exact resume are those of every run.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from forethought.clock import Clock, OfflineClock, UpdateBudget
from forethought.config import RunConfig
from forethought.files import reach
from forethought.training.trainer import Trainer


class OfflineTrainer(Trainer):
    """The parts of a run that learns from recorded data."""

    collector: None

    def make_clock(self) -> Clock:
        return OfflineClock()

    def make_budget(self) -> UpdateBudget:
        """Nothing is owed: there are no steps to earn an update."""
        return UpdateBudget(0.0, 0, 0)

    def make_collector(self) -> None:
        return None

    def advance(self) -> bool:
        """One update from the data."""
        halted = self.learn()
        reach(f"step-{self.clock.updates}")
        return halted

    def warn_if_idle(self) -> None:
        """Every offline run learns."""


def with_whole_paths(config: RunConfig) -> RunConfig:
    """The data's folders as absolute paths, so that a run can be resumed from anywhere."""
    if not config.is_offline:
        return config
    folders = ",".join(str(Path(folder).resolve()) for folder in config.offline.folders)
    return replace(config, offline=replace(config.offline, data=folders))
