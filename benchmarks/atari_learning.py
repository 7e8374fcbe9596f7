"""What 200,000 decisions of `dqn_modern` reach in an Atari game, beside random play and Dopamine.

    python benchmarks/atari_learning.py [--task atari:Boxing] [--out FOLDER] [--seeds 1 2 3]

The last checkpoint is evaluated over 30 games. No score is asked for: a published run is 250 times
as long, and the first of its points stands beside it. Runs that FOLDER already holds are resumed
or, where complete, only evaluated. Writes docs/results/atari_learning.json and
docs/pictures/atari_learning.png.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dqn_learning import draw
from forethought.report.published import published
from learning_kinds import outcome, summary
from results import ROOT, carry_out, write
from runs import at_once, is_trial, train_or_resume

STEPS = 200_000
PRESET = "dqn_modern"


def learn(seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """One run, and its last checkpoint beside random play."""
    run = options.out / f"{options.task.replace(':', '-')}-seed{seed}"
    train_or_resume(
        run, "dqn", options.task, "--preset", PRESET, "--steps", str(options.steps), "--seed",
        str(seed), "--env.num_envs", "8", "--replay.capacity_rows", str(max(options.steps, 10_000)),
        "--train.threads", "1", "--train.checkpoint_every_agent_steps", "25000",
        "--eval.every_agent_steps", "25000", "--eval.episodes", "5",
    )  # fmt: skip
    return outcome(run, seed, options.episodes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--task", default="atari:Boxing")
    parser.add_argument("--out", type=Path, default=Path("runs/atari_learning"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--episodes", type=int, default=30, help="evaluation games")
    parser.add_argument("--steps", type=int, default=STEPS, help="fewer are a trial")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    options = parser.parse_args()
    trial = is_trial(parser, options)
    runs = at_once(options.jobs, lambda seed: learn(seed, options), options.seeds)
    found = summary(runs, None)
    print(
        f"{options.task}: {found['return_mean']:.1f} {found['interval_over_seeds']}, random play "
        f"{found['random_return_mean']:.1f} {found['random_interval']}"
    )
    other = published(options.task, "dqn")
    beside: dict[str, Any] = {}
    if other is not None:
        frames, score = other.at(runs[0]["curve"][-1][0])
        beside = {
            "label": f"training games of {other.label}",
            "source": other.source,
            "env_frames": frames,
        }
        beside["return_mean"] = score
        beside["seeds"] = other.seeds[other.frames.index(frames)]
        print(f"{other.label} at {frames:,} frames: {score:.1f} ({other.source})")
    if not trial:
        about = {"task": options.task, "preset": PRESET, "agent_steps": STEPS}
        print(f"written: {write('atari_learning', {**about, 'published': beside, **found})}")
    folder = options.out if trial else ROOT / "docs" / "pictures"
    draw({PRESET: found}, options.task, folder / "atari_learning.png", beside)


if __name__ == "__main__":
    carry_out(main)
