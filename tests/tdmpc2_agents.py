"""Small TD-MPC2 agents, and something for them to learn from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import torch

from forethought.agents.tdmpc2 import TDMPC2, TDMPC2Config
from forethought.agents.tdmpc2.config import (
    ModelConfig,
    PlannerConfig,
)
from forethought.config import (
    EpisodeReplayConfig,
)
from forethought.replay import Batch
from forethought.seeding import Streams
from forethought.spaces.spec import EnvSpec

OBS, ACTION = 5, 2
TINY = ModelConfig(size=1, encoder_units=16, mlp_units=24, latent_dim=16, num_q=3)
FAST = PlannerConfig(samples=16, elites=4, policy_samples=4, iterations=2)
CONFIG = TDMPC2Config(model=TINY, planner=FAST, batch_size=8)


def make_spec(**changes: Any) -> EnvSpec:
    spec = EnvSpec(
        task="stub",
        observation_space=gymnasium.spaces.Box(-np.inf, np.inf, (OBS,), np.float32),
        action_space=gymnasium.spaces.Box(-1, 1, (ACTION,), np.float32),
        max_episode_steps=500,
        action_repeat=1,
        terminates=False,
    )
    return replace(spec, **changes)


def make_agent(config: TDMPC2Config = CONFIG, seed: int = 1, **options: Any) -> TDMPC2:
    return TDMPC2(
        options.pop("spec", make_spec()),
        config,
        EpisodeReplayConfig(capacity_rows=1_002),
        streams=Streams(seed),
        device=torch.device("cpu"),
        **options,
    )


def fill(agent: TDMPC2, rows: int = 60, length: int = 20) -> None:
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


def make_batch(agent: TDMPC2, seed: int = 0) -> Batch:
    g = torch.Generator().manual_seed(seed)
    t, b = agent.config.horizon, agent.config.batch_size
    return Batch(
        obs=torch.randn(t + 1, b, OBS, generator=g),
        action=torch.tanh(torch.randn(t, b, ACTION, generator=g)),
        reward=torch.randn(t, b, generator=g),
        terminated=torch.zeros(t, b),
        truncated=torch.zeros(t, b, dtype=torch.bool),
        is_first=torch.zeros(t + 1, b, dtype=torch.bool),
        extras={},
    )
