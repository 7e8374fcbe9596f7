"""The configuration of a run: frozen dataclasses, layers, validation, differences. No torch here.

A dataclass field carries its help text as a docstring and its rules in `__post_init__`, so a
configuration that exists is a valid one. YAML files, presets and flags all become nested dicts
that are layered and then read by `from_dict`: one check of names, types and ranges for all three.
"""

import dataclasses
import difflib
import json
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, ClassVar, Literal, TypeVar, Union

T = TypeVar("T")
LONGEST_TIMEOUT_SECONDS = 1_000_000
"""Eleven days; operating systems wait for 24 at most."""


class ForethoughtError(Exception):
    """Something a person can cause and mend; its text is the sentence that person sees."""


class ConfigError(ForethoughtError):
    """Bad input, found before work began."""


def require(condition: bool, key: str, value: object, rule: str) -> None:
    """State a rule of a configuration field; a broken one is a ConfigError."""
    if not condition:
        raise ConfigError(f"{key} is {value}, but must be {rule}.")


def nearest(word: str, candidates: Iterable[str]) -> str:
    """' Did you mean X?' for the candidate most like `word`, or '' when none is like it.

    Dotted names are compared by their last part, in the same group first: a common `replay.` must
    not make `replay.alpha` look like `replay.capacity_rows`, and `horizon` finds `agent.horizon`.
    """
    names = list(candidates)
    head, _, tail = word.rpartition(".")
    for group, likeness in (
        ([n for n in names if n.rpartition(".")[0] == head], 0.6),
        (names, 0.8),
    ):
        tails = {name.rpartition(".")[2]: name for name in reversed(group)}
        close = difflib.get_close_matches(tail, tails, n=1, cutoff=likeness)
        if close:
            return f" Did you mean {tails[close[0]]}?"
    return ""


def unknown(kind: str, word: str, candidates: Iterable[str], see: str = "") -> ConfigError:
    """The error for a name that does not exist; `see` is a last sentence that tells where to look.

    >>> raise unknown("task", "dmc:walker_walk", tasks, "'forethought list tasks' shows all.")
    """
    text = f"There is no {kind} {word}.{nearest(word, candidates)}"
    return ConfigError(f"{text} {see}".rstrip())


def check_device(key: str, value: str, *, auto: bool) -> None:
    """Only the spelling: whether the device exists is known once torch is imported."""
    names = "auto, cpu, cuda, cuda:N or mps" if auto else "cpu, cuda, cuda:N or mps"
    ok = re.fullmatch(r"cpu|cuda(:\d+)?|mps", value) or (auto and value == "auto")
    require(bool(ok), key, value, f"one of {names}")


ATARI = "atari:"
"""How the names of Atari tasks begin."""


@dataclass(frozen=True)
class AtariConfig:
    """How the games of atari: tasks are played; other tasks take none of this."""

    sticky_actions: float | None = None
    """Probability that a frame repeats the action of the frame before; None is that of the name:
    0.25, or 0 for NoFrameskip-v4."""
    full_action_set: bool = False
    """All 18 actions instead of those that do something in the game."""
    life_loss: bool = False
    """In training a lost life ends the future for learning; the game goes on, and its score is that
    of the whole game. Evaluations never do this."""
    fire_on_reset: bool = False
    """Press FIRE for one decision when a game begins."""
    noop_max: int = 30
    """A game begins with 1 to so many frames without an action; 0: with none."""
    clip_rewards: bool = True
    """Learn from the sign of each reward; reports always have the raw score."""

    def __post_init__(self) -> None:
        sticky, where = self.sticky_actions, "env.atari."
        rule = "at least 0 and below 1"
        require(sticky is None or 0 <= sticky < 1, where + "sticky_actions", sticky, rule)
        require(self.noop_max >= 0, where + "noop_max", self.noop_max, "at least 0")


@dataclass(frozen=True)
class EnvConfig:
    """The environments that the agent trains and is evaluated in."""

    num_envs: int = 1
    """Environments stepped together; of several tasks (multi:), so many of each."""
    workers: bool = False
    """Each environment in its own process."""
    action_repeat: int | None = None
    """Environment frames per decision; None is the task's own (dmc 2, atari 4, others 1)."""
    obs: Literal["pixels", "plain_pixels"] | None = None
    """What the agent sees; None is the task's own. pixels: dmc is drawn, 64 x 64 RGB, others must
    show images themselves. plain_pixels: dmc drawn without shadows and reflections, in an eighth of
    the time where no graphics card draws."""
    max_episode_steps: int | None = None
    """Decisions (agent steps) after which a training episode is truncated; None is the task's
    own."""
    eval_max_episode_steps: int | None = None
    """The same for evaluation episodes; None is as in training."""
    timeout_seconds: float = 60.0
    """Seconds that one reset or step of one environment may take before it counts as failed."""
    on_env_error: Literal["halt", "restart"] = "halt"
    """When a training environment raises, hangs, dies or gives bad values: halt the run, or build
    that environment anew and go on with its next episode."""
    max_restarts: int | None = None
    """Restarts of one environment in a row, without a finished episode, before the run halts; None
    is 5 with on_env_error restart."""
    atari: AtariConfig = field(default_factory=AtariConfig)
    """How the games of atari: tasks are played."""

    def __post_init__(self) -> None:
        require(self.num_envs >= 1, "env.num_envs", self.num_envs, "at least 1")
        seconds, restarts = self.timeout_seconds, self.max_restarts
        rule = f"above 0 and at most {LONGEST_TIMEOUT_SECONDS}"
        require(0 < seconds <= LONGEST_TIMEOUT_SECONDS, "env.timeout_seconds", seconds, rule)
        require(restarts is None or restarts >= 1, "env.max_restarts", restarts, "at least 1")
        if restarts is not None and self.on_env_error == "halt":
            raise ConfigError(
                f"env.max_restarts is {restarts}, but has no effect while env.on_env_error is "
                "halt; set env.on_env_error restart or leave the number out."
            )
        for name in ("action_repeat", "max_episode_steps", "eval_max_episode_steps"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"env.{name}", value, "at least 1")

    @property
    def training(self) -> dict[str, Any]:
        """What a training environment is made with (see envs/tasks.py)."""
        return {
            "action_repeat": self.action_repeat,
            "max_episode_steps": self.max_episode_steps,
            "obs": self.obs,
            "atari": self.atari,
        }

    @property
    def evaluation(self) -> dict[str, Any]:
        """The same for an evaluation environment, in which a lost life ends nothing."""
        return {
            **self.training,
            "max_episode_steps": self.eval_max_episode_steps or self.max_episode_steps,
            "atari": dataclasses.replace(self.atari, life_loss=False),
        }

    @property
    def allowed_restarts(self) -> int:
        """Restarts in a row of one environment; 0 halts at the first failure."""
        if self.on_env_error == "halt":
            return 0
        return 5 if self.max_restarts is None else self.max_restarts


@dataclass(frozen=True)
class _ReplayConfig:
    capacity_rows: int = 1_000_000
    """Rows kept over all environments (one row per decision and one per episode start)."""
    storage_device: str = "cpu"
    """Where the rows are kept: cpu, cuda, cuda:N or mps; batches go to the run's device."""
    block_rows: int = 4096
    """Rows per block written to disk; smaller blocks leave less for a checkpoint to write."""

    def __post_init__(self) -> None:
        require(self.capacity_rows >= 1, "replay.capacity_rows", self.capacity_rows, "at least 1")
        require(self.block_rows >= 1, "replay.block_rows", self.block_rows, "at least 1")
        check_device("replay.storage_device", self.storage_device, auto=False)


@dataclass(frozen=True)
class EpisodeReplayConfig(_ReplayConfig):
    """Slices drawn uniformly per finished episode, then per start (the official TD-MPC2 rule)."""

    kind: ClassVar[str] = "episodes"


@dataclass(frozen=True)
class TransitionReplayConfig(_ReplayConfig):
    """Slices drawn uniformly over all valid starts, those of the open episode included."""

    kind: ClassVar[str] = "transitions"


@dataclass(frozen=True)
class _NStepReplayConfig(_ReplayConfig):
    mapped_folder: str | None = None
    """Keep the rows in a nameless file in this folder, mapped into memory, and not in main memory;
    the disk needs room for all of them at once. None is main memory, taken as the rows arrive."""
    diagnostics_every_agent_steps: int = 10_000
    """Agent steps between looks at what is drawn from the replay (replay_... in train.csv); 0
    never looks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        every = self.diagnostics_every_agent_steps
        require(every >= 0, "replay.diagnostics_every_agent_steps", every, "at least 0")
        ok = self.mapped_folder is None or self.storage_device == "cpu"
        rule = f"left out: the rows are kept on {self.storage_device} (replay.storage_device)"
        require(ok, "replay.mapped_folder", self.mapped_folder, rule)


@dataclass(frozen=True)
class UniformReplayConfig(_NStepReplayConfig):
    """Transitions of n steps, each equally likely; for agents that learn values alone."""

    kind: ClassVar[str] = "uniform"


@dataclass(frozen=True)
class PrioritizedReplayConfig(_NStepReplayConfig):
    """Transitions of n steps, drawn in proportion to (|TD error| + epsilon)^alpha (Schaul et al.
    2016)."""

    kind: ClassVar[str] = "prioritized"
    alpha: float = 0.5
    """How much priorities count: 0 not at all, 1 in full."""
    beta_start: float = 0.4
    """How much of the bias importance weights correct at first; it rises to 1 in a straight
    line."""
    beta_anneal_agent_steps: int | None = None
    """Agent steps after which it is 1; None is the length of the run."""
    beta_anneal_updates: int | None = None
    """The same in updates, instead."""
    priority_epsilon: float = 1e-6
    """Added to every |TD error|, so that nothing is forgotten."""
    uniform_mix: float = 0.0
    """Share of the draws that are uniform."""
    is_norm: Literal["global", "batch", "none"] = "global"
    """Importance weights are divided by the greatest of the whole replay (the paper), by that of
    the batch (many published numbers), or not at all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.alpha <= 1, "replay.alpha", self.alpha, "between 0 and 1")
        require(0 <= self.beta_start <= 1, "replay.beta_start", self.beta_start, "between 0 and 1")
        epsilon, mix = self.priority_epsilon, self.uniform_mix
        require(epsilon > 0, "replay.priority_epsilon", epsilon, "above 0")
        require(0 <= mix < 1, "replay.uniform_mix", mix, "at least 0 and below 1")
        steps, updates = self.beta_anneal_agent_steps, self.beta_anneal_updates
        for name, value in (("agent_steps", steps), ("updates", updates)):
            ok = value is None or value >= 1
            require(ok, f"replay.beta_anneal_{name}", value, "at least 1")
        if steps is not None and updates is not None:
            raise ConfigError(
                f"replay.beta_anneal_agent_steps is {steps} and replay.beta_anneal_updates is "
                f"{updates}, but beta follows one of them; leave the other out."
            )


ReplayConfig = (
    EpisodeReplayConfig | TransitionReplayConfig | UniformReplayConfig | PrioritizedReplayConfig
)
SLICE_KINDS = (EpisodeReplayConfig.kind, TransitionReplayConfig.kind)
"""What an agent takes that does not say `replay_kinds`."""


def replay_kinds(agent_class: type) -> tuple[str, ...]:
    """The kinds of replay that an agent can learn from; the first is its default."""
    return tuple(getattr(agent_class, "replay_kinds", SLICE_KINDS))


def default_replay(agent_class: type) -> ReplayConfig:
    """The replay that an agent has when nobody says which."""
    kind: Any = union_members(ReplayConfig)[replay_kinds(agent_class)[0]]
    made: ReplayConfig = kind()
    return made


@dataclass(frozen=True)
class TrainConfig:
    """How experience, updates and checkpoints follow each other."""

    seed_agent_steps: int | None = None
    """Random decisions before learning, summed over environments; None is max(1000, 5 x L,
    num_envs x L) for episodes of at most L decisions, so that every environment finishes one."""
    seed_updates: int | None = None
    """Updates in one burst when the random phase ends; None is as many as its agent steps."""
    seed_policy: Literal["random", "agent"] = "random"
    """Who plays before learning begins: random actions, or the agent as it is (fine-tuning)."""
    updates_per_agent_step: float = 1.0
    """Updates per decision after the random phase; fractions add up exactly."""
    checkpoint_every_agent_steps: int = 10_000
    """Agent steps between checkpoints; 0 writes only the last one."""
    keep_checkpoints: int = 2
    """Newest checkpoints kept, besides the best one."""
    threads: int | None = None
    """Threads that torch computes with; None is torch's choice."""
    init_from: str | None = None
    """A run whose weights this one begins with; None begins with new ones."""
    init_checkpoint: str | None = None
    """Which checkpoint of that run: latest (None), best, or a step."""
    init_task: str | None = None
    """Where that run has several tasks: the one whose embedding a task begins with that is not
    among them; None is a new embedding."""

    def __post_init__(self) -> None:
        for name in ("init_checkpoint", "init_task"):
            value, rule = getattr(self, name), "left out: it has no effect without train.init_from"
            ok = value is None or self.init_from is not None
            require(ok, f"train.{name}", value, rule)
        for name in ("seed_agent_steps", "seed_updates", "checkpoint_every_agent_steps"):
            value = getattr(self, name)
            require(value is None or value >= 0, f"train.{name}", value, "at least 0")
        ratio = self.updates_per_agent_step
        require(0 < ratio <= 1000, "train.updates_per_agent_step", ratio, "above 0, at most 1000")
        kept = self.keep_checkpoints
        require(kept >= 1, "train.keep_checkpoints", kept, "at least 1")
        ok = self.threads is None or self.threads >= 1
        require(ok, "train.threads", self.threads, "at least 1")


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation during training: own environments, own random streams, no exploration."""

    every_agent_steps: int = 25_000
    """Agent steps between evaluations; 0 evaluates only at the end."""
    episodes: int = 10
    """Episodes per evaluation; of several tasks (multi:), so many of each."""
    epsilon: float = 0.0
    """Probability with which a decision is replaced by a random action."""
    protocol: Literal["nature", "dopamine"] | None = None
    """A published way to evaluate in atari: tasks, which decides the number of episodes or steps,
    their limit, epsilon, sticky actions and no-ops (docs/atari.md); None is as these keys say."""
    video_every_evaluations: int = 0
    """Film the first episode of the first evaluation and of every n-th after it, into videos/;
    0 films none. It is played again for that, so nothing else changes."""

    def __post_init__(self) -> None:
        every = self.every_agent_steps
        require(every >= 0, "eval.every_agent_steps", every, "at least 0")
        require(self.episodes >= 1, "eval.episodes", self.episodes, "at least 1")
        epsilon = self.epsilon
        require(0 <= epsilon <= 1, "eval.epsilon", epsilon, "between 0 and 1")
        if self.protocol is not None:
            for key in ("episodes", "epsilon"):
                value, default = getattr(self, key), EvalConfig.__dataclass_fields__[key].default
                rule = f"left out: eval.protocol {self.protocol} decides it"
                require(value == default, f"eval.{key}", value, rule)
        every = self.video_every_evaluations
        require(every >= 0, "eval.video_every_evaluations", every, "at least 0")


@dataclass(frozen=True)
class OfflineConfig:
    """Training from recorded data alone: no steps are taken, only updates and evaluations."""

    data: str | None = None
    """Folders of recorded data ('forethought data'), separated by commas; None trains in the
    task's environments."""
    storage: Literal["mapped", "memory"] = "mapped"
    """Read the rows from the disk as they are needed, or copy them into main memory first."""
    updates: int = 1_000_000
    """Length of an offline run in updates; it takes the place of steps."""
    eval_every_updates: int = 25_000
    """Updates between evaluations of an offline run; 0 evaluates only at the end."""
    checkpoint_every_updates: int = 10_000
    """Updates between checkpoints of an offline run; 0 writes only the last one."""
    log_every_updates: int = 1_000
    """Updates per row of train.csv in an offline run."""

    def __post_init__(self) -> None:
        for name, least in (
            ("updates", 1),
            ("eval_every_updates", 0),
            ("checkpoint_every_updates", 0),
            ("log_every_updates", 1),
        ):
            value = getattr(self, name)
            require(value >= least, f"offline.{name}", value, f"at least {least}")
        ok = self.data is None or all(folder.strip() for folder in self.data.split(","))
        rule = "folders separated by commas, such as data/walk,data/run"
        require(ok, "offline.data", repr(self.data), rule)

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders of the data; none where a run is not offline."""
        return tuple(x.strip() for x in self.data.split(",")) if self.data is not None else ()


IDLE_OFFLINE = {
    "steps": "offline.updates",
    "env.num_envs": None,
    "env.workers": None,
    "env.on_env_error": None,
    "env.max_restarts": None,
    "replay.capacity_rows": None,
    "replay.storage_device": "offline.storage",
    "replay.block_rows": None,
    "train.seed_agent_steps": None,
    "train.seed_updates": None,
    "train.seed_policy": None,
    "train.updates_per_agent_step": None,
    "train.checkpoint_every_agent_steps": "offline.checkpoint_every_updates",
    "eval.every_agent_steps": "offline.eval_every_updates",
    "track.every_agent_steps": "offline.log_every_updates",
}
"""Keys without effect in an offline run, and what takes their place there."""


ONLY_ATARI = ("env.atari", "eval.protocol")
"""Keys that mean something in atari: tasks alone."""
IDLE_WITH_PROTOCOL = ("eval.episodes", "eval.epsilon", "env.eval_max_episode_steps")
"""Keys without effect under a protocol of evaluation."""


@dataclass(frozen=True)
class Rhythm:
    """When a run reports, is evaluated, saves and ends, all in its own unit."""

    unit: Literal["agent_steps", "updates"]
    total: int
    log_every: int
    eval_every: int
    save_every: int


@dataclass(frozen=True)
class TrackConfig:
    """What is written while training; none of it can change the result."""

    every_agent_steps: int = 1_000
    """Agent steps per row of train.csv."""
    console: bool = True
    """A live status in the terminal; without a terminal, a line now and then."""
    tensorboard: bool = False
    """Also write TensorBoard files into the run directory."""
    wandb: bool = False
    """Also send everything to Weights & Biases."""
    wandb_project: str | None = None
    """The project at Weights & Biases; None is 'forethought'."""

    def __post_init__(self) -> None:
        every = self.every_agent_steps
        require(every >= 1, "track.every_agent_steps", every, "at least 1")
        if self.wandb_project is not None and not self.wandb:
            raise ConfigError(
                f"track.wandb_project is {self.wandb_project}, but has no effect while "
                "track.wandb is false; set track.wandb true or leave the project out."
            )


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
        batch = getattr(self.agent, "batch_size", None)
        horizon = getattr(self.agent, "horizon", None)
        if batch is None or horizon is None:
            return
        capacity, key, envs = self.replay.capacity_rows, "replay.capacity_rows", self.env.num_envs
        rule = f"at least agent.batch_size x (agent.horizon + 1) = {batch * (horizon + 1)}"
        require(capacity >= batch * (horizon + 1), key, capacity, rule)
        rule = f"at least env.num_envs x (agent.horizon + 1) = {envs * (horizon + 1)}"
        require(capacity >= envs * (horizon + 1), key, capacity, rule)

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
    if all(_inside(own, "offline.data", None) is None for own in every):
        every = [
            {k: v for k, v in own.items() if k != "offline" or not isinstance(v, Mapping)}
            for own in every
        ]
    if not task.startswith(ATARI):
        every = [layer({}, own) for own in every]
        for own in every:
            for key in ONLY_ATARI:
                _drop(own, key)
    data = merge(agent_config_class, every)
    named = data.pop("agent_name", agent_name)
    require(named == agent_name, "agent_name", named, f"{agent_name}, the agent of this run")
    agent: Any = from_dict(agent_config_class, data.pop("agent", {}), "agent")
    data = {**data, "agent_name": agent_name, "task": task, "agent": agent}
    config = from_dict(RunConfig, data)
    kind, kinds = config.replay.kind, replay_kinds(agent_config_class)
    require(kind in kinds, "replay", kind, f"{_either(kinds)} for {agent_name}")
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
        see = "" if nearest(key, names) else f"There are {_listed([*others, *free])}."
        raise unknown("option", key, names, see)


def to_dict(config: Any) -> dict[str, Any]:
    """Every field, nested, in plain JSON and YAML types; a member of a union carries its `kind`."""
    tag = {"kind": config.kind} if hasattr(config, "kind") else {}
    return tag | {f.name: _plain(getattr(config, f.name)) for f in dataclasses.fields(config)}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def from_dict(cls: type[T], data: Any, where: str = "") -> T:
    """The instance of a configuration dataclass that `data` describes, checked.

    `where` is the dotted name of the group, for the sentences that errors show.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(
            f"{where or 'The configuration'} is {data!r}, but must be a group of keys."
        )
    annotations = field_types(cls)
    values = {}
    for key, value in data.items():
        path = f"{where}.{key}" if where else str(key)
        if key == "kind" and hasattr(cls, "kind"):
            continue
        if key not in annotations and "." in str(key):
            raise ConfigError(
                f"There is no key {path}: in a file groups are nested, as in "
                f"{{{str(key).replace('.', ': {')}: {value}{'}' * (str(key).count('.') + 1)}."
            )
        if key not in annotations:
            known = [f"{where}.{name}".lstrip(".") for name in annotations]
            see = "" if nearest(path, known) else f"There are {_listed(annotations) or 'none'}."
            raise unknown("key", path, known, see)
        if isinstance(value, str) and union_members(annotations[key]):
            value = {"kind": value}  # `schedule: cosine`, as the flag `--agent.schedule cosine`
        if isinstance(value, Mapping) and union_members(annotations[key]):
            value = {"kind": default_kind(cls, key), **value}
        values[key] = _read(annotations[key], value, path)
    for f in dataclasses.fields(cls):  # type: ignore[arg-type]
        missing = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if missing and f.name not in values:
            raise ConfigError(f"{where}.{f.name}".lstrip(".") + " is missing.")
    return cls(**values)


def field_types(cls: type) -> dict[str, Any]:
    """The annotations of a configuration dataclass by field name, in the order of its fields."""
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def union_members(annotation: Any) -> dict[str, type]:
    """The dataclasses of a tagged union `A | B` by their `kind`; empty for any other type."""
    members = typing.get_args(annotation) if _is_union(annotation) else ()
    return {member.kind: member for member in members if hasattr(member, "kind")}


def default_kind(cls: type, name: str) -> str:
    """The kind that a tagged union field has when nobody names one."""
    found = {f.name: f for f in dataclasses.fields(cls)}[name]
    make = found.default_factory
    default = found.default if make is dataclasses.MISSING else make()
    return str(getattr(default, "kind", next(iter(union_members(field_types(cls)[name])))))


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (Union, types.UnionType)


_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def _read(annotation: Any, value: Any, where: str) -> Any:
    """`value`, checked against a field's annotation and brought into its type."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        return value
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        return from_dict(annotation, value, where)
    if _is_union(annotation):
        return _read_union(annotation, value, where)
    if origin is Literal:
        same = [a for a in args if a == value and isinstance(a, bool) == isinstance(value, bool)]
        require(bool(same), where, value, f"one of {_listed(args)}")
        return same[0]
    if origin in (tuple, list):
        return origin(_read_items(annotation, value, where))
    if origin is dict:
        if isinstance(value, Mapping):
            return {key: _read(args[1], item, f"{where}.{key}") for key, item in value.items()}
        raise ConfigError(f"{where} is {value!r}, but must be a group of keys.")
    # A bool is an int to Python, but `workers: 1` or `horizon: true` is a slip of the pen.
    if annotation is float and type(value) is int:
        return float(value)
    if annotation is int and type(value) is float and value.is_integer():
        return int(value)
    require(type(value) is annotation, where, repr(value), _WORDS.get(annotation, str(annotation)))
    require(annotation is not float or math.isfinite(value), where, value, "finite")
    return value


def _read_items(annotation: Any, value: Any, where: str) -> list[Any]:
    """The items of a `list[X]`, `tuple[X, ...]` or `tuple[X, Y]`."""
    args = typing.get_args(annotation)
    require(isinstance(value, list | tuple), where, repr(value), "a list")
    if typing.get_origin(annotation) is list or args[-1] is ...:
        args = (args[0],) * len(value)
    require(len(value) == len(args), where, value, f"a list of {len(args)}")
    return [_read(arg, item, f"{where}[{i}]") for i, (arg, item) in enumerate(zip(args, value))]


def _read_union(annotation: Any, value: Any, where: str) -> Any:
    members = [member for member in typing.get_args(annotation) if member is not type(None)]
    tagged = union_members(annotation)
    if value is None and len(members) < len(typing.get_args(annotation)):
        return None
    if tagged and isinstance(value, Mapping):
        kind = value["kind"]
        if kind not in tagged:
            raise unknown(f"{where} kind", str(kind), tagged, f"Choose from {_listed(tagged)}.")
        for key in value:
            owners = [name for name, cls in tagged.items() if key in field_types(cls)]
            if owners and kind not in owners:
                raise ConfigError(
                    f"{where}.{key} belongs to {where} of kind {_listed(owners)}, but this run "
                    f"has kind {kind}; leave it out or change the kind."
                )
        return from_dict(tagged[kind], value, where)
    for member in members[:-1]:
        try:
            return _read(member, value, where)
        except ConfigError:
            continue  # the last member's sentence is the one shown
    return _read(members[-1], value, where)


def _listed(words: Iterable[object]) -> str:
    return ", ".join(map(str, words))


def _either(words: Iterable[str]) -> str:
    *others, last = words
    return f"{_listed(others)} or {last}" if others else last


def layer(base: Mapping[str, Any], *overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Deep merge, later wins. A new `kind` drops the keys that only the old one has."""
    merged = dict(base)
    for override in overrides:
        for key, value in override.items():
            old = merged.get(key)
            if isinstance(value, Mapping) and isinstance(old, Mapping):
                changed = "kind" in value and value["kind"] != old.get("kind", value["kind"])
                merged[key] = layer(_kept(key, old, value["kind"]) if changed else old, value)
            else:
                merged[key] = layer({}, value) if isinstance(value, Mapping) else value
    return merged


def _kept(group: str, old: Mapping[str, Any], kind: Any) -> dict[str, Any]:
    """What an earlier layer says of the replay that another kind of replay has too, such as its
    capacity. Kinds of other groups have nothing in common."""
    new = union_members(ReplayConfig).get(kind) if group == "replay" else None
    return {key: value for key, value in old.items() if new and key in field_types(new)}


def merge(agent_class: type, layers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """All layers of a run as one. What a later layer leaves without effect is dropped from the
    earlier ones (a preset's planner, when a flag turns planning off); set in that layer or after
    it, it stays and is refused.

    An agent's configuration says in `idle` which of its keys that are: by switch (dotted, where it
    stands in a group) and its value. Recorded data leaves `IDLE_OFFLINE` without effect. Its
    `replay_kinds` say which replay is its default, its `run_defaults` what else begins otherwise.
    """
    idle: Mapping[tuple[str, Any], Iterable[str]] = getattr(agent_class, "idle", {})
    own = hasattr(agent_class, "replay_kinds")
    merged: dict[str, Any] = {"replay": {"kind": replay_kinds(agent_class)[0]}} if own else {}
    merged = layer(merged, getattr(agent_class, "run_defaults", {}))
    for override in layers:
        if _inside(override, "offline.data", None) is not None:
            for key in IDLE_OFFLINE:
                _drop(merged, key)
        if _inside(override, "eval.protocol", None) is not None:
            for key in IDLE_WITH_PROTOCOL:
                _drop(merged, key)
        agent = override.get("agent")
        for (switch, value), keys in idle.items():
            if _inside(agent, switch, not value) == value:
                for key in keys:
                    _drop(merged.get("agent"), key)
        merged = layer(merged, override)
    return merged


def refuse_idle(config: Any, where: str) -> None:
    """A key that has no effect while its switch stands as it does must have its default value."""
    off = {key: switch for switch, keys in config.idle.items() for key in keys}
    off = {k: (name, v) for k, (name, v) in off.items() if attrgetter(name)(config) is v}
    if not off:
        return
    own, default = flatten(to_dict(config)), flatten(_defaults(type(config)))
    for key, (name, value) in off.items():
        for path in [p for p in own if p == key or p.startswith(f"{key}.")]:
            rule = f"left out: it has no effect while {where}.{name} is {str(value).lower()}"
            require(own[path] == default[path], f"{where}.{path}", own[path], rule)


def _defaults(cls: type) -> dict[str, Any]:
    """What `to_dict` gives for an instance without arguments; none is made, so no rule runs."""
    absent = dataclasses.MISSING
    return {
        f.name: _plain(f.default if f.default_factory is absent else f.default_factory())
        for f in dataclasses.fields(cls)
    }


def _inside(data: Any, key: str, missing: Any) -> Any:
    """The value of a dotted key, or `missing`."""
    for part in key.split("."):
        if not isinstance(data, Mapping) or part not in data:
            return missing
        data = data[part]
    return data


def _drop(data: Any, key: str) -> None:
    """Removes a dotted key, if it is there."""
    *groups, last = key.split(".")
    for group in groups:
        data = data.get(group) if isinstance(data, dict) else None
    if isinstance(data, dict):
        data.pop(last, None)


def flatten(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested groups as one level with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def diff(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, str, Any, Any]]:
    """Rows (key, added | removed | changed, value in a, value in b) of all keys that differ."""
    old, new = flatten(a), flatten(b)
    rows: list[tuple[str, str, Any, Any]] = []
    for key in [*old, *(key for key in new if key not in old)]:
        if key not in new:
            rows.append((key, "removed", old[key], None))
        elif key not in old:
            rows.append((key, "added", None, new[key]))
        elif old[key] != new[key]:
            rows.append((key, "changed", old[key], new[key]))
    return rows
