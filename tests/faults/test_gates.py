"""Case 14: an update that is not finite is skipped and counted; the 101st in a row halts the run,
and a dump tells what went wrong."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from forethought import files
from forethought.nets.optimisers import clip_gradients
from forethought.tracking import RunDirectory, read_rows
from forethought.training import dump
from forethought.training.loop import resume_run, train_run
from tests.stub_agent import StubAgent, stub_run, training_record
from tests.tdmpc2_agents import ACTION, OBS, fill, make_agent

BURST = {"train": {"seed_updates": 400}}


def kinds(run) -> list[str]:
    return [event["kind"] for event in RunDirectory.open(run.path).events()]


def skipped(run) -> int:
    return sum(int(row["nonfinite_updates"]) for row in read_rows(run.path / "train.csv")[0])


def test_case_14_one_update_that_is_not_finite_is_skipped_counted_and_dumped(tmp_path, caplog):
    agent = {"nan_from_update": 30, "nan_until_update": 31}
    run = train_run(stub_run(agent=agent, steps=100), tmp_path / "run")
    assert (run.status, skipped(run), kinds(run).count("nonfinite-update")) == ("done", 1, 1)
    folder = run.path / "dumps" / "nonfinite-000000030"
    told = "Update 30 was not finite in grad_norm: the step that it belongs to was skipped (1 so"
    assert told in caplog.text
    assert f"A dump of it is in {folder}." in caplog.text
    found = files.read_json(folder / "dump.json")
    assert found["recent_updates"][-1]["grad_norm"] == "nan"
    assert math.isfinite(found["recent_updates"][-2]["grad_norm"])


def test_case_14_a_hundred_in_a_row_are_survived(tmp_path):
    agent = {"nan_from_update": 21, "nan_until_update": 121}
    run = train_run(stub_run(agent=agent, steps=62, **BURST), tmp_path / "run")
    assert (run.status, skipped(run)) == ("done", 100)


def test_case_14_the_101st_in_a_row_halts_with_dump_and_checkpoint(tmp_path, capsys, caplog):
    """dqn.md, finding 3; the weights stay those of the last good update."""
    good = train_run(stub_run(steps=60, train={"seed_updates": 20}), tmp_path / "good")
    run = train_run(stub_run(agent={"nan_from_update": 21}, **BURST), tmp_path / "run")
    assert (run.status, run.exit_code) == ("diverged", 3)
    assert RunDirectory.open(run.path).run_json["status"] == "diverged"
    checkpoint, _ = files.newest_verified(run.path / "checkpoints")
    assert files.read_json(checkpoint / "agent.json")["updates"] == 20 + 101
    weights = training_record(run.path)["agent tensors"]
    assert weights["weight"] == training_record(good.path)["agent tensors"]["weight"]
    assert f"see {run.path / 'dumps'}" in capsys.readouterr().err

    first, last = sorted((run.path / "dumps").iterdir(), reverse=True)
    assert (first.name, last.name) == ("nonfinite-000000021", "diverged-000000121")
    assert f"A dump of it is in {last}." in caplog.text
    files.verify(last)  # published whole, as a checkpoint is
    found = files.read_json(last / "dump.json")
    assert found["clock"]["updates"] == 121
    assert found["gates"]["nonfinite_in_a_row"] == 101
    assert len(found["recent_updates"]) == 121
    assert found["config"]["agent_name"] == "stub"
    linear = found["agent"]["parts"]["linear"]
    assert (linear["parameters"], linear["gradient_nonfinite"]) == (4, 4)
    assert (linear["parameter_nonfinite"], linear["exp_avg_nonfinite"]) == (0, 0)
    assert (linear["gradient_norm"], linear["optimiser_steps"]) == ("nan", 20)
    assert found["batch"]["reward"]["shape"] == [1, 8]
    assert found["batch"]["obs"]["nonfinite"] == 0
    batch = files.load_tensors(last / "batch.safetensors")
    assert sorted(batch) == ["action", "is_first", "obs", "reward", "terminated", "truncated"]
    assert batch["obs"].shape == (2, 8, 3)
    assert found["batch"]["obs"]["max"] == batch["obs"].max().item()


def test_case_14_a_diverged_run_says_so_when_it_is_resumed_and_halts_again(tmp_path, caplog):
    run = train_run(stub_run(agent={"nan_from_update": 21}, **BURST), tmp_path / "run")
    caplog.clear()
    again = resume_run(run.path)
    assert (again.status, again.exit_code) == ("diverged", 3)
    assert caplog.messages[0].startswith("This run diverged at 60 agent steps (see ")
    assert "102 updates in a row were not finite" in caplog.text
    newest, _ = files.newest_verified(run.path / "checkpoints")
    assert files.read_json(newest / "agent.json")["updates"] == 122


@pytest.fixture
def dumps_in_the_way(tmp_path, monkeypatch):
    def fault(name: str) -> None:
        if name == "step-1":
            (tmp_path / "run" / "dumps").write_text("in the way")

    monkeypatch.setattr(files, "fault_point", fault)


def test_case_14_a_dump_that_cannot_be_written_does_not_hide_the_divergence(
    tmp_path, dumps_in_the_way, caplog
):
    run = train_run(stub_run(agent={"nan_from_update": 1}, **BURST), tmp_path / "run")
    assert (run.status, run.exit_code) == ("diverged", 3)
    events = [e for e in RunDirectory.open(run.path).events() if e["kind"] == "write-failed"]
    assert [event["what"] for event in events] == ["The dump", "The dump"]  # the first, the last
    assert "The dump was not written, training goes on" in caplog.text
    assert "Training diverged: 101 updates in a row" in caplog.text
    assert "A dump of it" not in caplog.text


def test_case_14_an_agent_that_cannot_describe_itself_does_not_hide_the_rest(tmp_path, monkeypatch):
    def broken(agent):
        raise ZeroDivisionError("nothing left")

    monkeypatch.setattr(StubAgent, "diagnostics", broken)
    run = train_run(stub_run(agent={"nan_from_update": 1}, **BURST), tmp_path / "run")
    assert run.status == "diverged"
    found = files.read_json(run.path / "dumps" / "diverged-000000101" / "dump.json")
    assert found["agent"] == {"failed": "ZeroDivisionError: nothing left"}
    assert found["gates"]["nonfinite_total"] == 101


def test_the_first_and_the_newest_dump_of_a_kind_are_kept(tmp_path):
    names = [f"nonfinite-{n:09d}" for n in (5, 1005, 2005, 10_000_005)] + ["diverged-000000007"]
    for name in names:
        (tmp_path / name).mkdir()
    dump.keep_first_and_newest(tmp_path, "nonfinite")
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "diverged-000000007",
        "nonfinite-000000005",
        "nonfinite-010000005",
    ]


# -- what TD-MPC2 tells ----------------------------------------------------------------------------


def test_tdmpc2_names_the_part_that_is_not_finite():
    agent = make_agent()
    fill(agent)
    agent.train(2)
    with torch.no_grad():
        next(agent.model.reward.parameters())[0, 0] = math.inf
    assert agent.train(1)["nonfinite"] == 1.0
    told, _ = agent.diagnostics()
    broken = {name for name, part in told["parts"].items() if part["parameter_nonfinite"]}
    assert broken == {"reward"}
    assert told["parts"]["reward"]["parameter_nonfinite"] == 1
    assert set(told["parts"]) == {"encoder", "dynamics", "reward", "q", "policy", "target_q"}
    assert told["parts"]["reward"]["gradient_nonfinite"] > 0
    assert told["parts"]["q"]["gradient_nonfinite"] == 0
    assert told["parts"]["q"]["gradient_norm"] > 0  # as it came: nothing was scaled away
    assert (told["updates"], told["parts"]["q"]["optimiser_steps"]) == (3, 2)
    assert "gradient_norm" not in told["parts"]["target_q"]


def test_tdmpc2_keeps_its_last_batch_and_says_where_the_rows_are_from():
    """Row n of the environment observes n, so a slice must observe the rows it says it has."""
    agent = make_agent()
    assert agent.diagnostics()[1] == {}
    row = {"terminated": False, "truncated": False, "action": np.zeros(ACTION), "reward": 0.0}
    for n in range(60):
        obs = np.full(OBS, n, np.float32)
        row |= {"obs": obs, "is_first": n % 20 == 0, "truncated": n % 20 == 19}
        agent.store_transition(row)
    agent.train(1)
    told, batch = agent.diagnostics()
    rows = told["batch_rows"]
    assert (rows["slice_rows"], rows["rows_written"], rows["env_index"]) == (4, [60], [0] * 8)
    expected = np.array(rows["first_row"]) + np.arange(4)[:, None]  # [L, B]
    assert batch["obs"][..., 0].tolist() == expected.tolist()


def test_an_infinite_gradient_norm_scales_no_gradient():
    a, b = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    a.grad, b.grad = torch.tensor([3.0]), torch.tensor([math.inf])
    assert clip_gradients([a, b], 1.0) == math.inf
    assert (a.grad.item(), b.grad.item()) == (3.0, math.inf)
    b.grad = torch.tensor([4.0])
    assert clip_gradients([a, b], 1.0) == 5.0
    assert a.grad.item() == pytest.approx(0.6)
