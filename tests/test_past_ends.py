"""Slices that reach past the end of an episode: what lies behind it counts for nothing, and what
lies before it counts as it would in a slice of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from forethought import presets
from forethought.agents.tdmpc2 import TDMPC2, TDMPC2Config
from forethought.agents.tdmpc2.config import NStep, OneStep, TDLambda
from forethought.agents.tdmpc2.discounts import snapshot
from forethought.agents.tdmpc2.gammas import MultiGammaConfig
from forethought.agents.tdmpc2.update import TensorBatch, until_the_end
from forethought.config import (
    ConfigError,
    EpisodeReplayConfig,
    TransitionReplayConfig,
    build_run_config,
)
from forethought.data import Dataset
from forethought.envs import make_env
from forethought.replay import Replay
from forethought.replay.rows import LIFE_LOST
from forethought.seeding import Streams
from forethought.spaces.spec import Column
from tests.data_stubs import make_dataset, spec
from tests.tdmpc2_agents import ACTION, CONFIG, OBS, TINY, make_batch, make_spec

LENGTHS = [1, 2, 3, 3, 1, 2, 3, 2]
"""Steps that each slice of the batch has before its end; 3 are all, and of those one terminates."""


def agent(config: Any = TransitionReplayConfig, **options: Any) -> TDMPC2:
    mine = replace(CONFIG, model=replace(TINY, dropout=0.0), past_ends=True, **options)
    spec = make_spec(terminates=True)
    cpu = torch.device("cpu")
    return TDMPC2(spec, mine, config(capacity_rows=500), streams=Streams(1), device=cpu)


def slices(one: TDMPC2, junk: int = 0) -> TensorBatch:
    """Real steps are always the same, those past the ends depend on `junk`."""
    batch, other = make_batch(one), make_batch(one, seed=100 + junk)
    obs, action, reward = batch.obs.clone(), batch.action.clone(), batch.reward.clone()
    terminated = torch.zeros(3, 8)
    for b, length in enumerate(LENGTHS):
        terminated[length - 1, b] = float(length < 3 or b == 2)
        obs[length + 1 :, b] = other.obs[length + 1 :, b]
        action[length:, b] = other.action[length:, b]
        reward[length:, b] = other.reward[length:, b]
    present = until_the_end(terminated)
    terminated[1:] += junk * (present[1:-1] == 0)  # even these are not looked at
    return TensorBatch(obs, action, reward, terminated, present=present)


def test_present_is_every_state_before_the_end():
    terminated = torch.tensor([[0.0, 1, 0], [0, 0, 1], [0, 1, 1]])
    assert until_the_end(terminated).T.tolist() == [[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0]]


AUXILIARY = MultiGammaConfig(True, ("primary", 0.9, 0.97), debug_logging=True)


@pytest.mark.parametrize(
    "options",
    [
        {"returns": OneStep()},
        {"returns": NStep(3)},
        {"returns": TDLambda(0.9)},
        {"multi_gamma": AUXILIARY},
    ],
)
def test_what_lies_past_an_end_changes_nothing(options: Any) -> None:
    learned = []
    for junk in (0, 1):
        one = agent(**options)
        metrics = one.learner.update(slices(one, junk), one.draw_noise())
        learned.append((metrics, one.state()[1]))
    (metrics, weights), (again, same) = learned
    assert metrics == pytest.approx(again, rel=1e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, same[name], rtol=1e-5, atol=1e-7, msg=name)


def test_what_lies_before_it_counts_as_in_a_slice_of_its_own() -> None:
    """Slice by slice and step by step; a step's weight does not depend on how many follow."""
    one = agent(multi_gamma=AUXILIARY)
    assert one.model.aux_value is not None
    for weight in one.model.aux_value.parameters():  # which are 0 at first
        torch.nn.init.normal_(weight, std=0.1, generator=torch.Generator().manual_seed(0))
    batch, noise = slices(one), one.draw_noise()
    next_z, y, value = one.learner.targets(batch, noise)
    losses, _ = one.learner.model_losses(batch, next_z, y, value, noise)
    names = ("consistency_loss", "reward_loss", "value_loss")
    names += ("aux_value_ce/g0.9", "aux_value_ce/g0.97")
    expected = dict.fromkeys(names, 0.0)
    ending = 0.0
    for b, length in enumerate(LENGTHS):
        own, steps = slice(b, b + 1), slice(length)
        whole = TensorBatch(
            batch.obs[: length + 1, own],
            batch.action[steps, own],
            batch.reward[steps, own],
            batch.terminated[steps, own],
        )
        parts = (next_z[steps, own], y[steps, own], value[steps, own])
        alone, _ = one.learner.model_losses(whole, *parts, noise)
        for name in names:
            expected[name] += alone[name].item() * length / 3 / len(LENGTHS)
        ending += alone["termination_loss"].item() * length / sum(LENGTHS)
    assert {name: losses[name].item() for name in names} == pytest.approx(expected, rel=1e-5)
    assert losses["termination_loss"].item() == pytest.approx(ending, rel=1e-5)


def test_snapshots_show_and_count_what_lies_before_the_end() -> None:
    one = agent(multi_gamma=AUXILIARY)
    assert one.model.aux_value is not None and one.learner.auxiliary is not None
    for weight in one.model.aux_value.parameters():
        torch.nn.init.normal_(weight, std=0.1, generator=torch.Generator().manual_seed(0))
    batch = slices(one)
    z, value = torch.rand(3, 8, TINY.latent_dim or 0), torch.rand(3, 8)
    given = (batch.reward, batch.terminated, value, batch.steps)
    found = snapshot(one.learner.auxiliary, z, *given)
    examples = found["examples"]
    assert [len(example["reward"]) for example in examples] == LENGTHS
    assert [len(example["bootstrap"]) for example in examples] == LENGTHS
    for gamma in ("g0.9", "g0.97"):
        own, steps = found["per_gamma"][gamma], [example[gamma] for example in examples]
        assert [len(step["target"]) for step in steps] == LENGTHS
        errors = [error for step in steps for error in step["abs_error"]]
        predicted = [number for step in steps for number in step["prediction"]]
        targets = [number for step in steps for number in step["target"]]
        assert own["mae"] == pytest.approx(np.mean(errors), rel=1e-5)
        assert own["rmse"] == pytest.approx(np.sqrt(np.mean(np.square(errors))), rel=1e-5)
        assert own["prediction_mean"] == pytest.approx(np.mean(predicted), rel=1e-5)
        assert own["prediction_std"] == pytest.approx(np.std(predicted), rel=1e-4)
        assert own["target_mean"] == pytest.approx(np.mean(targets), rel=1e-5)
        rho = CONFIG.rho ** np.arange(3)
        counting = [sum(length > t for length in LENGTHS) / len(LENGTHS) for t in range(3)]
        assert own["ce"] == pytest.approx(np.mean(rho * own["ce_per_step"] * counting), rel=1e-5)


def test_an_agents_snapshot_leaves_out_what_lies_past_an_end(monkeypatch: Any) -> None:
    one = agent(multi_gamma=AUXILIARY)
    monkeypatch.setattr(Replay, "can_sample", lambda self, batch=1: True)
    monkeypatch.setattr(Replay, "sample", lambda self, *given: None)
    monkeypatch.setattr(type(one), "_tensors", lambda self, batch: slices(one))
    examples = one.snapshots(10)["multi_gamma"]["examples"]
    assert [len(example["reward"]) for example in examples] == LENGTHS[: len(examples)]
    assert {3} < {*LENGTHS[: len(examples)]}, "some must end early, else nothing is shown"


def test_the_policy_is_moved_by_states_before_the_end_alone() -> None:
    one = agent()
    batch, noise = slices(one), one.draw_noise()
    zs = torch.rand(4, 8, TINY.latent_dim or 0).requires_grad_()
    seen: list[Tensor] = []
    terms = one.model.actions.policy_terms

    def noted(model: Any, zs: Tensor, *rest: Any) -> Any:
        q, *entropies = terms(model, zs, *rest)
        q.retain_grad()
        seen.append(q)
        return q, *entropies

    one.model.actions.policy_terms = noted  # type: ignore[method-assign]
    one.learner.update_policy(zs.detach(), noise, present=batch.present)
    assert batch.present is not None and seen[0].grad is not None
    assert torch.equal(seen[0].grad != 0, batch.present != 0)


def test_an_agent_leaves_out_what_its_replay_repeats() -> None:
    """Episodes of two steps, slices of three: where a slice begins in the first step two count,
    where it begins in the second, one."""
    one = agent()
    for i in range(30):
        row = {"obs": np.full(OBS, i, np.float32), "terminated": i % 3 == 2, "truncated": False}
        row |= {"action": np.zeros(ACTION, np.float32), "reward": 1.0, "is_first": i % 3 == 0}
        one.store_transition(row)
    batch = one._tensors(one.replay.sample(100))
    assert batch.present is not None
    first = batch.obs[0, :, 0].long() % 3
    assert set(first.tolist()) == {0, 1}
    for begun, present in zip(first.tolist(), batch.present.T.tolist(), strict=True):
        assert present == ([1, 1, 0, 0] if begun == 0 else [1, 0, 0, 0])
    learned = one.train(3)
    assert learned["nonfinite"] == 0


def test_none_is_on_wherever_it_means_something() -> None:
    def found(spec: Any, config: Any = TransitionReplayConfig) -> bool:
        mine, cpu = replace(CONFIG, past_ends=None), torch.device("cpu")
        one = TDMPC2(spec, mine, config(capacity_rows=500), streams=Streams(1), device=cpu)
        assert one.replay.past_ends is one.past_ends
        return one.past_ends

    lives = make_spec(terminates=True, columns=(Column(LIFE_LOST, (), np.dtype(np.bool_), ""),))
    assert found(make_spec(terminates=True)) is True
    assert found(make_spec(terminates=True), EpisodeReplayConfig) is False
    assert found(make_spec(terminates=False)) is False
    assert found(lives) is False


@pytest.mark.parametrize("game", ["breakout", "freeway"])
@pytest.mark.parametrize("variant", ["a0", "a3"])
def test_the_preset_for_minatar_fits_every_game(game: str, variant: str) -> None:
    """Freeway never terminates; auxiliary discounts compose with any preset."""
    given = presets.layers(["tdmpc2_minatar", f"multi_gamma_{variant}"], None, "tdmpc2")
    config = build_run_config("tdmpc2", f"minatar:{game}", TDMPC2Config, given)
    env = make_env(f"minatar:{game}")
    small = replace(config.replay, capacity_rows=2_000)
    cpu = torch.device("cpu")
    one = TDMPC2(env.spec_for_agent, config.agent, small, streams=Streams(1), device=cpu)
    assert one.past_ends is (game == "breakout")
    env.close()


def test_it_is_refused_where_it_cannot_be() -> None:
    spec, cpu = make_spec(terminates=False), torch.device("cpu")
    mine = replace(CONFIG, past_ends=True, episodic=True)
    lives = make_spec(terminates=True, columns=(Column(LIFE_LOST, (), np.dtype(np.bool_), ""),))
    for task, words in ((spec, "never terminates"), (lives, "lost life")):  # whatever episodic says
        with pytest.raises(ConfigError, match=rf"agent\.past_ends .*{words}"):
            TDMPC2(
                task,
                mine,
                TransitionReplayConfig(capacity_rows=500),
                streams=Streams(1),
                device=cpu,
            )
    with pytest.raises(ConfigError, match=r"agent\.past_ends .*drawn per transition"):
        agent(EpisodeReplayConfig)
    with pytest.raises(ConfigError, match=r"agent\.past_ends .*drawn per transition"):
        build_run_config(
            "tdmpc2", "gym:CartPole-v1", TDMPC2Config, [{"agent": {"past_ends": True}}]
        )
    with pytest.raises(ConfigError, match=r"agent\.past_ends .*recorded data"):
        offline = {"agent": {"past_ends": True}, "offline": {"data": "recorded"}}
        build_run_config("tdmpc2", "gym:CartPole-v1", TDMPC2Config, [offline])
    with pytest.raises(ConfigError, match=r"agent\.past_ends .*horizon of 1"):
        TDMPC2Config(past_ends=True, horizon=1)
    with pytest.raises(ConfigError, match=r"agent\.past_ends"):
        TDMPC2Config(past_ends=True, episodic=False)
    with pytest.raises(ConfigError, match=r"agent\.past_ends .*whole slices"):
        agent().learn_from([])


def test_recorded_data_has_whole_slices_whatever_the_agent_would_draw_itself(tmp_path) -> None:
    mine = replace(CONFIG, model=TINY, past_ends=None)
    replay = TransitionReplayConfig(capacity_rows=500)
    one = TDMPC2(spec(), mine, replay, streams=Streams(1), device=torch.device("cpu"))
    assert one.past_ends
    one.learn_from([Dataset.open(make_dataset(tmp_path / "d"))])
    assert not one.past_ends
    assert one._tensors(one.replay.sample(4)).present is None
