"""Prioritized replay: findings 1, 14, 15 and 20 of seed 004, and the defects found beside them."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from forethought.clock import Clock
from forethought.config import (
    ConfigError,
    PrioritizedReplayConfig,
    UniformReplayConfig,
    build_run_config,
    from_dict,
    to_dict,
)
from forethought.replay import NStepReplay, ReplayError
from forethought.spaces import EnvSpec
from tests.dqn.value_stub import ValueConfig
from tests.stub_agent import StubConfig

CPU = torch.device("cpu")
SPEC = EnvSpec("stub:p", spaces.Box(0, 1e6, (1,), np.float32), spaces.Discrete(2), None, 1, True)


def make(steps: int = 4, capacity: int = 1000, seed: int = 0, **options: Any) -> NStepReplay:
    """`steps` transitions of one step, in one episode that has just ended."""
    config = PrioritizedReplayConfig(capacity_rows=capacity, **options)
    replay = NStepReplay(SPEC, config, 1, 1, 0.99, np.random.default_rng(seed), CPU)
    add(replay, steps)
    return replay


def add(replay: NStepReplay, steps: int) -> None:
    for i in range(steps + 1):
        row = {"obs": np.array([i], np.float32), "action": 0, "reward": 0.0, "truncated": False}
        replay.add({**row, "terminated": i == steps, "is_first": i == 0}, 0)


def set_priorities(replay: NStepReplay, errors: list[float]) -> None:
    """Of the rows 0, 1, ... of the run."""
    rows = torch.stack([torch.zeros(len(errors), dtype=torch.long), torch.arange(len(errors))])
    replay.update_priorities(rows, np.array(errors))


# ---- finding 1: beta ----


def test_finding_1_beta_reaches_exactly_1_at_the_end_of_its_unit():
    """0.45 + 0.55 * 1 is not 1 in every arithmetic; it must be."""
    for start in (0.0, 0.4, 0.45, 0.1, 0.7):
        replay = make(beta_start=start)
        assert replay.beta_at(Clock(agent_steps=0), 1000) == start
        assert replay.beta_at(Clock(agent_steps=1000), 1000) == 1.0
        assert replay.beta_at(Clock(agent_steps=5000), 1000) == 1.0
        replay = make(beta_start=start, beta_anneal_updates=250)
        assert replay.beta_at(Clock(agent_steps=1000, updates=249), 1000) < 1.0
        assert replay.beta_at(Clock(agent_steps=1, updates=250), 1000) == 1.0


def test_finding_1_beta_does_not_depend_on_the_action_repeat():
    """Half of the frames are half of the steps: 0.7. The seed's code counted steps against a
    total in frames and ended at 0.55."""
    replay = make(beta_start=0.4)
    half = Clock(agent_steps=500, env_frames=4 * 500)
    assert replay.beta_at(half, 1000) == pytest.approx(0.7, abs=1e-9)
    replay = make(beta_start=0.4, beta_anneal_agent_steps=2000)
    assert replay.beta_at(half, 1000) == pytest.approx(0.55, abs=1e-9)


def test_finding_1_beta_needs_a_length_and_uniform_replay_has_none():
    with pytest.raises(ReplayError, match="nobody said how long that is"):
        make().beta_at(Clock(), 0)
    with pytest.raises(ReplayError, match="Prioritized replay needs beta"):
        make().sample(1)
    config = UniformReplayConfig(capacity_rows=10)
    uniform = NStepReplay(SPEC, config, 1, 1, 0.99, np.random.default_rng(0), CPU)
    add(uniform, 3)
    assert uniform.beta_at(Clock(), 100) is None
    assert uniform.sample(5).weights.tolist() == [1.0] * 5
    with pytest.raises(ReplayError, match="beta has no meaning where draws are uniform"):
        uniform.sample(5, beta=0.5)


# ---- finding 14: weights ----


def weights_without_the_rarest(is_norm: str, beta: float = 0.5) -> list[float]:
    """Priorities 1, 1, 1, 0.001 (alpha 1): the weights of a batch that excludes the last."""
    replay = make(alpha=1.0, is_norm=is_norm, priority_epsilon=1e-12)
    set_priorities(replay, [1.0, 1.0, 1.0, 1e-3])
    for _ in range(100):
        batch = replay.sample(3, beta=beta)
        if 3 not in batch.rows[1]:
            return batch.weights.tolist()
    raise AssertionError("the rarest transition came with every batch")


def test_finding_14_weights_by_global_max():
    """(1 / 0.001)^-0.5 = 0.0316 each, though the rarest is not in the batch."""
    assert weights_without_the_rarest("global") == pytest.approx([0.001**0.5] * 3, rel=1e-6)


def test_finding_14_weights_by_the_batch_only_if_asked():
    assert weights_without_the_rarest("batch") == pytest.approx([1.0] * 3)


def test_finding_14_weights_as_they_are():
    """(N P)^-beta with N = 4 and P = 1 / 3.001."""
    assert weights_without_the_rarest("none") == pytest.approx([(4 / 3.001) ** -0.5] * 3, rel=1e-6)


@pytest.mark.parametrize("is_norm", ["global", "batch", "none"])
@pytest.mark.parametrize("mix", [0.0, 0.1])
def test_finding_14_weights_against_the_formula(is_norm, mix):
    rng = np.random.default_rng(3)
    replay = make(steps=50, alpha=0.6, uniform_mix=mix, is_norm=is_norm)
    errors = rng.exponential(1.0, 50)
    set_priorities(replay, errors.tolist())
    batch = replay.sample(20, beta=0.7)
    leaves = (errors + 1e-6) ** 0.6
    probability = (1 - mix) * leaves / leaves.sum() + mix / 50
    w = (50 * probability) ** -0.7
    drawn = batch.rows[1].numpy()
    scale = {"global": w.max(), "batch": w[drawn].max(), "none": 1.0}[is_norm]
    assert np.allclose(batch.weights.numpy(), w[drawn] / scale, rtol=1e-6, atol=0)


@pytest.mark.parametrize("is_norm", ["global", "none"])
def test_defect_2_5_a_tiny_probabilities_keep_their_own_weights(is_norm):
    """20,000 transitions, most of which are drawn less than once in a million: no floor makes
    their weights equal."""
    replay = make(steps=20_000, capacity=30_000, alpha=1.0, is_norm=is_norm)
    errors = np.geomspace(1e-4, 1e4, 20_000)
    set_priorities(replay, errors.tolist())
    starts: Any = replay._starts
    w = starts.weights(np.arange(20_000), 1.0)
    priority = errors + 1e-6
    scale = {"global": priority[0], "none": priority.sum() / 20_000}[is_norm]
    assert np.allclose(w, scale / priority, rtol=1e-9, atol=0)
    assert len(np.unique(w)) == 20_000


# ---- finding 15, defect (c): what is drawn ----


def test_finding_15_draws_follow_the_priorities_without_a_fallback():
    """Priorities 1 to 5, one of them never drawable (the episode's last row): frequencies within
    2 % of p^alpha / sum, and stratified batches of 5."""
    replay = make(steps=5, alpha=0.5)
    set_priorities(replay, [1.0, 2.0, 3.0, 4.0, 5.0])
    counts: Counter[int] = Counter()
    for _ in range(4000):
        counts.update(replay.sample(5, beta=1.0).rows[1].tolist())
    odds = np.sqrt(np.arange(1, 6) + 1e-6)
    odds /= odds.sum()
    assert set(counts) == set(range(5))
    assert [counts[i] / 20_000 for i in range(5)] == pytest.approx(odds, rel=0.02)


def test_a_uniform_mix_reaches_what_priorities_would_never_draw():
    replay = make(steps=2, alpha=1.0, uniform_mix=0.5)
    set_priorities(replay, [1e6, 0.0])
    counts = Counter(replay.sample(20_000, beta=1.0).rows[1].tolist())
    assert counts[1] / 20_000 == pytest.approx(0.25, abs=0.015)


def test_new_transitions_get_the_greatest_priority_and_alpha_once():
    """After an error of 16 (alpha 0.5, leaf 4) new ones have leaf 4: not 2, as when the stored
    leaf were raised to alpha again, and not the current maximum, which is 1."""
    replay = make(steps=3, alpha=0.5, priority_epsilon=1e-12)
    starts: Any = replay._starts
    assert starts.tree.leaves[:3].tolist() == [1.0, 1.0, 1.0]
    set_priorities(replay, [16.0, 1.0, 1.0])
    set_priorities(replay, [1.0])
    add(replay, 2)  # rows 4, 5, 6
    assert starts.tree.leaves[:7] == pytest.approx([1, 1, 1, 0, 4, 4, 0], rel=1e-9)


def test_alpha_0_draws_uniformly_with_equal_weights():
    replay = make(steps=4, alpha=0.0)
    set_priorities(replay, [1.0, 10.0, 100.0, 1000.0])
    batch = replay.sample(8000, beta=1.0)
    assert batch.weights.unique().tolist() == [1.0]
    counts = Counter(batch.rows[1].tolist())
    assert [counts[i] / 8000 for i in range(4)] == pytest.approx([0.25] * 4, abs=0.02)


# ---- late priorities ----


def test_late_priorities_never_hit_a_slot_that_was_used_again():
    """A ring of 6 rows: rows 0 to 4 are drawn, then overwritten by rows 6 to 10 in the same slots;
    the errors that come now belong to rows that are gone."""
    replay = make(steps=4, capacity=6)
    batch = replay.sample(64, beta=1.0)
    assert set(batch.rows[1].tolist()) == {0, 1, 2, 3}
    add(replay, 5)  # rows 5 to 10, in slots 5, 0, 1, 2, 3, 4
    starts: Any = replay._starts
    before = starts.tree.leaves.copy()
    replay.update_priorities(batch.rows, torch.full((64,), 1e6))
    assert np.array_equal(starts.tree.leaves, before)
    assert starts.max_priority == 1.0
    assert starts.updates_too_late == 64
    fresh = replay.sample(64, beta=1.0)
    replay.update_priorities(fresh.rows, torch.full((64,), 1e6))
    assert starts.max_priority == pytest.approx(1e6)


def test_case_24_negative_or_non_finite_errors_are_refused_and_zero_is_not():
    replay = make()
    rows = replay.sample(3, beta=1.0).rows
    starts: Any = replay._starts
    before = starts.tree.leaves.copy()
    for bad in (-0.5, math.nan, math.inf):
        with pytest.raises(ReplayError, match=f"A TD error of {bad} cannot be a priority: give"):
            replay.update_priorities(rows, torch.tensor([1.0, bad, 1.0]))
        assert np.array_equal(starts.tree.leaves, before)
    with pytest.raises(ReplayError, match="priorities do not fit"):
        replay.update_priorities(rows, torch.ones(2))
    set_priorities(replay, [0.0] * 4)
    assert starts.tree.minimum == pytest.approx(1e-6**0.5)
    assert replay.can_sample()


# ---- finding 20: options that mean nothing ----


def build(**replay: Any) -> Any:
    return build_run_config("value", "t", ValueConfig, [{"replay": replay}]).replay


@pytest.mark.parametrize("key", ["alpha", "beta_start", "priority_epsilon", "uniform_mix"])
def test_finding_20_uniform_replay_refuses_what_only_priorities_have(key):
    words = rf"replay.{key} belongs to replay of kind prioritized, but this run has kind uniform"
    with pytest.raises(ConfigError, match=words):
        build(kind="uniform", **{key: 0.5})
    with pytest.raises(ConfigError, match=words):  # it is this agent's default kind
        build(**{key: 0.5})
    assert getattr(build(kind="prioritized", **{key: 0.5}), key) == 0.5


def test_finding_20_an_agent_takes_only_the_replay_it_can_learn_from():
    assert build() == UniformReplayConfig()
    with pytest.raises(ConfigError, match="replay is episodes, but must be uniform or prioritized"):
        build(kind="episodes")
    with pytest.raises(ConfigError, match="replay is uniform, but must be episodes or transitions"):
        build_run_config("stub", "t", StubConfig, [{"replay": "uniform"}])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"alpha": 1.5}, "replay.alpha is 1.5, but must be between 0 and 1"),
        ({"beta_start": -0.1}, "replay.beta_start is -0.1"),
        ({"priority_epsilon": 0.0}, "replay.priority_epsilon is 0.0, but must be above 0"),
        ({"uniform_mix": 1.0}, "replay.uniform_mix is 1.0"),
        ({"is_norm": "max"}, "replay.is_norm is max, but must be one of global, batch, none"),
        ({"beta_anneal_updates": 0}, "replay.beta_anneal_updates is 0"),
        ({"beta_anneal_updates": 5, "beta_anneal_agent_steps": 5}, "beta follows one of them"),
        ({"diagnostics_every_agent_steps": -1}, "diagnostics_every_agent_steps is -1"),
        ({"mapped_folder": "x", "storage_device": "cuda"}, "replay.mapped_folder is x"),
    ],
)
def test_bad_options_are_refused_before_work_begins(options, words):
    with pytest.raises(ConfigError, match=words):
        build(kind="prioritized", **options)


def test_the_configuration_goes_round():
    config = PrioritizedReplayConfig(alpha=0.2, beta_anneal_updates=7, is_norm="batch")
    data = to_dict(config)
    assert data["kind"] == "prioritized"
    assert from_dict(PrioritizedReplayConfig, data) == config
