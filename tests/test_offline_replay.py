"""A replay that is a dataset: slices inside episodes, the right odds, padding, exact resume."""

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from gymnasium.spaces import Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from hypothesis import given, settings
from hypothesis import strategies as st

from forethought.config import ConfigError, EpisodeReplayConfig, TransitionReplayConfig
from forethought.data import Dataset, OfflineReplay, from_gym_steps, write_dataset
from forethought.files import FileError
from forethought.replay import Replay, ReplayError
from forethought.spaces.spec import Column, EnvSpec
from tests.data_stubs import TASK_COLUMN, episode_rows, make_dataset, spec, stamp

CPU = torch.device("cpu")
LENGTHS = (5, 9, 3, 12, 2, 7)
KINDS = ("episodes", "transitions")


def replay_of(*datasets, task=None, slice_rows=4, seed=0, **options):
    stream = np.random.Generator(np.random.PCG64(seed))
    return OfflineReplay(datasets, task or spec(), slice_rows, stream, CPU, **options)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return Dataset.open(
        make_dataset(tmp_path_factory.mktemp("data") / "d", LENGTHS, shard_bytes=700)
    )


def where(batch):
    """(episode, first row) of each slice, read from the marks in the observations."""
    marks = batch.obs[0, :, 0].numpy()
    return [(int(mark) // 1000 - 1, int(mark) % 1000) for mark in marks]


def check_slices(batch, lengths):
    """Every number of every column is the one that belongs to its row."""
    slice_rows = len(batch.obs)
    for b, (episode, first) in enumerate(where(batch)):
        rows = np.arange(first, first + slice_rows)
        assert rows[-1] <= lengths[episode], "a slice leaves its episode"
        marks = stamp(episode, rows).astype(np.float32)
        assert np.array_equal(batch.obs[:, b, 0], marks)
        assert np.array_equal(batch.reward[:, b], marks[1:])
        assert np.allclose(batch.action[:, b, 0] * 1e6, marks[1:])
        last = rows[1:] == lengths[episode]
        assert np.array_equal(batch.terminated[:, b] == 1.0, last & (episode % 2 == 0))
        assert np.array_equal(batch.truncated[:, b], last & (episode % 2 == 1))
        assert np.array_equal(batch.is_first[:, b], rows == 0)


def starts_of(lengths, slice_rows):
    """The obvious enumeration of what may be drawn."""
    return [(e, s) for e, steps in enumerate(lengths) for s in range(steps + 1 - slice_rows + 1)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("storage", ["mapped", "memory"])
def test_slices_hold_the_rows_they_say(data, kind, storage):
    replay = replay_of(data, kind=kind, storage=storage)
    assert len(data.shards) > 2
    batch = replay.sample(300)
    assert batch.obs.shape == (4, 300, 3) and batch.action.shape == (3, 300, 2)
    assert batch.terminated.dtype == torch.float32 and batch.truncated.dtype == torch.bool
    check_slices(batch, LENGTHS)


@pytest.mark.parametrize("kind", KINDS)
def test_every_valid_start_is_drawn_with_the_right_odds(data, kind):
    """Against the enumeration: per episode then start, or over all starts alike."""
    draws = 60_000
    found = Counter(where(replay_of(data, kind=kind).sample(draws)))
    valid = starts_of(LENGTHS, 4)
    assert set(found) == set(valid)
    episodes = {episode for episode, _ in valid}
    per_episode = Counter(episode for episode, _ in valid)
    for episode, start in valid:
        by_episode = 1 / len(episodes) / per_episode[episode]
        odds = by_episode if kind == "episodes" else 1 / len(valid)
        spread = np.sqrt(draws * odds * (1 - odds))
        assert abs(found[episode, start] - draws * odds) < 5 * spread, (episode, start)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 8), min_size=1, max_size=8),
    slice_rows=st.integers(1, 6),
    kind=st.sampled_from(KINDS),
    shard_bytes=st.integers(50, 3000),
)
def test_no_slice_ever_crosses_an_episode(tmp_path_factory, lengths, slice_rows, kind, shard_bytes):
    path = tmp_path_factory.mktemp("property") / "d"
    dataset = Dataset.open(make_dataset(path, lengths, shard_bytes=shard_bytes))
    if max(lengths) + 1 < slice_rows:
        with pytest.raises(ConfigError, match=r"has the .* rows of a slice"):
            replay_of(dataset, slice_rows=slice_rows, kind=kind)
        return
    replay = replay_of(dataset, slice_rows=slice_rows, kind=kind)
    batch = replay.sample(64)
    check_slices(batch, lengths)
    assert set(where(batch)) <= set(starts_of(lengths, slice_rows))


@pytest.mark.parametrize("config", [EpisodeReplayConfig(), TransitionReplayConfig()])
def test_a_batch_has_the_form_of_a_replay_of_experience(data, config):
    replay = Replay(spec(), config, 1, 4, np.random.default_rng(0), CPU)
    for number, steps in enumerate(LENGTHS):
        rows = episode_rows(number, steps, terminated=number % 2 == 0)
        for t in range(steps + 1):
            replay.add({**{k: v[t] for k, v in rows.items()}, "is_first": t == 0}, 0)
    ours, theirs = replay_of(data, kind=config.kind).sample(8), replay.sample(8)
    for name in ("obs", "action", "reward", "terminated", "truncated", "is_first"):
        a, b = getattr(ours, name), getattr(theirs, name)
        assert (a.shape, a.dtype) == (b.shape, b.dtype), name
    assert ours.extras == theirs.extras == {}


# Tasks


def test_several_datasets_of_unequal_width_are_padded_and_numbered(tmp_path):
    narrow, wide = spec("stub:narrow", 2, 1), spec("stub:wide", 5, 3)
    a = Dataset.open(make_dataset(tmp_path / "a", (6, 7), [narrow]))
    b = Dataset.open(make_dataset(tmp_path / "b", (8, 9), [wide]))
    many = spec("multi:", 6, 3, columns=(TASK_COLUMN,))
    replay = replay_of(a, b, task=many, tasks=["stub:wide", "stub:narrow"])
    assert replay.episodes_per_task == {"stub:wide": 2, "stub:narrow": 2}
    batch = replay.sample(200)
    task = batch.extras["task"]
    assert (
        task.shape == (4, 200)
        and task.dtype == torch.int64
        and set(task.flatten().tolist()) == {0, 1}
    )
    for number, (obs, action) in enumerate([(5, 3), (2, 1)]):
        mine = task[0] == number
        assert (batch.obs[:, mine, :obs] > 0).all() and (batch.obs[:, mine, obs:] == 0).all()
        assert (batch.action[:, mine, :action] > 0).all()
        assert (batch.action[:, mine, action:] == 0).all()
    assert 60 < int((task[0] == 0).sum()) < 140


@pytest.mark.parametrize(("obs", "action"), [(3, 1), (2, 2)])
def test_a_task_that_is_narrower_in_the_data_than_alone_is_refused(tmp_path, obs, action):
    """Padding is for the other tasks' width: zeros in place of what a task itself shows would be
    learned from in silence."""
    narrow, wide = spec("stub:narrow", obs, action), spec("stub:wide", 5, 3)
    a = Dataset.open(make_dataset(tmp_path / "a", (6, 7), [spec("stub:narrow", 2, 1)]))
    b = Dataset.open(make_dataset(tmp_path / "b", (8, 9), [wide]))
    many = replace(spec("multi:", 5, 3, columns=(TASK_COLUMN,)), tasks=(narrow, wide))
    with pytest.raises(ConfigError, match=r"of stub:narrow is .*, but the task's is"):
        replay_of(a, b, task=many, tasks=["stub:narrow", "stub:wide"])


def test_one_task_of_a_padded_dataset_is_cut_to_its_own_width(tmp_path):
    two = [spec("stub:narrow", 2, 1), spec("stub:wide", 5, 3)]
    dataset = Dataset.open(make_dataset(tmp_path / "d", (6, 7, 8, 9), two))
    replay = replay_of(dataset, task=two[0])
    batch = replay.sample(50)
    assert batch.obs.shape == (4, 50, 2) and batch.action.shape == (3, 50, 1)
    assert {episode for episode, _ in where(batch)} == {0, 2}
    assert (
        replay.left_out == 2
        and "2 more of other tasks or splits, or too short" in replay.describe()
    )


def test_data_that_is_read_into_memory_has_every_checksum_compared(tmp_path):
    """A reward that is another number is still a number; only its checksum tells."""
    place = make_dataset(tmp_path / "d", (6, 7))
    column = next(place.glob("*/reward.npy"))
    content = bytearray(column.read_bytes())
    content[-4] ^= 1  # of the last number's lowest byte
    column.write_bytes(content)
    assert replay_of(Dataset.open(place), storage="mapped").rows
    with pytest.raises(FileError, match=r"reward\.npy"):
        replay_of(Dataset.open(place), storage="memory")


def test_held_out_episodes_are_never_drawn(tmp_path):
    dataset = Dataset.open(make_dataset(tmp_path / "d", (6, 7, 8, 9), held_out=(1, 2)))
    replay = replay_of(dataset)
    assert {episode for episode, _ in where(replay.sample(100))} == {0, 3}
    others = replay_of(dataset, split="held-out")
    assert {episode for episode, _ in where(others.sample(100))} == {1, 2}
    with pytest.raises(ReplayError, match="has split train, but this one has held-out"):
        others.check(*replay.state())
    with pytest.raises(ReplayError, match="has split held-out, but this one has train"):
        replay.check(*others.state())
    state, tensors = replay.state()
    del state["layout"]["split"]  # as it was saved before there was a choice
    replay.check(state, tensors)


@pytest.mark.parametrize(
    "space",
    [
        Tuple((Discrete(3), Discrete(4))),
        Discrete(6, dtype=np.int32),
        MultiBinary(4),
        MultiDiscrete([3, 2]),
        Dict(a=Discrete(3), b=Discrete(2)),
    ],
    ids=lambda space: type(space).__name__,
)
def test_an_agents_own_recordings_fit_it(tmp_path, space):
    """However its actions are written down: a tuple is recorded as a dict."""
    own = replace(spec(), action_space=space)
    steps = [space.sample() for _ in range(9)]
    named = [
        {str(i): x for i, x in enumerate(step)} if isinstance(space, Tuple) else step
        for step in steps
    ]
    action = (
        {key: np.array([step[key] for step in named]) for key in named[0]}
        if isinstance(named[0], dict)
        else np.array(named)
    )
    rows = from_gym_steps(
        np.zeros((10, 3)), action, np.ones(9), np.zeros(9, bool), np.arange(9) == 8
    )
    with write_dataset(tmp_path / "d", [own], ["x"], source="stub") as writer:
        writer.append_episode(rows)
    assert replay_of(Dataset.open(tmp_path / "d"), task=own).sample(4).reward.shape == (3, 4)


@pytest.mark.parametrize(("held_out", "split"), [((), "held-out"), ((0, 1), "train")])
def test_a_split_without_episodes_is_told(tmp_path, held_out, split):
    dataset = Dataset.open(make_dataset(tmp_path / "d", (60, 70), held_out=held_out))
    with pytest.raises(ConfigError, match=f"is of the split {split}; record or import with"):
        replay_of(dataset, split=split)


@pytest.mark.parametrize(("recorded", "here"), [(6, 18), (18, 6), (5, 2)])
def test_actions_of_another_numbering_are_refused(tmp_path, recorded, here):
    """Action 5 of Pong's six is another button than action 5 of all eighteen."""
    specs = [replace(spec(), action_space=Discrete(n)) for n in (recorded, here)]
    rows = episode_rows(0, 9)
    rows["action"] = (np.arange(10) % 2).astype(np.int64)
    with write_dataset(tmp_path / "d", [specs[0]], ["x"], source="stub") as writer:
        writer.append_episode(rows)
    dataset = Dataset.open(tmp_path / "d")
    with pytest.raises(
        ConfigError, match=rf"are Discrete\({recorded}\) there, but Discrete\({here}\) here"
    ):
        replay_of(dataset, task=specs[1])
    assert replay_of(dataset, task=specs[0]).sample(4).action.shape == (3, 4)


def test_a_missing_task_is_named(data):
    with pytest.raises(ConfigError, match=r"There are no episodes of stub:b in .*, only of stub:a"):
        replay_of(data, tasks=["stub:a", "stub:b"])


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (spec(obs=2), r"obs of stub:a is float32 \(3,\), but the task's is float32 \(2,\)"),
        (spec(obs=4), r"obs of stub:a is float32 \(3,\), but the task's is float32 \(4,\)"),
        (spec(action=1), r"action of stub:a is float32 \(2,\)"),
        (spec(columns=(Column("wind", (2,), np.dtype(np.float32), "wind"),)), "wind .* is absent"),
    ],
)
def test_data_of_other_shapes_is_refused(data, task, said):
    with pytest.raises(ConfigError, match=said):
        replay_of(data, task=task)


def test_without_datasets_there_is_nothing_to_learn_from():
    with pytest.raises(ConfigError, match="No dataset was given"):
        replay_of()


# Extras and stacks


def test_declared_columns_and_stacks_come_with_the_slices(tmp_path):
    """Stacks against the obvious loop: frames before the episode are zeros, or its first again."""
    import gymnasium

    obs = gymnasium.spaces.Dict({"eye": gymnasium.spaces.Box(0, 255, (2,), np.uint8)})
    wind = Column("wind", (), np.dtype(np.float32), "wind")
    action = gymnasium.spaces.Discrete(4)
    task = EnvSpec("stub:eye", obs, action, None, 1, True, (wind,))
    steps = 9
    eye = (np.arange(steps + 1)[:, None] + [[10, 100]]).astype(np.uint8)
    rows = from_gym_steps(
        {"eye": eye},
        np.arange(steps) % 4,
        np.zeros(steps),
        np.zeros(steps, bool),
        np.zeros(steps, bool),
        {"wind": np.arange(steps + 1.0)},
    )
    with write_dataset(tmp_path / "d", [task], ["random"], source="stub") as writer:
        writer.append_episode(rows)
    dataset = Dataset.open(tmp_path / "d")
    for pad in ("zeros", "first"):
        replay = replay_of(dataset, task=task, stack={"obs/eye": 3}, stack_pad=pad)
        batch = replay.sample(40)
        assert batch.obs["eye"].shape == (4, 40, 3, 2) and batch.action.dtype == torch.int64
        for b, t in itertools.product(range(40), range(4)):
            row = int(batch.extras["wind"][t, b])
            wanted = [
                eye[max(row - back, 0)] * (row >= back or pad == "first") for back in (2, 1, 0)
            ]
            assert np.array_equal(batch.obs["eye"][t, b], wanted)


# The place of a replay


def test_a_look_from_outside_does_not_disturb_training(data):
    one, other = replay_of(data), replay_of(data)
    one.sample(16, np.random.default_rng(9))
    assert one.last_draw() is None
    assert torch.equal(one.sample(16).obs, other.sample(16).obs)
    draw = one.last_draw()
    assert len(draw["first_row"]) == 16 and draw["shard"][0].startswith("d/shard-")


@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_exactly_where_it_was_saved(data, kind):
    straight = replay_of(data, kind=kind)
    straight.sample(32)
    state, tensors = straight.state()
    assert tensors == {}
    wanted = [straight.sample(32).obs for _ in range(3)]
    resumed = replay_of(data, kind=kind, seed=5, storage="memory")
    resumed.restore(state, tensors, None)
    assert all(torch.equal(resumed.sample(32).obs, obs) for obs in wanted)


def test_a_state_of_other_data_is_refused(data, tmp_path):
    state, tensors = replay_of(data).state()
    other = Dataset.open(make_dataset(tmp_path / "d", LENGTHS[::-1]))
    with pytest.raises(ReplayError, match="datasets of the run"):
        replay_of(other).restore(state, tensors, None)
    with pytest.raises(ReplayError, match="slice_rows"):
        replay_of(data, slice_rows=3).restore(state, tensors, None)


def test_a_dataset_takes_no_rows_and_has_nothing_to_seal(data, tmp_path):
    replay = replay_of(data)
    with pytest.raises(ReplayError, match="takes no new rows"):
        replay.add({}, 0)
    with pytest.raises(ReplayError, match="no episode is open"):
        replay.close_episode(0)
    replay.seal_to(tmp_path / "nothing")
    assert replay.prune(tmp_path, set()) == [] and not (tmp_path / "nothing").exists()
    assert replay.can_sample(5) and replay.rows == sum(LENGTHS) + len(LENGTHS)


def test_what_does_not_fit_into_memory_is_left_on_the_disk(data, monkeypatch):
    from forethought.replay import memory

    monkeypatch.setattr(memory, "available_bytes", lambda device: 100)
    replay_of(data)
    with pytest.raises(ConfigError, match=r"leave it on the disk \(mapped\)"):
        replay_of(data, storage="memory")


@pytest.mark.parametrize("options", [{"kind": "rows"}, {"storage": "tape"}, {"slice_rows": 0}])
def test_options_are_checked(data, options):
    with pytest.raises(ConfigError):
        replay_of(data, **options)
