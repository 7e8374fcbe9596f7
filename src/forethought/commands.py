"""What the verbs of the command line share: how they are found, and how their words are read."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forethought import config as conf
from forethought import presets
from forethought.agents import registry
from forethought.config import ConfigError
from forethought.presets import flags, help

if TYPE_CHECKING:
    from rich.console import Console

    from forethought.training.evaluate import Tell

PLAIN_PERIOD_S = 30.0
"""Seconds between two lines of progress where there is no terminal."""


@dataclass(frozen=True)
class Verb:
    """A verb: what follows it, what it is for, and what carries it out."""

    usage: str
    about: str
    run: Callable[[list[str]], int]


def carry_out(
    tokens: Sequence[str], verbs: Mapping[str, Verb], group: str = "", *overview: str
) -> int:
    """Runs the verb that the tokens begin with; without one, or with --help, shows them all.

    `group` stands before the verbs, as in `data record`; `overview` is its purpose and an example.
    """
    verb = tokens[0] if tokens else None
    if verb in (None, "-h", "--help"):
        commands = {name: (own.usage, own.about) for name, own in verbs.items()}
        stream = sys.stdout if verb else sys.stderr
        return help.show_overview(commands, stream, f"forethought {group}".rstrip(), *overview)
    if verb not in verbs:
        see = f"'forethought {group} --help' shows all.".replace("  ", " ")
        raise conf.unknown(f"{group} command".lstrip(), str(verb), verbs, see)
    return verbs[verb].run(list(tokens[1:]))


def show_help(name: str, usage: str, verb: Verb, options: list[Any]) -> int:
    """Draws the flags of a verb."""
    return help.show(f"{name} {usage}".rstrip(), verb.about, options)


def words_and_options(
    name: str, usage: str, tokens: Sequence[str], options: type[Any], most: int | None = 1
) -> tuple[list[str], Any]:
    """The words of a verb, at least one where its usage names one, and its options."""
    words, given = flags.read(tokens, conf.field_types(options))
    least = min(1, len(usage))
    if len(words) < least or (most is not None and len(words) > most):
        found = " ".join(words) or "nothing"
        takes = (f"one {usage}" if most == 1 else usage) if usage else "no words"
        raise ConfigError(f"{name} takes {takes}, but was given: {found}.")
    return words, conf.from_dict(options, given)


@dataclass(frozen=True)
class RunFlags:
    """The configuration of a run as a command line gives it."""

    words: list[str]
    """What stands beside the flags."""
    own: dict[str, Any]
    """Flags of the verb itself that were given, such as --out."""
    layers: list[dict[str, Any]]
    """Presets, file and selectors as one; then the flags."""
    file: dict[str, Any]
    """What the file alone says."""

    @property
    def flags(self) -> dict[str, Any]:
        return self.layers[-1]


def read_run_flags(
    tokens: Sequence[str], agent_name: str, options: type[Any], about_help: Callable[..., int]
) -> RunFlags | int:
    """Reads the flags of a run in two passes; with --help among them, `about_help` draws it.

    The first pass finds presets, file and selectors, the second what they leave to be set.
    """
    agent_class = registry.config_class(agent_name)
    named = flags.values(tokens, ("preset", "config"))
    file = Path(named["config"][-1]) if named["config"] else None
    base = conf.merge(agent_class, presets.layers(named["preset"], file, agent_name))
    types, selected = flags.select(tokens, agent_class, base)
    if help.wanted(tokens):
        run = conf.build_run_config(agent_name, "TASK", agent_class, [selected, {}])
        given = {"preset": tuple(named["preset"]), "config": None if file is None else str(file)}
        return about_help([options(**given), run])
    own_types = conf.field_types(options)
    words, given = flags.read(tokens, types | own_types)
    own = {key: given.pop(key) for key in list(given) if key in own_types}
    said = {} if file is None else presets.load_file(file)
    return RunFlags(words, own, [selected, flags.nested(given)], said)


@contextlib.contextmanager
def playing() -> Iterator[Tell]:
    """A status on stderr while episodes are played; without a terminal, a line now and then."""
    if not sys.stderr.isatty():
        yield _plain_status()
        return
    from rich.console import Console

    with Console(stderr=True).status("loading") as status:
        yield lambda ended, steps, of: status.update(_progress(ended, steps, of))


def _progress(ended: int, steps: int, of: int | None) -> str:
    share = f"{ended}" if of is None else f"{ended} of {of}"
    return f"playing: {share} episodes, step {steps:,}"


def _plain_status() -> Tell:
    said = time.monotonic()

    def tell(ended: int, steps: int, of: int | None) -> None:
        nonlocal said
        if time.monotonic() - said >= PLAIN_PERIOD_S:
            said = time.monotonic()
            print(_progress(ended, steps, of), file=sys.stderr, flush=True)

    return tell


def table_console(width: int) -> Console:
    """For tables: without a terminal there is no width to fit, and lines stay whole."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else width, highlight=False)


def check_play(episodes: int | None, seed: int | None, device: str | None) -> None:
    """The rules of what every verb that plays episodes takes."""
    if episodes is not None:
        conf.require(episodes >= 1, "episodes", episodes, "at least 1")
    conf.require(seed is None or seed >= 0, "seed", seed, "at least 0")
    conf.check_device("device", device or "auto", auto=True)
