"""Statistics of reports: by hand, against a slow reference, and against rliable's own numbers."""

import itertools
import math
import statistics as python_statistics

import numpy as np
import pytest

from forethought.report import statistics
from forethought.report.published import published
from forethought.report.statistics import Estimate, estimate, interval, number

# Rows are runs, columns tasks; X and Y share scores, so that ties count.
X = np.array(
    [
        [0.10, 0.55, 0.90],
        [0.20, 0.60, 0.85],
        [0.35, 0.50, 1.10],
        [0.15, 0.70, 0.95],
        [0.30, 0.45, 0.20],
    ]
)
Y = np.array([[0.10, 0.40, 0.90], [0.05, 0.65, 0.80], [0.25, 0.35, 1.00], [0.15, 0.50, 0.60]])
TASKS_X, TASKS_Y = list(X.T), list(Y.T)
THRESHOLDS = np.array([0.0, 0.15, 0.3, 0.5, 0.6, 0.9, 1.0])

# Made once with rliable 1.2.0 (numpy 2.2.6, scipy 1.17.1, pandas 2.3.3, arch 7.2.0) by
# library.get_interval_estimates({"x": X}, metrics.aggregate_..., reps=50000) after
# np.random.seed(1): the value, and the 95 % percentile interval of the stratified bootstrap.
RLIABLE = {
    statistics.mean: (0.5266666666666667, 0.41666667, 0.61),
    statistics.median: (0.5599999999999999, 0.48, 0.63),
    statistics.iqm: (0.5, 0.36666667, 0.61111111),
    statistics.optimality_gap: (0.48, 0.40333333, 0.58333333),
}
# library.create_performance_profile({"x": X}, THRESHOLDS, reps=50000), the same way.
RLIABLE_PROFILE = np.array([15, 13, 10, 7, 5, 2, 1]) / 15
RLIABLE_PROFILE_LOW = np.array([15, 11, 8, 4, 3, 0, 0]) / 15
RLIABLE_PROFILE_HIGH = np.array([15, 15, 12, 10, 7, 4, 3]) / 15
# metrics.probability_of_improvement(X, Y), reps=20000.
RLIABLE_IMPROVEMENT = (0.6833333333333332, 0.45833333, 0.875)


@pytest.mark.parametrize("statistic", RLIABLE, ids=lambda statistic: statistic.__name__)
def test_statistics_and_intervals_agree_with_rliable(statistic):
    value, low, high = RLIABLE[statistic]
    assert float(statistic(TASKS_X)) == pytest.approx(value, abs=1e-12)
    # Both are random: scores are multiples of 0.05, so one resample moves an end by about 0.01.
    ends = interval(statistic, TASKS_X, resamples=20_000)
    assert ends == pytest.approx([low, high], abs=0.012)


def test_performance_profiles_agree_with_rliable():
    def profile(scores):
        return statistics.performance_profile(scores, THRESHOLDS)

    assert profile(TASKS_X) == pytest.approx(RLIABLE_PROFILE)
    ends = interval(profile, TASKS_X, resamples=20_000)
    one_run = 1 / 15 + 1e-9
    assert ends[0] == pytest.approx(RLIABLE_PROFILE_LOW, abs=one_run)
    assert ends[1] == pytest.approx(RLIABLE_PROFILE_HIGH, abs=one_run)


def test_probability_of_improvement_agrees_with_rliable():
    value, low, high = RLIABLE_IMPROVEMENT
    found = statistics.probability_of_improvement(TASKS_X, TASKS_Y)
    assert float(found) == pytest.approx(value, abs=1e-12)
    ends = interval(statistics.probability_of_improvement, TASKS_X, TASKS_Y, resamples=20_000)
    assert ends == pytest.approx([low, high], abs=0.012)


# A slow reference that also takes tasks with different numbers of runs, which rliable does not:
# it repeats runs until every task has as many.

UNEVEN = [np.array([0.2, 0.9, 0.4]), np.array([0.7]), np.array([0.1, 0.8])]


def slow_mean(scores):
    return python_statistics.mean(python_statistics.mean(task) for task in scores)


def slow_median(scores):
    return python_statistics.median(python_statistics.mean(task) for task in scores)


def evened(scores):
    most = math.lcm(*(len(task) for task in scores))
    return [score for task in scores for score in list(task) * (most // len(task))]


def slow_iqm(scores):
    flat = sorted(evened(scores))
    for _ in range(len(flat) // 4):
        flat = flat[1:-1]
    return python_statistics.mean(flat)


def slow_gap(scores):
    flat = evened(scores)
    return sum(max(0.0, 1.0 - score) for score in flat) / len(flat)


@pytest.mark.parametrize("scores", [TASKS_X, TASKS_Y, UNEVEN], ids=["x", "y", "uneven"])
@pytest.mark.parametrize(
    ("fast", "slow"),
    [
        (statistics.mean, slow_mean),
        (statistics.median, slow_median),
        (statistics.iqm, slow_iqm),
        (statistics.optimality_gap, slow_gap),
    ],
    ids=["mean", "median", "iqm", "gap"],
)
def test_statistics_agree_with_a_slow_reference(fast, slow, scores):
    assert float(fast(scores)) == pytest.approx(float(slow([list(task) for task in scores])))


def test_a_task_weighs_the_same_however_many_runs_it_has():
    """Four runs at 0 and one at 1: half of the weight is at 1, not a fifth."""
    scores = [np.zeros(4), np.ones(1)]
    assert float(statistics.iqm(scores)) == 0.5
    assert float(statistics.optimality_gap(scores)) == 0.5
    assert statistics.performance_profile(scores, np.array([0.5])).tolist() == [0.5]
    # Each of the three counts 2 times and each of the two 3 times: 9 zeros and 3 ones, and the
    # quarter that is cut is 3 of these 12, which are all ones.
    assert float(statistics.iqm([np.zeros(3), np.array([0.0, 1.0])])) == 0.0


def test_many_resamples_of_uneven_tasks_agree_with_single_ones():
    rng = np.random.default_rng(0)
    drawn = [rng.normal(size=(5, runs)) for runs in (3, 1, 2, 7)]
    thresholds = np.array([-1.0, 0.0, 0.5])
    for place in range(5):
        one = [task[place] for task in drawn]
        assert statistics.iqm(drawn)[place] == pytest.approx(slow_iqm(one), abs=1e-12)
        whole = statistics.performance_profile(drawn, thresholds)[place]
        flat = evened(one)
        shares = [sum(score > low for score in flat) / len(flat) for low in thresholds]
        assert whole == pytest.approx(shares)


def test_an_interval_needs_two_runs_of_every_task():
    """A task with one run never varies in a resample, so the interval would be too narrow."""
    scores = [np.array([0.0, 1.0]), np.array([0.5])]
    assert interval(statistics.mean, scores) is None
    assert estimate(statistics.mean, scores) == Estimate(0.5)
    pair = [np.array([0.0, 1.0])]
    assert interval(statistics.probability_of_improvement, pair, [np.array([0.5])]) is None


def test_probability_of_improvement_counts_wins_and_half_ties():
    """Of 2 x 2 pairs: 2 beats 1 and ties with 2; 1 ties with 1 and loses to 2."""
    x = y = [np.array([1.0, 2.0])]
    assert float(statistics.probability_of_improvement(x, y)) == 0.5
    wins = [2 > 1, 0.5 * (2 == 2), 3 > 1, 3 > 2]
    found = statistics.probability_of_improvement([np.array([2.0, 3.0])], y)
    assert float(found) == sum(wins) / 4 == 0.875


def test_the_interval_holds_every_resample_of_two_runs():
    """Two runs 0 and 1 have the resamples 00, 01, 10, 11: means 0, 1/2, 1/2, 1."""
    means = [python_statistics.mean(pair) for pair in itertools.product((0, 1), repeat=2)]
    assert interval(statistics.mean, [np.array([0.0, 1.0])]) == pytest.approx(
        np.percentile(means * 1000, [2.5, 97.5])
    )


def test_tasks_are_resampled_apart():
    """Drawn together, the task means would always sum to 1; apart, half the draws do not."""
    scores = [np.array([0.0, 1.0]), np.array([1.0, 0.0])]
    assert interval(statistics.mean, scores, resamples=4000) == pytest.approx([0.0, 1.0])


def test_an_interval_is_the_same_each_time_and_absent_for_one_run():
    assert estimate(statistics.iqm, TASKS_X) == estimate(statistics.iqm, TASKS_X)
    assert estimate(statistics.mean, [np.array([7.0])]) == Estimate(7.0)
    assert statistics.curve_band(np.array([[1.0, 2.0]])) is None


def test_a_band_is_the_interval_of_the_mean_at_each_frame():
    """Of two curves a quarter of the resamples is one of them alone."""
    curves = np.array([[0.0, 10.0], [10.0, 0.0]])
    band = statistics.curve_band(curves)
    assert band[0] == pytest.approx([0.0, 0.0])
    assert band[1] == pytest.approx([10.0, 10.0])


def test_the_area_under_a_curve_is_its_mean_height():
    """From 0 to 10 over 2 frames, then 10 over 2 more: (5 * 2 + 10 * 2) / 4."""
    assert statistics.area_under_curve([0, 2, 4], [0.0, 10.0, 10.0]) == 7.5
    assert statistics.area_under_curve([100], [42.0]) == 42.0


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (847.63, "848"),
        (49.44, "49.4"),
        (5.0, "5"),
        (0.5127, "0.513"),
        (-1234.5, "-1,234"),
        (-0.0004, "0"),
        (-0.04, "-0.04"),
    ],
)
def test_numbers_have_three_or_four_figures(value, text):
    assert number(value) == text


def test_published_curves_are_found_by_task_and_agent():
    curve = published("dmc:cartpole-swingup", "tdmpc2")
    assert (curve.frames[:2], curve.means[:2], curve.seeds[0]) == ((0, 100_000), (2.77, 839.4), 3)
    assert curve.frames[-1] == 4_000_000
    assert published("dmc:cup-catch", "tdmpc2").at(100_000) == (100_000, 981.23)
    assert published("gym:Pendulum-v1", "tdmpc2") is None
    assert published("dmc:cartpole-swingup", "stub") is None


def test_a_published_number_is_never_interpolated():
    """At 60,000 frames stands the next published point, with its own frames."""
    curve = published("dmc:cartpole-swingup", "tdmpc2")
    assert curve.at(60_000) == (100_000, 839.4)
    assert curve.at(100_001) == (200_000, 871.9)
    assert curve.at(9_000_000) == (4_000_000, 877.23)
