"""Signals: the first asks the run to stop cleanly, the second ends the process at once. Two within
`TOGETHER_SECONDS` are one: who signals a process and its group (`timeout`, some schedulers) sends
it twice.

What the first one does depends on what there is to lose:

- Before a run begins and while it is restored, everything is on the disk: `Interrupted` is raised
  at once, with a sentence that says how things stand.
- While it trains, the handler only sets a flag, which the loop polls between steps, between the
  updates of a burst and between the steps of an evaluation. So a checkpoint is never written from
  inside a signal handler, at a moment when half a step is done.
- If nobody polls for `GRACE_SECONDS` (an environment hangs), the step under way is given up and
  the newest checkpoint is what the run goes on from. Writing a checkpoint is never given up.

An exception that a handler raises is lost where Python code was called by C code that knows no
exceptions (MuJoCo's warnings, `__del__`). Such a loss is noticed, and the exception raised again.
C code that is being imported makes an ImportError of it, which before a run begins is undone; and
where a library that is being imported catches everything, it is raised again before the run begins.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

EXIT_CODES = {"SIGINT": 130, "SIGTERM": 143, "SIGUSR1": 143, "SIGHUP": 129}
"""Schedulers announce the end of a time slice by SIGUSR1; for the caller that is a termination. A
terminal that is closed, or a connection that breaks, sends SIGHUP."""
GRACE_SECONDS = 3.0
"""How long the step under way may take after a signal: with the end of the environments and the
checkpoint it must stay within the ten seconds that schedulers give at least."""
TOGETHER_SECONDS = 0.5
AGAIN_SECONDS = 0.1
"""After which an exception that was lost is raised again."""
NOT_BEGUN = "stopped before the run began; nothing was written"
AS_IT_WAS = "stopped while the run was being restored; its checkpoints are as they were"
SHOW_CURSOR = b"\x1b[?25h"


class Interrupted(SystemExit):
    """A signal ended the work where it stood; unhandled, the process ends with its exit code."""

    def __init__(self, name: str) -> None:
        super().__init__(EXIT_CODES[name])
        self.signal = name


class Stop:
    """The flag, and the handlers that set it while the block lasts.

    With `last_words` a signal does not wait to be polled: the words are said and `Interrupted` is
    raised, until `politely` is called. Outside the main thread Python allows no handlers; there
    only `request` sets the flag.
    """

    def __init__(self, last_words: str | None = None) -> None:
        self.signal: str | None = None
        self._first_at = 0.0
        self._last_words = last_words
        self._previous: dict[int, Any] = {}
        self._signalled, self._over = threading.Event(), threading.Event()
        self._armed = False
        """A signal came, and nobody has polled since."""
        self._expired = False
        """The grace is over: the next signal is the watcher's."""
        self._raised = False
        """`Interrupted` was raised; if it is lost, there is no grace any more."""
        self._unhurried = 0
        self._settled = False

    def __bool__(self) -> bool:
        """Whether to stop; who asks has nothing half done, so the grace needs no end."""
        if self.signal is not None:
            self._armed = False
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """The process's exit code for the signal that was received (0 without one)."""
        return EXIT_CODES[self.signal] if self.signal is not None else 0

    def request(self, name: str = "SIGTERM") -> None:
        """Asks for the stop, as the signal of this name would."""
        self.signal = name

    def politely(self) -> None:
        """From here on a signal sets the flag, for there is something to save."""
        if self._raised and self.signal is not None:
            self._raise(self.signal)  # somebody has caught it who did not mean to
        self._last_words = None

    def settle(self) -> None:
        """From here on a signal is only noted: what is left ends by itself."""
        self._armed, self._settled = False, True

    @contextlib.contextmanager
    def unhurried(self) -> Iterator[None]:
        """Work that must not be given up half-way, however long it takes."""
        self._unhurried += 1
        try:
            yield
        finally:
            self._unhurried -= 1

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for name in EXIT_CODES:
                number = getattr(signal, name)
                if name == "SIGHUP" and signal.getsignal(number) is signal.SIG_IGN:
                    continue  # under nohup a run outlives its terminal
                self._previous[number] = signal.signal(number, self._handle)
            self._previous_hook, sys.unraisablehook = sys.unraisablehook, self._notice
            # Made here, for a handler must not start threads.
            threading.Thread(target=self._watch, name="grace", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._previous:
            sys.unraisablehook = self._previous_hook
        self._previous.clear()
        self._over.set()
        self._signalled.set()
        disguised = None if self._last_words is None else _disguised(error)
        if disguised is not None:
            raise disguised
        lost = error is None and self._raised and not self._settled
        if lost and self.signal is not None and self._last_words is not None:
            raise Interrupted(self.signal)  # somebody has caught it who did not mean to

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self._expired:
            # In this order: the watcher, which reads in the other one, must not ask twice.
            armed, self._armed = self._armed, False
            self._expired = False
            if armed:  # else it was polled just now
                self._give_up(name)
            return
        if self.signal is not None:
            if time.monotonic() - self._first_at < TOGETHER_SECONDS:
                return
            _say("second signal: leaving at once")
            os._exit(EXIT_CODES[name])
        self.signal, self._first_at = name, time.monotonic()
        if self._last_words is not None:
            _say(f"{name}: {self._last_words}")
            self._raise(name)
        _say(f"{name}: saving, then stopping (once more: leave at once)")
        self._armed = not self._settled
        self._signalled.set()

    def _watch(self) -> None:
        """Waits for a signal, then for the end of the grace; runs in a thread of its own."""
        self._signalled.wait()
        while not self._over.wait(AGAIN_SECONDS if self._raised else GRACE_SECONDS):
            if self._expired or not self._armed or self._unhurried or self.signal is None:
                continue
            self._expired = True
            # Exceptions can be raised in the main thread only by a handler, at once only there.
            number = getattr(signal, self.signal)
            signal.pthread_kill(threading.main_thread().ident or 0, number)

    def _give_up(self, name: str) -> None:
        if not self._raised:
            _say(f"{name}: the step under way takes too long and is given up")
        self._raise(name)

    def _raise(self, name: str) -> NoReturn:
        self._raised = True
        self._signalled.set()
        raise Interrupted(name)

    def _notice(self, lost: sys.UnraisableHookArgs) -> None:
        """Told of each exception that can reach nobody."""
        if isinstance(lost.exc_value, Interrupted):
            self._armed = not self._settled
        else:
            self._previous_hook(lost)


def _disguised(error: BaseException | None) -> Interrupted | None:
    """The `Interrupted` of which an import has made the error, or one that the error came of."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))  # an error may be its own cause
        origin = error.__cause__ or error.__context__
        if isinstance(error, ImportError) and isinstance(origin, Interrupted):
            return origin
        error = origin
    return None


def _say(text: str) -> None:
    """A line on the screen, on one of its own even after a status line.

    os.write, because print inside a handler may re-enter a stream that is being written.
    """
    cursor = SHOW_CURSOR if os.isatty(2) else b""  # the status line hides it
    with contextlib.suppress(OSError):  # nobody may be listening any more
        os.write(2, cursor + f"\n{text}\n".encode())
