"""Options of the DQN family; none of this imports torch.

What comes in kinds is a tagged union: an option exists only where it has an effect. The defaults
are those of Nature DQN with Adam; presets hold what the papers had.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from forethought.config import (
    MOST_CHANNELS,
    MOST_UNITS,
    ConfigError,
    require,
    require_size,
    require_sizes,
)


@dataclass(frozen=True)
class AutoNetwork:
    """mlp for vectors, minatar for small images, nature for others."""

    kind: ClassVar[str] = "auto"


@dataclass(frozen=True)
class Nature:
    """Convolutions without padding and a hidden layer (Mnih et al., 2015)."""

    kind: ClassVar[str] = "nature"
    channels: tuple[int, ...] = (32, 64, 64)
    """Channels of each convolution."""
    kernels: tuple[int, ...] = (8, 4, 3)
    """Kernel of each convolution."""
    strides: tuple[int, ...] = (4, 2, 1)
    """Stride of each convolution."""
    hidden_units: int = 512
    """Units of the hidden layer; with agent.dueling, of that of each stream."""

    def __post_init__(self) -> None:
        for name in ("channels", "kernels", "strides"):
            values, where = getattr(self, name), f"agent.network.{name}"
            require(bool(values), where, list(values), "at least one number")
            require_sizes(where, values, MOST_CHANNELS)
            rule = f"as many as agent.network.channels ({len(self.channels)})"
            require(len(values) == len(self.channels), where, list(values), rule)
        _check_units(self.hidden_units)


@dataclass(frozen=True)
class Impala:
    """Residual blocks (Espeholt et al., 2018), wider, normalised and pooled as BTR has them."""

    kind: ClassVar[str] = "impala"
    width: int = 2
    """Multiplies the channels 16, 32, 32 of the three blocks."""
    spectral_norm: bool = True
    """Divide the convolutions of residual blocks by their largest singular value."""
    pool_cells: int | None = 6
    """Side of the grid that adaptive max pooling leaves; None: no such pooling."""
    hidden_units: int = 512
    """Units of the hidden layer; with agent.dueling, of that of each stream."""

    def __post_init__(self) -> None:
        require_size("agent.network.width", self.width, 1, MOST_CHANNELS // 32)
        if self.pool_cells is not None:
            require_size("agent.network.pool_cells", self.pool_cells, 1, MOST_CHANNELS)
        _check_units(self.hidden_units)


@dataclass(frozen=True)
class MinAtar:
    """One convolution and a hidden layer (Young and Tian, 2019)."""

    kind: ClassVar[str] = "minatar"
    channels: int = 16
    """Channels of the convolution, whose kernel is 3."""
    hidden_units: int = 128
    """Units of the hidden layer; with agent.dueling, of that of each stream."""

    def __post_init__(self) -> None:
        require_size("agent.network.channels", self.channels, 1, MOST_CHANNELS)
        _check_units(self.hidden_units)


@dataclass(frozen=True)
class Mlp:
    """Hidden layers with ReLU, for vectors."""

    kind: ClassVar[str] = "mlp"
    layers: tuple[int, ...] = (256,)
    """Units of the layers before the last hidden one; none: that one alone."""
    hidden_units: int = 256
    """Units of the last hidden layer; with agent.dueling, of that of each stream."""

    def __post_init__(self) -> None:
        require_sizes("agent.network.layers", self.layers, MOST_UNITS)
        _check_units(self.hidden_units)


def _check_units(units: int) -> None:
    require_size("agent.network.hidden_units", units, 1, MOST_UNITS)


@dataclass(frozen=True)
class NoDistribution:
    """The expected return alone, with the Huber loss (the paper's clipped error)."""

    kind: ClassVar[str] = "none"


@dataclass(frozen=True)
class C51:
    """Probabilities of fixed returns (Bellemare, Dabney and Munos, 2017)."""

    kind: ClassVar[str] = "c51"
    atoms: int = 51
    """Returns that have a probability."""
    v_min: float = -10.0
    """The lowest of them."""
    v_max: float = 10.0
    """The highest of them."""

    def __post_init__(self) -> None:
        require_size("agent.distribution.atoms", self.atoms, 2, MOST_UNITS)
        rule = f"below agent.distribution.v_max ({self.v_max})"
        require(self.v_min < self.v_max, "agent.distribution.v_min", self.v_min, rule)


@dataclass(frozen=True)
class QR:
    """Fixed quantiles of the return (Dabney et al., 2018)."""

    kind: ClassVar[str] = "qr"
    quantiles: int = 200
    """Quantiles, at the midpoints (2i + 1) / 2N."""
    kappa: float = 1.0
    """Where the Huber loss turns linear."""

    def __post_init__(self) -> None:
        _check_counts(self, "quantiles")
        require(self.kappa > 0, "agent.distribution.kappa", self.kappa, "above 0")


@dataclass(frozen=True)
class IQN:
    """Quantiles at random fractions (Dabney et al., 2018)."""

    kind: ClassVar[str] = "iqn"
    taus: int = 64
    """Fractions of the online network per transition: N."""
    target_taus: int = 64
    """Fractions of the target: N'."""
    policy_taus: int = 32
    """Fractions that an action is chosen by: K."""
    cosines: int = 64
    """Cosines that a fraction is embedded in."""
    kappa: float = 1.0
    """Where the Huber loss turns linear."""

    def __post_init__(self) -> None:
        _check_counts(self, "taus", "target_taus", "policy_taus", "cosines")
        require(self.kappa > 0, "agent.distribution.kappa", self.kappa, "above 0")


def _check_counts(config: QR | IQN, *names: str) -> None:
    for name in names:
        require_size(f"agent.distribution.{name}", getattr(config, name), 1, MOST_UNITS)


@dataclass(frozen=True)
class NoNoise:
    """Plain layers."""

    kind: ClassVar[str] = "none"


@dataclass(frozen=True)
class FactorisedNoise:
    """Noisy layers from the hidden layer on (Fortunato et al., 2018)."""

    kind: ClassVar[str] = "factorised"
    sigma: float = 0.5
    """sigma_0: the noise begins at sigma_0 / sqrt(inputs)."""
    in_evaluation: bool = False
    """Keep the noise on in evaluation."""

    def __post_init__(self) -> None:
        require(self.sigma > 0, "agent.noisy.sigma", self.sigma, "above 0")


@dataclass(frozen=True)
class AutoEpsilon:
    """linear with its defaults, but none beside noisy layers, which explore by themselves."""

    kind: ClassVar[str] = "auto"


@dataclass(frozen=True)
class LinearEpsilon:
    """Random actions with a probability that falls; its clock starts when the warm-up ends."""

    kind: ClassVar[str] = "linear"
    start: float = 1.0
    """The probability at the agent's first decision."""
    end: float = 0.01
    """The probability after the decay, and from then on."""
    decay_agent_steps: int = 250_000
    """Decisions of the agent from start to end; random play before learning does not count."""
    off_after_agent_steps: int | None = None
    """Decisions of the agent after which there are no random actions any more; None: never."""

    def __post_init__(self) -> None:
        where = "agent.epsilon."
        require(0 <= self.start <= 1, where + "start", self.start, "between 0 and 1")
        require(0 <= self.end <= 1, where + "end", self.end, "between 0 and 1")
        steps, off = self.decay_agent_steps, self.off_after_agent_steps
        require(steps >= 1, where + "decay_agent_steps", steps, "at least 1")
        rule = f"at least agent.epsilon.decay_agent_steps ({steps})"
        require(off is None or off >= steps, where + "off_after_agent_steps", off, rule)


@dataclass(frozen=True)
class NoEpsilon:
    """No random actions after the warm-up."""

    kind: ClassVar[str] = "none"


@dataclass(frozen=True)
class Adam:
    """Adam; the loss is the mean over the batch."""

    kind: ClassVar[str] = "adam"
    lr: float = 6.25e-5
    """Learning rate."""
    epsilon: float = 1.5e-4
    """Added to the root of the second moment."""

    def __post_init__(self) -> None:
        _check_optimiser(self.lr, self.epsilon)


@dataclass(frozen=True)
class RMSProp:
    """RMSProp of DeepMind's released code: centred, epsilon inside the root, no momentum, and the
    loss is the sum over the batch."""

    kind: ClassVar[str] = "deepmind_rmsprop"
    lr: float = 2.5e-4
    """Learning rate."""
    decay: float = 0.95
    """Of the averages of the gradient and of its square."""
    epsilon: float = 0.01
    """Added inside the root."""

    def __post_init__(self) -> None:
        _check_optimiser(self.lr, self.epsilon)
        require(0 <= self.decay < 1, "agent.optimiser.decay", self.decay, "at least 0 and below 1")


def _check_optimiser(lr: float, epsilon: float) -> None:
    require(lr > 0, "agent.optimiser.lr", lr, "above 0")
    require(epsilon > 0, "agent.optimiser.epsilon", epsilon, "above 0")


@dataclass(frozen=True)
class SyncByAgentSteps:
    """The target network is copied every so many decisions, as in the released code."""

    kind: ClassVar[str] = "agent_steps"
    period_agent_steps: int = 8_000
    """Decisions between copies, random play before learning included."""

    def __post_init__(self) -> None:
        period = self.period_agent_steps
        require(period >= 1, "agent.target.period_agent_steps", period, "at least 1")


@dataclass(frozen=True)
class SyncByUpdates:
    """The target network is copied every so many gradient steps, as in the paper's text."""

    kind: ClassVar[str] = "updates"
    period_updates: int = 10_000
    """Gradient steps between copies."""

    def __post_init__(self) -> None:
        period = self.period_updates
        require(period >= 1, "agent.target.period_updates", period, "at least 1")


@dataclass(frozen=True)
class NoMunchausen:
    """The plain reward and the greatest value."""

    kind: ClassVar[str] = "none"


@dataclass(frozen=True)
class Munchausen:
    """The log-policy in the reward, and soft values (Vieillard, Pietquin and Geist, 2020)."""

    kind: ClassVar[str] = "on"
    alpha: float = 0.9
    """Share of the log-policy that is added to the reward."""
    temperature: float = 0.03
    """tau of the softmax policy over Q."""
    clip: float = -1.0
    """l_0: the least that tau log pi counts."""

    def __post_init__(self) -> None:
        where = "agent.munchausen."
        require(0 <= self.alpha <= 1, where + "alpha", self.alpha, "between 0 and 1")
        require(self.temperature > 0, where + "temperature", self.temperature, "above 0")
        require(self.clip < 0, where + "clip", self.clip, "below 0")


@dataclass(frozen=True)
class DQNConfig:
    """DQN and what was added to it, each part a toggle."""

    replay_kinds: ClassVar[tuple[str, ...]] = ("uniform", "prioritized")
    """What it learns from; prioritized replay is the toggle --replay prioritized."""
    run_defaults: ClassVar[Mapping[str, Any]] = {
        "train": {"seed_agent_steps": 1_000, "seed_updates": 0, "updates_per_agent_step": 0.25}
    }
    """No burst of updates after the warm-up, and an update every fourth decision."""
    idle: ClassVar[dict[tuple[str, Any], tuple[str, ...]]] = {
        ("noisy.kind", "factorised"): ("epsilon",),
    }
    """Noisy layers explore by themselves: an epsilon that was set before them is dropped. One that
    is set with them or after them stays, and is used."""
    network: AutoNetwork | Nature | Impala | MinAtar | Mlp = field(default_factory=AutoNetwork)
    """From observations to values."""
    distribution: NoDistribution | C51 | QR | IQN = field(default_factory=NoDistribution)
    """What is learned of the return: its expectation, or its distribution."""
    noisy: NoNoise | FactorisedNoise = field(default_factory=NoNoise)
    """Exploration by noisy layers."""
    epsilon: AutoEpsilon | LinearEpsilon | NoEpsilon = field(default_factory=AutoEpsilon)
    """Exploration by random actions; auto is linear, and none beside noisy layers."""
    optimiser: Adam | RMSProp = field(default_factory=Adam)
    """Gradient steps."""
    target: SyncByAgentSteps | SyncByUpdates = field(default_factory=SyncByAgentSteps)
    """When the target network becomes the online one."""
    munchausen: NoMunchausen | Munchausen = field(default_factory=NoMunchausen)
    """The log-policy as part of the reward."""
    double: bool = False
    """The online network chooses the next action, the target network values it."""
    dueling: bool = False
    """Separate streams for the value and the advantages, whose mean is taken off."""
    n_step: int = 1
    """Rewards summed before the bootstrap; fewer where the episode ends before."""
    gamma: float = 0.99
    """Discount per decision."""
    batch_size: int = 32
    """Transitions per update."""
    grad_clip_norm: float | None = None
    """Largest norm of the gradient; None: not clipped."""
    init: Literal["torch7", "orthogonal", "kaiming"] = "torch7"
    """How weights begin: U(-1/sqrt(inputs), 1/sqrt(inputs)) for all, or these in all layers that a
    ReLU follows; the output layer, which none follows, always begins as in torch7."""
    frames: int | None = None
    """Last images seen together, each stored once; None is 4 for a camera's pictures (bytes with
    1 or 3 channels), else 1."""
    compile: Literal["auto", "off", "kernels"] = "auto"
    """kernels: bytes of stacked images become the network's numbers by C, and the convolutions of
    nature and a plain wide layer behind any convolutions (not a noisy one, nor IQN's) are computed
    by it, the same up to rounding in less time; auto: on a CPU, where there is a C compiler."""

    def __post_init__(self) -> None:
        def check(name: str, condition: bool, rule: str) -> None:
            require(condition, f"agent.{name}", getattr(self, name), rule)

        check("n_step", self.n_step >= 1, "at least 1")
        check("gamma", 0 < self.gamma <= 1, "above 0 and at most 1")
        check("batch_size", self.batch_size >= 1, "at least 1")
        clip = self.grad_clip_norm
        check("grad_clip_norm", clip is None or clip > 0, "above 0")
        check("frames", self.frames is None or self.frames >= 1, "at least 1")
        if isinstance(self.munchausen, Munchausen):
            rule = "off (--agent.no_double): Munchausen averages over actions, and chooses none"
            check("double", not self.double, rule)
            if isinstance(self.distribution, C51):
                raise ConfigError(
                    "agent.munchausen is on, but agent.distribution is c51, whose returns are "
                    "fixed: use none, qr or iqn."
                )

    @staticmethod
    def of_older_versions(saved: Mapping[str, Any]) -> Mapping[str, Any]:
        """What a run has saved, in today's words: once, auto had the keys of linear."""
        epsilon = saved.get("epsilon")
        if not isinstance(epsilon, Mapping) or epsilon.get("kind") != AutoEpsilon.kind:
            return saved
        keys = {key: value for key, value in epsilon.items() if key != "kind"}
        noisy = saved.get("noisy")
        if isinstance(noisy, Mapping) and noisy.get("kind") == FactorisedNoise.kind:
            keys = {}  # beside noisy layers they had no effect
        if not keys:
            return {**saved, "epsilon": {"kind": AutoEpsilon.kind}}
        return {**saved, "epsilon": {"kind": LinearEpsilon.kind, **keys}}

    @property
    def exploration(self) -> LinearEpsilon | NoEpsilon:
        """Random actions beside noisy layers only where they are asked for."""
        if not isinstance(self.epsilon, AutoEpsilon):
            return self.epsilon
        return NoEpsilon() if isinstance(self.noisy, FactorisedNoise) else LinearEpsilon()
