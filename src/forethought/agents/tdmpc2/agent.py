"""The TD-MPC2 agent: the model with its optimisers, replay, random streams and files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from forethought.agents.base import Agent, Json, Metrics, Tensors
from forethought.agents.tdmpc2 import discounts
from forethought.agents.tdmpc2.act import ActState, decide
from forethought.agents.tdmpc2.compiling import compile_learner, compile_model
from forethought.agents.tdmpc2.config import CosineRate, LinearRate, TDMPC2Config
from forethought.agents.tdmpc2.model import WorldModel
from forethought.agents.tdmpc2.noise import UpdateNoise, draw_update_noise
from forethought.agents.tdmpc2.update import METRICS, Learner, TensorBatch
from forethought.clock import Constant, Cosine, Linear, Schedule
from forethought.config import ConfigError, ForethoughtError, ReplayConfig
from forethought.maths import discount_for
from forethought.nets.health import health
from forethought.nets.optimisers import adam, optimiser_tensors, restore_optimiser
from forethought.nets.precision import autocast
from forethought.replay import Batch, Replay
from forethought.seeding import Streams
from forethought.spaces.spec import EnvSpec

PLAN_METRICS = ("plan_value_max", "plan_value_mean", "plan_value_std", "plan_std_mean")
"""Of the elites in a plan's last iteration, and of the first action's distribution."""
PARTS = ("encoder", "dynamics", "reward", "termination", "q", "aux_value")
"""What the model's optimiser owns; the policy has its own."""
RATE_OF = {"aux_value": "q"}
"""Parts that learn at the rate of another."""


class TDMPC2(Agent):
    """Model-based control in latent space for continuous actions and vector observations."""

    name: ClassVar[str] = "tdmpc2"
    config: TDMPC2Config

    def __init__(
        self,
        spec: EnvSpec,
        config: TDMPC2Config,
        replay_config: ReplayConfig,
        *,
        streams: Streams,
        device: torch.device,
        num_envs: int = 1,
        for_acting: bool = False,
    ) -> None:
        obs_dim, action_dim = check_spaces(spec)
        autocast(config.precision, device)  # refuses before anything is built
        gamma = discount(config, spec)
        aux_gammas = config.multi_gamma.auxiliary(gamma, spec.task)
        super().__init__(
            spec,
            config,
            replay_config,
            streams=streams,
            device=device,
            num_envs=num_envs,
            for_acting=for_acting,
        )
        self.gamma = gamma
        self.episodic = spec.terminates if config.episodic is None else config.episodic
        # Weights are drawn where every machine draws the same, then moved.
        self.model = WorldModel(obs_dim, action_dim, config, self.episodic, streams.torch("init"))
        if aux_gammas:
            self.model.aux_value = discounts.make_heads(config, aux_gammas)
            self.notes += (self.model.aux_value.describe(gamma),)
        self.model.to(device)
        self.notes += compile_model(self.model, config.compile, device)
        extra = ("termination_loss",) if self.episodic else ()
        self.metric_names = METRICS + extra + (PLAN_METRICS if config.mpc else ())
        self.metric_names += discounts.metric_names(aux_gammas)
        self.updates = 0
        if not for_acting:
            config.multi_gamma.warn_of_nothing(gamma, aux_gammas)
            self.update_stream = streams.torch("update", device=device)
            self.schedule = rate_schedule(config)
            self.learner = self._make_learner()
            compile_learner(self.learner, config.compile, device)

    def _make_learner(self) -> Learner:
        model, rates = self.model, self.config.lr
        by_rate: dict[float, list[nn.Parameter]] = {}  # parts with one rate are one step
        for name in PARTS:
            if (part := getattr(model, name)) is not None:
                rate = getattr(rates, RATE_OF.get(name, name))
                by_rate.setdefault(rate, []).extend(part.parameters())
        groups = [{"params": params, "base_lr": rate} for rate, params in by_rate.items()]
        policy = [{"params": list(model.policy.parameters()), "base_lr": rates.policy}]
        return Learner(
            model, self.config, self.gamma, adam(groups, eps=1e-8), adam(policy, eps=1e-5)
        )

    # ---- acting ----

    def new_state(self, num_envs: int, streams: Streams, stream: str, *index: int) -> ActState:
        shape = (self.config.horizon, num_envs, self.model.action_dim)
        mean = torch.zeros(shape, device=self.device)
        return ActState(mean, streams.torch(stream, *index, device=self.device))

    def act_batch(
        self,
        obs: Any,
        state: ActState,
        first: NDArray[np.bool_],
        info: Sequence[dict[str, Any]],
        explore: bool,
    ) -> tuple[NDArray[np.float32], ActState]:
        x = torch.as_tensor(np.asarray(obs), dtype=torch.float32, device=self.device)
        begins = torch.as_tensor(first, device=self.device)
        with torch.inference_mode(), autocast(self.config.precision, self.device):
            action, state = decide(self.model, self.config, x, state, begins, self.gamma, explore)
        return action.float().cpu().numpy(), state

    def act_with_stats(
        self, obs: Any, explore: bool = False
    ) -> tuple[NDArray[np.float32], dict[str, float]]:
        first = self._own_state is None
        if first:
            self._own_state = self.new_state(1, self.streams, "own-acting", self._own_episode)
            self._own_episode += 1
        action, self._own_state = self.act_batch(
            np.asarray(obs)[None], self._own_state, np.array([first]), [{}], explore
        )
        return action[0], self.acting_statistics(self._own_state)

    def acting_statistics(self, state: ActState) -> Metrics:
        plan = state.plan
        if plan is None:
            return {}
        return {
            "plan_value_max": plan.values.max().item(),
            "plan_value_mean": plan.values.mean().item(),
            "plan_value_std": plan.values.std(correction=0).item(),
            "plan_std_mean": plan.std[0].mean().item(),
        }

    def acting_state(self, state: ActState) -> tuple[Json, Tensors]:
        return {}, {"mean": state.mean, "generator": state.generator.get_state()}

    def restore_acting_state(self, state: ActState, json: Json, tensors: Tensors) -> ActState:
        state.generator.set_state(tensors["generator"].cpu())
        return ActState(tensors["mean"].to(self.device), state.generator)

    # ---- learning ----

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
        seen: dict[str, list[float]] = {}
        for _ in range(updates):
            batch = self.replay.sample(self.config.batch_size)
            for name, value in self.update(batch, self.draw_noise()).items():
                seen.setdefault(name, []).append(value)  # a skipped update lacks some
        return {name: sum(values) / len(values) for name, values in seen.items()}

    def draw_noise(self, stream: torch.Generator | None = None) -> UpdateNoise:
        """The random numbers of the next update, or of a look from outside with its own stream."""
        config, size = self.config, self.config.model.resolved
        return draw_update_noise(
            stream or self.update_stream,
            horizon=config.horizon,
            batch=config.batch_size,
            action_dim=self.model.action_dim,
            num_q=size.num_q,
            units=size.mlp_units,
            dropout=config.model.dropout,
        )

    def update(self, batch: Batch, noise: UpdateNoise) -> Metrics:
        """One gradient step on the given slices."""
        self._set_rates()
        self.updates += 1
        self.last_batch = batch
        with autocast(self.config.precision, self.device):
            return self.learner.update(self._tensors(batch), noise)

    def _tensors(self, batch: Batch) -> TensorBatch:
        return TensorBatch(batch.obs.float(), batch.action, batch.reward, batch.terminated)

    def snapshots(self, agent_steps: int) -> dict[str, Json]:
        """What the auxiliary values predict on slices of replay, and what they should."""
        if self.learner.auxiliary is None or not self.replay.can_sample():
            return {}
        name = "snapshot"
        batch = self.replay.sample(self.config.batch_size, self.streams.numpy(name, agent_steps))
        noise = self.draw_noise(self.streams.torch(name, agent_steps, device=self.device))
        tensors = self._tensors(batch)
        with torch.no_grad(), autocast(self.config.precision, self.device):
            _, _, value = self.learner.targets(tensors, noise)  # [T, B]
            z0 = self.model.encode(tensors.obs[0])  # [B, Z]
            zs = self.model.rollout_dynamics_multi_step(z0, tensors.action).latents  # [T+1, B, Z]
            shown = discounts.snapshot(
                self.learner.auxiliary, zs[:-1], tensors.reward, tensors.terminated, value
            )
        about = {"agent_steps": agent_steps, "updates": self.updates, "primary_gamma": self.gamma}
        return {"multi_gamma": about | shown}

    def _set_rates(self) -> None:
        factor = self.schedule.value(self.updates)
        for optimiser in (self.learner.optimiser, self.learner.policy_optimiser):
            for group in optimiser.param_groups:
                group["lr"] = group["base_lr"] * factor

    def diagnostics(self) -> tuple[Json, Tensors]:
        """Beside the batch: every part, the running scale of Q and the learning rates.

        After a skipped model step the policy's gradients are those of an update before.
        """
        json, batch = super().diagnostics()
        learner = self.learner
        owners = dict.fromkeys(PARTS, learner.optimiser) | {"policy": learner.policy_optimiser}
        parts = {
            name: health(part.parameters(), optimiser)
            for name, optimiser in owners.items()
            if (part := getattr(self.model, name)) is not None
        }
        parts["target_q"] = health(self.model.target_q.parameters(), learner.optimiser)
        rates = {
            name: [group["lr"] for group in optimiser.param_groups]
            for name, optimiser in _optimisers(learner)
        }
        own = {"updates": self.updates, "gamma": self.gamma, "learning_rates": rates}
        return {**own, "q_scale": learner.scale.value.item(), "parts": parts, **json}, batch

    def log_architecture(self) -> dict[str, int]:
        counts = {
            name: sum(p.numel() for p in part.parameters())
            for name in (*PARTS, "policy")
            if (part := getattr(self.model, name)) is not None
        }
        return counts | {"total": sum(counts.values())}

    # ---- saving ----

    def facts(self) -> Json:
        heads = self.model.aux_value
        return {} if heads is None else {"multi_gamma": heads.facts(self.gamma)}

    def check_origin(self, path: Path, meta: Json) -> None:
        super().check_origin(path, meta)
        discounts.check_same_gammas(path, meta, self.facts())

    def state(self) -> tuple[Json, Tensors]:
        names = _names(self.model)
        learner = self.learner
        tensors = {f"model/{k}": v for k, v in self.model.state_dict().items()}
        for kind, optimiser in _optimisers(learner):
            saved = optimiser_tensors(optimiser, names)
            tensors |= {f"{kind}/{k}": v for k, v in saved.items()}
        tensors["q_scale"] = learner.scale.value
        tensors["update_stream"] = self.update_stream.get_state()
        json = {"agent": self.name, "updates": self.updates, "gamma": self.gamma}
        return json, tensors

    def restore(self, json: Json, tensors: Tensors) -> None:
        check_shapes(self.model, _below("model", tensors))
        self.model.load_state_dict(_below("model", tensors))
        self.updates = json["updates"]
        if self.for_acting:
            return
        names, learner = _names(self.model), self.learner
        for kind, optimiser in _optimisers(learner):
            restore_optimiser(optimiser, names, _below(kind, tensors))
        learner.scale.value.copy_(tensors["q_scale"])
        self.update_stream.set_state(tensors["update_stream"].cpu())


def check_shapes(model: nn.Module, saved: Tensors) -> None:
    """One sentence where saved weights belong to another model."""
    own = model.state_dict()
    for name in sorted(own.keys() | saved.keys()):
        here = tuple(own[name].shape) if name in own else "absent"
        there = tuple(saved[name].shape) if name in saved else "absent"
        if here != there:
            raise ForethoughtError(
                f"The saved weights are of another model: {name} is {there} in the file and {here} "
                "in this agent. Use the configuration and task that it was trained with."
            )


def _optimisers(learner: Learner) -> tuple[tuple[str, torch.optim.Optimizer], ...]:
    return ("optimiser", learner.optimiser), ("policy_optimiser", learner.policy_optimiser)


def _below(prefix: str, tensors: Tensors) -> Tensors:
    return {k[len(prefix) + 1 :]: v for k, v in tensors.items() if k.startswith(prefix + "/")}


def _names(model: nn.Module) -> dict[Tensor, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def check_spaces(spec: EnvSpec) -> tuple[int, int]:
    """Lengths of observation and action, or a sentence that says what does not fit."""
    obs, action = spec.observation_space, spec.action_space
    if not isinstance(obs, gymnasium.spaces.Box) or len(obs.shape) != 1:
        raise ConfigError(
            f"tdmpc2 takes observations that are one vector (a Box of one axis), but those of "
            f"{spec.task} are {obs}."
        )
    box = isinstance(action, gymnasium.spaces.Box) and len(action.shape) == 1
    box = box and np.issubdtype(action.dtype, np.floating)
    if not (box and np.all(action.low == -1) and np.all(action.high == 1)):  # type: ignore[attr-defined]
        raise ConfigError(
            f"tdmpc2 takes continuous actions (a bounded Box of one axis), but those of "
            f"{spec.task} are {action}."
        )
    return obs.shape[0], action.shape[0]  # type: ignore[index]


def discount(config: TDMPC2Config, spec: EnvSpec) -> float:
    """The discount that was set, or the heuristic's."""
    if config.gamma is not None:
        return config.gamma
    if spec.max_episode_steps is None:
        raise ConfigError(
            f"{spec.task} has no step limit to derive a discount from: set --agent.gamma (for "
            "instance 0.99) or --env.max_episode_steps."
        )
    return discount_for(
        spec.max_episode_steps, config.gamma_denominator, config.gamma_min, config.gamma_max
    )


def rate_schedule(config: TDMPC2Config) -> Schedule:
    """The factor of all learning rates, by updates."""
    match config.schedule:
        case LinearRate(duration, end, warmup):
            return Linear(1.0, end, duration, warmup)
        case CosineRate(duration, end, warmup):
            return Cosine(1.0, end, duration, warmup)
        case _:
            return Constant(1.0)
