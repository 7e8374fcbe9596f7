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


def provenance() -> dict[str, Any]:
    """What a reader needs to run it again."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    changed = subprocess.run(
        ["git", "status", "--porcelain", "--", "src", "benchmarks"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    script = Path(sys.argv[0])
    name = script.resolve().relative_to(ROOT) if script.resolve().is_relative_to(ROOT) else script
    return {
        "command": " ".join(["python", str(name), *sys.argv[1:]]),
        "commit": commit.stdout.strip() + ("+changes" if changed.stdout.strip() else ""),
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
