"""Reading run directories, also of runs that are still training or were cut short.

What is missing or damaged in one run is a sentence beside the result, not the end of it: a report
of nine runs must not fail because the tenth was killed while it wrote a line.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forethought.config import flatten
from forethought.files import FileError, end_of_lines
from forethought.tracking.csv_file import read_rows
from forethought.tracking.run_directory import NoRun, RunDirectory

QUIET = frozenset(
    {"started", "about", "resumed", "done", "running", "interrupted", "checkpoint-size", "video"}
)
"""Events of a run that goes as it should; whether it is interrupted, its status says."""
LAST_EPISODES = 10
NORMALISED = "normalised_score/"
"""Columns of eval.csv that begin so are the scores of single tasks."""
LARGEST = 1e100
"""A return beyond this is damage: sums of such numbers overflow."""


@dataclass(frozen=True)
class RunRecord:
    """What a run directory says, with every number already read."""

    path: Path
    facts: Mapping[str, Any]
    """run.json."""
    config: Mapping[str, Any]
    """config.yaml, keys dotted."""
    evaluations: Mapping[int, float]
    """Mean return by env_frames, rising; of an offline run, which has none, by updates."""
    random_score: float | None
    """Mean return of random play, measured when the run began."""
    env_frames: int
    """Frames trained so far; of an offline run, updates."""
    agent_steps: int
    ms_per_agent_step: float | None
    """Median over the logging intervals in which it learned."""
    training_return: float | None
    """Mean of the last training episodes."""
    warnings: tuple[str, ...]
    """Gates, failures and warnings, one sentence for each kind."""
    notes: tuple[str, ...]
    """What the reader left out, one sentence each."""
    unit: str = "frames"
    """What its evaluations are counted in: frames, or updates of an offline run."""
    normalised: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """Of a run of several tasks: by evaluation, each task's score from 0 to 100."""

    @property
    def task(self) -> str:
        """An offline run is never drawn beside an online one: they share no axis."""
        name = str(self.facts["task"])
        return name if self.unit == "frames" else f"{name} (offline)"

    @property
    def agent(self) -> str:
        return str(self.facts["agent"])

    @property
    def seed(self) -> int:
        return int(self.facts["seed"])

    @property
    def versions(self) -> Mapping[str, Any]:
        """Of Python and the packages that the run was started with."""
        found = self.facts.get("versions")
        return found if isinstance(found, dict) else {}

    @property
    def no_evaluation(self) -> str:
        """The sentence for a run that has nothing to draw yet."""
        text = f"{self.path} has no evaluation yet ({self.facts['status']}"
        text += f", its records reach {self.env_frames:,} {self.unit}"
        if self.training_return is not None:
            text += f", mean return of its last episodes {self.training_return:,.4g}"
        return text + "): it is left out."


def find_runs(places: Iterable[Path]) -> list[Path]:
    """Every run among `places`; a folder that is no run stands for all runs below it."""
    found: dict[Path, Path] = {}
    for place in places:
        if not place.is_dir():
            raise NoRun(f"There is no run directory {place}.")
        inside = list(_below(place))
        if not inside:
            raise NoRun(f"{place} is no run, and there is none below it.")
        for path in inside:
            found.setdefault(path.resolve(), path)
    return list(found.values())


def _below(place: Path) -> Iterable[Path]:
    for folder, inside, names in os.walk(place):
        if "run.json" in names:
            inside.clear()  # a run holds many files, and no run
            yield Path(folder)
        inside.sort()


def read_runs(places: Iterable[Path]) -> tuple[list[RunRecord], list[str]]:
    """All runs among `places` that can be read, and a sentence for each that cannot."""
    records: list[RunRecord] = []
    notes: list[str] = []
    for path in find_runs(places):
        try:
            records.append(read_run(path))
        except FileError as error:
            notes.append(f"{error} The run is left out.")
    if not records:
        raise FileError(" ".join(notes))
    return records, notes


def read_run(path: Path) -> RunRecord:
    """One run; FileError where it cannot be understood at all."""
    run = RunDirectory.open(path)
    notes: list[str] = []
    config = flatten(run.config())
    x = "env_frames" if config.get("offline.data") is None else "updates"
    scored = _rows(run.eval_csv, path, notes)
    evaluations = _evaluations(scored, x, path, notes)
    train = _rows(run.train_csv, path, notes)
    episodes = _rows(run.episodes_csv, path, notes)
    rows = [*train[-1:], *episodes[-1:]]
    returns = _numbers(episodes[-LAST_EPISODES:], "return")
    learning = [row for row in train if (_number(row.get("updates_per_s")) or 0) > 0]
    times = _numbers(learning or train, "ms_per_agent_step")
    facts = run.run_json
    return RunRecord(
        path=path,
        facts=facts,
        config=config,
        evaluations=evaluations,
        random_score=_random_score(facts, path, notes),
        env_frames=int(max([*_numbers(rows, x), *evaluations], default=0)),
        agent_steps=int(max(_numbers(rows, "agent_steps"), default=0)),
        ms_per_agent_step=statistics.median(times) if times else None,
        training_return=statistics.mean(returns) if returns else None,
        warnings=tuple(_warnings(run, notes)),
        notes=tuple(notes),
        unit="frames" if x == "env_frames" else x,
        normalised=_normalised(scored, x),
    )


def _rows(file: Path, run: Path, notes: list[str]) -> list[dict[str, str]]:
    if not file.exists():
        return []
    rows, note = read_rows(file)
    if note is not None:
        notes.append(f"{run / note}")
    return rows


def _normalised(rows: list[dict[str, str]], x: str) -> dict[int, dict[str, float]]:
    """The scores of each of several tasks, by evaluation; nothing where there is one task."""
    found: dict[int, dict[str, float]] = {}
    for row in rows:
        at = _number(row.get(x))
        scores = {
            name.removeprefix(NORMALISED): _number(text)
            for name, text in row.items()
            if name.startswith(NORMALISED)
        }
        own = {k: v for k, v in scores.items() if v is not None and abs(v) <= LARGEST}
        if at is not None and own:
            found[int(at)] = own
    return found


def _evaluations(
    rows: list[dict[str, str]], x: str, run: Path, notes: list[str]
) -> dict[int, float]:
    found: dict[int, float] = {}
    for place, row in enumerate(rows, start=2):
        frames, score = _number(row.get(x)), _number(row.get("return_mean"))
        if frames is None or frames < 0 or score is None or abs(score) > LARGEST:
            notes.append(f"{run / 'eval.csv'}: line {place} holds no score and is left out.")
        else:
            found[int(frames)] = score
        failed = _number(row.get("n_failed"))
        if failed:
            notes.append(f"{run / 'eval.csv'}: {failed:g} episodes failed in line {place}.")
    return dict(sorted(found.items()))


def _random_score(facts: Mapping[str, Any], run: Path, notes: list[str]) -> float | None:
    """run.json's own check has seen to it that this is a number, but not which."""
    value = facts.get("random_score")
    if value is None:
        return None
    if abs(value) <= LARGEST:  # which NaN is not
        return float(value)
    notes.append(f"{run / 'run.json'}: random_score is no finite return and is left out.")
    return None


def _warnings(run: RunDirectory, notes: list[str]) -> Iterable[str]:
    """One sentence for each kind of event that a person should see: how often, and the last."""
    if not run.events_file.exists():
        return
    if end_of_lines(run.events_file) < run.events_file.stat().st_size:
        notes.append(f"{run.events_file}: the half-written last line is ignored.")
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for place, event in enumerate(run.events(), start=1):
        kind = event.get("kind") if isinstance(event, dict) else None
        if not isinstance(kind, str):
            notes.append(f"{run.events_file}: event {place} is damaged and left out.")
        elif kind not in QUIET:
            kinds.setdefault(kind, []).append(event)
    for kind, events in kinds.items():
        last = events[-1]
        words = next((last[key] for key in ("message", "reason", "note") if last.get(key)), "")
        reasons = last.get("reasons") or []
        if not words:
            words = "; ".join(map(str, reasons if isinstance(reasons, list) else [reasons]))
        often = f" ({len(events)} times)" if len(events) > 1 else ""
        yield f"{kind}{often}: {words}" if words else f"{kind}{often}"


def _numbers(rows: Iterable[Mapping[str, str]], column: str) -> list[float]:
    found = (_number(row.get(column)) for row in rows)
    return [value for value in found if value is not None]


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if math.isfinite(value) else None
