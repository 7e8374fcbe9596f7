"""A CSV file that only grows, can be cut back on resume, and survives a full disk.

A row is one write. A row that could not be written stays in memory and is written, in order, before
the next one; until then `append` raises and the caller decides what that means.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forethought.config import nearest
from forethought.files import MAX_LINES_BYTES, FileError, end_of_lines, read_bytes
from forethought.tracking.columns import Cell


class CsvFile:
    """Rows under fixed columns; the header is written when the file is made."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        twice = sorted({name for name in columns if list(columns).count(name) > 1})
        if twice:
            raise FileError(f"{path.name} would have the column {twice[0]} twice: rename one.")
        self.path = path
        self.columns = tuple(columns)
        self._header = _line(self.columns)
        self._pending: list[str] = []
        """Lines not yet in the file."""
        self._bytes = self._check()
        try:
            self._descriptor = os.open(path, os.O_WRONLY)
        except OSError as error:
            raise self._failure(error) from error

    def _check(self) -> int:
        """Make the file or check the one that is there; returns its length in bytes."""
        try:
            header = self._header.encode()
            begins = b""
            if self.path.exists():
                with self.path.open("rb") as file:
                    begins = file.read(len(header))
            whole = end_of_lines(self.path) if begins else 0  # without a half-written last line
            if not whole:
                self.path.write_bytes(header)
                return len(header)
            if begins != header:
                raise FileError(
                    f"{self.path} has other columns than this run writes: "
                    "resume with the version of forethought that began it."
                )
            os.truncate(self.path, whole)
            return whole
        except OSError as error:
            raise self._failure(error) from error

    def append(self, row: Mapping[str, Cell]) -> None:
        """Write one row; a missing or None value is an empty cell, an unknown key is an error."""
        self.check(row)
        self._pending.append(_line([row.get(name) for name in self.columns]))
        self.flush()

    def check(self, row: Mapping[str, Cell]) -> None:
        """Raise if a key of the row is no column."""
        unknown = [key for key in row if key not in self.columns]
        if unknown:
            raise FileError(
                f"{self.path.name} has no column {unknown[0]}.{nearest(unknown[0], self.columns)}"
            )

    def flush(self) -> None:
        """Write the rows that an earlier failure has left behind, and the newest."""
        while self._pending:
            line = self._pending[0].encode()
            try:
                self._write(line)
            except OSError as error:
                raise self._failure(error) from error
            self._bytes += len(line)
            del self._pending[0]

    def _write(self, line: bytes) -> None:
        """Write at the known end: over the rest of an attempt that failed half-way."""
        position = self._bytes
        while line:
            written = os.pwrite(self._descriptor, line, position)
            line, position = line[written:], position + written

    def state(self) -> dict[str, Any]:
        """Where the file ends now (on the disk, not only in memory), for `cut`."""
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise self._failure(error) from error
        pending = list(self._pending)
        return {"bytes": self._bytes, "columns": list(self.columns), "pending": pending}

    def cut(self, state: Mapping[str, Any] | None) -> str | None:
        """Drop the rows written after `state` (None: all rows); a sentence if some are missing."""
        end = len(self._header.encode()) if state is None else int(state["bytes"])
        if state is not None and tuple(state["columns"]) != self.columns:
            raise FileError(
                f"{self.path} had other columns at the checkpoint than this run writes: "
                "resume with the version of forethought that wrote it."
            )
        note = None
        if self._bytes < end:
            note = f"{self.path.name} has lost {end - self._bytes} bytes of rows since then."
            end = self._bytes
        try:
            os.ftruncate(self._descriptor, end)
        except OSError as error:
            raise self._failure(error) from error
        self._bytes = end
        self._pending = [] if state is None else [str(line) for line in state["pending"]]
        return note

    def close(self) -> None:
        """Write what is left and close the file."""
        try:
            self.flush()
        finally:
            os.close(self._descriptor)

    def _failure(self, error: OSError) -> FileError:
        return FileError(f"{self.path} could not be written ({error.strerror or error}).")


def read_rows(path: Path) -> tuple[list[dict[str, str]], str | None]:
    """All whole rows as text, and a sentence if a half-written last line was left out."""
    text = read_bytes(path, MAX_LINES_BYTES).decode("utf-8", errors="replace")
    whole, newline, rest = text.rpartition("\n")
    note = f"{path.name}: the half-written last line is ignored." if rest else None
    # The returns of an evaluation are one cell, which 10,000 episodes fill beyond csv's own limit.
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))
    lines = list(csv.reader(io.StringIO(whole + newline, newline="")))
    if not lines:
        return [], note
    header = lines[0]
    for number, cells in enumerate(lines[1:], start=2):
        if len(cells) != len(header):
            raise FileError(
                f"{path} is damaged: line {number} has {len(cells)} cells, "
                f"but the header has {len(header)}."
            )
    return [dict(zip(header, cells)) for cells in lines[1:]], note


def plain(value: Any) -> Any:
    """A numpy or torch value as the Python number or list that it holds."""
    return value.tolist() if hasattr(value, "tolist") else value


def _line(values: Sequence[object]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerow([_text(value) for value in values])
    return out.getvalue()


def _text(value: object) -> str:
    """One text per value: equal runs give equal bytes."""
    value = plain(value)
    if value is None:
        return ""
    if isinstance(value, str):
        return " ".join(value.splitlines())  # a row is one line, always
    if isinstance(value, (list, tuple)):
        return ";".join(_text(item) for item in value)
    if isinstance(value, bool):
        return str(int(value))
    # repr of a float is the shortest text that reads back as the same bits
    return repr(value)
