"""Published ways to evaluate in Atari games, by name, and human-normalised scores.

A protocol decides everything that a score depends on besides the agent: how much is played, where a
game is cut, how often an action is random, and what makes games differ (no-ops or sticky actions).
The scores of random play and of people are those that the papers use, from atari_scores.csv.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forethought.config import ATARI, ConfigError, EnvConfig, unknown
from forethought.envs import atari


@dataclass(frozen=True)
class Protocol:
    """How one paper or library evaluates."""

    source: str
    episodes: int | None
    """Games per evaluation; None where steps are counted."""
    agent_steps: int | None
    """Games are begun until those before have taken so many decisions; None where games count."""
    max_frames: int
    """Frames after which a game is truncated."""
    epsilon: float
    """Probability of a random action."""
    sticky_actions: float
    noop_max: int

    def environment(self, config: EnvConfig) -> dict[str, Any]:
        """What its environments are made with; all else is as in training."""
        chosen = {"sticky_actions": self.sticky_actions, "noop_max": self.noop_max}
        repeat = config.action_repeat or atari.ACTION_REPEAT
        return {
            **config.evaluation,
            "max_episode_steps": max(1, self.max_frames // repeat),
            "atari": dataclasses.replace(config.evaluation["atari"], **chosen),
        }


PROTOCOLS = {
    "nature": Protocol(
        source="Mnih et al., 2015: 30 games of at most 5 minutes, up to 30 no-ops, epsilon 0.05",
        episodes=30,
        agent_steps=None,
        max_frames=18_000,
        epsilon=0.05,
        sticky_actions=0.0,
        noop_max=30,
    ),
    "dopamine": Protocol(
        source="Dopamine (Castro et al., 2018): 125,000 steps, sticky actions, epsilon 0.001",
        episodes=None,
        agent_steps=125_000,
        max_frames=108_000,
        epsilon=0.001,
        sticky_actions=0.25,
        noop_max=0,
    ),
}


def protocol_of(name: str | None, task: str) -> Protocol | None:
    """The protocol of a name, for a task that it can be used on."""
    if name is None:
        return None
    if name not in PROTOCOLS:
        raise unknown("protocol", name, PROTOCOLS, f"There are {', '.join(PROTOCOLS)}.")
    if not task.startswith(ATARI):
        raise ConfigError(f"protocol is {name}, which is for {ATARI} tasks, but this is {task}.")
    return PROTOCOLS[name]


def evaluation_options(task: str, config: EnvConfig, protocol: str | None) -> dict[str, Any]:
    """What the evaluation environments of a run are made with."""
    rules = protocol_of(protocol, task)
    return config.evaluation if rules is None else rules.environment(config)


def human_normalised(task: str, score: float) -> float | None:
    """0 for random play, 1 for a person; None for tasks and games without such scores."""
    if not task.startswith(ATARI):
        return None
    rom, _ = atari.parse(task.removeprefix(ATARI))
    if rom not in _scores():
        return None
    random, human = _scores()[rom]
    return (score - random) / (human - random)


@functools.cache
def _scores() -> dict[str, tuple[float, float]]:
    """The scores of random play and of a person by game."""
    with (Path(__file__).parent / "atari_scores.csv").open(encoding="utf-8", newline="") as file:
        lines = (line for line in file if not line.startswith("#"))
        return {
            row["game"]: (float(row["random"]), float(row["human"]))
            for row in csv.DictReader(lines)
        }
