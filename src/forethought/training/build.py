"""Building what a run needs from its configuration, and an agent from what a run has saved."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from forethought import files
from forethought.agents import registry
from forethought.agents.base import Agent
from forethought.config import (
    ConfigError,
    EnvConfig,
    ForethoughtError,
    RunConfig,
    TrainConfig,
    build_run_config,
    diff,
    refuse_idle_groups,
    to_dict,
)
from forethought.data import Dataset
from forethought.envs import VectorEnv, make_env, spec_of
from forethought.seeding import Streams
from forethought.spaces.spec import EnvSpec
from forethought.tracking import RunDirectory
from forethought.tracking.video import require_video
from forethought.training.checkpoint import Checkpoints
from forethought.training.device import (
    keep_freed_memory,
    networks_must_fit,
    resolve_device,
    set_threads,
)

log = logging.getLogger("forethought")

FREE_KEYS = frozenset(
    {
        "steps",
        "env.timeout_seconds",
        "env.on_env_error",
        "env.max_restarts",
        "replay.mapped_folder",
        "train.checkpoint_every_agent_steps",
        "train.keep_checkpoints",
        "offline.data",
        "offline.storage",
        "offline.updates",
        "offline.checkpoint_every_updates",
        "offline.log_every_updates",
    }
)
"""What a person may change between two sittings (with all of `track`): how long the run is, and
what is done about failures. Nothing that decides what is computed: where recorded data lies is
free, because a checkpoint knows it by its content."""


@dataclass(frozen=True)
class Parts:
    """What a run computes with; made before its directory, so that bad input leaves no trace."""

    streams: Streams
    env: VectorEnv | None
    """None where the run learns from recorded data."""
    agent: Agent

    def close(self) -> None:
        """Ends the environments."""
        if self.env is not None:
            self.env.close()


def build_parts(config: RunConfig) -> Parts:
    """The environments and the agent of a run that trains."""
    if config.eval.video_every_evaluations:
        require_video("eval.video_every_evaluations")
    set_threads(config.train.threads)
    keep_freed_memory()
    device = resolve_device(config.device)
    streams = Streams(config.seed)
    if config.is_offline:
        spec = task_spec(config.task, config.env)
        agent = _new_agent(config, spec, streams, device, num_envs=1)
        _attach_data(agent, config)
        return Parts(streams, None, agent)
    env = make_env(
        config.task,
        config.env.num_envs,
        workers=config.env.workers,
        timeout_seconds=config.env.timeout_seconds,
        **config.env.training,
    )
    try:
        agent = _new_agent(config, env.spec_for_agent, streams, device, num_envs=env.num_envs)
        _ = agent.replay  # made now: a ring that does not fit is refused before work begins
    except BaseException:
        env.close()  # worker processes must not outlive a refusal
        raise
    return Parts(streams, env, agent)


def _new_agent(
    config: RunConfig, spec: EnvSpec, streams: Streams, device: torch.device, **options: Any
) -> Agent:
    make = registry.agent_class(config.agent_name)
    with networks_must_fit(config.agent_name, device):
        return make(spec, config.agent, config.replay, streams=streams, device=device, **options)


def _attach_data(agent: Agent, config: RunConfig) -> None:
    """Lets the agent learn from the run's recorded data; what does not fit is refused here."""
    data = [Dataset.open(Path(folder)) for folder in config.offline.folders]
    agent.learn_from(data, config.offline.storage)


def read_config(run: RunDirectory) -> RunConfig:
    """The configuration of a run, from its config.yaml."""
    data = run.config()
    name, task = str(data.get("agent_name")), str(data.get("task"))
    try:
        agent_class = registry.config_class(name)
        data = _in_todays_words(data, agent_class)
        config = build_run_config(name, task, agent_class, [data])
        refuse_idle_groups(config, data)
        return config
    except ConfigError as error:
        raise ConfigError(f"In {run.path / 'config.yaml'}: {error}") from error


def _in_todays_words(saved: dict[str, Any], agent_class: type) -> dict[str, Any]:
    """A whole configuration as it would be saved now; an agent's own says what has changed."""
    translate = getattr(agent_class, "of_older_versions", None)
    if translate is None or not isinstance(saved.get("agent"), dict):
        return saved
    return {**saved, "agent": translate(saved["agent"])}


def changed_keys(checkpoint: Path, config: RunConfig) -> list[str]:
    """`key: old -> new` where a run's configuration is another than the one a checkpoint was made
    with. What cannot change what is computed is free to change.

    A checkpoint of an older version may not tell, or lack keys, which then had their defaults.
    """
    saved = files.read_manifest(checkpoint).meta.get("config")
    if not isinstance(saved, dict):
        return []
    with contextlib.suppress(ForethoughtError):  # a key that no longer exists: compared as it is
        saved = _in_todays_words(saved, type(config.agent))
        old = build_run_config(config.agent_name, config.task, type(config.agent), [saved])
        saved = {**to_dict(old), "task": saved.get("task", config.task)}
    rows = diff(saved, to_dict(config))
    return [
        f"{key}: {old} -> {new}"
        for key, _, old, new in rows
        if key not in FREE_KEYS and not key.startswith("track.")
    ]


def load_agent(
    path: str | Path,
    *,
    checkpoint: str | int = "latest",
    for_acting: bool = True,
    device: str = "auto",
) -> Agent:
    """The agent of a run, from its `latest` or `best` checkpoint or from that of a step.

    For acting it has neither replay nor optimisers; else it can be trained on.
    """
    run = RunDirectory.open(Path(path))
    config = read_config(run)
    folder, _ = Checkpoints(run).find(checkpoint)
    changes = changed_keys(folder, config)
    if changes:
        text = "; ".join(changes)
        log.warning("config.yaml has changed since %s was written: %s.", folder.name, text)
    spec = task_spec(config.task, config.env)
    agent = _new_agent(
        config,
        spec,
        Streams(config.seed),
        resolve_device(device),
        num_envs=1 if config.is_offline else config.env.num_envs * max(1, len(spec.tasks)),
        for_acting=for_acting,
    )
    if config.is_offline and not for_acting:
        _attach_data(agent, config)
    agent.load(folder, run.replay)
    return agent


def task_spec(task: str, env: EnvConfig) -> EnvSpec:
    """The task as its training environments show it to an agent."""
    return spec_of(task, **env.training)


def seed_phase(config: TrainConfig, spec: EnvSpec, num_envs: int) -> tuple[int, int]:
    """agent_steps of random play, and the updates that follow it in one burst.

    By default every environment finishes an episode in it, for only finished ones may be sampled.
    """
    steps = config.seed_agent_steps
    if steps is None:
        steps = max(1000, max(5, num_envs) * (spec.max_episode_steps or 0))
    return steps, steps if config.seed_updates is None else config.seed_updates
