"""What an agent needs to know about its environment before it is built."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import gymnasium
import numpy as np

from forethought.spaces.action_codec import ActionCodec, Table


@dataclass(frozen=True)
class Column:
    """An extra column of every row, read from the environment's info at reset and at each step."""

    name: str
    """Name of the column in replay rows and batches."""
    shape: tuple[int, ...]
    """Shape of one element."""
    dtype: np.dtype[Any]
    """Type of one element; floats are stored as float32."""
    source: str
    """Key of info that holds it."""


@dataclass(frozen=True)
class EnvSpec:
    """One environment as agents see it: actions rescaled, floats as float32, tuples as dicts."""

    task: str
    """Name of the task, such as dmc:cheetah-run."""
    observation_space: gymnasium.Space[Any]
    """Observations of one environment."""
    action_space: gymnasium.Space[Any]
    """Actions of one environment; a bounded Box is [-1, 1]."""
    max_episode_steps: int | None
    """Decisions after which an episode is truncated; None = never."""
    action_repeat: int
    """Environment frames per decision."""
    terminates: bool
    """Whether an episode may end by termination; False promises that it never does."""
    columns: tuple[Column, ...] = ()
    """Extra columns that the environment declares."""
    tasks: tuple[EnvSpec, ...] = ()
    """Where one agent plays several tasks: each as it is alone, unpadded. The fields above are then
    what they share: the widest observation and action, the longest limit, the largest repeat."""
    distinct_actions: Table | None = None
    """Of a discrete action space, the distinct actions: the choice of each factor, -1 where it does
    not matter; None: every tuple of choices is one."""
    sign_rewards: bool = False
    """Whether agents learn from the sign of each reward alone; rows and reports have the raw
    ones."""

    action_half_range: tuple[float, ...] | None = None
    """Half the range of each action in the environment's own units, where actions are a bounded Box
    of floats; None where they are not, or nobody knows."""

    @cached_property
    def action_codec(self) -> ActionCodec:
        """The table of all actions; a space that is not discrete is refused."""
        return ActionCodec(self.action_space, self.distinct_actions)

    @property
    def mask_source(self) -> str | None:
        """The key of info that holds the legal actions; None where all are legal."""
        found = [column.source for column in self.columns if column.name == "action_mask"]
        return found[0] if found else None

    @property
    def shapes(self) -> dict[str, str]:
        """Observations and actions in words that no version of a library changes."""
        return {
            "observations": _words(self.observation_space),
            "actions": _words(self.action_space),
        }


def _words(space: gymnasium.Space[Any]) -> str:
    """Without the bounds of a Box: as text they depend on numpy's way to print."""
    if isinstance(space, gymnasium.spaces.Dict):
        return ", ".join(f"{key}: {_words(inner)}" for key, inner in space.spaces.items())
    return f"{space.dtype} {space.shape}" if isinstance(space, gymnasium.spaces.Box) else str(space)
