"""Files that are whole or absent: publish, verify, fall back, tensors, JSON."""

import errno
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from forethought import files
from forethought.files import FileError

SHA256_OF_WEIGHTS = "9a129038d9a00aed0cf6a7ea059ca50a813449061ab87848cf1a13eafdf33b2c"


def checkpoint(parent: Path, step: int, text: str = "weights") -> Path:
    path = parent / f"step-{step:09d}"
    with files.publish(path, {"step": step}) as folder:
        (folder / "model.bin").write_text(text)
        (folder / "replay").mkdir()
        (folder / "replay" / "tail.bin").write_bytes(bytes(range(256)))
    return path


def leftovers(parent: Path) -> list[str]:
    return sorted(entry.name for entry in parent.iterdir() if entry.name.startswith("."))


def test_a_published_directory_verifies_and_names_every_file(tmp_path):
    path = checkpoint(tmp_path, 5)
    manifest = files.verify(path)
    assert manifest.schema == 1
    assert manifest.meta == {"step": 5}
    assert set(manifest.files) == {"model.bin", "replay/tail.bin"}
    assert manifest.files["model.bin"]["bytes"] == len("weights")
    # sha256 of "weights", by `printf weights | sha256sum`
    assert manifest.files["model.bin"]["sha256"] == SHA256_OF_WEIGHTS
    assert set(manifest.versions) == {"python", "forethought", "torch", "numpy", "gymnasium"}
    assert manifest.sha256 == files.sha256(path / "manifest.json")
    assert leftovers(tmp_path) == []


def test_meta_may_be_filled_while_writing(tmp_path):
    meta = {}
    with files.publish(tmp_path / "step-1", meta):
        meta["eval_score"] = 0.1
    assert files.verify(tmp_path / "step-1").meta == {"eval_score": 0.1}


@pytest.mark.parametrize("stage", ["write", "manifest", "rename"])
def test_a_fault_before_the_rename_leaves_the_old_directory_and_no_rubbish(
    tmp_path, monkeypatch, stage
):
    path = checkpoint(tmp_path, 5, "old")

    def fault(reached: str) -> None:
        if reached == stage:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "fault_point", fault)
    with pytest.raises(FileError, match=r"could not be written .No space left on device."):
        checkpoint(tmp_path, 5, "new")
    assert (path / "model.bin").read_text() == "old"
    files.verify(path)
    assert leftovers(tmp_path) == []


def test_an_error_of_the_writer_itself_passes_through_unchanged(tmp_path):
    with pytest.raises(ZeroDivisionError), files.publish(tmp_path / "step-1"):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_fault_points_come_in_order_and_the_last_after_publication(tmp_path, monkeypatch):
    seen = []
    path = tmp_path / "step-000000001"
    monkeypatch.setattr(files, "fault_point", lambda name: seen.append((name, path.exists())))
    checkpoint(tmp_path, 1)
    expected = [("write", False), ("manifest", False), ("rename", False), ("after-rename", True)]
    assert seen == expected


def test_publishing_again_replaces_the_directory(tmp_path):
    checkpoint(tmp_path, 5, "old")
    path = checkpoint(tmp_path, 5, "new")
    assert (path / "model.bin").read_text() == "new"
    assert leftovers(tmp_path) == []


def test_a_failure_between_the_two_renames_puts_the_old_directory_back(tmp_path, monkeypatch):
    path = checkpoint(tmp_path, 5, "old")
    rename = Path.rename

    def fail_for_the_new(self, target):
        if self.name.startswith(".tmp-step"):
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_for_the_new)
    with pytest.raises(FileError, match="Input/output error"):
        checkpoint(tmp_path, 5, "new")
    assert (path / "model.bin").read_text() == "old"
    assert leftovers(tmp_path) == []


def test_recover_clears_what_a_killed_writer_left(tmp_path):
    checkpoint(tmp_path, 1).rename(tmp_path / ".old-step-000000001")  # killed between two renames
    (tmp_path / ".tmp-step-000000002-77").mkdir()
    (tmp_path / ".tmpXyz").write_text("half of a tensor file")
    assert files.recover(tmp_path) == [
        "Removed the unfinished .tmp-step-000000002-77.",
        "Removed the unfinished .tmpXyz.",
        "Put step-000000001 back, which was being replaced.",
    ]
    assert files.newest_verified(tmp_path) == (tmp_path / "step-000000001", [])
    assert leftovers(tmp_path) == []


def test_a_missing_file_is_named(tmp_path):
    path = checkpoint(tmp_path, 1)
    (path / "replay" / "tail.bin").unlink()
    with pytest.raises(FileError, match=r"tail\.bin is missing"):
        files.verify(path)


def test_the_newest_that_verifies_is_taken_and_the_skipped_are_named(tmp_path):
    for step in (999_999_999, 1_000_000_000, 2):  # by number: as text, ten digits sort before nine
        checkpoint(tmp_path, step)
    (tmp_path / "step-1000000000" / "model.bin").write_text("damaged")
    (tmp_path / ".tmp-step-3000000000-1").mkdir()
    (tmp_path / "catalog.json").write_text("[]")
    path, skipped = files.newest_verified(tmp_path)
    assert path.name == "step-999999999"
    assert len(skipped) == 1
    assert skipped[0].startswith("Skipped step-1000000000: ")
    assert "model.bin" in skipped[0]


def test_no_complete_checkpoint_is_one_sentence(tmp_path):
    with pytest.raises(FileError, match=r"holds no usable checkpoint\. Train anew\."):
        files.newest_verified(tmp_path / "absent")


def test_json_keeps_every_bit_of_a_float_and_long_integers(tmp_path):
    data = {"a": 0.1 + 0.2, "b": 1e-310, "c": 2**127 - 1, "d": [None, True, "é"], "e": -0.0}
    files.write_json(tmp_path / "x.json", data)
    back = files.read_json(tmp_path / "x.json")
    assert back == data
    assert math.copysign(1, back["e"]) == -1


def test_json_is_measured_in_bytes_as_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_JSON_BYTES", 20)
    files.write_json(tmp_path / "x.json", "é" * 8)  # 16 bytes, two quotes and the line's end
    assert files.read_json(tmp_path / "x.json") == "é" * 8
    with pytest.raises(FileError, match="would be 21 bytes of JSON, but at most 20 bytes"):
        files.write_json(tmp_path / "x.json", "é" * 9)
    assert files.read_json(tmp_path / "x.json") == "é" * 8


def test_an_atomic_write_that_fails_keeps_the_old_file(tmp_path, monkeypatch):
    files.write_json(tmp_path / "x.json", 1)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FileError, match=r"x\.json could not be written .No space left"):
        files.write_json(tmp_path / "x.json", 2)
    assert files.read_json(tmp_path / "x.json") == 1
    assert leftovers(tmp_path) == []


def test_json_that_is_absent_or_broken_is_one_sentence(tmp_path):
    with pytest.raises(FileError, match=r"x\.json could not be read"):
        files.read_json(tmp_path / "x.json")
    (tmp_path / "x.json").write_text('{"a": ')
    with pytest.raises(FileError, match=r"x\.json is damaged"):
        files.read_json(tmp_path / "x.json")


def test_tensors_come_back_equal_whatever_their_kind(tmp_path):
    base = torch.arange(6.0)
    tensors = {
        "base": base,
        "view of the same memory": base[2:4],
        "transposed": base.view(2, 3).T,
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(7),
        "bool": torch.tensor([True, False]),
        "bf16": torch.ones(2, dtype=torch.bfloat16),
        "bytes": torch.arange(256, dtype=torch.uint8),
        "nan": torch.tensor([math.nan, math.inf]),
    }
    files.save_tensors(tmp_path / "x.safetensors", tensors, {"agent": "a", "step": "3"})
    back = files.load_tensors(tmp_path / "x.safetensors")
    assert set(back) == set(tensors)
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        torch.testing.assert_close(back[name], tensor, rtol=0, atol=0, equal_nan=True)
    assert files.load_metadata(tmp_path / "x.safetensors") == {"agent": "a", "step": "3"}


def test_equal_tensors_give_equal_bytes(tmp_path):
    words = {f"key{number}": "x" for number in range(9)}
    for name in ("a", "b"):
        files.save_tensors(tmp_path / name, {"w": torch.ones(3), "v": torch.zeros(2)}, words)
    assert files.sha256(tmp_path / "a") == files.sha256(tmp_path / "b")


def test_a_tensor_file_that_is_none_is_refused_by_name(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(b"\x80\x04c__builtin__\nexec\n")  # looks like a pickle
    with pytest.raises(FileError, match=r"x\.safetensors is damaged"):
        files.load_tensors(tmp_path / "x.safetensors")
    with pytest.raises(FileError, match=r"x\.safetensors is damaged"):
        files.load_metadata(tmp_path / "x.safetensors")
    with pytest.raises(FileError, match=r"y\.safetensors could not be read"):
        files.load_tensors(tmp_path / "y.safetensors")


def test_tensors_that_cannot_be_written_are_one_sentence(tmp_path):
    with pytest.raises(FileError, match=r"x\.safetensors could not be written"):
        files.save_tensors(tmp_path / "absent" / "x.safetensors", {"w": torch.ones(3)})


def test_the_files_room_itself_needs_no_torch():
    code = "import sys, forethought.files, forethought.seeding, forethought.clock\n"
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
