"""The run directory, its lock and its catalog of checkpoints."""

import json
import math
import os
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest

from forethought import files
from forethought.clock import Clock
from forethought.config import ConfigError, ForethoughtError
from forethought.files import FileError
from forethought.tracking import (
    Catalog,
    RunDirectory,
    Tracker,
    run_directory,
)
from forethought.tracking.columns import LEADING
from forethought.tracking.run_directory import git_commit


def new_run(path: Path) -> RunDirectory:
    config = {"agent_name": "stub", "task": "gym:Stub-v0", "agent": {"lr": 3e-4, "layers": [8, 8]}}
    return RunDirectory.create(path, config, "stub", "gym:Stub-v0", 1)


# -- the run directory -----------------------------------------------------------------------------


def test_a_new_run_describes_itself(tmp_path):
    run = new_run(tmp_path / "run")
    about = RunDirectory.open(run.path).run_json
    assert about["status"] == "running"
    assert (about["agent"], about["task"], about["seed"]) == ("stub", "gym:Stub-v0", 1)
    assert set(about["versions"]) == {"python", "torch", "numpy", "gymnasium", "forethought"}
    assert datetime.fromisoformat(about["created_utc"]).tzinfo == UTC
    assert (about["tags"], about["best"]) == ([], None)
    assert run.config()["agent"] == {"lr": 3e-4, "layers": [8, 8]}
    for folder in (run.checkpoints, run.replay):
        assert folder.is_dir()


def test_the_default_place_is_task_agent_seed_and_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = [
        RunDirectory.create(None, {"a": 1}, "tdmpc2", "gym:ALE/Pong-v5", 3).path for _ in range(3)
    ]
    assert len(set(paths)) == 3  # though they began in the same second
    for path in paths:
        pattern = r"runs/gym-ALE-Pong-v5/tdmpc2/3-\d{8}T\d{6}Z(-\d)?"
        assert re.fullmatch(pattern, path.as_posix())


def test_the_commit_is_that_of_the_source_and_not_of_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    source, installed = tmp_path / "src" / "code.py", tmp_path / ".venv" / "code.py"
    for file in (source, installed):
        file.parent.mkdir()
        file.write_text("")
    assert git_commit(source) is None  # no repository yet
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "src"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "x"], check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    assert git_commit(source) == head.stdout.strip()
    assert git_commit(installed) is None  # somebody else's repository
    source.write_text("changed = True")
    assert git_commit(source) == head.stdout.strip() + "+changes"
    assert new_run(tmp_path / "run").run_json["git_commit"] == git_commit() != head.stdout.strip()

    def slow(source: Path, *words: str) -> str:
        if words[0] == "status":
            raise subprocess.TimeoutExpired("git", 5)
        return plain(source, *words)

    plain = run_directory._git
    monkeypatch.setattr(run_directory, "_git", slow)
    assert git_commit(source) == head.stdout.strip() + "+unknown"


def test_a_run_is_never_created_over_another(tmp_path):
    new_run(tmp_path / "run")
    with pytest.raises(FileError, match="already holds a run: choose another place"):
        new_run(tmp_path / "run")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("...")
    with pytest.raises(FileError, match="not empty, and not a run"):
        new_run(tmp_path / "other")
    (tmp_path / "empty").mkdir()
    new_run(tmp_path / "empty")


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match=r"could not be created .Not a directory."):
        new_run(tmp_path / "file" / "run")


def test_a_foreign_or_damaged_directory_is_refused_in_one_sentence(tmp_path):
    with pytest.raises(FileError, match="There is no run directory"):
        RunDirectory.open(tmp_path / "absent")
    with pytest.raises(ConfigError, match="is not a run directory: it has no run"):
        RunDirectory.open(tmp_path)
    run = new_run(tmp_path / "run")
    (run.path / "config.yaml").write_text("a: 1\nb: 2\nc: ]\n")
    with pytest.raises(FileError, match=r"config\.yaml is damaged: .* in line 3: "):
        RunDirectory.open(run.path)
    (run.path / "run.json").write_text('{"name": "npm"}')
    with pytest.raises(FileError, match="describes no run"):
        RunDirectory.open(run.path)
    (run.path / "run.json").write_text('{"sta')
    with pytest.raises(FileError, match=r"run\.json is damaged"):
        RunDirectory.open(run.path)


def test_the_description_changes_field_by_field(tmp_path):
    run = new_run(tmp_path / "run")
    run.update(status="done", best={"step": 5, "eval_score": 1.5})
    run.tag("needs-inspection")
    run.tag("needs-inspection")
    about = run.run_json
    assert (about["status"], about["best"]["step"]) == ("done", 5)
    assert about["tags"] == ["needs-inspection"]
    assert about["agent"] == "stub"
    with pytest.raises(ForethoughtError, match="status is finished, but must be one of running"):
        run.update(status="finished")


def test_events_are_lines_with_time_and_counters(tmp_path):
    run, clock = new_run(tmp_path / "run"), Clock(agent_steps=7)
    tracker = Tracker(run, [], clock, ("loss",))
    tracker.event("gate", norm=1001.0)
    with run.events_file.open("a") as file:
        file.write('{"kind": "cut by a ki')
    (event,) = run.events()
    assert (event["kind"], event["agent_steps"], event["norm"]) == ("gate", 7, 1001.0)
    assert set(LEADING) <= set(event)
    assert datetime.fromisoformat(event["time_utc"]).tzinfo == UTC


def test_events_that_cannot_be_written_are_warned_about_once(tmp_path, caplog):
    run = new_run(tmp_path / "run")
    run.events_file.mkdir()
    run.event("a")
    run.event("b")
    assert len(caplog.records) == 1


# -- the lock --------------------------------------------------------------------------------------


def test_a_lock_is_free_after_use_even_after_an_error(tmp_path):
    run = new_run(tmp_path / "run")
    with pytest.raises(ZeroDivisionError), run.lock():
        raise ZeroDivisionError
    with run.lock():
        pass
    assert run.events() == []


def test_the_same_process_cannot_hold_a_run_twice(tmp_path):
    run = new_run(tmp_path / "run")
    with run.lock(), pytest.raises(ForethoughtError, match=f"process {os.getpid()} on"), run.lock():
        pytest.fail("held twice")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the system tells no start times")
def test_a_pid_that_was_used_again_does_not_keep_a_run_locked(tmp_path):
    run = new_run(tmp_path / "run")
    holder = {"pid": os.getpid(), "host": os.uname().nodename, "started": 1}
    (run.path / "lock").write_text(json.dumps(holder))
    with run.lock():
        pass
    assert [event["kind"] for event in run.events()] == ["lock-taken-over"]


# -- the catalog -----------------------------------------------------------------------------------


def checkpoint(parent: Path, step: int, **meta: object) -> Path:
    path = parent / f"step-{step:09d}"
    with files.publish(path, {"env_frames": 2 * step, **meta}) as folder:
        (folder / "model.bin").write_text(f"{step}")
    return path


def test_the_catalog_says_what_when_where_and_how_good(tmp_path):
    """Seed 004 item 17."""
    catalog = Catalog(tmp_path)
    for step, score in ((10, 1.5), (20, None)):
        catalog.add(checkpoint(tmp_path, step), env_frames=2 * step, eval_score=score)
    first, second = json.loads((tmp_path / "catalog.json").read_text())
    times = [datetime.fromisoformat(entry["timestamp"]) for entry in (first, second)]
    assert times[0] <= times[1]
    assert times[0].tzinfo == UTC
    del first["timestamp"]
    assert first == {
        "step": 10,
        "env_frames": 20,
        "path": "step-000000010",
        "eval_score": 1.5,
        "sha256": files.sha256(tmp_path / "step-000000010" / "manifest.json"),
    }
    assert second["eval_score"] is None


def test_timestamps_stay_monotone_when_the_wall_clock_jumps_back(tmp_path):
    times = iter(["2026-01-02T00:00:00.000000+00:00", "2026-01-01T00:00:00.000000+00:00"])
    catalog = Catalog(tmp_path, now=lambda: next(times))
    for step in (1, 2):
        catalog.add(checkpoint(tmp_path, step), env_frames=step, eval_score=None)
    stamps = [entry.timestamp for entry in catalog.entries()]
    assert stamps == ["2026-01-02T00:00:00.000000+00:00"] * 2


def test_the_best_ignores_missing_scores_and_prefers_the_newer_of_equals(tmp_path):
    catalog = Catalog(tmp_path)
    assert catalog.best() is None
    for step, score in enumerate([None, math.nan, 3.0, -5.0, 3.0, 1.0]):
        catalog.add(checkpoint(tmp_path, step), env_frames=step, eval_score=score)
    best = catalog.best()
    assert best is not None
    assert best.step == 4


def test_a_checkpoint_saved_again_has_one_entry(tmp_path):
    catalog = Catalog(tmp_path)
    for score in (1.0, 2.0):
        catalog.add(checkpoint(tmp_path, 5), env_frames=10, eval_score=score)
    assert [entry.eval_score for entry in catalog.entries()] == [2.0]
    catalog.remove({"step-000000005"})
    assert catalog.entries() == []


def test_sync_mends_the_catalog_after_a_kill(tmp_path):
    catalog = Catalog(tmp_path)
    for step in (1, 2):
        catalog.add(checkpoint(tmp_path, step), env_frames=2 * step, eval_score=None)
    assert catalog.sync() == []
    checkpoint(tmp_path, 3, eval_score=9.0)  # published, but killed before it was entered
    (tmp_path / "step-000000001").rename(tmp_path / "gone")
    notes = catalog.sync()
    assert notes == [
        "step-000000001 was taken out of the catalog: it is missing.",
        "step-000000003 was entered in the catalog.",
    ]
    entries = [(entry.step, entry.env_frames, entry.eval_score) for entry in catalog.entries()]
    assert entries == [(2, 4, None), (3, 6, 9.0)]


def test_sync_enters_a_checkpoint_that_was_saved_again_before_a_kill(tmp_path):
    """In its place: what is newest by step stays the last, for the oldest ones are pruned."""
    catalog = Catalog(tmp_path, iter("abcdefg").__next__)
    for step in (1, 2, 3):
        catalog.add(checkpoint(tmp_path, step), env_frames=2 * step, eval_score=None)
    checkpoint(tmp_path, 2, eval_score=9.0)  # published again, but killed before it was entered
    assert catalog.sync() == ["step-000000002 was entered in the catalog."]
    entries = [(entry.step, entry.eval_score, entry.timestamp) for entry in catalog.entries()]
    assert entries == [(1, None, "a"), (2, 9.0, "d"), (3, None, "d")]
    assert catalog.sync() == []


def test_a_damaged_catalog_is_made_anew_from_the_checkpoints(tmp_path):
    catalog = Catalog(tmp_path)
    catalog.add(checkpoint(tmp_path, 1), env_frames=2, eval_score=None)
    (tmp_path / "catalog.json").write_text('[{"step": 1}]')
    with pytest.raises(FileError, match=r"catalog\.json is damaged"):
        catalog.entries()
    assert len(catalog.sync()) == 2
    assert [entry.step for entry in catalog.entries()] == [1]


def test_the_error_of_an_earlier_end_is_forgotten_when_the_run_goes_on(tmp_path):
    run = new_run(tmp_path / "run")
    run.update(status="failed", error="RuntimeError: the update is broken")
    run.update(best=None)
    assert run.run_json["error"] == "RuntimeError: the update is broken"
    run.update(status="running")
    assert "error" not in run.run_json
