"""Environments in processes of their own: one process, one pipe, one request at a time.

Processes are spawned, never forked: a fork of a process whose torch threads hold locks may hang. A
worker computes with one thread and leaves signals to its parent, which decides what an interrupt
means; it ends when its parent asks for it, closes the pipe or dies.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import connection, resource_tracker, util
from multiprocessing.process import BaseProcess
from typing import Any

from forethought.config import ConfigError, ForethoughtError
from forethought.envs.task_env import TaskEnv
from forethought.spaces.structure import EnvError

CLOSE_SECONDS = 5.0
"""How long a worker may take to end by itself before it is killed."""
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
LEFT_TO_PARENT = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def build(make: Callable[[], TaskEnv], index: int) -> TaskEnv:
    """Make an environment; what its constructor raises becomes an EnvError."""
    try:
        return make()
    except ForethoughtError:
        raise
    except Exception as error:
        wrapped = EnvError(
            f"Environment {index} could not be built: {type(error).__name__}: {error}"
        )
        wrapped.add_note("".join(traceback.format_exception(error)).rstrip())
        raise wrapped from error


def answer(env: TaskEnv, command: str, *arguments: Any) -> Any:
    """Carry out one request on an environment; the same for workers and for this process."""
    if command == "reset":
        seed, options = arguments
        return env.reset(seed=seed, options=options)
    if command == "step":
        return env.step(arguments[0])
    if command == "render":
        return env.render()
    if command == "metadata":
        return env.metadata
    if command == "spec":
        return env.spec_for_agent
    raise ValueError(f"There is no command {command}.")


class WorkerHandle:
    """The parent's side of one worker."""

    def __init__(self, make: Callable[[], TaskEnv], index: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._index = index
        self._pipe, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(
            target=_serve, args=(theirs, make, index), name=f"env-{index}", daemon=True
        )
        with _for_a_new_worker():
            self._process.start()
        theirs.close()  # else the end of the worker would not close the pipe
        self._waiting = False
        # At exit multiprocessing joins its children, before which they must have been told to end.
        self._finalizer = util.Finalize(
            self, _end, args=(self._pipe, self._process), exitpriority=10
        )

    def request(self, command: str, *arguments: Any) -> None:
        """Send a command; a dead worker is reported by `result`."""
        if self._waiting:
            # An exception (Ctrl-C in a notebook) came between a request and its answer: that
            # answer must not be taken for the next one's.
            with contextlib.suppress(ForethoughtError):
                self.result()
        self._waiting = True
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._pipe.send((command, arguments))

    def result(self) -> Any:
        """Wait for the answer; what the worker raised is raised here, with its traceback."""
        try:
            kind, content, notes = self._pipe.recv()
        except (EOFError, ConnectionResetError) as error:
            self._waiting = False
            raise EnvError(self._death()) from error
        self._waiting = False
        if kind == "answer":
            return content
        raised = ConfigError(content) if kind == "config" else EnvError(content)
        for note in notes:
            raised.add_note(note)
        raise raised

    def close(self) -> None:
        """Ask the worker to end; kill it if it does not."""
        self._finalizer()

    @property
    def pid(self) -> int | None:
        """The worker's process id."""
        return self._process.pid

    def _death(self) -> str:
        self._process.join(CLOSE_SECONDS)
        code = self._process.exitcode
        if code is None:
            how = "closed its pipe"
        elif code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
        else:
            how = f"ended with exit code {code}"
        return (
            f"The worker process {self.pid} of environment {self._index} {how}; look for its last "
            "words above, and for the machine's memory."
        )


def _end(pipe: connection.Connection[Any, Any], process: BaseProcess) -> None:
    pipe.close()
    process.join(CLOSE_SECONDS)
    if process.is_alive():
        process.kill()
        process.join()


@contextlib.contextmanager
def _for_a_new_worker() -> Iterator[None]:
    """What a new process inherits: one thread, and blocked signals until it ignores them itself."""
    # The tracker unblocks signals when it is started, so it must be running before.
    resource_tracker.ensure_running()
    before = {key: os.environ.get(key) for key in ONE_THREAD}
    os.environ.update(dict.fromkeys(ONE_THREAD, "1"))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_PARENT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


def _serve(pipe: connection.Connection[Any, Any], make: Callable[[], TaskEnv], index: int) -> None:
    """The worker's life."""
    for number in LEFT_TO_PARENT:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, LEFT_TO_PARENT)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    env: TaskEnv | None = None
    try:
        while True:
            command, arguments = pipe.recv()
            try:
                if env is None:
                    env = build(make, index)
                reply = ("answer", answer(env, command, *arguments), ())
            except ForethoughtError as error:
                kind = "config" if isinstance(error, ConfigError) else "error"
                reply = (kind, str(error), tuple(getattr(error, "__notes__", ())))
            pipe.send(reply)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the parent closed the pipe: this is how a worker is told to end
    finally:
        if env is not None:
            env.close()


def _end_with_parent() -> None:
    """An environment that hangs never reads its pipe, so its parent's death is watched for."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
