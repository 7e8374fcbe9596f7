"""Packed episodes: what is written comes back, and every fault in a dataset is found."""

import errno
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces

from forethought import files
from forethought.config import ConfigError
from forethought.data import Dataset, DatasetError, from_gym_steps, verify, write_dataset
from forethought.data.layout import EPISODE
from forethought.data.npy_files import GrowingColumn
from forethought.data.space_json import space_from_json, space_to_json
from forethought.files import FileError
from forethought.spaces.spec import Column, EnvSpec
from tests.data_stubs import episode_rows, make_dataset, spec, stamp


@pytest.fixture
def place(tmp_path):
    return make_dataset(tmp_path / "data")


def seal_again(folder):
    """A manifest that vouches for whatever is in the folder now: the work of a careful forger."""
    old = files.read_manifest(folder)
    (folder / files.MANIFEST).unlink()
    files._finish(folder, old.meta)


def change(folder, column, f):
    """Apply `f` to a column of the first shard, and make all checksums fit."""
    path = folder / "shard-00000" / f"{column}.npy"
    np.save(path, f(np.load(path)))
    seal_again(folder)


# Rows


def test_gym_steps_become_rows_in_one_place():
    rows = from_gym_steps(
        {"a": np.arange(4.0)}, np.array([1, 2, 3]), [7.0, 8.0, 9.0], [0, 0, 1], [False] * 3
    )
    assert rows["obs/a"].tolist() == [0, 1, 2, 3]
    assert rows["action"].tolist() == [0, 1, 2, 3]  # the action that LED to the row
    assert rows["reward"].tolist() == [0, 7, 8, 9]
    assert rows["terminated"].tolist() == [0, 0, 0, 1]


def test_every_row_comes_back(place):
    dataset = verify(place)
    assert dataset.rows == 5 + 9 + 3 + 12 + 4 and len(dataset.shards) > 1
    found = 0
    for shard in dataset.shards:
        for episode in shard.episodes:
            number, length = episode["episode_id"], episode["length"]
            rows = slice(episode["row_start"], episode["row_start"] + length)
            marks = stamp(number, np.arange(length)).astype(np.float32)
            assert np.array_equal(shard.columns["obs"][rows], np.repeat(marks[:, None], 3, 1))
            assert np.array_equal(shard.columns["reward"][rows][1:], marks[1:])
            assert shard.columns["action"][rows][1:] == pytest.approx(
                np.repeat(marks[1:, None], 2, 1) / 1e6
            )
            for name in ("reward", "action", "reward_valid", "action_valid"):
                assert not np.any(shard.columns[name][rows][0])
            assert shard.columns["is_first"][rows].tolist() == [True] + [False] * (length - 1)
            assert shard.columns["frame_id"][rows].tolist() == list(range(length))
            assert shard.columns["terminated"][rows][-1] == (number % 2 == 0)
            assert shard.columns["truncated"][rows][-1] == (number % 2 == 1)
            assert episode["return"] == marks[1:].astype(np.float64).sum()
            found += 1
    assert found == 4


def test_rows_are_mapped_and_cannot_be_written(place):
    column = Dataset.open(place).shards[0].columns["obs"]
    with pytest.raises(ValueError, match="read-only"):
        column[0] = 1.0


def test_the_description_tells_returns_and_lengths(place):
    dataset = Dataset.open(place)
    (task,) = dataset.tasks
    returns = [stamp(n, np.arange(1, t + 1)).sum() for n, t in enumerate((5, 9, 3, 12))]
    assert task.name == "stub:a" and task.policy == "random" and task.episodes == 4
    assert task.returns.mean == pytest.approx(np.mean(returns))
    assert task.returns.std == pytest.approx(np.std(returns))
    assert (task.returns.min, task.returns.max) == (min(returns), max(returns))
    assert (task.lengths.min, task.lengths.median, task.lengths.max) == (3, 7, 12)
    assert task.spec == spec()


def test_nested_spaces_and_declared_columns_come_back(tmp_path):
    obs = spaces.Dict(
        {"camera": spaces.Box(0, 255, (4, 4, 1), np.uint8), "a/b c".replace("/", "-"): box(2)}
    )
    action = spaces.Dict({"gear": spaces.Discrete(3, start=1), "keys": spaces.MultiBinary(2)})
    column = Column("mask", (3,), np.dtype(np.bool_), "mask")
    task = EnvSpec("stub:dict", obs, action, None, 4, False, (column,))
    rng = np.random.default_rng(0)
    camera = rng.integers(0, 256, (6, 4, 4, 1), dtype=np.uint8)
    mask = rng.random((6, 3)) < 0.5
    gear = rng.integers(1, 4, 5)
    rows = from_gym_steps(
        {"camera": camera, "a-b c": rng.normal(size=(6, 2))},
        {"gear": gear, "keys": rng.integers(0, 2, (5, 2), dtype=np.int8)},
        np.ones(5),
        np.zeros(5, bool),
        np.zeros(5, bool),  # neither: the recording was cut there
        {"mask": mask},
    )
    with write_dataset(tmp_path / "d", [task], ["random"], source="stub") as writer:
        writer.append_episode(rows, success=1.0, relevant=True)
    dataset = verify(tmp_path / "d")
    columns = dataset.shards[0].columns
    assert np.array_equal(columns["obs/camera"], camera)
    assert np.array_equal(columns["action/gear"], [0, *gear])
    assert np.array_equal(columns["info/mask"], mask)
    assert dataset.tasks[0].spec == task
    assert dataset.episodes[0]["success"] == 1.0 and dataset.episodes[0]["relevant"]
    assert (tmp_path / "d" / "shard-00000" / "obs.camera.npy").is_file()


def box(n, low=-np.inf, high=np.inf):
    return spaces.Box(low, high, (n,), np.float32)


@pytest.mark.parametrize(
    "space",
    [
        box(3),
        spaces.Box(np.array([-1.0, -np.inf]), np.array([2.5, np.inf]), dtype=np.float64),
        spaces.Box(0, 255, (3, 2, 2), np.uint8),
        spaces.Discrete(5, start=-2),
        spaces.MultiDiscrete([3, 4], start=[1, 0]),
        spaces.MultiBinary((2, 3)),
        spaces.MultiBinary(4),
        spaces.Dict({"z": box(1), "a": spaces.Dict({"x": spaces.Discrete(2)})}),
    ],
    ids=lambda space: type(space).__name__,
)
def test_a_space_comes_back_from_json(space):
    data = json.loads(json.dumps(space_to_json(space), allow_nan=False))
    assert space_from_json(data) == space


def test_a_dict_keeps_the_order_of_its_keys():
    """What a step of the codec chooses first is the first key: sorted, it would be another."""
    space = spaces.Dict([("turn", spaces.Discrete(3)), ("accelerate", spaces.Discrete(2))])
    assert list(space_from_json(space_to_json(space)).spaces) == ["turn", "accelerate"]


def test_a_description_cannot_ask_for_gigabytes():
    data = {"type": "Box", "dtype": "float32", "shape": [2**40], "low": 0, "high": 1}
    with pytest.raises(ValueError, match="a space of shape"):
        space_from_json(data)


def test_tasks_of_unequal_width_share_padded_columns(tmp_path):
    two = [spec("stub:narrow", 2, 1), spec("stub:wide", 5, 3)]
    dataset = verify(make_dataset(tmp_path / "d", specs=two))
    shard = dataset.shards[0]
    assert shard.columns["obs"].shape[1] == 5 and shard.columns["action"].shape[1] == 3
    assert not shard.columns["obs"][shard.columns["task"] == 0][:, 2:].any()
    assert [task.spec.observation_space.shape for task in dataset.tasks] == [(2,), (5,)]


# What the writer refuses


def wrong(**changes):
    rows = episode_rows(0, 4)
    return {**rows, **{key.replace("__", "/"): value for key, value in changes.items()}}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (wrong(reward=np.zeros(4, np.float32)), "columns of unequal length: .*reward 4"),
        (wrong(obs=np.zeros((5, 4))), r"obs of shape \(4,\), but its task says \(3,\)"),
        (wrong(obs=np.full((5, 3), np.nan)), "obs that is not finite as float32 in row 0"),
        (wrong(reward=np.arange(1.0, 6.0)), "reward 1.0 in its first row"),
        (wrong(action=np.full((5, 2), 0.5)), "in its first row, which no action led to"),
        (wrong(action=np.eye(5, 2, -1) * 3), "action 3.0 in row 1, which lies outside its space"),
        (wrong(terminated=np.arange(5) == 2), "is terminated in row 2 of 5"),
        (wrong(obs=np.zeros((5, 3), complex)), "obs of type complex128"),
        (wrong(bonus=np.zeros(5)), "has the columns .*bonus"),
        (episode_rows(0, 0), "has 1 rows, but needs a first one and a decision"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_episode_that_breaks_a_rule_leaves_nothing_behind(tmp_path, rows, said):
    with (
        pytest.raises(DatasetError, match=said),
        write_dataset(tmp_path / "d", [spec()], ["random"], source="stub") as writer,
    ):
        writer.append_episode(episode_rows(0, 4))
        writer.append_episode(rows)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(self, rows):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(GrowingColumn, "append", full)
    with pytest.raises(FileError, match=r"could not be written \(No space left"):
        make_dataset(tmp_path / "d")
    assert list(tmp_path.iterdir()) == []


def test_a_large_dataset_opens_few_files(tmp_path):
    """A process may often have no more than 1024 open; each shard has a dozen columns."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    dataset = Dataset.open(make_dataset(tmp_path / "d", [3] * 12, shard_bytes=1))
    assert len(dataset.shards) == 12
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 2


def test_what_a_terminal_would_obey_is_no_name(tmp_path):
    with pytest.raises(DatasetError, match=r"cannot be shown: 'stub:\\x1b\[2J'"):
        make_dataset(tmp_path / "d", specs=[spec("stub:\x1b[2J")])
    assert list(tmp_path.iterdir()) == []


def test_a_dataset_without_episodes_is_not_written(tmp_path):
    with (
        pytest.raises(DatasetError, match="stub:a has no episodes"),
        write_dataset(tmp_path / "d", [spec()], ["random"], source="stub"),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_nothing_that_exists_is_replaced(tmp_path, place):
    before = files.read_manifest(place).sha256
    with pytest.raises(ConfigError, match="exists already"):
        make_dataset(place)
    assert files.read_manifest(place).sha256 == before
    (tmp_path / "empty").mkdir()
    verify(make_dataset(tmp_path / "empty"))


def test_tasks_that_cannot_share_columns_are_refused(tmp_path):
    image = EnvSpec("stub:i", spaces.Box(0, 255, (3,), np.uint8), box(1, -1, 1), None, 1, True)
    with pytest.raises(ConfigError, match="make two datasets"):
        make_dataset(tmp_path / "d", specs=[spec(), image])
    nested = EnvSpec("stub:n", spaces.Dict({"a": box(3)}), box(1, -1, 1), None, 1, True)
    with pytest.raises(ConfigError, match="make two datasets"):
        make_dataset(tmp_path / "d", specs=[spec(), nested])


# What verify finds


def test_every_flipped_bit_is_found(place):
    """Each file, at 12 places spread over it, header and last byte included."""
    flips = 0
    for file in sorted(path for path in place.rglob("*") if path.is_file()):
        content = file.read_bytes()
        for where in np.unique(np.linspace(0, len(content) - 1, 12).astype(int)):
            damaged = bytearray(content)
            damaged[where] ^= 1 << int(where) % 8
            file.write_bytes(damaged)
            with pytest.raises(FileError):
                verify(place)
            flips += 1
        file.write_bytes(content)
    assert flips > 200
    verify(place)


@pytest.mark.parametrize("share", [0, 0.01, 0.5, 0.99])
def test_every_truncated_file_is_found_on_opening(place, share):
    for file in sorted(path for path in place.rglob("*") if path.is_file()):
        content = file.read_bytes()
        file.write_bytes(content[: int(share * len(content))])
        with pytest.raises(FileError) as caught:
            Dataset.open(place)
        assert "\n" not in str(caught.value)
        file.write_bytes(content)


def test_a_missing_shard_or_column_is_named(place):
    shutil.move(place / "shard-00001", place.parent / "aside")
    with pytest.raises(FileError, match=r"shard-00001/.* is missing"):
        Dataset.open(place)
    shutil.move(place.parent / "aside", place / "shard-00001")
    (place / "shard-00000" / "reward.npy").unlink()
    with pytest.raises(FileError, match=r"reward\.npy is missing"):
        verify(place)


@pytest.mark.parametrize(
    ("column", "f", "said"),
    [
        ("reward", lambda x: x[:-1], "the columns are unequal"),
        ("reward", lambda x: np.roll(x, 1), "reward is not zero in the first row"),
        ("reward", lambda x: np.where(x > 0, x[::-1], 0).astype(x.dtype), "sum up to"),
        ("reward", lambda x: x.astype(np.float64), "holds rows of float64"),
        ("is_first", lambda x: np.roll(x, 1), "exactly where an episode begins"),
        ("action_valid", lambda x: x | True, "action_valid is True"),
        ("reward_valid", lambda x: x & False, "reward_valid is False"),
        ("frame_id", lambda x: x + 1, "must count up"),
        ("task", lambda x: x + 1, "of another task"),
        ("terminated", lambda x: np.roll(x, -1), "in its last row only"),
        ("obs", lambda x: np.where(x == x[2], np.nan, x).astype(x.dtype), "obs is not finite"),
        (
            "action",
            lambda x: np.where(x == x[2], 7, x).astype(x.dtype),
            "in row 2, which lies",
        ),
        ("episodes", lambda x: x[:1], "the columns are unequal"),
        ("episodes", lambda x: shifted(x, "row_start", 1), "do not fill"),
        ("episodes", lambda x: shifted(x, "length", -1), "do not fill"),
        ("episodes", lambda x: shifted(x, "task", 1), "a task that the dataset does not have"),
        ("episodes", lambda x: shifted(x, "return", 1), "but its return is"),
        ("episodes", lambda x: shifted(x, "episode_id", 1), "not numbered"),
    ],
)
def test_wrong_rows_are_found_though_every_checksum_fits(place, column, f, said):
    """Seed 002, a reward array that is shifted by one: no checksum would tell."""
    change(place, column, f)
    files.verify(place)
    with pytest.raises(FileError, match=said):
        verify(place)


def test_an_episode_of_no_task_is_found_on_opening(place):
    """Learning from a dataset opens it and does not verify it."""
    change(place, "episodes", lambda x: shifted(x, "task", 1))
    with pytest.raises(DatasetError, match="a task that the dataset does not have"):
        Dataset.open(place)


@pytest.mark.parametrize(
    ("share", "held"), [(0.0, []), (0.25, [3, 7, 11]), (0.1, [9]), (0.5, [1, 3, 5, 7, 9, 11])]
)
def test_a_share_of_each_task_is_held_out(tmp_path, share, held):
    specs = [spec("stub:a"), spec("stub:b")]
    with write_dataset(tmp_path / "d", specs, ["x"] * 2, source="s", held_out=share) as writer:
        for number in range(12):
            for task in (0, 1):
                writer.append_episode(episode_rows(number, 3), task)
    table = verify(tmp_path / "d").episodes
    for task in (0, 1):
        assert np.flatnonzero(table[table["task"] == task]["split"]).tolist() == held


def test_a_share_of_less_than_an_episode_is_told(tmp_path, caplog):
    with write_dataset(tmp_path / "d", [spec()], ["x"], source="s", held_out=0.1) as writer:
        for number in range(5):
            writer.append_episode(episode_rows(number, 3))
    (said,) = [record.message for record in caplog.records]
    assert said.startswith("None of the 5 episodes of stub:a is held out, though")


def test_a_split_that_there_is_not_is_refused_before_anything_is_written(tmp_path):
    with (
        pytest.raises(ConfigError, match="split is test, but must be train or held-out"),
        write_dataset(tmp_path / "d", [spec()], ["x"], source="s") as writer,
    ):
        writer.append_episode(episode_rows(0, 3), split="test")


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
def test_a_share_that_cannot_be_held_out_is_refused(tmp_path, share):
    with (
        pytest.raises(ConfigError, match=r"held_out is .*, but must be a share"),
        write_dataset(tmp_path / "d", [spec()], ["x"], source="s", held_out=share),
    ):
        pass


def masked_dataset(path, mask):
    """Three decisions among three actions, with what was legal at each of four rows."""
    obs = spaces.Box(-1, 1, (1,), np.float32)
    column = Column("action_mask", (3,), np.dtype(np.bool_), "m")
    task = EnvSpec("stub:masked", obs, spaces.Discrete(3), 5, 1, True, columns=(column,))
    never, last = np.zeros(3, bool), np.arange(3) == 2
    rows = from_gym_steps(
        np.zeros((4, 1)), np.array([0, 1, 2]), np.ones(3), last, never, {"action_mask": mask}
    )
    with write_dataset(path, [task], ["random"], source="stub") as writer:
        writer.append_episode(rows)
    return path


def test_a_mask_that_leaves_nothing_to_do_is_refused_and_found(tmp_path):
    """But where the episode has terminated nothing has to be legal."""
    mask = np.ones((4, 3), bool)
    mask[3] = False
    whole = masked_dataset(tmp_path / "whole", mask)
    assert verify(whole).rows == 4
    mask[1] = False
    with pytest.raises(DatasetError, match=r"info/action_mask in row 1 that allows no action"):
        masked_dataset(tmp_path / "bad", mask)
    change(whole, "info.action_mask", lambda x: mask)
    with pytest.raises(DatasetError, match="allows no action at all in row 1"):
        verify(whole)


def test_discrete_actions_outside_their_space_are_found(tmp_path):
    place = masked_dataset(tmp_path / "data", np.ones((4, 3), bool))
    change(place, "action", lambda x: np.where(x == 2, 9, x).astype(x.dtype))
    with pytest.raises(DatasetError, match="action is 9 in row 3, which lies outside"):
        verify(place)


def shifted(table, field, by):
    table = table.astype(EPISODE)
    table[field] += by
    return table


def test_padding_that_is_not_zero_is_found(tmp_path):
    place = make_dataset(tmp_path / "d", specs=[spec("stub:n", 2, 1), spec("stub:w", 5, 3)])
    change(place, "obs", lambda x: x + 1)
    with pytest.raises(DatasetError, match=r"obs of stub:n is wider than its 2 elements"):
        verify(place)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda m: m["tasks"][0]["returns"].update(mean=1e9), "the returns of stub:a are"),
        (lambda m: m["tasks"][0].update(episodes=3), "but is said to have 3"),
        (lambda m: m.update(dataset_schema=99), "update forethought"),
        (lambda m: m["columns"][0].update(shape=[4]), "its columns are not those of its tasks"),
        (lambda m: m["shards"][0].update(name="../elsewhere"), "does not hold what it must"),
        (lambda m: m["shards"][0].update(rows=2**60), "does not hold what it must"),
        (lambda m: m["shards"].clear(), "it names no shards"),
        (lambda m: m.pop("tasks"), "does not hold what it must"),
        (lambda m: m["tasks"].clear(), "does not hold what it must"),
        (lambda m: m["tasks"][0].update(policy="a\x1b[2J"), "cannot be shown"),
        (lambda m: m["tasks"][0]["spec"].update(task="a\nb"), "cannot be shown"),
    ],
)
def test_a_description_that_cannot_be_is_refused(place, edit, said):
    meta = json.loads((place / "meta.json").read_text())
    edit(meta)
    (place / "meta.json").write_text(json.dumps(meta))
    seal_again(place)
    with pytest.raises(FileError, match=said):
        verify(place)


def test_what_is_no_dataset_is_told_so(tmp_path):
    with pytest.raises(ConfigError, match="There is no dataset"):
        verify(tmp_path / "absent")
    (tmp_path / "file").write_bytes(b"x")
    for path in (tmp_path, tmp_path / "file"):
        with pytest.raises(DatasetError, match="is not a dataset: it must be a folder with"):
            verify(path)
    with files.publish(tmp_path / "checkpoint", {"agent_steps": 3}):
        pass
    with pytest.raises(DatasetError, match="published by something else"):
        verify(tmp_path / "checkpoint")
