"""Results and pages as the tests of figures read them."""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def result(name: str) -> dict[str, Any]:
    """A file of docs/results."""
    return json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def page(name: str) -> str:
    """The text of a page, by its place under the root."""
    return (ROOT / name).read_text(encoding="utf-8")


def absent(lines: list[str], text: str) -> list[str]:
    """The lines that a text has not."""
    return [line for line in lines if line not in text]


def row(*cells: object) -> str:
    """A row of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def span(interval: list[float]) -> str:
    low, high = interval
    return f"{low:.1f} to {high:.1f}"


def commit_of(runs: list[dict[str, Any]]) -> str:
    """The beginning of the one commit that made all runs of a figure, unchanged."""
    (commit,) = {run["commit"] for run in runs}
    assert re.fullmatch(r"[0-9a-f]{40}", commit), f"made by {commit}"
    return commit[:7]


def three_seeds(runs: list[dict[str, Any]], episodes: int) -> list[str]:
    """The scores of seeds 1, 2 and 3, each the mean of so many episodes."""
    assert [run["seed"] for run in runs] == [1, 2, 3]
    for run in runs:
        assert len(run["returns"]) == episodes
        assert abs(run["return_mean"] - mean(run["returns"])) <= 1e-6 * abs(run["return_mean"])
    return [f"{run['return_mean']:.1f}" for run in runs]
