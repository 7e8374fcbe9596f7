"""The command line. Each verb reads its options and calls one function of a room above.

`train` is read in two passes. The first finds the agent, the presets, the file and the selectors
(`--replay transitions`, `--agent.schedule cosine`), the second reads the flags of what was
selected, so that a flag exists only where it means something. tyro draws the help from the
docstrings of the fields.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, is_dataclass, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from forethought import config as conf
from forethought import presets
from forethought.agents import registry
from forethought.config import ConfigError, ForethoughtError
from forethought.presets import flags

if TYPE_CHECKING:
    from forethought.training.evaluate import EvalResult


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
    """New total length of the run in agent steps; None keeps the one it was started with."""


@dataclass(frozen=True)
class EvaluateOptions:
    """Flags of evaluate."""

    policy: str | None = None
    """Who plays: None is the run's agent; a task alone is played by 'random'."""
    episodes: int = 10
    """Episodes to play."""
    checkpoint: str = "latest"
    """Which checkpoint of the run: latest, best, or a number of agent steps."""
    seed: int | None = None
    """Seed of the episodes; None is the run's own, or 1 for a task."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps."""
    json: bool = False
    """Print everything as one line of JSON, single episodes included."""


@dataclass(frozen=True)
class ListOptions:
    """list has no flags."""


@dataclass(frozen=True)
class Verb:
    """A verb: what follows it, what it is for, and what carries it out."""

    usage: str
    about: str
    run: Callable[[list[str]], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; what a person can cause is one sentence."""
    tokens = list(sys.argv[1:] if argv is None else argv)
    try:
        if not tokens or tokens[0] in ("-h", "--help"):
            return _show_overview(sys.stdout if tokens else sys.stderr)
        if tokens[0] == "--version":
            from importlib.metadata import version

            print(version("forethought"))
            return 0
        if tokens[0] not in VERBS:
            raise conf.unknown("command", tokens[0], VERBS, "'forethought --help' shows all.")
        code = VERBS[tokens[0]].run(tokens[1:])
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
        return 0


def _train(tokens: list[str]) -> int:
    agent_name = _agent_in(tokens)
    if agent_name is None:
        if _wants_help(tokens):
            run = conf.RunConfig(agent_name="AGENT", task="TASK", agent=None)
            return _show_help("train", "AGENT TASK", [TrainOptions(), run])
        raise ConfigError("train needs an agent and a task: forethought train AGENT TASK.")
    agent_class = registry.config_class(agent_name)

    named = flags.values(tokens, ("preset", "config"))
    file = Path(named["config"][-1]) if named["config"] else None
    base = conf.layer({}, *presets.layers(named["preset"], file, agent_name))
    types, selected = flags.select(tokens, agent_class, base)
    types |= conf.field_types(TrainOptions)
    if _wants_help(tokens):
        run = conf.build_run_config(agent_name, "TASK", agent_class, [selected])
        options = TrainOptions(tuple(named["preset"]), named["config"][-1] if file else None)
        return _show_help("train", f"{agent_name} TASK", [options, run])

    words, given = flags.read(tokens, types)
    if len(words) != 2 or words[0] != agent_name:
        raise ConfigError(
            f"train takes an agent and a task, first of all, but was given: {' '.join(words)}."
        )
    out = given.pop("out", None)
    given = {key: value for key, value in given.items() if key not in ("preset", "config")}
    config = conf.build_run_config(
        agent_name, words[1], agent_class, [selected, flags.nested(given)]
    )
    from forethought.training.loop import train_run

    return train_run(config, out=Path(out) if out else None).exit_code


def _resume(tokens: list[str]) -> int:
    if _wants_help(tokens):
        return _show_help("resume", "RUN", [ResumeOptions()])
    run, options = _one_word("resume", tokens, ResumeOptions)
    if options.steps is not None:
        conf.require(options.steps >= 1, "steps", options.steps, "at least 1")
    from forethought.training.loop import resume_run

    return resume_run(Path(run), steps=options.steps).exit_code


def _evaluate(tokens: list[str]) -> int:
    if _wants_help(tokens):
        return _show_help("evaluate", "RUN|TASK", [EvaluateOptions()])
    target, options = _one_word("evaluate", tokens, EvaluateOptions)
    conf.require(options.episodes >= 1, "episodes", options.episodes, "at least 1")
    ok = options.seed is None or options.seed >= 0
    conf.require(ok, "seed", options.seed, "at least 0")
    conf.check_device("device", options.device, auto=True)
    from forethought.training.evaluate import evaluate_target

    with _playing(options.episodes) as tell:
        result = evaluate_target(
            target,
            policy=options.policy,
            episodes=options.episodes,
            checkpoint=options.checkpoint,
            seed=options.seed,
            device=options.device,
            tell=tell,
        )
    print(json.dumps(result.to_json()) if options.json else _summary(result))
    return 0


@contextlib.contextmanager
def _playing(episodes: int) -> Iterator[Callable[[int, int], None] | None]:
    """A status on stderr while episodes are played, if a person is looking at it."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    with Console(stderr=True).status("loading") as status:
        yield lambda ended, steps: status.update(
            f"playing: {ended} of {episodes} episodes, step {steps:,}"
        )


def _summary(result: EvalResult) -> str:
    """An evaluation in the lines that a person wants."""
    found = result.statistics()
    lines = [f"{result.task}, {result.player}, {found.pop('episodes')} episodes"]
    shown = {key: value for key, value in found.items() if value is not None}
    return "\n".join([*lines, *(f"  {key:<14}{value:>10.6g}" for key, value in shown.items())])


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
    "list": Verb("agents|tasks|presets", "show what there is", _list),
}


def _agent_in(tokens: Iterable[str]) -> str | None:
    """The first word that names an agent, or else the first word, which the error will name."""
    words = [token for token in tokens if not token.startswith("-")]
    return next((word for word in words if word in registry.AGENTS), next(iter(words), None))


def _one_word(verb: str, tokens: Sequence[str], options: type[Any]) -> tuple[str, Any]:
    """The single word and the options of a verb other than train."""
    words, given = flags.read(tokens, conf.field_types(options))
    usage = VERBS[verb].usage
    if len(words) != 1:
        found = " ".join(words) or "nothing"
        raise ConfigError(f"{verb} takes one {usage}, but was given: {found}.")
    return words[0], conf.from_dict(options, given)


# Showing help.


def _wants_help(tokens: Sequence[str]) -> bool:
    return "-h" in tokens or "--help" in tokens


def _show_overview(stream: typing.TextIO) -> int:
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for name, verb in VERBS.items():
        table.add_row(f"[bold]{name}[/] {verb.usage}", verb.about)
    console = Console(file=stream, highlight=False)
    console.print("usage: [bold]forethought[/] COMMAND ...   (COMMAND --help explains each)\n")
    console.print("Agents that learn a model of their world, plan in it, and are checked.\n")
    console.print(Panel(table, title="commands", title_align="left", border_style="dim"))
    console.print("\nforethought train tdmpc2 dmc:cartpole-swingup --preset tdmpc2_small --seed 1")
    return 0 if stream is sys.stdout else 2


def _show_help(verb: str, usage: str, options: list[Any]) -> int:
    """Draws a verb's help; the values shown as defaults are those after presets and file."""
    import tyro

    default, about = _for_help(options), VERBS[verb].about
    try:
        tyro.cli(
            type(default),
            default=default,
            prog=f"forethought {verb} {usage}",
            description=f"{about[0].upper()}{about[1:]}.",
            args=["--help"],
            use_underscores=True,
        )
    except SystemExit as shown:
        return int(shown.code or 0)
    return 0


def _for_help(parts: list[Any]) -> Any:
    """One dataclass instance with the fields of all parts, as tyro needs it to draw the help.

    Subclasses keep the docstrings. Groups are narrowed to the classes they have here, selectors
    become choices, and no rules run, for the values shown were checked already.
    """
    import tyro

    shown: list[tuple[str, Any]] = []
    values: dict[str, Any] = {}
    for part in parts:
        for name, annotation in conf.field_types(type(part)).items():
            value = getattr(part, name)
            members = conf.union_members(annotation)
            if members and value is not None:
                text = f"Which {name}; --help beside a choice shows that one's own options."
                arg = tyro.conf.arg(name=name, help=text)
                shown.append((f"{name}_kind", Annotated[Literal[tuple(members)], arg]))
                values[f"{name}_kind"] = value.kind
            if name == "preset":
                shown.append((name, Annotated[annotation, tyro.conf.UseAppendAction]))
            if is_dataclass(value):
                values[name] = _for_help([value])
                about = tyro.conf.arg(help=type(value).__doc__)
                shown.append((name, Annotated[type(values[name]), about]))
            else:
                values[name] = value
                if name in ("agent_name", "task", "agent"):  # words, or not known yet
                    shown.append((name, Annotated[annotation, tyro.conf.Suppress]))
    cls = make_dataclass(
        type(parts[-1]).__name__,
        shown,
        bases=tuple(type(part) for part in parts),
        namespace={"__post_init__": lambda self: None},
        frozen=True,
        kw_only=True,
    )
    return cls(**values)
