"""Environments with one fault, for both sides of `beside_sb3.py`.

The fault comes at step FAULT_STEP of the environment object, counted over its episodes, which end
after 50 steps.
"""

from __future__ import annotations

import math
import time
from typing import Any

import gymnasium
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from gymnasium.envs.classic_control.pendulum import PendulumEnv

FAULT_STEP = 150
EPISODE_STEPS = 50


class NaNPendulum(PendulumEnv):
    """One reward is NaN."""

    steps = 0

    def step(self, action: Any) -> Any:
        self.steps += 1
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, math.nan if self.steps == FAULT_STEP else reward, terminated, truncated, info


class NaNCartPole(CartPoleEnv):
    """The same with discrete actions."""

    steps = 0

    def step(self, action: Any) -> Any:
        self.steps += 1
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, math.nan if self.steps == FAULT_STEP else reward, terminated, truncated, info


class HangingPendulum(PendulumEnv):
    """One step never returns."""

    steps = 0

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.steps == FAULT_STEP:
            time.sleep(3600)
        return super().step(action)


for _class in (NaNPendulum, NaNCartPole, HangingPendulum):
    gymnasium.register(
        f"faults/{_class.__name__}-v0",
        f"{__name__}:{_class.__name__}",
        max_episode_steps=EPISODE_STEPS,
    )
