"""docs/faults.md promises nothing that no test shows; its figures are those of docs/results."""

import ast
import json
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "faults.md"
TEST_LINK = re.compile(r"\[(test_\w+)\]\(\.\./(tests/[\w/]+\.py)\)")
SHOWN = TEST_LINK.findall(PAGE.read_text(encoding="utf-8"))
"""(function, file) of every test that the page names."""
ROWS = [
    line
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and line.count("|") == 6 and "| shown by |" not in line
]
"""What happens when, over all tables."""
FIGURES = ("faults", "faults_beside_sb3")


@cache
def functions(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(("function", "file"), SHOWN, ids=[name for name, _ in SHOWN])
def test_every_test_that_the_page_names_exists(function, file):
    assert (ROOT / file).is_file()
    assert function in functions(file)


def test_every_row_is_shown_by_a_test():
    assert len(ROWS) >= 30
    for row in ROWS:
        assert TEST_LINK.search(row.split("|")[5]), row


def test_every_fault_case_is_on_the_page():
    """By its number: a case may have several tests, of which the page names those that tell."""
    files = sorted((ROOT / "tests" / "faults").glob("test_*.py"))
    names = {name for file in files for name in functions(str(file.relative_to(ROOT)))}
    written = {found[1] for name in names if (found := re.match(r"test_case_(\d+)_", name))}
    shown = {found[1] for name, _ in SHOWN if (found := re.match(r"test_case_(\d+)_", name))}
    assert written - shown == set()
    assert {file.name for file in files} - {Path(file).name for _, file in SHOWN} == set()


@pytest.mark.parametrize("name", FIGURES)
def test_the_figures_on_the_page_are_those_of_the_result(name):
    """The script puts both in their place; neither was changed by hand since."""
    result = json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    text = PAGE.read_text(encoding="utf-8")
    part = text.partition(f"<!-- {name}: begin -->")[2].partition(f"<!-- {name}: end -->")[0]
    assert f"Measured {result['date_utc'][:10]} by `{result['command']}`" in part
    if name == "faults":
        kills, flips = result["kills"], result["flips"]
        assert f"| kills that were resumed | {kills['resumed']} of {kills['kills']} |" in part
        assert f"| flipped bits detected | {flips['detected']} of {flips['flips']} |" in part
        assert len(kills["each"]) == kills["kills"] and len(flips["each"]) == flips["flips"]
        assert kills["kills"] >= 200 and flips["flips"] >= 200  # a trial is no result
    else:
        for row in result["rows"]:
            assert f"| {row['fault']} | {row['sb3']} | {row['ours']} |" in part
