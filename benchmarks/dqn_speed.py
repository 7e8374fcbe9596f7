"""DQN on Pong beside Stable-Baselines3: agent steps per second of the whole trainer on both sides.

    python benchmarks/dqn_speed.py [--rounds 10] [--chunk 1600] [--threads 2] [--workers]

Both have the same game, network, batch, update frequency, optimiser, exploration rate, clipping
and replay size, and log to CSV. Stable-Baselines3 has as many environments as make it fastest, in
its own process or in others, and as many threads: all of these forms are tried for some rounds
first, the two fastest of them run beside ours, and the ratio is to the faster one. What is not
measured: start-up, random play before learning, the first chunk, evaluations and checkpoints (which
the other side does not make by itself).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from beside_sb3 import Pace, Side, alternate, own_channel, summary
from results import carry_out, not_its_own, write

TARGET = 1.6
FIRST = 1_600
"""Random decisions before learning."""


@dataclass(frozen=True)
class Form:
    """How a trainer is set up to be fast."""

    envs: int
    workers: bool = False
    """Each environment in a process of its own."""
    threads: int = 2
    """Of torch."""

    def __str__(self) -> str:
        where = " in processes of their own" if self.workers else ""
        envs = f"{self.envs} environment{'s' if self.envs > 1 else ''}"
        return f"{envs}{where} and {self.threads} thread{'s' if self.threads > 1 else ''}"


SB3_FORMS = (
    *(Form(n) for n in (1, 4, 8, 16, 32)),
    *(Form(n, workers=True, threads=threads) for n in (4, 8) for threads in (1, 2)),
)
"""Of Stable-Baselines3; alone in one process, a single thread lets the other core idle."""
FORM_ROUNDS = 2
"""Of every form, to find the two fastest."""
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
    import torch
    from stable_baselines3 import DQN
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_atari_env
    from stable_baselines3.common.logger import configure
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecFrameStack

    class Steps(BaseCallback):
        def _on_step(self) -> bool:
            pace.step(self.num_timesteps)
            return True

    torch.set_num_threads(options.threads)
    n = options.envs
    where = SubprocVecEnv if options.workers else DummyVecEnv
    # With the module's name, for processes of their own know no game before they import it.
    games = make_atari_env("ale_py:PongNoFrameskip-v4", n_envs=n, seed=1, vec_env_cls=where)
    env = VecFrameStack(games, n_stack=4)
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
    parser.add_argument("--threads", type=int, default=2, help="of torch, of ours")
    parser.add_argument("--envs", type=int, default=8, help="of ours")
    parser.add_argument("--workers", action="store_true", help="ours in processes of their own")
    parser.add_argument("--side", choices=["ours", "sb3"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side is not None:
        run_side(options)
        return
    trial = bool(not_its_own(parser, options))
    own = Form(options.envs, options.workers, options.threads)
    settings = SHARED | {"ours": str(own), "sb3_forms": [str(form) for form in SB3_FORMS]}
    print(f"settings: {settings}")

    def side(name: str, kind: str, form: Form) -> Side:
        command = [__file__, f"--side={kind}", f"--envs={form.envs}", f"--chunk={options.chunk}"]
        command += [f"--threads={form.threads}", *(["--workers"] if form.workers else [])]
        return Side(name, command, form.threads)

    tried = [side(str(form), "sb3", form) for form in SB3_FORMS]
    forms = alternate(tried, min(FORM_ROUNDS, options.rounds))
    speed = summary(forms)
    fastest = sorted(map(str, SB3_FORMS), key=lambda name: speed[f"{name}_median"])[-2:]
    for one in tried:
        if one.name not in fastest:
            one.close()
    sides = [one for one in tried if one.name in fastest]
    sides.append(side("ours", "ours", own))
    rounds = alternate(sides, options.rounds)
    for one in sides:
        one.close()
    found: dict[str, Any] = summary(rounds)
    best = max(fastest, key=lambda name: found[f"{name}_median"])
    ratios = [row["ours"] / row[best] for row in rounds]
    found |= {"sb3_fastest": best, "ratio_median": statistics.median(ratios)}
    found |= {"ratio_lowest": min(ratios), "ratio_target": TARGET}
    print(
        f"ours {found['ours_median']:.1f}/s, SB3 with {best} {found[f'{best}_median']:.1f}/s: "
        f"ratio median {found['ratio_median']:.2f}, lowest {found['ratio_lowest']:.2f} "
        f"(target {TARGET})"
    )
    if not trial:
        about = {"stable_baselines3": version("stable-baselines3"), "settings": settings}
        about |= {"sb3_forms_tried": forms}
        print(f"written: {write('dqn_speed', {**about, 'summary': found, 'rounds': rounds})}")


if __name__ == "__main__":
    carry_out(main)
