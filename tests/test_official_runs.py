"""Official checkpoints as runs: import, evaluate, train on, export; and what is refused."""

from __future__ import annotations

import json
import os
import pickle
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from forethought.cli import main
from forethought.config import ForethoughtError
from forethought.tracking import RunDirectory
from forethought.training import collect, signals
from forethought.training import official as official_module
from forethought.training.build import load_agent
from forethought.training.loop import resume_run
from forethought.training.official import export_run
from forethought.training.signals import Interrupted
from tests.official_files import LAYOUTS, OfficialNetworks

TASK = "gym:Pendulum-v1"
OBS, ACTION = 3, 1
SMALL = ["--preset", "debug", "--track.no_console", "--env.max_episode_steps", "20"]


def official(path: Path, layout: str = "newest", **options: Any) -> OfficialNetworks:
    return OfficialNetworks.random(OBS, ACTION, **options).save(path, layout)


def imported(tmp_path: Path, *flags: str, layout: str = "newest", out: str = "run") -> Path:
    if not (tmp_path / "agent.pt").exists():
        official(tmp_path / "agent.pt", layout)
    words = ["import-tdmpc2", str(tmp_path / "agent.pt"), "--task", TASK, *SMALL, *flags]
    assert main([*words, "--out", str(tmp_path / out)]) == 0
    return tmp_path / out


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_imported_run_plays_with_the_official_weights(layout, tmp_path, capsys):
    networks = official(tmp_path / "agent.pt", layout)
    run = imported(tmp_path)
    assert f"layout {layout}) is now the run {run} for {TASK}" in capsys.readouterr().out
    model = load_agent(run).model
    obs = torch.tensor([[0.5, -0.8, 3.0]])
    expected = networks.outputs(obs, torch.zeros(1, 1))
    torch.testing.assert_close(model.encode(obs).double(), expected["encode"], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        model.pi(model.encode(obs)).mean.double(), expected["pi"], atol=1e-5, rtol=1e-5
    )
    assert main(["evaluate", str(run), "--episodes", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoint_step"] == 0


def test_a_signal_while_a_run_is_written_leaves_it_whole(tmp_path, monkeypatch, capsys):
    """What says that nothing was written must not leave something."""
    create = RunDirectory.create

    def interrupted(*given: Any) -> RunDirectory:
        run = create(*given)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(2 * signals.GRACE_SECONDS)  # a large model on a slow disk
        return run

    monkeypatch.setattr(RunDirectory, "create", interrupted)
    monkeypatch.setattr(signals, "GRACE_SECONDS", 0.2)
    run = imported(tmp_path)
    assert "nothing was written" not in capsys.readouterr().err
    assert load_agent(run).model is not None


def test_a_signal_before_a_run_is_written_leaves_nothing(tmp_path, monkeypatch, capsys):
    official(tmp_path / "agent.pt")
    build = official_module.build_parts

    def interrupted(config: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return build(config)

    monkeypatch.setattr(official_module, "build_parts", interrupted)
    words = ["import-tdmpc2", str(tmp_path / "agent.pt"), "--task", TASK, *SMALL]
    with pytest.raises(Interrupted, match="130"):
        main([*words, "--out", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()


def test_an_imported_run_tells_where_it_comes_from(tmp_path):
    run = RunDirectory.open(imported(tmp_path))
    assert run.run_json["status"] == "interrupted"
    assert run.run_json["tags"] == ["imported"]
    (told,) = [event for event in run.events() if event["kind"] == "imported"]
    assert (told["file"], told["layout"]) == ("agent.pt", "newest")
    config = run.config()
    assert config["train"]["seed_policy"] == "agent"
    assert config["agent"]["model"]["latent_dim"] == 16


def test_training_on_begins_with_the_agents_own_play_and_learns(tmp_path, monkeypatch):
    path = imported(tmp_path, "--train.seed_agent_steps", "40", "--train.seed_updates", "0")
    before = load_agent(path).model.state_dict()

    def no_random_play(*_: Any) -> None:
        raise AssertionError("the agent should play")

    monkeypatch.setattr(collect, "legal_random", no_random_play)
    run = resume_run(path, steps=60)
    assert (run.status, run.agent_steps) == ("done", 60)
    agent = load_agent(path, for_acting=False)
    assert agent.updates == 5  # none in a burst, then one per four decisions
    after = agent.model.state_dict()
    assert not torch.equal(before["encoder.0.weight"], after["encoder.0.weight"])


def test_training_on_is_exact_when_it_is_interrupted(tmp_path):
    steps = ("--train.seed_agent_steps", "40")
    whole = imported(tmp_path, *steps, out="whole")
    halves = imported(tmp_path, *steps, out="halves")
    resume_run(whole, steps=60)
    resume_run(halves, steps=50)
    resume_run(halves, steps=60)
    a, b = (load_agent(path, for_acting=False).state()[1] for path in (whole, halves))
    assert all(torch.equal(a[name], b[name]) for name in a.keys() | b.keys())


def test_auxiliary_values_can_be_added_when_training_on(tmp_path):
    run = imported(
        tmp_path,
        *("--agent.multi_gamma.enabled", "--agent.multi_gamma.gammas", "primary", "0.9"),
    )
    heads = load_agent(run).model.aux_value
    assert heads is not None
    assert resume_run(run, steps=110).status == "done"


def test_an_export_comes_back_as_the_same_agent(tmp_path, capsys):
    run = imported(tmp_path)
    file = tmp_path / "exported.pt"
    assert main(["export-tdmpc2", str(run), "--out", str(file)]) == 0
    assert "enc_dim=16 mlp_dim=24 latent_dim=16 num_q=3" in capsys.readouterr().out
    again = tmp_path / "again"
    words = ["import-tdmpc2", str(file), "--task", TASK, *SMALL, "--out", str(again)]
    assert main(words) == 0
    ours, theirs = (load_agent(path).model.state_dict() for path in (run, again))
    assert all(torch.equal(ours[name], weight) for name, weight in theirs.items())


@pytest.mark.parametrize("flags", [(), ("--env.action_repeat", "1"), ("--env.action_repeat", "3")])
def test_an_export_says_what_is_not_in_the_file(tmp_path, capsys, flags):
    run = imported(tmp_path, *flags)
    capsys.readouterr()
    assert main(["export-tdmpc2", str(run), "--out", str(tmp_path / "exported.pt")]) == 0
    told = capsys.readouterr().out.splitlines()[1]
    assert ("actions held for 3 frames, " in told) == ("3" in flags)  # one is the task's own
    assert "the planner's options" in told and "presets and flags" in told


# ---- bad input ----


def test_a_task_must_be_given(refused):
    assert refused("import-tdmpc2", "agent.pt").endswith("give it with --task.")


def test_a_file_must_be_given(refused):
    assert "takes one FILE" in refused("import-tdmpc2", "--task", TASK)
    assert "needs a file to write" in refused("export-tdmpc2", "run")


def test_a_checkpoint_of_another_environment_leaves_nothing_behind(refused, empty_folder):
    OfficialNetworks.random(17, 6).save(empty_folder / "cheetah-run-1.pt", "2024")
    said = refused("import-tdmpc2", "cheetah-run-1.pt", "--task", TASK, "--out", "run")
    assert said.startswith(
        "cheetah-run-1.pt was trained in an environment with observations (17,) and actions (6,), "
        f"but {TASK} has observations float32 (3,) and actions float32 (1,)"
    )


def test_a_checkpoint_of_one_task_is_not_one_of_several(refused, empty_folder):
    official(Path("agent.pt"))
    said = refused("import-tdmpc2", "agent.pt", "--task", "multi:dmc:walker-walk,dmc:walker-run")
    assert "was trained on one task, but multi:dmc:walker-walk,dmc:walker-run are several" in said


def test_one_task_of_a_checkpoint_of_many_becomes_a_run(tmp_path, capsys):
    task, file, run = "dmc:cartpole-swingup", tmp_path / "mt30.pt", tmp_path / "run"
    OfficialNetworks.random(9, 1, tasks=30, task_dim=8).save(file, "newest")
    assert main(["import-tdmpc2", str(file), "--task", task, *SMALL, "--out", str(run)]) == 0
    assert "from 30 tasks" in capsys.readouterr().out
    assert main(["evaluate", str(run), "--episodes", "1", "--json"]) == 0
    assert resume_run(run, steps=2).status == "done"


def test_several_tasks_are_not_exported(tmp_path):
    run = tmp_path / "run"
    task = "multi:gym:tests.many_tasks:tasks/Short-v0,gym:tests.many_tasks:tasks/Long-v0"
    words = ["train", "tdmpc2", task, *SMALL, "--steps", "12", "--eval.episodes", "1"]
    assert main([*words, "--out", str(run)]) == 0
    with pytest.raises(ForethoughtError, match="plays 2 tasks: the official code knows no sets"):
        export_run(run, tmp_path / "agent.pt")
    assert not (tmp_path / "agent.pt").exists()


def test_a_pickle_posing_as_a_checkpoint_leaves_nothing_behind(refused, empty_folder):
    Path("agent.pt").write_bytes(pickle.dumps({"model": {}}))
    said = refused("import-tdmpc2", "agent.pt", "--task", TASK, "--out", "run", codes=(1,))
    assert "could run code and was not opened" in said


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--agent.model.latent_dim", "64"], "agent.model.latent_dim is 64, but agent.pt was"),
        (["--agent.model.size", "1"], "agent.model.size is 1, but agent.pt was"),
        (["--agent.episodic", "true"], "agent.episodic is True, but agent.pt was"),
        (["--agent.horzon", "3"], "There is no flag --agent.horzon"),
        (["--train.init_from", "other"], "import it first, then train with --train.init_from"),
    ],
)
def test_a_flag_that_contradicts_the_file_is_refused(flags, said, refused, empty_folder):
    official(Path("agent.pt"))
    assert said in refused("import-tdmpc2", "agent.pt", "--task", TASK, "--out", "run", *flags)


def test_a_flag_that_agrees_with_the_file_is_fine(tmp_path):
    run = imported(tmp_path, "--agent.model.latent_dim", "16", "--agent.horizon", "2")
    assert RunDirectory.open(run).config()["agent"]["horizon"] == 2


def test_an_existing_run_or_file_is_not_replaced(tmp_path, capsys):
    run = imported(tmp_path)
    words = ["import-tdmpc2", str(tmp_path / "agent.pt"), "--task", TASK, "--out", str(run)]
    assert main(words) == 1
    assert main(["export-tdmpc2", str(run), "--out", str(tmp_path / "agent.pt")]) == 2
    err = capsys.readouterr().err
    assert "already holds a run" in err
    assert "agent.pt already exists" in err


def test_an_agent_that_official_code_would_misread_is_not_exported(tmp_path, capsys):
    run = imported(tmp_path, layout="2023")
    assert "of symlog observations" in capsys.readouterr().out
    assert load_agent(run).config.model.symlog_obs
    assert main(["export-tdmpc2", str(run), "--out", str(tmp_path / "out.pt")]) == 1
    assert "squashes its observations by symlog" in capsys.readouterr().err
    assert not (tmp_path / "out.pt").exists()


def test_symlog_is_refused_for_a_file_that_was_trained_without(tmp_path, capsys):
    official(tmp_path / "agent.pt", "newest")
    command = ["import-tdmpc2", str(tmp_path / "agent.pt"), "--task", TASK, *SMALL]
    command += ["--agent.model.symlog_obs", "--out", str(tmp_path / "run")]
    assert main(command) == 2
    assert "agent.model.symlog_obs is true, but must be left out" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_symlog_is_refused_from_a_file_of_settings_too(tmp_path, capsys):
    official(tmp_path / "agent.pt", "newest")
    (tmp_path / "own.yaml").write_text("agent: {model: {symlog_obs: true}}\n")
    command = ["import-tdmpc2", str(tmp_path / "agent.pt"), "--task", TASK, *SMALL]
    command += ["--config", str(tmp_path / "own.yaml"), "--out", str(tmp_path / "run")]
    assert main(command) == 2
    assert "agent.model.symlog_obs is true, but must be left out" in capsys.readouterr().err


def test_a_file_of_2023_may_be_read_without_symlog(tmp_path, capsys):
    """For files that somebody renamed to that layout from another."""
    run = imported(tmp_path, "--agent.model.no_symlog_obs", layout="2023")
    assert "symlog" not in capsys.readouterr().out
    assert not load_agent(run).config.model.symlog_obs
