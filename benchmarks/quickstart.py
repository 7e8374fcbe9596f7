"""What does the quickstart reach, and how long does it train? One seed after the other, as JSON.

    python benchmarks/quickstart.py [--seeds 1 2 3]

Runs that are there already are only evaluated again. Beside each score stands that of random play.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from typing import Any

import forethought
from forethought.tracking import read_rows
from results import ROOT, carry_out, not_its_own, write
from runs import curve, minutes_of_training, origin, require_same

TASK, PRESETS = "dmc:cartpole-swingup", ("tdmpc2_small", "quickstart")
REQUIRED = {"return_of_each_seed": 700, "minutes_of_training": 10}


def one(seed: int, episodes: int) -> dict[str, Any]:
    """Train, or find trained, and evaluate the last checkpoint."""
    # Not where `make quickstart` trains: that run is a person's, who may have taken it further.
    run = ROOT / "runs" / "learn-quickstart" / f"seed{seed}"
    script = ["scripts/quickstart.py", "--seed", str(seed), "--out", str(run)]
    subprocess.run([sys.executable, *script], cwd=ROOT, check=True)
    presets = [word for name in PRESETS for word in ("--preset", name)]
    require_same(run, "tdmpc2", TASK, *presets, "--seed", str(seed))
    rows, _ = read_rows(run / "eval.csv")
    score = forethought.evaluate(run, episodes=episodes)
    chance = forethought.evaluate(run, policy="random", episodes=episodes)
    return {
        "seed": seed,
        "return_mean": score.mean,
        "returns": list(score.returns),
        "random_return_mean": chance.mean,
        "random_returns": list(chance.returns),
        "minutes_of_training": minutes_of_training(run),
        "agent_steps": int(rows[-1]["agent_steps"]),
        "curve": curve(run),
        **origin(run),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--episodes", type=int, default=10)
    options = parser.parse_args()
    trial = bool(not_its_own(parser, options))
    runs = [one(seed, options.episodes) for seed in options.seeds]
    for run in runs:
        print(
            f"seed {run['seed']}: {run['return_mean']:.1f} (random play "
            f"{run['random_return_mean']:.1f}) after {run['minutes_of_training']:.1f} minutes"
        )
    result = {
        "task": TASK,
        "presets": PRESETS,
        "required": REQUIRED,
        "return_mean": statistics.mean(run["return_mean"] for run in runs),
        "random_return_mean": statistics.mean(run["random_return_mean"] for run in runs),
        "runs": runs,
    }
    if not trial:
        print(f"written: {write('quickstart', result)}")


if __name__ == "__main__":
    carry_out(main)
