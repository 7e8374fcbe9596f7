"""What may be opened of an archive that somebody else made: plain members, nothing outside."""

from __future__ import annotations

import stat
import tarfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, TypeGuard

import torch
from torch import Tensor

from forethought.data.layout import DatasetError

MAX_MEMBERS = 100_000


def check_torch_archive(path: Path) -> None:
    """Refuse a file that is not the zip archive of torch.save, or whose members are not plain."""
    if not path.is_file():
        raise DatasetError(f"{path} is not a file.")
    if not zipfile.is_zipfile(path):
        raise DatasetError(
            f"{path} is not a file that torch.save writes (a zip archive): refused, and nothing in "
            "it was run."
        )
    members = _zip_members(path)
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED:
            raise DatasetError(f"{path} is compressed, which torch.save never does: refused.")


def is_plain_tensor(value: Any) -> TypeGuard[Tensor]:
    """Whether it is a tensor of real numbers, all of them in its own memory."""
    return (
        isinstance(value, Tensor)
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and not value.is_quantized
        and not value.is_complex()
        and value.numel() * value.element_size() <= value.untyped_storage().nbytes()
    )


def refuse_archive(path: Path) -> None:
    """A folder is wanted, but here is an archive: say what is wrong with it, or to unpack it."""
    if zipfile.is_zipfile(path):
        _zip_members(path)
    elif tarfile.is_tarfile(path):
        _check_tar(path)
    else:
        return
    raise DatasetError(f"{path} is an archive: unpack it and give the folder.")


def _zip_members(path: Path) -> list[zipfile.ZipInfo]:
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError) as error:
        raise DatasetError(f"{path} is damaged: it is no zip archive ({error}).") from error
    check_members(path, members)
    return members


def check_members(path: Path, members: Sequence[zipfile.ZipInfo]) -> None:
    """Refuse members of a zip archive that lead out of it, by name or as links."""
    _check_names(path, (member.filename for member in members))
    for member in members:
        if stat.S_ISLNK(member.external_attr >> 16):
            raise _outside(path, member.filename, "is a link")


def _check_tar(path: Path) -> None:
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                _check_names(path, [member.name])
                if not (member.isreg() or member.isdir()):
                    raise _outside(path, member.name, "is a link or a device")
    except (tarfile.TarError, EOFError, OSError, ValueError) as error:
        raise DatasetError(f"{path} is damaged: it is no tar archive ({error}).") from error


def _check_names(path: Path, names: Iterable[str]) -> None:
    for number, name in enumerate(names):
        if number >= MAX_MEMBERS:
            raise DatasetError(f"{path} has more than {MAX_MEMBERS} members: refused.")
        posix, windows = PurePosixPath(name), PureWindowsPath(name)
        parts = {*posix.parts, *windows.parts}
        if posix.is_absolute() or windows.anchor or ".." in parts or "\\" in name:
            raise _outside(path, name, "lies outside")


def _outside(path: Path, name: str, problem: str) -> DatasetError:
    return DatasetError(
        f"{path} holds {name[:200]!r}, which {problem}: refused, and nothing was written."
    )
