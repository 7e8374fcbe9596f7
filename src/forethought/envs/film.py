"""One environment whose every observation is also a picture, and episodes played from a record.

The episode runner plays in it as in any other: a picture is taken after each reset and after each
decision, so the last one shows how the episode ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forethought.config import ForethoughtError
from forethought.envs.episodes import Policy
from forethought.envs.restore import EpisodeLog
from forethought.envs.task_env import Step, TaskEnv
from forethought.envs.vector import VectorEnv
from forethought.spaces import nested
from forethought.spaces.nested import Tree

Picture = NDArray[np.uint8]
"""[height, width, 3]."""


class PictureError(ForethoughtError):
    """An environment gave no picture. Not an EnvError: the episode itself is fine."""


@dataclass(frozen=True)
class Shot:
    """A picture, and what had happened in its episode."""

    picture: Picture
    length: int
    """agent_steps."""
    total: float
    """Sum of the raw rewards."""


class FilmedEnv(VectorEnv):
    """One environment that hands a shot of every observation to `show`."""

    def __init__(self, make: Callable[[], TaskEnv], **options: Any) -> None:
        """`make` builds with `render_mode="rgb_array"`; as a worker, nothing that a graphics driver
        does to its process reaches this one. `options` as in any other."""
        super().__init__([make], **options)
        self.show: Callable[[Shot], None] = lambda shot: None
        self._length, self._total = 0, 0.0

    @property
    def frames_per_second(self) -> float:
        """Decisions per second of the task's own time; 30 where the environment does not say."""
        return float(self.metadata.get("render_fps") or 30.0)

    def reset_one(self, i: int, seed: int | None = None) -> tuple[Tree, dict[str, Any]]:
        """As in any other, and the first picture of the episode."""
        begun = super().reset_one(i, seed)
        self._length, self._total = 0, 0.0
        self._take()
        return begun

    def step_one(self, i: int, action: Tree) -> Step:
        """As in any other, and the picture of what came of it."""
        step = super().step_one(i, action)
        self._length += 1
        self._total += float(step[1])
        self._take()
        return step

    def _take(self) -> None:
        try:
            picture = self.render()[0]
        except ForethoughtError as error:
            raise PictureError(f"There is no picture of the environment: {error}") from error
        shape = np.shape(picture)
        is_picture = len(shape) == 3 and shape[2] == 3 and 0 not in shape
        if not is_picture or getattr(picture, "dtype", None) != np.uint8:
            raise PictureError(
                f"The environment's render gave {type(picture).__name__} of shape {shape}, but "
                "must give an array of uint8 of shape (height, width, 3)."
            )
        self.show(Shot(picture, self._length, self._total))


class Recording:
    """A policy that keeps what it does in the first episode of environment 0."""

    def __init__(self, policy: Policy, log: EpisodeLog) -> None:
        self.policy, self.log = policy, log
        self._over = False

    def start(self, num_envs: int) -> Any:
        return self.policy.start(num_envs)

    def act(
        self, obs: Any, state: Any, first: NDArray[np.bool_], infos: Sequence[dict[str, Any]]
    ) -> tuple[Any, Any]:
        # The row is `first` again when its episode has ended, whether or not another begins.
        self._over = self._over or bool(first[0] and self.log.actions)
        actions, state = self.policy.act(obs, state, first, infos)
        if not self._over:
            self.log.add(nested.index(actions, 0))
        return actions, state


class Recorded:
    """Plays one episode again, action by action."""

    def __init__(self, log: EpisodeLog) -> None:
        self.log = log

    def start(self, num_envs: int) -> int:
        """The state is the number of decisions made."""
        return 0

    def act(
        self, obs: Any, state: int, first: NDArray[np.bool_], infos: Sequence[dict[str, Any]]
    ) -> tuple[Any, int]:
        if state >= len(self.log.actions):
            raise PictureError(
                f"The episode did not end after its {len(self.log.actions)} actions when played "
                "again, so the environment is not a function of its seed and the actions."
            )
        return nested.stack([self.log.actions[state]]), state + 1
