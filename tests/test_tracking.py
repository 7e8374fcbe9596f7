"""The tracker: rows of training, episodes and evaluations, and what a resume makes of them."""

import json
import logging
import math
import os

import numpy as np
import pytest

from forethought.clock import Clock
from forethought.config import ForethoughtError
from forethought.files import FileError
from forethought.tracking import Tracker, read_rows
from forethought.tracking import csv_file as csv_module
from forethought.tracking.columns import EVALUATION
from tests.test_run_directory import new_run
from tests.tracking_stubs import METRICS, ListSink, play, without_times


def test_evaluation_rows_keep_every_episode(tmp_path):
    """Seed 004 item 12: lengths, seeds and truncation flags are not averaged away."""
    run, clock = new_run(tmp_path / "run"), Clock(agent_steps=10, env_frames=20)
    tracker = Tracker(run, [], clock, METRICS)
    tracker.evaluation(
        {
            "evaluation_index": 0,
            "eval_episodes": 2,
            "return_mean": 1.25,
            "returns": np.array([1.0, 1.5]),
            "lengths": [3, 5],
            "seeds": [11, 12],
            "truncated": [True, False],
        }
    )
    (row,), _ = read_rows(run.eval_csv)
    assert tuple(row) == EVALUATION
    assert (row["returns"], row["lengths"], row["truncated"]) == ("1.0;1.5", "3;5", "1;0")
    assert (row["agent_steps"], row["env_frames"]) == ("10", "20")


def test_an_interval_holds_means_maxima_and_the_number_of_skipped_updates(tmp_path):
    run, clock = new_run(tmp_path / "run"), Clock(agent_steps=1)
    tracker = Tracker(run, [], clock, METRICS)
    for loss, top in ((1.0, 5.0), (2.0, 9.0), (6.0, 7.0)):
        tracker.add({"loss": loss, "q_max": top})
    tracker.add({"nonfinite": 1.0})
    tracker.add({"nonfinite": 1.0})
    tracker.flush_train(clock)
    clock.agent_steps = 2
    tracker.flush_train(clock)
    first, second = read_rows(run.train_csv)[0]
    assert (first["loss"], first["q_max"], first["nonfinite_updates"]) == ("3.0", "9.0", "2")
    assert first["grad_norm"] == ""
    # nothing of the first interval is left in the second
    assert (second["loss"], second["q_max"], second["nonfinite_updates"]) == ("", "", "0")


def test_a_nan_is_never_hidden(tmp_path):
    run, clock = new_run(tmp_path / "run"), Clock(agent_steps=1)
    tracker = Tracker(run, [], clock, METRICS)
    for value in (1.0, math.nan, 2.0):
        tracker.add({"loss": value, "q_max": value})
    tracker.flush_train(clock)
    (row,), _ = read_rows(run.train_csv)
    assert (row["loss"], row["q_max"]) == ("nan", "nan")


def test_no_step_since_the_last_row_gives_no_second_row(tmp_path):
    run, clock = new_run(tmp_path / "run"), Clock()
    tracker = Tracker(run, [], clock, METRICS)
    play(tracker, clock, 1000)
    tracker.flush_train(clock)
    assert len(read_rows(run.train_csv)[0]) == 1


def test_an_undeclared_metric_and_a_column_of_the_tracker_itself_are_refused(tmp_path):
    tracker = Tracker(new_run(tmp_path / "run"), [], Clock(), METRICS)
    with pytest.raises(ForethoughtError, match=r"los was not declared\. Did you mean loss"):
        tracker.add({"los": 1.0})
    with pytest.raises(ForethoughtError, match="brings episodes"):
        tracker.evaluation({"episodes": 10})
    with pytest.raises(FileError, match=r"eval\.csv has no column return_man"):
        tracker.evaluation({"return_man": 1.0})


def test_rows_wait_for_a_full_disk_and_none_is_lost(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.WARNING, "forethought")
    run, clock, other = new_run(tmp_path / "run"), Clock(), ListSink()
    tracker = Tracker(run, [other], clock, METRICS)
    play(tracker, clock, 1000)
    real = os.pwrite

    def half_then_full(descriptor, data, position):
        real(descriptor, data[:7], position)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(csv_module.os, "pwrite", half_then_full)
    play(tracker, clock, 3000)
    state = json.loads(json.dumps(tracker.state()))
    monkeypatch.setattr(csv_module.os, "pwrite", real)
    play(tracker, clock, 4000)
    steps = [row["agent_steps"] for row in without_times(run.train_csv)]
    assert steps == ["1000", "2000", "3000", "4000"]
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text
    assert len(other.rows("train")) == 4
    # a checkpoint made while rows were waiting brings them back
    tracker.restore(state)
    clock.restore({**clock.state(), "agent_steps": 3000})
    play(tracker, clock, 4000)
    steps = [row["agent_steps"] for row in without_times(run.train_csv)]
    assert steps == ["1000", "2000", "3000", "4000"]


# -- resume ----------------------------------------------------------------------------------------


def test_a_resumed_tracker_writes_the_same_bytes_as_an_undisturbed_one(tmp_path):
    whole, clock = new_run(tmp_path / "whole"), Clock()
    play(Tracker(whole, [], clock, METRICS), clock, 5000)

    part, clock = new_run(tmp_path / "part"), Clock()
    first = Tracker(part, [], clock, METRICS)
    play(first, clock, 5000, stop=2345)  # in the middle of an interval
    saved = json.loads(json.dumps({"tracker": first.state(), "clock": clock.state()}))
    play(first, clock, 5000, stop=4567)  # lost: the process is killed here ...
    with part.train_csv.open("a") as file:
        file.write("5000,10000,50")  # ... in the middle of a line

    clock = Clock()
    clock.restore(saved["clock"])
    second = Tracker(part, [], clock, METRICS)
    second.restore(saved["tracker"])
    play(second, clock, 5000)
    for name in ("train.csv", "episodes.csv"):
        assert without_times(part.path / name) == without_times(whole.path / name)
    assert len(without_times(part.train_csv)) == 5


def test_a_resume_without_any_checkpoint_starts_the_files_anew(tmp_path):
    run, clock = new_run(tmp_path / "run"), Clock()
    play(Tracker(run, [], clock, METRICS), clock, 2000)
    clock = Clock()
    tracker = Tracker(run, [], clock, METRICS)
    tracker.restore(None)
    play(tracker, clock, 1000)
    assert [row["agent_steps"] for row in without_times(run.train_csv)] == ["1000"]
