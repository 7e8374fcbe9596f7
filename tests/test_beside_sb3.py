"""The scripts that run Stable-Baselines3 beside ours give both sides the same settings."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gymnasium.envs.classic_control.pendulum import PendulumEnv

import forethought
from forethought import files, presets
from forethought.agents.registry import config_class
from forethought.config import RunConfig, build_run_config

stable_baselines3 = pytest.importorskip("stable_baselines3")
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


class Model:
    """In place of an algorithm: keeps what it was given, and learns nothing."""

    given: dict[str, Any]
    deterministic: list[bool]

    def __init__(self, policy: str, env: Any, **given: Any) -> None:
        Model.given, Model.deterministic, self.env = {**given, "env": env}, [], env

    def set_logger(self, logger: Any) -> None:
        logger.close()  # nothing to log

    def learn(self, steps: int, callback: Any) -> None:
        Model.given["steps"] = steps

    def predict(self, obs: Any, deterministic: bool = False) -> tuple[Any, None]:
        Model.deterministic.append(deterministic)
        return np.zeros(1, np.float32), None


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    for name in ("SAC", "TD3", "DQN"):
        monkeypatch.setattr(stable_baselines3, name, Model)


def ours(monkeypatch: pytest.MonkeyPatch, script: Any, options: Any, tmp_path: Path) -> RunConfig:
    """What the script asks `forethought.train` for, as a whole configuration."""
    asked: dict[str, Any] = {}

    def train(name: str, task: str, /, **given: Any) -> None:
        asked.update(given, agent_name=name, task=task)

    monkeypatch.setattr(forethought, "train", train)
    monkeypatch.setattr(files, "fault_point", None)  # the script sets it
    script.ours(options, None, tmp_path)
    agent, task = asked.pop("agent_name"), asked.pop("task")
    named = asked.pop("presets")
    own = {key: value for key, value in asked.items() if key != "out"}
    layers = [*presets.layers([named], None, agent), own]
    return build_run_config(agent, task, config_class(agent), layers)


@pytest.mark.parametrize("agent", ["sac", "td3"])
@pytest.mark.parametrize("envs", [1, 8])
def test_sac_and_td3_make_the_same_work_on_both_sides(monkeypatch, tmp_path, agent, envs):
    """An update per agent step however many environments there are, each of the same size."""
    import sac_td3_speed as script

    options = argparse.Namespace(agent=agent, envs=envs, threads=[1], chunk=1)
    config = ours(monkeypatch, script, options, tmp_path)
    script.theirs(options, SimpleNamespace(step=None), tmp_path)
    given, own = Model.given, config.agent
    assert given["env"].num_envs == config.env.num_envs == envs
    assert given["gradient_steps"] == envs and given["train_freq"] == 1
    assert config.train.updates_per_agent_step == 1
    assert given["batch_size"] == own.batch_size == 256
    assert given["gamma"] == own.gamma and given["tau"] == own.tau
    assert {own.lr.actor, own.lr.critic, given["learning_rate"]} == {3e-4}
    assert given["buffer_size"] == config.replay.capacity_rows
    assert given["learning_starts"] == config.train.seed_agent_steps
    sizes = {"net_arch": list(own.hidden), "n_critics": own.critics}
    assert given["policy_kwargs"] == sizes == {"net_arch": [256, 256], "n_critics": 2}
    if agent == "td3":
        td3_is_the_same(given, own)
    else:
        assert "ent_coef" not in given  # auto, as ours; it begins at 1 on both sides
        assert (own.entropy.kind, own.entropy.initial) == ("auto", 1.0)


def td3_is_the_same(given: dict[str, Any], own: Any) -> None:
    assert given["policy_delay"] == own.policy_delay == 2
    assert given["target_policy_noise"] == own.target_noise
    assert given["target_noise_clip"] == own.target_noise_clip
    assert set(given["action_noise"]._sigma) == {own.exploration_noise} == {0.1}


@pytest.mark.parametrize("agent", ["sac", "td3"])
def test_sb3_learns_and_is_evaluated_as_ours_is(monkeypatch, agent):
    """Without exploration, from the same starts, with the values of our configuration."""
    import sac_td3_learning as script

    task = "gym:Pendulum-v1"
    config = script.settings(agent, task, 400)
    starts = []
    real = PendulumEnv.reset

    def reset(env: Any, *, seed: int | None = None, options: Any = None) -> Any:
        starts.append(seed)
        return real(env, seed=seed, options=options)

    monkeypatch.setattr(PendulumEnv, "reset", reset)
    about = {"agent": agent, "task": task, "seed": 1, "steps": 400, "seeds": [3, 4]}
    found = script.learn_with_sb3(about)
    given, own = Model.given, config.agent
    assert len(found["returns"]) == 2 and starts == [3, 4]
    assert Model.deterministic == [True] * 400  # two episodes of 200 decisions
    assert (given["steps"], given["seed"]) == (400, 1)
    assert given["batch_size"] == own.batch_size and given["gamma"] == own.gamma
    assert given["tau"] == own.tau and given["learning_rate"] == own.lr.actor == own.lr.critic
    assert given["learning_starts"] == config.train.seed_agent_steps
    assert given["buffer_size"] == config.replay.capacity_rows
    assert given["train_freq"] == given["gradient_steps"] == config.train.updates_per_agent_step
    assert given["policy_kwargs"] == {"net_arch": list(own.hidden), "n_critics": own.critics}
    if agent == "sac":
        assert given["ent_coef"] == f"auto_{own.entropy.initial}" == "auto_1.0"
    else:
        td3_is_the_same(given, own)


@pytest.mark.parametrize("envs", [1, 4, 8])
def test_dqn_makes_the_same_work_on_both_sides(monkeypatch, tmp_path, envs):
    """An update for every fourth decision, of the same size, clipped alike."""
    pytest.importorskip("ale_py")
    from stable_baselines3.common import env_util, vec_env

    import dqn_speed as script

    monkeypatch.setattr(env_util, "make_atari_env", lambda *given, n_envs, **more: n_envs)
    monkeypatch.setattr(vec_env, "VecFrameStack", lambda games, n_stack: (games, n_stack))
    options = argparse.Namespace(envs=envs, workers=False, threads=1, chunk=1)
    config = ours(monkeypatch, script, options, tmp_path)
    script.theirs(options, SimpleNamespace(step=None), tmp_path)
    given, own = Model.given, config.agent
    assert given["env"] == (envs, 4) and config.env.num_envs == envs
    decisions = given["train_freq"] * envs
    assert given["gradient_steps"] / decisions == config.train.updates_per_agent_step == 0.25
    assert given["batch_size"] == own.batch_size == 32
    assert given["max_grad_norm"] == own.grad_clip_norm == 10.0
    assert given["learning_rate"] == own.optimiser.lr == 1e-4
    assert given["gamma"] == own.gamma
    assert given["buffer_size"] == config.replay.capacity_rows
    assert given["learning_starts"] == config.train.seed_agent_steps
    assert given["target_update_interval"] == own.target.period_agent_steps
    ends = (given["exploration_initial_eps"], given["exploration_final_eps"])
    assert ends == (own.epsilon.start, own.epsilon.end) == (0.01, 0.01)
    assert not (own.double or own.dueling or own.n_step > 1) and own.network.hidden_units == 512
