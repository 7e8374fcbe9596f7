"""Control tasks from pixels, and exact resumes of agents that see images.

What opens OpenGL runs in a process of its own: two of its back-ends in one interpreter crash it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from forethought import files, presets
from forethought.agents.registry import config_class
from forethought.agents.tdmpc2 import TDMPC2
from forethought.config import ConfigError, EnvConfig, RunConfig, build_run_config
from forethought.envs import make_env, make_single, rendering
from forethought.seeding import Streams
from forethought.training import evaluate
from forethought.training.evaluate import Evaluator
from forethought.training.loop import resume_run, train_run
from tests.stub_agent import training_record

ROOM = "gym:tests.shown_envs:shown/Room-v0"

PARTS = ("train", "episodes", "agent", "agent tensors", "replay tensors", "loop tensors")
"""Of a run's record: what an evaluation more or less does not change."""


def run_config(task: str, steps: int = 140, seed_steps: int = 100, **env: Any) -> RunConfig:
    """Random until step 100, which lies inside an episode, as the checkpoints at 99 and 132 do."""
    mine = {
        "steps": steps,
        "agent": {"batch_size": 4, "image": {"channels": 4, "shift_pixels": 2}},
        "env": {"max_episode_steps": 30, **env},
        "train": {"seed_agent_steps": seed_steps, "seed_updates": 4,
                  "updates_per_agent_step": 0.125, "checkpoint_every_agent_steps": 33},
        "eval": {"every_agent_steps": 0, "episodes": 1},
        "track": {"console": False},
    }  # fmt: skip
    layers = [*presets.layers(["debug"], None, "tdmpc2"), mine]
    return build_run_config("tdmpc2", task, config_class("tdmpc2"), layers)


def test_random_play_of_a_task_from_pixels_draws_no_pictures(monkeypatch):
    def blind(*args: Any, **options: Any) -> Any:
        assert options["obs"] is None
        return make_env(*args, **options)

    monkeypatch.setattr(evaluate, "make_env", blind)
    seen = [EnvConfig(obs=obs, max_episode_steps=5) for obs in (None, "pixels")]
    results = [Evaluator("dmc:cartpole-balance", env, Streams(1), 2).random() for env in seen]
    assert results[0].returns == results[1].returns


class Killed(BaseException):
    """Stands for kill -9: nothing after it may be saved."""


def kill_at(monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    passes = count()

    def fault(name: str) -> None:
        if name == stage and next(passes) == 0:
            raise Killed

    monkeypatch.setattr(files, "fault_point", fault)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    run = train_run(run_config(ROOM), tmp_path_factory.mktemp("whole") / "run")
    return training_record(run.path)


@pytest.mark.parametrize("moment", [101, 136], ids=["from the random phase", "from planning"])
def test_a_resume_with_images_is_exact(
    moment: int, whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames that were stacked before the checkpoint are in the stacks after it."""
    kill_at(monkeypatch, f"step-{moment}")
    with pytest.raises(Killed):
        train_run(run_config(ROOM), tmp_path / "run")
    assert resume_run(tmp_path / "run").status == "done"
    assert training_record(tmp_path / "run") == whole


def test_environments_in_workers_show_the_same(whole: Any, tmp_path: Path) -> None:
    run = train_run(run_config(ROOM, steps=70, workers=True), tmp_path / "run")
    assert resume_run(run.path, steps=140).status == "done"
    again = training_record(run.path)
    assert [part for part in PARTS if again[part] != whole[part]] == []


def test_frames_of_the_random_phase_are_in_the_first_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 100 is the tenth of its episode, and no frame before it was seen by the planner."""
    ages: list[int] = []
    act_batch = TDMPC2.act_batch

    def noted(self: TDMPC2, obs: Any, state: Any, *rest: Any, **options: Any) -> Any:
        done = act_batch(self, obs, state, *rest, **options)
        ages.append(int(state.frames.age[0]))
        return done

    monkeypatch.setattr(TDMPC2, "act_batch", noted)
    train_run(run_config(ROOM, steps=103), tmp_path / "run")
    assert ages[:3] == [10, 11, 12]


# ---- dmc ----


def in_own_process(code: str, **environment: str) -> Any:
    """What a program prints as JSON in its last line."""
    given = {k: v for k, v in os.environ.items() if k not in ("MUJOCO_GL", "PYOPENGL_PLATFORM")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**given, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


SHOWN = """
import json
import numpy as np
from forethought.envs import make_env

found = {}
for obs in ("pixels", "plain_pixels"):
    env = make_env("dmc:cartpole-balance", 2, obs=obs, timeout_seconds=60.0)
    twin = make_env("dmc:cartpole-balance", 1, obs=obs, workers=True)
    first, _ = env.reset(seed=[1, 2])
    same, _ = twin.reset(seed=[1])
    drawn = 0
    for handle in env._handles:
        camera = handle._env.unwrapped
        def draw(once=camera.draw):
            global drawn
            drawn += 1
            return once()
        camera.draw = draw
    after = [env.step(np.array([[0.5], [-0.5]], np.float32))[0] for _ in range(3)][-1]
    again = [twin.step(np.array([[0.5]], np.float32))[0] for _ in range(3)][-1]
    found[obs] = {
        "shape": list(first.shape), "dtype": str(first.dtype), "std": float(first.std()),
        "equal": bool((first[0] == same[0]).all() and (after[0] == again[0]).all()),
        "moved": bool((first != after).any()), "drawn": drawn,
        "repeat": env.spec_for_agent.action_repeat, "first": first[0].tolist(),
    }
    env.close()
    twin.close()
"""


RESUMED = """
from pathlib import Path
from tests.stub_agent import training_record
from tests.test_pixels import PARTS, run_config
from forethought.training.loop import resume_run, train_run

place = Path(PLACE)
task, seen = "dmc:cartpole-balance", {"obs": "plain_pixels", "seed_steps": 12}
seen["max_episode_steps"] = 6  # a picture takes longer than all else
whole = train_run(run_config(task, steps=20, **seen), place / "whole")
parted = train_run(run_config(task, steps=15, workers=True, **seen), place / "parted")
resume_run(parted.path, steps=20)
once, again = (training_record(run.path) for run in (whole, parted))
found["unequal after a resume"] = [part for part in PARTS if once[part] != again[part]]
"""


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Both programs in one process: to open OpenGL takes longer than what they do."""
    if all(rendering.probe(backend) is not None for backend in rendering.BACKENDS):
        pytest.skip("no EGL and no OSMesa on this machine")
    place = tmp_path_factory.mktemp("drawn")
    resumed = RESUMED.replace("PLACE", repr(str(place)))
    return in_own_process(f"{SHOWN}{resumed}print(json.dumps(found))")


def test_control_tasks_are_drawn_once_per_decision_and_the_same_in_workers(drawn: Any) -> None:
    for obs in ("pixels", "plain_pixels"):
        seen = drawn[obs]
        assert (seen["shape"], seen["dtype"]) == ([2, 64, 64, 3], "uint8")
        assert seen["std"] > 5 and seen["equal"] and seen["moved"]
        assert (seen["drawn"], seen["repeat"]) == (6, 2)  # 2 environments, 3 decisions of 2 frames
    assert drawn["pixels"]["first"] != drawn["plain_pixels"]["first"]  # shadows


def test_a_resume_with_pixels_is_exact_in_process_and_in_workers(drawn: Any) -> None:
    assert drawn["unequal after a resume"] == []


def test_without_gl_pixels_are_refused_in_a_sentence() -> None:
    code = (
        "import json\n"
        "from forethought.config import ForethoughtError\n"
        "from forethought.envs import make_single, rendering\n"
        "rendering.probe = lambda backend: 'no such library'\n"
        "try:\n"
        "    make_single('dmc:cheetah-run', obs='pixels')\n"
        "except ForethoughtError as error:\n"
        "    print(json.dumps(str(error)))\n"
    )
    assert in_own_process(code).startswith("Pictures of MuJoCo tasks need EGL or OSMesa")


@pytest.mark.parametrize(
    ("task", "obs", "sentence"),
    [
        ("gym:Pendulum-v1", "pixels", "gym:Pendulum-v1 shows no image"),
        (ROOM, "plain_pixels", "only dmc tasks are drawn"),
        ("minatar:breakout", "plain_pixels", "only dmc tasks are drawn"),
    ],
)
def test_other_tasks_must_show_images_themselves(task: str, obs: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make_single(task, obs=obs)


def test_a_task_with_images_of_its_own_takes_the_presets_for_pixels() -> None:
    assert make_single(ROOM, obs="pixels").spec_for_agent == make_single(ROOM).spec_for_agent
    assert make_single("minatar:breakout", obs="pixels").observation_space.shape == (10, 10, 4)
