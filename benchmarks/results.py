"""Writing benchmark results: every value, with command, commit, date and machine."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent


def carry_out(main: Callable[[], None]) -> None:
    """Runs a benchmark; Ctrl-C is a sentence, for a measurement that was cut short is none."""
    try:
        main()
    except KeyboardInterrupt:
        print("Interrupted: nothing was written.", file=sys.stderr)
        raise SystemExit(130) from None


def not_its_own(
    parser: argparse.ArgumentParser, options: argparse.Namespace, *free: str
) -> dict[str, Any]:
    """What was asked otherwise than the benchmark asks by itself, `free` names apart; it says that
    such a trial is not published."""
    changed = {
        name: value
        for name, value in vars(options).items()
        if name not in free and value != parser.get_default(name)
    }
    if changed:
        print(f"A trial, for these are not the benchmark's: {changed}. It is not published.")
    return changed


def source() -> str:
    """The commit, with "+changes" behind it where code is not as committed."""
    changed = git("status", "--porcelain", "--", *CODE)
    return git("rev-parse", "HEAD") + ("+changes" if changed else "")


def git(*words: str) -> str:
    # No lock of the index for a look: a commit at that moment would fail.
    command = ["git", "--no-optional-locks", *words]
    asked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return asked.stdout.strip()


CODE = ("src", "benchmarks", "scripts", "pyproject.toml", "constraints.txt")
BEGUN_WITH = source()
"""When the benchmark began: what it measures. Processes that it starts later may see other code."""


def measured_commit() -> str:
    """The commit that a benchmark began with, and a word behind it if code has changed since."""
    begun, now = BEGUN_WITH, source()
    if begun == now:
        return begun
    same = now.endswith("+changes") == begun.endswith("+changes") and not git(
        "diff", "--name-only", begun.removesuffix("+changes"), "HEAD", "--", *CODE
    )
    if same:
        return begun
    print(f"The code has changed while this was measured, from {begun} to {now}.", file=sys.stderr)
    return begun if begun.endswith("+changes") else f"{begun}+changes"


def provenance() -> dict[str, Any]:
    """What a reader needs to run it again."""
    script = Path(sys.argv[0])
    name = script.resolve().relative_to(ROOT) if script.resolve().is_relative_to(ROOT) else script
    return {
        "command": " ".join(["python", str(name), *sys.argv[1:]]),
        "commit": measured_commit(),
        "date_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{processor()}, {torch.get_num_threads()} threads",
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
    }


def processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def write(name: str, result: dict[str, Any]) -> Path:
    """docs/results/<name>.json"""
    path = ROOT / "docs" / "results" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(provenance() | result, indent=1) + "\n")
    return path


def median_p10(values: list[float]) -> tuple[float, float]:
    """The median, and the value that a tenth of the measurements stay below."""
    ordered = sorted(values)
    return statistics.median(ordered), ordered[len(ordered) // 10]
