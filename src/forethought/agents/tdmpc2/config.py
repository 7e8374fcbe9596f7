"""Options of TD-MPC2. The defaults are the official ones; none of this imports torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from forethought.agents.tdmpc2.gammas import MultiGammaConfig
from forethought.config import (
    MOST_CHANNELS,
    MOST_PARTS,
    MOST_UNITS,
    refuse_idle,
    require,
    require_size,
    require_sizes,
)


@dataclass(frozen=True)
class SizeOf:
    """One row of the paper's table of model sizes."""

    encoder_units: int
    mlp_units: int
    latent_dim: int
    encoder_layers: int
    num_q: int


SIZES = {
    1: SizeOf(encoder_units=256, mlp_units=384, latent_dim=128, encoder_layers=2, num_q=2),
    5: SizeOf(encoder_units=256, mlp_units=512, latent_dim=512, encoder_layers=2, num_q=5),
    19: SizeOf(encoder_units=1024, mlp_units=1024, latent_dim=768, encoder_layers=3, num_q=5),
    48: SizeOf(encoder_units=1792, mlp_units=1792, latent_dim=768, encoder_layers=4, num_q=5),
    317: SizeOf(encoder_units=4096, mlp_units=4096, latent_dim=1376, encoder_layers=5, num_q=8),
}

LATENT_OF = {(19, 30): 512}
"""Latents by size and number of tasks, where official ones are not those of the table (mt30)."""


@dataclass(frozen=True)
class ModelConfig:
    """The world model's networks (TD-MPC2, section 3.1)."""

    size: Literal[1, 5, 19, 48, 317] = 5
    """Row of the paper's table, in million parameters; sets what is left at None below."""
    encoder_units: int | None = None
    """Units of each hidden layer of the encoder."""
    encoder_layers: int | None = None
    """Layers of the encoder, its last one included."""
    mlp_units: int | None = None
    """Units of each hidden layer of dynamics, reward, termination, policy and Q."""
    latent_dim: int | None = None
    """Length of the latent state z; a multiple of simnorm_dim. At size 19 None is 512 where there
    are 30 tasks."""
    num_q: int | None = None
    """Q functions in the ensemble."""
    task_dim: int | None = None
    """Length of each task's embedding, where there are several tasks; None is 64, or 96 from 80
    tasks on and at the sizes 1 and 317."""
    dropout: float = 0.01
    """Probability of dropping a unit in the first layer of each Q function, in training."""
    symlog_obs: bool = False
    """Squash observations by symlog before the encoder, as the official checkpoints of 2023 do."""
    simnorm_dim: int = 8
    """Neighbours that share one softmax in SimNorm."""
    bins: int = 101
    """Bins of the two-hot reward and value distributions."""
    bin_low: float = -10.0
    """Lowest bin, in symlog units."""
    bin_high: float = 10.0
    """Highest bin, in symlog units."""

    def __post_init__(self) -> None:
        where = "agent.model."
        require(self.size in SIZES, where + "size", self.size, f"one of {sorted(SIZES)}")
        sizes = dict.fromkeys(
            ("encoder_units", "mlp_units", "latent_dim", "task_dim"), (1, MOST_UNITS)
        )
        sizes |= dict.fromkeys(("encoder_layers", "num_q"), (2, MOST_PARTS))  # targets use two Q
        sizes |= dict.fromkeys(("simnorm_dim", "bins"), (2, MOST_UNITS))
        for name, bounds in sizes.items():
            if getattr(self, name) is not None:
                require_size(where + name, getattr(self, name), *bounds)
        require(0 <= self.dropout < 1, where + "dropout", self.dropout, "at least 0 and below 1")
        require(
            self.resolved.latent_dim % self.simnorm_dim == 0,
            where + "latent_dim",
            self.resolved.latent_dim,
            f"a multiple of agent.model.simnorm_dim ({self.simnorm_dim})",
        )
        require(
            self.bin_low < self.bin_high,
            where + "bin_low",
            self.bin_low,
            f"below agent.model.bin_high ({self.bin_high})",
        )

    def for_tasks(self, tasks: int) -> ModelConfig:
        """What this means for so many tasks: the official model of 30 has a row of its own."""
        latent = LATENT_OF.get((self.size, tasks))
        if latent is None or self.latent_dim is not None:
            return self
        return replace(self, latent_dim=latent)

    def told_of_tasks(self, tasks: int) -> tuple[str, ...]:
        """A sentence where the number of tasks decides a size."""
        latent = LATENT_OF.get((self.size, tasks))
        if latent != self.latent_dim or latent is None:
            return ()
        return (
            f"The latent state has {latent} numbers, as in the official model of {tasks} tasks at "
            f"size {self.size} (agent.model.latent_dim).",
        )

    @property
    def resolved(self) -> SizeOf:
        """The table's row with what was set by hand."""
        row = SIZES[self.size]
        return SizeOf(
            encoder_units=self.encoder_units or row.encoder_units,
            mlp_units=self.mlp_units or row.mlp_units,
            latent_dim=self.latent_dim or row.latent_dim,
            encoder_layers=self.encoder_layers or row.encoder_layers,
            num_q=self.num_q or row.num_q,
        )


@dataclass(frozen=True)
class ImageConfig:
    """Observations that are images."""

    frames: int | None = None
    """Last frames seen together, each stored once; None is 3 for a camera's pictures (bytes with 1
    or 3 channels), else 1."""
    shift_pixels: int | None = None
    """Pixels by which images are moved at random in training; None is 3 where both sides have 48
    or more, else 0."""
    channels: int = 32
    """Channels of each convolution."""
    kernels: tuple[int, ...] = ()
    """Kernel of each convolution; none given: 7 5 3 3, and 3 for images below 48 pixels."""
    strides: tuple[int, ...] = ()
    """Stride of each convolution; none given: 2 2 2 1, and fewer for images below 48 pixels."""

    def __post_init__(self) -> None:
        where = "agent.image."
        require(
            self.frames is None or self.frames >= 1, where + "frames", self.frames, "at least 1"
        )
        pixels = self.shift_pixels
        require(pixels is None or pixels >= 0, where + "shift_pixels", pixels, "at least 0")
        require_size(where + "channels", self.channels, 1, MOST_CHANNELS)
        for name in ("kernels", "strides"):
            require_sizes(where + name, getattr(self, name), MOST_CHANNELS)
        rule = f"as many as agent.image.kernels ({len(self.kernels)})"
        same = len(self.kernels) == len(self.strides)
        require(same, where + "strides", list(self.strides), rule)


@dataclass(frozen=True)
class PlannerConfig:
    """MPPI in latent space (TD-MPC2, section 3.2)."""

    samples: int = 512
    """Action sequences scored per iteration, policy sequences included."""
    elites: int = 64
    """Sequences kept to refit the distribution."""
    policy_samples: int = 24
    """Of the samples, those that the policy proposes."""
    iterations: int | None = None
    """Refits per plan; None means 6, and 8 from 20 action dimensions on."""
    min_std: float = 0.05
    """Continuous actions: smallest standard deviation of the action distribution."""
    max_std: float = 2.0
    """Continuous actions: largest and first standard deviation of the action distribution."""
    min_probability: float = 0.05
    """Discrete actions: share of each step's distribution that is spread over all legal ones."""
    temperature: float = 0.5
    """Multiplies the gap to the best value before the softmax over elites."""

    def __post_init__(self) -> None:
        where = "agent.planner."
        require_size(where + "samples", self.samples, 1, MOST_UNITS)
        require(
            1 <= self.elites <= self.samples,
            where + "elites",
            self.elites,
            f"between 1 and agent.planner.samples ({self.samples})",
        )
        require(
            0 <= self.policy_samples < self.samples,
            where + "policy_samples",
            self.policy_samples,
            f"at least 0 and below agent.planner.samples ({self.samples})",
        )
        rounds = self.iterations
        require(rounds is None or rounds >= 1, where + "iterations", rounds, "at least 1")
        require(
            0 < self.min_std <= self.max_std,
            where + "min_std",
            self.min_std,
            f"above 0 and at most agent.planner.max_std ({self.max_std})",
        )
        require(
            0 <= self.min_probability < 1,
            where + "min_probability",
            self.min_probability,
            "at least 0 and below 1",
        )
        require(self.temperature > 0, where + "temperature", self.temperature, "above 0")

    def iterations_for(self, action_dim: int) -> int:
        return self.iterations or (8 if action_dim >= 20 else 6)


@dataclass(frozen=True)
class OneStep:
    """y = r + gamma V(x'), the paper's target."""

    kind: ClassVar[str] = "one_step"


@dataclass(frozen=True)
class NStep:
    """Up to n rewards before the bootstrap, within the sampled slice."""

    kind: ClassVar[str] = "n_step"
    n: int = 3
    """Rewards summed before the bootstrap; at most agent.horizon."""

    def __post_init__(self) -> None:
        require(self.n >= 1, "agent.returns.n", self.n, "at least 1")


@dataclass(frozen=True)
class TDLambda:
    """An exponential mixture of n-step targets, within the sampled slice."""

    kind: ClassVar[str] = "td_lambda"
    lam: float = 0.95
    """Weight of longer returns: 0 is one-step, 1 sums the whole slice."""

    def __post_init__(self) -> None:
        require(0 <= self.lam <= 1, "agent.returns.lam", self.lam, "between 0 and 1")


@dataclass(frozen=True)
class ConstantRate:
    """The learning rates stay as they are."""

    kind: ClassVar[str] = "constant"


@dataclass(frozen=True)
class LinearRate:
    """The learning rates fall (or rise) in a straight line, after a warm-up."""

    kind: ClassVar[str] = "linear"
    duration_updates: int = 500_000
    """Updates until the end factor is reached, warm-up not counted."""
    end_factor: float = 0.1
    """What the rates are multiplied by at the end and after."""
    warmup_updates: int = 0
    """Updates n over which the rates rise; the first has 1/n of the rate."""

    def __post_init__(self) -> None:
        _check_rate(self.duration_updates, self.end_factor, self.warmup_updates)


@dataclass(frozen=True)
class CosineRate:
    """The learning rates fall along half a cosine, after a warm-up."""

    kind: ClassVar[str] = "cosine"
    duration_updates: int = 500_000
    """Updates until the end factor is reached, warm-up not counted."""
    end_factor: float = 0.1
    """What the rates are multiplied by at the end and after."""
    warmup_updates: int = 0
    """Updates n over which the rates rise; the first has 1/n of the rate."""

    def __post_init__(self) -> None:
        _check_rate(self.duration_updates, self.end_factor, self.warmup_updates)


def _check_rate(duration: int, end: float, warmup: int) -> None:
    require(duration >= 1, "agent.schedule.duration_updates", duration, "at least 1")
    require(end >= 0, "agent.schedule.end_factor", end, "at least 0")
    require(warmup >= 0, "agent.schedule.warmup_updates", warmup, "at least 0")


@dataclass(frozen=True)
class LearningRates:
    """Adam's learning rate for each part."""

    encoder: float = 9e-5
    """The encoder's: 0.3 of the others'."""
    dynamics: float = 3e-4
    """The dynamics'."""
    reward: float = 3e-4
    """The reward head's."""
    termination: float = 3e-4
    """The termination head's; only used in episodic tasks."""
    q: float = 3e-4
    """The Q ensemble's."""
    policy: float = 3e-4
    """The policy's, which has an optimiser of its own."""

    def __post_init__(self) -> None:
        for part, rate in vars(self).items():
            require(rate > 0, f"agent.lr.{part}", rate, "above 0")


@dataclass(frozen=True)
class TDMPC2Config:
    """TD-MPC2: a latent world model, learned from replay and planned in by MPPI."""

    idle: ClassVar[dict[tuple[str, Any], tuple[str, ...]]] = {
        ("mpc", False): ("planner",),
        ("episodic", False): ("lr.termination", "termination_coef", "past_ends"),
        ("multi_gamma.enabled", False): tuple(
            f"multi_gamma.{name}" for name in vars(MultiGammaConfig()) if name != "enabled"
        ),
    }
    """Keys without effect while a switch has a value."""
    model: ModelConfig = field(default_factory=ModelConfig)
    image: ImageConfig = field(default_factory=ImageConfig)
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    lr: LearningRates = field(default_factory=LearningRates)
    schedule: ConstantRate | LinearRate | CosineRate = field(default_factory=ConstantRate)
    """How the learning rates change over updates."""
    returns: OneStep | NStep | TDLambda = field(default_factory=OneStep)
    """How value targets are built from a slice."""
    multi_gamma: MultiGammaConfig = field(default_factory=MultiGammaConfig)
    q_target: Literal["max", "policy", "expected"] | None = None
    """What a state is worth in value targets: the greatest Q of the legal actions, Q of an action
    of the policy, or the policy's expectation of Q; None: max if discrete, policy if continuous."""
    q_target_top_k: int | None = None
    """Discrete actions: max looks at so many, the policy's likeliest; None: all, or 64 if there are
    more than 512."""
    mpc: bool = True
    """Plan each action; off: the policy acts alone."""
    horizon: int = 3
    """Decisions imagined by the planner, and steps of a training slice."""
    batch_size: int = 256
    """Slices per update."""
    gamma: float | None = None
    """Discount per decision; None derives it from the episode length."""
    gamma_denominator: float = 5.0
    """Heuristic: gamma = 1 - denominator / episode length, within the next two."""
    gamma_min: float = 0.95
    """Smallest discount of the heuristic."""
    gamma_max: float = 0.995
    """Largest discount of the heuristic."""
    episodic: bool | None = None
    """Learn when episodes terminate and plan with it; None: if the task can terminate."""
    past_ends: bool | None = False
    """Slices may begin in the last steps of an episode that terminates; steps past its end are left
    out of every loss. Else only whole slices are learned from, and these steps are seen only as
    later steps of one. Needs --replay transitions. None: wherever it means something."""
    rho: float = 0.5
    """Weight of each later step of a slice relative to the one before."""
    consistency_coef: float = 20.0
    """Weight of the latent prediction loss."""
    reward_coef: float = 0.1
    """Weight of the reward loss."""
    value_coef: float = 0.1
    """Weight of the value loss."""
    termination_coef: float = 1.0
    """Weight of the termination loss; only used in episodic tasks."""
    entropy_coef: float = 1e-4
    """Weight of the policy's entropy."""
    entropy: Literal["gaussian", "jacobian"] = "gaussian"
    """Entropy, continuous actions: gaussian (official since 2024-12) or with tanh's Jacobian."""
    log_std_min: float = -10.0
    """Smallest log standard deviation of a continuous policy."""
    log_std_max: float = 2.0
    """Largest log standard deviation of a continuous policy."""
    grad_clip_norm: float = 20.0
    """Largest gradient norm of the model, and of the policy."""
    tau: float = 0.01
    """Step of the target Q functions, and of the running scale of Q."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Number format of the networks; bf16 on CUDA only."""
    compile: Literal["auto", "off", "kernels", "full"] = "off"
    """kernels: activations fused by the machine's C compiler (CPU); full: torch.compile besides;
    auto: kernels on a CPU, full on CUDA. Same results up to rounding."""

    def check_replay(self, kind: str, offline: bool = False) -> None:
        """Refuse options that this kind of replay, or recorded data, cannot serve."""
        if self.past_ends is not True:
            return
        rule = "false: recorded data is drawn in whole slices"
        require(not offline, "agent.past_ends", True, rule)
        rule = "false, or slices drawn per transition: --replay transitions"
        require(kind == "transitions", "agent.past_ends", True, rule)

    def __post_init__(self) -> None:
        def check(name: str, condition: bool, rule: str) -> None:
            require(condition, f"agent.{name}", getattr(self, name), rule)

        check("horizon", self.horizon >= 1, "at least 1")
        check("batch_size", self.batch_size >= 1, "at least 1")
        check("gamma", self.gamma is None or 0 < self.gamma <= 1, "above 0 and at most 1")
        check("gamma_denominator", self.gamma_denominator > 0, "above 0")
        for name in ("gamma_denominator", "gamma_min", "gamma_max"):
            default = type(self).__dataclass_fields__[name].default
            unused = self.gamma is not None and getattr(self, name) != default
            check(name, not unused, "left out: it has no effect when agent.gamma is set")
        check(
            "gamma_min",
            0 < self.gamma_min <= self.gamma_max,
            f"above 0 and at most agent.gamma_max ({self.gamma_max})",
        )
        check("gamma_max", self.gamma_max <= 1, "at most 1")
        check("rho", 0 < self.rho <= 1, "above 0 and at most 1")
        for name in ("consistency", "reward", "value", "termination", "entropy"):
            check(f"{name}_coef", getattr(self, f"{name}_coef") >= 0, "at least 0")
        check("grad_clip_norm", self.grad_clip_norm > 0, "above 0")
        check("tau", 0 < self.tau <= 1, "above 0 and at most 1")
        check(
            "log_std_min",
            self.log_std_min < self.log_std_max,
            f"below agent.log_std_max ({self.log_std_max})",
        )
        k = self.q_target_top_k
        check("q_target_top_k", k is None or k >= 1, "at least 1")
        chosen = k is None or self.q_target in (None, "max")
        check("q_target_top_k", chosen, f"left out: agent.q_target is {self.q_target}")
        refuse_idle(self, "agent")
        ends = self.past_ends is not True or self.horizon > 1
        check("past_ends", ends, "false: with a horizon of 1 every slice is whole")
        if self.gamma is not None:
            self.multi_gamma.check_primary(self.gamma, "which is agent.gamma")
        if isinstance(self.returns, NStep):
            require(
                self.returns.n <= self.horizon,
                "agent.returns.n",
                self.returns.n,
                f"at most agent.horizon ({self.horizon})",
            )
