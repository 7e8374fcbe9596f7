"""The verbs of `forethought data`: record, import, verify and describe datasets."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forethought import commands
from forethought import config as conf
from forethought.commands import Verb, playing
from forethought.config import ConfigError, ForethoughtError
from forethought.presets import help

if TYPE_CHECKING:
    from forethought.data import Dataset


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
    """Which checkpoint of the run: latest (None), best, or a number of agent steps (of updates,
    offline)."""
    replay: bool = False
    """Play nothing, but write what the run's replay holds: how it played while it learned."""
    explore: bool = False
    """Act with the noise of training: the data then shows more than one way."""
    seed: int | None = None
    """Seed of the episodes; None is the run's own, or 1 for random play."""
    device: str | None = None
    """Where the agent computes: auto (None), cpu, cuda, cuda:N or mps."""
    held_out: float = 0.0
    """Share of the episodes that is kept from training, such as 0.1: every tenth."""
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
    held_out: float = 0.0
    """Share of each task's episodes that is kept from training, such as 0.1: every tenth."""
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


def run(tokens: list[str]) -> int:
    """Carries out `forethought data VERB ...`."""
    return commands.carry_out(
        tokens,
        VERBS,
        "data",
        "Datasets of packed episodes, to learn from without an environment.",
        "record --agent random --task dmc:walker-walk --out walker-random",
    )


def _record(words: Sequence[str], options: RecordOptions) -> int:
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
    commands.check_play(options.episodes, options.seed, options.device)
    from forethought.training.record import record

    with playing() as tell:
        dataset, failures = record(
            out,
            run=None if options.run is None else Path(options.run),
            task=options.task,
            episodes=options.episodes,
            checkpoint=options.checkpoint,
            explore=options.explore,
            seed=options.seed,
            device=options.device,
            held_out=options.held_out,
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

    return record_replay(
        out,
        run=Path(str(options.run)),
        checkpoint=options.checkpoint,
        held_out=options.held_out,
    )


def _import(words: Sequence[str], options: ImportOptions) -> int:
    source = Path(words[0])
    out = _out("import", options.out)
    from forethought.data.importers import import_dataset
    from forethought.envs import spec_of

    dataset = import_dataset(
        source,
        out,
        format=options.format,
        task=options.task,
        tasks=_names(options.tasks),
        only=_names(options.only),
        held_out=options.held_out,
        spec_of=spec_of,
    )
    return _tell([dataset], options.json)


def _verify(words: Sequence[str], options: VerifyOptions) -> int:
    places = [Path(word) for word in words]
    from forethought.data import verify

    codes: set[int] = set()
    for place in places:
        try:
            dataset = verify(place)
        except ForethoughtError as error:  # the others are looked at all the same
            if len(places) == 1:
                raise
            print("\n".join([str(error), *getattr(error, "__notes__", ())]), file=sys.stderr)
            codes.add(2 if isinstance(error, ConfigError) else 1)
            continue
        found = {"path": str(place), "rows": dataset.rows, "sha256": dataset.fingerprint}
        if options.json:
            print(json.dumps({**found, "whole": True}))
        else:
            print(f"{place} is whole: every checksum of its {dataset.rows:,} rows fits.")
    return min(codes, default=0)  # damage weighs more than a name that is none


def _describe(words: Sequence[str], options: DescribeOptions) -> int:
    from forethought.data import Dataset

    return _tell([Dataset.open(Path(word)) for word in words], options.json)


def _verb(
    name: str,
    usage: str,
    about: str,
    options: type[Any],
    carry_out: Callable[[Sequence[str], Any], int],
    most: int | None,
) -> Verb:
    """A verb of the group, which takes at most so many words."""

    def run_it(tokens: list[str]) -> int:
        if help.wanted(tokens):
            return commands.show_help(f"data {name}", usage, VERBS[name], [options()])
        found = commands.words_and_options(f"data {name}", usage, tokens, options, most)
        return carry_out(*found)

    return Verb(usage, about, run_it)


VERBS = {
    "record": _verb("record", "", "play episodes into a new dataset", RecordOptions, _record, 0),
    "import": _verb(
        "import",
        "SOURCE",
        "make a dataset of a Minari folder or TD-MPC2 chunks",
        ImportOptions,
        _import,
        1,
    ),
    "verify": _verb(
        "verify",
        "DATASET...",
        "read every byte of datasets and check it",
        VerifyOptions,
        _verify,
        None,
    ),
    "describe": _verb(
        "describe",
        "DATASET...",
        "tasks, sizes and returns of datasets",
        DescribeOptions,
        _describe,
        None,
    ),
}


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",")]


def _out(verb: str, out: str | None) -> Path:
    if out is None:
        raise ConfigError(f"data {verb} needs a new folder to write: --out DIR.")
    return Path(out)


def _tell(datasets: Sequence[Dataset], as_json: bool) -> int:
    from forethought.data.describe import description, show

    if as_json:
        found = [description(dataset) for dataset in datasets]
        print(json.dumps(found[0] if len(found) == 1 else found))
    else:
        show(datasets, commands.table_console(200))
    return 0
