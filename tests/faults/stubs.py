"""Environments that fail in episodes which a test chooses, also in workers and after a resume.

The seeds of those episodes stand in the environment variable FAULTY_SEEDS, which workers inherit;
an episode with any other seed is a plain count to 10 that pays 1 + 2 + ... + 10 = 55.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from typing import Any, ClassVar

import gymnasium
import pytest

from forethought.envs import EnvError
from forethought.seeding import Streams
from tests.stubs import FaultyEnv, Step

VARIABLE = "FAULTY_SEEDS"


class ChosenFaults(FaultyEnv):
    """Does `fault` at step 3, or with the fault "reset" in the reset, of the chosen episodes."""

    def __init__(self, fault: str, at: int = 3, length: int | None = 10) -> None:
        super().__init__("raise" if fault == "reset" else fault, at, length)
        self.in_reset = fault == "reset"

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.only_seeds = tuple(int(word) for word in os.environ.get(VARIABLE, "").split())
        if self.in_reset and seed in self.only_seeds:
            raise RuntimeError("the wheel came off")
        return super().reset(seed=seed, options=options)


class Unbuildable(FaultyEnv):
    """Always raises at step 1; the objects whose numbers are in `refused` cannot be made at all."""

    made: ClassVar[int] = 0
    refused: ClassVar[tuple[int, ...]] = ()

    def __init__(self) -> None:
        number = Unbuildable.made
        Unbuildable.made += 1
        if number in self.refused:
            raise OSError("no such rom")
        super().__init__("raise", at=1)


class Stubborn(FaultyEnv):
    """Hangs at step 1 and is not to be woken: it catches the interruption and returns."""

    def __init__(self) -> None:
        super().__init__("hang", at=1)

    def step(self, action: Any) -> Step:
        try:
            return super().step(action)
        except EnvError:
            return self.observe(), 0.0, False, False, {}


class Deaf(FaultyEnv):
    """Hangs at step 1 and gets no signal meanwhile, as code that does not return to Python."""

    def __init__(self) -> None:
        super().__init__("hang", at=1)

    def step(self, action: Any) -> Step:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
        time.sleep(3600)
        return super().step(action)


def choose(monkeypatch: pytest.MonkeyPatch, episodes: Iterable[tuple[int, int]]) -> None:
    """The faulty training episodes of a run with seed 1, as (environment, number of episode)."""
    seeds = [str(Streams(1).seed("env", i, number)) for i, number in episodes]
    monkeypatch.setenv(VARIABLE, " ".join(seeds))


def task(fault: str) -> str:
    """The name of the task whose chosen episodes have this fault."""
    return f"gym:tests.faults.stubs:fault/{fault}-v0"


for _fault in ("raise", "hang", "kill", "reset", "nan-reward", "nan-observation"):
    if f"fault/{_fault}-v0" not in gymnasium.registry:
        gymnasium.register(f"fault/{_fault}-v0", ChosenFaults, kwargs={"fault": _fault})
if "fault/unbuildable-v0" not in gymnasium.registry:
    gymnasium.register("fault/unbuildable-v0", Unbuildable)
