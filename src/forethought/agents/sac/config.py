"""Options of SAC. The defaults are those of the paper's second version; nothing imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from forethought.agents.actor_critic.config import ActorCriticConfig
from forethought.config import require


@dataclass(frozen=True)
class AutoEntropy:
    """The temperature alpha is learned, so that the policy keeps a given entropy."""

    kind: ClassVar[str] = "auto"
    target: float | None = None
    """Entropy to keep, in nats; None is minus the number of action dimensions."""
    initial: float = 1.0
    """Alpha at the start."""
    lr: float = 3e-4
    """Adam's learning rate of log alpha."""
    loss: Literal["alpha", "log_alpha"] = "alpha"
    """What multiplies the entropy that is missing: alpha, as in the paper, or its logarithm."""

    def __post_init__(self) -> None:
        require(self.initial > 0, "agent.entropy.initial", self.initial, "above 0")
        require(self.lr > 0, "agent.entropy.lr", self.lr, "above 0")


@dataclass(frozen=True)
class FixedEntropy:
    """The temperature stays as it is, as in the paper's first version."""

    kind: ClassVar[str] = "fixed"
    alpha: float = 0.2
    """Weight of the entropy against the rewards."""

    def __post_init__(self) -> None:
        require(self.alpha >= 0, "agent.entropy.alpha", self.alpha, "at least 0")


@dataclass(frozen=True)
class ClampedLogStd:
    """What the network gives, cut at both ends."""

    kind: ClassVar[str] = "clamp"
    min: float = -20.0
    """Smallest log standard deviation."""
    max: float = 2.0
    """Largest log standard deviation."""

    def __post_init__(self) -> None:
        _check_ends(self.min, self.max)


@dataclass(frozen=True)
class SquashedLogStd:
    """What the network gives, squashed by tanh: its gradient never vanishes altogether."""

    kind: ClassVar[str] = "tanh"
    min: float = -5.0
    """Smallest log standard deviation."""
    max: float = 2.0
    """Largest log standard deviation."""

    def __post_init__(self) -> None:
        _check_ends(self.min, self.max)


def _check_ends(low: float, high: float) -> None:
    require(low < high, "agent.log_std.min", low, f"below agent.log_std.max ({high})")


@dataclass(frozen=True)
class SACConfig(ActorCriticConfig):
    """Soft actor-critic: a stochastic actor that is paid for reward and for entropy."""

    run_defaults: ClassVar[Mapping[str, Any]] = {
        "train": {"seed_agent_steps": 10_000, "seed_updates": 0}
    }
    entropy: AutoEntropy | FixedEntropy = field(default_factory=AutoEntropy)
    """How the weight of the entropy, alpha, is found."""
    log_std: ClampedLogStd | SquashedLogStd = field(default_factory=ClampedLogStd)
    """How the policy's log standard deviation is kept within bounds."""
    action_units: Literal["normalised", "environment"] = "normalised"
    """Units of the action in log-probability and entropy: [-1, 1], or the environment's, which
    adds the logarithm of half the range of each action."""
    policy_delay: int = 1
    """Updates of the critics per turn of the actor, which then makes as many itself."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("policy_delay", self.policy_delay >= 1, "at least 1")
