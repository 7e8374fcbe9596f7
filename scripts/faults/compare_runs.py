"""What two runs must have in common to be the same run: everything but times and memory."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from forethought import files
from forethought.tracking import TIME_COLUMNS

CSV_FILES = ("train.csv", "episodes.csv", "eval.csv")


def differences(a: Path, b: Path) -> list[str]:
    """What differs between two runs, but for times: CSV files and the last checkpoint's state
    (weights, optimisers, replay, random streams, acting state), bit for bit."""
    found = []
    for name in CSV_FILES:
        if csv_rows(a / name) != csv_rows(b / name):
            found.append(name)
    (last_a, _), (last_b, _) = (files.newest_verified(run / "checkpoints") for run in (a, b))
    if last_a.name != last_b.name:
        return [*found, f"checkpoint {last_a.name} / {last_b.name}"]
    if files.read_json(last_a / "agent.json") != files.read_json(last_b / "agent.json"):
        found.append("agent.json")
    if loop_state(last_a) != loop_state(last_b):
        found.append("loop.json")
    for name in ("agent", "replay", "loop"):
        left, right = (tensor_bits(path / f"{name}.safetensors") for path in (last_a, last_b))
        keys = sorted(key for key in left.keys() | right.keys() if left.get(key) != right.get(key))
        found += [f"{name}: {key}" for key in keys]
    return found


def loop_state(checkpoint: Path) -> dict[str, Any]:
    """Counters, updates owed, gates and open episodes; not the tracker's, which measures time."""
    data: dict[str, Any] = files.read_json(checkpoint / "loop.json")
    return {key: value for key, value in data.items() if key != "tracker"}


def csv_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file without its columns of time and memory."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{k: v for k, v in row.items() if k not in TIME_COLUMNS} for row in rows]


def tensor_bits(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Type, shape and bytes of every tensor in a file."""
    return {
        name: (str(tensor.dtype), tuple(tensor.shape), tensor.numpy().tobytes())
        for name, tensor in files.load_tensors(path).items()
    }
