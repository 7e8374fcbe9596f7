"""Runs that learn from recorded data: their clock, checkpoints, resume, reports and refusals."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest
import torch
from gymnasium import registry

import forethought
from forethought import cli, presets
from forethought import config as conf
from forethought.agents.tdmpc2 import TDMPC2Config
from forethought.config import ConfigError
from forethought.data import Dataset
from forethought.envs import multi
from forethought.files import FileError, read_manifest
from forethought.report.compare import compare
from forethought.report.groups import collect
from forethought.report.runs import read_run
from forethought.spaces import nested
from forethought.tracking import RunDirectory
from forethought.training.build import load_agent
from forethought.training.checkpoint import Checkpoints
from forethought.training.contents import check_for_resuming
from forethought.training.record import record
from tests.official_files import OfficialNetworks

SHORT, LONG = multi.members(
    "multi:gym:tests.many_tasks:tasks/Short-v0,gym:tests.many_tasks:tasks/Long-v0"
)
PAIR = f"multi:{SHORT},{LONG}"
QUICK = ["--preset", "debug", "--track.no_console", "--env.max_episode_steps", "8"]
QUICK += ["--eval.episodes", "1"]
RHYTHM = ["--offline.updates", "16", "--offline.eval_every_updates", "8"]
RHYTHM += ["--offline.checkpoint_every_updates", "8", "--offline.log_every_updates", "4"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """One dataset of each task, of very unequal size."""
    folder = tmp_path_factory.mktemp("data")
    for name, task, episodes in (("short", SHORT, 2), ("long", LONG, 12)):
        record(folder / name, task=task, episodes=episodes)
    return folder


def train(data, out, *words, task=PAIR):
    given = ["--offline.data", f"{data / 'short'},{data / 'long'}", *RHYTHM]
    return cli.main(["train", "tdmpc2", task, *QUICK, *given, "--out", str(out), *words])


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("offline") / "run"
    assert train(data, out) == 0
    return out


def rows(file):
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def test_the_clock_counts_updates_and_no_steps(run):
    evaluations, train_rows = rows(run / "eval.csv"), rows(run / "train.csv")
    assert [row["updates"] for row in evaluations] == ["8", "16"]
    assert [row["updates"] for row in train_rows] == ["4", "8", "12", "16"]
    for row in evaluations + train_rows:
        assert (row["agent_steps"], row["env_frames"], row["episodes"]) == ("0", "0", "0")
    assert rows(run / "episodes.csv") == []
    assert float(train_rows[-1]["total_loss"]) > 0


def test_every_task_is_evaluated(run):
    last = rows(run / "eval.csv")[-1]
    assert last["eval_episodes"] == "2"
    for task in (SHORT, LONG):
        assert float(last[f"return_mean/{task}"]) > 0
        assert last[f"normalised_score/{task}"] == ""  # these tasks have no scale


def test_checkpoints_are_named_by_updates(run):
    assert sorted(path.name for path in (run / "checkpoints").glob("step-*")) == [
        "step-000000008",
        "step-000000016",
    ]
    folder, _ = Checkpoints(RunDirectory.open(run)).find("8")
    meta = read_manifest(folder).meta
    assert (meta["agent_steps"], meta["updates"], meta["step_unit"]) == (0, 8, "updates")


def test_it_resumes_exactly(run, data, tmp_path):
    out = tmp_path / "half"
    assert train(data, out, "--offline.updates", "8") == 0
    assert cli.main(["resume", str(out), "--steps", "16"]) == 0
    whole, parts = load_agent(run), load_agent(out)
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, parts.model.state_dict()[name]), name
    for file in ("eval.csv", "train.csv"):
        for a, b in zip(rows(run / file), rows(out / file), strict=True):
            for timed in ("wall_s", "updates_per_s", "env_frames_per_s", "peak_memory_mb"):
                a.pop(timed, None), b.pop(timed, None)
            assert a == b


def test_a_run_that_is_done_says_so_in_updates(run, capsys):
    assert cli.main(["resume", str(run)]) == 0
    assert "is complete at 16 updates" in capsys.readouterr().out
    assert cli.main(["resume", str(run), "--steps", "12"]) == 2
    assert "already stands at 16" in capsys.readouterr().err


def test_a_resume_wants_the_same_data_wherever_it_lies(run, data, tmp_path, capsys):
    copy, moved = tmp_path / "run", tmp_path / "moved"
    shutil.copytree(run, copy)
    shutil.copytree(data, moved)
    config = copy / "config.yaml"
    config.write_text(config.read_text().replace(str(data), str(moved)))
    assert cli.main(["resume", str(copy), "--steps", "18"]) == 0
    record(tmp_path / "other", task=SHORT, episodes=2, seed=9)
    text = config.read_text().replace(str(moved / "short"), str(tmp_path / "other"))
    config.write_text(text)
    capsys.readouterr()
    assert cli.main(["resume", str(copy), "--steps", "20"]) == 1
    assert "The saved replay has datasets" in capsys.readouterr().err


def test_evaluate_finds_it_by_updates(run, capsys):
    assert cli.main(["evaluate", str(run), "--episodes", "1", "--checkpoint", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoint_step"] == 8


def test_it_can_be_loaded_to_train_on(run):
    agent = load_agent(run, for_acting=False)
    assert agent.train(1)["nonfinite"] == 0
    assert agent.replay.episodes_per_task == {SHORT: 2, LONG: 12}


@pytest.mark.parametrize("kind", ["episodes", "transitions"])
def test_slices_are_balanced_over_tasks(run, kind, data):
    """2 short episodes weigh as much as 12 long ones."""
    agent = load_agent(run, for_acting=False)
    agent.replay_config = {
        "episodes": conf.EpisodeReplayConfig(),
        "transitions": conf.TransitionReplayConfig(),
    }[kind]
    agent.learn_from([Dataset.open(data / name) for name in ("long", "short")], "memory")
    drawn = agent.replay.sample(4000)
    share = (drawn.extras["task"][0] == 0).float().mean().item()
    assert share == pytest.approx(0.5, abs=0.03)
    short = drawn.extras["task"][0] == 0
    assert (drawn.obs[:, short, 2] == 0).all()
    assert (drawn.action[:, short, 1] == 0).all()


def test_one_task_learns_offline_too(data, tmp_path):
    words = ["train", "tdmpc2", SHORT, *QUICK, "--offline.updates", "3"]
    words += ["--offline.data", str(data / "short"), "--out", str(tmp_path / "run")]
    assert cli.main(words) == 0
    assert [row["updates"] for row in rows(tmp_path / "run" / "eval.csv")] == ["3"]


def test_pictures_are_stacked_as_they_are_in_replay(tmp_path):
    """Offline an agent sees the last three frames too, the first one repeated before it."""
    task = "gym:tests.shown_envs:shown/Room-v0"
    record(tmp_path / "data", task=task, episodes=2)
    out = tmp_path / "run"
    words = ["train", "tdmpc2", task, *QUICK, "--offline.data", str(tmp_path / "data")]
    words += ["--agent.image.channels", "4", "--offline.updates", "2", "--out", str(out)]
    assert cli.main(words) == 0
    agent = load_agent(out, for_acting=False)
    drawn = agent.replay.sample(64)
    (column,) = agent.observations.stack
    frames = nested.flatten(drawn.obs, "obs")[column]  # [T+1, B, 3, ...]
    assert frames.shape[2] == 3
    assert torch.equal(frames[1:, :, :2], frames[:-1, :, 1:])
    begins = drawn.is_first[0]
    assert begins.any()
    assert torch.equal(frames[0, begins, 0], frames[0, begins, 2])


# ---- refusals ----


def test_a_recording_is_of_one_task(tmp_path):
    with pytest.raises(ConfigError, match="A recording is of one task"):
        record(tmp_path / "both", task=PAIR)


def test_data_without_a_task_is_refused_before_anything_begins(data, tmp_path, capsys):
    words = ["train", "tdmpc2", PAIR, *QUICK, "--offline.data", str(data / "short")]
    assert cli.main([*words, "--out", str(tmp_path / "run")]) == 2
    assert f"There are no episodes of {LONG}" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_data_of_other_shapes_is_refused(data, tmp_path, capsys, monkeypatch):
    """The same name with another observation, as after a change of an environment."""
    monkeypatch.setitem(registry["tasks/Short-v0"].kwargs, "width", 1)
    words = ["train", "tdmpc2", SHORT, *QUICK, "--offline.data", str(data / "short")]
    assert cli.main([*words, "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert "obs" in said
    assert not (tmp_path / "run").exists()


def test_data_of_another_action_repeat_is_refused(data, tmp_path, capsys):
    """A decision of two frames is not one of one, though all shapes are the same."""
    words = ["train", "tdmpc2", SHORT, *QUICK, "--offline.data", str(data / "short")]
    words += ["--env.action_repeat", "2", "--out", str(tmp_path / "run")]
    assert cli.main(words) == 2
    assert f"each action of {SHORT} for 1 frames, but this run for 2" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_missing_folder_is_refused(tmp_path, capsys):
    words = ["train", "tdmpc2", SHORT, *QUICK, "--offline.data", str(tmp_path / "none")]
    assert cli.main([*words, "--out", str(tmp_path / "run")]) in (1, 2)
    assert "none" in capsys.readouterr().err


def read(*layers):
    return conf.build_run_config("tdmpc2", SHORT, TDMPC2Config, layers)


@pytest.mark.parametrize(
    ("layer", "sentence"),
    [
        ({"steps": 5}, "steps is 5, but must be left out: it has no effect in an offline run"),
        ({"env": {"num_envs": 2}}, "env.num_envs is 2"),
        ({"train": {"seed_policy": "agent"}}, "train.seed_policy is agent, but must be left out"),
        ({"eval": {"every_agent_steps": 7}}, "which has offline.eval_every_updates"),
        ({"offline": {"updates": 0}}, "offline.updates is 0, but must be at least 1"),
        ({"offline": {"data": "a,,b"}}, "folders separated by commas"),
    ],
)
def test_keys_without_effect_or_sense_are_refused(layer, sentence):
    with pytest.raises(ConfigError, match=sentence):
        read({"offline": {"data": "somewhere"}}, layer)


def test_presets_fit_both_kinds_of_run():
    """What a preset says of steps gives way to recorded data, and the other way round."""
    preset = {"steps": 400, "train": {"seed_agent_steps": 100}, "offline": {"updates": 40}}
    online, offline = read(preset, {}), read(preset, {"offline": {"data": "d"}})
    assert online.rhythm.unit == "agent_steps"
    assert online.rhythm.total == 400
    assert online.offline.updates == 1_000_000
    assert (offline.rhythm.unit, offline.rhythm.total) == ("updates", 40)
    assert offline.train.seed_agent_steps is None


def test_what_a_person_says_of_offline_runs_must_have_an_effect(tmp_path, capsys):
    words = ["train", "tdmpc2", SHORT, *QUICK, "--offline.updates", "9", "--out", str(tmp_path)]
    assert cli.main(words) == 2
    assert "offline.updates is 9, but must be left out: it has no" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"no effect without offline\.data"):
        forethought.train("tdmpc2", SHORT, presets="debug", offline={"updates": 9})


@pytest.mark.parametrize("verb", ["train", "import-tdmpc2", "python", "resume"])
def test_what_a_file_says_of_offline_runs_must_have_an_effect(verb, tmp_path, capsys):
    file, out = tmp_path / "mine.yaml", str(tmp_path / "run")
    file.write_text("offline: {updates: 9}\n")
    sentence = "offline.updates is 9, but must be left out: it has no effect without offline.data"
    if verb == "python":
        with pytest.raises(ConfigError, match=sentence):
            forethought.train("tdmpc2", SHORT, presets="debug", config=file, out=out)
        return
    flags = [*QUICK, "--config", str(file), "--out", out]
    if verb == "train":
        words = ["train", "tdmpc2", SHORT, *flags]
    elif verb == "import-tdmpc2":
        OfficialNetworks.random(2, 1).save(tmp_path / "agent.pt", "newest")
        words = ["import-tdmpc2", str(tmp_path / "agent.pt"), "--task", SHORT, *flags]
    else:
        config = conf.to_dict(read(conf_of_debug()))
        config["offline"]["updates"] = 9
        RunDirectory.create(tmp_path / "run", config, "tdmpc2", SHORT, 1)
        words = ["resume", out]
    assert cli.main(words) == 2
    assert sentence in capsys.readouterr().err
    assert verb == "resume" or not (tmp_path / "run").exists()


def conf_of_debug():
    return presets.for_agent("debug", "tdmpc2")


def test_the_whole_configuration_of_a_run_is_a_file_for_the_next(tmp_path):
    """Its group `offline` stands there with defaults, and says nothing."""
    config = read(conf_of_debug())
    conf.refuse_idle_groups(config, conf.to_dict(config))


def test_a_checkpoint_without_its_open_episodes_is_damaged_unless_offline(run, tmp_path):
    """An online run's checkpoint must have a collector; only the manifest says offline."""
    folder, _ = Checkpoints(RunDirectory.open(run)).find("latest")
    manifest = read_manifest(folder)
    check_for_resuming(folder, manifest)
    del manifest.meta["step_unit"]
    with pytest.raises(FileError, match="is of step 0, though its name says 16"):
        check_for_resuming(folder, manifest)
    manifest.meta["step_unit"] = "episodes"
    with pytest.raises(FileError, match="step_unit is 'episodes'"):
        check_for_resuming(folder, manifest)


# ---- reports ----


def test_a_report_draws_offline_runs_by_updates(run):
    found = read_run(run)
    assert list(found.evaluations) == [8, 16]
    assert found.unit == "updates"
    group = collect([run]).tasks[f"{PAIR} (offline)"][0]
    assert (group.last_frames, group.unit) == (16, "updates")
    assert group.published is None


def test_online_and_offline_runs_are_never_drawn_together(run, tmp_path):
    online = tmp_path / "online"
    words = ["train", "tdmpc2", PAIR, *QUICK, "--steps", "20", "--out", str(online)]
    assert cli.main([*words, "--train.seed_agent_steps", "20", "--train.seed_updates", "2"]) == 0
    both = collect([run, online])
    assert sorted(both.tasks) == [PAIR, f"{PAIR} (offline)"]
    assert read_run(online).unit == "frames"
    told = compare([str(run), str(online)]).to_json()["statistics"]
    assert told[f"{PAIR} (offline)"][0]["updates"] == 16
    assert told[PAIR][0]["env_frames"] == 20


def test_a_report_tells_the_score_of_every_task(run, tmp_path):
    """Scores as dmc tasks would have them, written into the run's own file."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    table = rows(copy / "eval.csv")
    for row, short, long in zip(table, (10.0, 80.0), (20.0, 30.0)):
        row[f"normalised_score/{SHORT}"], row[f"normalised_score/{LONG}"] = short, long
    with (copy / "eval.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(table[0]))
        writer.writeheader()
        writer.writerows(table)
    assert cli.main(["report", str(copy), "--out", str(tmp_path / "page.html")]) == 0
    page = Path(tmp_path / "page.html").read_text().replace("<wbr>", "")
    assert "Normalised scores at the last evaluation" in page
    assert f"<th scope=row>{SHORT}</th><td>80" in page
    assert "<th scope=row>mean over tasks</th><td>55" in page
