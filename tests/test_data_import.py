"""Importers: every number of the source stands in the row it belongs to."""

import json
import os
import subprocess
import sys

import gymnasium
import numpy as np
import pytest
import torch

from forethought.config import ConfigError, ForethoughtError
from forethought.data import DatasetError, OfflineReplay, verify
from forethought.data.importers import import_dataset
from forethought.data.layout import META
from forethought.data.minari import import_minari
from forethought.data.tdmpc2_chunks import import_tdmpc2, load_chunk
from forethought.data.tdmpc2_tasks import MT30, MT80
from forethought.envs import spec_of
from forethought.spaces.agent_view import agent_action, native_action
from tests.data_stubs import TASK_COLUMN, spec
from tests.import_stubs import (
    GENERATIONS,
    box_json,
    chunk_columns,
    minari_episode,
    write_chunk,
    write_minari,
)

h5py = pytest.importorskip("h5py")
NAMES = ["dmc:walker-walk", "dmc:cartpole-swingup"]


# TD-MPC2 chunks


@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_chunk_of_each_generation_is_read_without_tensordict(tmp_path, generation):
    columns = chunk_columns([0, 1, 0])
    path = write_chunk(tmp_path / "chunk.pt", columns, generation)
    found = load_chunk(path)
    for name, values in columns.items():
        assert np.array_equal(found[name], values, equal_nan=values.dtype.kind == "f")


def test_chunks_become_a_dataset_of_several_tasks(tmp_path):
    folder = tmp_path / "mt"
    folder.mkdir()
    (folder / META).write_text("{}")  # of whatever: without a manifest no dataset of ours
    with pytest.raises(DatasetError, match="is neither a Minari folder"):
        import_dataset(folder, tmp_path / "out")
    parts = [chunk_columns([0, 1, 0], seed=1), chunk_columns([1, 1], seed=2)]
    for number, columns in enumerate(parts):
        write_chunk(folder / f"chunk_{number}.pt", columns)
    import_dataset(folder, tmp_path / "out", tasks=NAMES)
    with pytest.raises(DatasetError, match=r"out is a dataset already: give it to --offline\.data"):
        import_dataset(tmp_path / "out", tmp_path / "again")
    dataset = verify(tmp_path / "out")
    assert [task.name for task in dataset.tasks] == NAMES
    assert [task.spec.observation_space.shape for task in dataset.tasks] == [(5,), (2,)]
    assert [task.spec.action_space.shape for task in dataset.tasks] == [(3,), (1,)]
    assert [task.episodes for task in dataset.tasks] == [2, 3]
    shard, episode = dataset.shards[0], 0
    for columns in parts:
        for number, task in enumerate(columns["task"][:, 0]):
            rows = slice(episode * 6, (episode + 1) * 6)
            assert np.array_equal(shard.columns["obs"][rows], columns["obs"][number])
            assert np.array_equal(shard.columns["action"][rows][1:], columns["action"][number, 1:])
            assert np.array_equal(shard.columns["reward"][rows][1:], columns["reward"][number, 1:])
            assert (
                shard.columns["reward"][rows][0] == 0 and not shard.columns["action"][rows][0].any()
            )
            assert shard.columns["truncated"][rows].tolist() == [False] * 5 + [True]
            assert shard.episodes[episode]["task"] == task
            episode += 1
    stream, many = np.random.default_rng(0), spec("multi:", 5, 3, columns=(TASK_COLUMN,))
    replay = OfflineReplay([dataset], many, 3, stream, torch.device("cpu"), tasks=NAMES)
    assert set(replay.sample(64).extras["task"].flatten().tolist()) == {0, 1}


def test_only_some_tasks_are_imported_when_asked(tmp_path):
    path = write_chunk(tmp_path / "chunk.pt", chunk_columns([0, 1, 0]))
    dataset = import_tdmpc2(path, tmp_path / "out", tasks=NAMES, only=NAMES[1:])
    assert [task.name for task in dataset.tasks] == NAMES[1:] and dataset.rows == 6
    assert {leaf.path: leaf.shape for leaf in dataset.leaves}["obs"] == (2,)
    with pytest.raises(
        ConfigError, match=r"episodes of dmc:walker-wlak in .* mean dmc:walker-walk"
    ):
        import_tdmpc2(path, tmp_path / "none", tasks=NAMES, only=["dmc:walker-wlak"])
    with pytest.raises(ConfigError, match="There are no episodes of dmc:fish-swim"):
        import_tdmpc2(path, tmp_path / "other", tasks=NAMES, only=["dmc:fish-swim"])


def test_a_task_that_can_be_made_keeps_its_own_width(tmp_path):
    """An element that happens to be zero in all of the data is the task's all the same."""
    columns = chunk_columns([0], obs=24, action=6, widths=((3, 1),))
    path = write_chunk(tmp_path / "chunk.pt", columns)
    dataset = import_tdmpc2(path, tmp_path / "out", tasks=["dmc:cartpole-swingup"], spec_of=spec_of)
    (task,) = dataset.tasks
    assert task.spec.observation_space.shape == (5,) and task.spec.action_space.shape == (1,)
    assert not dataset.shards[0].columns["obs"][:, 3:].any()
    other = import_tdmpc2(path, tmp_path / "other", tasks=["lab:task"], spec_of=spec_of)
    assert other.tasks[0].spec.observation_space.shape == (3,)


@pytest.mark.parametrize(
    ("widths", "obs"), [((6, 1), 24), ((5, 2), 24), ((3, 1), 4)], ids=["obs", "action", "file"]
)
def test_data_that_cannot_be_of_the_task_it_is_said_to_be_is_refused(tmp_path, widths, obs):
    columns = chunk_columns([0], obs=obs, action=6, widths=(widths,))
    path = write_chunk(tmp_path / "chunk.pt", columns)
    with pytest.raises(DatasetError, match="is not of dmc:cartpole-swingup, which has 5 numbers"):
        import_tdmpc2(path, tmp_path / "out", tasks=["dmc:cartpole-swingup"], spec_of=spec_of)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "task", ["minatar:breakout", "multi:dmc:cartpole-swingup,dmc:reacher-easy"]
)
def test_chunks_are_of_single_tasks_with_vectors(tmp_path, task):
    columns = chunk_columns([0], obs=24, action=6, widths=((5, 1),))
    path = write_chunk(tmp_path / "chunk.pt", columns)
    with pytest.raises(DatasetError, match=r"chunks hold vectors of single tasks, but that has"):
        import_tdmpc2(path, tmp_path / "out", tasks=[task], spec_of=spec_of)


def test_the_narrowest_file_counts_for_each_column_by_itself(tmp_path):
    """One file has room for 24 and 1, the other for 5 and 6: an action of 2 has none in both."""
    for name, obs, action in (("a", 24, 1), ("b", 5, 6)):
        columns = chunk_columns([0], obs=obs, action=action, widths=((5, 1),))
        write_chunk(tmp_path / f"{name}.pt", columns)
    task = ["dmc:reacher-easy"]  # 6 and 2
    with pytest.raises(DatasetError, match="of the 5 and 1 in the file 5 and 1 are used"):
        import_tdmpc2(tmp_path, tmp_path / "out", tasks=task, spec_of=spec_of)


def test_widths_that_are_guessed_are_told_with_the_reason(tmp_path, caplog):
    path = write_chunk(tmp_path / "chunk.pt", chunk_columns([0]))
    import_tdmpc2(path, tmp_path / "out", tasks=["dmc:cartpole-swingpu"], spec_of=spec_of)
    (said,) = [record.message for record in caplog.records]
    assert "guessed from the data" in said and "Did you mean dmc:cartpole-swingup?" in said
    caplog.clear()
    import_tdmpc2(path, tmp_path / "mine", tasks=[MT30[-1]], spec_of=spec_of)
    (said,) = [record.message for record in caplog.records]
    assert said.endswith(f"{MT30[-1]} (they have no environment here)")


def test_a_share_is_checked_before_anything_is_read(tmp_path):
    with pytest.raises(ConfigError, match="held_out is 2, but must be a share"):
        import_dataset(tmp_path / "absent.pt", tmp_path / "out", held_out=2)


def test_episodes_of_minari_are_held_out_too(tmp_path):
    folder = write_minari(tmp_path / "m", [minari_episode(5, seed=n) for n in range(4)], **BOX)
    dataset = import_dataset(folder, tmp_path / "out", held_out=0.5)
    assert dataset.episodes["split"].tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize(("rows", "names"), [(501, MT30), (101, MT80)])
def test_the_official_sets_are_known_by_the_length_of_their_episodes(tmp_path, rows, names):
    path = write_chunk(tmp_path / "chunk.pt", chunk_columns([1, 0], rows=rows))
    dataset = import_tdmpc2(path, tmp_path / "out")
    assert [task.name for task in dataset.tasks] == list(names[:2])
    assert dataset.tasks[0].spec.max_episode_steps == rows - 1
    assert (len(MT30), len(MT80), len(set(MT80))) == (30, 80, 80)


def test_terminations_of_a_chunk_are_kept(tmp_path):
    columns = chunk_columns([0, 0])
    columns["terminated"] = np.zeros((2, 6), np.float32)
    columns["terminated"][:, 0], columns["terminated"][1, -1] = np.nan, 1.0
    path = write_chunk(tmp_path / "chunk.pt", columns)
    dataset = import_tdmpc2(path, tmp_path / "out", tasks=NAMES)
    columns = verify(dataset.path).shards[0].columns
    assert np.flatnonzero(columns["terminated"]).tolist() == [11]
    assert np.flatnonzero(columns["truncated"]).tolist() == [5]


def altered(**changes):
    columns = chunk_columns([0, 1])
    return {**columns, **{name: f(columns[name]) for name, f in changes.items()}}


def without(name):
    return {key: value for key, value in chunk_columns([0, 1]).items() if key != name}


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        (altered(reward=lambda x: x[:, :-1]), "unequal columns: obs is"),
        (altered(action=lambda x: x[:1]), "unequal columns: action is"),
        (altered(task=lambda x: x.astype(np.float32)), "not made of task numbers"),
        (altered(task=lambda x: x - 1), "not made of task numbers"),
        (altered(task=lambda x: x + np.arange(6, dtype=np.int32)), "the task changes"),
        (altered(task=lambda x: x + 5), "a task number 6, but 2 tasks are named"),
        (altered(obs=lambda x: x * np.nan), "not finite"),
        (altered(action=lambda x: x * 3), r"actions outside \[-1, 1\]"),
        (without("task"), "has no tensor task, only obs, action, reward"),
    ],
)
def test_a_chunk_with_a_fault_is_refused_and_nothing_written(tmp_path, columns, said):
    path = write_chunk(tmp_path / "chunk.pt", columns)
    with pytest.raises((DatasetError, ConfigError), match=said):
        import_tdmpc2(path, tmp_path / "out", tasks=NAMES)
    assert [x.name for x in tmp_path.iterdir()] == ["chunk.pt"]


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.to(torch.bfloat16),
        lambda x: x.to(torch.float8_e4m3fn),
        lambda x: x.to_sparse(),
        lambda x: x * 1j,
        lambda x: torch.empty_like(x, device="meta"),
        lambda x: torch.zeros(1).expand(x.shape),
    ],
    ids=["bf16", "fp8", "sparse", "complex", "without content", "a promise"],
)
def test_tensors_that_are_not_plain_numbers_are_refused(tmp_path, change):
    columns = {name: torch.from_numpy(x) for name, x in chunk_columns([0, 1]).items()}
    columns["reward"] = change(columns["reward"])
    torch.save(columns, tmp_path / "chunk.pt")
    with pytest.raises(DatasetError, match=r"reward of type .* no plain tensor of numbers"):
        load_chunk(tmp_path / "chunk.pt")


def test_a_task_that_is_named_twice_is_refused(tmp_path):
    path = write_chunk(tmp_path / "chunk.pt", chunk_columns([0, 1]))
    with pytest.raises(ConfigError, match="The task dmc:walker-walk is named twice"):
        import_tdmpc2(path, tmp_path / "out", tasks=[NAMES[0], NAMES[0]])


def test_unknown_sets_must_be_named(tmp_path):
    path = write_chunk(tmp_path / "chunk.pt", chunk_columns([0]))
    with pytest.raises(ConfigError, match="Episodes of 6 rows are of no official set"):
        import_tdmpc2(path, tmp_path / "out")
    with pytest.raises(DatasetError, match=r"holds no \*\.pt files"):
        (tmp_path / "empty").mkdir()
        import_tdmpc2(tmp_path / "empty", tmp_path / "out")
    write_chunk(tmp_path / "longer.pt", chunk_columns([0], rows=7))
    with pytest.raises(DatasetError, match="episodes of 6, 7 rows"):
        import_tdmpc2(tmp_path, tmp_path / "out", tasks=NAMES)


# Minari


BOX = {"obs_space": box_json(3, -10.0, 10.0), "action_space": box_json(2, -2.0, 2.0)}


def test_a_minari_folder_is_imported(tmp_path):
    episodes = [minari_episode(7, terminated=True, seed=1), minari_episode(4, seed=2)]
    episodes[0]["infos"] = {"success": np.arange(8) == 7}
    episodes[1]["infos"] = {"success": np.bool_(True)}  # of no step: nobody knows of what
    folder = write_minari(tmp_path / "expert-v0", episodes, **BOX)
    import_dataset(folder, tmp_path / "out")
    dataset = verify(tmp_path / "out")
    (task,) = dataset.tasks
    assert (task.name, task.policy, task.spec.max_episode_steps) == ("gym:Stub-v0", "SAC", 20)
    assert dataset.source == "Minari dataset stub/expert-v0"
    columns, start = dataset.shards[0].columns, 0
    for episode in episodes:
        steps = len(episode["rewards"])
        rows = slice(start, start + steps + 1)
        assert columns["obs"][rows] == pytest.approx(episode["observations"], rel=1e-6)
        assert columns["action"][rows][1:] == pytest.approx(episode["actions"] / 2.0, rel=1e-6)
        assert columns["reward"][rows][1:] == pytest.approx(episode["rewards"], rel=1e-6)
        assert np.array_equal(columns["terminated"][rows][1:], episode["terminations"])
        assert np.array_equal(columns["truncated"][rows][1:], episode["truncations"])
        start += steps + 1
    assert task.returns.max == pytest.approx(max(e["rewards"].sum() for e in episodes), rel=1e-6)
    assert dataset.episodes["success"][0] == 1.0 and np.isnan(dataset.episodes["success"][1])
    assert (
        import_minari(folder, tmp_path / "named", task="gym:Mine-v1").tasks[0].name == "gym:Mine-v1"
    )


def test_nested_minari_spaces_are_imported(tmp_path):
    four = {"type": "Discrete", "n": 4, "start": 0, "dtype": "int64"}
    goal = {"type": "Tuple", "subspaces": [box_json(1, 0.0, 1.0, "float32"), four]}
    obs = {"type": "Dict", "subspaces": {"pose": box_json(2, -1.0, 1.0), "goal": goal}}
    steps = 5
    episode = {
        **minari_episode(steps),
        "observations": {
            "pose": np.ones((steps + 1, 2)),
            "goal": {
                "_index_0": np.zeros((steps + 1, 1), np.float32),
                "_index_1": np.arange(6) % 4,
            },
        },
        "actions": np.arange(steps) % 3,
    }
    action = {"type": "Discrete", "n": 3, "start": 0, "dtype": "int64"}
    folder = write_minari(tmp_path / "m", [episode], obs, action)
    columns = verify(import_minari(folder, tmp_path / "out").path).shards[0].columns
    assert columns["obs/goal/1"].tolist() == [0, 1, 2, 3, 0, 1]
    assert columns["action"].tolist() == [0, 0, 1, 2, 0, 1]


MINARI = """
import gymnasium, json, minari, numpy as np
from minari.data_collector import EpisodeBuffer
env = gymnasium.make("Pendulum-v1", max_episode_steps=10)
episodes = []
for seed in range(3):
    steps, (obs, _) = [], env.reset(seed=seed)
    env.action_space.seed(seed)
    seen = [obs]
    while not steps or not (steps[-1][2] or steps[-1][3]):
        action = env.action_space.sample()
        obs, reward, terminated, truncated, _ = env.step(action)
        seen.append(obs)
        steps.append((action, float(reward), terminated, truncated))
    columns = [np.array(column) for column in zip(*steps)]
    names = ("actions", "rewards", "terminations", "truncations")
    buffer = EpisodeBuffer(observations=np.array(seen), infos={}, **dict(zip(names, columns)))
    episodes.append(buffer)
minari.create_dataset_from_buffers(
    "pendulum/random-v0", buffer=episodes, env=env, algorithm_name="random"
)
print(json.dumps([float(sum(e.rewards)) for e in episodes]))
"""


def test_what_minari_itself_writes_is_imported(tmp_path):
    """In a process of its own: Minari warns of much, and warnings are errors here."""
    pytest.importorskip("minari")
    done = subprocess.run(
        [sys.executable, "-c", MINARI],
        env={**os.environ, "MINARI_DATASETS_PATH": str(tmp_path / "store")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    totals = json.loads(done.stdout.splitlines()[-1])
    dataset = import_dataset(tmp_path / "store" / "pendulum" / "random-v0", tmp_path / "out")
    (task,) = verify(dataset.path).tasks
    assert (task.name, task.episodes, task.lengths.mean) == ("gym:Pendulum-v1", 3, 10)
    assert task.returns.mean == pytest.approx(np.mean(totals), rel=1e-5)
    assert 0.5 < np.abs(dataset.shards[0].columns["action"]).max() <= 1.0


def test_recorded_actions_go_to_the_agents_scale_and_back():
    space = gymnasium.spaces.Box(np.array([-2.0, 0.0]), np.array([2.0, 10.0]), dtype=np.float64)
    native = np.array([[-2.0, 0.0], [0.0, 5.0], [1.0, 10.0]])
    seen = agent_action(space, native)
    assert seen == pytest.approx(np.array([[-1, -1], [0, 0], [0.5, 1]]), abs=1e-12)
    assert np.stack([native_action(space, a) for a in seen]) == pytest.approx(native, abs=1e-9)


@pytest.mark.parametrize(
    ("episode", "said"),
    [
        ({"rewards": np.zeros(3)}, "columns of unequal length"),
        ({"observations": np.zeros((5, 3))}, "columns of unequal length"),
        ({"actions": np.full((5, 2), 3.0)}, "which lies outside its space"),
        ({"terminations": np.arange(5) == 2}, "is terminated in row 3 of 6"),
        ({"observations": np.array([b"a"] * 6)}, "is not imported"),
        ({"rewards": {"deep": np.zeros(5)}}, "is not a column"),
    ],
)
def test_an_episode_with_a_fault_is_refused_and_nothing_written(tmp_path, episode, said):
    folder = write_minari(tmp_path / "m", [{**minari_episode(5), **episode}], **BOX)
    with pytest.raises(DatasetError, match=said):
        import_minari(folder, tmp_path / "out")
    assert [x.name for x in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"data_format": "arrow"}, "in the format arrow, but only hdf5"),
        ({"total_episodes": 4}, "holds 1 episodes, but its metadata.json says 4"),
        ({"observation_space": "{"}, "does not hold what it must"),
        ({"env_spec": None}, "does not hold what it must"),
        ({"action_space": json.dumps({"type": "Text"})}, "A space of kind 'Text'"),
    ],
)
def test_metadata_that_cannot_be_imported_is_refused(tmp_path, metadata, said):
    folder = write_minari(tmp_path / "m", [minari_episode(5)], **BOX)
    file = folder / "data" / "metadata.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **metadata}))
    with pytest.raises(ForethoughtError, match=said):
        import_minari(folder, tmp_path / "out")
    assert [x.name for x in tmp_path.iterdir()] == ["m"]


def test_options_of_one_format_are_refused_for_another(tmp_path):
    folder = write_minari(tmp_path / "m", [minari_episode(5)], **BOX)
    with pytest.raises(ConfigError, match="are for TD-MPC2 chunks"):
        import_dataset(folder, tmp_path / "out", tasks=NAMES)
    path = write_chunk(tmp_path / "chunk.pt", chunk_columns([0]))
    with pytest.raises(ConfigError, match="--task is for Minari"):
        import_dataset(path, tmp_path / "out", task="gym:X-v0")
    with pytest.raises(ConfigError, match=r"There is no format minary\. Did you mean minari"):
        import_dataset(path, tmp_path / "out", format="minary")
    with pytest.raises(ConfigError, match="to import"):
        import_dataset(tmp_path / "absent", tmp_path / "out")
