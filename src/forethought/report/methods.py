"""What a method is: the part of a configuration that may change a result; and its short name."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from forethought import presets
from forethought.config import ConfigError, flatten
from forethought.report.runs import RunRecord

Method = tuple[tuple[str, str], ...]
"""What a method is: its settings as text, hashable."""
IDENTITY = ("task", "seed")
WATCHING = ("track.", "eval.video_")
"""Keys that begin so only watch a run."""
LENGTH = (
    "steps",
    "train.checkpoint_every_agent_steps",
    "train.keep_checkpoints",
    "offline.updates",
    "offline.checkpoint_every_updates",
    "offline.log_every_updates",
    "offline.storage",
)
"""How long a run goes on and what it keeps: until it ends, every evaluation is the same."""


def tells_apart(key: str) -> bool:
    """Whether runs with different values of this key are runs of different methods."""
    return key not in (*IDENTITY, *LENGTH) and not key.startswith(WATCHING)


def settings(record: RunRecord) -> dict[str, Any]:
    """The configuration but for the task, the seed and what changes no result."""
    own = {"agent_name": record.agent, **record.config}
    return {key: value for key, value in own.items() if tells_apart(key)}


def method_of(record: RunRecord) -> Method:
    """The settings of a run as a key."""
    return tuple(sorted((key, repr(value)) for key, value in settings(record).items()))


def names(methods: Sequence[Mapping[str, Any]], played: Sequence[set[str]]) -> list[str]:
    """A short name for each method: its preset or agent, and what tells it from its like.

    Methods are told apart only where they meet, that is within a task: `played` are the tasks of
    each. Two that never meet may share a name.
    """
    bases = [_preset(method) for method in methods]
    shared = len(set(bases)) == 1  # then what tells them apart is name enough
    found = []
    for base, method in zip(bases, methods):
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
            # By the values that tell: on another task the same values are the same letter.
            likes = [m for name, m in zip(bases, methods) if name == base]
            values = dict.fromkeys(_values(m, differing) for m in likes)
            found.append(f"{base} {_letter(list(values).index(_values(method, differing)))}")
    # Two values that read the same once shortened still need two names.
    return [
        f"{name} {_letter(found[:place].count(name))}" if _meet(name, found, played) else name
        for place, name in enumerate(found)
    ]


def _values(method: Mapping[str, Any], keys: Sequence[str]) -> str:
    return repr([method.get(key, ...) for key in keys])  # an absent key is not a null one


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


def brief_commits(text: str) -> str:
    """Ten signs of each commit in a text; what stands behind one ("+changes") stays."""
    return re.sub(r"\b([0-9a-f]{10})[0-9a-f]{30}\b", r"\1", text)


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
