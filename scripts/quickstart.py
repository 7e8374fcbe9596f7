"""From nothing to an agent that plans: trains, evaluates, draws, films, and says what to try next.

    python scripts/quickstart.py [--seed 1] [--out DIR] [-- FLAGS OF TRAIN]

Every step is a command that a person could type, and is shown as such. Called again, it goes on
where it stopped: a run that was interrupted is resumed, one that is complete is not trained again.
The exit code is 0 only if everything was made.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import forethought
from forethought import ForethoughtError
from forethought.cli import main as command
from forethought.tracking import RunDirectory, read_rows

AGENT, TASK = "tdmpc2", "dmc:cartpole-swingup"
PRESETS = ("tdmpc2_small", "quickstart")
EPISODES = 10
STOPPED = (130, 143)
"""Exit codes of a person or a scheduler that ends a command."""
PRODUCTS = {
    "learning curve": ("report", "--out", "learning_curve.png"),
    "report": ("report", "--out", "report.html"),
    "video": ("watch", "--video", "video.mp4"),
}
"""What is left behind: the verb that makes it, its flag and the file."""


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


def training_minutes(out: Path) -> float:
    """Of the whole run: `wall_s` goes on over every process that trained it, pauses left out."""
    file = RunDirectory.open(out).eval_csv
    rows, _ = read_rows(file)
    try:
        return float(rows[-1]["wall_s"]) / 60  # the last evaluation comes after the last step
    except (IndexError, KeyError, ValueError) as error:
        raise ForethoughtError(
            f"{file} is damaged: it does not say the time of training; delete {out} to start over."
        ) from error


def produce(out: Path) -> dict[str, int]:
    """Makes each product, whatever became of the others; their exit codes."""
    codes = {}
    for name, (verb, flag, file) in PRODUCTS.items():
        codes[name] = run(verb, str(out), flag, str(out / file))
        if codes[name] in STOPPED:
            break
    return codes


def activation() -> str | None:
    """The command that puts `forethought` on the path; None without an environment."""
    file = Path(sys.executable).parent / "activate"
    return shlex.join(["source", os.path.relpath(file)]) if file.exists() else None


def how_to_go_on() -> str:
    """Said at a stop; the line before it names a command that may not be on the path yet."""
    words = activation()
    path = "" if words is None else f" For commands of forethought, first: {words}"
    return f"the same command goes on from here.{path}"


def quickstart(out: Path, seed: int, flags: list[str]) -> int:
    """The whole way; returns the exit code."""
    say(f"{AGENT} learns {TASK}: swing a pole up, and keep it there. Ctrl-C stops and saves.")
    code = train(out, seed, flags)
    if code != 0:
        if code in STOPPED:
            say(f"Not finished; {how_to_go_on()}")
        return code
    minutes = training_minutes(out)

    say(f"\nEvaluating the last checkpoint and random play, {EPISODES} episodes each ...")
    score = forethought.evaluate(out, episodes=EPISODES)
    chance = forethought.evaluate(out, policy="random", episodes=EPISODES)
    codes = produce(out)
    stopped = next((code for code in codes.values() if code in STOPPED), None)
    if stopped is not None:
        return stopped

    say(f"\nTrained in {minutes:.1f} minutes. Mean return over {EPISODES} episodes, at most 1000:")
    lowest, highest = min(score.returns), max(score.returns)
    say(f"  the agent    {score.mean:6.1f}   (from {lowest:.1f} to {highest:.1f})")
    say(f"  random play  {chance.mean:6.1f}")
    say("\nLook at:")
    for name, (_, _, file) in PRODUCTS.items():
        # A file that an earlier call left there is not what this one was to make.
        say(f"  {name:<15} {'was not made, see above' if codes[name] else out / file}")
    say("\nTry next:")
    words = activation()
    if words is not None:
        say(f"  {words}")
    further = shlex.join(["forethought", "resume", str(out), "--steps", "50000"])
    say(f"  {further}     # train it further")
    say(f"  forethought train {AGENT} dmc:cup-catch --preset tdmpc2_small --steps 50000")
    say("  forethought list tasks                     # what else there is to learn")
    failed = [name for name, code in codes.items() if code != 0]
    if failed:
        say(f"\nNot everything was made: the {' and the '.join(failed)} failed, see above.")
    return 1 if failed else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Reads the flags; what a person can cause and mend is one sentence."""
    parser = argparse.ArgumentParser(description="From nothing to an agent that plans.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--out", type=Path, help="the run directory; runs/quickstart-seedN if not given"
    )
    parser.add_argument("flags", nargs="*", help="more flags of 'forethought train', after --")
    given = parser.parse_args(argv)
    out = given.out or Path("runs") / f"quickstart-seed{given.seed}"
    try:
        return quickstart(out, given.seed, given.flags)
    except ForethoughtError as error:
        print(error, *getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\nInterrupted; {how_to_go_on()}", file=sys.stderr)
        return 130


if __name__ == "__main__":  # the process that films imports this file again
    sys.exit(main())
