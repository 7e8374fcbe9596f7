"""Training with environments that fail: the run halts, or restarts them and stays exact."""

from __future__ import annotations

import os
import shutil
import signal
from functools import partial
from multiprocessing import active_children
from typing import Any

import gymnasium
import numpy as np
import pytest
import yaml
from gymnasium.envs.registration import EnvSpec

from forethought import files
from forethought.cli import main
from forethought.config import EnvConfig, to_dict
from forethought.envs import EnvError, EnvFailure
from forethought.files import FileError
from forethought.seeding import Streams
from forethought.tracking import RunDirectory, run_directory
from forethought.training.build import load_agent
from forethought.training.loop import Run, resume_run, train_run
from tests.faults.stubs import VARIABLE, ChosenFaults, Unbuildable, choose, task
from tests.stub_agent import StubAgent, register, stub_run, training_record

BOTH = pytest.mark.parametrize("workers", [False, True], ids=["in-process", "workers"])


def events(run: Run, kind: str = "env-restarted") -> list[dict[str, Any]]:
    return [e for e in RunDirectory.open(run.path).events() if e["kind"] == kind]


def restarting(fault: str, workers: bool = False, **layers: Any):
    """A run of two environments that restarts them: episodes of 10, of which `choose` picks some
    that fail at step 3."""
    env = {"num_envs": 2, "workers": workers, "on_env_error": "restart", **layers.pop("env", {})}
    return stub_run(task(fault), env=env, **{"steps": 101, **layers})


def check_restarted(fault: str, workers: bool, reason: str, path, monkeypatch) -> dict[str, Any]:
    """The second episode of environment 0 fails at step 3, in the run's 13th step.

    24 decisions are behind it then; that step adds only the one of environment 1, all later ones
    two again: 25, 27, ..., 49, 51, ..., 101. Returns the event.
    """
    choose(monkeypatch, [(0, 1)])
    run = train_run(restarting(fault, workers, env={"timeout_seconds": 1.0}), path)
    assert (run.status, run.agent_steps) == ("done", 101)
    record = training_record(run.path)
    assert [row["agent_steps"] for row in record["train"]] == ["51", "101"]
    assert record["train"][-1]["updates"] == "60"  # 40 + floor((101 - 60) / 2)
    zero, one = (
        [
            (row["length_agent_steps"], row["return"], row["truncated"])
            for row in record["episodes"]
            if row["env_index"] == env
        ]
        for env in "01"
    )
    # 51 steps: in environment 0 10, 2 and the one that failed, then 38 more
    assert zero == [("10", "55.0", "0"), ("2", "3.0", "1"), *[("10", "55.0", "0")] * 3]
    assert one == [("10", "55.0", "0")] * 5
    assert [row["episodes"] for row in record["episodes"]] == [str(n) for n in range(1, 11)]
    [event] = events(run)
    assert (event["env"], event["in_a_row"], event["total"]) == (0, 1, 1)
    assert (event["agent_steps"], reason in event["reason"]) == (25, True)
    check_slices(run)
    return event


def check_slices(run: Run) -> None:
    """Within a slice the count must go up by one, with the offset of one episode."""
    batch = load_agent(run.path, for_acting=False).replay.sample(4000)
    obs = batch.obs  # [L, B, 2]
    assert (obs[1:, :, 0] - obs[:-1, :, 0]).unique().tolist() == [1.0]
    assert (obs[:, :, 1] == obs[0, :, 1]).all()
    assert batch.reward.isfinite().all()


def test_case_13_a_bad_value_halts_the_run(tmp_path, monkeypatch):
    choose(monkeypatch, [(1, 0)])
    with pytest.raises(EnvFailure, match="The reward of environment 1 at step 3 is nan"):
        train_run(stub_run(task("nan-reward"), env={"num_envs": 2}), tmp_path / "run")
    about = RunDirectory.open(tmp_path / "run").run_json
    assert about["status"] == "failed"
    assert about["error"].startswith("The reward of environment 1 at step 3 is nan")


@pytest.mark.parametrize("fault", ["nan-reward", "nan-observation"])
def test_case_13_nothing_bad_is_stored_when_the_run_goes_on(fault, tmp_path, monkeypatch):
    reason = "The reward of environment 0 at step 3 is nan"
    if fault == "nan-observation":
        reason = "The observation of environment 0 at step 3 is not finite: it holds nan"
    check_restarted(fault, False, reason, tmp_path / "run", monkeypatch)


@BOTH
def test_case_15_an_environment_that_raises_is_restarted(workers, tmp_path, monkeypatch, caplog):
    reason = "Environment 0 raised RuntimeError at step 3: the wheel came off"
    event = check_restarted("raise", workers, reason, tmp_path / "run", monkeypatch)
    assert "stubs.py" in event["traceback"][0]
    said = f"Environment 0 failed and is built anew (restart 1 of at most 5 in a row): {reason}"
    assert said in caplog.text


def test_case_15_by_default_the_run_halts(tmp_path, monkeypatch):
    choose(monkeypatch, [(0, 1), (1, 1)])
    with pytest.raises(EnvFailure, match="Environment 0 raised RuntimeError at step 3") as caught:
        train_run(stub_run(task("raise"), env={"num_envs": 2}), tmp_path / "run")
    assert caught.value.__notes__[1].startswith("In the same step: Environment 1 raised")
    assert RunDirectory.open(tmp_path / "run").run_json["status"] == "failed"


def test_case_15_a_run_that_halts_ends_with_the_command_that_goes_on(tmp_path, monkeypatch, capsys):
    """Episode 5 of an environment alone begins at 50 steps; two more were taken in it."""
    choose(monkeypatch, [(0, 5)])
    config, path = tmp_path / "config.yaml", tmp_path / "run"
    config.write_text(yaml.safe_dump(to_dict(stub_run(task("raise")))))
    words = ["stub", task("raise"), "--config", str(config), "--out", str(path)]
    assert main(["train", *words]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[-1] == (
        f"Stopped by an error at 52 agent steps. When it is mended: forethought resume {path}"
    )
    sentence = "Environment 0 raised RuntimeError at step 3: the wheel came off"
    assert said.count(sentence) == 1 and said.count(said[-1]) == 1
    assert RunDirectory.open(path).run_json["error"] == sentence
    monkeypatch.delenv(VARIABLE)
    assert main(["resume", str(path)]) == 0


def test_case_15_a_run_that_fails_before_it_has_saved_is_begun_by_a_resume(tmp_path, monkeypatch):
    """Its directory holds its configuration, and nothing that could be lost."""
    choose(monkeypatch, [(0, 0)])
    path = tmp_path / "run"
    with pytest.raises(EnvFailure) as caught:
        train_run(stub_run(task("reset")), path)
    assert f"forethought resume {path}" in "".join(caught.value.__notes__)
    monkeypatch.delenv(VARIABLE)
    assert resume_run(path).status == "done"
    train_run(stub_run(task("reset")), tmp_path / "undisturbed")
    assert training_record(path) == training_record(tmp_path / "undisturbed")


def test_case_15_a_run_that_saves_only_at_its_end_is_offered_no_resume(tmp_path, monkeypatch):
    """It failed on the way: nothing was saved, and what it recorded is not cut off."""
    choose(monkeypatch, [(0, 5)])
    config = stub_run(task("raise"), train={"checkpoint_every_agent_steps": 0})
    with pytest.raises(EnvFailure) as caught:
        train_run(config, tmp_path / "run")
    assert "forethought resume" not in "".join(caught.value.__notes__)
    with pytest.raises(FileError, match="holds no usable checkpoint"):
        resume_run(tmp_path / "run")


def test_case_15_a_run_with_records_but_no_checkpoint_is_not_begun_anew(tmp_path):
    """Somebody deleted them: what it recorded must not be cut off."""
    run = train_run(stub_run(steps=100), tmp_path / "run")
    shutil.rmtree(run.path / "checkpoints")
    (run.path / "checkpoints").mkdir()
    with pytest.raises(FileError, match="holds no usable checkpoint"):
        resume_run(run.path)


def test_case_15_half_a_row_is_a_record_too(tmp_path):
    run = train_run(stub_run(steps=100), tmp_path / "run")
    shutil.rmtree(run.path / "checkpoints")
    (run.path / "checkpoints").mkdir()
    for table in ("train.csv", "episodes.csv", "eval.csv"):
        header = (run.path / table).read_text().splitlines(keepends=True)[0]
        (run.path / table).write_text(header)
    assert RunDirectory.open(run.path).unbegun
    with (run.path / "eval.csv").open("a") as file:
        file.write("100,")
    with pytest.raises(FileError, match="holds no usable checkpoint"):
        resume_run(run.path)


def test_case_15_what_cannot_be_looked_at_hides_no_error(tmp_path, monkeypatch):
    """Whether it can go on is unknown then, so the command is named: it will tell."""

    def unreadable(run):
        raise FileError("train.csv is a link")

    choose(monkeypatch, [(0, 5)])
    monkeypatch.setattr(RunDirectory, "unbegun", property(unreadable))
    config = stub_run(task("raise"), train={"checkpoint_every_agent_steps": 0})
    with pytest.raises(EnvFailure) as caught:
        train_run(config, tmp_path / "run")
    assert f"forethought resume {tmp_path / 'run'}" in "".join(caught.value.__notes__)


def test_case_15_a_kill_while_the_directory_is_made_leaves_room_for_the_same_command(
    tmp_path, monkeypatch
):
    """Everything but run.json is there, also halves of files; what is not ours stays refused."""
    path = tmp_path / "run"

    def kill(file, data):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(run_directory, "write_json", kill)
        train_run(stub_run(steps=100), path)
    half, mine = path / ".tmp-run.json-1", path / "notes.txt"
    half.write_text("{")
    assert {entry.name for entry in path.iterdir()} >= {"config.yaml", "checkpoints", "replay"}
    (path / "checkpoints" / "step-000000001").mkdir()
    with pytest.raises(FileError, match="is not empty, and not a run"):
        train_run(stub_run(steps=100), path)
    (path / "checkpoints" / "step-000000001").rmdir()
    mine.write_text("mine")
    with pytest.raises(FileError, match="is not empty, and not a run"):
        train_run(stub_run(steps=100), path)
    mine.unlink()
    assert train_run(stub_run(steps=100), path).status == "done"
    assert not half.exists()


@pytest.mark.parametrize("made", [[], ["checkpoints"], ["checkpoints", "replay"]])
def test_case_15_the_directory_may_be_left_at_any_stage(tmp_path, made):
    for name in made:
        (tmp_path / "run" / name).mkdir(parents=True)
    assert train_run(stub_run(steps=100), tmp_path / "run").status == "done"


@pytest.mark.parametrize("content", ["", '{"pid": 1, "ho', None])
def test_case_15_a_lock_that_was_cut_or_removed_is_free(tmp_path, content):
    """As a power cut leaves it; or as a person who follows the advice about another host's lock."""
    path = tmp_path / "run"
    for name in ("checkpoints", "replay"):
        (path / name).mkdir(parents=True)
    (path / "config.yaml").write_text(yaml.safe_dump(to_dict(stub_run(steps=1))))
    if content is not None:
        (path / "lock").write_text(content)
    assert train_run(stub_run(steps=100), path).status == "done"


def test_case_15_a_pipe_in_the_place_of_the_lock_is_refused_at_once(tmp_path):
    path = tmp_path / "run"
    for name in ("checkpoints", "replay"):
        (path / name).mkdir(parents=True)
    os.mkfifo(path / "lock")
    with pytest.raises(FileError, match="is not empty, and not a run"):
        train_run(stub_run(steps=100), path)


@pytest.mark.parametrize("folders", [(), ("checkpoints", "replay")])
@pytest.mark.parametrize("name", ["config.yaml", "lock"])
def test_case_15_a_file_of_a_person_is_never_taken_for_a_rest_of_ours(tmp_path, name, folders):
    path = tmp_path / "run"
    path.mkdir()
    for folder in folders:
        (path / folder).mkdir()
    (path / name).write_text("# my own settings\nsteps: 7\n")
    with pytest.raises(FileError, match="is not empty, and not a run"):
        train_run(stub_run(steps=100), path)
    assert (path / name).read_text() == "# my own settings\nsteps: 7\n"
    assert {entry.name for entry in path.iterdir()} == {name, *folders}


def test_case_15_of_two_that_begin_in_one_place_the_second_is_refused(tmp_path, monkeypatch):
    """Both have looked into the empty folder before either wrote."""
    train_run(stub_run(steps=100), tmp_path / "run")
    monkeypatch.setattr(run_directory, "_make", lambda out: out)
    before = (tmp_path / "run" / "config.yaml").read_bytes()
    with pytest.raises(FileError, match="already holds a run"):
        train_run(stub_run(steps=200), tmp_path / "run")
    assert (tmp_path / "run" / "config.yaml").read_bytes() == before


def test_case_15_the_agent_is_told_that_another_episode_began(tmp_path, monkeypatch):
    firsts = []
    act = StubAgent.act_batch

    def listen(self, obs, state, first, info, explore):
        if explore:
            firsts.append(first.tolist())
        return act(self, obs, state, first, info, explore)

    monkeypatch.setattr(StubAgent, "act_batch", listen)
    choose(monkeypatch, [(0, 1)])
    train_run(restarting("raise", train={"seed_agent_steps": 0}, steps=40), tmp_path / "run")
    # ten steps, an end in both, two steps, a failure in one
    both, none, one = [True, True], [False, False], [True, False]
    assert firsts[:15] == [both, *[none] * 9, both, none, none, one, none]


def test_case_15_environments_that_fail_in_the_same_step_are_all_restarted(tmp_path, monkeypatch):
    choose(monkeypatch, [(0, 1), (1, 1)])
    run = train_run(restarting("raise", steps=100), tmp_path / "run")
    assert run.agent_steps == 100  # the 13th step carried out nothing
    assert [(e["env"], e["agent_steps"], e["total"]) for e in events(run)] == [
        (0, 24, 1),
        (1, 24, 2),
    ]
    rows = training_record(run.path)["episodes"]
    assert [row["length_agent_steps"] for row in rows] == ["10", "10", "2", "2", *["10"] * 6]


@BOTH
@pytest.mark.parametrize("number", [0, 1], ids=["first", "later"])
def test_case_15_a_reset_that_fails_is_answered_by_the_next_episode(
    number, workers, tmp_path, monkeypatch
):
    """No episode began, so none is listed; its seed is not tried again."""
    choose(monkeypatch, [(0, number), (0, number + 1)])
    run = train_run(restarting("reset", workers, steps=60), tmp_path / "run")
    assert run.agent_steps == 60
    assert [(e["env"], e["in_a_row"]) for e in events(run)] == [(0, 1), (0, 2)]
    rows = training_record(run.path)["episodes"]
    assert [row["length_agent_steps"] for row in rows] == ["10"] * 6
    assert len({row["seed"] for row in rows}) == 6


def test_case_15_restarts_are_bounded(tmp_path, monkeypatch):
    choose(monkeypatch, [(0, number) for number in range(9)])
    config = restarting("raise", env={"max_restarts": 2})
    with pytest.raises(EnvFailure) as caught:
        train_run(config, tmp_path / "run")
    assert str(caught.value) == (
        "Environment 0 raised RuntimeError at step 3: the wheel came off; environment 0 was "
        "restarted 2 times in a row without a finished episode (env.max_restarts), so the run "
        "halts."
    )
    assert "stubs.py" in caught.value.__notes__[0]
    kinds = [e["kind"] for e in RunDirectory.open(tmp_path / "run").events()]
    assert kinds.count("env-restarted") == 2


def test_case_15_a_finished_episode_begins_the_count_anew(tmp_path, monkeypatch):
    choose(monkeypatch, [(0, number) for number in (0, 2, 4, 6)])
    run = train_run(restarting("raise", env={"max_restarts": 1}), tmp_path / "run")
    assert [(e["in_a_row"], e["total"]) for e in events(run)] == [(1, 1), (1, 2), (1, 3), (1, 4)]


def test_case_15_an_environment_that_cannot_be_built_anew_counts_too(tmp_path, monkeypatch):
    """Object 0 trains, 1 and 2 cannot be made, 3 fails at its first step: four failures."""
    monkeypatch.setattr(Unbuildable, "made", 0)
    monkeypatch.setattr(Unbuildable, "refused", (1, 2))
    monkeypatch.setattr("forethought.training.trainer.Trainer.play_randomly", lambda *_: None)
    env = {"on_env_error": "restart", "max_restarts": 3}
    with pytest.raises(EnvFailure, match=r"Environment 0 raised .* restarted 3 times in a row"):
        train_run(stub_run(task("unbuildable"), env=env), tmp_path / "run")
    reasons = [
        e["reason"]
        for e in RunDirectory.open(tmp_path / "run").events()
        if e["kind"] == "env-restarted"
    ]
    assert ["could not be built: OSError: no such rom" in r for r in reasons] == [False, True, True]
    assert Unbuildable.made == 4


def test_case_15_an_illegal_action_is_never_answered_by_a_restart(tmp_path, monkeypatch):
    def act(self, obs, state, first, info, explore):
        return np.full((len(obs), 1), 1.5, np.float32), state

    monkeypatch.setattr(StubAgent, "act_batch", act)
    choose(monkeypatch, [])
    with pytest.raises(
        EnvError, match=r"environment 0 at step .* lies outside its space \[-1, 1\]"
    ):
        train_run(restarting("raise", train={"seed_agent_steps": 4}), tmp_path / "run")
    kinds = [e["kind"] for e in RunDirectory.open(tmp_path / "run").events()]
    assert "env-restarted" not in kinds


@BOTH
def test_case_16_an_environment_that_hangs_is_restarted(workers, tmp_path, monkeypatch):
    reason = "Environment 0 did not finish step 3 within 1 s"
    check_restarted("hang", workers, reason, tmp_path / "run", monkeypatch)


def test_case_16_a_hang_in_an_evaluation_of_a_run_is_a_failed_episode(tmp_path, monkeypatch):
    monkeypatch.setenv("FAULTY_SEEDS", str(Streams(1).seed("eval", 1, 0)))
    run = train_run(
        stub_run(task("hang"), env={"timeout_seconds": 1.0}, steps=70), tmp_path / "run"
    )
    [row] = training_record(run.path)["eval"]
    assert (row["eval_episodes"], row["n_failed"], row["return_mean"]) == ("1", "1", "55.0")
    [event] = events(run, "evaluation-episodes-failed")
    assert "did not finish step 3 within 1 s" in event["reasons"][0]


def kill_worker_at(monkeypatch, moment: str, name: str = "env-0") -> None:
    """A real kill -9 of a worker when the run passes the moment."""

    def fault(reached: str) -> None:
        if reached == moment:
            [worker] = [child for child in active_children() if child.name == name]
            os.kill(worker.pid, signal.SIGKILL)

    monkeypatch.setattr(files, "fault_point", fault)


def test_case_17_a_killed_worker_is_named_with_its_signal_and_the_run_resumes(
    tmp_path, monkeypatch
):
    """By default the run halts; what it has saved goes on exactly, as it does without workers."""
    choose(monkeypatch, [])
    config, without = (
        stub_run(task("raise"), env={"num_envs": 2, "workers": workers}, steps=120)
        for workers in (True, False)
    )
    undisturbed = train_run(without, tmp_path / "undisturbed")
    kill_worker_at(monkeypatch, "step-104")
    with pytest.raises(
        EnvFailure, match=r"process \d+ of environment 0 was ended by SIGKILL during step 3;"
    ):
        train_run(config, tmp_path / "run")
    monkeypatch.undo()
    register(monkeypatch)
    assert resume_run(tmp_path / "run").status == "done"
    assert training_record(tmp_path / "run") == training_record(undisturbed.path)


def test_case_17_a_killed_worker_is_restarted(tmp_path, monkeypatch):
    """Killed after 12 steps, it is missed in the 13th."""
    choose(monkeypatch, [])
    kill_worker_at(monkeypatch, "step-24")
    run = train_run(restarting("raise", workers=True), tmp_path / "run")
    assert (run.status, run.agent_steps) == ("done", 101)
    [event] = events(run)
    assert "of environment 0 was ended by SIGKILL during step 3" in event["reason"]
    rows = [row for row in training_record(run.path)["episodes"] if row["env_index"] == "0"]
    assert [row["length_agent_steps"] for row in rows] == ["10", "2", "10", "10", "10"]
    check_slices(run)


def test_case_17_an_environment_that_kills_its_process_is_restarted(tmp_path, monkeypatch):
    check_restarted("kill", True, "was ended by SIGKILL", tmp_path / "run", monkeypatch)


@pytest.mark.parametrize("kind", ["transitions", "episodes"])
@pytest.mark.parametrize(
    ("length", "at", "horizon"), [(1, 1, 1), (2, 1, 1), (2, 2, 2), (3, 3, 1), (7, 4, 3)]
)
def test_case_23_no_slice_crosses_the_end_or_the_loss_of_an_episode(
    kind, length, at, horizon, tmp_path, monkeypatch
):
    """Every second episode of environment 0 is lost, two of three in environment 1; with a horizon
    of 3 they are shorter than a slice. The replay wraps several times.
    tests/test_replay_properties.py has the rule itself, with hypothesis."""
    lost = [(0, n) for n in range(0, 400, 2)] + [(1, n) for n in range(400) if n % 3]
    choose(monkeypatch, lost)
    spec = EnvSpec("fault/short-v0", partial(ChosenFaults, "raise", at, length))
    monkeypatch.setitem(gymnasium.registry, spec.id, spec)
    layers = {
        "agent": {"horizon": horizon, "batch_size": 4},
        "replay": {"kind": kind, "capacity_rows": 60, "block_rows": 7},
        "steps": max(120, 30 * length),
        "eval": {"every_agent_steps": 0, "episodes": 1},
    }
    env = {"num_envs": 2, "on_env_error": "restart"}
    run = train_run(stub_run("gym:fault/short-v0", env=env, **layers), tmp_path / "run")
    assert len(events(run)) > 20
    check_slices(run)


LOST = [(0, 1), (1, 3), (0, 5), (0, 6)]


@pytest.fixture(scope="module")
def restarted(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        register(patch)
        choose(patch, LOST)
        path = tmp_path_factory.mktemp("a") / "run"
        return train_run(restarting("raise", steps=200), path)


class Killed(BaseException):
    """Stands for kill -9: nothing after it may be saved."""


@pytest.mark.parametrize(
    ("moment", "workers"),
    [
        ("step-25", False),
        ("step-68", False),
        ("step-94", False),
        ("step-94", True),
        ("save-100", False),
    ],
)
def test_case_15_a_run_with_restarts_resumes_exactly(
    moment, workers, restarted, tmp_path, monkeypatch
):
    """Killed right after a restart (25; 94, the second in a row), between two, and in a save."""
    choose(monkeypatch, LOST)
    passes = []

    def fault(name: str) -> None:
        if name == moment and not passes:
            passes.append(name)
            raise Killed

    monkeypatch.setattr(files, "fault_point", fault)
    train = {"checkpoint_every_agent_steps": 25}
    with pytest.raises(Killed):
        train_run(restarting("raise", workers, steps=200, train=train), tmp_path / "run")
    resume_run(tmp_path / "run")
    ours, theirs = training_record(tmp_path / "run"), training_record(restarted.path)
    assert ours == theirs
    counts = [
        files.read_json(path / "checkpoints" / theirs["checkpoint"] / "loop.json")["collector"][
            "restarts"
        ]
        for path in (tmp_path / "run", restarted.path)
    ]
    assert counts[0] == counts[1] and counts[0]["total"] == 4


@pytest.mark.parametrize("fault", ["raise", "hang", "kill"])
def test_case_15_an_environment_that_fails_on_resume_is_restarted(fault, tmp_path, monkeypatch):
    """It stopped 5 steps into the second episode of each; stepped again, that of 1 fails at 3."""
    choose(monkeypatch, [])

    def fault_at(name: str) -> None:
        if name == "step-30":
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(files, "fault_point", fault_at)
    config = restarting(fault, workers=fault == "kill", env={"timeout_seconds": 1.0})
    run = train_run(config, tmp_path / "run")
    assert run.status == "interrupted"
    choose(monkeypatch, [(1, 1)])
    assert resume_run(run.path).status == "done"
    [resumed], [restart] = events(run, "resumed"), events(run)
    assert resumed["lost_episodes"] == [1] and restart["env"] == 1
    assert resumed["reasons"] == [restart["reason"]]
    rows = [row for row in training_record(run.path)["episodes"] if row["env_index"] == "1"]
    assert [row["length_agent_steps"] for row in rows] == ["10", "5", "10", "10", "10"]
    check_slices(run)


def test_case_15_five_restarts_are_allowed_unless_another_number_is_given():
    assert EnvConfig().allowed_restarts == 0
    assert EnvConfig(on_env_error="restart").allowed_restarts == 5
    assert EnvConfig(on_env_error="restart", max_restarts=2).allowed_restarts == 2
