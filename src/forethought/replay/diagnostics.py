"""What a value learner's replay gives it, in numbers for train.csv.

They come from draws that are made for the purpose, from a stream of their own: neither training nor
a resumed run notices. Of a hundred numbers that could be had these are the ones that show the usual
faults: a replay that draws the same few transitions (duplicates, effective size, share never
drawn), priorities that explode or collapse, weights that throw most of a batch away, experience
that is too old, rewards that are never seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forethought.config import PrioritizedReplayConfig, ReplayConfig, UniformReplayConfig

QUANTILES = (0.1, 0.5, 0.9)
REWARD_EDGES = (
    ("below_minus_1", -np.inf, -1.0),  # from the first number (not included) to the second
    ("minus_1_to_0", -1.0, 0.0),
    ("0", 0.0, 0.0),
    ("0_to_1", 0.0, 1.0),
    ("above_1", 1.0, np.inf),
)

DRAWS = (
    "replay_age_mean",
    *(f"replay_age_q{round(100 * q)}" for q in QUANTILES),
    "replay_never_drawn",
    "replay_draws_per_row",
    "replay_duplicates",
    "replay_terminated",
    *(f"replay_reward_{name}" for name, _, _ in REWARD_EDGES),
)
PRIORITIES = (
    "replay_priority_mean",
    "replay_priority_std",
    "replay_priority_min",
    "replay_priority_max",
    *(f"replay_priority_q{round(100 * q)}" for q in QUANTILES),
    "replay_weight_mean",
    "replay_weight_std",
    "replay_weight_min",
    "replay_effective_share",
)


@dataclass(frozen=True)
class Look:
    """A batch drawn for diagnostics: [B] each."""

    slots: NDArray[np.int64]
    age_agent_steps: NDArray[np.int64]
    """Steps taken since its last row, in all environments together."""
    weights: NDArray[np.float64]
    terminated: NDArray[np.bool_]
    reward: NDArray[np.float32]
    """Of its first step, as stored."""


def replay_metric_names(config: ReplayConfig) -> tuple[str, ...]:
    """The names of all that diagnostics report with this configuration."""
    if not isinstance(config, UniformReplayConfig | PrioritizedReplayConfig):
        return ()
    if config.diagnostics_every_agent_steps == 0:
        return ()
    return (*DRAWS, *PRIORITIES) if isinstance(config, PrioritizedReplayConfig) else DRAWS


def describe_draws(
    looks: Sequence[Look],
    times_drawn: NDArray[np.int32],
    priorities: NDArray[np.float64] | None,
) -> dict[str, float]:
    """The numbers of `replay_metric_names`, in words in docs/replay.md."""
    age = np.concatenate([look.age_agent_steps for look in looks])
    reward = np.concatenate([look.reward for look in looks])
    found = {
        "replay_age_mean": age.mean(),
        **_quantiles("replay_age", age),
        "replay_never_drawn": (times_drawn == 0).mean(),
        "replay_draws_per_row": times_drawn.mean(),
        "replay_duplicates": np.mean([1 - len(np.unique(x.slots)) / len(x.slots) for x in looks]),
        "replay_terminated": np.concatenate([look.terminated for look in looks]).mean(),
        **{f"replay_reward_{name}": _share(reward, low, high) for name, low, high in REWARD_EDGES},
    }
    if priorities is not None:
        weights = np.concatenate([look.weights for look in looks])
        effective = [x.weights.sum() ** 2 / (x.weights**2).sum() / len(x.weights) for x in looks]
        found |= {
            "replay_priority_mean": priorities.mean(),
            "replay_priority_std": priorities.std(),
            "replay_priority_min": priorities.min(),
            "replay_priority_max": priorities.max(),
            **_quantiles("replay_priority", priorities),
            "replay_weight_mean": weights.mean(),
            "replay_weight_std": weights.std(),
            "replay_weight_min": weights.min(),
            "replay_effective_share": np.mean(effective),
        }
    return {name: float(value) for name, value in found.items()}


def _quantiles(name: str, values: NDArray[np.generic]) -> dict[str, float]:
    numbers = np.quantile(values.astype(np.float64), QUANTILES)
    return {f"{name}_q{round(100 * q)}": float(x) for q, x in zip(QUANTILES, numbers)}


def _share(reward: NDArray[np.float32], low: float, high: float) -> float:
    """The share of rewards in a bin of the histogram."""
    if low == high:
        return float((reward == low).mean())
    # 0 has a bin of its own, and whole rewards of 1 and -1 belong to their sign's inner bin.
    inside = (reward > low) & (reward <= high) if low >= 0 else (reward >= low) & (reward < high)
    return float(inside.mean())
