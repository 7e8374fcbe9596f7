"""Does it learn every kind of task? Discrete actions, pixels, and two tasks from recorded data.

    python benchmarks/learning_kinds.py [--kinds cartpole ...] [--out FOLDER] [--seeds 1 2 3]

Each run has one core and at most twenty minutes. The last checkpoint is evaluated over 20
episodes, with random play beside it. What is asked: that the 95 percent interval over seeds lies
wholly above that of random play. What is aimed at is a score for each task. Runs that FOLDER
already holds are resumed or, where complete, only evaluated.

The kind `offline` first makes its data, once for all seeds: three agents for each task alone, and
what their replays kept of all that they saw while they learned.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from forethought.report.statistics import estimate, mean
from results import carry_out, write
from runs import (
    at_once,
    curve,
    evaluated,
    forethought,
    interval_over_seeds,
    is_trial,
    minutes_of_training,
    origin,
    train_or_resume,
)

MOST_MINUTES = 20


@dataclass(frozen=True)
class Kind:
    """A task, how it is trained, and the mean return that is aimed at."""

    task: str
    flags: tuple[str, ...]
    aim: float | None = None


KINDS = {
    "cartpole": Kind("gym:CartPole-v1", ("--preset", "tdmpc2_discrete"), 450),
    "lander": Kind("gym:LunarLander-v3", ("--preset", "tdmpc2_discrete"), 0),
    "breakout": Kind("minatar:breakout", ("--preset", "tdmpc2_minatar"), 3),
    # A pole that has fallen stays down: of an episode of 250 decisions, only the first few dozen of
    # a beginner show what is to be learned. In training they are cut there; evaluations are whole.
    # The rates fall, for the last checkpoint is what counts: with constant ones a seed that had
    # learned it after 10,000 decisions had lost it again after 13,000.
    "pixels": Kind(
        "dmc:cartpole-balance",
        (
            *("--preset", "tdmpc2_small_pixels", "--agent.gamma", "0.98"),
            *("--env.max_episode_steps", "50", "--env.eval_max_episode_steps", "250"),
            *("--agent.schedule", "cosine", "--agent.schedule.duration_updates", "13000"),
            *("--agent.schedule.end_factor", "0.05"),
        ),
        700,
    ),
}
OFFLINE_TASKS = ("dmc:cartpole-swingup", "dmc:cup-catch")
SMALL = ("--preset", "tdmpc2_small", "--agent.compile", "kernels")
"""A fifth less time than without the kernels, under which a run comes close to twenty minutes."""
RECORDED_SEEDS = (1, 2, 3)
"""Of one agent that has learned, nearly all data shows how it is done, and nothing what lies beside
it; three of them went astray in three ways."""
RECORDED_STEPS = 25_000
"""Agent steps of each recorded agent; its replay keeps all of them."""
OFFLINE_UPDATES = 40_000
OFFLINE_SHARE = 0.8
"""Of the recorded agents' mean return, aimed at in each task."""


def learn(kind: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """One run, and its last checkpoint beside random play."""
    about = KINDS[kind]
    run = options.out / f"{kind}-seed{seed}"
    train_or_resume(run, "tdmpc2", about.task, *about.flags, "--seed", str(seed))
    return outcome(run, seed, options.episodes)


def outcome(run: Path, seed: int, episodes: int) -> dict[str, Any]:
    """What the last checkpoint of a run reaches, and random play from the same starts."""
    agent, chance = evaluated(run, episodes), evaluated(run, episodes, "--policy", "random")
    minutes = minutes_of_training(run)
    print(
        f"{run.name}: {agent['return_mean']:.1f}, random play {chance['return_mean']:.1f}, "
        f"{minutes:.1f} minutes",
        flush=True,
    )
    return {
        "seed": seed,
        "return_mean": agent["return_mean"],
        "returns": agent["returns"],
        "seeds": agent["seeds"],
        **({"tasks": agent["tasks"]} if "tasks" in agent else {}),
        "random_return_mean": chance["return_mean"],
        "random_returns": chance["returns"],
        "minutes_of_training": minutes,
        **origin(run),
        "curve": curve(run),
    }


def interval(values: Sequence[float]) -> list[float] | None:
    """95 percent bootstrap interval of a mean over many episodes; none of a single one."""
    found = estimate(mean, [np.asarray(values, np.float64)])
    return None if found.low is None or found.high is None else [found.low, found.high]


def summary(runs: list[dict[str, Any]], aim: float | None) -> dict[str, Any]:
    """Scores of all seeds beside random play's, and whether they are apart."""
    scores = [run["return_mean"] for run in runs]
    chance = [value for run in runs for value in run["random_returns"]]
    ours, random = interval_over_seeds(scores), interval(chance)
    return {
        "return_mean": statistics.mean(scores),
        "interval_over_seeds": ours,
        "random_return_mean": statistics.mean(chance),
        "random_interval": random,
        "above_random_play": None if ours is None or random is None else ours[0] > random[1],
        "aim": aim,
        "aim_reached": None if aim is None else statistics.mean(scores) >= aim,
        "most_minutes": max(run["minutes_of_training"] for run in runs),
        "runs": runs,
    }


# ---- two tasks from recorded data ----


def alone(task: str, seed: int, options: argparse.Namespace) -> Path:
    """The run of an agent that learns one of the tasks."""
    return Path(options.out / f"recorded-{task.replace(':', '-')}-seed{seed}")


def data_of(task: str, seed: int, options: argparse.Namespace) -> Path:
    """What its replay kept; in the run's own folder, with which it goes."""
    return alone(task, seed, options) / "recorded_data"


def record(task: str, seed: int, options: argparse.Namespace) -> None:
    """An agent that learns a task, and the dataset of its replay; made once."""
    run, data = alone(task, seed, options), data_of(task, seed, options)
    steps = ("--steps", str(RECORDED_STEPS))
    train_or_resume(run, "tdmpc2", task, *SMALL, "--seed", str(seed), *steps)
    if not data.exists():
        forethought("data", "record", "--run", str(run), "--replay", "--out", str(data))


@cache
def reached(run: Path, episodes: int) -> float:
    """The mean return of a recorded agent; played once, for every seed that learns from it."""
    return float(evaluated(run, episodes)["return_mean"])


def learn_offline(seed: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Both tasks in one agent, from what agents of each saw; an outcome per task."""
    places = [data_of(task, own, options) for task in OFFLINE_TASKS for own in RECORDED_SEEDS]
    data = ",".join(map(str, places))
    run = options.out / f"offline-seed{seed}"
    train_or_resume(
        run, "tdmpc2", f"multi:{','.join(OFFLINE_TASKS)}", *SMALL,
        "--offline.data", data, "--offline.updates", str(OFFLINE_UPDATES),
        "--offline.eval_every_updates", str(OFFLINE_UPDATES // 2), "--eval.episodes", "5",
        "--seed", str(seed),
    )  # fmt: skip
    both, found = outcome(run, seed, options.episodes), []
    for task in OFFLINE_TASKS:
        agents = [alone(task, own, options) for own in RECORDED_SEEDS]
        recorded = statistics.mean(reached(agent, options.episodes) for agent in agents)
        mine = [i for i, of in enumerate(both["tasks"]) if of == task]
        own = {key: [both[key][i] for i in mine] for key in ("returns", "random_returns", "seeds")}
        score = statistics.mean(own["returns"])
        chance = statistics.mean(own["random_returns"])
        print(f"  {task}: {score:.1f}, the recorded agents {recorded:.1f}", flush=True)
        of_task = {"return_mean": score, "random_return_mean": chance, "recorded": recorded}
        found.append(both | own | of_task)
    return found


def summary_offline(outcomes: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Task by task; the aim is a share of what the recorded agents reach."""
    found = {}
    for task, runs in zip(OFFLINE_TASKS, zip(*outcomes, strict=True), strict=True):
        aim = OFFLINE_SHARE * statistics.mean(run["recorded"] for run in runs)
        found[task] = summary(list(runs), aim)
    return found


# ---- the whole ----


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    every = [*KINDS, "offline"]
    parser.add_argument("--kinds", nargs="+", choices=every, default=every)
    parser.add_argument("--out", type=Path, default=Path("runs/kinds"), help="folder for the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--episodes", type=int, default=20, help="evaluation episodes")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    options = parser.parse_args()
    trial = is_trial(parser, options, "kinds")

    def made(pair: tuple[int, str]) -> Any:
        seed, kind = pair
        return learn_offline(seed, options) if kind == "offline" else learn(kind, seed, options)

    if "offline" in options.kinds:
        pairs = [(task, seed) for seed in RECORDED_SEEDS for task in OFFLINE_TASKS]
        at_once(options.jobs, lambda pair: record(*pair, options), pairs)
    # Seed by seed, so that a benchmark cut short has something of every kind.
    work = [(seed, kind) for seed in options.seeds for kind in options.kinds]
    outcomes = at_once(options.jobs, made, work)
    for kind in options.kinds:
        of_kind = [found for (_, name), found in zip(work, outcomes, strict=True) if name == kind]
        if kind == "offline":
            result = {"tasks": summary_offline(of_kind)}
            tell = list(result["tasks"].items())
        else:
            about = KINDS[kind]
            result = {"task": about.task, "flags": about.flags, **summary(of_kind, about.aim)}
            tell = [(about.task, result)]
        for task, facts in tell:
            print(
                f"{task}: {facts['return_mean']:.1f} {facts['interval_over_seeds']}, random play "
                f"{facts['random_return_mean']:.1f} {facts['random_interval']}, aim {facts['aim']}"
            )
        if not trial:  # a file per kind: kinds can be made again one by one
            result = {"most_minutes_asked": MOST_MINUTES, "episodes": options.episodes} | result
            print(f"written: {write(f'learning_{kind}', result)}")


if __name__ == "__main__":
    carry_out(main)
