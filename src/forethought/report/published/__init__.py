"""Published learning curves, shipped as data; README.md beside this file names the sources."""

from __future__ import annotations

import bisect
import csv
import functools
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

NAMES = {"tdmpc2": "TD-MPC2", "sac": "SAC"}
"""Agents with a published curve, and how people write their names."""
SOURCE = "results of the official TD-MPC2 repository (Hansen et al., 2024)"


@dataclass(frozen=True)
class Published:
    """A curve from a paper or its repository."""

    label: str
    """What a picture writes beside it."""
    source: str
    frames: tuple[int, ...]
    """env_frames, rising."""
    means: tuple[float, ...]
    """Mean return over the published seeds."""
    seeds: tuple[int, ...]
    """How many seeds each mean is of."""

    def at(self, frames: float) -> tuple[int, float]:
        """(env_frames, mean) of the first published point that had at least this many frames.

        Nothing is interpolated: where the budgets differ, the reader is told both.
        """
        place = min(bisect.bisect_left(self.frames, frames), len(self.frames) - 1)
        return self.frames[place], self.means[place]


def published(task: str, agent: str) -> Published | None:
    """The published curve of an agent on a task such as dmc:cheetah-run, if there is one."""
    family, _, name = task.partition(":")
    rows = _table().get((agent, name), []) if family == "dmc" and agent in NAMES else []
    if not rows:
        return None
    frames, means, seeds = zip(*sorted(rows))
    return Published(f"published {NAMES[agent]}", SOURCE, frames, means, seeds)


@functools.cache
def _table() -> dict[tuple[str, str], list[tuple[int, float, int]]]:
    """Rows (env_frames, mean, seeds) by (algorithm, task)."""
    found = defaultdict(list)
    with (Path(__file__).parent / "tdmpc2_dmc.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            point = (int(row["env_step"]), float(row["mean"]), int(row["n_seeds"]))
            found[row["algo"], row["task"]].append(point)
    return dict(found)
