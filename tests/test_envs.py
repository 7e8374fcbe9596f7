"""Single environments: names, limits, seeds, checks at the boundary, missing extras."""

import hashlib
import logging
import subprocess
import sys
from functools import partial

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from forethought.config import ConfigError, ForethoughtError
from forethought.envs import (
    EnvError,
    TaskEnv,
    check_task,
    dmc,
    known_tasks,
    make_env,
    make_single,
    spec_of,
)
from forethought.extras import install_extra
from forethought.spaces import random_action
from tests.pictures import GreyEnv
from tests.stubs import CounterEnv, EntityEnv, ImageEnv, NestedEnv

STUBS = "gym:tests.stubs:stub/"

# Warnings of gymnasium's checker that are about taste or about the way it is called.
CHECKER = pytest.mark.filterwarnings(
    "ignore:.*(is different from the unwrapped version|probably too (low|high)"
    "|Not able to test alternative render modes|action space be normalized):UserWarning"
)


def run_episode(env, seed, steps=10**6):
    """Observation and reward stream of one episode with actions drawn from a stream of its own."""
    rng = np.random.default_rng(99)
    obs, _ = env.reset(seed=seed)
    stream = [obs.tobytes()]
    for _ in range(steps):
        action = random_action(env.spec_for_agent, rng, 1)[0]
        obs, reward, terminated, truncated, _ = env.step(action)
        stream += [action.tobytes(), obs.tobytes(), np.float64(reward).tobytes()]
        if terminated or truncated:
            break
    return hashlib.sha256(b"".join(stream)).hexdigest()


# Names


def test_listing_tasks_imports_no_simulator():
    code = (
        "import sys\n"
        "from forethought.envs import known_tasks\n"
        "known_tasks()\n"
        "heavy = ('torch', 'ale_py', 'cv2', 'dm_control', 'mujoco', 'minatar')\n"
        "sys.exit(any(m in sys.modules for m in heavy))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_listed_tasks_exist():
    tasks = known_tasks()
    assert len(tasks) == len(set(tasks))
    assert {"dmc:cup-catch", "gym:Pendulum-v1", "minatar:breakout"} <= set(tasks)
    for task in tasks:
        check_task(task)


def test_the_static_list_of_control_tasks_is_the_suites():
    from dm_control import suite

    assert {(domain, task) for domain in dmc.TASKS for task in dmc.TASKS[domain]} == set(
        suite.ALL_TASKS
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cup-catch", ("ball_in_cup", "catch")),
        ("ball_in_cup-catch", ("ball_in_cup", "catch")),
        ("cartpole-swingup-sparse", ("cartpole", "swingup_sparse")),
        ("cartpole-swingup_sparse", ("cartpole", "swingup_sparse")),
        ("finger-turn-easy", ("finger", "turn_easy")),
        ("reacher-easy", ("reacher", "easy")),
        ("humanoid_CMU-run", ("humanoid_CMU", "run")),
        ("pointmass-easy", ("point_mass", "easy")),
    ],
)
def test_control_tasks_are_called_as_in_td_mpc2(name, expected):
    assert dmc.suite_name(name) == expected


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        ("dmc:walker_walk", "There is no task dmc:walker_walk. Did you mean dmc:walker-walk? "),
        ("gym:Pendulum", "There is no task gym:Pendulum. Did you mean gym:Pendulum-v1? "),
        ("minatar:brekout", "There is no task minatar:brekout. Did you mean minatar:breakout? "),
        ("gym:tests.stubs:stub/Countr-v0", "Did you mean gym:tests.stubs:stub/Counter-v0?"),
        ("gym:no_such_module:X-v0", "The module no_such_module of the task"),
        ("cheetah-run", "There is no task cheetah-run. Did you mean dmc:cheetah-run?"),
        ("gym:", "There is no task gym:. "),
    ],
)
def test_an_unknown_task_is_refused_with_the_nearest_name(task, sentence):
    for call in (check_task, make_env):
        with pytest.raises(ConfigError) as caught:
            call(task)
        assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("task", "module", "extra"),
    [
        ("dmc:cheetah-run", "dm_control", "dmc"),
        ("minatar:breakout", "minatar", "minatar"),
        ("gym:Ant-v5", "mujoco", "mujoco"),
        ("gym:LunarLander-v3", "Box2D", "box2d"),
        ("gym:ALE/Pong-v5", "ale_py", "atari"),
    ],
)
def test_a_missing_extra_is_told_with_the_line_that_installs_it(monkeypatch, task, module, extra):
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    with pytest.raises(ConfigError) as caught:
        make_env(task)
    assert str(caught.value) == f"{task} needs {module}: run {install_extra(extra)}."


@pytest.mark.filterwarnings("ignore:.*Hopper-v3 is out of date")
def test_an_environment_that_gymnasium_cannot_make_is_one_sentence():
    with pytest.raises(ConfigError, match="gym:Hopper-v3 cannot be made: "):
        make_single("gym:Hopper-v3")


# Gymnasium's checker


@CHECKER
@pytest.mark.parametrize(
    "task",
    ["dmc:hopper-hop", "dmc:cup-catch", "minatar:breakout", "minatar:freeway", "gym:Pendulum-v1"]
    + [f"{STUBS}{name}-v0" for name in ("Counter", "Nested", "Image", "Discrete")],
)
def test_single_environments_pass_gymnasiums_checker(task):
    env = make_single(task)
    check_env(env, skip_render_check=True)
    env.close()


@CHECKER
@pytest.mark.parametrize("task", ["dmc:reacher-easy", "minatar:seaquest"])
def test_our_adapters_pass_gymnasiums_checker_bare(task):
    env = make_single(task).unwrapped
    check_env(env, skip_render_check=True)
    env.close()


# What an agent is told


def test_spec_of_control_tasks():
    spec = spec_of("dmc:cheetah-run")
    assert (spec.task, spec.max_episode_steps, spec.action_repeat) == ("dmc:cheetah-run", 500, 2)
    assert spec.terminates is False
    assert spec.observation_space.shape == (17,) and spec.observation_space.dtype == np.float32
    assert spec.action_space == gymnasium.spaces.Box(-1.0, 1.0, (6,), np.float32)
    assert spec_of("dmc:cheetah-run", action_repeat=4).max_episode_steps == 250  # 1000 frames


def test_spec_of_gymnasium_and_minatar_tasks():
    pendulum = spec_of("gym:Pendulum-v1")
    assert (pendulum.max_episode_steps, pendulum.terminates) == (200, False)
    assert pendulum.action_space.high.tolist() == [1.0]  # gymnasium says 2
    assert spec_of("gym:CartPole-v1").terminates is True
    breakout = spec_of("minatar:breakout")
    assert breakout.observation_space.shape == (10, 10, 4)
    assert breakout.observation_space.dtype == np.bool_
    assert (breakout.action_space.n, breakout.max_episode_steps) == (6, 5000)
    assert (breakout.terminates, spec_of("minatar:freeway").terminates) == (True, False)


# Limits and repeats


@pytest.mark.parametrize("task", ["gym:Pendulum-v1", "dmc:hopper-hop", f"{STUBS}Endless-v0"])
def test_a_limit_of_7_gives_7_steps_and_truncates(task):
    """airspace.md row 3.3; it replaces the task's own limit of 200, of 500, of none."""
    env = make_single(task, max_episode_steps=7)
    env.reset(seed=1)
    action = np.zeros(env.action_space.shape, np.float32)
    ends = [env.step(action)[2:4] for _ in range(7)]
    assert ends == [(False, False)] * 6 + [(False, True)]
    with pytest.raises(EnvError, match="reset it first"):
        env.step(action)


def test_a_limit_may_exceed_the_registered_one():
    env = make_single("gym:Pendulum-v1", max_episode_steps=250)
    env.reset(seed=1)
    ends = [env.step(np.zeros(1, np.float32))[3] for _ in range(250)]
    assert ends == [False] * 249 + [True]


def test_termination_at_the_limit_is_termination():
    env = TaskEnv(CounterEnv(length=5), max_episode_steps=5)
    env.reset()
    for _ in range(4):
        env.step(np.zeros(1, np.float32))
    assert env.step(np.zeros(1, np.float32))[2:4] == (True, False)


def test_a_control_episode_has_500_decisions_and_is_truncated():
    env = make_single("dmc:cartpole-balance")
    env.reset(seed=1)
    for decision in range(1, 501):
        _, reward, terminated, truncated, _ = env.step(np.zeros(1, np.float32))
        assert 0.0 <= reward <= 2.0 and not terminated
        assert truncated == (decision == 500)


def test_action_repeat_sums_rewards_and_stops_at_the_end():
    env = TaskEnv(CounterEnv(length=5), action_repeat=2)
    env.reset()
    steps = [env.step(np.zeros(1, np.float32)) for _ in range(3)]
    assert [step[1] for step in steps] == [1 + 2, 3 + 4, 5]  # the fifth frame ends it
    assert [step[2] for step in steps] == [False, False, True]
    assert steps[-1][0][0] == 5


def test_repeating_an_action_equals_holding_it():
    twice, once = make_single("dmc:walker-walk"), make_single("dmc:walker-walk", action_repeat=1)
    twice.reset(seed=3), once.reset(seed=3)
    for k in range(20):
        action = np.full(6, np.sin(k), np.float32)
        obs, reward, *_ = twice.step(action)
        first, second = once.step(action), once.step(action)
        assert obs.tobytes() == second[0].tobytes()
        assert reward == first[1] + second[1]


@pytest.mark.parametrize("key", ["action_repeat", "max_episode_steps"])
def test_limits_and_repeats_below_1_are_refused(key):
    with pytest.raises(ConfigError, match=f"{key} is 0, but must be at least 1"):
        make_single("gym:Pendulum-v1", **{key: 0})


# Seeds: an episode is a function of (seed, actions)


@pytest.mark.parametrize("task", ["gym:Pendulum-v1", "dmc:hopper-hop", "minatar:asterix"])
def test_the_seed_decides_the_stream(task):
    """dqn.md section 3, item 4."""
    one, two = make_single(task), make_single(task)
    assert run_episode(one, 5, 200) == run_episode(two, 5, 200)
    assert run_episode(one, 5, 200) != run_episode(one, 6, 200)


@pytest.mark.parametrize(
    "task",
    ["gym:CartPole-v1", "dmc:hopper-hop", "dmc:reacher-easy", "dmc:lqr-lqr-2-1"]
    + [f"minatar:{game}" for game in ("seaquest", "breakout")],
)
def test_an_episode_does_not_depend_on_what_came_before(task):
    used = make_single(task)
    run_episode(used, 11, 60)
    run_episode(used, None, 13)
    assert run_episode(used, 7, 60) == run_episode(make_single(task), 7, 60)


def test_a_fresh_process_plays_the_same_episode():
    code = (
        "from forethought.envs import make_single\n"
        "from tests.test_envs import run_episode\n"
        "print(run_episode(make_single('dmc:hopper-hop'), 7))"
    )
    used = make_single("dmc:hopper-hop")
    run_episode(used, 3, 50)
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{code}"]
    fresh = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert run_episode(used, 7) == fresh


# MinAtar


def test_minatar_plays_to_its_end_and_pays():
    env = make_single("minatar:breakout")
    rng = np.random.default_rng(0)
    total, ends = 0.0, 0
    env.reset(seed=1)
    for _ in range(400):
        _, reward, terminated, truncated, _ = env.step(rng.integers(6))
        total += reward
        if terminated or truncated:
            ends += 1
            env.reset(seed=ends)
    assert ends > 5 and total > 0


def test_the_timer_of_freeway_truncates():
    env = make_single("minatar:freeway")
    env.reset(seed=1)
    ends = [env.step(np.int64(0))[2:4] for _ in range(2501)]
    assert ends == [(False, False)] * 2500 + [(False, True)]


# Pictures


def test_minatar_draws_its_cells():
    env = make_single("minatar:breakout", render_mode="rgb_array")
    env.reset(seed=1)
    picture = env.render()
    assert picture.shape == (160, 160, 3) and picture.dtype == np.uint8
    cells = env.unwrapped._state().any(axis=2)
    assert ((picture[::16, ::16].max(axis=2) > 0) == cells).all()


def test_control_tasks_draw_pictures_or_say_what_is_missing():
    """Also after this process has imported the suite without pictures."""
    make_single("dmc:cheetah-run").close()
    try:
        env = make_single("dmc:cheetah-run", render_mode="rgb_array")
    except ForethoughtError as error:
        assert "need EGL or OSMesa" in str(error)
        pytest.skip("no GL on this machine")
    env.reset(seed=1)
    picture = env.render()
    assert picture.shape == (360, 480, 3) and picture.std() > 5
    assert env.metadata["render_fps"] == 50.0  # 100 control steps a second, two per decision
    env.close()


@pytest.mark.parametrize(
    ("task", "rate"),
    # 100, 33.3 and 66.7 control steps a second, two per decision
    [("dmc:cheetah-run", 50), ("dmc:swimmer-swimmer6", 50 / 3), ("dmc:dog-run", 100 / 3)],
)
def test_control_tasks_are_shown_at_their_own_rate(task, rate):
    assert make_single(task).metadata["render_fps"] == pytest.approx(rate)


def test_a_rate_may_be_a_number_of_numpy():
    env = GreyEnv()
    env.metadata = {**env.metadata, "render_fps": np.float32(20)}
    assert TaskEnv(env, action_repeat=2).metadata["render_fps"] == 10.0


@pytest.mark.parametrize("rate", [0, -1.0, 5e-324, 10**400, np.inf, np.nan, 1j, "30"])
def test_a_rate_that_nobody_could_watch_is_left_out(rate):
    env = GreyEnv()
    env.metadata = {**env.metadata, "render_fps": rate}
    assert "render_fps" not in TaskEnv(env, action_repeat=2).metadata


def test_a_rate_that_is_no_number_is_left_out():
    """Then pictures are shown at 30 a second; nothing else depends on it."""
    env = make_single("gym:tests.pictures:pictures/Rateless-v0")
    assert "render_fps" not in env.metadata
    env.reset(seed=1)


def test_without_gl_training_works_and_pictures_are_refused_in_a_sentence():
    code = (
        "from forethought.config import ForethoughtError\n"
        "from forethought.envs import make_single, rendering\n"
        "rendering.probe = lambda backend: 'no such library'\n"
        "make_single('dmc:cheetah-run').reset(seed=1)\n"
        "try:\n"
        "    make_single('dmc:cheetah-run', render_mode='rgb_array')\n"
        "except ForethoughtError as error:\n"
        "    print(error)\n"
        "make_single('dmc:cheetah-run').reset(seed=1)\n"
    )
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": "", "OMP_NUM_THREADS": "1"},
    )
    assert result.stdout.startswith("Pictures of MuJoCo tasks need EGL or OSMesa")


# The boundary


class Rewarding(CounterEnv):
    """The same reward at every frame."""

    def __init__(self, reward):
        super().__init__(length=None)
        self.reward = reward

    def step(self, action):
        obs, _, *rest = super().step(action)
        return obs, self.reward, *rest


@pytest.mark.parametrize(
    ("reward", "repeat"),
    [(1e300, 1), (-1e39, 1), (10**400, 1), (3e38, 2)],
    ids=["float64", "negative", "whole number", "sum of frames"],
)
def test_a_reward_that_float32_cannot_hold_stops_at_the_boundary(reward, repeat):
    """float32 ends at 3.4e38: two frames of 3e38 are each finite, but their sum is not."""
    env = TaskEnv(Rewarding(reward), action_repeat=repeat)
    env.reset()
    with pytest.raises(EnvError, match=r"reward of environment 0 at step 1 is .* in float32"):
        env.step(np.zeros(1, np.float32))
    env = TaskEnv(Rewarding(3e38))
    env.reset()
    assert env.step(np.zeros(1, np.float32))[1] == 3e38


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (np.array([np.nan], np.float32), "The action of environment 0 at step 1 is not finite"),
        (np.array([0.0, 0.0], np.float32), r"has shape \(2,\)"),
        (np.array([1.5], np.float32), r"holds 1.5, which lies outside its space \[-1, 1\]"),
    ],
)
def test_bad_actions_are_refused(action, words):
    env = TaskEnv(CounterEnv())
    env.reset()
    with pytest.raises(EnvError, match=words):
        env.step(action)


def test_a_discrete_action_out_of_range_is_refused():
    env = TaskEnv(CounterEnv(discrete=True))
    env.reset()
    with pytest.raises(EnvError, match="holds 3, which lies outside"):
        env.step(np.int64(3))


def test_an_environment_that_breaks_its_promise_never_to_terminate_is_told():
    env = TaskEnv(CounterEnv(length=1), terminates=False)
    env.reset()
    with pytest.raises(EnvError, match="terminated at step 1, but declares that it never does"):
        env.step(np.zeros(1, np.float32))


def test_the_environment_receives_the_rescaled_action():
    env = TaskEnv(NestedEnv())
    env.reset()
    env.step({"steer": np.array([-1.0, 0.5], np.float32), "gear": np.int64(2)})
    received = env.unwrapped.received[0]
    assert received["steer"].tolist() == [-2.0, 2.5]  # from [-2, 4]
    assert received["gear"] == 2


def test_declared_columns_arrive_checked():
    env = TaskEnv(EntityEnv())
    _, info = env.reset()
    assert info["action_mask"].tolist() == [True, False, False]
    _, _, _, _, info = env.step(np.int64(0))
    assert info["action_mask"].tolist() == [False, True, False]
    env.unwrapped.mask = lambda: np.zeros(2, bool)
    with pytest.raises(EnvError, match=r"The column 'action_mask' of environment 0 at step 0 has"):
        env.reset()


def test_a_missing_column_is_told():
    class Forgetful(EntityEnv):
        def reset(self, *, seed=None, options=None):
            return super().reset(seed=seed)[0], {}

    with pytest.raises(EnvError, match="has no 'action_mask', which the environment declares"):
        TaskEnv(Forgetful()).reset()


def test_observations_are_copies():
    env = TaskEnv(ImageEnv())
    first, _ = env.reset()
    env.step(np.int64(0))
    assert (first == 0).all()


def test_toy_tasks_with_discrete_observations_work():
    env = make_single("gym:FrozenLake-v1")
    obs, _ = env.reset(seed=1)
    assert obs == 0 and obs.dtype == np.int64
    blackjack = make_single("gym:Blackjack-v1")  # a Tuple observation
    obs, _ = blackjack.reset(seed=1)
    assert sorted(obs) == ["0", "1", "2"]
    assert partial(blackjack.step, np.int64(0))()[2] is True


def test_deprecations_inside_the_suites_models_are_not_told(caplog):
    make_single("dmc:cheetah-run").close()
    logging.getLogger("absl").warning("huge value in QACC")
    assert [record.getMessage() for record in caplog.records] == ["huge value in QACC"]
