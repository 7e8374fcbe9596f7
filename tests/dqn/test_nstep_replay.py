"""Replay of n-step transitions: against a slow reference, and by cases that a person can check."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from forethought.config import (
    ConfigError,
    EpisodeReplayConfig,
    PrioritizedReplayConfig,
    UniformReplayConfig,
)
from forethought.replay import FrameStacker, NStepReplay, ReplayError
from forethought.spaces import Column, EnvSpec
from tests.dqn.nstep_reference import CPU, Case, Reference, cases

QUICK = settings(derandomize=True, database=None, deadline=None, max_examples=100)


def keys_of(rows: torch.Tensor) -> list[tuple[int, int]]:
    return [(env, row) for env, row in rows.T.tolist()]


@QUICK
@given(cases(), st.integers(0, 4))
def test_exactly_the_valid_transitions_are_drawn_with_the_right_priorities(case: Case, late: int):
    """Whatever the order of rows, ends, environments and wrap-arounds; priorities come up to four
    rows late and must not reach a slot that was used again."""
    replay, reference = case.replay(), Reference(case)
    waiting: list[tuple[torch.Tensor, np.ndarray]] = []
    rng = np.random.default_rng(5)
    for env, what in case.events:
        reference.apply(env, what, replay)
        valid = reference.valid()
        assert replay.can_sample(1) == bool(valid)
        if not valid:
            continue
        batch = replay.sample(4, beta=case.beta)
        assert set(keys_of(batch.rows)) <= valid
        # Each transition once: of two errors for one, the last would win.
        unique = np.unique(batch.rows.numpy(), axis=1)
        waiting.append((torch.from_numpy(unique), rng.exponential(2.0, unique.shape[1])))
        if len(waiting) > late:
            rows, errors = waiting.pop(0)
            replay.update_priorities(rows, errors)
            reference.update(keys_of(rows), errors)
    if not reference.valid():
        return
    starts: Any = replay._starts
    slots = {
        replay._storage.slots(env, np.int64(row)): (env, row) for env, row in reference.valid()
    }
    assert set(starts.valid_slots().tolist()) == set(slots)
    if case.kind == "prioritized":
        leaves = starts.tree.leaves
        assert {slot for slot in range(len(leaves)) if leaves[slot] > 0} == set(slots)
        for slot, key in slots.items():
            assert leaves[slot] == pytest.approx(reference.priority[key], rel=1e-12)
        assert starts.tree.minimum == pytest.approx(min(reference.priority.values()), rel=1e-12)
        assert starts.max_priority == reference.max_priority
    drawn = Counter(keys_of(replay.sample(2000, beta=case.beta).rows))
    assert set(drawn) <= set(slots.values())
    if case.kind == "uniform":
        assert set(drawn) == set(slots.values())


@QUICK
@given(cases())
def test_what_is_drawn_is_what_the_rows_say(case: Case):
    replay, reference = case.replay(), Reference(case)
    for env, what in case.events:
        reference.apply(env, what, replay)
    if not replay.can_sample():
        return
    batch = replay.sample(40, beta=case.beta)
    for b, (env, start) in enumerate(keys_of(batch.rows)):
        rows = reference.rows[env]
        reward, discount, last = reference.transition(env, start)
        assert float(batch.reward[b]) == np.float32(reward)
        assert float(batch.discount[b]) == np.float32(discount)
        assert float(batch.terminated[b]) == float(discount == 0)
        assert int(batch.steps[b]) == last - start
        assert int(batch.action[b]) == rows[start + 1]["action"]
        for obs, extras, number in (
            (batch.obs, batch.extras, start),
            (batch.next_obs, batch.next_extras, last),
        ):
            assert obs["where"][b].tolist() == [env, number]
            assert np.array_equal(obs["frame"][b].numpy(), reference.frames(env, number))
            assert bool(extras["life_lost"][b]) == rows[number]["life_lost"]


@settings(QUICK, max_examples=25)  # it writes blocks to the disk
@given(cases(), st.integers(0, 70), st.sampled_from([0, 7]))
def test_a_restored_replay_goes_on_exactly(tmp_path_factory, case: Case, cut: int, seed: int):
    """Saved anywhere (wrapped or not), restored into a fresh replay, both fed the same rows and
    the same priorities, those of batches drawn before among them."""
    folder = tmp_path_factory.mktemp("blocks")
    replay, reference = case.replay(), Reference(case)
    replay.seal_to(folder)
    before = None
    for env, what in case.events[:cut]:
        reference.apply(env, what, replay)
        if replay.can_sample():
            before = replay.sample(4, beta=case.beta)
            replay.update_priorities(before.rows, np.linspace(0.1, 4, 4))
    other = case.replay(seed)
    other.restore(*replay.state(), folder)
    for env, what in case.events[cut:]:
        reference.apply(env, what, replay, other)
        if replay.can_sample():
            a, b = (x.sample(6, beta=case.beta) for x in (replay, other))
            assert torch.equal(a.rows, b.rows)
            assert torch.equal(a.weights, b.weights)
            for one in (replay, other):
                one.update_priorities(a.rows, a.reward.abs())
                if before is not None:
                    one.update_priorities(before.rows, np.full(4, 0.25))
    (json, tensors), (other_json, other_tensors) = replay.state(whole=True), other.state(whole=True)
    assert json == other_json
    assert tensors.keys() == other_tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, other_tensors[name]), name
    if replay.can_sample():
        stream = np.random.default_rng
        assert replay.diagnostics(8, stream(1), case.beta) == other.diagnostics(
            8, stream(1), case.beta
        )


# ---- cases that a person can check ----

PLAIN = EnvSpec(
    "stub:plain",
    spaces.Box(-np.inf, np.inf, (1,), np.float32),
    spaces.Discrete(5),
    None,
    1,
    True,
    (Column("life_lost", (), np.dtype(np.bool_), "life_lost"),),
)


def make(n_step: int = 3, gamma: float = 0.5, capacity: int = 50, **options: Any) -> NStepReplay:
    config = options.pop("config", UniformReplayConfig(capacity_rows=capacity))
    rng = np.random.default_rng(0)
    return NStepReplay(PLAIN, config, 1, n_step, gamma, rng, CPU, **options)


def add(replay: NStepReplay, rewards: list[float], end: str = "", lives: tuple[int, ...] = ()):
    """Row 0, then one row per reward; observation = row, action = row - 1."""
    for i, reward in enumerate([0.0, *rewards]):
        last = i == len(rewards)
        row = {
            "obs": np.array([i], np.float32),
            "action": max(0, i - 1) % 5,
            "reward": reward,
            "terminated": last and end == "terminated",
            "truncated": last and end == "truncated",
            "is_first": i == 0,
            "life_lost": i in lives,
        }
        replay.add(row, 0)


def table(replay: NStepReplay) -> dict[int, tuple[float, float, int, int]]:
    """Of each transition by its first row: return, discount, last row, action."""
    batch = replay.sample(500)
    columns = (batch.reward, batch.discount, batch.next_obs[:, 0], batch.action)
    values = zip(*(column.tolist() for column in columns))
    return dict(zip(batch.obs[:, 0].int().tolist(), values))


def test_confirmed_correct_done_mask_termination_cuts_the_bootstrap():
    """Rewards 1, 2, 4, gamma 0.5, n = 3, the end for good: 1 + 1 + 1, 2 + 2, 4; no future."""
    replay = make()
    add(replay, [1, 2, 4], "terminated")
    assert table(replay) == {0: (3.0, 0.0, 3, 0), 1: (4.0, 0.0, 3, 1), 2: (4.0, 0.0, 3, 2)}


def test_confirmed_correct_done_mask_truncation_bootstraps_from_the_last_observation():
    """m = min(n, steps to end): the discounts are 0.5^3, 0.5^2 and 0.5, all from row 3."""
    replay = make()
    add(replay, [1, 2, 4], "truncated")
    assert table(replay) == {0: (3.0, 0.125, 3, 0), 1: (4.0, 0.25, 3, 1), 2: (4.0, 0.5, 3, 2)}


def test_rows_near_the_write_head_wait_for_their_n_steps():
    """Rows 0 to 4 of an open episode, n = 3: only rows 0 and 1 have three steps ahead."""
    replay = make()
    add(replay, [1, 2, 4, 8])
    assert set(table(replay)) == {0, 1}
    replay.close_episode(0)  # as when the environment had to be restarted
    assert table(replay)[3] == (8.0, 0.5, 4, 3)
    assert set(table(replay)) == {0, 1, 2, 3}


def test_a_lost_life_cuts_the_bootstrap_but_not_the_stack():
    """Rewards 1, 2, 4, 8; a life is lost on arriving at row 2, and the game goes on."""
    replay = make(n_step=2, cut="life_lost", stack={"obs": 3})
    add(replay, [1, 2, 4, 8], "truncated", lives=(2,))
    batch = replay.sample(500)
    found = {
        int(obs[-1, 0]): (reward, discount, next_obs[:, 0].tolist())
        for obs, reward, discount, next_obs in zip(
            batch.obs, batch.reward.tolist(), batch.discount.tolist(), batch.next_obs
        )
    }
    assert found[0] == (2.0, 0.0, [0, 1, 2])  # 1 + 0.5 * 2, and over
    assert found[1] == (2.0, 0.0, [0, 1, 2])
    assert found[2] == (8.0, 0.25, [2, 3, 4])  # 4 + 0.5 * 8; frames from before the loss are there


def test_rewards_are_stored_raw_and_clipped_by_their_sign_when_drawn():
    replay = make(n_step=2, clip_rewards=True)
    add(replay, [100, -7, 0], "terminated")
    assert {row: x[0] for row, x in table(replay).items()} == {0: 0.5, 1: -1.0, 2: 0.0}
    stored = next(iter(replay.episodes()))
    assert stored["reward"].tolist() == [0, 100, -7, 0]


def test_an_episode_of_one_row_gives_nothing():
    replay = make()
    add(replay, [], "truncated")
    assert not replay.can_sample()
    with pytest.raises(ReplayError, match="Nothing can be sampled yet: no episode has ended"):
        replay.sample(1)


@pytest.mark.parametrize("pad", ["zeros", "first"])
def test_the_agent_acts_on_the_very_stacks_it_later_learns_from(pad):
    """Seed repo: acts on repeated first frames and learns from zeros. Here one rule makes both."""
    pixels = EnvSpec("stub:p", spaces.Box(0, 255, (2, 2), np.uint8), PLAIN.action_space, None, 1,
                     True)  # fmt: skip
    config = UniformReplayConfig(capacity_rows=300)
    replay = NStepReplay(pixels, config, 2, 2, 0.9, np.random.default_rng(0), CPU, {"obs": 4}, pad)
    stacker, rng = FrameStacker({"obs": 4}, pad, 2), np.random.default_rng(1)
    acted: set[bytes] = set()
    first = np.array([True, True])
    for _ in range(60):
        obs = rng.integers(1, 256, (2, 2, 2)).astype(np.uint8)
        acted |= {stack.tobytes() for stack in stacker.push(obs, first)}
        ends = rng.random(2) < 0.2
        for env in range(2):
            row = {"obs": obs[env], "action": 1, "reward": 0.0, "is_first": bool(first[env])}
            replay.add({**row, "terminated": bool(ends[env]), "truncated": False}, env)
        first = ends
    batch = replay.sample(1000)
    assert batch.both_obs.is_contiguous() and batch.both_obs.dtype == torch.uint8
    replayed = {stack.numpy().tobytes() for stack in batch.both_obs.flatten(0, 1)}
    assert len(replayed) > 80
    assert replayed <= acted


def test_a_look_from_outside_changes_nothing_that_training_draws():
    replays = [make(config=PrioritizedReplayConfig(capacity_rows=50)) for _ in range(2)]
    for replay in replays:
        add(replay, [1.0] * 20, "terminated")
    replays[0].sample(7, beta=1.0, stream=np.random.default_rng(3))
    replays[0].diagnostics(8, np.random.default_rng(3), 0.5)
    (_, a), (_, b) = (replay.state() for replay in replays)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert torch.equal(*(replay.sample(9, beta=1.0).rows for replay in replays))


# ---- what is refused ----


def test_what_cannot_be_is_refused_in_words():
    with pytest.raises(ConfigError, match="replay is episodes, but must be uniform or prioritized"):
        make(config=EpisodeReplayConfig(capacity_rows=50))
    with pytest.raises(ConfigError, match="There is no extra column lives"):
        make(cut="lives")
    with pytest.raises(ConfigError, match="n_step is 0, but must be at least 1"):
        make(n_step=0)
    with pytest.raises(ConfigError, match=r"capacity_rows is 3, but must be at least 4"):
        make(n_step=3, capacity=3)


def test_a_saved_replay_with_forged_starts_is_refused():
    replay = make(config=PrioritizedReplayConfig(capacity_rows=50))
    add(replay, [1.0] * 10)
    state, tensors = replay.state()
    for name, forged, words in (
        ("looked_at", torch.tensor([12]), "tells of starts that cannot be"),
        ("priority", -tensors["sampler/priority"], "priority below 0 or not finite"),
        ("priority", tensors["sampler/priority"][:-1], "no priority for each of its 11 rows"),
        ("priority", tensors["sampler/priority"] * 0, "priorities for other rows than can be"),
        ("max_priority", torch.tensor([torch.inf], dtype=torch.float64), "is not finite"),
        ("times_drawn", torch.tensor([1]), "no times_drawn for each"),
    ):
        with pytest.raises(ReplayError, match=words):
            make(config=PrioritizedReplayConfig(capacity_rows=50)).restore(
                state, {**tensors, f"sampler/{name}": forged}, None
            )
