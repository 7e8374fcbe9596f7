"""Cases 20, 21, 28 and 30: sinks that fail, files that cannot be written, clocks that jump, lines
that were cut. None of it changes what is learned, and none of it is hidden."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
import torch

from forethought import files
from forethought.clock import Clock
from forethought.files import FileError
from forethought.tracking import CsvFile, RunDirectory, Tracker, read_rows, run_directory
from forethought.training import loop
from forethought.training.loop import resume_run, train_run
from tests.forked import forked
from tests.stub_agent import register, stub_run, training_record

METHODS = ("start", "train", "episode", "evaluation", "progress", "close")


@pytest.fixture(scope="module")
def without_sinks(tmp_path_factory):
    """The record of a run without any sink."""
    with pytest.MonkeyPatch.context() as patch:
        register(patch)
        return training_record(train_run(stub_run(), tmp_path_factory.mktemp("a") / "run").path)


def events(run, kind: str) -> list[dict]:
    return [event for event in RunDirectory.open(run.path).events() if event["kind"] == kind]


# -- case 20: sinks --------------------------------------------------------------------------------


class FailingSink:
    """Raises `error` in the named methods; in all others it disturbs the global random state."""

    def __init__(self, methods, error) -> None:
        self.methods, self.error, self.calls = methods, error, []

    def __getattr__(self, name):
        if name not in METHODS:
            raise AttributeError(name)

        def call(*arguments):
            self.calls.append(name)
            random.seed(1)
            np.random.seed(1)
            torch.default_generator.manual_seed(1)  # a tenth of the time of torch.manual_seed
            if name in self.methods:
                raise self.error

        return call


@pytest.mark.parametrize(
    ("methods", "error", "failures"),
    [
        (METHODS, ConnectionError("no network"), 5),  # of eight intervals: then it is disabled
        (("start",), ConnectionError("no network"), 5),
        (("train",), OSError(28, "No space left on device"), 5),
        (("episode",), TimeoutError("no answer"), 5),
        (("progress",), ValueError("no terminal"), 5),
        (("close",), RuntimeError("upload failed"), 1),
        ((), None, 0),
    ],
)
def test_case_20_a_sink_that_fails_leaves_the_same_run_bit_for_bit(
    methods, error, failures, without_sinks, tmp_path, monkeypatch, caplog
):
    """airspace.md, section 5, row 2.1: the run ends with the weights of one without that sink."""
    sink = FailingSink(methods, error)
    monkeypatch.setattr(loop, "make_sinks", lambda track, steps, unit: [sink])
    run = train_run(stub_run(), tmp_path / "run")
    assert run.status == "done"
    assert training_record(run.path) == without_sinks
    told = [event["sinks"] for event in events(run, "tracking-failures")]
    assert told == ([failures] if failures else [])
    assert len(events(run, "sink-disabled")) == (failures == 5)
    assert len([m for m in caplog.messages if m.startswith("FailingSink failed in ")]) == bool(
        failures
    )
    if methods == METHODS:
        assert sink.calls == ["start"] * 5
    if not methods:
        assert sink.calls.count("train") == 8 and sink.calls[-1] == "close"


# -- case 21: files --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["train.csv", "episodes.csv", "eval.csv"])
def test_case_21_a_csv_that_cannot_be_written_at_the_start_stops_before_training(
    tmp_path, monkeypatch, name
):
    create = RunDirectory.create

    def with_something_in_the_way(*arguments):
        run = create(*arguments)
        (run.path / name).mkdir()
        return run

    monkeypatch.setattr(RunDirectory, "create", with_something_in_the_way)
    monkeypatch.setattr(loop.Trainer, "begin", lambda trainer: pytest.fail("training began"))
    with pytest.raises(FileError, match=f"{name} could not be written"):
        train_run(stub_run(), tmp_path / "run")


def test_case_21_a_place_that_cannot_be_written_stops_with_one_sentence(tmp_path):
    """A file where the directory should be: permissions do not bind an administrator."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(FileError, match=r"file/run could not be created \(Not a directory\)"):
        train_run(stub_run(), tmp_path / "file" / "run")


def no_room() -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))


def test_case_21_a_full_disk_at_the_start_stops_before_training(tmp_path):
    """No file may hold a single byte: a real limit in a real process."""
    train = ["train", "tdmpc2", "gym:Pendulum-v1", "--preset", "debug"]
    with forked(*train, "--out", str(tmp_path / "run"), prepare=no_room) as process:
        told = process.stderr.read()
        assert process.wait(10) == 1
    assert "Traceback" not in told
    assert told.count("\n") == 1 and "could not be written (File too large)" in told


@contextlib.contextmanager
def files_of_at_most(size: int):
    """No file of this process may grow beyond `size` bytes: what a full disk does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_case_21_rows_and_events_wait_while_the_disk_is_full(
    without_sinks, tmp_path, monkeypatch, caplog
):
    """From step 120 to 280 nothing can be written: rows, events and two checkpoints."""
    with contextlib.ExitStack() as full:

        def fault(name: str) -> None:
            if name == "step-120":
                full.enter_context(files_of_at_most(0))
            if name == "step-280":
                full.close()

        monkeypatch.setattr(files, "fault_point", fault)
        run = train_run(stub_run(), tmp_path / "run")
    assert run.status == "done"
    assert training_record(run.path) == without_sinks
    assert caplog.text.count("the rows are kept and written later") == 1
    assert caplog.text.count("The checkpoint was not saved, training goes on") >= 1
    assert len(events(run, "checkpoint-failed")) >= 1  # written when there was room again
    [told] = events(run, "tracking-failures")
    assert told["csv"] >= 5  # train.csv at 150, 200, 250; episodes.csv at 150, 180, ...


def test_case_21_rows_that_never_found_room_are_in_the_checkpoint(tmp_path, monkeypatch):
    """The disk of train.csv fails to the end; the resumed run writes what is missing."""
    real = os.pwrite

    def full(descriptor, data, position):
        if position > 250:
            raise OSError(28, "No space left on device")
        return real(descriptor, data, position)

    whole = train_run(stub_run(steps=300), tmp_path / "whole")
    monkeypatch.setattr(os, "pwrite", full)
    run = train_run(stub_run(steps=200), tmp_path / "run")
    assert len(read_rows(run.path / "train.csv")[0]) < 4
    monkeypatch.setattr(os, "pwrite", real)
    resume_run(run.path, steps=300)
    ours, theirs = training_record(run.path), training_record(whole.path)
    assert ours["train"] == theirs["train"] and ours["episodes"] == theirs["episodes"]


# -- case 28: clocks -------------------------------------------------------------------------------


class BackwardsClock(datetime):
    """Each look at the wall clock is an hour before the last one."""

    looks = 0

    @classmethod
    def now(cls, tz=None):
        cls.looks += 1
        return datetime(2030, 1, 1, tzinfo=UTC) - timedelta(hours=cls.looks)


def test_case_28_a_wall_clock_that_goes_back_gives_no_negative_durations(
    without_sinks, tmp_path, monkeypatch
):
    monkeypatch.setattr(run_directory, "datetime", BackwardsClock)
    run = train_run(stub_run(), tmp_path / "run")
    assert BackwardsClock.looks > 10
    assert training_record(run.path) == without_sinks
    about = RunDirectory.open(run.path).run_json
    assert about["created_utc"] <= about["updated_utc"]
    catalog = json.loads((run.path / "checkpoints" / "catalog.json").read_text())
    stamps = [entry["timestamp"] for entry in catalog]
    assert stamps == sorted(stamps) and len(stamps) >= 2
    for name in ("train", "episodes", "eval"):
        walls = [float(row["wall_s"]) for row in read_rows(run.path / f"{name}.csv")[0]]
        assert walls == sorted(walls) and walls[0] >= 0
    for row in read_rows(run.path / "train.csv")[0]:
        assert float(row["ms_per_agent_step"]) >= 0 and float(row["env_frames_per_s"]) > 0
    walls = [event["wall_s"] for event in RunDirectory.open(run.path).events() if "wall_s" in event]
    assert walls == sorted(walls)


def test_case_28_wall_time_goes_on_after_a_resume_and_a_sleep(tmp_path):
    """8 s, then another process whose monotonic clock began elsewhere, 2 s later; no date."""
    seconds, path = [100.0], tmp_path / "run"
    run, clock = RunDirectory.create(path, {}, "stub", "gym:Stub-v0", 1), Clock()

    def row(tracker: Tracker, steps: int, after: float) -> None:
        seconds[0] += after
        clock.agent_steps = clock.updates = steps
        clock.env_frames = 2 * steps
        tracker.flush_train(clock)

    first = Tracker(run, [], clock, ("loss",), now=lambda: seconds[0])
    row(first, 1000, after=8.0)
    state = first.state()
    assert state["wall_s"] == 8.0
    seconds[0] = 3.0
    second = Tracker(run, [], clock, ("loss",), now=lambda: seconds[0])
    second.restore(state)
    row(second, 2000, after=2.0)
    one, two = read_rows(run.train_csv)[0]
    assert (one["wall_s"], two["wall_s"]) == ("8.0", "10.0")
    assert (one["ms_per_agent_step"], two["ms_per_agent_step"]) == ("8.0", "2.0")
    assert (two["env_frames_per_s"], two["updates_per_s"]) == ("1000.0", "500.0")
    assert float(two["peak_memory_mb"]) > 10


# -- case 30: half-written lines -------------------------------------------------------------------


def test_case_30_a_half_written_last_line_is_ignored_said_and_mended(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("a,b\n1,2\n3333333333,")
    rows, note = read_rows(path)
    assert rows == [{"a": "1", "b": "2"}]
    assert note == "x.csv: the half-written last line is ignored."
    CsvFile(path, ["a", "b"]).append({"a": 5, "b": 6})
    assert read_rows(path) == ([{"a": "1", "b": "2"}, {"a": "5", "b": "6"}], None)


def test_case_30_a_resume_mends_every_file_that_was_cut(tmp_path, caplog):
    run = train_run(stub_run(steps=100), tmp_path / "run")
    for name in ("train.csv", "episodes.csv", "eval.csv"):
        with (run.path / name).open("a") as file:
            file.write("130,13")
    with (run.path / "events.jsonl").open("a") as file:
        file.write('{"kind": "cut by a ki')
    directory = RunDirectory.open(run.path)
    before = directory.events()
    assert caplog.messages == ["events.jsonl: the half-written last line is ignored."]
    caplog.clear()
    resume_run(run.path, steps=200)
    whole = train_run(stub_run(steps=200), tmp_path / "whole")
    ours, theirs = training_record(run.path), training_record(whole.path)
    for name in ("train", "episodes"):
        assert ours[name] == theirs[name]
    after = directory.events()
    assert caplog.messages == []  # nothing is left to ignore
    assert after[: len(before)] == before
    assert after[len(before)]["kind"] == "events-mended"
    assert after[-1]["kind"] == "done"


def test_case_30_a_damaged_line_among_events_is_named(tmp_path, caplog):
    run = RunDirectory.create(tmp_path / "run", {}, "stub", "gym:Stub-v0", 1)
    run.event("a")
    with run.events_file.open("a") as file:
        file.write("not JSON\n")
    run.event("b")
    assert [event["kind"] for event in run.events()] == ["a", "b"]
    assert caplog.messages == ["events.jsonl: line 2 is damaged and ignored."]


def test_events_that_found_no_room_are_written_in_order_later(tmp_path, caplog):
    run = RunDirectory.create(tmp_path / "run", {}, "stub", "gym:Stub-v0", 1)
    run.event("a", n=1)
    size = run.events_file.stat().st_size
    with files_of_at_most(size + 10):  # room for a part of the next line
        run.event("b")
        run.event("c")
        assert run.events_file.stat().st_size == size
    run.event("d")
    assert [event["kind"] for event in run.events()] == ["a", "b", "c", "d"]
    assert len(caplog.messages) == 1 and "are kept and written later" in caplog.text
