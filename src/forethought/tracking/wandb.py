"""Weights & Biases. Online, offline or disabled is decided by its own WANDB_MODE variable."""

from __future__ import annotations

from typing import Any

from forethought.tracking.columns import Row
from forethought.tracking.run_directory import RunDirectory
from forethought.tracking.sinks import numbers


class WandbSink:
    """Curves over env_frames, with keys 'train/...', 'episode/...' and 'eval/...'."""

    def __init__(self, project: str) -> None:
        self._project = project
        self._run: Any = None

    def start(self, run: RunDirectory) -> None:
        import wandb

        about = run.run_json
        self._run = wandb.init(
            project=self._project,
            id=about["id"],
            resume="allow",  # a resumed run goes on with the same curves
            dir=str(run.path),
            name=f"{about['task']} {about['agent']} {about['seed']}",
            config=run.config(),
        )

    def train(self, row: Row) -> None:
        self._log("train", row)

    def episode(self, row: Row) -> None:
        self._log("episode", row)

    def evaluation(self, row: Row) -> None:
        self._log("eval", row)

    def close(self) -> None:
        self._run.finish()

    def _log(self, group: str, row: Row) -> None:
        values = numbers(row)
        data = {f"{group}/{name}": value for name, value in values.items()}
        self._run.log(data, step=int(values["env_frames"]))
