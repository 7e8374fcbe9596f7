"""Resuming a run: how far, what is refused, and what is said. tests/faults has the exactness."""

from __future__ import annotations

import os
import signal
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
from forethought.tracking.run_directory import git_commit
from forethought.training.build import read_config
from forethought.training.loop import resume_run, train_run
from tests.stub_agent import register, stub_run, training_record
from tests.stubs import CounterEnv


@pytest.fixture(autouse=True)
def _stub_agent(monkeypatch):
    register(monkeypatch)


def stop_at_250(monkeypatch) -> None:
    """SIGTERM at step 250, once; the ninth episode of 30 decisions is then open."""
    passes = count()

    def fault(name: str) -> None:
        if name == "step-250" and next(passes) == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(files, "fault_point", fault)


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
    stop_at_250(monkeypatch)
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
    assert "Resumed at 1,000 agent steps (checkpoint step-000001000)." in told[:5]


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
    stop_at_250(monkeypatch)
    run = train_run(stub_run("gym:stub/Drifting-v0"), tmp_path / "run")
    assert resume_run(run.path).status == "done"
    assert "is no longer exact" in caplog.text
    [event] = [e for e in RunDirectory.open(run.path).events() if e["kind"] == "resumed"]
    assert event["lost_episodes"] == [0]
    assert event["reasons"] == ["Its last observation differs."]
    assert event["git_commit"] == git_commit()
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
    stop_at_250(monkeypatch)
    run = train_run(stub_run("gym:stub/RaisesOnce-v0", env={"num_envs": 2}), tmp_path / "run")
    monkeypatch.setattr(RaisesOnce, "faults", [where])
    assert resume_run(run.path).status == "done"
    assert "is no longer exact. Environment 0 raised RuntimeError" in caplog.text
    [event] = [e for e in RunDirectory.open(run.path).events() if e["kind"] == "resumed"]
    assert event["lost_episodes"] == [0]
    assert "the wheel came off" in event["reasons"][0]
    lost = [row for row in training_record(run.path)["episodes"] if row["truncated"] == "1"]
    assert [(row["agent_steps"], row["env_index"]) for row in lost] == [("250", "0")]
