"""The run directory: everything that a run leaves behind, and the only thing others read of it."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import subprocess
import uuid
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from forethought import presets
from forethought.config import ConfigError, ForethoughtError
from forethought.files import (
    MAX_LINE_BYTES,
    FileError,
    is_there,
    open_regular,
    published,
    read_bytes,
    read_json,
    versions,
    write_json,
    write_text_atomic,
)
from forethought.tracking.events import EventsFile, read_events
from forethought.tracking.lock import Lock

LONGEST_NAME = 150
"""Letters of a task's folder; file systems take 255."""
SCHEMA = 1
"""Version of run.json's layout."""
STATUSES = ("running", "done", "interrupted", "diverged", "failed")
FIELD_TYPES: dict[str, tuple[type | tuple[type, ...], str]] = {
    "schema": (int, "a whole number"),
    "id": (str, "text"),
    "status": (str, "text"),
    "agent": (str, "text"),
    "task": (str, "text"),
    "seed": (int, "a whole number"),
    "tags": (list, "a list"),
    "best": (dict, "a group of keys"),
    "random_score": ((int, float), "a number"),
}
"""What others rely on in run.json, and how a sentence names its type."""
MAX_CONFIG_BYTES = 2**18
"""Of config.yaml, a hundred times what one has."""
IDENTITY = {"agent": "agent_name", "task": "task", "seed": "seed"}
"""Keys of run.json, and the keys of config.yaml that must say the same."""
log = logging.getLogger("forethought")


class NoRun(FileError, ConfigError):
    """What was named as a run is none: bad usage, not a damaged file."""


class RunDirectory:
    """Paths, description, configuration, events and lock of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.replay = path / "replay"
        self.train_csv = path / "train.csv"
        self.episodes_csv = path / "episodes.csv"
        self.eval_csv = path / "eval.csv"
        self.events_file = path / "events.jsonl"
        self._run_file = path / "run.json"
        self._config_file = path / "config.yaml"
        self._events = EventsFile(self.events_file)
        self._events_failed = False

    @classmethod
    def create(
        cls, out: Path | None, config: Mapping[str, Any], agent: str, task: str, seed: int
    ) -> RunDirectory:
        """A new run in `out`, or in runs/<task>/<agent>/<seed>-<time>; never over an old one."""
        now = utc_now()
        about = {
            "schema": SCHEMA,
            "id": uuid.uuid4().hex,
            "status": "running",
            "agent": agent,
            "task": task,
            "seed": seed,
            "versions": versions(),
            "git_commit": git_commit(),
            "created_utc": now,
            "updated_utc": now,
            "tags": [],
            "best": None,
        }
        path = _make(out) if out is not None else _make_default(agent, task, seed)
        run = cls(path)
        try:
            for folder in (run.checkpoints, run.replay):
                folder.mkdir(exist_ok=True)
            with Lock(path / "lock").hold():  # two may have been given the same place at once
                _refuse_run(path)
                for half in filter(_is_half, list(path.iterdir())):
                    half.unlink(missing_ok=True)
                write_text_atomic(run._config_file, yaml.safe_dump(dict(config), sort_keys=False))
                write_json(run._run_file, about)  # last: a directory with run.json is a run
        except OSError as error:
            raise _not_created(path, error) from error
        return run

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """An existing run; one sentence if it is none, or not readable."""
        run = cls(path)
        try:
            if not (is_there(path) and path.is_dir()):
                raise NoRun(f"There is no run directory {path}.")
            if not is_there(run._run_file):
                raise NoRun(f"{path} is not a run directory: it has no run.json.")
        except OSError as error:  # a folder of somebody else's, or a name that no disk takes
            raise FileError(f"{path} cannot be read: {error.strerror}.") from error
        _refuse_links(path)
        about, config = run._read(), run.config()
        for key, twin in IDENTITY.items():
            if twin in config and config[twin] != about[key]:
                raise FileError(
                    f"{path} is damaged: run.json says {key} {about[key]}, but config.yaml says "
                    f"{twin} {config[twin]}."
                )
        return run

    @property
    def unbegun(self) -> bool:
        """Whether nothing was saved and nothing recorded: it failed, or was killed, before that."""
        if published(self.checkpoints):
            return False
        return not any(
            _has_rows(table) for table in (self.train_csv, self.episodes_csv, self.eval_csv)
        )

    @property
    def run_json(self) -> dict[str, Any]:
        """The run's description as it stands on the disk."""
        return self._read()

    def _read(self) -> dict[str, Any]:
        data = read_json(self._run_file)
        needed = ("status", "agent", "task", "seed", "tags")
        if not isinstance(data, dict) or any(key not in data for key in needed):
            raise FileError(f"{self.path} is not a run directory: run.json describes no run.")
        for key, (kind, words) in FIELD_TYPES.items():
            value = data.get(key)
            optional = value is None and key not in needed
            if not optional and (not isinstance(value, kind) or isinstance(value, bool)):
                raise FileError(
                    f"{self._run_file} is damaged: {key} is {value!r}, but must be {words}."
                )
        if data["status"] not in STATUSES:
            raise FileError(
                f"{self._run_file} is damaged: status is {data['status']!r}, but must be one of "
                f"{', '.join(STATUSES)}."
            )
        if (data.get("schema") or 0) > SCHEMA:
            raise FileError(
                f"{self._run_file} has schema {data['schema']}, but this version reads up to "
                f"{SCHEMA}: update forethought to read it."
            )
        return data

    def update(self, **fields: Any) -> None:
        """Change fields of run.json, atomically."""
        status = fields.get("status", STATUSES[0])
        if status not in STATUSES:
            raise ForethoughtError(f"status is {status}, but must be one of {', '.join(STATUSES)}.")
        data = self._read()
        if "status" in fields:
            data.pop("error", None)  # of an earlier end
        # The wall clock may jump back; a run must not seem to end before it began.
        now = max(utc_now(), str(data.get("updated_utc", "")))
        write_json(self._run_file, {**data, **fields, "updated_utc": now})

    def tag(self, name: str) -> None:
        """Add a tag that lists and reports show, once."""
        tags = self._read()["tags"]
        if name not in tags:
            self.update(tags=[*tags, name])

    def config(self) -> dict[str, Any]:
        """The whole configuration that the run was started with."""
        try:
            data = presets.parse(read_bytes(self._config_file, MAX_CONFIG_BYTES).decode())
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            told = presets.yaml_problem(error)
            raise FileError(
                f"{self._config_file} is damaged: it is not valid YAML{told}."
            ) from error
        if not isinstance(data, dict):
            raise FileError(f"{self._config_file} is damaged: it holds no configuration.")
        return data

    def event(self, kind: str, **fields: Any) -> None:
        """Add a line to events.jsonl; a full disk is warned about once and stops nothing."""
        try:
            self._events.append({"time_utc": utc_now(), "kind": kind, **fields})
        except OSError as error:
            if not self._events_failed:
                log.warning(
                    "%s could not be written (%s); its lines are kept and written later.",
                    self.events_file,
                    error.strerror,
                )
            self._events_failed = True

    def events(self) -> list[dict[str, Any]]:
        """All whole lines of events.jsonl; says which it ignores."""
        events, notes = read_events(self.events_file)
        for note in notes:
            log.warning("%s", note)
        return events

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Be the one trainer of this run; a living other one is an error, a dead one an event."""
        with Lock(self.path / "lock").hold() as dead:
            note = self._events.mend()
            if dead is not None:
                reason = "taken over from a process that had died without ending it"
                self.event("lock-taken-over", reason=reason, pid=dead.pid, host=dead.host)
            if note is not None:
                self.event("events-mended", note=note)
            yield


def utc_now() -> str:
    """The time in UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def git_commit(source: Path = Path(__file__).parents[1] / "__init__.py") -> str | None:
    """The commit of the source tree that runs, if that is a git checkout; "+changes" behind it
    where files beside or below `source` are not as committed, "+unknown" where git did not say.

    The file must be tracked: an installed package may lie in some other project's repository.
    """
    try:
        _git(source, "ls-files", "--error-unmatch", "--", source.name)
        commit = _git(source, "rev-parse", "--verify", "--quiet", "HEAD")
    except (OSError, subprocess.SubprocessError):
        return None
    try:
        return commit + ("+changes" if _git(source, "status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.SubprocessError):  # a slow disk: better than no commit at all
        return f"{commit}+unknown"


def _git(source: Path, *words: str) -> str:
    # No lock of the index for a look: a commit at that moment would fail.
    command = ["git", "--no-optional-locks", *words]
    asked = subprocess.run(
        command, cwd=source.parent, capture_output=True, text=True, timeout=5, check=True
    )
    return asked.stdout.strip()


def _refuse_links(path: Path) -> None:
    """A run writes into its files and clears its folders: none may lie elsewhere, none may block.

    The run directory itself may well be a link.
    """
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                whole = entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False)
                if not whole:
                    raise FileError(
                        f"{path / entry.name} is a link or no regular file, but a run keeps its "
                        "own files: put the file itself there, or remove it."
                    )
    except OSError as error:
        raise FileError(f"{path} could not be read ({error.strerror}).") from error


def _make(out: Path) -> Path:
    try:
        _refuse_run(out)
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()) and not _left_by_a_kill(out):
            raise FileError(
                f"{out} is not empty, and not a run: choose another place (--out, or out=)."
            )
    except OSError as error:
        raise _not_created(out, error) from error
    return out


def _refuse_run(path: Path) -> None:
    if (path / "run.json").exists():
        raise FileError(
            f"{path} already holds a run: choose another place (--out, or out=), or continue it "
            "with 'forethought resume'."
        )


def _left_by_a_kill(out: Path) -> bool:
    """Whether `create` was killed here before it wrote run.json: two empty folders, then a lock and
    the configuration of a run, or halves of files, and nothing else."""
    entries = list(out.iterdir())
    folders = [entry for entry in entries if entry.name in ("checkpoints", "replay")]
    files = [entry for entry in entries if entry not in folders]
    plain = all(map(Path.is_file, files)) and all(map(Path.is_dir, folders))
    if not plain or any(map(Path.is_symlink, entries)):
        return False
    empty = not any(any(folder.iterdir()) for folder in folders)
    return empty and (not files or len(folders) == 2) and all(map(_is_first_file, files))


def _is_first_file(file: Path) -> bool:
    """Whether `create` itself wrote this, and no person: a lock may have been cut, not config.yaml,
    which is written at once."""
    if file.name == "lock":
        content = read_bytes(file, MAX_LINE_BYTES)
        return not content.strip(b"\0") or content.startswith(b'{"pid"')
    if file.name == "config.yaml":
        try:
            return RunDirectory(file.parent).config().keys() >= set(IDENTITY.values())
        except FileError:
            return False
    return _is_half(file)


def _is_half(file: Path) -> bool:
    return file.name.startswith((".tmp-config.yaml-", ".tmp-run.json-"))


def _make_default(agent: str, task: str, seed: int) -> Path:
    folder = Path("runs") / _folder_name(task) / agent
    name = f"{seed}-{datetime.now(UTC).strftime('%Y%m%dT%H%M%SZ')}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(1, 1000):  # two runs may begin in the same second
            path = folder / (name if number == 1 else f"{name}-{number}")
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                return path
    except OSError as error:
        raise _not_created(folder / name, error) from error
    raise FileError(f"{folder / name} could not be created: choose another place (--out, or out=).")


def _folder_name(task: str) -> str:
    """The task as a folder; of many tasks, their number and what tells them from other ones."""
    if len(task) > LONGEST_NAME:
        digest = hashlib.sha256(task.encode()).hexdigest()[:8]
        return f"{task.partition(':')[0]}-{task.count(',') + 1}-tasks-{digest}"
    return task.replace(":", "-").replace("/", "-")


def _not_created(path: Path, error: OSError) -> FileError:
    return FileError(
        f"{path} could not be created ({error.strerror}): choose another place (--out, or out=)."
    )


def _has_rows(table: Path) -> bool:
    """Whether anything follows the header, whole or not."""
    if not table.exists():
        return False
    with open_regular(table) as file:
        file.readline(MAX_LINE_BYTES)
        return bool(file.read(1))
