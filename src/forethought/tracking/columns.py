"""The columns of a run's CSV files: names, order, and which of them measure time."""

from __future__ import annotations

from collections.abc import Sequence

Cell = str | int | float | bool | None | Sequence[object]
"""A value in a row; None is a missing one, a sequence is written joined by ';'."""
Row = dict[str, Cell]

LEADING = ("agent_steps", "env_frames", "updates", "episodes", "wall_s")
"""What every CSV begins with: the clock's counters and the seconds of training so far."""

TRAIN_TIMES = ("ms_per_agent_step", "env_frames_per_s", "updates_per_s", "peak_memory_mb")
"""Measured by the tracker for each row of train.csv, evaluation and saving included."""

TIME_COLUMNS = ("wall_s", *TRAIN_TIMES)
"""The columns that differ between two equal runs; all others are equal byte for byte."""

NONFINITE_FLAG = "nonfinite"
"""The metric by which an agent says that it skipped an update."""
VALUE_SHARE = "q_bound_share"
"""The metric by which an agent says how its greatest value stands to r_max / (1 - gamma)."""
NONFINITE_COLUMN = "nonfinite_updates"
"""Updates skipped in the interval, a sum and not a mean."""

EPISODE = (
    *LEADING,
    "env_index",
    "return",
    "length_agent_steps",
    "success",
    "terminated",
    "truncated",
    "seed",
)

EVALUATION = (
    *LEADING,
    "evaluation_index",
    "eval_episodes",
    "n_failed",
    "return_mean",
    "return_std",
    "return_median",
    "return_iqm",
    "return_min",
    "return_max",
    "length_mean",
    "success_mean",
    "returns",
    "lengths",
    "seeds",
    "truncated",
)


def train_columns(metric_names: Sequence[str]) -> tuple[str, ...]:
    """The columns of train.csv for an agent that reports `metric_names`."""
    own = (*LEADING, *TRAIN_TIMES, NONFINITE_COLUMN)
    return (*own, *(name for name in metric_names if name != NONFINITE_FLAG))


CLIPPED_RETURN, LIVES_EPISODES = "clipped_return", "lives_episodes"


def learned_columns(sign_rewards: bool, lives: bool) -> tuple[str, ...]:
    """What episodes.csv has besides, where learning sees signs of rewards, or lost lives as
    ends."""
    return (CLIPPED_RETURN,) * sign_rewards + (LIVES_EPISODES,) * lives


def episode_columns(tasks: Sequence[str], learned: Sequence[str] = ()) -> tuple[str, ...]:
    """The columns of episodes.csv in a run of these tasks; none: of a single one. `learned`: those
    of `learned_columns`."""
    return (*EPISODE, *learned, *(("task",) if tasks else ()))


def evaluation_columns(tasks: Sequence[str], human: bool = False) -> tuple[str, ...]:
    """The columns of eval.csv in a run of these tasks; none: of a single one. `human`: that one has
    published scores of people."""
    if not tasks:
        return (*EVALUATION, "human_normalised") if human else EVALUATION
    own = [f"{what}/{task}" for task in tasks for what in ("return_mean", "normalised_score")]
    return (*EVALUATION, "normalised_score", *own)
