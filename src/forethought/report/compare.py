"""Two or more runs, or folders of runs, side by side: what differs, and what came of it.

Each word of the command is one side. A folder that is no run is a side of all the runs below it,
usually the seeds of one configuration.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forethought.config import ConfigError, diff
from forethought.report import statistics
from forethought.report.groups import (
    Group,
    between_notes,
    fair_frames,
    make_group,
    one_per_seed,
)
from forethought.report.methods import (
    brief_commits,
    differing_keys,
    printable,
    show,
    tells_apart,
)
from forethought.report.runs import RunRecord, read_runs
from forethought.report.statistics import Estimate, number

if TYPE_CHECKING:
    from rich.console import Console

ALWAYS = ("task", "agent_name", "seed", "status", "git_commit")
"""Keys that are shown whether or not they differ, and the versions with them."""
SIGNS = {"added": "+", "removed": "-", "changed": "~"}
COLOURS = {"added": "bold green", "removed": "bold red", "changed": "bold yellow"}
ABSENT = "-"


@dataclass(frozen=True)
class Side:
    """A run, or all runs below a folder."""

    name: str
    runs: tuple[RunRecord, ...]
    facts: Mapping[str, Any]
    """What it is and the whole configuration, keys dotted; differing values are joined."""
    groups: Mapping[str, Group]
    """By task the runs that have been evaluated."""


@dataclass(frozen=True)
class Comparison:
    """Everything that `compare` shows."""

    sides: tuple[Side, ...]
    kinds: Mapping[str, Sequence[str]]
    """Per key and side after the first: added, removed, changed or same, as seen from the first."""
    notes: tuple[str, ...]

    @property
    def tasks(self) -> list[str]:
        return sorted({run.task for side in self.sides for run in side.runs})

    def groups(self, task: str) -> list[Group]:
        """The sides that have been evaluated on a task."""
        return [side.groups[task] for side in self.sides if task in side.groups]

    def improvements(self, task: str) -> list[tuple[Group, Group, int, Estimate]]:
        """(side, first side, frames, chance that a run of side beats one of the first side).

        Without the sides that have one run, and those that were never evaluated at the same frames.
        """
        groups = self.groups(task)
        found = []
        for first, other in itertools.product(groups[:1], groups[1:]):
            at = fair_frames([first, other])
            if at is None or min(len(first.runs), len(other.runs)) < 2:
                continue
            x, y = [other.scores_at(at)], [first.scores_at(at)]
            chance = statistics.estimate(statistics.probability_of_improvement, x, y)
            found.append((other, first, at, chance))
        return found

    def to_json(self) -> dict[str, Any]:
        """All of it, every key included."""
        return {
            "sides": [
                {"name": side.name, "runs": [str(run.path) for run in side.runs], **side.facts}
                for side in self.sides
            ],
            "differences": {
                key: {"kinds": list(kinds), "values": [side.facts.get(key) for side in self.sides]}
                for key, kinds in self.kinds.items()
                if set(kinds) != {"same"}
            },
            "statistics": {
                task: [_statistics(group) for group in self.groups(task)] for task in self.tasks
            },
            "improvement": [
                {"task": task, "of": x.label, "over": y.label, _counter(x): at, **asdict(chance)}
                for task in self.tasks
                for x, y, at, chance in self.improvements(task)
            ],
            "notes": list(self.notes),
        }


def compare(places: Sequence[str]) -> Comparison:
    """Reads the sides and finds what differs between the first and each of the others."""
    if len(places) < 2:
        raise ConfigError("compare takes two or more runs, or folders of runs.")
    notes: list[str] = []
    sides = [_side(place, notes) for place in places]
    found = Comparison(tuple(sides), _kinds(sides), ())
    for task in found.tasks:
        groups = found.groups(task)
        for other in groups[1:]:
            notes += between_notes([groups[0], other])
        notes += _absent_notes(sides, task)
    return replace(found, notes=tuple(dict.fromkeys(notes)))


def _absent_notes(sides: Sequence[Side], task: str) -> list[str]:
    """A sentence for each side that has nothing to compare on this task."""
    return [
        f"{side.name} has no runs of {task}, so it is not compared there."
        for side in sides
        if all(run.task != task for run in side.runs)
    ]


def _side(place: str, notes: list[str]) -> Side:
    every, found = read_runs([Path(place)])
    notes += found + [note for record in every for note in record.notes]
    notes += [record.no_evaluation for record in every if not record.evaluations]
    single = one_per_seed([record for record in every if record.evaluations], notes)
    kept = {record.path for record in single}
    records = [record for record in every if record.path in kept or not record.evaluations]
    keys = differing_keys([record.config for record in records])
    mixed = [key for key in keys if key == "task" or tells_apart(key)]
    if mixed:
        notes.append(f"{place} holds runs that also differ in {', '.join(mixed[:5])}.")
    groups = {}
    for task in sorted({record.task for record in single}):
        own = [record for record in records if record.path in kept and record.task == task]
        groups[task] = make_group(place, own, notes)
    return Side(place, tuple(records), _joined(records), groups)


def _kinds(sides: Sequence[Side]) -> dict[str, list[str]]:
    first, *others = sides
    keys = dict.fromkeys(key for side in sides for key in side.facts)
    rows = [{key: kind for key, kind, _, _ in diff(first.facts, o.facts)} for o in others]
    return {key: [row.get(key, "same") for row in rows] for key in keys}


def _joined(records: Sequence[RunRecord]) -> dict[str, Any]:
    """One value per key; where the runs of a side differ, their values joined as text."""
    whole: dict[str, list[Any]] = {}
    for record in records:
        own = {
            "task": record.task,
            "agent_name": record.agent,
            "seed": record.seed,
            "status": record.facts["status"],
            "git_commit": record.facts.get("git_commit") or ABSENT,
            **{f"versions.{name}": version for name, version in record.versions.items()},
            **record.config,
        }
        for key, value in own.items():
            known = whole.setdefault(key, [])
            if value not in known:
                known.append(value)
    return {
        key: values[0] if len(values) == 1 else _as_text(key, sorted(values, key=_order))
        for key, values in whole.items()
    }


def _as_text(key: str, values: Sequence[Any]) -> str:
    # Commits stay whole here: cut at their end, they would lose "+changes".
    return ", ".join(map(str if key == "git_commit" else show, values))


def _order(value: Any) -> tuple[bool, float, str]:
    """Numbers by their size, then all else: the same values are the same text, wherever found."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return (False, value, "") if is_number else (True, 0.0, show(value))


def _counter(group: Group) -> str:
    return "env_frames" if group.unit == "frames" else group.unit


def _statistics(group: Group) -> dict[str, Any]:
    return {
        "side": group.label,
        "seeds": list(group.seeds),
        _counter(group): group.last_frames,
        **{name: asdict(value) for name, value in group.summary().items()},
        "random_play": group.random_score,
        "ms_per_agent_step": group.ms_per_agent_step(),
    }


# On the screen.


def show_comparison(comparison: Comparison, console: Console, everything: bool = False) -> None:
    """Draws the differences (every key if asked), then the statistics, then what was left out."""
    from rich.table import Table

    sides = comparison.sides
    table = Table(title="configuration", title_justify="left", title_style="bold")
    for name in ("", "key", *(side.name for side in sides)):
        table.add_column(_text(name), overflow="fold")
    for key, kinds in comparison.kinds.items():
        always = key in ALWAYS or key.startswith("versions.")
        if everything or always or set(kinds) != {"same"}:
            found = [side.facts.get(key, ABSENT) for side in sides]
            brief = [brief_commits(str(x)) if key == "git_commit" else x for x in found]
            cells = [_text(show(value, 60)) for value in brief]
            styles = ["", *(COLOURS.get(kind, "dim") for kind in kinds)]
            for cell, style in zip(cells, styles):
                cell.stylize(style)
            signs = "".join(dict.fromkeys(SIGNS.get(kind, "") for kind in kinds))
            table.add_row(signs, _text(key, "bold" if signs else "dim"), *cells)
    console.print(table)
    for task in comparison.tasks:
        _show_statistics(comparison, task, console)
    for note in comparison.notes:
        console.print(_text(note), style="yellow", soft_wrap=True)


def _show_statistics(comparison: Comparison, task: str, console: Console) -> None:
    from rich.table import Table

    groups = comparison.groups(task)
    if not groups:
        return
    table = Table(title=_text(task), title_justify="left", title_style="bold")
    # Of one run it is that run's number: "seeds 2" would be read as two of them.
    single = all(len(group.runs) == 1 for group in groups)
    table.add_column("one seed each: no intervals" if single else "95 % intervals over seeds")
    for group in groups:
        table.add_column(_text(group.label), overflow="fold")
    found = [group.summary() for group in groups]
    rows = {
        "seed" if single else "seeds": [", ".join(map(str, group.seeds)) for group in groups],
        groups[0].unit: [f"{group.last_frames:,}" for group in groups],
        "last evaluation": [str(summary["last"]) for summary in found],
        "IQM": [str(summary["iqm"]) for summary in found],
        "best": [str(summary["best"]) for summary in found],
        "area under curve": [str(summary["area"]) for summary in found],
        "random play": [_optional(group.random_score) for group in groups],
        "ms per agent step": [_optional(group.ms_per_agent_step()) for group in groups],
    }
    at = fair_frames(groups)
    if at is not None and any(group.last_frames != at for group in groups):
        means = [statistics.estimate(statistics.mean, [group.scores_at(at)]) for group in groups]
        rows[f"at {at:,} {groups[0].unit}"] = [str(mean) for mean in means]
    for name, cells in rows.items():
        table.add_row(name, *cells, style="bold" if name == "last evaluation" else "")
    console.print(table)
    for better, worse, at, chance in comparison.improvements(task):
        words = f"A run of {better.label} beats one of {worse.label} at {at:,} {better.unit}"
        console.print(_text(f"{words} with probability {chance}."), soft_wrap=True)


def _optional(value: float | None) -> str:
    return ABSENT if value is None else number(value)


def _text(words: str, style: str = "") -> Any:
    """Text that is not read as markup, and holds nothing that would steer the terminal."""
    from rich.text import Text

    return Text(printable(words), style=style)
