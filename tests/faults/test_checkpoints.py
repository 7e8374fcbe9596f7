"""Checkpoints under kills, full disks, damage, changed configurations and wrong owners."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
import torch
import yaml

from forethought import files
from forethought.agents.tdmpc2 import TDMPC2
from forethought.agents.tdmpc2.config import TDMPC2Config
from forethought.cli import main
from forethought.config import ConfigError, EnvConfig, ForethoughtError, TransitionReplayConfig
from forethought.files import FileError
from forethought.replay import blocks
from forethought.seeding import Streams
from forethought.tracking import RunDirectory, read_rows
from forethought.training.build import load_agent, read_config, task_spec
from forethought.training.checkpoint import Checkpoints, config_hash
from forethought.training.evaluate import evaluate_target
from forethought.training.loop import resume_run, train_run
from forethought.training.trainer import Trainer
from tests.faults.forgery import NEWEST, forge_meta, newest
from tests.stub_agent import StubAgent, StubConfig, register, stub_run, training_record

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
CHECKPOINT_FILES = (
    "agent.json",
    "agent.safetensors",
    "loop.json",
    "loop.safetensors",
    "manifest.json",
    "replay.safetensors",
)


class Killed(BaseException):
    """Stands for kill -9: nothing after it may be saved."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run of 300 steps with checkpoints at 200 and 300."""
    with pytest.MonkeyPatch.context() as patch:
        register(patch)
        return train_run(stub_run(steps=300), tmp_path_factory.mktemp("a") / "run").path


@pytest.fixture
def run(trained, tmp_path) -> Path:
    """A copy of it to damage."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def events(run: Path, kind: str) -> list[dict]:
    return [event for event in RunDirectory.open(run).events() if event["kind"] == kind]


def own_block(run: Path) -> Path:
    """A replay block that only the newest checkpoint needs."""
    there = (files.read_manifest(run / "checkpoints" / f"step-000000{n}") for n in (300, 200))
    new, old = (set(manifest.meta["replay_blocks"]) for manifest in there)
    return run / "replay" / min(new - old)


def damageable(run: Path) -> list[Path]:
    """Every file that the newest checkpoint rests on."""
    return [*(newest(run) / name for name in CHECKPOINT_FILES), own_block(run)]


# -- kills -----------------------------------------------------------------------------------------


class Fork:
    """A process that does `work`, here because all is imported; `work` is given a function that
    tells this one a number."""

    def __init__(self, work: Callable[[Callable[[int], None]], None]) -> None:
        reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                work(lambda number: os.write(writing, f"{number}\n".encode()) and None)
            finally:
                os._exit(1)  # never back into the tests
        os.close(writing)
        self.told = os.fdopen(reading)

    def kill(self) -> list[int]:
        """Kills it with -9; what it had still told."""
        os.kill(self.pid, signal.SIGKILL)
        with self.told:
            rest = [int(line) for line in self.told]
        _, status = os.waitpid(self.pid, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
        return rest


def test_case_01_kill_9_of_a_run_that_saves_at_every_step_loses_at_most_one_interval(
    tmp_path, monkeypatch
):
    """Five real kills; step N begins when the checkpoint of step N - 1 is whole."""
    draw, fault_point = random.Random(1), files.fault_point
    train = {"checkpoint_every_agent_steps": 1, "seed_agent_steps": 2, "seed_updates": 2}
    config = stub_run(steps=10**6, train=train, eval={"every_agent_steps": 0, "episodes": 1})
    for number in range(5):
        path = tmp_path / f"run{number}"

        def work(tell: Callable[[int], None], path: Path = path) -> None:
            def fault(stage: str) -> None:
                if stage.startswith("step-"):
                    tell(int(stage.removeprefix("step-")))

            monkeypatch.setattr(files, "fault_point", fault)
            train_run(config, path)

        trainer = Fork(work)
        reached = [int(next(trainer.told)) for _ in range(4)]  # past the burst of updates
        time.sleep(draw.uniform(0, 0.1))
        last = [*reached, *trainer.kill()][-1]
        assert files.fault_point is fault_point
        at = Checkpoints(RunDirectory.open(path)).newest()[0]
        assert int(at.name.removeprefix("step-")) >= last - 1
        resumed = resume_run(path, steps=last + 1)
        assert (resumed.status, resumed.agent_steps) == ("done", last + 1)


def test_case_01_kill_9_at_50_random_instants_of_saving_leaves_the_newest_whole(run):
    """A process does nothing but save, so every kill falls in or near a save."""
    draw, directory = random.Random(2), RunDirectory.open(run)
    agent = load_agent(run, for_acting=False)
    loop = (
        files.read_json(newest(run) / "loop.json"),
        files.load_tensors(newest(run) / "loop.safetensors"),
    )
    clock, saved = loop[0]["clock"], 300

    def work(tell: Callable[[int], None]) -> None:
        for step in count(saved + 1):
            clock["agent_steps"] = clock["env_frames"] = loop[0]["budget"]["agent_steps"] = step
            Checkpoints(directory, keep=2).save(agent, loop, clock, None)
            tell(step)

    stages = set()
    for _ in range(50):
        saver = Fork(work)
        time.sleep(draw.uniform(0.005, 0.05))
        done = [saved, *saver.kill()][-1]
        path, skipped = Checkpoints(directory).newest()
        saved = int(path.name.removeprefix("step-"))
        assert skipped == []
        assert saved in (done, done + 1)  # published, perhaps not yet told
        stages |= {left.name[:4] for left in directory.checkpoints.glob(".*")}
        files.recover(directory.checkpoints)
    assert ".tmp" in stages  # some fell in the middle
    assert resume_run(run, steps=saved + 5).agent_steps == saved + 5


@pytest.mark.parametrize(("stage", "expected"), [("manifest", 1), ("rename", 1)])
def test_case_01_kill_9_before_the_rename_leaves_the_previous_checkpoint(tmp_path, stage, expected):
    assert kill_in_second_save(tmp_path, stage) == f"step-{expected:09d}"


def test_case_02_kill_9_after_the_rename_leaves_the_new_checkpoint(tmp_path):
    """No pointer has to be written for it to be found."""
    assert kill_in_second_save(tmp_path, "after-rename") == "step-000000002"


def kill_in_second_save(folder: Path, stage: str) -> str:
    """The newest checkpoint after a real kill at this stage of the second save."""
    code = (
        "import sys; from pathlib import Path; from forethought import files\n"
        "for step in (1, 2):\n"
        "    if step == 2: import os; os.environ['FORETHOUGHT_PAUSE_AT'] = sys.argv[2] + ':60'\n"
        "    with files.publish(Path(sys.argv[1]) / f'step-{step:09d}') as folder:\n"
        "        (folder / 'model.bin').write_text('x' * 100_000)\n"
    )
    command = [sys.executable, "-c", code, str(folder), stage]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == f"pausing at {stage}\n"
        process.kill()
    path, skipped = files.newest_verified(folder)
    assert skipped == []
    return path.name


def test_case_02_a_kill_before_the_catalog_resumes_from_the_new_checkpoint(tmp_path, monkeypatch):
    """Killed between the publication of step 100 and its entry in the catalog."""
    passes = count(1)

    def kill(stage: str) -> None:
        if stage == "after-rename" and next(passes) == 2:  # the first is of step 0
            raise Killed

    monkeypatch.setattr(files, "fault_point", kill)
    with pytest.raises(Killed):
        train_run(stub_run(steps=120), tmp_path / "run")
    run = RunDirectory.open(tmp_path / "run")
    assert [entry.step for entry in Checkpoints(run).catalog.entries()] == [0]
    assert resume_run(run.path).status == "done"
    assert [event["checkpoint"] for event in events(run.path, "resumed")] == ["step-000000100"]
    assert [entry.step for entry in Checkpoints(run).catalog.entries()] == [100, 120]


# -- a full disk -----------------------------------------------------------------------------------

Usage = namedtuple("Usage", "total used free")


def full_disk(monkeypatch, stages: tuple[str, str], free: int = 20_000_000) -> None:
    """The disk has `free` bytes left between two moments of the run."""
    real, full = shutil.disk_usage, [False]

    def watch(stage: str) -> None:
        full[0] = stage == stages[0] or (full[0] and stage != stages[1])

    monkeypatch.setattr(files, "fault_point", watch)
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: Usage(10**9, 10**9, free) if full[0] else real(path)
    )


def test_case_03_without_space_a_checkpoint_on_the_way_is_not_begun_and_tried_again(
    tmp_path, monkeypatch, caplog
):
    """No room at step 100, room again before step 200; the run equals an undisturbed one."""
    full_disk(monkeypatch, ("step-100", "step-101"), free=16 * 2**20 + 1000)
    run = train_run(stub_run(), tmp_path / "run")
    assert (run.status, run.exit_code) == ("done", 0)
    [failed] = events(run.path, "checkpoint-failed")
    takes = r"step-000000100 was not written: it takes 2\d\.\d kB, but 16\.8 MB are free there, of "
    assert re.search(takes + r"which 16\.8 MB are kept", failed["reason"])
    assert "The checkpoint was not saved, training goes on" in caplog.text
    names = [path.name for path in files.published(run.path / "checkpoints")]
    assert names[-2:] == ["step-000000300", "step-000000400"]
    monkeypatch.undo()
    with pytest.MonkeyPatch.context() as patch:
        register(patch)
        whole = training_record(train_run(stub_run(), tmp_path / "other").path)
    ours = training_record(run.path)
    assert ours["agent tensors"] == whole["agent tensors"] and ours["train"] == whole["train"]


def test_case_03_without_space_for_the_last_checkpoint_the_run_fails_and_says_so(
    tmp_path, monkeypatch, capsys
):
    full_disk(monkeypatch, ("step-300", "never"), free=1_000_000)
    with pytest.raises(FileError, match=r"step-000000300 was not written: .*1\.0 MB are free"):
        train_run(stub_run(steps=300), tmp_path / "run")
    assert RunDirectory.open(tmp_path / "run").run_json["status"] == "failed"
    monkeypatch.undo()
    with pytest.MonkeyPatch.context() as patch:  # room again: nothing was lost
        register(patch)
        assert resume_run(tmp_path / "run").agent_steps == 300
    assert events(tmp_path / "run", "resumed")[0]["checkpoint"] == "step-000000200"


def test_case_03_a_write_that_breaks_off_leaves_the_previous_checkpoint_whole(tmp_path):
    """A real limit of 5000 bytes per file (EFBIG) while step 100 is saved: the weights' file does
    not fit, for torch's random state alone has 5056."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(stage: str) -> None:
        if stage == "step-100":
            resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
        if stage == "step-101":
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            seen.append([path.name for path in files.published(tmp_path / "run" / "checkpoints")])
            seen.append(files.verify(tmp_path / "run" / "checkpoints" / "step-000000000").schema)

    seen: list = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "fault_point", limit)
        register(patch)
        try:
            run = train_run(stub_run(steps=200, eval={"every_agent_steps": 0}), tmp_path / "run")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert seen == [["step-000000000"], 1]
    [failed] = events(run.path, "checkpoint-failed")
    assert "agent.safetensors could not be written" in failed["reason"]
    assert files.published(run.path / "checkpoints")[-1].name == "step-000000200"
    assert not list((run.path / "checkpoints").glob(".tmp*"))


def test_case_03_replay_blocks_wait_for_space_too(tmp_path, monkeypatch, caplog):
    """Blocks of 64 rows fill at rows 64, 128, ...; the one at 128 finds no room."""
    full_disk(monkeypatch, ("step-110", "step-130"), free=1_000_000)
    run = train_run(stub_run(steps=200), tmp_path / "run")
    assert caplog.text.count("block00000001.safetensors was not written: it takes") == 1
    names = sorted(path.name for path in (run.path / "replay").iterdir())
    assert names == [f"stream00-block{n:08d}.safetensors" for n in range(3)]
    assert resume_run(run.path, steps=210).status == "done"


def test_the_size_of_a_checkpoint_is_told_before_it_is_written(tmp_path, monkeypatch):
    """The event comes before the first file; the sum is what the files then take, or a bit more."""
    told = []

    def listen(stage: str) -> None:
        if stage == "write":
            told.append(events(tmp_path / "run", "checkpoint-size"))

    monkeypatch.setattr(files, "fault_point", listen)
    run = train_run(stub_run(steps=20), tmp_path / "run").path
    assert [len(found) for found in told] == [1, 1]
    [event] = told[0]
    first = run / "checkpoints" / "step-000000000"
    actual = sum(path.stat().st_size for path in first.iterdir())
    expected = sum(value for key, value in event.items() if key.endswith("_bytes"))
    assert actual <= expected <= 1.4 * actual
    assert (
        event["replay_bytes_when_full"]
        == 2000 * load_agent(run, for_acting=False).replay._row_bytes
    )


def test_a_checkpoint_writes_only_the_open_tail_of_the_replay(run):
    """310 rows at step 300 in blocks of 64: four are sealed, the tail has 54 (and 1 open start)."""
    saved = files.read_json(newest(run) / "agent.json")["replay"]["streams"][0]
    assert (saved["written"], saved["tail_row"], len(saved["blocks"])) == (311, 256, 4)
    tensors = files.load_tensors(newest(run) / "replay.safetensors")
    assert {len(x) for name, x in tensors.items() if name.startswith("tail/")} == {55}


# -- damage ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("percent", [0, 1, 50, 99])
def test_case_04_every_truncated_file_is_named_and_the_previous_checkpoint_taken(run, percent):
    checkpoints = Checkpoints(RunDirectory.open(run))
    for file in damageable(run):
        whole = file.read_bytes()
        file.write_bytes(whole[: len(whole) * percent // 100])
        path, [reason] = checkpoints.newest()
        assert path.name == "step-000000200"
        assert reason.startswith(f"Skipped {NEWEST}: ") and file.name in reason
        file.write_bytes(whole)
    assert checkpoints.newest() == (newest(run), [])


def test_a_resume_hashes_the_replay_twice_and_not_more(run, monkeypatch):
    """Once to choose the checkpoint, once when its rows are taken over: a replay may be large."""
    hashed: list[str] = []
    sha256 = files.sha256

    def counted(path: Path) -> str:
        hashed.append(path.name)
        return sha256(path)

    monkeypatch.setattr(files, "sha256", counted)
    monkeypatch.setattr(blocks, "sha256", counted)
    monkeypatch.setattr(Trainer, "play_randomly", lambda trainer, stop: stop.request())
    needed = set(files.read_manifest(newest(run)).meta["replay_blocks"])
    assert needed
    resume_run(run, steps=400)
    assert {hashed.count(name) for name in needed} == {2}


@pytest.mark.parametrize("percent", [0, 1, 50, 99])
def test_case_04_a_truncated_run_json_or_catalog_is_named_or_mended(run, percent):
    for name in ("run.json", "checkpoints/catalog.json"):
        whole = (run / name).read_bytes()
        (run / name).write_bytes(whole[: len(whole) * percent // 100])
        if name == "run.json":
            with pytest.raises(FileError, match=r"run\.json is damaged"):
                RunDirectory.open(run)
        else:
            catalog = Checkpoints(RunDirectory.open(run)).catalog
            assert catalog.sync()[0].startswith("The catalog is made anew: ")
            assert [entry.step for entry in catalog.entries()] == [200, 300]
        (run / name).write_bytes(whole)


@pytest.mark.parametrize("percent", [0, 1, 50, 99])
def test_case_04_a_truncated_configuration_is_refused(run, percent):
    """Half of it may still be YAML, but says something else than the checkpoint does."""
    whole = (run / "config.yaml").read_bytes()
    (run / "config.yaml").write_bytes(whole[: len(whole) * percent // 100])
    before = (run / "run.json").read_bytes()
    with pytest.raises(ForethoughtError):
        resume_run(run, steps=310)
    assert (run / "run.json").read_bytes() == before


@pytest.mark.parametrize("file", ["agent.safetensors", "loop.json", "replay.safetensors"])
def test_case_04_the_run_goes_on_from_the_previous_checkpoint_to_the_same_end(
    tmp_path, run, file, caplog
):
    undisturbed = train_run(stub_run(steps=320), tmp_path / "undisturbed").path
    content = (newest(run) / file).read_bytes()
    (newest(run) / file).write_bytes(content[: len(content) // 2])
    assert resume_run(run, steps=320).status == "done"
    assert f"Skipped {NEWEST}" in caplog.text and file in caplog.text
    assert len(events(run, "checkpoint-skipped")) == 1
    ours, theirs = training_record(run), training_record(undisturbed)
    assert ours["agent tensors"] == theirs["agent tensors"]
    assert ours["train"] == theirs["train"] and ours["episodes"] == theirs["episodes"]


def test_case_04_a_missing_replay_block_is_named_and_the_previous_checkpoint_taken(run, caplog):
    block = own_block(run)
    block.unlink()
    assert resume_run(run, steps=320).status == "done"
    assert f"{block.name} is missing" in caplog.text


def test_case_04_a_skipped_checkpoint_is_never_taken_again(tmp_path, run, monkeypatch):
    """The run that goes on writes the missing block anew, so that the skipped one is whole again;
    but its CSV rows were cut off."""
    config = {"steps": 400, "track": {"every_agent_steps": 20, "console": False}}
    undisturbed = train_run(stub_run(**config), tmp_path / "undisturbed").path
    path = train_run(stub_run(**config | {"steps": 300}), tmp_path / "other").path
    own_block(path).unlink()

    def fault(name: str) -> None:
        if name == "step-285":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(files, "fault_point", fault)
        resume_run(path, steps=400)
    [aside] = events(path, "checkpoint-set-aside")
    assert events(path, "checkpoints-mended") == []
    assert (path / "checkpoints" / aside["now"]).is_dir()
    assert (aside["checkpoint"], aside["now"]) == (NEWEST, f"{NEWEST}.skipped")
    assert resume_run(path).status == "done"
    assert training_record(path) == training_record(undisturbed)


def test_case_04_the_best_is_none_once_the_only_one_that_was_evaluated_is_gone(tmp_path):
    run = train_run(stub_run(steps=200, eval={"every_agent_steps": 0}), tmp_path / "run").path
    for folder in files.published(run / "checkpoints")[1:]:
        (folder / "agent.json").write_text("{")
    assert RunDirectory.open(run).run_json["best"] is not None

    def stop(name: str) -> None:
        if name == "step-149":
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "fault_point", stop)
        assert resume_run(run).status == "interrupted"
    assert RunDirectory.open(run).run_json["best"] is None


def test_case_04_one_that_is_skipped_twice_at_the_same_step_is_set_aside_twice(run):
    (run / "checkpoints" / f"{NEWEST}.skipped").symlink_to("nowhere")  # in the way, too
    for _ in range(2):
        (newest(run) / "agent.json").write_text("{")
        assert resume_run(run, steps=320).status == "done"
        shutil.rmtree(run / "checkpoints" / "step-000000320")
        assert resume_run(run, steps=300).status == "done"
    assert len(events(run, "checkpoint-set-aside")) == 2
    assert Checkpoints(RunDirectory.open(run)).newest()[0].name == NEWEST


def test_case_04_a_damaged_row_after_the_checkpoint_is_cut_off(run):
    """As a power cut leaves it: the table is not read before it is cut back."""
    with (run / "train.csv").open("ab") as file:
        file.write(bytes(64) + b"\n")
    assert resume_run(run, steps=320).status == "done"
    rows, note = read_rows(run / "train.csv")
    assert note is None and int(rows[-1]["agent_steps"]) == 320


def test_case_04_without_any_whole_checkpoint_one_sentence_says_so(run):
    for folder in files.published(run / "checkpoints"):
        (folder / "agent.json").write_text("{")
    with pytest.raises(
        FileError, match=rf"holds no usable checkpoint. Skipped {NEWEST}.* Train anew\.$"
    ):
        resume_run(run, steps=400)
    with pytest.raises(FileError, match="holds no usable checkpoint"):
        load_agent(run)


def test_case_05_every_flipped_bit_is_found(run):
    """200 random bits, over all files that the newest checkpoint rests on."""
    draw, checkpoints = random.Random(0), Checkpoints(RunDirectory.open(run))
    targets = [*damageable(run), newest(run) / "manifest.json", newest(run) / "manifest.json"]
    for number in range(200):
        file = targets[number % len(targets)]
        whole = file.read_bytes()
        damaged = bytearray(whole)
        damaged[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        file.write_bytes(damaged)
        path, [reason] = checkpoints.newest()
        assert path.name == "step-000000200" and file.name in reason
        file.write_bytes(whole)
    assert checkpoints.newest()[0] == newest(run)


def test_case_05_a_flipped_bit_in_the_configuration_is_refused_where_it_can_matter(run):
    """Bits of config.yaml: whatever reads as another value than the checkpoint has is refused.

    Only the length of the run and what is tracked may change by design."""
    draw, file = random.Random(2), run / "config.yaml"
    whole = file.read_bytes()
    end = whole.index(b"track:")
    was = read_config(RunDirectory.open(run))
    refused = 0
    for _ in range(60):
        damaged = bytearray(whole)
        damaged[draw.randrange(end)] ^= 1 << draw.randrange(8)
        file.write_bytes(damaged)
        try:
            same = read_config(RunDirectory.open(run))
            unchanged = same == was or same.steps != was.steps
        except ForethoughtError:
            unchanged = False
        if not unchanged:
            refused += 1
            with pytest.raises(ForethoughtError):
                resume_run(run)
    assert refused > 40


def test_files_beside_those_of_the_manifest_are_never_read(run):
    """A checkpoint is what its manifest names; a desktop's `.DS_Store` must not spoil it."""
    (newest(run) / ".DS_Store").write_bytes(b"\x00" * 100)
    (newest(run) / "optimiser.pkl").write_bytes(b"\x80\x04.")
    assert resume_run(run, steps=310).agent_steps == 310
    assert (newest(run) / ".DS_Store").exists()


def test_a_checkpoint_damaged_while_the_run_goes_on_does_not_stop_it_from_saving(run, monkeypatch):
    """Which blocks it needs is no longer known; the new checkpoints name their own."""

    def damage(stage: str) -> None:
        if stage == "step-305":
            (newest(run) / "manifest.json").write_text("{")

    monkeypatch.setattr(files, "fault_point", damage)
    assert resume_run(run, steps=310).status == "done"
    assert "are not kept for it" in events(run, "checkpoints-mended")[0]["note"]
    assert Checkpoints(RunDirectory.open(run)).newest()[0].name == "step-000000310"


# -- schemas ---------------------------------------------------------------------------------------


def test_case_08_a_manifest_of_a_newer_schema_is_refused_with_advice(run):
    newer = files.Manifest(files.SCHEMA + 1, {}, {}, {})
    for folder in files.published(run / "checkpoints"):
        (folder / "manifest.json").write_text(newer.text)
    with pytest.raises(FileError, match="schema 2, but this version reads up to 1: update"):
        resume_run(run, steps=310)


def test_case_08_golden_files_are_as_they_were_made():
    for sums in GOLDEN.glob("schema-*.sha256"):
        listed = dict(line.split("  ")[::-1] for line in sums.read_text().splitlines())
        found = {
            path.relative_to(GOLDEN).as_posix(): files.sha256(path)
            for path in sums.with_suffix("").rglob("*")
            if path.is_file()
        }
        assert found == listed
    assert (GOLDEN / f"schema-{files.SCHEMA}").is_dir(), "run tests/golden/make.py"


@pytest.mark.parametrize("name", [path.name for path in sorted(GOLDEN.glob("schema-*/"))])
def test_case_08_a_run_of_each_schema_verifies_evaluates_and_resumes(tmp_path, name):
    run = Path(shutil.copytree(GOLDEN / name, tmp_path / "run"))
    folder, skipped = Checkpoints(RunDirectory.open(run)).newest()
    assert (folder.name, skipped) == ("step-000000170", [])
    result = evaluate_target(str(run), episodes=1)
    assert result.checkpoint_step == 170 and -500 < result.mean < 0  # 50 steps of Pendulum
    assert main(["resume", str(run), "--steps", "180"]) == 0
    assert [event["lost_episodes"] for event in events(run, "resumed")] == [[]]
    assert load_agent(run, for_acting=False).replay.rows == 180 + 4  # four episodes have begun


def test_case_08_a_manifest_that_tells_neither_agent_nor_configuration_is_read(run):
    """As manifests were before they did."""

    def forget(meta: dict) -> None:
        for key in ("agent", "task", "observations", "actions", "config", "config_sha256"):
            del meta[key]

    forge_meta(newest(run), forget)
    assert load_agent(run).updates == 160
    assert resume_run(run, steps=310).status == "done"
    assert events(run, "resumed")[0]["checkpoint"] == NEWEST


# -- changed configurations and wrong owners -------------------------------------------------------


def edit_config(run: Path, **changes: object) -> None:
    """Set keys of config.yaml: `agent__lr=1` is agent.lr."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    for key, value in changes.items():
        *groups, last = key.split("__")
        inner = config
        for group in groups:
            inner = inner[group]
        inner[last] = value
    (run / "config.yaml").write_text(yaml.safe_dump(config))


def test_the_manifest_tells_agent_task_and_the_whole_configuration(run):
    meta = files.read_manifest(newest(run)).meta
    config = RunDirectory.open(run).config()
    assert (meta["agent"], meta["task"]) == ("stub", "gym:Pendulum-v1")
    assert (meta["observations"], meta["actions"]) == ("float32 (3,)", "float32 (1,)")
    assert meta["config"] == config
    assert meta["config_sha256"] == config_hash(dict(reversed(config.items())))


def test_case_11_a_changed_configuration_is_refused_with_a_list_of_the_differences(run, capsys):
    edit_config(run, agent__lr=0.5, train__updates_per_agent_step=2.0, track__every_agent_steps=10)
    before = (run / "checkpoints" / "catalog.json").read_bytes()
    assert main(["resume", str(run), "--steps", "310"]) == 2
    assert capsys.readouterr().err == (
        f"{run / 'config.yaml'} has changed since {NEWEST} was written; put the old values back, "
        "or accept the new ones with --override: agent.lr: 0.01 -> 0.5; "
        "train.updates_per_agent_step: 0.5 -> 2.0.\n"
    )
    assert (run / "checkpoints" / "catalog.json").read_bytes() == before
    assert RunDirectory.open(run).run_json["status"] == "done"


def test_case_11_override_takes_the_changes_over_and_tells_them(run, capsys):
    edit_config(run, agent__lr=0.5)
    assert main(["resume", str(run), "--steps", "310", "--override"]) == 0
    assert "config.yaml says now: agent.lr: 0.01 -> 0.5." in capsys.readouterr().out
    [event] = events(run, "configuration-overridden")
    assert event["changes"] == ["agent.lr: 0.01 -> 0.5"]
    after = files.read_manifest(run / "checkpoints" / "step-000000310").meta["config"]
    assert (after["agent"]["lr"], after["steps"]) == (0.5, 310)
    assert main(["resume", str(run), "--steps", "320"]) == 0  # accepted once and for all


@pytest.mark.parametrize(
    ("key", "change", "reason"),
    [
        ("agent__horizon", (1, 3), "slice_rows 2, but this one has 4"),
        ("env__num_envs", (1, 2), "num_envs 1, but this one has 2"),
    ],
)
def test_case_11_a_change_that_what_was_saved_cannot_fit_is_refused_once(
    run, key, change, reason, capsys
):
    edit_config(run, **{key: change[1]})
    before = (run / "config.yaml").read_bytes(), (run / "events.jsonl").read_bytes()
    assert main(["resume", str(run), "--steps", "310", "--override"]) == 2
    said = capsys.readouterr().err
    assert said == (
        f"What was saved does not fit the changes in {run / 'config.yaml'} "
        f"({key.replace('__', '.')}: {change[0]} -> {change[1]}); put the old values back, or "
        f"start a new run with the new ones: The saved replay has {reason}; "
        "resume with the configuration of the run.\n"
    )
    assert before == ((run / "config.yaml").read_bytes(), (run / "events.jsonl").read_bytes())


def test_case_11_a_key_that_the_checkpoint_does_not_know_had_its_default(run):
    """A newer version adds a key: its default is no change, another value is one."""
    forge_meta(newest(run), lambda meta: meta["config"]["env"].pop("workers"))
    assert resume_run(run).status == "done"
    edit_config(run, env__workers=True)
    with pytest.raises(ConfigError, match=r"env\.workers: False -> True"):
        resume_run(run)


def test_case_11_what_is_done_about_failures_may_change(run):
    """A time-out that was too short must not need --override, which is for other results."""
    edit_config(run, env__timeout_seconds=5.0, env__on_env_error="restart", env__max_restarts=2)
    assert resume_run(run, steps=310).status == "done"
    assert not events(run, "configuration-overridden")


def test_a_damaged_configuration_is_named_by_its_file(run):
    edit_config(run, train__threads=0)
    with pytest.raises(ConfigError, match=r"In .*config\.yaml: train\.threads is 0, but must be"):
        resume_run(run)


def test_case_11_other_versions_of_packages_are_told_once(run, caplog, monkeypatch):
    found = {**files.versions(), "torch": "99.0"}
    monkeypatch.setattr(files, "versions", lambda: found)
    resume_run(run, steps=310)
    told = [record for record in caplog.records if "written by other versions" in record.message]
    assert len(told) == 1 and f"torch {torch.__version__} -> 99.0" in told[0].message
    assert len(events(run, "versions-changed")) == 1


def other_agent(task: str = "gym:Pendulum-v1", name: str = "stub"):
    cls, config = (TDMPC2, TDMPC2Config()) if name == "tdmpc2" else (StubAgent, StubConfig())
    replay = TransitionReplayConfig(capacity_rows=2000, block_rows=64)
    spec = task_spec(task, EnvConfig())
    return cls(spec, config, replay, streams=Streams(1), device=torch.device("cpu"))


def test_case_12_a_checkpoint_of_another_agent_is_refused_by_both_names(run, tmp_path):
    sentence = (
        r"step-000000300 was written by stub for gym:Pendulum-v1 \(observations float32 \(3,\); "
        r"actions float32 \(1,\)\), but this is tdmpc2 for gym:Pendulum-v1 .*: use the agent and "
        r"task that it was trained with\.$"
    )
    with pytest.raises(FileError, match=sentence):
        other_agent(name="tdmpc2").load(newest(run))
    other_agent().save(tmp_path / "saved")
    with pytest.raises(FileError, match=r"saved was written by stub .* but this is tdmpc2"):
        other_agent(name="tdmpc2").load(tmp_path / "saved")


def test_case_12_a_checkpoint_of_another_task_is_refused_by_both_names_and_shapes(run):
    sentence = (
        r"by stub for gym:Pendulum-v1 \(observations float32 \(3,\); actions float32 \(1,\)\), but "
        r"this is stub for gym:MountainCarContinuous-v0 \(observations float32 \(2,\)"
    )
    with pytest.raises(FileError, match=sentence):
        other_agent("gym:MountainCarContinuous-v0").load(newest(run))


def test_case_12_an_equal_shape_of_another_task_is_taken_and_told(run, caplog):
    """To try an agent in a variant of its task is a fair wish."""
    forge_meta(newest(run), lambda meta: meta.update(task="gym:Windy-v0"))
    agent = other_agent()
    agent.load(newest(run), run / "replay")
    assert agent.updates == 160
    assert "was written by stub for gym:Windy-v0" in caplog.text


def test_case_12_a_checkpoint_put_into_the_wrong_run_is_skipped_or_refused_by_both_names(
    run, capsys, caplog
):
    forge_meta(newest(run), lambda meta: meta.update(task="gym:MountainCarContinuous-v0"))
    both = "was written by stub for gym:MountainCarContinuous-v0, but this run is stub for gym:Pend"
    assert main(["evaluate", str(run), "--checkpoint", "300"]) == 1
    assert both in capsys.readouterr().err
    assert main(["evaluate", str(run), "--episodes", "1"]) == 0  # the latest that is its own
    assert "stub at step 200" in capsys.readouterr().out
    assert both in caplog.text
    assert resume_run(run, steps=310).status == "done"
    assert events(run, "resumed")[0]["checkpoint"] == "step-000000200"


@pytest.mark.parametrize(("key", "value"), [("agent_name", "tdmpc2"), ("task", "gym:Acrobot-v1")])
def test_case_12_a_configuration_of_another_agent_or_task_is_refused_by_both_names(run, key, value):
    edit_config(run, **{key: value})
    was = {"agent_name": "stub", "task": "gym:Pendulum-v1"}[key]
    words = f"run.json says {key.removesuffix('_name')} {was}, but config.yaml says {key} {value}"
    for attempt in (resume_run, load_agent, lambda path: evaluate_target(str(path))):
        with pytest.raises(FileError, match=words):
            attempt(run)


def test_case_12_evaluation_tells_a_changed_configuration(run, caplog):
    edit_config(run, agent__lr=0.5)
    evaluate_target(str(run), episodes=1)
    assert f"config.yaml has changed since {NEWEST} was written: agent.lr: 0.01" in caplog.text


# -- two trainers ----------------------------------------------------------------------------------

HOLD = (
    "import sys, time; from pathlib import Path; from forethought.tracking import RunDirectory\n"
    "with RunDirectory.open(Path(sys.argv[1])).lock():\n"
    "    print('held', flush=True)\n"
    "    time.sleep(60)\n"
)


def test_case_26_a_second_trainer_is_refused_while_the_first_lives_and_succeeds_a_dead_one(
    run, capsys
):
    command = [sys.executable, "-c", HOLD, str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        assert main(["resume", str(run), "--steps", "310"]) == 1
        named = f"is being trained by process {other.pid} on {os.uname().nodename}: wait for it"
        assert named in capsys.readouterr().err
        assert RunDirectory.open(run).run_json["status"] == "done"  # nothing was touched
        other.kill()
        # Dead, but not yet waited for: a zombie has a pid and must not count as alive.
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        assert main(["resume", str(run), "--steps", "310"]) == 0
        pid = other.pid
    assert [event["pid"] for event in events(run, "lock-taken-over")] == [pid]


def test_case_26_a_new_run_is_not_begun_where_one_is(run):
    with pytest.raises(FileError, match="already holds a run: choose another place"):
        train_run(stub_run(), run)


def test_case_26_the_lock_of_another_host_stands(run):
    holder = {"pid": 1, "host": "elsewhere", "started": None}
    (run / "lock").write_text(json.dumps(holder))
    with pytest.raises(ForethoughtError, match=r"process 1 on elsewhere: if that .* remove .*lock"):
        resume_run(run, steps=310)
