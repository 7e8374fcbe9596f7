"""Seed 003, phase 5: metrics and snapshots."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forethought import files
from forethought.agents.tdmpc2.discounts import (
    AuxiliaryLoss,
    metric_names,
    snapshot,
)
from tests.multi_gamma.agents import (
    AUX,
    ON,
    PAGE,
    agent_with,
    assert_same,
    stir,
)
from tests.multi_gamma.reference import slow_two_hot
from tests.tdmpc2_agents import fill, make_batch


def test_phase_5_metrics_have_the_names_and_the_page_explains_them() -> None:
    assert set(metric_names(AUX)) == {
        "aux_value_ce/g0.97", "aux_value_ce/g0.995", "aux_value_ce/mean",
        "aux_value_mean/g0.97", "aux_value_mean/g0.995",
        "aux_value_std/g0.97", "aux_value_std/g0.995",
    }  # fmt: skip
    agent = agent_with()
    metrics = agent.update(make_batch(agent), agent.draw_noise())
    assert set(metric_names(AUX)) <= metrics.keys() & set(agent.metric_names)
    page = PAGE.read_text(encoding="utf-8")
    for name in {*(name.partition("/g")[0] for name in metric_names(AUX)), "aux_value_ce/mean"}:
        assert f"| `{name}" in page


def test_phase_5_mean_and_std_are_those_of_the_decoded_predictions() -> None:
    agent = agent_with()
    stir(agent)
    z = torch.rand(3, 8, 16, generator=torch.Generator().manual_seed(6))
    loss, heads = agent.learner.auxiliary, agent.model.aux_value
    assert loss is not None and heads is not None
    _, metrics = loss(z, torch.zeros(3, 8), torch.zeros(3, 8), torch.zeros(3, 8))
    decoded = agent.model.two_hot.decode(heads(z)[:, :, 1]).flatten().tolist()
    mean = sum(decoded) / 24
    assert metrics["aux_value_mean/g0.995"].item() == pytest.approx(mean, rel=1e-4)
    std = math.sqrt(sum((x - mean) ** 2 for x in decoded) / 24)
    assert metrics["aux_value_std/g0.995"].item() == pytest.approx(std, rel=1e-4)


def taken(debug: bool, examples: int = 8) -> tuple[dict[str, Any], AuxiliaryLoss, list[Tensor]]:
    """A snapshot of stirred heads, with what it was made from."""
    agent = agent_with(replace(ON, debug_logging=debug, log_num_examples=examples))
    stir(agent)
    g = torch.Generator().manual_seed(7)
    given = [torch.rand(3, 16, 16, generator=g), *(torch.randn(3, 16, generator=g) for _ in "rtv")]
    given[2] = (given[2] > 1).float()
    loss = agent.learner.auxiliary
    assert loss is not None
    with torch.no_grad():
        return snapshot(loss, *given), loss, given


@pytest.mark.parametrize(
    ("debug", "examples", "shown"),
    [(False, 8, 4), (False, 3, 3), (True, 8, 8), (True, 3, 3), (True, 99, 16)],
)
def test_phase_5_snapshots_are_bounded_by_log_num_examples(
    debug: bool, examples: int, shown: int
) -> None:
    made, _, _ = taken(debug, examples)
    assert len(made["examples"]) == shown
    assert made["slices"] == 16
    assert json.loads(json.dumps(made)) == made


def test_phase_5_a_short_snapshot_shows_distribution_target_and_prediction() -> None:
    made, _, _ = taken(False)
    assert made["tier"] == "standard"
    for example in made["examples"]:
        assert set(example) == {"reward", "g0.97", "g0.995"}
        for gamma in AUX:
            one = example[f"g{gamma}"]
            assert set(one) == {"target", "prediction", "abs_error", "distribution"}
            assert sum(one["distribution"]) == pytest.approx(1, abs=1e-4)
            assert len(one["target"]) == 3
    assert "ce_per_step" not in made["per_gamma"]["g0.97"]


def test_phase_5_a_debug_snapshot_shows_what_the_numbers_are_made_of() -> None:
    """Every number worked out again from the raw tensors, for the second slice at 0.995."""
    made, loss, (z, reward, terminated, value) = taken(True)
    assert made["tier"] == "debug"
    example, one = made["examples"][1], made["examples"][1]["g0.995"]
    bootstrap = [(1 - e) * v for e, v in zip(terminated[:, 1].tolist(), value[:, 1].tolist())]
    assert example["bootstrap"] == pytest.approx(bootstrap)
    target = [r + 0.995 * v for r, v in zip(reward[:, 1].tolist(), bootstrap)]
    assert one["target"] == pytest.approx(target, rel=1e-5)
    share = loss.heads(z)[:, 1, 1].softmax(-1)
    decoded = loss.two_hot.decode(loss.heads(z)[:, 1, 1]).tolist()
    assert one["prediction"] == pytest.approx(decoded, rel=1e-4)
    errors = [abs(a - b) for a, b in zip(decoded, target)]
    assert one["abs_error"] == pytest.approx(errors, rel=1e-3, abs=1e-4)
    for t in range(3):
        best = sorted(range(101), key=lambda k: -share[t, k].item())[:2]
        assert one["top_bins"][t] == best
        assert one["top_probabilities"][t] == pytest.approx(share[t, best].tolist(), rel=1e-5)
        two_hot = slow_two_hot(target[t], 101, -10, 10)
        for k, weight in zip(one["target_bins"][t], one["target_weights"][t], strict=True):
            assert two_hot[k] == pytest.approx(weight, abs=1e-4)
        assert sum(one["target_weights"][t]) == pytest.approx(1)


def test_phase_5_statistics_of_a_snapshot_are_over_all_slices() -> None:
    made, loss, (z, reward, terminated, value) = taken(True)
    given = made["per_gamma"]["g0.97"]
    y = reward + 0.97 * (1 - terminated) * value
    predicted = loss.two_hot.decode(loss.heads(z)[:, :, 0])
    assert given["mae"] == pytest.approx((predicted - y).abs().mean().item(), rel=1e-4)
    rmse = ((predicted - y) ** 2).mean().sqrt().item()
    assert given["rmse"] == pytest.approx(rmse, rel=1e-4)
    ce = -(loss.two_hot.encode(y) * loss.heads(z)[:, :, 0].log_softmax(-1)).sum(-1).mean(1)
    assert given["ce_per_step"] == pytest.approx(ce.tolist(), rel=1e-4)
    weighted = sum(0.5**t * ce[t].item() for t in range(3)) / 3
    assert given["ce"] == pytest.approx(weighted, rel=1e-4)


def test_phase_5_a_snapshot_changes_nothing_of_training_and_comes_out_the_same_again() -> None:
    agent, undisturbed = agent_with(), agent_with()
    for one in (agent, undisturbed):
        fill(one)
        one.train(2)
    rows = agent.replay.last_draw()
    first, again = agent.snapshots(100), agent.snapshots(100)
    assert first == again
    assert first["multi_gamma"] != agent.snapshots(200)["multi_gamma"]  # other slices
    assert agent.replay.last_draw() == rows
    for one in (agent, undisturbed):
        one.train(2)
    assert_same(agent.state()[1], undisturbed.state()[1])


def test_phase_5_before_replay_holds_a_slice_there_is_no_snapshot() -> None:
    assert agent_with().snapshots(0) == {}


def test_phase_5_a_run_leaves_a_snapshot_at_every_evaluation(run: Path) -> None:
    found = sorted(path.name for path in (run / "snapshots").iterdir())
    assert found == ["multi_gamma-110.json", "multi_gamma-220.json"]
    data = files.read_json(run / "snapshots" / found[1])
    assert (data["agent_steps"], data["primary_gamma"], data["gammas"]) == (220, 0.95, list(AUX))


def test_phase_5_parameter_counts_stand_once_in_the_events(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    (started,) = [line for line in lines if line["kind"] == "started"]
    assert started["parameters"]["aux_value"] == 2 * (16 * 101 + 101)
    (about,) = [line for line in lines if line["kind"] == "about"]
    assert sum("Auxiliary values" in line for line in about["lines"]) == 1


def test_phase_5_the_columns_of_train_csv_have_values(run: Path) -> None:
    header, *rows = (run / "train.csv").read_text().splitlines()
    place = header.split(",").index("aux_value_ce/g0.97")
    assert float(rows[-1].split(",")[place]) > 0
