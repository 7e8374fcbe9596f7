"""docs/agents/dqn.md has every option, preset, metric, and a test for each finding."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from functools import cache
from pathlib import Path

import pytest

from forethought import config as conf
from forethought import presets
from forethought.agents.dqn import DQNConfig
from forethought.agents.dqn import config as options
from forethought.agents.dqn.update import METRICS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "agents" / "dqn.md"
TEXT = PAGE.read_text(encoding="utf-8")
TEST = re.compile(r"\[(test_\w+)\]\((?:\.\./)+(tests/[\w/]+\.py)\)")


def table(begins: str) -> list[list[str]]:
    """The rows below the line that a table begins with."""
    lines = TEXT.split(begins, 1)[1].splitlines()[2:]
    rows = lines[: next(i for i, line in enumerate(lines) if not line.startswith("|"))]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


def cell(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return "none" if value is None else str(value).lower()
    if isinstance(value, tuple | list):
        return str(list(value))
    if isinstance(value, float):
        return f"{value:g}"
    return f"{value:,}" if isinstance(value, int) else str(getattr(value, "kind", value))


def every_option(cls, prefix="agent."):
    """(key, kind, default, help) of every option of every kind."""
    sources = [inspect.getsource(c) for c in cls.__mro__ if dataclasses.is_dataclass(c)]
    text = " ".join(" ".join(sources).split())
    for name, annotation in conf.field_types(cls).items():
        kinds = conf.union_members(annotation)
        yield f"`{prefix}{name}`", "", cell(getattr(cls(), name)), text
        for kind, member in kinds.items():
            for key, _, default, help_text in every_option(member, f"{prefix}{name}."):
                yield key, kind, default, help_text


def test_every_option_is_on_the_page_with_its_default_and_help():
    shown = table("| key | of kind | default | meaning |")
    wanted = list(every_option(DQNConfig))
    assert [(key, kind) for key, kind, *_ in shown] == [(key, kind) for key, kind, *_ in wanted]
    for (key, _, default, meaning), (*_, value, help_text) in zip(shown, wanted, strict=True):
        assert default == value or (default, value) == ("derived", "none"), key
        assert meaning.split(" Kinds: ")[0] in help_text, key


def test_presets_on_the_page_have_the_values_of_their_files():
    names = re.findall(r"`(\w+)`", re.search(r"^\| key \| `nature_code`.*$", TEXT, re.M)[0])
    rows = table("| key | `nature_code`")
    files = {name for name in presets.names() if name.startswith("dqn_")}
    assert {f"dqn_{name}" for name in names} == files - {"dqn_nature_text"}
    for column, name in enumerate(names, start=1):
        layers = presets.layers([f"dqn_{name}"], None, "dqn")
        run = conf.build_run_config("dqn", "atari:Pong", DQNConfig, layers)
        values = conf.flatten(conf.to_dict(run))
        for row in rows:
            key = row[0].strip("`")
            assert row[column] == (cell(values[key]) if key in values else "-"), (name, key)


def test_every_metric_is_explained():
    rows = [row[0].strip("`") for row in table("| column | meaning | what to look for |")]
    wanted = {*METRICS, "epsilon", "dead_units", "nonfinite_updates"} - {"nonfinite"}
    assert set(rows) == wanted


@cache
def functions(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(("function", "file"), sorted(set(TEST.findall(TEXT))))
def test_every_test_that_the_page_names_exists(function, file):
    assert function in functions(file)


def test_all_22_findings_and_every_confirmed_line_have_a_test():
    findings = table("| | finding | here | shown by |")
    assert [row[0] for row in findings] == [str(n) for n in range(1, 23)]
    confirmed = table("| item | here | shown by |")
    assert len(confirmed) == 11
    for number, *_, shown in findings:
        assert re.search(rf"test_findings?_(\d+_)*{number}_", shown), f"finding {number}"
    assert all("test_confirmed_" in row[-1] for row in confirmed)


def test_every_kind_of_an_option_says_what_it_is():
    kinds = [c for c in vars(options).values() if dataclasses.is_dataclass(c)]
    assert all(c.__doc__ and not c.__doc__.startswith(c.__name__ + "(") for c in kinds)
