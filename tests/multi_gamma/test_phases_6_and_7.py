"""Seed 003, phases 6 and 7: off is the baseline; compile."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from forethought import presets
from forethought.agents.tdmpc2 import TDMPC2Config
from forethought.agents.tdmpc2.discounts import (
    AuxiliaryLoss,
    AuxiliaryValues,
)
from tests.multi_gamma.agents import (
    agent_with,
    assert_same,
    built,
    stir,
    weights,
    with_gammas,
)
from tests.tdmpc2_agents import fill, make_agent


@pytest.mark.parametrize(
    ("gammas", "updates"), [(("primary",), 200), ((0.99,), 2), (("primary", 0.99), 2)]
)
def test_phase_6_one_discount_is_the_baseline_bit_for_bit_over_200_updates(
    gammas: tuple[Any, ...], updates: int, caplog: pytest.LogCaptureFixture
) -> None:
    agent, baseline = make_agent(with_gammas(*gammas)), make_agent()
    assert caplog.messages[-1] == (
        "agent.multi_gamma is enabled, but no auxiliary discount stands beside the primary 0.99: "
        "this is the baseline."
    )
    assert all(record.levelno == logging.WARNING for record in caplog.records)
    assert agent.model.aux_value is None and agent.learner.auxiliary is None
    assert agent.metric_names == baseline.metric_names and agent.notes == ()
    assert agent.log_architecture() == baseline.log_architecture()
    for one in (agent, baseline):
        fill(one)
    assert agent.train(updates) == baseline.train(updates)
    assert_same(agent.state()[1], baseline.state()[1])
    assert agent.snapshots(1) == {} and agent.facts() == {}


def test_phase_6_off_builds_nothing_draws_nothing_and_says_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one line of the feature runs: each part of it would raise."""

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("the feature is off")

    for name in ("make_heads", "snapshot", "auxiliary_targets"):
        monkeypatch.setattr(f"forethought.agents.tdmpc2.discounts.{name}", never)
    monkeypatch.setattr(AuxiliaryValues, "__init__", never)
    monkeypatch.setattr(AuxiliaryLoss, "__call__", never)
    config = built(*presets.layers(["multi_gamma_a0"], None, "tdmpc2"))
    assert config == TDMPC2Config()
    agent = make_agent()
    fill(agent)
    metrics = agent.train(3)
    assert not any("aux" in name for name in (*metrics, *agent.metric_names, *weights(agent)))
    assert caplog.messages == []


def test_phase_7_the_c_kernels_learn_the_same_up_to_rounding() -> None:
    eager, native = agent_with(), agent_with(compile="kernels")
    for agent in (eager, native):
        fill(agent)
        agent.train(3)
    for (name, a), b in zip(eager.model.named_parameters(), native.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_phase_7_the_loss_is_one_graph_of_fixed_shapes() -> None:
    """No branch depends on data: traced at one batch, it gives the same numbers at another."""
    agent = agent_with()
    stir(agent)
    loss = agent.learner.auxiliary
    assert loss is not None

    def given(seed: int) -> list[Tensor]:
        g = torch.Generator().manual_seed(seed)
        shapes = (3, 8, 16), (3, 8), (3, 8), (3, 8)
        return [torch.rand(shape, generator=g).round(decimals=3) for shape in shapes]

    def scalar(*tensors: Tensor) -> Tensor:
        total, metrics = loss(*tensors)
        return torch.stack([total, *metrics.values()])

    compiled = torch.compile(scalar, backend="eager", fullgraph=True, dynamic=False)
    compiled(*given(1))
    with torch.compiler.set_stance("fail_on_recompile"):
        assert torch.equal(compiled(*given(2)), scalar(*given(2)))
