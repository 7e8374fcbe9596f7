"""Runs of a benchmark, several at a time: what ends one of them ends them all."""

import argparse
import importlib
import re
import signal
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest

from forethought import presets
from forethought.config import to_dict
from forethought.tracking import RunDirectory

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import runs

    return runs.at_once


def test_runs_are_given_in_the_order_of_their_work(at_once):
    both_there = threading.Barrier(2, timeout=10)  # passes only if two run at the same time

    def learn(number):
        both_there.wait()
        return number * 10

    assert at_once(2, learn, [1, 2, 3, 4]) == [10, 20, 30, 40]


def test_no_run_begins_after_one_was_stopped(at_once):
    begun = []
    stopped_together = threading.Barrier(2, timeout=10)

    def learn(number):
        begun.append(number)
        stopped_together.wait()
        raise SystemExit(f"run {number} was stopped")

    with pytest.raises(SystemExit, match="run 1 was stopped"):
        at_once(2, learn, [1, 2, 3, 4, 5])
    assert sorted(begun) == [1, 2]


@pytest.mark.parametrize(("data", "unit"), [(None, "env_frames"), ("recorded", "updates")])
def test_a_curve_goes_over_frames_and_offline_over_updates(monkeypatch, tmp_path, data, unit):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import runs

    (tmp_path / "eval.csv").write_text(
        "agent_steps,env_frames,updates,episodes,wall_s,return_mean\n0,0,100,0,1.0,7.5\n"
    )
    about = types.SimpleNamespace(config=lambda: {"offline": {"data": data}})
    monkeypatch.setattr(runs.RunDirectory, "open", lambda run: about)
    assert runs.curve(tmp_path) == [[{"env_frames": 0.0, "updates": 100.0}[unit], 7.5]]


def parsed(words):
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    return parser, parser.parse_args(words)


@pytest.mark.parametrize(
    ("words", "trial"), [([], False), (["--jobs", "1"], False), (["--seeds", "1"], True)]
)
def test_a_trial_has_a_folder_of_its_own(monkeypatch, tmp_path, words, trial):
    """So a trial's runs are never taken for the benchmark's, which resumes what it finds."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import runs

    parser, options = parsed(["--out", str(tmp_path), *words])
    assert runs.is_trial(parser, options) == trial
    assert (options.out.parent == tmp_path) == trial and options.out.is_dir()


def test_a_run_of_another_configuration_is_not_taken_for_the_benchmarks(monkeypatch, tmp_path):
    """Neither one of other words, nor one whose preset has changed since."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import runs

    asked = []

    def forethought(*words, log):
        asked.append(words[0])
        if words[0] == "train":
            config, out = runs.training_asked(list(words[1:]))
            RunDirectory.create(out, to_dict(config), config.agent_name, config.task, config.seed)

    monkeypatch.setattr(runs, "forethought", forethought)
    words = ("sac", "gym:Pendulum-v1", "--preset", "pendulum", "--seed")
    for _ in range(2):
        runs.train_or_resume(tmp_path / "run", *words, "1")
    assert asked == ["train", "resume"]
    with pytest.raises(SystemExit, match=r"run is not what .* \(seed: 1 there, 2 here\): move it"):
        runs.train_or_resume(tmp_path / "run", *words, "2")
    plain = presets.layers
    monkeypatch.setattr(
        presets, "layers", lambda *given: [*plain(*given), {"agent": {"batch_size": 7}}]
    )
    with pytest.raises(SystemExit, match=r"agent.batch_size: \d+ there, 7 here"):
        runs.train_or_resume(tmp_path / "run", *words, "1")
    assert asked == ["train", "resume"]


def test_data_is_the_same_from_wherever_it_is_named(monkeypatch, tmp_path):
    """A run keeps whole paths of its data, so the benchmark's own words must become whole too."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import runs

    monkeypatch.chdir(tmp_path)
    task = "multi:dmc:cartpole-swingup,dmc:cup-catch"
    kept = runs.configuration("tdmpc2", task, "--offline.data", "data/a,data/b")
    assert kept["offline"]["data"] == f"{tmp_path}/data/a,{tmp_path}/data/b"


def test_a_run_that_other_code_resumed_names_both_commits(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import runs

    run = RunDirectory.create(tmp_path / "run", {}, "sac", "gym:Pendulum-v1", 1)
    run.update(git_commit="a" * 40)
    run.event("resumed", git_commit="a" * 40)
    assert runs.commit_of(run.path) == "a" * 40
    run.event("resumed", git_commit="b" * 40 + "+changes")
    assert runs.commit_of(run.path) == f"{'a' * 40}, {'b' * 40}+changes"


def test_a_result_names_the_code_that_its_benchmark_began_with(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import results

    git = ("git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")

    def commit(name, text):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        for words in (("add", "."), ("commit", "-q", "-m", name)):
            subprocess.run([*git, *words], cwd=tmp_path, check=True)

    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    commit("src/code.py", "1")
    monkeypatch.setattr(results, "ROOT", tmp_path)
    begun = results.source()
    assert len(begun) == 40
    monkeypatch.setattr(results, "BEGUN_WITH", begun)
    commit("docs/page.md", "a page is no code")
    assert results.measured_commit() == begun
    (tmp_path / "src/code.py").write_text("2")
    assert results.measured_commit() == f"{begun}+changes"
    commit("src/code.py", "2")
    assert results.measured_commit() == f"{begun}+changes"
    assert f"from {begun} to" in capsys.readouterr().err


def test_every_benchmark_knows_its_trials():
    """What is asked otherwise than usual is never published in place of the result."""
    for script in BENCHMARKS.glob("*.py"):
        text = script.read_text(encoding="utf-8")
        if "carry_out(main)" in text:
            asks = re.search(r"trial = (is_trial|bool\(not_its_own)\(parser, options", text)
            assert asks and re.search(r"(if|elif) not trial", text), script.name


def test_a_picture_has_intervals_and_the_published_point(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(BENCHMARKS)
    from matplotlib.axes import Axes

    from dqn_learning import draw

    drawn = []
    for name in ("errorbar", "plot"):
        own = getattr(Axes, name)
        monkeypatch.setattr(
            Axes, name, lambda axes, *a, own=own, **k: (drawn.append((a, k)), own(axes, *a, **k))[1]
        )
    run = {"curve": [[0.0, 1.0], [10.0, 3.0]]}
    found = {"runs": [run, run], "return_mean": 3.0, "interval_over_seeds": [1.0, 5.0]}
    point = {"env_frames": 12, "return_mean": 2.5, "label": "published"}
    draw({"plain": found | {"random_return_mean": 0.5}}, "a task", tmp_path / "x.png", point)
    assert (tmp_path / "x.png").stat().st_size > 1000
    assert any(k.get("yerr") == [[2.0], [2.0]] for _, k in drawn)
    assert any(a[:2] == ([12], [2.5]) for a, _ in drawn)


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_ends_in_a_sentence(times):
    """Signals as a terminal sends them, to a process whose run takes a while to end."""
    program = (
        "import sys, time\n"
        f"sys.path.insert(0, {str(BENCHMARKS)!r})\n"
        "import runs\n"
        "def learn(number):\n"
        "    print('begun', flush=True)\n"
        "    time.sleep(1.5)\n"
        "runs.at_once(1, learn, [1, 2])\n"
    )
    command = [sys.executable, "-c", program]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        said = process.stdout.readline()
        if times == 2:  # while the run saves
            process.send_signal(signal.SIGINT)
        told, wrong = process.communicate(timeout=30)
    assert said == "Interrupted. The same command goes on where this one stops.\n"
    assert (process.returncode, told, wrong) == (130, "", "")


# What learning_kinds makes of its runs


@pytest.fixture
def kinds(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import learning_kinds

    return learning_kinds


def a_run(score, chance, minutes=5.0, **more):
    return {
        "return_mean": score,
        "random_returns": chance,
        "minutes_of_training": minutes,
        **more,
    }


def test_a_kind_is_judged_by_intervals_and_not_by_means(kinds):
    """Student's t for three seeds: 12 -+ 4.303 * 2 / sqrt(3) = 7.03 to 16.97."""
    runs = [a_run(10.0, [1.0, 3.0]), a_run(12.0, [2.0, 2.0], 9.0), a_run(14.0, [2.0, 2.0])]
    found = kinds.summary(runs, 12.5)
    assert found["return_mean"] == 12.0 and found["random_return_mean"] == 2.0
    assert found["interval_over_seeds"] == pytest.approx([7.031, 16.969], abs=1e-3)
    assert found["above_random_play"] and not found["aim_reached"]
    assert found["most_minutes"] == 9.0
    scattered = [a_run(0.0, [1.0, 3.0]), a_run(12.0, [2.0, 2.0]), a_run(24.0, [2.0, 2.0])]
    assert not kinds.summary(scattered, 12.0)["above_random_play"]
    assert kinds.summary(scattered, 12.0)["aim_reached"]
    assert kinds.summary(runs[:1], None)["above_random_play"] is None


def test_each_task_of_recorded_data_is_measured_against_who_recorded_it(kinds):
    """Aims: 80 percent of 1000 and of 100."""
    outcomes = [
        [a_run(score, [0.0, 1.0], recorded=1000.0), a_run(score / 10, [0.0, 1.0], recorded=100.0)]
        for score in (790.0, 800.0, 810.0)
    ]
    found = kinds.summary_offline(outcomes)
    assert [found[task]["aim"] for task in kinds.OFFLINE_TASKS] == [800.0, 80.0]
    assert [found[task]["return_mean"] for task in kinds.OFFLINE_TASKS] == [800.0, 80.0]
    assert all(found[task]["aim_reached"] for task in kinds.OFFLINE_TASKS)
    outcomes[0][1]["return_mean"] = 70.0
    found = kinds.summary_offline(outcomes)
    assert [found[task]["aim_reached"] for task in kinds.OFFLINE_TASKS] == [True, False]


@pytest.mark.parametrize(("words", "written"), [([], 1), (["--seeds", "1"], 0)])
def test_a_trial_of_kinds_publishes_nothing(kinds, monkeypatch, tmp_path, words, written):
    made = []
    monkeypatch.setattr(sys, "argv", ["x", "--kinds", "cartpole", "--out", str(tmp_path), *words])
    monkeypatch.setattr(
        kinds, "at_once", lambda jobs, learn, work: [a_run(10.0 + s, [1.0, 2.0]) for s, _ in work]
    )
    monkeypatch.setattr(kinds, "write", lambda name, result: made.append((name, result)))
    kinds.main()
    assert [name for name, _ in made] == ["learning_cartpole"] * written


@pytest.mark.parametrize(("words", "written"), [([], 1), (["--steps", "500"], 0)])
def test_a_trial_of_the_learning_runs_publishes_nothing(monkeypatch, tmp_path, words, written):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import learning

    made = []
    run = {"return_mean": 1.0, "random_return_mean": 0.5}
    monkeypatch.setattr(sys, "argv", ["x", "--out", str(tmp_path), *words])
    monkeypatch.setattr(learning, "at_once", lambda jobs, learn, work: [run for _ in work])
    monkeypatch.setattr(learning, "write", lambda name, result: made.append(name))
    learning.main()
    assert made == ["learning_tdmpc2_small"] * written


@pytest.mark.parametrize(
    ("words", "missing", "written"), [([], 0, 1), (["--steps", "500"], 0, 0), (["--report"], 3, 0)]
)
def test_a_trial_or_a_part_of_the_ablation_publishes_nothing(
    monkeypatch, tmp_path, words, missing, written
):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import multi_gamma_ablation as ablation

    def at_once(jobs, learn, work):
        numbers = {"auc": 5.0, "final_return": 7.0, "peak_memory_mb": 300.0, "auxiliary": {}}
        found = [
            {"task": task, "variant": variant, "seed": seed, **numbers}
            for task, variant, seed in work
        ]
        return found[missing:] + [None] * missing

    made = []
    cost = {"overhead_percent": 1.0, "parameters_percent": 1.0}
    monkeypatch.setattr(sys, "argv", ["x", "--out", str(tmp_path), *words])
    monkeypatch.setattr(ablation, "at_once", at_once)
    monkeypatch.setattr(
        ablation, "auxiliary_overhead", lambda *given: dict.fromkeys(ablation.VARIANTS, cost)
    )
    monkeypatch.setattr(ablation, "write", lambda name, result: made.append(result))
    monkeypatch.setattr(ablation, "draw", lambda result, path: made.append(path))
    ablation.main()
    assert len(made) == 2 * written


def test_the_ablation_keeps_a_final_evaluation_with_its_run(monkeypatch, tmp_path):
    """A run that is made anew is evaluated anew, and one of another length is refused."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import multi_gamma_ablation as ablation

    scores = iter([1.0, 900.0, 5.0])

    def evaluated(run, episodes, *flags):
        return {"returns": [next(scores)] * episodes, "checkpoint_step": 500}

    monkeypatch.setattr(ablation, "evaluated", evaluated)
    run = tmp_path / "run"
    run.mkdir()
    for _ in range(2):  # the second time it is only read
        assert ablation.final_evaluation(run, 2, 500)["returns"] == [1.0, 1.0]
    run.rename(tmp_path / "away")
    run.mkdir()
    assert ablation.final_evaluation(run, 2, 500)["returns"] == [900.0, 900.0]
    with pytest.raises(SystemExit, match="ends at 500 steps, but must at 1000"):
        ablation.final_evaluation(run, 2, 1000)


def test_stable_baselines3_plays_pong_in_worker_processes():
    """Which know the game too; its side of the benchmark ends when nobody asks any more."""
    pytest.importorskip("stable_baselines3")
    flags = ["--side=sb3", "--envs=2", "--workers", "--threads=1", "--chunk=8"]
    script = "import dqn_speed, sys; dqn_speed.FIRST = 16; "
    script += f"sys.argv[1:] = {flags}; dqn_speed.main()"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=BENCHMARKS,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0.0"]  # the first chunk only warms up


@pytest.mark.parametrize("name", sorted(path.stem for path in BENCHMARKS.glob("*.py")))
def test_every_benchmark_can_be_imported_and_says_what_it_does(monkeypatch, name):
    monkeypatch.syspath_prepend(BENCHMARKS)
    module = importlib.import_module(name)
    assert len(module.__doc__.splitlines()[0]) > 20


@pytest.mark.parametrize("agent", ["sac", "td3"])
def test_sb3_is_not_compared_where_it_cannot_have_our_learning_rates(monkeypatch, agent):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import sac_td3_learning

    def own(value):
        return lambda *given: [{"agent": {"lr": {"actor": value, "critic": 1e-3}}}]

    task = "gym:Pendulum-v1"
    assert sac_td3_learning.settings(agent, task, 100).agent.lr.actor > 0  # as the presets are
    monkeypatch.setattr(sac_td3_learning.presets, "layers", own(2e-3))
    with pytest.raises(SystemExit, match=r"pendulum has the learning rates .*cannot be compared"):
        sac_td3_learning.settings(agent, task, 100)


def test_sb3_and_ours_have_the_same_loss_of_the_temperature(monkeypatch):
    """Stable-Baselines3 multiplies by log alpha; the presets by alpha, as the paper does."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import sac_td3_learning

    asked = []
    monkeypatch.setattr(
        sac_td3_learning, "train_or_resume", lambda run, *words: asked.extend(words)
    )
    found = {"return_mean": 1.0, "returns": [1.0], "seeds": [1], "random_return_mean": 0.0}
    monkeypatch.setattr(sac_td3_learning, "evaluated", lambda *given: found)
    monkeypatch.setattr(sac_td3_learning, "commit_of", lambda run: "")
    monkeypatch.setattr(sac_td3_learning, "curve", lambda run: [])
    options = types.SimpleNamespace(steps=100, out=Path(), episodes=1)
    sac_td3_learning.ours("sac", "gym:Pendulum-v1", 1, options)
    assert asked[asked.index("--agent.entropy.loss") + 1] == "log_alpha"
    compared = sac_td3_learning.settings("sac", "gym:Pendulum-v1", 100)
    assert compared.agent.entropy.loss == "log_alpha" and compared.agent.entropy.lr == 1e-3


def test_ours_beside_sb3_is_judged_by_its_interval_and_by_its_least_seed(monkeypatch):
    """Student's t for three seeds: 12 - 4.303 * 2 / sqrt(3) = 7.03."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import sac_td3_learning as script

    other = script.joined([{"return_mean": score} for score in (10.0, 12.0, 14.0)])
    found = []
    for ours in (7.0, 8.0, 10.0):
        mine = script.joined([{"return_mean": ours}] * 3)
        found.append(list(script.verdict({"ours": mine, "sb3": other}).values()))
    assert found == [[False, False], [True, False], [True, True]]
