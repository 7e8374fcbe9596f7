"""The report: one self-contained page that answers first and explains after.

Nothing is loaded from elsewhere and nothing runs: styles and pictures stand in the page, and its
colours follow the reader's light or dark setting. Every word that comes from a run is escaped.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from forethought.config import ConfigError, ForethoughtError
from forethought.files import FileError, write_bytes_atomic, write_text_atomic
from forethought.report import curves, statistics
from forethought.report.groups import (
    Collection,
    Group,
    collect,
    fair_frames,
    not_comparable,
    of_control,
)
from forethought.report.methods import brief_commits, differing_keys, show
from forethought.report.published import Published
from forethought.report.runs import RunRecord
from forethought.report.statistics import Estimate, Scores, number

STYLE = Path(__file__).with_name("page.css")
ABSENT = "-"
MEANINGS = {
    "last evaluation": "mean over seeds of the score at the last evaluation that all seeds have",
    "IQM": "the same without the lowest and the highest quarter of the seeds, rounded down: of "
    "fewer than 4 seeds nothing is cut, and it is the mean",
    "best": "mean over seeds of each seed's best evaluation up to that one",
    "area": "mean height of the learning curve, from random play at frame 0 on",
    "interval": "[low, high] holds 95 % of 2,000 bootstrap resamples of the seeds",
    "ms per step": "milliseconds of wall time per agent step in a row of train.csv, evaluations "
    "and checkpoints between two rows included; the median over the rows in which the agent "
    "learned",
}


def write_report(places: Iterable[Path], out: Path) -> str:
    """Writes the page (FILE.html) or the learning curves alone (FILE.png); returns a sentence."""
    kind = out.suffix.lower()
    if kind not in (".html", ".htm", ".png"):
        raise ConfigError(f"out is {out}, but must end in .html or .png.")
    if not out.parent.is_dir():
        raise FileError(f"There is no folder {out.parent} to write {out.name} to.")
    collection = collect(places)
    if not collection.tasks:
        raise ForethoughtError(" ".join(["There is nothing to report yet.", *collection.notes]))
    if kind == ".png":
        write_bytes_atomic(out, curves.png(curves.learning_curves(collection)))
    else:
        write_text_atomic(out, page(collection))
    shown = sum(len(group.runs) for groups in collection.tasks.values() for group in groups)
    runs = "1 run" if shown == 1 else f"{shown} runs"
    notes = "".join(f"\n{note}" for note in collection.notes)
    return f"Written: {out} ({runs}){notes}"


def page(collection: Collection) -> str:
    """The whole page."""
    tasks = ", ".join(collection.tasks)
    body = [
        f"<h1>{escape(_title(collection))}</h1>",
        _answers(collection),
        *(_task_section(collection, task) for task in collection.tasks),
        _over_tasks(collection),
        _differences(collection.methods),
        _runs_table(collection.runs),
        _warnings(collection),
        _meanings(),
    ]
    head = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(tasks)}: forethought report</title>\n"
        f"<style>\n{STYLE.read_text(encoding='utf-8')}</style>\n</head>\n<body>\n<main>\n"
    )
    return head + "\n".join(part for part in body if part) + "\n</main>\n</body>\n</html>\n"


def _title(collection: Collection) -> str:
    tasks = list(collection.tasks)
    agents = sorted({run.agent for run in collection.runs})
    where = tasks[0] if len(tasks) == 1 else f"{len(tasks)} tasks"
    return f"{' and '.join(agents)} on {where}"


def _answers(collection: Collection) -> str:
    cards = [_answer(group) for groups in collection.tasks.values() for group in groups]
    return f'<div class="answers">\n{"".join(cards)}</div>'


def _answer(group: Group) -> str:
    """The score, its interval, and what it stands beside."""
    score = statistics.estimate(statistics.mean, [group.scores])
    seeds = "1 seed" if len(group.runs) == 1 else f"{len(group.runs)} seeds"
    if score.low is not None and score.high is not None:
        spread = f"95 % interval {number(score.low)} to {number(score.high)}, {seeds}"
    else:
        spread = f"{seeds}, so no interval"
    beside = [f"after {group.last_frames:,} {group.unit}"]
    if group.random_score is not None:
        beside.append(f"random play {number(group.random_score)}")
    if group.published is not None:
        frames, value = group.published.at(group.last_frames)
        at = "" if frames == group.last_frames else f" at {frames:,} frames"
        beside.append(f"{group.published.label} {number(value)}{at}")
    if group.held_otherwise is not None:
        beside.append(group.held_otherwise)
    return (
        f'<section class="answer"><p class="where">{escape(group.task)}<br>'
        f"<b>{escape(group.label)}</b></p>"
        f'<p class="score">{number(score.value)}</p><p class="spread">{spread}</p>'
        f'<p class="beside">{"<br>".join(map(escape, beside))}</p></section>\n'
    )


def _task_section(collection: Collection, task: str) -> str:
    groups = collection.tasks[task]
    # Of one run it is that run's number: "seeds 2" would be read as two of them.
    seeds = "seed" if all(len(group.seeds) == 1 for group in groups) else "seeds"
    header = ("runs", seeds, groups[0].unit, *list(MEANINGS)[:4], "random play", "ms per step")
    rows = []
    for group in groups:
        found = group.summary()
        speed = group.ms_per_agent_step()
        rows.append(
            [
                group.label,
                ", ".join(map(str, group.seeds)),
                f"{group.last_frames:,}",
                *(str(found[key]) for key in ("last", "iqm", "best", "area")),
                ABSENT if group.random_score is None else number(group.random_score),
                ABSENT if speed is None else f"{speed:.1f}",
            ]
        )
    picture = _picture(
        curves.svg(curves.learning_curves(collection, task)),
        f"Learning curves on {task}: " + "; ".join(f"{row[0]} {row[3]}" for row in rows),
    )
    papers = {group.published for group in groups if group.published is not None}
    told = sorted(_source(paper) for paper in papers)
    source = "".join(f'<p class="note">{escape(text)}</p>' for text in told)
    table = f"{_table(header, rows, 'numbers')}{_normalised(groups)}"
    return f"<h2>{escape(task)}</h2>\n{picture}{source}\n{table}"


def _normalised(groups: Sequence[Group]) -> str:
    """Of several tasks in one agent: the score of each, and their mean."""
    found = [group.normalised() for group in groups]
    tasks = list(dict.fromkeys(task for own in found for task in own))
    if not tasks:
        return ""

    def cell(own: Mapping[str, statistics.Array], names: Sequence[str]) -> str:
        scores = [own[name].mean() for name in names if name in own]
        return number(float(sum(scores) / len(scores))) if len(scores) == len(names) else ABSENT

    rows = [[task, *(cell(own, [task]) for own in found)] for task in tasks]
    rows.append(["mean over tasks", *(cell(own, tasks) for own in found)])
    told = "Normalised scores at the last evaluation, from 0 to 100: return / 10 in DeepMind "
    told += "Control, else successes in percent."
    table = _table(("task", *(group.label for group in groups)), rows, "numbers")
    return f"{_note(told)}\n{table}"


def _source(paper: Published) -> str:
    low, high = min(paper.seeds), max(paper.seeds)
    seeds = f"{high}" if low == high else f"{low} to {high}"
    named = f"The {paper.label}" if paper.label.startswith("published") else paper.label
    return f"{named}: mean of {seeds} seeds, {paper.source}."


def _over_tasks(collection: Collection) -> str:
    """How the methods compare over the tasks that every method was run on, or why they do not; then
    task by task those that are not averaged."""
    parts, averaged = [], len(collection.tasks) > 1 and len(collection.scales) > 1
    if len(collection.tasks) > 1:
        parts.append("<h2>Over all tasks</h2>")
        notes = [] if averaged else [_note(text) for text in _no_average(collection)]
        parts += [_aggregates(collection)] if averaged else notes
    several = [
        task
        for task, groups in collection.tasks.items()
        if len(groups) > 1 and not (averaged and task in collection.scales)
    ]
    if several:
        parts.append("<h2>Between the groups</h2>")
    return "\n".join([*parts, *(_between(collection, task) for task in several)])


def _no_average(collection: Collection) -> list[str]:
    common = collection.common_tasks()
    if len(common) > 1:
        first = "Nothing is averaged over tasks, for fewer than two of them can be:"
        return [first, *collection.not_averaged]
    which = f"only {common[0]} was" if common else "none was"
    return [f"Nothing is averaged over tasks: of the tasks here, {which} run with every group."]


def _between(collection: Collection, task: str) -> str:
    """The groups of one task, where all of them were evaluated."""
    groups = collection.tasks[task]
    at = fair_frames(groups)
    if at is None:
        return _note(not_comparable(groups))
    scores = {group.label: [group.scores_at(at)] for group in groups}
    pictures = _pictures(scores, "return", list(collection.methods))
    return "\n".join([_note(f"{task} at {at:,} {groups[0].unit}."), *pictures])


def _pictures(scores: Mapping[str, Scores], unit: str, methods: Sequence[str]) -> list[str]:
    """Profiles and chances; `methods` are all of the page, so that each keeps its colour."""
    found = [_picture(curves.svg(curves.profiles(scores, unit, methods)), "Performance profiles")]
    pairs = improvements(scores)
    if pairs:
        found.append(_picture(curves.svg(curves.improvements(pairs)), "Probability of improvement"))
    return found


def _aggregates(collection: Collection) -> str:
    scores = collection.normalised()
    measures = {
        "mean": statistics.mean,
        "median": statistics.median,
        "IQM": statistics.iqm,
        "optimality gap": statistics.optimality_gap,
    }
    rows = [
        [label, *(str(statistics.estimate(measure, own)) for measure in measures.values())]
        for label, own in scores.items()
    ]
    places = [
        f"{task} at {own.frames:,} {collection.tasks[task][0].unit}"
        for task, own in collection.scales.items()
    ]
    notes = [f"Normalised scores on {', '.join(places)}: {_scale(list(collection.scales))}."]
    notes += [f"Left out of the average: {text}" for text in collection.not_averaged]
    for label, own in scores.items():
        single = [task for task, runs in zip(collection.scales, own) if len(runs) == 1]
        if single:
            notes.append(f"{label} has no interval, for it has one run of {', '.join(single)}.")
    if len({len(runs) for own in scores.values() for runs in own}) > 1:
        notes.append("The tasks have different numbers of runs; every task has the same weight.")
    table = _table(("runs", *measures), rows, "numbers")
    pictures = _pictures(scores, "normalised score", list(collection.methods))
    return "\n".join([*map(_note, notes), table, *pictures])


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def improvements(scores: Mapping[str, Scores]) -> dict[tuple[str, str], Estimate]:
    """For each pair with several runs on both sides: how likely the better one beats the other."""
    found = {}
    several = [label for label, tasks in scores.items() if min(map(len, tasks)) > 1]
    for pair in itertools.combinations(several, 2):
        x, y = (scores[label] for label in pair)
        if statistics.probability_of_improvement(x, y) < 0.5:
            pair, x, y = (pair[1], pair[0]), y, x
        found[pair] = statistics.estimate(statistics.probability_of_improvement, x, y)
    return found


def _scale(tasks: Sequence[str]) -> str:
    control = [of_control(task) for task in tasks]
    words = ["dmc tasks by their greatest return, 1000"] if any(control) else []
    if not all(control):
        others = "other tasks " if words else ""
        words.append(f"{others}from random play (0) to the best run here (1)")
    return "; ".join(words)


def _differences(methods: Mapping[str, Mapping[str, object]]) -> str:
    """The keys in which the groups differ; a value that is not the first group's is marked."""
    keys = differing_keys(list(methods.values()))
    if len(methods) < 2:
        return ""
    first = next(iter(methods.values()))
    rows = []
    for key in keys:
        cells = [f"<th scope=row>{escape(key)}</th>"]
        for method in methods.values():
            text = show(method[key], 60) if key in method else ABSENT
            same = (key in method, method.get(key)) == (key in first, first.get(key))
            cells.append(f"<td>{escape(text) if same else f'<mark>{escape(text)}</mark>'}</td>")
        rows.append(f"<tr>{''.join(cells)}</tr>")
    header = "".join(f"<th>{escape(label)}</th>" for label in ("key", *methods))
    table = f"<table><thead><tr>{header}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f'<h2>What differs</h2>\n<div class="wide">{table}</div>'


def _runs_table(runs: Sequence[RunRecord]) -> str:
    header = ("run", "task", "seed", "status", "frames", "last", "tags", "commit", "versions")
    rows = []
    for run in runs:
        last = list(run.evaluations.values())[-1:]
        rows.append(
            [
                str(run.path),
                run.task,
                str(run.seed),
                str(run.facts["status"]),
                f"{run.env_frames:,}" + ("" if run.unit == "frames" else f" {run.unit}"),
                number(last[0]) if last else ABSENT,
                ", ".join(map(str, run.facts["tags"])) or ABSENT,
                show(brief_commits(str(run.facts.get("git_commit") or ABSENT))),
                ", ".join(f"{name} {version}" for name, version in run.versions.items()) or ABSENT,
            ]
        )
    return f"<h2>Runs</h2>\n{_table(header, rows)}"


def _warnings(collection: Collection) -> str:
    found = [f"{run.path}: {words}" for run in collection.runs for words in run.warnings]
    if not found and not collection.notes:
        return ""
    lines = "".join(f"<li>{escape(line)}</li>" for line in [*collection.notes, *found])
    return f'<h2>Worth knowing</h2>\n<ul class="warnings">{lines}</ul>'


def _meanings() -> str:
    lines = "".join(f"<dt>{word}</dt><dd>{text}</dd>" for word, text in MEANINGS.items())
    return f"<h2>What the numbers mean</h2>\n<dl>{lines}</dl>"


def _picture(svg: str, words: str) -> str:
    return f'<figure role="img" aria-label="{escape(words)}">\n{svg}</figure>\n'


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "words") -> str:
    """A table of plain text; the first cell of a row names it."""
    head = "".join(f"<th>{escape(word)}</th>" for word in header)
    lines = []
    for name, *cells in rows:
        rest = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        broken = escape(name).replace("/", "/<wbr>")  # a path breaks between folders, not in a name
        lines.append(f"<tr><th scope=row>{broken}</th>{rest}</tr>")
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    return f'<div class="wide {kind}">{table}</div>'
