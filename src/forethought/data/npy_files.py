"""Columns as plain .npy files: written row by row, read by mapping them into memory.

numpy leaves room in the header for the number of rows to grow, so the header is written once when
the file is begun and once more when its rows are counted. No file here is ever unpickled.
"""

from __future__ import annotations

import os
import tokenize
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib import format as npy
from numpy.typing import NDArray

from forethought.files import FileError, open_regular

BUFFER_BYTES = 2**20
"""Of each open column: an episode of a narrow column is less than a page."""


class GrowingColumn:
    """A .npy file whose rows are appended; it is one only after `close`."""

    def __init__(self, path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self.dtype, self.shape = dtype, shape
        self.rows = 0
        self._file = path.open("wb", buffering=BUFFER_BYTES)
        self._write_header()
        self._header_bytes = self._file.tell()

    def append(self, rows: NDArray[Any]) -> None:
        """Rows [N, *shape] of the column's own type."""
        self._file.write(np.ascontiguousarray(rows, self.dtype).tobytes())
        self.rows += len(rows)

    def close(self) -> None:
        """Say how many rows there are."""
        self._file.seek(0)
        self._write_header()
        if self._file.tell() != self._header_bytes:
            raise FileError(f"{self._file.name} has more rows than its header has room for.")
        self._file.close()

    def abandon(self) -> None:
        """Close the file as it is: somebody is about to delete it."""
        self._file.close()

    def _write_header(self) -> None:
        header = {
            "descr": npy.dtype_to_descr(self.dtype),
            "fortran_order": False,
            "shape": (self.rows, *self.shape),
        }
        npy.write_array_header_1_0(self._file, header)


def map_column(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """A .npy file of exactly this type and shape, read-only and not read yet.

    Nothing is copied: what is touched comes from the disk, or from what the system keeps of it.
    torch maps it and not Python's mmap, which would keep a file open per column: the columns of a
    large dataset may be more than a process can have open.
    """
    with open_regular(path) as file:
        _check_header(path, file, dtype, shape)
        start = file.tell()
        count = int(np.prod(shape, dtype=np.int64))
        size = os.fstat(file.fileno()).st_size
        if size != start + count * dtype.itemsize:
            raise FileError(
                f"{path} has {size} bytes, but a column of {shape[0]} rows must have "
                f"{start + count * dtype.itemsize}."
            )
    content = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8).numpy()
    rows = content[start:].view(dtype).reshape(shape)
    rows.flags.writeable = False
    return rows


def _check_header(
    path: Path, file: BufferedReader, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> None:
    """Leave `file` where the rows begin; refuse what is no .npy file or not of these rows."""
    try:
        version = npy.read_magic(file)
        if version != (1, 0):
            raise ValueError(f"version {version}")
        found_shape, fortran, found_dtype = npy.read_array_header_1_0(file)
    except (ValueError, SyntaxError, TypeError, EOFError, tokenize.TokenError) as error:
        reason = (str(error).splitlines() or [""])[0].rstrip(".")[:200]
        raise FileError(f"{path} is damaged: it is not a .npy file ({reason}).") from error
    if fortran or found_dtype != dtype or found_shape[1:] != shape[1:]:
        raise FileError(
            f"{path} holds rows of {found_dtype} {found_shape[1:]}, but the dataset says "
            f"{dtype} {shape[1:]}."
        )
    if found_shape != shape:
        raise FileError(
            f"{path} has {found_shape[0]} rows, but its shard has {shape[0]}: the columns are "
            "unequal."
        )
