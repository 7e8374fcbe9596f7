"""Videos: files that are whole or absent, sinks that get them, and training that never notices."""

from __future__ import annotations

import importlib.util
import logging
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import imageio.v2 as imageio
import imageio_ffmpeg
import numpy as np
import pytest

from forethought.clock import Clock
from forethought.config import ConfigError, EvalConfig
from forethought.envs import EpisodeLog
from forethought.extras import install_extra
from forethought.tracking import RunDirectory, Tracker
from forethought.tracking.tensorboard import TensorBoardSink
from forethought.tracking.video import (
    VideoError,
    check_file,
    preview,
    require_video,
    write_video,
)
from forethought.tracking.wandb import WandbSink
from forethought.training import videos
from forethought.training.loop import train_run
from tests.stub_agent import register, stub_run, training_record
from tests.videos import frame

GREY = "gym:tests.pictures:pictures/Grey-v0"


@pytest.fixture(autouse=True)
def _stub_agent(monkeypatch):
    register(monkeypatch)


def picture(grey: int, height: int = 400, width: int = 400) -> np.ndarray:
    return np.full((height, width, 3), grey, np.uint8)


def write(path: Path, count: int = 10, fps: float = 20, **size: int) -> Path:
    with write_video(path, fps) as add:
        for number in range(count):
            add(picture(20 * (number % 12), **size), [])
    return path


# -- files -----------------------------------------------------------------------------------------


def test_a_video_has_every_picture_at_the_rate_that_was_asked_for(tmp_path):
    path = write(tmp_path / "a.mp4", count=10, fps=20)
    count, seconds = imageio_ffmpeg.count_frames_and_secs(path)
    assert (count, seconds) == (10, pytest.approx(0.5))
    assert frame(path, 3).mean() == pytest.approx(60, abs=3)
    assert frame(path, 9).mean() == pytest.approx(180, abs=3)
    assert [file.name for file in tmp_path.iterdir()] == ["a.mp4"]


def test_odd_sides_become_even_and_small_pictures_large(tmp_path):
    path = write(tmp_path / "odd.mp4", count=2, height=401, width=403)
    assert frame(path, 0).shape == (402, 404, 3)
    path = write(tmp_path / "small.mp4", count=2, height=33, width=50)
    assert frame(path, 0).shape == (330, 500, 3)  # ten times: the first factor that reaches 320


@pytest.mark.parametrize(
    ("fps", "given", "kept", "milliseconds"),
    # The last three cannot be shown as they are: the format counts in hundredths of a second.
    [
        (50, 10, 5, 40),
        (20, 4, 4, 50),
        (30, 90, 75, 40),
        (15, 30, 28, 70),
        (60, 60, 25, 40),
        (1 / 0.07, 14, 14, 70),
    ],
)
def test_a_gif_drops_pictures_rather_than_time(tmp_path, fps, given, kept, milliseconds):
    path = write(tmp_path / "a.gif", count=given, fps=fps)
    with imageio.get_reader(path) as reader:
        assert len(reader) == kept
        assert reader.get_meta_data()["duration"] == milliseconds
    assert kept * milliseconds / 1000 == pytest.approx(given / fps, abs=milliseconds / 1000)


def test_a_caption_stands_below_the_picture_and_shrinks_to_fit(tmp_path):
    path = tmp_path / "a.mp4"
    with write_video(path, 10) as add:
        add(picture(100), ["return 3", "short"])
        add(picture(100), ["return 3", "x" * 60])
    shown = frame(path, 1)
    assert shown.shape == (444, 400, 3)  # two lines of 19 pixels and a margin
    assert shown[:390].mean() == pytest.approx(100, abs=3)
    text = shown[402:]
    assert text.max() > 180 and text[:, -4:].max() < 80  # bright letters, dark margin


def test_a_video_that_fails_leaves_the_older_one(tmp_path):
    path = write(tmp_path / "a.mp4", count=2)
    before = path.read_bytes()
    with pytest.raises(KeyError), write_video(path, 20) as add:
        add(picture(0), [])
        raise KeyError("the caller's own error passes as it is")
    with pytest.raises(VideoError, match=r"a\.mp4 could not be written"):  # noqa: SIM117
        with write_video(path, 20) as add:
            add(picture(0), [])
            add(picture(0, height=500), [])  # another size
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["a.mp4"]


@pytest.mark.parametrize(("suffix", "fps"), [("mp4", float("inf")), ("gif", 1e-5)])
def test_a_rate_that_the_format_cannot_hold_is_one_sentence(tmp_path, suffix, fps):
    with pytest.raises(VideoError, match="could not be written"):
        write(tmp_path / f"a.{suffix}", count=2, fps=fps)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", ["mp4", "gif"])
def test_a_full_disk_leaves_the_older_video_and_says_so(tmp_path, suffix):
    """Neither ffmpeg nor Pillow can write more than some kilobytes: a process of its own."""
    path = write(tmp_path / f"a.{suffix}", count=2)
    before = path.read_bytes()
    code = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "import numpy as np\n"
        "from forethought.tracking.video import VideoError, write_video\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "noise = np.random.default_rng(1).integers(0, 255, (30, 320, 320, 3), np.uint8)\n"
        "try:\n"
        "    with write_video(Path(sys.argv[1]), 20) as add:\n"
        "        for picture in noise:\n"
        "            add(picture, [])\n"
        "except VideoError as error:\n"
        "    print(error)\n"
    )
    command = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert re.fullmatch(
        rf"The video {re.escape(str(path))} could not be written: .*\n", done.stdout
    )
    assert "Traceback" not in done.stderr
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_what_cannot_be_written_is_refused_before_any_work(tmp_path):
    for path, sentence in [
        (tmp_path / "a.avi", r"must end in \.mp4 or \.gif"),
        (tmp_path / "none" / "a.mp4", "there is no folder"),
        (tmp_path / "folder.mp4", "choose another file"),
    ]:
        (tmp_path / "folder.mp4").mkdir(exist_ok=True)
        with pytest.raises(ConfigError, match=sentence):
            check_file(path)


def test_a_missing_extra_is_named_with_the_command_that_installs_it(tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "imageio_ffmpeg" else found(name)
    )
    with pytest.raises(ConfigError, match=re.escape(install_extra("video"))):
        require_video("It")
    config = stub_run(GREY, eval={"video_every_evaluations": 1})
    with pytest.raises(ConfigError, match=r"eval\.video_every_evaluations needs imageio"):
        train_run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_preview_is_a_small_gif(tmp_path):
    gif, size = preview(write(tmp_path / "a.mp4", count=20, fps=20))
    assert gif.startswith(b"GIF89a") and size == (256, 256)
    with imageio.get_reader(gif, format="GIF") as reader:
        assert len(reader) == 10  # one second at 10 frames per second


# -- sinks -----------------------------------------------------------------------------------------


class Silent:
    """A sink that shows no videos."""

    def start(self, run): ...
    def train(self, row): ...
    def episode(self, row): ...
    def evaluation(self, row): ...
    def close(self): ...


def tracker(path: Path, *sinks) -> Tracker:
    run = RunDirectory.create(path, {"agent": {}}, "stub", GREY, 1)
    clock = Clock()
    clock.agent_steps, clock.env_frames = 30, 60
    return Tracker(run, sinks, clock, ("loss",))


def test_tensorboard_shows_the_video_among_its_images(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    track = tracker(tmp_path / "run", Silent(), TensorBoardSink())
    track.video(write(tmp_path / "a.mp4"))
    track.close()
    assert track.sink_failures == 0
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    (image,) = events.Images("eval/video")
    assert image.step == 60  # env_frames
    assert image.encoded_image_string.startswith(b"GIF89a")


def test_wandb_gets_the_file(tmp_path, monkeypatch):
    logged = []
    run = SimpleNamespace(
        log=lambda data, step: logged.append((step, data)), finish=lambda: None, tags=()
    )
    fake = SimpleNamespace(init=lambda **options: run, Video=lambda file, format: (file, format))
    monkeypatch.setitem(__import__("sys").modules, "wandb", fake)
    track = tracker(tmp_path / "run", WandbSink("project"))
    track.video(tmp_path / "a.mp4")
    track.close()
    assert logged == [(60, {"eval/video": (str(tmp_path / "a.mp4"), "mp4")})]


# -- training --------------------------------------------------------------------------------------


def test_a_negative_rhythm_is_refused():
    with pytest.raises(ConfigError, match=r"eval\.video_every_evaluations is -1"):
        EvalConfig(video_every_evaluations=-1)


def test_a_run_films_its_evaluations_and_is_the_same_run(tmp_path):
    """Steps 50, 100, 150 and 200 are evaluated, the first and every third after it filmed."""
    layers = {"steps": 200, "train": {"checkpoint_every_agent_steps": 0}}
    plain = stub_run(GREY, **layers, eval={"every_agent_steps": 50})
    train_run(plain, tmp_path / "plain")
    filmed = stub_run(GREY, **layers, eval={"every_agent_steps": 50, "video_every_evaluations": 3})
    run = train_run(filmed, tmp_path / "filmed")
    assert training_record(run.path) == training_record(tmp_path / "plain")
    files = sorted((run.path / "videos").iterdir())
    assert [file.name for file in files] == ["step-000000050.mp4", "step-000000200.mp4"]
    assert imageio_ffmpeg.count_frames_and_secs(files[0])[0] == 6  # the start and five steps
    assert frame(files[0], 5)[:320].mean() == pytest.approx(100, abs=3)  # grey 20 t at t = 5
    told = [event["file"] for event in RunDirectory.open(run.path).events() if "file" in event]
    assert told == [file.name for file in files]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Raises", "the lens cap is on"),
        ("Kills", "SIGKILL"),
        ("Floats", "must give an array of uint8"),
        ("Empty", "of shape (0, 0, 3), but must give an array of uint8"),
        ("Moody", "return 15.0, but 20.0 when it was played again"),
    ],
)
def test_pictures_that_fail_are_told_and_training_goes_on(tmp_path, caplog, name, reason):
    layers = {"steps": 100, "train": {"checkpoint_every_agent_steps": 0}}
    evaluation = {"every_agent_steps": 50, "video_every_evaluations": 1}
    config = stub_run(f"gym:tests.pictures:pictures/{name}-v0", **layers, eval=evaluation)
    with caplog.at_level(logging.WARNING, "forethought"):
        run = train_run(config, tmp_path / "run")
    assert run.status == "done"
    assert len([r for r in caplog.records if "training goes on" in r.message]) == 1
    failed = [e for e in RunDirectory.open(run.path).events() if e["kind"] == "video-failed"]
    assert [event["failures"] for event in failed] == [1, 2]
    assert all(reason in event["reason"] for event in failed)
    assert list((run.path / "videos").iterdir()) == []


def test_whatever_a_picture_fails_with_training_goes_on(tmp_path, monkeypatch):
    """An error that nobody thought of is a failed video too."""
    monkeypatch.setattr(videos, "film", lambda *args, **options: 1 / 0)
    filming = videos.EvaluationVideos(stub_run(GREY), tracker(tmp_path / "run"))
    filming.film(EpisodeLog(1), SimpleNamespace(seeds=(), returns=()), 10, {})
    (event,) = filming.tracker.run.events()
    assert (event["kind"], event["reason"]) == ("video-failed", "division by zero")


def test_after_five_failures_no_more_videos_are_tried(tmp_path, monkeypatch):
    def fail(*args, **options):
        raise VideoError("The disk is full.")

    monkeypatch.setattr(videos, "film", fail)
    track = tracker(tmp_path / "run")
    filming = videos.EvaluationVideos(stub_run(GREY, eval={"video_every_evaluations": 1}), track)
    for index in range(1, 6):
        assert filming.due(index)
        filming.film(EpisodeLog(1), SimpleNamespace(seeds=(), returns=()), 10 * index, {})
    assert not filming.due(6)
    kinds = [event["kind"] for event in track.run.events()]
    assert kinds == ["video-failed"] * 4 + ["videos-disabled"]


def test_a_run_that_is_being_stopped_gives_up_its_video_without_a_failure(tmp_path):
    track = tracker(tmp_path / "run")
    filming = videos.EvaluationVideos(stub_run(GREY, eval={"video_every_evaluations": 1}), track)
    log = EpisodeLog(1, [np.zeros(1, np.float32)] * 5)
    filming.film(log, SimpleNamespace(seeds=(1,), returns=(15.0,)), 10, {"stop": lambda: True})
    assert filming.failures == 0 and track.run.events() == []
    assert list((tmp_path / "run" / "videos").iterdir()) == []
