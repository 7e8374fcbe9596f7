"""Does it learn? Trains each task with each seed, evaluates the last checkpoint, writes JSON.

    python benchmarks/learning.py --out FOLDER [--tasks ...] [--seeds 1 2 3] [--jobs 2]

Runs that FOLDER already holds are resumed or, where complete, only evaluated: a killed benchmark
goes on where it stopped. Published numbers are those of the official repository (3 seeds), which
used the full configuration; `tdmpc2_small` is another one. With other values than the script's own
it is a trial: its runs have a folder of their own, and no result is written.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from forethought.tracking import RunDirectory
from results import carry_out, write
from runs import at_once, curve, evaluated, is_trial, origin, train_or_resume

TASKS = {
    "dmc:cartpole-swingup": {"required": 750, "published": 839.4},
    "dmc:cup-catch": {"required": 900, "published": 981.2},
}
"""Mean return at 100k env_frames: what this benchmark asks for, and what was published."""


def learn(task: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """One run, and the evaluation of its last checkpoint."""
    run = options.out / f"{task.replace(':', '-')}-seed{seed}"
    steps = ("--steps", str(options.steps))
    train_or_resume(
        run, "tdmpc2", task, "--preset", options.preset, "--seed", str(seed), *steps,
        *options.flags, resuming=steps,
    )  # fmt: skip
    evaluation = evaluated(run, options.episodes)
    print(f"{task} seed {seed}: {evaluation['return_mean']:.1f}", flush=True)
    return {
        "seed": seed,
        "return_mean": evaluation["return_mean"],
        "returns": evaluation["returns"],
        "seeds": evaluation["seeds"],
        "random_return_mean": RunDirectory.open(run).run_json["random_score"],
        **origin(run),
        "curve": curve(run),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--out", type=Path, default=Path("runs/learning"), help="folder for the runs"
    )
    parser.add_argument("--preset", default="tdmpc2_small")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=50_000, help="agent steps of each run")
    parser.add_argument("--episodes", type=int, default=10, help="evaluation episodes")
    parser.add_argument("--flags", nargs="*", default=[], help="further flags, without their --")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    options = parser.parse_args()
    trial = is_trial(parser, options)
    options.flags = [f"--{flag}" for flag in options.flags]
    # Seed by seed, so that a benchmark cut short has something of every task.
    work = [(task, seed) for seed in options.seeds for task in options.tasks]
    found = at_once(options.jobs, lambda pair: learn(*pair, options), work)
    tasks = {}
    for task in options.tasks:
        runs = [result for (name, _), result in zip(work, found, strict=True) if name == task]
        mean = statistics.mean(run["return_mean"] for run in runs)
        random = statistics.mean(run["random_return_mean"] for run in runs)
        goal = TASKS.get(task, {})
        tasks[task] = {"return_mean": mean, "random_return_mean": random, **goal, "runs": runs}
        print(f"{task}: mean {mean:.1f}, random play {random:.1f}, {goal}")
    result = {"preset": options.preset, "agent_steps": options.steps, "tasks": tasks}
    if not trial:
        print(f"written: {write('learning_tdmpc2_small', result)}")


if __name__ == "__main__":
    carry_out(main)
