"""Environments that give nonsense, raise, hang or die are named, and the others go on.

What a run in training makes of that is in test_restarts.py.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from multiprocessing import active_children
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest

from forethought.config import LONGEST_TIMEOUT_SECONDS, ConfigError, EnvConfig, ForethoughtError
from forethought.envs import EnvError, EnvFailure, TaskEnv, handles, make_env
from forethought.envs.episodes import run_episodes
from forethought.spaces import nested
from forethought.training.evaluate import evaluate_target
from forethought.training.signals import Interrupted
from tests.faults.stubs import Exits, OldStyle, Stubborn, task
from tests.stubs import CounterEnv, FaultyEnv, NestedEnv, fault_if, vector_of

BOTH = pytest.mark.parametrize("workers", [False, True], ids=["in-process", "workers"])
ZERO = np.zeros(1, np.float32)


# Case 13: values that an environment must not give


class Keyed(NestedEnv):
    """From step 2 on it gives `bad` in the place of its leaf at `path`."""

    def __init__(self, path: str, bad: Any) -> None:
        super().__init__()
        self.path, self.bad = path, bad

    def observe(self) -> Any:
        leaves = nested.flatten(super().observe())
        return nested.unflatten(leaves | ({self.path: self.bad} if self.t >= 2 else {}))


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (
            "nan-observation",
            "The observation of environment 6 at step 3 is not finite: it holds nan",
        ),
        ("shape", "observation of environment 6 at step 3 has shape (3,), but its space says (2,)"),
        ("dtype", "The observation of environment 6 at step 3 has dtype <U1"),
        ("nan-reward", "The reward of environment 6 at step 3 is nan"),
        ("inf-reward", "The reward of environment 6 at step 3 is inf"),
    ],
)
def test_case_13_a_bad_value_stops_at_the_boundary_with_environment_and_step(fault, sentence):
    env = TaskEnv(FaultyEnv(fault, at=3), env_index=6)
    env.reset(seed=0)
    env.step(ZERO), env.step(ZERO)
    with pytest.raises(EnvFailure) as caught:
        env.step(ZERO)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("path", "bad", "problem"),
    [
        ("pose/position", np.array([0, np.nan, 0]), "is not finite: it holds nan"),
        ("pose/position", np.array([0, 1e300, 0]), "is not finite as float32: it holds 1e+300"),
        ("pose/angle", np.zeros(2, np.float32), "has shape (2,), but its space says ()"),
        ("image", np.zeros((2, 2), np.int64), "has dtype int64, but its space says uint8"),
        ("image", {"red": 1}, "is a dict, but its space says an array"),
        ("gear", 100, "holds 100, which lies outside its space [0, 99]"),
        ("gear", -1, "holds -1, which lies outside its space [0, 99]"),
    ],
)
def test_case_13_a_bad_value_in_a_dict_is_named_by_its_key(path, bad, problem):
    env = TaskEnv(Keyed(path, bad), env_index=1)
    env.reset(seed=0)
    action = {"steer": np.zeros(2, np.float32), "gear": np.int64(0)}
    env.step(action)
    with pytest.raises(EnvFailure) as caught:
        env.step(action)
    assert str(caught.value) == (
        f"The observation '{path}' of environment 1 at step 2 {problem}; "
        "correct the environment or the space it declares."
    )


def test_case_13_a_float_outside_its_box_is_told_once_and_taken_as_it_is(caplog):
    """Stock simulators leave their bounds (the next test), which must not end a run."""
    env = TaskEnv(Keyed("pose/angle", 2e4), env_index=1)
    env.reset(seed=0)
    action = {"steer": np.zeros(2, np.float32), "gear": np.int64(0)}
    angles = [float(env.step(action)[0]["pose"]["angle"]) for _ in range(3)]
    assert angles == [1.0, 2e4, 2e4]
    assert caplog.messages == [
        "The observation 'pose/angle' of environment 1 at step 2 holds 20000.0, which lies outside "
        "its space [-10000, 10000]; it is taken as it is, and not told again."
    ]


def test_case_13_gymnasiums_own_lander_may_spin_beyond_its_box(caplog):
    pytest.importorskip("Box2D")
    env = TaskEnv(gymnasium.make("LunarLanderContinuous-v3"))
    for seed in range(6):
        env.reset(seed=seed)
        ended = False
        while not ended:  # full thrust, to one side
            _, _, terminated, truncated, _ = env.step(np.ones(2, np.float32))
            ended = terminated or truncated
    env.close()
    assert "lies outside its space" in caplog.text


@BOTH
@pytest.mark.parametrize(
    ("bad", "problem"),
    [(1.5, r"holds 1.5, which lies outside its space"), (np.nan, "is not finite")],
)
def test_case_13_an_illegal_action_is_the_agents_fault_and_no_failure(workers, bad, problem):
    envs = vector_of(CounterEnv, num_envs=2, workers=workers)
    envs.reset(seed=0)
    with pytest.raises(EnvError, match=f"The action of environment 1 at step 1 {problem}") as it:
        envs.step_each(np.array([[0.0], [bad]], np.float32))
    assert type(it.value) is EnvError and not envs.failed
    envs.close()


RESET = "reset must return (observation, info)"
STEP = "step must return (observation, reward, terminated, truncated, info)"


@BOTH
@pytest.mark.parametrize(
    ("how", "problem"),
    [
        ("reset-obs", f"one ndarray from its reset, but {RESET}"),
        ("reset-tuple", f"a ndarray as the last value from its reset, but {RESET}"),
        ("reset-info", f"a None as the last value from its reset, but {RESET}"),
        ("step-obs", f"one ndarray from step 2, but {STEP}"),
        ("step-four", f"4 values from step 2, but {STEP}"),
        ("step-info", f"a None as the last value from step 2, but {STEP}"),
    ],
)
def test_case_13_the_api_of_old_gym_is_answered_by_what_must_be_returned(workers, how, problem):
    with contextlib.closing(
        vector_of(partial(CounterEnv, 10), partial(OldStyle, how), workers=workers)
    ) as envs:
        with pytest.raises(EnvFailure) as caught:
            envs.reset(seed=0)
            envs.step(np.zeros((2, 1), np.float32))
            envs.step(np.zeros((2, 1), np.float32))
        assert envs.failed == {1}
    assert str(caught.value) == (
        f"Environment 1 returned {problem}, of which info is a dict; correct the environment."
    )


def test_case_13_an_end_that_is_neither_true_nor_false_is_told():
    env = TaskEnv(OldStyle("step-ends"))
    env.reset()
    env.step(ZERO)
    with pytest.raises(EnvFailure, match=r"ended with \[False  True\] at step 2, but step must"):
        env.step(ZERO)


@BOTH
@pytest.mark.parametrize("name", ["observation_space", "action_space"])
def test_case_13_a_space_that_is_missing_is_told_before_anything_is_played(workers, name):
    with pytest.raises(ConfigError) as caught:
        vector_of(partial(OldStyle, name), workers=workers)
    assert str(caught.value) == (
        f"Environment 0 (OldStyle) has no {name}, but must have a space of gymnasium; set it in "
        "the environment's __init__."
    )


def test_case_13_a_space_of_another_package_is_told():
    env = CounterEnv()
    env.action_space = (-1.0, 1.0)
    with pytest.raises(ConfigError, match=r"\(CounterEnv\) has a tuple as its action_space, but"):
        TaskEnv(env)


@pytest.mark.parametrize(
    ("how", "kind", "problem"),
    [
        ("reset-obs", ForethoughtError, "returned one ndarray from its reset"),
        ("step-four", ForethoughtError, "returned 4 values from step 2"),
        ("observation_space", ConfigError, "has no observation_space"),
        ("exits-build", EnvFailure, "could not be built: SystemExit: 3"),
        ("exits-step", ForethoughtError, "raised SystemExit at step 3: 3"),
    ],
)
def test_case_13_an_evaluation_says_the_same(how, kind, problem):
    with pytest.raises(kind, match=problem):
        evaluate_target(task(how), policy="random", episodes=2)


# Case 15: exceptions


def test_case_15_the_traceback_of_the_environment_is_kept():
    env = TaskEnv(FaultyEnv("raise", at=1))
    env.reset()
    with pytest.raises(EnvFailure) as caught:
        env.step(ZERO)
    assert str(caught.value) == "Environment 0 raised RuntimeError at step 1: the wheel came off"
    assert "stubs.py" in caught.value.__notes__[0]
    assert isinstance(caught.value.__cause__, RuntimeError)


@BOTH
def test_case_15_the_traceback_begins_with_the_environments_own_line(workers):
    """Beyond our frames and the wrapper that gymnasium.make puts around every environment."""
    with contextlib.closing(make_env("gym:tests.stubs:stub/Raises-v0", workers=workers)) as envs:
        envs.reset(seed=[0])
        envs.step(ZERO[None]), envs.step(ZERO[None])
        with pytest.raises(EnvFailure) as caught:
            envs.step(ZERO[None])
    first, second, third, *_, last = caught.value.__notes__[0].splitlines()
    assert first == "Traceback (most recent call last):"
    assert second.startswith('  File "') and "/tests/stubs.py" in second
    assert third == '    raise RuntimeError("the wheel came off")'
    assert last == "RuntimeError: the wheel came off"


@BOTH
@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        ("build", "Environment 0 could not be built: SystemExit: 3"),
        ("reset", "Environment 0 raised SystemExit at step 0: 3"),
        ("step", "Environment 0 raised SystemExit at step 3: 3"),
    ],
)
def test_case_15_an_environment_that_exits_has_failed(workers, place, sentence):
    """Exit code 3 means diverged, so it must never be the environment's word."""
    with pytest.raises(EnvFailure) as caught, contextlib.ExitStack() as stack:
        envs = vector_of(partial(Exits, place), workers=workers)
        stack.callback(envs.close)
        envs.reset(seed=0)
        for _ in range(3):
            envs.step(ZERO[None])
    assert str(caught.value) == sentence
    assert "sys.exit(self.code)" in caught.value.__notes__[0]


def test_case_15_an_environment_that_exits_at_its_end_is_only_warned_about(caplog):
    vector_of(partial(Exits, "close")).close()
    assert caplog.messages == ["Environment 0 could not be closed: SystemExit: 3"]


def test_case_15_a_module_that_exits_when_it_is_imported_is_told(tmp_path, monkeypatch):
    (tmp_path / "module_that_exits.py").write_text("import sys\n\nsys.exit(3)\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="raised SystemExit while it was imported: 3") as caught:
        make_env("gym:module_that_exits:Any-v0")
    assert (
        caught.value.__notes__[0]
        .splitlines()[1]
        .endswith('module_that_exits.py", line 3, in <module>')
    )


def test_case_15_the_word_of_a_signal_passes_through_an_environment(monkeypatch):
    """Our own stop is a SystemExit too, raised wherever the signal finds the process."""
    envs = vector_of(CounterEnv)
    envs.reset(seed=0)

    def stopped(*_: object) -> None:
        raise Interrupted("SIGTERM")

    monkeypatch.setattr(CounterEnv, "step", stopped)
    with pytest.raises(Interrupted):
        envs.step(ZERO[None])
    assert not envs.failed
    envs.close()


@BOTH
@pytest.mark.parametrize("fault", ["raise", "nan-observation"])
def test_case_15_a_failing_environment_is_named_and_the_others_go_on(workers, fault):
    envs = vector_of(*fault_if(1, fault), workers=workers)
    envs.reset(seed=0)
    actions = np.zeros((2, 1), np.float32)
    envs.step(actions), envs.step(actions)
    with pytest.raises(EnvFailure, match=r"nvironment 1 .*at step 3") as caught:
        envs.step(actions)
    assert envs.failed == {1}
    if fault == "raise":
        assert "RuntimeError at step 3: the wheel came off" in str(caught.value)
        assert "stubs.py" in caught.value.__notes__[0]  # the original traceback
    # No late answer is taken for that of a later request.
    obs, _ = envs.reset(seed=1)
    assert obs[:, 0].tolist() == [0, 0]
    assert envs.step(actions)[0][:, 0].tolist() == [1, 1]
    envs.close()


def test_case_15_all_failures_of_one_step_are_told():
    envs = vector_of(partial(FaultyEnv, "raise", 1), num_envs=2)
    envs.reset(seed=0)
    first, second = envs.step_each(np.zeros((2, 1), np.float32))
    assert [str(x)[:20] for x in (first, second)] == [
        "Environment 0 raised",
        "Environment 1 raised",
    ]


# Case 16: hangs


@BOTH
def test_case_16_a_hang_is_named_and_costs_only_its_own_environment(workers):
    envs = vector_of(*fault_if(1, "hang"), workers=workers, timeout_seconds=0.5)
    envs.reset(seed=0)
    actions = np.zeros((2, 1), np.float32)
    envs.step(actions), envs.step(actions)
    fine, hung = envs.step_each(actions)
    assert fine[1] == 3.0
    assert str(hung) == (
        "Environment 1 did not finish step 3 within 0.5 s; if it is only slow, raise "
        "env.timeout_seconds."
    )
    assert envs.failed == {1}
    assert "env-1" not in [child.name for child in active_children()]
    envs.rebuild(1)
    assert envs.failed == set()
    envs.reset_one(1, 7)
    assert [step[1] for step in envs.step_each(actions)] == [4.0, 1.0]
    envs.close()


def test_case_16_the_place_of_a_hang_in_this_process_is_told():
    envs = vector_of(partial(FaultyEnv, "hang", 1), timeout_seconds=0.3)
    envs.reset(seed=0)
    [hung] = envs.step_each(ZERO[None])
    assert "time.sleep(3600)" in hung.__notes__[0]
    envs.close()


def test_case_16_an_environment_that_catches_the_interruption_has_failed_all_the_same():
    envs = vector_of(Stubborn, timeout_seconds=0.3)
    envs.reset(seed=0)
    with pytest.raises(EnvFailure, match=r"did not finish step 1 within 0\.3 s"):
        envs.step(ZERO[None])
    envs.close()


@pytest.mark.parametrize("workers", [False, True], ids=["in-process", "workers"])
def test_case_16_an_evaluation_builds_a_hung_environment_anew(workers):
    """Also one that hung in its last episode: the next evaluation finds it whole."""
    make = partial(FaultyEnv, "hang", only_seeds=(1, 5))
    envs = vector_of(make, num_envs=2, workers=workers, timeout_seconds=0.5)
    played = run_episodes(Still(), envs, [1, 2, 3, 4, 5])
    assert [episode.seed for episode in played.episodes] == [2, 3, 4]
    assert len(played.failures) == 2 and "did not finish step 3" in played.failures[0]
    assert envs.failed == {0}
    assert len(run_episodes(Still(), envs, [2, 3]).episodes) == 2
    envs.close()


class Still:
    """A policy that never moves."""

    def start(self, num_envs: int) -> None:
        return None

    def act(self, obs, state, first, infos):
        return np.zeros((len(first), 1), np.float32), state


DEAF = """
import sys
sys.path[:0] = {path!r}
from threading import Thread
import numpy as np
from forethought.envs import watchdog
from tests.faults.stubs import Deaf
from tests.stubs import vector_of
watchdog.GRACE_SECONDS = 0.5
envs = vector_of(Deaf, timeout_seconds=0.5)
envs.reset(seed=0)
{call}
"""


@pytest.mark.parametrize(
    "call",
    ["envs.step(np.zeros((1, 1)))", "Thread(target=envs.step, args=[np.zeros((1, 1))]).start()"],
    ids=["main-thread", "another-thread"],
)
def test_case_16_a_hang_that_cannot_be_interrupted_ends_the_process_in_a_sentence(call):
    code = DEAF.format(path=sys.path, call=call)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith(
        "Environment 0 hangs in code that cannot be interrupted: step 1 has lasted 1 s ("
    )
    assert "stubs.py, line" in done.stderr and "forethought resume RUN" in done.stderr
    assert done.stderr.count("\n") == 1


def test_case_16_the_watchdog_gives_the_signal_back_and_passes_on_what_it_did_not_send():
    heard = []
    before = signal.signal(signal.SIGALRM, lambda *_: heard.append("mine"))
    mine = signal.getsignal(signal.SIGALRM)
    try:
        one = vector_of(CounterEnv, timeout_seconds=60)
        two = vector_of(CounterEnv, timeout_seconds=60)
        signal.raise_signal(signal.SIGALRM)
        assert heard == ["mine"]
        one.close()
        assert signal.getsignal(signal.SIGALRM) != mine  # the other one still needs it
        two.close()
        assert signal.getsignal(signal.SIGALRM) == mine
    finally:
        signal.signal(signal.SIGALRM, before)
    assert "env-watchdog" not in [t.name for t in threading.enumerate() if not t.daemon]


def test_case_16_without_a_time_out_nothing_is_watched():
    before = set(threading.enumerate())  # some of earlier tests may still be ending
    envs = vector_of(CounterEnv)
    assert set(threading.enumerate()) <= before
    envs.close()


# Case 17: processes that are killed


def test_case_17_an_evaluation_starts_a_killed_worker_anew():
    make = partial(FaultyEnv, "kill", only_seeds=(1,))
    envs = vector_of(make, num_envs=2, workers=True)
    played = run_episodes(Still(), envs, [1, 2, 3])
    assert [episode.seed for episode in played.episodes] == [2, 3]
    assert "was ended by SIGKILL during step 3" in played.failures[0]
    envs.close()


UNGUARDED = """
import sys
sys.path[:0] = {path!r}
from tests.stubs import CounterEnv, vector_of
vector_of(CounterEnv, num_envs=2, workers=True)
"""


def test_case_17_a_script_that_workers_cannot_import_is_told_what_it_lacks(tmp_path):
    """The one traceback is that of the script itself, which did not catch the error."""
    script = tmp_path / "main.py"
    script.write_text(UNGUARDED.format(path=sys.path))
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    last = done.stderr.splitlines()[-1]
    assert "ConfigError: The worker process" in last
    assert last.endswith('does its work below a line `if __name__ == "__main__":`.')


# The end of environments


class Unclosable(FaultyEnv):
    """Raises at step 1; its end hangs, or raises too."""

    closed: ClassVar[int] = 0

    def __init__(self, hangs: bool) -> None:
        super().__init__("raise", at=1)
        self.hangs = hangs

    def close(self) -> None:
        Unclosable.closed += 1
        if self.hangs:
            time.sleep(3600)
        raise OSError("the socket is gone")


@pytest.mark.parametrize("hangs", [False, True])
def test_case_15_an_end_that_fails_hides_no_failure_and_spares_no_other_environment(
    monkeypatch, caplog, hangs
):
    """Nor does it take the time of a step: a run that is told to stop must stop."""
    monkeypatch.setattr(handles, "CLOSE_SECONDS", 0.2)
    monkeypatch.setattr(Unclosable, "closed", 0)
    envs = vector_of(partial(Unclosable, hangs), num_envs=2, timeout_seconds=60.0)
    began = time.monotonic()
    with pytest.raises(EnvFailure, match="Environment 0 raised"), contextlib.closing(envs):
        envs.reset(seed=0)
        envs.step(np.zeros((2, 1), np.float32))
    assert Unclosable.closed == 2 and envs.closed
    assert time.monotonic() - began < 20
    told = "did not finish its close" if hangs else "could not be closed: OSError: the socket"
    assert [told in record.message for record in caplog.records] == [True, True]


@pytest.mark.parametrize("workers", [False, True])
def test_case_16_the_longest_time_out_can_be_waited_for(workers):
    with contextlib.closing(
        vector_of(CounterEnv, num_envs=1, workers=workers, timeout_seconds=LONGEST_TIMEOUT_SECONDS)
    ) as envs:
        envs.reset(seed=0)


# The configuration


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"timeout_seconds": 0.0},
            "env.timeout_seconds is 0.0, but must be above 0 and at most 1000000.",
        ),
        (
            {"timeout_seconds": float("inf")},
            "env.timeout_seconds is inf, but must be above 0 and at most 1000000.",
        ),
        (
            {"max_restarts": 0, "on_env_error": "restart"},
            "env.max_restarts is 0, but must be at least 1.",
        ),
        (
            {"max_restarts": 3},
            "env.max_restarts is 3, but has no effect while env.on_env_error is halt; set "
            "env.on_env_error restart or leave the number out.",
        ),
    ],
)
def test_case_16_bad_limits_are_refused(options, sentence):
    with pytest.raises(ConfigError) as caught:
        EnvConfig(**options)
    assert str(caught.value) == sentence
