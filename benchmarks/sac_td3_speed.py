"""SAC and TD3 beside Stable-Baselines3: agent steps per second of the whole trainer on both sides.

    python benchmarks/sac_td3_speed.py [--agents sac td3] [--rounds 8] [--threads 1 2]

Both have the same task, networks, batch, rates, delay, exploration and one update per agent step,
and log to CSV. Each side runs with one environment, four and eight, on one thread and on two; for
each number of threads the ratio is that of the fastest of ours to the fastest of theirs, and last
stands that of the fastest of all, whatever the threads. What is not measured: start-up, random play
before learning, the first chunk, evaluations and checkpoints (which the other side does not make by
itself).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from beside_sb3 import Pace, Side, alternate, own_channel, summary
from results import carry_out, not_its_own, write

TASK = "HalfCheetah-v5"
TARGET = 1.3
LEARNING_STARTS = 1_000
ENVS = (1, 4, 8)
"""Environments of either side; the fastest number counts."""
SHARED = {
    "task": TASK,
    "hidden": [256, 256],
    "critics": 2,
    "batch_size": 256,
    "updates_per_agent_step": 1,
    "gamma": 0.99,
    "tau": 0.005,
    "learning_rate": 3e-4,
    "replay_rows": 1_000_000,
    "learning_starts_agent_steps": LEARNING_STARTS,
}
OWN = {
    "sac": {"temperature": "learned, from 1", "target_entropy": "minus the action's dimensions"},
    "td3": {
        "policy_delay": 2,
        "exploration_noise": 0.1,
        "target_noise": 0.2,
        "target_noise_clip": 0.5,
    },
}
"""What both sides have, in all and by agent."""


def ours(options: argparse.Namespace, pace: Pace, folder: Path) -> None:
    """The trainer of `forethought train`; it passes a named point after each step."""
    import forethought
    from forethought import files

    files.fault_point = lambda stage: (
        pace.step(int(stage[5:])) if stage.startswith("step-") else None
    )
    forethought.train(
        options.agent,
        f"gym:{TASK}",
        presets=f"{options.agent}_mujoco",
        out=folder / "run",
        env={"num_envs": options.envs},
        train={
            "seed_agent_steps": LEARNING_STARTS,
            "checkpoint_every_agent_steps": 0,
            "threads": options.threads[0],
        },
        eval={"every_agent_steps": 0, "episodes": 1},
        track={"console": False},
    )


def theirs(options: argparse.Namespace, pace: Pace, folder: Path) -> None:
    """`learn` of Stable-Baselines3."""
    import numpy as np
    import torch
    from stable_baselines3 import SAC, TD3
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.logger import configure
    from stable_baselines3.common.noise import NormalActionNoise

    class Steps(BaseCallback):
        def _on_step(self) -> bool:
            pace.step(self.num_timesteps)
            return True

    torch.set_num_threads(options.threads[0])
    env = make_vec_env(TASK, n_envs=options.envs, seed=1)
    shared: dict[str, Any] = {
        "policy_kwargs": {"net_arch": SHARED["hidden"], "n_critics": SHARED["critics"]},
        "learning_rate": SHARED["learning_rate"],
        "batch_size": SHARED["batch_size"],
        "gamma": SHARED["gamma"],
        "tau": SHARED["tau"],
        "buffer_size": SHARED["replay_rows"],
        "learning_starts": LEARNING_STARTS,
        "train_freq": 1,  # a step of all environments, and then as many updates
        "gradient_steps": options.envs,
        "device": "cpu",
        "seed": 1,
    }
    if options.agent == "sac":
        model: Any = SAC("MlpPolicy", env, **shared)
    else:
        size = env.action_space.shape[0]  # type: ignore[index]
        own = OWN["td3"]
        noise = NormalActionNoise(np.zeros(size), own["exploration_noise"] * np.ones(size))
        model = TD3(
            "MlpPolicy",
            env,
            action_noise=noise,
            policy_delay=own["policy_delay"],
            target_policy_noise=own["target_noise"],
            target_noise_clip=own["target_noise_clip"],
            **shared,
        )
    model.set_logger(configure(str(folder), ["csv"]))
    model.learn(10**9, callback=Steps())


def run_side(options: argparse.Namespace) -> None:
    """This process is one of the sides."""
    pace = Pace(LEARNING_STARTS, options.chunk, own_channel())
    with tempfile.TemporaryDirectory() as folder:
        (ours if options.side == "ours" else theirs)(options, pace, Path(folder))


def measure(agent: str, threads: int, options: argparse.Namespace) -> dict[str, Any]:
    """Rounds of both sides with each number of environments."""
    print(f"{agent}, {threads} threads: {json.dumps(SHARED | OWN[agent])}")
    common = [__file__, f"--agent={agent}", f"--threads={threads}", f"--chunk={options.chunk}"]
    sides = [
        Side(f"{name}_{n}_envs", [*common, f"--side={name}", f"--envs={n}"], threads)
        for n in ENVS
        for name in ("ours", "sb3")
    ]
    rounds = alternate(sides, options.rounds)
    for side in sides:
        side.close()
    found: dict[str, Any] = summary(rounds)
    faster = {
        name: max(ENVS, key=lambda n: found[f"{name}_{n}_envs_median"]) for name in ("ours", "sb3")
    }
    mine, other = (f"{name}_{faster[name]}_envs" for name in ("ours", "sb3"))
    ratios = sorted(row[mine] / row[other] for row in rounds)
    found |= {"faster_envs": faster, "ratio_median": statistics.median(ratios)}
    found |= {"ratio_lowest": ratios[0], "ratio_target": TARGET}
    print(
        f"  {agent}, {threads} threads: ours with {faster['ours']} environments "
        f"{found[f'{mine}_median']:.1f}/s, SB3 with {faster['sb3']} "
        f"{found[f'{other}_median']:.1f}/s: ratio median {found['ratio_median']:.2f}, "
        f"lowest {found['ratio_lowest']:.2f} (target {TARGET})"
    )
    return {"summary": found, "rounds": rounds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--agents", nargs="+", default=["sac", "td3"], choices=["sac", "td3"])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--chunk", type=int, default=600, help="agent steps of a round")
    parser.add_argument(
        "--threads", type=int, nargs="+", default=[1, 2], help="of torch, on both sides"
    )
    for name, kind in (("--side", str), ("--agent", str), ("--envs", int)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side is not None:
        run_side(options)
        return
    trial = bool(not_its_own(parser, options))
    found = {
        agent: {f"threads_{n}": measure(agent, n, options) for n in options.threads}
        for agent in options.agents
    }
    for agent, by_threads in found.items():
        medians = {
            side: max(
                own["summary"][f"{side}_{n}_envs_median"]
                for own in by_threads.values()
                for n in ENVS
            )
            for side in ("ours", "sb3")
        }
        ratio = medians["ours"] / medians["sb3"]
        by_threads["fastest_of_all"] = {**medians, "ratio": ratio}
        print(f"{agent}, the fastest of ours to the fastest of SB3: {ratio:.2f} (target {TARGET})")
    settings = SHARED | {"threads": options.threads, "chunk_agent_steps": options.chunk}
    settings |= {"environments": ENVS, "by_agent": OWN}
    result = {"stable_baselines3": version("stable-baselines3"), "settings": settings}
    if not trial:
        print(f"written: {write('sac_td3_speed', {**result, 'agents': found})}")


if __name__ == "__main__":
    carry_out(main)
