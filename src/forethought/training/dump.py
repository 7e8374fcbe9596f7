"""Dumps: what helps to find out why an update was not finite.

    dumps/nonfinite-000012345/   the first skipped update that was told of, and the newest one
    dumps/diverged-000012445/    the update that halted the run
        dump.json                clock, gates, the last metrics; per part of the agent the norms of
                                 gradients, parameters and Adam's moments, and how many entries are
                                 not finite; the batch in numbers and where its rows come from;
                                 the configuration
        batch.safetensors        the batch of that update

The first skipped update says more about the cause than the 101st. Numbers that are not finite are
written as text ("nan", "inf"), for JSON has none.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forethought import files
from forethought.agents.base import Agent

DUMPS = "dumps"
"""The folder of dumps in a run directory."""


def write_dump(folder: Path, agent: Agent, about: Mapping[str, Any]) -> Path:
    """Publishes a dump at `folder`; FileError if it cannot be written.

    `about` is what the run itself knows. An agent that cannot describe itself any more, at the
    moment when a run is lost anyway, does not keep the rest from being written.
    """
    tensors: Mapping[str, Tensor] = {}
    try:
        described, tensors = agent.diagnostics()
    except Exception as error:  # noqa: BLE001 - any agent's code; the failure is in the dump
        described = {"failed": f"{type(error).__name__}: {error}"}
    data = {**about, "agent": described, "batch": {k: numbers(x) for k, x in tensors.items()}}
    with files.publish(folder) as inside:
        files.save_tensors(inside / "batch.safetensors", tensors)
        files.write_json(inside / "dump.json", readable(data))
    return folder


def keep_first_and_newest(dumps: Path, kind: str) -> None:
    """Removes the dumps of a kind between its first and its newest one."""
    found = [path for path in files.published(dumps) if path.name.startswith(f"{kind}-")]
    for path in found[1:-1]:
        shutil.rmtree(path)


def numbers(x: Tensor) -> dict[str, Any]:
    """A tensor in a few numbers; those of its finite entries, beside the count of the others."""
    values = x.detach().cpu().double().flatten()  # first to the CPU: not all devices have float64
    finite = values[torch.isfinite(values)]
    found: dict[str, Any] = {"shape": list(x.shape), "nonfinite": len(values) - len(finite)}
    if len(finite):
        found |= {"min": finite.min().item(), "mean": finite.mean().item()}
        found |= {"max": finite.max().item()}
    return found


def readable(value: Any) -> Any:
    """The same with every number that is not finite as its text."""
    if isinstance(value, Mapping):
        return {key: readable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [readable(item) for item in value]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value
