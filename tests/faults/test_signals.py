"""Cases 18 and 19: a signal at any moment leaves a run to go on with, and says how."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import pytest
from gymnasium.envs.registration import EnvSpec

from forethought import files
from forethought.config import ConfigError
from forethought.files import FileError
from forethought.tracking import RunDirectory, console
from forethought.training import loop, signals
from forethought.training.collect import Collector
from forethought.training.loop import resume_run, train_run
from forethought.training.signals import Interrupted, Stop
from forethought.training.telling import say_farewell
from tests.faults.conftest import MOMENTS, TWO
from tests.forked import forked, pause_at
from tests.stub_agent import register, stub_run, training_record
from tests.stubs import CounterEnv

EACH = pytest.mark.parametrize(
    ("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGUSR1", 143), ("SIGHUP", 129)]
)


def send(name: str = "SIGTERM") -> None:
    os.kill(os.getpid(), getattr(signal, name))


def at(monkeypatch, stage: str, act) -> None:
    """Does `act` once, when the run passes the fault point."""
    passes = count()

    def fault(name: str) -> None:
        if name == stage and next(passes) == 0:
            act()

    monkeypatch.setattr(files, "fault_point", fault)


def status_of(path: Path) -> str:
    return RunDirectory.open(path).run_json["status"]


# -- case 18: the first signal ---------------------------------------------------------------------


@pytest.mark.parametrize("moment", MOMENTS)
def test_case_18_a_run_stopped_by_a_signal_saves_and_resumes_exactly(
    moment, undisturbed, tmp_path, monkeypatch, capfd
):
    sent: list[float] = []

    def act() -> None:
        sent.append(time.monotonic())
        send()

    at(monkeypatch, MOMENTS[moment], act)
    run = train_run(stub_run(**TWO), tmp_path / "run")
    assert (run.status, run.exit_code) == ("interrupted", 143)
    assert time.monotonic() - sent[0] < 10
    told = capfd.readouterr().err
    assert "\nSIGTERM: saving, then stopping" in told
    assert told.endswith(f"Continue with: forethought resume {run.path}\n")
    assert status_of(run.path) == "interrupted"
    if moment == "burst":  # the checkpoint keeps the updates owed, it does not finish the burst
        newest, _ = files.newest_verified(run.path / "checkpoints")
        assert files.read_json(newest / "loop.json")["budget"]["taken"] == 17
    assert resume_run(run.path).status == "done"
    assert training_record(run.path) == undisturbed


def test_case_18_stopped_many_times_it_is_still_the_same(undisturbed, tmp_path, monkeypatch):
    stops = {"update-3", "evaluation-1-2", "step-100", "step-102", "update-150", "step-398"}

    def fault(name: str) -> None:
        if name in stops:
            stops.remove(name)
            send("SIGINT")

    monkeypatch.setattr(files, "fault_point", fault)
    run = train_run(stub_run(**TWO), tmp_path / "run")
    sittings = 1
    while run.status == "interrupted":
        assert run.exit_code == 130
        newest, _ = files.newest_verified(run.path / "checkpoints")
        assert newest.name == f"step-{run.agent_steps:09d}"  # a resumed run saves as a new one does
        run, sittings = resume_run(run.path), sittings + 1
    assert sittings == 7 and not stops
    assert training_record(run.path) == undisturbed


@EACH
def test_case_18_a_signal_while_a_run_is_built_leaves_no_trace(
    tmp_path, monkeypatch, capfd, name, code
):
    def slow_build(config):
        send(name)
        raise AssertionError("the signal did not end the building")

    monkeypatch.setattr(loop, "build_parts", slow_build)
    with pytest.raises(Interrupted) as ended:
        train_run(stub_run(), tmp_path / "run")
    assert ended.value.code == code
    words = f"\n{name}: stopped before the run began; nothing was written\n"
    assert capfd.readouterr().err == words
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("again", [ImportError, FileError])
@pytest.mark.parametrize("last_words", ["nothing was written", None])
def test_case_18_only_imports_before_a_run_begins_are_taken_for_their_signal(last_words, again):
    """Also of an error that is its own cause; what goes wrong in tidying up is told."""
    wanted = Interrupted if last_words and again is ImportError else again
    with pytest.raises(wanted), Stop(last_words):
        try:
            raise Interrupted("SIGINT")
        finally:
            raise again("of the signal, without saying so")
    error = FileError("its own cause")
    with pytest.raises(FileError), Stop(last_words):
        raise error from error


@pytest.mark.parametrize("signalled", [True, False])
def test_case_18_a_signal_that_an_import_makes_another_error_of_is_a_signal_still(
    tmp_path, monkeypatch, capfd, signalled
):
    """As MuJoCo's modules do, whose initialisation is C++. A failed import alone is no signal."""

    def build(**kwargs):
        try:
            if signalled:
                send("SIGINT")
        except BaseException as error:
            raise ImportError("initialization failed") from error
        raise ImportError("initialization failed")

    spec = EnvSpec("stub/Importing-v0", build, max_episode_steps=30)
    monkeypatch.setitem(gymnasium.registry, spec.id, spec)
    with pytest.raises(Interrupted if signalled else ConfigError):
        train_run(stub_run("gym:stub/Importing-v0"), tmp_path / "run")
    words = "\nSIGINT: stopped before the run began; nothing was written\n"
    assert capfd.readouterr().err == (words if signalled else "")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("then", [Stop.politely, lambda stop: None], ids=["politely", "the end"])
def test_case_18_a_signal_that_a_library_catches_ends_the_run_all_the_same(then):
    """Some catch everything while they are imported; after its last words no run may begin."""
    with pytest.raises(Interrupted) as caught, Stop(signals.NOT_BEGUN) as stop:
        with contextlib.suppress(BaseException):
            send("SIGINT")
        then(stop)
    assert caught.value.code == 130


def test_case_18_a_signal_after_the_directory_was_made_leaves_a_run_to_resume(
    tmp_path, monkeypatch, undisturbed
):
    create = RunDirectory.create

    def create_then_signal(*arguments):
        run = create(*arguments)
        send()
        return run

    monkeypatch.setattr(RunDirectory, "create", create_then_signal)
    run = train_run(stub_run(**TWO), tmp_path / "run")
    assert (run.status, run.exit_code, run.agent_steps) == ("interrupted", 143, 0)
    assert resume_run(run.path).status == "done"
    assert training_record(run.path) == undisturbed


def test_case_18_before_the_first_checkpoint_a_hang_says_that_nothing_was_begun(
    tmp_path, monkeypatch, capfd
):
    def hang(collector):
        send()
        time.sleep(60)

    monkeypatch.setattr(signals, "GRACE_SECONDS", 0.2)
    monkeypatch.setattr(Collector, "begin", hang)
    run = train_run(stub_run(), tmp_path / "run")
    assert (run.status, run.exit_code) == ("interrupted", 143)
    assert capfd.readouterr().err.endswith(
        "Stopped before the first checkpoint: nothing was begun. Continue with: forethought resume "
        f"{run.path}\n"
    )
    assert files.published(run.path / "checkpoints") == []
    monkeypatch.undo()
    register(monkeypatch)
    assert resume_run(run.path).status == "done"
    train_run(stub_run(), tmp_path / "undisturbed")
    assert training_record(run.path) == training_record(tmp_path / "undisturbed")


class SignalledEnv(CounterEnv):
    """Sends the signal at the third decision of the episode that a resume steps again."""

    armed = False

    def step(self, action):
        if SignalledEnv.armed and self.t == 2:
            SignalledEnv.armed = False
            send()
            raise AssertionError("the signal did not end the restoring")
        return super().step(action)


def test_case_18_a_signal_while_an_episode_is_stepped_again_leaves_the_run_as_it_was(
    tmp_path, monkeypatch, capfd
):
    spec = EnvSpec("stub/Signalled-v0", SignalledEnv, kwargs={"length": 30})
    monkeypatch.setitem(gymnasium.registry, spec.id, spec)
    whole = train_run(stub_run("gym:stub/Signalled-v0"), tmp_path / "whole")
    at(monkeypatch, MOMENTS["mid-episode"], send)
    run = train_run(stub_run("gym:stub/Signalled-v0"), tmp_path / "run")
    capfd.readouterr()
    SignalledEnv.armed = True
    again = resume_run(run.path)
    assert (again.status, again.exit_code) == ("interrupted", 143)
    told = capfd.readouterr().err
    assert "SIGTERM: stopped while the run was being restored" in told
    assert told.endswith(
        "Stopped without a new checkpoint; the newest is step-000000250. "
        f"Continue with: forethought resume {run.path}\n"
    )
    assert resume_run(run.path).status == "done"
    assert training_record(run.path) == training_record(whole.path)


@pytest.mark.parametrize(
    ("period", "offline", "why"),
    [
        (0, False, " (train.checkpoint_every_agent_steps is 0)"),
        (0, True, " (offline.checkpoint_every_updates is 0)"),
        (100, False, ""),  # somebody deleted them
    ],
)
def test_case_18_a_run_that_saved_nothing_says_why(tmp_path, capsys, period, offline, why):
    run = train_run(stub_run(steps=100), tmp_path / "run")
    directory = RunDirectory.open(run.path)
    directory.checkpoints.rename(tmp_path / "gone")
    config, clock = SimpleNamespace(is_offline=offline), SimpleNamespace(told="90 agent steps")
    rhythm = SimpleNamespace(period=period)
    trainer = SimpleNamespace(run=directory, clock=clock, config=config, save_every=rhythm)
    say_farewell(trainer, "interrupted", cut_short=True)
    said = f"Stopped at 90 agent steps without a checkpoint{why}: nothing was saved.\n"
    assert capsys.readouterr().err.endswith(said)


@pytest.mark.parametrize("workers", [False, True])
def test_case_18_a_signal_while_an_environment_hangs_gives_the_step_up(
    tmp_path, monkeypatch, capfd, workers
):
    """The seventh decision sleeps for an hour; half a step is not saved."""
    monkeypatch.setattr(signals, "GRACE_SECONDS", 0.2)
    monkeypatch.setattr(loop.Trainer, "play_randomly", lambda trainer, stop: None)
    at(monkeypatch, "step-6", lambda: threading.Timer(0.5, send).start())
    layers = {"env": {"workers": workers}}
    began = time.monotonic()
    run = train_run(stub_run("gym:tests.stubs:stub/Hangs-v0", **layers), tmp_path / "run")
    assert time.monotonic() - began < 20  # of 3600
    assert (run.status, run.exit_code) == ("interrupted", 143)
    told = capfd.readouterr().err
    assert "\nSIGTERM: the step under way takes too long and is given up\n" in told
    assert "the newest is step-000000000. Continue with: forethought resume" in told
    assert status_of(run.path) == "interrupted"


@pytest.mark.parametrize("evaluation", ["random play", "on the way", "last"])
def test_case_18_a_slow_evaluation_is_given_up_and_loses_no_step(
    tmp_path, monkeypatch, undisturbed, capfd, evaluation
):
    """A step of an evaluation takes longer than the grace; training's own state is whole."""
    monkeypatch.setattr(signals, "GRACE_SECONDS", 0.2)
    index, steps = {"random play": (0, 0), "on the way": (1, 200), "last": (2, 400)}[evaluation]

    def slow() -> None:
        send()
        time.sleep(60)

    at(monkeypatch, f"evaluation-{index}-5", slow)
    run = train_run(stub_run(**TWO), tmp_path / "run")
    assert (run.status, run.exit_code, run.agent_steps) == ("interrupted", 143, steps)
    told = capfd.readouterr().err
    assert "the step under way takes too long and is given up" in told
    assert "Stopped at" in told and "without a new checkpoint" not in told
    assert files.published(run.path / "checkpoints")[-1].name == f"step-{steps:09d}"
    assert resume_run(run.path).status == "done"
    assert training_record(run.path) == undisturbed


def test_case_18_a_checkpoint_is_never_given_up(tmp_path, monkeypatch, undisturbed, capfd):
    """Saving takes four times the grace; the checkpoint on the way and the last one are whole."""
    monkeypatch.setattr(signals, "GRACE_SECONDS", 0.1)

    def slow() -> None:
        send()
        time.sleep(0.4)

    at(monkeypatch, "save-300", slow)
    run = train_run(stub_run(**TWO), tmp_path / "run")
    assert (run.status, run.agent_steps) == ("interrupted", 300)
    assert "given up" not in capfd.readouterr().err
    assert resume_run(run.path).status == "done"
    assert training_record(run.path) == undisturbed


def test_case_18_the_first_checkpoint_is_not_given_up_either(
    tmp_path, monkeypatch, undisturbed, capfd
):
    monkeypatch.setattr(signals, "GRACE_SECONDS", 1.0)

    def slow() -> None:
        send()
        time.sleep(1.5)

    at(monkeypatch, "save-0", slow)
    run = train_run(stub_run(**TWO), tmp_path / "run")
    assert (run.status, run.agent_steps) == ("interrupted", 0)
    assert "given up" not in capfd.readouterr().err
    assert resume_run(run.path).status == "done"
    assert training_record(run.path) == undisturbed


def test_case_18_a_signal_in_the_last_checkpoint_of_a_finished_run_changes_nothing(
    tmp_path, monkeypatch, undisturbed
):
    monkeypatch.setattr(signals, "GRACE_SECONDS", 0.1)

    def slow() -> None:
        send()
        time.sleep(0.4)

    at(monkeypatch, "save-400", slow)
    run = train_run(stub_run(**TWO), tmp_path / "run")
    assert (run.status, run.exit_code, status_of(run.path)) == ("done", 0, "done")
    assert training_record(run.path) == undisturbed


# -- the flag itself -------------------------------------------------------------------------------


@EACH
def test_case_19_the_first_signal_sets_the_flag_and_the_second_leaves_at_once(
    monkeypatch, capfd, name, code
):
    left = []
    monkeypatch.setattr(os, "_exit", left.append)
    monkeypatch.setattr(signals, "TOGETHER_SECONDS", 0.0)
    before = signal.getsignal(getattr(signal, name))
    with Stop() as stop:
        assert not stop and stop.exit_code == 0
        send(name)
        assert stop and stop.exit_code == code and left == []
        send(name)
        assert left == [code]
    assert signal.getsignal(getattr(signal, name)) is before
    # on a line of its own, though the status line before it has no end
    assert "\n\nsecond signal: leaving at once\n" in capfd.readouterr().err


def test_case_18_under_nohup_a_run_outlives_its_terminal():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stop() as stop:
            send("SIGHUP")
            assert not stop
    finally:
        signal.signal(signal.SIGHUP, before)


def test_case_19_a_signal_to_the_process_and_to_its_group_is_one(monkeypatch, capfd):
    """GNU timeout sends both, a few milliseconds apart."""
    left = []
    monkeypatch.setattr(os, "_exit", left.append)
    with Stop() as stop:
        send("SIGINT")
        time.sleep(0.01)
        send("SIGTERM")
        assert stop and stop.exit_code == 130 and left == []
        assert capfd.readouterr().err.count("\n\n") == 0  # nothing is said of the second
        monkeypatch.setattr(signals, "TOGETHER_SECONDS", 0.005)
        send("SIGINT")
        assert left == [130]


def test_a_signal_whose_words_nobody_can_read_is_no_error(monkeypatch):
    def gone(descriptor, text):
        raise BrokenPipeError

    monkeypatch.setattr(os, "write", gone)
    with Stop() as stop:
        send()
        assert stop


def called_by_c(function) -> None:
    """Calls it as MuJoCo calls for its warnings: an exception of it reaches nobody."""
    ctypes.CFUNCTYPE(None)(function)()


def waiting(last_words: str | None) -> float:
    """Seconds until a signal that comes in a callback of C code ends the work after it."""
    began = time.monotonic()
    with pytest.raises(Interrupted), Stop(last_words):

        def callback() -> None:
            send("SIGINT")
            time.sleep(1.0)

        called_by_c(callback)
        for _ in range(60):
            time.sleep(0.1)
    return time.monotonic() - began


@pytest.mark.parametrize("last_words", ["nothing was written", None])
def test_case_18_a_stop_that_is_lost_in_a_callback_of_c_code_is_raised_again(
    monkeypatch, capfd, last_words
):
    monkeypatch.setattr(signals, "GRACE_SECONDS", 0.2)
    hook = sys.unraisablehook
    assert waiting(last_words) < 4  # of 7
    told = capfd.readouterr().err
    assert "Exception ignored" not in told and "Traceback" not in told
    assert told.count("SIGINT:") == (1 if last_words else 2)  # said once, however often it is lost
    assert sys.unraisablehook is hook


def test_other_exceptions_that_reach_nobody_are_told_as_ever(monkeypatch):
    told = []
    monkeypatch.setattr(sys, "unraisablehook", lambda lost: told.append(lost.exc_type))
    with Stop():
        called_by_c(lambda: 1 / 0)
    assert told == [ZeroDivisionError]


# -- real processes --------------------------------------------------------------------------------


def train_command(out: Path, *options: str) -> list[str]:
    common = ["--preset", "debug", "--steps", "60", "--train.checkpoint-every-agent-steps", "25"]
    common += ["--env.max-episode-steps", "20", "--train.seed-agent-steps", "40"]
    common += ["--track.no-console", "--out", str(out)]
    return ["train", "tdmpc2", "gym:Pendulum-v1", *common, *options]


def test_case_19_a_second_interrupt_in_a_save_leaves_at_once_and_the_checkpoints_whole(tmp_path):
    command = train_command(tmp_path / "run")
    with forked(*command, prepare=partial(pause_at, "save-50:60")) as process:
        assert any("pausing at save-50" in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        assert any("SIGINT: saving, then stopping" in line for line in process.stderr)
        time.sleep(1.2 * signals.TOGETHER_SECONDS)
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
        assert time.monotonic() - began < 10  # of the 60 that the save would take
    newest, skipped = files.newest_verified(tmp_path / "run" / "checkpoints")
    assert (newest.name, skipped) == ("step-000000025", [])
    assert resume_run(tmp_path / "run").status == "done"
    assert status_of(tmp_path / "run") == "done"


def pause_and_chatter(where: str) -> None:
    """A plain line of progress at every step, as a long run writes them."""
    console.PLAIN_PERIOD_S = 0.0
    pause_at(where)


@pytest.mark.parametrize("shown", ["--track.no-console", "--track.console"])
def test_case_18_a_terminal_that_is_gone_keeps_nobody_from_saving(tmp_path, shown):
    """What is printed then reaches nobody: neither that nor the signal may cost the run."""
    command = train_command(tmp_path / "run", shown)
    with forked(*command, prepare=partial(pause_and_chatter, "step-45:2")) as process:
        assert any("pausing at step-45" in line for line in process.stderr)
        process.stderr.close()
        process.send_signal(signal.SIGHUP)
        assert process.wait(30) == 129
    assert status_of(tmp_path / "run") == "interrupted"
    newest, skipped = files.newest_verified(tmp_path / "run" / "checkpoints")
    assert newest.name >= "step-000000044" and skipped == []


def test_case_18_a_reader_that_is_gone_ends_no_run(tmp_path):
    """As in `forethought train ... | tee log`, where tee is killed."""
    command = train_command(tmp_path / "run", "--track.console")
    with forked(*command, prepare=partial(pause_and_chatter, "step-45:1")) as process:
        assert any("pausing at step-45" in line for line in process.stderr)
        process.stderr.close()
        assert process.wait(30) == 0
    assert status_of(tmp_path / "run") == "done"
    told = [event for event in RunDirectory.open(tmp_path / "run").events()]
    assert "BrokenPipeError" in next(e["reason"] for e in told if e["kind"] == "sink-failed")


def nobody_reads() -> None:
    """The other end of stderr is closed before the first word."""
    reader, writer = os.pipe()
    os.dup2(writer, 2)
    os.close(writer)
    os.close(reader)


def nothing_fits() -> None:
    """As a log on a full disk."""
    os.dup2(os.open("/dev/full", os.O_WRONLY), 2)


@pytest.mark.parametrize("prepare", [nobody_reads, nothing_fits])
def test_case_18_a_reader_that_was_never_there_ends_no_run(tmp_path, prepare):
    with forked(*train_command(tmp_path / "run", "--track.console"), prepare=prepare) as process:
        assert process.wait(30) == 0
    assert status_of(tmp_path / "run") == "done"


def test_case_18_a_signal_while_the_kernels_are_compiled_ends_with_one_sentence(tmp_path):
    compiler = tmp_path / "slow-cc"
    compiler.write_text(f"#!/bin/sh\ntouch {tmp_path / 'compiling'}\nexec sleep 60\n")
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    environment = {**os.environ, "CC": str(compiler), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    words = train_command(tmp_path / "run", "--agent.compile", "kernels")
    command = [sys.executable, "-m", "forethought", *words]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while not (tmp_path / "compiling").exists():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGUSR1)
        _, told = process.communicate(timeout=10)
    assert process.returncode == 143
    assert told == "\nSIGUSR1: stopped before the run began; nothing was written\n"
    assert not (tmp_path / "run").exists()
