"""SAC and TD3 beside Stable-Baselines3: agent steps per second of the whole trainer on both sides.

    python benchmarks/sac_td3_speed.py [--agents sac td3] [--rounds 12] [--threads 1 2]

Each side trains in a process of its own, with acting, replay, updates, episodes and a CSV log, and
stops every `chunk` agent steps until it is told to go on. So the two alternate on one machine, and
a round is one chunk of each, the order turning around from round to round. What is not measured:
start-up, the random phase before learning, the first chunk, evaluation and checkpoints (which
Stable-Baselines3 does not make by itself). Both have the same networks, batch, rates, delay and
exploration, one environment and one update per step.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, TextIO

from results import median_p10, write

TASK = "HalfCheetah-v5"
TARGET = 1.3
LEARNING_STARTS = 1_000
SHARED = {
    "task": TASK,
    "num_envs": 1,
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
"""What both sides have; SAC learns its temperature on both, TD3 has a delay of 2 and noise of 0.1,
and of 0.2 clipped at 0.5 on its targets."""


class Pace:
    """Counts agent steps on one side, and waits for the word at the end of every chunk."""

    def __init__(self, chunk: int, rounds: int, channel: TextIO) -> None:
        self.ends = {LEARNING_STARTS + chunk * (i + 1) for i in range(rounds + 1)}
        self.channel, self.began = channel, 0.0

    def step(self, number: int) -> None:
        if number not in self.ends:
            return
        took = time.perf_counter() - self.began if self.began else 0.0  # the first only warms up
        print(json.dumps(took), file=self.channel, flush=True)
        if not sys.stdin.readline():  # nobody asks any more
            raise SystemExit(0)
        self.began = time.perf_counter()


def ours(agent: str, steps: int, threads: int, pace: Pace, folder: Path) -> None:
    """The trainer of `forethought train`; it passes a named point after each step."""
    import forethought
    from forethought import files

    files.fault_point = lambda stage: (
        pace.step(int(stage[5:])) if stage.startswith("step-") else None
    )
    forethought.train(
        agent,
        f"gym:{TASK}",
        presets=f"{agent}_mujoco",
        out=folder / "run",
        steps=steps,
        train={
            "seed_agent_steps": LEARNING_STARTS,
            "checkpoint_every_agent_steps": 0,
            "threads": threads,
        },
        eval={"every_agent_steps": 0, "episodes": 1},
        track={"console": False},
    )


def theirs(agent: str, steps: int, threads: int, pace: Pace, folder: Path) -> None:
    """`learn` of Stable-Baselines3."""
    import gymnasium
    import numpy as np
    import torch
    from stable_baselines3 import SAC, TD3
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.logger import configure
    from stable_baselines3.common.noise import NormalActionNoise

    class Steps(BaseCallback):
        def _on_step(self) -> bool:
            pace.step(self.num_timesteps)
            return True

    torch.set_num_threads(threads)
    env = gymnasium.make(TASK)
    options: dict[str, Any] = {
        "policy_kwargs": {"net_arch": SHARED["hidden"], "n_critics": SHARED["critics"]},
        "learning_rate": SHARED["learning_rate"],
        "batch_size": SHARED["batch_size"],
        "gamma": SHARED["gamma"],
        "tau": SHARED["tau"],
        "buffer_size": SHARED["replay_rows"],
        "learning_starts": LEARNING_STARTS,
        "train_freq": 1,
        "gradient_steps": 1,
        "device": "cpu",
        "seed": 1,
    }
    if agent == "sac":
        model: Any = SAC("MlpPolicy", env, **options)
    else:
        size = env.action_space.shape[0]  # type: ignore[index]
        noise = NormalActionNoise(np.zeros(size), 0.1 * np.ones(size))
        model = TD3("MlpPolicy", env, action_noise=noise, policy_delay=2, **options)
    model.set_logger(configure(str(folder), ["csv"]))
    model.learn(steps, callback=Steps())


SIDES = {"ours": ours, "sb3": theirs}


class Side:
    """One trainer in a process of its own."""

    def __init__(self, name: str, agent: str, threads: int, options: argparse.Namespace) -> None:
        arguments = [f"--{key}={getattr(options, key)}" for key in ("chunk", "rounds")]
        arguments.append(f"--threads={threads}")
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--side", name, "--agents", agent, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        )
        self._read()  # it has begun to learn and is warm
        self.name, self.chunk = name, options.chunk

    def steps_per_second(self) -> float:
        """Of one more chunk."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return self.chunk / self._read()

    def _read(self) -> float:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"A side of the benchmark ended early: {self.process.args}")
        return float(json.loads(line))

    def close(self) -> None:
        """Lets it end: it reads the end of its input."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def measure(agent: str, threads: int, options: argparse.Namespace) -> dict[str, Any]:
    print(f"{agent}, {threads} threads: {json.dumps(SHARED)}")
    sides = [Side(name, agent, threads, options) for name in SIDES]
    rounds = []
    for number in range(options.rounds):
        row = {side.name: side.steps_per_second() for side in sides}
        sides.reverse()
        row["ratio"] = row["ours"] / row["sb3"]
        rounds.append(row)
        print(
            f"  round {number + 1:2d}  ours {row['ours']:6.1f}/s   SB3 {row['sb3']:6.1f}/s   "
            f"ratio {row['ratio']:.2f}",
            flush=True,
        )
    for side in sides:
        side.close()
    summary: dict[str, Any] = {"target_ratio": TARGET}
    for name in ("ours", "sb3", "ratio"):
        middle, low = median_p10([row[name] for row in rounds])
        summary |= {f"{name}_median": middle, f"{name}_p10": low}
    print(
        f"  {agent}, {threads} threads: ours {summary['ours_median']:.1f}/s, "
        f"SB3 {summary['sb3_median']:.1f}/s, "
        f"ratio median {summary['ratio_median']:.2f}, p10 {summary['ratio_p10']:.2f} "
        f"(target {TARGET})"
    )
    return {"summary": summary, "rounds": rounds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--agents", nargs="+", default=["sac", "td3"], choices=["sac", "td3"])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--chunk", type=int, default=1_000, help="agent steps of a round")
    parser.add_argument(
        "--threads", type=int, nargs="+", default=[1, 2], help="of torch, on both sides"
    )
    parser.add_argument("--trial", action="store_true", help="write no result")
    parser.add_argument("--side", choices=list(SIDES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side is not None:
        # What a side prints must not get among the times: they have the first standard output.
        channel = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        pace = Pace(options.chunk, options.rounds, channel)
        steps = LEARNING_STARTS + options.chunk * (options.rounds + 1) + 1
        with tempfile.TemporaryDirectory() as folder:
            (agent,) = options.agents
            (threads,) = options.threads
            SIDES[options.side](agent, steps, threads, pace, Path(folder))
        return
    from importlib.metadata import version

    found = {
        agent: {f"threads_{n}": measure(agent, n, options) for n in options.threads}
        for agent in options.agents
    }
    settings = SHARED | {"threads": options.threads, "chunk_agent_steps": options.chunk}
    result = {"stable_baselines3": version("stable-baselines3"), "settings": settings}
    if not options.trial:
        print(f"written: {write('sac_td3_speed', {**result, 'agents': found})}")


if __name__ == "__main__":
    main()
