"""What SAC and TD3 do alike: act on vectors, store single steps, save and load."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from forethought.agents.actor_critic.config import ActorCriticConfig
from forethought.agents.actor_critic.spaces import check_spaces
from forethought.agents.actor_critic.update import Transitions
from forethought.agents.base import (
    Agent,
    Json,
    Metrics,
    Tensors,
    below,
    check_shapes,
    parameter_names,
)
from forethought.config import ReplayConfig
from forethought.nets.health import health
from forethought.nets.init import uniform_linears
from forethought.nets.optimisers import optimiser_tensors, restore_optimiser
from forethought.replay import Batch, Replay
from forethought.seeding import Streams
from forethought.spaces.spec import EnvSpec

SLICE_ROWS = 2
"""Rows of a transition: the one that is left and the one that is reached."""


class Learner(Protocol):
    """What an update changes."""

    optimisers: dict[str, torch.optim.Optimizer]
    """By name; `owners` says whose they are."""

    def update(self, batch: Transitions, noise: Any, actor_turn: bool) -> Metrics: ...


@dataclass
class ActState:
    """What one caller's environments carry from decision to decision: a random stream."""

    generator: torch.Generator


class ActorCritic(Agent):
    """An actor and critics for observations and actions that are vectors."""

    config: Any
    owners: ClassVar[dict[str, str]]
    """The optimiser of each part of the model; of a target, that of what it follows."""

    def __init__(
        self,
        spec: EnvSpec,
        config: ActorCriticConfig,
        replay_config: ReplayConfig,
        *,
        streams: Streams,
        device: torch.device,
        num_envs: int = 1,
        for_acting: bool = False,
    ) -> None:
        self.obs_dim, self.action_dim = check_spaces(self.name, spec)
        super().__init__(
            spec,
            config,
            replay_config,
            streams=streams,
            device=device,
            num_envs=num_envs,
            for_acting=for_acting,
        )
        self.model = self.make_model()
        # Weights are drawn where every machine draws the same, then moved; targets start equal.
        uniform_linears(self.model, streams.torch("init"))
        self.equal_targets()
        self.model.to(device)
        self.updates = 0
        if not for_acting:
            self.update_stream = streams.torch("update", device=device)
            self.learner: Learner = self.make_learner()

    # ---- what SAC and TD3 have of their own ----

    @abstractmethod
    def make_model(self) -> nn.Module:
        """The networks, among them `target_...` for each one that has a target."""

    @abstractmethod
    def make_learner(self) -> Learner:
        """The update with its optimisers."""

    @abstractmethod
    def decide(self, obs: Tensor, noise: Tensor | None) -> Tensor:
        """Actions [E, A] for observations [E, O]; without noise [E, A], those of evaluation."""

    @abstractmethod
    def draw_noise(self, actor_turn: bool) -> Any:
        """The random numbers of one update."""

    # ---- acting ----

    def new_state(self, num_envs: int, streams: Streams, stream: str, *index: int) -> ActState:
        return ActState(streams.torch(stream, *index, device=self.device))

    def act_batch(
        self,
        obs: Any,
        state: ActState,
        first: NDArray[np.bool_],
        info: Sequence[dict[str, Any]] | dict[str, Any],
        explore: bool,
    ) -> tuple[Any, ActState]:
        with torch.inference_mode():
            x = torch.as_tensor(obs, dtype=torch.float32, device=self.device)  # [E, O]
            shape = (len(x), self.action_dim)
            noise = None
            if explore:
                noise = torch.randn(shape, generator=state.generator, device=self.device)
            return self.decide(x, noise).cpu().numpy(), state

    def acting_state(self, state: ActState) -> tuple[Json, Tensors]:
        return {}, {"generator": state.generator.get_state()}

    def restore_acting_state(self, state: ActState, json: Json, tensors: Tensors) -> ActState:
        state.generator.set_state(tensors["generator"].cpu())
        return state

    # ---- learning ----

    def make_replay(self) -> Replay:
        return Replay(
            self.spec,
            self.replay_config,
            self.num_envs,
            SLICE_ROWS,
            self.streams.numpy("replay"),
            self.device,
        )

    def train(self, updates: int = 1) -> Metrics:
        seen: dict[str, list[float]] = {}
        replay = cast(Replay, self.replay)
        for _ in range(updates):
            batch = replay.sample(self.config.batch_size)
            noise = self.draw_noise(self.actor_turn)
            for name, value in self.update(batch, noise).items():
                seen.setdefault(name, []).append(value)  # not every update has all of them
        return {name: sum(values) / len(values) for name, values in seen.items()}

    @property
    def actor_turn(self) -> bool:
        """Whether the next update is one of those that move the actor."""
        return (self.updates + 1) % int(self.config.policy_delay) == 0

    def update(self, batch: Batch, noise: Any) -> Metrics:
        """One gradient step on the given transitions."""
        turn = self.actor_turn
        self.updates += 1
        self.last_batch = batch
        return self.learner.update(Transitions.of(batch), noise, turn)

    def diagnostics(self) -> tuple[Json, Tensors]:
        json, batch = super().diagnostics()
        optimisers = self.learner.optimisers
        parts = {
            name: health(part.parameters(), optimisers[self.owners[name]])
            for name, part in self.model.named_children()
        }
        rates = {
            name: [group["lr"] for group in optimiser.param_groups]
            for name, optimiser in optimisers.items()
        }
        own = {"updates": self.updates, "gamma": self.config.gamma, "learning_rates": rates}
        return {**own, "parts": parts, **json}, batch

    def log_architecture(self) -> dict[str, int]:
        counts = {
            name: sum(p.numel() for p in part.parameters())
            for name, part in self.model.named_children()
            if not name.startswith("target_")
        }
        return counts | {"total": sum(counts.values())}

    # ---- saving ----

    def state(self) -> tuple[Json, Tensors]:
        names = parameter_names(self.model)
        tensors = {f"model/{k}": v for k, v in self.model.state_dict().items()}
        for kind, optimiser in self.learner.optimisers.items():
            saved = optimiser_tensors(optimiser, names)
            tensors |= {f"{kind}_optimiser/{k}": v for k, v in saved.items()}
        tensors["update_stream"] = self.update_stream.get_state()
        return {"agent": self.name, "updates": self.updates}, tensors

    def restore(self, json: Json, tensors: Tensors) -> None:
        check_shapes(self.model, below("model", tensors))
        self.model.load_state_dict(below("model", tensors))
        self.updates = json["updates"]
        if self.for_acting:
            return
        names = parameter_names(self.model)
        for kind, optimiser in self.learner.optimisers.items():
            restore_optimiser(optimiser, names, below(f"{kind}_optimiser", tensors))
        self.update_stream.set_state(tensors["update_stream"].cpu())

    def equal_targets(self) -> None:
        """Every target becomes what it follows; no gradient ever reaches it."""
        parts = dict(self.model.named_children())
        for name, part in parts.items():
            if name.startswith("target_"):
                part.load_state_dict(parts[name.removeprefix("target_")].state_dict())
                part.requires_grad_(False)
