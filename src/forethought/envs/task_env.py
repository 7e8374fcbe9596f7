"""One environment as agents see it: repeat, limit, rescaled actions, and checks at the boundary.

The strategy for errors: what an environment raises, and every value that breaks its promise,
becomes an EnvFailure with the environment's index and the step, so that nothing ill-formed reaches
replay; an action that breaks the agent's promise is an EnvError. The original traceback travels as
a note of the exception, also out of a worker process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import gymnasium
import numpy as np
from gymnasium.utils import RecordConstructorArgs

from forethought.config import ConfigError, require
from forethought.envs import foreign
from forethought.envs.watchdog import doing
from forethought.spaces.action_codec import Table, table_of
from forethought.spaces.agent_view import agent_space, half_range, native_action
from forethought.spaces.nested import Tree
from forethought.spaces.spec import Column, EnvSpec
from forethought.spaces.structure import EnvError, EnvFailure, Leaf, Structure, column_leaf

T = TypeVar("T")
LARGEST_REWARD = float(np.finfo(np.float32).max)  # replay stores float32, where more is infinite
SLOWEST_FPS, FASTEST_FPS = 1e-3, 1e5
"""What an environment may give as its rate of pictures; others are none."""
RESET = "reset must return (observation, info)"
STEP = "step must return (observation, reward, terminated, truncated, info)"
Step = tuple[Tree, float, bool, bool, dict[str, Any]]


class TaskEnv(gymnasium.Wrapper[Any, Any, Any, Any], RecordConstructorArgs):
    """Wraps any gymnasium environment; `spec_for_agent` tells an agent what it will see.

    An environment may declare `columns` (a tuple of Column), `terminates` (False promises that no
    episode ends by termination), `distinct_actions` (see spaces/action_codec.py), `sign_rewards`
    (see spaces/spec.py) and `frames_per_step` (above 1 where it holds an action itself). One that
    offers `snapshot` and `restore` (see envs/atari_game.py) is resumed by them.
    """

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        task: str = "custom",
        *,
        action_repeat: int = 1,
        max_episode_steps: int | None = None,
        terminates: bool | None = None,
        env_index: int = 0,
    ) -> None:
        RecordConstructorArgs.__init__(  # so that env.spec.make() gives another one
            self,
            task=task,
            action_repeat=action_repeat,
            max_episode_steps=max_episode_steps,
            terminates=terminates,
            env_index=env_index,
        )
        gymnasium.Wrapper.__init__(self, env)
        require(action_repeat >= 1, "action_repeat", action_repeat, "at least 1")
        limit = max_episode_steps
        require(limit is None or limit >= 1, "max_episode_steps", limit, "at least 1")
        self.env_index = env_index
        held = int(_declared(env, "frames_per_step", 1))
        if held not in (1, action_repeat):
            raise ConfigError(
                f"action_repeat is {action_repeat}, but {task} holds each action for {held} frames "
                "itself, which must not be held again; leave it out."
            )
        self._calls = action_repeat // held
        self.observation_space = agent_space(self._space("observation_space"), action=False)
        self.action_space = agent_space(self._space("action_space"), action=True)
        self._observations = Structure.of(self.observation_space)
        self._actions = Structure.of(self.action_space)
        columns: tuple[Column, ...] = tuple(_declared(env, "columns", ()))
        leaves: tuple[Leaf, ...] = tuple(column_leaf(c.name, c.shape, c.dtype) for c in columns)
        self._columns = Structure(leaves, {})
        if terminates is None:
            terminates = bool(_declared(env, "terminates", True))
        self.spec_for_agent = self._own = EnvSpec(
            task=task,
            observation_space=self.observation_space,
            action_space=self.action_space,
            max_episode_steps=limit,
            action_repeat=action_repeat,
            terminates=terminates,
            columns=columns,
            distinct_actions=_declared_table(env, self.action_space),
            sign_rewards=bool(_declared(env, "sign_rewards", False)),
            action_half_range=half_range(self._space("action_space")),
        )
        rate: Any = env.metadata.get("render_fps")
        self.metadata = {k: v for k, v in env.metadata.items() if k != "render_fps"}
        number = isinstance(rate, int | float | np.integer | np.floating)
        if number and SLOWEST_FPS <= rate <= FASTEST_FPS:
            # One frame is shown per decision.
            self.metadata["render_fps"] = float(rate) / action_repeat
        self._steps = 0
        self._running = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Tree, dict[str, Any]]:
        """A new episode; with a seed, a function of (seed, actions) alone."""
        self._steps, self._running = 0, False
        begun = self._guard(lambda: self.env.reset(seed=seed, options=options))
        obs, info = self._parts(begun, 2, "reset", RESET)
        self._running = True
        return self._checked(obs), self._checked_info(info)

    def step(self, action: Tree) -> Step:
        """One decision: the action held for `action_repeat` frames, their rewards summed."""
        if not self._running:
            raise EnvError(
                f"Environment {self.env_index} was stepped before a reset or after the end of its "
                "episode; reset it first."
            )
        self._steps += 1
        native = self._native(action)
        reward, terminated, truncated = 0.0, False, False
        obs: Any = None
        info: dict[str, Any] = {}
        for _ in range(self._calls):
            frame = self._guard(lambda: self.env.step(native))
            obs, frame_reward, *ends, info = self._parts(frame, 5, "step", STEP)
            reward += self._checked_reward(frame_reward)
            terminated, truncated = map(self._checked_end, ends)
            if terminated or truncated:
                break
        reward = self._checked_reward(reward)  # a sum of large frames may be too large
        if terminated and not self._own.terminates:
            raise EnvFailure(
                f"Environment {self.env_index} terminated at step {self._steps}, but declares that "
                "it never does; set its attribute terminates to True (tdmpc2, which learns when "
                "episodes end, must then be trained anew)."
            )
        limit = self._own.max_episode_steps
        if limit is not None and self._steps >= limit and not terminated:
            truncated = True
        self._running = not (terminated or truncated)
        obs, info = self._checked(obs), self._checked_info(info, over=terminated)
        return obs, reward, terminated, truncated, info

    def snapshot(self) -> dict[str, Any] | None:
        """All that decides the rest of the episode; None where only its actions can tell."""
        if not self.env.has_wrapper_attr("snapshot"):
            return None
        taken: dict[str, Any] | None = self._guard(self.env.get_wrapper_attr("snapshot"))
        return None if taken is None else {**taken, "steps": np.int64(self._steps)}

    def restore(self, snapshot: dict[str, Any]) -> tuple[Tree, dict[str, Any]] | None:
        """Go on with the episode that `snapshot` described, from its last observation and info;
        None where that cannot be done exactly."""
        steps = np.asarray(snapshot.get("steps", ()))
        if not self.env.has_wrapper_attr("restore") or steps.shape != ():
            return None
        self._steps, self._running = int(steps), False
        own = {key: value for key, value in snapshot.items() if key != "steps"}
        found = self._guard(lambda: self.env.get_wrapper_attr("restore")(own))
        if found is None:
            return None
        self._running = True
        return self._checked(found[0]), self._checked_info(found[1])

    def render(self) -> Any:
        """A picture, or whatever the render mode promises."""
        return self._guard(self.env.render)

    def _native(self, action: Tree) -> Any:
        # An action outside its space is refused, not clipped: what is stored is what was executed.
        action = self._actions.check(action, "action", self.env_index, self._steps)
        return native_action(self.env.action_space, action)

    def _guard(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except foreign.RAISED as error:
            if foreign.passes(error):
                raise
            sentence = (
                f"Environment {self.env_index} raised {type(error).__name__} at step "
                f"{self._steps}: {error}"
            )
            raise foreign.wrapped(EnvFailure, sentence, error) from error

    def _space(self, name: str) -> gymnasium.Space[Any]:
        space = getattr(self.env, name, None)
        if not isinstance(space, gymnasium.Space):
            there = "has no" if space is None else f"has a {_type_of(space)} as its"
            raise ConfigError(
                f"Environment {self.env_index} ({type(self.env.unwrapped).__name__}) {there} "
                f"{name}, but must have a space of gymnasium; set it in the environment's __init__."
            )
        return space

    def _parts(self, returned: Any, number: int, command: str, rule: str) -> tuple[Any, ...]:
        """What a reset or step returned, in its parts.

        That the info is a dict also tells a pair from an observation that has two members.
        """
        if not isinstance(returned, tuple | list):
            problem = f"one {_type_of(returned)}"
        elif len(returned) != number:
            problem = f"{len(returned)} values"
        elif not isinstance(returned[-1], Mapping):
            problem = f"a {_type_of(returned[-1])} as the last value"
        else:
            return tuple(returned)
        raise EnvFailure(
            f"Environment {self.env_index} returned {problem} from {doing(command, self._steps)}, "
            f"but {rule}, of which info is a dict; correct the environment."
        )

    def _checked_end(self, value: Any) -> bool:
        try:
            return bool(value)
        except ValueError:  # numpy's word for an array of several
            raise EnvFailure(
                f"Environment {self.env_index} ended with {value} at step {self._steps}, but {STEP}"
                ", of which terminated and truncated are True or False; correct the environment."
            ) from None

    def _checked(self, obs: Any) -> Tree:
        if callable(obs):  # one of our own that is made only where somebody sees it
            obs = self._guard(obs)
        return self._observations.check(obs, "observation", self.env_index, self._steps)

    def _checked_reward(self, reward: Any) -> float:
        try:
            value = float(reward)
        except (TypeError, ValueError, OverflowError):
            value = math.nan
        if not abs(value) <= LARGEST_REWARD:  # also true for nan
            raise EnvFailure(
                f"The reward of environment {self.env_index} at step {self._steps} is {reward}, "
                "but must be a number that is finite in float32; correct the environment."
            )
        return value

    def _checked_info(self, info: Mapping[str, Any], over: bool = False) -> dict[str, Any]:
        """The info with its declared columns present, well-formed and in stored dtypes.

        When all is over nothing needs to be legal; after a truncation values look further.
        """
        columns = self.spec_for_agent.columns
        for column in columns:
            if column.source not in info:
                raise EnvFailure(
                    f"The info of environment {self.env_index} at step {self._steps} has no "
                    f"'{column.source}', which the environment declares as a column; add it."
                )
        if not columns:
            return dict(info)
        values = {column.name: info[column.source] for column in columns}
        checked = self._columns.check(values, "column", self.env_index, self._steps)
        if not over and not np.any(checked.get("action_mask", True)):
            raise EnvFailure(
                f"The action_mask of environment {self.env_index} at step {self._steps} allows no "
                "action; end the episode there, or let the environment allow one."
            )
        return {**info, **{column.source: checked[column.name] for column in columns}}


def _type_of(value: Any) -> str:
    return "None" if value is None else type(value).__name__


def _declared_table(env: gymnasium.Env[Any, Any], space: gymnasium.Space[Any]) -> Table | None:
    declared = _declared(env, "distinct_actions", None)
    return None if declared is None else table_of(space, declared)


def _declared(env: gymnasium.Env[Any, Any], name: str, default: Any) -> Any:
    return env.get_wrapper_attr(name) if env.has_wrapper_attr(name) else default
