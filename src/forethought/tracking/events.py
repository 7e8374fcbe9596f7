"""events.jsonl: one JSON object a line, in the order in which things happened.

A line that cannot be written (a full disk) waits in memory for the next one, like a row of a CSV
file. What a kill or a power cut has left half-written is ignored by readers, which say so, and
removed when a run is taken up again: the next line must not continue it.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from forethought.files import MAX_LINES_BYTES, end_of_lines, read_bytes


class EventsFile:
    """The end of events.jsonl that a trainer writes to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: list[str] = []

    def append(self, event: dict[str, Any]) -> None:
        """Write one event, after those that an earlier failure has left; OSError if that fails."""
        self._waiting.append(json.dumps(event, default=str) + "\n")
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            while self._waiting:
                _write_whole(descriptor, self._waiting[0].encode())
                del self._waiting[0]
        finally:
            os.close(descriptor)

    def mend(self) -> str | None:
        """Cut off a half-written last line; a sentence if there was one."""
        if not self.path.is_file():
            return None
        whole = end_of_lines(self.path)
        if whole == self.path.stat().st_size:
            return None
        os.truncate(self.path, whole)
        return f"The half-written last line of {self.path.name} was removed."


def _write_whole(descriptor: int, line: bytes) -> None:
    """All of the line or nothing of it."""
    before = os.fstat(descriptor).st_size
    try:
        while line:
            line = line[os.write(descriptor, line) :]
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, before)
        raise


def read_events(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """All whole events, and a sentence for each line that was left out."""
    if not path.exists():
        return [], []
    content = read_bytes(path, MAX_LINES_BYTES)
    *lines, rest = content.decode("utf-8", errors="replace").split("\n")
    notes = [f"{path.name}: the half-written last line is ignored."] if rest else []
    events = []
    for number, line in enumerate(lines, start=1):
        try:
            events.append(json.loads(line))
        except ValueError:
            notes.append(f"{path.name}: line {number} is damaged and ignored.")
    return events, notes
