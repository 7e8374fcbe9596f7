"""One trainer at a time holds a run: a lock file with pid and host, which outlives no process.

The file names its holder and is empty when free. A holder on this host that no longer lives is
recognised (by pid and by start time, for pids are used again) and its lock taken over. Of a holder
on another host nothing can be known, so its lock stands until a person removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from forethought.config import ForethoughtError
from forethought.files import FileError


@dataclass(frozen=True)
class Holder:
    """The process that holds a run."""

    pid: int
    host: str
    started: int | None
    """When the process began, in the kernel's ticks since boot; None where it does not tell."""


class Lock:
    """The lock file of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextlib.contextmanager
    def hold(self) -> Iterator[Holder | None]:
        """Hold the lock inside the block; yields the dead holder it was taken from, if any."""
        dead = self._acquire()
        try:
            yield dead
        finally:
            # Removed by a person, with or without its directory: then there is nothing to free.
            with contextlib.suppress(FileError), self._guarded() as descriptor:
                if _parse(os.read(descriptor, 4096)) == _this_process():
                    os.ftruncate(descriptor, 0)

    def _acquire(self) -> Holder | None:
        with self._guarded() as descriptor:
            holder = _parse(os.read(descriptor, 4096))
            if holder is not None:
                self._refuse_if_held(holder)
            try:
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(asdict(_this_process())).encode(), 0)
                os.fsync(descriptor)
            except OSError as error:
                raise FileError(
                    f"{self.path} could not be written ({error.strerror}): check the free space "
                    "and the permissions there."
                ) from error
            return holder

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[int]:
        """The open file, with the kernel's own lock on it while it is read and changed.

        Only for that moment: children would inherit the kernel's lock and keep it when the
        trainer is killed.
        """
        try:
            # Never through a link, and never waiting for the other end of a pipe.
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(self.path, flags, 0o644)
        except OSError as error:
            raise FileError(f"{self.path} could not be opened ({error.strerror}).") from error
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise FileError(f"{self.path} is not a regular file: remove it and try again.")
            # Some network file systems have none; the file's content then guards alone.
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield descriptor
        finally:
            os.close(descriptor)

    def _refuse_if_held(self, holder: Holder) -> None:
        where = f"{self.path.parent} is being trained by process {holder.pid} on {holder.host}"
        if holder.host != socket.gethostname():
            raise ForethoughtError(
                f"{where}: if that process no longer runs, remove {self.path} and try again."
            )
        alive, started = _look_up(holder.pid)
        if alive and (holder.started is None or started is None or holder.started == started):
            raise ForethoughtError(f"{where}: wait for it or stop it first.")


def _this_process() -> Holder:
    return Holder(os.getpid(), socket.gethostname(), _look_up(os.getpid())[1])


def _parse(content: bytes) -> Holder | None:
    """The holder that a lock file names; None if it is free (or was cut by a crash: free, too)."""
    try:
        data = json.loads(content)
        holder = Holder(int(data["pid"]), str(data["host"]), data["started"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return holder if holder.pid > 0 else None  # 0 and below would mean groups of processes


def _look_up(pid: int) -> tuple[bool, int | None]:
    """Whether a process of this host lives, and when it began if the kernel tells."""
    try:
        # The name in parentheses may hold anything; the fields after it are fixed (man 5 proc).
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return fields[0] not in "ZX", int(fields[19])  # a zombie has died, though it has a pid
    except OSError:
        pass  # no such process, or no /proc on this system: ask by signal
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False, None
    except PermissionError:
        return True, None
    return True, None
