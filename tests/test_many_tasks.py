"""Several tasks in one agent: their environments, replay, scores, runs and refusals."""

from __future__ import annotations

import contextlib
import csv
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import forethought
from forethought import cli
from forethought.agents.tdmpc2.config import ModelConfig, TDMPC2Config
from forethought.agents.tdmpc2.gammas import MultiGammaConfig
from forethought.agents.tdmpc2.tasks import discount, embedding_dim
from forethought.config import (
    ConfigError,
    EnvConfig,
    EpisodeReplayConfig,
    ForethoughtError,
    TransitionReplayConfig,
)
from forethought.envs import EnvError, check_task, make_env, make_single, multi, spec_of
from forethought.envs.episodes import (
    Episode,
    EvaluationError,
    Played,
    legal_random,
    run_episodes,
)
from forethought.envs.vector import batch_infos, infos_of_each
from forethought.replay import Replay
from forethought.seeding import Streams
from forethought.training import evaluate, watch
from forethought.training.build import load_agent
from forethought.training.evaluate import EvalResult, Evaluator, RandomPolicy, check_every_task
from tests.tdmpc2_agents import CONFIG, FAST, TINY, make_agent

PAIR = "multi:dmc:cartpole-swingup,dmc:reacher-easy"
"""Observations of 5 and 6 numbers, actions of 1 and 2."""
OWN = "multi:gym:tests.many_tasks:tasks/Short-v0,gym:tests.many_tasks:tasks/Long-v0"


def make_spec():
    return spec_of(OWN)


# ---- environments ----


def test_observations_are_padded_and_the_task_is_told():
    env = make_env(OWN, 2)
    try:
        assert env.num_envs == 4
        spec = env.spec_for_agent
        assert spec.observation_space.shape == (3,)
        assert spec.action_space.shape == (2,)
        assert [own.observation_space.shape for own in spec.tasks] == [(2,), (3,)]
        obs, info = env.reset(seed=1)
        assert info["task"].tolist() == [0, 1, 0, 1]
        assert (obs[[0, 2], 2] == 0).all()
        assert (obs[[1, 3]] != 0).any(axis=0)[2]
    finally:
        env.close()


def test_each_task_keeps_its_limit_its_repeat_and_its_bounds():
    spec = make_spec()
    short, long = spec.tasks
    assert (short.max_episode_steps, long.max_episode_steps) == (4, 9)
    assert spec.max_episode_steps == 9
    assert (short.action_repeat, long.action_repeat) == (1, 1)
    member = make_single(OWN, env_index=1)
    member.reset(seed=0)
    ends = [member.step(np.array([0.5, -1.0], np.float32))[3] for _ in range(9)]
    assert ends == [False] * 8 + [True]
    # Rescaled to the task's own bounds, -2 to 4 and -1 to 1.
    np.testing.assert_allclose(member.unwrapped.received[0], [2.5, -1.0])


def test_padding_of_the_action_is_not_executed_and_must_be_zero():
    member = make_single(OWN, env_index=2)
    member.reset(seed=0)
    member.step(np.array([0.25, 0.0], np.float32))
    np.testing.assert_allclose(member.unwrapped.received[0], [0.25])
    with pytest.raises(EnvError, match="not zero in dimensions that gym:tests"):
        member.step(np.array([0.25, 0.5], np.float32))


def test_limits_and_repeats_of_the_run_hold_for_every_task():
    spec = spec_of(OWN, action_repeat=2, max_episode_steps=3)
    assert [own.max_episode_steps for own in spec.tasks] == [3, 3]
    assert [own.action_repeat for own in spec.tasks] == [2, 2]


def test_workers_give_the_same_episodes():
    trajectories = []
    for workers in (False, True):
        env = make_env(OWN, seed=3, workers=workers)
        try:
            policy = RandomPolicy(env.spec_for_agent, Streams(5))
            trajectories.append(run_episodes(policy, env, [4, 5, 6]))
        finally:
            env.close()
    assert trajectories[0] == trajectories[1]
    names = [episode.task for episode in trajectories[0].episodes]
    assert names == [*multi.members(OWN), multi.members(OWN)[0]]


def test_random_play_is_zero_in_the_padding():
    spec = make_spec()
    infos = [{"task": 0}, {"task": 1}]
    drawn = np.stack([legal_random(spec, np.random.default_rng(i), infos) for i in range(9)])
    assert (drawn[:, 0, 1] == 0).all()
    assert (drawn[:, 0, 0] != 0).all()
    assert (drawn[:, 1] != 0).all()
    with pytest.raises(ConfigError, match="task is -1, but must be a whole number from 0 to 1"):
        legal_random(spec, np.random.default_rng(0), [{"task": 0}, {"task": -1}])


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        ("multi:dmc:walker-walk", "has one task"),
        ("multi:dmc:walker-walk,dmc:walker-walk", "names dmc:walker-walk twice"),
        ("multi:dmc:walker-walk,", "'' in multi:dmc:walker-walk, is no single task"),
        ("multi:dmc:walker-walk,multi:dmc:cheetah-run", "is no single task"),
        ("multi:dmc:walker-walk,dmc:walker_wlk", "Did you mean dmc:walker-walk"),
    ],
)
def test_names_that_make_no_sense_are_refused(task, sentence):
    with pytest.raises(ConfigError) as error:
        check_task(task)
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ("gym:CartPole-v1", "continuous actions"),
        ("gym:tests.stubs:stub/Nested-v0", "one vector"),
        ("gym:tests.stubs:stub/Image-v0", "one vector"),
    ],
)
def test_tasks_that_cannot_be_padded_are_refused(other, sentence):
    with pytest.raises(ConfigError, match=sentence) as error:
        spec_of(f"multi:gym:tests.many_tasks:tasks/Short-v0,{other}")
    assert other in str(error.value)


# ---- replay ----


@pytest.mark.parametrize("config", [EpisodeReplayConfig, TransitionReplayConfig])
def test_every_task_is_drawn_equally_often(config):
    """Task 0 has one episode of 4 steps, task 1 twenty of 9: each is half of what is drawn."""
    spec = make_spec()

    def new(seed):
        rng = np.random.default_rng(seed)
        return Replay(spec, config(capacity_rows=1000), 2, 3, rng, torch.device("cpu"))

    replay = new(0)
    for stream, episodes, length in ((0, 1, 4), (1, 20, 9)):
        for _ in range(episodes):
            for t in range(length + 1):
                replay.add(row(stream, t, length), stream)
    drawn = replay.sample(4000).extras["task"]
    assert (drawn == drawn[0]).all()
    assert drawn[0].float().mean().item() == pytest.approx(0.5, abs=0.03)
    saved = replay.state(whole=True)
    other = new(1)
    other.restore(*saved, None)
    assert torch.equal(replay.sample(64).obs, other.sample(64).obs)


def test_a_task_without_a_slice_is_left_out_until_it_has_one():
    config = EpisodeReplayConfig(capacity_rows=100)
    rng = np.random.default_rng(0)
    replay = Replay(make_spec(), config, 2, 3, rng, torch.device("cpu"))
    assert not replay.can_sample()
    for t in range(5):
        replay.add(row(1, t, 4), 1)
    assert replay.can_sample()
    assert (replay.sample(16).extras["task"] == 1).all()


def row(stream, t, length):
    return {
        "obs": np.full(3, t, np.float32),
        "action": np.zeros(2, np.float32),
        "reward": 0.0,
        "terminated": False,
        "truncated": t == length,
        "is_first": t == 0,
        "task": stream,
    }


# ---- the agent ----


def test_the_official_lengths_of_embeddings():
    sizes = {size: TDMPC2Config(model=ModelConfig(size=size)) for size in (1, 5, 19, 48, 317)}
    assert {size: embedding_dim(own, 30) for size, own in sizes.items()} == {
        1: 96, 5: 64, 19: 64, 48: 64, 317: 96,
    }  # fmt: skip
    assert embedding_dim(sizes[5], 80) == 96


def test_every_task_has_the_discount_of_its_own_length():
    spec = spec_of(f"{OWN},dmc:cartpole-swingup")
    model = make_agent(spec=spec).model
    assert model.tasks.gammas.tolist() == [0.95, 0.95, 0.99]
    assert discount(CONFIG, spec) == 0.99
    fixed = make_agent(replace(CONFIG, gamma=0.9), spec=spec).model
    assert fixed.tasks.gammas.tolist() == [0.9, 0.9, 0.9]


def test_embeddings_start_small_and_are_counted():
    agent = make_agent(spec=make_spec(), config=replace(CONFIG, model=replace(TINY, task_dim=10)))
    embedding = agent.model.tasks.embedding
    assert embedding.shape == (2, 10)
    assert embedding.abs().max() <= 0.02
    assert embedding.std() > 0.005
    assert agent.log_architecture()["tasks"] == 20
    assert "2 tasks: an embedding of 10 numbers each" in " ".join(agent.notes)


def test_acting_is_zero_in_the_padding_with_and_without_a_plan():
    for config in (CONFIG, replace(CONFIG, mpc=False, planner=type(FAST)())):
        agent = make_agent(config, spec=make_spec())
        state = agent.new_state(2, Streams(1), "planner")
        obs = np.random.default_rng(0).normal(size=(2, 3)).astype(np.float32)
        info = [{"task": 0}, {"task": 1}]
        action, state = agent.act_batch(obs, state, np.ones(2, bool), info, explore=True)
        assert action[0, 1] == 0
        assert (action[[0, 1, 1], [0, 0, 1]] != 0).all()


def test_infos_as_the_environments_give_them_tell_the_tasks_too():
    obs = np.random.default_rng(0).normal(size=(2, 3)).astype(np.float32)
    own = [{"task": 1, "a": {"b": 2}}, {"task": 0}]
    given = batch_infos(own)
    assert infos_of_each(given, 2) == own and infos_of_each(own, 2) is own
    agent, actions = make_agent(spec=make_spec()), []
    for info in (own, given):
        state = agent.new_state(2, Streams(1), "planner")
        actions.append(agent.act_batch(obs, state, np.ones(2, bool), info, explore=True)[0])
    assert np.array_equal(*actions)


def test_an_agent_of_many_tasks_wants_to_know_which_one():
    agent = make_agent(spec=make_spec())
    with pytest.raises(ForethoughtError, match="must be the number of one"):
        agent.act(np.zeros(3, np.float32), info={"task": np.array([0, 1])})
    with pytest.raises(ForethoughtError, match=r"plays 2 tasks, .* act\(obs, task=NAME\)"):
        agent.act(np.zeros(3, np.float32))
    with pytest.raises(ForethoughtError, match=r"have \(3,\), padded .*: act\(obs, task=NAME\)\.$"):
        agent.act(np.zeros(2, np.float32))
    with pytest.raises(ForethoughtError, match="needs to know which one"):
        agent.model.encode(torch.zeros(1, 3))


@pytest.mark.parametrize(("number", "observed", "acted"), [(0, 2, 1), (1, 3, 2)])
def test_act_takes_a_task_with_its_own_observations_and_actions(number, observed, acted):
    """By name or number, the same as padded with the task in info, and without the padding."""
    name, obs = multi.members(OWN)[number], np.linspace(-1, 1, observed, dtype=np.float32)
    wide = np.pad(obs, (0, 3 - observed))
    by_name, by_number, by_info = (make_agent(spec=make_spec()) for _ in range(3))
    action = by_name.act(obs, task=name)
    assert action.shape == (acted,)
    assert np.array_equal(action, by_number.act(obs, task=number))
    assert np.array_equal(action, by_info.act(wide, info={"task": number})[:acted])
    again, stats = by_name.act_with_stats(obs, task=name)
    assert again.shape == (acted,)
    assert stats["plan_value_max"] >= stats["plan_value_mean"]


def test_a_task_that_does_not_fit_is_told():
    agent = make_agent(spec=make_spec())
    with pytest.raises(ConfigError, match=r"Did you mean gym:tests\.many_tasks:tasks/Long-v0"):
        agent.act(np.zeros(3), task="gym:tests.many_tasks:tasks/Lnog-v0")
    for number in (2, -1, 1.0, True, None, "x", np.float32(1)):
        told = pytest.raises(ConfigError, match="must be a whole number from 0 to 1")
        with told:
            agent.act(np.zeros(3, np.float32), info={"task": number})
        with told:
            agent.store_transition({"obs": np.zeros(3, np.float32), "task": number})
        if not isinstance(number, str | None):  # a name, and no task at all
            with told:
                agent.act(np.zeros(3), task=number)
    with pytest.raises(
        ConfigError, match=r"has shape \(3,\), but that of .*Short-v0 alone has \(2"
    ):
        agent.act(np.zeros(3), task=0)
    with pytest.raises(ConfigError, match="task is 0, but there is one task, stub"):
        make_agent().act(np.zeros(5), task=0)


@pytest.mark.parametrize("terminating", [(), (0,), (1,), (0, 1)])
def test_tasks_are_episodic_together_where_one_of_them_terminates(terminating):
    own = [replace(one, terminates=i in terminating) for i, one in enumerate(make_spec().tasks)]
    assert multi.joint_spec(OWN, tuple(own)).terminates is bool(terminating)


def test_size_19_has_the_official_latent_of_30_tasks():
    spec = make_spec()
    own = [replace(spec.tasks[i % 2], task=f"task {i}") for i in range(30)]
    model = ModelConfig(size=19, encoder_units=16, mlp_units=24, encoder_layers=2, num_q=2)
    latents = {}
    for count in (2, 29, 30):
        many = multi.joint_spec(f"multi:{count}", tuple(own[:count]))
        agent = make_agent(replace(CONFIG, model=model), spec=many, for_acting=True)
        latents[count] = agent.model.latent_dim
        assert ("has 512 numbers" in " ".join(agent.notes)) == (count == 30)
    assert latents == {2: 768, 29: 768, 30: 512}
    by_hand = replace(CONFIG, model=replace(model, latent_dim=64))
    assert make_agent(by_hand, spec=many, for_acting=True).model.latent_dim == 64


def test_auxiliary_discounts_of_many_tasks_are_refused():
    config = replace(CONFIG, multi_gamma=MultiGammaConfig(enabled=True, gammas=("primary", 0.9)))
    with pytest.raises(ConfigError, match="several tasks, each with a discount of its own"):
        make_agent(config, spec=make_spec())


def test_an_embedding_for_one_task_is_refused():
    config = replace(CONFIG, model=replace(TINY, task_dim=8))
    with pytest.raises(ConfigError, match="task_dim is 8, but stub is one task"):
        make_agent(config)


# ---- scores ----


def played(*scores):
    """Episodes of (task, return, success)."""
    own = [
        Episode(i, total, 5, False, True, success, task)
        for i, (task, total, success) in enumerate(scores)
    ]
    return Played(own, [])


def test_normalised_scores_by_hand():
    a, b = "dmc:walker-walk", "dmc:cheetah-run"
    result = EvalResult.of(
        played((a, 900.0, None), (b, 200.0, None), (a, 700.0, None), (b, 400.0, None)), PAIR, "x"
    )
    own = result.by_task()
    assert (own[a].mean, own[b].mean) == (800.0, 300.0)
    assert (own[a].normalised_score, own[b].normalised_score) == (80.0, 30.0)
    assert result.normalised_score == 55.0
    row = result.row()
    assert row["normalised_score/dmc:walker-walk"] == 80.0
    assert row["return_mean/dmc:cheetah-run"] == 300.0


def test_tasks_count_equally_when_episodes_failed():
    a, b = "dmc:walker-walk", "dmc:cheetah-run"
    result = EvalResult.of(played((a, 900.0, None), (b, 0.0, None), (a, 900.0, None)), PAIR, "x")
    assert result.mean == 450.0


def test_a_task_of_which_no_episode_could_be_played_leaves_no_mean():
    """Else the mean of the others would pass for that of all, and for the best."""
    a, b = multi.members(PAIR)
    spec = spec_of(PAIR)
    check_every_task(played((a, 900.0, None), (b, 0.0, None)), spec)
    only = played((a, 900.0, None), (a, 900.0, None))
    only.failures.append("the engine of it broke")
    with pytest.raises(EvaluationError, match=f"{b} could be played.* the engine of it broke"):
        check_every_task(only, spec)
    only.failures[:] = [f"{b}-backwards broke", f"{b} broke"]
    with pytest.raises(EvaluationError, match=f"all tasks. {b} broke"):
        check_every_task(only, spec)


def test_an_evaluation_that_lacks_a_task_has_failed(monkeypatch):
    a, b = multi.members(PAIR)
    monkeypatch.setattr(
        evaluate, "run_episodes", lambda *_, **__: played((a, 900.0, None), (a, 900.0, None))
    )
    evaluator = Evaluator(PAIR, EnvConfig(), Streams(1), 1)
    with contextlib.closing(evaluator), pytest.raises(EvaluationError, match=f"episode of {b}"):
        evaluator.random()


def test_success_is_the_scale_of_tasks_that_report_it_and_others_have_none():
    a, b = "gym:A-v0", "dmc:cheetah-run"
    result = EvalResult.of(played((a, -3.0, 1.0), (b, 500.0, None), (a, -3.0, 0.0)), PAIR, "x")
    assert result.normalised_score == 50.0
    without = EvalResult.of(played((a, -3.0, None), (b, 500.0, None)), PAIR, "x")
    assert without.normalised_score is None
    assert without.row()["normalised_score/dmc:cheetah-run"] == 50.0


# ---- runs ----

FLAGS = ["--preset", "debug", "--steps", "64", "--track.no_console", "--env.max_episode_steps", "8"]
FLAGS += ["--eval.every_agent_steps", "32", "--eval.episodes", "1"]
FLAGS += ["--train.seed_agent_steps", "24", "--train.seed_updates", "2"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("many") / "run"
    assert cli.main(["train", "tdmpc2", PAIR, *FLAGS, "--out", str(out)]) == 0
    return out


def rows(file):
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def test_a_run_tells_each_task_in_its_files(run):
    evaluations, episodes = rows(run / "eval.csv"), rows(run / "episodes.csv")
    assert [row["agent_steps"] for row in evaluations] == ["32", "64"]
    last = evaluations[-1]
    means = [float(last[f"return_mean/{task}"]) for task in multi.members(PAIR)]
    assert float(last["return_mean"]) == pytest.approx(np.mean(means))
    assert float(last["normalised_score"]) == pytest.approx(np.mean(means) / 10)
    assert last["eval_episodes"] == "2"
    assert {(row["env_index"], row["task"]) for row in episodes} == {
        ("0", "dmc:cartpole-swingup"),
        ("1", "dmc:reacher-easy"),
    }


def test_it_resumes_exactly(run, tmp_path):
    """32 steps and then 32 more leave the same weights and rows as 64 at once."""
    out = tmp_path / "half"
    words = ["train", "tdmpc2", PAIR, *FLAGS, "--out", str(out)]
    words[words.index("64")] = "32"
    assert cli.main(words) == 0
    assert cli.main(["resume", str(out), "--steps", "64"]) == 0
    whole, parts = load_agent(run), load_agent(out)
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, parts.model.state_dict()[name]), name
    for file in ("eval.csv", "episodes.csv"):
        for a, b in zip(rows(run / file), rows(out / file), strict=True):
            assert {**a, "wall_s": ""} == {**b, "wall_s": ""}


def test_frames_are_counted_by_each_tasks_own_repeat(tmp_path):
    """A decision is two frames of cartpole and one of the other: 40 decisions are 60 frames."""
    task = f"multi:dmc:cartpole-swingup,{multi.members(OWN)[0]}"
    words = ["train", "tdmpc2", task, "--preset", "debug", "--track.no_console", "--steps", "40"]
    words += ["--env.max_episode_steps", "10", "--train.seed_agent_steps", "40"]
    assert cli.main([*words, "--train.seed_updates", "1", "--out", str(tmp_path / "run")]) == 0
    last = rows(tmp_path / "run" / "eval.csv")[-1]
    assert (last["agent_steps"], last["env_frames"]) == ("40", "60")


def test_evaluate_tells_each_task(run, capsys):
    assert cli.main(["evaluate", str(run), "--episodes", "1"]) == 0
    told = capsys.readouterr().out
    assert "normalised_score" in told
    assert "dmc:reacher-easy" in told
    assert cli.main(["evaluate", str(run), "--episodes", "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told["by_task"]) == set(multi.members(PAIR))


@pytest.mark.parametrize(("wanted", "number"), [(None, 0), ("dmc:reacher-easy", 1)])
def test_one_of_several_tasks_is_watched(run, wanted, number, monkeypatch):
    """The picture itself needs a graphics driver: here, which task is built and played."""
    built = []

    def film(policy, seeds, task, made_with, path, title, *, number):
        built.append((number, title.split(",")[0]))
        env = make_env(task, max_episode_steps=2)
        try:
            return run_episodes(policy, env, seeds)
        finally:
            env.close()

    monkeypatch.setattr(watch, "film", film)
    result = watch.watch_run(run, video=run / "x.mp4", task=wanted)
    assert built == [(number, multi.members(PAIR)[number])]
    assert len(result.returns) == 1
    with pytest.raises(ConfigError, match="There is no task dmc:cheetah-run in this run"):
        watch.watch_run(run, video=run / "x.mp4", task="dmc:cheetah-run")


def test_random_play_of_many_tasks():
    result = forethought.evaluate(OWN, policy="random", episodes=2)
    assert len(result.returns) == 4
    assert set(result.tasks) == set(multi.members(OWN))


def test_the_folder_of_many_tasks_has_a_short_name(tmp_path, monkeypatch):
    from forethought.tracking import RunDirectory

    monkeypatch.chdir(tmp_path)
    task = "multi:" + ",".join(f"dmc:task-{i}" for i in range(80))
    run = RunDirectory.create(None, {}, "tdmpc2", task, 1)
    assert run.path.parts[1].startswith("multi-80-tasks-")
