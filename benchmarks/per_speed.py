"""How long it takes to draw 32 transitions by priority from a million, and to set their priorities.

One transition is a pair of observations of 17 numbers, so that the tree and not the copying of
frames is measured; with `--atari` it is two stacks of four 84 x 84 frames from a ring of
`--atari_rows`, by priority alone, and what that takes of main memory is told. The target is 0.3 ms
for both together, whatever the number of rows. Uniform draws, which set no priorities, and a small
replay stand beside it; all take turns, so that a busy machine slows every side.

    python benchmarks/per_speed.py [--rounds 1000] [--rows 1000000 10000] [--no-atari]
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

import gymnasium
import numpy as np
import torch

from forethought.config import PrioritizedReplayConfig, ReplayConfig, UniformReplayConfig
from forethought.replay import NStepReplay
from forethought.spaces.spec import EnvSpec
from results import carry_out, median_p10, not_its_own, write

OBS, EPISODE_ROWS, ENVS, N_STEP, BATCH = 17, 501, 8, 3, 32
TARGET_MS = 0.3
VECTORS = gymnasium.spaces.Box(-np.inf, np.inf, (OBS,), np.float32)
FRAMES = gymnasium.spaces.Box(0, 255, (84, 84), np.uint8)


def fill(
    config: ReplayConfig, space: gymnasium.spaces.Box, stack: dict[str, int]
) -> tuple[NStepReplay, float]:
    """A full replay with priorities of all sizes, and the microseconds that adding a row took."""
    actions = gymnasium.spaces.Discrete(6)
    spec = EnvSpec("synthetic", space, actions, EPISODE_ROWS - 1, 1, False)
    rng = np.random.default_rng(0)
    replay = NStepReplay(spec, config, ENVS, N_STEP, 0.99, rng, torch.device("cpu"), stack)
    obs = np.zeros(space.shape, space.dtype)
    began = time.perf_counter()
    for i in range(config.capacity_rows // ENVS):
        t = i % EPISODE_ROWS
        row = {
            "obs": obs,
            "action": 1,
            "reward": 1.0,
            "terminated": False,
            "truncated": t == EPISODE_ROWS - 1,
            "is_first": t == 0,
        }
        for env in range(ENVS):
            replay.add(row, env)
    add_us = (time.perf_counter() - began) / config.capacity_rows * 1e6
    if config.kind == "prioritized":
        for _ in range(100):
            batch = replay.sample(4096, beta=0.5)
            replay.update_priorities(batch.rows, rng.exponential(1.0, 4096))
    return replay, add_us


def resident_gb() -> float:
    """What this process has of main memory; pages never written to are not counted."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e9


def turn(replay: NStepReplay, rng: np.random.Generator) -> Callable[[], tuple[float, float]]:
    """One draw and one update of its priorities; the milliseconds of each."""
    beta = 0.5 if replay.kind == "prioritized" else None

    def once() -> tuple[float, float]:
        errors = rng.exponential(1.0, BATCH)
        began = time.perf_counter()
        batch = replay.sample(BATCH, beta=beta)
        drawn = time.perf_counter()
        replay.update_priorities(batch.rows, errors)
        return (drawn - began) * 1e3, (time.perf_counter() - drawn) * 1e3

    return once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1000, help="batches drawn per replay")
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 10_000])
    parser.add_argument(
        "--atari",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also stacks of Atari frames",
    )
    parser.add_argument("--atari_rows", type=int, default=1_000_000)
    options = parser.parse_args()
    trial = bool(not_its_own(parser, options))

    turns: dict[str, Callable[[], tuple[float, float]]] = {}
    add_us: dict[str, float] = {}
    memory_gb: dict[str, float] = {}
    cases = [(f"{rows}", rows, VECTORS, {}) for rows in options.rows]
    if options.atari:
        cases.append((f"{options.atari_rows} atari", options.atari_rows, FRAMES, {"obs": 4}))
    for name, rows, space, stack in cases:
        # A second replay of a million stacks would not fit beside the first.
        kinds = (
            (PrioritizedReplayConfig,) if stack else (PrioritizedReplayConfig, UniformReplayConfig)
        )
        for make in kinds:
            config = make(capacity_rows=rows)
            name_of, before = f"{config.kind} {name}", resident_gb()
            replay, add_us[name_of] = fill(config, space, stack)
            memory_gb[name_of] = resident_gb() - before
            told = f"adding a row takes {add_us[name_of]:.1f} us, all {memory_gb[name_of]:.2f} GB"
            print(f"{name_of}: {replay.describe()}; {told}", flush=True)
            turns[name_of] = turn(replay, np.random.default_rng(1))

    values: dict[str, dict[str, list[float]]] = {
        name: {"sample_ms": [], "update_ms": [], "both_ms": []} for name in turns
    }
    for number in range(options.rounds + 20):
        for name, once in turns.items():
            sample, update = once()
            if number >= 20:  # the first ones warm up
                own = values[name]
                own["sample_ms"].append(sample)
                own["update_ms"].append(update)
                own["both_ms"].append(sample + update)

    summary: dict[str, dict[str, float]] = {}
    print(f"{BATCH} transitions of {N_STEP} steps, ms (target: {TARGET_MS:g} for both):")
    for name, own in values.items():
        median, p10 = median_p10(own["both_ms"])
        parts = {part: median_p10(own[part])[0] for part in ("sample_ms", "update_ms")}
        summary[name] = {"median_ms": median, "p10_ms": p10, **parts}
        apart = f"drawing {parts['sample_ms']:.3f}, updating {parts['update_ms']:.3f}"
        print(f"  {name:26} median {median:.3f} ({apart}), p10 {p10:.3f}")
    result = {"target_ms": TARGET_MS, "batch": BATCH, "n_step": N_STEP, "summary": summary}
    result |= {"add_row_us": add_us, "memory_gb": memory_gb, "ms": values}
    if not trial:
        print(f"Every value is in {write('per_speed', result)}.")


if __name__ == "__main__":
    carry_out(main)
