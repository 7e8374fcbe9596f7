"""Files that are either whole or absent: atomic writes, published directories, safetensors, JSON.

A directory is published by rename after every file in it reached the disk; its manifest, written
last, holds the size and sha256 of each file and a checksum of itself. Whatever kills the process,
a reader finds a directory that verifies, or does not take it and says why. No pickle anywhere.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from forethought.config import ForethoughtError

if TYPE_CHECKING:
    from torch import Tensor

SCHEMA = 1
"""Version of the manifest's layout; a reader refuses a newer one."""
MANIFEST = "manifest.json"
PAUSE_VARIABLE = "FORETHOUGHT_PAUSE_AT"
_TEMPORARY = ".tmp-"
_REPLACED = ".old-"


class FileError(ForethoughtError):
    """A file or directory of a run cannot be read or written."""


def _no_fault(stage: str) -> None:
    """In ordinary runs nothing happens at a fault point."""


fault_point: Callable[[str], None] = _no_fault
"""Called before each stage of `publish`: 'write', 'manifest', 'rename', 'after-rename'.
Tests replace it to raise or kill exactly there."""


def reach(stage: str) -> None:
    """Pass a fault point; FORETHOUGHT_PAUSE_AT=<stage>:<seconds> sleeps there, to be killed."""
    fault_point(stage)
    name, _, seconds = os.environ.get(PAUSE_VARIABLE, "").partition(":")
    if name == stage:
        print(f"pausing at {stage}", file=sys.stderr, flush=True)
        time.sleep(float(seconds or 0))


# -- whole files -----------------------------------------------------------------------------------


def fsync_dir(path: Path) -> None:
    """Make the names in a directory durable (a rename is not, until its directory is)."""
    fsync_file(path)


def fsync_file(path: Path) -> None:
    """Make the contents of a file durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text_atomic(path: Path, text: str) -> None:
    """Replace `path` by `text`: a reader sees the old file or the new one, never a part."""
    temporary = path.with_name(f"{_TEMPORARY}{path.name}-{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        fsync_dir(path.parent)
    except OSError as error:
        raise _not_written(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_json(path: Path, data: Any) -> None:
    """Write `data` as JSON, atomically; floats keep every bit."""
    write_text_atomic(path, json.dumps(data, indent=1, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """The value that `write_json` wrote."""
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise _not_read(path, error) from error
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path} is damaged: it is not valid JSON ({error}).") from error


def sha256(path: Path) -> str:
    """The sha256 of a file, as hexadecimal text."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def save_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors (from any device) and a few words about them as one safetensors file."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    ready: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        plain = tensor.detach().to("cpu").contiguous()
        # safetensors refuses two names for one memory; a view saves its own elements only.
        if plain.untyped_storage().data_ptr() in storages:
            plain = plain.clone()
        storages.add(plain.untyped_storage().data_ptr())
        ready[name] = plain
    # One key: safetensors writes several in an order that differs between processes.
    words = {"forethought": json.dumps(dict(metadata), sort_keys=True)} if metadata else None
    try:
        save_file(ready, path, metadata=words)
    except OSError as error:
        raise _not_written(path, error) from error
    except SafetensorError as error:
        raise FileError(f"{path} could not be written: {error}.") from error


def load_tensors(path: Path, device: str = "cpu") -> dict[str, Tensor]:
    """The tensors that `save_tensors` wrote, on `device`."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path, device=device)
    except OSError as error:
        raise _not_read(path, error) from error
    except SafetensorError as error:
        raise FileError(f"{path} is damaged: it is not a safetensors file ({error}).") from error


def load_metadata(path: Path) -> dict[str, str]:
    """The words that `save_tensors` wrote beside the tensors."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            words = json.loads((file.metadata() or {}).get("forethought", "{}"))
    except OSError as error:
        raise _not_read(path, error) from error
    except (SafetensorError, ValueError) as error:
        raise FileError(f"{path} is damaged: it is not a safetensors file ({error}).") from error
    return {str(key): str(value) for key, value in words.items()}


# -- published directories -------------------------------------------------------------------------


@dataclass(frozen=True)
class Manifest:
    """What a published directory says about itself."""

    schema: int
    """Version of the manifest's layout."""
    files: dict[str, dict[str, Any]]
    """Per file, by path inside the directory: sha256 and bytes."""
    versions: dict[str, str]
    """Of Python and the packages that wrote it."""
    meta: dict[str, Any]
    """What the writer wanted to say (counters, scores, ...)."""

    @property
    def text(self) -> str:
        """The one way to write this manifest, with a checksum of itself."""
        body = {
            "schema": self.schema,
            "files": self.files,
            "versions": self.versions,
            "meta": self.meta,
        }
        checksum = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        return json.dumps({**body, "checksum": checksum}, indent=1) + "\n"

    @property
    def sha256(self) -> str:
        """The sha256 of the manifest file."""
        return hashlib.sha256(self.text.encode()).hexdigest()


@contextlib.contextmanager
def publish(path: Path, meta: dict[str, Any] | None = None) -> Iterator[Path]:
    """Yield an empty directory to fill; on success it becomes `path`, complete and on the disk.

    `meta` goes into the manifest and may be filled inside the block. On any error the temporary
    directory is removed and whatever was at `path` before is untouched. An earlier directory at
    `path` is replaced; if the process dies between the two renames, `recover` puts it back.
    """
    temporary = path.with_name(f"{_TEMPORARY}{path.name}-{os.getpid()}")
    replaced = path.with_name(f"{_REPLACED}{path.name}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        reach("write")
        yield temporary
        reach("manifest")
        _finish(temporary, meta or {})
        reach("rename")
        if path.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            path.rename(replaced)
        temporary.rename(path)
        fsync_dir(path.parent)
        reach("after-rename")
    except OSError as error:
        raise _not_written(path, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        _settle(path, replaced)


def _finish(folder: Path, meta: dict[str, Any]) -> None:
    """Bring every file to the disk, then the manifest that vouches for them."""
    inside = sorted(folder.rglob("*"))
    files = {}
    for file in (entry for entry in inside if entry.is_file()):
        fsync_file(file)
        name = file.relative_to(folder).as_posix()
        files[name] = {"sha256": sha256(file), "bytes": file.stat().st_size}
    manifest = Manifest(SCHEMA, files, versions(), meta)
    write_text_atomic(folder / MANIFEST, manifest.text)
    for directory in (entry for entry in inside if entry.is_dir()):
        fsync_dir(directory)


def _settle(path: Path, replaced: Path) -> bool:
    """Drop the directory that `path` has replaced, or put it back (True) if nothing came."""
    back = replaced.exists() and not path.exists()
    if back:
        replaced.rename(path)
    else:
        shutil.rmtree(replaced, ignore_errors=True)
    return back


def recover(parent: Path) -> list[str]:
    """Clear what a killed writer left in `parent`; returns a sentence for each thing done.

    Only for the one writer of `parent`: it would remove what another is writing.
    """
    done = []
    # Without the dash: safetensors, too, writes to a `.tmp...` file before it renames.
    for entry in sorted(parent.glob(".tmp*")):
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        done.append(f"Removed the unfinished {entry.name}.")
    for entry in sorted(parent.glob(f"{_REPLACED}*")):
        path = parent / entry.name.removeprefix(_REPLACED)
        if _settle(path, entry):
            done.append(f"Put {path.name} back, which was being replaced.")
    return done


def read_manifest(path: Path) -> Manifest:
    """The manifest of a published directory, checked against its own checksum."""
    file = path / MANIFEST
    data = read_json(file)
    try:
        schema = int(data["schema"])
    except (KeyError, TypeError, ValueError) as error:
        raise FileError(f"{file} is damaged: it names no schema.") from error
    if schema > SCHEMA:
        raise FileError(
            f"{file} has schema {schema}, but this version reads up to {SCHEMA}: "
            "update forethought to read it."
        )
    try:
        manifest = Manifest(schema, data["files"], data["versions"], data["meta"])
        # Byte for byte, so that no flipped bit passes, not even in white space.
        whole = manifest.text.encode() == file.read_bytes() and all(
            isinstance(entry["bytes"], int) and isinstance(entry["sha256"], str)
            for entry in manifest.files.values()
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        whole = False
    if not whole:
        raise FileError(f"{file} is damaged: its checksum does not fit.")
    return manifest


def verify(path: Path) -> Manifest:
    """Check every file that the manifest names; FileError names the first that does not fit."""
    manifest = read_manifest(path)
    for name, expected in manifest.files.items():
        inside = PurePosixPath(name)
        if inside.is_absolute() or ".." in inside.parts:
            raise FileError(f"{path / MANIFEST} names {name}, which lies outside: refused.")
        file = path / inside
        if file.is_symlink() or not file.resolve().is_relative_to(path.resolve()):
            raise FileError(f"{file} is a link, but a published file must be in its place.")
        if not file.is_file():
            raise FileError(f"{file} is missing.")
        size = file.stat().st_size
        if size != expected["bytes"]:
            raise FileError(f"{file} has {size} bytes, but must have {expected['bytes']}.")
        if sha256(file) != expected["sha256"]:
            raise FileError(f"{file} is damaged: its sha256 does not fit the manifest.")
    return manifest


def published(parent: Path) -> list[Path]:
    """The directories `<word>-<number>` in `parent`, by number, verified or not."""
    numbered = []
    for entry in parent.iterdir() if parent.is_dir() else ():
        match = re.fullmatch(r"[a-z]+-(\d+)", entry.name)
        if match and entry.is_dir():
            numbered.append((int(match[1]), entry))
    return [entry for _, entry in sorted(numbered)]


def newest_verified(parent: Path) -> tuple[Path, list[str]]:
    """The newest directory in `parent` that verifies, and why newer ones were skipped."""
    skipped: list[str] = []
    for candidate in reversed(published(parent)):
        try:
            verify(candidate)
        except FileError as error:
            skipped.append(f"Skipped {candidate.name}: {error}")
        else:
            return candidate, skipped
    reason = f" {' '.join(skipped)}" if skipped else ""
    raise FileError(f"{parent} holds no complete checkpoint.{reason}")


@cache
def versions() -> dict[str, str]:
    """Of Python and the packages that decide what a run computes, without importing them."""
    found = {"python": platform.python_version()}
    for package in ("forethought", "torch", "numpy", "gymnasium"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _not_written(path: Path, error: OSError) -> FileError:
    return FileError(
        f"{path} could not be written ({error.strerror or error}): "
        "check the free space and the permissions there."
    )


def _not_read(path: Path, error: OSError) -> FileError:
    return FileError(f"{path} could not be read ({error.strerror or error}).")
