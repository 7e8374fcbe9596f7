"""The groups of a run's options: environments, replay, training, evaluation, tracking, offline."""

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from forethought.config.errors import ConfigError, require
from forethought.config.reading import union_members

LONGEST_TIMEOUT_SECONDS = 1_000_000
"""Eleven days; operating systems wait for 24 at most."""
MOST_NOOPS = 10_000
"""Frames without an action before a game, which itself ends after 108,000."""
MOST_THREADS = 1024
"""More than any machine has use for; torch itself takes what fits into 31 bits."""


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
        rule = f"from 0 to {MOST_NOOPS:,}"
        require(0 <= self.noop_max <= MOST_NOOPS, where + "noop_max", self.noop_max, rule)


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
        ok = self.threads is None or 1 <= self.threads <= MOST_THREADS
        require(ok, "train.threads", self.threads, f"at least 1, at most {MOST_THREADS}")


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
