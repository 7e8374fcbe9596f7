"""Exact resume: a run that was stopped anywhere and continued equals one that was not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from itertools import count
from typing import ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec

from forethought import files
from forethought.cli import main
from forethought.config import ConfigError, ForethoughtError
from forethought.tracking import RunDirectory
from forethought.training.build import read_config
from forethought.training.loop import resume_run, train_run
from tests.stub_agent import register, stub_run, training_record
from tests.stubs import CounterEnv

MOMENTS = {
    "random play": "evaluation-0-10",
    "seed phase": "step-42",
    "burst": "update-17",
    "mid-episode": "step-250",
    "evaluation": "evaluation-1-10",
    "save": "save-300",
}


class Killed(BaseException):
    """Stands for kill -9: nothing after it may be saved."""


@pytest.fixture(autouse=True)
def _stub_agent(monkeypatch):
    register(monkeypatch)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        register(patch)
        path = train_run(stub_run(env={"num_envs": 2}), tmp_path_factory.mktemp("a") / "run").path
    return training_record(path)


def at(monkeypatch, moment: str, act) -> None:
    """Does `act` once, when the run passes the moment."""
    passes = count()

    def fault(name: str) -> None:
        if name == MOMENTS[moment] and next(passes) == 0:
            act()

    monkeypatch.setattr(files, "fault_point", fault)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_run_resumes_exactly(moment, undisturbed, tmp_path, monkeypatch):
    def kill() -> None:
        raise Killed

    at(monkeypatch, moment, kill)
    with pytest.raises(Killed):
        train_run(stub_run(env={"num_envs": 2}), tmp_path / "run")
    assert resume_run(tmp_path / "run").status == "done"
    assert training_record(tmp_path / "run") == undisturbed


@pytest.mark.parametrize("moment", [name for name in MOMENTS if name != "save"])
def test_a_run_stopped_by_a_signal_saves_and_resumes_exactly(
    moment, undisturbed, tmp_path, monkeypatch, capfd
):
    at(monkeypatch, moment, lambda: os.kill(os.getpid(), signal.SIGTERM))
    run = train_run(stub_run(env={"num_envs": 2}), tmp_path / "run")
    assert (run.status, run.exit_code) == ("interrupted", 143)
    assert f"forethought resume {run.path}" in capfd.readouterr().err
    about = RunDirectory.open(run.path).run_json
    assert about["status"] == "interrupted"
    if moment == "burst":  # the checkpoint keeps the updates owed, it does not finish the burst
        newest, _ = files.newest_verified(run.path / "checkpoints")
        assert files.read_json(newest / "loop.json")["budget"]["taken"] == 17
    assert resume_run(run.path).status == "done"
    assert training_record(run.path) == undisturbed


def test_stopped_many_times_it_is_still_the_same(undisturbed, tmp_path, monkeypatch):
    stops = {"update-3", "evaluation-1-2", "step-100", "step-102", "update-150", "step-398"}

    def fault(name: str) -> None:
        if name in stops:
            stops.remove(name)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(files, "fault_point", fault)
    run = train_run(stub_run(env={"num_envs": 2}), tmp_path / "run")
    sittings = 1
    while run.status == "interrupted":
        assert run.exit_code == 130
        run, sittings = resume_run(run.path), sittings + 1
    assert sittings == 7 and not stops
    assert training_record(run.path) == undisturbed


def test_worker_environments_resume_exactly(undisturbed, tmp_path):
    layers = {"env": {"num_envs": 2, "workers": True}}
    run = train_run(stub_run(**layers, steps=100), tmp_path / "run")
    resume_run(run.path, steps=400)
    ours = training_record(run.path)
    for part in ("train", "episodes", "agent", "agent tensors", "replay tensors", "loop tensors"):
        assert ours[part] == undisturbed[part], part


def test_a_new_total_of_steps_is_remembered(tmp_path):
    run = train_run(stub_run(steps=100), tmp_path / "run")
    assert resume_run(run.path, steps=150).agent_steps == 150
    assert read_config(RunDirectory.open(run.path)).steps == 150


def test_a_complete_run_says_so(tmp_path, capsys):
    run = train_run(stub_run(steps=100), tmp_path / "run")
    before = training_record(run.path)
    again = resume_run(run.path)
    assert (again.status, again.exit_code, again.score) == ("done", 0, run.score)
    assert "is complete at 100 agent steps" in capsys.readouterr().out
    assert training_record(run.path) == before


def test_fewer_steps_than_taken_are_refused(tmp_path, monkeypatch):
    at(monkeypatch, "mid-episode", lambda: os.kill(os.getpid(), signal.SIGTERM))
    run = train_run(stub_run(), tmp_path / "run")
    with pytest.raises(ConfigError, match="steps is 200, but the run already stands at 250"):
        resume_run(run.path, steps=200)


def test_a_complete_run_refuses_fewer_steps_too(tmp_path, capsys):
    run = train_run(stub_run(steps=100), tmp_path / "run")
    capsys.readouterr()
    assert main(["resume", str(run.path), "--steps", "50"]) == 2
    sentence = "steps is 50, but the run already stands at 100; give a greater total.\n"
    assert capsys.readouterr().err == sentence
    assert main(["resume", str(run.path), "--steps", "100"]) == 0


def test_resume_says_where_it_goes_on(tmp_path, capsys):
    run = train_run(stub_run(steps=1000, track={"console": True}), tmp_path / "run")
    assert "Resumed" not in capsys.readouterr().err
    resume_run(run.path, steps=1010)
    told = capsys.readouterr().err.splitlines()
    assert "Resumed at 1,000 agent steps (checkpoint step-000001000)." in told[:4]


def test_a_run_that_is_being_trained_is_refused(tmp_path):
    run = train_run(stub_run(steps=50), tmp_path / "run")
    with (
        RunDirectory.open(run.path).lock(),
        pytest.raises(ForethoughtError, match="is being trained by process"),
    ):
        resume_run(run.path, steps=100)


class Drifting(CounterEnv):
    """Not a function of (seed, actions): every object of this class starts elsewhere."""

    made = count()

    def __init__(self) -> None:
        super().__init__(length=30)
        self.drift = float(next(self.made))

    def observe(self):
        return super().observe() + np.float32(self.drift)


def test_an_episode_that_cannot_be_stepped_again_is_marked_and_the_run_says_so(
    tmp_path, monkeypatch, caplog
):
    spec = EnvSpec("stub/Drifting-v0", Drifting)
    monkeypatch.setitem(gymnasium.registry, spec.id, spec)
    at(monkeypatch, "mid-episode", lambda: os.kill(os.getpid(), signal.SIGTERM))
    run = train_run(stub_run("gym:stub/Drifting-v0"), tmp_path / "run")
    assert resume_run(run.path).status == "done"
    assert "is no longer exact" in caplog.text
    [event] = [e for e in RunDirectory.open(run.path).events() if e["kind"] == "resumed"]
    assert event["lost_episodes"] == [0]
    assert event["reasons"] == ["Its last observation differs."]
    rows = training_record(run.path)["episodes"]
    # 8 whole episodes of 30, then 10 decisions of the ninth until step 250
    lost = [row for row in rows if row["truncated"] == "1"]
    assert [(row["agent_steps"], row["length_agent_steps"]) for row in lost] == [("250", "10")]
    assert [row["episodes"] for row in rows] == [str(n + 1) for n in range(len(rows))]


class RaisesOnce(CounterEnv):
    """Raises at reset or at a step of the object that a resume makes, then never again."""

    faults: ClassVar[list[str]] = []

    def reset(self, *, seed=None, options=None):
        self.may_raise("reset")
        return super().reset(seed=seed, options=options)

    def step(self, action):
        self.may_raise("step")
        return super().step(action)

    def may_raise(self, where: str) -> None:
        if where in self.faults:
            self.faults.remove(where)
            raise RuntimeError("the wheel came off")


@pytest.mark.parametrize("where", ["reset", "step"])
def test_an_episode_that_raises_when_stepped_again_is_lost_and_the_run_goes_on(
    where, tmp_path, monkeypatch, caplog
):
    spec = EnvSpec("stub/RaisesOnce-v0", partial(RaisesOnce, 30))
    monkeypatch.setitem(gymnasium.registry, spec.id, spec)
    at(monkeypatch, "mid-episode", lambda: os.kill(os.getpid(), signal.SIGTERM))
    run = train_run(stub_run("gym:stub/RaisesOnce-v0", env={"num_envs": 2}), tmp_path / "run")
    monkeypatch.setattr(RaisesOnce, "faults", [where])
    assert resume_run(run.path).status == "done"
    assert "is no longer exact. Environment 0 raised RuntimeError" in caplog.text
    [event] = [e for e in RunDirectory.open(run.path).events() if e["kind"] == "resumed"]
    assert event["lost_episodes"] == [0]
    assert "the wheel came off" in event["reasons"][0]
    lost = [row for row in training_record(run.path)["episodes"] if row["truncated"] == "1"]
    assert [(row["agent_steps"], row["env_index"]) for row in lost] == [("250", "0")]


def test_a_run_made_longer_equals_an_undisturbed_one_though_its_end_was_written(tmp_path):
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


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "forethought", *words]


@pytest.mark.parametrize("moment", ["update-12", "step-146"])
def test_a_real_kill_of_the_real_agent_resumes_exactly(tmp_path, moment):
    """kill -9 through the command line, in the burst and after it: only the checkpoint at step 140
    holds optimiser state that can be lost. scripts/exact_resume.py does all moments."""
    common = ["--preset", "debug", "--steps", "150", "--train.checkpoint-every-agent-steps", "70"]
    train = command("train", "tdmpc2", "gym:Pendulum-v1", *common, "--track.no-console")
    subprocess.run([*train, "--out", str(tmp_path / "a")], check=True, capture_output=True)
    environment = {**os.environ, "FORETHOUGHT_PAUSE_AT": f"{moment}:60"}
    with subprocess.Popen(
        [*train, "--out", str(tmp_path / "b")], env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        assert any(f"pausing at {moment}" in line for line in process.stderr)
        process.kill()
    subprocess.run(command("resume", str(tmp_path / "b")), check=True, capture_output=True)
    assert training_record(tmp_path / "a") == training_record(tmp_path / "b")
