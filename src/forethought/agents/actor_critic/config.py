"""Options that SAC and TD3 share; none of this imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from forethought.config import MOST_PARTS, MOST_UNITS, require, require_size, require_sizes


@dataclass(frozen=True)
class LearningRates:
    """Adam's learning rate for each part."""

    actor: float = 3e-4
    """The actor's."""
    critic: float = 3e-4
    """That of all critics."""

    def __post_init__(self) -> None:
        for part, rate in vars(self).items():
            require(rate > 0, f"agent.lr.{part}", rate, "above 0")


@dataclass(frozen=True)
class ActorCriticConfig:
    """An actor and an ensemble of critics, learned from single transitions."""

    run_defaults: ClassVar[Mapping[str, Any]] = {}
    """What a run of this agent has unless somebody says otherwise, in the shape of config.yaml."""
    replay_kinds: ClassVar[tuple[str, ...]] = ("transitions",)
    """Every transition is drawn equally often, as soon as it is there."""
    hidden: tuple[int, ...] = (256, 256)
    """Units of each hidden layer, of the actor and of every critic."""
    critics: int = 2
    """Q functions, computed together; targets take the least of them."""
    critic_loss: Literal["half_sum", "sum", "mean"] = "half_sum"
    """How the squared errors of the critics are joined: half their sum, their sum or their mean."""
    batch_size: int = 256
    """Transitions per update."""
    gamma: float = 0.99
    """Discount per decision."""
    tau: float = 0.005
    """Step of the target networks."""
    lr: LearningRates = field(default_factory=LearningRates)

    def __post_init__(self) -> None:
        require_sizes("agent.hidden", self.hidden, MOST_UNITS)
        require_size("agent.critics", self.critics, 1, MOST_PARTS)
        self.check("batch_size", self.batch_size >= 1, "at least 1")
        self.check("gamma", 0 < self.gamma <= 1, "above 0 and at most 1")
        self.check("tau", 0 < self.tau <= 1, "above 0 and at most 1")

    def check(self, name: str, condition: bool, rule: str) -> None:
        """State a rule of one of the fields."""
        require(condition, f"agent.{name}", getattr(self, name), rule)
