"""docs/faults.md promises nothing that no test shows; figures are those of docs/results."""

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
LEARNING = json.loads(
    (ROOT / "docs" / "results" / "learning_tdmpc2_small.json").read_text(encoding="utf-8")
)


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


# What was learned


def rows_of_tasks(page: Path) -> dict[str, list[str]]:
    """By task, the other cells of every row that begins with one and holds numbers only."""
    found = {}
    for line in page.read_text(encoding="utf-8").splitlines():
        task, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        if re.fullmatch(r"`dmc:[\w-]+`", task) and all(re.fullmatch(r"[\d.]+", c) for c in cells):
            assert task not in found, f"{task} stands twice in {page.name}"
            found[task.strip("`")] = cells
    return found


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_the_means_in_the_file_are_those_of_its_episodes():
    for task in LEARNING["tasks"].values():
        for run in task["runs"]:
            assert run["return_mean"] == pytest.approx(mean(run["returns"]))
        for key in ("return_mean", "random_return_mean"):
            assert task[key] == pytest.approx(mean([run[key] for run in task["runs"]]))


def test_the_readme_has_the_means_of_the_learning_runs():
    wanted = {
        name: [f"{task[key]:.1f}" for key in ("return_mean", "published", "random_return_mean")]
        for name, task in LEARNING["tasks"].items()
    }
    assert rows_of_tasks(ROOT / "README.md") == wanted


def test_the_page_of_tdmpc2_has_every_seed_of_the_learning_runs():
    wanted = {}
    for name, task in LEARNING["tasks"].items():
        assert [run["seed"] for run in task["runs"]] == [1, 2, 3]
        keys = ("return_mean", "random_return_mean", "published")
        values = [run["return_mean"] for run in task["runs"]] + [task[key] for key in keys]
        wanted[name] = [f"{value:.1f}" for value in values]
    page = ROOT / "docs" / "agents" / "tdmpc2.md"
    assert rows_of_tasks(page) == wanted
    told = f"commit {LEARNING['commit'][:7]}, {LEARNING['date_utc'][:10]}"
    assert told in page.read_text(encoding="utf-8")


def test_the_span_of_scores_in_the_readme_is_that_of_the_seeds():
    runs = LEARNING["tasks"]["dmc:cartpole-swingup"]["runs"]
    random = [run["random_return_mean"] for run in runs]
    agent = [run["return_mean"] for run in runs]
    told = (
        f"Random play reaches {min(random):.0f} to {max(random):.0f}, "
        f"the agent {min(agent):.0f} to {max(agent):.0f} at the end"
    )
    assert told in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readme_says_of_a_resume_what_was_measured():
    file = ROOT / "docs" / "results" / "faults_beside_sb3.json"
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    (row,) = [row for row in rows if row["fault"].startswith("500 steps")]
    difference = row["measured"]["sb3"]["largest_difference"]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "500 + 500 steps against 1000" in text
    assert f"differs by up to {difference:.2f} in a parameter" in text


def test_the_page_of_datasets_tells_the_measured_speed():
    file = ROOT / "docs" / "results" / "offline_speed.json"
    result = json.loads(file.read_text(encoding="utf-8"))
    mapped = result["summary"]["episodes mapped"]
    text = (ROOT / "docs" / "datasets.md").read_text(encoding="utf-8")
    told = [
        f"{result['speed_of_memory']['episodes']:.1%} of the speed",
        f"drawn per transition: {result['speed_of_memory']['transitions']:.1%}",
        f"{mapped['sample_ms']['median']:.2f} ms of {mapped['update_ms']['median']:.1f} ms",
        f"took {result['summary']['cold']['sample_ms']['median']:.1f} ms to draw",
        f"Measured {result['date_utc'][:10]}",
    ]
    assert [words for words in told if words not in text] == []
    assert result["rows"] >= 10_000_000
