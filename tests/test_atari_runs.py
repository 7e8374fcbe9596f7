"""Runs on Atari: what learning sees, exact resumes, evaluation protocols, published scores. Seed
004's findings 4, 7, 12 and 'EpisodicLife absent in eval' by name."""

from __future__ import annotations

import ast
import json
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import gymnasium
import imageio_ffmpeg
import numpy as np
import pytest
import torch

import forethought
from forethought import files, presets
from forethought.agents.registry import config_class
from forethought.cli import main
from forethought.config import (
    AtariConfig,
    ConfigError,
    EnvConfig,
    EvalConfig,
    RunConfig,
    TransitionReplayConfig,
    build_run_config,
    merge,
)
from forethought.envs import make_env, protocols, spec_of
from forethought.envs.atari_game import AtariGame
from forethought.envs.episodes import EpsilonGreedy, run_episodes
from forethought.envs.protocols import PROTOCOLS, evaluation_options, human_normalised
from forethought.replay import FrameStacker, Replay
from forethought.report.published import published
from forethought.seeding import Streams
from forethought.spaces.spec import Column, EnvSpec
from forethought.tracking import read_rows
from forethought.training import evaluate
from forethought.training.evaluate import (
    EvalResult,
    Evaluator,
    RandomPolicy,
    evaluate_target,
)
from forethought.training.loop import resume_run, train_run
from forethought.training.watch import film
from tests.stub_agent import training_record
from tests.stubs import CounterEnv, vector_of

TASK = "atari:Breakout"


def run_config(task: str = TASK, name: str = "tdmpc2", **layers: Any) -> RunConfig:
    """130 steps of a tiny agent, random until step 90; checkpoints lie inside games."""
    mine = {
        "steps": 130,
        "agent": {"batch_size": 2, "image": {"channels": 2, "shift_pixels": 0}},
        "env": {"num_envs": 2, "max_episode_steps": 60, "atari": {"life_loss": True}},
        "replay": {"kind": "transitions", "block_rows": 16},
        "train": {"seed_agent_steps": 90, "seed_updates": 2, "updates_per_agent_step": 0.1,
                  "checkpoint_every_agent_steps": 40},
        "eval": {"every_agent_steps": 0, "episodes": 1, "epsilon": 0.25},
        "track": {"console": False, "every_agent_steps": 30},
    }  # fmt: skip
    found = [*presets.layers(["debug"], None, name), mine, layers]
    return build_run_config(name, task, config_class(name), found)


class Killed(BaseException):
    """Stands for kill -9: nothing after it may be saved."""


@pytest.fixture(autouse=True)
def _few_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "PARALLEL_ENVS", 2)  # loading a game takes a sixth of a second


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return train_run(run_config(), tmp_path_factory.mktemp("whole") / "run").path


def test_an_atari_run_resumes_bit_for_bit_from_the_emulators_state(whole, tmp_path, monkeypatch):
    """Sticky actions and lost lives included; no game is stepped again."""
    passes = count()

    def fault(name: str) -> None:
        if name == "step-102" and next(passes) == 0:
            raise Killed

    monkeypatch.setattr(files, "fault_point", fault)
    with pytest.raises(Killed):
        train_run(run_config(), tmp_path / "run")
    stepped = count()
    reset_one = forethought.envs.VectorEnv.reset_one
    monkeypatch.setattr(
        forethought.envs.VectorEnv,
        "reset_one",
        lambda self, *rest: (next(stepped), reset_one(self, *rest))[1],
    )
    assert resume_run(tmp_path / "run").status == "done"
    assert next(stepped) == 1  # the one game of the evaluation at the end
    assert training_record(tmp_path / "run") == training_record(whole)


def test_four_games_of_dqn_resume_bit_for_bit(tmp_path, monkeypatch):
    """Prioritized replay, stacks, sticky actions, lost lives; scripts/faults/exact_resume.py does
    the same with real kills and in workers."""
    mine = {
        "steps": 72,
        # Sizes that C computes, where there is a compiler.
        "agent": {
            "network": {"kind": "nature", "channels": [32, 64, 64], "hidden_units": 512},
            "batch_size": 32,
        },
        "env": {"num_envs": 4, "max_episode_steps": 12, "atari": {"life_loss": True}},
        "replay": {"capacity_rows": 400, "block_rows": 8},
        "train": {"seed_agent_steps": 24, "seed_updates": 2, "checkpoint_every_agent_steps": 20},
        "eval": {"every_agent_steps": 0, "episodes": 1},
        "track": {"console": False, "every_agent_steps": 30},
    }
    layers = [*presets.layers(["dqn_modern", "debug"], None, "dqn"), mine]
    config = build_run_config("dqn", TASK, config_class("dqn"), layers)
    straight = training_record(train_run(config, tmp_path / "straight").path)
    passes = count()

    def fault(name: str) -> None:
        if name == "step-56" and next(passes) == 0:
            raise Killed

    monkeypatch.setattr(files, "fault_point", fault)
    with pytest.raises(Killed):
        train_run(config, tmp_path / "run")
    assert resume_run(tmp_path / "run").status == "done"
    assert training_record(tmp_path / "run") == straight


def test_counts_and_scores_of_a_run(whole):
    """Finding 7: frames are decisions times the repeat; scores are raw and of whole games."""
    rows, _ = read_rows(whole / "train.csv")
    assert all(int(row["env_frames"]) == 4 * int(row["agent_steps"]) for row in rows)
    evaluation = read_rows(whole / "eval.csv")[0][-1]
    expected = (float(evaluation["return_mean"]) - 1.7) / (30.5 - 1.7)
    assert float(evaluation["human_normalised"]) == pytest.approx(expected)
    assert int(evaluation["lengths"]) <= 60  # finding 12: each game's length


def test_finding_16_episodes_tell_raw_and_clipped_returns_and_lives(tmp_path, monkeypatch):
    """Rewards 0, 5, -7, 5, ... and a life lost at each fourth step: returns are raw and of whole
    games, and beside them stands what learning sees; after a resume, too."""
    step = AtariGame.step

    def paid(self, action):
        obs, _, terminated, truncated, info = step(self, action)
        self.told = getattr(self, "told", 0) + 1
        self._life_lost = self.told % 4 == 0
        reward = (0.0, 5.0, -7.0, 5.0)[self.told % 4]
        return obs, reward, terminated, truncated, {**info, "life_lost": self._life_lost}

    def reset(self, **given):
        self.told = 0
        return begin(self, **given)

    begin = AtariGame.reset
    monkeypatch.setattr(AtariGame, "step", paid)
    monkeypatch.setattr(AtariGame, "reset", reset)
    monkeypatch.setattr(AtariGame, "snapshot", lambda self: None)  # stepped again on resume
    layers = {"steps": 60, "env": {"num_envs": 1, "max_episode_steps": 18}}
    layers |= {"train": {"checkpoint_every_agent_steps": 26, "seed_agent_steps": 60}}
    passes = count()

    def fault(name: str) -> None:
        if name == "step-30" and next(passes) == 0:
            raise Killed

    monkeypatch.setattr(files, "fault_point", fault)
    with pytest.raises(Killed):
        train_run(run_config(**layers), tmp_path / "run")
    assert resume_run(tmp_path / "run").status == "done"
    rows, _ = read_rows(tmp_path / "run" / "episodes.csv")
    told = [(row["return"], row["clipped_return"], row["lives_episodes"]) for row in rows]
    # 18 steps: 5 - 7 + 5 + 0 four times, then 5 - 7; lives at 4, 8, 12 and 16, and the end.
    assert [tuple(map(float, row)) for row in told] == [(10.0, 4.0, 5.0)] * 3


# What learning sees


LOST = Column("life_lost", (), np.dtype(np.bool_), "life_lost")


def replay_of(rewards: list[float], lost: list[bool], **options: Any) -> Replay:
    """One open episode of as many steps; frames are numbered."""
    space: Any = gymnasium.spaces.Box(0, 255, (2, 2), np.uint8)
    actions: Any = gymnasium.spaces.Discrete(3)
    spec = EnvSpec("t", space, actions, None, 4, True, columns=(LOST,), **options)
    rng, cpu = np.random.default_rng(0), torch.device("cpu")
    config = TransitionReplayConfig(capacity_rows=100)
    replay = Replay(spec, config, 1, 2, rng, cpu, stack={"obs": 3})
    for t, (reward, life_lost) in enumerate(zip([0.0, *rewards], [False, *lost])):
        row = {"obs": np.full((2, 2), t + 1, np.uint8), "action": np.int64(0), "reward": reward}
        ends = {"terminated": False, "truncated": False, "is_first": t == 0}
        replay.add({**row, **ends, "life_lost": life_lost}, 0)
    return replay


def test_learning_sees_clipped_rewards_and_replay_keeps_the_raw_ones():
    for clipped, allowed in ((True, {-1.0, 0.0, 1.0}), (False, {-7.0, 0.0, 200.0})):
        replay = replay_of([200.0, -7.0, 0.0, 200.0], [False] * 4, sign_rewards=clipped)
        assert set(replay.sample(200).reward.flatten().tolist()) == allowed
        (rows,) = replay.episodes()
        assert rows["reward"].tolist() == [0.0, 200.0, -7.0, 0.0, 200.0]


def test_a_lost_life_cuts_the_bootstrap_and_the_game_goes_on():
    replay = replay_of([0.0] * 5, [False, True, False, False, False])
    batch = replay.sample(300)
    arrived = batch.obs[1, :, -1, 0, 0]  # the newest frame of the second row: t + 1
    assert batch.terminated[0][arrived == 3].eq(1.0).all()  # the life was lost on arriving at t=2
    assert batch.terminated[0][arrived != 3].eq(0.0).all()
    assert {3, 4} <= set(arrived.tolist())  # slices go on behind it


def test_acting_and_replay_stack_frames_alike_across_a_lost_life():
    replay = replay_of([0.0] * 6, [False, False, True, False, False, False])
    stacker = FrameStacker({"obs": 3}, "zeros", 1)
    acting = [
        stacker.push(np.full((1, 2, 2), t + 1, np.uint8), np.array([t == 0]))[0] for t in range(7)
    ]
    batch = replay.sample(300)
    for stack in batch.obs[0]:
        np.testing.assert_array_equal(stack.numpy(), acting[int(stack[-1, 0, 0]) - 1])


def test_rewards_are_summed_before_their_sign_is_taken():
    """Seed 004, wrapper order: repeat, sum, then clip; never the sum of clipped frames."""
    env = make_env("atari:Pong", atari=AtariConfig(sticky_actions=0.0))
    game = env._handles[0]._env.unwrapped
    env.reset_one(0, 1)
    act = iter([3, -1, 0, 1])
    game._ale = type(
        "Ale",
        (),
        {
            "act": lambda self, action: next(act),
            "game_over": lambda self, with_truncation: False,
            "getScreenGrayscale": lambda self, screen: None,
            "lives": lambda self: 0,
        },
    )()
    assert env.step_one(0, np.int64(0))[1] == 3.0
    assert env.spec_for_agent.sign_rewards
    env.close()


# Evaluation


def test_confirmed_episodic_life_is_absent_in_evaluations():
    """Seed 004, confirmed correct: evaluations play whole games with raw rewards."""
    config = EnvConfig(atari=AtariConfig(life_loss=True))
    assert config.training["atari"].life_loss
    assert not config.evaluation["atari"].life_loss
    for name in (None, *PROTOCOLS):
        evaluator = Evaluator(TASK, config, Streams(1), 1, protocol=name)
        env = evaluator.env
        assert env.spec_for_agent.columns == ()
        evaluator.close()


def test_finding_7_no_frame_skip_is_written_into_training():
    """Of the numbers in the room of training, none is a 4 that has to do with frames."""
    for file in sorted(Path(evaluate.__file__).parent.glob("*.py")):
        assert not fours_among_frames(file.read_text(encoding="utf-8")), file.name


def fours_among_frames(source: str) -> list[str]:
    """Sums, assignments and named arguments with a 4 in them that speak of frames or steps."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.BinOp | ast.Assign | ast.AnnAssign | ast.AugAssign | ast.keyword):
            four = any(isinstance(x, ast.Constant) and x.value == 4 for x in ast.walk(node))
            words = ast.unparse(node).lower()
            if four and any(word in words for word in ("frame", "step", "repeat", "skip")):
                found.append(words)
    return found


@pytest.mark.parametrize(
    "line",
    [
        "x = frames // 4",
        "frame_skip = 4",
        "env_frames += 4 * n",
        "run(repeat=4)",
        "s: F = 4",
    ],
)
def test_finding_7_a_frame_skip_would_be_seen(line):
    assert bool(fours_among_frames(line)) == (line != "s: F = 4")


@pytest.mark.parametrize(
    ("name", "repeat", "steps", "sticky", "noops", "epsilon", "length"),
    [("nature", None, 4_500, 0.0, 30, 0.05, (30, None)),
     ("nature", 2, 9_000, 0.0, 30, 0.05, (30, None)),
     ("dopamine", None, 27_000, 0.25, 0, 0.001, (None, 125_000))],
)  # fmt: skip
def test_finding_7_protocols_count_their_limit_in_frames(
    name, repeat, steps, sticky, noops, epsilon, length
):
    config = EnvConfig(action_repeat=repeat, max_episode_steps=50)
    made = evaluation_options(TASK, config, name)
    assert made["max_episode_steps"] == steps and made["action_repeat"] == repeat
    assert (made["atari"].sticky_actions, made["atari"].noop_max) == (sticky, noops)
    evaluator = Evaluator(TASK, config, Streams(1), 3, protocol=name)
    assert evaluator.epsilon == epsilon
    assert (PROTOCOLS[name].episodes, PROTOCOLS[name].agent_steps) == length


class Still:
    def start(self, num_envs: int) -> int:
        return num_envs

    def act(self, obs: Any, state: int, first: Any, infos: Any) -> Any:
        return np.zeros((state, 1), np.float32), state


@pytest.mark.parametrize("num_envs", [1, 2, 3])
def test_steps_are_counted_as_if_games_were_played_one_after_the_other(num_envs):
    """Dopamine's rule: a game begins while those before it have taken fewer steps than wanted."""
    env = vector_of(*[partial(CounterEnv, 4)] * num_envs)
    for wanted, games in ((1, 1), (4, 1), (5, 2), (8, 2), (9, 3), (21, 6)):
        played = run_episodes(Still(), env, range(wanted), min_steps=wanted)
        assert [e.seed for e in played.episodes] == list(range(games))
        assert all(e.length == 4 for e in played.episodes)


def test_epsilon_replaces_as_many_decisions_from_a_stream_of_its_own():
    env = make_env("minatar:breakout")
    spec = env.spec_for_agent

    class Third(Still):
        def act(self, obs: Any, state: int, first: Any, infos: Any) -> Any:
            return np.full(len(first), 3), state

    policy = EpsilonGreedy(Third(), 0.3, spec, Streams(1).numpy("eval-epsilon", 1))
    first, infos = np.zeros(4_000, np.bool_), [{}] * 4_000
    actions, _ = policy.act(None, 1, first, infos)
    number = int(spec.action_space.n)
    assert np.mean(actions != 3) == pytest.approx(0.3 * (1 - 1 / number), abs=0.03)
    again = EpsilonGreedy(Third(), 0.3, spec, Streams(1).numpy("eval-epsilon", 1))
    np.testing.assert_array_equal(again.act(None, 1, first, infos)[0], actions)
    env.close()


def test_finding_4_evaluations_more_often_change_nothing_in_training(whole, tmp_path):
    often = run_config(eval={"every_agent_steps": 60, "epsilon": 0.5})
    again = training_record(train_run(often, tmp_path / "run").path)
    before = training_record(whole)
    for part in ("train", "episodes", "agent tensors", "replay tensors", "loop tensors"):
        assert again[part] == before[part], part


def test_a_protocol_plays_a_run_and_random_play(whole, monkeypatch, capsys):
    short = protocols.Protocol("t", None, 50, 160, 0.5, 0.25, 0)  # 160 frames: 40 decisions
    monkeypatch.setitem(PROTOCOLS, "dopamine", short)
    result = evaluate_target(str(whole), protocol="dopamine")
    assert result.protocol == "dopamine" and result.epsilon == 0.5
    assert sum(result.lengths[:-1]) < 50 <= sum(result.lengths)
    assert all(length <= 40 for length in result.lengths)
    assert main(["evaluate", TASK, "--protocol", "dopamine", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["protocol"] == "dopamine" and told["epsilon"] == 0.0  # random play is random
    for key in ("return_mean", "return_median", "return_iqm", "return_min", "return_max"):
        assert key in told
    assert told["human_normalised"] == pytest.approx((told["return_mean"] - 1.7) / 28.8)


def test_fewer_games_of_a_run_s_protocol_are_played_by_its_rules(tmp_path, monkeypatch):
    """`--episodes` says how much is played, not how; and such a result has no protocol's name."""
    short = protocols.Protocol("t", None, 50, 160, 0.5, 0.25, 0)  # 160 frames: 40 decisions
    monkeypatch.setitem(PROTOCOLS, "dopamine", short)
    run = train_run(run_config(eval={"protocol": "dopamine"}), tmp_path / "run").path
    result = evaluate_target(str(run), episodes=3)
    assert len(result.returns) == 3 and result.lengths == (40, 40, 40)
    assert result.epsilon == 0.5 and result.protocol is None
    with pytest.raises(ConfigError, match="the protocol nature decides it"):
        evaluate_target(str(run), episodes=3, protocol="nature")


def test_human_normalised_scores():
    assert human_normalised("atari:Pong", -20.7) == 0.0
    assert human_normalised("atari:PongNoFrameskip-v4", 14.6) == 1.0
    assert human_normalised("atari:MsPacman-v5", 6951.6) == pytest.approx(1.0)
    assert human_normalised("atari:Tetris", 3.0) is None  # nobody published one
    assert human_normalised("gym:Pendulum-v1", 3.0) is None
    lengths = EvalResult("atari:Pong", "p", (-21.0, 14.6), (3, 5), *[()] * 4, failures=())
    assert lengths.lengths == (3, 5)  # finding 12
    assert lengths.human_normalised == pytest.approx((-3.2 + 20.7) / 35.3)


def test_dopamines_points_are_shown_beside_runs_of_dqn():
    curve = published("atari:Pong", "dqn", {})
    assert curve.label == "Dopamine's DQN" and curve.at(800_000) == (1_000_000, -20.19)
    assert curve.spacing is None and set(curve.seeds) == {5}
    rainbow = {"agent.distribution.kind": "c51", "replay.kind": "prioritized"}
    assert published("atari:BreakoutNoFrameskip-v4", "dqn", rainbow).label == "Dopamine's Rainbow"
    impala = {"agent.network.kind": "impala", "agent.distribution.kind": "iqn"}
    assert published("atari:MsPacman", "dqn", impala).label == "Dopamine's IQN with Impala"
    assert published("atari:Tennis", "dqn", {}) is None
    assert published("dmc:cartpole-swingup", "tdmpc2").spacing == 100_000


def test_finding_8_a_filmed_game_has_15_pictures_a_second(tmp_path):
    made_with = EnvConfig(max_episode_steps=5).evaluation
    spec = spec_of("atari:Pong")
    file = tmp_path / "pong.mp4"
    film(RandomPolicy(spec, Streams(1)), [5], "atari:Pong", made_with, file, "random play")
    assert imageio_ffmpeg.count_frames_and_secs(file) == (6, pytest.approx(6 / 15, abs=0.01))


# Configuration


def test_options_of_atari_are_refused_elsewhere(capsys):
    assert main(["train", "tdmpc2", "gym:Pendulum-v1", "--env.atari.noop-max", "3"]) == 2
    told = capsys.readouterr().err
    assert told == (
        "env.atari.noop_max is 3, but must be left out: gym:Pendulum-v1 is no atari: task.\n"
    )
    assert main(["train", "tdmpc2", "gym:Pendulum-v1", "--eval.protocol", "nature"]) == 2
    assert "eval.protocol is nature, but must be left out" in capsys.readouterr().err
    assert main(["evaluate", "gym:Pendulum-v1", "--protocol", "nature"]) == 2
    assert "which is for atari: tasks, but this is gym:Pendulum-v1" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"env\.atari\.life_loss is True, but must be left out"):
        agent = config_class("tdmpc2")()
        env = EnvConfig(atari=AtariConfig(life_loss=True))
        RunConfig(agent_name="tdmpc2", task="minatar:breakout", agent=agent, env=env)


def test_what_a_preset_says_of_atari_is_dropped_on_other_tasks():
    layer = {"env": {"atari": {"life_loss": True}}, "eval": {"protocol": "nature"}}
    config = build_run_config("tdmpc2", "minatar:breakout", config_class("tdmpc2"), [layer])
    assert config.env.atari == AtariConfig() and config.eval.protocol is None
    atari = build_run_config("tdmpc2", "atari:Pong", config_class("tdmpc2"), [layer])
    assert atari.env.atari.life_loss and atari.eval.protocol == "nature"


def test_a_protocol_leaves_nothing_to_other_keys():
    with pytest.raises(ConfigError, match=r"eval\.episodes is 3, but must be left out"):
        EvalConfig(protocol="nature", episodes=3)
    with pytest.raises(ConfigError, match=r"eval\.epsilon is 0\.1, but must be left out"):
        EvalConfig(protocol="dopamine", epsilon=0.1)
    limited = {"env": {"eval_max_episode_steps": 5}, "eval": {"protocol": "nature"}}
    with pytest.raises(ConfigError, match="eval_max_episode_steps is 5, but must be left out"):
        build_run_config("tdmpc2", "atari:Pong", config_class("tdmpc2"), [limited])
    earlier = {"eval": {"episodes": 2, "epsilon": 0.1}, "env": {"eval_max_episode_steps": 5}}
    later = {"eval": {"protocol": "nature"}}
    assert merge(config_class("tdmpc2"), [earlier, later]) == {**later, "env": {}}


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"sticky_actions": 1.0}, "env.atari.sticky_actions is 1.0, but must be at least 0 and"),
        ({"noop_max": -1}, "env.atari.noop_max is -1, but must be from 0 to 10,000"),
        ({"noop_max": 10**8}, "env.atari.noop_max is 100000000, but must be from 0 to 10,000"),
    ],
)
def test_bad_options_of_atari(values, sentence):
    with pytest.raises(ConfigError, match=sentence.replace(".", r"\.")):
        AtariConfig(**values)
