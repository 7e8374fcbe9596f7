"""DQN on Pong beside Stable-Baselines3: agent steps per second of the whole trainer on both sides.

    python benchmarks/dqn_speed.py [--rounds 10] [--chunk 1600] [--threads 2] [--workers]

Both have the same game, network, batch, update frequency, optimiser, exploration rate, clipping
and replay size, and log to CSV. Stable-Baselines3 has as many environments as make it faster: each
of its numbers runs beside ours, and the ratio is to the faster one. What is not measured: start-up,
random play before learning, the first chunk, evaluations and checkpoints (which the other side
does not make by itself).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from beside_sb3 import Pace, Side, alternate, own_channel, summary
from results import carry_out, write

TARGET = 1.6
FIRST = 1_600
"""Random decisions before learning."""
SB3_ENVS = (1, 4, 8)
SHARED = {
    "game": "Pong, frame skip 4, no sticky actions, up to 30 no-ops, signs of rewards, 4 frames",
    "network": "Nature, 3 convolutions and 512 units",
    "batch_size": 32,
    "agent_steps_per_update": 4,
    "optimiser": "Adam, 1e-4, epsilon 1e-8",
    "gradient_clip_norm": 10.0,
    "target_period_agent_steps": 1_000,
    "epsilon": 0.01,
    "gamma": 0.99,
    "replay_rows": 20_000,
    "random_agent_steps": FIRST,
}


def ours(options: argparse.Namespace, pace: Pace, folder: Path) -> None:
    """The trainer of `forethought train`; it passes a named point after each step."""
    import forethought
    from forethought import files

    files.fault_point = lambda stage: (
        pace.step(int(stage[5:])) if stage.startswith("step-") else None
    )
    forethought.train(
        "dqn",
        "atari:Pong",
        presets="dqn_dopamine",
        out=folder / "run",
        agent={
            "optimiser": {"lr": 1e-4, "epsilon": 1e-8},
            "grad_clip_norm": 10.0,
            "target": {"period_agent_steps": 1_000},
            "epsilon": {"start": 0.01, "end": 0.01},
        },
        env={
            "num_envs": options.envs,
            "workers": options.workers,
            "atari": {"sticky_actions": 0.0, "noop_max": 30},
        },
        replay={"capacity_rows": SHARED["replay_rows"]},
        train={
            "seed_agent_steps": FIRST,
            "checkpoint_every_agent_steps": 0,
            "threads": options.threads,
        },
        eval={"every_agent_steps": 0, "protocol": None, "episodes": 1},
        track={"console": False},
    )


def theirs(options: argparse.Namespace, pace: Pace, folder: Path) -> None:
    """`learn` of Stable-Baselines3."""
    import ale_py
    import gymnasium
    import torch
    from stable_baselines3 import DQN
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_atari_env
    from stable_baselines3.common.logger import configure
    from stable_baselines3.common.vec_env import VecFrameStack

    gymnasium.register_envs(ale_py)

    class Steps(BaseCallback):
        def _on_step(self) -> bool:
            pace.step(self.num_timesteps)
            return True

    torch.set_num_threads(options.threads)
    n = options.envs
    env = VecFrameStack(make_atari_env("PongNoFrameskip-v4", n_envs=n, seed=1), n_stack=4)
    every = max(1, 4 // n)  # steps of all environments between updates
    model = DQN(
        "CnnPolicy",
        env,
        learning_rate=1e-4,
        buffer_size=SHARED["replay_rows"],
        learning_starts=FIRST,
        batch_size=SHARED["batch_size"],
        gamma=SHARED["gamma"],
        train_freq=every,
        gradient_steps=every * n // 4,
        target_update_interval=SHARED["target_period_agent_steps"],
        exploration_initial_eps=SHARED["epsilon"],
        exploration_final_eps=SHARED["epsilon"],
        max_grad_norm=SHARED["gradient_clip_norm"],
        device="cpu",
        seed=1,
    )
    model.set_logger(configure(str(folder), ["csv"]))
    model.learn(10**9, callback=Steps())


def run_side(options: argparse.Namespace) -> None:
    """This process is one of the sides."""
    pace = Pace(FIRST, options.chunk, own_channel())
    with tempfile.TemporaryDirectory() as folder:
        (ours if options.side == "ours" else theirs)(options, pace, Path(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--chunk", type=int, default=1_600, help="agent steps of a round")
    parser.add_argument("--threads", type=int, default=2, help="of torch, on both sides")
    parser.add_argument("--envs", type=int, default=8, help="of ours")
    parser.add_argument("--workers", action="store_true", help="ours in processes of their own")
    parser.add_argument("--trial", action="store_true", help="write no result")
    parser.add_argument("--side", choices=["ours", "sb3"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side is not None:
        run_side(options)
        return
    settings = SHARED | {"threads": options.threads, "our_envs": options.envs}
    settings |= {"our_workers": options.workers, "sb3_envs": SB3_ENVS}
    print(f"settings: {settings}")
    common = [f"--chunk={options.chunk}", f"--threads={options.threads}"]
    workers = ["--workers"] if options.workers else []
    own = [__file__, "--side=ours", f"--envs={options.envs}", *workers, *common]
    sides = [Side("ours", own, options.threads)]
    for n in SB3_ENVS:
        command = [__file__, "--side=sb3", f"--envs={n}", *common]
        sides.append(Side(f"sb3_{n}_envs", command, options.threads))
    rounds = alternate(sides, options.rounds)
    for side in sides:
        side.close()
    found: dict[str, Any] = summary(rounds)
    best = max(SB3_ENVS, key=lambda n: found[f"sb3_{n}_envs_median"])
    ratios = [row["ours"] / row[f"sb3_{best}_envs"] for row in rounds]
    found |= {"sb3_faster_envs": best, "ratio_median": statistics.median(ratios)}
    found |= {"ratio_lowest": min(ratios), "ratio_target": TARGET}
    print(
        f"ours {found['ours_median']:.1f}/s, SB3 with {best} environments "
        f"{found[f'sb3_{best}_envs_median']:.1f}/s: ratio median {found['ratio_median']:.2f}, "
        f"lowest {found['ratio_lowest']:.2f} (target {TARGET})"
    )
    if not options.trial:
        about = {"stable_baselines3": version("stable-baselines3"), "settings": settings}
        print(f"written: {write('dqn_speed', {**about, 'summary': found, 'rounds': rounds})}")


if __name__ == "__main__":
    carry_out(main)
