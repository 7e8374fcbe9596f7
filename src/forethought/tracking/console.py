"""One live status line in a terminal; without a terminal, a plain line now and then."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from forethought.tracking.columns import Row
from forethought.tracking.run_directory import RunDirectory

LIVE_PERIOD_S = 0.25
"""Seconds between two drawings of the live line."""
PLAIN_PERIOD_S = 10.0
"""Seconds between two plain lines."""
SPEED_WINDOW_S = 30.0
"""Seconds over which the speed is averaged."""
LEAST_WINDOW_S = 1.0
"""Seconds that must have been measured before a speed is told."""
BAR_COLUMNS = (4, 24)
"""The least and the greatest width of the bar; with less room there is none."""


class Terminal(Console):
    """Standard error. Where nobody reads it any longer, writing fails as in any other file: rich
    would end the process, and a run must not depend on who watches it."""

    def __init__(self) -> None:
        super().__init__(stderr=True)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError("nobody reads standard error any longer")


class ConsoleSink:
    """Progress, ETA, speed, last return, last evaluation; drawn by the caller, at most at 4 Hz."""

    def __init__(
        self,
        steps: int,
        console: Console | None = None,
        now: Callable[[], float] = time.monotonic,
        unit: str = "agent_steps",
    ) -> None:
        """`steps` is the run's length in its unit."""
        self._steps, self._unit = steps, unit
        self._console = console or Terminal()
        self._now = now
        self._period = LIVE_PERIOD_S if self._console.is_terminal else PLAIN_PERIOD_S
        self._live: Live | None = None
        self._next = 0.0
        self._name = ""
        self._position = 0
        self._phase = ""
        """What is done instead of learning step by step; "" for that."""
        self._last_return: float | None = None
        self._last_evaluation: float | None = None
        self._marks: deque[tuple[float, int]] = deque()
        """(seconds, position) at recent drawings of the present phase."""

    def start(self, run: RunDirectory) -> None:
        about = run.run_json
        self._name = f"{about['agent']} {about['task']}"
        self._next = self._now() + self._period
        if self._console.is_terminal:
            # No thread of its own: it would compete with training for the interpreter.
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()

    def train(self, row: Row) -> None:
        count = row[self._unit]
        assert isinstance(count, int)
        self._position = count

    def episode(self, row: Row) -> None:
        self._last_return = _number(row.get("return"))

    def evaluation(self, row: Row) -> None:
        self._last_evaluation = _number(row.get("return_mean"))

    def progress(self, position: int, phase: str) -> None:
        """Called at every step and update; draws only when the period has passed.

        `phase` names the work since the last call, such as an evaluation or random play; with ""
        the agent took its own steps and learned from them.
        """
        self._position = position
        self._enter(phase)
        now = self._now()
        if not self._marks:
            self._marks.append((now, position))  # a resumed run is not at 0
        if now >= self._next:
            self._draw()

    def close(self) -> None:
        self._enter("")
        self._draw()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _enter(self, phase: str) -> None:
        """Random play is far faster than learning: no phase says anything about another's speed."""
        if phase != self._phase:
            self._marks.clear()
        self._phase = phase

    def _draw(self) -> None:
        now = self._now()
        self._next = now + self._period
        self._marks.append((now, self._position))
        while len(self._marks) > 2 and now - self._marks[0][0] > SPEED_WINDOW_S:
            self._marks.popleft()
        if self._live is None:
            self._console.print(self._line(), markup=False, highlight=False, soft_wrap=True)
        else:
            self._live.update(self._live_line(), refresh=True)

    def _line(self) -> str:
        """The status without a terminal."""
        steps = f"{self._steps_done()} {self._unit.replace('_', ' ')}"
        return " · ".join([self._share(), self._name, steps, *self._findings()])

    def _live_line(self) -> Table:
        """The status that fits the terminal; the start lines above it name agent and task."""
        least, most = BAR_COLUMNS
        share = self._share()
        room = self._console.width - len(share) - 2  # a gap, and the last column stays free
        parts = [self._steps_done(), *self._findings()]
        while len(parts) > 2 and len(" · ".join(parts)) > room:
            parts.pop(1)  # the speed first: the ETA says as much
        text = " · ".join(parts)
        cells: list[Text | ProgressBar] = [Text(share, no_wrap=True)]
        columns = min(most, room - len(text) - 1)
        if columns >= least:
            total = max(self._steps, 1)
            cells.append(ProgressBar(total=total, completed=self._position, width=columns))
        table = Table.grid(padding=(0, 1))
        table.add_row(*cells, Text(text, no_wrap=True, overflow="ellipsis"))
        return table

    def _share(self) -> str:
        return f"{min(1.0, self._position / max(self._steps, 1)):4.0%}"

    def _steps_done(self) -> str:
        return f"{self._position:,}/{self._steps:,}"

    def _findings(self) -> list[str]:
        """Speed, ETA, return, evaluation and phase, as far as they are known."""
        parts = []
        speed = self._speed()
        if speed > 0:
            parts.append(f"{speed:.1f}/s")
        if speed > 0 and not self._phase:  # only learning tells how long the rest will take
            left = max(0, self._steps - self._position) / speed
            parts.append(f"ETA {_duration(left)}")
        if self._last_return is not None:
            parts.append(f"return {self._last_return:.1f}")
        if self._last_evaluation is not None:
            parts.append(f"eval {self._last_evaluation:.1f}")
        if self._phase:
            parts.append(self._phase)
        return parts

    def _speed(self) -> float:
        """Steps per second in the recent past of this phase; 0 while nothing can be said."""
        (first, before), (last, after) = self._marks[0], self._marks[-1]
        return (after - before) / (last - first) if last - first >= LEAST_WINDOW_S else 0.0


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def _duration(seconds: float) -> str:
    """For example 2:05:09."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
