"""Environments that fail in episodes which a test chooses, also in workers and after a resume.

The seeds of those episodes stand in the environment variable FAULTY_SEEDS, which workers inherit;
an episode with any other seed is a plain count to 10 that pays 1 + 2 + ... + 10 = 55.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import gymnasium
import numpy as np

from forethought.envs import EnvError
from forethought.seeding import Streams
from tests.stubs import CounterEnv, FaultyEnv, Step

if TYPE_CHECKING:  # every worker imports this file
    import pytest

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


class OldStyle(CounterEnv):
    """Speaks the API of old gym in one respect, `how`, from step 2 on or in every reset."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        if how.endswith("_space"):
            delattr(self, how)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        obs, info = super().reset(seed=seed)
        returned = {
            "reset-obs": obs,  # two numbers, which unpack into an observation and an info
            "reset-tuple": (obs, obs),
            "reset-info": (obs, None),
        }
        return returned.get(self.how, (obs, info))

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = super().step(action)
        if self.t < 2:
            return obs, reward, terminated, truncated, info
        returned = {
            "step-obs": obs,
            "step-four": (obs, reward, terminated, info),
            "step-info": (obs, reward, terminated, truncated, None),
            "step-ends": (obs, reward, np.array([False, True]), truncated, info),
        }
        return returned.get(self.how, (obs, reward, terminated, truncated, info))


class Exits(FaultyEnv):
    """Calls sys.exit where `place` says: in its construction, reset, step (the third) or close."""

    def __init__(self, place: str, code: object = 3) -> None:
        super().__init__("raise")
        self.place, self.code = place, code
        self._leave("build")

    def _leave(self, place: str) -> None:
        if place == self.place:
            sys.exit(self.code)  # type: ignore[arg-type]

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self._leave("reset")
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Step:
        if self.t == 2:
            self._leave("step")
        return super().step(action)

    def close(self) -> None:
        self._leave("close")


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
for _how in ("reset-obs", "step-four", "observation_space"):
    if f"fault/{_how}-v0" not in gymnasium.registry:
        gymnasium.register(f"fault/{_how}-v0", OldStyle, kwargs={"how": _how})
for _place in ("build", "step"):
    if f"fault/exits-{_place}-v0" not in gymnasium.registry:
        gymnasium.register(f"fault/exits-{_place}-v0", Exits, kwargs={"place": _place})
if "fault/unbuildable-v0" not in gymnasium.registry:
    gymnasium.register("fault/unbuildable-v0", Unbuildable)
