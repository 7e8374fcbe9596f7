"""CSV files and sinks: one truth, and nothing that can disturb it."""

import io
import json
import logging
import math
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from forethought.clock import Clock
from forethought.config import ConfigError, ForethoughtError, TrackConfig
from forethought.files import FileError
from forethought.tracking import (
    TIME_COLUMNS,
    CsvFile,
    Tracker,
    make_sinks,
    read_rows,
)
from forethought.tracking import csv_file as csv_module
from forethought.tracking.columns import EPISODE, EVALUATION, train_columns
from forethought.tracking.console import ConsoleSink
from forethought.tracking.tensorboard import TensorBoardSink
from forethought.tracking.wandb import WandbSink
from tests.test_run_directory import new_run

METRICS = ("loss", "q_max", "grad_norm")


class ListSink:
    """Remembers every call."""

    def __init__(self):
        self.calls = []

    def start(self, run):
        self.calls.append(("start", run.path))

    def train(self, row):
        self.calls.append(("train", row))

    def episode(self, row):
        self.calls.append(("episode", row))

    def evaluation(self, row):
        self.calls.append(("evaluation", row))

    def close(self):
        self.calls.append(("close", None))

    def rows(self, kind):
        return [row for name, row in self.calls if name == kind]


class BrokenSink:
    """Raises in every call, as W&B does when the network is gone."""

    def __init__(self):
        self.calls = 0

    def __getattr__(self, name):
        def fail(*arguments):
            self.calls += 1
            raise ConnectionError("no network")

        if name in ("start", "train", "episode", "evaluation", "progress", "close"):
            return fail
        raise AttributeError(name)


class FakeWandb(types.ModuleType):
    """What `import wandb` gives in tests: keeps what it is told, one row per step as W&B does.

    What is logged at the step of the last row is merged into it, key by key.
    """

    def __init__(self):
        super().__init__("wandb")
        self.asked = {}
        self.logged = []
        self.finished = False

    def init(self, **options):
        self.asked = options
        return self

    def log(self, data, step):
        if self.logged and self.logged[-1][0] == step:
            self.logged[-1][1].update(data)
        else:
            self.logged.append((step, dict(data)))

    def finish(self):
        self.finished = True


@pytest.fixture
def fake_wandb(monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def play(tracker: Tracker, clock: Clock, steps: int, stop: int | None = None) -> None:
    """A stub of training: action repeat 2, an episode per 300 steps, a row per 1000 steps."""
    while clock.agent_steps < (stop or steps):
        clock.agent_steps += 1
        clock.env_frames += 2
        clock.updates += 1
        noise = math.sin(clock.agent_steps)
        tracker.add({"loss": 0.1 + noise, "q_max": noise, "grad_norm": 1.0})
        if clock.agent_steps % 300 == 0:
            clock.episodes += 1
            tracker.episode(
                {
                    "env_index": 0,
                    "return": np.float32(0.1) + clock.episodes,
                    "length_agent_steps": 300,
                    "terminated": False,
                    "truncated": True,
                    "seed": 2**31 - 1,
                }
            )
        if clock.agent_steps % 1000 == 0:
            tracker.flush_train(clock)
        tracker.tick("training")


def without_times(path: Path) -> list[dict[str, str]]:
    rows, note = read_rows(path)
    assert note is None
    return [{k: v for k, v in row.items() if k not in TIME_COLUMNS} for row in rows]


# -- rows and sinks --------------------------------------------------------------------------------


def test_three_thousand_steps_give_three_rows_with_finite_loss(tmp_path, fake_wandb):
    """Seed 004 item 2: one stream of rows for CSV and W&B, with the same keys."""
    run, clock = new_run(tmp_path / "run"), Clock()
    tracker = Tracker(run, [WandbSink("project")], clock, METRICS)
    play(tracker, clock, 3000)
    tracker.close()
    rows, note = read_rows(run.train_csv)
    assert note is None
    assert [row["agent_steps"] for row in rows] == ["1000", "2000", "3000"]
    assert all(math.isfinite(float(row["loss"])) for row in rows)
    assert tuple(rows[0]) == train_columns(METRICS)
    assert tuple(rows[0])[:5] == ("agent_steps", "env_frames", "updates", "episodes", "wall_s")
    sent = [data for _, data in fake_wandb.logged if "train/loss" in data]
    assert len(sent) == 3
    for row, data in zip(rows, sent):
        assert {key for key in data if "train/" in key} == {f"train/{name}" for name in row}
        assert all(float(cell) == data[f"train/{name}"] for name, cell in row.items())
    assert fake_wandb.finished


def test_wandb_steps_are_env_frames_and_never_go_back(tmp_path, fake_wandb):
    """Seed 004 item 9."""
    run, clock = new_run(tmp_path / "run"), Clock()
    tracker = Tracker(run, [WandbSink("project")], clock, METRICS)
    play(tracker, clock, 3000)
    tracker.evaluation({"evaluation_index": 0, "return_mean": 5.0, "returns": [4.0, 6.0]})
    steps = [step for step, _ in fake_wandb.logged]
    assert steps == sorted(steps)
    for step, data in fake_wandb.logged:
        assert {value for key, value in data.items() if key.endswith("/env_frames")} == {step}
    assert steps[-1] == 6000  # 3000 decisions of two frames each
    assert fake_wandb.logged[-1][1]["eval/return_mean"] == 5.0
    assert "eval/returns" not in fake_wandb.logged[-1][1]  # a list is no curve


def test_wandb_is_told_what_the_run_is_and_continues_it_by_id(tmp_path, fake_wandb):
    run = new_run(tmp_path / "run")
    WandbSink("project").start(run)
    assert fake_wandb.asked["project"] == "project"
    assert fake_wandb.asked["id"] == run.run_json["id"]
    assert fake_wandb.asked["resume"] == "allow"
    assert fake_wandb.asked["config"]["agent"]["lr"] == 3e-4
    assert "mode" not in fake_wandb.asked  # the environment decides


def test_episode_rows_reach_every_sink_with_the_value_of_the_csv(tmp_path, fake_wandb):
    """Seed 004 item 16."""
    run, clock, other = new_run(tmp_path / "run"), Clock(), ListSink()
    tracker = Tracker(run, [other, WandbSink("project")], clock, METRICS)
    play(tracker, clock, 600)
    tracker.close()
    rows, _ = read_rows(run.episodes_csv)
    assert tuple(rows[0]) == EPISODE
    assert [row["episodes"] for row in rows] == ["1", "2"]
    sent = [data["episode/return"] for _, data in fake_wandb.logged]
    assert [float(row["return"]) for row in rows] == sent
    assert sent == [row["return"] for row in other.rows("episode")]
    assert sent[0] == pytest.approx(1.1)
    assert rows[0]["success"] == ""  # the environment's info had none
    assert (rows[0]["terminated"], rows[0]["truncated"]) == ("0", "1")


def test_episodes_that_end_at_the_same_frame_reach_wandb_as_their_mean(tmp_path, fake_wandb):
    """W&B keeps one value per key and step; without the mean only the last would be left."""
    run, clock = new_run(tmp_path / "run"), Clock()
    tracker = Tracker(run, [WandbSink("project")], clock, METRICS)

    def end(env_frames, *episodes):
        clock.agent_steps, clock.env_frames = env_frames // 2, env_frames
        for i, (total, success) in enumerate(episodes):
            clock.episodes += 1
            tracker.episode({"env_index": i, "return": total, "success": success, "seed": 7 + i})

    end(20, (1.0, None), (2.0, 1.0), (6.0, 0.0))
    assert fake_wandb.logged == []  # more episodes may end at this frame
    end(40, (5.0, None))
    tracker.flush_train(clock)
    end(60, (8.0, None), (9.0, None))
    tracker.close()
    shown = ("return", "success", "count", "episodes")
    found = [
        (step, *(data.get(f"episode/{name}") for name in shown)) for step, data in fake_wandb.logged
    ]
    assert found == [(20, 3.0, 0.5, 3, 3), (40, 5.0, None, 1, 4), (60, 8.5, None, 2, 6)]
    assert fake_wandb.logged[1][1]["train/agent_steps"] == 20
    returns = [row["return"] for row in read_rows(run.episodes_csv)[0]]
    assert returns == ["1.0", "2.0", "6.0", "5.0", "8.0", "9.0"]
    assert fake_wandb.finished


def test_episodes_that_wandb_refused_do_not_pile_up(tmp_path, fake_wandb, monkeypatch):
    clock, sink = Clock(), WandbSink("project")
    tracker = Tracker(new_run(tmp_path / "run"), [sink], clock, METRICS)
    monkeypatch.setattr(fake_wandb, "log", lambda data, step: 1 / 0)
    play(tracker, clock, 2000)
    assert tracker.sink_failures == 3  # the episode of step 300, and a row in each interval
    monkeypatch.undo()
    tracker.close()
    assert fake_wandb.logged == [] and fake_wandb.finished


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


# -- failing sinks ---------------------------------------------------------------------------------


def test_a_sink_that_always_raises_changes_nothing_is_warned_once_and_disabled(tmp_path, caplog):
    """Seed 000 row 2.1."""
    caplog.set_level(logging.WARNING, "forethought")
    broken, healthy = BrokenSink(), ListSink()
    runs = {}
    for name, sinks in (("with", [broken, healthy]), ("without", [])):
        runs[name], clock = new_run(tmp_path / name), Clock()
        tracker = Tracker(runs[name], sinks, clock, METRICS)
        tracker.start()
        play(tracker, clock, 8000)
        tracker.close()
        if name == "with":
            assert tracker.sink_failures == 5
    for file in ("train.csv", "episodes.csv"):
        expected = without_times(runs["without"].path / file)
        assert without_times(runs["with"].path / file) == expected
    assert broken.calls == 5  # one in each of five intervals, then never again
    assert [record.message for record in caplog.records] == [
        "BrokenSink failed in start (ConnectionError: no network); "
        "training goes on, it is tried again at the next interval."
    ]
    assert len(healthy.rows("train")) == 8
    kinds = [event["kind"] for event in runs["with"].events()]
    assert kinds == ["sink-failed", "sink-disabled", "tracking-failures"]


def test_a_sink_that_recovers_goes_on_at_the_next_interval(tmp_path):
    class Shaky(ListSink):
        def train(self, row):
            if row["agent_steps"] == 2000:
                raise TimeoutError
            super().train(row)

    shaky, clock = Shaky(), Clock()
    tracker = Tracker(new_run(tmp_path / "run"), [shaky], clock, METRICS)
    play(tracker, clock, 4000)
    tracker.close()
    assert [row["agent_steps"] for row in shaky.rows("train")] == [1000, 3000, 4000]
    # episodes ended at 2100, 2400 and 2700, while the sink was left alone
    episodes = [row["agent_steps"] for row in shaky.rows("episode")]
    assert 1800 in episodes
    assert 2400 not in episodes
    assert 3300 in episodes
    assert tracker.sink_failures == 1
    assert shaky.calls[-1] == ("close", None)


def test_a_sink_cannot_change_what_the_next_one_sees(tmp_path):
    class Vandal(ListSink):
        def train(self, row):
            row.clear()

    other, clock = ListSink(), Clock()
    tracker = Tracker(new_run(tmp_path / "run"), [Vandal(), other], clock, METRICS)
    play(tracker, clock, 1000)
    assert other.rows("train")[0]["agent_steps"] == 1000


def test_the_csv_has_a_row_before_any_other_sink_sees_it(tmp_path):
    run, clock = new_run(tmp_path / "run"), Clock()

    class Reader(ListSink):
        def train(self, row):
            super().train(len(read_rows(run.train_csv)[0]))

    reader = Reader()
    play(Tracker(run, [reader], clock, METRICS), clock, 2000)
    assert reader.rows("train") == [1, 2]


def test_an_interrupt_is_not_a_failing_sink(tmp_path):
    class Interrupted(ListSink):
        def train(self, row):
            raise KeyboardInterrupt

    clock = Clock()
    tracker = Tracker(new_run(tmp_path / "run"), [Interrupted()], clock, METRICS)
    with pytest.raises(KeyboardInterrupt):
        play(tracker, clock, 1000)


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


# -- resume and time -------------------------------------------------------------------------------


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


def test_wall_time_is_monotonic_and_continues_after_a_resume(tmp_path, monkeypatch):
    """Reliability case 28: the date may jump; durations may not."""
    seconds = [100.0]
    monkeypatch.setattr("time.time", lambda: -1e9)
    run, clock = new_run(tmp_path / "run"), Clock()
    tracker = Tracker(run, [], clock, METRICS, now=lambda: seconds[0])
    seconds[0] += 8.0
    play(tracker, clock, 1000)
    state = tracker.state()
    assert state["wall_s"] == 8.0

    seconds[0] = 3.0  # another process: its monotonic clock began elsewhere
    tracker = Tracker(run, [], clock, METRICS, now=lambda: seconds[0])
    tracker.restore(state)
    seconds[0] += 2.0
    play(tracker, clock, 2000)
    first, second = read_rows(run.train_csv)[0]
    assert (first["wall_s"], second["wall_s"]) == ("8.0", "10.0")
    assert first["ms_per_agent_step"] == "8.0"
    assert second["ms_per_agent_step"] == "2.0"
    assert second["env_frames_per_s"] == "1000.0"
    assert second["updates_per_s"] == "500.0"
    assert float(second["peak_memory_mb"]) > 10


# -- CSV files -------------------------------------------------------------------------------------


def test_cells_are_exact_and_read_back(tmp_path):
    file = CsvFile(tmp_path / "x.csv", ["a", "b", "c"])
    file.append({"a": 0.1 + 0.2, "b": None, "c": 'two, "quoted"\nlines'})
    file.append({"a": np.float32(0.1), "b": True, "c": math.inf})
    rows, note = read_rows(tmp_path / "x.csv")
    assert note is None
    assert rows[0] == {"a": "0.30000000000000004", "b": "", "c": 'two, "quoted" lines'}
    assert rows[1] == {"a": "0.10000000149011612", "b": "1", "c": "inf"}
    assert (tmp_path / "x.csv").read_bytes().count(b"\n") == 3


def test_a_half_written_last_line_is_ignored_and_said(tmp_path):
    """Reliability case 30."""
    path = tmp_path / "x.csv"
    path.write_text("a,b\n1,2\n3333333333,")
    rows, note = read_rows(path)
    assert rows == [{"a": "1", "b": "2"}]
    assert note == "x.csv: the half-written last line is ignored."
    CsvFile(path, ["a", "b"]).append({"a": 5, "b": 6})
    assert read_rows(path) == ([{"a": "1", "b": "2"}, {"a": "5", "b": "6"}], None)


def test_a_damaged_line_is_named(tmp_path):
    (tmp_path / "x.csv").write_text("a,b\n1,2\n3\n5,6\n")
    with pytest.raises(FileError, match="line 3 has 1 cells, but the header has 2"):
        read_rows(tmp_path / "x.csv")


def test_cut_drops_later_rows_and_says_when_earlier_ones_are_missing(tmp_path):
    file = CsvFile(tmp_path / "x.csv", ["a"])
    file.append({"a": 1})
    state = file.state()
    assert state["bytes"] == len("a\n1\n")
    file.append({"a": 2})
    assert file.cut(state) is None
    assert (tmp_path / "x.csv").read_text() == "a\n1\n"
    (tmp_path / "x.csv").write_text("a\n")
    assert CsvFile(tmp_path / "x.csv", ["a"]).cut(state) == (
        "x.csv has lost 2 bytes of rows since then."
    )


def test_a_file_with_other_columns_is_refused(tmp_path):
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(FileError, match=r"x\.csv has other columns"):
        CsvFile(tmp_path / "x.csv", ["a", "c"])
    with pytest.raises(FileError, match="column a twice"):
        CsvFile(tmp_path / "y.csv", ["a", "a"])


def test_a_csv_that_cannot_be_opened_stops_before_training(tmp_path):
    run = new_run(tmp_path / "run")
    run.train_csv.mkdir()
    with pytest.raises(FileError, match=r"train\.csv could not be written"):
        Tracker(run, [], Clock(), METRICS)


# -- console, TensorBoard, choice of sinks ---------------------------------------------------------


def console_sink(tmp_path, terminal, seconds, steps=1000, width=160):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=width, _environ={})
    sink = ConsoleSink(steps, console, now=lambda: seconds[0])
    sink.start(new_run(tmp_path / "run"))
    return sink, out


def shown(out):
    """What a terminal was sent, without colours and movements of the cursor."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())


def test_without_a_terminal_a_plain_line_comes_now_and_then(tmp_path):
    seconds = [0.0]
    sink, out = console_sink(tmp_path, False, seconds)
    sink.episode({"return": 12.34})
    sink.evaluation({"return_mean": 56.78})
    for step in range(300):  # ten steps a second, for thirty seconds
        sink.progress(step, "")
        seconds[0] += 0.1
    lines = out.getvalue().splitlines()
    assert len(lines) == 2
    assert "\x1b" not in out.getvalue()
    assert lines[0].startswith(" 10% · stub gym:Stub-v0 · 10")
    assert "10.0/s" in lines[0]
    assert "ETA 0:01:30" in lines[0]  # 900 steps are left
    assert lines[0].endswith("return 12.3 · eval 56.8")


def test_a_terminal_is_redrawn_at_most_four_times_a_second(tmp_path, monkeypatch):
    seconds = [0.0]
    sink, out = console_sink(tmp_path, True, seconds)
    draws = []
    draw = sink._draw
    monkeypatch.setattr(sink, "_draw", lambda: (draws.append(seconds[0]), draw()))
    for step in range(1000):  # two seconds
        sink.progress(step, "")
        seconds[0] += 0.002
    assert 7 <= len(draws) <= 8
    sink.progress(1000, "")
    sink.close()
    assert re.search("100% ━{24} 1,000/1,000 · ", shown(out))
    assert "\x1b[?25h" in out.getvalue()  # the cursor is visible again


@pytest.mark.parametrize("width", [60, 80, 100])
def test_the_live_line_fits_the_terminal(tmp_path, width):
    seconds = [0.0]
    sink, out = console_sink(tmp_path, True, seconds, steps=1_000_000, width=width)
    sink.episode({"return": 812.34})
    sink.evaluation({"return_mean": 756.78})
    sink.progress(450_000, "")
    seconds[0] = 10.0
    sink.progress(450_100, "")  # 549,900 steps are left at 10 a second
    line = shown(out).split("\r")[-1].rstrip()
    assert len(line) < width
    assert line.startswith(" 45% ") and "450,100/1,000,000" in line
    assert line.endswith("ETA 15:16:30 · return 812.3 · eval 756.8") or width == 60
    assert width == 60 or ("━━━━" in line) == (width == 100)  # the bar is what gives way
    assert "…" not in line and "stub" not in line
    seconds[0] = 20.0
    sink.progress(450_100, "evaluating")
    line = shown(out).split("\r")[-1].rstrip()
    assert len(line) < width and line.endswith("eval 756.8 · evaluating")


def test_a_phase_shows_no_speed_and_leaves_none_behind(tmp_path):
    seconds = [0.0]
    sink, out = console_sink(tmp_path, False, seconds)
    for at, step, phase in [
        (0, 0, ""),
        (10, 100, ""),  # ten steps a second
        (50, 100, "learning 1,691/2,500 updates"),
        (60, 200, ""),
    ]:
        seconds[0] = at
        sink.progress(step, phase)
    before, burst, after = out.getvalue().splitlines()
    assert "10.0/s · ETA 0:01:30" in before
    assert burst.endswith("100/1,000 agent steps · learning 1,691/2,500 updates")
    assert "10.0/s · ETA 0:01:20" in after  # the forty seconds of the burst do not count


def test_the_last_line_names_no_phase(tmp_path):
    seconds = [0.0]
    sink, out = console_sink(tmp_path, False, seconds)
    sink.progress(1000, "evaluating")
    sink.close()
    assert out.getvalue() == "100% · stub gym:Stub-v0 · 1,000/1,000 agent steps\n"


def test_a_resumed_run_does_not_count_old_steps_as_speed(tmp_path):
    seconds = [0.0]
    sink, out = console_sink(tmp_path, False, seconds, steps=2000)
    sink.progress(1000, "")
    seconds[0] = 10.0
    sink.progress(1050, "")
    assert "· 5.0/s" in out.getvalue()


def test_tensorboard_gets_the_rows_over_env_frames(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run, clock = new_run(tmp_path / "run"), Clock()
    tracker = Tracker(run, [TensorBoardSink()], clock, METRICS)
    play(tracker, clock, 2000)
    tracker.close()
    assert tracker.sink_failures == 0
    events = EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    curve = events.Scalars("train/loss")
    assert [point.step for point in curve] == [2000, 4000]
    rows = without_times(run.train_csv)
    values = [point.value for point in curve]
    assert values == pytest.approx([float(row["loss"]) for row in rows], rel=1e-6)
    assert len(events.Scalars("episode/return")) == 6


def test_only_the_sinks_asked_for_are_made(tmp_path):
    assert make_sinks(TrackConfig(console=False), 10) == []
    track = TrackConfig(console=True, tensorboard=True, wandb=True, wandb_project="p")
    kinds = [type(sink) for sink in make_sinks(track, 10)]
    assert kinds == [ConsoleSink, TensorBoardSink, WandbSink]


@pytest.mark.parametrize("package", ["wandb", "tensorboard"])
def test_a_missing_extra_is_an_error_before_work_begins(monkeypatch, package):
    monkeypatch.setattr(
        "forethought.tracking.sinks.find_spec", lambda name: None if name == package else object()
    )
    with pytest.raises(ConfigError, match=rf"pip install 'forethought\[{package}\]'"):
        make_sinks(TrackConfig(console=False, **{package: True}), 10)


def test_tracking_imports_no_torch_and_no_wandb():
    code = (
        "import sys, forethought.tracking, forethought.tracking.console\n"
        "import forethought.tracking.tensorboard, forethought.tracking.wandb\n"
        "found = {'torch', 'wandb', 'tensorboard'} & set(sys.modules)\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
