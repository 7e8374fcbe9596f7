"""A pickle that shows whether it was executed: reading it makes a file."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any


class _Marker:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


def that_makes(file: Path) -> bytes:
    """The pickle whose reader makes `file`."""
    return pickle.dumps(_Marker(file))
