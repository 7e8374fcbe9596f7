"""Environments with pictures, by name: `gym:tests.pictures:pictures/Grey-v0`, also in workers."""

from __future__ import annotations

import os
import signal
from typing import Any

import gymnasium
import numpy as np

from tests.stubs import CounterEnv, Step


class GreyEnv(CounterEnv):
    """A counter whose picture after t steps is grey 20 t, [20, 30]; ends at step 5.

    `fault` does something else instead: 'raise' or 'kill' when drawing, 'float' and 'empty' for
    pictures that are none, 'rate' for a rate that is none, 'moody' for rewards that depend on
    whether pictures are drawn.
    """

    metadata = {"render_modes": ["rgb_array", "human"], "render_fps": 20}
    shown: list[int] = []
    """Steps at which a window was drawn, over all instances."""

    def __init__(self, render_mode: str | None = None, fault: str | None = None) -> None:
        super().__init__()
        self.render_mode, self.fault = render_mode, fault
        if fault == "rate":
            self.metadata = {**self.metadata, "render_fps": None}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        begun = super().reset(seed=seed)
        if self.render_mode == "human":
            self.shown.append(self.t)
        return begun

    def step(self, action: Any) -> Step:
        obs, reward, terminated, truncated, info = super().step(action)
        if self.render_mode == "human":
            self.shown.append(self.t)
        if self.fault == "moody" and self.render_mode is not None:
            reward += 1.0
        return obs, reward, terminated, truncated, info

    def render(self) -> Any:
        if self.fault == "raise":
            raise RuntimeError("the lens cap is on")
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "empty":
            return np.zeros((0, 0, 3), np.uint8)
        picture = np.full((20, 30, 3), 20 * self.t, np.uint8)
        return picture / 255 if self.fault == "float" else picture


for _name, _fault in [
    ("Grey", None),
    ("Raises", "raise"),
    ("Kills", "kill"),
    ("Floats", "float"),
    ("Empty", "empty"),
    ("Rateless", "rate"),
    ("Moody", "moody"),
]:
    if f"pictures/{_name}-v0" not in gymnasium.registry:
        gymnasium.register(f"pictures/{_name}-v0", GreyEnv, kwargs={"fault": _fault})
