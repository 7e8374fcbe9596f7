"""A dataset in words and numbers, for people and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from forethought.data.dataset import Dataset
from forethought.files import size_in_words


def description(dataset: Dataset) -> dict[str, Any]:
    """Everything that is known without reading rows, JSON-able."""
    episodes = dataset.episodes
    success = episodes["success"]
    tasks = []
    for number, task in enumerate(dataset.tasks):
        known = success[(episodes["task"] == number) & ~np.isnan(success)]
        tasks.append(
            {
                "task": task.name,
                "policy": task.policy,
                **task.spec.shapes,
                "max_episode_steps": task.spec.max_episode_steps,
                "action_repeat": task.spec.action_repeat,
                "episodes": task.episodes,
                "rows": task.rows,
                "returns": asdict(task.returns),
                "lengths_agent_steps": asdict(task.lengths),
                "success_mean": float(known.mean()) if len(known) else None,
            }
        )
    return {
        "path": str(dataset.path),
        "source": dataset.source,
        "rows": dataset.rows,
        "episodes": len(episodes),
        "held_out_episodes": int((episodes["split"] != 0).sum()),
        "shards": len(dataset.shards),
        "bytes": dataset.size_bytes,
        "sha256": dataset.fingerprint,
        "columns": {x.path: f"{x.dtype} {x.shape}" for x in dataset.leaves},
        "tasks": tasks,
    }


def show(datasets: Sequence[Dataset], console: Console) -> None:
    """A table per dataset, a row per task."""
    for dataset in datasets:
        about = description(dataset)
        shards = f"{about['shards']} shard{'s' if about['shards'] > 1 else ''}"
        episodes = f"{about['episodes']:,} episode{'s' if about['episodes'] != 1 else ''}"
        held = about["held_out_episodes"]
        episodes += f" ({held:,} held out)" if held else ""
        console.print(
            f"[bold]{escape(about['path'])}[/]: {about['rows']:,} rows, {episodes}, "
            f"{size_in_words(about['bytes'])} in {shards}; {escape(about['source'])}"
        )
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for name in ("task", "played by", "observations", "actions"):
            table.add_column(name)
        for name in ("episodes", "decisions", "return", "std", "min", "max"):
            table.add_column(name, justify="right")
        for task in about["tasks"]:
            words = [task[key] for key in ("task", "policy", "observations", "actions")]
            returns = task["returns"]
            numbers = [returns[key] for key in ("mean", "std", "min", "max")]
            length = task["lengths_agent_steps"]["mean"]
            table.add_row(
                *map(escape, words),
                f"{task['episodes']:,}",
                f"{length:.6g}",
                *(f"{number:.6g}" for number in numbers),
            )
        console.print(table)
