"""Trainers that alternate on one machine: each runs in a process of its own, stops at the end of
every chunk of agent steps and waits to be told to go on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO

from results import median_p10


class Pace:
    """Counts agent steps inside a side; they may come several at once."""

    def __init__(self, first: int, chunk: int, channel: TextIO) -> None:
        self.next, self.chunk, self.channel = first + chunk, chunk, channel
        self.began, self.last = 0.0, first

    def step(self, agent_steps: int) -> None:
        """At the end of a chunk, tell steps per second and wait; the first chunk only warms up."""
        if agent_steps < self.next:
            return
        took = time.perf_counter() - self.began if self.began else 0.0
        speed = (agent_steps - self.last) / took if took else 0.0
        print(json.dumps(speed), file=self.channel, flush=True)
        if not sys.stdin.readline():  # nobody asks any more
            raise SystemExit(0)
        self.next, self.last = agent_steps + self.chunk, agent_steps
        self.began = time.perf_counter()


def own_channel() -> TextIO:
    """The standard output for speeds alone: what else a side prints goes to the errors."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return channel


class Side:
    """One trainer in a process of its own; `command` is a script with its flags."""

    def __init__(self, name: str, command: Sequence[str], threads: int) -> None:
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        )
        self._read()  # it has begun to learn and is warm

    def steps_per_second(self) -> float:
        """Of one more chunk."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return self._read()

    def _read(self) -> float:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"A side of the benchmark ended early: {self.process.args}")
        return float(json.loads(line))

    def close(self) -> None:
        """Lets it end: it reads the end of its input."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def alternate(sides: list[Side], rounds: int) -> list[dict[str, float]]:
    """Rounds of one chunk of each side, the order turning around; agent steps per second."""
    found = []
    for number in range(rounds):
        row = {side.name: side.steps_per_second() for side in sides}
        sides.reverse()
        found.append(row)
        told = "   ".join(f"{name} {speed:7.1f}/s" for name, speed in sorted(row.items()))
        print(f"  round {number + 1:2d}   {told}", flush=True)
    return found


def summary(rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Medians and lower tenths of every side."""
    found: dict[str, Any] = {}
    for name in rounds[0]:
        middle, low = median_p10([row[name] for row in rounds])
        found |= {f"{name}_median": middle, f"{name}_p10": low}
    return found
