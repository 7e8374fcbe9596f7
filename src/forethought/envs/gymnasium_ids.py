"""`gym:<id>`: any id of gymnasium's registry, also `namespace/Name-v0` and `module:Name-v0`."""

from __future__ import annotations

import importlib

import gymnasium

from forethought.config import ConfigError, unknown
from forethought.envs.families import LIST_HINT, Built, require_extra

NEVER_TERMINATE = ("Pendulum", "HalfCheetah", "Swimmer", "Reacher", "Pusher", "HumanoidStandup")
"""Gymnasium's own tasks, without version, that only ever end by their limit."""

# Modules that gymnasium's own environments need, by the module that defines them.
EXTRAS = {
    "gymnasium.envs.mujoco": ("mujoco", "mujoco"),
    "gymnasium.envs.box2d": ("box2d", "Box2D"),
}
# Packages that register a namespace when they are imported.
NAMESPACES = {"ALE": ("atari", "ale_py")}
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
        raise unknown("task", f"gym:{name}", [prefix + known for known in names()], LIST_HINT)
    entry_point = str(gymnasium.registry[env_id].entry_point)
    for prefix, (extra, package) in EXTRAS.items():
        if entry_point.startswith(prefix):
            require_extra(f"gym:{name}", extra, package)


def build(name: str, render_mode: str | None) -> Built:
    """Make the environment without its registered limit: limits are ours, in decisions."""
    env_id = name.rpartition(":")[2]
    pictures = {} if render_mode is None else {"render_mode": render_mode}
    try:
        env = gymnasium.make(env_id, max_episode_steps=-1, disable_env_checker=True, **pictures)
    except (gymnasium.error.Error, ImportError) as error:
        raise ConfigError(f"gym:{name} cannot be made: {error}") from error
    return Built(
        env,
        action_repeat=1,
        max_frames=gymnasium.registry[env_id].max_episode_steps,
        terminates=False if env_id.rpartition("-v")[0] in NEVER_TERMINATE else None,
    )


def _import(module: str, name: str) -> None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"The module {module} of the task gym:{name} cannot be imported ({error}); install it "
            "or correct the name."
        ) from error
