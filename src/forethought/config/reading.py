"""Dataclasses from plain data and back, with one check of names, types and ranges."""

import dataclasses
import math
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar, Union

from forethought.config.errors import ConfigError, nearest, require, unknown

T = TypeVar("T")


def to_dict(config: Any) -> dict[str, Any]:
    """Every field, nested, in plain JSON and YAML types; a member of a union carries its `kind`."""
    tag = {"kind": config.kind} if hasattr(config, "kind") else {}
    return tag | {f.name: plain(getattr(config, f.name)) for f in dataclasses.fields(config)}


def plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def from_dict(cls: type[T], data: Any, where: str = "") -> T:
    """The instance of a configuration dataclass that `data` describes, checked.

    `where` is the dotted name of the group, for the sentences that errors show.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(
            f"{where or 'The configuration'} is {data!r}, but must be a group of keys."
        )
    annotations = field_types(cls)
    values = {}
    for key, value in data.items():
        path = f"{where}.{key}" if where else str(key)
        if key == "kind" and hasattr(cls, "kind"):
            continue
        if key not in annotations and "." in str(key):
            raise ConfigError(
                f"There is no key {path}: in a file groups are nested, as in "
                f"{{{str(key).replace('.', ': {')}: {value}{'}' * (str(key).count('.') + 1)}."
            )
        if key not in annotations:
            known = [f"{where}.{name}".lstrip(".") for name in annotations]
            see = "" if nearest(path, known) else f"There are {listed(annotations) or 'none'}."
            raise unknown("key", path, known, see)
        if isinstance(value, str) and union_members(annotations[key]):
            value = {"kind": value}  # `schedule: cosine`, as the flag `--agent.schedule cosine`
        if isinstance(value, Mapping) and union_members(annotations[key]):
            value = {"kind": default_kind(cls, key), **value}
        values[key] = _read(annotations[key], value, path)
    for f in dataclasses.fields(cls):  # type: ignore[arg-type]
        missing = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if missing and f.name not in values:
            raise ConfigError(f"{where}.{f.name}".lstrip(".") + " is missing.")
    return cls(**values)


def field_types(cls: type) -> dict[str, Any]:
    """The annotations of a configuration dataclass by field name, in the order of its fields."""
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def union_members(annotation: Any) -> dict[str, type]:
    """The dataclasses of a tagged union `A | B` by their `kind`; empty for any other type."""
    members = typing.get_args(annotation) if _is_union(annotation) else ()
    return {member.kind: member for member in members if hasattr(member, "kind")}


def default_kind(cls: type, name: str) -> str:
    """The kind that a tagged union field has when nobody names one."""
    found = {f.name: f for f in dataclasses.fields(cls)}[name]
    make = found.default_factory
    default = found.default if make is dataclasses.MISSING else make()
    return str(getattr(default, "kind", next(iter(union_members(field_types(cls)[name])))))


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (Union, types.UnionType)


_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def _read(annotation: Any, value: Any, where: str) -> Any:
    """`value`, checked against a field's annotation and brought into its type."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        return value
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        return from_dict(annotation, value, where)
    if _is_union(annotation):
        return _read_union(annotation, value, where)
    if origin is Literal:
        same = [a for a in args if a == value and isinstance(a, bool) == isinstance(value, bool)]
        require(bool(same), where, value, f"one of {listed(args)}")
        return same[0]
    if origin in (tuple, list):
        return origin(_read_items(annotation, value, where))
    if origin is dict:
        if isinstance(value, Mapping):
            return {key: _read(args[1], item, f"{where}.{key}") for key, item in value.items()}
        raise ConfigError(f"{where} is {value!r}, but must be a group of keys.")
    # A bool is an int to Python, but `workers: 1` or `horizon: true` is a slip of the pen.
    if annotation is float and type(value) is int:
        require(abs(value) <= sys.float_info.max, where, value, "finite")
        return float(value)
    if annotation is int and type(value) is float and value.is_integer():
        return int(value)
    require(type(value) is annotation, where, repr(value), _WORDS.get(annotation, str(annotation)))
    require(annotation is not float or math.isfinite(value), where, value, "finite")
    return value


def _read_items(annotation: Any, value: Any, where: str) -> list[Any]:
    """The items of a `list[X]`, `tuple[X, ...]` or `tuple[X, Y]`."""
    args = typing.get_args(annotation)
    require(isinstance(value, list | tuple), where, repr(value), "a list")
    if typing.get_origin(annotation) is list or args[-1] is ...:
        args = (args[0],) * len(value)
    require(len(value) == len(args), where, value, f"a list of {len(args)}")
    return [_read(arg, item, f"{where}[{i}]") for i, (arg, item) in enumerate(zip(args, value))]


def _read_union(annotation: Any, value: Any, where: str) -> Any:
    members = [member for member in typing.get_args(annotation) if member is not type(None)]
    tagged = union_members(annotation)
    if value is None and len(members) < len(typing.get_args(annotation)):
        return None
    if tagged and isinstance(value, Mapping):
        kind = value["kind"]
        if kind not in tagged:
            raise unknown(f"{where} kind", str(kind), tagged, f"Choose from {listed(tagged)}.")
        for key in value:
            owners = [name for name, cls in tagged.items() if key in field_types(cls)]
            if owners and kind not in owners:
                raise ConfigError(
                    f"{where}.{key} belongs to {where} of kind {listed(owners)}, but this run "
                    f"has kind {kind}; leave it out or change the kind."
                )
        return from_dict(tagged[kind], value, where)
    for member in members[:-1]:
        try:
            return _read(member, value, where)
        except ConfigError:
            continue  # the last member's sentence is the one shown
    return _read(members[-1], value, where)


def listed(words: Iterable[object]) -> str:
    return ", ".join(map(str, words))


def either(words: Iterable[str]) -> str:
    *others, last = words
    return f"{listed(others)} or {last}" if others else last
