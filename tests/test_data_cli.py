"""forethought data: recording from a run and from random play, and telling about it."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from forethought import cli
from forethought.data import verify
from forethought.envs import make_env
from forethought.seeding import Streams
from forethought.training import record as recording
from forethought.training.build import load_agent, read_config
from forethought.training.loop import train_run
from forethought.training.record import record
from tests.data_stubs import make_dataset
from tests.faults.forgery import forge
from tests.import_stubs import chunk_columns, write_chunk
from tests.stub_agent import register, stub_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        register(patch)
        yield train_run(stub_run(steps=200), tmp_path_factory.mktemp("runs") / "one").path


@pytest.fixture(autouse=True)
def _stub_agent(monkeypatch, tmp_path):
    register(monkeypatch)
    monkeypatch.chdir(tmp_path)


def said(capsys, *tokens):
    assert cli.main(["data", *tokens]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_random_play_is_recorded_and_told(capsys):
    told = said(
        capsys, "record", "--agent", "random", "--task", "gym:Pendulum-v1", "--episodes", "3",
        "--out", "data", "--json",
    )  # fmt: skip
    about = json.loads(told)
    (task,) = about["tasks"]
    dataset = verify("data")
    assert (about["episodes"], about["rows"], task["policy"]) == (3, 603, "random")
    assert task["returns"]["mean"] == pytest.approx(dataset.episodes["return"].mean())
    assert task["lengths_agent_steps"]["max"] == 200
    assert "played by" in said(capsys, "describe", "data")
    assert "is whole" in said(capsys, "verify", "data")


def test_rows_are_what_the_environment_did(run):
    """The actions of each recorded episode, stepped again, give its observations and rewards."""
    dataset, failures = record(Path("data"), run=run, episodes=12, explore=True)
    assert failures == () and dataset.tasks[0].policy == "stub at step 200 of one, exploring"
    shard = dataset.shards[0]
    seeds = recorded_seeds(12)
    env = make_env("gym:Pendulum-v1", max_episode_steps=30)
    for number, episode in enumerate(shard.episodes):
        rows = slice(episode["row_start"], episode["row_start"] + episode["length"])
        obs, action = shard.columns["obs"][rows], shard.columns["action"][rows]
        # Environment i of ten plays the seeds i and i + 10; all episodes have the same length.
        first, _ = env.reset_one(0, seeds[number])
        assert np.array_equal(first, obs[0])
        for t in range(1, len(obs)):
            found, reward, _, truncated, _ = env.step_one(0, action[t])
            assert np.array_equal(found, obs[t])
            assert shard.columns["reward"][rows][t] == np.float32(reward)
            assert shard.columns["truncated"][rows][t] == truncated
    env.close()


def recorded_seeds(count):
    return [Streams(stub_run().seed).seed("record", episode) for episode in range(count)]


def test_environments_show_what_those_of_the_run_show(run, monkeypatch):
    """A run that learned from pixels is recorded from pixels."""
    seen = {}

    def noted(*_, **options):
        seen.update(options)
        raise RuntimeError("seen")

    def from_pixels(directory):
        config = read_config(directory)
        return replace(config, env=replace(config.env, obs="pixels", max_episode_steps=9))

    monkeypatch.setattr(recording, "RecordedEnv", noted)
    monkeypatch.setattr(recording, "read_config", from_pixels)
    with pytest.raises(RuntimeError, match="seen"):
        record(Path("data"), run=run, episodes=1)
    assert (seen["obs"], seen["max_episode_steps"]) == ("pixels", 9)


def test_frames_that_an_environment_draws_over_are_kept():
    told, task = [], "gym:tests.stubs:stub/Image-v0"
    dataset, _ = record(Path("data"), task=task, episodes=1, tell=lambda *now: told.append(now))
    assert {of for _, _, of in told} == {1}
    assert dataset.shards[0].columns["obs"][:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4, 5]


def test_exploring_and_not_are_different_and_repeatable(run, tmp_path):
    options = {"plain": {}, "again": {}, "noisy": {"explore": True}, "other": {"seed": 9}}
    found = {
        name: record(tmp_path / name, run=run, episodes=2, **option)[0].shards[0].columns["action"]
        for name, option in options.items()
    }
    assert np.array_equal(found["plain"], found["again"])
    assert not np.array_equal(found["plain"], found["noisy"])
    assert not np.array_equal(found["plain"], found["other"])


def test_the_replay_of_a_run_becomes_a_dataset(run, capsys):
    said(capsys, "record", "--run", str(run), "--replay", "--out", "data")
    dataset = verify("data")
    replay = load_agent(run, for_acting=False).replay
    assert dataset.rows == replay.rows == 200 + 7  # six episodes of 30, and one of 20 that is open
    assert len(dataset.episodes) == 7 and dataset.episodes["length"][-1] == 21
    rows = next(iter(replay.episodes()))
    assert np.array_equal(dataset.shards[0].columns["obs"][:31], rows["obs"])
    assert dataset.tasks[0].policy == "stub while it learned, up to step 200 of one"


def test_chunks_are_imported_by_the_command(capsys, tmp_path):
    write_chunk(tmp_path / "chunk.pt", chunk_columns([0, 1]))
    names = ["--tasks", "lab:walker-walk,lab:cup-catch"]
    told = said(capsys, "import", "chunk.pt", *names, "--only", "lab:cup-catch", "--out", "data")
    assert "lab:cup-catch" in told and "walker" not in told


def test_episodes_are_held_out_when_asked(run, capsys, tmp_path):
    write_chunk(tmp_path / "chunk.pt", chunk_columns([0, 0]))
    share = ["--held_out", "0.5", "--json"]
    for words in (
        ["record", "--run", str(run), "--replay", "--out", "a"],
        ["record", "--run", str(run), "--episodes", "2", "--out", "b"],
        ["import", "chunk.pt", "--tasks", "lab:walker-walk", "--out", "c"],
    ):
        told = json.loads(said(capsys, *words, *share))
        assert told["held_out_episodes"] == told["episodes"] // 2 > 0
    assert "2 episodes (1 held out)" in said(capsys, "describe", "c")


def test_an_import_asks_the_tasks_how_wide_they_are(capsys, tmp_path):
    columns = chunk_columns([0], obs=24, action=6, widths=((3, 1),))
    write_chunk(tmp_path / "chunk.pt", columns)
    words = ["import", "chunk.pt", "--tasks", "dmc:cartpole-swingup", "--out", "d", "--json"]
    assert json.loads(said(capsys, *words))["tasks"][0]["observations"] == "float32 (5,)"


def test_several_datasets_are_described_together(capsys, tmp_path):
    make_dataset(tmp_path / "a")
    make_dataset(tmp_path / "b", (4,))
    told = json.loads(said(capsys, "describe", "a", "b", "--json"))
    assert [about["episodes"] for about in told] == [4, 1]
    assert [json.loads(x)["whole"] for x in said(capsys, "verify", "a", "b", "--json").splitlines()]


def test_of_several_datasets_every_one_is_verified(capsys, tmp_path):
    for name in "abcd":
        place = make_dataset(tmp_path / name)
        if name in "ac":
            reward = place / "shard-00000/reward.npy"
            forge(place, "shard-00000/reward.npy", reward.read_bytes()[:-4])
    assert cli.main(["data", "verify", "b", "absent"]) == 2
    assert cli.main(["data", "verify", "absent", "a"]) == 1
    capsys.readouterr()
    assert cli.main(["data", "verify", *"abcd", "absent"]) == 1
    out, err = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()] == ["b", "d"]
    assert [word in err for word in ("a/shard", "c/shard", "absent")] == [True] * 3
    assert err.count("\n") == 3


def test_a_damaged_dataset_is_told_in_one_sentence(capsys, tmp_path):
    place = make_dataset(tmp_path / "a")
    forge(place, "shard-00000/reward.npy", (place / "shard-00000/reward.npy").read_bytes()[:-4])
    assert cli.main(["data", "verify", "a"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "reward.npy" in err


def test_an_episode_that_fails_is_left_out_and_told(capsys, monkeypatch):
    from forethought.envs import recorded
    from forethought.spaces.structure import EnvFailure

    step = recorded.RecordedEnv.step_one
    calls = iter(range(10**6))

    def failing(self, i, action):
        if next(calls) == 5:
            raise EnvFailure("The wheel came off.")
        return step(self, i, action)

    monkeypatch.setattr(recorded.RecordedEnv, "step_one", failing)
    play = ["record", "--agent", "random", "--task", "gym:Pendulum-v1", "--out", "data"]
    assert cli.main(["data", *play, "--episodes", "2"]) == 0
    assert "Failed and left out: The wheel came off." in capsys.readouterr().err
    assert len(verify("data").episodes) == 1


RANDOM = ["record", "--agent", "random", "--task", "gym:Pendulum-v1"]


@pytest.mark.parametrize(
    ("tokens", "sentence"),
    [
        (["record", "--out", "x"], "--run RUN, or --agent random --task TASK"),
        (RANDOM, "--out DIR"),
        ([*RANDOM, "--out", "x", "--episodes", "0"], "episodes is 0, but must be at least 1"),
        ([*RANDOM, "--out", "x", "--explore"], "no effect on random play"),
        ([*RANDOM, "--out", "x", "--checkpoint", "best"], "no effect on random play"),
        ([*RANDOM, "--out", "x", "--run", "RUN"], "or --run RUN alone"),
        ([*RANDOM, "--out", "x", "--replay"], "must be given with --run RUN"),
        (["record", "--agent", "tdmpc2", "--task", "a:b", "--out", "x"], "only random play"),
        (["record", "--agent", "random", "--task", "gym:Nothing-v0", "--out", "x"], "gym:Nothing"),
        (["record", "--run", "R", "--replay", "--episodes", "3", "--out", "x"], "plays nothing"),
        (["record", "word", "--out", "x"], "data record takes no words, but was given: word"),
        (["import", "--out", "x"], "data import takes one SOURCE, but was given: nothing"),
        (["import", "absent", "--out", "x"], "There is no absent to import"),
        (["verify"], "takes DATASET..., but was given: nothing"),
        (["recrod"], "Did you mean record?"),
        (["describe", "--jsn", "x"], "Did you mean --json?"),
    ],
)
def test_what_makes_no_sense_is_refused(refused, tokens, sentence):
    assert sentence in refused("data", *tokens)


def test_a_place_that_is_taken_is_refused_before_anything_is_played(refused, empty_folder):
    (empty_folder / "x").mkdir()
    (empty_folder / "x" / "mine").write_text("kept")
    assert "x exists already" in refused("data", *RANDOM, "--out", "x")


def test_data_alone_shows_its_commands(capsys):
    assert cli.main(["data"]) == 2
    assert "describe DATASET..." in capsys.readouterr().err
    assert cli.main(["data", "record", "--help"]) == 0
    assert "--explore" in capsys.readouterr().out
