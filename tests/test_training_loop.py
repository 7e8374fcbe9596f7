"""The loop: exact counts, equal seeds, what stops a run and what does not."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec

from forethought import files
from forethought.clock import Clock
from forethought.config import ConfigError, EnvConfig, TrainConfig
from forethought.envs import spec_of
from forethought.files import FileError
from forethought.seeding import Streams
from forethought.spaces import EnvError
from forethought.tracking import RunDirectory, Tracker, read_rows
from forethought.training import telling
from forethought.training.build import seed_phase
from forethought.training.device import resolve_device
from forethought.training.loop import train_run
from tests.stub_agent import StubAgent, give_scores, register, stub_run, training_record
from tests.stubs import CounterEnv, FaultyEnv


@pytest.fixture(autouse=True)
def _stub_agent(monkeypatch):
    register(monkeypatch)


def rows(run, name: str) -> list[dict[str, str]]:
    return read_rows(run.path / f"{name}.csv")[0]


def test_a_run_leaves_exact_counts(tmp_path):
    run = train_run(stub_run(steps=300, track={"every_agent_steps": 100}), tmp_path / "run")
    assert (run.status, run.exit_code, run.agent_steps) == ("done", 0, 300)
    train = rows(run, "train")
    assert [row["agent_steps"] for row in train] == ["100", "200", "300"]
    # 40 in the burst at step 60, then one per two steps: 40 + (300 - 60) / 2 = 160
    assert [row["updates"] for row in train] == ["60", "110", "160"]
    assert all(math.isfinite(float(row["loss"])) for row in train)
    episodes = rows(run, "episodes")
    assert [row["length_agent_steps"] for row in episodes] == ["30"] * 10
    assert {(row["terminated"], row["truncated"]) for row in episodes} == {("0", "1")}
    evaluations = rows(run, "eval")
    assert [(row["agent_steps"], row["evaluation_index"]) for row in evaluations] == [
        ("200", "1"),
        ("300", "2"),  # the end is always evaluated
    ]
    about = RunDirectory.open(run.path).run_json
    assert about["status"] == "done" and about["random_score"] == run.random_score


@pytest.mark.parametrize(
    ("length", "truncates", "terminated"),
    [(30, False, True), (30, True, False), (99, False, False)],
)
def test_replay_is_told_how_an_episode_ended(tmp_path, monkeypatch, length, truncates, terminated):
    """By itself, or at its own limit or the run's: a limit told as an end cuts the bootstrap."""
    spec = EnvSpec("stub/Counter-v0", CounterEnv, kwargs={"length": length, "truncates": truncates})
    monkeypatch.setitem(gymnasium.registry, spec.id, spec)
    stored, store = [], StubAgent.store_transition

    def listen(agent: StubAgent, row: dict[str, Any], env_index: int = 0) -> None:
        stored.append((row["terminated"], row["truncated"]))
        store(agent, row, env_index)

    monkeypatch.setattr(StubAgent, "store_transition", listen)
    train_run(stub_run(f"gym:{spec.id}", steps=60), tmp_path / "run")
    episode = [(False, False)] * 30 + [(terminated, not terminated)]
    assert stored[:62] == episode * 2


def test_only_a_burst_of_updates_is_a_phase(tmp_path, monkeypatch):
    phases = []
    tick = Tracker.tick

    def listen(tracker: Tracker, phase: str = "") -> None:
        phases.append(phase)
        tick(tracker, phase)

    monkeypatch.setattr(Tracker, "tick", listen)
    train_run(stub_run(steps=100), tmp_path / "run")
    learning = [phase for phase in phases if phase.startswith("learning")]
    # 40 updates at step 60; the last one that is owed is no burst, nor are those of later steps
    assert learning == [f"learning {made}/40 updates" for made in range(1, 39)]
    before = [phase for phase in phases if phase == "random play, learning begins at 60"]
    assert len(before) == 60  # which are no measure of learning
    assert phases.count("") == 40 + 2 + 20  # later steps, the burst's last updates, later ones


def test_an_agent_that_collects_by_itself_says_when_learning_begins(tmp_path, monkeypatch):
    phases = []
    monkeypatch.setattr(Tracker, "tick", lambda self, phase="": phases.append(phase))
    train_run(stub_run(steps=100, train={"seed_policy": "agent"}), tmp_path / "run")
    assert phases.count("collecting, learning begins at 60") == 60


def test_a_collapse_of_the_pace_becomes_an_event(tmp_path, monkeypatch):
    def wall_s(tracker: Tracker) -> float:
        """A second for each step, and a hundred for each after step 200."""
        steps = tracker._clock.agent_steps
        return steps + 99.0 * max(0, steps - 200)

    monkeypatch.setattr(Tracker, "wall_s", property(wall_s))
    run = train_run(stub_run(steps=300, track={"every_agent_steps": 10}), tmp_path / "run")
    told = [event for event in RunDirectory.open(run.path).events() if event["kind"] == "slow"]
    assert [event["agent_steps"] for event in told] == [230]
    assert "has slowed down" in told[0]["message"]


def test_an_evaluation_says_how_far_it_is(tmp_path, monkeypatch):
    """Two episodes of 30 decisions, played together."""
    phases = []
    monkeypatch.setattr(Tracker, "tick", lambda self, phase="": phases.append(phase))
    train_run(stub_run(steps=200), tmp_path / "run")
    random = [phase for phase in phases if phase.startswith("measuring")]
    assert random[0] == "measuring random play: 0/2 episodes, step 0"
    assert random[-1] == "measuring random play: 0/2 episodes, step 29"
    told = [phase for phase in phases if phase.startswith("evaluating")]
    assert len(told) == 30 and told[-1] == "evaluating: 0/2 episodes, step 29"


def test_frames_count_the_action_repeat_and_environments_add_up(tmp_path):
    layers = {"env": {"num_envs": 3, "action_repeat": 2}, "steps": 200}
    run = train_run(stub_run(**layers), tmp_path / "run")
    assert run.agent_steps == 201  # whole steps of three environments
    first = rows(run, "train")[0]
    assert (first["agent_steps"], first["env_frames"]) == ("51", "102")
    assert {row["env_index"] for row in rows(run, "episodes")} == {"0", "1", "2"}


def test_evaluating_more_often_never_changes_training(tmp_path):
    """dqn.md, finding 4: the evaluation's cadence is not in the training stream."""
    records = [
        training_record(
            train_run(
                stub_run(eval={"every_agent_steps": every, "episodes": episodes}),
                tmp_path / f"{every}",
            ).path
        )
        for every, episodes in ((0, 1), (60, 3))
    ]
    assert [len(record["eval"]) for record in records] == [1, 7]
    for part in ("train", "episodes", "agent", "agent tensors", "replay tensors", "loop tensors"):
        assert records[0][part] == records[1][part], part


def test_worker_processes_give_the_same_run_as_one_process(tmp_path):
    records = [
        training_record(
            train_run(
                stub_run(steps=120, env={"num_envs": 2, "workers": workers}),
                tmp_path / f"{workers}",
            ).path
        )
        for workers in (False, True)
    ]
    assert records[0] == records[1]


@pytest.mark.parametrize(
    ("random", "scores", "tags"),
    [(0.0, [10, 4, 4, 4], ["needs-inspection"]), (-21.0, [-4, -5, -5, -5], [])],
)
def test_a_run_whose_score_collapses_is_tagged(tmp_path, monkeypatch, random, scores, tags):
    """dqn.md, finding 3, with Pong's scores as the counterexample."""
    give_scores(monkeypatch, random, scores)
    run = train_run(stub_run(eval={"every_agent_steps": 100}), tmp_path / "run")
    assert RunDirectory.open(run.path).run_json["tags"] == tags
    kinds = [event["kind"] for event in RunDirectory.open(run.path).events()]
    assert kinds.count("evaluation-drop") == len(tags)


def test_an_error_in_the_update_reaches_the_caller(tmp_path):
    """airspace.md 3.1: programming errors are never swallowed."""
    with pytest.raises(RuntimeError, match="the update is broken"):
        train_run(stub_run(agent={"fail_at_update": 5}), tmp_path / "run")
    run = RunDirectory.open(tmp_path / "run")
    assert run.run_json["status"] == "failed"
    assert (
        run.run_json["error"] == run.events()[-1]["error"] == "RuntimeError: the update is broken"
    )
    assert run.events()[-1]["kind"] == "failed"


def test_the_last_words_of_a_run_have_thousands_commas(tmp_path, capsys):
    """Stopped and diverged alike; the number is that of a long run."""
    run = RunDirectory.create(tmp_path / "run", {}, "stub", "gym:Pendulum-v1", 1)
    clock = Clock(agent_steps=1234567, updates=2000)
    trainer = SimpleNamespace(run=run, clock=clock, collector=object())
    for status in ("interrupted", "diverged"):
        telling.say_farewell(trainer, status, False)
    stopped, diverged = capsys.readouterr().err.splitlines()
    assert stopped.startswith("Stopped at 1,234,567 agent steps, 2,000 updates. Continue with: ")
    assert diverged.startswith("Diverged at 1,234,567 agent steps; see ")


def test_finding_2_a_row_has_the_mean_over_every_update_of_its_interval(tmp_path, monkeypatch):
    """The loss of update n is n: with updates 1, 2, 3, 4 a row says 2.5."""
    real = StubAgent.train

    def numbered(agent, updates=1):
        return {**real(agent, updates), "loss": float(agent.updates)}

    monkeypatch.setattr(StubAgent, "train", numbered)
    run = train_run(stub_run(), tmp_path / "run")
    rows, _ = read_rows(run.path / "train.csv")
    before, seen = 0, 0
    for row in rows:
        now = int(row["updates"])
        if now > before:
            assert float(row["loss"]) == pytest.approx((before + 1 + now) / 2)
            seen += now - before > 2
        before = now
    assert seen >= 2


@pytest.mark.parametrize(
    ("training", "evaluation", "protocol", "offline", "told"),
    [
        (None, None, None, False, None),
        (
            1234,
            None,
            None,
            False,
            "in training after 1,234 decisions and in evaluation after 1,234",
        ),
        (50, 250, None, False, "in training after 50 decisions and in evaluation after 250 deci"),
        (None, 250, None, False, "Episodes end in evaluation after 250 decisions at most, what"),
        (50, None, "dopamine", False, "Episodes end in training after 50 decisions at most, w"),
        (50, None, None, True, "Episodes end in evaluation after 50 decisions at most, whatever"),
    ],
)
def test_a_run_tells_at_its_start_where_episodes_end_other_than_the_task_says(
    training, evaluation, protocol, offline, told
):
    """The preset debug says 50, which may be more than the task's own."""
    env = EnvConfig(max_episode_steps=training, eval_max_episode_steps=evaluation)
    config = SimpleNamespace(env=env, eval=SimpleNamespace(protocol=protocol))
    lines = telling._limits(SimpleNamespace(config=config, collector=None if offline else 1))
    assert lines == [] if told is None else told in lines[0]


@pytest.mark.parametrize(
    ("every", "steps", "offline", "told"),
    [
        (99, 100, False, None),
        (100, 100, False, "the best evaluation alone is saved (train.checkpoint_every_agent_steps"),
        (
            250_000,
            100,
            False,
            "is 250,000, the run has 100 agent steps): what was learned since is",
        ),
        (
            0,
            100,
            False,
            "Nothing is saved before the end (train.checkpoint_every_agent_steps is 0)",
        ),
        (500, 100, True, "(offline.checkpoint_every_updates is 500, the run has 100 updates)"),
        (99, 1, True, None),
    ],
)
def test_a_run_that_saves_nothing_on_its_way_says_so_at_its_start(every, steps, offline, told):
    """Presets of 50,000,000 decisions save every 250,000; with --steps 200000 that is never."""
    config = SimpleNamespace(is_offline=offline, steps=steps, offline=SimpleNamespace(updates=100))
    lines = telling._saved(SimpleNamespace(config=config, save_every=SimpleNamespace(period=every)))
    assert lines == [] if told is None else told in lines[0]


UNITS = {"agent_steps": "agent steps", "env_frames": "frames", "updates": "updates"}


@pytest.mark.parametrize(
    ("layers", "sentence"),
    [
        (
            {"steps": 100, "env": {"action_repeat": 2}, "train": {"seed_updates": 10}},
            "100 agent steps are 200 frames (2 each) and 30 updates (10 at once, then 0.5 a step "
            "after the first 60).",
        ),
        (
            {"steps": 90, "env": {"num_envs": 4}, "train": {"seed_updates": 0}},
            "92 agent steps are 92 frames (1 each) and 16 updates (0.5 a step after the first 60).",
        ),
        (
            {"steps": 50, "task": "multi:gym:Pendulum-v1,dmc:pendulum-swingup"},
            "50 agent steps are 75 frames (1.5 each) and 0 updates (40 at once, then 0.5 a step "
            "after the first 60).",
        ),
    ],
)
def test_a_run_begins_with_its_length_in_all_three_units(tmp_path, layers, sentence):
    """dqn.md 2.1. The run itself counts the same."""
    run = train_run(stub_run(**layers), tmp_path / "run")
    [about] = [e for e in RunDirectory.open(run.path).events() if e["kind"] == "about"]
    assert sentence in about["lines"]
    last = read_rows(run.path / "train.csv")[0][-1]
    counts = [f"{last[unit]} {word}" for unit, word in UNITS.items()]
    assert [count for count in counts if count not in sentence] == []


@pytest.fixture
def task_that_raises(monkeypatch):
    """A task whose episodes raise when they are reset with a given seed of the run's streams."""

    def register_it(stream: str, *index: int) -> str:
        options = {"fault": "raise", "only_seeds": (Streams(1).seed(stream, *index),)}
        spec = EnvSpec("stub/SomeSeeds-v0", FaultyEnv, kwargs=options)
        monkeypatch.setitem(gymnasium.registry, spec.id, spec)
        return f"gym:{spec.id}"

    return register_it


def test_a_training_environment_that_fails_stops_the_run(tmp_path, task_that_raises):
    with pytest.raises(EnvError, match=r"Environment 0 raised .* at step 3: the wheel came off"):
        train_run(stub_run(task_that_raises("env", 0, 4)), tmp_path / "run")
    assert RunDirectory.open(tmp_path / "run").run_json["status"] == "failed"


def fail_at(monkeypatch, stage: str, calls: set[int]) -> None:
    """The disk is full at the numbered passes of a stage of saving."""
    passes = iter(range(1000))

    def fault(name: str) -> None:
        if name == stage and next(passes) in calls:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "fault_point", fault)


def test_a_checkpoint_on_the_way_may_fail_and_training_is_the_same(tmp_path, monkeypatch, caplog):
    undisturbed = train_run(stub_run(), tmp_path / "a")
    fail_at(monkeypatch, "manifest", {1, 2})  # 0 is the checkpoint of the beginning
    run = train_run(stub_run(), tmp_path / "b")
    assert run.status == "done"
    events = [e for e in RunDirectory.open(run.path).events() if e["kind"] == "checkpoint-failed"]
    assert [event["failures"] for event in events] == [1, 2]
    assert "No space left on device" in events[0]["reason"]
    assert caplog.text.count("training goes on") == 2
    assert training_record(run.path) == training_record(undisturbed.path)


def test_the_last_checkpoint_must_not_fail(tmp_path, monkeypatch):
    fail_at(monkeypatch, "manifest", {1})
    layers = {"steps": 100, "train": {"checkpoint_every_agent_steps": 1000}}
    with pytest.raises(FileError, match="No space left on device"):
        train_run(stub_run(**layers, eval={"every_agent_steps": 0}), tmp_path / "run")
    assert RunDirectory.open(tmp_path / "run").run_json["status"] == "failed"


def test_what_cannot_be_written_beside_checkpoints_stops_no_training(tmp_path, monkeypatch, caplog):
    """The score of random play, a tag and the scores in run.json; the last status must be told."""
    give_scores(monkeypatch, 0.0, [10, 4, 4, 4])
    update = RunDirectory.update

    def full(self, **fields):
        if "status" not in fields:
            raise FileError("run.json could not be written (No space left on device).")
        update(self, **fields)

    monkeypatch.setattr(RunDirectory, "update", full)
    layers = {"train": {"checkpoint_every_agent_steps": 0}, "eval": {"every_agent_steps": 100}}
    run = train_run(stub_run(**layers), tmp_path / "run")
    assert (run.status, run.random_score) == ("done", 0.0)
    events = [e for e in RunDirectory.open(run.path).events() if e["kind"] == "write-failed"]
    assert [(event["what"], event["failures"]) for event in events] == [
        ("The score of random play in run.json", 1),
        ("The tag needs-inspection", 2),
        ("The scores in run.json", 3),
    ]
    assert caplog.text.count("was not written, training goes on") == 3


def test_a_score_that_could_not_be_written_is_written_with_the_next_checkpoint(
    tmp_path, monkeypatch
):
    update, failed = RunDirectory.update, []

    def full_once(self, **fields):
        if "random_score" in fields and not failed:
            failed.append(fields)
            raise OSError(28, "No space left on device")
        update(self, **fields)

    monkeypatch.setattr(RunDirectory, "update", full_once)
    run = train_run(stub_run(steps=100), tmp_path / "run")
    assert failed == [{"random_score": run.random_score}]
    assert RunDirectory.open(run.path).run_json["random_score"] == run.random_score


@pytest.mark.parametrize(
    ("steps", "train", "told"),
    [
        (59, {}, True),
        (60, {}, False),  # the burst follows the 60th step
        (60, {"seed_updates": 0}, True),
        (62, {"seed_updates": 0}, False),  # half an update per step
    ],
)
def test_a_run_too_short_to_learn_says_so_at_its_start(tmp_path, caplog, steps, train, told):
    run = train_run(stub_run(steps=steps, train=train), tmp_path / "run")
    assert (run.status, "This run will not learn" in caplog.text) == ("done", told)
    assert (int(rows(run, "train")[-1]["updates"]) == 0) is told
    kinds = [event["kind"] for event in RunDirectory.open(run.path).events()]
    assert kinds.count("never-learns") == told
    assert "updates-owed" not in kinds


def test_a_run_whose_replay_never_held_a_slice_says_so_at_its_end(tmp_path, caplog):
    """Whole episodes only, but the first would end at step 200: 40 + (100 - 60) / 2 are owed."""
    layers = {"env": {"max_episode_steps": 200}, "replay": {"kind": "episodes"}, "steps": 100}
    run = train_run(stub_run(**layers), tmp_path / "run")
    assert run.status == "done"
    assert "60 updates were never made: replay holds no whole slice" in caplog.text
    assert "no episode has ended" in caplog.text
    kinds = [event["kind"] for event in RunDirectory.open(run.path).events()]
    assert kinds.count("updates-owed") == 1 and "never-learns" not in kinds


def test_a_run_too_short_for_a_slice_says_so_at_its_end(tmp_path, caplog):
    """Transitions need no ended episode, so a limit of episodes would not help."""
    layers = {"env": {"max_episode_steps": 200}, "steps": 3, "agent": {"horizon": 5}}
    train = {"seed_agent_steps": 1, "seed_updates": 1}
    train_run(stub_run(**layers, train=train), tmp_path / "run")
    assert "for too few steps were made; train longer." in caplog.text


@pytest.mark.parametrize(
    ("given", "length", "num_envs", "steps"),
    [
        (None, 100, 1, 1000),
        (None, 500, 1, 2500),
        (None, 500, 8, 4000),  # one episode of each environment
        (None, None, 8, 1000),
        (30, 500, 8, 30),
    ],
)
def test_the_seed_phase_lets_every_environment_finish_an_episode(given, length, num_envs, steps):
    spec = replace(spec_of("gym:Pendulum-v1"), max_episode_steps=length)
    assert seed_phase(TrainConfig(seed_agent_steps=given), spec, num_envs) == (steps, steps)
    assert seed_phase(TrainConfig(given, seed_updates=7), spec, num_envs) == (steps, 7)


def test_a_failing_evaluation_episode_is_reported_in_the_row(tmp_path, task_that_raises):
    run = train_run(stub_run(task_that_raises("eval", 1, 0)), tmp_path / "run")
    found = [(row["n_failed"], row["eval_episodes"]) for row in rows(run, "eval")]
    assert found == [("1", "1"), ("0", "2")]


def test_what_an_agent_cannot_handle_leaves_no_directory(tmp_path):
    with pytest.raises(ConfigError):
        train_run(stub_run("gym:Pendulum-v9"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_device_that_is_not_there_is_refused_in_a_sentence():
    assert resolve_device("cpu").type == "cpu"
    with pytest.raises(ConfigError, match="device is tpu, but must be one of"):
        resolve_device("tpu")
    with pytest.raises(ConfigError, match="cuda:99 is not available here"):
        resolve_device("cuda:99")


def test_evaluation_episodes_have_a_limit_of_their_own(tmp_path):
    limits = {"max_episode_steps": 30, "eval_max_episode_steps": 7}
    run = train_run(stub_run(env=limits, steps=100), tmp_path / "run")
    assert rows(run, "eval")[0]["lengths"] == "7;7"
    assert rows(run, "eval")[0]["truncated"] == "1;1"
    assert rows(run, "episodes")[0]["length_agent_steps"] == "30"


def test_rewards_are_summed_raw(tmp_path):
    """Counter: rewards 1 to 5, so each episode returns 15 and succeeds."""
    run = train_run(stub_run("gym:tests.stubs:stub/Counter-v0", steps=100), tmp_path / "run")
    found = {(r["return"], r["success"], r["terminated"]) for r in rows(run, "episodes")}
    assert found == {("15.0", "1.0", "1")}
    assert np.isclose(run.random_score, 15.0)
