"""Run directories with known curves, written by the same files that training writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forethought.config import layer
from forethought.tracking import CsvFile, RunDirectory
from forethought.tracking.columns import EPISODE, EVALUATION, train_columns

TASK = "dmc:cartpole-swingup"
CONFIG: dict[str, Any] = {
    "agent_name": "stub",
    "task": TASK,
    "seed": 1,
    "steps": 50_000,
    "agent": {"horizon": 3, "mpc": True, "model": {"size": 1}},
    "track": {"console": True},
}


def make_run(
    path: Path,
    scores: dict[int, float],
    *,
    seed: int = 1,
    task: str = TASK,
    agent: str = "stub",
    random: float | None = 50.0,
    ms: float = 20.0,
    status: str = "done",
    config: dict[str, Any] | None = None,
) -> RunDirectory:
    """A run whose evaluations have these mean returns by env_frames."""
    own = {"agent_name": agent, "task": task, "seed": seed}
    run = RunDirectory.create(path, layer(CONFIG, config or {}, own), agent, task, seed)
    run.update(status=status, random_score=random)
    rows = {at: {"agent_steps": at // 2, "env_frames": at, "wall_s": 1.0} for at in scores}
    evaluations = CsvFile(run.eval_csv, EVALUATION)
    for at, score in scores.items():
        evaluations.append({**rows[at], "eval_episodes": 10, "n_failed": 0, "return_mean": score})
    evaluations.close()
    train = CsvFile(run.train_csv, train_columns(["total_loss"]))
    for at in scores or {2000: 0.0}:
        row = {"agent_steps": at // 2, "env_frames": at, "updates_per_s": 30.0}
        train.append({**row, "ms_per_agent_step": ms})
    train.close()
    episodes = CsvFile(run.episodes_csv, EPISODE)
    episodes.append({"agent_steps": 500, "env_frames": 1000, "return": 12.0})
    episodes.close()
    run.event("started")
    return run
