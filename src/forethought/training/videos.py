"""Videos of evaluations while a run trains.

Of the evaluation only the actions are kept. The episode is then played again in a process of its
own, which draws the pictures: no environment, stream or network of the run takes part, and whatever
a graphics driver does, the run goes on as if there were no videos. Strategy for errors: as for a
sink; a failure is warned about once, counted, and after five of them no more videos are tried.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from forethought.config import RunConfig
from forethought.envs import EpisodeLog
from forethought.envs.episodes import EvaluationInterrupted
from forethought.envs.film import Recorded
from forethought.envs.protocols import evaluation_options
from forethought.tracking import Tracker
from forethought.tracking.sinks import MAX_FAILURES
from forethought.tracking.video import VideoError
from forethought.training.evaluate import EvalResult
from forethought.training.watch import film

log = logging.getLogger("forethought")


class EvaluationVideos:
    """Films the first episode of those evaluations that the configuration asks for."""

    def __init__(self, config: RunConfig, tracker: Tracker) -> None:
        self.config, self.tracker = config, tracker
        self.folder = tracker.run.path / "videos"
        self.failures = 0
        """In this process."""

    def due(self, index: int) -> bool:
        """Whether evaluation `index`, counted from 1, is filmed."""
        every = self.config.eval.video_every_evaluations
        return every > 0 and (index - 1) % every == 0 and self.failures < MAX_FAILURES

    def film(
        self,
        recorded: EpisodeLog,
        result: EvalResult,
        step: int,
        polls: dict[str, Callable[..., Any]],
    ) -> None:
        """Writes the video of a recorded episode; `polls` are those of the episode runner."""
        file = self.folder / f"step-{step:09d}.mp4"
        title = f"{self.config.task}, {self.config.agent_name} at step {step:,}"
        protocol = self.config.eval.protocol
        made_with = evaluation_options(self.config.task, self.config.env, protocol)
        try:
            self.folder.mkdir(exist_ok=True)
            played = film(
                Recorded(recorded),
                [recorded.seed],
                self.config.task,
                made_with,
                file,
                title,
                polls=polls,
                workers=True,
                timeout_seconds=self.config.env.timeout_seconds,
            )
            again = played.episodes[0].total
            before = dict(zip(result.seeds, result.returns)).get(recorded.seed)
            if again != before:
                file.unlink()
                raise VideoError(
                    f"The episode had return {before}, but {again} when it was played again for "
                    "its video: the environment is not a function of its seed and the actions."
                )
        except EvaluationInterrupted:
            return  # the run is being stopped, and goes on without this video
        except Exception as error:  # noqa: BLE001 - as for a sink: no picture ends a run
            self._failed(error)
            return
        self.tracker.event("video", file=file.name)
        self.tracker.video(file)

    def _failed(self, error: Exception) -> None:
        self.failures += 1
        if self.failures == 1:
            log.warning("The video of the evaluation failed, training goes on: %s", error)
        last = self.failures >= MAX_FAILURES
        kind = "videos-disabled" if last else "video-failed"
        self.tracker.event(kind, failures=self.failures, reason=str(error))
