"""Killing a writer again and again: a fork that writes without end meets SIGKILL at some moment.

Forked, because importing and building both libraries anew for each kill would take minutes; the
killed process is as real as any.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable


def kill_repeatedly(
    kills: int,
    seed: int,
    write: Callable[[int], None],
    begun: Callable[[int], bool],
    readable: Callable[[int], str],
) -> list[str]:
    """`write(i)` writes without end in a fork; what `readable(i)` says after each kill.

    `begun(i)` tells that there is something to lose; from then on the kill may come, within a
    second.
    """
    rng = random.Random(seed)
    found = []
    for i in range(kills):
        child = os.fork()
        if child == 0:
            try:
                write(i)
            finally:
                os._exit(1)  # never back into the parent's code
        while not begun(i):
            if os.waitpid(child, os.WNOHANG) != (0, 0):
                raise RuntimeError(f"writer {i} ended by itself")
            time.sleep(0.002)
        time.sleep(rng.random())
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            raise RuntimeError(f"writer {i} ended by itself")
        found.append(readable(i))
    return found
