"""How long it takes to draw 256 slices of 4 rows, from a large replay and from a small one.

A row is that of cheetah-run (17 observations, 6 actions), episodes have 501 rows. The target is
less than 1 ms, whatever the number of rows. The peer is TorchRL's slice sampler with the settings
of the official TD-MPC2 code; without `pip install torchrl` only our own numbers are measured. All
replays take turns, so that a busy machine slows every side.

    python benchmarks/replay_speed.py [--rounds 500] [--rows 1000000 10000]
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch

from forethought.config import EpisodeReplayConfig, ReplayConfig, TransitionReplayConfig
from forethought.replay import Replay
from forethought.spaces.spec import EnvSpec
from results import carry_out, median_p10, not_its_own, write

OBS, ACTION, EPISODE_ROWS = 17, 6, 501
SLICES, SLICE_ROWS = 256, 4
TARGET_MS = 1.0

SPEC = EnvSpec(
    task="synthetic",
    observation_space=gymnasium.spaces.Box(-np.inf, np.inf, (OBS,), np.float32),
    action_space=gymnasium.spaces.Box(-1, 1, (ACTION,), np.float32),
    max_episode_steps=EPISODE_ROWS - 1,
    action_repeat=2,
    terminates=False,
)


def fill_ours(config: ReplayConfig) -> tuple[Replay, float]:
    """A full replay, and the microseconds that adding one row took."""
    rng = np.random.default_rng(0)
    replay = Replay(SPEC, config, 1, SLICE_ROWS, rng, torch.device("cpu"))
    obs = rng.standard_normal((EPISODE_ROWS, OBS), np.float32)
    action = rng.uniform(-1, 1, (EPISODE_ROWS, ACTION)).astype(np.float32)
    began = time.perf_counter()
    for i in range(config.capacity_rows):
        t = i % EPISODE_ROWS
        row = {
            "obs": obs[t],
            "action": action[t],
            "reward": 1.0,
            "terminated": False,
            "truncated": t == EPISODE_ROWS - 1,
            "is_first": t == 0,
        }
        replay.add(row, 0)
    replay.close_episode(0)
    return replay, (time.perf_counter() - began) / config.capacity_rows * 1e6


def fill_torchrl(rows: int) -> Callable[[], Any]:
    """TorchRL's replay with the same rows; returns its `sample`."""
    rl = importlib.import_module("torchrl.data.replay_buffers")
    tensordict = importlib.import_module("tensordict")
    buffer = rl.ReplayBuffer(
        storage=rl.LazyTensorStorage(rows, device="cpu"),
        sampler=rl.SliceSampler(num_slices=SLICES, traj_key="episode", strict_length=True),
        batch_size=SLICES * SLICE_ROWS,
    )
    columns = {
        "obs": torch.randn(rows, OBS),
        "action": torch.rand(rows, ACTION),
        "reward": torch.ones(rows),
        "terminated": torch.zeros(rows),
        "episode": torch.arange(rows) // EPISODE_ROWS,
    }
    buffer.extend(tensordict.TensorDict(columns, batch_size=[rows]))
    return lambda: buffer.sample()


def has_torchrl() -> bool:
    try:
        importlib.import_module("torchrl.data.replay_buffers")
    except ImportError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=500, help="batches drawn per replay")
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 10_000])
    options = parser.parse_args()
    trial = bool(not_its_own(parser, options))
    peer = has_torchrl()
    if not peer:
        print("torchrl is not installed: no peer is measured.")

    draw: dict[str, Callable[[], Any]] = {}
    add_us: dict[str, float] = {}
    for rows in options.rows:
        for config in (
            EpisodeReplayConfig(capacity_rows=rows),
            TransitionReplayConfig(capacity_rows=rows),
        ):
            name = f"{config.kind} {rows}"
            replay, add_us[name] = fill_ours(config)
            print(f"{name}: {replay.describe()}; adding a row takes {add_us[name]:.1f} us")
            draw[name] = lambda replay=replay: replay.sample(SLICES)
        if peer:
            draw[f"torchrl {rows}"] = fill_torchrl(rows)

    values: dict[str, list[float]] = {name: [] for name in draw}
    for turn in range(options.rounds + 10):
        for name, sample in draw.items():
            began = time.perf_counter()
            sample()
            if turn >= 10:  # the first ones warm up
                values[name].append((time.perf_counter() - began) * 1e3)

    summary = {}
    print(f"{SLICES} slices of {SLICE_ROWS} rows, ms per batch (target: under {TARGET_MS:g}):")
    for name, times in values.items():
        median, p10 = median_p10(times)
        summary[name] = {"median_ms": median, "p10_ms": p10}
        if name.startswith("torchrl"):
            ours = median_p10(values[name.replace("torchrl", "episodes")])[0]
            summary[name]["times_ours"] = median / ours
        note = f", {summary[name]['times_ours']:.1f} times ours" if len(summary[name]) > 2 else ""
        print(f"  {name:22} median {median:.3f}, p10 {p10:.3f}{note}")
    result = {
        "target_ms": TARGET_MS,
        "peer": "torchrl" if peer else "torchrl is not installed",
        "summary": summary,
        "add_row_us": add_us,
        "sample_ms": values,
    }
    if not trial:
        print(f"Every value is in {write('replay_speed', result)}.")


if __name__ == "__main__":
    carry_out(main)
