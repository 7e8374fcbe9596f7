"""`multi:dmc:walker-walk,dmc:cheetah-run`: several tasks that one agent sees as one.

Every observation is padded with zeros to the widest one, every action is cut to what its task
takes, and the column `task` of each row tells which task it is of, counted in the order of the
name. Member i of a vector plays task i modulo their number. Limits and repeats stay each task's.
"""

from __future__ import annotations

import operator
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.utils import RecordConstructorArgs
from numpy.typing import NDArray

from forethought.config import ConfigError, unknown
from forethought.envs.task_env import TaskEnv
from forethought.spaces.nested import Tree
from forethought.spaces.spec import Column, EnvSpec
from forethought.spaces.structure import EnvError

PREFIX = "multi:"
TASK = Column("task", (), np.dtype(np.int64), "task")
"""Which task a row is of, as its place in the name."""


def is_multi(task: str) -> bool:
    """Whether a name stands for several tasks."""
    return task.startswith(PREFIX)


def members(task: str) -> tuple[str, ...]:
    """The names of the tasks, in their order; at least two, each once."""
    names = tuple(name.strip() for name in task.removeprefix(PREFIX).split(","))
    rule = "write several tasks as multi:dmc:walker-walk,dmc:cheetah-run"
    if len(names) < 2:
        raise ConfigError(f"{task} has one task, and needs none but its own name; {rule}.")
    for place, name in enumerate(names):
        if is_multi(name) or not name:
            raise ConfigError(f"'{name}' in {task} is no single task; {rule}.")
        if name in names[:place]:
            raise ConfigError(f"{task} names {name} twice; name each task once.")
    return names


def joint_spec(task: str, own: tuple[EnvSpec, ...]) -> EnvSpec:
    """What an agent sees of these tasks together; one that cannot be padded is refused."""
    for spec in own:
        _check(task, spec)
    limits = [spec.max_episode_steps for spec in own]
    known = [limit for limit in limits if limit is not None]
    observations = max(spec.observation_space.shape[0] for spec in own)  # type: ignore[index]
    actions = max(spec.action_space.shape[0] for spec in own)  # type: ignore[index]
    return EnvSpec(
        task=task,
        observation_space=spaces.Box(-np.inf, np.inf, (observations,), np.float32),
        action_space=spaces.Box(-1.0, 1.0, (actions,), np.float32),
        max_episode_steps=max(known) if len(known) == len(limits) else None,
        action_repeat=max(spec.action_repeat for spec in own),
        terminates=any(spec.terminates for spec in own),
        columns=(TASK,),
        tasks=own,
    )


def _check(task: str, spec: EnvSpec) -> None:
    obs, action = spec.observation_space, spec.action_space
    if not isinstance(obs, spaces.Box) or len(obs.shape) != 1:
        what = f"observations that are one vector, but those of {spec.task} are {obs}"
    elif (
        not isinstance(action, spaces.Box)
        or len(action.shape) != 1
        or not np.issubdtype(action.dtype, np.floating)
        or not action.is_bounded("both")
    ):
        what = f"continuous actions (a bounded Box of one axis), but those of {spec.task} are "
        what += str(action)
    elif spec.columns:
        names = ", ".join(column.name for column in spec.columns)
        what = f"no extra columns, but {spec.task} declares {names}"
    else:
        return
    raise ConfigError(f"{task}: tasks that share one agent have {what}; train it alone.")


def task_names(spec: EnvSpec) -> tuple[str, ...]:
    """The names of the tasks in a spec; of a single task, none."""
    return tuple(own.task for own in spec.tasks)


def one_of(spec: EnvSpec, task: str | int) -> tuple[int, EnvSpec]:
    """The number of a task that is named, or numbered, and what it is alone."""
    names = task_names(spec)
    if not names:
        raise ConfigError(f"task is {task}, but there is one task, {spec.task}; leave it out.")
    if isinstance(task, str):
        if task not in names:
            raise unknown("task", task, names, f"There are {', '.join(names)}.")
        task = names.index(task)
    number = number_of(task, spec)
    return number, spec.tasks[number]


def number_of(task: Any, spec: EnvSpec) -> int:
    """The number of a task, checked: Python itself would take -1 for the last."""
    try:
        number = -1 if isinstance(task, bool) else operator.index(task)
    except TypeError:
        number = -1
    if not 0 <= number < len(spec.tasks):
        raise ConfigError(
            f"task is {task!r}, but must be a whole number from 0 to {len(spec.tasks) - 1}."
        )
    return number


def padded(obs: Any, own: EnvSpec, spec: EnvSpec) -> NDArray[np.float32]:
    """An observation of one task alone, as wide as those of all."""
    width, shape = spec.observation_space.shape[0], own.observation_space.shape  # type: ignore[index]
    if np.shape(obs) != shape:
        raise ConfigError(
            f"The observation has shape {np.shape(obs)}, but that of {own.task} alone has {shape}; "
            "one that is padded goes with info, as the environments of several tasks give it."
        )
    wide = np.zeros(width, np.float32)
    wide[: len(obs)] = obs
    return wide


def action_masks(spec: EnvSpec) -> NDArray[np.float32]:
    """[tasks, A]: 1 where a task has an action dimension, 0 where it is padding."""
    widest = spec.action_space.shape[0]  # type: ignore[index]
    own = [task.action_space.shape[0] for task in spec.tasks]  # type: ignore[index]
    return (np.arange(widest)[None] < np.array(own)[:, None]).astype(np.float32)


class PaddedEnv(gymnasium.Wrapper[Any, Any, Any, Any], RecordConstructorArgs):
    """One task in the common shape: a longer observation, a longer action, its number in info."""

    columns = (TASK,)

    def __init__(self, env: gymnasium.Env[Any, Any], number: int, widths: tuple[int, int]) -> None:
        """`widths` are those of the common observation and action."""
        RecordConstructorArgs.__init__(self, number=number, widths=widths)
        gymnasium.Wrapper.__init__(self, env)
        self._number, self._width = number, widths[0]
        obs, action = env.observation_space, env.action_space
        assert isinstance(obs, spaces.Box) and isinstance(action, spaces.Box)  # `joint_spec` says
        self._actions = action.shape[0]
        with np.errstate(over="ignore"):
            low, high = obs.low.astype(np.float32), obs.high.astype(np.float32)
        extra = (0, widths[0] - len(low))
        self.observation_space = spaces.Box(np.pad(low, extra), np.pad(high, extra))
        ones = np.ones(widths[1] - len(action.low), action.dtype)
        self.action_space = spaces.Box(
            np.concatenate((action.low, -ones)),
            np.concatenate((action.high, ones)),
            dtype=action.dtype.type,
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """A new episode of the task."""
        obs, info = self.env.reset(seed=seed, options=options)
        return self._padded(obs), {**info, "task": self._number}

    def step(
        self, action: NDArray[Any]
    ) -> tuple[NDArray[np.float32], Any, Any, Any, dict[str, Any]]:
        """One step with the part of the action that the task takes."""
        obs, reward, terminated, truncated, info = self.env.step(action[: self._actions])
        return self._padded(obs), reward, terminated, truncated, {**info, "task": self._number}

    def _padded(self, obs: Any) -> NDArray[np.float32]:
        padded = np.zeros(self._width, np.float32)
        own = self.env.observation_space.shape
        if np.shape(obs) != own:
            raise ValueError(f"the observation has shape {np.shape(obs)}, but its space says {own}")
        with np.errstate(over="ignore"):  # what is not finite in float32 is refused in words
            padded[: len(obs)] = obs
        return padded


class MemberEnv(TaskEnv):
    """A task of several: it keeps its own limit and repeat, and shows the common spec."""

    def __init__(
        self, env: gymnasium.Env[Any, Any], shared: EnvSpec, env_index: int, number: int
    ) -> None:
        own = shared.tasks[number]
        widths = (shared.observation_space.shape[0], shared.action_space.shape[0])  # type: ignore[index]
        super().__init__(
            PaddedEnv(env, number, widths),
            own.task,
            action_repeat=own.action_repeat,
            max_episode_steps=own.max_episode_steps,
            terminates=own.terminates,
            env_index=env_index,
        )
        self.spec_for_agent = shared
        self._padding = action_masks(shared)[number] == 0

    def _native(self, action: Tree) -> Any:
        # What is stored is what was executed, and of padding nothing is executed.
        if np.any(np.asarray(action)[..., self._padding] != 0):
            raise EnvError(
                f"The action of environment {self.env_index} at step {self._steps} is not zero in "
                f"dimensions that {self._own.task} does not have; correct the agent."
            )
        return super()._native(action)
