"""Agents that learn a model of their world, plan in it, and are checked against their papers.

>>> import forethought
>>> run = forethought.train("tdmpc2", "gym:Pendulum-v1", presets=["debug"], seed=1)
>>> forethought.evaluate(run, episodes=2).mean

Importing this imports no torch: each function brings its room along when it is called, and the
classes `Run` and `EvalResult` are imported when they are asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forethought.config import ForethoughtError

if TYPE_CHECKING:
    from forethought.agents.base import Agent
    from forethought.config import ReplayConfig
    from forethought.envs import VectorEnv
    from forethought.training.evaluate import EvalResult
    from forethought.training.loop import Run

__all__ = [
    "EvalResult",
    "ForethoughtError",
    "Run",
    "evaluate",
    "load",
    "make_agent",
    "make_env",
    "resume",
    "train",
]


def make_env(task: str, num_envs: int = 1, seed: int = 0, **options: Any) -> VectorEnv:
    """The environments of a task, stepped together; they must be closed when done with.

    `seed` decides all episodes that are reset without a seed of their own. `options`: `workers`
    (each environment in its own process), `action_repeat` (frames per decision),
    `max_episode_steps` (decisions), `obs` ("pixels" draws dmc tasks), `atari` (a dict of what
    env.atari holds), `render_mode` and `timeout_seconds` (of one reset or step).

    >>> env = make_env("dmc:walker-walk", num_envs=4, seed=7, workers=True)
    """
    from forethought.config import AtariConfig, from_dict
    from forethought.envs import make_env

    if isinstance(options.get("atari"), dict):
        options["atari"] = from_dict(AtariConfig, options["atari"], "env.atari")
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
    """A new agent for these environments, outside any run; `train` makes one with a run.

    `options` are those of the agent, nested as under `agent:` in a YAML file; `seed` decides its
    weights and all of its noise, `replay` how it keeps and samples experience.

    >>> make_agent("tdmpc2", make_env("gym:Pendulum-v1"), horizon=5, planner={"samples": 256})
    """
    from forethought.agents.registry import agent_class, config_class
    from forethought.config import ConfigError, default_replay, from_dict
    from forethought.envs import VectorEnv
    from forethought.seeding import Streams
    from forethought.training.device import networks_must_fit, resolve_device

    if not isinstance(env, VectorEnv):
        raise ConfigError(
            f"make_agent was given {env!r}, but takes environments as make_env makes them: "
            f"make_agent({name!r}, make_env(TASK))."
        )
    config, place = from_dict(config_class(name), options, "agent"), resolve_device(device)
    with networks_must_fit(name, place):
        return agent_class(name)(
            env.spec_for_agent,
            config,
            replay or default_replay(config_class(name)),
            streams=Streams(seed),
            device=place,
            num_envs=env.num_envs,
        )


def train(
    agent: str,
    task: str,
    /,  # so that `agent` can also be a group among the options
    *,
    presets: str | Iterable[str] = (),
    config: str | Path | None = None,
    out: str | Path | None = None,
    **options: Any,
) -> Run:
    """Trains an agent from the start, as `forethought train` does, and returns when it stops.

    `presets` (one name or several), then the YAML file `config`, then `options` decide the
    configuration, later ones winning; `options` are the keys and groups that config.yaml may hold.
    `out` is the run directory; None makes runs/<task>/<agent>/<seed>-<time>. Bad input raises
    ConfigError before anything begins; an environment that fails raises EnvError after the run has
    been marked failed.

    >>> train("tdmpc2", "dmc:cartpole-swingup", seed=3, agent={"horizon": 5}, env={"num_envs": 2})
    """
    from forethought.agents.registry import config_class
    from forethought.config import build_run_config, check_options, refuse_idle_groups
    from forethought.presets import layers, load_file
    from forethought.training.loop import train_run

    check_options(options, config_class(agent), ("presets", "config", "out"))
    file = Path(config) if config is not None else None
    names = [presets] if isinstance(presets, str) else presets
    found = [*layers(names, file, agent), options]
    run_config = build_run_config(agent, task, config_class(agent), found)
    refuse_idle_groups(run_config, load_file(file) if file is not None else {}, options)
    return train_run(run_config, out=Path(out) if out is not None else None)


def resume(run: str | Path | Run, steps: int | None = None, *, override: bool = False) -> Run:
    """Continues a run exactly where it stopped, to a new total of `steps` agent steps if given.

    A config.yaml that was changed since the checkpoint is refused with a list of the differences;
    `override` accepts them.
    """
    from forethought.training.loop import resume_run

    return resume_run(_place(run), steps=steps, override=override)


def evaluate(
    target: str | Path | Run,
    *,
    policy: str | None = None,
    episodes: int | None = None,
    protocol: str | None = None,
    checkpoint: str | int | None = None,
    seed: int | None = None,
    device: str | None = None,
) -> EvalResult:
    """Plays episodes with a run's agent, without exploration, or with random actions.

    `target` is a run or a task; a task alone is played by the `policy` "random". `checkpoint` is
    "latest" (None), "best" or a number of agent steps. `seed` decides the episodes (None is
    the run's own, or 1 for a task), so an agent and random play meet the same starts; those of the
    evaluations during training are others. There are 10 episodes unless `episodes` or a `protocol`
    ("nature" or "dopamine", for atari: tasks) says otherwise.
    """
    from forethought.training.evaluate import evaluate_target

    return evaluate_target(
        target if isinstance(target, str) else str(_place(target)),
        policy=policy,
        episodes=episodes,
        protocol=protocol,
        checkpoint=checkpoint,
        seed=seed,
        device=device,
    )


def load(
    run: str | Path | Run,
    for_acting: bool = True,
    *,
    checkpoint: str | int = "latest",
    device: str = "auto",
) -> Agent:
    """The agent of a run, from its "latest" or "best" checkpoint or that of a number of steps.

    For acting it has neither replay nor optimisers; with `for_acting=False` it can be trained on.
    """
    from forethought.training.build import load_agent

    return load_agent(_place(run), checkpoint=checkpoint, for_acting=for_acting, device=device)


def __getattr__(name: str) -> Any:
    """The classes that results are made of, whose rooms import torch."""
    if name == "Run":
        from forethought.training.loop import Run

        return Run
    if name == "EvalResult":
        from forethought.training.evaluate import EvalResult

        return EvalResult
    raise AttributeError(f"module {__name__} has no attribute {name}")


def _place(run: str | Path | Run) -> Path:
    """The directory of a run, given by its path or as what `train` returned."""
    return Path(run) if isinstance(run, str | Path) else run.path
