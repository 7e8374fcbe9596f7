"""The command line: words and flags in, one call of a room and an exit code out."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

import forethought
from forethought import commands, presets
from forethought.agents.registry import config_class
from forethought.cli import VERBS, main
from forethought.config import (
    ConfigError,
    ForethoughtError,
    TransitionReplayConfig,
    build_run_config,
    flatten,
    to_dict,
)
from forethought.presets import flags

TASK = "gym:Pendulum-v1"


class FakeResult:
    """An evaluation of two episodes."""

    task, policy, player, failures, tasks = TASK, "random", "random", (), ()
    protocol, epsilon = None, 0.0

    def statistics(self):
        return {"episodes": 2, "n_failed": 0, "return_mean": -1234.5, "success_mean": None}

    def to_json(self):
        return {"task": self.task, **self.statistics(), "returns": [-1000.0, -1469.0]}


@pytest.fixture
def rooms(monkeypatch):
    """The training room replaced by one that writes down how it was called."""
    calls = SimpleNamespace(made=[], exit_code=0, error=None)

    def record(name, answer):
        def call(*args, **options):
            calls.made.append((name, args, options))
            if calls.error is not None:
                raise calls.error
            return answer()

        return call

    loop, evaluate = ModuleType("loop"), ModuleType("evaluate")
    loop.train_run = record("train", lambda: SimpleNamespace(exit_code=calls.exit_code))
    loop.resume_run = record("resume", lambda: SimpleNamespace(exit_code=calls.exit_code))
    evaluate.evaluate_target = record("evaluate", FakeResult)
    monkeypatch.setitem(sys.modules, "forethought.training.loop", loop)
    monkeypatch.setitem(sys.modules, "forethought.training.evaluate", evaluate)
    return calls


@pytest.fixture
def trained(rooms):
    """Runs `forethought train tdmpc2 TASK ...` and returns the configuration it would train."""

    def run(*tokens):
        assert main(["train", "tdmpc2", TASK, *tokens]) == 0
        (_, (config,), options) = rooms.made.pop()
        return SimpleNamespace(config=config, **options)

    return run


def default_config():
    return build_run_config("tdmpc2", TASK, config_class("tdmpc2"), [])


# train


def test_without_flags_the_run_has_the_defaults(trained):
    run = trained()
    assert run.config == default_config()
    assert run.out is None


def test_flags_reach_every_group(trained):
    run = trained(
        *("--seed", "3", "--steps", "500", "--device", "cpu", "--out", "somewhere"),
        *("--agent.horizon", "5", "--agent.planner.samples=256", "--env.num-envs", "2"),
        *("--env.workers", "--track.no-console", "--train.threads", "1", "--agent.gamma", "0.9"),
    )
    assert run.out == Path("somewhere")
    config = run.config
    assert (config.seed, config.steps, config.device) == (3, 500, "cpu")
    assert (config.agent.horizon, config.agent.planner.samples) == (5, 256)
    assert (config.env.num_envs, config.env.workers) == (2, True)
    assert (config.track.console, config.train.threads, config.agent.gamma) == (False, 1, 0.9)


@pytest.mark.parametrize(
    ("tokens", "value"),
    [
        (["--env.workers"], True),
        (["--env.workers", "true"], True),
        (["--env.workers=true"], True),
        (["--env.workers", "false"], False),
        (["--env.workers", "--env.no-workers"], False),
        (["--env.no_workers", "--env.workers"], True),
    ],
)
def test_a_switch_is_written_in_any_usual_way(trained, tokens, value):
    assert trained(*tokens).config.env.workers is value


def test_hyphens_and_underscores_are_the_same(trained):
    tokens = (["--env.num_envs", "2"], ["--env.num-envs", "2"])
    assert trained(*tokens[0]).config == trained(*tokens[1]).config


def test_words_may_stand_after_flags(rooms):
    assert main(["train", "--env.workers", "--preset", "debug", "tdmpc2", "--seed", "4", TASK]) == 0
    (_, (config,), _) = rooms.made.pop()
    assert (config.agent_name, config.task, config.seed, config.steps) == ("tdmpc2", TASK, 4, 400)


def test_layers_are_defaults_presets_file_flags(trained, tmp_path, monkeypatch):
    for name, steps in (("first", 11), ("second", 22)):
        text = f"about: x\nsteps: {steps}\nseed: {steps}\ntrain: {{threads: {steps}}}\n"
        (tmp_path / f"{name}.yaml").write_text(text)
    file = tmp_path / "mine.yml"
    file.write_text("seed: 33\ntrain: {threads: 33}\n")
    monkeypatch.setattr(presets, "FOLDER", tmp_path)
    both = ["--preset", "first", "--preset", "second", "--config", str(file)]
    config = trained(*both, "--train.threads", "44").config
    assert (config.steps, config.seed, config.train.threads) == (22, 33, 44)
    assert config.eval == default_config().eval


def test_none_gives_an_optional_value_back_to_its_default(trained, tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("env: {max_episode_steps: 9}")
    config = trained("--config", str(file), "--env.max-episode-steps", "none").config
    assert config.env.max_episode_steps is None


def test_a_selector_decides_which_flags_there_are(trained):
    config = trained("--replay", "transitions", "--replay.capacity_rows", "5000").config
    assert config.replay == TransitionReplayConfig(capacity_rows=5000)
    config = trained("--agent.schedule.end-factor", "0.5", "--agent.schedule", "cosine").config
    assert (config.agent.schedule.kind, config.agent.schedule.end_factor) == ("cosine", 0.5)


def test_a_kind_from_a_file_decides_too(trained, tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("agent: {returns: {kind: td_lambda}}")
    config = trained("--config", str(file), "--agent.returns.lam", "0.5").config
    assert (config.agent.returns.kind, config.agent.returns.lam) == ("td_lambda", 0.5)


def test_values_that_hold_only_together_are_judged_together(trained, tmp_path):
    """600 elites of the default 512 samples would be an error, of 1024 they are not."""
    file = tmp_path / "a.yaml"
    file.write_text("agent: {planner: {elites: 600}}")
    planner = trained("--config", str(file), "--agent.planner.samples", "1024").config.agent.planner
    assert (planner.elites, planner.samples) == (600, 1024)


def test_the_config_of_a_run_starts_the_same_run_again(trained, tmp_path):
    first = trained("--preset", "debug", "--seed", "9", "--replay", "transitions").config
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps(to_dict(first)))
    assert trained("--config", str(file)).config == first


def test_every_value_of_a_run_can_be_written_as_a_flag(trained):
    """The flags that help shows are those that are read: each default passes through its own."""
    config = default_config()
    tokens = []
    for key, value in flatten(to_dict(config)).items():
        if key not in ("agent_name", "task"):
            tokens += [f"--{key.removesuffix('.kind')}", str(value)]
    assert len(tokens) > 100
    assert trained(*tokens).config == config


# What is wrong, in one sentence; more of these go through the real rooms in test_bad_input.py.


@pytest.mark.parametrize(
    ("tokens", "sentence"),
    [
        (["train"], "train needs an agent and a task: forethought train AGENT TASK."),
        (
            ["train", "tdmpc2"],
            "train takes an agent and a task, first of all (forethought train tdmpc2 TASK), but "
            "was given: tdmpc2.",
        ),
        (["train", "tdmpc2", TASK, "x"], f"but was given: tdmpc2 {TASK} x."),
        (["train", "tdmpc", TASK], "There is no agent tdmpc. Did you mean tdmpc2?"),
        (
            ["train", "tdmpc2", TASK, "--horizon", "3"],
            "no flag --horizon. Did you mean --agent.horizon?",
        ),
        (["train", "tdmpc2", TASK, "--sed", "3"], "no flag --sed. Did you mean --seed?"),
        (["train", "tdmpc2", TASK, "-x"], "There is no flag -x."),
        (["train", "tdmpc2", TASK, "--seed"], "--seed needs a value."),
        (["train", "tdmpc2", TASK, "--seed", "--out", "x"], "--seed needs a value."),
        (["train", "tdmpc2", TASK, "--preset"], "--preset needs a value."),
        (["train", "tdmpc2", TASK, "--seed", "x"], "seed is 'x', but must be a whole number."),
        (
            ["train", "tdmpc2", TASK, "--agent.gamma", "{"],
            "agent.gamma is '{', but must be a number.",
        ),
        (
            ["train", "tdmpc2", TASK, "--env.workers=3"],
            "env.workers is 3, but must be true or false.",
        ),
        (
            ["train", "tdmpc2", TASK, "--agent.schedule.end-factor", "3"],
            "agent.schedule.end_factor belongs to agent.schedule of kind linear, cosine",
        ),
        (
            ["train", "tdmpc2", TASK, "--replay", "episode"],
            "replay kind episode. Did you mean episodes?",
        ),
        (["resume"], "resume takes one RUN, but was given: nothing."),
        (["resume", "a", "--steps", "-3"], "steps is -3, but must be at least 1."),
        (["evaluate", "a", "b"], "evaluate takes one RUN|TASK, but was given: a b."),
        (["evaluate", "a", "--episodes", "0"], "episodes is 0, but must be at least 1."),
        (["evaluate", "a", "--seed", "-1"], "seed is -1, but must be at least 0."),
        (["evaluate", "a", "--episode", "3"], "no flag --episode. Did you mean --episodes?"),
        (["list", "task"], "There is no list of task. Did you mean tasks?"),
        (["trian"], "There is no command trian. Did you mean train?"),
    ],
)
def test_bad_usage_exits_2_with_one_line(rooms, capsys, tokens, sentence):
    assert main(tokens) == 2
    out, err = capsys.readouterr()
    assert sentence in err
    assert err.count("\n") == 1
    assert out == ""
    assert rooms.made == []


def test_no_arguments_show_the_commands_and_exit_2(capsys):
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "forethought COMMAND" in err


# Exit codes.


@pytest.mark.parametrize("code", [0, 1, 3, 130, 143])
@pytest.mark.parametrize("tokens", [["train", "tdmpc2", TASK], ["resume", "somewhere"]])
def test_the_exit_code_is_that_of_the_run(rooms, tokens, code):
    rooms.exit_code = code
    assert main(tokens) == code


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ForethoughtError("The disk is full."), 1, "The disk is full.\n"),
        (ConfigError("There is no task x."), 2, "There is no task x.\n"),
        (KeyboardInterrupt(), 130, "\nInterrupted.\n"),  # below the ^C
    ],
)
def test_what_a_person_can_cause_has_no_traceback(rooms, capsys, error, code, line):
    rooms.error = error
    assert main(["train", "tdmpc2", TASK]) == code
    assert capsys.readouterr().err == line


def test_the_traceback_of_an_environment_follows_the_sentence(rooms, capsys):
    rooms.error = ForethoughtError("Environment 0 raised RuntimeError at step 3: the wheel.")
    rooms.error.add_note('Traceback (most recent call last):\n  File "theirs.py", line 7')
    assert main(["train", "tdmpc2", TASK]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "Environment 0 raised RuntimeError at step 3: the wheel.",
        "Traceback (most recent call last):",
        '  File "theirs.py", line 7',
    ]


def test_a_programming_error_is_not_hidden(rooms):
    rooms.error = RuntimeError("a bug")
    with pytest.raises(RuntimeError, match="a bug"):
        main(["train", "tdmpc2", TASK])


# resume, evaluate, list


def test_resume_passes_the_new_total(rooms):
    assert main(["resume", "runs/x", "--steps", "900"]) == 0
    assert main(["resume", "runs/x", "--override"]) == 0
    assert rooms.made == [
        ("resume", (Path("runs/x"),), {"steps": 900, "override": False}),
        ("resume", (Path("runs/x"),), {"steps": None, "override": True}),
    ]


def test_evaluate_passes_its_options_and_prints_a_summary(rooms, capsys):
    tokens = ["--policy", "random", "--episodes", "2", "--checkpoint", "5000", "--seed", "7"]
    tokens += ["--device", "cpu"]
    assert main(["evaluate", TASK, *tokens]) == 0
    options = {"policy": "random", "episodes": 2, "checkpoint": "5000", "seed": 7, "device": "cpu"}
    ((verb, words, given),) = rooms.made
    assert callable(given.pop("tell"))
    assert (verb, words, given) == ("evaluate", (TASK,), options | {"protocol": None})
    out = capsys.readouterr().out
    assert out.splitlines()[0] == f"{TASK}, random, 2 episodes"
    assert "return_mean      -1234.5" in out
    assert "success" not in out


def test_evaluate_names_the_protocol_and_the_noise(rooms, capsys, monkeypatch):
    monkeypatch.setattr(FakeResult, "protocol", "nature")
    monkeypatch.setattr(FakeResult, "epsilon", 0.05)
    assert main(["evaluate", TASK]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith(f"{TASK}, random, ") and first.endswith(
        ", protocol nature, epsilon 0.05"
    )


def test_evaluate_says_why_episodes_failed(rooms, capsys, monkeypatch):
    reasons = ("the wheel came off.", "the wheel came off.", "b.", "c.", "d.")
    monkeypatch.setattr(FakeResult, "failures", reasons)
    found = {"episodes": 1, "n_failed": 5, "return_mean": 3.0}
    monkeypatch.setattr(FakeResult, "statistics", lambda self: dict(found))
    assert main(["evaluate", TASK]) == 0  # one was played
    assert capsys.readouterr().out.splitlines() == [
        f"{TASK}, random, 1 episode",
        "  n_failed               5",
        "  return_mean            3",
        "Failed: the wheel came off.",
        "Failed: b.",
        "Failed: c.",
        "Failed otherwise: 1 more (--json has all).",
    ]


def test_a_long_name_stands_apart_from_its_number(rooms, capsys, monkeypatch):
    found = {"episodes": 1, "return_mean": 3.0, "human_normalised": -0.0173611}
    monkeypatch.setattr(FakeResult, "statistics", lambda self: dict(found))
    assert main(["evaluate", TASK]) == 0
    assert capsys.readouterr().out.splitlines()[1:3] == [
        "  return_mean               3",
        "  human_normalised -0.0173611",
    ]


def test_evaluate_shows_a_live_status_only_in_a_terminal(rooms, capsys, monkeypatch):
    assert main(["evaluate", TASK]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    played = sys.modules["forethought.training.evaluate"].evaluate_target

    def play(*args, tell, **options):
        tell(1, 1200, 2)
        return played(*args, **options)

    monkeypatch.setattr(sys.modules["forethought.training.evaluate"], "evaluate_target", play)
    assert main(["evaluate", TASK, "--episodes", "2"]) == 0
    out, err = capsys.readouterr()
    assert "playing: 1 of 2 episodes, step 1,200" in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", err)
    assert out.startswith(TASK) and "playing" not in out


def test_without_a_terminal_playing_says_how_far_it_is_every_half_minute(capsys, monkeypatch):
    seconds = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: seconds[0])
    with commands.playing() as tell:
        for step in range(70):  # one step a second
            tell(step // 25, step, 10)
            seconds[0] += 1.0
    assert capsys.readouterr().err.splitlines() == [
        "playing: 1 of 10 episodes, step 30",
        "playing: 2 of 10 episodes, step 60",
    ]


def test_evaluate_prints_json_that_can_be_read_back(rooms, capsys):
    assert main(["evaluate", TASK, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["returns"] == [-1000.0, -1469.0]


@pytest.mark.parametrize(
    ("what", "line"),
    [("agents", "tdmpc2 "), ("tasks", "dmc:cartpole-swingup"), ("presets", "debug")],
)
def test_list_names_what_there_is(capsys, what, line):
    assert main(["list", what]) == 0
    assert any(shown.startswith(line) for shown in capsys.readouterr().out.splitlines())


def test_a_reader_that_leaves_early_is_no_error():
    """'forethought list tasks | head': here the reader is gone before the first line."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "forethought", "list", "presets"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        env={key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"},
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_reader_that_left_takes_no_exit_code_along(monkeypatch):
    """What the command found stands, whoever read it to the end."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(
            commands, "carry_out", lambda tokens, verbs: print("damaged", end="") or 1
        )
        assert main(["data", "verify", "folder"]) == 1


def test_a_file_that_fails_in_the_middle_of_a_training_is_no_slip_of_the_pen(monkeypatch, capsys):
    """Where a run can go on, the traceback and the sentence that says so are shown."""
    error = FileNotFoundError(2, "No such file or directory", "/psm_3fa2")

    def fail(tokens, verbs):
        raise error

    monkeypatch.setattr(commands, "carry_out", fail)
    assert main(["train"]) == 1
    assert capsys.readouterr().err == "/psm_3fa2 cannot be used: No such file or directory.\n"
    error.add_note("Stopped by an error at 100 agent steps.")
    with pytest.raises(FileNotFoundError):
        main(["train"])


# Help.


def test_the_overview_names_every_command(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f" {verb} " in out for verb in VERBS)


def test_the_help_of_train_shows_every_flag_that_is_read(capsys):
    assert main(["train", "tdmpc2", "--agent.schedule", "cosine", "--help"]) == 0
    out = capsys.readouterr().out
    types, _ = flags.select(["--agent.schedule", "cosine"], config_class("tdmpc2"), {})
    assert "agent.schedule.end_factor" in types
    missing = [key for key in types if f"--{key} " not in out and f"--{key}," not in out]
    assert missing == []
    assert "Decisions imagined by the planner" in out


@pytest.mark.parametrize(
    "agent, kinds", [("tdmpc2", "{episodes,transitions}"), ("dqn", "{uniform,prioritized}")]
)
def test_help_offers_the_replays_that_the_agent_takes(capsys, agent, kinds):
    assert main(["train", agent, "--help"]) == 0
    assert f"--replay {kinds} " in capsys.readouterr().out


def test_help_breaks_lines_at_the_terminals_width_alone(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["train", "tdmpc2", "--help"]) == 0
    _, _, below = capsys.readouterr().out.partition("--agent.q_target ")
    lines = [line.strip(" │") for line in below.partition("--agent.")[0].splitlines()[1:-1]]
    assert len(lines) > 2 and all(len(line) > 60 for line in lines[:-1])


def test_help_shows_the_values_of_the_presets_given(capsys):
    assert main(["train", "tdmpc2", "--preset", "debug", "--help"]) == 0
    assert "(default: 400)" in capsys.readouterr().out


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(capsys, verb):
    assert main([verb, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: forethought {verb} ")


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.count(".") == 2


# From Python.


@pytest.mark.parametrize("verb", ["resume", "evaluate", "watch", "report", "compare"])
def test_a_run_that_does_not_exist_is_bad_usage(capsys, tmp_path, monkeypatch, verb):
    monkeypatch.chdir(tmp_path)
    words = ["gone", "gone"] if verb == "compare" else ["gone"]
    options = ["--video", "x.mp4"] if verb == "watch" else []
    assert main([verb, *words, *options]) == 2
    assert capsys.readouterr().err.startswith("There is no run directory gone")


# Python


def test_a_single_preset_may_be_given_by_its_name(rooms):
    forethought.train("tdmpc2", TASK, presets="debug")
    forethought.train("tdmpc2", TASK, presets=["debug"])
    (_, (one,), _), (_, (several,), _) = rooms.made
    assert one == several != default_config()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"preset": "debug"}, "There is no option preset. Did you mean presets?"),
        ({"confg": "x.yaml"}, "There is no option confg. Did you mean config?"),
        ({"output": "x"}, "There is no option output. Did you mean out?"),
        ({"step": 5}, "There is no option step. Did you mean steps?"),
        ({"horizon": 2}, 'There is no option horizon. Did you mean agent={"horizon": 2}?'),
        ({"num_envs": 2}, 'There is no option num_envs. Did you mean env={"num_envs": 2}?'),
        ({"capacity_rows": 9}, "There is no option capacity_rows. Did you mean replay={"),
        ({"horzon": 2}, "There is no option horzon. Did you mean agent.horizon?"),
        ({"qqq": 2}, "There is no option qqq. There are presets, config, out, seed, steps, "),
    ],
)
def test_a_misspelt_keyword_of_train_is_refused_with_the_nearest(rooms, options, sentence):
    with pytest.raises(ConfigError) as caught:
        forethought.train("tdmpc2", TASK, **options)
    assert str(caught.value).startswith(sentence)
    assert rooms.made == []


def test_the_public_names_go_through_a_whole_run(tmp_path):
    options = {"seed": 2, "steps": 20, "eval": {"episodes": 1}, "track": {"console": False}}
    options["train"] = {"seed_agent_steps": 20, "seed_updates": 0}
    run = forethought.train("tdmpc2", TASK, presets=["debug"], out=tmp_path / "run", **options)
    assert (run.status, run.exit_code, run.path) == ("done", 0, tmp_path / "run")
    assert forethought.resume(run, steps=25).status == "done"
    result = forethought.evaluate(run, episodes=2)
    assert len(result.returns) == 2
    agent = forethought.load(run)
    assert agent.act(np.zeros(3, np.float32)).shape == (1,)


def test_an_agent_is_made_for_environments_with_its_options():
    env = forethought.make_env(TASK, num_envs=2, seed=3)
    agent = forethought.make_agent("tdmpc2", env, device="cpu", horizon=5, model={"size": 1})
    assert (agent.config.horizon, agent.config.model.size, agent.num_envs) == (5, 1, 2)
    env.close()
    with pytest.raises(ConfigError, match=r"Did you mean agent.horizon\?"):
        forethought.make_agent("tdmpc2", env, horizn=5)
    with pytest.raises(ConfigError, match="make_agent was given 'gym:Pendulum-v1', but takes"):
        forethought.make_agent("tdmpc2", "gym:Pendulum-v1")


def test_warnings_are_sentences_also_after_a_library_has_logged(tmp_path):
    """Python's own `logging.warning` sets up a form of its own, which dm_control does by and by."""
    script = (
        "import logging; from forethought import cli; cli.main(['--version']); "
        "logging.warning('theirs'); logging.getLogger('forethought').warning('A sentence.')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stderr.splitlines() == ["theirs", "A sentence."]
