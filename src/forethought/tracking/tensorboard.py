"""TensorBoard files in the run directory, under `tensorboard/`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forethought.tracking.columns import Row
from forethought.tracking.run_directory import RunDirectory
from forethought.tracking.sinks import numbers
from forethought.tracking.video import preview


class TensorBoardSink:
    """Curves over env_frames, in groups 'train', 'episode' and 'eval'."""

    def __init__(self, x: str = "env_frames") -> None:
        """`x` is the counter to draw over; an offline run has no frames, but updates."""
        self._x = x
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

    def video(self, row: Row) -> None:
        """A GIF among the images: TensorBoard shows no other kind of video."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        gif, (width, height) = preview(Path(str(row["file"])))
        image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=gif)
        summary = Summary(value=[Summary.Value(tag="eval/video", image=image)])
        at = int(numbers(row)[self._x])
        self._at(at).file_writer.add_summary(summary, at)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _write(self, group: str, row: Row) -> None:
        values = numbers(row)
        at = int(values[self._x])
        for name, value in values.items():
            self._at(at).add_scalar(f"{group}/{name}", value, global_step=at)

    def _at(self, at: int) -> Any:
        """The writer, opened by what is written first."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # After a resume the curve goes on from its first row; what a killed process had
            # written beyond it is dropped.
            self._writer = SummaryWriter(str(self._folder), purge_step=at)
        return self._writer
