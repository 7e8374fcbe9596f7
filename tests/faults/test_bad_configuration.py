"""Case 22: a bad configuration is one sentence, before anything is allocated or written."""

from __future__ import annotations

import sys

import pytest
import yaml

from forethought import presets
from forethought.agents.registry import config_class
from forethought.config import ConfigError, build_run_config, to_dict

PENDULUM = "gym:Pendulum-v1"


early = pytest.mark.usefixtures("nothing_is_allocated")


@pytest.fixture
def nothing_is_allocated(monkeypatch):
    """The rooms that allocate cannot be entered: whoever tries gets an ImportError."""
    for name in ("loop", "build", "evaluate"):
        monkeypatch.setitem(sys.modules, f"forethought.training.{name}", None)


def train(*flags: str) -> list[str]:
    return ["train", "tdmpc2", PENDULUM, "--preset", "debug", *flags]


@early
@pytest.mark.parametrize(
    ("flag", "value", "rule"),
    [
        ("agent.gamma", "-0.1", "above 0 and at most 1"),
        ("agent.gamma", "0", "above 0 and at most 1"),
        ("agent.gamma", "1.1", "above 0 and at most 1"),
        ("agent.gamma", "2.0", "above 0 and at most 1"),
        ("agent.batch_size", "0", "at least 1"),
        ("agent.horizon", "0", "at least 1"),
        ("agent.tau", "0", "above 0 and at most 1"),
        ("agent.tau", "-0.01", "above 0 and at most 1"),
        ("agent.tau", "1.5", "above 0 and at most 1"),
        ("agent.tau", "5", "above 0 and at most 1"),
        ("agent.lr.q", "-3e-4", "above 0"),
        ("agent.planner.elites", "17", "between 1 and agent.planner.samples (16)"),
        ("agent.planner.elites", "0", "between 1 and agent.planner.samples (16)"),
        (
            "replay.capacity_rows",
            "31",
            "at least agent.batch_size x (agent.horizon + 1) = 32",  # 8 x (3 + 1)
        ),
        ("replay.capacity_rows", "0", "at least 1"),
        ("env.num_envs", "0", "at least 1"),
        ("steps", "-1", "at least 1"),
        ("steps", "0", "at least 1"),
        ("seed", "-1", "at least 0"),
        ("device", "gpu", "one of auto, cpu, cuda, cuda:N or mps"),
    ],
)
def test_case_22_a_value_out_of_range_names_its_key_and_the_rule(refused, flag, value, rule):
    sentence = refused(*train(f"--{flag}", value))
    number = f"{float(value)}" if "agent.gamma" in flag or "tau" in flag or "lr" in flag else value
    assert sentence == f"{flag} is {number}, but must be {rule}."


@early
@pytest.mark.parametrize(
    ("agent", "batch", "envs", "rule"),
    [
        ("dqn", 16, 1, "agent.batch_size x (agent.n_step + 1) = 32"),
        ("dqn", 8, 40, "env.num_envs x (agent.n_step + 1) = 80"),
        ("sac", 16, 1, "agent.batch_size x 2 = 32"),
        ("td3", 16, 1, "agent.batch_size x 2 = 32"),
    ],
)
def test_case_22_a_replay_too_small_for_a_batch_is_refused(refused, agent, batch, envs, rule):
    task = "gym:CartPole-v1" if agent == "dqn" else PENDULUM
    words = ("--agent.batch_size", str(batch), "--env.num_envs", str(envs))
    sentence = refused("train", agent, task, *words, "--replay.capacity_rows", "31")
    assert sentence == f"replay.capacity_rows is 31, but must be at least {rule}."


@early
@pytest.mark.parametrize(
    ("flag", "value", "sentence"),
    [
        ("agent.batch_size", "many", "agent.batch_size is 'many', but must be a whole number."),
        ("agent.batch_size", "8.5", "agent.batch_size is 8.5, but must be a whole number."),
        ("agent.gamma", "high", "agent.gamma is 'high', but must be a number."),
        ("agent.gamma", ".nan", "agent.gamma is nan, but must be finite."),
        ("agent.mpc", "perhaps", "agent.mpc is 'perhaps', but must be true or false."),
        ("agent.model.size", "6", "agent.model.size is 6, but must be one of 1, 5, 19, 48, 317."),
    ],
)
def test_case_22_a_value_of_a_wrong_type_names_its_key(
    refused, empty_folder, flag, value, sentence
):
    """As a flag and in a file."""
    said = refused(*train(f"--{flag}={value}"))
    data: object = presets.parse_scalar(value)
    for key in reversed(flag.split(".")):
        data = {key: data}
    (empty_folder / "mine.yaml").write_text(yaml.safe_dump(data))
    in_file = refused(*train("--config", "mine.yaml"))
    assert said.removeprefix("--") == in_file == sentence


@early
@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("agent.horizn", "agent.horizon"),
        ("agent.planner.sample", "agent.planner.samples"),
        ("replay.capacity", "replay.capacity_rows"),
        ("train.seed_agent_step", "train.seed_agent_steps"),
    ],
)
def test_case_22_a_typo_in_a_key_names_the_nearest(refused, empty_folder, flag, meant):
    assert f"{meant}?" in refused(*train(f"--{flag}", "3"))
    data: object = 3
    for key in reversed(flag.split(".")):
        data = {key: data}
    (empty_folder / "mine.yaml").write_text(yaml.safe_dump(data))
    assert f"There is no key {flag}. Did you mean {meant}?" in refused(
        *train("--config", "mine.yaml")
    )


@early
def test_case_22_a_first_gamma_that_is_not_the_primary_one_that_was_set(refused):
    flags = ["--agent.gamma", "0.9", "--agent.multi_gamma.enabled"]
    assert refused(*train(*flags, "--agent.multi_gamma.gammas", "0.99", "0.97")) == (
        "agent.multi_gamma.gammas[0] is 0.99, but must be primary or 0.9, which is agent.gamma."
    )


def test_case_22_a_first_gamma_that_is_not_the_primary_one_of_the_task(refused, monkeypatch):
    """50 decisions give 0.95; known once the task is, before a network or replay is made."""
    monkeypatch.setattr("forethought.agents.tdmpc2.agent.WorldModel", None)
    monkeypatch.setattr("forethought.agents.tdmpc2.agent.Replay", None)
    flags = ["--agent.multi_gamma.enabled", "--agent.multi_gamma.gammas", "0.99", "0.97"]
    assert refused(*train(*flags)) == (
        "agent.multi_gamma.gammas[0] is 0.99, but must be primary or 0.95, the discount of "
        "gym:Pendulum-v1."
    )


# -- keys without effect ---------------------------------------------------------------------------


@early
@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            ["--track.wandb_project", "x"],
            "track.wandb_project is x, but has no effect while track.wandb is false; set "
            "track.wandb true or leave the project out.",
        ),
        (
            ["--agent.gamma", "0.9", "--agent.gamma_max", "0.99"],
            "agent.gamma_max is 0.99, but must be left out: it has no effect when agent.gamma is "
            "set.",
        ),
        (
            ["--agent.mpc", "false", "--agent.planner.samples", "99"],
            "agent.planner.samples is 99, but must be left out: it has no effect while agent.mpc "
            "is false.",
        ),
        (
            ["--agent.episodic", "false", "--agent.lr.termination", "0.1"],
            "agent.lr.termination is 0.1, but must be left out: it has no effect while "
            "agent.episodic is false.",
        ),
        (
            ["--agent.episodic", "false", "--agent.termination_coef", "2"],
            "agent.termination_coef is 2.0, but must be left out: it has no effect while "
            "agent.episodic is false.",
        ),
    ],
)
def test_case_22_a_key_without_effect_is_refused(refused, flags, sentence):
    assert refused(*train(*flags)) == sentence


def test_a_switch_drops_what_earlier_layers_said_about_it_and_nothing_else():
    """The debug preset has a planner; who turns planning off cannot leave it out of a preset."""
    base = presets.layers(["debug"], None, "tdmpc2")
    cls = config_class("tdmpc2")
    off = build_run_config("tdmpc2", PENDULUM, cls, [*base, {"agent": {"mpc": False}}])
    assert (off.agent.mpc, off.agent.planner.samples, off.agent.batch_size) == (False, 512, 8)
    again = build_run_config("tdmpc2", PENDULUM, cls, [to_dict(off)])
    assert again == off
    rates = {"agent": {"lr": {"termination": 0.1, "q": 0.2}, "termination_coef": 3.0}}
    layers = [rates, {"agent": {"episodic": False}}]
    built = build_run_config("tdmpc2", PENDULUM, cls, layers).agent
    assert (built.lr.termination, built.lr.q, built.termination_coef) == (3e-4, 0.2, 1.0)
    assert rates["agent"]["termination_coef"] == 3.0  # the layer itself is not changed
    with pytest.raises(ConfigError, match=r"agent\.lr\.termination is 0\.1"):
        build_run_config("tdmpc2", PENDULUM, cls, [{"agent": {"episodic": False}}, rates])


@pytest.mark.parametrize(("flag", "value"), [("checkpoint", "best"), ("device", "cpu")])
def test_case_22_random_play_takes_neither_checkpoint_nor_device(refused, monkeypatch, flag, value):
    monkeypatch.undo()  # this verb decides in the room itself
    sentence = refused("evaluate", PENDULUM, "--policy", "random", f"--{flag}", value)
    assert sentence == f"{flag} is {value}, but must be left out: it has no effect on random play."
