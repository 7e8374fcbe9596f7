"""The tracker: takes what training reports, writes the CSV files first, then tells the sinks.

Nothing here can stop or change training. A CSV file that cannot be opened at the start is an error
before any work; one that fails later (a full disk) is warned about once, its rows wait in memory
and are written when the disk allows it. Sinks are guarded, see `sinks`.
"""

from __future__ import annotations

import logging
import math
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from forethought.clock import Clock
from forethought.config import ForethoughtError, nearest
from forethought.files import FileError
from forethought.tracking import columns
from forethought.tracking.columns import Cell, Row
from forethought.tracking.csv_file import CsvFile, plain
from forethought.tracking.run_directory import RunDirectory
from forethought.tracking.sinks import GuardedSink, Sink

log = logging.getLogger("forethought")


class Tracker:
    """Rows of training, episodes and evaluations, from one trainer to every sink."""

    def __init__(
        self,
        run: RunDirectory,
        sinks: Sequence[Sink],
        clock: Clock,
        metric_names: Sequence[str],
        now: Callable[[], float] = time.monotonic,
        tasks: Sequence[str] = (),
        human: bool = False,
        learned: Sequence[str] = (),
    ) -> None:
        """`clock` is the run's own; `now` must never go back, whatever happens to the date.

        `tasks` are the names of the tasks where there are several; `human` says that evaluations
        are also told in scores of people; `learned` are the `learned_columns` of episodes.
        """
        self.run = run
        self.csv_failures = 0
        self._clock = clock
        self._now = now
        self._began = now()
        self._wall_before = 0.0
        self._metrics = Interval(metric_names)
        self._last_flush = {**clock.row(), "wall_s": 0.0}
        self._files = {
            "train": CsvFile(run.train_csv, columns.train_columns(metric_names)),
            "episode": CsvFile(run.episodes_csv, columns.episode_columns(tasks, learned)),
            "evaluation": CsvFile(run.eval_csv, columns.evaluation_columns(tasks, human)),
        }
        self._sinks = [GuardedSink(sink, run) for sink in sinks]

    def start(self) -> None:
        """Start the sinks; not needed before rows, but live ones then show themselves at once."""
        for sink in self._sinks:
            sink.start()

    @property
    def wall_s(self) -> float:
        """Seconds of training, over all processes that worked on this run."""
        return self._wall_before + (self._now() - self._began)

    @property
    def sink_failures(self) -> int:
        """How often sinks other than CSV have failed in this process."""
        return sum(sink.failures for sink in self._sinks)

    def add(self, metrics: Mapping[str, float]) -> None:
        """Take the metrics of an update into the open interval."""
        self._metrics.add(metrics)

    def flush_train(self, clock: Clock) -> Row:
        """Close the interval: one row of train.csv, if any step was taken since the last. Returns
        it; empty if there is none."""
        for sink in self._sinks:
            sink.retry()
        if clock.position == self._last_flush[clock.unit] and self._metrics.empty:
            return {}
        now = {**clock.row(), "wall_s": self.wall_s}
        times = _times(self._last_flush, now)
        row = {**now, "wall_s": round(now["wall_s"], 3), **times, **self._metrics.row()}
        self._last_flush = now
        self._metrics.clear()
        self._write("train", row)
        return row

    def episode(self, row: Mapping[str, Cell]) -> None:
        """A training episode has ended."""
        self._write("episode", self._lead(row))

    def evaluation(self, row: Mapping[str, Cell]) -> None:
        """An evaluation has ended."""
        self._write("evaluation", self._lead(row))

    def video(self, file: Path) -> None:
        """A video of an evaluation was written into the run directory."""
        for sink in self._sinks:
            sink.video({**self._leading(), "file": str(file)})

    def event(self, kind: str, **fields: Any) -> None:
        """Something worth knowing happened: a line in events.jsonl, with the counters."""
        self.run.event(kind, **self._leading(), **fields)

    def tick(self, phase: str = "") -> None:
        """Keep a live status alive between rows; cheap enough for every step and update."""
        for sink in self._sinks:
            sink.progress(self._clock.position, phase)

    def state(self) -> dict[str, Any]:
        """Everything that decides the coming rows, JSON-able."""
        return {
            "wall_s": self.wall_s,
            "interval": self._metrics.state(),
            "last_flush": dict(self._last_flush),
            "files": {name: file.state() for name, file in self._files.items()},
        }

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Go back to `state`: rows written after it are cut off. None: to the very beginning."""
        self._began = self._now()
        if state is None:
            self._wall_before = 0.0
            self._last_flush = {**Clock().row(), "wall_s": 0.0}
            self._metrics.clear()
        else:
            self._wall_before = state["wall_s"]
            self._last_flush = dict(state["last_flush"])
            self._metrics.restore(state["interval"])
        for name, file in self._files.items():
            note = file.cut(None if state is None else state["files"][name])
            if note is not None:
                log.warning("%s", note)
                self.run.event("csv-rows-lost", note=note)

    def close(self) -> None:
        """Close the sinks, then the files; says in events.jsonl what did not reach them."""
        for sink in self._sinks:
            sink.close()
        for file in self._files.values():
            try:
                file.close()
            except FileError as error:
                self._csv_failed(error)
        if self.sink_failures or self.csv_failures:
            self.event("tracking-failures", sinks=self.sink_failures, csv=self.csv_failures)

    def _leading(self) -> Row:
        return {**self._clock.row(), "wall_s": round(self.wall_s, 3)}

    def _lead(self, row: Mapping[str, Cell]) -> Row:
        leading = self._leading()
        twice = [name for name in row if name in leading]
        if twice:
            raise ForethoughtError(f"A row brings {twice[0]}, which the tracker itself fills in.")
        return {**leading, **{name: plain(value) for name, value in row.items()}}

    def _write(self, kind: str, row: Row) -> None:
        file = self._files[kind]
        file.check(row)
        try:
            file.append(row)
        except FileError as error:
            self._csv_failed(error)
        for sink in self._sinks:
            sink.send(kind, row)

    def _csv_failed(self, error: FileError) -> None:
        self.csv_failures += 1
        if self.csv_failures == 1:
            log.warning("%s Training goes on; the rows are kept and written later.", error)
            self.event("csv-failed", reason=str(error))


class Interval:
    """Metrics since the last row: means; the greatest for names ending in _max; skipped updates."""

    def __init__(self, metric_names: Sequence[str]) -> None:
        self._names = frozenset(metric_names) | {columns.NONFINITE_FLAG}
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    @property
    def empty(self) -> bool:
        return not self._counts

    def add(self, metrics: Mapping[str, float]) -> None:
        for name, given in metrics.items():
            if name not in self._names:
                raise ForethoughtError(
                    f"The metric {name} was not declared.{nearest(name, self._names)}"
                )
            value = float(given)
            if name not in self._counts:
                self._sums[name] = value
                self._counts[name] = 1
                continue
            self._counts[name] += 1
            if not name.endswith("_max"):
                self._sums[name] += value
            elif value > self._sums[name] or math.isnan(value):  # a NaN stays: never hidden
                self._sums[name] = value

    def row(self) -> Row:
        row: Row = {columns.NONFINITE_COLUMN: 0}
        for name, total in self._sums.items():
            if name == columns.NONFINITE_FLAG:
                row[columns.NONFINITE_COLUMN] = int(total)
            else:
                row[name] = total if name.endswith("_max") else total / self._counts[name]
        return row

    def clear(self) -> None:
        self._sums.clear()
        self._counts.clear()

    def state(self) -> dict[str, Any]:
        return {"sums": dict(self._sums), "counts": dict(self._counts)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._sums = dict(state["sums"])
        self._counts = dict(state["counts"])


def _times(before: Mapping[str, float], now: Mapping[str, float]) -> Row:
    """How fast the interval went."""
    seconds = now["wall_s"] - before["wall_s"]
    agent_steps = now["agent_steps"] - before["agent_steps"]
    row: Row = {"peak_memory_mb": _peak_memory_mb()}
    if agent_steps > 0:
        row["ms_per_agent_step"] = round(1000 * seconds / agent_steps, 3)
    if seconds > 0:
        row["env_frames_per_s"] = round((now["env_frames"] - before["env_frames"]) / seconds, 3)
        row["updates_per_s"] = round((now["updates"] - before["updates"]) / seconds, 3)
    return row


def _peak_memory_mb() -> float:
    """The most memory that this process has used so far, in MB of 10^6 bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6, 1)
