"""Atari games: frames pixel for pixel, names and options, lives, snapshots. Seed 004's findings 4,
5, 7 and 8 by name."""

from __future__ import annotations

import hashlib
import importlib.util
import re
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.wrappers import AtariPreprocessing

from forethought.config import AtariConfig, ConfigError
from forethought.envs import (
    EpisodeLog,
    VectorEnv,
    atari,
    check_task,
    make_env,
    make_single,
    replay_episode,
    spec_of,
)
from forethought.envs.atari_game import Stickiness
from forethought.envs.film import FilmedEnv
from forethought.extras import install_extra
from tests.test_envs import CHECKER


def game(name: str = "Breakout", repeat: int = 4, sticky: float = 0.25, **options: Any) -> Any:
    """The bare adapter, without TaskEnv around it."""
    chosen = AtariConfig(sticky_actions=sticky, **options)
    return atari.build(name, None, action_repeat=repeat, options=chosen).env


def gymnasiums(name: str, repeat: int, sticky: float, noop_max: int, full: bool = False) -> Any:
    importlib.import_module("ale_py")
    made = gymnasium.make(
        f"ALE/{name}-v5",
        frameskip=1,
        repeat_action_probability=sticky,
        full_action_space=full,
        disable_env_checker=True,
    )
    return AtariPreprocessing(made, noop_max=noop_max, frame_skip=repeat)


def actions_of(env: Any, count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(int(env.action_space.n), size=count).tolist()


# Frames


@pytest.mark.parametrize(
    ("name", "repeat", "sticky", "noop_max", "steps"),
    [
        ("Pong", 4, 0.0, 30, 250),
        ("Breakout", 4, 0.25, 30, 400),  # several games: the next one begins from a copy
        ("SpaceInvaders", 3, 0.25, 0, 200),  # its lasers flicker: without pooling they vanish
        ("Freeway", 1, 0.5, 7, 150),
    ],
)
def test_confirmed_frames_equal_gymnasiums_preprocessing(name, repeat, sticky, noop_max, steps):
    """The same seed and actions: the same frames, rewards, lives and ends, also where actions
    stick. But for the last frame of a game that ends inside a decision, which gymnasium forgets."""
    ours = game(name, repeat, sticky, noop_max=noop_max)
    theirs = gymnasiums(name, repeat, sticky, noop_max)
    assert ours.action_space == theirs.action_space
    games, seed = 0, 11
    seen, _ = ours.reset(seed=seed)
    np.testing.assert_array_equal(seen, theirs.reset(seed=seed)[0])
    for number, action in enumerate(actions_of(ours, steps)):
        seen, reward, terminated, truncated, info = ours.step(np.int64(action))
        expected, their_reward, their_end, _, their_info = theirs.step(action)
        assert (reward, terminated, truncated) == (their_reward, their_end, False), number
        assert info["lives"] == their_info["lives"]
        if not terminated:
            np.testing.assert_array_equal(seen, expected, err_msg=f"{name} at step {number}")
        else:
            games, seed = games + 1, seed + 1
            seen, _ = ours.reset(seed=seed)
            np.testing.assert_array_equal(seen, theirs.reset(seed=seed)[0])
    assert games >= (name == "Breakout")


def test_uint8_observations_use_their_whole_range():
    """Seed 004, confirmed correct: bytes in the buffer, never scaled in the environment."""
    env = make_single("atari:Pong")
    seen, _ = env.reset(seed=1)
    assert env.observation_space == gymnasium.spaces.Box(0, 255, (84, 84), np.uint8)
    assert seen.dtype == np.uint8 and seen.shape == (84, 84) and seen.max() > 100


class Screens:
    """Stands for the emulator: frame k of a decision is filled with 10 (k + 1), ever brighter."""

    def __init__(self, ends_at: int | None) -> None:
        self.ends_at, self.frame = ends_at, -1

    def act(self, action: int) -> int:
        self.frame += 1
        return 1

    def game_over(self, with_truncation: bool) -> bool:
        return self.frame == self.ends_at

    def getScreenGrayscale(self, screen: np.ndarray) -> None:
        screen.fill(10 * (self.frame + 1))

    def lives(self) -> int:
        return 3


@pytest.mark.parametrize("ends_at", [0, 1, 2, 3])
def test_finding_5_a_frame_of_an_earlier_decision_is_never_shown(ends_at):
    env = game("Pong", 4, 0.0)
    env.reset(seed=1)
    for screen in (*env._screens, env._shown):
        screen.fill(255)  # what the decision before has left
    env._ale = Screens(ends_at)
    seen, reward, terminated, _, _ = env.step(np.int64(0))
    assert np.unique(seen).tolist() == [10 * (ends_at + 1)]
    assert reward == ends_at + 1 and terminated


@pytest.mark.parametrize(("repeat", "brightest"), [(1, 10), (2, 20), (4, 40)])
def test_finding_7_the_action_repeat_comes_from_the_configuration(repeat, brightest):
    env = game("Pong", repeat, 0.0)
    env.reset(seed=1)
    env._ale = Screens(None)
    seen, reward, *_ = env.step(np.int64(0))
    assert reward == repeat and seen.max() == brightest
    spec = spec_of("atari:Pong", action_repeat=repeat)
    assert spec.action_repeat == repeat and spec.max_episode_steps == 108_000 // repeat


def test_the_brighter_of_the_last_two_frames_is_shown():
    class Flickering(Screens):
        def getScreenGrayscale(self, screen: np.ndarray) -> None:
            screen.fill(0)
            screen[:, 40 * self.frame : 40 * self.frame + 40] = 200  # one quarter per frame

    env = game("Pong", 4, 0.0)
    env.reset(seed=1)
    env._ale = Flickering(None)
    seen = env.step(np.int64(0))[0]
    quarters = [int(seen[:, 21 * k + 5 : 21 * k + 16].max()) for k in range(4)]
    assert quarters == [0, 0, 200, 200]


def test_what_fire_leaves_is_shown_like_any_other_decision(monkeypatch):
    """Of its last two frames the brighter: what flickers must not be missing at the start."""
    env = game("Pong", 4, 0.0, noop_max=0, fire_on_reset=True)

    def hold(action: int) -> float:
        env._press(action)
        env._shown.fill(77)
        return 0.0

    monkeypatch.setattr(env, "_hold", hold)
    assert np.unique(env.reset(seed=1)[0]).tolist() == [77]


# Seeds


def stream(seed: int, steps: int = 120, **options: Any) -> str:
    env = game("Breakout", **options)
    found = [env.reset(seed=seed)[0]]
    for action in actions_of(env, steps, seed=5):
        seen, reward, terminated, *_ = env.step(np.int64(action))
        found += [seen, np.float64(reward)]
        if terminated:
            found.append(env.reset(seed=seed + 1)[0])
    return hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in found)).hexdigest()


def test_finding_4_an_episode_is_a_function_of_its_seed_and_actions():
    assert stream(1) == stream(1)
    assert stream(1) != stream(2)
    without = {"sticky": 0.0, "noop_max": 0}
    assert stream(1, **without) == stream(2, **without)  # nothing else is random


def test_an_episode_does_not_depend_on_the_one_before():
    fresh, used = game(), game()
    used.reset(seed=9)
    for action in actions_of(used, 90):
        used.step(np.int64(action))
    np.testing.assert_array_equal(fresh.reset(seed=3)[0], used.reset(seed=3)[0])
    for action in actions_of(fresh, 60, seed=1):
        a, b = fresh.step(np.int64(action)), used.step(np.int64(action))
        np.testing.assert_array_equal(a[0], b[0])


def test_no_op_starts_are_1_to_30_frames():
    env = game("Pong", noop_max=30, sticky=0.0)
    frames = []
    for seed in range(60):
        env.reset(seed=seed)
        frames.append(env._ale.getEpisodeFrameNumber())
    assert min(frames) >= 1 and max(frames) <= 30 and len(set(frames)) > 15


def test_stickiness_has_its_probability():
    obeyed = np.array(Stickiness(0.25, seed=3).take(40_000))
    assert obeyed.mean() == pytest.approx(0.75, abs=0.01)
    one, other = Stickiness(0.25, seed=3), Stickiness(0.25, seed=3)
    pieces = [x for count in (1, 4, 4095, 4097, 3) for x in one.take(count)]
    assert pieces == other.take(len(pieces)) and one.frames == len(pieces)


# Names and options


def test_the_list_of_games_is_ales():
    roms = importlib.import_module("ale_py.roms").get_all_rom_ids()
    several_players = {"combat", "joust", "maze_craze", "warlords"}
    assert set(atari.ROMS.values()) == set(roms) - several_players
    registered = {f"ALE/{name}-v5" for name in atari.names()}
    assert registered <= set(gymnasium.registry)


@pytest.mark.parametrize(
    ("name", "sticky"),
    [("Pong", 0.25), ("Pong-v5", 0.25), ("ALE/Pong-v5", 0.25), ("PongNoFrameskip-v4", 0.0)],
)
def test_conventions_by_name_never_double_the_frame_skip(name, sticky):
    env = make_single(f"atari:{name}", atari=AtariConfig(noop_max=0))
    assert env.unwrapped._probability == sticky
    env.reset(seed=1)
    before = env.unwrapped._ale.getEpisodeFrameNumber()
    env.step(np.int64(0))
    assert env.unwrapped._ale.getEpisodeFrameNumber() - before == 4
    assert env.spec_for_agent.action_repeat == 4


def test_what_a_run_says_wins_over_the_name():
    chosen = AtariConfig(sticky_actions=0.0)
    assert make_single("atari:Pong-v5", atari=chosen).unwrapped._probability == 0.0


def test_unknown_games_are_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"no task atari:Pogn\. Did you mean atari:Pong\?"):
        check_task("atari:Pogn")
    with pytest.raises(ConfigError, match=r"Did you mean atari:SeaquestNoFrameskip-v4\?"):
        check_task("atari:SeaqestNoFrameskip-v4")
    with pytest.raises(ConfigError, match=r"no task atari:Pong-v4\. Did you mean atari:Pong\?"):
        check_task("atari:Pong-v4")  # frames skipped at random: not one of the two conventions


def test_a_missing_extra_names_the_line_that_installs_it(monkeypatch):
    there = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "cv2" else there(name)
    )
    with pytest.raises(ConfigError, match=re.escape(f"needs cv2: run {install_extra('atari')}.")):
        check_task("atari:Pong")


def test_the_full_action_set():
    assert make_single("atari:Pong").action_space.n == 6
    full = game("Breakout", 4, 0.0, full_action_set=True)
    assert full.action_space.n == 18
    theirs = gymnasiums("Breakout", 4, 0.0, 30, full=True)
    np.testing.assert_array_equal(full.reset(seed=2)[0], theirs.reset(seed=2)[0])
    for action in actions_of(full, 60):
        np.testing.assert_array_equal(full.step(np.int64(action))[0], theirs.step(action)[0])


def test_fire_on_reset_launches_the_ball():
    frames = []
    for fire in (False, True):
        env = game("Breakout", 4, 0.0, noop_max=0, fire_on_reset=fire)
        env.reset(seed=1)
        frames.append([env.step(np.int64(0))[0] for _ in range(12)])
    still, moving = frames
    assert all(np.array_equal(still[4], x) for x in still[4:])  # no ball: nothing moves
    assert any(not np.array_equal(moving[4], x) for x in moving[5:])
    with pytest.raises(ConfigError, match="fire_on_reset is true, but atari:Freeway has no action"):
        make_single("atari:Freeway", atari=AtariConfig(fire_on_reset=True))


def test_a_held_action_is_not_held_again():
    with pytest.raises(ConfigError, match="action_repeat is 2, but gym:ALE/Pong-v5 holds each"):
        make_single("gym:ALE/Pong-v5", action_repeat=2)
    assert spec_of("gym:ALE/Pong-v5").action_repeat == 4
    assert spec_of("gym:PongNoFrameskip-v4", action_repeat=2).action_repeat == 2


@pytest.mark.parametrize(
    ("task", "repeat", "rate"),
    [
        ("atari:Pong", None, 15),
        ("atari:PongNoFrameskip-v4", 2, 30),
        ("gym:ALE/Pong-v5", None, 15),
        ("gym:PongNoFrameskip-v4", None, 60),
    ],
)
def test_finding_8_videos_run_at_60_over_the_action_repeat(task, repeat, rate):
    def make() -> Any:
        return make_single(task, action_repeat=repeat, render_mode="rgb_array")

    shots = []
    env = FilmedEnv(make)
    env.show = shots.append
    env.reset_one(0, 1)
    env.step_one(0, np.int64(0))
    assert env.frames_per_second == rate
    assert len(shots) == 2 and shots[1].picture.shape == (210, 160, 3)
    env.close()


@CHECKER
def test_the_adapter_passes_gymnasiums_checker():
    for env in (make_single("atari:Pong"), make_single("atari:Pong").unwrapped):
        check_env(env, skip_render_check=True)
    shown = make_single("atari:Pong", render_mode="rgb_array")
    shown.reset(seed=1)
    assert shown.render().shape == (210, 160, 3)


# Lives


def play_until_a_life_is_lost(env: Any, most: int = 400) -> tuple[list[Any], int]:
    steps = []
    lives = env.reset(seed=4)[1]["lives"]
    for number in range(most):
        steps.append(env.step(np.int64(1 + number % 3)))
        if steps[-1][4]["lives"] < lives:
            return steps, lives
    raise AssertionError("no life was lost")


def test_a_lost_life_is_told_and_the_game_goes_on():
    env = make_single("atari:Breakout", atari=AtariConfig(life_loss=True))
    assert [column.name for column in env.spec_for_agent.columns] == ["life_lost"]
    steps, lives = play_until_a_life_is_lost(env)
    assert lives == 5 and steps[-1][4]["lives"] == 4
    assert bool(steps[-1][4]["life_lost"]) and not any(s[4]["life_lost"] for s in steps[:-1])
    assert not steps[-1][2]  # the game is not over ...
    again = env.step(np.int64(1))  # ... and goes on without a reset
    assert again[4]["lives"] == 4 and not again[4]["life_lost"]
    assert env.unwrapped._ale.getEpisodeFrameNumber() > 4 * len(steps)


def test_without_the_option_no_life_is_told():
    assert spec_of("atari:Breakout").columns == ()


# Snapshots


@pytest.mark.parametrize("name", ["Breakout", "Pong"])
def test_a_snapshot_goes_on_exactly_in_another_emulator(name):
    """Actions that stick are in it, though not in the state that ALE saves."""
    ours = make_single(f"atari:{name}", atari=AtariConfig(sticky_actions=0.8))
    other = make_single(f"atari:{name}", atari=AtariConfig(sticky_actions=0.8))
    choices = actions_of(ours, 200, seed=2)
    ours.reset(seed=8)
    for stop, action in enumerate(choices):
        ours.step(np.int64(action))
        if stop % 20 != 19:
            continue
        seen, _ = other.restore(ours.snapshot())
        np.testing.assert_array_equal(seen, ours.unwrapped._show())
        snapshot = ours.snapshot()
        for later in choices[:12]:
            a, b = ours.step(np.int64(later)), other.step(np.int64(later))
            np.testing.assert_array_equal(a[0], b[0])
            assert a[1:4] == b[1:4]
        assert ours.restore(snapshot) is not None
    assert int(ours.snapshot()["steps"]) == 200


def test_a_game_that_has_just_begun_is_begun_again_and_not_restored():
    """No frame is there yet that could tell whether the picture, which ALE does not save, is."""
    ours, other = (make_single("atari:Pong") for _ in range(2))
    ours.reset(seed=8)
    assert ours.snapshot() is None
    ours.step(np.int64(0))
    snapshot = ours.snapshot()
    assert other.restore({**snapshot, "actions": snapshot["actions"][:0]}) is None
    assert other.restore(snapshot) is not None


def test_what_hides_behind_the_brighter_of_two_frames_is_missed_all_the_same():
    """Tetris draws over old pictures, which ALE does not save, in frames that take turns: restored,
    the brighter of two frames is right and the next ones are not."""
    ours, other = (make_single("atari:Tetris") for _ in range(2))
    ours.reset(seed=8)
    ours.step(np.int64(0))
    before = ours.unwrapped._shown.copy()
    assert other.restore(ours.snapshot()) is None
    np.testing.assert_array_equal(other.unwrapped._shown, before)


def test_a_snapshot_that_does_not_fit_is_not_taken_and_the_actions_are_stepped_again():
    env: VectorEnv = make_env("atari:Pong", atari=AtariConfig(sticky_actions=0.5))
    log = EpisodeLog(7)
    obs, _ = env.reset_one(0, 7)
    for action in (2, 3, 3, 0, 2):
        log.add(np.int64(action))
        obs = env.step_one(0, np.int64(action))[0]
    snapshot = env.snapshots()[0]
    future = env.step_one(0, np.int64(4))[0]
    wrong = [
        ("ale", snapshot["ale"][:-9]),
        ("screens", snapshot["screens"] + np.array([1, 0], np.uint8)[:, None, None]),
        ("screens", snapshot["screens"][0]),
        ("actions", np.array([99])),
        ("numbers", np.array([0, 10**12, 0, 0, 0])),
        ("numbers", np.array([0, 0, 99, 0, 0])),  # an action at which ALE would end the process
        ("steps", np.zeros(2)),
    ]
    for broken in (*({**snapshot, key: value} for key, value in wrong), None, snapshot):
        assert replay_episode(env, 0, log, obs, broken) is None
        np.testing.assert_array_equal(env.step_one(0, np.int64(4))[0], future)
    env.close()


def test_environments_in_workers_are_those_of_this_process():
    options: dict[str, Any] = {"atari": AtariConfig(life_loss=True), "max_episode_steps": 40}
    here = make_env("atari:Breakout", 2, 3, **options)
    there = make_env("atari:Breakout", 2, 3, workers=True, **options)
    try:
        np.testing.assert_array_equal(here.reset()[0], there.reset()[0])
        for _ in range(15):
            action = np.array([1, 2])
            a, b = here.step(action), there.step(action)
            for x, y in zip(a[:4], b[:4]):
                np.testing.assert_array_equal(x, y)
        one, two = here.snapshots(), there.snapshots()
        for x, y in zip(one, two):
            assert {k: v.tobytes() for k, v in x.items()} == {k: v.tobytes() for k, v in y.items()}
        assert there.restore_one(1, one[0]) is not None
        np.testing.assert_array_equal(there.current(1)[0], here.current(0)[0])
    finally:
        here.close()
        there.close()


def test_a_game_is_truncated_at_its_limit_and_not_terminated():
    env = make_single("atari:Pong", max_episode_steps=3)
    env.reset(seed=1)
    ends = [env.step(np.int64(0))[2:4] for _ in range(3)]
    assert ends == [(False, False), (False, False), (False, True)]
