"""Small agents of the DQN family, and something for them to learn from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import torch

from forethought.agents.dqn import DQN, DQNConfig
from forethought.agents.dqn.heads import QNetwork
from forethought.agents.dqn.networks import make_trunk, network_for
from forethought.agents.dqn.update import Learner, Transitions
from forethought.config import (
    PrioritizedReplayConfig,
    ReplayConfig,
    RunConfig,
    UniformReplayConfig,
    build_run_config,
    from_dict,
)
from forethought.seeding import Streams
from forethought.spaces.spec import EnvSpec

OBS, ACTIONS = 5, 3
DISTRIBUTIONS: dict[str, dict[str, Any]] = {
    "none": {"kind": "none"},
    "c51": {"kind": "c51", "atoms": 11, "v_min": -8.0, "v_max": 12.0},
    "qr": {"kind": "qr", "quantiles": 6, "kappa": 0.7},
    "iqn": {
        "kind": "iqn",
        "taus": 4,
        "target_taus": 5,
        "policy_taus": 6,
        "cosines": 8,
        "kappa": 1.4,
    },
}
"""No value is a default: one that is not passed on shows."""
SMALL = {"network": {"kind": "mlp", "layers": [16], "hidden_units": 12}, "batch_size": 8}
RUN: dict[str, Any] = {
    "steps": 400,
    "env": {"max_episode_steps": 30},
    "replay": {"capacity_rows": 2_000, "block_rows": 64},
    "train": {
        "seed_agent_steps": 100,
        "seed_updates": 0,
        "updates_per_agent_step": 0.25,
        "checkpoint_every_agent_steps": 100,
        "threads": 1,
    },
    "eval": {"every_agent_steps": 200, "episodes": 2},
    "track": {"every_agent_steps": 50, "console": False},
}


def options(**given: Any) -> DQNConfig:
    """A configuration as a YAML file says it, small unless it says otherwise."""
    return from_dict(DQNConfig, {**SMALL, **given}, "agent")


def vector_spec(**changes: Any) -> EnvSpec:
    spec = EnvSpec(
        task="stub",
        observation_space=gymnasium.spaces.Box(-np.inf, np.inf, (OBS,), np.float32),
        action_space=gymnasium.spaces.Discrete(ACTIONS),
        max_episode_steps=500,
        action_repeat=1,
        terminates=True,
    )
    return replace(spec, **changes)


def image_spec(shape: tuple[int, ...] = (84, 84), actions: int = 6, dtype: Any = np.uint8) -> Any:
    high = 1 if dtype == np.bool_ else 255
    space: Any = gymnasium.spaces.Box(0, high, shape, dtype)
    return vector_spec(observation_space=space, action_space=gymnasium.spaces.Discrete(actions))


def make_network(spec: EnvSpec, config: DQNConfig, seed: int = 0) -> QNetwork:
    network, image, frames = network_for(spec, config)
    length = int(np.prod(spec.observation_space.shape))
    trunk = make_trunk(network, image, frames, length)
    generator = torch.Generator().manual_seed(seed)
    return QNetwork(trunk, spec.action_codec.size, config, generator)


def make_learner(config: DQNConfig, spec: EnvSpec | None = None) -> Learner:
    """In float64, with a target network that is another one."""
    spec = spec or vector_spec()
    online, target = (make_network(spec, config, seed).double() for seed in (0, 1))
    learner = Learner(online, target, config)
    learner.target.load_state_dict(make_network(spec, config, 1).double().state_dict())
    return learner


def make_agent(
    config: DQNConfig | None = None, replay: ReplayConfig | None = None, **changes: Any
) -> DQN:
    return DQN(
        changes.pop("spec", vector_spec()),
        config or options(),
        replay or UniformReplayConfig(capacity_rows=500),
        streams=Streams(changes.pop("seed", 1)),
        device=torch.device("cpu"),
        **changes,
    )


def prioritized(**changes: Any) -> PrioritizedReplayConfig:
    return PrioritizedReplayConfig(
        **{"capacity_rows": 500, "beta_anneal_updates": 10, **changes}  # type: ignore[arg-type]
    )


def fill(agent: DQN, rows: int = 60, length: int = 20) -> None:
    rng = np.random.default_rng(0)
    for i in range(rows):
        first = i % (length + 1) == 0
        row: dict[str, Any] = {
            "obs": rng.normal(size=OBS).astype(np.float32),
            "terminated": i % (length + 1) == length,
            "truncated": False,
            "is_first": first,
        }
        if not first:
            row["action"] = np.int64(rng.integers(ACTIONS))
            row["reward"] = float(rng.normal())
        agent.store_transition(row)


def transitions(rows: int = 8, seed: int = 0, **changes: Any) -> Transitions:
    g = torch.Generator().manual_seed(seed)
    batch = Transitions(
        obs=torch.randn(rows, OBS, generator=g).double(),
        action=torch.randint(0, ACTIONS, (rows,), generator=g),
        reward=torch.randn(rows, generator=g).double(),
        discount=torch.full((rows,), 0.9).double(),
        next_obs=torch.randn(rows, OBS, generator=g).double(),
        weights=torch.ones(rows).double(),
    )
    return replace(batch, **changes)


def dqn_run(task: str = "gym:CartPole-v1", **layers: Any) -> RunConfig:
    """A run of 400 steps, 100 of them random, with an evaluation every 200."""
    return build_run_config("dqn", task, DQNConfig, [RUN, {"agent": SMALL}, layers])
