"""A command in a process of its own: a copy of this one, so that it need not load torch again.

It is killed, signalled and limited as any process is; what it writes comes through a pipe.
"""

from __future__ import annotations

import io
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from forethought import files


@dataclass
class Forked:
    """The other process, as seen from this one."""

    pid: int
    stderr: TextIO

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, seconds: float) -> int:
        """Its exit code; below zero the signal that ended it."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid = 0
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        raise TimeoutError(f"process {self.pid} is still there after {seconds} s")


def _carry_out(words: tuple[str, ...], prepare: Callable[[], None], write_end: int) -> None:
    """In the copy: never returns, whatever happens, because the caller's tests are not its own."""
    code = 70
    try:
        os.dup2(write_end, 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.stderr = io.TextIOWrapper(io.FileIO(2, "w"), write_through=True)
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w"), write_through=True)
        prepare()
        from forethought.cli import main

        code = main([*words])
    except BaseException:  # noqa: BLE001 -- told through the pipe
        traceback.print_exc()
    finally:
        os._exit(code)


@contextmanager
def forked(*words: str, prepare: Callable[[], None] = lambda: None) -> Iterator[Forked]:
    """The command line with these words; `prepare` is called in the other process before it."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        _carry_out(words, prepare, write_end)
    os.close(write_end)
    with os.fdopen(read_end, encoding="utf-8") as stderr:
        process = Forked(pid, stderr)
        try:
            yield process
        finally:
            if process.pid:
                os.kill(process.pid, 9)
                os.waitpid(process.pid, 0)


def pause_at(stage: str) -> None:
    """To `prepare`: the run waits at `<stage>:<seconds>`, and says so, to be killed there."""
    os.environ[files.PAUSE_VARIABLE] = stage
