"""Counters, what is due when, updates owed, schedules."""

import json

import pytest

from forethought.clock import Clock, Constant, Cosine, Every, Linear, UpdateBudget
from forethought.config import ConfigError, ForethoughtError


def through_json(state: dict[str, int]) -> dict[str, int]:
    return json.loads(json.dumps(state))


def test_a_clock_row_is_in_the_order_of_the_csv_files():
    clock = Clock(agent_steps=5, env_frames=10, updates=3, episodes=1)
    assert list(clock.row().items()) == [
        ("agent_steps", 5),
        ("env_frames", 10),
        ("updates", 3),
        ("episodes", 1),
    ]


def test_a_clock_restores_every_counter():
    clock = Clock(5, 10, 3, 1)
    other = Clock()
    other.restore(through_json(clock.state()))
    assert other == clock


def test_every_is_due_when_a_multiple_is_crossed_even_by_a_jump():
    every = Every(10)
    counts = [0, 4, 8, 12, 16, 20, 24, 47, 48]
    assert [count for count in counts if every.due(count)] == [12, 20, 47]


def test_every_zero_is_never_due():
    every = Every(0)
    assert not any(every.due(count) for count in range(100))


def test_every_does_not_fire_twice_across_a_resume():
    every = Every(10)
    assert every.due(12)
    resumed = Every(10)
    resumed.restore(through_json(every.state()))
    assert not resumed.due(16)
    assert resumed.due(20)


def test_a_negative_period_is_refused():
    with pytest.raises(ConfigError, match="period is -1, but must be at least 0"):
        Every(-1)


def test_nothing_is_owed_before_the_seed_phase_ends_then_the_burst_comes_once():
    budget = UpdateBudget(1.0, seed_agent_steps=4, seed_updates=4)
    owed = []
    for agent_steps in range(1, 8):
        budget.advance(agent_steps)
        owed.append(budget.owed)
        while budget.owed:
            budget.take()
    assert owed == [0, 0, 0, 4, 1, 1, 1]


def test_steps_of_many_environments_past_the_seed_phase_earn_their_own_updates():
    budget = UpdateBudget(1.0, seed_agent_steps=4, seed_updates=10)
    budget.advance(6)  # three environments: 3, then 6
    assert budget.owed == 12  # the burst of 10, and one for each of the 2 steps beyond


def test_a_fraction_of_an_update_is_never_lost():
    """0.3 in binary is a little less than 3/10: rounding it down would lose an update."""
    budget = UpdateBudget(0.3, seed_agent_steps=0, seed_updates=0)
    done = 0
    for agent_steps in range(1, 30_001):
        budget.advance(agent_steps)
        while budget.owed:
            budget.take()
            done += 1
        assert done == agent_steps * 3 // 10


def test_updates_owed_survive_a_resume_in_the_middle_of_the_burst():
    budget = UpdateBudget(0.5, seed_agent_steps=2, seed_updates=5)
    budget.advance(3)
    budget.take()
    resumed = UpdateBudget(0.5, seed_agent_steps=2, seed_updates=5)
    resumed.restore(through_json(budget.state()))
    assert resumed.owed == 4
    resumed.advance(4)
    assert resumed.owed == 5


def test_an_update_that_is_not_owed_is_refused():
    with pytest.raises(ForethoughtError, match="not owed"):
        UpdateBudget(1.0, seed_agent_steps=0, seed_updates=0).take()


@pytest.mark.parametrize("ratio", [-1.0, float("nan"), float("inf")])
def test_an_impossible_ratio_is_refused(ratio):
    with pytest.raises(ConfigError, match="updates_per_agent_step"):
        UpdateBudget(ratio, 0, 0)


def test_linear_reaches_its_end_exactly_and_stays():
    """Seed 004 item 1: beta from 0.4 is 0.7 half-way and exactly 1.0 at the end."""
    beta = Linear(0.4, 1.0, duration=1000)
    assert beta.value(0) == 0.4
    assert beta.value(500) == pytest.approx(0.7, abs=1e-9)
    assert beta.value(1000) == 1.0
    assert beta.value(5000) == 1.0
    assert Linear(1.0, 0.05, duration=10).value(10) == 0.05  # 1 - 0.95 is 0.050000000000000044
    assert beta.value(-50) == 0.4  # before its time starts, for callers that subtract a delay


def test_cosine_passes_the_middle_half_way():
    rate = Cosine(1.0, 0.0, duration=100)
    assert rate.value(0) == 1.0
    assert rate.value(25) == pytest.approx(0.853553, abs=1e-6)  # (1 + cos 45 degrees) / 2
    assert rate.value(50) == pytest.approx(0.5)
    assert rate.value(100) == 0.0


def test_warm_up_rises_to_the_start_and_delays_the_decay():
    assert [Constant(1.0, warmup=4).value(count) for count in range(6)] == [
        0.25,
        0.5,
        0.75,
        1.0,
        1.0,
        1.0,
    ]
    line = Linear(1.0, 0.0, duration=10, warmup=4)
    assert line.value(1) == 0.5
    assert line.value(4) == 1.0
    assert line.value(9) == 0.5
    assert line.value(14) == 0.0


def test_a_schedule_without_duration_is_refused():
    with pytest.raises(ConfigError, match=r"schedule\.duration is 0, but must be at least 1"):
        Linear(1.0, 0.0, duration=0)
