"""Agents that learn a model of their world, plan in it, and are checked against their papers.

>>> import forethought
>>> run = forethought.train("tdmpc2", "gym:Pendulum-v1", presets=["debug"], seed=1)
>>> forethought.evaluate(run, episodes=2).mean

Importing this imports no torch: each function brings its room along when it is called.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forethought.agents.base import Agent
    from forethought.config import ReplayConfig
    from forethought.envs import VectorEnv
    from forethought.training.evaluate import EvalResult
    from forethought.training.loop import Run

__all__ = ["evaluate", "load", "make_agent", "make_env", "resume", "train"]


def make_env(task: str, num_envs: int = 1, seed: int = 0, **options: Any) -> VectorEnv:
    """The environments of a task, stepped together; `options` as in `forethought.envs.make_env`."""
    from forethought.envs import make_env

    return make_env(task, num_envs, seed, **options)


def make_agent(
    name: str,
    env: VectorEnv,
    *,
    seed: int = 1,
    device: str = "auto",
    replay: ReplayConfig | None = None,
    **options: Any,
) -> Agent:
    """A new agent for these environments; `options` are those of the agent, nested as in YAML.

    >>> make_agent("tdmpc2", make_env("gym:Pendulum-v1"), horizon=5, planner={"samples": 256})
    """
    from forethought.agents.registry import agent_class, config_class
    from forethought.config import EpisodeReplayConfig, from_dict
    from forethought.seeding import Streams
    from forethought.training.device import resolve_device

    return agent_class(name)(
        env.spec_for_agent,
        from_dict(config_class(name), options, "agent"),
        replay or EpisodeReplayConfig(),
        streams=Streams(seed),
        device=resolve_device(device),
        num_envs=env.num_envs,
    )


def train(
    agent: str,
    task: str,
    *,
    presets: Iterable[str] = (),
    config: str | Path | None = None,
    out: str | Path | None = None,
    **options: Any,
) -> Run:
    """Trains an agent as `forethought train` does; `options` are what config.yaml may hold.

    >>> train("tdmpc2", "dmc:cartpole-swingup", seed=3, agent={"horizon": 5}, env={"num_envs": 2})
    """
    from forethought.agents.registry import config_class
    from forethought.config import build_run_config
    from forethought.presets import layers
    from forethought.training.loop import train_run

    file = Path(config) if config is not None else None
    found = [*layers(presets, file, agent), options]
    run_config = build_run_config(agent, task, config_class(agent), found)
    return train_run(run_config, out=Path(out) if out is not None else None)


def resume(run: str | Path | Run, steps: int | None = None) -> Run:
    """Continues a run exactly where it stopped, to a new total of `steps` agent steps if given."""
    from forethought.training.loop import resume_run

    return resume_run(_place(run), steps=steps)


def evaluate(target: str | Path | Run, **options: Any) -> EvalResult:
    """Plays episodes with a run's agent, or with a named policy in a task.

    `options`: policy, episodes, checkpoint, seed, as `forethought evaluate --help` explains them.
    """
    from forethought.training.evaluate import evaluate_target

    return evaluate_target(target if isinstance(target, str) else str(_place(target)), **options)


def load(
    run: str | Path | Run,
    for_acting: bool = True,
    *,
    checkpoint: str = "latest",
    device: str = "auto",
) -> Agent:
    """The agent of a run; for acting only, it has neither replay nor optimisers."""
    from forethought.training.build import load_agent

    return load_agent(_place(run), checkpoint=checkpoint, for_acting=for_acting, device=device)


def _place(run: str | Path | Run) -> Path:
    """The directory of a run, given by its path or as what `train` returned."""
    return Path(run) if isinstance(run, str | Path) else run.path
