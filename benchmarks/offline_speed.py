"""How much slower updates are when they draw from a dataset on the disk than from memory.

A dataset of 10 million narrow rows (4 observations, 1 action; episodes of 501) is made in a
temporary folder. One agent, `tdmpc2_small` on one thread, takes turns: an update from the mapped
files, one from the same rows copied into main memory, so that a busy machine slows both. The target
is 90 percent of the speed from memory. The first updates are drawn from files that the system was
told to forget, and counted apart (`cold`).

    python benchmarks/offline_speed.py [--rows 10000000] [--rounds 100]
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any, Literal, cast

import gymnasium
import numpy as np
import torch

from forethought import presets
from forethought.agents.tdmpc2.agent import TDMPC2
from forethought.agents.tdmpc2.config import TDMPC2Config
from forethought.config import EpisodeReplayConfig, build_run_config
from forethought.data import Dataset, OfflineReplay, from_gym_steps, write_dataset
from forethought.seeding import Streams
from forethought.spaces.spec import EnvSpec
from forethought.training.device import keep_freed_memory
from results import carry_out, median_p10, not_its_own, write

OBS, ACTION, EPISODE_STEPS = 4, 1, 500
SHARD_BYTES = 128 * 2**20  # several shards, as a larger dataset would have
TARGET = 0.9
COLD_ROUNDS = 20

SPEC = EnvSpec(
    task="synthetic",
    observation_space=gymnasium.spaces.Box(-np.inf, np.inf, (OBS,), np.float32),
    action_space=gymnasium.spaces.Box(-1, 1, (ACTION,), np.float32),
    max_episode_steps=EPISODE_STEPS,
    action_repeat=2,
    terminates=False,
)


def make_dataset(path: Path, rows: int) -> float:
    """Random numbers as episodes; returns the seconds that writing took."""
    rng = np.random.default_rng(0)
    ends = np.arange(1, EPISODE_STEPS + 1) == EPISODE_STEPS
    never = np.zeros(EPISODE_STEPS, np.bool_)
    began = time.perf_counter()
    with write_dataset(
        path, [SPEC], ["random numbers"], source="offline_speed", shard_bytes=SHARD_BYTES
    ) as writer:
        while writer.episodes * (EPISODE_STEPS + 1) < rows:
            obs = rng.standard_normal((EPISODE_STEPS + 1, OBS), np.float32)
            action = rng.random((EPISODE_STEPS, ACTION), np.float32) * 2 - 1
            reward = rng.random(EPISODE_STEPS, np.float32)
            writer.append_episode(from_gym_steps(obs, action, reward, never, ends))
    return time.perf_counter() - began


def forget(path: Path) -> None:
    """Ask the system to drop what it keeps of these files in memory."""
    if not hasattr(os, "posix_fadvise"):
        return
    for file in path.rglob("*.npy"):
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def make_agent() -> TDMPC2:
    layers = presets.layers(["tdmpc2_small"], None, "tdmpc2")
    run = build_run_config("tdmpc2", "dmc:cartpole-swingup", TDMPC2Config, layers)
    config = cast(TDMPC2Config, run.agent)
    replay = EpisodeReplayConfig(capacity_rows=10_000)
    return TDMPC2(SPEC, config, replay, streams=Streams(1), device=torch.device("cpu"))


def measure(path: Path, rounds: int) -> dict[str, Any]:
    """Milliseconds of every sample and update, both sides in turns."""
    agent = make_agent()
    batch, slice_rows = agent.config.batch_size, agent.config.horizon + 1
    dataset, cpu = Dataset.open(path), torch.device("cpu")

    def replay(kind: str, storage: Literal["mapped", "memory"]) -> OfflineReplay:
        stream = Streams(1).numpy(f"{kind}-{storage}")
        return OfflineReplay([dataset], SPEC, slice_rows, stream, cpu, kind=kind, storage=storage)

    times: dict[str, dict[str, list[float]]] = {}

    def update(name: str, source: OfflineReplay) -> None:
        began = time.perf_counter()
        drawn = source.sample(batch)
        sampled = time.perf_counter()
        agent.update(drawn, agent.draw_noise())
        ended = time.perf_counter()
        found = times.setdefault(name, {"sample_ms": [], "update_ms": []})
        found["sample_ms"].append((sampled - began) * 1e3)
        found["update_ms"].append((ended - began) * 1e3)

    mapped = replay("episodes", "mapped")
    warm = mapped.sample(batch)
    for _ in range(5):  # the agent's first updates compile and allocate
        agent.update(warm, agent.draw_noise())
    for _ in range(COLD_ROUNDS):
        update("cold", mapped)
    for array in (x for shard in dataset.shards for x in shard.columns.values()):
        array.max()  # as after the first epoch: the system keeps the files that are in use
    sources = {
        "episodes mapped": mapped,
        "episodes memory": replay("episodes", "memory"),
        "transitions mapped": replay("transitions", "mapped"),
        "transitions memory": replay("transitions", "memory"),
    }
    for turn in range(rounds):
        names = list(sources)
        for name in names if turn % 2 else names[::-1]:
            update(name, sources[name])
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=100, help="updates per side")
    options = parser.parse_args()
    trial = bool(not_its_own(parser, options))
    keep_freed_memory()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="offline-speed-") as folder:
        path = Path(folder) / "data"
        seconds = make_dataset(path, options.rows)
        dataset = Dataset.open(path)
        rows, size = dataset.rows, dataset.size_bytes
        print(
            f"{rows:,} rows in {len(dataset.shards)} shards, {size / 1e6:.0f} MB, written and "
            f"hashed in {seconds:.1f} s ({rows / seconds / 1e6:.2f} million rows a second)."
        )
        del dataset
        forget(path)
        times = measure(path, options.rounds)

    summary: dict[str, Any] = {}
    for name, found in times.items():
        summary[name] = {}
        for what, values in found.items():
            median, p10 = median_p10(values)
            summary[name][what] = {"median": median, "p10": p10}
        print(
            f"  {name:20} update median {summary[name]['update_ms']['median']:.2f} ms, "
            f"of which drawing {summary[name]['sample_ms']['median']:.3f} ms"
        )
    ratios = {}
    for kind in ("episodes", "transitions"):
        mapped, memory = (
            summary[f"{kind} {x}"]["update_ms"]["median"] for x in ("mapped", "memory")
        )
        ratios[kind] = memory / mapped
        met = "met" if ratios[kind] >= TARGET else "missed"
        print(f"{kind}: {ratios[kind]:.1%} of the speed from memory (target {TARGET:.0%}: {met})")
    result = {
        "target": TARGET,
        "speed_of_memory": ratios,
        "rows": rows,
        "bytes": size,
        "write_s": seconds,
        "summary": summary,
        "ms": times,
    }
    if not trial:
        print(f"Every value is in {write('offline_speed', result)}.")


if __name__ == "__main__":
    carry_out(main)
