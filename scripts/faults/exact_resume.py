"""Shows that a killed run, resumed, equals an undisturbed one bit for bit.

For each task: train undisturbed, the same again, and with another seed; then kill with -9
mid-episode, in the update burst, in an evaluation and in a save, and resume. Compared are the final
checkpoint (weights, optimiser state, replay, acting state) and the CSV files but for their time
columns. Prints a table, writes docs/results/exact_resume.json, exits with 1 if anything differs
that must not, or is equal that must not.

    python scripts/faults/exact_resume.py [--tasks TASK ...] [--out FILE] [--keep DIR]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import result_file
from compare_runs import differences
from forethought import files
from forethought.tracking import RunDirectory

TASKS = {
    "dmc:hopper-hop": ("tdmpc2", ["--env.num-envs", "2", "--env.workers"]),
    "gym:Pendulum-v1": ("tdmpc2", []),
    "atari:Breakout": (
        "dqn",
        # Prioritized replay, 3-step returns, sticky actions: all that a resume could forget.
        [
            *("--preset", "dqn_modern", "--env.num-envs", "4", "--env.workers"),
            *("--env.atari.life-loss", "--agent.batch-size", "32"),  # which C computes
        ],
    ),
}
"""The agent of each task and its flags."""
# The debug preset has episodes of 50 decisions, a burst of 20 updates at step 100, evaluations at
# 200 and 400. A checkpoint every 70 steps falls inside episodes, which must then be stepped again,
# or their emulator restored.
OPTIONS = ["--preset", "debug", "--track.no-console", "--train.checkpoint-every-agent-steps", "70"]
MOMENTS = {
    "mid-episode": "step-272",  # four environments step together: no other number is reached
    "in the burst": "update-11",
    "in an evaluation": "evaluation-1-25",
    "in a save": "save-280",
}
PAUSE_SECONDS = 120


def forethought(*words: str) -> list[str]:
    return [sys.executable, "-m", "forethought", *words]


def train_command(task: str, seed: int, out: Path) -> list[str]:
    agent, own = TASKS[task]
    # A preset of its own first: of two presets the later one wins, and `debug` makes it tiny.
    options = [*own, *OPTIONS, "--seed", str(seed), "--out", str(out)]
    return forethought("train", agent, task, *options)


def run_to_end(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")


def kill_at(moment: str, command: list[str]) -> None:
    """Starts a run and kills it with -9 where it pauses for us."""
    environment = {**os.environ, files.PAUSE_VARIABLE: f"{moment}:{PAUSE_SECONDS}"}
    with subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if line.startswith("pausing at"):
                process.kill()
                return
    sys.exit(f"{' '.join(command)} never came to {moment}:\n{''.join(said)}")


def compare(
    task: str, case: str, undisturbed: Path, other: Path, must_equal: bool
) -> dict[str, Any]:
    found = differences(undisturbed, other)
    resumed = [event for event in RunDirectory.open(other).events() if event["kind"] == "resumed"]
    found += [
        f"lost episodes {event['lost_episodes']}" for event in resumed if event["lost_episodes"]
    ]
    right = (not found) == must_equal
    row = {
        "task": task,
        "case": case,
        "must_be": "equal" if must_equal else "different",
        "resumed_from": [event["checkpoint"] for event in resumed],
        "differences": len(found),
        "first_differences": found[:5],
        "right": right,
    }
    verdict = "equal" if not found else f"{len(found)} differences"
    print(f"{task:<18}{case:<25}{verdict:<20}{'ok' if right else 'WRONG'}", flush=True)
    return row


def check_task(task: str, folder: Path) -> list[dict[str, Any]]:
    name = task.replace(":", "-")
    undisturbed = folder / f"{name}-undisturbed"
    run_to_end(train_command(task, 1, undisturbed))
    rows = []
    for case, seed in (("the same seed", 1), ("another seed", 2)):
        other = folder / f"{name}-{case.replace(' ', '-')}"
        run_to_end(train_command(task, seed, other))
        rows.append(compare(task, case, undisturbed, other, must_equal=seed == 1))
    for case, moment in MOMENTS.items():
        other = folder / f"{name}-{case.replace(' ', '-')}"
        kill_at(moment, train_command(task, 1, other))
        run_to_end(forethought("resume", str(other)))
        rows.append(compare(task, f"killed {case}", undisturbed, other, must_equal=True))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    default = result_file.RESULTS / "exact_resume.json"
    parser.add_argument("--out", type=Path, default=default, help="where the JSON goes")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--keep", type=Path, help="keep the run directories here")
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        rows = [row for task in arguments.tasks for row in check_task(task, folder)]
    right = all(row["right"] for row in rows)
    seconds = round(time.monotonic() - began, 1)
    result_file.write(arguments.out, {"seconds": seconds, "all_right": right, "cases": rows})
    print(f"{'all as it must be' if right else 'NOT as it must be'}, in {seconds:.0f} s")
    return 0 if right else 1


if __name__ == "__main__":
    result_file.carry_out(
        main, "Eighteen pairs of runs take about four minutes; each is told when it is done."
    )
