"""Checkpoints: what is kept, what is listed, and what happens to damaged ones."""

from __future__ import annotations

import shutil
from datetime import datetime
from pathlib import Path

import pytest

from forethought import files
from forethought.config import ForethoughtError
from forethought.tracking import RunDirectory, read_rows
from forethought.training.build import load_agent
from forethought.training.checkpoint import Checkpoints
from forethought.training.loop import resume_run, train_run
from tests.stub_agent import give_scores, register, stub_run


@pytest.fixture(autouse=True)
def _stub_agent(monkeypatch):
    register(monkeypatch)


@pytest.fixture
def run(tmp_path) -> Path:
    """Checkpoints at 0, 100, 200 and 300 were made, the newest two and the best are there."""
    return train_run(stub_run(steps=300), tmp_path / "run").path


def names(run: Path) -> list[str]:
    return [path.name for path in files.published(run / "checkpoints")]


def test_the_newest_and_the_best_are_kept(tmp_path, monkeypatch):
    """The best (step 100) survives two newer ones."""
    give_scores(monkeypatch, random=0.0, scores=[10.0, 5.0, 9.0, 8.0])
    run = train_run(stub_run(eval={"every_agent_steps": 100}), tmp_path / "run").path
    assert names(run) == ["step-000000100", "step-000000300", "step-000000400"]
    assert RunDirectory.open(run).run_json["best"] == {"step": 100, "eval_score": 10.0}
    path, _ = Checkpoints(RunDirectory.open(run)).find("best")
    assert path.name == "step-000000100"


def test_finding_17_the_catalog_lists_step_frames_path_score_time_and_hash(run):
    """dqn.md, finding 17."""
    entries = files.read_json(run / "checkpoints" / "catalog.json")
    assert [entry["path"] for entry in entries] == names(run)
    assert [(entry["step"], entry["env_frames"]) for entry in entries][-1] == (300, 300)
    times = [datetime.fromisoformat(entry["timestamp"]) for entry in entries]
    assert times == sorted(times) and all(time.utcoffset() is not None for time in times)
    for entry in entries:
        folder = run / "checkpoints" / entry["path"]
        assert files.verify(folder).sha256 == entry["sha256"]
    scored = {entry["step"]: entry["eval_score"] for entry in entries}
    evaluated = {int(r["agent_steps"]): r["return_mean"] for r in read_rows(run / "eval.csv")[0]}
    assert {step for step, score in scored.items() if score is not None} == {200, 300}
    assert {step: repr(scored[step]) for step in evaluated} == evaluated


def test_replay_blocks_live_as_long_as_a_checkpoint_names_them(tmp_path):
    """A ring of 128 rows in blocks of 32: what was overwritten before the oldest kept checkpoint
    (step 300) is deleted."""
    replay = {"capacity_rows": 128, "block_rows": 32}
    layers = {"replay": replay, "eval": {"every_agent_steps": 0}, "train": {"keep_checkpoints": 2}}
    run = train_run(stub_run(**layers), tmp_path / "run").path
    there = {path.name for path in (run / "replay").iterdir()}
    needed = Checkpoints(RunDirectory.open(run)).needed_blocks()
    assert needed == there
    # 310 rows (a row more per episode) at step 300, of which 182 to 309 were in the ring: block 5
    assert min(there) == "stream00-block00000005.safetensors"


def test_a_new_run_has_a_checkpoint_of_its_beginning(tmp_path):
    run = train_run(stub_run(steps=50), tmp_path / "run").path
    assert names(run) == ["step-000000000", "step-000000050"]


def test_what_a_killed_writer_left_is_cleared(run):
    half = run / "checkpoints" / ".tmp-step-000000400-99"
    shutil.copytree(run / "checkpoints" / "step-000000300", half)
    (half / "manifest.json").unlink()
    (run / "checkpoints" / "catalog.json").unlink()
    resume_run(run, steps=310)
    assert not half.exists()
    entries = files.read_json(run / "checkpoints" / "catalog.json")
    assert [entry["path"] for entry in entries] == names(run)


@pytest.mark.parametrize("deleted", [100, 200])
def test_a_checkpoint_deleted_by_hand_is_forgotten_and_saving_goes_on(
    tmp_path, monkeypatch, caplog, deleted
):
    """Step 100 would be pruned when 300 is saved, step 200 would be asked for its blocks."""

    def fault(name: str) -> None:
        if name == "step-250":
            shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{deleted:09d}")

    monkeypatch.setattr(files, "fault_point", fault)
    run = train_run(stub_run(eval={"every_agent_steps": 0}), tmp_path / "run").path
    assert caplog.text == ""
    assert names(run) == ["step-000000300", "step-000000400"]
    events = RunDirectory.open(run).events()
    assert "checkpoint-failed" not in [event["kind"] for event in events]
    [note] = [event["note"] for event in events if event["kind"] == "checkpoints-mended"]
    assert note == f"step-{deleted:09d} was taken out of the catalog: it is missing."


def test_an_agent_loaded_for_acting_has_no_replay(run):
    agent = load_agent(run)
    with pytest.raises(ForethoughtError, match="for acting only"):
        _ = agent.replay
    whole = load_agent(run, for_acting=False)
    assert whole.replay.rows == 311  # 300 decisions, 11 episode starts
    assert whole.updates == agent.updates == 160
