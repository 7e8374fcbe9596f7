"""Do SAC and TD3 learn what they should? Ours beside Stable-Baselines3, at equal steps.

    python benchmarks/sac_td3_learning.py --out FOLDER [--agents ...] [--tasks ...] [--seeds 1 2 3]

Every run is evaluated at its end, without exploration, by 30 episodes with the same starts on both
sides; random play stands beside them. What FOLDER already holds is kept: our runs are resumed
where they stopped, those of Stable-Baselines3, which cannot be, are begun again unless complete.
Both sides have the same networks, batch, rates, losses, noise and learning start. What is asked:
our mean inside or above the interval of Stable-Baselines3's seeds; whether it also reaches the
least of these seeds is told beside it. Writes docs/results/sac_td3_learning.json and
docs/pictures/sac_td3_learning.png.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from forethought import presets
from forethought.agents.registry import config_class
from forethought.config import RunConfig, build_run_config, to_dict
from forethought.presets.flags import nested
from results import ROOT, carry_out, write
from runs import (
    at_once,
    commit_of,
    curve,
    evaluated,
    interval_over_seeds,
    is_trial,
    train_or_resume,
)

STEPS = {"gym:Pendulum-v1": 50_000, "gym:HalfCheetah-v5": 50_000}
SEED_STEPS = {"gym:Pendulum-v1": 1_000, "gym:HalfCheetah-v5": 10_000}
"""Random decisions before learning, on both sides: in 50,000 steps 25,000 would be too many."""
LOSSES = {"sac": {"agent.entropy.loss": "log_alpha"}, "td3": {}}
"""As Stable-Baselines3 has them, where our presets have the paper's."""
EVALUATIONS = 10
"""During training, evenly spaced, for the curves."""


def preset(agent: str, task: str) -> str:
    return "pendulum" if task == "gym:Pendulum-v1" else f"{agent}_mujoco"


def settings(agent: str, task: str, steps: int) -> RunConfig:
    """Our configuration of a run, which the other side takes its values from."""
    mine = {
        "steps": steps,
        "train": {"seed_agent_steps": min(SEED_STEPS[task], steps // 2), "threads": 1},
        "eval": {"every_agent_steps": max(1, steps // EVALUATIONS), "episodes": 5},
        "track": {"console": False},
    }
    layers = [*presets.layers([preset(agent, task)], None, agent), mine, nested(LOSSES[agent])]
    config = build_run_config(agent, task, config_class(agent), layers)
    rates = {*vars(config.agent.lr).values()}
    rates |= {config.agent.entropy.lr} if agent == "sac" else set()
    if len(rates) > 1:
        raise SystemExit(
            f"{preset(agent, task)} has the learning rates {sorted(rates)}, but Stable-Baselines3 "
            "has one for all: the two sides cannot be compared."
        )
    return config


def ours(agent: str, task: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """One run of ours, and the evaluation of its last checkpoint."""
    config = settings(agent, task, options.steps or STEPS[task])
    run = options.out / f"ours-{agent}-{task.replace(':', '-')}-seed{seed}"
    train_or_resume(
        run, agent, task, "--seed", str(seed), "--steps", str(config.steps),
        "--preset", preset(agent, task), "--train.threads", "1",
        "--train.seed_agent_steps", str(config.train.seed_agent_steps),
        "--eval.every_agent_steps", str(config.eval.every_agent_steps), "--eval.episodes", "5",
        *(word for key, value in LOSSES[agent].items() for word in (f"--{key}", value)),
    )  # fmt: skip
    found, chance = (
        evaluated(run, options.episodes, *flags) for flags in ((), ("--policy", "random"))
    )
    return {
        "seed": seed,
        "return_mean": found["return_mean"],
        "returns": found["returns"],
        "seeds": found["seeds"],
        "random_return_mean": chance["return_mean"],
        "commit": commit_of(run),
        "curve": curve(run),
    }


def theirs(
    agent: str, task: str, seed: int, seeds: list[int], options: argparse.Namespace
) -> dict[str, Any]:
    """One run of Stable-Baselines3 in a process of its own; a complete one is only read."""
    name = f"sb3-{agent}-{task.replace(':', '-')}-seed{seed}"
    file = options.out / f"{name}.json"
    steps = options.steps or STEPS[task]
    about = {"agent": agent, "task": task, "seed": seed, "steps": steps, "seeds": seeds}
    # What it was made with: a changed preset or another version makes it again.
    about["settings"] = json.loads(json.dumps(to_dict(settings(agent, task, steps))))
    about["stable_baselines3"] = version("stable-baselines3")
    if not file.exists() or json.loads(file.read_text())["about"] != about:
        asked = options.out / f"{name}.asked.json"
        asked.write_text(json.dumps(about))
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        command = [sys.executable, __file__, "--sb3", str(asked), "--write", str(file)]
        words = options.out / f"{name}.log"
        print(f"{name}: {words} tells how far it is", flush=True)
        with words.open("a") as log:
            done = subprocess.run(command, env=environment, stdout=log, stderr=log)
        if done.returncode:
            raise SystemExit(f"This command failed, {words} has its words: {command}")
    found: dict[str, Any] = json.loads(file.read_text())["result"]
    return found


def learn_with_sb3(about: dict[str, Any]) -> dict[str, Any]:
    """Train, then play the given starts; in the units and with the values of our configuration."""
    import gymnasium
    import torch
    from stable_baselines3 import SAC, TD3
    from stable_baselines3.common.callbacks import EvalCallback
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.noise import NormalActionNoise

    torch.set_num_threads(1)
    agent, steps = about["agent"], about["steps"]
    config = settings(agent, about["task"], steps)
    own, env_id = config.agent, about["task"].removeprefix("gym:")
    env = gymnasium.make(env_id)
    options: dict[str, Any] = {
        "policy_kwargs": {"net_arch": list(own.hidden), "n_critics": own.critics},
        "learning_rate": own.lr.actor,
        "batch_size": own.batch_size,
        "gamma": own.gamma,
        "tau": own.tau,
        "buffer_size": config.replay.capacity_rows,
        "learning_starts": config.train.seed_agent_steps,
        "train_freq": 1,
        "gradient_steps": 1,
        "device": "cpu",
        "seed": about["seed"],
    }
    if agent == "sac":
        model: Any = SAC("MlpPolicy", env, ent_coef=f"auto_{own.entropy.initial}", **options)
    else:
        width = own.exploration_noise * np.ones(env.action_space.shape)
        model = TD3(
            "MlpPolicy",
            env,
            action_noise=NormalActionNoise(np.zeros_like(width), width),
            policy_delay=own.policy_delay,
            target_policy_noise=own.target_noise,
            target_noise_clip=own.target_noise_clip,
            **options,
        )
    with tempfile.TemporaryDirectory() as folder:
        evaluation = EvalCallback(
            Monitor(gymnasium.make(env_id)),
            n_eval_episodes=5,
            eval_freq=config.eval.every_agent_steps,
            log_path=folder,  # without one it forgets what it found
            verbose=0,
        )
        model.learn(steps, callback=evaluation)
    curve = [
        [float(at), float(np.mean(scores))]
        for at, scores in zip(
            evaluation.evaluations_timesteps, evaluation.evaluations_results, strict=True
        )
    ]
    returns = [play(gymnasium.make(env_id), model, start) for start in about["seeds"]]
    return {
        "seed": about["seed"],
        "return_mean": statistics.mean(returns),
        "returns": returns,
        "seeds": about["seeds"],
        "curve": curve,
    }


def play(env: Any, model: Any, seed: int) -> float:
    """The return of one episode from one start, without exploration."""
    obs, _ = env.reset(seed=seed)
    total, over = 0.0, False
    while not over:
        action, _ = model.predict(obs, deterministic=True)
        obs, reward, terminated, truncated, _ = env.step(action)
        total, over = total + float(reward), terminated or truncated
    env.close()
    return total


def both(
    agent: str, task: str, seed: int, options: argparse.Namespace
) -> tuple[dict[str, Any], dict[str, Any]]:
    mine = ours(agent, task, seed, options)
    other = theirs(agent, task, seed, mine["seeds"], options)
    told = f"ours {mine['return_mean']:.1f}, SB3 {other['return_mean']:.1f}"
    print(f"{agent} {task} seed {seed}: {told}", flush=True)
    return mine, other


def joined(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The mean over seeds with its interval (`runs.interval_over_seeds`), and every run."""
    scores = [run["return_mean"] for run in runs]
    return {
        "return_mean": statistics.mean(scores),
        "interval_over_seeds": interval_over_seeds(scores),
        "least_seed": min(scores),
        "runs": runs,
    }


def verdict(sides: dict[str, dict[str, Any]]) -> dict[str, bool | None]:
    """Of our mean beside the other side's interval, and the stricter one beside its least seed."""
    mine, other = sides["ours"]["return_mean"], sides["sb3"]
    low = other["interval_over_seeds"]
    return {
        "inside_or_above": None if low is None else mine >= low[0],
        "at_least_their_least_seed": mine >= other["least_seed"],
    }


def draw(tasks: dict[str, dict[str, Any]], path: Path) -> None:
    """One panel per task and agent: curves of all seeds, behind them the mean of the last
    evaluations with its interval, random play as a line."""
    from matplotlib.figure import Figure

    panels = [(task, agent) for task, found in tasks.items() for agent in found["agents"]]
    figure = Figure(figsize=(5 * len(panels), 3.6), layout="constrained")
    for place, (task, agent) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), place + 1)
        found = tasks[task]
        for side, colour in (("ours", "tab:blue"), ("sb3", "tab:orange")):
            for number, run in enumerate(found["agents"][agent][side]["runs"]):
                label = {"ours": "forethought", "sb3": "Stable-Baselines3"}[side]
                x, y = zip(*run["curve"], strict=True)
                axes.plot(x, y, color=colour, alpha=0.6, label=None if number else label)
            whole = found["agents"][agent][side]
            mean, interval = whole["return_mean"], whole["interval_over_seeds"]
            bars = None if interval is None else [[mean - interval[0]], [interval[1] - mean]]
            ends = found["agent_steps"] * (1.02 if side == "ours" else 1.05)
            axes.errorbar([ends], [mean], yerr=bars, color=colour, marker="o", capsize=3)
        axes.axhline(found["random_return_mean"], color="gray", linestyle=":", label="random play")
        axes.set_title(f"{agent}, {task}")
        axes.set_xlabel("agent steps")
        axes.set_ylabel("return (5 episodes)")
        axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("runs/sac_td3_learning"))
    parser.add_argument("--agents", nargs="+", default=["sac", "td3"], choices=["sac", "td3"])
    parser.add_argument("--tasks", nargs="+", default=list(STEPS), choices=list(STEPS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=None, help="agent steps; for a trial")
    parser.add_argument("--episodes", type=int, default=30, help="evaluation episodes at the end")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    parser.add_argument("--sb3", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sb3 is not None:
        about = json.loads(options.sb3.read_text())
        whole = json.dumps({"about": about, "result": learn_with_sb3(about)})
        unfinished = options.write.with_suffix(".part")
        unfinished.write_text(whole)
        unfinished.rename(options.write)
        return
    trial = is_trial(parser, options)
    # Seed by seed, so that a benchmark cut short has something of everything.
    work = [
        (agent, task, seed)
        for seed in options.seeds
        for task in options.tasks
        for agent in options.agents
    ]
    found = at_once(options.jobs, lambda one: both(*one, options), work)
    tasks: dict[str, dict[str, Any]] = {}
    for task in options.tasks:
        agents = {}
        for agent in options.agents:
            pairs = [
                pair for one, pair in zip(work, found, strict=True) if one[:2] == (agent, task)
            ]
            sides = {
                side: joined([pair[place] for pair in pairs])
                for place, side in enumerate(("ours", "sb3"))
            }
            agents[agent] = {**sides, **verdict(sides)}
            for side, own in sides.items():
                told = f"{own['return_mean']:.1f} {own['interval_over_seeds']}"
                print(f"{agent} {task} {side}: {told}")
            for question, answer in verdict(sides).items():
                print(f"{agent} {task} {question.replace('_', ' ')}: {answer}")
        random = statistics.mean(
            run["random_return_mean"] for own in agents.values() for run in own["ours"]["runs"]
        )
        steps = options.steps or STEPS[task]
        tasks[task] = {"agent_steps": steps, "random_return_mean": random, "agents": agents}
        print(f"{task} random play: {random:.1f}")
    if not trial:
        about = {"stable_baselines3": version("stable-baselines3"), "episodes": options.episodes}
        print(f"written: {write('sac_td3_learning', {**about, 'tasks': tasks})}")
    folder = options.out if trial else ROOT / "docs" / "pictures"
    draw(tasks, folder / "sac_td3_learning.png")


if __name__ == "__main__":
    carry_out(main)
