"""Statistics over runs and tasks, by the definitions of rliable (Agarwal et al., NeurIPS 2021).

Hand-written because rliable 1.2.0 does not import beside pandas 3. Scores are one array of runs
per task. rliable wants as many runs of each task; here the numbers may differ, and every task then
has the same weight, shared by its runs. Every statistic works on the last axis, so that the
bootstrap computes all of its resamples in one call. Intervals are percentile bootstraps
over runs, drawn anew within each task (stratified); the draws are seeded, so a report made twice
is the same report.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Scores = Sequence[Array]
"""Per task the scores of its runs, [..., runs]; leading axes are bootstrap resamples."""

RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A statistic and its bootstrap interval; without one where some task has a single run."""

    value: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        """The numbers for a person: `848 [841, 858]`."""
        if self.low is None or self.high is None:
            return number(self.value)
        return f"{number(self.value)} [{number(self.low)}, {number(self.high)}]"


def number(value: float) -> str:
    """A score with three or four figures: 847.6 is 848, 0.51234 is 0.512, -1234.5 is -1,234."""
    size = abs(value)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
    text = f"{value:,.{digits}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text


def mean(scores: Scores) -> Array:
    """Mean over tasks of the mean over runs."""
    return _mean(_task_means(scores), axis=0)


def median(scores: Scores) -> Array:
    """Median over tasks of the mean over runs."""
    return np.asarray(np.median(_task_means(scores), axis=0), np.float64)


def iqm(scores: Scores) -> Array:
    """Interquartile mean of all runs of all tasks: without the lowest and highest quarter.

    The quarter is rounded down to whole runs, as in `scipy.stats.trim_mean(scores, 0.25)`. Where
    tasks have different numbers of runs, each run counts as often as makes these numbers equal:
    beside three runs of one task, each of two runs of another counts 3 times and the three 2 times.
    """
    counts = [task.shape[-1] for task in scores]
    equal = math.lcm(*counts)
    times = np.concatenate([np.full(count, equal // count) for count in counts])
    flat = _flat(scores)  # [..., runs]
    order = np.argsort(flat, axis=-1)
    until = np.cumsum(times[order], axis=-1)  # [..., runs]: scores so far, each run as often
    total = equal * len(counts)
    low, high = total // 4, total - total // 4
    kept = np.clip(until, low, high) - np.clip(until - times[order], low, high)  # [..., runs]
    rising = np.take_along_axis(flat, order, axis=-1)
    return np.asarray(np.sum(rising * kept, axis=-1) / (high - low), np.float64)


def optimality_gap(scores: Scores, target: float = 1.0) -> Array:
    """How far runs fall short of `target` on average; more than the target counts as the target."""
    return target - mean([np.minimum(task, target) for task in scores])


def performance_profile(scores: Scores, thresholds: Array) -> Array:
    """The share of runs with a score above each threshold, mean over tasks, [..., thresholds]."""
    shares = [_mean(task[..., None] > thresholds, axis=-2) for task in scores]
    return _mean(np.stack(shares), axis=0)


def probability_of_improvement(x: Scores, y: Scores) -> Array:
    """The chance that a run of x beats a run of y on the same task, ties half, mean over tasks."""
    per_task = []
    for a, b in zip(x, y, strict=True):
        ahead, behind = a[..., :, None], b[..., None, :]
        wins = (ahead > behind) + 0.5 * (ahead == behind)
        per_task.append(_mean(wins, axis=(-2, -1)))
    return _mean(np.stack(per_task), axis=0)


def area_under_curve(frames: ArrayLike, scores: ArrayLike) -> float:
    """Mean height of a learning curve: its area by trapezoids over the frames that it spans."""
    x, y = np.asarray(frames, np.float64), np.asarray(scores, np.float64)
    width = x[-1] - x[0]
    return float(np.trapezoid(y, x) / width) if width > 0 else float(y[-1])


def interval(
    statistic: Callable[..., Array],
    *groups: Scores,
    resamples: int = RESAMPLES,
    confidence: float = CONFIDENCE,
    seed: int = 0,
) -> Array | None:
    """[2, ...]: the bootstrap interval of `statistic(*groups)`.

    Each group and each task is resampled on its own. None where some task has a single run: all
    its resamples are that run, so the interval would leave out how much the task varies.
    """
    if min(len(task) for group in groups for task in group) < 2:
        return None
    rng = np.random.default_rng(seed)
    drawn = [
        [task[rng.integers(0, len(task), (resamples, len(task)))] for task in group]
        for group in groups
    ]
    tail = 50 * (1 - confidence)
    return np.percentile(statistic(*drawn), [tail, 100 - tail], axis=0)


def estimate(statistic: Callable[..., Array], *groups: Scores) -> Estimate:
    """A statistic of one or two groups of scores with its 95 % interval."""
    ends = interval(statistic, *groups)
    value = float(statistic(*groups))
    return Estimate(value) if ends is None else Estimate(value, float(ends[0]), float(ends[1]))


def curve_band(curves: Array) -> Array | None:
    """[2, frames]: the interval of the mean of `curves` [runs, frames]; whole curves are drawn."""
    runs = np.arange(len(curves), dtype=np.float64)

    def mean_curve(drawn: Scores) -> Array:
        chosen: Array = curves[drawn[0].astype(np.int64)]  # [resamples, runs, frames]
        return _mean(chosen, axis=-2)

    return interval(mean_curve, [runs])


def _mean(values: NDArray[Any], axis: int | tuple[int, int]) -> Array:
    return np.asarray(np.mean(values, axis=axis), np.float64)


def _task_means(scores: Scores) -> Array:
    return np.stack([np.mean(task, axis=-1) for task in scores])


def _flat(scores: Scores) -> Array:
    return np.concatenate([np.asarray(task, np.float64) for task in scores], axis=-1)
