"""Runs with uniform and prioritized replay: finding 11 (diagnostics) and exact resume."""

from __future__ import annotations

import os
import signal
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from forethought import files
from forethought.config import PrioritizedReplayConfig, UniformReplayConfig
from forethought.replay import NStepReplay, replay_metric_names
from forethought.replay.diagnostics import DRAWS, PRIORITIES, Look, describe_draws
from forethought.spaces import EnvSpec
from forethought.tracking import read_rows
from forethought.training.loop import resume_run, train_run
from tests.dqn.value_stub import register, value_run
from tests.stub_agent import training_record
from tests.tracking_stubs import ListSink

KINDS = ("uniform", "prioritized")


@pytest.fixture(autouse=True)
def _value_agent(monkeypatch):
    register(monkeypatch)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What a run that nobody stopped leaves behind, by kind; each is made once."""
    made: dict[str, Any] = {}

    def record(kind: str) -> Any:
        if kind not in made:
            out = tmp_path_factory.mktemp("undisturbed") / kind
            made[kind] = training_record(train_run(value_run(kind), out).path)
        return made[kind]

    return record


# ---- finding 11 ----


def replay_of(errors: list[float] | None, num_envs: int = 1) -> NStepReplay:
    """One open episode in each environment; in the first as many transitions of one step as errors,
    rewards -2, -1, 0, 1, 2."""
    spec = EnvSpec("t", spaces.Box(0, 9, (1,), np.float32), spaces.Discrete(2), None, 1, True)
    config: Any = UniformReplayConfig(capacity_rows=60)
    if errors is not None:
        config = PrioritizedReplayConfig(capacity_rows=60, alpha=1.0, priority_epsilon=1e-12)
    stream, cpu = np.random.default_rng(0), torch.device("cpu")
    replay = NStepReplay(spec, config, num_envs, 1, 0.9, stream, cpu)
    for i in range(6):
        row = {"obs": np.zeros(1, np.float32), "action": 0, "reward": float(i - 3)}
        for env in range(num_envs):
            replay.add({**row, "is_first": i == 0, "terminated": False, "truncated": False}, env)
    if errors is not None:
        rows = torch.tensor([[0] * len(errors), list(range(len(errors)))])
        replay.update_priorities(rows, np.array(errors))
    return replay


def test_finding_11_priorities_are_described_exactly():
    """Five transitions of priority 1, 2, 3, 4 and 5."""
    found = replay_of([1.0, 2.0, 3.0, 4.0, 5.0]).diagnostics(4, np.random.default_rng(0), beta=1.0)
    assert set(found) == {*DRAWS, *PRIORITIES}
    assert found["replay_priority_mean"] == pytest.approx(3.0, abs=1e-9)
    assert found["replay_priority_std"] == pytest.approx(2**0.5, abs=1e-9)
    assert found["replay_priority_min"] == pytest.approx(1.0, abs=1e-9)
    assert found["replay_priority_max"] == pytest.approx(5.0, abs=1e-9)
    assert found["replay_priority_q50"] == pytest.approx(3.0, abs=1e-9)
    assert found["replay_weight_min"] == pytest.approx(0.2, abs=1e-9)  # (5 / 1)^-1


def test_finding_11_uniform_replay_is_described_too():
    replay = replay_of(None)
    replay.sample(10)
    found = replay.diagnostics(5, np.random.default_rng(0))
    assert set(found) == set(DRAWS)
    assert found["replay_draws_per_row"] == 2.0  # 10 draws, 5 transitions
    assert found["replay_age_mean"] == pytest.approx(2.0, abs=0.2)  # 0 to 4, equally often
    assert found["replay_reward_0"] == pytest.approx(0.2, abs=0.05)
    assert found["replay_reward_above_1"] == pytest.approx(0.2, abs=0.05)
    assert found["replay_reward_0_to_1"] == pytest.approx(0.2, abs=0.05)
    assert found["replay_reward_below_minus_1"] == pytest.approx(0.2, abs=0.05)
    assert found["replay_reward_minus_1_to_0"] == pytest.approx(0.2, abs=0.05)
    assert sum(x for name, x in found.items() if "reward" in name) == pytest.approx(1.0)


def test_finding_11_the_newest_transition_has_age_0():
    """Only the newest has a priority to speak of: its last row is the last one stored."""
    found = replay_of([1e-9, 1e-9, 1e-9, 1e-9, 1e9]).diagnostics(8, np.random.default_rng(0), 1.0)
    assert found["replay_age_mean"] == 0.0
    found = replay_of([1e9, 1e-9, 1e-9, 1e-9, 1e-9]).diagnostics(8, np.random.default_rng(0), 1.0)
    assert found["replay_age_mean"] == found["replay_age_q90"] == 4.0
    assert found["replay_duplicates"] == pytest.approx(7 / 8)


def test_finding_11_ages_are_in_decisions_of_all_environments():
    """Two environments that store in turn: the oldest of five transitions is 8 decisions old."""
    found = replay_of([1e9, 1e-9, 1e-9, 1e-9, 1e-9], num_envs=2).diagnostics(
        8, np.random.default_rng(0), 1.0
    )
    assert found["replay_age_mean"] == found["replay_age_q90"] == 8.0


def test_finding_11_the_effective_share_of_a_batch():
    """ESS = (sum w)^2 / sum w^2: weights 1, 1 are two samples, weights 1, 0 are one of two."""
    zeros = np.zeros(2, np.int64)

    def share(*weights: float) -> float:
        look = Look(zeros, zeros, np.array(weights), zeros == 1, zeros.astype(np.float32))
        drawn, ones = np.ones(2, np.int32), np.ones(2)
        return describe_draws([look], drawn, ones)["replay_effective_share"]

    assert share(1.0, 1.0) == 1.0
    assert share(1.0, 0.0) == 0.5
    assert share(3.0, 1.0) == pytest.approx(16 / 10 / 2)


def test_finding_11_never_drawn_is_a_share_of_what_can_be_drawn():
    replay = replay_of(None)
    assert replay.diagnostics(5, np.random.default_rng(0))["replay_never_drawn"] == 1.0
    drawn = set(replay.sample(2).rows[1].tolist())
    found = replay.diagnostics(5, np.random.default_rng(0))
    assert found["replay_never_drawn"] == pytest.approx(1 - len(drawn) / 5)


@pytest.mark.parametrize("kind", KINDS)
def test_finding_11_diagnostics_reach_train_csv_and_the_sinks(kind, tmp_path, monkeypatch):
    """Every 50 of 200 steps, in the row of that step; the other rows leave the cells empty."""
    sink = ListSink()
    monkeypatch.setattr("forethought.training.loop.make_sinks", lambda *args: [sink])
    config = value_run(kind)
    run = train_run(config, tmp_path / "run")
    rows, _ = read_rows(run.path / "train.csv")
    names = replay_metric_names(config.replay)
    assert ("replay_priority_mean" in names) == (kind == "prioritized")
    told = [row["agent_steps"] for row in rows if row["replay_age_mean"]]
    assert told == ["50", "100", "150", "200"]
    for row in rows:
        cells = [bool(row[name]) for name in names]
        assert all(cells) if row["agent_steps"] in told else not any(cells)
    sent = [row for row in sink.rows("train") if row.get("replay_age_mean") is not None]
    assert [row["replay_age_mean"] for row in sent] == [
        pytest.approx(float(row["replay_age_mean"])) for row in rows if row["replay_age_mean"]
    ]
    assert float(rows[-1]["replay_draws_per_row"]) > 0


def test_finding_11_no_diagnostics_no_columns(tmp_path):
    config = value_run("uniform", replay={"diagnostics_every_agent_steps": 0})
    run = train_run(config, tmp_path / "run")
    rows, _ = read_rows(run.path / "train.csv")
    assert not [name for name in rows[0] if name.startswith("replay_")]


def test_finding_11_looking_more_often_changes_nothing_else(tmp_path):
    records = []
    for every in (25, 100):
        config = value_run("prioritized", replay={"diagnostics_every_agent_steps": every})
        record = training_record(train_run(config, tmp_path / str(every)).path)
        rows = record["train"]
        record["train"] = [
            {key: cell for key, cell in row.items() if not key.startswith("replay_")}
            for row in rows
        ]
        records.append(record)
    assert records[0] == records[1]


# ---- finding 1, in a run; exact resume ----


def test_finding_1_beta_in_a_run_ends_at_1(tmp_path):
    """A row per step of both environments, so that each has the beta of its one update."""
    config = value_run("prioritized", steps=120, track={"every_agent_steps": 2})
    rows, _ = read_rows(train_run(config, tmp_path / "run").path / "train.csv")
    beta = {row["agent_steps"]: float(row["beta"]) for row in rows if row["beta"]}
    assert beta["90"] == pytest.approx(0.4 + 0.6 * 90 / 120, abs=1e-9)
    assert beta["120"] == 1.0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", [48, 130])
def test_a_run_that_was_stopped_goes_on_exactly(kind, at, undisturbed, tmp_path, monkeypatch):
    """Stopped before a look at replay is due, and after the rings have wrapped; priorities, counts
    of draws and the open interval come back bit for bit."""
    straight = undisturbed(kind)
    passes = count()

    def fault(name: str) -> None:
        if name == f"step-{at}" and next(passes) == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(files, "fault_point", fault)
    run = train_run(value_run(kind), tmp_path / "stopped")
    assert (run.status, run.agent_steps) == ("interrupted", at)
    assert resume_run(run.path).status == "done"
    assert training_record(run.path) == straight


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_failed_goes_on_exactly_from_its_checkpoint(
    kind, undisturbed, tmp_path, monkeypatch
):
    """An error 26 steps after the checkpoint of step 160: what came after is undone."""

    def fault(name: str) -> None:
        if name == "step-186":
            raise RuntimeError("lightning")

    monkeypatch.setattr(files, "fault_point", fault)
    with pytest.raises(RuntimeError, match="lightning"):
        train_run(value_run(kind), tmp_path / "killed")
    monkeypatch.setattr(files, "fault_point", lambda name: None)
    assert resume_run(tmp_path / "killed").status == "done"
    assert training_record(tmp_path / "killed") == undisturbed(kind)
