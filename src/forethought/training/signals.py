"""Signals: the first asks the run to stop cleanly, the second ends the process at once.

A handler does no work of its own: it sets a flag, which the loop polls between steps, between the
updates of a burst and between the steps of an evaluation. So a checkpoint is never written from
inside a signal handler, at a moment when half a step is done.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

EXIT_CODES = {"SIGINT": 130, "SIGTERM": 143, "SIGUSR1": 143}
"""Schedulers announce the end of a time slice by SIGUSR1; for the caller that is a termination."""


class Stop:
    """The flag, and the handlers that set it while the block lasts.

    Outside the main thread Python allows no handlers; there only `request` sets the flag.
    """

    def __init__(self) -> None:
        self.signal: str | None = None
        self._previous: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """The process's exit code for the signal that was received (0 without one)."""
        return EXIT_CODES[self.signal] if self.signal is not None else 0

    def request(self, name: str = "SIGTERM") -> None:
        """Asks for the stop, as the signal of this name would."""
        self.signal = name

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for name in EXIT_CODES:
                number = getattr(signal, name, None)  # no SIGUSR1 on Windows
                if number is not None:
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.signal is not None:
            os.write(2, b"second signal: leaving at once\n")
            os._exit(EXIT_CODES[name])
        self.signal = name
        # os.write, because print inside a handler may re-enter a stream that is being written.
        os.write(2, f"\n{name}: saving, then stopping (once more: leave at once)\n".encode())
