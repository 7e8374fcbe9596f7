"""What a family of tasks (gym, dmc, minatar) offers to the rest of the room."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import gymnasium

from forethought.config import ConfigError
from forethought.extras import install_extra
from forethought.spaces.images import has_image

LIST_HINT = "'forethought list tasks' shows all."


@dataclass(frozen=True)
class Built:
    """A new environment, one frame per step and without a limit, and the task's own defaults."""

    env: gymnasium.Env[Any, Any]
    action_repeat: int
    """The task's own frames per decision."""
    max_frames: int | None
    """The task's own limit in environment frames."""
    terminates: bool | None
    """Whether episodes may end by termination; None = as the environment declares."""


def require_extra(task: str, extra: str, *modules: str) -> None:
    """Refuse a task whose modules are not installed, with the line that installs them."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise ConfigError(f"{task} needs {' and '.join(missing)}: run {install_extra(extra)}.")


def require_images(task: str, obs: str | None, env: gymnasium.Env[Any, Any]) -> None:
    """Refuse to draw what is not drawn here: images must be the environment's own."""
    if obs == "plain_pixels":
        raise ConfigError(f"env.obs is plain_pixels, but only dmc tasks are drawn, not {task}.")
    if obs is not None and not has_image(env.observation_space):
        raise ConfigError(
            f"env.obs is pixels, but {task} shows no image: its observations are "
            f"{env.observation_space}, and only dmc tasks are drawn. Leave env.obs out."
        )
