"""The agent of the DQN family: networks with their optimiser, replay, random streams and files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor

from forethought.agents.base import (
    Agent,
    Json,
    Metrics,
    Tensors,
    below,
    check_shapes,
    log,
    parameter_names,
)
from forethought.agents.dqn.act import ActState, choose
from forethought.agents.dqn.config import (
    IQN,
    DQNConfig,
    LinearEpsilon,
    SyncByAgentSteps,
    SyncByUpdates,
)
from forethought.agents.dqn.dead_units import LOOKED_AT, dead_share
from forethought.agents.dqn.heads import QNetwork
from forethought.agents.dqn.networks import kernels_for, make_trunk, network_for
from forethought.agents.dqn.update import (
    METRICS,
    Learner,
    Transitions,
    UpdateNoise,
    draw_update_noise,
)
from forethought.clock import Every
from forethought.config import ConfigError, ForethoughtError, ReplayConfig
from forethought.envs.vector import infos_of_each
from forethought.nets.health import health
from forethought.nets.layers import use_kernels
from forethought.nets.optimisers import optimiser_tensors, restore_optimiser
from forethought.replay import NStepBatch, NStepReplay, replay_metric_names
from forethought.replay.rows import LIFE_LOST, RowSpec
from forethought.replay.stacks import FrameStacker
from forethought.seeding import Streams, numpy_state, restore_numpy
from forethought.spaces import nested
from forethought.spaces.action_codec import is_discrete
from forethought.spaces.masks import legal_actions, stored_legal
from forethought.spaces.spec import EnvSpec

STACK_PAD = "zeros"
"""What lies before an episode's first frame, in acting and in replay."""


class DQN(Agent):
    """Values of discrete actions, learned from replay; images or vectors as observations."""

    name: ClassVar[str] = "dqn"
    config: DQNConfig

    def __init__(
        self,
        spec: EnvSpec,
        config: DQNConfig,
        replay_config: ReplayConfig,
        *,
        streams: Streams,
        device: torch.device,
        num_envs: int = 1,
        for_acting: bool = False,
    ) -> None:
        check_task(spec)
        network, image, frames = network_for(spec, config)
        super().__init__(
            spec,
            config,
            replay_config,
            streams=streams,
            device=device,
            num_envs=num_envs,
            for_acting=for_acting,
        )
        self.codec = spec.action_codec
        self.first_action = first_action(spec)
        self.is_vector = image is None
        self.stack = {"obs": frames} if frames > 1 else {}

        kernels, notes = kernels_for(config, spec, image, frames, device)

        def build() -> QNetwork:
            # Weights are drawn where every machine draws the same, then moved.
            length = int(np.prod(spec.observation_space.shape or ()))
            trunk = make_trunk(network, image, frames, length)
            built = QNetwork(trunk, self.codec.size, config, streams.torch("init"))
            if kernels is not None:
                use_kernels(built, kernels)
            return built.to(device)

        self.online = build()
        told = _told(config, network.kind, frames if image else 0, spec.action_repeat)
        self.notes += (*notes, told)
        looks = replay_metric_names(replay_config)
        self.metric_names = (*METRICS, "epsilon", *looks, *(("dead_units",) if looks else ()))
        self.updates = 0
        if not for_acting:
            self.update_stream = streams.torch("update", device=device)
            self.learner = Learner(self.online, build(), config)
            match config.target:
                case SyncByUpdates(period) | SyncByAgentSteps(period):
                    self._period = Every(period)

    # ---- acting ----

    def new_state(self, num_envs: int, streams: Streams, stream: str, *index: int) -> ActState:
        generator = streams.torch(stream, *index, device=self.device)
        state = ActState(streams.numpy(stream, *index), generator)
        if self.stack:
            rows = RowSpec.of(self.spec, self.stack, STACK_PAD)
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
        x = self._seen(torch.as_tensor(np.asarray(obs), device=self.device))
        action = choose(self.online, self.config, x, state, explore, self._legal(info))
        return self.codec.decode(action), state

    def _seen(self, obs: Tensor) -> Tensor:
        """A vector as numbers; images stay as they are stored, the network scales them."""
        return obs.float() if self.is_vector else obs

    def _legal(self, info: Sequence[dict[str, Any]]) -> NDArray[np.bool_] | None:
        """Which actions each environment allows now [E, A]; None: all of them."""
        source = self.spec.mask_source
        if source is None:
            return None
        if any(source not in own for own in info):
            raise ForethoughtError(
                f"{self.spec.task} says in info which actions are legal, but there is no "
                f"'{source}' in the info given: pass what reset and step return, as in "
                "act(obs, info=info)."
            )
        mask = np.stack([own[source] for own in info])
        return legal_actions(mask, (len(info), self.codec.size))

    def acting_statistics(self, state: ActState) -> Metrics:
        return {} if state.epsilon is None else {"epsilon": state.epsilon}

    def acting_state(self, state: ActState) -> tuple[Json, Tensors]:
        tensors = {"generator": state.generator.get_state()}
        if state.frames is not None:
            tensors |= {f"frames/{name}": x for name, x in state.frames.state().items()}
        return {"choices": numpy_state(state.choices), "decisions": state.decisions}, tensors

    def restore_acting_state(self, state: ActState, json: Json, tensors: Tensors) -> ActState:
        state.generator.set_state(tensors["generator"].cpu())
        restore_numpy(state.choices, json["choices"])
        state.decisions = json["decisions"]
        if state.frames is not None:
            state.frames.restore(below("frames", tensors))
        return state

    # ---- learning ----

    def make_replay(self) -> NStepReplay:
        cut = any(column.name == LIFE_LOST for column in self.spec.columns)
        return NStepReplay(
            self.spec,
            self.replay_config,
            self.num_envs,
            self.config.n_step,
            self.config.gamma,
            self.streams.numpy("replay"),
            self.device,
            stack=self.stack,
            stack_pad=STACK_PAD,
            clip_rewards=self.spec.sign_rewards,
            cut=LIFE_LOST if cut else None,
        )

    @property
    def transitions(self) -> NStepReplay:
        """The replay, by what it gives."""
        replay = self.replay
        assert isinstance(replay, NStepReplay)
        return replay

    def train(self, updates: int = 1) -> Metrics:
        seen: dict[str, list[float]] = {}
        for _ in range(updates):
            beta = self.transitions.beta_at(self.clock, self.total_agent_steps)
            batch = self.transitions.sample(self.config.batch_size, beta=beta)
            for name, value in self.update(batch, self.draw_noise()).items():
                seen.setdefault(name, []).append(value)
        return {name: sum(values) / len(values) for name, values in seen.items()}

    def draw_noise(self) -> UpdateNoise:
        """The random numbers of the next update."""
        rows = self.config.batch_size
        return draw_update_noise(self.online, self.config, rows, self.update_stream)

    def update(self, batch: NStepBatch, noise: UpdateNoise) -> Metrics:
        """One gradient step on the given transitions; then their priorities, then the target."""
        by_updates = isinstance(self.config.target, SyncByUpdates)
        if self.updates == 0 and not by_updates:
            if self.clock.agent_steps == 0:
                log.warning(
                    "The target network is copied every %d agent steps, but nobody counts them, so "
                    "it never is: give the agent the clock that you count with by `follow`, or "
                    "count updates (agent.target of kind updates).",
                    self._period.period,
                )
            # Periods that ended before anything was learned are none.
            self._period.due(max(0, self.clock.agent_steps - self.num_envs))
        self.updates += 1
        self.last_batch = batch
        metrics, priority = self.learner.update(self._tensors(batch), noise)
        if not metrics["nonfinite"]:
            self.transitions.update_priorities(batch.rows, priority)
        if self._period.due(self.updates if by_updates else self.clock.agent_steps):
            self.learner.sync()
        return metrics

    def _tensors(self, batch: NStepBatch) -> Transitions:
        if self.first_action is not None:
            action = batch.action.long() - self.first_action  # [B]
        else:
            stored = nested.tree_map(lambda leaf: leaf.cpu().numpy(), batch.action)
            action = torch.from_numpy(self.codec.encode(stored)).to(self.device)  # [B]
        return Transitions(
            obs=self._seen(batch.obs),
            action=action,
            reward=batch.reward,
            discount=batch.discount,
            next_obs=self._seen(batch.next_obs),
            weights=batch.weights,
            legal=_allowed(batch.extras),
            next_legal=_allowed(batch.next_extras),
        )

    def replay_diagnostics(self) -> Metrics:
        """Beside what replay gives: how many units do not answer to any of it."""
        found, steps = super().replay_diagnostics(), self.clock.agent_steps
        if not found:
            return found
        beta = self.transitions.beta_at(self.clock, self.total_agent_steps)
        stream = self.streams.numpy("dead-units", steps)
        batch = self.transitions.sample(LOOKED_AT, beta=beta, stream=stream)
        tau, kind = None, self.config.distribution
        if isinstance(kind, IQN):
            generator = self.streams.torch("dead-units", steps, device=self.device)
            shape = LOOKED_AT, kind.policy_taus
            tau = torch.rand(shape, generator=generator, device=self.device)
        return found | {"dead_units": dead_share(self.online, self._seen(batch.obs), tau)}

    def diagnostics(self) -> tuple[Json, Tensors]:
        """Beside the batch: both networks, and the learning rate."""
        json, batch = super().diagnostics()
        optimiser = self.learner.optimiser
        parts = {
            "online": health(self.online.parameters(), optimiser),
            "target": health(self.learner.target.parameters(), optimiser),
        }
        own = {"updates": self.updates, "lr": optimiser.param_groups[0]["lr"]}
        return {**own, "parts": parts, **json}, batch

    def log_architecture(self) -> dict[str, int]:
        return self.online.log_architecture()

    # ---- saving ----

    def state(self) -> tuple[Json, Tensors]:
        tensors = {f"online/{k}": v for k, v in self.online.state_dict().items()}
        tensors |= {f"target/{k}": v for k, v in self.learner.target.state_dict().items()}
        saved = optimiser_tensors(self.learner.optimiser, parameter_names(self.online))
        tensors |= {f"optimiser/{k}": v for k, v in saved.items()}
        tensors["update_stream"] = self.update_stream.get_state()
        json = {
            "agent": self.name,
            "updates": self.updates,
            "target_period": self._period.state(),
            "greatest_return": self.learner.greatest_return,
        }
        return json, tensors

    def restore(self, json: Json, tensors: Tensors) -> None:
        check_shapes(self.online, below("online", tensors))
        self.online.load_state_dict(below("online", tensors))
        self.updates = json["updates"]
        if self.for_acting:
            return
        check_shapes(self.learner.target, below("target", tensors))
        self.learner.target.load_state_dict(below("target", tensors))
        names = parameter_names(self.online)
        restore_optimiser(self.learner.optimiser, names, below("optimiser", tensors))
        self.update_stream.set_state(tensors["update_stream"].cpu())
        self._period.restore(json["target_period"])
        self.learner.greatest_return = json["greatest_return"]


def check_task(spec: EnvSpec) -> None:
    """A sentence that says what does not fit, before anything is built."""
    if spec.tasks:
        raise ConfigError(f"dqn plays one task, but {spec.task} is several; tdmpc2 plays many.")
    if not is_discrete(spec.action_space):
        raise ConfigError(
            f"dqn takes discrete actions (Discrete, MultiDiscrete, MultiBinary or a Dict of "
            f"these), but those of {spec.task} are {spec.action_space}; sac, td3 and tdmpc2 take "
            "continuous ones."
        )
    for column in spec.columns:
        if column.name == "action_mask":
            spec.action_codec.check_mask(column.shape)


def first_action(spec: EnvSpec) -> int | None:
    """Where actions are plain consecutive numbers, the first of them: then nothing has to be looked
    up in the table, which takes as long as a small network. Else None."""
    space = spec.action_space
    if isinstance(space, spaces.Discrete) and spec.distinct_actions is None:
        return int(space.start)
    return None


def _allowed(extras: dict[str, Tensor]) -> Tensor | None:
    mask = extras.get("action_mask")
    return None if mask is None else stored_legal(mask)  # [B, A]


def _told(config: DQNConfig, network: str, stacked: int, repeat: int) -> str:
    """The toggles in one line, with schedules in agent steps and in frames."""

    def steps(count: int) -> str:
        return f"{count:,} agent steps ({count * repeat:,} frames)"

    parts = [f"network {network}", f"stacks of {stacked}" if stacked > 1 else ""]
    parts += [name for name in ("double", "dueling") if getattr(config, name)]
    parts += [f"{config.n_step}-step returns"]
    for name in ("distribution", "noisy", "munchausen"):
        kind = getattr(config, name).kind
        parts += [] if kind == "none" else [name if kind == "on" else f"{name} {kind}"]
    epsilon, target = config.exploration, config.target
    if isinstance(epsilon, LinearEpsilon):
        parts += [
            f"epsilon {epsilon.start:g} to {epsilon.end:g} over {steps(epsilon.decay_agent_steps)}"
        ]
    else:
        explores = config.noisy.kind != "none"
        parts += ["no epsilon" if explores else "no exploration (neither epsilon nor noisy layers)"]
    if isinstance(target, SyncByAgentSteps):
        parts += [f"target copied every {steps(target.period_agent_steps)}"]
    else:
        parts += [f"target copied every {target.period_updates:,} updates"]
    return "DQN: " + ", ".join(part for part in parts if part) + "."
