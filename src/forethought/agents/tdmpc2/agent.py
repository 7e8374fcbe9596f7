"""The TD-MPC2 agent: the model with its optimisers, replay, random streams and files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
from numpy.typing import NDArray

from forethought.agents.base import (
    Agent,
    Json,
    Metrics,
    Tensors,
    below,
    check_shapes,
    parameter_names,
)
from forethought.agents.tdmpc2 import discounts
from forethought.agents.tdmpc2.act import (
    ActState,
    decide,
    legal_of,
    plan_metrics,
    plan_statistics,
    tasks_of,
)
from forethought.agents.tdmpc2.actions import BoxActions, check_actions, check_same_table
from forethought.agents.tdmpc2.categorical import CategoricalActions
from forethought.agents.tdmpc2.compiling import compile_learner, compile_model
from forethought.agents.tdmpc2.config import TDMPC2Config
from forethought.agents.tdmpc2.model import WorldModel
from forethought.agents.tdmpc2.noise import UpdateNoise, draw_update_noise
from forethought.agents.tdmpc2.observations import observations_of
from forethought.agents.tdmpc2.rates import optimisers_of, rate_schedule
from forethought.agents.tdmpc2.tasks import Tasks, discount
from forethought.agents.tdmpc2.transfer import Source, check_meaning, transfer
from forethought.agents.tdmpc2.update import METRICS, Learner, TensorBatch, until_the_end
from forethought.config import ReplayConfig, require
from forethought.data import Dataset, OfflineReplay
from forethought.envs import multi
from forethought.envs.vector import infos_of_each
from forethought.nets.health import health
from forethought.nets.optimisers import optimiser_tensors, restore_optimiser
from forethought.nets.precision import autocast
from forethought.replay import Batch, Replay
from forethought.replay.rows import LIFE_LOST, RowSpec
from forethought.replay.stacks import FrameStacker
from forethought.seeding import Streams
from forethought.spaces import nested
from forethought.spaces.masks import stored_legal
from forethought.spaces.spec import EnvSpec

PARTS = ("encoder", "dynamics", "reward", "termination", "q", "aux_value", "tasks")
"""What the model's optimiser owns; the policy has its own."""
STACK_PAD = "first"
"""Before an episode's first frame lies that frame again."""


class TDMPC2(Agent):
    """Model-based control in latent space, for observations of any kind; actions are continuous, or
    discrete of any structure."""

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
        config = replace(config, model=config.model.for_tasks(len(spec.tasks)))
        action_dim, codec = check_actions(spec)
        (BoxActions if codec is None else CategoricalActions).check(config, spec.task)
        observations = observations_of(spec, config.image)
        squashed, rule = config.model.symlog_obs, f"left out: {spec.task} shows no single vector"
        fits = not squashed or observations.vector is not None
        require(fits, "agent.model.symlog_obs", squashed, rule)
        config.check_replay(replay_config.kind)
        past_ends = _past_ends(spec, config, replay_config.kind)
        if not for_acting and not past_ends:
            stacked = max(observations.stack.values(), default=1)
            _check_slices(spec, config, replay_config, num_envs, history=stacked - 1)
        autocast(config.precision, device)  # refuses before anything is built
        gamma = discount(config, spec)
        aux_gammas = config.multi_gamma.auxiliary(gamma, spec.task)
        tasks = Tasks.of(spec, config)
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
        self.past_ends = past_ends
        # Weights are drawn where every machine draws the same, then moved.
        self.codec, self.observations = codec, observations
        self.model = WorldModel(
            observations, action_dim, config, self.episodic, streams.torch("init"), codec, tasks
        )
        if isinstance(self.model.actions, CategoricalActions):
            self.notes += (self.model.actions.describe(),)
        if tasks is not None:
            self.notes += (tasks.describe(), *config.model.told_of_tasks(len(spec.tasks)))
        if aux_gammas:
            self.model.aux_value = discounts.make_heads(config, aux_gammas)
            self.notes += (self.model.aux_value.describe(gamma),)
        self.model.to(device)
        self.notes += compile_model(self.model, config.compile, device)
        extra = ("termination_loss",) if self.episodic else ()
        planned = plan_metrics(self.model.actions.plan_metric) if config.mpc else ()
        self.metric_names = METRICS + extra + planned
        self.metric_names += discounts.metric_names(aux_gammas)
        self.updates = 0
        if not for_acting:
            config.multi_gamma.warn_of_nothing(gamma, aux_gammas)
            self.update_stream = streams.torch("update", device=device)
            self.schedule = rate_schedule(config)
            optimisers = optimisers_of(self.model, config.lr, PARTS)
            self.learner = Learner(self.model, config, gamma, *optimisers)
            compile_learner(self.learner, config.compile, device)

    def check_new(self, steps: int) -> None:
        super().check_new(steps)
        if not self.episodic:
            _refuse_idle_termination(self.spec.task, self.config)

    # ---- acting ----

    def new_state(self, num_envs: int, streams: Streams, stream: str, *index: int) -> ActState:
        shape = (self.config.horizon, num_envs, self.model.actions.plan_width)
        mean = torch.zeros(shape, device=self.device)
        state = ActState(mean, streams.torch(stream, *index, device=self.device))
        if self.observations.stack:
            rows = RowSpec.of(self.spec, self.observations.stack, STACK_PAD)
            state.frames = FrameStacker.of(rows, num_envs)
        return state

    def observe(self, obs: Any, state: ActState, first: NDArray[np.bool_]) -> bool:
        if state.frames is not None:
            state.frames.push(obs, first)
        return state.frames is not None

    def act_batch(
        self,
        obs: Any,
        state: ActState,
        first: NDArray[np.bool_],
        info: Sequence[dict[str, Any]] | dict[str, Any],
        explore: bool,
    ) -> tuple[Any, ActState]:
        info = infos_of_each(info, len(first))
        if state.frames is not None:
            obs = state.frames.push(obs, first)
        x = self.observations.tensors(obs, self.device)
        begins = torch.as_tensor(first, device=self.device)
        legal = legal_of(info, self.spec, self.device)
        task = tasks_of(info, self.spec, self.device)
        with torch.inference_mode(), autocast(self.config.precision, self.device):
            action, state = decide(
                self.model, self.config, x, state, begins, self.gamma, explore, legal, task
            )
        if self.codec is not None:
            return self.codec.decode(action.cpu().numpy()), state
        return action.float().cpu().numpy(), state

    def act_with_stats(
        self,
        obs: Any,
        explore: bool = False,
        info: dict[str, Any] | None = None,
        task: str | int | None = None,
    ) -> tuple[Any, dict[str, float]]:
        if task is None:
            return super().act_with_stats(obs, explore, info)
        number, own = multi.one_of(self.spec, task)
        action, statistics = super().act_with_stats(
            multi.padded(obs, own, self.spec), explore, {**(info or {}), "task": number}
        )
        return action[: own.action_space.shape[0]], statistics  # type: ignore[index]

    def acting_statistics(self, state: ActState) -> Metrics:
        return plan_statistics(self.model.actions, state.plan)

    def acting_state(self, state: ActState) -> tuple[Json, Tensors]:
        tensors = {"mean": state.mean, "generator": state.generator.get_state()}
        if state.frames is not None:
            tensors |= {f"frames/{name}": x for name, x in state.frames.state().items()}
        return {}, tensors

    def restore_acting_state(self, state: ActState, json: Json, tensors: Tensors) -> ActState:
        state.generator.set_state(tensors["generator"].cpu())
        restored = ActState(tensors["mean"].to(self.device), state.generator, None, state.frames)
        if restored.frames is not None:
            restored.frames.restore(below("frames", tensors))
        return restored

    # ---- learning ----

    def make_replay(self) -> Replay:
        return Replay(
            self.spec,
            self.replay_config,
            self.num_envs,
            self.config.horizon + 1,
            self.streams.numpy("replay"),
            self.device,
            self.observations.stack,
            STACK_PAD,
            past_ends=self.past_ends,
        )

    @property
    def slices(self) -> Replay | OfflineReplay:
        """Its replay, which it draws slices from."""
        return cast("Replay | OfflineReplay", self.replay)

    def begin_with(
        self, tensors: Tensors, task: str, told: str, init_task: str | None, meta: Json
    ) -> tuple[str, ...]:
        there = multi.members(task) if multi.is_multi(task) else (task,)
        here = multi.task_names(self.spec) or (self.spec.task,)
        check_meaning(told, meta.get("config", {}).get("agent", {}), self.config)
        weights = below("model", tensors)
        if not discounts.same_heads(meta, self.facts()):
            weights = {k: v for k, v in weights.items() if not k.startswith("aux_value.")}
        source = Source(told, weights, there, init_task)
        found = transfer(self.model, here, source, self.streams.torch("init-task"))
        self.model.load_state_dict(found.weights)
        self.learner.scale.value.copy_(tensors["q_scale"])
        return found.table(source)

    def learn_from(self, datasets: Sequence[Dataset], storage: Any = "mapped") -> None:
        self.config.check_replay(self.replay_config.kind, offline=True)
        self.past_ends = False
        self.replay = OfflineReplay(
            datasets,
            self.spec,
            self.config.horizon + 1,
            self.streams.numpy("replay"),
            self.device,
            tasks=multi.task_names(self.spec) or None,
            kind=self.replay_config.kind,
            storage=storage,
            stack=self.observations.stack,
            stack_pad=STACK_PAD,
        )

    def train(self, updates: int = 1) -> Metrics:
        seen: dict[str, list[float]] = {}
        for _ in range(updates):
            batch = self.slices.sample(self.config.batch_size)
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
            num_q=size.num_q,
            units=size.mlp_units,
            dropout=config.model.dropout,
            **self.model.actions.update_noise(),
            pads=self.observations.pads,
        )

    def update(self, batch: Batch, noise: UpdateNoise) -> Metrics:
        """One gradient step on the given slices."""
        self._set_rates()
        self.updates += 1
        self.last_batch = batch
        with autocast(self.config.precision, self.device):
            return self.learner.update(self._tensors(batch), noise)

    def _tensors(self, batch: Batch) -> TensorBatch:
        task = None if self.model.tasks is None else batch.extras["task"][0].long()  # [B]
        action, legal = batch.action, batch.extras.get("action_mask")
        if self.codec is None:
            legal = None
        else:
            stored = nested.tree_map(lambda leaf: leaf.cpu().numpy(), action)
            action = torch.from_numpy(self.codec.encode(stored)).to(self.device)  # [T, B]
        if legal is not None:
            legal = stored_legal(legal)  # [T+1, B, N]
        obs = self.observations.of_batch(batch.obs)
        present = until_the_end(batch.terminated) if self.past_ends else None
        return TensorBatch(obs, action, batch.reward, batch.terminated, legal, task, present)

    def snapshots(self, position: int) -> dict[str, Json]:
        """What the auxiliary values predict on slices of replay, and what they should."""
        if self.learner.auxiliary is None or not self.replay.can_sample():
            return {}
        name = "snapshot"
        batch = self.slices.sample(self.config.batch_size, self.streams.numpy(name, position))
        noise = self.draw_noise(self.streams.torch(name, position, device=self.device))
        tensors = self._tensors(batch)
        with torch.no_grad(), autocast(self.config.precision, self.device):
            _, _, value = self.learner.targets(tensors, noise)  # [T, B]
            first = nested.index(tensors.obs, 0)
            z0 = self.model.encode(first, noise.shift_at(0))  # [B, Z]
            zs = self.model.rollout_dynamics_multi_step(z0, tensors.action).latents  # [T+1, B, Z]
            shown = discounts.snapshot(
                self.learner.auxiliary,
                zs[:-1],
                tensors.reward,
                tensors.terminated,
                value,
                tensors.steps,
            )
        agent_steps = 0 if isinstance(self.replay, OfflineReplay) else position
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
        told: Json = {} if heads is None else {"multi_gamma": heads.facts(self.gamma)}
        return told if self.codec is None else {**told, "distinct_actions": self.codec.size}

    def check_origin(self, path: Path, meta: Json) -> None:
        super().check_origin(path, meta)
        discounts.check_same_gammas(path, meta, self.facts())
        check_same_table(path, meta, self.facts())

    def state(self) -> tuple[Json, Tensors]:
        names = parameter_names(self.model)
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
        check_shapes(self.model, below("model", tensors))
        self.model.load_state_dict(below("model", tensors))
        self.updates = json["updates"]
        if self.for_acting:
            return
        names, learner = parameter_names(self.model), self.learner
        for kind, optimiser in _optimisers(learner):
            restore_optimiser(optimiser, names, below(kind, tensors))
        learner.scale.value.copy_(tensors["q_scale"])
        self.update_stream.set_state(tensors["update_stream"].cpu())


def _optimisers(learner: Learner) -> tuple[tuple[str, torch.optim.Optimizer], ...]:
    return ("optimiser", learner.optimiser), ("policy_optimiser", learner.policy_optimiser)


def _past_ends(spec: EnvSpec, config: TDMPC2Config, kind: str) -> bool:
    """Whether slices may reach past ends. The switch is refused where it has no effect, or would
    mean something else; None is off there."""
    reason = "" if spec.terminates else f"{spec.task} never terminates"
    if any(column.name == LIFE_LOST for column in spec.columns):
        reason = "the steps after a lost life (env.atari.life_loss) would be left out too"
    insisted = config.past_ends is True
    require(not (insisted and reason), "agent.past_ends", True, f"false: {reason}")
    return insisted or (config.past_ends is None and not reason and kind == "transitions")


def _refuse_idle_termination(task: str, config: TDMPC2Config) -> None:
    """Keys of the termination head, which tasks that never terminate have not. A rate that other
    parts have as well is no wish for one: presets raise all rates together."""
    rule = f"left out: {task} never terminates, so there is no termination head"
    coef, rates = config.termination_coef, vars(config.lr).copy()
    require(coef == TDMPC2Config().termination_coef, "agent.termination_coef", coef, rule)
    rate = rates.pop("termination")
    like_others = rate in (TDMPC2Config().lr.termination, *rates.values())
    require(like_others, "agent.lr.termination", rate, rule)


def _check_slices(
    spec: EnvSpec, config: TDMPC2Config, replay: ReplayConfig, num_envs: int, history: int
) -> None:
    """Refuse episodes in which no slice fits, and rings in which no whole episode does: nothing, or
    only the ends of episodes, would be learned from."""
    for task in spec.tasks or (spec,):
        limit = task.max_episode_steps
        if limit is None:
            continue
        rule = f"at most {limit}, the decisions of an episode of {task.task}: no slice would fit"
        require(config.horizon <= limit, "agent.horizon", config.horizon, rule)
        if task.terminates or replay.kind != "episodes":
            continue  # episodes may be shorter, or are drawn from before they end
        least = num_envs * (limit + 1 + history)
        rule = (
            f"at least {least}, a whole episode of {task.task} for each of {num_envs} environments,"
            " for only whole ones are drawn from (--replay transitions draws from any)"
        )
        require(replay.capacity_rows >= least, "replay.capacity_rows", replay.capacity_rows, rule)
