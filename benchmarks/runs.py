"""Runs of a benchmark: made, resumed or found complete, and what a result file keeps of them."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from forethought.cli import training_asked
from forethought.config import diff, to_dict
from forethought.tracking import RunDirectory, read_rows
from forethought.training.offline import with_whole_paths
from results import not_its_own

Work = TypeVar("Work")
Found = TypeVar("Found")


def at_once(jobs: int, learn: Callable[[Work], Found], work: Sequence[Work]) -> list[Found]:
    """`learn` of all work, `jobs` at a time. One that fails or is stopped lets none begin after it:
    a pool alone would start the next run before it hears of the end of the last."""
    stop = threading.Event()

    def one(item: Work) -> Found:
        if stop.is_set():
            raise SystemExit("Not begun: another run failed or was stopped.")
        try:
            return learn(item)
        except BaseException:
            stop.set()
            raise

    pool = ThreadPoolExecutor(jobs)
    try:
        return list(pool.map(one, work))
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one is for the runs, which have it
        # Said before the runs under way, which save now, have ended.
        print("Interrupted. The same command goes on where this one stops.", flush=True)
        raise SystemExit(130) from None
    finally:
        stop.set()
        pool.shutdown()


def is_trial(parser: argparse.ArgumentParser, options: argparse.Namespace, *free: str) -> bool:
    """Whether what decides the result differs from the script's own values, `free` names apart.

    Then the runs go to a folder of their own, where no later benchmark takes them for its own, and
    the result is not published.
    """
    changed = not_its_own(parser, options, "out", "jobs", *free)
    if changed:
        told = "-".join(f"{name}={value}" for name, value in sorted(changed.items()))
        options.out = options.out / f"trial-{hashlib.sha256(told.encode()).hexdigest()[:8]}"
        print(f"Its runs are in {options.out}.")
    options.out.mkdir(parents=True, exist_ok=True)
    return bool(changed)


def forethought(*arguments: str, log: Path | None = None) -> str:
    """Run the command line; its output goes to `log` or is returned."""
    # Several runs share the cores: threads that wait must not spin.
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-m", "forethought", *arguments]
    if log is None:
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise SystemExit(f"This command failed, its own words are above: {command}")
        return done.stdout
    with log.open("a") as file:
        done = subprocess.run(command, env=environment, stdout=file, stderr=file)
    if done.returncode:
        raise SystemExit(f"This command failed, {log} has its words: {command}")
    return ""


def train_or_resume(run: Path, *training: str, resuming: tuple[str, ...] = ()) -> None:
    """A run that is there goes on (or is complete), another begins; one that was begun with other
    words, or with presets that have changed since, is not taken for this one."""
    log = run.with_name(f"{run.name}.log")
    print(f"{run.name}: {log} tells how far it is", flush=True)
    if not (run / "run.json").exists():
        forethought("train", *training, "--out", str(run), log=log)
        return
    require_same(run, *training)
    forethought("resume", str(run), *resuming, log=log)


def require_same(run: Path, *training: str) -> None:
    """Stops the benchmark at a run whose configuration is not that of these words."""
    rows = diff(RunDirectory.open(run).config(), configuration(*training))
    if rows:
        told = "; ".join(f"{key}: {old} there, {new} here" for key, _, old, new in rows)
        raise SystemExit(
            f"{run} is not what this benchmark asks for ({told}): move it away, or name another "
            "--out."
        )


def configuration(*training: str) -> dict[str, Any]:
    """What a run of these words keeps as its configuration."""
    asked = training_asked(list(training))
    assert not isinstance(asked, int), f"{training} asks for help"
    whole: dict[str, Any] = to_dict(with_whole_paths(asked[0]))
    return whole


def evaluated(run: Path, episodes: int, *flags: str) -> dict[str, Any]:
    """Every episode of the last checkpoint, or of what `flags` name instead."""
    found: dict[str, Any] = json.loads(
        forethought("evaluate", str(run), "--episodes", str(episodes), "--json", *flags)
    )
    return found


T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t, two-sided 95 percent, for 1 to 9 degrees of freedom."""


def interval_over_seeds(values: Sequence[float]) -> list[float] | None:
    """Student's 95 percent interval of a mean over seeds; none of a single one.

    Not a bootstrap: from three seeds that can never leave the range of the three.
    """
    n = len(values)
    if n < 2:
        return None
    t = T_95[n - 2] if n - 2 < len(T_95) else 1.96 + 2.5 / (n - 1)  # within 0.02 of it
    mean, half = statistics.mean(values), t * statistics.stdev(values) / math.sqrt(n)
    return [mean - half, mean + half]


def curve(run: Path) -> list[list[float]]:
    """[env_frames, mean return] of every evaluation during training; offline, where there are no
    frames, [updates, mean return]."""
    rows, _ = read_rows(run / "eval.csv")
    unit = "updates" if RunDirectory.open(run).config()["offline"]["data"] else "env_frames"
    return [[float(row[unit]), float(row["return_mean"])] for row in rows]


def minutes_of_training(run: Path) -> float:
    """Of the whole run, its evaluations included, pauses between processes left out."""
    rows, _ = read_rows(run / "eval.csv")
    return float(rows[-1]["wall_s"]) / 60


def commit_of(run: Path) -> str:
    """Of the code that made a run; several, where it was resumed by other code."""
    directory = RunDirectory.open(run)
    resumed = [event for event in directory.events() if event["kind"] == "resumed"]
    commits = [directory.run_json.get("git_commit"), *(e.get("git_commit") for e in resumed)]
    return ", ".join(dict.fromkeys(commit or "unknown" for commit in commits))


def origin(run: Path) -> dict[str, Any]:
    """What a reader needs to know of the code that made a run."""
    directory = RunDirectory.open(run)
    return {
        "commit": commit_of(run),
        "compile": directory.config()["agent"].get("compile"),
    }
