"""TensorBoard files in the run directory, under `tensorboard/`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forethought.tracking.columns import Row
from forethought.tracking.run_directory import RunDirectory
from forethought.tracking.sinks import numbers


class TensorBoardSink:
    """Curves over env_frames, in groups 'train', 'episode' and 'eval'."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._writer: Any = None

    def start(self, run: RunDirectory) -> None:
        self._folder = run.path / "tensorboard"

    def train(self, row: Row) -> None:
        self._write("train", row)

    def episode(self, row: Row) -> None:
        self._write("episode", row)

    def evaluation(self, row: Row) -> None:
        self._write("eval", row)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _write(self, group: str, row: Row) -> None:
        values = numbers(row)
        env_frames = int(values["env_frames"])
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # After a resume the curve goes on from its first row; what a killed process had
            # written beyond it is dropped.
            self._writer = SummaryWriter(str(self._folder), purge_step=env_frames)
        for name, value in values.items():
            self._writer.add_scalar(f"{group}/{name}", value, global_step=env_frames)
