"""`gym:<id>`: any id of gymnasium's registry, also `namespace/Name-v0` and `module:Name-v0`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import gymnasium
from gymnasium.envs.registration import load_env_creator

from forethought.config import ConfigError, unknown
from forethought.envs import foreign, rendering
from forethought.envs.families import LIST_HINT, Built, require_extra, require_images

NEVER_TERMINATE = ("Pendulum", "HalfCheetah", "Swimmer", "Reacher", "Pusher", "HumanoidStandup")
"""Gymnasium's own tasks, without version, that only ever end by their limit."""

# Modules that gymnasium's own environments need, by the module that defines them.
EXTRAS = {
    "gymnasium.envs.mujoco": ("mujoco", "mujoco"),
    "gymnasium.envs.box2d": ("box2d", "Box2D"),
}
# Packages that register a namespace when they are imported.
NAMESPACES = {"ALE": ("atari", "ale_py")}
OWN_HINT = "One that a module of your own registers is named gym:MODULE:ID."
ALE = "ale_py.env"
ALE_FRAMES_PER_SECOND = 60
JAX = ("gymnasium.envs.phys2d", "gymnasium.envs.tabular")


def names() -> list[str]:
    """Ids that can be made with our extras: no copies in jax, no versions that only raise."""
    return sorted(
        env_id
        for env_id, spec in gymnasium.registry.items()
        if isinstance(spec.entry_point, str | type) and not str(spec.entry_point).startswith(JAX)
    )


def check(name: str) -> None:
    """Refuse an id that is not registered, or whose extra is missing."""
    module, _, env_id = name.rpartition(":")
    namespace = env_id.partition("/")[0]
    if module:
        _import(module, name)
    elif namespace in NAMESPACES:
        extra, package = NAMESPACES[namespace]
        require_extra(f"gym:{name}", extra, package)
        importlib.import_module(package)
    if env_id not in gymnasium.registry:
        prefix = f"gym:{module}:" if module else "gym:"
        see = LIST_HINT if module else f"{LIST_HINT} {OWN_HINT}"
        raise unknown("task", f"gym:{name}", [prefix + known for known in names()], see)
    entry_point = str(gymnasium.registry[env_id].entry_point)
    for prefix, (extra, package) in EXTRAS.items():
        if entry_point.startswith(prefix):
            require_extra(f"gym:{name}", extra, package)


def build(name: str, render_mode: str | None, obs: str | None = None) -> Built:
    """Make the environment without its registered limit: limits are ours, in decisions."""
    env_id = name.rpartition(":")[2]
    registered = gymnasium.registry[env_id]
    # Only gymnasium's own: a person's Pusher-v0 may well terminate.
    own = str(registered.entry_point).startswith("gymnasium.envs.")
    pictures = {} if render_mode is None else {"render_mode": render_mode}
    if str(gymnasium.registry[env_id].entry_point).startswith("gymnasium.envs.mujoco"):
        with rendering.switched_off():
            importlib.import_module("mujoco")
        if render_mode == "rgb_array":
            rendering.choose_backend()
    if render_mode is not None:
        _check_render_mode(name, env_id, render_mode)
    try:
        env = gymnasium.make(env_id, max_episode_steps=-1, disable_env_checker=True, **pictures)
    except (gymnasium.error.Error, ImportError) as error:
        raise ConfigError(f"gym:{name} cannot be made: {error}") from error
    require_images(f"gym:{name}", obs, env)
    held = _tell_frames(env) if str(registered.entry_point).startswith(ALE) else 1
    return Built(
        env,
        action_repeat=held,
        max_frames=registered.max_episode_steps,
        terminates=False if own and env_id.rpartition("-v")[0] in NEVER_TERMINATE else None,
    )


def _tell_frames(env: gymnasium.Env[Any, Any]) -> int:
    """Frames that a step of a game in ALE's namespace takes; where they are drawn at random, their
    mean. ALE's own metadata says 30 frames per second, whatever is skipped."""
    game: Any = env.unwrapped
    skip = game._frameskip
    held = skip if isinstance(skip, int) else round((skip[0] + skip[1] - 1) / 2)
    game.frames_per_step = held
    # Per frame: TaskEnv divides by what is held.
    game.metadata = {**game.metadata, "render_fps": ALE_FRAMES_PER_SECOND}
    return held


def _check_render_mode(name: str, env_id: str, render_mode: str) -> None:
    """Refuse a mode that the environment does not declare; gymnasium would only warn, or raise."""
    made_by = gymnasium.registry[env_id].entry_point
    creator = load_env_creator(made_by) if isinstance(made_by, str) else made_by
    metadata = getattr(creator, "metadata", None)
    if isinstance(metadata, dict) and render_mode not in metadata.get("render_modes", ()):
        modes = ", ".join(metadata.get("render_modes", ())) or "none"
        raise ConfigError(
            f"gym:{name} has no render mode {render_mode} (it has: {modes}); add it to the "
            "environment's metadata and its render method."
        )


def _import(module: str, name: str) -> None:
    """Import the module that registers an id: an installed one, or a file in the current folder.

    `python -m` looks into that folder, but an installed command such as `forethought` does not. It
    is looked into last, so that a person's own file hides no package; workers inherit the path.
    """
    if module.startswith(".") or "/" in module or "\\" in module:
        raise ConfigError(
            f"{module} in the task gym:{name} is no name of a module: one in the file puck.py of "
            "the current folder is written gym:puck:Puck-v0."
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"The module {module} of the task gym:{name} cannot be imported ({error}); run the "
            "command in the folder that holds it, install what is missing or correct the name."
        ) from error
    except foreign.RAISED as error:
        if foreign.passes(error):
            raise
        sentence = (
            f"The module {module} of the task gym:{name} raised {type(error).__name__} while it "
            f"was imported: {error}"
        )
        raise foreign.wrapped(ConfigError, sentence, error) from error
