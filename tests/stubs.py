"""Small environments whose every number is known in advance, for the tests of all rooms.

In process: `vector_of(partial(CounterEnv, length=3), num_envs=2)`. By name, also in workers:
`make_env("gym:tests.stubs:stub/Counter-v0")`; the ids are registered at the end of this file.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from forethought.envs import TaskEnv, VectorEnv
from forethought.spaces import Column

Step = tuple[Any, float, bool, bool, dict[str, Any]]


class CounterEnv(gymnasium.Env):
    """Observation [t, offset] after t steps, reward t; `offset` is random from the reset's seed.

    Ends at step `length` (None = never) by termination, or by truncation with `truncates`.
    """

    def __init__(
        self, length: int | None = 5, *, truncates: bool = False, discrete: bool = False
    ) -> None:
        self.length, self.truncates = length, truncates
        self.terminates = length is not None and not truncates
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        box = spaces.Box(-2.0, 2.0, (1,), np.float32)
        self.action_space = spaces.Discrete(3) if discrete else box
        self.t, self.offset = 0, 0.0
        self.received: list[Any] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t, self.offset = 0, float(self.np_random.random())
        self.received = []
        return self.observe(), {}

    def step(self, action: Any) -> Step:
        self.t += 1
        self.received.append(action)
        ended = self.t == self.length
        terminated, truncated = ended and not self.truncates, ended and self.truncates
        info = {"success": terminated} if ended else {}
        return self.observe(), float(self.t), terminated, truncated, info

    def observe(self) -> Any:
        return np.array([self.t, self.offset], np.float32)


class NestedEnv(CounterEnv):
    """Dict observations {"pose": {"position", "angle"}, "image", "gear"}, Dict actions, all = t."""

    def __init__(self, length: int | None = 5, *, truncates: bool = False) -> None:
        super().__init__(length, truncates=truncates)
        pose = {
            "position": spaces.Box(-np.inf, np.inf, (3,), np.float64),
            "angle": spaces.Box(-1e4, 1e4, (), np.float32),
        }
        self.observation_space = spaces.Dict(
            {
                "pose": spaces.Dict(pose),
                "image": spaces.Box(0, 255, (2, 2), np.uint8),
                "gear": spaces.Discrete(100),
            }
        )
        self.action_space = spaces.Dict(
            {"steer": spaces.Box(-2.0, 4.0, (2,), np.float64), "gear": spaces.Discrete(3)}
        )

    def observe(self) -> Any:
        return {
            "pose": {"position": np.full(3, self.t, np.float64), "angle": np.float32(self.t)},
            "image": np.full((2, 2), self.t, np.uint8),
            "gear": self.t,
        }


class EntityEnv(CounterEnv):
    """`craft` [4, 2] with `craft_mask` [4]; after t steps the first t mod 5 rows are present.

    Row k holds k + 1; absent rows hold garbage (1e6). Only action t mod 3 is legal, and info says
    so in the declared column `action_mask`; an illegal action raises.
    """

    columns = (Column("action_mask", (3,), np.dtype(np.bool_), "action_mask"),)

    def __init__(self, length: int | None = 5, *, truncates: bool = False) -> None:
        super().__init__(length, truncates=truncates, discrete=True)
        self.observation_space = spaces.Dict(
            {
                "craft": spaces.Box(-np.inf, np.inf, (4, 2), np.float32),
                "craft_mask": spaces.MultiBinary(4),
            }
        )

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        obs, info = super().reset(seed=seed)
        return obs, {**info, "action_mask": self.mask()}

    def step(self, action: Any) -> Step:
        if not self.mask()[action]:
            raise ValueError(f"action {action} is illegal at step {self.t}")
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, reward, terminated, truncated, {**info, "action_mask": self.mask()}

    def mask(self) -> Any:
        return np.arange(3) == self.t % 3

    def observe(self) -> Any:
        present = np.arange(4) < self.t % 5
        rows = np.repeat(np.arange(1.0, 5.0, dtype=np.float32)[:, None], 2, axis=1)
        return {
            "craft": np.where(present[:, None], rows, np.float32(1e6)),
            "craft_mask": present.astype(np.int8),
        }


class ImageEnv(CounterEnv):
    """uint8 frames [4, 4, 1] filled with t mod 256, always in the same buffer, as simulators do."""

    def __init__(self, length: int | None = 5, *, truncates: bool = False) -> None:
        super().__init__(length, truncates=truncates, discrete=True)
        self.observation_space = spaces.Box(0, 255, (4, 4, 1), np.uint8)
        self.buffer = np.zeros((4, 4, 1), np.uint8)

    def observe(self) -> Any:
        self.buffer[:] = self.t % 256
        return self.buffer


FAULTS = (
    "nan-observation",
    "shape",
    "dtype",
    "nan-reward",
    "inf-reward",
    "raise",
    "hang",
    "kill",
)


class FaultyEnv(CounterEnv):
    """A counter that does `fault` (one of FAULTS) at step `at`, counted from each reset.

    With `only_seeds` it does so only in episodes whose reset seed is among them.
    """

    def __init__(
        self,
        fault: str,
        at: int = 3,
        length: int | None = 10,
        *,
        only_seeds: tuple[int, ...] | None = None,
    ) -> None:
        assert fault in FAULTS, fault
        super().__init__(length)
        self.fault, self.at, self.only_seeds = fault, at, only_seeds
        self.armed = True

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.armed = self.only_seeds is None or seed in self.only_seeds
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Step:
        obs, reward, terminated, truncated, info = super().step(action)
        if self.armed and self.t == self.at:
            if self.fault == "raise":
                raise RuntimeError("the wheel came off")
            if self.fault == "hang":
                time.sleep(3600)
            if self.fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fault == "nan-observation":
                obs = np.array([np.nan, 0.0], np.float32)
            if self.fault == "shape":
                obs = np.zeros(3, np.float32)
            if self.fault == "dtype":
                obs = np.array(["1", "2"])
            reward = {"nan-reward": np.nan, "inf-reward": np.inf}.get(self.fault, reward)
        return obs, reward, terminated, truncated, info


def task_env(
    make: Callable[[], gymnasium.Env], env_index: int = 0, options: dict[str, Any] | None = None
) -> TaskEnv:
    """A stub as agents see it."""
    return TaskEnv(make(), "stub", env_index=env_index, **(options or {}))


def vector_of(
    *makers: Callable[[], gymnasium.Env],
    num_envs: int | None = None,
    seed: int = 0,
    workers: bool = False,
    timeout_seconds: float | None = None,
    **options: Any,
) -> VectorEnv:
    """A vector of stubs: one per maker, or `num_envs` of a single maker; options go to TaskEnv."""
    chosen = list(makers) * (num_envs or 1)
    tasks = [partial(task_env, make, i, options) for i, make in enumerate(chosen)]
    return VectorEnv(tasks, seed, workers=workers, timeout_seconds=timeout_seconds)


def fault_if(index: int, fault: str, at: int = 3, num_envs: int = 2) -> list[Callable[[], Any]]:
    """Makers of which only environment `index` has the fault."""
    good = partial(CounterEnv, 10)
    return [partial(FaultyEnv, fault, at) if i == index else good for i in range(num_envs)]


def _register(name: str, entry_point: type[gymnasium.Env], **kwargs: Any) -> None:
    if f"stub/{name}-v0" not in gymnasium.registry:
        gymnasium.register(f"stub/{name}-v0", entry_point, kwargs=kwargs)


_register("Counter", CounterEnv)
_register("Truncated", CounterEnv, truncates=True)
_register("Endless", CounterEnv, length=None)
_register("Discrete", CounterEnv, discrete=True)
_register("Nested", NestedEnv)
_register("Entity", EntityEnv)
_register("Image", ImageEnv)
_register("Raises", FaultyEnv, fault="raise")
_register("NaN", FaultyEnv, fault="nan-observation")
_register("Hangs", FaultyEnv, fault="hang", at=7)
