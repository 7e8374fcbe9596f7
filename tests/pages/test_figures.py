"""Figures of learning, resumes and speed on the pages are those of docs/results."""

import re
from pathlib import Path

import pytest

from tests.pages.figures import ROOT, commit_of, mean, result, row, span, three_seeds

TDMPC2 = ROOT / "docs" / "agents" / "tdmpc2.md"
LEARNING = result("learning_tdmpc2_small")
KINDS = ("cartpole", "lander", "breakout", "pixels")
"""Of benchmarks/learning_kinds.py; the kind `offline` has a table of its own."""


PIXELS = ("pixels", "small_pixels")


def rows_of_tasks(page: Path) -> dict[str, list[str]]:
    """By task, the other cells of every row that begins with one and holds numbers only."""
    found = {}
    for line in page.read_text(encoding="utf-8").splitlines():
        task, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        if re.fullmatch(r"`dmc:[\w-]+`", task) and all(re.fullmatch(r"[\d.]+", c) for c in cells):
            assert task not in found, f"{task} stands twice in {page.name}"
            found[task.strip("`")] = cells
    return found


FILES = sorted(path.stem for path in (ROOT / "docs" / "results").glob("*.json"))


@pytest.mark.parametrize("name", FILES)
def test_every_result_is_of_a_commit_as_it_is(name):
    found = result(name)
    commit = found.get("commit") or found["git_commit"]
    assert re.fullmatch(r"[0-9a-f]{40}", commit)


def test_the_means_in_the_file_are_those_of_its_episodes():
    for task in LEARNING["tasks"].values():
        for run in task["runs"]:
            assert run["return_mean"] == pytest.approx(mean(run["returns"]))
        for key in ("return_mean", "random_return_mean"):
            assert task[key] == pytest.approx(mean([run[key] for run in task["runs"]]))


def test_the_readme_has_the_means_of_the_learning_runs():
    wanted = {
        name: [f"{task[key]:.1f}" for key in ("return_mean", "published", "random_return_mean")]
        for name, task in LEARNING["tasks"].items()
    }
    assert rows_of_tasks(ROOT / "README.md") == wanted


def test_the_page_of_tdmpc2_has_every_seed_of_the_learning_runs():
    wanted = {}
    for name, task in LEARNING["tasks"].items():
        assert [run["seed"] for run in task["runs"]] == [1, 2, 3]
        keys = ("return_mean", "random_return_mean", "published")
        values = [run["return_mean"] for run in task["runs"]] + [task[key] for key in keys]
        wanted[name] = [f"{value:.1f}" for value in values]
    assert rows_of_tasks(TDMPC2) == wanted
    (made,) = {commit_of(task["runs"]) for task in LEARNING["tasks"].values()}
    told = f"commit {made}, {LEARNING['date_utc'][:10]}"
    assert told in TDMPC2.read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_of_tdmpc2_has_every_seed_of_every_kind_of_task(kind):
    """| task | its seeds | their mean | its interval | random play's interval | the aim |"""
    found = result(f"learning_{kind}")
    seeds = three_seeds(found["runs"], episodes=20)
    spans = [span(found[key]) for key in ("interval_over_seeds", "random_interval")]
    text = TDMPC2.read_text(encoding="utf-8")
    told = row(f"`{found['task']}`", *seeds, f"{found['return_mean']:.1f}", *spans, found["aim"])
    assert told in text
    assert f"at most {found['most_minutes']:.1f} minutes" in text
    assert f"commit {commit_of(found['runs'])}" in text


def test_the_page_of_tdmpc2_has_every_seed_of_two_tasks_from_recorded_data():
    """| task | its seeds | their mean | its interval | random play's | who recorded | the aim |"""
    whole, text = result("learning_offline"), TDMPC2.read_text(encoding="utf-8")
    assert list(whole["tasks"]) == ["dmc:cartpole-swingup", "dmc:cup-catch"]
    for task, found in whole["tasks"].items():
        seeds = three_seeds(found["runs"], episodes=20)
        recorded = mean([run["recorded"] for run in found["runs"]])
        assert found["aim"] == pytest.approx(0.8 * recorded)
        told = row(
            f"both: `{task}`",
            *seeds,
            f"{found['return_mean']:.1f}",
            *(span(found[key]) for key in ("interval_over_seeds", "random_interval")),
            f"{recorded:.1f}",
            f"{found['aim']:.1f}",
        )
        assert told in text
    minutes = max(found["most_minutes"] for found in whole["tasks"].values())
    assert f"at most {minutes:.1f} minutes" in text
    (made,) = {commit_of(found["runs"]) for found in whole["tasks"].values()}
    assert f"commit {made}" in text


def test_the_page_of_tdmpc2_has_the_ablation_of_auxiliary_discounts():
    """| task | variant | area under the curve | its gain | final return | seed std of the area |"""
    whole, text = result("multi_gamma_ablation"), TDMPC2.read_text(encoding="utf-8")
    assert whole["runs_missing"] == 0 and len(whole["runs"]) == 30
    assert whole["verdict"]["sentence"] in text
    assert f"commit {commit_of(whole['runs'])}" in text
    for task, entries in whole["tasks"].items():
        for variant, entry in entries.items():
            gain = entry.get("auc_gain_percent")
            told = "" if gain is None else "{mean:+.1f} ({low:+.1f} to {high:+.1f})".format(**gain)
            cells = row(
                f"`{task}`",
                variant,
                f"{entry['auc']['mean']:.1f}",
                told,
                f"{entry['final_return']['mean']:.1f}",
                f"{entry['auc']['seed_std']:.1f}",
            )
            assert cells in text
    for variant, found in whole["verdict"]["variants"].items():
        costs = found["overhead"]
        parts = (f"{costs[f'{name}_percent']:.1f}" for name in ("time", "parameters", "memory"))
        assert row(variant, *parts) in text
    others = {
        (task, variant): entry
        for task, entries in whole["tasks"].items()
        for variant, entry in entries.items()
        if variant != "a0"
    }
    below = sum(entry["auc_gain_percent"]["high"] < 0 for entry in others.values())
    assert f"area's gain lie wholly below 0 in {below} of {len(others)} cases" in text
    *held, last = (
        f"{variant} on `{task}`"
        for (task, variant), entry in others.items()
        if entry["final_return_minus_a0"]["high"] >= 0
    )
    told = f"wholly below 0 in {len(others) - len(held) - 1} of {len(others)} cases (all but "
    assert f"{told}{', '.join(held)} and {last})" in text
    best = {
        task: max(entries, key=lambda variant, of=entries: of[variant]["final_return"]["mean"])
        for task, entries in whole["tasks"].items()
    }
    assert set(best.values()) == {"a0"}, "the page says so"
    ends: dict[tuple[str, ...], list[float]] = {}
    for run in whole["runs"]:
        for gamma, points in (run["auxiliary"] or {}).items():
            _, _, entropy = points[-1]
            ends.setdefault((run["task"], run["variant"], gamma), []).append(entropy)
    assert f"to at most {max(mean(end) for end in ends.values()):.2f}." in text
    of_a0 = (f"{entries['a0']['final_return']['mean']:.1f}" for entries in whole["tasks"].values())
    assert f"the baseline ends highest ({' and '.join(of_a0)})" in text


def test_the_span_of_scores_in_the_readme_is_that_of_the_seeds():
    runs = LEARNING["tasks"]["dmc:cartpole-swingup"]["runs"]
    random = [run["random_return_mean"] for run in runs]
    agent = [run["return_mean"] for run in runs]
    told = (
        f"Random play reaches {min(random):.0f} to {max(random):.0f}, "
        f"the agent {min(agent):.0f} to {max(agent):.0f} at the end"
    )
    assert told in (ROOT / "README.md").read_text(encoding="utf-8")


def test_readme_and_quickstart_tell_what_the_quickstart_reached():
    """Returns, random play, minutes, and the lines that it ends with."""
    found = result("quickstart")
    runs = found["runs"]
    assert [run["seed"] for run in runs] == [1, 2, 3]
    assert all(run["return_mean"] == pytest.approx(mean(run["returns"])) for run in runs)
    first, second, third = (f"{run['return_mean']:.0f}" for run in runs)
    minutes = [run["minutes_of_training"] for run in runs]
    random = [run["random_return_mean"] for run in runs]
    scores = f"for seeds 1, 2 and 3, which reached {first}, {second} and {third}"
    lasted = f"{min(minutes):.1f} to {max(minutes):.1f} minutes"
    chance = f"{min(random):.0f} to {max(random):.0f}"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    for text in (readme, page):
        assert [words for words in (scores, lasted, chance) if words not in text] == []
    ends = [
        f"Trained in {minutes[0]:.1f} minutes.",
        f"{runs[0]['return_mean']:9.1f}   (from {min(runs[0]['returns']):.1f} to "
        f"{max(runs[0]['returns']):.1f})",
        f"random play {random[0]:7.1f}",
    ]
    assert [words for words in ends if words not in readme] == []


def test_the_readme_says_what_stable_baselines3_has_against_kills_and_nan():
    """Its optional means too: a comparison that left them out would be unfair."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    told = {row["fault"]: row["sb3"] for row in result("faults_beside_sb3")["rows"]}
    saved = told["kill -9 of training that saves at every step"]
    assert "newest unreadable 10 of 20, nothing usable 0 of 20" in saved
    assert "`CheckpointCallback`, which keeps every file: the newest 10 times, all of them" in text
    assert "VecCheckNan" in told["one reward is NaN"] and "optional `VecCheckNan`" in text


def test_the_readme_says_of_a_resume_what_was_measured():
    rows = result("faults_beside_sb3")["rows"]
    (row,) = [row for row in rows if row["fault"].startswith("500 steps")]
    difference = row["measured"]["sb3"]["largest_difference"]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "500 + 500 steps against 1000" in text
    assert f"differs by up to {difference:.2f} in a parameter" in text


def test_the_page_of_datasets_tells_the_measured_speed():
    found = result("offline_speed")
    mapped = found["summary"]["episodes mapped"]
    text = (ROOT / "docs" / "datasets.md").read_text(encoding="utf-8")
    told = [
        f"{found['speed_of_memory']['episodes']:.1%} of the speed",
        f"drawn per transition: {found['speed_of_memory']['transitions']:.1%}",
        f"{mapped['sample_ms']['median']:.2f} ms of {mapped['update_ms']['median']:.1f} ms",
        f"took {found['summary']['cold']['sample_ms']['median']:.1f} ms to draw",
        f"Measured {found['date_utc'][:10]}",
    ]
    assert [words for words in told if words not in text] == []
    assert found["rows"] >= 10_000_000


def test_the_page_of_tdmpc2_tells_the_measured_speed():
    """Of plans and updates, the small preset, auxiliary discounts, discrete actions and pixels."""
    speed, pixels, discrete = map(result, ("tdmpc2_speed", "pixel_speed", "categorical_speed"))
    text = TDMPC2.read_text(encoding="utf-8")
    told = [f"{speed['date_utc'][:10]}, commit {speed['commit'][:7]}, medians of 30 rounds"]
    for size, words in (("5", " the limit"), ("1", "")):
        found = speed["sizes"][size]["summary"]
        plan, update = (
            f"{found[work]['ratio_median']:.2f} x{words} ({found[work]['ms_median']:.0f} ms)"
            for work in ("plan", "update")
        )
        told.append(f"| size {size} | {plan} | {update} |")
    told.append(f"`tdmpc2_small` took {speed['small']['ms_median']:.1f} ms")
    added = [
        speed["auxiliary"][size][count]["overhead_percent"]
        for size in ("size_5", "small")
        for count in ("two", "five")
    ]
    told.append("add {:.1f} percent (two) and {:.1f} percent (five)".format(*added))
    told.append("{:.1f} and {:.1f} percent in `tdmpc2_small`".format(*added[2:]))
    full, small = (pixels["presets"][f"tdmpc2_{name}"]["summary"] for name in PIXELS)
    plan, update = (f"{full[work]['ratio_median']:.2f} ({work})" for work in ("plan", "update"))
    told.append(f"`tdmpc2_pixels` {plan} and {update} times")
    told.append(f"{small['decision_with_update']['ms_median']:.1f} ms for a decision with its")
    of = {
        f"{size} {kind}": discrete["sizes"][size]["summary"][f"{kind}_441"]["ratio_median"]
        for size in "51"
        for kind in ("discrete", "commands")
    }
    told.append(f"it took {of['5 discrete']:.2f} times as long at size 5")
    told.append(f"{of['5 commands']:.2f} for commands of five choices with a mask) and ")
    told.append(f"{of['1 discrete']:.2f} ({of['1 commands']:.2f}) at size 1")
    assert [words for words in told if words not in text] == []
