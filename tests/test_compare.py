"""`forethought compare`: keys added, removed and changed, and statistics side by side."""

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from forethought.cli import main
from forethought.report.compare import compare, show_comparison
from forethought.tracking import RunDirectory
from tests.report_runs import TASK, make_run


@pytest.fixture
def sides(tmp_path, monkeypatch):
    """Folders `old` (horizon 3: 100, 200) and `new` (horizon 5: 200, 300), two seeds each."""
    for name, horizon, base in (("old", 3, 0.0), ("new", 5, 100.0)):
        for seed in (1, 2):
            agent = {"horizon": horizon, **({"added": 7} if name == "new" else {"removed": None})}
            scores = {1000: 10.0, 2000: base + 100.0 * seed}
            place = tmp_path / name / str(seed)
            make_run(place, scores, seed=seed, ms=horizon, config={"agent": agent})
    monkeypatch.chdir(tmp_path)
    return tmp_path


def shown(*words: str, everything: bool = False, colour: bool = False) -> str:
    console = Console(file=io.StringIO(), width=200, force_terminal=colour, highlight=False)
    show_comparison(compare(words), console, everything)
    return console.file.getvalue()


def line(text: str, key: str) -> list[str]:
    """The cells of a table's row."""
    (found,) = [row for row in text.splitlines() if re.match(rf"│.*\b{re.escape(key)}\s+│", row)]
    return [cell.strip() for cell in found.strip("│").split("│")]


def test_keys_added_removed_and_changed(sides):
    kinds = compare(["old", "new"]).kinds
    found = {key: kind for key, (kind,) in kinds.items() if kind != "same"}
    assert found == {
        "agent.horizon": "changed",
        "agent.added": "added",
        "agent.removed": "removed",
    }


def test_only_differences_are_shown_unless_asked(sides):
    text = shown("old", "new")
    assert line(text, "agent.horizon") == ["~", "agent.horizon", "3", "5"]
    assert line(text, "agent.added") == ["+", "agent.added", "-", "7"]
    assert line(text, "agent.removed") == ["-", "agent.removed", "null", "-"]
    assert "agent.mpc" not in text
    assert line(shown("old", "new", everything=True), "agent.mpc") == [
        "",
        "agent.mpc",
        "true",
        "true",
    ]


def test_seeds_versions_and_commit_are_always_shown(sides):
    text = shown("old", "new")
    assert line(text, "seed") == ["", "seed", "1, 2", "1, 2"]
    python = compare(["old", "new"]).sides[0].facts["versions.python"]
    assert line(text, "versions.python") == ["", "versions.python", python, python]


def test_a_commit_is_brief_and_keeps_the_word_of_changes(sides):
    for place, commit in (("old/1", "a" * 40), ("new/1", "b" * 40 + "+changes")):
        RunDirectory.open(sides / place).update(git_commit=commit)
    text = shown("old/1", "new/1")
    assert line(text, "git_commit") == ["~", "git_commit", "a" * 10, "b" * 10 + "+changes"]
    RunDirectory.open(sides / "old/2").update(git_commit="a" * 40 + "+changes")
    RunDirectory.open(sides / "new/2").update(git_commit=None)
    both = line(shown("old", "new"), "git_commit")
    assert both[2:] == [f"{'a' * 10}, {'a' * 10}+changes", f"-, {'b' * 10}+changes"]


def test_differences_are_coloured_and_equal_values_are_not(sides):
    text = shown("old", "new", colour=True)
    assert "\x1b[1;33m5\x1b[0m" in text  # bold yellow: changed
    assert "\x1b[1;32m7\x1b[0m" in text  # bold green: added


def test_the_same_seeds_are_the_same_wherever_they_lie(sides):
    """Folders come in the order of their names, 10 before 2; commits in that of their seeds."""
    for side, names in (("p", "{}"), ("q", "{:02}"), ("r", "r{}")):
        for seed in range(1, 12):
            place = sides / side / names.format(12 - seed if side == "r" else seed)
            make_run(place, {1000: 1.0}, seed=seed)
    found = compare(["p", "q", "r"])
    assert {kind for kinds in found.kinds.values() for kind in kinds} == {"same"}
    assert found.sides[0].facts["seed"] == "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11"


def test_two_runs_that_differ_only_by_seed_say_so(sides):
    text = shown("old/1", "old/2")
    configuration, statistics = text.split("one seed each")
    assert line(configuration, "seed")[:2] == ["~", "seed"]
    assert line(statistics, "seed") == ["seed", "1", "2"]
    assert "agent." not in text


def test_single_runs_have_a_seed_and_no_intervals(sides):
    """`seeds 2` would be read as two of them."""
    text = shown("old/1", "new/2")
    assert "one seed each: no intervals" in text and "95 %" not in text
    assert "seeds" not in text


def test_statistics_stand_side_by_side_with_intervals(sides):
    text = shown("old", "new")
    assert "95 % intervals over seeds" in text
    last = line(text, "last evaluation")
    assert last[1].startswith("150 [")
    assert last[2].startswith("250 [")
    assert line(text, "best") == ["best", *last[1:]]
    assert line(text, "frames") == ["frames", "2,000", "2,000"]
    assert line(text, "ms per agent step") == ["ms per agent step", "3", "5"]
    # 50 at frame 0, 10, then 100 or 200: (30 + 55) / 2 = 42.5 and (30 + 105) / 2 = 67.5
    assert line(text, "area under curve")[1].startswith("55 [")


def test_the_probability_of_improvement_needs_several_seeds_on_both_sides(sides):
    """new has 200 and 300, old 100 and 200: three wins and a tie in four pairs."""
    words = "A run of new beats one of old at 2,000 frames with probability 0.875 ["
    assert words in shown("old", "new")
    assert "beats" not in shown("old", "new/1")


def test_sides_of_different_length_are_compared_at_the_same_frames(sides):
    for seed in (1, 2):
        make_run(Path("long") / str(seed), {2000: 150.0, 9000: 999.0}, seed=seed)
    ((_, _, at, chance),) = compare(["old", "long"]).improvements(TASK)
    assert (at, chance.value) == (2000, 0.5)  # 150 against 100 and 200


def test_sides_of_different_length_show_their_scores_at_the_same_frames(sides):
    make_run(Path("long"), {2000: 150.0, 9000: 999.0})
    text = shown("old", "long")
    assert line(text, "at 2,000 frames")[2] == "150"
    assert line(text, "last evaluation")[2] == "999"
    told = "dmc:cartpole-swingup: old and long are compared with each other at 2,000 frames"
    assert told in text
    assert "at 2,000 frames" not in shown("old", "new").split("beats")[0]


def test_sides_that_were_never_evaluated_at_the_same_frames_are_not_comparable(sides):
    for seed in (1, 2):
        make_run(Path("late") / str(seed), {50_000: 900.0, 100_000: 950.0}, seed=seed)
    found = compare(["old", "late"])
    assert found.improvements(TASK) == []
    assert found.notes == (
        "dmc:cartpole-swingup: not comparable, for they were never evaluated at the same frames "
        "(old at 1,000 to 2,000 frames; late at 50,000 to 100,000 frames).",
    )
    assert "beats" not in shown("old", "late")


def test_the_same_seed_twice_counts_once_the_newer(sides):
    """Three runs of one seed are one sample: no interval, and no probability of improvement."""
    for place in range(3):
        run = make_run(Path("again") / str(place), {2000: 100.0 + place})
        run.update(created_utc=f"2026-01-0{place + 1}")
    found = compare(["again", "old"])
    (group, _) = found.groups(TASK)
    assert (group.seeds, group.scores.tolist()) == ((1,), [102.0])
    assert found.improvements(TASK) == []
    assert found.notes[0] == (
        "again/0 has the seed and configuration of again/1, which is newer: it is left out."
    )
    assert len(found.sides[0].runs) == 1


def test_a_run_of_a_side_that_shares_no_evaluation_is_left_out_and_said(sides):
    make_run(Path("old/3"), {500: 900.0}, seed=3, random=None, config={"agent": {"removed": None}})
    found = compare(["old", "new"])
    assert found.groups(TASK)[0].seeds == (1, 2)
    assert found.notes == (
        "old/3 was evaluated at 500 frames, not at the 2,000 of the rest of old: it is left out.",
    )
    shown("old", "new")


def test_three_sides_are_compared_with_the_first(sides):
    assert compare(["old", "new", "old/1"]).kinds["agent.horizon"] == ["changed", "same"]


def test_json_holds_everything(sides, capsys):
    assert main(["compare", "old", "new", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [side["name"] for side in data["sides"]] == ["old", "new"]
    assert data["differences"]["agent.horizon"] == {"kinds": ["changed"], "values": [3, 5]}
    assert data["statistics"][TASK][1]["last"]["value"] == 250.0
    assert data["improvement"][0]["value"] == 0.875
    assert data["notes"] == []


def test_a_mixed_folder_and_a_run_without_evaluations_are_said(sides):
    make_run(Path("old/3"), {}, seed=3, status="running", config={"agent": {"horizon": 9}})
    notes = compare(["old", "new"]).notes
    assert notes[0].startswith("old/3 has no evaluation yet (running")
    assert notes[1] == "old holds runs that also differ in agent.horizon, agent.removed."


def test_a_side_without_runs_of_a_task_is_said(sides):
    make_run(sides / "other" / "1", {1000: 5.0, 2000: 6.0}, seed=1, task="gym:Other-v0")
    text = shown("old", "other")
    assert f"other has no runs of {TASK}, so it is not compared there.\n" in text
    assert "old has no runs of gym:Other-v0, so it is not compared there.\n" in text
    assert "has no runs" not in shown("old", "new")


def test_words_from_a_run_neither_style_nor_steer_the_terminal(sides):
    make_run(Path("bad"), {100: 1.0}, config={"agent": {"note": "[bold]x[/]\x1b[2J"}})
    text = shown("old/1", "bad", colour=True)
    assert "[bold]x[/]\N{REPLACEMENT CHARACTER}[2J" in text
    assert "\x1b[2J" not in text


@pytest.mark.parametrize(
    ("tokens", "code", "sentence"),
    [
        (["old"], 2, "compare takes two or more runs, or folders of runs."),
        (["old", "gone"], 2, "There is no run directory gone."),
    ],
)
def test_a_wrong_comparison_is_one_sentence(sides, capsys, tokens, code, sentence):
    assert main(["compare", *tokens]) == code
    assert capsys.readouterr().err == f"{sentence}\n"
