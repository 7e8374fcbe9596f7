"""Seed 003, phases 2 and 3: heads and targets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch import Tensor

from forethought.agents.tdmpc2 import TDMPC2Config
from forethought.agents.tdmpc2.config import NStep
from forethought.agents.tdmpc2.discounts import (
    AuxiliaryValues,
    auxiliary_targets,
)
from tests.multi_gamma.agents import (
    AUX,
    ON,
    agent_with,
    assert_same,
    stir,
    tensors_of,
    weights,
)
from tests.multi_gamma.reference import head_weights
from tests.tdmpc2_agents import CONFIG, fill, make_agent, make_spec


def test_phase_2_a_joint_head_is_one_layer_for_the_auxiliary_discounts() -> None:
    heads = agent_with().model.aux_value
    assert heads is not None
    assert [tuple(p.shape) for p in heads.parameters()] == [(2 * 101, 16), (2 * 101,)]
    assert heads(torch.zeros(3, 8, 16)).shape == (3, 8, 2, 101)


def test_phase_2_separate_heads_are_one_layer_each() -> None:
    heads = agent_with(replace(ON, head="separate")).model.aux_value
    assert heads is not None
    shapes = [tuple(p.shape) for p in heads.parameters()]
    assert shapes == [(101, 16), (101,)] * 2
    assert heads(torch.zeros(3, 8, 16)).shape == (3, 8, 2, 101)


def test_phase_2_joint_and_separate_heads_of_the_same_weights_agree() -> None:
    joint, separate = (AuxiliaryValues(16, 11, AUX, head) for head in ("joint", "separate"))
    with torch.no_grad():
        for p in joint.parameters():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
        for layer, (w, b) in zip(separate.heads, head_weights(joint), strict=True):
            layer.weight.copy_(w)  # type: ignore[operator]
            layer.bias.copy_(b)  # type: ignore[operator]
    z = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(joint(z), separate(z))


def test_phase_2_parameters_are_counted_and_told_once() -> None:
    """512 x 101 + 101 = 51,813 for each discount at size 5."""
    config = TDMPC2Config(multi_gamma=ON)
    spec = make_spec(observation_space=gymnasium.spaces.Box(-1, 1, (17,), np.float32))
    agent = make_agent(config, spec=spec)
    counts = agent.log_architecture()
    assert counts["aux_value"] == 2 * 51_813
    assert counts["total"] == sum(n for part, n in counts.items() if part != "total")
    assert agent.notes == (
        "Auxiliary values at discounts 0.97, 0.995 beside the primary 0.99: joint head, 103,626 "
        "parameters.",
    )


def test_phase_2_heads_start_at_zero_and_all_else_as_without_them() -> None:
    agent, baseline = agent_with(), make_agent()
    assert agent.model.aux_value is not None
    assert all((p == 0).all() for p in agent.model.aux_value.parameters())
    rest = {k: v for k, v in weights(agent).items() if not k.startswith("aux_value")}
    assert_same(rest, weights(baseline))


def test_phase_2_heads_learn_at_the_rate_of_q() -> None:
    agent = agent_with(lr=replace(CONFIG.lr, q=7e-4))
    groups = {g["base_lr"]: set(g["params"]) for g in agent.learner.optimiser.param_groups}
    assert agent.model.aux_value is not None
    assert set(agent.model.aux_value.parameters()) <= groups[7e-4]


def test_phase_3_targets_are_one_step_from_the_primary_value() -> None:
    """1 + 0.9 x 10 = 10, 1 + 0.97 x 10 = 10.7; termination leaves the reward."""
    reward, value = torch.ones(1, 2), torch.full((1, 2), 10.0)
    y = auxiliary_targets(reward, torch.tensor([[0.0, 1.0]]), value, torch.tensor([0.9, 0.97]))
    torch.testing.assert_close(y, torch.tensor([[[10.0, 10.7], [1.0, 1.0]]]))


@pytest.mark.parametrize("returns", [CONFIG.returns, NStep(2)], ids=["one_step", "n_step"])
def test_phase_3_they_bootstrap_from_the_very_tensor_of_the_primary_target(
    returns: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the primary target makes of it, the auxiliary one is one step."""
    agent = agent_with(returns=returns)
    stir(agent)
    batch, noise = tensors_of(agent), agent.draw_noise()
    _, _, value = agent.learner.targets(batch, noise)
    assert not value.requires_grad
    seen = []

    def watched(reward: Tensor, terminated: Tensor, given: Tensor, gammas: Tensor) -> Tensor:
        seen.append((reward, terminated, given))
        return auxiliary_targets(reward, terminated, given, gammas)

    monkeypatch.setattr("forethought.agents.tdmpc2.discounts.auxiliary_targets", watched)
    agent.learner.update(batch, noise)
    ((reward, terminated, given),) = seen
    assert reward is batch.reward and terminated is batch.terminated
    assert torch.equal(given, value)


def test_phase_3_no_further_random_number_is_drawn() -> None:
    agent, baseline = agent_with(), make_agent()
    for one in (agent, baseline):
        fill(one)
        one.train(3)
    assert torch.equal(agent.update_stream.get_state(), baseline.update_stream.get_state())
    assert agent.replay.state()[0]["rng"] == baseline.replay.state()[0]["rng"]
