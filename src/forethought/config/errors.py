"""Errors that are sentences for people, and the words they are made of."""

import difflib
from collections.abc import Iterable
from typing import Literal


class ForethoughtError(Exception):
    """Something a person can cause and mend; its text is the sentence that person sees."""


class ConfigError(ForethoughtError):
    """Bad input, found before work began."""


class MemoryRefused(ForethoughtError):
    """Memory that could not be had: nothing is wrong with what was to be put into it."""


CPU_REFUSALS = ("can't allocate memory", "Cannot allocate memory", "bad_alloc")
DEVICE_REFUSALS = ("out of memory", "ALLOC_FAILED")
"""Words of torch's errors for main memory and for a device's, which have no type of their own."""


def memory_refused(error: BaseException) -> Literal["cpu", "device", None]:
    """Whose memory an error says was too small, if it is about memory at all."""
    text = str(error)
    if isinstance(error, MemoryError) or any(words in text for words in CPU_REFUSALS):
        return "cpu"
    told = isinstance(error, RuntimeError) and any(words in text for words in DEVICE_REFUSALS)
    return "device" if told else None


def require(condition: bool, key: str, value: object, rule: str) -> None:
    """State a rule of a configuration field; a broken one is a ConfigError."""
    if not condition:
        raise ConfigError(f"{key} is {value}, but must be {rule}.")


def nearest(word: str, candidates: Iterable[str]) -> str:
    """' Did you mean X?' for the candidate most like `word`, or '' when none is like it.

    Dotted names are compared by their last part, in the same group first: a common `replay.` must
    not make `replay.alpha` look like `replay.capacity_rows`, and `horizon` finds `agent.horizon`.
    """
    names = list(candidates)
    head, _, tail = word.rpartition(".")
    for group, likeness in (
        ([n for n in names if n.rpartition(".")[0] == head], 0.6),
        (names, 0.8),
    ):
        tails = {name.rpartition(".")[2]: name for name in reversed(group)}
        close = difflib.get_close_matches(tail, tails, n=1, cutoff=likeness)
        if close:
            return f" Did you mean {tails[close[0]]}?"
    return ""


def unknown(kind: str, word: str, candidates: Iterable[str], see: str = "") -> ConfigError:
    """The error for a name that does not exist; `see` is a last sentence that tells where to look.

    >>> raise unknown("task", "dmc:walker_walk", tasks, "'forethought list tasks' shows all.")
    """
    text = f"There is no {kind} {word}.{nearest(word, candidates)}"
    return ConfigError(f"{text} {see}".rstrip())
