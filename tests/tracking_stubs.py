"""Sinks that remember or fail, and a stub of training that feeds a tracker."""

from __future__ import annotations

import math
import types
from pathlib import Path

import numpy as np

from forethought.clock import Clock
from forethought.tracking import TIME_COLUMNS, Tracker, read_rows

METRICS = ("loss", "q_max", "grad_norm")


class ListSink:
    """Remembers every call."""

    def __init__(self):
        self.calls = []

    def start(self, run):
        self.calls.append(("start", run.path))

    def train(self, row):
        self.calls.append(("train", row))

    def episode(self, row):
        self.calls.append(("episode", row))

    def evaluation(self, row):
        self.calls.append(("evaluation", row))

    def close(self):
        self.calls.append(("close", None))

    def rows(self, kind):
        return [row for name, row in self.calls if name == kind]


class BrokenSink:
    """Raises in every call, as W&B does when the network is gone."""

    def __init__(self):
        self.calls = 0

    def __getattr__(self, name):
        def fail(*arguments):
            self.calls += 1
            raise ConnectionError("no network")

        if name in ("start", "train", "episode", "evaluation", "progress", "close"):
            return fail
        raise AttributeError(name)


class FakeWandb(types.ModuleType):
    """What `import wandb` gives in tests: keeps what it is told, one row per step as W&B does.

    What is logged at the step of the last row is merged into it, key by key.
    """

    def __init__(self):
        super().__init__("wandb")
        self.asked = {}
        self.logged = []
        self.tags = ()
        self.finished = False

    def init(self, **options):
        self.asked = options
        return self

    def log(self, data, step):
        if self.logged and self.logged[-1][0] == step:
            self.logged[-1][1].update(data)
        else:
            self.logged.append((step, dict(data)))

    def finish(self):
        self.finished = True


def play(tracker: Tracker, clock: Clock, steps: int, stop: int | None = None) -> None:
    """A stub of training: action repeat 2, an episode per 300 steps, a row per 1000 steps."""
    while clock.agent_steps < (stop or steps):
        clock.agent_steps += 1
        clock.env_frames += 2
        clock.updates += 1
        noise = math.sin(clock.agent_steps)
        tracker.add({"loss": 0.1 + noise, "q_max": noise, "grad_norm": 1.0})
        if clock.agent_steps % 300 == 0:
            clock.episodes += 1
            tracker.episode(
                {
                    "env_index": 0,
                    "return": np.float32(0.1) + clock.episodes,
                    "length_agent_steps": 300,
                    "terminated": False,
                    "truncated": True,
                    "seed": 2**31 - 1,
                }
            )
        if clock.agent_steps % 1000 == 0:
            tracker.flush_train(clock)
        tracker.tick("training")


def without_times(path: Path) -> list[dict[str, str]]:
    rows, note = read_rows(path)
    assert note is None
    return [{k: v for k, v in row.items() if k not in TIME_COLUMNS} for row in rows]
