"""TensorBoard, W&B and other sinks: they follow the CSV files and cannot disturb them."""

import logging
import math
import re
import subprocess
import sys

import pytest

from forethought.clock import Clock
from forethought.config import ConfigError, TrackConfig
from forethought.extras import install_extra
from forethought.tracking import Tracker, make_sinks, read_rows
from forethought.tracking.columns import EPISODE, train_columns
from forethought.tracking.console import ConsoleSink
from forethought.tracking.tensorboard import TensorBoardSink
from forethought.tracking.wandb import WandbSink
from tests.test_run_directory import new_run
from tests.tracking_stubs import METRICS, BrokenSink, FakeWandb, ListSink, play, without_times


@pytest.fixture
def fake_wandb(monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


# -- W&B and TensorBoard ---------------------------------------------------------------------------


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


def test_wandb_has_the_tags_of_the_run(tmp_path, fake_wandb):
    """Those that it has when it is begun or resumed, and those that it gets on the way."""
    run, clock = new_run(tmp_path / "run"), Clock()
    run.tag("imported")
    fake_wandb.tags = ("paper",)  # a person's own
    tracker = Tracker(run, [WandbSink("project")], clock, METRICS)
    tracker.start()
    assert "tags" not in fake_wandb.asked  # which would take WANDB_TAGS away
    assert fake_wandb.tags == ("paper", "imported")
    run.tag("needs-inspection")
    play(tracker, clock, 1000)
    assert fake_wandb.tags == ("paper", "imported", "needs-inspection")
    tracker.close()


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


def test_every_column_of_episodes_that_end_together_reaches_wandb_as_its_mean(tmp_path, fake_wandb):
    """Also those that only some tasks have, such as Atari's; counters are the last ones."""
    run, sink = new_run(tmp_path / "run"), WandbSink("project")
    sink.start(run)
    clock = {"agent_steps": 10, "env_frames": 40, "updates": 3, "wall_s": 1.0}
    for number, (total, clipped, lives) in enumerate([(10.0, 1.0, 5), (20.0, 5.0, 1)]):
        row = {"env_index": number, "seed": number, "return": total, "clipped_return": clipped}
        sink.episode({**clock, "episodes": 7 + number, **row, "lives_episodes": lives})
    sink.close()
    [(step, data)] = fake_wandb.logged
    assert (step, data["episode/count"], data["episode/episodes"]) == (40, 2, 8)
    assert data["episode/return"] == 15.0
    assert (data["episode/clipped_return"], data["episode/lives_episodes"]) == (3.0, 3.0)
    assert "episode/seed" not in data and "episode/env_index" not in data


def test_episodes_that_wandb_refused_do_not_pile_up(tmp_path, fake_wandb, monkeypatch):
    clock, sink = Clock(), WandbSink("project")
    tracker = Tracker(new_run(tmp_path / "run"), [sink], clock, METRICS)
    monkeypatch.setattr(fake_wandb, "log", lambda data, step: 1 / 0)
    play(tracker, clock, 2000)
    assert tracker.sink_failures == 3  # the episode of step 300, and a row in each interval
    monkeypatch.undo()
    tracker.close()
    assert fake_wandb.logged == [] and fake_wandb.finished


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


# -- choice and failure ----------------------------------------------------------------------------


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
    with pytest.raises(ConfigError, match=re.escape(install_extra(package))):
        make_sinks(TrackConfig(console=False, **{package: True}), 10)


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


def test_tracking_imports_no_torch_and_no_wandb():
    code = (
        "import sys, forethought.tracking, forethought.tracking.console\n"
        "import forethought.tracking.tensorboard, forethought.tracking.wandb\n"
        "found = {'torch', 'wandb', 'tensorboard'} & set(sys.modules)\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
