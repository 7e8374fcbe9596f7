"""Cases 9 and 10: a run that was killed anywhere and resumed equals one that was not, and the same
seed gives the same run. scripts/faults/exact_resume.py does more moments, with real kills."""

from __future__ import annotations

import signal
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch

from forethought import files, presets
from forethought.agents.registry import config_class
from forethought.config import RunConfig, build_run_config
from forethought.nets.kernels import native_kernels
from forethought.tracking import RunDirectory
from forethought.training.build import load_agent
from forethought.training.loop import resume_run, train_run
from tests.faults.conftest import MOMENTS, TWO
from tests.forked import forked, pause_at
from tests.stub_agent import stub_run, training_record


class Killed(BaseException):
    """Stands for kill -9: nothing after it may be saved."""


def kill_at(monkeypatch, stage: str) -> None:
    passes = count()

    def fault(name: str) -> None:
        if name == stage and next(passes) == 0:
            raise Killed

    monkeypatch.setattr(files, "fault_point", fault)


# -- case 9: resume --------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", MOMENTS)
def test_case_09_a_killed_run_resumes_exactly(moment, undisturbed, tmp_path, monkeypatch):
    kill_at(monkeypatch, MOMENTS[moment])
    with pytest.raises(Killed):
        train_run(stub_run(**TWO), tmp_path / "run")
    assert resume_run(tmp_path / "run").status == "done"
    assert training_record(tmp_path / "run") == undisturbed


def test_case_09_a_kill_after_the_last_checkpoint_adds_no_evaluation(
    undisturbed, tmp_path, monkeypatch
):
    """The checkpoint of step 400 is published, but run.json does not say `done` yet."""

    def fault(name: str) -> None:
        last = tmp_path / "run" / "checkpoints" / "step-000000400"
        if name == "after-rename" and last.exists():
            raise Killed

    monkeypatch.setattr(files, "fault_point", fault)
    with pytest.raises(Killed):
        train_run(stub_run(**TWO), tmp_path / "run")
    monkeypatch.setattr(files, "fault_point", lambda name: None)
    assert resume_run(tmp_path / "run").status == "done"
    assert training_record(tmp_path / "run") == undisturbed


def test_case_09_worker_environments_resume_exactly(undisturbed, tmp_path):
    layers = {"env": {"num_envs": 2, "workers": True}}
    run = train_run(stub_run(**layers, steps=100), tmp_path / "run")
    resume_run(run.path, steps=400)
    ours = training_record(run.path)
    for part in ("train", "episodes", "agent", "agent tensors", "replay tensors", "loop tensors"):
        assert ours[part] == undisturbed[part], part


def test_case_09_a_run_made_longer_equals_an_undisturbed_one_though_its_end_was_written(tmp_path):
    """60 steps end with the open interval as a row; 120 steps have rows at 50, 100 and 120."""
    layers = {"eval": {"every_agent_steps": 60}, "train": {"seed_agent_steps": 20}}
    run = train_run(stub_run(**layers, steps=60), tmp_path / "run")
    before = training_record(run.path)
    assert [row["agent_steps"] for row in before["train"]] == ["50", "60"]
    assert [row["updates"] for row in before["train"]] == ["55", "60"]  # 40 + (60 - 20) / 2
    assert resume_run(run.path).status == "done"  # complete: nothing is cut off
    assert training_record(run.path) == before
    resume_run(run.path, steps=120)
    undisturbed = train_run(stub_run(**layers, steps=120), tmp_path / "undisturbed")
    ours = training_record(run.path)
    assert [row["agent_steps"] for row in ours["train"]] == ["50", "100", "120"]
    assert ours == training_record(undisturbed.path)


def test_case_09_a_real_kill_of_the_real_agent_resumes_exactly(whole, tmp_path):
    """kill -9 through the command line; the checkpoint at step 50 holds optimiser state that could
    be lost."""
    options = ["--preset", "debug", "--steps", "60", "--train.checkpoint-every-agent-steps", "25"]
    options += ["--env.max-episode-steps", "20", "--train.seed-agent-steps", "40"]
    options += ["--eval.every-agent-steps", "0", "--eval.episodes", "1", "--track.no-console"]
    train = ["train", "tdmpc2", "gym:Pendulum-v1", *options, "--out", str(tmp_path / "run")]
    with forked(*train, prepare=partial(pause_at, "step-56:60")) as process:
        assert any("pausing at step-56" in line for line in process.stderr)
        process.send_signal(signal.SIGKILL)
        assert process.wait(10) == -signal.SIGKILL
    assert resume_run(tmp_path / "run").status == "done"
    assert training_record(tmp_path / "run") == training_record(whole)


# -- compiled and eager ----------------------------------------------------------------------------


@pytest.fixture
def kernels():
    """The C kernels; without a compiler there is nothing to compare."""
    found, note = native_kernels(torch.device("cpu"))
    if found is None:
        pytest.skip(note)


def tdmpc2_run(compile_: str, steps: int) -> RunConfig:
    """Of the debug preset, but shorter: a burst of 20 updates at step 40, then one update per four
    steps; checkpoints lie inside episodes."""
    mine = {
        "steps": steps,
        "agent": {"compile": compile_},
        "env": {"max_episode_steps": 20},
        "train": {"seed_agent_steps": 40, "checkpoint_every_agent_steps": 25},
        "eval": {"every_agent_steps": 0, "episodes": 1},
        "track": {"console": False},
    }
    layers = [*presets.layers(["debug"], None, "tdmpc2"), mine]
    return build_run_config("tdmpc2", "gym:Pendulum-v1", config_class("tdmpc2"), layers)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of 60 steps that nothing happened to."""
    return train_run(tdmpc2_run("off", 60), tmp_path_factory.mktemp("whole") / "run").path


def test_case_09_a_resume_with_c_kernels_is_exact(tmp_path, monkeypatch, kernels):
    whole = train_run(tdmpc2_run("kernels", 60), tmp_path / "whole")
    kill_at(monkeypatch, "step-56")
    with pytest.raises(Killed):
        train_run(tdmpc2_run("kernels", 60), tmp_path / "run")
    assert resume_run(tmp_path / "run").status == "done"
    assert training_record(tmp_path / "run") == training_record(whole.path)


@pytest.mark.parametrize(("before", "after"), [("off", "kernels"), ("kernels", "off")])
def test_checkpoints_of_compiled_and_eager_agents_are_interchangeable(
    tmp_path, kernels, before, after
):
    """The same weights on both sides; what follows is equal up to rounding."""
    whole = train_run(tdmpc2_run(before, 60), tmp_path / "whole")
    run = train_run(tdmpc2_run(before, 50), tmp_path / "run")
    saved = load_agent(run.path).model.state_dict()
    text = (run.path / "config.yaml").read_text()
    written = {"off": ["compile: 'off'", "compile: off"], "kernels": ["compile: kernels"]}
    for words in written[before]:
        text = text.replace(words, f"compile: '{after}'")
    (run.path / "config.yaml").write_text(text)
    changed = load_agent(run.path)
    assert changed.config.compile == after
    assert all(torch.equal(saved[name], x) for name, x in changed.model.state_dict().items())
    assert resume_run(run.path, steps=60, override=True).status == "done"
    ours, theirs = (load_agent(path).model.state_dict() for path in (run.path, whole.path))
    for name, x in theirs.items():
        torch.testing.assert_close(ours[name], x, rtol=1e-3, atol=1e-5)


# -- case 10: the same seed ------------------------------------------------------------------------


def test_case_10_the_same_seed_gives_the_same_run_and_another_does_not(tmp_path):
    a, b, c = (
        training_record(train_run(stub_run(seed=seed, steps=200), tmp_path / name).path)
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert a == b
    assert a["episodes"] != c["episodes"]
    assert a["agent tensors"]["weight"] != c["agent tensors"]["weight"]


def csv_bytes(path: Path, name: str) -> list[str]:
    return (path / f"{name}.csv").read_text().splitlines()


def test_case_10_only_the_declared_columns_measure_time(whole, tmp_path):
    """The rows of two equal runs as text: what differs is a time column, and episodes have one."""
    first, second = whole, train_run(tdmpc2_run("off", 60), tmp_path / "run").path
    assert training_record(first) == training_record(second)
    assert RunDirectory.open(first).config() == RunDirectory.open(second).config()
    header = csv_bytes(first, "episodes")[0].split(",")
    pairs = zip(csv_bytes(first, "episodes")[1:], csv_bytes(second, "episodes")[1:])
    different = {
        header[i]
        for one, two in pairs
        for i, (x, y) in enumerate(zip(one.split(","), two.split(",")))
        if x != y
    }
    assert different <= {"wall_s"}
