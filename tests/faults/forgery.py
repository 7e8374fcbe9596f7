"""Checkpoints as an attacker would make them: any content, and checksums that fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forethought import files

NEWEST = "step-000000300"


def newest(run: Path) -> Path:
    """The newest checkpoint of the runs in these tests."""
    return run / "checkpoints" / NEWEST


def forge(checkpoint: Path, name: str, content: bytes) -> None:
    """Put `content` in the place of a file, and make the manifest vouch for it."""
    (checkpoint / name).write_bytes(content)
    manifest = files.read_manifest(checkpoint)
    entry = {"sha256": files.sha256(checkpoint / name), "bytes": len(content)}
    sign(checkpoint, {**manifest.files, name: entry}, manifest.meta)


def sign(checkpoint: Path, named: dict[str, Any], meta: dict[str, Any]) -> None:
    """A manifest with a right checksum of its own."""
    manifest = files.Manifest(files.SCHEMA, named, files.versions(), meta)
    (checkpoint / files.MANIFEST).write_text(manifest.text)


def forge_meta(checkpoint: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change what the manifest says of the run."""
    manifest = files.read_manifest(checkpoint)
    change(manifest.meta)
    sign(checkpoint, manifest.files, manifest.meta)


def forge_json(checkpoint: Path, name: str, keys: str, value: Any) -> None:
    """Set one value of a JSON file: `streams.0.written` of agent.json, say; `DELETE` removes it."""
    data = json.loads((checkpoint / name).read_text())
    *path, last = keys.split(".")
    inner = data
    for key in path:
        inner = inner[int(key) if key.isdigit() else key]
    if value is DELETE:
        del inner[last]
    else:
        inner[int(last) if last.isdigit() else last] = value
    forge(checkpoint, name, json.dumps(data).encode())


DELETE = object()


def forge_tensors(checkpoint: Path, name: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the tensors of a file."""
    tensors = {key: x.clone() for key, x in files.load_tensors(checkpoint / name).items()}
    change(tensors)
    files.save_tensors(checkpoint / name, tensors)
    forge(checkpoint, name, (checkpoint / name).read_bytes())


def forge_block(run: Path, content: bytes) -> str:
    """Put `content` in the place of the newest replay block, and make the checkpoint name it."""
    checkpoint = newest(run)
    agent = json.loads((checkpoint / "agent.json").read_text())
    block = agent["replay"]["streams"][0]["blocks"][-1]
    file = run / "replay" / block["name"]
    file.write_bytes(content)
    block["sha256"] = files.sha256(file)
    forge(checkpoint, "agent.json", json.dumps(agent).encode())
    forge_meta(checkpoint, lambda meta: meta["replay_blocks"].update({file.name: block["sha256"]}))
    return file.name
