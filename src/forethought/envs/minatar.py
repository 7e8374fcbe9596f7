"""`minatar:<game>`: the five games of MinAtar with their own defaults (sticky actions, ramping)."""

from __future__ import annotations

import colorsys
import importlib
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from forethought.config import unknown
from forethought.envs.families import LIST_HINT, Built, require_extra, require_images

GAMES = ("asterix", "breakout", "freeway", "seaquest", "space_invaders")
MAX_FRAMES = 5000
CELL = 16
"""Pixels per side of a cell in pictures."""
TIMED = ("freeway",)
"""Games that only end when their own timer runs out: a limit, and so a truncation."""


def names() -> list[str]:
    """All games."""
    return list(GAMES)


def check(name: str) -> None:
    """Refuse an unknown game, or a missing extra."""
    if name not in GAMES:
        raise unknown("task", f"minatar:{name}", [f"minatar:{game}" for game in GAMES], LIST_HINT)
    require_extra(f"minatar:{name}", "minatar", "minatar")


def build(name: str, render_mode: str | None, obs: str | None = None) -> Built:
    """The game with MinAtar's defaults."""
    env = MinAtarEnv(name, render_mode)
    require_images(f"minatar:{name}", obs, env)
    return Built(env, 1, MAX_FRAMES, terminates=name not in TIMED)


class MinAtarEnv(gymnasium.Env[NDArray[np.bool_], np.int64]):
    """One game: ten by ten cells with a channel per kind of object, all six actions."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}

    def __init__(self, game: str, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self._name = game
        self._make = importlib.import_module("minatar").Environment
        self._game = self._make(game)
        shape = tuple(self._game.state_shape())
        cells: Any = gymnasium.spaces.Box(0, 1, shape, np.bool_)
        self.observation_space = cells
        self.action_space = gymnasium.spaces.Discrete(self._game.num_actions())

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.bool_], dict[str, Any]]:
        """A new game. MinAtar's own reset keeps the last action, which sticky actions may repeat,
        so a fresh game is built: the episode is a function of (seed, actions) alone."""
        super().reset(seed=seed)
        self._game = self._make(self._name)
        self._game.seed(int(self.np_random.integers(2**31)))
        self._game.reset()
        return self._state(), {}

    def step(self, action: np.int64) -> tuple[NDArray[np.bool_], float, bool, bool, dict[str, Any]]:
        """One frame of the game."""
        reward, ended = self._game.act(int(action))
        timed = self._name in TIMED
        return self._state(), float(reward), bool(ended and not timed), bool(ended and timed), {}

    def render(self) -> NDArray[np.uint8] | None:
        """The cells in the colour of their highest channel."""
        if self.render_mode is None:
            return None
        state = self._state()
        channels = state.shape[2]
        hues = [colorsys.hsv_to_rgb(c / channels, 0.7, 1.0) for c in range(channels)]
        palette = np.array([(0.0, 0.0, 0.0), *hues])
        top = (state * np.arange(1, channels + 1)).max(axis=2)  # [10, 10], 0 where empty
        picture: NDArray[np.uint8] = (palette[top] * 255).astype(np.uint8)
        return picture.repeat(CELL, axis=0).repeat(CELL, axis=1)

    def _state(self) -> NDArray[np.bool_]:
        return np.array(self._game.state(), np.bool_)
