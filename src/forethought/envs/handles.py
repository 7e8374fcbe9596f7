"""One environment behind a handle that takes one request at a time, here or in a worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from forethought.config import ForethoughtError
from forethought.envs import foreign
from forethought.envs.task_env import TaskEnv
from forethought.envs.watchdog import Call, Watchdog
from forethought.spaces.structure import EnvFailure

BUILD_SECONDS = 60.0
"""The least time that building an environment may take: imports and a new process are slow."""
CLOSE_SECONDS = 5.0
"""The most time that it may take to end; one that hangs must not keep a run from stopping."""


class Handle(Protocol):
    """One environment that takes one request at a time."""

    def request(self, command: str, *arguments: Any) -> None:
        """Begin a command; it never raises what the environment raises."""

    def result(self) -> Any:
        """The answer to the last request, or the error that it caused."""

    def close(self) -> None:
        """End the environment; may be called twice."""


def build(make: Callable[[], TaskEnv], index: int) -> TaskEnv:
    """Make an environment; what its constructor raises becomes an EnvFailure."""
    try:
        return make()
    except foreign.RAISED as error:
        if foreign.passes(error):
            raise
        sentence = f"Environment {index} could not be built: {type(error).__name__}: {error}"
        raise foreign.wrapped(EnvFailure, sentence, error) from error


def answer(env: TaskEnv, command: str, *arguments: Any) -> Any:
    """Carry out one request on an environment; the same for workers and for this process."""
    if command == "reset":
        seed, options = arguments
        return env.reset(seed=seed, options=options)
    if command == "step":
        return env.step(arguments[0])
    if command == "snapshot":
        return env.snapshot()
    if command == "restore":
        return env.restore(arguments[0])
    if command == "render":
        return env.render()
    if command == "metadata":
        return env.metadata
    if command == "spec":
        return env.spec_for_agent
    raise ValueError(f"There is no command {command}.")


def steps_after(command: str, steps: int) -> int:
    """Decisions since the last reset, this request included; a picture is no decision."""
    return {"reset": 0, "step": steps + 1}.get(command, steps)


class LocalHandle:
    """An environment in this process; with a watchdog it may not hang for ever."""

    def __init__(
        self, make: Callable[[], TaskEnv], index: int, watchdog: Watchdog | None = None
    ) -> None:
        self._index, self._watchdog, self._step = index, watchdog, 0
        self._env: TaskEnv = self._run("build", build, make, index)
        self._answer: Any = None
        self._error: ForethoughtError | None = None

    def request(self, command: str, *arguments: Any) -> None:
        """Answer at once, and keep the answer."""
        self._answer, self._error = None, None
        self._step = steps_after(command, self._step)
        try:
            self._answer = self._run(command, answer, self._env, command, *arguments)
        except ForethoughtError as error:
            self._error = error

    def result(self) -> Any:
        """The kept answer or error."""
        if self._error is not None:
            raise self._error
        return self._answer

    def close(self) -> None:
        """Close the environment; what it raises becomes an EnvFailure."""
        try:
            self._run("close", self._env.close)
        except foreign.RAISED as error:
            if foreign.passes(error):
                raise
            what = f"Environment {self._index} could not be closed: {type(error).__name__}"
            raise foreign.wrapped(EnvFailure, f"{what}: {error}", error) from error

    def _run(self, command: str, work: Callable[..., Any], *arguments: Any) -> Any:
        dog = self._watchdog
        if dog is None:
            return work(*arguments)
        seconds = dog.seconds
        if command == "build":
            seconds = max(seconds, BUILD_SECONDS)
        elif command == "close":
            seconds = min(seconds, CLOSE_SECONDS)
        return dog.run(Call(self._index, command, self._step, seconds), work, *arguments)
