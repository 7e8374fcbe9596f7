"""What every sink offers, and the guard that keeps a failing sink away from training.

CSV is the truth; other sinks follow and may fail. A sink that raises is warned about once, counted,
left alone until the next logging interval, and disabled after five failures.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Protocol, runtime_checkable

from forethought.config import ConfigError, TrackConfig
from forethought.extras import install_extra
from forethought.tracking.columns import Row
from forethought.tracking.run_directory import RunDirectory

MAX_FAILURES = 5
"""Failures after which a sink is disabled for the rest of the process."""
log = logging.getLogger("forethought")


class Sink(Protocol):
    """A place that rows go to, besides the CSV files; x is the row's env_frames."""

    def start(self, run: RunDirectory) -> None: ...
    def train(self, row: Row) -> None: ...
    def episode(self, row: Row) -> None: ...
    def evaluation(self, row: Row) -> None: ...
    def close(self) -> None: ...


@runtime_checkable
class LiveSink(Protocol):
    """A sink that also follows the run between rows; called at every step, so it must be cheap."""

    def progress(self, position: int, phase: str) -> None: ...


@runtime_checkable
class VideoSink(Protocol):
    """A sink that also shows videos; the row has the counters, and the `file` of an mp4."""

    def video(self, row: Row) -> None: ...


class GuardedSink:
    """A sink behind a guard: nothing that it raises reaches the caller."""

    def __init__(self, sink: Sink, run: RunDirectory) -> None:
        self.failures = 0
        self._sink = sink
        self._live = sink if isinstance(sink, LiveSink) else None
        self._run = run
        self._name = type(sink).__name__
        self._started = False
        self._muted = False

    @property
    def disabled(self) -> bool:
        return self.failures >= MAX_FAILURES

    def retry(self) -> None:
        """A new interval begins: a sink that failed in the last one gets another chance."""
        self._muted = False

    def start(self) -> None:
        """Start the sink now; if that fails, the next row tries again."""
        self._call("start")

    def send(self, kind: str, row: Row) -> None:
        """Pass a row of this kind ('train', 'episode', 'evaluation') on."""
        self._call(kind, row)

    def progress(self, position: int, phase: str) -> None:
        """Tell a live sink how far the run is."""
        if self._live is not None and self._started:
            self._call("progress", position, phase)

    def video(self, row: Row) -> None:
        """Pass a video on, to a sink that shows such."""
        if isinstance(self._sink, VideoSink):
            self._call("video", row)

    def close(self) -> None:
        """Close the sink, if it was ever started: a disabled one, too, may hold the terminal."""
        if self._started:
            self._attempt("close")

    def _call(self, method: str, *arguments: object) -> None:
        if not self.disabled and not self._muted:
            self._attempt(method, *arguments)

    def _attempt(self, method: str, *arguments: object) -> None:
        try:
            if not self._started:
                self._sink.start(self._run)
                self._started = True
            if method != "start":
                # each sink gets its own copy: none can change what another one sees
                getattr(self._sink, method)(
                    *(dict(item) if isinstance(item, dict) else item for item in arguments)
                )
        except Exception as error:  # noqa: BLE001 - foreign code; training must not depend on it
            self._failed(method, error)

    def _failed(self, method: str, error: Exception) -> None:
        self.failures += 1
        self._muted = True
        reason = f"{type(error).__name__}: {error}"
        if self.failures == 1:
            log.warning(
                "%s failed in %s (%s); training goes on, it is tried again at the next interval.",
                self._name,
                method,
                reason,
            )
        if self.failures in (1, MAX_FAILURES):
            kind = "sink-disabled" if self.disabled else "sink-failed"
            self._run.event(kind, sink=self._name, failures=self.failures, reason=reason)


def numbers(row: Row) -> dict[str, float]:
    """The cells of a row that can be drawn as a curve."""
    return {
        name: int(value) if isinstance(value, bool) else value
        for name, value in row.items()
        if isinstance(value, (int, float))
    }


def make_sinks(track: TrackConfig, steps: int, unit: str = "agent_steps") -> list[Sink]:
    """The sinks that the configuration asks for; `steps` is the run's length in its unit.

    A missing package is an error here, before any work begins.
    """
    for wanted, package in ((track.tensorboard, "tensorboard"), (track.wandb, "wandb")):
        if wanted and find_spec(package) is None:
            raise ConfigError(
                f"track.{package} is true, but the package {package} is not installed: "
                f"run {install_extra(package)}."
            )
    x = "env_frames" if unit == "agent_steps" else unit
    sinks: list[Sink] = []
    if track.console:
        from forethought.tracking.console import ConsoleSink

        sinks.append(ConsoleSink(steps, unit=unit))
    if track.tensorboard:
        from forethought.tracking.tensorboard import TensorBoardSink

        sinks.append(TensorBoardSink(x))
    if track.wandb:
        from forethought.tracking.wandb import WandbSink

        sinks.append(WandbSink(track.wandb_project or "forethought", x))
    return sinks
