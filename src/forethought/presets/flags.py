"""Flags of the command line, read into the same nested dicts that YAML files hold.

So the last layer of a configuration goes through the same checks as the others. Which flags exist
depends on what is selected: `--replay transitions` decides what `--replay.…` may follow.
"""

from __future__ import annotations

import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Annotated, Any

from forethought import config as conf
from forethought.config import ConfigError
from forethought.presets import parse_scalar

Types = dict[str, Any]
"""What a verb accepts: the annotation of every flag by its dotted name."""
SELECTOR = Annotated[str, "names the kind of a group"]
"""The annotation of a flag that selects a member of a tagged union."""


def values(tokens: Sequence[str], wanted: Iterable[str]) -> dict[str, list[str]]:
    """Pass one: the values of flags that take exactly one, however many others stand between."""
    found: dict[str, list[str]] = {key: [] for key in wanted}
    for place, token in enumerate(tokens):
        key, has_value, value = _key(token)
        if key in found:
            found[key] += [value] if has_value else _take(list(tokens[place + 1 :]), str, token)
    return found


def _key(token: str) -> tuple[str, bool, str]:
    """'--env.num-envs=2' as ('env.num_envs', True, '2'); a token that is no flag has key ''."""
    name, equals, value = token.partition("=")
    return name[2:].replace("-", "_") if name.startswith("--") else "", bool(equals), value


def select(
    tokens: Sequence[str], agent_class: type, base: Mapping[str, Any]
) -> tuple[Types, dict[str, Any]]:
    """Every flag that means something in this run, and the layers so far with the selectors."""
    data = dict(base)
    while True:  # a selected kind may itself have kinds to select
        types = _types(conf.RunConfig, data, agent_class)
        kinds = [key for key, annotation in types.items() if annotation is SELECTOR]
        chosen = {f"{key}.kind": kind[-1] for key, kind in values(tokens, kinds).items() if kind}
        now = conf.layer(data, nested(chosen))
        if now == data:
            del types["agent_name"], types["task"]  # words, not flags
            return types, data
        data = now


def _types(cls: type, data: Any, agent_class: type | None = None, prefix: str = "") -> Types:
    """The flags of a dataclass: a leaf is one flag, a group has its fields, a union a selector."""
    found: Types = {}
    for name, annotation in conf.field_types(cls).items():
        value = data.get(name) if isinstance(data, Mapping) else None
        members = conf.union_members(annotation)
        if members:
            found[prefix + name] = SELECTOR
            chosen = value.get("kind") if isinstance(value, Mapping) else None
            annotation = members.get(str(chosen), members[conf.default_kind(cls, name)])
        if name == "agent" and agent_class:
            annotation = agent_class
        if is_dataclass(annotation):
            found |= _types(typing.cast(type, annotation), value, None, f"{prefix}{name}.")
        else:
            found[prefix + name] = annotation
    return found


def read(tokens: Sequence[str], types: Types) -> tuple[list[str], dict[str, Any]]:
    """Pass two: the words that are no flags, and the value of each flag by its dotted name."""
    words: list[str] = []
    flags: dict[str, Any] = {}
    rest = list(tokens)
    while rest:
        token = rest.pop(0)
        key, has_value, value = _key(token)
        head, _, tail = key.rpartition(".")
        positive = f"{head}.{tail.removeprefix('no_')}".lstrip(".")
        if not token.startswith("-"):
            words.append(token)
        elif key in types:
            texts = [value] if has_value else _take(rest, types[key], token)
            name = f"{key}.kind" if types[key] is SELECTOR else key
            flags[name] = _value(types[key], texts)
        elif types.get(positive) is bool and not has_value:
            flags[positive] = False
        elif types.get(head) is SELECTOR:
            # from_dict knows whether another kind has this key, and says so.
            flags[key] = value if has_value else _take(rest, str, token)[0]
        else:
            known = [f"--{name}" for name in types]
            raise conf.unknown("flag", token.partition("=")[0], known, "See --help.")
    return words, flags


def _take(rest: list[str], annotation: Any, token: str) -> list[str]:
    """Removes the values of a flag from the tokens that follow it."""
    if annotation is bool:
        follows = bool(rest) and rest[0].lower() in ("true", "false")
        return [rest.pop(0)] if follows else ["true"]
    count = 0
    # A repeatable flag such as --preset takes one value each time, a list of numbers all at once.
    many = _is_list(annotation) and annotation != tuple[str, ...]
    while count < len(rest) and not rest[count].startswith("--") and (many or count < 1):
        count += 1
    if count == 0 and not many:
        raise ConfigError(f"{token} needs a value.")
    taken, rest[:] = rest[:count], rest[count:]
    return taken


def _value(annotation: Any, texts: list[str]) -> Any:
    """Text as the value that YAML would give it, unless the flag wants text. Types come later."""
    members = typing.get_args(annotation) or (annotation,)
    if type(None) in members and [text.lower() for text in texts] in (["none"], ["null"]):
        return None
    if _is_list(annotation):
        items = [parse_scalar(text) for text in texts]
        whole = len(items) == 1 and isinstance(items[0], list)  # '[0.9, 0.97]', as in a file
        return items[0] if whole else items
    wants_text = any(member is str or isinstance(member, str) for member in members)
    return texts[0] if wants_text else parse_scalar(texts[0])


def _is_list(annotation: Any) -> bool:
    """Whether a flag's value is a list, or a list or None."""
    members = (annotation, *typing.get_args(annotation))
    return any(typing.get_origin(member) in (tuple, list) for member in members)


def nested(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as nested groups."""
    data: dict[str, Any] = {}
    for key, value in flags.items():
        *groups, last = key.split(".")
        inner = data
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[last] = value
    return data
