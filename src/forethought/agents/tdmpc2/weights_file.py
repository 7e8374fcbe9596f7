"""Reading a file of `torch.save` that a stranger wrote: tensors come out, nothing is executed.

The archive is looked at before it is opened (plain entries inside one folder, nothing compressed),
then read by torch's `weights_only` reader, which knows tensors and plain values and no code. What
is wrong is one sentence.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forethought.config import ConfigError
from forethought.data.archives import check_members, is_plain_tensor
from forethought.data.layout import DatasetError
from forethought.files import FileError

DAMAGE = (RuntimeError, EOFError, ValueError, KeyError, IndexError, TypeError, AttributeError)
"""What torch's reader raises at an archive that is not whole."""


def load_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a state dict by name, as float32 on the CPU (whole numbers as they are).

    The state dict is the file's content or its entry `model`.
    """
    _check_archive(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        code = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"it asks for {code[1]}" if code else "it is damaged, or holds more than weights"
        raise FileError(
            f"{path} was not read: {what}, and only weights are taken from a checkpoint, because "
            "anything else could run code."
        ) from error
    except DAMAGE as error:
        raise FileError(f"{path} is damaged: torch cannot read it.") from error
    if isinstance(content, Mapping) and "model" in content:
        content = content["model"]
    if not isinstance(content, Mapping) or not all(isinstance(name, str) for name in content):
        raise FileError(f"{path} holds no weights by name, so it is no checkpoint of TD-MPC2.")
    return {
        name: _plain(path, name, value)
        for name, value in content.items()
        if not name.endswith(("__batch_size", "__device"))
    }


def _check_archive(path: Path) -> None:
    """Refuse what torch.save never writes: no archive, compressed entries, links, ways out."""
    try:
        if not path.is_file():
            raise ConfigError(f"There is no file {path}.")
        if not zipfile.is_zipfile(path):
            with path.open("rb") as file:
                pickled = file.read(1) == b"\x80"
            what = "a pickle, which could run code and was not opened" if pickled else "none"
            raise FileError(
                f"{path} is no checkpoint: torch.save writes an archive, and this is {what}."
            )
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
        size = path.stat().st_size
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise FileError(f"{path} could not be read ({error}).") from error
    try:
        check_members(path, entries)
    except DatasetError as error:
        raise FileError(f"This is no checkpoint of torch.save: {error}") from error
    folders = {entry.filename.partition("/")[0] for entry in entries}
    stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
    names = {entry.filename.partition("/")[2] for entry in entries}
    fits = sum(entry.file_size for entry in entries) <= size
    if not (stored and fits and len(folders) == 1):
        raise FileError(f"{path} is no checkpoint: it is an archive that torch.save did not write.")
    if "data.pkl" not in names or "constants.pkl" in names:
        raise FileError(f"{path} is no checkpoint: it is an archive of something else.")


def _plain(path: Path, name: str, value: Any) -> Tensor:
    """A tensor that is what it says: its own memory, finite numbers."""
    if not is_plain_tensor(value):
        raise FileError(f"{path} holds {name}, which is no plain tensor with its own content.")
    if value.is_floating_point():
        value = value.detach().to(torch.float32)
    if not torch.isfinite(value).all():
        raise FileError(f"{path} holds numbers that are not finite, in {name}.")
    return torch.as_tensor(value).contiguous()
