"""`python scripts/faults/traced_run.py FILE WORDS...` is `forethought WORDS...` that keeps in FILE
where it stands: the agent steps taken, and the last fault point passed.

A write of a few bytes is done by the kernel whole or not at all, so after kill -9 the file says
where the process was.
"""

from __future__ import annotations

import os
import sys

from forethought import files
from forethought.cli import main

WIDTH = 80
START = "start-up"


def trace(path: str) -> None:
    """Notes every fault point from now on."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    steps = "-"

    def note(stage: str) -> None:
        nonlocal steps
        if stage.startswith("step-"):
            steps = stage.removeprefix("step-")
        os.pwrite(descriptor, f"{steps} {stage}".ljust(WIDTH).encode(), 0)

    note(START)
    files.fault_point = note


if __name__ == "__main__":
    trace(sys.argv[1])
    sys.exit(main(sys.argv[2:]))
