"""Files that are either whole or absent: atomic writes, published directories, safetensors, JSON.

A directory is published by rename after every file in it reached the disk; its manifest, written
last, holds the size and sha256 of each file and a checksum of itself. Whatever kills the process,
a reader finds a directory that verifies, or does not take it and says why. No pickle anywhere.

A file may also be hostile, with checksums that fit: what is read is a regular file in its place
and never a link, sizes are bounded before anything is read, and readers check what they were given.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from forethought.config import ForethoughtError, MemoryRefused, memory_refused

if TYPE_CHECKING:
    from torch import Tensor

SCHEMA = 1
"""Version of the manifest's layout; a reader refuses a newer one."""
MANIFEST = "manifest.json"
MAX_JSON_BYTES = 16 * 2**20
"""Of a JSON file: more is neither written nor read (parsed, it takes up to 30 times as much)."""
MAX_HEADER_BYTES = 4 * 2**20
"""Of the description at the head of a safetensors file, enough for 40,000 tensors."""
MAX_LINE_BYTES = 16 * 2**20
"""Of one line in a file of lines."""
MAX_LINES_BYTES = 2**28
"""Of a file of lines that is read whole: a CSV with millions of rows."""
MAX_FILES = 1000
"""In a published directory."""
SPACE_RESERVE = 16 * 2**20
"""Bytes that a large write leaves free, for the run's other files."""
PAUSE_VARIABLE = "FORETHOUGHT_PAUSE_AT"
_TEMPORARY = ".tmp-"
_REPLACED = ".old-"


class FileError(ForethoughtError):
    """A file or directory of a run cannot be read or written."""


UNFIT = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What taking over the content of a file may trip over."""


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


def open_regular(path: Path) -> BufferedReader:
    """Open a file to read it: not through a link, and nothing that could block or has no end."""
    try:
        mode = path.lstat().st_mode
        if stat.S_ISREG(mode):
            return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb")
    except OSError as error:
        raise _not_read(path, error) from error
    what = "a link" if stat.S_ISLNK(mode) else "not a regular file"
    raise FileError(f"{path} is {what}, but must be a file in its place.")


def read_bytes(path: Path, limit: int) -> bytes:
    """The whole of a file that may have at most `limit` bytes."""
    with open_regular(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise FileError(
            f"{path} is larger than the {size_in_words(limit)} that such a file may be."
        )
    return content


def end_of_lines(path: Path) -> int:
    """Where the last whole line of a file ends; of a long file only the end is looked at."""
    with open_regular(path) as file:
        size = file.seek(0, os.SEEK_END)
        start = max(0, size - MAX_LINE_BYTES)
        file.seek(start)
        end = file.read(MAX_LINE_BYTES).rfind(b"\n") + 1
    if start and not end:
        raise FileError(
            f"{path} is damaged: its last line is longer than {size_in_words(MAX_LINE_BYTES)}."
        )
    return start + end


def write_text_atomic(path: Path, text: str) -> None:
    """Replace `path` by `text`: a reader sees the old file or the new one, never a part."""
    # A lone surrogate (half a character) becomes its escape, which JSON reads back.
    write_bytes_atomic(path, text.encode("utf-8", errors="backslashreplace"))


def write_bytes_atomic(path: Path, content: bytes) -> None:
    """The same for bytes, such as a picture."""
    temporary = path.with_name(f"{_TEMPORARY}{path.name}-{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        fsync_dir(path.parent)
    except OSError as error:
        raise _not_written(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def json_text(data: Any) -> str:
    """`data` as the text of a JSON file; floats keep every bit."""
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


def write_json(path: Path, data: Any) -> None:
    """Write `data` as JSON, atomically."""
    text = json_text(data)
    size = len(text.encode("utf-8", errors="backslashreplace"))
    if size > MAX_JSON_BYTES:  # nobody could read it again
        raise FileError(
            f"{path} would be {size_in_words(size)} of JSON, but at most "
            f"{size_in_words(MAX_JSON_BYTES)} are read again: it is not written."
        )
    write_text_atomic(path, text)


def read_json(path: Path) -> Any:
    """The value that `write_json` wrote."""
    content = read_bytes(path, MAX_JSON_BYTES)
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path} is damaged: it is not valid JSON ({error}).") from error


def sha256(path: Path) -> str:
    """The sha256 of a file, as hexadecimal text."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def size_in_words(size_bytes: int) -> str:
    """A size as people say it: 412 bytes, 3.2 MB, 56.4 GB."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.1f} {name}"
    return f"{size_bytes} bytes"


def check_space(path: Path, needed_bytes: int) -> None:
    """Refuse to begin a large write to `path` that the disk has no room for."""
    place = next(folder for folder in (path, *path.parents) if folder.is_dir())
    try:
        free = shutil.disk_usage(place).free
    except OSError as error:
        raise _not_written(path, error) from error
    if needed_bytes + SPACE_RESERVE > free:
        raise FileError(
            f"{path} was not written: it takes {size_in_words(needed_bytes)}, but "
            f"{size_in_words(free)} are free there, of which {size_in_words(SPACE_RESERVE)} are "
            "kept for the run's other files; make room and it is tried again."
        )


def tensor_bytes(tensors: Mapping[str, Tensor]) -> int:
    """The size of the file that `save_tensors` will write, or a little more."""
    header = sum(len(name.encode()) + 100 + 20 * x.ndim for name, x in tensors.items())
    return 16 + header + sum(x.numel() * x.element_size() for x in tensors.values())


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
    """The tensors that `save_tensors` wrote, on `device`.

    In main memory they are mapped, not read: one that nobody touches costs nothing.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    _check_header(path)
    try:
        return load_file(path, device=device)
    except OSError as error:
        _refuse_as_memory(path, error)
        raise _not_read(path, error) from error
    # The last ones are torch's, for shapes and types that safetensors knows and torch does not.
    except (SafetensorError, *UNFIT) as error:
        _refuse_as_memory(path, error)
        raise FileError(
            f"{path} is damaged: it is not a safetensors file ({_first_line(error)})."
        ) from error


def load_metadata(path: Path) -> dict[str, str]:
    """The words that `save_tensors` wrote beside the tensors."""
    from safetensors import SafetensorError, safe_open

    _check_header(path)
    try:
        with safe_open(path, framework="numpy") as file:
            words = dict(json.loads((file.metadata() or {}).get("forethought", "{}")))
    except OSError as error:
        raise _not_read(path, error) from error
    except (SafetensorError, ValueError, TypeError, RecursionError) as error:
        raise FileError(
            f"{path} is damaged: it is not a safetensors file ({_first_line(error)})."
        ) from error
    return {str(key): str(value) for key, value in words.items()}


def _check_header(path: Path) -> None:
    """Refuse a tensor file whose header is longer than the file or than any of ours.

    That its tensors are exactly the bytes after the header, safetensors itself checks.
    """
    with open_regular(path) as file:
        length = int.from_bytes(file.read(8), "little")
        size = os.fstat(file.fileno()).st_size
    if length > min(size - 8, MAX_HEADER_BYTES):
        raise FileError(
            f"{path} is damaged: it is not a safetensors file (a header of {length} bytes)."
        )


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
def publish(
    path: Path, meta: dict[str, Any] | None = None, needed_bytes: int = 0
) -> Iterator[Path]:
    """Yield an empty directory to fill; on success it becomes `path`, complete and on the disk.

    `meta` goes into the manifest and may be filled inside the block. Nothing is begun if the disk
    has no room for `needed_bytes`. On any error the temporary directory is removed and whatever was
    at `path` before is untouched. An earlier directory at `path` is replaced; if the process dies
    between the two renames, `recover` puts it back.
    """
    check_space(path, needed_bytes)
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
    if len(files) > MAX_FILES or len(manifest.text) > MAX_JSON_BYTES:
        raise FileError(
            f"{folder} has {len(files)} files and a manifest of "
            f"{size_in_words(len(manifest.text))}: more than is read again."
        )
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


def is_there(path: Path) -> bool:
    """Like `Path.exists`, which since Python 3.14 also says no of what may not be looked at; that
    is an OSError here."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def standing(path: Path) -> Path:
    """Where the directory published at `path` is: in the moment between the two renames of
    `publish`, and for ever if its writer was killed then, it has the name of what is replaced."""
    replaced = path.with_name(f"{_REPLACED}{path.name}") if path.name else path
    return replaced if replaced.is_dir() and not os.path.lexists(path) else path


def recover(parent: Path) -> list[str]:
    """Clear what a killed writer left in `parent`; returns a sentence for each thing done.

    Only for the one writer of `parent`: it would remove what another is writing.
    """
    done = []
    try:
        # Without the dash: safetensors, too, writes to a `.tmp...` file before it renames.
        for entry in sorted(parent.glob(".tmp*")):
            remove(entry)
            done.append(f"Removed the unfinished {entry.name}.")
        for entry in sorted(parent.glob(f"{_REPLACED}*")):
            path = parent / entry.name.removeprefix(_REPLACED)
            if _settle(path, entry):
                done.append(f"Put {path.name} back, which was being replaced.")
    except OSError as error:
        raise _not_written(parent, error) from error
    return done


def remove(path: Path) -> None:
    """Delete a file or a directory; of a link, the link alone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def read_manifest(path: Path) -> Manifest:
    """The manifest of a published directory, checked against its own checksum."""
    file = path / MANIFEST
    if path.is_symlink():
        raise FileError(f"{path} is a link, but must be a directory in its place.")
    content = read_bytes(file, MAX_JSON_BYTES)
    try:
        data = json.loads(content)
        schema = int(data["schema"])
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise FileError(f"{file} is damaged: it names no schema.") from error
    if schema > SCHEMA:
        raise FileError(
            f"{file} has schema {schema}, but this version reads up to {SCHEMA}: "
            "update forethought to read it."
        )
    try:
        manifest = Manifest(schema, data["files"], data["versions"], data["meta"])
        # Byte for byte, so that no flipped bit passes, not even in white space.
        whole = manifest.text.encode() == content and all(
            isinstance(entry["bytes"], int) and isinstance(entry["sha256"], str)
            for entry in manifest.files.values()
        )
        whole = whole and isinstance(manifest.meta, dict) and isinstance(manifest.versions, dict)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        whole = False
    if not whole:
        raise FileError(f"{file} is damaged: its checksum does not fit.")
    if len(manifest.files) > MAX_FILES:
        raise FileError(
            f"{file} names {len(manifest.files)} files, but at most {MAX_FILES} may be."
        )
    for name in manifest.files:
        if not _is_inside(name):
            raise FileError(f"{file} names {name[:200]!r}, which lies outside: refused.")
    return manifest


def _is_inside(name: str) -> bool:
    """Whether a manifest's name is a plain path below its directory."""
    parts = PurePosixPath(name).parts
    plain = re.fullmatch(r"[A-Za-z0-9._/-]+", name) is not None
    return plain and not name.startswith("/") and ".." not in parts and parts != ()


def verify(path: Path) -> Manifest:
    """Check every file that the manifest names; FileError names the first that does not fit.

    What the manifest does not name is nobody's business: it is never read.
    """
    manifest = read_manifest(path)
    for name in manifest.files:
        check_file(path, manifest, name)
    return manifest


def check_file(path: Path, manifest: Manifest, name: str, *, content: bool = True) -> None:
    """Check one file that the manifest names; without `content`, only its place and its size."""
    expected, file = manifest.files[name], path / name
    if not os.path.lexists(file):
        raise FileError(f"{file} is missing.")
    if not file.parent.resolve().is_relative_to(path.resolve()):
        raise FileError(f"{file} is a link, but a published file must be in its place.")
    with open_regular(file) as opened:
        size = os.fstat(opened.fileno()).st_size
        if size != expected["bytes"]:
            raise FileError(f"{file} has {size} bytes, but must have {expected['bytes']}.")
        if content and hashlib.file_digest(opened, "sha256").hexdigest() != expected["sha256"]:
            raise FileError(f"{file} is damaged: its sha256 does not fit the manifest.")


def require_files(path: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Refuse a directory whose manifest does not vouch for a file that will be read."""
    for name in names:
        if name not in manifest.files:
            raise FileError(f"{path / MANIFEST} does not name {name}, which must be there.")


@contextlib.contextmanager
def content_of(path: Path) -> Iterator[None]:
    """While the block takes over what was read from `path`: what it trips over is one sentence.

    Memory that is refused meanwhile is no fault of the file.
    """
    try:
        yield
    except OSError as e:
        _refuse_as_memory(path, e)
        raise
    except UNFIT as e:
        _refuse_as_memory(path, e)
        reason = f"{type(e).__name__}: {_first_line(e)}"
        raise FileError(f"{path} does not hold what it must ({reason}).") from e


def published(parent: Path) -> list[Path]:
    """The directories `<word>-<number>` in `parent`, by number, verified or not."""
    numbered = []
    for entry in parent.iterdir() if parent.is_dir() else ():
        match = re.fullmatch(r"[a-z]+-(\d+)", entry.name)
        if match and entry.is_dir():
            numbered.append((int(match[1]), entry))
    return [entry for _, entry in sorted(numbered)]


def newest_verified(
    parent: Path, check: Callable[[Path, Manifest], None] | None = None
) -> tuple[Path, list[str]]:
    """The newest directory in `parent` that verifies, and why newer ones were skipped.

    `check` may refuse a whole one for what it holds, by a FileError.
    """
    skipped: list[str] = []
    for candidate in reversed(published(parent)):
        try:
            manifest = verify(candidate)
            if check is not None:
                check(candidate, manifest)
        except FileError as error:
            skipped.append(f"Skipped {candidate.name}: {error}")
        else:
            return candidate, skipped
    reason = f" {' '.join(skipped)}" if skipped else ""
    raise FileError(f"{parent} holds no usable checkpoint.{reason} Train anew.")


@cache
def versions() -> dict[str, str]:
    """Of Python and the packages that decide what a run computes, without importing them."""
    found = {"python": platform.python_version()}
    for package in ("forethought", "torch", "numpy", "gymnasium"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _first_line(error: Exception) -> str:
    """An error in one line: torch's go on with a list of its own functions."""
    return (str(error).splitlines() or [""])[0].rstrip(".")[:200]


def _refuse_as_memory(path: Path, error: Exception) -> None:
    """Says so where memory was too small for what is in a file, which may be all right."""
    if memory_refused(error):
        reason = _first_line(error) or "it was refused"
        raise MemoryRefused(
            f"There is not enough memory for {path} ({reason}): close other programs, or use a "
            "device with more. The file is kept as it is."
        ) from error


def _not_written(path: Path, error: OSError) -> FileError:
    return FileError(
        f"{path} could not be written ({error.strerror or error}): "
        "check the free space and the permissions there."
    )


def _not_read(path: Path, error: OSError) -> FileError:
    return FileError(f"{path} could not be read ({error.strerror or error}).")
