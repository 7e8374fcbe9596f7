"""Groups of runs that differ only by their seed, and the numbers that a person asks of them."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forethought import presets
from forethought.config import ConfigError, flatten
from forethought.report import statistics
from forethought.report.published import Published, published
from forethought.report.runs import RunRecord, read_runs
from forethought.report.statistics import Array, Estimate, Scores

Method = tuple[tuple[str, str], ...]
"""What a method is: its configuration but for task, seed and tracking, as text, hashable."""
BY_TASK = "by task"
"""Stands for a value that a method has otherwise on another task."""
DMC_MAXIMUM = 1000.0
"""Rewards of DeepMind Control are at most 1 in each of an episode's 1000 frames."""


@dataclass(frozen=True)
class Group:
    """Runs of one task and one configuration; each has at least one evaluation."""

    label: str
    runs: tuple[RunRecord, ...]

    @property
    def task(self) -> str:
        return self.runs[0].task

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(run.seed for run in self.runs)

    @functools.cached_property
    def frames(self) -> tuple[int, ...]:
        """The env_frames at which every run was evaluated."""
        return tuple(sorted(set.intersection(*(set(run.evaluations) for run in self.runs))))

    @property
    def last_frames(self) -> int:
        """Where the runs are compared: the last evaluation that all of them have."""
        own = (max(run.evaluations) for run in self.runs)
        return self.frames[-1] if self.frames else min(own)

    @property
    def scores(self) -> Array:
        """The score of each run there."""
        return self.scores_at(self.last_frames)

    def scores_at(self, frames: int) -> Array:
        """The score of each run at its newest evaluation up to `frames`."""
        return np.array([_until(run, frames) for run in self.runs])

    @property
    def random_score(self) -> float | None:
        """Mean return of random play over the runs."""
        known = [run.random_score for run in self.runs if run.random_score is not None]
        return float(np.mean(known)) if known else None

    @property
    def published(self) -> Published | None:
        return published(self.task, self.runs[0].agent)

    def curve(self, run: RunRecord) -> tuple[list[int], list[float]]:
        """A run's evaluations; at frame 0 stands random play, which is how a run begins."""
        points = dict(run.evaluations)
        if run.random_score is not None:
            points = {0: run.random_score, **points}
        return list(points), list(points.values())

    def mean_curve(self) -> tuple[list[int], Array] | None:
        """(frames, [runs, frames]) over the evaluations that all runs have; None if too few."""
        start = self.random_score is not None and 0 not in self.frames
        rows = []
        for run in self.runs:
            first = [run.random_score if run.random_score is not None else self.random_score]
            values = [run.evaluations[at] for at in self.frames]
            rows.append([*first, *values] if start else values)
        frames = [0, *self.frames] if start else list(self.frames)
        return (frames, np.array(rows, np.float64)) if len(frames) > 1 else None

    def areas(self) -> Array:
        """Mean height of each run's curve up to the frames where the runs are compared."""
        found = []
        for run in self.runs:
            frames, scores = self.curve(run)
            inside = [at <= self.last_frames for at in frames]
            keep = [(at, score) for at, score, ok in zip(frames, scores, inside) if ok]
            found.append(statistics.area_under_curve(*zip(*keep)))
        return np.array(found)

    def summary(self) -> dict[str, Estimate]:
        """The statistics over seeds, each with its interval."""
        best = np.array([max(run.evaluations.values()) for run in self.runs])
        return {
            "last": statistics.estimate(statistics.mean, [self.scores]),
            "iqm": statistics.estimate(statistics.iqm, [self.scores]),
            "best": statistics.estimate(statistics.mean, [best]),
            "area": statistics.estimate(statistics.mean, [self.areas()]),
        }

    def ms_per_agent_step(self) -> float | None:
        """Median over the runs."""
        known = [run.ms_per_agent_step for run in self.runs if run.ms_per_agent_step is not None]
        return float(np.median(known)) if known else None


def _until(run: RunRecord, frames: int) -> float:
    before = [score for at, score in run.evaluations.items() if at <= frames]
    return before[-1] if before else next(iter(run.evaluations.values()))


def fair_frames(groups: Sequence[Group]) -> int:
    """Where groups of one task are compared with each other: the last evaluation of all runs."""
    return Group("", tuple(run for group in groups for run in group.runs)).last_frames


@dataclass(frozen=True)
class Collection:
    """All groups of a report, by task and by method, and what was left out."""

    tasks: Mapping[str, Sequence[Group]]
    methods: Mapping[str, Mapping[str, Any]]
    """Dotted configuration of each method, but for task, seed and tracking, by label; methods that
    were never run on the same task may share one."""
    notes: Sequence[str]
    runs: Sequence[RunRecord]
    """Everything that was read, runs without an evaluation included."""

    def common_tasks(self) -> list[str]:
        """Tasks that every method was run on: only these may be averaged over."""
        labels = set(self.methods)
        return [t for t, groups in self.tasks.items() if {g.label for g in groups} == labels]

    def normalised(self) -> dict[str, Scores]:
        """Per method the scores on the common tasks, on a scale that tasks share.

        DeepMind Control: score / 1000. Other tasks: random play is 0, the best run here is 1.
        """
        found: dict[str, list[Array]] = {label: [] for label in self.methods}
        for task in self.common_tasks():
            at = fair_frames(self.tasks[task])
            low, high = self._scale(task, at)
            for group in self.tasks[task]:
                found[group.label].append((group.scores_at(at) - low) / (high - low))
        return {label: scores for label, scores in found.items() if scores}

    def _scale(self, task: str, frames: int) -> tuple[float, float]:
        if task.startswith("dmc:"):
            return 0.0, DMC_MAXIMUM
        groups = self.tasks[task]
        known = [g.random_score for g in groups if g.random_score is not None]
        scores = np.concatenate([group.scores_at(frames) for group in groups])
        low = float(np.mean(known)) if known else float(scores.min())
        high = float(scores.max())
        return (low, high) if high > low else (low, low + 1.0)


def collect(places: Iterable[Path]) -> Collection:
    """Reads every run among `places` and groups those that have something to show."""
    records, notes = read_runs(places)
    for record in records:
        notes += record.notes
    notes += [record.no_evaluation for record in records if not record.evaluations]
    shown = _newest_per_seed([record for record in records if record.evaluations], notes)
    keys = list(dict.fromkeys(_method(record) for record in shown))
    settings = [_settings(_first(shown, key)) for key in keys]
    played = [{record.task for record in shown if _method(record) == key} for key in keys]
    labels = dict(zip(keys, _labels(settings, played)))
    tasks: dict[str, dict[str, list[RunRecord]]] = {}
    for record in sorted(shown, key=lambda record: record.seed):
        tasks.setdefault(record.task, {}).setdefault(labels[_method(record)], []).append(record)
    groups = {}
    for task, by_label in sorted(tasks.items()):
        found = [Group(label, tuple(runs)) for label, runs in sorted(by_label.items())]
        groups[task] = sorted(found, key=lambda group: -float(group.scores.mean()))
    notes += [note for task in groups.values() for group in task for note in _length_note(group)]
    methods: dict[str, dict[str, Any]] = {}
    for label in sorted(set(labels.values())):
        same = [found for key, found in zip(keys, settings) if labels[key] == label]
        differing = differing_keys(same)
        methods[label] = {**same[0], **dict.fromkeys(differing, BY_TASK)}
        if differing:
            notes.append(f"{label} is not the same on every task: {', '.join(differing)} differ.")
    return Collection(groups, methods, notes, records)


def _first(records: Iterable[RunRecord], key: Method) -> RunRecord:
    return next(record for record in records if _method(record) == key)


def _length_note(group: Group) -> Iterable[str]:
    longer = [run for run in group.runs if max(run.evaluations) > group.last_frames]
    if longer:
        names = ", ".join(f"seed {run.seed}" for run in longer)
        where = f"{group.task}, {group.label}: compared at {group.last_frames:,} frames"
        yield f"{where}, which all seeds have reached; {names} went on."


def _newest_per_seed(records: Iterable[RunRecord], notes: list[str]) -> list[RunRecord]:
    """The same seed twice is no second sample: the newer run counts."""
    kept: dict[tuple[str, Method, int], RunRecord] = {}
    for record in sorted(records, key=lambda record: str(record.facts.get("created_utc"))):
        key = (record.task, _method(record), record.seed)
        if key in kept:
            older = kept[key].path
            same = f"{older} has the seed and configuration of {record.path}"
            notes.append(f"{same}, which is newer: it is left out.")
        kept[key] = record
    return list(kept.values())


def _settings(record: RunRecord) -> dict[str, Any]:
    """The configuration but for the task, the seed and what only watches."""
    own = {"agent_name": record.agent, **record.config}
    apart = ("task", "seed")
    return {k: v for k, v in own.items() if k not in apart and not k.startswith("track.")}


def _method(record: RunRecord) -> Method:
    return tuple(sorted((key, repr(value)) for key, value in _settings(record).items()))


def _labels(methods: Sequence[Mapping[str, Any]], played: Sequence[set[str]]) -> list[str]:
    """A short name for each method: its preset or agent, and what tells it from its like.

    Methods are told apart only where they meet, that is within a task: `played` are the tasks of
    each. Two that never meet may share a name.
    """
    bases = [_preset(method) for method in methods]
    shared = len(set(bases)) == 1  # then what tells them apart is name enough
    found = []
    for place, (base, method) in enumerate(zip(bases, methods)):
        meeting = [
            [m for name, m, tasks in zip(bases, methods, played) if name == base and task in tasks]
            for task in sorted(set[str]().union(*played))
        ]
        differing = list(dict.fromkeys(key for like in meeting for key in differing_keys(like)))
        if not differing:
            found.append(base)
        elif len(differing) <= 2:
            told = [f"{key.rpartition('.')[2]} {show(method.get(key))}" for key in differing]
            found.append(", ".join(told if shared else [base, *told]))
        else:
            found.append(f"{base} {_letter(bases[:place].count(base))}")
    # Two values that read the same once shortened still need two names.
    return [
        f"{name} {_letter(found[:place].count(name))}" if _meet(name, found, played) else name
        for place, name in enumerate(found)
    ]


def _meet(label: str, labels: Sequence[str], played: Sequence[set[str]]) -> bool:
    """Whether two methods of this name were run on the same task."""
    tasks = [task for name, own in zip(labels, played) if name == label for task in own]
    return len(tasks) > len(set(tasks))


def _letter(index: int) -> str:
    """A, B, ..., Z, A1, B1, ..."""
    return chr(ord("A") + index % 26) + (str(index // 26) if index >= 26 else "")


def printable(text: str) -> str:
    """Text without characters that would steer a terminal or break a picture."""
    return "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text
    )


def show(value: Any, width: int = 24) -> str:
    """A value of a configuration as YAML writes it, cut to a width that a column has."""
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    text = printable(text)
    return text if len(text) <= width else f"{text[: width - 1]}…"


def differing_keys(methods: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys that are not the same in all of them, absent ones included."""
    keys = dict.fromkeys(key for method in methods for key in method)
    absent = object()
    return [key for key in keys if len({repr(method.get(key, absent)) for method in methods}) > 1]


def _preset(method: Mapping[str, Any]) -> str:
    """The preset whose values for the agent all are the method's, or else the agent's name."""
    agent, best = str(method["agent_name"]), ""
    size = 1  # one value alone, such as a switch that is off, names no method
    for name in presets.names():
        try:
            layer = flatten(presets.for_agent(name, agent))
        except ConfigError:  # a preset for other agents
            continue
        wanted = {key: value for key, value in layer.items() if key.startswith("agent.")}
        if len(wanted) > size and all(method.get(key) == wanted[key] for key in wanted):
            best, size = name, len(wanted)
    if not best:
        return agent
    return best if best.startswith(agent) else f"{agent} {best}"
