"""Whole runs of the DQN family: metrics in every sink, gates, exact resume, learning."""

from __future__ import annotations

import math
import sys
from importlib.machinery import ModuleSpec
from itertools import count
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

from forethought import files
from forethought.agents.dqn.update import METRICS, Learner
from forethought.envs import EnvError
from forethought.spaces import Column
from forethought.tracking import RunDirectory, read_rows
from forethought.training.build import load_agent
from forethought.training.loop import resume_run, train_run
from tests.dqn.small_agents import DISTRIBUTIONS, dqn_run
from tests.stub_agent import give_scores, training_record
from tests.stubs import CounterEnv
from tests.tracking_stubs import FakeWandb


class MatchEnv(CounterEnv):
    """Shows a number from 0 to 2 as a one-hot vector; reward 1 for naming it, else -1."""

    def __init__(self, length: int = 10) -> None:
        super().__init__(length, discrete=True)
        self.observation_space = spaces.Box(0, 1, (3,), np.float32)

    def step(self, action: Any) -> Any:
        right = int(action) == self.wanted
        obs, _, *ends = super().step(action)
        return obs, 1.0 if right else -1.0, *ends

    def observe(self) -> Any:
        self.wanted = int(self.np_random.integers(3))
        return np.eye(3, dtype=np.float32)[self.wanted]


class MovingDot(CounterEnv):
    """Bytes [12, 12] with a dot that moves by the action; ends when it leaves, after 40 at most."""

    def __init__(self) -> None:
        super().__init__(40, discrete=True)
        self.observation_space = spaces.Box(0, 255, (12, 12), np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.place = 6
        return super().reset(seed=seed)

    def step(self, action: Any) -> Any:
        self.place += int(action) - 1
        obs, _, terminated, truncated, info = super().step(action)
        return obs, 1.0, terminated or not 0 < self.place < 11, truncated, info

    def observe(self) -> Any:
        picture = np.zeros((12, 12), np.uint8)
        picture[self.t % 12, self.place] = 255
        return picture


class MaskedEnv(CounterEnv):
    """Only action t mod 3 is legal after t steps; another one raises."""

    columns = (Column("action_mask", (3,), np.dtype(np.bool_), "action_mask"),)

    def __init__(self) -> None:
        super().__init__(8, discrete=True)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        obs, info = super().reset(seed=seed)
        return obs, {**info, "action_mask": np.arange(3) == self.t % 3}

    def step(self, action: Any) -> Any:
        if int(action) != self.t % 3:
            raise EnvError("an illegal action was taken")
        *rest, info = super().step(action)
        return *rest, {**info, "action_mask": np.arange(3) == self.t % 3}


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    for name, make in {"Match": MatchEnv, "Dot": MovingDot, "Masked": MaskedEnv}.items():
        spec = EnvSpec(f"stub/{name}-v0", make)
        monkeypatch.setitem(gymnasium.registry, spec.id, spec)


# What is written


@pytest.fixture
def logged(tmp_path, monkeypatch):
    fake = FakeWandb()
    fake.__spec__ = ModuleSpec("wandb", None)  # by which a run asks whether it is installed
    monkeypatch.setitem(sys.modules, "wandb", fake)
    config = dqn_run(
        steps=600,
        env={"num_envs": 2, "action_repeat": 2},
        train={"seed_agent_steps": 100},
        agent={"epsilon": {"kind": "linear", "decay_agent_steps": 200}},
        eval={"every_agent_steps": 0},
        track={"every_agent_steps": 200, "wandb": True},
        replay={"kind": "prioritized", "diagnostics_every_agent_steps": 200},
    )
    run = train_run(config, tmp_path / "run")
    return run.path, fake


def test_findings_2_6_9_16_what_training_tells_reaches_every_sink(logged):
    path, fake = logged
    rows, _ = read_rows(path / "train.csv")
    # 2: every update's metrics, aggregated, in CSV and W&B from one stream.
    assert [row["agent_steps"] for row in rows] == ["200", "400", "600"]
    for row in rows:
        looks = ("replay_age_mean", "replay_priority_mean", "dead_units")
        for name in (*METRICS[:-1], "epsilon", *looks):
            assert math.isfinite(float(row[name])), name
        assert float(row["updates_per_s"]) > 0 and float(row["env_frames_per_s"]) > 0
    sent = [data for _, data in fake.logged if "train/loss" in data]
    assert [float(row["loss"]) for row in rows] == [data["train/loss"] for data in sent]
    for row, data in zip(rows, sent, strict=True):
        assert {f"train/{name}" for name, cell in row.items() if cell} <= set(data)
    # 6: decisions 0 to 99 of the agent, in pairs, fall into the first row; the clock starts at 1.0.
    assert float(rows[0]["epsilon"]) == pytest.approx(1 - 0.99 * 0.245, abs=1e-9)
    assert float(rows[2]["epsilon"]) == pytest.approx(0.01, abs=1e-9)
    # 9: the x-axis is env_frames, and never goes back.
    assert [int(row["env_frames"]) for row in rows] == [400, 800, 1200]
    steps = [step for step, _ in fake.logged]
    assert steps == sorted(steps) and steps[-1] == 1200
    # 16: episodes too, raw returns of whole episodes.
    episodes, _ = read_rows(path / "episodes.csv")
    by_frames: dict[int, list[float]] = {}
    for row in episodes:
        by_frames.setdefault(int(row["env_frames"]), []).append(float(row["return"]))
    told = {s: d["episode/return"] for s, d in fake.logged if "episode/return" in d}
    assert told == {s: pytest.approx(np.mean(x)) for s, x in by_frames.items()}
    assert all(float(row["return"]) >= float(row["length_agent_steps"]) for row in episodes)
    # Updates: one for every fourth decision after the warm-up.
    assert [int(row["updates"]) for row in rows] == [25, 75, 125]


# Gates


def test_finding_3_a_hundred_bad_updates_leave_the_weights_and_the_next_one_halts(
    tmp_path, monkeypatch
):
    real = Learner.targets
    updates = count(1)

    def spoiled(self, batch, noise):
        y = real(self, batch, noise)
        return y * float("nan") if next(updates) > 20 else y

    layers = {"train": {"seed_agent_steps": 100, "updates_per_agent_step": 1.0}}
    good = train_run(dqn_run(steps=120, **layers), tmp_path / "good")
    monkeypatch.setattr(Learner, "targets", spoiled)
    survived = train_run(dqn_run(steps=220, **layers), tmp_path / "survived")
    assert survived.status == "done"  # 100 in a row
    updates = count(1)
    run = train_run(dqn_run(steps=400, **layers), tmp_path / "run")
    assert (run.status, run.exit_code, run.agent_steps) == ("diverged", 3, 221)
    wanted = load_agent(good.path, device="cpu").online.state_dict()
    for path in (survived.path, run.path):
        found = load_agent(path, device="cpu").online.state_dict()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_finding_3_a_great_gradient_norm_warns_once(tmp_path, monkeypatch):
    from forethought.agents.dqn import update

    monkeypatch.setattr(update, "clip_gradients", lambda parameters, limit: 1001.0)
    run = train_run(dqn_run(steps=200), tmp_path / "run")
    events = [e["kind"] for e in RunDirectory.open(run.path).events()]
    assert events.count("gradient-norm") == 1 and run.status == "done"


def test_runaway_values_warn_once_and_go_on(tmp_path):
    """CartPole pays 1 a step: with a discount of 0.01 the bound is about 1, and a bias of 50 on
    the output is far beyond ten times that."""

    def high(network, outputs, init, generator):
        real(network, outputs, init, generator)
        torch.nn.init.constant_(outputs[0].bias, 50.0)

    from forethought.agents.dqn import heads

    real = heads.initialise
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heads, "initialise", high)
        run = train_run(dqn_run(steps=200, agent={"gamma": 0.01}), tmp_path / "run")
    events = [e["kind"] for e in RunDirectory.open(run.path).events()]
    assert events.count("runaway-values") == 1 and run.status == "done"


@pytest.mark.parametrize(
    ("random", "scores", "tagged"),
    [(0.0, (10, 4, 4, 4), True), (-21.0, (-4, -5, -5, -5), False)],
    ids=["collapse", "Pong"],
)
def test_finding_3_three_low_evaluations_tag_the_run(random, scores, tagged, tmp_path, monkeypatch):
    give_scores(monkeypatch, random, scores)
    config = dqn_run(steps=400, eval={"every_agent_steps": 100})
    run = train_run(config, tmp_path / "run")
    tags = RunDirectory.open(run.path).run_json.get("tags", [])
    assert ("needs-inspection" in tags) == tagged


# Exact resume


class Killed(BaseException):
    """Stands for kill -9: nothing after it may be saved."""


RAINBOW = {
    "distribution": DISTRIBUTIONS["c51"],
    "double": True,
    "dueling": True,
    "n_step": 3,
    "noisy": {"kind": "factorised"},
    "target": {"kind": "updates", "period_updates": 20},
}
RUNS = {
    "nature": {
        "task": "gym:stub/Dot-v0",
        "agent": {
            "network": {"kind": "minatar", "channels": 4},
            "optimiser": {"kind": "deepmind_rmsprop"},
            "epsilon": {"kind": "linear", "decay_agent_steps": 150},
            "target": {"kind": "agent_steps", "period_agent_steps": 60},
        },
    },
    "rainbow": {"agent": RAINBOW, "replay": {"kind": "prioritized", "alpha": 0.5}},
    "btr": {
        "task": "gym:stub/Dot-v0",
        "agent": {
            "network": {"kind": "impala", "width": 1, "pool_cells": 2, "hidden_units": 16},
            "distribution": DISTRIBUTIONS["iqn"],
            "munchausen": {"kind": "on"},
            "dueling": True,
            "n_step": 3,
            "noisy": {"kind": "factorised"},
            "epsilon": {"kind": "linear", "decay_agent_steps": 150},
            "batch_size": 4,
        },
        "replay": {"kind": "prioritized", "alpha": 0.2},
        "train": {"updates_per_agent_step": 0.1},
    },
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_killed_in_the_middle_goes_on_exactly(name, tmp_path, monkeypatch):
    layers = {"env": {"num_envs": 2}, "steps": 280, **RUNS[name]}
    straight = train_run(dqn_run(**layers), tmp_path / "straight")
    passes = count()

    def fault(stage: str) -> None:
        if stage == "step-250" and next(passes) == 0:
            raise Killed

    monkeypatch.setattr(files, "fault_point", fault)
    with pytest.raises(Killed):
        train_run(dqn_run(**layers), tmp_path / "run")
    assert resume_run(tmp_path / "run").status == "done"
    assert training_record(tmp_path / "run") == training_record(straight.path)


def test_finding_4_a_seed_decides_the_run_and_evaluations_do_not(tmp_path):
    layers = {**RUNS["rainbow"], "steps": 180, "train": {"checkpoint_every_agent_steps": 0}}

    def record(name, **more):
        run = train_run(dqn_run(**{**layers, **more}), tmp_path / name)
        found = training_record(run.path)
        return found["agent tensors"], found["episodes"], found["replay tensors"]

    once = record("once")
    assert once == record("again")
    assert once == record("watched", eval={"every_agent_steps": 50})
    assert once[0] != record("other", seed=2)[0]


# Learning


LEARNS = {
    "plain": {},
    "nature": {"optimiser": {"kind": "deepmind_rmsprop", "lr": 1e-3}},
    "rainbow": {**RAINBOW, "distribution": {"kind": "c51", "atoms": 21}},
    "qr": {"distribution": {"kind": "qr", "quantiles": 11}},
    "munchausen iqn": {"distribution": DISTRIBUTIONS["iqn"], "munchausen": {"kind": "on"}},
}


@pytest.mark.parametrize("name", LEARNS)
def test_every_member_learns_to_name_what_it_sees(name, tmp_path):
    """Ten namings an episode: 10 is perfect, chance is -3.3."""
    agent = {
        "optimiser": {"kind": "adam", "lr": 3e-3},
        "epsilon": {"kind": "none"}
        if "noisy" in LEARNS[name]
        else {"kind": "linear", "decay_agent_steps": 400},
        "batch_size": 32,
        "gamma": 0.5,
        "target": {"kind": "updates", "period_updates": 20},
        **LEARNS[name],
    }
    config = dqn_run(
        "gym:stub/Match-v0",
        steps=900,
        agent=agent,
        env={"num_envs": 4},
        train={"updates_per_agent_step": 0.5, "checkpoint_every_agent_steps": 0},
        replay={"kind": "prioritized"} if name == "rainbow" else {},
        eval={"every_agent_steps": 0, "episodes": 10},
    )
    run = train_run(config, tmp_path / "run")
    assert run.score is not None and run.score > 8.0


def test_masks_hold_through_a_whole_run(tmp_path):
    run = train_run(dqn_run("gym:stub/Masked-v0", agent={"munchausen": {"kind": "on"}}), tmp_path)
    assert (run.status, run.agent_steps) == ("done", 400)


def test_finding_21_train_runs_for_500_steps_on_an_atari_game(tmp_path):
    pytest.importorskip("ale_py")
    config = dqn_run(
        "atari:Breakout",
        steps=500,
        agent={"network": {"kind": "nature", "hidden_units": 32}, "batch_size": 4},
        env={"num_envs": 2, "max_episode_steps": 60, "atari": {"life_loss": True}},
        train={"seed_agent_steps": 440, "checkpoint_every_agent_steps": 0},
        eval={"every_agent_steps": 0, "episodes": 1},
    )
    run = train_run(config, tmp_path / "run")
    assert run.status == "done"
    assert math.isfinite(float(read_rows(run.path / "train.csv")[0][-1]["loss"]))
    agent = load_agent(run.path, for_acting=False, device="cpu")
    batch = agent.transitions.sample(64)
    assert batch.obs.dtype == torch.uint8 and batch.obs.shape[1:] == (4, 84, 84)
    assert set(batch.reward.tolist()) <= {-1.0, 0.0, 1.0}
