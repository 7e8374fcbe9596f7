"""Agent steps per second of Atari environments: ours, gymnasium's wrappers and the emulator alone.

Every side plays random actions at action repeat 4, sticky actions 0.25, no-op starts, and shows
stacks of 4 grey frames of 84 x 84; games that end are begun anew within the time. Gymnasium is
reset without a seed, as its users do after the first time: with one it would load the game again.
"emulator" is ALE's act alone, 4 frames to the step: what no environment can exceed on one core.
"idle worker" is a process with nothing to do but to show such a frame: what the way to a worker and
back allows. All sides take turns, so that a busy machine slows every one. Besides, the milliseconds
that loading a game and beginning a new one take.

    python benchmarks/atari_env_speed.py [--game Pong] [--rounds 10] [--seconds 1] [--envs 8]
"""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

from forethought.config import AtariConfig
from forethought.envs import TaskEnv, VectorEnv, make_env
from forethought.replay import FrameStacker
from results import carry_out, median_p10, not_its_own, write

REPEAT, STACK, STICKY = 4, 4, 0.25


class Idle(gymnasium.Env[Any, Any]):
    """Shows the same frame at once."""

    def __init__(self) -> None:
        space: Any = gymnasium.spaces.Box(0, 255, (84, 84), np.uint8)
        self.observation_space = space
        self.action_space = gymnasium.spaces.Discrete(6)
        self.frame = np.zeros((84, 84), np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self.frame, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.frame, 0.0, False, False, {}


def idle() -> TaskEnv:
    return TaskEnv(Idle(), action_repeat=1)


def ours(env: VectorEnv) -> Callable[[], int]:
    """One decision everywhere, stacked; the number of decisions."""
    rng, n = np.random.default_rng(0), env.num_envs
    stacker = FrameStacker({"obs": STACK}, "zeros", n)
    stacker.push(env.reset()[0], np.ones(n, np.bool_))
    actions = int(env.single_action_space.n)  # type: ignore[attr-defined]

    def step() -> int:
        obs, _, terminated, truncated, _ = env.step(rng.integers(actions, size=n))
        over = terminated | truncated
        if over.any():
            obs, _ = env.reset(options={"reset_mask": over})
        stacker.push(obs, over)
        return n

    return step


def gymnasiums(game: str) -> Callable[[], int]:
    made = gymnasium.make(f"ALE/{game}-v5", frameskip=1, repeat_action_probability=STICKY)
    wrapped = AtariPreprocessing(made, frame_skip=REPEAT)
    env = FrameStackObservation(wrapped, STACK, padding_type="zero")
    rng = np.random.default_rng(0)
    env.reset(seed=0)
    actions = int(env.action_space.n)  # type: ignore[attr-defined]

    def step() -> int:
        _, _, terminated, truncated, _ = env.step(int(rng.integers(actions)))
        if terminated or truncated:
            env.reset()
        return 1

    return step


def emulator(rom: str) -> Callable[[], int]:
    ale_py = importlib.import_module("ale_py")
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    ale = ale_py.ALEInterface()
    ale.setFloat("repeat_action_probability", STICKY)
    ale.loadROM(importlib.import_module("ale_py.roms").get_rom_path(rom))
    ale.reset_game()
    rng, actions = np.random.default_rng(0), ale.getMinimalActionSet()

    def step() -> int:
        action = actions[int(rng.integers(len(actions)))]
        for _ in range(REPEAT):
            ale.act(action)
        if ale.game_over():
            ale.reset_game()
        return 1

    return step


def speed(step: Callable[[], int], seconds: float) -> float:
    """Agent steps per second."""
    steps, began = 0, time.perf_counter()
    while (passed := time.perf_counter() - began) < seconds:
        steps += step()
    return steps / passed


def beginnings(make: Callable[..., VectorEnv], times: int) -> dict[str, float]:
    """Milliseconds to load a game and to begin a new one."""
    taken: dict[str, list[float]] = {"load": [], "reset": []}
    for seed in range(times):
        began = time.perf_counter()
        env = make(1)
        loaded = time.perf_counter()
        env.reset_one(0, seed)
        taken["load"].append(1e3 * (loaded - began))
        taken["reset"].append(1e3 * (time.perf_counter() - loaded))
        env.close()
    return {f"{name}_ms_median": median_p10(found)[0] for name, found in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--game", default="Pong")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=1.0, help="per side and round")
    parser.add_argument("--envs", type=int, default=8, help="environments of the vector forms")
    options = parser.parse_args()
    trial = bool(not_its_own(parser, options))
    importlib.import_module("ale_py")
    from forethought.envs import atari

    chosen = AtariConfig(sticky_actions=STICKY)
    make = functools.partial(make_env, f"atari:{options.game}", atari=chosen)
    cores = len(os.sched_getaffinity(0))
    envs = {
        "ours, 1": make(1),
        f"ours, {options.envs}": make(options.envs),
        f"ours, {options.envs} in workers": make(options.envs, workers=True),
        "idle worker": VectorEnv([idle], workers=True),
    }
    sides = {name: ours(env) for name, env in envs.items()}
    sides["gymnasium"] = gymnasiums(options.game)
    sides["emulator"] = emulator(atari.ROMS[options.game])
    values: dict[str, list[float]] = {name: [] for name in sides}
    try:
        for turn in range(options.rounds + 1):
            for name, step in sides.items():
                found = speed(step, options.seconds)
                if turn > 0:  # the first one warms up
                    values[name].append(found)
    finally:
        for env in envs.values():
            env.close()
    summary: dict[str, Any] = {}
    print(f"{options.game}, agent steps per second on {cores} cores (action repeat {REPEAT}):")
    for name, found in values.items():
        median, p10 = median_p10(found)
        over = [a / b for a, b in zip(found, values["gymnasium"])]
        ratio, _ = median_p10(over)
        summary[name] = {"median": median, "p10": p10, "over_gymnasium_median": ratio}
        print(f"  {name:24s} {median:8.0f}, p10 {p10:8.0f}; {ratio:.2f} x gymnasium, by rounds")
    began = beginnings(make, options.rounds)
    print(
        f"  loading takes {began['load_ms_median']:.0f} ms, a reset {began['reset_ms_median']:.1f}"
    )
    if not trial:
        result = {"game": options.game, "cores": cores, "action_repeat": REPEAT,
                  "sticky_actions": STICKY, "stack": STACK, "seconds": options.seconds,
                  "summary": summary, "beginnings": began, "rounds": values}  # fmt: skip
        print(f"written: {write('atari_env_speed', result)}")


if __name__ == "__main__":
    carry_out(main)
