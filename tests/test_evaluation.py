"""Episodes and evaluation: what is counted, what may fail, and that training never notices."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

from forethought.config import ConfigError, EnvConfig
from forethought.envs import VectorEnv, make_env
from forethought.envs.episodes import (
    EvaluationError,
    EvaluationInterrupted,
    Played,
    run_episodes,
)
from forethought.files import FileError
from forethought.seeding import Streams
from forethought.training.build import load_agent
from forethought.training.evaluate import (
    EvalResult,
    Evaluator,
    RandomPolicy,
    Watched,
    evaluate_target,
)
from forethought.training.loop import train_run
from tests.dqn.small_agents import make_agent
from tests.stub_agent import StubAgent, register, stub_run
from tests.stubs import CounterEnv, EntityEnv, FaultyEnv, vector_of


@pytest.fixture(autouse=True)
def _stub_agent(monkeypatch):
    register(monkeypatch)


class Still:
    """A policy that always answers zero, and counts what it is shown."""

    def __init__(self) -> None:
        self.firsts: list[list[bool]] = []

    def start(self, num_envs):
        return num_envs

    def act(self, obs, state, first, infos):
        self.firsts.append(first.tolist())
        return np.zeros((state, 1), np.float32), state


def counters(*lengths: int, **options) -> VectorEnv:
    return vector_of(*(partial(CounterEnv, length) for length in lengths), **options)


def result_of(played: Played) -> EvalResult:
    return EvalResult.of(played, "stub", "still")


def test_finding_12_a_result_carries_returns_lengths_seeds_and_how_episodes_ended():
    result = result_of(run_episodes(Still(), counters(3, 5), [11, 12]))
    assert result.lengths == (3, 5)
    assert result.returns == (6.0, 15.0)  # 1+2+3, 1+2+3+4+5
    assert result.seeds == (11, 12)
    assert result.terminated == (True, True)
    assert result.truncated == (False, False)
    assert result.success == (1.0, 1.0)
    assert result.mean == 10.5 and result.std == 4.5 and result.median == 10.5
    assert result.statistics()["length_mean"] == 4.0


def test_no_evaluation_explores(tmp_path, monkeypatch):
    """Neither in training, nor of a finished run, nor by the agent itself."""
    asked = []
    act = StubAgent.act_batch

    def watched(self, obs, state, first, info, explore):
        asked.append((state.generator.initial_seed(), explore))
        return act(self, obs, state, first, info, explore)

    monkeypatch.setattr(StubAgent, "act_batch", watched)
    config = stub_run(steps=100, eval={"every_agent_steps": 50})
    run = train_run(config, tmp_path / "run")
    assert {explore for _, explore in asked} == {True, False}  # training itself does explore
    exploring = {seed for seed, explore in asked if explore}
    assert not exploring & {seed for seed, explore in asked if not explore}
    for evaluate in (
        lambda: evaluate_target(str(run.path), episodes=2),
        lambda: load_agent(run.path).evaluate(make_env(config.task), episodes=2),
    ):
        asked.clear()
        evaluate()
        assert {explore for _, explore in asked} == {False}


@pytest.mark.parametrize("epsilon", [0.0, 0.25, 1.0])
def test_evaluations_take_as_many_random_actions_as_asked(monkeypatch, epsilon):
    """`eval.epsilon`, and that of the protocols: of an agent that always goes left in CartPole."""
    evaluator = Evaluator("gym:CartPole-v1", EnvConfig(), Streams(1), 40, epsilon=epsilon)
    agent = make_agent(spec=evaluator.env.spec_for_agent)
    taken: list[int] = []
    step = CartPoleEnv.step
    monkeypatch.setattr(CartPoleEnv, "step", lambda env, a: (taken.append(int(a)), step(env, a))[1])
    with torch.no_grad():
        agent.online.advantage.output.weight.zero_()
        agent.online.advantage.output.bias.copy_(torch.tensor([1.0, 0.0]))
    result = evaluator.agent(agent, 0)
    evaluator.close()
    assert result.epsilon == epsilon and len(taken) >= 300
    assert np.mean(taken) == pytest.approx(epsilon / 2, abs=0.05)  # half of them are left, too


def test_a_step_limit_truncates():
    """airspace.md 3.3: limit 7 gives 7 steps."""
    result = result_of(run_episodes(Still(), counters(100, max_episode_steps=7), [1]))
    assert result.lengths == (7,)
    assert result.truncated == (True,) and result.terminated == (False,)
    assert result.success == (None,) and result.statistics()["success_mean"] is None


def test_more_episodes_than_environments_keep_the_order_of_their_seeds():
    policy = Still()
    result = result_of(run_episodes(policy, counters(2, 4), [5, 6, 7, 8, 9]))
    assert result.seeds == (5, 6, 7, 8, 9)
    assert result.lengths == (2, 4, 2, 4, 2)
    assert policy.firsts[0] == [True, True]
    assert policy.firsts[2] == [True, False]  # environment 0 began its second episode


def test_statistics_by_hand():
    result = EvalResult("t", "p", (7.0, 0.0, 1.0, 6.0, 2.0, 5.0, 3.0, 4.0), *[()] * 5, failures=())
    assert result.iqm == 3.5  # the mean of 2, 3, 4, 5
    assert result.median == 3.5 and result.std == pytest.approx(np.sqrt(5.25))
    skewed = (100.0, 0.0, 1.0, 50.0, 2.0, 10.0, 3.0, 4.0)
    far = EvalResult("atari:Pong", "p", skewed, *[()] * 5, failures=())
    assert far.iqm == 4.75 and far.median == 3.5 and far.mean == 21.25  # 2, 3, 4, 10 are in between
    assert far.human_normalised == pytest.approx((21.25 + 20.7) / 35.3)
    one = EvalResult("t", "p", (3.0,), *[()] * 5, failures=())
    assert one.iqm == 3.0 and one.std == 0.0


def faulty(fault: str, only_seeds: tuple[int, ...] | None) -> VectorEnv:
    return vector_of(partial(FaultyEnv, fault, only_seeds=only_seeds), num_envs=2)


@pytest.mark.parametrize("fault", ["raise", "nan-reward", "nan-observation"])
def test_episodes_that_fail_are_counted_and_the_others_go_on(fault):
    """airspace.md 2.4: an environment that fails k of n."""
    result = result_of(run_episodes(Still(), faulty(fault, (2, 3)), [1, 2, 3, 4, 5]))
    assert result.n_failed == 2
    assert result.seeds == (1, 4, 5)
    assert result.returns == (55.0, 55.0, 55.0)
    assert "environment" in result.failures[0].lower()


def test_an_evaluation_that_fails_everywhere_raises():
    """With the traceback of the first: who wrote the environment wants to see where."""
    with pytest.raises(EvaluationError, match=r"All 3 .* the wheel came off") as raised:
        run_episodes(Still(), faulty("raise", None), [1, 2, 3])
    [trace] = raised.value.__notes__
    assert trace.startswith("Traceback") and "the wheel came off" in trace
    with pytest.raises(EvaluationError, match=r"The only .* failed: .* the wheel came off"):
        run_episodes(Still(), faulty("raise", None), [1])


@pytest.mark.parametrize("episodes", [0, -1, 1.5])
def test_a_number_of_episodes_that_cannot_be_played_is_named(episodes):
    with pytest.raises(ConfigError, match=rf"episodes is {episodes}, but must be a whole number"):
        evaluate_target("gym:Pendulum-v1", episodes=episodes)


def test_programming_errors_are_not_counted_as_failed_episodes():
    class Broken(Still):
        def act(self, obs, state, first, infos):
            raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        run_episodes(Broken(), counters(3), [1])


def test_an_evaluation_stops_within_a_step_of_being_asked():
    steps = []
    with pytest.raises(EvaluationInterrupted):
        run_episodes(
            Still(),
            counters(100),
            [1],
            stop=lambda: len(steps) == 4,
            on_step=lambda: steps.append(1),
        )
    assert len(steps) == 4


def test_random_play_is_legal_and_a_function_of_its_stream():
    """Only one action is legal at each step; an illegal one raises in the environment."""
    env = vector_of(EntityEnv, num_envs=2)
    policy = RandomPolicy(env.spec_for_agent, Streams(1))
    played = run_episodes(policy, env, [1, 2, 3])
    assert not played.failures and len(played.episodes) == 3


def test_random_play_of_a_task_repeats_with_its_seed():
    def play(seed: int) -> EvalResult:
        return evaluate_target("gym:CartPole-v1", policy="random", episodes=3, seed=seed)

    assert play(1).returns == play(1).returns
    assert play(1).seeds != play(2).seeds
    data = json.loads(json.dumps(play(1).to_json()))
    assert data["policy"] == "random" and len(data["returns"]) == 3
    assert (data["run"], data["checkpoint_step"], data["seed"]) == (None, None, 1)
    assert play(1).player == "random"


def test_progress_counts_the_episodes_that_have_ended():
    told = []
    watched = Watched(Still(), lambda *how_far: told.append(how_far), 4)
    run_episodes(watched, counters(2, 4), [5, 6, 7, 8])
    # environment 0 ends its episodes after 2 and 4 steps, environment 1 after 4 and 8
    ended = [0, 0, 1, 1, 3, 3, 3, 3]
    assert told == [(done, step, 4) for step, done in enumerate(ended)]


def test_progress_counts_the_episodes_of_every_task(tmp_path):
    told = []
    task = "multi:gym:Pendulum-v1,gym:MountainCarContinuous-v0"
    env = EnvConfig(max_episode_steps=3)
    Evaluator(task, env, Streams(1), 2, lambda *how_far: told.append(how_far)).random()
    assert {of for _, _, of in told} == {4}


def test_a_run_is_evaluated_from_its_latest_best_or_named_checkpoint(tmp_path):
    run = train_run(stub_run(steps=200), tmp_path / "run")
    results = {
        which: evaluate_target(str(run.path), checkpoint=which, episodes=2)
        for which in ("latest", "best", "200", "100", 100)
    }
    assert results[100] == results["100"]  # from Python a step is a number
    assert results["latest"].returns == results["200"].returns == results["best"].returns
    assert results["latest"].returns != results["100"].returns
    assert results["latest"].policy == "stub"
    assert results["latest"].player == "stub at step 200 (latest)"
    assert results["100"].player == "stub at step 100"
    data = results["best"].to_json()
    found = (data["run"], data["checkpoint"], data["checkpoint_step"], data["seed"])
    assert found == (str(run.path), "best", 200, 1)
    random = evaluate_target(str(run.path), policy="random", episodes=2)
    assert random.seeds == results["latest"].seeds  # the same starts, so they compare
    assert random.mean == run.random_score
    assert (random.run, random.checkpoint_step) == (str(run.path), None)
    with pytest.raises(ConfigError, match="no checkpoint at step 150; it has: 100, 200"):
        evaluate_target(str(run.path), checkpoint="150")
    with pytest.raises(ConfigError, match="must be latest, best or a step"):
        evaluate_target(str(run.path), checkpoint="newest")
    assert load_agent(run.path, checkpoint=100).updates == 60


@pytest.mark.parametrize(
    ("target", "policy", "sentence"),
    [
        ("nowhere", None, "There is no run directory nowhere"),
        ("gym:Pendulum-v1", "randon", "There is no policy randon. Did you mean random"),
        ("gym:Pendulum-v9", None, "There is no task gym:Pendulum-v9"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_in_a_sentence(target, policy, sentence):
    with pytest.raises(ConfigError, match=sentence):
        evaluate_target(target, policy=policy)


def test_a_foreign_directory_is_refused(tmp_path):
    with pytest.raises(FileError, match="is not a run directory"):
        evaluate_target(str(tmp_path))
