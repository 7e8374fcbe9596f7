"""Small SAC and TD3 agents, batches and runs, for their tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import torch

from forethought import presets
from forethought.agents.registry import agent_class, config_class
from forethought.config import RunConfig, TransitionReplayConfig, build_run_config
from forethought.replay import Batch
from forethought.seeding import Streams
from forethought.spaces.spec import EnvSpec

OBS, ACTION, BATCH = 5, 3, 10
HALF_RANGE = (0.5, 2.0, 3.0)
NAMES = ("sac", "td3")


def make_spec(**changes: Any) -> EnvSpec:
    spec = EnvSpec(
        task="stub",
        observation_space=gymnasium.spaces.Box(-np.inf, np.inf, (OBS,), np.float32),
        action_space=gymnasium.spaces.Box(-1, 1, (ACTION,), np.float32),
        max_episode_steps=500,
        action_repeat=1,
        terminates=True,
        action_half_range=HALF_RANGE,
    )
    return replace(spec, **changes)


def make_agent(name: str, spec: EnvSpec | None = None, **options: Any) -> Any:
    """An agent with two hidden layers of 12 and 10, unless told otherwise."""
    kind = config_class(name)
    build = {key: options.pop(key) for key in ("num_envs", "for_acting") if key in options}
    seed = options.pop("seed", 1)
    config = kind(**{"hidden": (12, 10), "batch_size": BATCH, **options})
    return agent_class(name)(
        spec or make_spec(),
        config,
        TransitionReplayConfig(capacity_rows=500),
        streams=Streams(seed),
        device=torch.device("cpu"),
        **build,
    )


def in_float64(agent: Any) -> Any:
    """The same agent with weights in float64, moved away from where targets equal what they
    follow."""
    generator = torch.Generator().manual_seed(7)
    agent.model.double()
    with torch.no_grad():
        for parameter in agent.model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.1 * noise)
    return agent


def make_batch(seed: int = 0, dtype: torch.dtype = torch.float32, batch: int = BATCH) -> Batch:
    """Slices of two rows; some terminate, some are truncated."""
    g = torch.Generator().manual_seed(seed)
    ends = torch.rand(1, batch, generator=g)
    return Batch(
        obs=torch.randn(2, batch, OBS, generator=g).to(dtype),
        action=torch.tanh(torch.randn(1, batch, ACTION, generator=g)).to(dtype),
        reward=torch.randn(1, batch, generator=g).to(dtype),
        terminated=(ends < 0.3).to(dtype),
        truncated=ends > 0.7,
        is_first=torch.zeros(2, batch, dtype=torch.bool),
        extras={},
    )


def fill(agent: Any, rows: int = 60, length: int = 20) -> None:
    """Puts random episodes into replay that end by truncation."""
    rng = np.random.default_rng(0)
    for i in range(rows):
        first = i % (length + 1) == 0
        row = {
            "obs": rng.normal(size=OBS).astype(np.float32),
            "terminated": False,
            "truncated": i % (length + 1) == length,
            "is_first": first,
        }
        if not first:
            row["action"] = rng.uniform(-1, 1, ACTION).astype(np.float32)
            row["reward"] = float(rng.normal())
        agent.store_transition(row)


def weights(agent: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in agent.model.state_dict().items()}


def debug_run(name: str, **layers: Any) -> RunConfig:
    """A tiny run on gym:Pendulum-v1 with two environments, one update per decision."""
    mine = {
        "steps": 160,
        "env": {"num_envs": 2, "max_episode_steps": 30},
        "train": {
            "seed_agent_steps": 40,
            "seed_updates": 0,
            "updates_per_agent_step": 1.0,
            "checkpoint_every_agent_steps": 70,
        },
        "eval": {"every_agent_steps": 0, "episodes": 1},
        "track": {"console": False},
    }
    found = [*presets.layers(["debug"], None, name), mine, layers]
    return build_run_config(name, "gym:Pendulum-v1", config_class(name), found)
