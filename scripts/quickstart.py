"""From nothing to an agent that plans: trains, evaluates, draws, films, and says what to try next.

    python scripts/quickstart.py [--seed 1] [--out DIR] [-- FLAGS OF TRAIN]

Every step is a command that a person could type, and is shown as such. Called again, it goes on
where it stopped: a run that was interrupted is resumed, one that is complete is not trained again.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

import forethought
from forethought.cli import main as command
from forethought.tracking import RunDirectory, read_rows

AGENT, TASK = "tdmpc2", "dmc:cartpole-swingup"
PRESETS = ("tdmpc2_small", "quickstart")
EPISODES = 10


def say(text: str = "") -> None:
    """A line on the terminal, at once."""
    print(text, flush=True)


def run(*tokens: str) -> int:
    """Shows a command, carries it out, and returns its exit code."""
    say(f"\n$ forethought {shlex.join(tokens)}")
    return command(list(tokens))


def train(out: Path, seed: int, flags: list[str]) -> int:
    """Trains from the start, or goes on, or finds that all is done."""
    if not (out / "run.json").exists():
        presets = [word for name in PRESETS for word in ("--preset", name)]
        return run("train", AGENT, TASK, *presets, *flags, "--seed", f"{seed}", "--out", str(out))
    if RunDirectory.open(out).run_json["status"] == "done":
        say(f"\n{out} is trained already; delete it to start over, or choose another SEED.")
        return 0
    return run("resume", str(out))


def main() -> int:
    """The whole way; returns the exit code."""
    parser = argparse.ArgumentParser(description="From nothing to an agent that plans.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--out", type=Path, help="the run directory; runs/quickstart-seedN if not given"
    )
    parser.add_argument("flags", nargs="*", help="more flags of 'forethought train', after --")
    given = parser.parse_args()
    out = given.out or Path("runs") / f"quickstart-seed{given.seed}"

    say(f"{AGENT} learns {TASK}: swing a pole up, and keep it there. Ctrl-C stops and saves.")
    code = train(out, given.seed, given.flags)
    if code != 0:
        say("Not finished; the same command goes on from here." if code in (130, 143) else "")
        return code
    minutes = float(read_rows(out / "eval.csv")[0][-1]["wall_s"]) / 60

    say(f"\nEvaluating the last checkpoint and random play, {EPISODES} episodes each ...")
    score = forethought.evaluate(out, episodes=EPISODES)
    chance = forethought.evaluate(out, policy="random", episodes=EPISODES)

    made = {"learning curve": "learning_curve.png", "report": "report.html"}
    for file in made.values():
        run("report", str(out), "--out", str(out / file))
    made["video"] = "video.mp4"
    run("watch", str(out), "--video", str(out / made["video"]))

    say(f"\nTrained in {minutes:.1f} minutes. Mean return over {EPISODES} episodes, at most 1000:")
    lowest, highest = min(score.returns), max(score.returns)
    say(f"  the agent    {score.mean:6.1f}   (from {lowest:.1f} to {highest:.1f})")
    say(f"  random play  {chance.mean:6.1f}")
    say("\nLook at:")
    for name, file in made.items():
        lost = "" if (out / file).exists() else "   (was not made, see above)"
        say(f"  {name:<15} {out / file}{lost}")
    say("\nTry next:")
    say(f"  source {os.path.relpath(Path(sys.executable).parent)}/activate")
    say(f"  forethought resume {out} --steps 50000     # train it further")
    say(f"  forethought train {AGENT} dmc:cup-catch --preset tdmpc2_small --steps 50000")
    say("  forethought list tasks                     # what else there is to learn")
    return 0


if __name__ == "__main__":  # the process that films imports this file again
    sys.exit(main())
