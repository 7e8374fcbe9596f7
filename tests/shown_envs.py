"""Environments that show images and dicts, by name: `gym:tests.shown_envs:shown/Ball-v0`."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

SIDE = 12


class BallEnv(gymnasium.Env):
    """A bright pixel that the action pushes along a line: [12, 12, 3] bytes, reward in the middle.

    The row is drawn anew with each seed; a byte of the corner counts the steps, so that no two
    frames of an episode are equal.
    """

    terminates = False

    def __init__(self) -> None:
        self.observation_space: Any = spaces.Box(0, 255, (SIDE, SIDE, 3), np.uint8)
        self.action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
        self.t, self.row, self.place = 0, 0, 0.0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t, self.row = 0, int(self.np_random.integers(SIDE))
        self.place = float(self.np_random.uniform(0, SIDE - 1))
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        self.place = float(np.clip(self.place + action[0], 0, SIDE - 1))
        reward = 1.0 - abs(self.place - SIDE / 2) / SIDE
        return self.observe(), reward, False, False, {}

    def picture(self) -> Any:
        frame = np.zeros((SIDE, SIDE, 3), np.uint8)
        frame[self.row, round(self.place)] = 255
        frame[0, 0, 0] = self.t % 256
        return frame

    def observe(self) -> Any:
        return self.picture()


class RoomEnv(BallEnv):
    """The same in a nested Dict with everything else: entities, discrete and binary members."""

    def __init__(self) -> None:
        super().__init__()
        inside = {"gear": spaces.Discrete(3, start=1), "lamps": spaces.MultiBinary(2)}
        self.observation_space = spaces.Dict(
            {
                "camera": self.observation_space,
                "craft": spaces.Box(-np.inf, np.inf, (3, 2), np.float32),
                "craft_mask": spaces.MultiBinary(3),
                "inside": spaces.Dict(inside),
                "place": spaces.Box(0, SIDE, (), np.float32),
            }
        )

    def observe(self) -> Any:
        present = np.arange(3) < self.t % 4
        rows = np.where(present, np.float32(self.place), np.float32(1e30))  # absent: anything
        return {
            "camera": self.picture(),
            "craft": np.repeat(rows[:, None], 2, axis=1),
            "craft_mask": present.astype(np.int8),
            "inside": {"gear": 1 + self.t % 3, "lamps": np.array([1, self.t % 2], np.int8)},
            "place": np.float32(self.place),
        }


for _name, _kind in [("Ball", BallEnv), ("Room", RoomEnv)]:
    if f"shown/{_name}-v0" not in gymnasium.registry:
        gymnasium.register(f"shown/{_name}-v0", _kind, max_episode_steps=30)
