"""How configuration files are read: YAML, with fewer surprises."""

from __future__ import annotations

import re
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.resolver import Resolver


class Plain(Resolver):
    """The plain values of YAML 1.2: `3e-4` is a number, and `off` is a word.

    PyYAML follows 1.1, where 3e-4 is text and `compile: off` means false. Aliases are refused:
    a few lines of them stand for more values than any memory holds.
    """

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in rules if not tag.endswith(":bool")]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """The next node of the file."""
        if self.check_event(yaml.AliasEvent):  # type: ignore[attr-defined]
            mark = self.peek_event().start_mark  # type: ignore[attr-defined]
            problem = "aliases (*name) are not taken; write the value out"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
        node: yaml.Node | None = super().compose_node(parent, index)  # type: ignore[misc]
        if isinstance(node, yaml.MappingNode):
            _refuse_repeated_keys(node)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """The value of a node; of one that is not what its tag says (`!!int x`), an error."""
        try:
            return super().construct_object(node, deep)  # type: ignore[misc]
        except (ValueError, LookupError, AttributeError, ArithmeticError) as error:
            problem = f"it cannot be read ({error})"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from error


def _refuse_repeated_keys(node: yaml.MappingNode) -> None:
    """PyYAML takes the last and says nothing: what stood under the first would have no effect."""
    seen = set()
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        if key.value in seen:
            problem = f"{key.value} stands there twice; write it once"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
        seen.add(key.value)


Plain.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
Plain.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


class PythonLoader(Plain, yaml.SafeLoader):
    """Safe YAML wherever there is Python."""


LOADERS: list[type[Any]] = [PythonLoader]
"""The last is the one to use."""

if yaml.__with_libyaml__:

    class LibraryLoader(Plain, Composer, yaml.CSafeLoader):
        """The same in a sixth of the time, and tabs between words are taken too: libyaml reads,
        and nodes are composed here, where aliases are seen."""

        def __init__(self, text: str) -> None:
            Composer.__init__(self)
            yaml.CSafeLoader.__init__(self, text)

    LOADERS.append(LibraryLoader)
