"""A tiny agent that learns from n-step transitions, so that a run with such a replay can be had."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

from forethought.agents import registry
from forethought.agents.base import Metrics
from forethought.config import RunConfig, build_run_config
from forethought.replay import NStepReplay, replay_metric_names
from tests.stub_agent import StubAgent, StubConfig


@dataclass(frozen=True)
class ValueConfig(StubConfig):
    """Options of the stub."""

    replay_kinds: ClassVar[tuple[str, ...]] = ("uniform", "prioritized")


class ValueStub(StubAgent):
    """A linear model of the discounted reward of three steps."""

    name: ClassVar[str] = "value"

    def __init__(self, spec, config, replay_config, **options) -> None:
        super().__init__(spec, config, replay_config, **options)
        names = ("beta", *StubAgent.metric_names, *replay_metric_names(replay_config))
        self.metric_names = names

    def make_replay(self) -> NStepReplay:
        stream = self.streams.numpy("replay")
        return NStepReplay(
            self.spec, self.replay_config, self.num_envs, 3, 0.9, stream, self.device
        )

    def _update(self) -> Metrics:
        self.updates += 1
        beta = self.replay.beta_at(self.clock, self.total_agent_steps)
        self.last_batch = batch = self.replay.sample(self.config.batch_size, beta=beta)
        x = torch.cat([batch.obs, batch.action], dim=-1)
        error = x @ self.weight.data - batch.reward
        loss = (batch.weights * error**2).mean()
        self.weight.grad = (batch.weights * error) @ x * (2 / len(error))
        self.optimiser.step()
        self.replay.update_priorities(batch.rows, error.abs())
        metrics = {"loss": loss.item(), "nonfinite": 0.0}
        return metrics if beta is None else {**metrics, "beta": beta}


def register(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `value` an agent for the length of a test."""
    entry = registry.AgentEntry(
        about="a linear model of values, for tests",
        agent="tests.dqn.value_stub:ValueStub",
        config="tests.dqn.value_stub:ValueConfig",
    )
    monkeypatch.setitem(registry.AGENTS, "value", entry)


def value_run(kind: str, **layers: Any) -> RunConfig:
    """200 steps in two environments, episodes of 30, looks at replay every 50 steps."""
    base: dict[str, Any] = {
        "steps": 200,
        "env": {"max_episode_steps": 30, "num_envs": 2},
        "replay": {
            "kind": kind,
            "capacity_rows": 90,  # wraps
            "block_rows": 16,
            "diagnostics_every_agent_steps": 50,
        },
        "train": {
            "seed_agent_steps": 40,
            "seed_updates": 20,
            "updates_per_agent_step": 0.5,
            "checkpoint_every_agent_steps": 80,
            "threads": 1,
        },
        "eval": {"every_agent_steps": 0, "episodes": 1},
        "track": {"every_agent_steps": 25, "console": False},
    }
    return build_run_config("value", "gym:Pendulum-v1", ValueConfig, [base, layers])
