"""A time-out for environments in this process: a thread that looks whether a call lasts too long.

At the limit the main thread is interrupted by SIGALRM, whose handler raises an EnvFailure inside
the environment's code. Code that does not come back to Python cannot be interrupted so; after a
grace the process is ended with a sentence, for a hang must not last for ever. Only that last stage
exists outside the main thread and where there is no SIGALRM. Code that never releases the
interpreter's lock stops this thread too: such environments belong into workers.

A step pays for one small object and three assignments: the thread keeps the time, by counting its
own ticks. So a process that is stopped and continued (Ctrl-Z) is not taken for one that hangs.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

from forethought.spaces.structure import EnvFailure

T = TypeVar("T")
GRACE_SECONDS = 10.0
"""How long an interrupted call may take to come back before the process is ended."""
LONGEST_TICK = 1.0
SIGNAL = getattr(signal, "SIGALRM", None)  # no such signal on Windows


class Call:
    """One call into an environment, as a sentence about it needs to know."""

    __slots__ = ("command", "env_index", "expired", "seconds", "step", "thread")

    def __init__(self, env_index: int, command: str, step: int, seconds: float) -> None:
        self.env_index, self.command, self.step, self.seconds = env_index, command, step, seconds
        self.thread = threading.get_ident()
        self.expired = False


def doing(command: str, step: int) -> str:
    """A request in words; `step` counts decisions since the last reset."""
    return {"step": f"step {step}", "build": "its construction"}.get(command, f"its {command}")


def too_long(env_index: int, command: str, step: int, seconds: float) -> str:
    """The sentence about an environment that hangs."""
    return (
        f"Environment {env_index} did not finish {doing(command, step)} within {seconds:g} s; if "
        "it is only slow, raise env.timeout_seconds."
    )


class Watchdog:
    """Watches calls of which at most one lasts at a time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.call: Call | None = None
        self._closed = threading.Event()
        _interrupter.add(self)
        threading.Thread(target=self._watch, name="env-watchdog", daemon=True).start()

    def run(self, call: Call, work: Callable[..., T], *arguments: Any) -> T:
        """The work's result; an EnvFailure if it took longer than its call may."""
        try:
            self.call = call
            result = work(*arguments)
            if call.expired:  # it caught the interruption: nobody knows what state it is in
                raise EnvFailure(too_long(call.env_index, call.command, call.step, call.seconds))
            return result
        finally:
            # Python runs signal handlers only where functions are called or loops turn, so
            # between the end of the work and this assignment no interruption can come.
            self.call = None

    def close(self) -> None:
        """Ends the thread and gives the signal back; may be called twice."""
        self._closed.set()
        _interrupter.remove(self)

    def _watch(self) -> None:
        tick = min(LONGEST_TICK, self.seconds / 20)
        seen, waited = self.call, 0.0
        while not self._closed.wait(tick):
            call = self.call
            if call is None or call is not seen:
                seen, waited = call, 0.0
                continue
            waited += tick
            if not call.expired and waited >= call.seconds:
                call.expired = True
                _interrupter.interrupt(call)
            elif call.expired and waited >= call.seconds + GRACE_SECONDS:
                _give_up(call, waited)


def _give_up(call: Call, waited: float) -> None:
    """Ends the process; the thread that hangs cannot be made to."""
    frame = sys._current_frames().get(call.thread)
    place = "" if frame is None else f" ({frame.f_code.co_filename}, line {frame.f_lineno})"
    sentence = (
        f"Environment {call.env_index} hangs in code that cannot be interrupted: "
        f"{doing(call.command, call.step)} has lasted {waited:.0f} s{place}. The process ends "
        "here; 'forethought resume RUN' goes on from the last checkpoint, and with env.workers "
        "true a training environment that hangs can be restarted.\n"
    )
    os.write(2, sentence.encode())  # no buffer that the hanging thread may have locked
    os._exit(1)


class _Interrupter:
    """The handler of SIGALRM while any watchdog lives, for signal.signal is too slow for a step.

    A signal that no watchdog has sent is passed on to whoever had it before.
    """

    def __init__(self) -> None:
        self._dogs: list[Watchdog] = []
        self._before: Any = None
        self._installed = False
        self._sent = False

    def add(self, dog: Watchdog) -> None:
        self._dogs.append(dog)
        main = threading.current_thread() is threading.main_thread()
        if SIGNAL is not None and main and not self._installed:
            self._before = signal.signal(SIGNAL, self._handle)
            self._installed = True

    def remove(self, dog: Watchdog) -> None:
        self._dogs = [other for other in self._dogs if other is not dog]
        main = threading.current_thread() is threading.main_thread()
        if SIGNAL is not None and main and self._installed and not self._dogs:
            if signal.getsignal(SIGNAL) == self._handle:  # else someone took it since
                signal.signal(SIGNAL, self._before)
            self._installed = False

    def interrupt(self, call: Call) -> None:
        """Called by a watchdog's thread."""
        if self._installed and SIGNAL is not None and call.thread == threading.main_thread().ident:
            self._sent = True
            signal.pthread_kill(call.thread, SIGNAL)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._sent:
            self._pass_on(number, frame)
            return
        self._sent = False
        for dog in self._dogs:
            call = dog.call
            here = call is not None and call.thread == threading.get_ident()
            if call is not None and here and call.expired:  # else it came back just now
                failure = EnvFailure(
                    too_long(call.env_index, call.command, call.step, call.seconds)
                )
                stack = "".join(traceback.format_stack(frame, limit=5)).rstrip()
                failure.add_note(f"It was interrupted here:\n{stack}")
                raise failure

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if callable(self._before):
            self._before(number, frame)
        elif self._before == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


_interrupter = _Interrupter()
