"""What forethought does under one fault, where the command line alone cannot show it:
`python scripts/faults/our_side.py FAULT ...`. The last line printed is JSON."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import forethought
import hostile_pickle
from compare_runs import tensor_bits
from forethought import files
from forethought.config import ForethoughtError
from forethought.tracking import RunDirectory
from forethought.training.checkpoint import Checkpoints
from forethought.training.loop import Run
from random_kills import kill_repeatedly

TASK = "gym:Pendulum-v1"


def train(out: Path, **options: Any) -> Run:
    quiet = {"track": {"console": False}}
    return forethought.train("tdmpc2", TASK, presets=["debug"], out=out, **quiet, **options)


def reads(load: Callable[[], Any]) -> str:
    """'' if it loads, else the error."""
    try:
        load()
    except ForethoughtError as error:  # anything else is a defect and must be seen
        return str(error)
    return ""


def kill_in_save(folder: Path, kills: int, seed: int) -> dict[str, Any]:
    """Overwriting one directory by `agent.save(path)`; a run with a checkpoint at every step."""
    agent = forethought.load(train(folder / "source").path, for_acting=False)
    place = folder / "agent"

    def over_and_over(i: int) -> None:
        for _ in itertools.count():
            agent.save(place)

    def every_step(i: int) -> None:
        with contextlib.redirect_stderr(io.StringIO()):
            train(folder / f"run-{i}", steps=10**6, train={"checkpoint_every_agent_steps": 1})

    def resumable(i: int) -> str:
        """As `resume` does: clears what the killed process left, takes the newest, loads it all."""
        run = RunDirectory.open(folder / f"run-{i}")
        newest = files.published(run.checkpoints)[-1]
        files.recover(run.checkpoints)
        found = ""

        def load() -> None:
            nonlocal found
            path, skipped = Checkpoints(run).newest()
            forethought.load(run.path, for_acting=False)
            found = "" if path == newest else " ".join(skipped)

        return reads(load) or found

    def published_twice(i: int) -> bool:
        return len(files.published(folder / f"run-{i}" / "checkpoints")) >= 2

    return {
        "agent.save": kill_repeatedly(
            kills,
            seed,
            over_and_over,
            lambda i: place.exists(),
            lambda i: reads(lambda: agent.load(place)),
        ),
        "train": kill_repeatedly(kills, seed, every_step, published_twice, resumable),
    }


def full_disk(folder: Path) -> dict[str, Any]:
    """From step 150 on no file may grow over half of a checkpoint; the run goes to 400."""
    run = folder / "run"
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(stage: str) -> None:
        if stage == "step-150":
            good = files.published(run / "checkpoints")[-1] / "agent.safetensors"
            resource.setrlimit(resource.RLIMIT_FSIZE, (good.stat().st_size // 2, limit[1]))

    ordinary, files.fault_point = files.fault_point, fill
    error = reads(lambda: train(run, steps=400))
    files.fault_point = ordinary
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    opened = RunDirectory.open(run)
    kinds = [event["kind"] for event in opened.events()]
    newest, skipped = Checkpoints(opened).newest()
    steps = int(opened.train_csv.read_text().splitlines()[-1].split(",")[0])
    return {
        "error": error,
        "warned": kinds.count("checkpoint-failed"),
        "trained_to": steps,
        "newest": newest.name,
        "skipped": skipped,
        "resumed": forethought.resume(run).status,
    }


def hostile(folder: Path) -> dict[str, Any]:
    """Each file of the newest checkpoint, and a replay block, is in its turn a pickle; once as it
    is, once with hashes that an attacker made to fit. Then `resume`, for a few steps more."""
    source = train(folder / "source", steps=120, train={"checkpoint_every_agent_steps": 50}).path
    newest = files.published(source / "checkpoints")[-1].relative_to(source)
    block = sorted((source / "replay").glob("*.safetensors"))[0].relative_to(source)
    names = sorted(path.name for path in (source / newest).iterdir() if path.name != files.MANIFEST)
    marker = folder / "executed"
    outcomes = {}
    for file in [*(newest / name for name in names), block]:
        for signed in (False, True):
            run = shutil.copytree(source, folder / f"{file.name}-{signed}")
            (run / file).write_bytes(hostile_pickle.that_makes(marker))
            if signed:
                sign(run / newest, run / file)
            said = reads(lambda: forethought.resume(run, steps=125))  # noqa: B023 - called at once
            skipped = [e for e in RunDirectory(run).events() if e["kind"] == "checkpoint-skipped"]
            outcome = said or ("older checkpoint" if skipped else "loaded")
            outcomes[f"{file}, hashes made to fit: {signed}"] = outcome.replace(f"{run}/", "")
    return {"executed": marker.exists(), "outcomes": outcomes}


def sign(checkpoint: Path, file: Path) -> None:
    """Gives the manifest the hash and size that a file has now, as somebody could by hand."""
    old = files.read_manifest(checkpoint)
    listed, meta, digest = dict(old.files), dict(old.meta), files.sha256(file)
    if file.parent == checkpoint:
        listed[file.name] = {"sha256": digest, "bytes": file.stat().st_size}
    else:
        before = meta["replay_blocks"][file.name]
        meta["replay_blocks"] = {**meta["replay_blocks"], file.name: digest}
        state = checkpoint / "agent.json"
        state.write_text(state.read_text().replace(before, digest))
        listed[state.name] = {"sha256": files.sha256(state), "bytes": state.stat().st_size}
    manifest = files.Manifest(old.schema, listed, old.versions, meta)
    (checkpoint / files.MANIFEST).write_text(manifest.text)


def nonfinite(run: Path) -> dict[str, Any]:
    """Tensors of the newest checkpoint with a NaN or infinity in them."""
    newest, _ = Checkpoints(RunDirectory.open(run)).newest()
    tensors = files.load_tensors(newest / "agent.safetensors")
    floats = [x for x in tensors.values() if x.is_floating_point()]
    bad = sum(not torch.isfinite(x).all().item() for x in floats)
    return {"checkpoint": newest.name, "nonfinite": bad, "tensors": len(floats)}


def different_tensors(a: Path, b: Path) -> dict[str, Any]:
    """Between the last checkpoints of two runs, over weights, optimiser and random streams."""
    newest = [Checkpoints(RunDirectory.open(run)).newest()[0] for run in (a, b)]
    left, right = (tensor_bits(folder / "agent.safetensors") for folder in newest)
    names = left.keys() | right.keys()
    return {
        "different": sum(left.get(name) != right.get(name) for name in names),
        "tensors": len(names),
        "steps": [int(folder.name.rpartition("-")[2]) for folder in newest],
    }


FAULTS: dict[str, Callable[..., dict[str, Any]]] = {
    "kill-in-save": lambda folder, kills, seed: kill_in_save(Path(folder), int(kills), int(seed)),
    "full-disk": lambda folder: full_disk(Path(folder)),
    "hostile": lambda folder: hostile(Path(folder)),
    "nonfinite": lambda run: nonfinite(Path(run)),
    "different-tensors": lambda a, b: different_tensors(Path(a), Path(b)),
}

if __name__ == "__main__":
    print(json.dumps(FAULTS[sys.argv[1]](*sys.argv[2:])))
