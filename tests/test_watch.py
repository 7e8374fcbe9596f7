"""Watching an agent: the episodes of evaluate in a file or a window; and which OpenGL draws."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import imageio_ffmpeg
import numpy as np
import pytest

from forethought.cli import main
from forethought.config import ConfigError, EnvConfig, ForethoughtError
from forethought.envs import EpisodeLog, make_single, rendering
from forethought.envs.episodes import run_episodes
from forethought.envs.film import FilmedEnv, PictureError, Recorded, Recording
from forethought.seeding import Streams
from forethought.training import watch
from forethought.training.evaluate import RandomPolicy, evaluate_target
from forethought.training.loop import train_run
from forethought.training.watch import film, watch_run
from tests.pictures import GreyEnv
from tests.stub_agent import register, stub_run
from tests.stubs import CounterEnv, vector_of
from tests.videos import frame

GREY = "gym:tests.pictures:pictures/Grey-v0"


@pytest.fixture(autouse=True)
def _stub_agent(monkeypatch):
    register(monkeypatch)


@pytest.fixture
def run(tmp_path):
    """A finished run of 40 decisions, with checkpoints at 20 and 40."""
    train = {"checkpoint_every_agent_steps": 20, "seed_agent_steps": 10, "seed_updates": 1}
    config = stub_run(GREY, steps=40, train=train, env={"action_repeat": 2})
    return train_run(config, tmp_path / "run").path


# -- watch -----------------------------------------------------------------------------------------


def test_a_video_shows_the_start_and_every_decision_at_the_decision_rate(run, tmp_path):
    """Five frames at 20 Hz are three decisions of two frames at 10 Hz: greys 0, 40, 80, 100."""
    file = tmp_path / "a.mp4"
    result = watch_run(run, video=file, episodes=2)
    assert result.returns == (15.0, 15.0) and result.lengths == (3, 3)
    assert imageio_ffmpeg.count_frames_and_secs(file) == (8, pytest.approx(0.8))
    greys = [frame(file, number)[:320].mean() for number in range(4)]
    assert greys == pytest.approx([0, 40, 80, 100], abs=3)


def test_every_shot_says_how_far_its_episode_is():
    env = FilmedEnv(functools.partial(make_single, GREY, render_mode="rgb_array"))
    shots: list[tuple[int, float]] = []
    env.show = lambda shot: shots.append((shot.length, shot.total))
    run_episodes(RandomPolicy(env.spec_for_agent, Streams(1)), env, [1, 2])
    env.close()
    assert shots == [(0, 0.0), (1, 1.0), (2, 3.0), (3, 6.0), (4, 10.0), (5, 15.0)] * 2


def test_the_episodes_are_those_of_evaluate(tmp_path):
    path = train_run(stub_run("gym:Pendulum-v1", steps=40), tmp_path / "run").path
    told = []
    here = {"video": tmp_path / "a.mp4", "checkpoint": "best", "seed": 7}
    played = watch_run(path, **here, tell=lambda *how_far: told.append(how_far))
    assert {of for _, _, of in told} == {1}
    assert played.returns == evaluate_target(str(path), episodes=1, seed=7).returns
    assert (played.checkpoint, played.checkpoint_step, played.seed) == ("best", 40, 7)


def test_the_command_says_the_returns_and_where_the_file_is(run, tmp_path, capsys):
    file = tmp_path / "a.gif"
    assert main(["watch", str(run), "--video", str(file), "--checkpoint", "20"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{GREY}, stub at step 20: return 15",
        f"The video is in {file}",
    ]
    assert file.read_bytes().startswith(b"GIF89a")


def test_without_a_screen_a_video_is_advised(run, capsys, monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    assert main(["watch", str(run)]) == 2
    said = capsys.readouterr().err
    assert "There is no screen" in said and f"forethought watch {run} --video agent.mp4" in said


def test_with_a_screen_a_gym_task_opens_its_window(run, monkeypatch):
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr(GreyEnv, "shown", [])
    assert watch_run(run, episodes=1).returns == (15.0,)
    assert GreyEnv.shown == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("screen", [":0", ""])
def test_a_task_without_a_window_says_so_with_and_without_a_screen(monkeypatch, screen):
    monkeypatch.setenv("DISPLAY", screen)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    with pytest.raises(ConfigError, match="Only gym: tasks can be shown in a window, not dmc:a-b"):
        watch._require_window("dmc:a-b", "runs/x")


@pytest.mark.parametrize(
    ("tokens", "sentence"),
    [
        (["--video", "a.avi"], "must end in .mp4 or .gif"),
        (["--video", "a.mp4", "--episodes", "0"], "episodes is 0, but must be at least 1."),
        (["--video", "a.mp4", "--seed", "-1"], "seed is -1, but must be at least 0."),
        (["--video", "a.mp4", "--device", "gpu"], "device is gpu"),
    ],
)
def test_bad_usage_is_one_sentence_before_any_work(run, capsys, monkeypatch, tokens, sentence):
    monkeypatch.setattr(watch, "load_agent", lambda *args, **options: 1 / 0)
    assert main(["watch", str(run), *tokens]) == 2
    assert sentence in capsys.readouterr().err


def test_an_environment_without_pictures_is_refused_in_a_sentence():
    with pytest.raises(ConfigError, match=r"has no render mode rgb_array \(it has: none"):
        make_single("gym:tests.stubs:stub/Counter-v0", render_mode="rgb_array")


# -- played again ----------------------------------------------------------------------------------


def test_a_recorded_episode_is_played_again_action_by_action():
    env = vector_of(lambda: CounterEnv(4), num_envs=2)
    log = EpisodeLog(11)
    policy = RandomPolicy(env.spec_for_agent, Streams(3))
    run_episodes(Recording(policy, log), env, [11, 12, 13, 14])  # two episodes in each
    assert len(log.actions) == 4
    received: list[np.ndarray] = []
    again = vector_of(lambda: CounterEnv(4))
    step = again.step_one
    again.step_one = lambda i, action: received.append(action) or step(i, action)
    (episode,) = run_episodes(Recorded(log), again, [11]).episodes
    assert episode.total == 10.0  # 1 + 2 + 3 + 4
    np.testing.assert_array_equal(received, log.actions)


def test_an_episode_that_goes_on_beyond_its_record_is_refused():
    log = EpisodeLog(1, [np.zeros(1, np.float32)] * 3)
    with pytest.raises(PictureError, match="did not end after its 3 actions"):
        run_episodes(Recorded(log), vector_of(lambda: CounterEnv(4)), [1])


# -- which OpenGL draws ----------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch):
    """A machine on which only these backends work; without a choice of the user."""
    for name in ("MUJOCO_GL", "PYOPENGL_PLATFORM"):
        monkeypatch.setenv(name, "")  # so that what the code sets is taken back

    def with_backends(*working):
        monkeypatch.setattr(
            rendering, "probe", lambda backend: None if backend in working else "no such library"
        )

    return with_backends


def test_egl_is_taken_first_then_osmesa(machine, monkeypatch):
    machine("egl", "osmesa")
    assert rendering.choose_backend() == "egl"
    assert (os.environ["MUJOCO_GL"], os.environ["PYOPENGL_PLATFORM"]) == ("egl", "egl")
    monkeypatch.setenv("MUJOCO_GL", "")
    machine("osmesa")
    assert rendering.choose_backend() == "osmesa"


def test_with_neither_the_packages_are_named_and_nothing_is_set(machine):
    machine()
    with pytest.raises(ForethoughtError, match=r"egl: no such library; .*libegl1 or libosmesa6"):
        rendering.choose_backend()
    assert os.environ["MUJOCO_GL"] == ""


def test_the_choice_of_the_user_is_kept_or_refused_but_never_replaced(machine, monkeypatch):
    machine("egl", "glfw")
    monkeypatch.setenv("MUJOCO_GL", "glfw")
    assert rendering.choose_backend() == "glfw"
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    with pytest.raises(ForethoughtError, match="MUJOCO_GL is osmesa, which draws no pictures here"):
        rendering.choose_backend()
    monkeypatch.setenv("MUJOCO_GL", "off")
    with pytest.raises(ForethoughtError, match="MUJOCO_GL is off, so there are no pictures"):
        rendering.choose_backend()


def test_a_backend_that_does_not_exist_fails_in_its_own_process():
    rendering.probe.cache_clear()
    reason = rendering.probe("no-such-backend")
    assert reason is not None and "no-such-backend" in reason


def test_a_wrong_choice_of_the_user_does_not_matter_to_training():
    """Importing MuJoCo or dm_control with a backend that does not exist raises."""
    code = (
        "from forethought.envs import make_single\n"
        "for task in ('gym:HalfCheetah-v5', 'dmc:cartpole-swingup'):\n"
        "    make_single(task).reset(seed=1)\n"
    )
    environment = {**os.environ, "MUJOCO_GL": "no-such-backend"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, capture_output=True)


def test_a_control_task_is_filmed_at_its_control_rate(tmp_path):
    """cartpole has 100 control steps a second, two per decision."""
    task, limits = "dmc:cartpole-swingup", EnvConfig(max_episode_steps=3).evaluation
    spec = make_single(task).spec_for_agent
    file = tmp_path / "a.mp4"
    try:
        film(RandomPolicy(spec, Streams(1)), [5], task, limits, file, "random play")
    except ForethoughtError as error:
        if "need EGL or OSMesa" not in str(error):
            raise
        pytest.skip("no EGL and no OSMesa on this machine")
    assert imageio_ffmpeg.count_frames_and_secs(file) == (4, pytest.approx(4 / 50))
    assert np.std(frame(file, 0)[:360]) > 5
