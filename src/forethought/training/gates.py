"""Failure gates: the same rules for every agent, so that no run fails silently.

- An update with a non-finite loss, Q or gradient is skipped by the agent, which says so by its
  metric `nonfinite`, and counted here; the 101st in a row halts the run. One bad batch is
  survivable; a hundred in a row are not, and going on would only burn time. The first one told
  and the one that halts leave a dump.
- Any other metric that is not finite warns, at most once per 1000 updates: the update was made.
- A gradient norm over 1000 warns, at most once per 1000 updates.
- Values over ten times what the rewards seen can add up to (the metric `q_bound_share`) warn, at
  most once per 1000 updates.
- Three evaluations in a row below best - 0.5 (best - random) tag the run `needs-inspection`. The
  random score anchors the rule: half of the best would be wrong for negative scores (at a best of
  -4 in Pong, -5 is no collapse).
- Three intervals of train.csv in a row in which the run learned at less than a fifth of its usual
  pace warn: something else takes the processor, or threads spin.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from forethought.tracking.columns import NONFINITE_FLAG, VALUE_SHARE

MAX_NONFINITE_IN_A_ROW = 100  # updates
GRADIENT_NORM_LIMIT = 1000.0
VALUE_LIMIT = 10.0  # times r_max / (1 - gamma)
WARNING_PERIOD = 1000  # updates between two warnings of one kind
EVALUATIONS_TO_TAG = 3
NEEDS_INSPECTION = "needs-inspection"
USUAL_INTERVALS = 5  # before a pace is called usual
SLOW_SHARE = 0.2  # of the usual pace
SLOW_INTERVALS = 3


@dataclass(frozen=True)
class Alarm:
    """What a gate saw; the loop writes it to events.jsonl and to the screen."""

    kind: str
    """`nonfinite-update`, `nonfinite-metric`, `gradient-norm`, `runaway-values`,
    `evaluation-drop`, `slow` or `diverged`."""
    message: str
    """One sentence for a person."""
    halt: bool = False
    """The run must stop now."""
    tag: str | None = None
    """A tag for run.json."""
    dump: bool = False
    """Worth a dump: what caused it is still in memory."""


@dataclass
class Gates:
    """The counters of all gates of one run; saved with each checkpoint."""

    nonfinite_in_a_row: int = 0
    nonfinite_total: int = 0
    metric_alarms: int = 0
    norm_alarms: int = 0
    last_nonfinite_warning: int = -WARNING_PERIOD
    last_metric_warning: int = -WARNING_PERIOD
    last_norm_warning: int = -WARNING_PERIOD
    random_score: float | None = None
    best_score: float | None = None
    low_evaluations: int = 0
    value_alarms: int = 0
    last_value_warning: int = -WARNING_PERIOD

    def after_update(self, metrics: Mapping[str, float], updates: int) -> list[Alarm]:
        """Judges the metrics of one update; `updates` is the count that includes it."""
        bad = [name for name, value in metrics.items() if not math.isfinite(value)]
        if metrics.get(NONFINITE_FLAG, 0.0) > 0.0:
            return self._skipped(bad, updates)
        self.nonfinite_in_a_row = 0
        return [
            *self._metrics(bad, updates),
            *self._norms(metrics, updates),
            *self._values(metrics, updates),
        ]

    def after_evaluation(self, score: float) -> list[Alarm]:
        """Judges the mean return of one evaluation; the best is updated after the judgement."""
        best, random = self.best_score, self.random_score
        self.best_score = score if best is None else max(best, score)
        # A run that never rose above random play has nothing to fall from.
        if best is None or random is None or best <= random:
            return []
        if score >= best - 0.5 * (best - random):
            self.low_evaluations = 0
            return []
        self.low_evaluations += 1
        if self.low_evaluations != EVALUATIONS_TO_TAG:  # tagged once per drop, not at each after it
            return []
        message = (
            f"{EVALUATIONS_TO_TAG} evaluations in a row fell more than half-way from the best "
            f"({best:g}) to random play ({random:g}); the run is tagged {NEEDS_INSPECTION}."
        )
        return [Alarm("evaluation-drop", message, tag=NEEDS_INSPECTION)]

    def state(self) -> dict[str, Any]:
        """Every counter, for a checkpoint; those of values only once there was an alarm."""
        quiet = () if self.value_alarms else ("value_alarms", "last_value_warning")
        return {name: value for name, value in asdict(self).items() if name not in quiet}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes the counters of a checkpoint; one that it does not have yet begins at its start."""
        for name, start in asdict(Gates()).items():
            setattr(self, name, state.get(name, start))

    def _skipped(self, bad: list[str], updates: int) -> list[Alarm]:
        self.nonfinite_in_a_row += 1
        self.nonfinite_total += 1
        where = f" in {', '.join(bad)}" if bad else ""
        if self.nonfinite_in_a_row > MAX_NONFINITE_IN_A_ROW:
            message = (
                f"Training diverged: {self.nonfinite_in_a_row} updates in a row were not "
                f"finite{where}, the last at update {updates}."
            )
            return [Alarm("diverged", message, halt=True, dump=True)]
        message = (
            f"Update {updates} was not finite{where}: the step that it belongs to was skipped "
            f"({self.nonfinite_total} so far in this run)."
        )
        return self._rarely("nonfinite", updates, Alarm("nonfinite-update", message, dump=True))

    def _metrics(self, bad: list[str], updates: int) -> list[Alarm]:
        if not bad:
            return []
        self.metric_alarms += 1
        message = (
            f"Update {updates} was made, but is not finite in {', '.join(bad)} "
            f"({self.metric_alarms} such updates so far)."
        )
        return self._rarely("metric", updates, Alarm("nonfinite-metric", message))

    def _norms(self, metrics: Mapping[str, float], updates: int) -> list[Alarm]:
        norms = {n: x for n, x in metrics.items() if "grad_norm" in n and math.isfinite(x)}
        name = max(norms, key=lambda key: norms[key], default="")
        if not norms or norms[name] <= GRADIENT_NORM_LIMIT:
            return []
        self.norm_alarms += 1
        message = (
            f"{name} is {norms[name]:.4g} at update {updates}, over {GRADIENT_NORM_LIMIT:g} "
            f"({self.norm_alarms} such updates so far)."
        )
        return self._rarely("norm", updates, Alarm("gradient-norm", message))

    def _values(self, metrics: Mapping[str, float], updates: int) -> list[Alarm]:
        share = metrics.get(VALUE_SHARE, 0.0)
        if not VALUE_LIMIT < share < math.inf:
            return []
        self.value_alarms += 1
        message = (
            f"Values run away: at update {updates} the greatest is {share:.4g} times all that the "
            f"rewards seen so far could add up to, over {VALUE_LIMIT:g} ({self.value_alarms} such "
            "updates so far)."
        )
        return self._rarely("value", updates, Alarm("runaway-values", message))

    def _rarely(self, what: str, updates: int, alarm: Alarm) -> list[Alarm]:
        """The alarm, unless the last one of its kind is less than WARNING_PERIOD updates old."""
        field = f"last_{what}_warning"
        if updates - getattr(self, field) < WARNING_PERIOD:
            return []
        setattr(self, field, updates)
        return [alarm]


class Pace:
    """How fast this process learns, interval by interval.

    It is not part of a checkpoint: what another process measured, perhaps on another machine, says
    nothing about this one, and time must not decide what a run becomes.
    """

    def __init__(self) -> None:
        self.usual: list[float] = []
        """Updates per second of the intervals that were not slow."""
        self.slow = 0
        """Slow intervals in a row."""

    def after_interval(self, updates_per_s: float) -> list[Alarm]:
        """Judges one interval; one without updates says nothing."""
        if updates_per_s <= 0:
            return []
        usual = statistics.median(self.usual) if len(self.usual) >= USUAL_INTERVALS else 0.0
        if updates_per_s >= SLOW_SHARE * usual:
            self.usual.append(updates_per_s)
            self.slow = 0
            return []
        self.slow += 1
        if self.slow != SLOW_INTERVALS:  # told once per collapse, not at each interval after it
            return []
        message = (
            f"Learning has slowed down to {updates_per_s:.3g} updates per second, from "
            f"{usual:.3g}: does another process use this machine? Threads of several runs that "
            "wait for each other cost most; OMP_WAIT_POLICY=PASSIVE and train.threads 1 help."
        )
        return [Alarm("slow", message)]
