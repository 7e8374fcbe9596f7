"""SAC and TD3 against the slow references: same weights, batch and noise, same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forethought.agents.actor_critic.config import LearningRates
from forethought.agents.sac.config import (
    AutoEntropy,
    ClampedLogStd,
    FixedEntropy,
    SquashedLogStd,
)
from forethought.agents.sac.update import SACNoise
from tests.actor_critics import (
    ACTION,
    BATCH,
    HALF_RANGE,
    in_float64,
    make_agent,
    make_batch,
    weights,
)

from . import reference_actor_critic as reference

EXACT = {"rtol": 1e-9, "atol": 1e-9}
RATES = LearningRates(actor=2e-3, critic=3e-3)
UPDATES = 4


def normal(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def assert_same(agent: Any, state: dict[str, torch.Tensor]) -> None:
    ours = weights(agent)
    assert ours.keys() == state.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, state[name], msg=name, **EXACT)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"entropy": AutoEntropy(loss="log_alpha", initial=0.3, lr=5e-3, target=-1.0)},
        {"entropy": FixedEntropy(0.2), "critic_loss": "sum"},
        {"log_std": SquashedLogStd(), "action_units": "environment", "critic_loss": "mean"},
        {"log_std": ClampedLogStd(-0.4, 0.1)},
        {"policy_delay": 2, "critics": 3},
        {"critics": 1, "hidden": (7,)},
    ],
    ids=["paper", "log_alpha", "fixed", "tanh-environment", "clamp", "delay-three", "one-critic"],
)
def test_sac_updates_like_the_slow_reference(options: dict[str, Any]) -> None:
    agent = in_float64(make_agent("sac", lr=RATES, **options))
    state, adam = weights(agent), reference.Adam.new()
    delay = agent.config.policy_delay
    for number in range(1, UPDATES + 1):
        batch = make_batch(number, torch.float64)
        steps = delay if number % delay == 0 else 0
        drawn = normal(100 + number, 1 + steps, BATCH, ACTION)
        noise = SACNoise(drawn[0], drawn[1:])
        metrics = agent.update(batch, noise)
        state, losses = reference.sac_update(
            state, batch, noise, agent.config, HALF_RANGE, agent.target_entropy, adam
        )
        assert_same(agent, state)
        for name, loss in losses.items():
            assert metrics[name] == pytest.approx(loss.item(), rel=1e-9, abs=1e-9), name


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"critic_loss": "half_sum", "policy_delay": 1},
        {"critics": 3, "policy_delay": 3, "critic_loss": "mean"},
        {"critics": 1, "target_noise": 0.0, "policy_delay": 1},
        {"target_noise": 2.0, "target_noise_clip": 0.3},
    ],
    ids=["paper", "each-update", "three-critics", "ddpg", "clipped-noise"],
)
def test_td3_updates_like_the_slow_reference(options: dict[str, Any]) -> None:
    agent = in_float64(make_agent("td3", lr=RATES, **options))
    state, adam = weights(agent), reference.Adam.new()
    for number in range(1, UPDATES + 1):
        batch, noise = make_batch(number, torch.float64), normal(100 + number, BATCH, ACTION)
        metrics = agent.update(batch, noise)
        state, losses = reference.td3_update(state, batch, noise, agent.config, adam, number)
        assert_same(agent, state)
        assert losses.keys() <= metrics.keys()
        for name, loss in losses.items():
            assert metrics[name] == pytest.approx(loss.item(), rel=1e-9, abs=1e-9), name


def test_the_reference_can_tell_a_truncation_from_a_termination() -> None:
    """Were all of them alike, parity would say nothing about the cut of the bootstrap."""
    batch = make_batch(1)
    assert 0 < batch.terminated.sum() < BATCH
    assert (batch.truncated & (batch.terminated == 0)).any()
