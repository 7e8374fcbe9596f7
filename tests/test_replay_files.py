"""Replay on disk: blocks written as they fill, checkpoints that name them, exact restoration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from forethought.config import EpisodeReplayConfig, TransitionReplayConfig
from forethought.files import FileError, load_tensors, save_tensors
from forethought.replay import Replay, ReplayError, blocks
from forethought.spaces import EnvSpec

SPEC = EnvSpec(
    "stub:count",
    spaces.Box(-np.inf, np.inf, (1,), np.float32),
    spaces.Box(-1, 1, (1,), np.float32),
    None,
    1,
    True,
)
KINDS = {"episodes": EpisodeReplayConfig, "transitions": TransitionReplayConfig}
both_kinds = pytest.mark.parametrize("kind", list(KINDS))


def make(kind: str = "episodes", capacity: int = 40, num_envs: int = 1, seed: int = 0) -> Replay:
    """Blocks of 8 rows, slices of 3."""
    config = KINDS[kind](capacity_rows=capacity, block_rows=8)
    return Replay(SPEC, config, num_envs, 3, np.random.default_rng(seed), torch.device("cpu"))


def feed(replay: Replay, first: int, end: int, sign: int = 1) -> None:
    """Rows first..end-1 of each environment, in episodes of 5; the observation is the number."""
    for number in range(first, end):
        for env in range(replay.num_envs):
            replay.add(
                {
                    "obs": np.array([sign * (number + 1000 * env)], np.float32),
                    "action": np.array([0.5], np.float32),
                    "reward": float(number),
                    "terminated": False,
                    "truncated": number % 5 == 4,
                    "is_first": number % 5 == 0,
                },
                env,
            )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def block_name(number: int, stream: int = 0) -> str:
    return f"stream{stream:02d}-block{number:08d}.safetensors"


def saved(replay: Replay, folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The state as it comes back from files."""
    state, tensors = replay.state()
    save_tensors(folder / "tensors.safetensors", tensors)
    return json.loads(json.dumps(state)), load_tensors(folder / "tensors.safetensors")


def assert_same_future(a: Replay, b: Replay, rows: int) -> None:
    """Equal samples now and while both go on from row `rows`."""
    for start in range(rows, rows + 30, 6):
        x, y = a.sample(32), b.sample(32)
        for name in ("obs", "action", "reward", "terminated", "truncated", "is_first"):
            assert torch.equal(getattr(x, name), getattr(y, name)), name
        feed(a, start, start + 6)
        feed(b, start, start + 6)


@both_kinds
@pytest.mark.parametrize("rows", [7, 16, 38, 103], ids="rows{}".format)
def test_the_next_samples_after_a_restore_are_those_of_the_undisturbed_replay(
    kind: str, rows: int, tmp_path: Path
):
    """Two rings of 20: before a block is full, at a block's end, wrapped, wrapped five times."""
    folder = tmp_path / "replay"
    replay = make(kind, num_envs=2)
    replay.seal_to(folder)
    feed(replay, 0, rows)
    replay.sample(10)
    restored = make(kind, num_envs=2, seed=5)
    restored.restore(*saved(replay, tmp_path), folder)
    assert restored.rows == replay.rows == 2 * min(rows, 20)
    assert_same_future(replay, restored, rows)


def test_blocks_are_written_when_they_fill_and_never_by_a_checkpoint(tmp_path: Path):
    """Blocks of 8: 23 rows are two blocks and a tail of 7, which the checkpoint holds."""
    replay = make()
    replay.seal_to(tmp_path)
    feed(replay, 0, 7)
    assert names(tmp_path) == []
    feed(replay, 7, 8)
    assert names(tmp_path) == [block_name(0)]
    feed(replay, 8, 23)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    state, tensors = replay.state()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    assert [block["name"] for block in state["streams"][0]["blocks"]] == [
        block_name(0),
        block_name(1),
    ]
    assert tensors["tail/0/column/obs"].flatten().tolist() == list(range(16, 23))


def test_a_checkpoint_names_only_the_blocks_that_the_ring_still_holds(tmp_path: Path):
    """Ring of 20, 45 rows: rows 25 to 44 are held, in blocks 3 (24-31) and 4 (32-39) and a tail."""
    replay = make(capacity=20)
    replay.seal_to(tmp_path)
    feed(replay, 0, 45)
    state, tensors = replay.state()
    assert [block["name"] for block in state["streams"][0]["blocks"]] == [
        block_name(3),
        block_name(4),
    ]
    assert tensors["tail/0/column/obs"].flatten().tolist() == list(range(40, 45))


def test_a_missing_or_altered_block_is_refused_by_name(tmp_path: Path):
    replay = make()
    replay.seal_to(tmp_path)
    feed(replay, 0, 30)
    state = replay.state()
    path = tmp_path / block_name(1)
    whole = path.read_bytes()

    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ReplayError, match=f"{block_name(1)} is not the one that was written"):
        make().restore(*state, tmp_path)
    path.unlink()
    with pytest.raises(ReplayError, match=f"{block_name(1)} is missing"):
        make().restore(*state, tmp_path)
    with pytest.raises(ReplayError, match=f"needs the replay block {block_name(0)}"):
        make().restore(*state, None)
    path.write_bytes(whole)
    make().restore(*state, tmp_path)


def test_pruning_keeps_what_checkpoints_name_and_what_the_next_one_needs(tmp_path: Path):
    """Ring of 16. A checkpoint at row 24 names blocks 1 and 2; at row 45 the ring needs 3 and 4."""
    replay = make(capacity=16)
    replay.seal_to(tmp_path)
    feed(replay, 0, 24)
    early = replay.state()
    keep = {block["name"] for block in early[0]["streams"][0]["blocks"]}
    assert keep == {block_name(1), block_name(2)}
    feed(replay, 24, 45)
    (tmp_path / ".tmp-stream00-block00000009.safetensors").write_text("killed while writing")
    (tmp_path / "notes.txt").write_text("not ours")
    gone = replay.prune(tmp_path, keep)
    assert gone == [".tmp-stream00-block00000009.safetensors", block_name(0)]
    assert names(tmp_path) == ["notes.txt", *(block_name(i) for i in (1, 2, 3, 4))]
    make(capacity=16).restore(*early, tmp_path)
    make(capacity=16).restore(*replay.state(), tmp_path)
    assert replay.prune(tmp_path, set()) == [block_name(1), block_name(2)]


def test_a_block_from_beyond_the_checkpoint_is_replaced_when_it_fills_again(tmp_path: Path):
    """The run went on to block 3, was killed and resumed at row 20; other rows fill block 2."""
    replay = make()
    replay.seal_to(tmp_path)
    feed(replay, 0, 20)
    checkpoint = replay.state()
    feed(replay, 20, 33)
    assert names(tmp_path) == [block_name(i) for i in range(4)]

    resumed = make()
    resumed.restore(*checkpoint, tmp_path)
    resumed.seal_to(tmp_path)
    feed(resumed, 20, 27, sign=-1)
    again = make()
    again.restore(*resumed.state(), tmp_path)  # block 2 of the killed run is not taken
    assert again.rows == 27
    feed(resumed, 27, 29, sign=-1)
    rows = load_tensors(tmp_path / block_name(2))["column/obs"].flatten().tolist()
    assert rows == [16, 17, 18, 19, -20, -21, -22, -23]
    again.restore(*resumed.state(), tmp_path)
    assert_same_future(resumed, again, 29)


@both_kinds
def test_without_a_folder_the_state_holds_every_row(kind: str, tmp_path: Path):
    replay, restored = make(kind, capacity=20), make(kind, capacity=20, seed=3)
    feed(replay, 0, 47)
    state, tensors = saved(replay, tmp_path)
    assert state["streams"][0]["blocks"] == []
    restored.restore(state, tensors, None)
    assert_same_future(replay, restored, 47)


def test_a_whole_state_needs_no_blocks(tmp_path: Path):
    replay, restored = make(capacity=20), make(capacity=20, seed=3)
    replay.seal_to(tmp_path)
    feed(replay, 0, 47)
    restored.restore(*replay.state(whole=True), None)
    assert_same_future(replay, restored, 47)


def test_a_restored_replay_writes_only_where_it_is_told(tmp_path: Path):
    """Loaded from run a and trained on in run b: a is left alone, b gets all that b needs."""
    a, b = tmp_path / "a", tmp_path / "b"
    replay = make(capacity=20)
    replay.seal_to(a)
    feed(replay, 0, 45)
    in_a = names(a)
    copy = make(capacity=20)
    copy.restore(*replay.state(), a)
    feed(copy, 45, 50)
    assert names(a) == in_a
    state, tensors = copy.state()
    assert state["streams"][0]["blocks"] == []  # those of run a may vanish
    assert tensors["tail/0/column/obs"].flatten().tolist() == list(range(30, 50))
    copy.seal_to(b)
    assert names(b) == [block_name(i) for i in (3, 4, 5)]  # block 3 from row 30 on
    restored = make(capacity=20)
    restored.restore(*saved(copy, tmp_path), b)
    assert_same_future(copy, restored, 50)


def test_a_failed_write_warns_once_and_loses_nothing(tmp_path: Path, monkeypatch, caplog):
    """A full disk at blocks 1 and 2: the checkpoint holds their rows; block 3 brings them all."""
    replay = make()
    replay.seal_to(tmp_path)
    feed(replay, 0, 10)
    real = blocks.save_tensors

    def full_disk(path: Path, *rest: Any) -> None:
        raise FileError(f"{path} could not be written (No space left on device).")

    monkeypatch.setattr(blocks, "save_tensors", full_disk)
    feed(replay, 10, 26)
    assert (caplog.text.count("No space left on device"), replay.seal_failures) == (1, 2)
    state, tensors = replay.state()
    assert [block["name"] for block in state["streams"][0]["blocks"]] == [block_name(0)]
    assert tensors["tail/0/column/obs"].flatten().tolist() == list(range(8, 26))
    restored = make()
    restored.restore(state, tensors, tmp_path)

    monkeypatch.setattr(blocks, "save_tensors", real)
    feed(replay, 26, 32)
    assert names(tmp_path) == [block_name(i) for i in range(4)]
    feed(restored, 26, 32)
    feed(replay, 32, 35)
    feed(restored, 32, 35)
    assert_same_future(replay, restored, 35)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ReplayError, match="cannot be made"):
        make().seal_to(tmp_path / "file" / "replay")


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (make("transitions"), "kind transitions, but this one has episodes"),
        (make(capacity=48), "capacity_rows_per_env 48, but this one has 40"),
        (make(capacity=80, num_envs=2), "num_envs 2, but this one has 1"),
    ],
)
def test_a_state_of_another_layout_is_refused(other: Replay, words: str):
    with pytest.raises(ReplayError, match=words):
        make().restore(*other.state(), None)


def gap_at_the_start(stream: dict[str, Any]) -> None:
    del stream["blocks"][0]


def no_blocks(stream: dict[str, Any]) -> None:
    stream["blocks"] = []


def gap_before_the_tail(stream: dict[str, Any]) -> None:
    del stream["blocks"][-1]


def block_off_its_grid(stream: dict[str, Any]) -> None:
    stream["blocks"][1]["first_row"] = 9


def foreign_name(stream: dict[str, Any]) -> None:
    stream["blocks"][1]["name"] = "../secret.safetensors"


def tail_after_the_end(stream: dict[str, Any]) -> None:
    stream["tail_row"] = 31


def more_open_than_written(stream: dict[str, Any]) -> None:
    stream["open_rows"] = 31


def endless(stream: dict[str, Any]) -> None:
    stream["written"] = 10**18


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (gap_at_the_start, "has a gap: of the rows from 0 on, its blocks hold those from 8 to 24"),
        (no_blocks, "has a gap"),
        (gap_before_the_tail, "has a gap"),
        (block_off_its_grid, "names blocks of stream 0 that cannot be"),
        (foreign_name, "names blocks of stream 0 that cannot be"),
        (tail_after_the_end, "cannot be: stream 0 has 30 rows, 0 of them in the open episode"),
        (more_open_than_written, "cannot be: stream 0 has 30 rows, 31 of them"),
        (endless, r"counts rows of stream 0 by \[24, 1000000000000000000, 0\]"),
    ],
)
def test_a_state_that_cannot_be_is_refused_before_anything_is_read(tmp_path, change, words):
    """30 rows in blocks of 8: three blocks and a tail from row 24 on."""
    replay = make()
    replay.seal_to(tmp_path)
    feed(replay, 0, 30)
    state, tensors = replay.state()
    change(state["streams"][0])
    other = make()
    with pytest.raises(ReplayError, match=words):
        other.restore(state, tensors, tmp_path)
    assert other.rows == 0


def test_a_block_never_outgrows_its_ring(tmp_path: Path):
    """Blocks of 8 rows asked for, rings of 5: blocks of 5 are written, none has lost rows."""
    replay = make("transitions", capacity=5)
    replay.seal_to(tmp_path)
    feed(replay, 0, 12)
    restored = make("transitions", capacity=5)
    restored.restore(*saved(replay, tmp_path), tmp_path)
    assert load_tensors(tmp_path / block_name(1))["column/obs"].flatten().tolist() == [
        5, 6, 7, 8, 9
    ]  # fmt: skip
    feed(replay, 12, 15)
    feed(restored, 12, 15)
    assert_same_future(replay, restored, 15)
