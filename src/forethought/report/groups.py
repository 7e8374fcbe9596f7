"""Groups of runs that differ only by their seed, and the numbers that a person asks of them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forethought.envs import multi
from forethought.report import statistics
from forethought.report.methods import Method, differing_keys, method_of, names, settings
from forethought.report.published import Published, published
from forethought.report.runs import RunRecord, read_runs
from forethought.report.statistics import Array, Estimate, Scores, number

BY_TASK = "by task"
"""Stands for a value that a method has otherwise on another task."""
DMC_MAXIMUM = 1000.0
"""Rewards of DeepMind Control are at most 1 in each of an episode's 1000 frames."""
NEAR = 0.01
"""Evaluations this close count as at the same frames: three environments that step together are
evaluated at 25,002 frames where one is at 25,000."""
CLEAR = 0.1
"""How far the best run must be above random play to set a scale, as a share of the largest of the
returns involved: less is within the noise of an evaluation, and every other run would be a huge
number of such noises."""


@dataclass(frozen=True)
class Group:
    """Runs of one task and one configuration that were all evaluated at some same frames."""

    label: str
    runs: tuple[RunRecord, ...]

    @property
    def task(self) -> str:
        return self.runs[0].task

    @property
    def unit(self) -> str:
        """What `frames` are here: of offline runs, updates."""
        return self.runs[0].unit

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(run.seed for run in self.runs)

    @functools.cached_property
    def frames(self) -> tuple[int, ...]:
        """The env_frames at which every run was evaluated."""
        return tuple(sorted(set.intersection(*(set(run.evaluations) for run in self.runs))))

    @functools.cached_property
    def last_frames(self) -> int:
        """Where the runs are compared: the last evaluation that all of them have."""
        found = last_shared(self.runs)
        if found is None:
            raise ValueError(f"{self.label}: runs without a common evaluation are no group.")
        return found

    @property
    def scores(self) -> Array:
        """The score of each run there."""
        return self.scores_at(self.last_frames)

    def scores_at(self, frames: int) -> Array:
        """The score of each run at these frames, where each must have been evaluated."""
        found = [score_at(run, frames) for run in self.runs]
        if None in found:
            raise ValueError(
                f"{self.label}: not every run was evaluated at {frames:,} {self.unit}."
            )
        return np.array(found, np.float64)

    @property
    def random_score(self) -> float | None:
        """Mean return of random play over the runs."""
        known = [run.random_score for run in self.runs if run.random_score is not None]
        return float(np.mean(known)) if known else None

    @property
    def published(self) -> Published | None:
        return published(self.task, self.runs[0].agent, self.runs[0].config)

    @property
    def held_otherwise(self) -> str | None:
        """What to remember beside the published curve where its agents decide more or less often;
        None where they do not, or there is none."""
        own, paper = self.runs[0].config.get("env.action_repeat"), self.published
        if paper is None or paper.action_repeat is None or own in (None, paper.action_repeat):
            return None
        return f"actions held for {own} frames here, for {paper.action_repeat} in published runs"

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
        best = np.array([max(self._up_to_there(run)) for run in self.runs])
        return {
            "last": statistics.estimate(statistics.mean, [self.scores]),
            "iqm": statistics.estimate(statistics.iqm, [self.scores]),
            "best": statistics.estimate(statistics.mean, [best]),
            "area": statistics.estimate(statistics.mean, [self.areas()]),
        }

    def _up_to_there(self, run: RunRecord) -> list[float]:
        """A run's scores up to where the runs are compared: one that went on has no better best."""
        return [score for at, score in run.evaluations.items() if at <= self.last_frames]

    def normalised(self) -> dict[str, Array]:
        """Of several tasks: each one's scores from 0 to 100 where the runs are compared, by name;
        only of tasks and runs that have them."""
        rows = [run.normalised.get(_evaluated_at(run, self.last_frames), {}) for run in self.runs]
        names = dict.fromkeys(name for row in rows for name in row)
        return {name: np.array([row[name] for row in rows if name in row]) for name in names}

    def ms_per_agent_step(self) -> float | None:
        """Median over the runs."""
        known = [run.ms_per_agent_step for run in self.runs if run.ms_per_agent_step is not None]
        return float(np.median(known)) if known else None


def score_at(run: RunRecord, frames: int) -> float | None:
    """The run's score at these frames; None where it was not evaluated there, or close before.

    An earlier evaluation says nothing about these frames, and a later one even less.
    """
    at = _evaluated_at(run, frames)
    return run.evaluations[at] if at >= 0 else None


def _evaluated_at(run: RunRecord, frames: int) -> int:
    """Where the run was evaluated at these frames or close before; -1 where it was not."""
    before = [at for at in run.evaluations if frames * (1 - NEAR) <= at <= frames]
    return before[-1] if before else -1


def last_shared(runs: Sequence[RunRecord]) -> int | None:
    """The last frames at which every one of these runs was evaluated, if there are any."""
    every = sorted({at for run in runs for at in run.evaluations}, reverse=True)
    everywhere = (at for at in every if all(score_at(run, at) is not None for run in runs))
    near = next(everywhere, None)
    exact = max(set.intersection(*(set(run.evaluations) for run in runs)), default=None)
    if near is not None and exact is not None and exact >= near * (1 - NEAR):
        return exact
    return near


def make_group(label: str, runs: Sequence[RunRecord], notes: list[str]) -> Group:
    """A group of the runs that can be compared; the others are left out, with a note for each."""
    if last_shared(runs) is None:
        every = sorted({at for run in runs for at in run.evaluations})
        # The frames that most runs have, and of these the last.
        counts = [(sum(score_at(run, at) is not None for run in runs), at) for at in every]
        _, frames = max(counts)
        for run in runs:
            if score_at(run, frames) is None:
                where = f"not at the {frames:,} of the rest of {label}"
                notes.append(
                    f"{run.path} was evaluated at {_span([run])}, {where}: it is left out."
                )
        runs = [run for run in runs if score_at(run, frames) is not None]
    return Group(label, tuple(runs))


def fair_frames(groups: Sequence[Group]) -> int | None:
    """Where groups of one task are compared with each other: the last evaluation of all runs.

    None if there is no such place: then they cannot be compared.
    """
    return last_shared([run for group in groups for run in group.runs])


def not_comparable(groups: Sequence[Group]) -> str:
    """The sentence for groups that have no common evaluation."""
    spans = "; ".join(f"{group.label} at {_span(group.runs)}" for group in groups)
    why = f"not comparable, for they were never evaluated at the same {groups[0].unit}"
    return f"{groups[0].task}: {why} ({spans})."


def _span(runs: Sequence[RunRecord]) -> str:
    every = {at for run in runs for at in run.evaluations}
    low, high = min(every), max(every)
    unit = runs[0].unit
    return f"{low:,} {unit}" if low == high else f"{low:,} to {high:,} {unit}"


def between_notes(groups: Sequence[Group]) -> list[str]:
    """What a reader must know who sees the numbers of these groups side by side."""
    at = fair_frames(groups)
    if at is None:
        return [not_comparable(groups)]
    longer = [group for group in groups if group.last_frames * (1 - NEAR) > at]
    if not longer:
        return []
    told = ", ".join(f"{group.label} (to {group.last_frames:,})" for group in longer)
    who = " and ".join(group.label for group in groups) if len(groups) < 3 else "the groups"
    where = f"{groups[0].task}: {who} are compared with each other at {at:,} {groups[0].unit}"
    return [f"{where}, the last that all were evaluated at; {told} went on."]


@dataclass(frozen=True)
class Scale:
    """Where a task's groups are compared, and the returns that are 0 and 1 there."""

    frames: int
    low: float
    high: float


def of_control(task: str) -> bool:
    """Whether a task is one of DeepMind Control, or several of them together."""
    names = task.removeprefix(multi.PREFIX).split(",")
    return all(name.strip().startswith("dmc:") for name in names)


def scale(task: str, groups: Sequence[Group]) -> Scale | str:
    """How a task's returns become scores that tasks share; a sentence where they cannot.

    DeepMind Control: return / 1000. Other tasks: random play is 0, the best run here is 1.
    """
    at = fair_frames(groups)
    if at is None:
        return not_comparable(groups)
    if of_control(task):
        return Scale(at, 0.0, DMC_MAXIMUM)
    known = [group.random_score for group in groups if group.random_score is not None]
    if not known:
        return f"{task}: no run has measured random play, which would be 0."
    scores = np.concatenate([group.scores_at(at) for group in groups])
    if len(scores) == 1:
        return f"{task}: its only run is the best one here, so it would be 1 whatever it reached."
    low, high, worst = float(np.mean(known)), float(scores.max()), float(scores.min())
    if high - low <= CLEAR * max(abs(low), abs(high), abs(worst)):
        told = f"the best run here ({number(high)}) is not clearly above random play"
        return f"{task}: {told} ({number(low)}), so the two are no scale."
    return Scale(at, low, high)


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

    @functools.cached_property
    def _scales(self) -> dict[str, Scale | str]:
        return {task: scale(task, self.tasks[task]) for task in self.common_tasks()}

    @property
    def scales(self) -> dict[str, Scale]:
        """The common tasks that can be averaged over, and how."""
        return {task: own for task, own in self._scales.items() if isinstance(own, Scale)}

    @property
    def not_averaged(self) -> list[str]:
        """A sentence for each common task that cannot."""
        return [own for own in self._scales.values() if isinstance(own, str)]

    def normalised(self) -> dict[str, Scores]:
        """Per method the scores on the tasks of `scales`, in their order."""
        found: dict[str, list[Array]] = {label: [] for label in self.methods}
        for task, own in self.scales.items():
            for group in self.tasks[task]:
                scores = (group.scores_at(own.frames) - own.low) / (own.high - own.low)
                found[group.label].append(scores)
        return {label: scores for label, scores in found.items() if scores}


def collect(places: Iterable[Path]) -> Collection:
    """Reads every run among `places` and groups those that have something to show."""
    records, notes = read_runs(places)
    for record in records:
        notes += record.notes
    notes += [record.no_evaluation for record in records if not record.evaluations]
    shown = one_per_seed([record for record in records if record.evaluations], notes)
    keys = list(dict.fromkeys(method_of(record) for record in shown))
    found = [settings(_first(shown, key)) for key in keys]
    played = [{record.task for record in shown if method_of(record) == key} for key in keys]
    labels = dict(zip(keys, names(found, played)))
    tasks: dict[str, dict[str, list[RunRecord]]] = {}
    for record in sorted(shown, key=lambda record: record.seed):
        tasks.setdefault(record.task, {}).setdefault(labels[method_of(record)], []).append(record)
    groups = {}
    for task, by_label in sorted(tasks.items()):
        own = [make_group(label, runs, notes) for label, runs in sorted(by_label.items())]
        groups[task] = sorted(own, key=lambda group: -float(group.scores.mean()))
        notes += [note for group in groups[task] for note in _length_note(group)]
        notes += between_notes(groups[task])
    methods: dict[str, dict[str, Any]] = {}
    for label in sorted(set(labels.values())):
        same = [own for key, own in zip(keys, found) if labels[key] == label]
        differing = differing_keys(same)
        methods[label] = {**same[0], **dict.fromkeys(differing, BY_TASK)}
        if differing:
            notes.append(f"{label} is not the same on every task: {', '.join(differing)} differ.")
    return Collection(groups, methods, notes, records)


def _first(records: Iterable[RunRecord], key: Method) -> RunRecord:
    return next(record for record in records if method_of(record) == key)


def _length_note(group: Group) -> Iterable[str]:
    longer = [run for run in group.runs if max(run.evaluations) * (1 - NEAR) > group.last_frames]
    if longer:
        seeds = ", ".join(f"seed {run.seed}" for run in longer)
        where = f"{group.task}, {group.label}: compared at {group.last_frames:,} {group.unit}"
        yield f"{where}, which all seeds have reached; {seeds} went on."


def one_per_seed(records: Iterable[RunRecord], notes: list[str]) -> list[RunRecord]:
    """The same seed twice is no second sample: the run that went further counts, and of equal ones
    the newer."""

    def order(record: RunRecord) -> tuple[int, str]:
        return max(record.evaluations), str(record.facts.get("created_utc"))

    kept: dict[tuple[str, Method, int], RunRecord] = {}
    for record in sorted(records, key=order):
        key = (record.task, method_of(record), record.seed)
        if key in kept:
            other = kept[key]
            further = max(record.evaluations) > max(other.evaluations)
            same = f"{other.path} has the seed and configuration of {record.path}"
            why = "went further" if further else "is newer"
            notes.append(f"{same}, which {why}: it is left out.")
        kept[key] = record
    return list(kept.values())
