"""The whole configuration of a run, and how it is made of layers."""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal

from forethought.config.errors import ConfigError, nearest, require, unknown
from forethought.config.groups import (
    ATARI,
    AtariConfig,
    EnvConfig,
    EpisodeReplayConfig,
    EvalConfig,
    OfflineConfig,
    ReplayConfig,
    TrackConfig,
    TrainConfig,
    check_device,
    replay_kinds,
)
from forethought.config.layers import (
    IDLE_OFFLINE,
    ONLY_ATARI,
    drop_key,
    flatten,
    layer,
    merge,
    value_at,
)
from forethought.config.reading import (
    either,
    field_types,
    from_dict,
    listed,
    to_dict,
    union_members,
)


@dataclass(frozen=True)
class Rhythm:
    """When a run reports, is evaluated, saves and ends, all in its own unit."""

    unit: Literal["agent_steps", "updates"]
    total: int
    log_every: int
    eval_every: int
    save_every: int


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that decides how a run goes. Same values, same thread count: the same run."""

    agent_name: str
    """The agent's name, as 'forethought list agents' shows it."""
    task: str
    """The task's name, as 'forethought list tasks' shows it."""
    seed: int = 1
    """Seed of every random stream of the run."""
    steps: int = 1_000_000
    """Length of the run in agent steps (decisions, summed over environments)."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps; auto takes the first of cuda, mps and cpu that exists."""
    agent: Any
    """The agent itself."""
    env: EnvConfig = field(default_factory=EnvConfig)
    """The environments."""
    replay: ReplayConfig = field(default_factory=EpisodeReplayConfig)
    """The stored experience."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """The rhythm of experience, updates and checkpoints."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """Evaluation during training."""
    track: TrackConfig = field(default_factory=TrackConfig)
    """What is written while training."""
    offline: OfflineConfig = field(default_factory=OfflineConfig)
    """Training from recorded data."""

    @property
    def is_offline(self) -> bool:
        """Whether the run learns from recorded data alone."""
        return self.offline.data is not None

    @property
    def rhythm(self) -> Rhythm:
        """Its length and intervals: in agent steps, or in updates where it takes no steps."""
        off = self.offline
        if self.is_offline:
            every = (off.log_every_updates, off.eval_every_updates, off.checkpoint_every_updates)
            return Rhythm("updates", off.updates, *every)
        every = (
            self.track.every_agent_steps,
            self.eval.every_agent_steps,
            self.train.checkpoint_every_agent_steps,
        )
        return Rhythm("agent_steps", self.steps, *every)

    def with_total(self, total: int) -> "RunConfig":
        """The same run with another length, in its own unit."""
        if self.is_offline:
            longer = dataclasses.replace(self.offline, updates=total)
            return dataclasses.replace(self, offline=longer)
        return dataclasses.replace(self, steps=total)

    @property
    def is_atari(self) -> bool:
        """Whether its task is a game of the Atari 2600."""
        return self.task.startswith(ATARI)

    def __post_init__(self) -> None:
        self._refuse_idle()
        self._check_protocol()
        require(self.seed >= 0, "seed", self.seed, "at least 0")
        require(self.steps >= 1, "steps", self.steps, "at least 1")
        check_device("device", self.device, auto=True)
        self._check_capacity()

    def _check_capacity(self) -> None:
        """Replay must have room for a batch, and for one of its parts from each environment."""
        if getattr(self.agent, "batch_size", None) is None:
            return
        # Rows of a part: a slice, the n steps of a return, or a transition, and the row before it.
        steps = [name for name in ("horizon", "n_step") if hasattr(self.agent, name)]
        rows = 1 + (getattr(self.agent, steps[0]) if steps else 1)
        told = f"(agent.{steps[0]} + 1)" if steps else "2"
        capacity, key = self.replay.capacity_rows, "replay.capacity_rows"
        for name in ("agent.batch_size", "env.num_envs"):
            least = attrgetter(name)(self) * rows
            require(capacity >= least, key, capacity, f"at least {name} x {told} = {least}")

    def _check_protocol(self) -> None:
        """What is for Atari has no effect elsewhere, and a protocol sets the limit itself."""
        if not self.is_atari:
            rule = f"left out: {self.task} is no {ATARI} task"
            for key, value in to_dict(self.env.atari).items():
                default = getattr(AtariConfig(), key)
                require(value == default, f"env.atari.{key}", value, rule)
            require(self.eval.protocol is None, "eval.protocol", self.eval.protocol, rule)
        if self.eval.protocol is not None:
            limit, key = self.env.eval_max_episode_steps, "env.eval_max_episode_steps"
            rule = f"left out: eval.protocol {self.eval.protocol} decides it"
            require(limit is None, key, limit, rule)

    def _refuse_idle(self) -> None:
        """What has no effect in an offline run must have its default value."""
        if not self.is_offline:
            return
        for key, instead in IDLE_OFFLINE.items():
            value, default = attrgetter(key)(self), _default_of(self, key)
            rule = "left out: it has no effect in an offline run"
            rule += f" (which has {instead})" if instead else ""
            require(value == default, key, value, rule)


def _default_of(config: Any, key: str) -> Any:
    """The default of a dotted key, in the class that its group has here."""
    group, _, name = key.rpartition(".")
    owner = attrgetter(group)(config) if group else config
    return next(f.default for f in dataclasses.fields(owner) if f.name == name)


def build_run_config(
    agent_name: str, task: str, agent_config_class: type, layers: Iterable[Mapping[str, Any]]
) -> RunConfig:
    """The run that the layers describe, later ones winning over earlier ones and over defaults.

    A layer has the shape of a run's config.yaml, or any part of it. Its `agent_name` must be this
    agent, for its `agent` group would mean nothing to another; its `task` gives way to `task`. What
    layers say of offline runs or of Atari (presets do) is dropped where the run is none.
    """
    every = list(layers)
    if all(value_at(own, "offline.data", None) is None for own in every):
        every = [
            {k: v for k, v in own.items() if k != "offline" or not isinstance(v, Mapping)}
            for own in every
        ]
    if not task.startswith(ATARI):
        every = [layer({}, own) for own in every]
        for own in every:
            for key in ONLY_ATARI:
                drop_key(own, key)
    data = merge(agent_config_class, every)
    named = data.pop("agent_name", agent_name)
    require(named == agent_name, "agent_name", named, f"{agent_name}, the agent of this run")
    agent: Any = from_dict(agent_config_class, data.pop("agent", {}), "agent")
    data = {**data, "agent_name": agent_name, "task": task, "agent": agent}
    config = from_dict(RunConfig, data)
    kind, kinds = config.replay.kind, replay_kinds(agent_config_class)
    require(kind in kinds, "replay", kind, f"{either(kinds)} for {agent_name}")
    if hasattr(agent, "check_replay"):
        agent.check_replay(kind, config.is_offline)
    return config


def refuse_idle_groups(config: RunConfig, *said: Mapping[str, Any]) -> None:
    """What a person says of offline runs or of Atari, in a file or by flags, must not be without
    effect; only presets, which are for every kind of run, may."""
    defaults = flatten({"offline": to_dict(OfflineConfig()), "env": to_dict(EnvConfig())})
    for key, value in [pair for own in said for pair in flatten(own).items()]:
        if key.startswith("offline.") and not config.is_offline:
            rule = "left out: it has no effect without offline.data"
        elif key.startswith(ONLY_ATARI) and not config.is_atari:
            rule = f"left out: {config.task} is no {ATARI} task"
        else:
            continue
        require(value == defaults.get(key), key, value, rule)


def check_options(
    options: Mapping[str, Any], agent_config_class: type, others: Iterable[str]
) -> None:
    """Refuses keywords that are neither a key nor a group of a run; `others` may be meant, too.

    A key of a group, written without it, is told how to be given: `horizon=2` is
    `agent={"horizon": 2}`.
    """
    known = field_types(RunConfig)
    inside = {f"agent.{name}" for name in field_types(agent_config_class)}
    for group, annotation in known.items():
        kinds = union_members(annotation).values() or [annotation]
        groups = [kind for kind in kinds if dataclasses.is_dataclass(kind)]
        inside |= {f"{group}.{name}" for kind in groups for name in field_types(kind)}
    for key, value in options.items():
        if key in known:
            continue
        for path in sorted(inside):
            group, _, name = path.partition(".")
            if name == key:
                meant = f"{group}={{{json.dumps(key)}: {value!r}}}"
                raise ConfigError(f"There is no option {key}. Did you mean {meant}?")
        names = [*known, *others, *sorted(inside)]
        free = [name for name in known if name not in ("agent_name", "task")]  # given by position
        see = "" if nearest(key, names) else f"There are {listed([*others, *free])}."
        raise unknown("option", key, names, see)
