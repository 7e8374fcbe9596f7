"""Published learning curves, shipped as data; README.md beside this file names the sources."""

from __future__ import annotations

import bisect
import csv
import functools
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from forethought.envs import atari

NAMES = {"tdmpc2": "TD-MPC2", "sac": "SAC"}
"""Agents with a published curve, and how people write their names."""
DOPAMINE = (
    "training games of the published baselines of Dopamine (Castro et al., 2018), sticky actions "
    "0.25, epsilon falling to 0.01 over the first million frames"
)
SOURCE = "results of the official TD-MPC2 repository (Hansen et al., 2024)"
EPISODE_FRAMES, ACTION_REPEAT = 1000, 2
"""Of the published runs on DeepMind Control."""


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
    action_repeat: int | None = None
    """Frames for which its agents hold an action; None: runs here hold theirs as long."""

    def at(self, frames: float) -> tuple[int, float]:
        """(env_frames, mean) of the first published point that had at least this many frames.

        Nothing is interpolated: where the budgets differ, the reader is told both.
        """
        place = min(bisect.bisect_left(self.frames, frames), len(self.frames) - 1)
        return self.frames[place], self.means[place]

    @property
    def spacing(self) -> int | None:
        """env_frames between two points; None where they lie at unequal distances."""
        gaps = {b - a for a, b in pairwise(self.frames)}
        return gaps.pop() if len(gaps) == 1 else None


def published(task: str, agent: str, config: Mapping[str, Any] | None = None) -> Published | None:
    """The published curve of an agent on a task such as dmc:cheetah-run, if there is one. `config`
    (keys dotted) tells which of the algorithms it is that share a name, and what it sees."""
    family, _, name = task.partition(":")
    if (family, agent) == ("atari", "dqn"):
        return _of_dopamine(name, config or {})
    if family == "dmc" and agent in NAMES:
        return _of_control(name, agent, config or {})
    return None


def _of_control(name: str, agent: str, config: Mapping[str, Any]) -> Published | None:
    """From pixels where a run sees pixels; none where its episodes have another length, for then
    returns are of another size."""
    limit = config.get("env.eval_max_episode_steps") or config.get("env.max_episode_steps")
    repeat = config.get("env.action_repeat") or ACTION_REPEAT
    if limit is not None and limit * repeat != EPISODE_FRAMES:
        return None
    pixels = config.get("env.obs") is not None
    rows = _table().get((f"{agent}-pixels" if pixels else agent, name), [])
    if not rows:
        return None
    frames, means, seeds = zip(*sorted(rows))
    label = f"published {NAMES[agent]}" + (" from pixels" if pixels else "")
    return Published(label, SOURCE, frames, means, seeds, ACTION_REPEAT)


@functools.cache
def _table() -> dict[tuple[str, str], list[tuple[int, float, int]]]:
    """Rows (env_frames, mean, seeds) by (algorithm, task)."""
    found = defaultdict(list)
    with (Path(__file__).parent / "tdmpc2_dmc.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            point = (int(row["env_step"]), float(row["mean"]), int(row["n_seeds"]))
            found[row["algo"], row["task"]].append(point)
    return dict(found)


def _of_dopamine(name: str, config: Mapping[str, Any]) -> Published | None:
    """The curve of the member of the family that a run is most like."""
    kind = config.get("agent.distribution.kind", "none")
    algo = {"none": "DQN", "c51": "C51", "qr": "QR-DQN", "iqn": "IQN"}[kind]
    if kind == "c51" and config.get("replay.kind") == "prioritized":
        algo = "Rainbow"
    network = "impala" if config.get("agent.network.kind") == "impala" else "nature"
    rows = _dopamine_table().get((network, algo, atari.parse(name)[0]))
    if rows is None:
        return None
    label = f"Dopamine's {algo}" + (" with Impala" if network == "impala" else "")
    frames, means, seeds = zip(*sorted(rows))
    return Published(label, DOPAMINE, frames, means, seeds)


@functools.cache
def _dopamine_table() -> dict[tuple[str, str, str], list[tuple[int, float, int]]]:
    """Rows (env_frames, mean, seeds) by (network, algorithm, game)."""
    found = defaultdict(list)
    with (Path(__file__).parent / "dopamine_atari.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            point = (int(row["env_frames"]), float(row["mean"]), int(row["n_seeds"]))
            found[row["network"], row["algo"], row["game"]].append(point)
    return dict(found)
