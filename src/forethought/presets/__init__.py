"""Presets: named YAML files with part of a configuration, and the reading of such files.

A preset starts with `about:`, one line for people, and then holds any groups of a run's
configuration. Its mapping `agents:` holds, by agent name, what applies to that agent only.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from forethought.config import ConfigError, layer, unknown

FOLDER = Path(__file__).parent


class _Loader(yaml.SafeLoader):
    """Safe YAML with the plain values of YAML 1.2: `3e-4` is a number, and `off` is a word.

    PyYAML follows 1.1, where 3e-4 is text and `compile: off` means false. Aliases are refused:
    a few lines of them stand for more values than any memory holds.
    """

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in rules if not tag.endswith(":bool")]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """The next node of the file."""
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            problem = "aliases (*name) are not taken; write the value out"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
        return super().compose_node(parent, index)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def parse(text: str) -> Any:
    """The value of a YAML text; whatever is wrong with it is a YAMLError."""
    try:
        return yaml.load(text, _Loader)
    except (ValueError, RecursionError) as error:  # `!!int x`, or lists in lists in lists
        raise yaml.MarkedYAMLError(problem=f"it cannot be read ({error})") from error


def yaml_problem(error: Exception) -> str:
    """Where a text is no YAML, and why, to follow a sentence: ` in line 3: ...`."""
    mark = getattr(error, "problem_mark", None)
    line = f" in line {mark.line + 1}" if mark else ""
    return f"{line}: {getattr(error, 'problem', None) or 'it cannot be parsed'}"


def parse_scalar(text: str) -> Any:
    """The value that a flag's text would have in YAML; text that is no YAML stays text."""
    try:
        return parse(text)
    except yaml.YAMLError:
        return text


def names() -> list[str]:
    """All presets, in alphabetical order."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load(name: str) -> dict[str, Any]:
    """A preset as it stands in its file."""
    if name not in names():
        raise unknown("preset", name, names(), "'forethought list presets' shows all.")
    return load_file(FOLDER / f"{name}.yaml")


def load_file(path: Path) -> dict[str, Any]:
    """A configuration file: one YAML mapping, or nothing at all."""
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


def for_agent(name: str, agent_name: str) -> dict[str, Any]:
    """The layer that a preset means for one agent: the agent's own part wins over the rest."""
    data = load(name)
    agents = data.pop("agents", {})
    data.pop("about", None)
    if not data and agent_name not in agents:
        others = ", ".join(agents) or "no agent"
        raise ConfigError(f"Preset {name} has nothing for agent {agent_name}; it is for {others}.")
    return layer(data, agents.get(agent_name, {}))


def layers(preset_names: Iterable[str], file: Path | None, agent_name: str) -> list[dict[str, Any]]:
    """The layers of the named presets and then of the configuration file, for one agent."""
    found = [for_agent(name, agent_name) for name in preset_names]
    return found if file is None else [*found, load_file(file)]
