"""What observations and actions an actor with critics takes."""

from __future__ import annotations

import gymnasium
import numpy as np

from forethought.config import ConfigError
from forethought.spaces.spec import EnvSpec


def check_spaces(name: str, spec: EnvSpec) -> tuple[int, int]:
    """The lengths of an observation and of an action, or a sentence that says what does not fit."""
    if spec.tasks:
        raise ConfigError(
            f"{name} learns one task, but {spec.task} is several: train each in a run of its own, "
            "or use tdmpc2."
        )
    seen, action = spec.observation_space, spec.action_space
    if not (
        isinstance(action, gymnasium.spaces.Box)
        and len(action.shape) == 1
        and np.issubdtype(action.dtype, np.floating)
        and np.all(action.low == -1)
        and np.all(action.high == 1)
    ):
        raise ConfigError(
            f"{name} takes continuous actions (a bounded Box of one axis), but those of "
            f"{spec.task} are {action}."
        )
    if not (isinstance(seen, gymnasium.spaces.Box) and len(seen.shape) == 1):
        raise ConfigError(
            f"{name} takes observations that are one vector (a Box of one axis), but those of "
            f"{spec.task} are {seen}; flatten them (gymnasium.wrappers.FlattenObservation), or use "
            "tdmpc2."
        )
    return seen.shape[0], action.shape[0]
