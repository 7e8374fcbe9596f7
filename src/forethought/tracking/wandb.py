"""Weights & Biases. Online, offline or disabled is decided by its own WANDB_MODE variable."""

from __future__ import annotations

from typing import Any

from forethought.tracking.columns import LEADING, Row
from forethought.tracking.run_directory import RunDirectory
from forethought.tracking.sinks import numbers

NAMES_ONE_EPISODE = ("env_index", "seed")
"""No curves: they say which episode it was."""


class WandbSink:
    """Curves over env_frames, with keys 'train/...', 'episode/...' and 'eval/...'.

    W&B keeps one value per key and step, but several environments may end an episode at the same
    step. So their episodes wait until env_frames moves on or another row comes, and are logged as
    their mean, with `episode/count`; episodes.csv has each of them.
    """

    def __init__(self, project: str, x: str = "env_frames") -> None:
        """`x` is the counter to draw over; an offline run has no frames, but updates."""
        self._project, self._x = project, x
        self._run: Any = None
        self._ended: list[dict[str, float]] = []
        """Episodes that ended at one count of env_frames, not yet logged."""

    def start(self, run: RunDirectory) -> None:
        import wandb

        self._directory, about = run, run.run_json
        self._run = wandb.init(
            project=self._project,
            id=about["id"],
            resume="allow",  # a resumed run goes on with the same curves
            dir=str(run.path),
            name=f"{about['task']} {about['agent']} {about['seed']}",
            config=run.config(),
        )
        self._tag()

    def train(self, row: Row) -> None:
        self._log_episodes()
        self._log("train", numbers(row))
        self._tag()

    def episode(self, row: Row) -> None:
        values = {k: v for k, v in numbers(row).items() if k not in NAMES_ONE_EPISODE}
        if self._ended and self._ended[0]["env_frames"] != values["env_frames"]:
            self._log_episodes()
        self._ended.append(values)

    def evaluation(self, row: Row) -> None:
        self._log_episodes()
        self._log("eval", numbers(row))

    def video(self, row: Row) -> None:
        import wandb

        self._log_episodes()
        step = int(numbers(row)[self._x])
        self._run.log({"eval/video": wandb.Video(str(row["file"]), format="mp4")}, step=step)

    def close(self) -> None:
        try:
            self._log_episodes()
            self._tag()
        finally:
            self._run.finish()

    def _tag(self) -> None:
        """Those of the run, such as needs-inspection, beside those that a person gave it there."""
        there = self._run.tags or ()
        missing = tuple(tag for tag in self._directory.run_json["tags"] if tag not in there)
        if missing:
            self._run.tags = (*there, *missing)

    def _log_episodes(self) -> None:
        ended, self._ended = self._ended, []  # emptied first: what cannot be sent must not pile up
        if not ended:
            return
        values: dict[str, float] = {"count": len(ended)}
        for name in dict.fromkeys(name for episode in ended for name in episode):
            known = [episode[name] for episode in ended if name in episode]
            # Counters go on from episode to episode, all else is of one of them.
            values[name] = known[-1] if name in LEADING else sum(known) / len(known)
        self._log("episode", values)

    def _log(self, group: str, values: dict[str, float]) -> None:
        data = {f"{group}/{name}": value for name, value in values.items()}
        self._run.log(data, step=int(values[self._x]))
