"""Counters with units, what is due when, how many updates are owed, and schedules.

Nothing here reads the time of day: a run's future depends only on these counts, so that an
interrupted run and an undisturbed one do the same things at the same counts.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import ClassVar, Protocol

from forethought.config import ForethoughtError, require


@dataclass
class Clock:
    """The four counters of a run."""

    agent_steps: int = 0
    """Decisions taken, summed over environments."""
    env_frames: int = 0
    """Decisions times action repeat."""
    updates: int = 0
    """Gradient steps."""
    episodes: int = 0
    """Finished training episodes."""
    unit: ClassVar[str] = "agent_steps"
    """What the run is measured in: its length, its intervals and the names of its checkpoints."""

    @property
    def position(self) -> int:
        """How far the run has come, in its unit."""
        return int(getattr(self, self.unit))

    @property
    def told(self) -> str:
        """The same in words."""
        return f"{self.position:,} {self.unit.replace('_', ' ')}"

    def row(self) -> dict[str, int]:
        """The counters in the order in which every CSV begins."""
        return asdict(self)

    def state(self) -> dict[str, int]:
        return asdict(self)

    def restore(self, state: dict[str, int]) -> None:
        self.agent_steps = state["agent_steps"]
        self.env_frames = state["env_frames"]
        self.updates = state["updates"]
        self.episodes = state["episodes"]


class OfflineClock(Clock):
    """The counters of a run that learns from recorded data: it takes no steps, only updates."""

    unit: ClassVar[str] = "updates"


class Every:
    """Says when a count has crossed a multiple of `period`; a period of 0 is never due.

    Counts may jump (many environments step together), so `count % period == 0` would miss some.
    """

    def __init__(self, period: int) -> None:
        require(period >= 0, "period", period, "at least 0")
        self.period = period
        self._last = 0

    def due(self, count: int) -> bool:
        """True once for each time that a multiple was reached or crossed since the last call."""
        if self.period == 0:
            return False
        crossed = count // self.period > self._last // self.period
        self._last = count
        return crossed

    def state(self) -> dict[str, int]:
        return {"last": self._last}

    def restore(self, state: dict[str, int]) -> None:
        self._last = state["last"]


class UpdateBudget:
    """How many gradient steps the agent steps taken so far have earned, less those done.

        agent steps   0 ......... seed_agent_steps ..................... now
        earned        nothing     seed_updates at once, then updates_per_agent_step each

    Earned updates are a function of the count, not a running sum: a ratio of 0.1 gives exactly one
    update per ten steps for ever, however the steps were grouped.
    """

    def __init__(
        self, updates_per_agent_step: float, seed_agent_steps: int, seed_updates: int
    ) -> None:
        require(
            updates_per_agent_step >= 0 and math.isfinite(updates_per_agent_step),
            "train.updates_per_agent_step",
            updates_per_agent_step,
            "finite and at least 0",
        )
        require(seed_agent_steps >= 0, "train.seed_agent_steps", seed_agent_steps, "at least 0")
        require(seed_updates >= 0, "train.seed_updates", seed_updates, "at least 0")
        # Through the decimal text: Fraction(0.1) would be the binary neighbour of 1/10.
        ratio = Fraction(repr(float(updates_per_agent_step)))
        self._numerator, self._denominator = ratio.numerator, ratio.denominator
        self._seed_agent_steps = seed_agent_steps
        self._seed_updates = seed_updates
        self._agent_steps = 0
        self._taken = 0

    def advance(self, agent_steps_total: int) -> None:
        """Tell how many agent steps the run has taken in all."""
        self._agent_steps = agent_steps_total

    @property
    def owed(self) -> int:
        """Updates earned and not yet taken."""
        after_seed = self._agent_steps - self._seed_agent_steps
        if after_seed < 0:
            return 0
        earned = self._numerator * after_seed // self._denominator  # asked several times a step
        return self._seed_updates + earned - self._taken

    def take(self) -> None:
        """Count one update as done."""
        if self.owed < 1:
            raise ForethoughtError(
                "An update was taken that was not owed: ask UpdateBudget.owed first."
            )
        self._taken += 1

    def state(self) -> dict[str, int]:
        return {"agent_steps": self._agent_steps, "taken": self._taken}

    def restore(self, state: dict[str, int]) -> None:
        self._agent_steps = state["agent_steps"]
        self._taken = state["taken"]


class Schedule(Protocol):
    """A number that depends on a count; the caller says of what."""

    def value(self, count: int) -> float: ...


def _warmed(count: int, warmup: int) -> float:
    """The factor of the warm-up: 1/warmup at the first count, 1 at the last and after.

    Not 0 at the first: a gradient step with learning rate 0 would be wasted.
    """
    return min(1.0, (max(count, 0) + 1) / warmup) if warmup > 0 else 1.0


def _progress(count: int, warmup: int, duration: int) -> float:
    """How far the schedule has come, from 0 to 1; its time starts when the warm-up ends."""
    return min(1.0, max(0.0, (count - warmup) / duration))


@dataclass(frozen=True)
class Constant:
    """Always `start`, after an optional warm-up."""

    start: float
    """The value."""
    warmup: int = 0
    """Counts over which the value first rises to `start`."""

    def __post_init__(self) -> None:
        require(self.warmup >= 0, "schedule.warmup", self.warmup, "at least 0")

    def value(self, count: int) -> float:
        return self.start * _warmed(count, self.warmup)


@dataclass(frozen=True)
class Linear:
    """A straight line from `start` to `end`, after an optional warm-up."""

    start: float
    """The value when the warm-up ends."""
    end: float
    """The value `duration` counts later, and from then on."""
    duration: int
    """Counts from `start` to `end`, warm-up not included."""
    warmup: int = 0
    """Counts over which the value first rises to `start`."""

    def __post_init__(self) -> None:
        require(self.duration >= 1, "schedule.duration", self.duration, "at least 1")
        require(self.warmup >= 0, "schedule.warmup", self.warmup, "at least 0")

    def value(self, count: int) -> float:
        progress = _progress(count, self.warmup, self.duration)
        if progress == 1.0:
            return self.end  # exactly, without the rounding of the sum below
        return (self.start + (self.end - self.start) * progress) * _warmed(count, self.warmup)


@dataclass(frozen=True)
class Cosine:
    """Half a cosine wave from `start` to `end`, after an optional warm-up."""

    start: float
    """The value when the warm-up ends."""
    end: float
    """The value `duration` counts later, and from then on."""
    duration: int
    """Counts from `start` to `end`, warm-up not included."""
    warmup: int = 0
    """Counts over which the value first rises to `start`."""

    def __post_init__(self) -> None:
        require(self.duration >= 1, "schedule.duration", self.duration, "at least 1")
        require(self.warmup >= 0, "schedule.warmup", self.warmup, "at least 0")

    def value(self, count: int) -> float:
        progress = _progress(count, self.warmup, self.duration)
        if progress == 1.0:
            return self.end
        wave = (1.0 + math.cos(math.pi * progress)) / 2.0
        return (self.end + (self.start - self.end) * wave) * _warmed(count, self.warmup)
