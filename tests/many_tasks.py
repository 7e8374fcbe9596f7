"""Two small tasks of unequal shapes, for one agent: gym:tests.many_tasks:tasks/Short-v0."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class PointEnv(gymnasium.Env):
    """The state drifts with the action, and staying near zero is rewarded."""

    terminates = False

    def __init__(self, width: int, low: tuple[float, ...], high: tuple[float, ...]) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (width,), np.float32)
        self.action_space = spaces.Box(np.array(low, np.float32), np.array(high, np.float32))
        self.x = np.zeros(width, np.float32)
        self.received: list[Any] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.x = self.np_random.normal(size=self.x.shape).astype(np.float32)
        self.received = []
        return self.x, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.received.append(np.array(action))
        self.x = (0.9 * self.x + 0.1 * float(np.mean(action))).astype(np.float32)
        return self.x, float(np.exp(-np.square(self.x).sum())), False, False, {}


def _register(name: str, limit: int, **kwargs: Any) -> None:
    if f"tasks/{name}-v0" not in gymnasium.registry:
        gymnasium.register(f"tasks/{name}-v0", PointEnv, max_episode_steps=limit, kwargs=kwargs)


_register("Short", 4, width=2, low=(-1.0,), high=(1.0,))
_register("Long", 9, width=3, low=(-2.0, -1.0), high=(4.0, 1.0))
