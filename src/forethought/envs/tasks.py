"""Tasks by name: `family:name`, checked before anything is built."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from forethought.config import AtariConfig, require, unknown
from forethought.envs import atari, dmc, gymnasium_ids, minatar, multi
from forethought.envs.families import LIST_HINT
from forethought.envs.handles import build
from forethought.envs.task_env import TaskEnv
from forethought.envs.vector import VectorEnv
from forethought.spaces.spec import EnvSpec

FAMILIES: dict[str, ModuleType] = {
    "atari": atari,
    "dmc": dmc,
    "gym": gymnasium_ids,
    "minatar": minatar,
}
"""Each offers names(), check(name) and build(name, render_mode, obs)."""


def known_tasks() -> list[str]:
    """Every task by name. Cheap: no simulator is imported."""
    return [f"{key}:{name}" for key, family in FAMILIES.items() for name in family.names()]


def check_task(task: str) -> None:
    """Refuse a task that does not exist (with the nearest name) or whose extra is missing."""
    if multi.is_multi(task):
        for own in multi.members(task):
            check_task(own)
        return
    key, separator, name = task.partition(":")
    if not separator or key not in FAMILIES or not name:
        raise unknown("task", task, known_tasks(), LIST_HINT)
    FAMILIES[key].check(name)


def make_single(
    task: str,
    *,
    action_repeat: int | None = None,
    max_episode_steps: int | None = None,
    obs: str | None = None,
    atari: AtariConfig | None = None,
    render_mode: str | None = None,
    env_index: int = 0,
) -> TaskEnv:
    """One environment as agents see it.

    `max_episode_steps` counts decisions and replaces the task's own limit; None keeps that, in
    whole decisions. `obs` and `atari` (which other tasks leave alone) are those of the
    configuration. `env_index` is the name under which errors speak of it; of several tasks it also
    says which one this is (modulo their number).
    """
    check_task(task)
    if multi.is_multi(task):
        limits: dict[str, Any]
        limits = {"action_repeat": action_repeat, "max_episode_steps": max_episode_steps}
        shared = spec_of(task, obs=obs, **limits)
        return _make_member(shared, render_mode=render_mode, env_index=env_index)
    key, _, name = task.partition(":")
    require(
        action_repeat is None or action_repeat >= 1, "action_repeat", action_repeat, "at least 1"
    )
    own = {"action_repeat": action_repeat, "options": atari} if key == "atari" else {}
    built = FAMILIES[key].build(name, render_mode, obs, **own)
    repeat = built.action_repeat if action_repeat is None else action_repeat
    if max_episode_steps is None and built.max_frames is not None:
        max_episode_steps = max(1, built.max_frames // repeat)
    return TaskEnv(
        built.env,
        task,
        action_repeat=repeat,
        max_episode_steps=max_episode_steps,
        terminates=built.terminates,
        env_index=env_index,
    )


def _make_member(shared: EnvSpec, *, render_mode: str | None, env_index: int) -> multi.MemberEnv:
    """Environment `env_index` of several tasks."""
    number = env_index % len(shared.tasks)
    task = shared.tasks[number].task
    check_task(task)  # in a worker, this imports what registers it
    key, _, name = task.partition(":")
    built = FAMILIES[key].build(name, render_mode, None)
    return multi.MemberEnv(built.env, shared, env_index, number)


def make_env(
    task: str,
    num_envs: int = 1,
    seed: int = 0,
    *,
    workers: bool = False,
    action_repeat: int | None = None,
    max_episode_steps: int | None = None,
    obs: str | None = None,
    atari: AtariConfig | None = None,
    render_mode: str | None = None,
    timeout_seconds: float | None = None,
) -> VectorEnv:
    """`num_envs` environments of one task, in this process or each in its own; of several tasks,
    so many of each.

    A reset or step that lasts longer than `timeout_seconds` is an EnvFailure; None waits for ever.
    """
    require(num_envs >= 1, "num_envs", num_envs, "at least 1")
    check_task(task)
    limits: dict[str, Any] = {
        "action_repeat": action_repeat,
        "max_episode_steps": max_episode_steps,
        "obs": obs,
        "atari": atari,
    }
    make: Callable[..., TaskEnv] = functools.partial(make_single, task, **limits)
    if multi.is_multi(task):
        shared = spec_of(task, **limits)
        num_envs *= len(shared.tasks)
        make = functools.partial(_make_member, shared)
    makers = [
        functools.partial(make, render_mode=render_mode, env_index=i) for i in range(num_envs)
    ]
    return VectorEnv(makers, seed, workers=workers, timeout_seconds=timeout_seconds)


def spec_of(
    task: str,
    *,
    action_repeat: int | None = None,
    max_episode_steps: int | None = None,
    obs: str | None = None,
    atari: AtariConfig | None = None,
) -> EnvSpec:
    """What an agent will see of a task."""
    options: dict[str, Any]
    options = {"action_repeat": action_repeat, "max_episode_steps": max_episode_steps, "obs": obs}
    options["atari"] = atari
    if multi.is_multi(task):
        require(obs is None, "env.obs", obs, "left out: several tasks are seen as vectors")
        return multi.joint_spec(task, tuple(spec_of(own, **options) for own in multi.members(task)))
    make = functools.partial(make_single, task, **options)
    env = build(make, 0)
    try:
        return env.spec_for_agent
    finally:
        env.close()
