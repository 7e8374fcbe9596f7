"""Environments in processes of their own: one process, one pipe, one request at a time; large
arrays of observations, as pictures are, lie in memory that both sides share.

Processes are spawned, never forked: a fork of a process whose torch threads hold locks may hang. A
worker computes with one thread and leaves signals to its parent, which decides what an interrupt
means; it ends when its parent asks for it, closes the pipe or dies.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import connection, resource_tracker, util
from multiprocessing.process import BaseProcess
from typing import Any

from forethought.config import ConfigError, ForethoughtError
from forethought.envs.handles import BUILD_SECONDS, CLOSE_SECONDS, answer, build, steps_after
from forethought.envs.room import Room, new_memory
from forethought.envs.task_env import TaskEnv
from forethought.envs.watchdog import doing, too_long
from forethought.spaces.structure import EnvError, EnvFailure

LAST_WAIT_SECONDS = 0.5
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
LEFT_TO_PARENT = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
UNGUARDED = 79
"""Exit code of a worker that, still importing the script that started it, met the same start."""
IMPORTS = (
    "a worker imports the script that starts it, so that must be a file which does its work below "
    'a line `if __name__ == "__main__":`'
)
ERRORS: dict[str, type[ForethoughtError]] = {
    "config": ConfigError,
    "failure": EnvFailure,
    "error": EnvError,
}
"""What travels out of a worker, by the word that stands for it on the pipe."""


class WorkerHandle:
    """The parent's side of one worker; without a time-out it waits for ever."""

    def __init__(
        self, make: Callable[[], TaskEnv], index: int, timeout_seconds: float | None = None
    ) -> None:
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            # This process is a worker that imports its parent's script, and the script starts
            # workers as soon as it is imported. Python would show a page of tracebacks.
            raise SystemExit(UNGUARDED)
        context = multiprocessing.get_context("spawn")
        self._index, self._timeout = index, timeout_seconds
        self._pipe, theirs = context.Pipe()
        memory = new_memory(context)
        self._room = Room(memory)
        self._process: BaseProcess = context.Process(
            target=_serve, args=(theirs, make, index, memory), name=f"env-{index}", daemon=True
        )
        with _for_a_new_worker():
            self._process.start()
        theirs.close()  # else the end of the worker would not close the pipe
        self._poll = select.poll()  # made once: Connection.poll would make a selector each time
        self._poll.register(self._pipe.fileno(), select.POLLIN)
        self._waiting = self._answered = False
        self._command, self._step, self._asked = "build", 0, time.monotonic()
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
        self._step = steps_after(command, self._step)
        self._command, self._asked = command if self._answered else "build", time.monotonic()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._pipe.send((command, arguments))

    def result(self) -> Any:
        """Wait for the answer; what the worker raised is raised here, with its traceback.

        A worker that gives none in time is killed. The time runs from the request, so that many
        workers that hang together cost one time-out.
        """
        if self._timeout is not None:
            self._wait(self._timeout)
        try:
            kind, content, notes = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._waiting = False
            raise self._death() from None  # that the pipe ended says nothing more
        self._waiting, self._answered = False, True
        if kind == "answer":
            return content
        if kind == "seen":
            return (self._room.get(content[0]), *content[1:])
        raised = ERRORS[kind](content)
        for note in notes:
            raised.add_note(note)
        raise raised

    def close(self) -> None:
        """Ask the worker to end; kill it if it does not.

        One whose answer nobody has waited for is killed at once: its step was given up, and many
        that hang must not each take their time to end.
        """
        if self._waiting:
            self._process.kill()
        self._finalizer()

    @property
    def pid(self) -> int | None:
        """The worker's process id."""
        return self._process.pid

    def _wait(self, seconds: float) -> None:
        """Returns when the worker has answered or ended."""
        if self._command == "build":
            seconds = max(seconds, BUILD_SECONDS)
        left = max(0.0, self._asked + seconds - time.monotonic())
        # Once more, for a moment: perhaps the whole group was stopped (Ctrl-Z) and just went on.
        if self._poll.poll(left * 1000) or self._poll.poll(LAST_WAIT_SECONDS * 1000):
            return
        self._waiting = False
        self._process.kill()
        self._process.join()
        raise EnvFailure(too_long(self._index, self._command, self._step, seconds))

    def _death(self) -> ForethoughtError:
        self._process.join(CLOSE_SECONDS)
        code = self._process.exitcode
        who = f"The worker process {self.pid} of environment {self._index}"
        if code == UNGUARDED:
            return ConfigError(f"{who} could not begin: {IMPORTS}.")
        if code is None:
            how = "closed its pipe"
        elif code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
        else:
            how = f"ended with exit code {code}"
        where = doing(self._command, self._step)
        hint = f"; {IMPORTS}" if code == 1 and not self._answered else ""
        return EnvFailure(
            f"{who} {how} during {where}; look for its last words above, and for the machine's "
            f"memory{hint}."
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


def _serve(
    pipe: connection.Connection[Any, Any], make: Callable[[], TaskEnv], index: int, memory: Any
) -> None:
    """The worker's life."""
    room = Room(memory)
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
                found = answer(env, command, *arguments)
                reply: tuple[str, Any, tuple[str, ...]] = ("answer", found, ())
                if command in ("reset", "step"):
                    reply = ("seen", (room.put(found[0]), *found[1:]), ())
            except ForethoughtError as error:
                kinds = (word for word, cls in ERRORS.items() if isinstance(error, cls))
                kind = next(kinds, "error")
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
