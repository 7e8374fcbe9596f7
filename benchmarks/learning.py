"""Does it learn? Trains each task with each seed, evaluates the last checkpoint, writes JSON.

    python benchmarks/learning.py --out FOLDER [--tasks ...] [--seeds 1 2 3] [--jobs 2]

Runs that FOLDER already holds are resumed or, where complete, only evaluated: a killed benchmark
goes on where it stopped. Published numbers are those of the official repository (3 seeds), which
used the full configuration; `tdmpc2_small` is another one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from forethought.tracking import RunDirectory, read_rows
from results import write

TASKS = {
    "dmc:cartpole-swingup": {"required": 750, "published": 839.4},
    "dmc:cup-catch": {"required": 900, "published": 981.2},
}
"""Mean return at 100k env_frames: what this benchmark asks for, and what was published."""


def forethought(*arguments: str, log: Path | None = None) -> str:
    """Run the command line; its output goes to `log` or is returned."""
    # Several runs share the cores: threads that wait must not spin.
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-m", "forethought", *arguments]
    if log is None:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return done.stdout
    with log.open("a") as file:
        subprocess.run(command, env=environment, stdout=file, stderr=file, check=True)
    return ""


def learn(task: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """One run, and the evaluation of its last checkpoint."""
    run = options.out / f"{task.replace(':', '-')}-seed{seed}"
    log = options.out / f"{run.name}.log"
    if (run / "run.json").exists():
        forethought("resume", str(run), "--steps", str(options.steps), log=log)
    else:
        forethought(
            "train", "tdmpc2", task, "--preset", options.preset, "--seed", str(seed),
            "--steps", str(options.steps), "--out", str(run), *options.flags, log=log,
        )  # fmt: skip
    text = forethought(
        "evaluate",
        str(run),
        "--checkpoint",
        "latest",
        "--episodes",
        str(options.episodes),
        "--json",
    )
    evaluation = json.loads(text)
    facts = RunDirectory.open(run).run_json
    print(f"{task} seed {seed}: {evaluation['return_mean']:.1f}", flush=True)
    return {
        "seed": seed,
        "return_mean": evaluation["return_mean"],
        "returns": evaluation["returns"],
        "seeds": evaluation["seeds"],
        "random_return_mean": facts["random_score"],
        "commit": facts.get("git_commit"),
        "compile": RunDirectory.open(run).config()["agent"]["compile"],
        "curve": curve(run),
    }


def curve(run: Path) -> list[list[float]]:
    """[env_frames, mean return] of every evaluation during training."""
    rows, _ = read_rows(run / "eval.csv")
    return [[float(row["env_frames"]), float(row["return_mean"])] for row in rows]


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
    options.flags = [f"--{flag}" for flag in options.flags]
    options.out.mkdir(parents=True, exist_ok=True)
    # Seed by seed, so that a benchmark cut short has something of every task.
    work = [(task, seed) for seed in options.seeds for task in options.tasks]
    with ThreadPoolExecutor(options.jobs) as pool:
        found = list(pool.map(lambda pair: learn(*pair, options), work))
    tasks = {}
    for task in options.tasks:
        runs = [result for (name, _), result in zip(work, found, strict=True) if name == task]
        mean = statistics.mean(run["return_mean"] for run in runs)
        random = statistics.mean(run["random_return_mean"] for run in runs)
        goal = TASKS.get(task, {})
        tasks[task] = {"return_mean": mean, "random_return_mean": random, **goal, "runs": runs}
        print(f"{task}: mean {mean:.1f}, random play {random:.1f}, {goal}")
    result = {"preset": options.preset, "agent_steps": options.steps, "tasks": tasks}
    print(f"written: {write(f'learning_{options.preset}', result)}")


if __name__ == "__main__":
    main()
