"""Do auxiliary discounts help? Trains multi_gamma_a0 to a4 with paired seeds and says so.

    python benchmarks/multi_gamma_ablation.py --out FOLDER [--tasks ...] [--seeds 1 2 3] [--jobs 2]

Runs of one seed share initial weights, random play and evaluation episodes, so variants are
compared with the baseline a0 seed by seed. The success test of the plan: 3 percent more area under
the learning curve than a0 on two tasks, at no more than 15 percent more time per update, parameters
and memory. It is judged only where every run is there. Runs that
FOLDER already holds are resumed or, where complete, only read: a killed ablation goes on where it
stopped, and with --report what is there is reported without training.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forethought import presets
from forethought.files import read_json, write_json
from forethought.report.statistics import area_under_curve
from forethought.tracking import RunDirectory, read_rows
from results import ROOT, carry_out, write
from runs import (
    at_once,
    commit_of,
    curve,
    evaluated,
    interval_over_seeds,
    is_trial,
    require_same,
    train_or_resume,
)
from tdmpc2_speed import auxiliary_overhead, small

TASKS = ("dmc:cartpole-swingup", "dmc:reacher-easy")
VARIANTS = ("a0", "a1", "a2", "a3", "a4")
LEAST_GAIN_PERCENT, MOST_OVERHEAD_PERCENT, LEAST_TASKS = 3.0, 15.0, 2


# ---- runs ----


def learn(task: str, variant: str, seed: int, options: argparse.Namespace) -> dict[str, Any] | None:
    """One run and what the report needs of it; None where it is to be reported but is not done."""
    run = options.out / f"{task.replace(':', '-')}-{variant}-seed{seed}"
    steps = ("--steps", str(options.steps))
    training = (
        "tdmpc2", task, "--preset", "tdmpc2_small", "--preset", f"multi_gamma_{variant}",
        "--seed", str(seed), *steps, "--eval.every_agent_steps", str(options.eval_every),
        "--eval.episodes", str(options.eval_episodes),
    )  # fmt: skip
    if not options.report:
        train_or_resume(run, *training, resuming=steps)
    elif not (run / "run.json").exists() or RunDirectory.open(run).run_json["status"] != "done":
        return None
    else:
        require_same(run, *training)
    return facts_of(run, options) | {"task": task, "variant": variant, "seed": seed}


def facts_of(run: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Curve, final return, auxiliary errors over time, cost of a finished run."""
    directory = RunDirectory.open(run)
    final = final_evaluation(run, options.episodes, options.steps)
    about = directory.run_json
    points = [[0.0, about["random_score"]], *curve(run)]
    rows, _ = read_rows(directory.train_csv)
    started = next(event for event in directory.events() if event["kind"] == "started")
    print(f"{run.name}: final {final['return_mean']:.1f}", flush=True)
    return {
        "curve": points,
        "auc": area_under_curve(*zip(*points, strict=True)),
        "final_return": final["return_mean"],
        "final_returns": final["returns"],
        "auxiliary": auxiliary_over_time(run),
        "parameters": started["parameters"],
        "peak_memory_mb": float(rows[-1]["peak_memory_mb"]),
        "ms_per_agent_step_median": statistics.median(
            float(row["ms_per_agent_step"]) for row in rows if row["ms_per_agent_step"]
        ),
        "commit": commit_of(run),
    }


def final_evaluation(run: Path, episodes: int, steps: int) -> dict[str, Any]:
    """Of the last checkpoint, once: kept in the run's own folder, with which it goes."""
    kept = run / "final_evaluation.json"
    if kept.exists():
        known: dict[str, Any] = read_json(kept)
        if (len(known["returns"]), known["checkpoint_step"]) == (episodes, steps):
            return known
    found = evaluated(run, episodes, "--checkpoint", "latest")
    if found["checkpoint_step"] != steps:
        raise SystemExit(f"{run} ends at {found['checkpoint_step']} steps, but must at {steps}.")
    write_json(kept, found)
    return found


def auxiliary_over_time(run: Path) -> dict[str, list[list[float]]]:
    """[agent_steps, MAE, CE] at each evaluation, by discount."""
    found: dict[str, list[list[float]]] = {}
    snapshots = [read_json(path) for path in (run / "snapshots").glob("multi_gamma-*.json")]
    for data in sorted(snapshots, key=lambda data: data["agent_steps"]):
        for gamma, values in data["per_gamma"].items():
            row = [data["agent_steps"], values["mae"], values["ce"]]
            found.setdefault(gamma, []).append(row)
    return found


# ---- arithmetic ----


def paired(values: Sequence[float]) -> dict[str, Any]:
    """Mean of differences over seeds, and its 95 percent interval."""
    low, high = interval_over_seeds(values) or (None, None)
    return {"mean": statistics.mean(values), "low": low, "high": high, "each": list(values)}


def compare(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Per task and variant: the numbers over seeds, and the paired differences from a0."""
    report: dict[str, Any] = {}
    for task in dict.fromkeys(run["task"] for run in runs):
        of_task = [run for run in runs if run["task"] == task]
        base = {run["seed"]: run for run in of_task if run["variant"] == "a0"}
        report[task] = {}
        for variant in sorted({run["variant"] for run in of_task}):
            own = sorted((r for r in of_task if r["variant"] == variant), key=lambda r: r["seed"])
            both = [(run, base[run["seed"]]) for run in own if run["seed"] in base]
            entry: dict[str, Any] = {"seeds": [run["seed"] for run in own]}
            entry["peak_memory_mb"] = statistics.mean(run["peak_memory_mb"] for run in own)
            for name in ("auc", "final_return"):
                values = [run[name] for run in own]
                entry[name] = {"mean": statistics.mean(values), "each": values}
                entry[name]["seed_std"] = statistics.stdev(values) if len(values) > 1 else None
            if both and variant != "a0":
                entry["auc_minus_a0"] = paired([r["auc"] - b["auc"] for r, b in both])
                # Relative to the mean of a0: one seed that learned nothing must not decide it.
                scale = 100 / statistics.mean(b["auc"] for _, b in both)
                gains = [scale * (r["auc"] - b["auc"]) for r, b in both]
                entry["auc_gain_percent"] = paired(gains)
                finals = [r["final_return"] - b["final_return"] for r, b in both]
                entry["final_return_minus_a0"] = paired(finals)
                memory = [r["peak_memory_mb"] - b["peak_memory_mb"] for r, b in both]
                entry["peak_memory_mb_minus_a0"] = paired(memory)
            entry["auxiliary_mean"] = mean_over_seeds([run["auxiliary"] for run in own])
            report[task][variant] = entry
    return report


def mean_over_seeds(found: Sequence[Mapping[str, list[list[float]]]]) -> dict[str, Any]:
    """[agent_steps, MAE, CE] over the seeds, where all have a snapshot."""
    shared = set.intersection(*(set(one) for one in found)) if found else set()
    result = {}
    for gamma in sorted(shared):
        by_step = [{row[0]: row[1:] for row in one[gamma]} for one in found]
        steps = sorted(set.intersection(*(set(rows) for rows in by_step)))
        result[gamma] = [
            [step, *(statistics.mean(rows[step][i] for rows in by_step) for i in range(2))]
            for step in steps
        ]
    return result


def verdict(
    report: Mapping[str, Any], overhead: Mapping[str, Any], runs_missing: int = 0
) -> dict[str, Any]:
    """Whether a variant passes the success test, and the sentence that says so; nothing is judged
    by a part of the runs, by fewer than two tasks or by single seeds."""
    variants = sorted({name for task in report.values() for name in task if name != "a0"})
    pairs = [
        len(entry.get("auc_minus_a0", {"each": ()})["each"])
        for task in report.values()
        for variant, entry in task.items()
        if variant != "a0"
    ]
    if runs_missing or len(report) < LEAST_TASKS or not pairs or min(pairs) < 2:
        told = f"{runs_missing} runs are missing" if runs_missing else "there are too few runs"
        return {"met": None, "sentence": f"The success test cannot be judged: {told}."}
    each = {}
    for variant in variants:
        gains = {
            task: entries[variant]["auc_gain_percent"]
            for task, entries in report.items()
            if "auc_gain_percent" in entries.get(variant, {})
        }
        enough = [task for task, gain in gains.items() if gain["mean"] >= LEAST_GAIN_PERCENT]
        memory = [
            100 * entry[variant]["peak_memory_mb_minus_a0"]["mean"] / entry["a0"]["peak_memory_mb"]
            for entry in report.values()
        ]
        costs = {
            "time_percent": overhead[variant]["overhead_percent"],
            "parameters_percent": overhead[variant]["parameters_percent"],
            "memory_percent": statistics.mean(memory),
        }
        each[variant] = {
            "auc_gain_percent": {task: gain["mean"] for task, gain in gains.items()},
            "tasks_with_enough_gain": enough,
            "tasks_with_interval_above_0": [
                task for task, gain in gains.items() if gain["low"] is not None and gain["low"] > 0
            ],
            "overhead": costs,
            "met": len(enough) >= LEAST_TASKS and max(costs.values()) <= MOST_OVERHEAD_PERCENT,
            "met_by_time_alone": len(enough) >= LEAST_TASKS
            and costs["time_percent"] <= MOST_OVERHEAD_PERCENT,
        }

    def by(key: str) -> str:
        return ", ".join(name for name, found in each.items() if found[key]) or "none of them"

    sure = {name: len(found["tasks_with_interval_above_0"]) for name, found in each.items()}
    sentence = (
        f"The success test (at least {LEAST_GAIN_PERCENT:g} percent more area under the curve than "
        f"a0 on {LEAST_TASKS} tasks, at most {MOST_OVERHEAD_PERCENT:g} percent more time per "
        f"update, parameters and memory) was met by {by('met')}; with time alone as the cost by "
        f"{by('met_by_time_alone')}. These are means over the seeds, and the best of "
        f"{len(each)} variants; tasks on which the paired interval lies above 0: "
        + ", ".join(f"{name} {count}" for name, count in sure.items())
        + "."
    )
    met = any(found["met"] for found in each.values())
    return {"met": met, "sentence": sentence, "variants": each}


def gammas_of(variant: str) -> tuple[float, ...]:
    layer = presets.for_agent(f"multi_gamma_{variant}", "tdmpc2")
    return tuple(layer["agent"]["multi_gamma"].get("gammas", [])[1:])


def show(report: Mapping[str, Any]) -> None:
    for task, entries in report.items():
        print(task)
        for variant, entry in entries.items():
            line = f"  {variant}  AUC {entry['auc']['mean']:6.1f}"
            line += f"  final {entry['final_return']['mean']:6.1f}"
            if "auc_gain_percent" in entry:
                gain = entry["auc_gain_percent"]
                ends = "" if gain["low"] is None else f" [{gain['low']:+.1f}, {gain['high']:+.1f}]"
                line += f"  AUC {gain['mean']:+.1f}{ends} percent of a0's"
            print(line)


def draw(result: Mapping[str, Any], path: Path) -> Any:
    """A column per task: the curves of every run, their means drawn strongly; below them the errors
    of the auxiliary values over time, a colour for each discount and a dash for each variant."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    tasks, variants = list(result["tasks"]), list(VARIANTS)
    gammas = sorted(
        {g for t in result["tasks"].values() for e in t.values() for g in e["auxiliary_mean"]}
    )
    # Of a scale, for the colours of the first row mean variants.
    shades = dict(zip(gammas, colormaps["plasma"](np.linspace(0.0, 0.85, len(gammas)))))
    dashes = dict(zip(variants, ("-", ":", "-.", "--", "-")))
    figure = Figure(figsize=(5 * len(tasks) + 1.5, 9.5), layout="constrained")
    panels = figure.subplots(3, len(tasks), squeeze=False)
    for column, task in enumerate(tasks):
        for place, variant in enumerate(variants):
            own = [r for r in result["runs"] if (r["task"], r["variant"]) == (task, variant)]
            if not own:
                continue
            for run in own:
                x, y = zip(*run["curve"], strict=True)
                panels[0][column].plot(x, y, color=f"C{place}", alpha=0.25)
            heights = zip(*([point[1] for point in run["curve"]] for run in own), strict=True)
            means = [statistics.mean(at) for at in heights]
            panels[0][column].plot(x, means, color=f"C{place}", linewidth=2.5, label=variant)
            for gamma, rows in result["tasks"][task][variant]["auxiliary_mean"].items():
                steps, *errors = zip(*rows, strict=True)
                look = {"color": shades[gamma], "linestyle": dashes[variant]}
                for row, values in enumerate(errors, 1):
                    panels[row][column].plot(steps, values, label=f"{variant}, {gamma}", **look)
        panels[0][column].set(title=task, xlabel="environment frames", ylabel="return")
        panels[1][column].set(xlabel="agent steps", ylabel="auxiliary values: mean absolute error")
        panels[2][column].set(xlabel="agent steps", ylabel="auxiliary values: cross-entropy")
    for row in panels:  # beside the panels: curves leave no room in them
        row[-1].legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100, metadata={"Software": None})
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("runs/multi_gamma_ablation"))
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=10_000, help="agent steps of each run")
    parser.add_argument("--eval_every", type=int, default=1000, help="agent steps")
    parser.add_argument("--eval_episodes", type=int, default=3, help="per point of a curve")
    parser.add_argument("--episodes", type=int, default=10, help="for the final return")
    parser.add_argument("--rounds", type=int, default=60, help="of the measurement of time")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--report", action="store_true", help="report what is there, train nothing")
    options = parser.parse_args()
    own = options.out
    trial = is_trial(parser, options, "report")
    if options.report:
        options.out = own  # what is there is read, whoever made it
    # Seed by seed, so that an ablation cut short has whole pairs.
    work = [(t, v, s) for s in options.seeds for t in options.tasks for v in options.variants]
    found = at_once(options.jobs, lambda one: learn(*one, options), work)
    runs = [run for run in found if run is not None]
    torch.set_num_threads(1)
    timed = {variant: gammas_of(variant) for variant in options.variants if variant != "a0"}
    overhead = auxiliary_overhead(small(), timed, options.rounds)
    report = compare(runs)
    show(report)
    judged = verdict(report, overhead, len(work) - len(runs))
    print(judged["sentence"])
    result = {
        "preset": "tdmpc2_small",
        "agent_steps": options.steps,
        "runs_missing": len(work) - len(runs),
        "verdict": judged,
        "tasks": report,
        "overhead_of_an_update": overhead,
        "runs": runs,
    }
    if len(runs) < len(work):
        print(f"{len(work) - len(runs)} of {len(work)} runs are missing: nothing is published.")
    elif not trial:
        draw(result, ROOT / "docs" / "pictures" / "multi_gamma_ablation.png")
        print(f"written: {write('multi_gamma_ablation', result)}")


if __name__ == "__main__":
    carry_out(main)
