"""The command line. Each verb reads its options and calls one function of a room above.

`train` is read in two passes. The first finds the agent, the presets, the file and the selectors
(`--replay transitions`, `--agent.schedule cosine`), the second reads the flags of what was
selected, so that a flag exists only where it means something. tyro draws the help from the
docstrings of the fields.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from forethought import cli_data, commands, presets
from forethought import config as conf
from forethought.agents import registry
from forethought.commands import Verb, playing, table_console
from forethought.config import ConfigError, ForethoughtError
from forethought.presets import flags, help
from forethought.training.signals import AS_IT_WAS, NOT_BEGUN, Stop

if TYPE_CHECKING:
    from forethought.training.evaluate import EvalResult

SHOWN_FAILURES = 3
"""Sentences of episodes that failed, at most, below a summary."""


@dataclass(frozen=True)
class TrainOptions:
    """Flags of train besides those of the run's configuration."""

    preset: tuple[str, ...] = ()
    """A named set of values; may be repeated, later ones win ('forethought list presets')."""
    config: str | None = None
    """A YAML file of values, such as the config.yaml of a run; wins over presets."""
    out: str | None = None
    """The run directory; None makes runs/<task>/<agent>/<seed>-<time>."""


@dataclass(frozen=True)
class ResumeOptions:
    """Flags of resume."""

    steps: int | None = None
    """New total length of the run in agent steps, or updates if it learns from recorded
    data; None keeps the one it was started with."""
    override: bool = False
    """Accept changes that were made in the run's config.yaml."""


@dataclass(frozen=True)
class EvaluateOptions:
    """Flags of evaluate."""

    policy: str | None = None
    """Who plays: None is the run's agent; a task alone is played by 'random'."""
    episodes: int | None = None
    """Episodes to play, 10 unless a protocol says otherwise; they start otherwise than those of the
    evaluations during training, so their score differs from the one that train told last."""
    protocol: Literal["nature", "dopamine"] | None = None
    """A published way to evaluate in atari: tasks (docs/atari.md); None is that of the run, if it
    has one, of which --episodes change only how much is played."""
    checkpoint: str | None = None
    """Which checkpoint of the run: latest (None), best, or a number of agent steps (of updates,
    offline)."""
    seed: int | None = None
    """Seed of the episodes; None is the run's own, or 1 for a task."""
    device: str | None = None
    """Where the agent computes: auto (None), cpu, cuda, cuda:N or mps."""
    json: bool = False
    """Print everything as one line of JSON, single episodes included."""


@dataclass(frozen=True)
class WatchOptions:
    """Flags of watch."""

    video: str | None = None
    """The file to write, .mp4 or .gif; None shows the agent in a window (gym tasks only)."""
    episodes: int = 1
    """Episodes to play, one after the other."""
    checkpoint: str = "latest"
    """Which checkpoint of the run: latest, best, or a number of agent steps (of updates,
    offline)."""
    seed: int | None = None
    """Seed of the episodes; None is the run's own."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps."""
    task: str | None = None
    """Which one to show, where the run has several tasks (multi:); None is the first."""


@dataclass(frozen=True)
class CompareOptions:
    """Flags of compare."""

    all: bool = False
    """Show every key, not only those that differ."""
    json: bool = False
    """Print everything as one line of JSON."""


@dataclass(frozen=True)
class ReportOptions:
    """Flags of report."""

    out: str = "report.html"
    """The file to write, in place of an older one: FILE.html is the whole page, FILE.png the
    learning curves alone."""


@dataclass(frozen=True)
class ImportOptions:
    """Flags of import-tdmpc2 besides those of the run's configuration, which are as in train."""

    task: str | None = None
    """The task that the checkpoint was trained on, such as dmc:cheetah-run; must be given."""
    out: str | None = None
    """The run directory; None makes runs/<task>/tdmpc2/<seed>-<time>."""
    preset: tuple[str, ...] = ()
    """A named set of values; may be repeated, later ones win ('forethought list presets')."""
    config: str | None = None
    """A YAML file of values, such as the config.yaml of a run; wins over presets."""


@dataclass(frozen=True)
class ExportOptions:
    """Flags of export-tdmpc2."""

    out: str | None = None
    """The file to write, such as agent.pt; must be given."""
    checkpoint: str = "latest"
    """Which checkpoint of the run: latest, best, or a number of agent steps (of updates,
    offline)."""


@dataclass(frozen=True)
class DoctorOptions:
    """Flags of doctor."""

    json: bool = False
    """Print everything as one line of JSON."""


@dataclass(frozen=True)
class ListOptions:
    """list has no flags."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; what a person can cause is one sentence."""
    tokens = list(sys.argv[1:] if argv is None else argv)
    code = 0
    _warn_in_sentences()
    try:
        if tokens[:1] == ["--version"]:
            from importlib.metadata import version

            print(version("forethought"))
            return 0
        code = commands.carry_out(tokens, VERBS)
        sys.stdout.flush()  # here, where a reader that left can still be met
        return code
    except ForethoughtError as error:
        # A note is the traceback of an error in code that is not ours, such as an environment's.
        print(error, *getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # 'forethought list tasks | head': the reader left, which is fine
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code
    except OSError as error:
        if error.filename is None or hasattr(error, "__notes__"):
            raise  # nothing that a person named, or in the middle of a training
        print(f"{error.filename} cannot be used: {error.strerror}.", file=sys.stderr)
        return 1


def _warn_in_sentences() -> None:
    """Warnings are the sentence alone, also after a library has logged by itself: then Python would
    put level and logger before every sentence of ours."""
    root = logging.getLogger()
    if not root.handlers and logging.lastResort is not None:
        root.addHandler(logging.lastResort)


def _train(tokens: list[str]) -> int:
    asked = training_asked(tokens)
    if isinstance(asked, int):
        return asked
    config, out = asked
    with Stop(NOT_BEGUN):  # importing torch takes seconds
        from forethought.training.loop import train_run

    return train_run(config, out=out).exit_code


def training_asked(tokens: list[str]) -> tuple[conf.RunConfig, Path | None] | int:
    """What the words behind `forethought train` mean: the whole configuration, and the run's place
    where one was named; an exit code where they asked for help."""
    agent_name = _agent_in(tokens)
    if agent_name is None:
        if _wants_help(tokens):
            run = conf.RunConfig(agent_name="AGENT", task="TASK", agent=None)
            return _show_help("train", "AGENT TASK", [TrainOptions(), run])
        raise ConfigError("train needs an agent and a task: forethought train AGENT TASK.")
    found = commands.read_run_flags(
        tokens,
        agent_name,
        TrainOptions,
        lambda options: _show_help("train", f"{agent_name} TASK", options),
    )
    if isinstance(found, int):
        return found
    words = found.words
    if len(words) != 2 or words[0] != agent_name:
        raise ConfigError(
            f"train takes an agent and a task, first of all (forethought train {agent_name} TASK), "
            f"but was given: {' '.join(words)}."
        )
    agent_class = registry.config_class(agent_name)
    config = conf.build_run_config(agent_name, words[1], agent_class, found.layers)
    conf.refuse_idle_groups(config, found.file, found.flags)
    out = found.own.get("out")
    return config, Path(out) if out else None


def _resume(tokens: list[str]) -> int:
    if _wants_help(tokens):
        return _show_help("resume", "RUN", [ResumeOptions()])
    run, options = _one_word("resume", tokens, ResumeOptions)
    if options.steps is not None:
        conf.require(options.steps >= 1, "steps", options.steps, "at least 1")
    with Stop(AS_IT_WAS):
        from forethought.training.loop import resume_run

    return resume_run(Path(run), steps=options.steps, override=options.override).exit_code


def _evaluate(tokens: list[str]) -> int:
    if _wants_help(tokens):
        return _show_help("evaluate", "RUN|TASK", [EvaluateOptions()])
    target, options = _one_word("evaluate", tokens, EvaluateOptions)
    commands.check_play(options.episodes, options.seed, options.device)
    from forethought.training.evaluate import evaluate_target

    with playing() as tell:
        result = evaluate_target(
            target,
            policy=options.policy,
            episodes=options.episodes,
            protocol=options.protocol,
            checkpoint=options.checkpoint,
            seed=options.seed,
            device=options.device,
            tell=tell,
        )
    print(json.dumps(result.to_json()) if options.json else _summary(result))
    return 0


def _summary(result: EvalResult) -> str:
    """An evaluation in the lines that a person wants."""
    found = result.statistics()
    played = found.pop("episodes")
    told = f"{result.task}, {result.player}, {played} {'episode' if played == 1 else 'episodes'}"
    told += "" if result.protocol is None else f", protocol {result.protocol}"
    lines = [told + (f", epsilon {result.epsilon:g}" if result.epsilon else "")]
    shown = {key: value for key, value in found.items() if value is not None}
    width = max(14, *(len(key) + 1 for key in shown))
    lines += [f"  {key:<{width}}{value:>10.6g}" for key, value in shown.items()]
    if result.tasks:
        lines += ["", f"  {'':<32}{'return_mean':>12}{'normalised_score':>18}"]
        for task, own in (*result.by_task().items(), ("all", result)):
            score = own.normalised_score
            told = "" if score is None else f"{score:.4g}"
            lines.append(f"  {task:<32}{own.mean:>12.6g}{told:>18}")
    failures = list(dict.fromkeys(result.failures))
    lines += [f"Failed: {sentence}" for sentence in failures[:SHOWN_FAILURES]]
    if failures[SHOWN_FAILURES:]:
        lines.append(f"Failed otherwise: {len(failures) - SHOWN_FAILURES} more (--json has all).")
    return "\n".join(lines)


def _watch(tokens: list[str]) -> int:
    if _wants_help(tokens):
        return _show_help("watch", "RUN", [WatchOptions()])
    run, options = _one_word("watch", tokens, WatchOptions)
    commands.check_play(options.episodes, options.seed, options.device)
    from forethought.training.watch import watch_run

    video = None if options.video is None else Path(options.video)
    with playing() as tell:
        result = watch_run(
            Path(run),
            video=video,
            episodes=options.episodes,
            checkpoint=options.checkpoint,
            seed=options.seed,
            device=options.device,
            task=options.task,
            tell=tell,
        )
    returns = ", ".join(f"{value:.6g}" for value in result.returns)
    print(f"{result.task}, {result.player}: return {returns}")
    if video is not None:
        print(f"The video is in {video}")
    return 0


def _compare(tokens: list[str]) -> int:
    if _wants_help(tokens):
        return _show_help("compare", "RUN RUN...", [CompareOptions()])
    places, given = flags.read(tokens, conf.field_types(CompareOptions))
    options = conf.from_dict(CompareOptions, given)
    from forethought.report.compare import compare, show_comparison

    comparison = compare(places)
    if options.json:
        print(json.dumps(comparison.to_json(), default=str))
    else:
        show_comparison(comparison, table_console(160), options.all)
    return 0


def _report(tokens: list[str]) -> int:
    if _wants_help(tokens):
        return _show_help("report", "RUN...", [ReportOptions()])
    places, given = flags.read(tokens, conf.field_types(ReportOptions))
    options = conf.from_dict(ReportOptions, given)
    if not places:
        raise ConfigError("report takes one or more runs, or folders of runs.")
    from forethought.report.html import write_report

    print(write_report([Path(place) for place in places], Path(options.out)))
    return 0


def _import(tokens: list[str]) -> int:
    found = commands.read_run_flags(
        tokens,
        "tdmpc2",
        ImportOptions,
        lambda options: _show_help("import-tdmpc2", "FILE", options),
    )
    if isinstance(found, int):
        return found
    words = found.words
    if len(words) != 1:
        told = " ".join(words) or "nothing"
        raise ConfigError(f"import-tdmpc2 takes one FILE, but was given: {told}.")
    task, out = found.own.get("task"), found.own.get("out")
    if task is None:
        raise ConfigError("import-tdmpc2 needs the task of the checkpoint: give it with --task.")
    with Stop(NOT_BEGUN):
        from forethought.training.official import import_run

    place = Path(out) if out else None
    imported = import_run(Path(words[0]), task, place, found.layers[:-1], found.flags, found.file)
    print("\n".join(imported.checkpoint.notes + imported.sentences()))
    return 0


def _export(tokens: list[str]) -> int:
    if _wants_help(tokens):
        return _show_help("export-tdmpc2", "RUN", [ExportOptions()])
    run, options = _one_word("export-tdmpc2", tokens, ExportOptions)
    if options.out is None:
        raise ConfigError("export-tdmpc2 needs a file to write: give it with --out.")
    from forethought.training.official import export_run

    out = Path(options.out)
    print("\n".join(export_run(Path(run), out, options.checkpoint).sentences(out)))
    return 0


def _doctor(tokens: list[str]) -> int:
    if _wants_help(tokens):
        return _show_help("doctor", "", [DoctorOptions()])
    _, options = commands.words_and_options("doctor", "", tokens, DoctorOptions, most=0)
    from forethought import doctor

    findings = doctor.examine()
    if options.json:
        print(json.dumps(doctor.to_json(findings)))
    else:
        doctor.show(findings)
    return 0 if doctor.healthy(findings) else 1


def _data(tokens: list[str]) -> int:
    return cli_data.run(tokens)


def _list(tokens: list[str]) -> int:
    what = ("agents", "tasks", "presets")
    if _wants_help(tokens):
        return _show_help("list", "agents|tasks|presets", [ListOptions()])
    kind, _ = _one_word("list", tokens, ListOptions)
    if kind not in what:
        raise conf.unknown("list of", kind, what, f"Choose from {', '.join(what)}.")
    if kind == "agents":
        rows = {name: entry.about for name, entry in registry.AGENTS.items()}
    elif kind == "presets":
        rows = {name: presets.load(name).get("about", "") for name in presets.names()}
    else:
        from forethought.envs import known_tasks

        rows = dict.fromkeys(known_tasks(), "")
    width = max(map(len, rows))
    print("\n".join(f"{name:<{width}}  {about}".rstrip() for name, about in rows.items()))
    return 0


VERBS = {
    "train": Verb("AGENT TASK", "train an agent; with AGENT, --help shows its options too", _train),
    "resume": Verb("RUN", "continue a run exactly where it stopped", _resume),
    "evaluate": Verb("RUN|TASK", "play episodes with a trained agent or a named policy", _evaluate),
    "watch": Verb("RUN", "film the agent of a run, or show it in a window", _watch),
    "compare": Verb("RUN RUN...", "what differs between runs, or folders of runs", _compare),
    "report": Verb("RUN...", "a page of learning curves, beside published ones", _report),
    "data": Verb("record|import|verify|describe", "datasets of recorded episodes", _data),
    "import-tdmpc2": Verb("FILE", "make a run of an official TD-MPC2 checkpoint", _import),
    "export-tdmpc2": Verb("RUN", "write a run's weights as an official checkpoint", _export),
    "list": Verb("agents|tasks|presets", "show what there is", _list),
    "doctor": Verb("", "say what works on this machine, and what to install", _doctor),
}


def _agent_in(tokens: Iterable[str]) -> str | None:
    """The first word that names an agent, or else the first word, which the error will name."""
    words = [token for token in tokens if not token.startswith("-")]
    return next((word for word in words if word in registry.AGENTS), next(iter(words), None))


def _one_word(verb: str, tokens: Sequence[str], options: type[Any]) -> tuple[str, Any]:
    """The single word and the options of a verb."""
    words, found = commands.words_and_options(verb, VERBS[verb].usage, tokens, options)
    return words[0], found


def _wants_help(tokens: Sequence[str]) -> bool:
    return help.wanted(tokens)


def _show_help(verb: str, usage: str, options: list[Any]) -> int:
    return commands.show_help(verb, usage, VERBS[verb], options)
