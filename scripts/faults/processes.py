"""Processes that a fault is done to: in a group of their own, and never waited for without end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parent
PATIENCE_SECONDS = 300.0
_started: list[subprocess.Popen[str]] = []


@dataclass(frozen=True)
class Done:
    """A process that ended, or was ended after `seconds`."""

    code: int | None
    """None: it still ran."""
    out: str
    err: str
    seconds: float

    @property
    def json(self) -> dict[str, Any]:
        """What a side script measured."""
        if self.code != 0:
            raise RuntimeError(f"a side script ended with {self.code}:\n{self.err}")
        return dict(json.loads(self.out.splitlines()[-1]))

    @property
    def sentence(self) -> str:
        """The first line of what a command of ours said when it failed."""
        return next((line for line in self.err.splitlines() if line.strip()), "")


def run(*words: str, patience: float = PATIENCE_SECONDS) -> Done:
    """A command in a process group of its own, which does not outlive `patience` seconds."""
    with start(*words) as process:
        began = time.monotonic()
        try:
            out, err = process.communicate(timeout=patience)
            code: int | None = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            code = None
        return Done(code, out, err, round(time.monotonic() - began, 2))


def start(*words: str) -> subprocess.Popen[str]:
    """Environments of `fault_envs` are found by both sides."""
    path = os.pathsep.join([str(SCRIPTS), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    _started.append(process)
    return process


def end_all() -> None:
    """Ends every process that still runs, with its children."""
    for process in _started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def wait_for_hang(*words: str, patience: float) -> dict[str, Any]:
    """Whether a process is still learning `patience` seconds after it said that it begins."""
    with start(*words) as process:
        assert process.stdout is not None
        while process.stdout.readline().strip() != "learning":
            if process.poll() is not None:
                raise RuntimeError(f"it ended before it learned: {process.communicate()[1]}")
        try:
            out, _ = process.communicate(timeout=patience)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return {"hangs": True, "waited_seconds": patience}
        return {"hangs": False, **json.loads(out.splitlines()[-1])}


def terminate(*words: str, ready: Callable[[], bool]) -> tuple[int, float]:
    """Sends SIGTERM to the process when it is ready; its exit code as a shell sees it, and how
    long it took to end."""
    with start(*words) as process:
        while not ready():
            if process.poll() is not None:
                raise RuntimeError(f"it ended by itself: {process.communicate()[1]}")
            time.sleep(0.01)
        began = time.monotonic()
        process.terminate()
        process.communicate(timeout=PATIENCE_SECONDS)
        code = process.returncode
        return (128 - code if code < 0 else code), round(time.monotonic() - began, 2)
