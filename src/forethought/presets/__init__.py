"""Presets: named YAML files with part of a configuration, and the reading of such files.

A preset starts with `about:`, one line for people, and then holds any groups of a run's
configuration. Its mapping `agents:` holds, by agent name, what applies to that agent only. A group
with `if_kind: KIND` is left out where a preset before it has chosen another kind for that group.
"""

import copy
import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from forethought.config import ConfigError, layer, unknown

FOLDER = Path(__file__).parent


def parse(text: str) -> Any:
    """The value of a YAML text; whatever is wrong with it is a YAMLError."""
    import yaml  # here and below: 'forethought doctor' must start where it is missing

    from forethought.presets.loader import LOADERS

    try:
        try:
            return yaml.load(text, LOADERS[-1])
        except yaml.YAMLError:
            # It says more exactly where a text goes wrong, and takes some that libyaml refuses.
            return yaml.load(text, LOADERS[0])
    except (ValueError, RecursionError) as error:  # half a character, or lists in lists in lists
        raise yaml.MarkedYAMLError(problem=f"it cannot be read ({error})") from error


def yaml_problem(error: Exception) -> str:
    """Where a text is no YAML, and why, to follow a sentence: ` in line 3: ...`."""
    mark = getattr(error, "problem_mark", None)
    line = f" in line {mark.line + 1}" if mark else ""
    return f"{line}: {getattr(error, 'problem', None) or 'it cannot be parsed'}"


def parse_scalar(text: str) -> Any:
    """The value that a flag's text would have in YAML; text that is no YAML stays text."""
    if text in ("true", "false"):  # what a flag alone stands for, also where there is no YAML
        return text == "true"
    import yaml

    try:
        return parse(text)
    except yaml.YAMLError:
        return text


def names() -> list[str]:
    """All presets, in alphabetical order."""
    return list(_names(FOLDER))


def load(name: str) -> dict[str, Any]:
    """A preset as it stands in its file."""
    if name not in names():
        raise unknown("preset", name, names(), "'forethought list presets' shows all.")
    return copy.deepcopy(_shipped(FOLDER / f"{name}.yaml"))


# Presets are part of the package and do not change while it runs; a report looks at all of them.
@functools.cache
def _names(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in folder.glob("*.yaml")))


@functools.cache
def _shipped(path: Path) -> dict[str, Any]:
    return load_file(path)


def load_file(path: Path) -> dict[str, Any]:
    """A configuration file: one YAML mapping, or nothing at all."""
    import yaml

    try:
        data = parse(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(f"The configuration {path} cannot be read: {reason}.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"The configuration {path} is not YAML{yaml_problem(error)}.") from error
    if not isinstance(data, dict | None):
        raise ConfigError(f"The configuration {path} must hold keys with values, not {data!r}.")
    return data or {}


def for_agent(
    name: str, agent_name: str, so_far: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The layer that a preset means for one agent: the agent's own part wins over the rest.

    `so_far` is what the presets before it say, by which the groups with `if_kind` are kept or not.
    """
    data = load(name)
    agents = data.pop("agents", {})
    data.pop("about", None)
    if not data and agent_name not in agents:
        others = ", ".join(agents) or "no agent"
        raise ConfigError(f"Preset {name} has nothing for agent {agent_name}; it is for {others}.")
    return _fitting(layer(data, agents.get(agent_name, {})), so_far or {})


def layers(preset_names: Iterable[str], file: Path | None, agent_name: str) -> list[dict[str, Any]]:
    """The layers of the named presets and then of the configuration file, for one agent."""
    found: list[dict[str, Any]] = []
    so_far: dict[str, Any] = {}
    for name in preset_names:
        found.append(for_agent(name, agent_name, so_far))
        so_far = layer(so_far, found[-1])
    return found if file is None else [*found, load_file(file)]


def _fitting(data: Mapping[str, Any], so_far: Mapping[str, Any]) -> dict[str, Any]:
    """The layer without the groups that are for a kind which was not chosen."""
    kept: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            before = so_far.get(key)
            before = {"kind": before} if isinstance(before, str) else before or {}
            wanted = value.get("if_kind")
            if wanted is not None and before.get("kind", wanted) != wanted:
                continue
            value = _fitting({k: v for k, v in value.items() if k != "if_kind"}, before)
        kept[key] = value
    return kept
