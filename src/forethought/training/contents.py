"""What a checkpoint must hold to be resumed from or played.

A checksum says that nothing has changed since somebody wrote a file, not that it was us. So before
a checkpoint is chosen its JSON is checked here, key by key, and its tensors are tried out on the
agent; what does not fit is a FileError in one sentence, and the caller takes an older checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from forethought import files
from forethought.agents.base import Agent
from forethought.files import FileError, Manifest
from forethought.seeding import Streams, restore_numpy

AGENT_FILES = ("agent.json", "agent.safetensors")
FILES = (*AGENT_FILES, "replay.safetensors", "loop.json", "loop.safetensors")
MAX_COUNT = 2**53
"""A greater count is nonsense: no run takes that many steps, and numbers would overflow."""


class Kind:
    """A kind of JSON value: the test, and the words for it."""

    def __init__(self, words: str, test: Callable[[Any], bool]) -> None:
        self.words, self.test = words, test


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < MAX_COUNT)


COUNT = Kind("a count, zero or more", lambda value: type(value) is int and 0 <= value < MAX_COUNT)
WHOLE = Kind("a whole number", lambda value: type(value) is int and abs(value) < MAX_COUNT)
NUMBER = Kind("a number", _is_number)
SCORE = Kind("a number or null", lambda value: value is None or _is_number(value))
FLAG = Kind("true or false", lambda value: type(value) is bool)
TEXT = Kind("text", lambda value: isinstance(value, str))
GROUP = Kind("a group of keys", lambda value: isinstance(value, dict))
NUMBERS = Kind(
    "numbers by name",
    lambda value: isinstance(value, dict) and all(map(_is_number, value.values())),
)
SCORES = Kind(
    "numbers or null by name",
    lambda value: (
        isinstance(value, dict) and all(x is None or _is_number(x) for x in value.values())
    ),
)

CLOCK = dict.fromkeys(("agent_steps", "env_frames", "updates", "episodes"), COUNT)
UNITS = ("agent_steps", "updates")
"""What a checkpoint's name may count: an offline run takes no steps."""
META = {**CLOCK, "eval_score": SCORE, "replay_blocks": GROUP}
CSV = {"bytes": COUNT, "columns": [TEXT], "pending": [TEXT]}
EPISODE = {
    "number": COUNT,
    "total": NUMBER,
    "clipped?": NUMBER,
    "lives_lost?": COUNT,
    "log": {"seed": COUNT, "decisions": COUNT},
}
LOOP = {
    "evaluations?": COUNT,
    "evaluation_pending?": FLAG,
    "score?": SCORE,
    "scored_at?": WHOLE,
    "checkpoint_failures?": COUNT,
    "write_failures?": COUNT,
    "clock": CLOCK,
    "budget": {"agent_steps": COUNT, "taken": COUNT},
    "gates": SCORES,
    "log_every": {"last": COUNT},
    "eval_every": {"last": COUNT},
    "save_every": {"last": COUNT},
    "diagnose_every?": {"last": COUNT},
    "tracker": {
        "wall_s": NUMBER,
        "interval": {"sums": NUMBERS, "counts": NUMBERS},
        "last_flush": {**CLOCK, "wall_s": NUMBER},
        "files": {"train": CSV, "episode": CSV, "evaluation": CSV},
    },
    "collector?": {
        "exploration": GROUP,
        "act": GROUP,
        "first": [FLAG],
        "open": [EPISODE],
        "restarts?": {"in_a_row": [COUNT], "total": COUNT},
    },
}
AGENT = {"updates?": COUNT, "replay": {"layout": GROUP, "streams": [GROUP], "rng": GROUP}}


def check_json(pattern: Any, value: Any, where: str) -> None:
    """Refuse a value unlike the pattern: groups by key (`key?` may be absent), lists, kinds."""
    if isinstance(pattern, Kind):
        if not pattern.test(value):
            raise FileError(f"{where} is {str(value)[:80]!r}, but must be {pattern.words}.")
        return
    if isinstance(pattern, list):
        check_json(Kind("a list", lambda found: isinstance(found, list)), value, where)
        for index, item in enumerate(value):
            check_json(pattern[0], item, f"{where}[{index}]")
        return
    check_json(GROUP, value, where)
    for key, inner in pattern.items():
        name = key.removesuffix("?")
        if name not in value and name == key:
            raise FileError(f"{where} has no {name}.")
        if name in value:
            separator = ": " if where.endswith(".json") else "."
            check_json(inner, value[name], f"{where}{separator}{name}")


def check_for_acting(path: Path, manifest: Manifest) -> None:
    """A checkpoint that can be played: the agent's files are there, at the step of its name."""
    files.require_files(path, manifest, AGENT_FILES)
    unit = _unit(manifest.meta, path)
    check_json({unit: COUNT}, manifest.meta, f"{path / files.MANIFEST}")
    step, named = step_of(manifest.meta), int(path.name.rpartition("-")[2])
    if step != named:
        raise FileError(f"{path} is of step {step}, though its name says {named}.")


def check_for_resuming(path: Path, manifest: Manifest) -> dict[str, str]:
    """A checkpoint that can be resumed from, as far as its JSON tells; the sha256 of the replay
    blocks that it needs, by name."""
    check_for_acting(path, manifest)
    files.require_files(path, manifest, FILES)
    check_json(META, manifest.meta, f"{path / files.MANIFEST}")
    loop, agent = files.read_json(path / "loop.json"), files.read_json(path / "agent.json")
    check_json(LOOP, loop, f"{path / 'loop.json'}")
    check_json(AGENT, agent, f"{path / 'agent.json'}")
    if "collector" not in loop and _unit(manifest.meta, path) == "agent_steps":
        raise FileError(f"{path / 'loop.json'} has no collector.")
    counts = {loop["clock"]["agent_steps"], loop["budget"]["agent_steps"]}
    if loop["clock"]["updates"] != manifest.meta["updates"]:
        raise FileError(f"{path / 'loop.json'} counts other updates than the manifest.")
    if counts != {manifest.meta["agent_steps"]}:
        raise FileError(f"{path / 'loop.json'} counts other agent steps than the manifest.")
    with files.content_of(path / "agent.json"):
        blocks = block_hashes(agent["replay"])
    if blocks != manifest.meta["replay_blocks"]:
        raise FileError(f"{path / 'agent.json'} names other replay blocks than the manifest.")
    return blocks


def step_of(meta: Mapping[str, Any]) -> int:
    """The step of a checkpoint, from its manifest: agent steps, or updates of an offline run."""
    return int(meta[meta.get("step_unit", "agent_steps")])


def told_step(meta: Mapping[str, Any]) -> str:
    """The same in words."""
    return f"{step_of(meta):,} {str(meta.get('step_unit', 'agent_steps')).replace('_', ' ')}"


def _unit(meta: Mapping[str, Any], path: Path) -> str:
    unit = meta.get("step_unit", "agent_steps")
    if unit not in UNITS:
        raise FileError(
            f"{path / files.MANIFEST}: step_unit is {str(unit)[:80]!r}, but must be one of "
            f"{', '.join(UNITS)}."
        )
    return str(unit)


def block_hashes(replay_json: Mapping[str, Any]) -> dict[str, str]:
    """sha256 by name of the sealed blocks that a replay's saved state refers to."""
    return {
        block["name"]: block["sha256"]
        for stream in replay_json["streams"]
        for block in stream["blocks"]
    }


def try_out(path: Path, agent: Agent, replay_folder: Path) -> None:
    """Refuse a checkpoint that this agent cannot be restored from.

    Its weights are changed by this; its replay, which may be large, is only looked at.
    """
    agent.check_origin(path, files.read_manifest(path).meta)
    saved = files.read_json(path / "agent.json")
    with files.content_of(path / "agent.safetensors"):
        agent.restore(saved, files.load_tensors(path / "agent.safetensors"))
    with files.content_of(path / "replay.safetensors"):
        tensors = files.load_tensors(path / "replay.safetensors")
        agent.replay.check(saved["replay"], tensors, replay_folder)
    with files.content_of(path / "loop.safetensors"):
        collector = files.read_json(path / "loop.json").get("collector")
        tensors = files.load_tensors(path / "loop.safetensors")
        if collector is not None:  # an offline run has none
            _try_open_episodes(collector, tensors, agent)


def _try_open_episodes(collector: dict[str, Any], tensors: dict[str, Tensor], agent: Agent) -> None:
    """The acting state and the logs of open episodes; ValueError says what is wrong."""
    restarts = collector.get("restarts", {"in_a_row": collector["first"]})["in_a_row"]
    if {len(x) for x in (collector["open"], collector["first"], restarts)} != {agent.num_envs}:
        raise ValueError(f"it does not describe {agent.num_envs} environments")
    restore_numpy(np.random.Generator(np.random.PCG64()), collector["exploration"])
    state = agent.new_state(agent.num_envs, Streams(0), "planner")
    _, fresh = agent.acting_state(state)
    saved = _below("act/", tensors)
    for name in sorted(fresh.keys() | saved.keys()):
        here, there = (_shape(found.get(name)) for found in (fresh, saved))
        if here != there:
            raise ValueError(f"the acting state has {name} {there}, but must have {here}")
    agent.restore_acting_state(state, collector["act"], saved)
    for index, episode in enumerate(collector["open"]):
        decisions, actions = episode["log"]["decisions"], _below(f"action/{index}/", tensors)
        lengths = {len(action) if action.ndim else -1 for action in actions.values()}
        held = sum(action.numel() for action in actions.values())
        if (lengths or {0}) != {decisions} or held < decisions:
            raise ValueError(f"the open episode {index} has {lengths} actions of {decisions}")
        if not all(math.isfinite(float(x.double().sum())) for x in actions.values()):
            raise ValueError(f"the open episode {index} has actions that are not finite")


def _shape(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
