"""What SAC and TD3 share: acting, transitions from replay, gates, exact resume, refusals."""

from __future__ import annotations

from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import forethought
from forethought import files, presets
from forethought.agents.actor_critic.update import Transitions
from forethought.agents.registry import config_class
from forethought.config import ConfigError, ForethoughtError, build_run_config
from forethought.envs import make_env, spec_of
from forethought.nets.init import uniform_linears
from forethought.nets.relu import MLPEnsemble, ReluMLP
from forethought.replay import Batch
from forethought.seeding import Streams
from forethought.spaces.spec import EnvSpec
from forethought.training.loop import resume_run, train_run
from tests.actor_critics import (
    ACTION,
    BATCH,
    NAMES,
    OBS,
    debug_run,
    fill,
    make_agent,
    make_batch,
    make_spec,
    weights,
)
from tests.stub_agent import training_record
from tests.stubs import CounterEnv, vector_of

BOTH = pytest.mark.parametrize("name", NAMES)


# Networks


def test_an_ensemble_computes_what_its_members_compute_one_by_one() -> None:
    ensemble = MLPEnsemble(3, 4, (6, 5), 2)
    uniform_linears(ensemble, torch.Generator().manual_seed(1))
    x = torch.randn(7, 4)
    out = ensemble(x)  # [3, 7, 2]
    for n in range(3):
        net, h = ReluMLP(4, (6, 5), 2), x
        with torch.no_grad():
            for i, (weight, bias) in enumerate(net.layers):
                weight.copy_(ensemble.weights[i][n])
                bias.copy_(ensemble.biases[i][n, 0])
                h = (h.relu() if i else h) @ weight.T + bias
        torch.testing.assert_close(out[n], net(x))
        torch.testing.assert_close(out[n], h)
    torch.testing.assert_close(ensemble(x, count=2), out[:2])


@pytest.mark.parametrize("slopes", [1, 4])
@pytest.mark.parametrize("count", [None, 1, 2])
@pytest.mark.parametrize("hidden", [(), (6,), (6, 5)], ids=len)
def test_the_least_of_an_ensemble_and_its_slope(
    hidden: tuple[int, ...], count: int | None, slopes: int
) -> None:
    """In the last inputs, which are the action; once more after another batch."""
    ensemble = MLPEnsemble(3, 4, hidden, 1).double()
    uniform_linears(ensemble, torch.Generator().manual_seed(1))
    for batch in (9, 5, 9):
        x = torch.randn(batch, 4, dtype=torch.float64).requires_grad_()
        wanted = ensemble(x, count).squeeze(-1).amin(0)
        (gradient,) = torch.autograd.grad(wanted.sum(), x)
        found, slope = ensemble.least(x.detach(), slopes, count)
        torch.testing.assert_close(found, wanted.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(slope, gradient[:, -slopes:], rtol=1e-12, atol=1e-12)
    assert all(parameter.grad is None for parameter in ensemble.parameters())


@pytest.mark.parametrize("inputs", [4, 16, 257])  # few, a register full, many
@pytest.mark.parametrize("hidden", [(), (6,), (6, 5)], ids=len)
@pytest.mark.parametrize("kind", [ReluMLP, partial(MLPEnsemble, 3)], ids=["one", "ensemble"])
def test_the_way_back_by_hand_is_that_of_autograd(
    kind: Any, hidden: tuple[int, ...], inputs: int
) -> None:
    """Whatever was computed before, for another batch too: gradients are not added up."""
    net = kind(inputs, hidden, 2).double()
    uniform_linears(net, torch.Generator().manual_seed(1))
    for batch in (9, 9, 5):
        x = torch.randn(batch, inputs, dtype=torch.float64)
        out = net(x)
        factor = torch.randn_like(out)
        wanted = torch.autograd.grad((out * factor).sum(), list(net.parameters()))
        trace = net.trace(x)
        torch.testing.assert_close(trace.out, out, rtol=1e-12, atol=1e-12)
        net.learn(trace, factor)
        for parameter, gradient in zip(net.parameters(), wanted, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-12)
    moved = net.float().trace(torch.randn(5, inputs))  # in memory of its own type
    assert moved.out.dtype == torch.float32


def test_members_and_layers_start_within_one_over_the_root_of_their_inputs() -> None:
    ensemble = MLPEnsemble(2, 4, (400,), 1)
    uniform_linears(ensemble, torch.Generator().manual_seed(1))
    assert not torch.equal(ensemble.weights[0][0], ensemble.weights[0][1])
    for weight, bound in zip(ensemble.weights, (0.5, 0.05)):
        assert 0.9 * bound < weight.abs().max() <= bound
    assert ensemble.biases[0].abs().max() <= 0.5 and ensemble.biases[0].any()


@BOTH
def test_targets_start_equal_and_critics_different(name: str) -> None:
    state = weights(make_agent(name))
    for key, value in state.items():
        if key.startswith("target_"):
            assert torch.equal(value, state[key.removeprefix("target_")])
    assert not torch.equal(state["critic.weights.0"][0], state["critic.weights.0"][1])


@BOTH
def test_every_weight_learns_and_targets_move_by_tau(name: str) -> None:
    agent = make_agent(name, policy_delay=1)
    before = weights(agent)
    agent.update(make_batch(), agent.draw_noise(True))
    after = weights(agent)
    for key in before:
        assert not torch.equal(before[key], after[key]), key
    for key in (key for key in before if key.startswith("target_")):
        online = after[key.removeprefix("target_")]
        torch.testing.assert_close(after[key], before[key] + 0.005 * (online - before[key]))


# Acting


@BOTH
def test_actions_are_in_range_and_evaluation_draws_nothing(name: str) -> None:
    agent = make_agent(name, num_envs=3)
    obs, first = np.random.default_rng(0).normal(size=(3, OBS)).astype(np.float32), np.ones(3, bool)
    state = agent.new_state(3, Streams(1), "planner")
    before = state.generator.get_state()
    calm, state = agent.act_batch(obs, state, first, [{}] * 3, False)
    assert torch.equal(state.generator.get_state(), before)
    loud, state = agent.act_batch(100 * obs, state, first, [{}] * 3, True)
    for action in (calm, loud):
        assert action.dtype == np.float32 and action.shape == (3, ACTION)
        assert np.abs(action).max() <= 1
    assert not np.array_equal(calm, agent.act_batch(obs, state, first, [{}] * 3, True)[0])
    np.testing.assert_array_equal(agent.act(obs[0]), agent.act(obs[0]))
    np.testing.assert_allclose(agent.act(obs[0]), calm[0], atol=1e-6)


@BOTH
def test_acting_elsewhere_does_not_disturb_the_training_stream(name: str) -> None:
    agent, obs, first = make_agent(name), np.zeros((1, OBS), np.float32), np.array([True])
    state = agent.new_state(1, Streams(1), "planner")
    json, tensors = agent.acting_state(state)
    one, _ = agent.act_batch(obs, state, first, [{}], True)
    agent.act(obs[0], explore=True)
    restored = agent.restore_acting_state(agent.new_state(1, Streams(9), "x"), json, tensors)
    again, _ = agent.act_batch(obs, restored, first, [{}], True)
    np.testing.assert_array_equal(one, again)


# Transitions


@BOTH
def test_truncation_keeps_the_bootstrap_and_termination_cuts_it(name: str) -> None:
    """Seed 004, 'done mask': only termination cuts the future, in the losses too."""
    agent, batch = make_agent(name, gamma=0.5), make_batch()
    noise = agent.draw_noise(False)
    drawn = noise.target if name == "sac" else noise
    steps = Transitions.of(batch)
    y = agent.learner.targets(steps, drawn)
    cut = batch.terminated[0] == 1
    torch.testing.assert_close(y[cut], batch.reward[0][cut])
    assert (y[~cut] != batch.reward[0][~cut]).all()
    other = Transitions.of(Batch(**{**vars(batch), "truncated": ~batch.truncated}))
    assert torch.equal(agent.learner.targets(other, drawn), y)


@BOTH
@pytest.mark.parametrize("truncates", [True, False], ids=["truncated", "terminated"])
def test_what_replay_gives_ends_with_the_true_last_observation(name: str, truncates: bool) -> None:
    """An episode of three steps: the last transition leads to x_3, not to the next episode."""
    env = vector_of(partial(CounterEnv, length=3, truncates=truncates), num_envs=2)
    agent = make_agent(name, env.spec_for_agent, num_envs=2, batch_size=64)
    for i in range(2):
        for _ in range(2):
            obs, _ = env.reset_one(i)
            agent.store_transition(
                {"obs": obs, "terminated": False, "truncated": False, "is_first": True}, i
            )
            for _ in range(3):
                action = np.zeros(1, np.float32)
                obs, reward, terminated, truncated, _ = env.step_one(i, action)
                row = {"obs": obs, "action": action, "reward": reward, "is_first": False}
                agent.store_transition({**row, "terminated": terminated, "truncated": truncated}, i)
    batch = agent.replay.sample(64)
    steps = Transitions.of(batch)
    torch.testing.assert_close(steps.next_obs[:, 0], steps.obs[:, 0] + 1)
    torch.testing.assert_close(steps.next_obs[:, 1], steps.obs[:, 1])  # the same episode
    torch.testing.assert_close(steps.reward, steps.next_obs[:, 0])
    last = steps.next_obs[:, 0] == 3
    assert last.any()
    assert torch.equal(steps.terminated.bool(), last & (not truncates))
    assert torch.equal(batch.truncated[0], last & truncates)
    env.close()


@BOTH
def test_integer_observations_are_learned_from_as_numbers(name: str) -> None:
    space = spaces.Box(0, 9, (OBS,), np.int64)
    agent = make_agent(name, make_spec(observation_space=space))
    batch = Batch(**{**vars(make_batch()), "obs": torch.randint(0, 9, (2, BATCH, OBS))})
    assert agent.update(batch, agent.draw_noise(agent.actor_turn))["nonfinite"] == 0.0
    assert agent.act(np.arange(OBS)).shape == (ACTION,)


# Gates


@BOTH
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_step_that_is_not_finite_changes_nothing(name: str, value: float) -> None:
    """Seed 004, finding 3: the first bad step must not poison the weights."""
    agent, batch = make_agent(name, policy_delay=1), make_batch()
    agent.update(batch, agent.draw_noise(True))
    before, moments = weights(agent), agent.state()[1]
    moments = {k: v.clone() for k, v in moments.items() if "optimiser" in k}
    reward = batch.reward.clone()
    reward[0, 3] = value
    spoiled = Batch(**{**vars(batch), "reward": reward})
    assert agent.update(spoiled, agent.draw_noise(True))["nonfinite"] == 1.0
    after, now = weights(agent), agent.state()[1]
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert all(torch.equal(moments[key], now[key]) for key in moments)
    json, tensors = agent.diagnostics()
    assert json["parts"]["critic"]["gradient_nonfinite"] > 0
    assert json["parts"]["actor"]["parameter_nonfinite"] == 0 and "reward" in tensors


@BOTH
def test_metrics_are_those_that_were_declared(name: str) -> None:
    agent = make_agent(name)
    fill(agent)
    seen = agent.train(2) | agent.train(1)
    assert set(seen) == set(agent.metric_names)
    assert all(np.isfinite(list(seen.values())))


# Saving


@BOTH
def test_saved_and_loaded_agent_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    agent = make_agent(name)
    fill(agent)
    agent.train(3)  # an odd number: a delayed actor is half-way to its turn
    agent.save(tmp_path / "saved")
    other = make_agent(name, seed=2)
    other.load(tmp_path / "saved")
    assert agent.train(5) == other.train(5)
    for key, value in weights(agent).items():
        assert torch.equal(value, weights(other)[key]), key


@BOTH
def test_loaded_for_acting_has_neither_replay_nor_optimisers(name: str, tmp_path: Path) -> None:
    agent = make_agent(name)
    agent.save(tmp_path / "saved")
    actor = make_agent(name, seed=2, for_acting=True)
    actor.load(tmp_path / "saved")
    assert not hasattr(actor, "learner")
    np.testing.assert_array_equal(actor.act(np.ones(OBS)), agent.act(np.ones(OBS)))
    with pytest.raises(ForethoughtError, match="loaded for acting only"):
        _ = actor.replay
    with pytest.raises(ForethoughtError, match="no optimisers to save"):
        actor.save(tmp_path / "again")


@BOTH
def test_an_observation_of_another_shape_is_refused_in_one_sentence(name: str) -> None:
    agent = make_agent(name)
    for obs in (np.ones(OBS + 1), np.ones((1, OBS)), {"x": np.ones(OBS)}):
        told = rf"but those of stub have \({OBS},\): pass the observation of one environment;"
        with pytest.raises(ForethoughtError, match=told):
            agent.act(obs)
    with pytest.raises(ForethoughtError, match="Something irregular was given, but obs"):
        agent.act((np.ones(OBS), {}))  # what reset returns, info and all
    agent.act(np.ones(OBS))


@BOTH
def test_weights_of_another_size_are_refused_in_one_sentence(name: str, tmp_path: Path) -> None:
    make_agent(name).save(tmp_path / "saved")
    with pytest.raises(ForethoughtError, match="weights are of another model"):
        make_agent(name, hidden=(8, 8)).load(tmp_path / "saved")


class Killed(BaseException):
    """Stands for kill -9: nothing after it may be saved."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The record of a run of each that nothing happened to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return {name: training_record(train_run(debug_run(name), folder / name).path) for name in NAMES}


@BOTH
@pytest.mark.parametrize("moment", ["step-34", "update-27", "step-150"])
def test_a_killed_run_resumes_exactly(name, moment, undisturbed, tmp_path, monkeypatch) -> None:
    """In random play, between two updates and in the middle of an episode; two environments."""
    passes = count()

    def fault(reached: str) -> None:
        if reached == moment and next(passes) == 0:
            raise Killed

    monkeypatch.setattr(files, "fault_point", fault)
    with pytest.raises(Killed):
        train_run(debug_run(name), tmp_path / "run")
    assert resume_run(tmp_path / "run").status == "done"
    assert training_record(tmp_path / "run") == undisturbed[name]


# Refusals


@BOTH
@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(3),
        spaces.MultiDiscrete([2, 3]),
        spaces.Box(-1, 1, (2, 2), np.float32),
        spaces.Box(-np.inf, np.inf, (2,), np.float32),
        spaces.Dict({"a": spaces.Box(-1, 1, (2,), np.float32)}),
    ],
    ids=lambda space: type(space).__name__,
)
def test_actions_it_cannot_take_are_refused(name: str, space: gymnasium.Space[Any]) -> None:
    with pytest.raises(ConfigError, match=f"{name} takes continuous actions .* of stub are"):
        make_agent(name, make_spec(action_space=space))


@BOTH
@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(3),
        spaces.Box(0, 255, (8, 8, 3), np.uint8),
        spaces.Dict({"a": spaces.Box(-1, 1, (2,), np.float32)}),
    ],
    ids=lambda space: type(space).__name__,
)
def test_observations_it_cannot_take_are_refused(name: str, space: gymnasium.Space[Any]) -> None:
    with pytest.raises(ConfigError, match=f"{name} takes observations that are one vector"):
        make_agent(name, make_spec(observation_space=space))


@BOTH
def test_a_task_with_discrete_actions_is_refused_before_there_is_a_run(name, tmp_path) -> None:
    out = tmp_path / "run"
    with pytest.raises(ConfigError, match="those of gym:CartPole-v1 are Discrete"):
        forethought.train(name, "gym:CartPole-v1", presets="debug", out=out)
    assert not out.exists()


@BOTH
def test_several_tasks_are_refused(name: str) -> None:
    one = make_spec()
    with pytest.raises(ConfigError, match=f"{name} learns one task, but stub is several"):
        make_agent(name, make_spec(tasks=(one, one)))


@BOTH
@pytest.mark.parametrize("kind", ["episodes", "uniform"])
def test_another_replay_is_refused(name: str, kind: str) -> None:
    with pytest.raises(ConfigError, match=f"replay is {kind}, but must be transitions for {name}"):
        build_run_config(name, "t", config_class(name), [{"replay": {"kind": kind}}])


@pytest.mark.parametrize(
    ("name", "agent", "sentence"),
    [
        ("sac", {"entropy": {"kind": "fixed", "lr": 1e-3}}, r"agent\.entropy\.lr belongs to"),
        ("sac", {"exploration_noise": 0.1}, r"There is no key agent\.exploration_noise"),
        ("td3", {"entropy": {"kind": "auto"}}, r"There is no key agent\.entropy"),
    ],
)
def test_an_option_without_effect_is_refused(name: str, agent: Any, sentence: str) -> None:
    """Seed 004, findings 19 and 20."""
    with pytest.raises(ConfigError, match=sentence):
        build_run_config(name, "t", config_class(name), [{"agent": agent}])


# A run's defaults, and ranges of actions


def config_of(name: str, *names: str) -> Any:
    layers = presets.layers(names, None, name)
    return build_run_config(name, "gym:Pendulum-v1", config_class(name), layers)


def test_a_run_begins_to_learn_when_its_agent_says_and_without_a_burst() -> None:
    for name, steps in (("sac", 10_000), ("td3", 25_000)):
        run = config_of(name)
        assert (run.train.seed_agent_steps, run.train.seed_updates) == (steps, 0)
        assert run.replay.kind == "transitions"
    assert config_of("sac", "sac_sb3").train.seed_agent_steps == 100
    assert config_of("sac", "sac_cleanrl").train.seed_agent_steps == 5_000


@BOTH
def test_make_agent_gives_it_the_replay_it_learns_from(name: str) -> None:
    env = make_env("gym:Pendulum-v1")
    agent = forethought.make_agent(name, env, hidden=[8], device="cpu")
    assert agent.replay_config.kind == "transitions"
    env.close()


def test_the_spec_tells_half_the_range_of_each_action() -> None:
    assert spec_of("gym:Pendulum-v1").action_half_range == (2.0,)
    assert spec_of("gym:CartPole-v1").action_half_range is None
    assert EnvSpec.__dataclass_fields__["action_half_range"].default is None
