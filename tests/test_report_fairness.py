"""Comparisons that a reader may trust: at the same frames, on a scale, of the same method."""

import re

import numpy as np
import pytest

from forethought.report.curves import PALETTE, profiles
from forethought.report.groups import Group, collect, fair_frames, scale
from forethought.report.html import page
from forethought.report.runs import read_run
from tests.report_runs import TASK, make_run

LONG = {"agent": {"horizon": 5}}
PENDULUM = "gym:Pendulum-v1"


def section(text: str, heading: str) -> str:
    """The words of a section of the page, without its pictures."""
    found = re.search(rf"<h2>{heading}</h2>(.*?)(?=<h2>|</main>)", text, re.DOTALL)
    plain = re.sub(r"<svg.*?</svg>", "", found.group(1) if found else "", flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]*>", " ", plain).split())


# The same frames.


def two_groups(folder, first, second):
    for seed in (1, 2):
        make_run(folder / f"a{seed}", first, seed=seed)
        make_run(folder / f"b{seed}", second, seed=seed, config=LONG)
    return collect([folder])


def test_groups_without_a_common_evaluation_are_not_comparable(tmp_path):
    """One ended at 20,000 frames, before the other's first evaluation at 50,000."""
    early, late = {10_000: 100.0, 20_000: 200.0}, {50_000: 500.0, 100_000: 900.0}
    found = two_groups(tmp_path, early, late)
    assert fair_frames(found.tasks[TASK]) is None
    sentence = (
        "dmc:cartpole-swingup: not comparable, for they were never evaluated at the same frames "
        "(horizon 5 at 50,000 to 100,000 frames; horizon 3 at 10,000 to 20,000 frames)."
    )
    assert found.notes == [sentence]
    assert found.normalised() == {}
    assert section(page(found), "Between the groups") == sentence


def test_an_older_evaluation_does_not_stand_for_later_frames(tmp_path):
    """At 20,000 frames the one was evaluated, the other last at 5,000."""
    found = two_groups(tmp_path, {20_000: 200.0}, {5_000: 500.0, 100_000: 900.0})
    assert fair_frames(found.tasks[TASK]) is None
    with pytest.raises(ValueError, match="not every run was evaluated at 20,000 frames"):
        found.tasks[TASK][0].scores_at(20_000)


def test_evaluations_at_nearly_the_same_frames_are_compared(tmp_path):
    """Three environments that step together are evaluated at 100,002 frames instead of 100,000."""
    found = two_groups(tmp_path, {50_000: 1.0, 100_000: 200.0}, {50_001: 2.0, 100_002: 300.0})
    groups = found.tasks[TASK]
    assert fair_frames(groups) == 100_002
    assert [group.scores_at(100_002).tolist() for group in groups] == [[300.0] * 2, [200.0] * 2]
    assert found.notes == []


def test_an_exact_common_evaluation_is_preferred_to_a_near_one(tmp_path):
    found = two_groups(tmp_path, {100_000: 200.0}, {100_000: 300.0, 100_500: 999.0})
    assert fair_frames(found.tasks[TASK]) == 100_000


def test_groups_of_different_length_say_where_they_are_compared(tmp_path):
    found = two_groups(tmp_path, {100: 500.0}, {100: 400.0, 200: 900.0})
    assert found.notes == [
        "dmc:cartpole-swingup: horizon 5 and horizon 3 are compared with each other at 100 frames,"
        " the last that all were evaluated at; horizon 5 (to 200) went on."
    ]


def test_a_seed_that_shares_no_evaluation_is_left_out_and_said(tmp_path):
    make_run(tmp_path / "a", {1000: 10.0}, seed=1, random=None)
    for seed in (2, 3):
        make_run(tmp_path / f"b{seed}", {2000: 20.0 * seed}, seed=seed, random=None)
    found = collect([tmp_path])
    (group,) = found.tasks[TASK]
    assert (group.seeds, group.scores.tolist()) == ((2, 3), [40.0, 60.0])
    assert group.areas().tolist() == [40.0, 60.0]
    assert found.notes == [
        f"{tmp_path / 'a'} was evaluated at 1,000 frames, not at the 2,000 of the rest of stub: "
        "it is left out."
    ]
    page(found)


def test_of_two_seeds_that_share_nothing_the_longer_stays(tmp_path):
    make_run(tmp_path / "a", {1000: 10.0}, seed=1)
    make_run(tmp_path / "b", {2000: 20.0}, seed=2)
    assert collect([tmp_path]).tasks[TASK][0].seeds == (2,)
    apart = Group("x", tuple(read_run(tmp_path / name) for name in "ab"))
    with pytest.raises(ValueError, match="without a common evaluation"):
        _ = apart.scores


# The same scale.


def runs_on(folder, task, scores, **options):
    for seed, score in enumerate(scores, start=1):
        make_run(folder / f"{task[4:]}{seed}", {100: score}, seed=seed, task=task, **options)


@pytest.mark.parametrize(
    ("random", "scores"),
    [
        (-1200.0, (-1500.0, -1498.0)),  # worse than random play
        (-1200.0, (-1199.0, -1500.0)),  # one barely better: -1500 would be -300
        (-1200.0, (-1200.0, -1200.0)),
        (0.1, (0.5, -50.0)),  # far in units of random play, but not beside the worst
        (480.0, (500.0, 490.0)),
    ],
)
def test_a_task_where_no_run_clearly_beats_random_play_is_not_averaged(tmp_path, random, scores):
    runs_on(tmp_path, PENDULUM, scores, random=random)
    runs_on(tmp_path, TASK, (900.0, 700.0))
    runs_on(tmp_path, "dmc:cup-catch", (500.0, 300.0))
    found = collect([tmp_path])
    assert list(found.scales) == [TASK, "dmc:cup-catch"]
    ((first, second),) = found.normalised().values()
    assert (first.tolist(), second.tolist()) == ([0.9, 0.7], [0.5, 0.3])
    words = section(page(found), "Over all tasks")
    assert f"Left out of the average: {PENDULUM}: the best run here (" in words
    assert "is not clearly above random play" in words
    assert "stub 0.6 [" in words  # the mean over the two others


def test_the_only_run_of_a_task_sets_no_scale_for_itself(tmp_path):
    """It would be its own best, so 1, whatever it reached."""
    runs_on(tmp_path, PENDULUM, (-300.0,), random=-1200.0)
    runs_on(tmp_path, TASK, (900.0,))
    runs_on(tmp_path, "dmc:cup-catch", (500.0,))
    found = collect([tmp_path])
    assert list(found.scales) == [TASK, "dmc:cup-catch"]
    assert found.not_averaged == [
        "gym:Pendulum-v1: its only run is the best one here, so it would be 1 whatever it reached."
    ]


@pytest.mark.parametrize("after", ["", " (offline)"])
def test_several_tasks_of_control_in_one_agent_have_controls_scale(tmp_path, after):
    both = f"multi:{TASK},dmc:cup-catch"
    runs_on(tmp_path, both, (300.0, 500.0))
    (groups,) = collect([tmp_path]).tasks.values()
    assert (scale(both + after, groups).low, scale(both + after, groups).high) == (0.0, 1000.0)
    mixed = f"multi:{TASK},{PENDULUM}"
    assert scale(mixed + after, groups).high == 500.0


def test_a_clear_lead_over_random_play_is_a_scale(tmp_path):
    """-1200 is 0 and -1000 is 1, a sixth of 1200 apart; at -1080, exactly a tenth, it is none."""
    runs_on(tmp_path, PENDULUM, (-1000.0, -1100.0), random=-1200.0)
    groups = collect([tmp_path]).tasks[PENDULUM]
    assert (scale(PENDULUM, groups).low, scale(PENDULUM, groups).high) == (-1200.0, -1000.0)
    runs_on(tmp_path / "less", PENDULUM, (-1080.0,), random=-1200.0)
    assert isinstance(scale(PENDULUM, collect([tmp_path / "less"]).tasks[PENDULUM]), str)


def test_without_random_play_there_is_no_zero(tmp_path):
    runs_on(tmp_path, PENDULUM, (-200.0, -300.0), random=None)
    runs_on(tmp_path, TASK, (900.0, 700.0))
    found = collect([tmp_path])
    assert found.not_averaged == [
        "gym:Pendulum-v1: no run has measured random play, which would be 0."
    ]
    words = section(page(found), "Over all tasks")
    assert words.startswith("Nothing is averaged over tasks, for fewer than two of them can be: ")
    assert words.endswith(found.not_averaged[0])


def test_the_page_says_which_task_has_one_run_and_shows_no_interval(tmp_path):
    runs_on(tmp_path, TASK, (100.0, 110.0))
    runs_on(tmp_path, "dmc:cup-catch", (200.0,))
    words = section(page(collect([tmp_path])), "Over all tasks")
    assert "stub has no interval, for it has one run of dmc:cup-catch." in words
    assert "every task has the same weight" in words
    assert "[" not in words


def test_the_page_says_why_nothing_is_averaged(tmp_path):
    make_run(tmp_path / "a", {100: 1.0})
    make_run(tmp_path / "b", {100: 1.0}, config=LONG)
    make_run(tmp_path / "c", {100: 1.0}, task="dmc:cup-catch")
    words = section(page(collect([tmp_path])), "Over all tasks")
    assert words.endswith("of the tasks here, only dmc:cartpole-swingup was run with every group.")


def test_groups_of_one_task_are_compared_whatever_else_is_in_the_report(tmp_path):
    """One more run of another task: nothing is averaged, and the groups are still drawn, each in
    the colour that it has in the learning curves."""
    two_groups(tmp_path, {100: 10.0}, {100: 20.0})
    other = {"agent": {"horizon": 2}}
    for seed in (1, 2):
        make_run(tmp_path / f"c{seed}", {100: 1.0}, task="dmc:cup-catch", seed=seed, config=other)
    text = page(collect([tmp_path]))
    assert "none was run with every group" in section(text, "Over all tasks")
    assert section(text, "Between the groups") == f"{TASK} at 100 frames."
    between = text[text.index("<h2>Between the groups</h2>") :]
    for name in ("Performance profiles", "Probability of improvement"):
        assert between.count(f'aria-label="{name}"') == 1
    methods = list(collect([tmp_path]).methods)
    (axes,) = profiles({methods[2]: [np.array([1.0, 2.0])]}, "return", methods).axes
    assert axes.lines[0].get_color() == PALETTE[2]


def test_a_task_that_is_left_out_of_the_average_is_compared_by_itself(tmp_path):
    """Those that are averaged are not shown once more."""
    tasks = (TASK, "dmc:cup-catch", PENDULUM)
    for task, scores in zip(
        tasks, ((900.0, 700.0), (500.0, 300.0), (-1500.0, -1498.0)), strict=True
    ):
        for name, config in (("a", None), ("b", LONG)):
            runs_on(tmp_path / name, task, scores, random=-1200.0, config=config)
    found = collect([tmp_path])
    assert list(found.scales) == [TASK, "dmc:cup-catch"]
    assert section(page(found), "Between the groups") == f"{PENDULUM} at 100 frames."


# The same method.


@pytest.mark.parametrize(
    "config",
    [
        {"steps": 100_000},
        {"eval": {"video_every_evaluations": 3}},
        {"train": {"checkpoint_every_agent_steps": 7}},
        {"train": {"keep_checkpoints": 9}},
        {"track": {"wandb": True}},
    ],
    ids=str,
)
def test_what_changes_no_result_splits_no_group(tmp_path, config):
    make_run(tmp_path / "a", {100: 10.0}, seed=1)
    make_run(tmp_path / "b", {100: 20.0}, seed=2, config=config)
    (group,) = collect([tmp_path]).tasks[TASK]
    assert group.seeds == (1, 2)


@pytest.mark.parametrize(
    "config", [{"eval": {"episodes": 3}}, {"train": {"updates_per_agent_step": 2.0}}], ids=str
)
def test_what_may_change_a_result_splits_a_group(tmp_path, config):
    make_run(tmp_path / "a", {100: 10.0}, seed=1)
    make_run(tmp_path / "b", {100: 20.0}, seed=2, config=config)
    assert len(collect([tmp_path]).tasks[TASK]) == 2


def test_lettered_groups_keep_their_letter_on_every_task(tmp_path):
    """Both were run on both tasks, with another action repeat on the second."""
    other = {"horizon": 5, "mpc": False, "model": {"size": 5}}
    for task, repeat in ((TASK, 2), ("dmc:cup-catch", 4)):
        for name, agent in (("x", {}), ("y", other)):
            config = {"agent": agent, "env": {"action_repeat": repeat}}
            make_run(tmp_path / task[4:] / name, {100: 1.0}, task=task, config=config)
    found = collect([tmp_path])
    assert list(found.methods) == ["stub A", "stub B"]
    assert found.common_tasks() == [TASK, "dmc:cup-catch"]
