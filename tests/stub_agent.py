"""A tiny agent that obeys the contract: a linear model of the reward, trained by Adam.

Gradient and Adam are written out: hundreds of its runs are much of the time that all tests take.

It acts by a noisy linear policy, so that its actions, weights and streams all depend on each other:
whatever a resume loses shows in the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from forethought import files
from forethought.agents import registry
from forethought.agents.base import Agent, Json, Metrics, Tensors
from forethought.config import RunConfig, build_run_config
from forethought.nets.health import health
from forethought.replay import Replay
from forethought.seeding import Streams
from forethought.tracking import TIME_COLUMNS, read_rows
from forethought.training.evaluate import EvalResult, Evaluator


@dataclass(frozen=True)
class StubConfig:
    """Options of the stub."""

    lr: float = 0.01
    """Adam's learning rate."""
    batch_size: int = 8
    """Slices per update."""
    horizon: int = 1
    """Steps of a slice."""
    nan_from_update: int | None = None
    """From this update on, gradients are NaN."""
    nan_until_update: int | None = None
    """From this update on, they are finite again."""
    fail_at_update: int | None = None
    """This update raises a RuntimeError."""


@dataclass
class StubState:
    """Last action and generator of one caller."""

    last: torch.Tensor
    generator: torch.Generator


class Adam:
    """Of one parameter."""

    def __init__(self, weight: torch.nn.Parameter, lr: float) -> None:
        self.weight, self.lr = weight, lr
        self.state: dict[torch.nn.Parameter, dict[str, torch.Tensor]] = {}

    def step(self) -> None:
        weight, grad = self.weight.data, self.weight.grad
        if self.weight not in self.state:
            moments = {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}
            self.state[self.weight] = {"step": torch.zeros(()), **moments}
        state = self.state[self.weight]
        state["step"] += 1
        steps = state["step"].item()
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.lerp_(grad, 0.1)
        square.mul_(0.999).addcmul_(grad, grad, value=0.001)
        scale = (square / (1 - 0.999**steps)).sqrt_().add_(1e-8)
        weight.addcdiv_(mean, scale, value=-self.lr / (1 - 0.9**steps))


class StubAgent(Agent):
    """See the module."""

    name: ClassVar[str] = "stub"
    metric_names = ("loss", "grad_norm", "q_max", "nonfinite")

    def __init__(self, spec, config, replay_config, *, streams, device, **options) -> None:
        super().__init__(spec, config, replay_config, streams=streams, device=device, **options)
        self.obs_dim, self.action_dim = spec.observation_space.shape[0], spec.action_space.shape[0]
        size = self.obs_dim + self.action_dim
        generator = streams.torch("init")
        self.weight = torch.nn.Parameter(torch.randn(size, generator=generator) * 0.1)
        self.optimiser = Adam(self.weight, config.lr)
        self.noise = streams.torch("update")
        self.updates = 0

    def new_state(self, num_envs: int, streams: Streams, stream: str, *index: int) -> StubState:
        last = torch.zeros(num_envs, self.action_dim)
        return StubState(last, streams.torch(stream, *index))

    def act_batch(
        self,
        obs: Any,
        state: StubState,
        first: np.ndarray,
        info: Sequence[dict[str, Any]],
        explore: bool,
    ) -> tuple[np.ndarray, StubState]:
        x = torch.as_tensor(obs, dtype=torch.float32)
        noise = torch.randn(state.last.shape, generator=state.generator)
        pull = (x @ self.weight[: self.obs_dim].detach())[:, None] * self.weight[-1].detach()
        last = torch.where(torch.as_tensor(first)[:, None], torch.zeros(()), state.last)
        action = torch.tanh(pull + 0.5 * last + (0.3 if explore else 0.0) * noise)
        return action.numpy().astype(np.float32), StubState(action, state.generator)

    def act_with_stats(
        self, obs: Any, explore: bool = False, info: Any = None, task: Any = None
    ) -> tuple[Any, dict[str, float]]:
        raise NotImplementedError

    def acting_state(self, state: StubState) -> tuple[Json, Tensors]:
        return {}, {"last": state.last, "generator": state.generator.get_state()}

    def restore_acting_state(self, state: StubState, json: Json, tensors: Tensors) -> StubState:
        state.generator.set_state(tensors["generator"])
        return StubState(tensors["last"], state.generator)

    def make_replay(self) -> Replay:
        return Replay(
            self.spec,
            self.replay_config,
            self.num_envs,
            self.config.horizon + 1,
            self.streams.numpy("replay"),
            self.device,
        )

    def train(self, updates: int = 1) -> Metrics:
        metrics: Metrics = {}
        for _ in range(updates):
            metrics = self._update()
        return metrics

    def _update(self) -> Metrics:
        self.updates += 1
        if self.updates == self.config.fail_at_update:
            raise RuntimeError("the update is broken")
        self.last_batch = batch = self.replay.sample(self.config.batch_size)
        x = torch.cat([batch.obs[0], batch.action[0]], dim=-1)
        x = x + 0.01 * torch.randn(x.shape, generator=self.noise)
        predicted = x @ self.weight.data
        error = predicted - batch.reward[0]
        loss = (error**2).mean()
        self.weight.grad = (error @ x) * (2 / len(error))
        begin, end = self.config.nan_from_update, self.config.nan_until_update
        if begin is not None and begin <= self.updates < (end or self.updates + 1):
            self.weight.grad.fill_(torch.nan)
        norm = self.weight.grad.norm().item()
        if not np.isfinite(norm):
            return {"loss": loss.item(), "grad_norm": norm, "nonfinite": 1.0}
        self.optimiser.step()
        q_max = predicted.max().item()
        return {"loss": loss.item(), "grad_norm": norm, "q_max": q_max, "nonfinite": 0.0}

    def diagnostics(self) -> tuple[Json, Tensors]:
        json, batch = super().diagnostics()
        return {"parts": {"linear": health([self.weight], self.optimiser)}, **json}, batch

    def log_architecture(self) -> dict[str, int]:
        return {"linear": self.weight.numel(), "total": self.weight.numel()}

    def state(self) -> tuple[Json, Tensors]:
        adam = self.optimiser.state.get(self.weight, {})
        tensors = {f"adam/{name}": torch.as_tensor(value) for name, value in adam.items()}
        tensors |= {"weight": self.weight, "noise": self.noise.get_state()}
        return {"updates": self.updates}, tensors

    def restore(self, json: Json, tensors: Tensors) -> None:
        self.updates = json["updates"]
        self.weight.data = tensors["weight"].clone()
        self.noise.set_state(tensors["noise"])
        adam = {k.removeprefix("adam/"): v for k, v in tensors.items() if k.startswith("adam/")}
        self.optimiser = Adam(self.weight, self.config.lr)
        if adam:
            self.optimiser.state[self.weight] = {k: v.clone() for k, v in adam.items()}


def register(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `stub` an agent for the length of a test."""
    entry = registry.AgentEntry(
        about="a linear model, for tests",
        agent="tests.stub_agent:StubAgent",
        config="tests.stub_agent:StubConfig",
    )
    monkeypatch.setitem(registry.AGENTS, "stub", entry)


def give_scores(monkeypatch: pytest.MonkeyPatch, random: float, scores: Sequence[float]) -> None:
    """Puts these scores in the place of played evaluations."""
    coming = iter(scores)

    def result(policy: str, score: float) -> EvalResult:
        return EvalResult("t", policy, (score,), (1,), (0,), (True,), (False,), (None,), ())

    monkeypatch.setattr(Evaluator, "random", lambda self, **polls: result("random", random))
    monkeypatch.setattr(Evaluator, "agent", lambda *args, **polls: result("stub", next(coming)))


def stub_run(task: str = "gym:Pendulum-v1", **layers: Any) -> RunConfig:
    """A run of the stub: 400 steps, episodes of 30, 60 of them random, an evaluation every 200."""
    base: dict[str, Any] = {
        "steps": 400,
        "env": {"max_episode_steps": 30},
        "replay": {"kind": "transitions", "capacity_rows": 2_000, "block_rows": 64},
        "train": {
            "seed_agent_steps": 60,
            "seed_updates": 40,
            "updates_per_agent_step": 0.5,
            "checkpoint_every_agent_steps": 100,
            "threads": 1,
        },
        "eval": {"every_agent_steps": 200, "episodes": 2},
        "track": {"every_agent_steps": 50, "console": False},
    }
    return build_run_config("stub", task, StubConfig, [base, layers])


LOOP_STATE = (
    "evaluations",
    "evaluation_pending",
    "score",
    "scored_at",
    "clock",
    "budget",
    "gates",
    "log_every",
    "eval_every",
    "save_every",
    "collector",
)


def training_record(path: Path) -> dict[str, Any]:
    """All of a run that must not depend on time: CSV rows, and the tensors and JSON at its end."""
    record: dict[str, Any] = {}
    for name in ("train", "episodes", "eval"):
        rows, _ = read_rows(path / f"{name}.csv")
        record[name] = [
            {key: cell for key, cell in row.items() if key not in TIME_COLUMNS} for row in rows
        ]
    newest, _ = files.newest_verified(path / "checkpoints")
    record["checkpoint"] = newest.name
    record["agent"] = files.read_json(newest / "agent.json")
    loop = files.read_json(newest / "loop.json")
    record["loop"] = {key: loop[key] for key in LOOP_STATE}
    for name in ("agent", "replay", "loop"):
        tensors = files.load_tensors(newest / f"{name}.safetensors")
        record[f"{name} tensors"] = {
            key: (str(value.dtype), tuple(value.shape), value.numpy().tobytes())
            for key, value in tensors.items()
        }
    return record
