"""What is drawn, read from the picture's own lines and words rather than from its pixels."""

import numpy as np
import pytest

from forethought.cli import main
from forethought.report import curves
from forethought.report.curves import improvements
from forethought.report.groups import collect
from forethought.report.html import page
from forethought.report.statistics import Estimate
from tests.report_runs import TASK, make_run


def axes_of(folder):
    (axes,) = curves.learning_curves(collect([folder])).axes
    return axes


def words(axes):
    return [text.get_text().replace("\n", " ") for text in axes.texts]


def points(axes, marker):
    """The places of lines that are drawn as this marker."""
    drawn = [line for line in axes.lines if line.get_marker() == marker]
    return [tuple(map(float, xy)) for line in drawn for xy in line.get_xydata()]


def test_published_numbers_are_points_without_a_line(tmp_path):
    make_run(tmp_path / "a", {100_000: 700.0, 200_000: 800.0}, agent="tdmpc2")
    axes = axes_of(tmp_path)
    (line,) = [line for line in axes.lines if line.get_marker() == "D"]
    assert line.get_linestyle() == "None"
    assert points(axes, "D") == [(100_000, 839.4), (200_000, 871.9)]
    assert axes.get_xlim()[1] == pytest.approx(201_000)
    assert "872 at 200k · published TD-MPC2" in words(axes)
    caption = "one seed, so no interval ◆ published TD-MPC2, a point every 100k frames"
    assert caption in words(axes)


def published_points(folder, env, task=TASK):
    make_run(folder, {100_000: 700.0}, agent="tdmpc2", task=task, config={"env": env})
    return points(axes_of(folder), "D")


def test_runs_from_pixels_stand_beside_published_runs_from_pixels(tmp_path):
    task = "dmc:cheetah-run"
    for obs in ("pixels", "plain_pixels"):
        assert published_points(tmp_path / obs, {"obs": obs}, task) == [(100_000, 286.37)]
    assert "published TD-MPC2 from pixels" in page(collect([tmp_path / "pixels"]))
    assert published_points(tmp_path / "state", {}, task) == [(100_000, pytest.approx(519, abs=1))]
    pixels = {"env": {"obs": "pixels"}}
    sac = make_run(tmp_path / "sac", {100_000: 1.0}, agent="sac", task=task, config=pixels)
    assert points(axes_of(sac.path), "D") == []  # none is published


def test_episodes_of_another_length_stand_beside_no_published_curve(tmp_path):
    """Their returns are of another size. 500 decisions of two frames, 250 of four are whole."""
    paper = [(100_000, 839.4)]
    assert published_points(tmp_path / "a", {"max_episode_steps": 50}) == []
    assert published_points(tmp_path / "b", {"max_episode_steps": 500}) == paper
    whole = {"max_episode_steps": 50, "eval_max_episode_steps": 250, "action_repeat": 4}
    assert published_points(tmp_path / "c", whole) == paper
    assert published_points(tmp_path / "d", {"max_episode_steps": 500, "action_repeat": 4}) == []


def test_the_bar_of_a_chance_ends_where_its_interval_ends():
    (axes,) = improvements({("a", "b"): Estimate(0.8, 0.3, 1.0)}).axes
    (bar,) = [line for line in axes.lines if line.get_alpha() == 0.3]
    assert list(bar.get_xdata()) == [0.3, 1.0]
    assert bar.get_solid_capstyle() == "butt"  # others add half the bar's height at each end


def test_a_published_point_a_little_beyond_the_run_is_a_point(tmp_path):
    make_run(tmp_path / "a", {60_000: 700.0}, agent="tdmpc2")
    axes = axes_of(tmp_path)
    assert points(axes, "D") == [(100_000, 839.4)]
    assert axes.get_xlim()[1] == pytest.approx(100_500)
    assert "700 at 60k · tdmpc2" in words(axes)


def test_a_published_point_far_beyond_the_run_is_named(tmp_path):
    """A run of 30,000 frames would fill less than a third of a picture that reaches 100,000."""
    make_run(tmp_path / "a", {30_000: 700.0}, agent="tdmpc2")
    axes = axes_of(tmp_path)
    assert points(axes, "D") == []
    assert axes.get_xlim()[1] == pytest.approx(30_150)
    told = "published TD-MPC2: 839 at 100k frames, beyond this picture"
    assert any(text.endswith(told) for text in words(axes))


def test_runs_that_decide_less_often_than_the_published_ones_are_told_apart(tmp_path):
    for name, repeat in (("a", 5), ("b", 2), ("c", None)):
        config = {"env": {"action_repeat": repeat}, "agent": {"name": name}}
        make_run(tmp_path / name, {45_000: 870.0}, agent="tdmpc2", config=config)
    told = "actions held for 5 frames here, for 2 in published runs"
    figure = curves.learning_curves(collect([tmp_path]))
    (axes,) = figure.axes
    captions = axes.texts[0].get_text().split("\n")
    assert captions[1:] == ["published TD-MPC2: 839 at 100k frames, beyond this picture", told]
    figure.canvas.draw()
    right = max(text.get_window_extent().x1 for text in axes.texts)
    assert right < figure.bbox.width  # nothing is cut off
    assert page(collect([tmp_path])).count(told) == 2  # the card of that run, and the picture


def test_the_page_says_how_many_seeds_a_published_mean_is_of(tmp_path):
    make_run(tmp_path / "a", {100_000: 700.0}, agent="tdmpc2")
    told = "The published TD-MPC2: mean of 3 seeds, results of the official TD-MPC2 repository"
    assert told in page(collect([tmp_path]))


def test_seeds_with_one_evaluation_and_no_random_play_are_dots(tmp_path):
    make_run(tmp_path / "a", {1000: 100.0}, seed=1, random=None)
    make_run(tmp_path / "b", {1000: 200.0}, seed=2, random=None)
    axes = axes_of(tmp_path)
    assert points(axes, "o") == [(1000, 100), (1000, 200), (1000, 150)]  # the last is the mean
    assert words(axes)[0] == "mean of 2 seeds"


def test_a_name_says_where_its_line_ended(tmp_path):
    """Two seeds went on to 50,000 frames, but the mean of all three ends at 25,000."""
    for seed in (1, 2):
        make_run(tmp_path / str(seed), {25_000: 300.0, 50_000: 800.0}, seed=seed)
    make_run(tmp_path / "3", {25_000: 0.0}, seed=3)
    axes = axes_of(tmp_path)
    assert "200 at 25k · stub" in words(axes)
    assert (25_000, 200) in points(axes, "o")


def test_no_two_groups_look_the_same(tmp_path):
    for horizon in range(9):
        scores = {50: 1.0, 100: 100.0 * horizon}
        make_run(tmp_path / str(horizon), scores, config={"agent": {"horizon": horizon}})
    axes = axes_of(tmp_path)
    lines = [line for line in axes.lines if len(line.get_xdata()) == 3]
    looks = {(line.get_color(), line._dash_pattern[1] is None) for line in lines}
    assert len(lines) == len(looks) == 9
    assert "500 · horizon 5" in words(axes)
    assert "600 · horizon 6 (dashed)" in words(axes)
    every = curves._looks([str(place) for place in range(24)]).values()
    assert len(set(every)) == 24
    scores = {str(place): [np.array([float(place), 1.0])] for place in range(7)}
    (drawn,) = curves.profiles(scores, "return").axes
    first, last = drawn.lines[0], drawn.lines[6]
    assert first.get_color() == last.get_color()
    assert first.get_linestyle() != last.get_linestyle()


def test_an_evaluation_at_frame_0_alone_is_drawn(tmp_path):
    make_run(tmp_path / "a", {0: 3.0})
    axes = axes_of(tmp_path)
    assert (0, 3) in points(axes, "o")
    page(collect([tmp_path]))


@pytest.mark.parametrize("name", ["x.htm", "x.html", "x.png"])
def test_notes_are_printed_too(tmp_path, capsys, name):
    """Who sees "2 runs" where three are must not have to open the page to learn why."""
    make_run(tmp_path / "a", {100: 10.0, 200: 99.0}, seed=1)
    make_run(tmp_path / "b", {100: 20.0}, seed=2)
    assert main(["report", str(tmp_path), "--out", str(tmp_path / name)]) == 0
    assert capsys.readouterr().out.count(f"{TASK}, stub: compared at 100 frames") == 1


def test_the_page_says_when_the_iqm_cuts_nothing(tmp_path):
    make_run(tmp_path / "a", {100: 1.0})
    assert "of fewer than 4 seeds nothing is cut" in page(collect([tmp_path]))


ENDS = [("walker-walk", "reacher-easy"), ("walker-walk", "finger-spin"), ("ball", "reacher-easy")]


def test_long_titles_that_begin_or_end_alike_are_told_apart(tmp_path):
    """Both ends of a title stay, and its middle goes."""
    tasks = [f"multi:dmc:{first},dmc:cheetah-run,dmc:cup-catch,dmc:{last}" for first, last in ENDS]
    for number, task in enumerate(tasks):
        make_run(tmp_path / str(number), {1000: 100.0}, task=task)
    figure = curves.learning_curves(collect([tmp_path]))
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert len(set(titles)) == len(tasks)
    assert all(len(title) <= curves.TITLE for title in titles)
