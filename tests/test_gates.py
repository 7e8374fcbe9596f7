"""Failure gates: what is survived, what warns, what halts, what tags (dqn.md 2.8 and finding 3)."""

from __future__ import annotations

import json
import math

from forethought.training.gates import NEEDS_INSPECTION, Gates, Pace


def nan_updates(gates: Gates, count: int, start: int = 0) -> list[str]:
    return [
        alarm.kind
        for update in range(start + 1, start + count + 1)
        for alarm in gates.after_update({"loss": math.nan, "nonfinite": 1.0}, update)
    ]


def test_a_hundred_nonfinite_updates_are_survived_and_the_next_halts():
    gates = Gates()
    assert nan_updates(gates, 100) == ["nonfinite-update"]  # warned once, not a hundred times
    [alarm] = gates.after_update({"nonfinite": 1.0}, 101)
    assert alarm.halt and alarm.kind == "diverged"
    assert "101 updates in a row" in alarm.message


def test_one_finite_update_starts_the_count_again():
    gates = Gates()
    nan_updates(gates, 100)
    assert gates.after_update({"loss": 1.0}, 101) == []
    assert "diverged" not in nan_updates(gates, 100, start=101)
    assert gates.nonfinite_total == 200


def test_the_agent_says_that_it_skipped_and_is_counted():
    gates = Gates()
    gates.after_update({"nonfinite": 1.0}, 1)
    gates.after_update({"nonfinite": 0.0, "loss": 2.0}, 2)
    assert (gates.nonfinite_total, gates.nonfinite_in_a_row) == (1, 0)


def test_an_infinite_loss_is_named():
    metrics = {"value_loss": math.inf, "q_mean": 1.0, "nonfinite": 1.0}
    [alarm] = Gates().after_update(metrics, 7)
    assert alarm.message.startswith("Update 7 was not finite") and "value_loss" in alarm.message


def test_a_metric_that_is_not_finite_is_no_skipped_update():
    """The agent stepped: nothing was skipped and nothing halts, but it is told and counted."""
    gates, metrics = Gates(), {"td_target_mean": math.inf, "grad_norm": 2000.0, "nonfinite": 0.0}
    alarms = gates.after_update(metrics, 7)
    assert [alarm.kind for alarm in alarms] == ["nonfinite-metric", "gradient-norm"]
    assert alarms[0].message.startswith("Update 7 was made, but is not finite in td_target_mean")
    assert all(gates.after_update({"q_mean": math.nan}, u) == [] for u in range(8, 1007))
    [alarm] = gates.after_update({"q_mean": math.nan}, 1007)
    assert "q_mean (1001 such updates" in alarm.message
    assert (gates.nonfinite_total, gates.nonfinite_in_a_row, gates.metric_alarms) == (0, 0, 1001)


def test_a_checkpoint_without_a_counter_starts_it():
    gates = Gates(metric_alarms=3)
    gates.restore({k: v for k, v in Gates(norm_alarms=2).state().items() if k != "metric_alarms"})
    assert (gates.metric_alarms, gates.norm_alarms) == (0, 2)


def test_gradient_norms_over_1000_warn_once_per_1000_updates():
    gates = Gates()
    assert gates.after_update({"grad_norm": 1000.0}, 1) == []
    assert [a.kind for a in gates.after_update({"grad_norm": 1001.0}, 2)] == ["gradient-norm"]
    assert all(gates.after_update({"grad_norm": 1001.0}, u) == [] for u in range(3, 1002))
    [alarm] = gates.after_update({"grad_norm_policy": 1001.0}, 1002)
    assert "grad_norm_policy" in alarm.message and "1001" in alarm.message
    assert gates.norm_alarms == 1001


def test_values_over_ten_times_their_bound_warn_once_per_1000_updates():
    gates = Gates()
    assert gates.after_update({"q_bound_share": 10.0}, 1) == []
    assert "value_alarms" not in gates.state(), "the checkpoints of agents without it stay the same"
    assert [a.kind for a in gates.after_update({"q_bound_share": 10.1}, 2)] == ["runaway-values"]
    assert all(gates.after_update({"q_bound_share": 10.1}, u) == [] for u in range(3, 1002))
    again = Gates()
    again.restore(gates.state())
    assert again == gates
    [alarm] = again.after_update({"q_bound_share": 25.0}, 1002)
    assert "25 times" in alarm.message and not alarm.halt and again.value_alarms == 1001


def tags(random: float, scores: list[float]) -> list[str | None]:
    gates = Gates(random_score=random)
    return [alarm.tag for score in scores for alarm in gates.after_evaluation(score)]


def test_three_low_evaluations_in_a_row_tag_the_run():
    assert tags(0.0, [10, 4, 4]) == []
    assert tags(0.0, [10, 4, 4, 4]) == [NEEDS_INSPECTION]
    assert tags(0.0, [10, 4, 4, 4, 4, 4]) == [NEEDS_INSPECTION]  # one drop, one tag
    assert tags(0.0, [10, 4, 4, 6, 4, 4]) == []  # not in a row
    assert tags(0.0, [10, 5, 5, 5]) == []  # exactly half-way is not below


def test_a_negative_best_is_measured_against_random_play():
    """Pong: half of the best would call -5 a collapse from -4."""
    assert tags(-21.0, [-4, -5, -5, -5]) == []
    assert tags(-21.0, [-4, -13, -13, -13]) == [NEEDS_INSPECTION]  # limit: -4 - 8.5 = -12.5


def test_a_run_below_random_play_has_nothing_to_fall_from():
    assert tags(-100.0, [-150, -160, -170, -180, -190]) == []


def test_the_gates_go_on_from_their_saved_state():
    gates = Gates(random_score=0.0)
    nan_updates(gates, 60)
    gates.after_evaluation(10.0)
    gates.after_evaluation(4.0)
    again = Gates()
    again.restore(json.loads(json.dumps(gates.state())))
    assert again == gates
    assert "diverged" not in nan_updates(again, 40, start=60)
    assert nan_updates(again, 1, start=100) == ["diverged"]
    assert [a.kind for s in (4.0, 4.0) for a in again.after_evaluation(s)] == ["evaluation-drop"]


def told_of(pace: Pace, *updates_per_s: float) -> list[int]:
    """Which of these intervals are told of."""
    return [place for place, speed in enumerate(updates_per_s) if pace.after_interval(speed)]


def test_a_collapse_of_the_pace_is_told_once_after_three_intervals():
    pace = Pace()
    assert told_of(pace, 100, 0, 90, 110, 100, 105) == []  # one interval without updates
    assert told_of(pace, 19, 18, 19, 19, 1) == [2]
    assert told_of(pace, 100, 19, 19, 100, 19, 19) == []  # never three in a row
    assert told_of(pace, 19) == [0]
    assert "19 updates per second, from 100" in pace_message()


def pace_message() -> str:
    pace = Pace()
    told_of(pace, *[100] * 5, 19, 19)
    (alarm,) = pace.after_interval(19)
    return alarm.message


def test_a_pace_that_never_was_usual_or_falls_by_half_is_not_told():
    assert told_of(Pace(), 100, 1, 1, 1, 1) == []
    assert told_of(Pace(), *[100] * 5, *[21] * 5) == []
