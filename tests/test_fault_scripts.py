"""The scripts that count faults would notice if one were missed."""

import importlib
import json
import random
from pathlib import Path

import pytest

from forethought import files
from forethought.files import Manifest
from forethought.training.loop import train_run
from tests.faults.forgery import forge_json, forge_tensors
from tests.stub_agent import register, stub_run

SCRIPTS = Path(__file__).parents[1] / "scripts" / "faults"


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module


@pytest.fixture
def run(tmp_path, monkeypatch):
    register(monkeypatch)
    layers = {"train": {"checkpoint_every_agent_steps": 50, "keep_checkpoints": 3}}
    return train_run(stub_run(steps=150, **layers), tmp_path / "run").path


def test_flipped_bits_are_counted_as_detected_and_put_back(run, scripts):
    flip_bits = scripts("flip_bits")
    before = {path: path.read_bytes() for path in sorted(run.rglob("*.safetensors"))}
    done = [flip_bits.flip(run, random.Random(seed)) for seed in range(25)]
    assert all(flip.detected for flip in done)
    assert {flip.outcome for flip in done} == {"older checkpoint", "refused"}
    assert {path: path.read_bytes() for path in before} == before
    flip_bits.check_unhurt(run)


def test_a_loader_that_checks_no_hashes_is_found_out(run, scripts, monkeypatch):
    flip_bits = scripts("flip_bits")

    def trusting(path: Path) -> Manifest:
        data = json.loads((path / files.MANIFEST).read_bytes())
        return Manifest(data["schema"], data["files"], data["versions"], data["meta"])

    newest = files.published(run / "checkpoints")[-1] / "agent.safetensors"
    monkeypatch.setattr(files, "verify", trusting)
    checkpoints = flip_bits.Checkpoints(flip_bits.RunDirectory.open(run))
    folders = files.published(run / "checkpoints")
    with flip_bits.flipped(newest, newest.stat().st_size - 1, 3):
        found = flip_bits.load(checkpoints, folders, folders[-1], newest)
    assert found == (False, "loaded", "")


def test_runs_that_differ_in_a_number_or_a_bit_are_different(run, scripts, tmp_path, monkeypatch):
    differences = scripts("compare_runs").differences
    layers = {"train": {"checkpoint_every_agent_steps": 50, "keep_checkpoints": 3}}
    same = train_run(stub_run(steps=150, **layers), tmp_path / "same").path
    assert differences(run, same) == []
    text = (same / "train.csv").read_text()
    (same / "train.csv").write_text(text.replace("\n150,", "\n149,"))
    assert differences(run, same) == ["train.csv"]
    (same / "train.csv").write_text(text)
    last = files.published(same / "checkpoints")[-1]
    forge_tensors(last, "agent.safetensors", lambda tensors: tensors["weight"][:1].neg_())
    forge_json(last, "loop.json", "gates.low_evaluations", 7)
    assert differences(run, same) == ["loop.json", "agent: weight"]


@pytest.mark.parametrize(
    ("part", "key"), [(0, "right"), (0, "runs_equal_to_undisturbed"), (1, "detected")]
)
def test_one_miss_among_all_is_not_right(scripts, part, key):
    all_right = scripts("kills_and_flips").all_right
    found = ({"kills": 3, "right": 3, "runs": 2, "runs_equal_to_undisturbed": 2},)
    found += ({"flips": 4, "detected": 4},)
    assert all_right(*found)
    found[part][key] -= 1
    assert not all_right(*found)


def kill(kill_runs, **changes):
    told = {"chain": "c", "kind": "k", "interval": 2, "seconds": 1.0, "stage": "write"}
    return kill_runs.Kill(
        **told, **{"phase": "p", "stood_at": 10, "newest_checkpoint": 8, **changes}
    )


def test_a_kill_is_right_if_at_most_one_interval_and_no_checkpoint_is_lost(scripts):
    kill_runs = scripts("kill_runs")
    assert kill(kill_runs, resumed_at=8).right  # 10 - 8 = one interval
    assert not kill(kill_runs, resumed_at=7).right  # 3 steps, more than one
    assert not kill(kill_runs, resumed_at=None).right
    assert not kill(kill_runs, resumed_at=8, newest_checkpoint=10).right  # 10 was published


def test_a_kill_in_the_start_up_of_a_resume_is_settled_by_the_next_one(scripts, tmp_path):
    """Killed at 10, killed again before it went on, then resumed at 9: both lost one step."""
    kill_runs = scripts("kill_runs")
    chain = kill_runs.Chain("c", next(iter(kill_runs.KINDS)), tmp_path)

    class Killed:
        seconds = 1.0

        def __init__(self, *stage):
            self.stage = lambda: stage

    chain.note_kill(Killed(10, "write"))
    chain.note_kill(Killed(None, "start-up"))
    assert [k.resumed_at for k in chain.kills] == [None, None]
    line = json.dumps({"kind": "resumed", "agent_steps": 9})
    (tmp_path / "events.jsonl").write_text(line + "\n")
    chain.note_kill(Killed(None, "start-up"))
    assert [(k.stood_at, k.resumed_at, k.lost) for k in chain.kills] == [
        (10, 9, 1),
        (10, 9, 1),
        (9, None, None),
    ]
    assert chain.kills[0].phase == "saving: writing the tensors"


def test_a_table_goes_to_its_place_in_the_page_and_a_trial_does_not(scripts, tmp_path, monkeypatch):
    result_file = scripts("result_file")
    page = tmp_path / "faults.md"
    page.write_text("a\n<!-- faults: begin -->\nold\n<!-- faults: end -->\nb\n")
    monkeypatch.setattr(result_file, "RESULTS", tmp_path)
    result_file.write(tmp_path / "trial.json", {"seconds": 3.2})
    result_file.put_in_page("faults", tmp_path / "trial.json", "| new |", page)
    assert "old" in page.read_text()
    result_file.write(tmp_path / "faults.json", {"seconds": 3.2})
    result_file.put_in_page("faults", tmp_path / "faults.json", "| new |", page)
    text = page.read_text()
    assert text.startswith("a\n<!-- faults: begin -->\nMeasured 20") and " in 3 s on " in text
    assert text.endswith("\n\n| new |\n<!-- faults: end -->\nb\n") and "old" not in text
