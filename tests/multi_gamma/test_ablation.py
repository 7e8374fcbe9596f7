"""The ablation's arithmetic."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

import pytest

from forethought.cli import training_asked
from forethought.config import to_dict
from forethought.tracking import RunDirectory
from tests.multi_gamma.agents import (
    AUX,
)


@pytest.fixture
def ablation(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("multi_gamma_ablation")


def made(task: str, variant: str, seed: int, auc: float) -> dict[str, Any]:
    auxiliary = {} if variant == "a0" else {"g0.97": [[100, auc, 2.0], [200, 1.0, 1.0]]}
    about = {"task": task, "variant": variant, "seed": seed, "auxiliary": auxiliary}
    return about | {"auc": auc, "final_return": 2 * auc, "peak_memory_mb": 300.0 + seed}


def test_the_ablation_compares_seed_by_seed(ablation: Any) -> None:
    """Gains of 2, 4 and 6 on a mean of 100: mean 4, interval 4 +- 4.303 x 2 / sqrt(3) = 4.97."""
    base = [made("x", "a0", seed, auc) for seed, auc in ((1, 50), (2, 100), (3, 150))]
    other = [made("x", "a1", seed, auc) for seed, auc in ((3, 156), (1, 52), (2, 104))]
    report = ablation.compare(base + other)
    gain = report["x"]["a1"]["auc_gain_percent"]
    assert gain["each"] == pytest.approx([2, 4, 6])
    assert (gain["mean"], gain["low"], gain["high"]) == pytest.approx(
        (4, -0.9686, 8.9686), abs=1e-3
    )
    assert report["x"]["a1"]["final_return_minus_a0"]["each"] == [4, 8, 12]
    assert report["x"]["a0"]["auc"]["seed_std"] == 50
    assert "auc_gain_percent" not in report["x"]["a0"]
    assert report["x"]["a1"]["auxiliary_mean"]["g0.97"] == [[100, 104, 2.0], [200, 1.0, 1.0]]


@pytest.mark.parametrize(
    ("second_task", "percent", "met"),
    [(104.0, 15.0, True), (102.0, 10.0, False), (104.0, 15.1, False)],
)
def test_the_ablations_success_test_asks_for_two_tasks_and_a_low_cost(
    ablation: Any, second_task: float, percent: float, met: bool
) -> None:
    gained = {"x": 103.0, "y": second_task}
    runs = [made(task, "a0", seed, 100.0) for task in "xy" for seed in (1, 2)]
    runs += [made(task, "a4", seed, gained[task]) for task in "xy" for seed in (1, 2)]
    cost = {"overhead_percent": percent, "parameters_percent": 10.0}
    judged = ablation.verdict(ablation.compare(runs), {"a4": cost})
    assert judged["met"] is judged["variants"]["a4"]["met"] is met
    assert f"was met by {'a4' if met else 'none of them'}; with time alone" in judged["sentence"]
    heavy = ablation.verdict(ablation.compare(runs), {"a4": {**cost, "parameters_percent": 17.0}})
    assert heavy["met"] is False and heavy["variants"]["a4"]["met_by_time_alone"] is met


def test_the_ablation_judges_nothing_by_a_part_of_its_runs(ablation: Any) -> None:
    runs = [made(task, v, seed, 100.0) for task in "xy" for v in ("a0", "a4") for seed in (1, 2)]
    cost = {"a4": {"overhead_percent": 1.0, "parameters_percent": 1.0}}
    one_task = [run for run in runs if run["task"] == "x"]
    one_seed = [run for run in runs if run["seed"] == 1]
    without_a0 = [run for run in runs if run["variant"] != "a0"]
    for found, missing in [(runs, 1), ([], 8), (one_task, 0), (one_seed, 0), (without_a0, 0)]:
        judged = ablation.verdict(ablation.compare(found), cost, missing)
        assert judged["met"] is None and "cannot be judged" in judged["sentence"]
    assert ablation.verdict(ablation.compare(runs), cost)["met"] is False


def test_the_ablation_reads_errors_over_time_from_a_run(ablation: Any, run: Path) -> None:
    found = ablation.auxiliary_over_time(run)
    assert {gamma: [row[0] for row in rows] for gamma, rows in found.items()} == {
        "g0.97": [110, 220],
        "g0.995": [110, 220],
    }
    assert ablation.gammas_of("a0") == () and ablation.gammas_of("a3") == AUX


def test_the_ablations_picture_has_every_run_and_every_discount(
    ablation: Any, tmp_path: Path
) -> None:
    """Two seeds and their mean for each of two variants; two errors of one discount."""
    runs = [made("x", variant, seed, 100.0) for variant in ("a0", "a1") for seed in (1, 2)]
    runs = [run | {"curve": [[0.0, 1.0], [100.0, float(run["seed"])]]} for run in runs]
    figure = ablation.draw({"tasks": ablation.compare(runs), "runs": runs}, tmp_path / "a.png")
    returns, mae, ce = figure.axes
    assert [list(line.get_ydata()) for line in returns.lines[:3]] == [[1, 1], [1, 2], [1, 1.5]]
    assert len(returns.lines) == 6
    assert list(mae.lines[0].get_ydata()) == [100.0, 1.0]
    assert list(ce.lines[0].get_ydata()) == [2.0, 1.0]
    assert (tmp_path / "a.png").stat().st_size > 0


def test_the_ablation_reports_no_run_of_another_configuration(
    ablation: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of other evaluations, for instance: their curves would be compared with each other."""
    options = argparse.Namespace(
        out=tmp_path, steps=1000, eval_every=500, eval_episodes=3, report=True
    )
    begun: list[Path] = []

    def train(run: Path, *training: str, resuming: tuple[str, ...]) -> None:
        config, _ = training_asked(list(training))  # type: ignore[misc]
        directory = RunDirectory.create(run, to_dict(config), "tdmpc2", config.task, config.seed)
        directory.update(status="done")
        begun.append(run)

    monkeypatch.setattr(ablation, "train_or_resume", train)
    monkeypatch.setattr(ablation, "facts_of", lambda run, options: {})
    work = ("dmc:reacher-easy", "a1", 2)
    assert ablation.learn(*work, options) is None
    options.report = False
    ablation.learn(*work, options)
    options.report = True
    assert ablation.learn(*work, options) == dict(task=work[0], variant="a1", seed=2)
    options.eval_every = 250
    with pytest.raises(SystemExit, match=r"eval\.every_agent_steps: 500 there, 250 here"):
        ablation.learn(*work, options)
    assert len(begun) == 1
