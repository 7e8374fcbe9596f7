"""Layers of values, later ones winning; what has no effect; what differs."""

import dataclasses
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any

from forethought.config.errors import require
from forethought.config.groups import ReplayConfig, replay_kinds
from forethought.config.reading import field_types, plain, to_dict, union_members

IDLE_OFFLINE = {
    "steps": "offline.updates",
    "env.num_envs": None,
    "env.workers": None,
    "env.on_env_error": None,
    "env.max_restarts": None,
    "replay.capacity_rows": None,
    "replay.storage_device": "offline.storage",
    "replay.block_rows": None,
    "train.seed_agent_steps": None,
    "train.seed_updates": None,
    "train.seed_policy": None,
    "train.updates_per_agent_step": None,
    "train.checkpoint_every_agent_steps": "offline.checkpoint_every_updates",
    "eval.every_agent_steps": "offline.eval_every_updates",
    "track.every_agent_steps": "offline.log_every_updates",
}
"""Keys without effect in an offline run, and what takes their place there."""
ONLY_ATARI = ("env.atari", "eval.protocol")
"""Keys that mean something in atari: tasks alone."""
IDLE_WITH_PROTOCOL = ("eval.episodes", "eval.epsilon", "env.eval_max_episode_steps")
"""Keys without effect under a protocol of evaluation."""


def layer(base: Mapping[str, Any], *overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Deep merge, later wins. A new `kind` drops what was said of the old one, but for the keys of
    the replay that both have. A word for a group is its kind: `replay: transitions`."""
    merged = dict(base)
    for override in overrides:
        for key, value in override.items():
            old = merged.get(key)
            if isinstance(value, str) and isinstance(old, Mapping):
                value = {"kind": value}
            elif isinstance(value, Mapping) and isinstance(old, str):
                old = {"kind": old}
            if isinstance(value, Mapping) and isinstance(old, Mapping):
                changed = "kind" in value and value["kind"] != old.get("kind", value["kind"])
                merged[key] = layer(_kept(key, old, value["kind"]) if changed else old, value)
            else:
                merged[key] = layer({}, value) if isinstance(value, Mapping) else value
    return merged


def _kept(group: str, old: Mapping[str, Any], kind: Any) -> dict[str, Any]:
    """What an earlier layer says of the replay that another kind of replay has too, such as its
    capacity. In other groups the same word may mean another thing (a learning rate, of Adam or of
    RMSProp), and nothing is kept."""
    new = union_members(ReplayConfig).get(kind) if group == "replay" else None
    return {key: value for key, value in old.items() if new and key in field_types(new)}


def merge(agent_class: type, layers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """All layers of a run as one. What a later layer leaves without effect is dropped from the
    earlier ones (a preset's planner, when a flag turns planning off). Set in that layer or after
    it, it stays: then the agent refuses it, or uses it after all.

    An agent's configuration says in `idle` which of its keys that are: by switch (dotted, where it
    stands in a group) and its value. Recorded data leaves `IDLE_OFFLINE` without effect. Its
    `replay_kinds` say which replay is its default, its `run_defaults` what else begins otherwise.
    """
    idle: Mapping[tuple[str, Any], Iterable[str]] = getattr(agent_class, "idle", {})
    own = hasattr(agent_class, "replay_kinds")
    merged: dict[str, Any] = {"replay": {"kind": replay_kinds(agent_class)[0]}} if own else {}
    merged = layer(merged, getattr(agent_class, "run_defaults", {}))
    for override in layers:
        if value_at(override, "offline.data", None) is not None:
            for key in IDLE_OFFLINE:
                drop_key(merged, key)
        if value_at(override, "eval.protocol", None) is not None:
            for key in IDLE_WITH_PROTOCOL:
                drop_key(merged, key)
        agent = override.get("agent")
        for (switch, value), keys in idle.items():
            if value_at(agent, switch, not value) == value:
                for key in keys:
                    drop_key(merged.get("agent"), key)
        merged = layer(merged, override)
    return merged


def refuse_idle(config: Any, where: str) -> None:
    """A key that has no effect while its switch stands as it does must have its default value."""
    off = {key: switch for switch, keys in config.idle.items() for key in keys}
    off = {k: (name, v) for k, (name, v) in off.items() if attrgetter(name)(config) == v}
    if not off:
        return
    own, default = flatten(to_dict(config)), flatten(_defaults(type(config)))
    for key, (name, value) in off.items():
        for path in [p for p in own if p == key or p.startswith(f"{key}.")]:
            rule = f"left out: it has no effect while {where}.{name} is {str(value).lower()}"
            require(own[path] == default[path], f"{where}.{path}", own[path], rule)


def _defaults(cls: type) -> dict[str, Any]:
    """What `to_dict` gives for an instance without arguments; none is made, so no rule runs."""
    absent = dataclasses.MISSING
    return {
        f.name: plain(f.default if f.default_factory is absent else f.default_factory())
        for f in dataclasses.fields(cls)
    }


def value_at(data: Any, key: str, missing: Any) -> Any:
    """The value of a dotted key, or `missing`. A word for a group is its kind."""
    for part in key.split("."):
        if part == "kind" and isinstance(data, str):
            return data
        if not isinstance(data, Mapping) or part not in data:
            return missing
        data = data[part]
    return data


def drop_key(data: Any, key: str) -> None:
    """Removes a dotted key, if it is there."""
    *groups, last = key.split(".")
    for group in groups:
        data = data.get(group) if isinstance(data, dict) else None
    if isinstance(data, dict):
        data.pop(last, None)


def flatten(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested groups as one level with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def diff(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, str, Any, Any]]:
    """Rows (key, added | removed | changed, value in a, value in b) of all keys that differ."""
    old, new = flatten(a), flatten(b)
    rows: list[tuple[str, str, Any, Any]] = []
    for key in [*old, *(key for key in new if key not in old)]:
        if key not in new:
            rows.append((key, "removed", old[key], None))
        elif key not in old:
            rows.append((key, "added", None, new[key]))
        elif old[key] != new[key]:
            rows.append((key, "changed", old[key], new[key]))
    return rows
