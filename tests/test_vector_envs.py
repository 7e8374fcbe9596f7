"""Environments stepped together, in process and in workers: equal, exact, honest about failures."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from forethought.config import ConfigError
from forethought.envs import EnvError, EpisodeLog, make_env, replay_episode
from forethought.envs.room import Place, Room, new_memory
from forethought.envs.vector import batch_infos
from forethought.seeding import Streams
from forethought.spaces import nested, random_action
from tests.stubs import CounterEnv, EntityEnv, FaultyEnv, ImageEnv, NestedEnv, vector_of

BOTH = pytest.mark.parametrize("workers", [False, True], ids=["in-process", "workers"])


def zeros(envs):
    return np.zeros((envs.num_envs, 1), np.float32)


def play(envs, steps, seed=0):
    """Everything that `steps` decisions gave, with masked resets, as one list of trees."""
    rng = np.random.default_rng(seed)
    obs, _ = envs.reset()
    record = [obs]
    for _ in range(steps):
        actions = random_action(envs.spec_for_agent, rng, envs.num_envs)
        obs, reward, terminated, truncated, _ = envs.step(actions)
        record.append({"obs": obs, "reward": reward, "end": np.stack([terminated, truncated])})
        ended = terminated | truncated
        if ended.any():
            record.append(envs.reset(options={"reset_mask": ended})[0])
    return record


def same(a, b):
    return len(a) == len(b) and all(nested.bitwise_equal(x, y) for x, y in zip(a, b))


@pytest.mark.parametrize("task", ["gym:Pendulum-v1", "dmc:hopper-hop"])
def test_workers_and_process_give_the_same_bits(task):
    options = {"num_envs": 2, "seed": 3, "max_episode_steps": 60}
    local, remote = make_env(task, **options), make_env(task, workers=True, **options)
    assert local.spec_for_agent == remote.spec_for_agent
    assert same(play(local, 150), play(remote, 150))
    other = make_env(task, **{**options, "seed": 4})
    assert not same(play(local, 5), play(other, 5))
    for envs in (local, remote, other):
        envs.close()


def test_gymnasiums_interface_is_kept():
    envs = make_env("gym:Pendulum-v1", 3)
    assert envs.metadata["autoreset_mode"] == AutoresetMode.DISABLED
    assert envs.single_observation_space.shape == (3,) and envs.observation_space.shape == (3, 3)
    obs, _ = envs.reset(seed=1)
    assert envs.observation_space.contains(obs)
    obs, reward, terminated, truncated, _ = envs.step(zeros(envs))
    assert envs.observation_space.contains(obs)
    assert (reward.dtype, terminated.dtype, truncated.dtype) == (np.float64, np.bool_, np.bool_)
    envs.close(), envs.close()


@BOTH
def test_only_masked_environments_are_reset(workers):
    envs = vector_of(partial(CounterEnv, 2), partial(CounterEnv, 2), workers=workers)
    start, _ = envs.reset(seed=[10, 20])
    envs.step(zeros(envs))
    obs, infos = envs.reset(seed=[11, None], options={"reset_mask": np.array([True, False])})
    assert obs[:, 0].tolist() == [0, 1]
    assert obs[1, 1] == start[1, 1] and obs[0, 1] != start[0, 1]
    obs, _, terminated, _, infos = envs.step(zeros(envs))
    assert obs[:, 0].tolist() == [1, 2] and terminated.tolist() == [False, True]
    assert infos["_success"].tolist() == [False, True] and infos["success"][1]
    with pytest.raises(EnvError, match=r"Environment 1 was stepped .* after the end"):
        envs.step(zeros(envs))
    envs.close()


def test_an_empty_mask_resets_nothing_and_shows_everything():
    envs = vector_of(EntityEnv, num_envs=2)
    envs.reset(seed=0)
    envs.step(np.array([0, 0]))
    obs, infos = envs.reset(options={"reset_mask": np.zeros(2, bool)})
    assert obs["craft_mask"].sum() == 2  # one entity each after one step
    assert infos["action_mask"].tolist() == [[False, True, False]] * 2


def test_declared_columns_are_those_of_the_current_state_of_all():
    envs = vector_of(EntityEnv, num_envs=2)
    envs.reset(seed=0)
    envs.step(np.array([0, 0]))
    _, infos = envs.reset(options={"reset_mask": np.array([True, False])})
    assert infos["action_mask"].tolist() == [[True, False, False], [False, True, False]]


def test_every_episode_has_a_seed_of_its_own_from_the_runs_stream():
    envs = vector_of(partial(CounterEnv, 1), num_envs=2, seed=5)
    seen = []
    for _ in range(3):
        obs, _ = envs.reset()
        seen.append(obs[:, 1].tolist())
    assert len({offset for row in seen for offset in row}) == 6
    expected, _ = envs.reset(seed=[Streams(5).seed("env", i, 2) for i in range(2)])
    assert expected[:, 1].tolist() == seen[2]


def test_nested_values_are_batched_and_rescaled():
    envs = vector_of(NestedEnv, num_envs=2)
    obs, _ = envs.reset(seed=0)
    assert obs["pose"]["position"].shape == (2, 3)
    assert obs["pose"]["position"].dtype == np.float32
    actions = {"steer": np.zeros((2, 2), np.float32), "gear": np.array([0, 2])}
    obs, *_ = envs.step(actions)
    assert obs["gear"].tolist() == [1, 1] and obs["image"].shape == (2, 2, 2)


@BOTH
def test_observations_are_safe_to_keep(workers):
    envs = vector_of(ImageEnv, num_envs=2, workers=workers)
    frames = [envs.reset(seed=0)[0]] + [envs.step(np.zeros(2, np.int64))[0] for _ in range(3)]
    assert [int(frame.max()) for frame in frames] == [0, 1, 2, 3]
    envs.close()


def test_pictures_come_from_every_environment():
    envs = make_env("minatar:breakout", 2, render_mode="rgb_array")
    envs.reset()
    assert [picture.shape for picture in envs.render()] == [(160, 160, 3)] * 2
    envs.close()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda e: e.step(np.zeros((3, 1), np.float32)), "There are 3 actions for 2 environments"),
        (lambda e: e.reset(seed=[1]), "There are 1 seeds for 2 environments"),
        (lambda e: e.reset(options={"reset_mask": np.ones(2)}), "reset_mask has dtype float64"),
        (lambda e: e.reset(options={"reset_mask": np.ones(3, bool)}), r"and shape \(3,\)"),
    ],
)
def test_wrong_calls_are_told(call, words):
    envs = vector_of(CounterEnv, num_envs=2)
    envs.reset(seed=0)
    with pytest.raises(EnvError, match=words):
        call(envs)


def test_a_first_reset_with_a_mask_is_refused():
    with pytest.raises(EnvError, match="Environment 1 was never reset"):
        vector_of(CounterEnv, num_envs=2).reset(options={"reset_mask": np.array([True, False])})


def test_environments_that_differ_are_refused():
    with pytest.raises(EnvError, match="Environment 1 differs from environment 0"):
        vector_of(CounterEnv, NestedEnv)


def test_no_environments_are_refused():
    with pytest.raises(ConfigError, match="num_envs is 0, but must be at least 1"):
        make_env("gym:Pendulum-v1", 0)


def test_infos_promote_numbers_and_keep_objects():
    batch = batch_infos([{"x": 1, "name": "a"}, {"x": 2.5, "deep": {"y": np.ones(2)}}, {}])
    assert batch["x"].tolist() == [1.0, 2.5, 0.0] and batch["_x"].tolist() == [True, True, False]
    assert batch["name"].tolist() == ["a", None, None]
    assert batch["deep"]["y"].tolist() == [[0, 0], [1, 1], [0, 0]]


# Failures


def unbuildable():
    raise OSError("no such rom")


@BOTH
def test_an_environment_that_cannot_be_built_is_told(workers):
    with pytest.raises(EnvError, match="Environment 0 could not be built: OSError: no such rom"):
        vector_of(unbuildable, workers=workers)


class Pictures(CounterEnv):
    """A picture that lies in shared memory, one that is too large for it, and a small vector."""

    def __init__(self) -> None:
        super().__init__(4)
        shapes = {"large": (600, 600), "picture": (84, 84), "small": (3,)}
        self.observation_space = gymnasium.spaces.Dict(
            {key: gymnasium.spaces.Box(0, 255, shape, np.uint8) for key, shape in shapes.items()}
        )

    def observe(self):
        shapes = {key: space.shape for key, space in self.observation_space.items()}
        return {
            key: (np.arange(np.prod(shape)) + self.t).astype(np.uint8).reshape(shape)
            for key, shape in shapes.items()
        }


def test_pictures_come_out_of_shared_memory_as_they_were_put_there():
    here, there = vector_of(Pictures), vector_of(Pictures, workers=True)
    try:
        shown = [(here.reset(seed=1)[0], there.reset(seed=1)[0])]
        for _ in range(3):
            action = zeros(here)
            shown.append((here.step(action)[0], there.step(action)[0]))
        for mine, theirs in shown:  # also the older ones: what was handed over is safe to keep
            assert nested.bitwise_equal(mine, theirs)
        assert not nested.bitwise_equal(shown[0][1], shown[1][1])
    finally:
        here.close()
        there.close()


def test_only_large_arrays_are_put_into_the_room_and_those_that_fit():
    room = Room(new_memory(multiprocessing.get_context("spawn")))
    tree = {key: np.full(size, 7, np.uint8) for key, size in
            (("small", 100), ("a", 10_001), ("b", 240_000), ("c", 20_000))}  # fmt: skip
    tree["b"] = tree["b"].view(np.float64)  # begins where a float64 may
    put = room.put(tree)
    assert [isinstance(put[key], Place) for key in tree] == [False, True, True, False]
    found = room.get(put)
    assert nested.bitwise_equal(found, tree)
    room.put({"a": np.zeros(10_001, np.uint8)})
    assert nested.bitwise_equal(found, tree)


def test_shared_memory_has_no_name_that_could_be_left_behind():
    envs = vector_of(CounterEnv, workers=True)
    envs.reset(seed=0)
    maps = Path(f"/proc/{envs._handles[0].pid}/maps").read_text()
    files = [line for line in maps.splitlines() if " rw-s " in line]
    assert files and all(line.endswith("(deleted)") for line in files)
    envs.close()


def test_workers_leave_signals_to_their_parent():
    envs = vector_of(CounterEnv, workers=True)
    envs.reset(seed=0)
    pid = envs._handles[0].pid
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        os.kill(pid, number)
    assert envs.step(zeros(envs))[0][0, 0] == 1
    envs.close()
    assert not alive(pid)


def test_an_answer_left_behind_by_an_interrupt_is_not_taken_for_the_next():
    envs = vector_of(CounterEnv, workers=True)
    envs.reset(seed=0)
    envs._handles[0].request("step", np.zeros(1, np.float32))  # interrupted before its answer
    obs, *_ = envs.step(zeros(envs))
    assert obs[0, 0] == 2
    envs.close()


def alive(pid):
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except FileNotFoundError:
        return Path("/proc/self").exists() is False  # no /proc: the signal's answer stands


SCRIPT = """
import os, sys, time
sys.path[:0] = {path!r}
import numpy as np
from functools import partial
from pathlib import Path
from tests.stubs import CounterEnv, FaultyEnv, vector_of
if __name__ == "__main__":
    envs = vector_of(CounterEnv, partial(FaultyEnv, "hang", 1), workers=True)
    print(*[handle.pid for handle in envs._handles], flush=True)
    envs.reset(seed=0)
    {end}
"""


@pytest.mark.parametrize(
    "end",
    [
        "pass",
        "os.kill(os.getpid(), 9)",
        "[h.request('step', np.zeros(1)) for h in envs._handles]; "
        "time.sleep(0.2); os.kill(os.getpid(), 9)",
    ],
    ids=["leaves-without-closing", "killed", "killed-while-one-hangs"],
)
def test_workers_end_with_their_parent(tmp_path, end):
    script = tmp_path / "main.py"
    script.write_text(SCRIPT.format(path=sys.path, end=end))
    result = subprocess.run(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, check=False, timeout=60
    )
    pids = [int(pid) for pid in result.stdout.split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, pids))


class Surroundings(CounterEnv):
    """Tells in `info` what variables its process has."""

    def reset(self, **options):
        obs, _ = super().reset(**options)
        return obs, {key: os.environ.get(key) for key in ("OMP_NUM_THREADS", "CHOSEN_LATE")}


def test_a_worker_has_the_variables_of_the_moment_at_which_it_starts(monkeypatch):
    """Those of its parent, whatever was set when the first worker started; and one thread."""
    found = []
    for value in ("a", "b", None):
        if value is None:
            monkeypatch.delenv("CHOSEN_LATE")
        else:
            monkeypatch.setenv("CHOSEN_LATE", value)
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        envs = vector_of(Surroundings, workers=True)
        found.append(envs.reset(seed=0)[1]["CHOSEN_LATE"][0])
        assert envs.reset(seed=0)[1]["OMP_NUM_THREADS"][0] == "1"
        envs.close()
        assert os.environ["OMP_NUM_THREADS"] == "2"
    assert found == ["a", "b", None]


# Open episodes across a resume


@BOTH
def test_an_open_episode_is_stepped_again_bit_for_bit(workers):
    envs = make_env("dmc:hopper-hop", 2, workers=workers)
    rng, log = np.random.default_rng(0), EpisodeLog(7)
    obs, _ = envs.reset(seed=[3, 7])
    for _ in range(30):
        actions = random_action(envs.spec_for_agent, rng, 2)
        log.add(nested.index(actions, 1))
        obs, *_ = envs.step(actions)
    values, arrays = log.state()
    assert values == {"seed": 7, "decisions": 30} and arrays[""].shape == (30, 4)
    envs.reset(seed=0)
    restored = EpisodeLog.restored(values, arrays)
    assert replay_episode(envs, 1, restored, obs[1]) is None
    restored.actions[3] = -restored.actions[3]
    assert replay_episode(envs, 1, restored, obs[1]) == "Its last observation differs."
    envs.close()


def test_a_log_copies_its_actions_and_starts_anew():
    log, action = EpisodeLog(), {"steer": np.zeros(2, np.float32), "gear": np.int64(1)}
    log.start(4)
    log.add(action)
    action["steer"][0] = 9.0
    values, arrays = log.state()
    assert arrays["steer"].tolist() == [[0.0, 0.0]] and arrays["gear"].tolist() == [1]
    again = EpisodeLog.restored(values, arrays)
    assert again.seed == 4 and nested.bitwise_equal(
        again.actions[0]["steer"], log.actions[0]["steer"]
    )
    log.start(5)
    assert log.state() == ({"seed": 5, "decisions": 0}, {})
    assert EpisodeLog.restored({"seed": 5, "decisions": 0}, {}) == log


def test_an_episode_that_ends_early_on_replay_is_not_restored():
    envs = vector_of(partial(CounterEnv, 2))
    obs, _ = envs.reset(seed=1)
    log = EpisodeLog(1, [np.zeros(1, np.float32)] * 2)
    reason = replay_episode(envs, 0, log, np.array([2.0, obs[0, 1]], np.float32))
    assert reason == "It ended at step 2, though it was open after 2."


def test_an_episode_that_raises_on_replay_is_not_restored():
    envs = vector_of(partial(FaultyEnv, "raise", 2))
    log = EpisodeLog(1, [np.zeros(1, np.float32)] * 2)
    assert "the wheel came off" in str(replay_episode(envs, 0, log, np.zeros(2, np.float32)))


def test_a_faulty_episode_fails_only_with_its_seed():
    envs = vector_of(partial(FaultyEnv, "raise", 1, only_seeds=(8,)))
    envs.reset_one(0, 7)
    assert envs.step_one(0, np.zeros(1, np.float32))[1] == 1.0
    envs.reset_one(0, 8)
    with pytest.raises(EnvError, match="the wheel came off"):
        envs.step_one(0, np.zeros(1, np.float32))
