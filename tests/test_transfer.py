"""Beginning with the weights of another run: what is taken, and what does not fit."""

from __future__ import annotations

import shutil
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from gymnasium import spaces

from forethought import cli
from forethought.agents.tdmpc2.config import TDMPC2Config
from forethought.agents.tdmpc2.gammas import MultiGammaConfig
from forethought.agents.tdmpc2.transfer import Source, transfer
from forethought.config import ConfigError, build_run_config
from forethought.envs import multi, spec_of
from forethought.training.build import load_agent
from forethought.training.init_from import action_repeats, different_lengths
from tests.discrete_actions import SPACE, discrete_agent
from tests.tdmpc2_agents import CONFIG, TINY, make_agent, make_spec

SHORT, LONG = "gym:tests.many_tasks:tasks/Short-v0", "gym:tests.many_tasks:tasks/Long-v0"
PAIR = f"multi:{SHORT},{LONG}"
OTHER = "gym:Pendulum-v1"
"""Three observations and one action."""


def agent_of(task, seed=1, config=CONFIG):
    """An agent whose weights are nowhere zero."""
    agent = make_agent(config, seed=seed, spec=spec_of(task))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in agent.model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return agent


def begin(agent, source, like=None):
    tensors = {f"model/{k}": v for k, v in source.model.state_dict().items()}
    tensors["q_scale"] = torch.tensor(7.0)
    return agent.begin_with(tensors, source.spec.task, "the other run", like, source.facts())


@pytest.mark.parametrize(
    ("task", "number", "observed", "acted"), [(SHORT, 0, 2, 1), (LONG, 1, 3, 2)]
)
def test_one_of_many_tasks_goes_on_exactly_as_it_was(task, number, observed, acted):
    """Every network gives the same numbers for the same observation and action."""
    many, one = agent_of(PAIR), agent_of(task, seed=2)
    begin(one, many)
    obs, action = torch.randn(5, observed), torch.tanh(torch.randn(5, acted))
    wide_obs = torch.nn.functional.pad(obs, (0, 3 - observed))
    wide_action = torch.nn.functional.pad(action, (0, 2 - acted))
    which = torch.full((5,), number)
    with torch.no_grad():
        z, wide_z = one.model.encode(obs), many.model.encode(wide_obs, task=which)
        a, b = one.model, many.model
        mask = b.mask_of(which)
        pairs = [
            (z, b.state_of(wide_z)),
            (a.next(z, action), b.state_of(b.next(wide_z, wide_action))),
            (a.reward(z, action), b.reward(wide_z, wide_action)),
            (a.q(z, action), b.q(wide_z, wide_action)),
            (a.target_q(z, action), b.target_q(wide_z, wide_action)),
            (a.pi(z).mean, b.pi(wide_z, mask=mask).mean[:, :acted]),
        ]
    for here, there in pairs:
        torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-5)
    assert one.learner.scale.value == 7


def test_a_new_task_begins_like_the_one_that_is_named():
    many, one = agent_of(PAIR), agent_of(OTHER)
    lines = begin(one, many, like=LONG)
    e = many.model.tasks.embedding[1]
    weight, bias = many.model.policy[0].weight, many.model.policy[0].bias
    expected = bias + weight[:, 16:] @ e
    torch.testing.assert_close(one.model.policy[0].bias, expected)
    assert any(f"the embedding of {LONG} is in its bias" in line for line in lines)


def test_a_new_task_without_a_like_begins_with_a_new_embedding():
    many, one, again = agent_of(PAIR), agent_of(OTHER), agent_of(OTHER)
    lines = begin(one, many)
    begin(again, many)
    assert torch.equal(one.model.policy[0].bias, again.model.policy[0].bias), "seeded"
    weight, bias = many.model.policy[0].weight, many.model.policy[0].bias
    shift = (one.model.policy[0].bias - bias).abs()
    assert 0 < shift.max() <= 0.02 * weight[:, 16:].abs().sum(1).max()
    assert any(f"a new task ({OTHER})" in line for line in lines)


def test_what_is_only_here_stays_new_and_is_told():
    """From two observations and one action to three and two."""
    small, large = agent_of(SHORT), agent_of(LONG, seed=2)
    before = {k: v.clone() for k, v in large.model.state_dict().items()}
    lines = begin(large, small)
    here, there = large.model.state_dict(), small.model.state_dict()
    first = "encoder.0.weight"
    assert torch.equal(here[first][:, :2], there[first])
    assert torch.equal(here[first][:, 2], before[first][:, 2])
    weight = "dynamics.0.weight"
    assert torch.equal(here[weight][:, :17], there[weight])
    assert torch.equal(here[weight][:, 17], before[weight][:, 17])
    for name in ("policy.2.weight", "policy.2.bias"):
        assert torch.equal(here[name][0], there[name][0])
        assert torch.equal(here[name][2], there[name][1]), "the log std of action 0"
        assert torch.equal(here[name][[1, 3]], before[name][[1, 3]])
    told = "\n".join(lines)
    assert "obs inputs: 2 taken, 1 new" in told
    assert "actions: 1 taken, 1 new" in told


def test_many_tasks_take_their_embeddings_by_name():
    many = agent_of(PAIR)
    turned = agent_of(f"multi:{OTHER},{LONG},{SHORT}", seed=2)
    begin(turned, many, like=SHORT)
    here, there = turned.model.tasks.embedding, many.model.tasks.embedding
    assert torch.equal(here, there[[0, 1, 0]])


def test_one_task_may_become_many():
    one, many = agent_of(LONG), agent_of(PAIR, seed=2)
    before = many.model.tasks.embedding.clone()
    lines = begin(many, one)
    assert torch.equal(many.model.tasks.embedding, before)
    assert any(line.split() == ["tasks", "new"] for line in lines)
    columns = many.model.policy[0].weight[:, :16]
    assert torch.equal(columns, one.model.policy[0].weight)


def test_a_termination_head_that_only_one_side_has():
    plain = agent_of(LONG)
    episodic = agent_of(LONG, seed=2, config=replace(CONFIG, episodic=True))
    assert any(line.split() == ["termination", "new"] for line in begin(episodic, plain))
    lines = begin(plain, episodic)
    assert any("termination" in line and "left out" in line for line in lines)


@pytest.mark.parametrize(
    ("gammas", "head", "carried"),
    [
        ((0.97, 0.995), "joint", True),
        ((0.97, 0.9), "joint", False),  # as many heads, of another discount
        ((0.97,), "joint", False),
        ((0.97, 0.995), "separate", False),
    ],
)
def test_auxiliary_heads_carry_over_to_the_same_discounts_alone(gammas, head, carried):
    def made(seed, gammas, head):
        auxiliary = MultiGammaConfig(enabled=True, gammas=("primary", *gammas), head=head)
        return agent_of(LONG, seed=seed, config=replace(CONFIG, multi_gamma=auxiliary))

    there, here = made(1, (0.97, 0.995), "joint"), made(2, gammas, head)
    before = {k: v.clone() for k, v in here.model.aux_value.state_dict().items()}
    lines = begin(here, there)
    told = "all" if carried else "new"
    assert any(line.split() == ["aux_value", told] for line in lines)
    wanted = there.model.aux_value.state_dict() if carried else before
    after = here.model.aux_value.state_dict()
    assert all(torch.equal(after[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"mlp_units": 32}, "dynamics.0.weight"),
        ({"latent_dim": 24}, "encoder.1.weight"),
        ({"num_q": 2}, "q.2"),
        ({"encoder_layers": 3}, "encoder."),
        ({"bins": 51}, "reward.2.weight"),
    ],
)
def test_another_architecture_is_one_error_that_names_both(changes, name):
    other = replace(CONFIG, model=replace(TINY, **changes))
    for here, there in ((CONFIG, other), (other, CONFIG)):
        with pytest.raises(ConfigError, match="the other run do not fit this run") as error:
            begin(agent_of(LONG, config=here), agent_of(PAIR, config=there))
        assert name in str(error.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.symlog_obs", True),
        ("model.simnorm_dim", 4),
        ("model.bin_low", -5.0),
        ("model.bin_high", 5.0),
        ("log_std_min", -5.0),
        ("log_std_max", 1.0),
    ],
)
def test_weights_that_mean_something_else_are_refused_though_they_fit(key, value):
    """Every shape is the same, so only the saved configuration tells."""
    group, _, name = key.rpartition(".")
    config = (
        replace(CONFIG, **{name: value})
        if not group
        else (replace(CONFIG, model=replace(TINY, **{name: value})))
    )
    there = agent_of(LONG, config=config)
    saved = there.facts() | {"config": {"agent": asdict(config)}}
    tensors = {f"model/{k}": v for k, v in there.model.state_dict().items()}
    tensors["q_scale"] = torch.tensor(7.0)
    with pytest.raises(
        ConfigError, match=rf"agent\.{key} is .* the other run learned with {value}"
    ):
        agent_of(LONG).begin_with(tensors, LONG, "the other run", None, saved)
    agent_of(LONG, config=config).begin_with(tensors, LONG, "the other run", None, saved)


def test_what_was_not_saved_had_its_default():
    """A key younger than the run that is begun with: its weights mean what the default says."""
    there = agent_of(LONG)
    tensors = {f"model/{k}": v for k, v in there.model.state_dict().items()}
    tensors["q_scale"] = torch.tensor(7.0)
    saved = there.facts() | {"config": {"agent": {}}}
    agent_of(LONG).begin_with(tensors, LONG, "the other run", None, saved)
    other = replace(CONFIG, model=replace(TINY, symlog_obs=True))
    with pytest.raises(ConfigError, match=r"symlog_obs is True, but .* learned with False"):
        agent_of(LONG, config=other).begin_with(tensors, LONG, "the other run", None, saved)


def test_embeddings_of_another_length_do_not_fit_many_tasks():
    short = replace(CONFIG, model=replace(TINY, task_dim=8))
    with pytest.raises(ConfigError, match=r"task_dim"):
        begin(agent_of(PAIR), agent_of(PAIR, config=short))


def test_a_like_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="is no task of the other run; choose from"):
        begin(agent_of(OTHER), agent_of(PAIR), like=OTHER)
    with pytest.raises(ConfigError, match="has one task and no embeddings"):
        begin(agent_of(OTHER), agent_of(LONG), like=LONG)


@pytest.mark.parametrize(
    "space", [spaces.Discrete(5), spaces.MultiDiscrete([2, 3]), SPACE], ids=["5", "2x3", "dict"]
)
def test_discrete_actions_carry_over_whole(space):
    """Not one weight of the actions' stays new while the table says that all were taken."""
    there, here = discrete_agent(CONFIG, space), discrete_agent(CONFIG, space, seed=2)
    with torch.no_grad():
        for parameter in there.model.parameters():
            parameter += 0.1
    lines = begin(here, there)
    for name, weight in there.model.state_dict().items():
        assert torch.equal(weight, here.model.state_dict()[name]), name
    assert {line.split()[-1] for line in lines[1:]} == {"all"}


def test_actions_of_another_kind_or_number_do_not_carry_over():
    four, five = (discrete_agent(CONFIG, spaces.Discrete(n)) for n in (4, 5))
    continuous = make_agent(CONFIG, spec=make_spec(terminates=True))
    for here, there in ((four, five), (four, continuous), (continuous, five)):
        with pytest.raises(ConfigError, match="The actions of the other run are") as error:
            begin(here, there)
        assert "discrete (" in str(error.value)


def test_other_networks_are_refused():
    agent = agent_of(LONG)
    weights = {"encoder.conv.weight": torch.zeros(1)}
    source = Source("a run of pictures", weights, ("x",))
    with pytest.raises(ConfigError, match=r"of pictures cannot carry over.* images or a dict"):
        transfer(agent.model, (LONG,), source, torch.Generator())


# ---- runs ----

QUICK = ["--preset", "debug", "--track.no_console", "--env.max_episode_steps", "8", "--steps", "40"]
QUICK += ["--train.seed_agent_steps", "20", "--train.seed_updates", "2"]


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    out = tmp_path_factory.mktemp("many") / "run"
    assert cli.main(["train", "tdmpc2", PAIR, *QUICK, "--out", str(out)]) == 0
    return out


def test_a_run_begins_with_another_and_resumes_without_it(many, tmp_path, capsys):
    source, out = tmp_path / "source", tmp_path / "run"
    shutil.copytree(many, source)
    words = ["train", "tdmpc2", SHORT, *QUICK, "--out", str(out), "--track.console", "true"]
    assert cli.main([*words, "--train.init_from", str(source)]) == 0
    said = capsys.readouterr().err
    assert f"Begins with the weights of {source} at 40 agent steps ({PAIR}):" in said
    assert "obs inputs: 2 of 3 taken" in said
    assert "An action is held" not in said
    shutil.rmtree(source)
    assert cli.main(["resume", str(out), "--steps", "44"]) == 0
    assert load_agent(out).spec.task == SHORT


def test_steps_of_another_length_are_told(many, tmp_path, capsys):
    words = ["train", "tdmpc2", SHORT, *QUICK, "--out", str(tmp_path / "run")]
    words += ["--track.console", "true", "--env.action_repeat", "2"]
    assert cli.main([*words, "--train.init_from", str(many)]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "An action is held for 2 frames here and was for 1 frame there" in said


@pytest.mark.parametrize(
    ("there", "here", "sentence"),
    [
        ({"a": 1, "b": 2}, {"b": 2}, None),  # as that very task was
        ({"b": 2}, {"a": 1, "b": 2}, "for 1 frame here and was for 2 frames there"),
        ({"a": 1, "b": 2}, {"a": 2}, "for 2 frames here and was for 1 frame there"),
        ({"a": 1, "b": 2}, {"c": 2}, None),  # a new one, as one of those there
        ({"a": 1, "b": 2}, {"c": 4}, "for 4 frames here and was for 1 or 2 frames there"),
        ({}, {"a": 1}, "for 1 frame here and was for an unknown number of frames there"),
        ({"a": 1}, {}, "for an unknown number of frames here and was for 1 frame there"),
        ({"b": 1, "x": 2}, {"c": 2}, "for 2 frames here and was for 1 frame there"),  # c like b
        ({"x": 1, "y": 2}, {"x": 2, "c": 8}, "for 2 or 8 frames here and was for 1 or 2 frames"),
    ],
)
def test_lengths_of_steps_are_compared_task_by_task(there, here, sentence):
    told = different_lengths(there, here, like="b" if "x" in there else None)
    assert told is None if sentence is None else sentence in told


def test_a_new_task_is_compared_with_the_one_it_begins_like(many, tmp_path, capsys, monkeypatch):
    """Of two tasks with lengths of their own, train.init_task names the one that counts."""
    repeats = {SHORT: 1, LONG: 3}

    def held(config):
        return {OTHER: 3} if config.task == OTHER else repeats

    monkeypatch.setattr("forethought.training.init_from.action_repeats", held)
    words = ["train", "tdmpc2", OTHER, *QUICK, "--track.console", "true"]
    words += ["--train.init_from", str(many), "--train.init_task"]
    for like, told in ((SHORT, True), (LONG, False)):
        capsys.readouterr()
        assert cli.main([*words, like, "--out", str(tmp_path / f"like-{told}")]) == 0
        said = " ".join(capsys.readouterr().err.split())
        assert ("An action is held for 3 frames here and was for 1 frame there" in said) is told


def test_every_task_of_several_has_a_length():
    config = build_run_config("tdmpc2", PAIR, TDMPC2Config, [{"env": {"action_repeat": 3}}])
    assert action_repeats(config) == {SHORT: 3, LONG: 3}


def test_steps_of_the_same_length_are_not_told(many, tmp_path, capsys):
    """A number that is the task's own anyway."""
    words = ["train", "tdmpc2", SHORT, *QUICK, "--out", str(tmp_path / "run")]
    words += ["--track.console", "true", "--env.action_repeat", "1"]
    assert cli.main([*words, "--train.init_from", str(many)]) == 0
    assert "An action is held" not in capsys.readouterr().err


def test_the_first_weights_are_those_of_the_other_run(many, tmp_path):
    out = tmp_path / "run"
    words = ["train", "tdmpc2", PAIR, *QUICK, "--out", str(out), "--train.init_from", str(many)]
    words += ["--train.keep_checkpoints", "9", "--train.checkpoint_every_agent_steps", "20"]
    assert cli.main(words) == 0
    begun, other = load_agent(out, checkpoint="0"), load_agent(many)
    for name, weight in other.model.state_dict().items():
        assert torch.equal(weight, begun.model.state_dict()[name]), name


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--train.init_from", "nowhere"], "There is no run directory nowhere"),
        (["--train.init_task", SHORT], "no effect without train.init_from"),
        (["--train.init_from", "RUN", "--train.init_checkpoint", "7"], "no checkpoint at step 7"),
        (["--train.init_from", "RUN", "--agent.model.mlp_units", "32"], "do not fit this run"),
    ],
)
def test_what_cannot_be_begun_with_leaves_no_trace(many, tmp_path, capsys, words, sentence):
    words = [str(many) if word == "RUN" else word for word in words]
    out = tmp_path / "run"
    assert cli.main(["train", "tdmpc2", LONG, *QUICK, *words, "--out", str(out)]) == 2
    assert sentence in capsys.readouterr().err
    assert not out.exists()


def test_tasks_are_told_apart_by_their_names():
    assert multi.members(PAIR) == (SHORT, LONG)
    assert np.array_equal(multi.action_masks(spec_of(PAIR)), [[1, 0], [1, 1]])
