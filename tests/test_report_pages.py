"""Reports from run directories: what is read, how it is grouped, and what the page says."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from forethought.cli import main
from forethought.config import layer
from forethought.extras import install_extra
from forethought.files import FileError
from forethought.report import curves
from forethought.report.groups import collect
from forethought.report.html import improvements, page
from forethought.report.runs import find_runs, read_run
from tests.report_runs import TASK, make_run

HOSTILE = "\"><script>alert('1')</script><img src=http://x/y onerror=z>&$\\frac{1}$"


def three_seeds(folder: Path, **options) -> None:
    for seed, last in ((1, 840.0), (2, 850.0), (3, 860.0)):
        scores = {50_000: last - 200, 100_000: last}
        make_run(folder / f"seed{seed}", scores, seed=seed, **options)


class Reader(HTMLParser):
    """The elements, attributes and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.words = [], [], []
        self.feed(text)
        self.close()
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.words.append(data)


def report(*places: Path) -> Reader:
    return Reader(page(collect(places)))


# Reading.


def test_a_folder_stands_for_all_runs_below_it(tmp_path):
    three_seeds(tmp_path / "a" / "b")
    alone = make_run(tmp_path / "c", {100: 1.0}).path
    assert len(find_runs([tmp_path])) == 4
    assert find_runs([alone, tmp_path / "a"])[0] == alone
    assert len(find_runs([tmp_path, alone, alone])) == 4  # each once
    with pytest.raises(FileError, match="There is no run directory"):
        find_runs([tmp_path / "nowhere"])
    (alone / "snapshots").mkdir()
    (alone / "snapshots" / "run.json").write_text("{}")
    assert find_runs([alone]) == [alone]  # a run holds no run
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileError, match="is no run, and there is none below it"):
        find_runs([tmp_path / "empty"])


def test_a_half_written_last_line_is_ignored_and_said(tmp_path):
    run = make_run(tmp_path / "run", {100: 1.0, 200: 2.0}, status="running")
    whole = run.eval_csv.read_bytes()
    run.eval_csv.write_bytes(whole + b"150,300,0,0,1.0,3,10,0,99")
    with run.events_file.open("a") as file:
        file.write('{"kind": "gradient-no')
    record = read_run(run.path)
    assert record.evaluations == {100: 1.0, 200: 2.0}
    assert [note.rpartition("/")[2] for note in record.notes] == [
        "eval.csv: the half-written last line is ignored.",
        "events.jsonl: the half-written last line is ignored.",
    ]
    assert "the half-written last line is ignored" in report(run.path).text


def test_a_row_without_a_finite_score_is_left_out_and_said(tmp_path):
    run = make_run(tmp_path / "run", {100: 1.0, 200: float("nan")})
    record = read_run(run.path)
    assert record.evaluations == {100: 1.0}
    assert "line 3 holds no score" in record.notes[0]


def test_a_run_without_evaluations_is_named_with_its_training_return(tmp_path):
    make_run(tmp_path / "done", {100: 1.0})
    make_run(tmp_path / "young", {}, seed=2, status="running")
    shown = report(tmp_path)
    assert (
        "young has no evaluation yet (running, its records reach 2,000 frames, mean" in shown.text
    )
    assert "return of its last episodes 12): it is left out." in shown.text
    assert "1 seed, so no interval" in shown.text


def test_only_runs_without_evaluations_are_one_sentence_and_exit_1(tmp_path, capsys):
    make_run(tmp_path / "young", {})
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "x.html")]) == 1
    assert capsys.readouterr().err.startswith("There is nothing to report yet. ")
    assert not (tmp_path / "x.html").exists()


def test_a_damaged_run_is_left_out_and_said(tmp_path):
    three_seeds(tmp_path)
    (tmp_path / "seed2" / "run.json").write_text("{")
    shown = report(tmp_path)
    assert "2 seeds" in shown.text
    assert "seed2/run.json is damaged" in shown.text


def test_an_evaluation_of_many_episodes_can_be_read(tmp_path):
    run = make_run(tmp_path / "run", {100: 1.0})
    row = ["100", "200", *["0"] * 6, "7.5", *["0"] * 7, ";".join(["847.6270760517554"] * 10_000)]
    with run.eval_csv.open("a") as file:
        file.write(",".join([*row, "", "", ""]) + "\n")
    assert read_run(run.path).evaluations == {100: 1.0, 200: 7.5}


def test_events_become_warnings_once_per_kind(tmp_path):
    run = make_run(tmp_path / "run", {100: 1.0})
    run.event("gradient-norm", message="grad_norm is 1500.")
    run.event("gradient-norm", message="grad_norm is 1600.")
    run.event("evaluation-episodes-failed", reasons=["the wheel came off"])
    run.event("video", file="step-000000100.mp4")  # all is well: nothing to be warned of
    assert read_run(run.path).warnings == (
        "gradient-norm (2 times): grad_norm is 1600.",
        "evaluation-episodes-failed: the wheel came off",
    )


@pytest.mark.parametrize(
    ("line", "warning", "note"),
    [
        ('{"kind": [1]}', (), "event 2 is damaged and left out."),
        ('{"kind": {"a": 1}, "message": {"b": 2}}', (), "event 2 is damaged and left out."),
        ("[1]", (), "event 2 is damaged and left out."),
        ('{"kind": "x", "reasons": 5}', ("x: 5",), None),
        ('{"kind": "x", "message": [5]}', ("x: [5]",), None),
    ],
)
def test_an_event_of_odd_types_is_said_and_ends_nothing(tmp_path, line, warning, note):
    run = make_run(tmp_path / "run", {100: 1.0})
    with run.events_file.open("a") as file:
        file.write(f"{line}\n")
    record = read_run(run.path)
    assert record.warnings == warning
    assert record.notes == (() if note is None else (f"{run.events_file}: {note}",))
    assert (note or warning[0]) in report(run.path).text


@pytest.mark.parametrize(
    "value", [10**400, 1e200, float("nan"), float("-inf")], ids=["10**400", "1e200", "nan", "-inf"]
)
def test_a_score_of_random_play_that_is_no_return_is_left_out_and_said(tmp_path, value):
    run = make_run(tmp_path / "run", {100: 1.0})
    facts = json.loads((run.path / "run.json").read_text())
    (run.path / "run.json").write_text(json.dumps({**facts, "random_score": value}))
    shown = report(run.path)
    assert "run.json: random_score is no finite return and is left out." in shown.text
    assert read_run(run.path).random_score is None


def test_returns_that_would_overflow_and_frames_before_0_are_left_out(tmp_path):
    run = make_run(tmp_path / "run", {100: 7.0})
    run.eval_csv.write_text("env_frames,return_mean\n-5,3\n10,1e308\n20,-1e308\n30,7\n")
    record = read_run(run.path)
    assert record.evaluations == {30: 7.0}
    assert [note.partition("eval.csv: ")[2][:6] for note in record.notes] == [
        "line 2",
        "line 3",
        "line 4",
    ]
    report(run.path)


# Grouping.


def test_runs_that_differ_only_by_seed_or_tracking_are_one_group(tmp_path):
    make_run(tmp_path / "a", {100: 10.0}, seed=1)
    make_run(tmp_path / "b", {100: 20.0}, seed=2, config={"track": {"console": False}})
    make_run(tmp_path / "c", {100: 90.0}, seed=1, config={"agent": {"horizon": 5}})
    found = collect([tmp_path])
    assert [(g.label, g.seeds) for g in found.tasks[TASK]] == [
        ("horizon 5", (1,)),  # the best first
        ("horizon 3", (1, 2)),
    ]
    assert found.tasks[TASK][1].scores.tolist() == [10.0, 20.0]


def test_groups_that_differ_much_are_lettered(tmp_path):
    other = {"agent": {"horizon": 5, "mpc": False, "model": {"size": 5}}}
    make_run(tmp_path / "a", {100: 10.0})
    make_run(tmp_path / "b", {100: 20.0}, config=other)
    assert sorted(collect([tmp_path]).methods) == ["stub A", "stub B"]


def test_a_group_is_named_only_by_what_differs_within_a_task(tmp_path):
    short = {"env": {"action_repeat": 4}}
    make_run(tmp_path / "a", {100: 10.0})
    make_run(tmp_path / "b", {100: 20.0}, task="gym:X-v0", config=short)
    found = collect([tmp_path])
    assert [group.label for task in found.tasks.values() for group in task] == ["stub", "stub"]
    assert found.methods["stub"]["env.action_repeat"] == "by task"
    assert found.methods["stub"]["agent.horizon"] == 3
    assert found.notes == ["stub is not the same on every task: env.action_repeat differ."]

    deep = {"agent": {"horizon": 5}}
    make_run(tmp_path / "c", {100: 5.0}, config=deep)
    make_run(tmp_path / "d", {100: 15.0}, task="gym:X-v0", config=layer(short, deep))
    found = collect([tmp_path])
    for task in ("dmc:cartpole-swingup", "gym:X-v0"):
        assert [group.label for group in found.tasks[task]] == ["horizon 3", "horizon 5"]
    assert found.common_tasks() == ["dmc:cartpole-swingup", "gym:X-v0"]


def test_scores_and_names_at_the_curves_are_kept_apart(tmp_path):
    make_run(tmp_path / "a", {100: 348.0}, config={"agent": {"horizon": 400}})
    make_run(tmp_path / "b", {100: 200.0})
    picture = curves.svg(curves.learning_curves(collect([tmp_path])))
    assert "348 · horizon 400" in picture and "50 · random play" in picture


def test_a_group_is_named_after_the_preset_that_it_has(tmp_path):
    from forethought.agents.registry import config_class
    from forethought.config import build_run_config, to_dict
    from forethought.presets import layers

    built = layers(["tdmpc2_small"], None, "tdmpc2")
    config = to_dict(build_run_config("tdmpc2", TASK, config_class("tdmpc2"), built))
    make_run(tmp_path / "a", {100: 10.0}, agent="tdmpc2", config=config)
    assert list(collect([tmp_path]).methods) == ["tdmpc2_small"]


def test_a_preset_that_only_turns_something_off_names_no_method(tmp_path):
    """multi_gamma_a0 is part of every run without auxiliary discounts."""
    from forethought.agents.registry import config_class
    from forethought.config import build_run_config, to_dict

    config = to_dict(build_run_config("tdmpc2", TASK, config_class("tdmpc2"), []))
    make_run(tmp_path / "a", {100: 10.0}, agent="tdmpc2", config=config)
    assert list(collect([tmp_path]).methods) == ["tdmpc2"]


def test_the_same_seed_twice_counts_once_the_newer(tmp_path):
    make_run(tmp_path / "new", {100: 20.0}).update(created_utc="2026-02-02")
    make_run(tmp_path / "old", {100: 10.0}).update(created_utc="2026-01-01")
    found = collect([tmp_path])
    assert found.tasks[TASK][0].scores.tolist() == [20.0]
    assert "old has the seed and configuration of" in found.notes[0]


def test_a_short_repetition_does_not_hide_a_run_that_went_further(tmp_path):
    make_run(tmp_path / "new", {100: 20.0}).update(created_utc="2026-02-02")
    make_run(tmp_path / "old", {100: 10.0, 200: 30.0}).update(created_utc="2026-01-01")
    found = collect([tmp_path])
    assert found.tasks[TASK][0].scores.tolist() == [30.0]
    assert found.notes[0].endswith("old, which went further: it is left out.")


def test_seeds_are_compared_where_all_have_been(tmp_path):
    make_run(tmp_path / "a", {100: 10.0, 200: 99.0}, seed=1)
    make_run(tmp_path / "b", {100: 20.0}, seed=2, status="running")
    found = collect([tmp_path])
    group = found.tasks[TASK][0]
    assert (group.last_frames, group.scores.tolist()) == (100, [10.0, 20.0])
    assert "compared at 100 frames, which all seeds have reached; seed 1 went on." in found.notes[0]


def test_the_best_is_of_the_frames_that_all_seeds_have(tmp_path):
    """Seed 1 went on and found 999; (3 + 2) / 2 is the best of both up to frame 100."""
    make_run(tmp_path / "a", {50: 3.0, 100: 1.0, 200: 999.0}, seed=1)
    make_run(tmp_path / "b", {50: 1.0, 100: 2.0}, seed=2)
    assert collect([tmp_path]).tasks[TASK][0].summary()["best"].value == 2.5


def test_areas_begin_with_random_play_at_frame_0(tmp_path):
    """(50 + 150) / 2 over the first 100 frames, (150 + 250) / 2 over the next: 150."""
    make_run(tmp_path / "a", {100: 150.0, 200: 250.0}, random=50.0)
    assert collect([tmp_path]).tasks[TASK][0].areas().tolist() == [150.0]


def test_scores_are_normalised_by_task(tmp_path):
    """dmc by 1000; elsewhere random play (-1200) is 0 and the best run (-200) is 1."""
    make_run(tmp_path / "a", {100: 500.0})
    for seed, score in ((1, -200.0), (2, -700.0)):
        name, place = "gym:Pendulum-v1", tmp_path / f"p{seed}"
        make_run(place, {100: score}, seed=seed, task=name, random=-1200.0)
    (scores,) = collect([tmp_path]).normalised().values()
    assert [task.tolist() for task in scores] == [[0.5], [1.0, 0.5]]


def test_only_tasks_that_every_group_was_run_on_are_averaged(tmp_path):
    make_run(tmp_path / "a", {100: 500.0})
    make_run(tmp_path / "b", {100: 400.0}, config={"agent": {"horizon": 5}})
    make_run(tmp_path / "c", {100: 900.0}, task="dmc:cup-catch")
    found = collect([tmp_path])
    assert found.common_tasks() == [TASK]
    assert {label: scores[0].tolist() for label, scores in found.normalised().items()} == {
        "horizon 3": [0.5],
        "horizon 5": [0.4],
    }


def test_groups_of_different_length_are_compared_at_the_same_frames(tmp_path):
    make_run(tmp_path / "a", {100: 500.0, 200: 900.0})
    make_run(tmp_path / "b", {100: 400.0}, config={"agent": {"horizon": 5}})
    scores = collect([tmp_path]).normalised()
    assert scores["horizon 3"][0].tolist() == [0.5]


def test_the_better_group_stands_first_in_a_pair():
    scores = {"low": [np.array([1.0, 2.0])], "high": [np.array([2.0, 3.0])]}
    ((pair, chance),) = improvements(scores).items()
    assert (pair, chance.value) == (("high", "low"), 0.875)
    assert improvements({"one": [np.array([1.0])], "two": [np.array([1.0, 2.0])]}) == {}


# The page.


def test_the_page_begins_with_the_answer_beside_random_play_and_the_published_number(tmp_path):
    three_seeds(tmp_path, agent="tdmpc2")
    text = report(tmp_path).text
    answer = re.search(
        r"dmc:cartpole-swingup tdmpc2 850 95 % interval (\d+) to (\d+), (.*?) dmc", text
    )
    assert answer is not None, text[:400]
    low, high, beside = answer.groups()
    assert 840 <= int(low) < 850 < int(high) <= 860
    assert beside == "3 seeds after 100,000 frames random play 50 published TD-MPC2 839"


def test_a_published_number_at_other_frames_says_so(tmp_path):
    make_run(tmp_path / "a", {60_000: 700.0}, agent="tdmpc2")
    assert "published TD-MPC2 839 at 100,000 frames" in report(tmp_path).text


def test_what_differs_between_groups_is_marked(tmp_path):
    make_run(tmp_path / "a", {100: 10.0})
    make_run(tmp_path / "b", {100: 20.0}, config={"agent": {"horizon": 5, "extra": None}})
    text = page(collect([tmp_path]))
    table = text[text.index("What differs") : text.index("<h2>Runs")]
    assert re.findall(r"<mark>(.*?)</mark>", table) == ["5", "null"]
    assert "agent.horizon" in table
    assert "agent.mpc" not in table


def test_the_page_is_self_contained_and_runs_nothing(tmp_path):
    three_seeds(tmp_path / "a")
    three_seeds(tmp_path / "b", task="dmc:cup-catch")
    shown = report(tmp_path)
    assert not {"script", "link", "iframe", "img", "object", "base"} & set(shown.tags)
    assert shown.tags.count("svg") == 3  # two tasks and their profile
    for name, value in shown.attributes:
        assert not name.startswith("on")
        if name in ("href", "xlink:href", "src"):
            assert value.startswith("#")
    text = page(collect([tmp_path]))
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)
    assert "prefers-color-scheme: dark" in text


def test_hostile_words_are_only_words(tmp_path):
    place = tmp_path / "<script>alert(2)<" / "b"
    run = make_run(place, {100: 1.0}, task=f"dmc:{HOSTILE}", config={"agent": {"note": HOSTILE}})
    run.tag(HOSTILE)
    run.update(git_commit=HOSTILE, versions={HOSTILE: HOSTILE})
    run.event(HOSTILE, message=HOSTILE)
    other = {"agent": {"note": "</style></svg><script>x"}}
    make_run(tmp_path / "c", {100: 1.0}, task=f"dmc:{HOSTILE}", config=other)
    plain = tmp_path / "plain"
    make_run(plain / "a", {100: 1.0}, config={"agent": {"note": "x"}})
    make_run(plain / "b", {100: 1.0}, config={"agent": {"note": "y"}})
    shown, harmless = report(tmp_path / "c", place), report(plain)
    assert "script" not in shown.tags
    assert "img" not in shown.tags
    assert set(shown.tags) <= {*harmless.tags, "ul", "li"}
    assert {name for name, _ in shown.attributes} <= {name for name, _ in harmless.attributes}
    assert HOSTILE in shown.text


def test_the_table_of_runs_says_that_code_was_not_as_committed(tmp_path):
    run = make_run(tmp_path / "a", {100: 1.0})
    run.update(git_commit="a" * 40 + "+changes")
    text = page(collect([tmp_path]))
    assert f"<td>{'a' * 10}+changes</td>" in text and "a" * 11 not in text


def test_the_same_runs_give_the_same_page(tmp_path):
    three_seeds(tmp_path)
    assert page(collect([tmp_path])) == page(collect([tmp_path]))


# Pictures.


def test_labels_are_moved_apart_and_stay_in_order():
    placed = curves.apart([0.5, 0.51, 0.52, 0.99, 1.0], [0.1] * 5)
    assert np.all(np.diff(placed) >= 0.1 - 1e-9)
    assert placed[0] == 0.5  # the first stays where its line ends
    assert placed[-1] <= 1.0


def test_names_break_after_commas_first():
    assert curves.wrap("876 mpc true, horizon 3") == ["876 mpc true,", "horizon 3"]
    assert curves.wrap("848 tdmpc2_small") == ["848 tdmpc2_small"]
    assert len(curves.wrap("a" * 500)) == 3


def test_a_dollar_sign_in_a_name_is_no_formula(tmp_path):
    make_run(tmp_path / "a", {100: 1.0}, task="gym:$\\frac{1}$", config={"agent": {"x": "$\\y$"}})
    make_run(tmp_path / "b", {100: 1.0}, task="gym:$\\frac{1}$", config={"agent": {"x": "$_$"}})
    drawn = curves.svg(curves.learning_curves(collect([tmp_path])))
    assert "gym:$\\frac{1}$" in drawn
    assert "x $\\y$" in drawn


def test_frames_are_short():
    assert [curves.frames_text(x) for x in (0, 500, 25_000, 1_500_000)] == [
        "0",
        "500",
        "25k",
        "1.5M",
    ]


# The command.


def test_report_writes_html_or_png_over_an_older_one(tmp_path, capsys, monkeypatch):
    three_seeds(tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    assert main(["report", "runs"]) == 0
    assert capsys.readouterr().out == "Written: report.html (3 runs)\n"
    Path("report.html").write_text("old")
    assert main(["report", "runs/seed1", "runs/seed2"]) == 0
    assert Path("report.html").read_text().startswith("<!doctype html>")
    assert main(["report", "runs", "--out", "curves.png"]) == 0
    assert Path("curves.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in Path().iterdir()) == ["curves.png", "report.html", "runs"]


@pytest.mark.parametrize(
    ("tokens", "code", "sentence"),
    [
        ([], 2, "report takes one or more runs, or folders of runs."),
        (["run", "--out", "x.pdf"], 2, "out is x.pdf, but must end in .html or .png."),
        (["run", "--out", "nowhere/x.html"], 1, "There is no folder nowhere to write x.html to."),
        (["gone"], 2, "There is no run directory gone."),
    ],
)
def test_a_wrong_report_is_one_sentence(tmp_path, monkeypatch, capsys, tokens, code, sentence):
    make_run(tmp_path / "run", {100: 1.0})
    monkeypatch.chdir(tmp_path)
    assert main(["report", *tokens]) == code
    assert capsys.readouterr().err == f"{sentence}\n"


def test_without_matplotlib_a_sentence_says_what_to_install(tmp_path, monkeypatch, capsys):
    make_run(tmp_path / "run", {100: 1.0})
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "x.html")]) == 1
    assert install_extra("report") in capsys.readouterr().err


def test_report_and_compare_import_no_torch(tmp_path):
    three_seeds(tmp_path / "runs")
    run, out = str(tmp_path / "runs"), str(tmp_path / "x.html")
    program = f"""
import json, sys
from forethought.cli import main
codes = [main(["report", {run!r}, "--out", {out!r}]), main(["compare", {run!r}, {run!r}])]
print(json.dumps([codes, "torch" in sys.modules]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    assert json.loads(done.stdout.splitlines()[-1]) == [[0, 0], False]
