"""The verbs of `forethought data`: record, import, verify and describe datasets."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forethought import config as conf
from forethought.config import ConfigError
from forethought.presets import flags, help

if TYPE_CHECKING:
    from forethought.data import Dataset

Playing = Callable[[int], AbstractContextManager[Callable[[int, int], None] | None]]
"""Shows, while a block lasts, how many of this many episodes have ended."""


@dataclass(frozen=True)
class RecordOptions:
    """Flags of data record."""

    run: str | None = None
    """The run whose agent plays; its task and environment options are the run's."""
    agent: str | None = None
    """Who plays where no run is given: random."""
    task: str | None = None
    """The task that random play is recorded in, such as dmc:walker-walk."""
    episodes: int | None = None
    """Episodes to play; None is 10."""
    out: str | None = None
    """The folder to make; it must not exist yet."""
    checkpoint: str | None = None
    """Which checkpoint of the run: latest (None), best, or a number of agent steps."""
    replay: bool = False
    """Play nothing, but write what the run's replay holds: how it played while it learned."""
    explore: bool = False
    """Act with the noise of training: the data then shows more than one way."""
    seed: int | None = None
    """Seed of the episodes; None is the run's own, or 1 for random play."""
    device: str | None = None
    """Where the agent computes: auto (None), cpu, cuda, cuda:N or mps."""
    json: bool = False
    """Print the description as one line of JSON."""


@dataclass(frozen=True)
class ImportOptions:
    """Flags of data import."""

    out: str | None = None
    """The folder to make; it must not exist yet."""
    format: str = "auto"
    """What SOURCE is: minari (a folder in its HDF5 layout), tdmpc2 (official *.pt chunks, a file or
    a folder of them), or auto: as it looks."""
    task: str | None = None
    """Name of the task of a Minari dataset; None is gym:ID of the environment it names."""
    tasks: str | None = None
    """Names of the tasks in TD-MPC2 chunks, in the order of their numbers, with commas between;
    None takes those of mt30 or mt80."""
    only: str | None = None
    """Names of the tasks to import from TD-MPC2 chunks, with commas between; None imports all."""
    json: bool = False
    """Print the description as one line of JSON."""


@dataclass(frozen=True)
class VerifyOptions:
    """Flags of data verify."""

    json: bool = False
    """Print the outcome as one line of JSON."""


@dataclass(frozen=True)
class DescribeOptions:
    """Flags of data describe."""

    json: bool = False
    """Print everything as one line of JSON."""


@dataclass(frozen=True)
class DataVerb:
    """A verb of the group: what follows it, what it is for, its flags and what carries it out."""

    usage: str
    about: str
    options: type[Any]
    run: Callable[[Sequence[str], Any, Playing], int]


def run(tokens: list[str], playing: Playing) -> int:
    """Carries out `forethought data VERB ...`; `playing` shows how far the episodes are."""
    verb = tokens[0] if tokens else None
    if verb in (None, "-h", "--help"):
        return help.show_overview(
            {name: (v.usage, v.about) for name, v in VERBS.items()},
            sys.stdout if verb else sys.stderr,
            "forethought data",
            "Datasets of packed episodes, to learn from without an environment.",
            "record --agent random --task dmc:walker-walk --out walker-random",
        )
    if verb not in VERBS:
        raise conf.unknown("data command", str(verb), VERBS, "'forethought data --help' shows all.")
    chosen = VERBS[verb]
    if help.wanted(tokens):
        return help.show(f"data {verb} {chosen.usage}".rstrip(), chosen.about, [chosen.options()])
    words, given = flags.read(tokens[1:], conf.field_types(chosen.options))
    options = conf.from_dict(chosen.options, given)
    return chosen.run(words, options, playing)


def _record(words: Sequence[str], options: RecordOptions, playing: Playing) -> int:
    if words:
        raise ConfigError(f"data record takes flags only, but was given: {' '.join(words)}.")
    out = _out("record", options.out)
    if options.agent is not None and (options.agent != "random" or options.run is not None):
        raise ConfigError(
            f"--agent is {options.agent}, but only random play needs no run: use --agent random "
            "--task TASK, or --run RUN alone."
        )
    if (options.run is None) != (options.agent == "random" and options.task is not None):
        raise ConfigError(
            "data record needs to know who plays: --run RUN, or --agent random --task TASK."
        )
    if options.replay:
        return _tell([_record_replay(options, out)], options.json)
    conf.check_device("device", options.device or "auto", auto=True)
    from forethought.training.record import EPISODES, record

    with playing(options.episodes or EPISODES) as tell:
        dataset, failures = record(
            out,
            run=None if options.run is None else Path(options.run),
            task=options.task,
            episodes=options.episodes,
            checkpoint=options.checkpoint,
            explore=options.explore,
            seed=options.seed,
            device=options.device,
            tell=tell,
        )
    for sentence in dict.fromkeys(failures):
        print(f"Failed and left out: {sentence}", file=sys.stderr)
    return _tell([dataset], options.json)


def _record_replay(options: RecordOptions, out: Path) -> Dataset:
    conf.require(options.run is not None, "replay", True, "given with --run RUN")
    for key in ("episodes", "explore", "seed", "device"):
        value = getattr(options, key)
        conf.require(value in (None, False), key, value, "left out: --replay plays nothing")
    from forethought.training.record import record_replay

    return record_replay(out, run=Path(str(options.run)), checkpoint=options.checkpoint)


def _import(words: Sequence[str], options: ImportOptions, playing: Playing) -> int:
    (source,) = _places("import", "SOURCE", words, at_most=1)
    out = _out("import", options.out)
    from forethought.data.importers import import_dataset

    dataset = import_dataset(
        source,
        out,
        format=options.format,
        task=options.task,
        tasks=_names(options.tasks),
        only=_names(options.only),
    )
    return _tell([dataset], options.json)


def _verify(words: Sequence[str], options: VerifyOptions, playing: Playing) -> int:
    places = _places("verify", "DATASET...", words)
    from forethought.data import verify

    for place in places:
        dataset = verify(place)
        found = {"path": str(place), "rows": dataset.rows, "sha256": dataset.fingerprint}
        if options.json:
            print(json.dumps({**found, "whole": True}))
        else:
            print(f"{place} is whole: every checksum of its {dataset.rows:,} rows fits.")
    return 0


def _describe(words: Sequence[str], options: DescribeOptions, playing: Playing) -> int:
    places = _places("describe", "DATASET...", words)
    from forethought.data import Dataset

    return _tell([Dataset.open(place) for place in places], options.json)


VERBS = {
    "record": DataVerb("", "play episodes into a new dataset", RecordOptions, _record),
    "import": DataVerb(
        "SOURCE", "make a dataset of a Minari folder or TD-MPC2 chunks", ImportOptions, _import
    ),
    "verify": DataVerb(
        "DATASET...", "read every byte of datasets and check it", VerifyOptions, _verify
    ),
    "describe": DataVerb(
        "DATASET...", "tasks, sizes and returns of datasets", DescribeOptions, _describe
    ),
}


def _places(verb: str, usage: str, words: Sequence[str], at_most: int | None = None) -> list[Path]:
    if not words or (at_most is not None and len(words) > at_most):
        found = " ".join(words) or "nothing"
        raise ConfigError(f"data {verb} takes {usage}, but was given: {found}.")
    return [Path(word) for word in words]


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",")]


def _out(verb: str, out: str | None) -> Path:
    if out is None:
        raise ConfigError(f"data {verb} needs a new folder to write: --out DIR.")
    return Path(out)


def _tell(datasets: Sequence[Dataset], as_json: bool) -> int:
    from rich.console import Console

    from forethought.data.describe import description, show

    if as_json:
        found = [description(dataset) for dataset in datasets]
        print(json.dumps(found[0] if len(found) == 1 else found))
    else:
        # Without a terminal there is no width to fit: tables keep their lines whole.
        show(datasets, Console(width=None if sys.stdout.isatty() else 200, highlight=False))
    return 0
