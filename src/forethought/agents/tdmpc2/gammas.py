"""Which auxiliary discounts a run has: the options of `agent.multi_gamma` and their rules.

No torch here; the heads themselves are in `discounts.py`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from forethought.config import ConfigError, require

Gamma = Literal["primary"] | float
KEY = "agent.multi_gamma.gammas"
MOST = 6
"""Discounts in all, the primary one included."""
SAME = 1e-6
"""Discounts that are no further apart than this are one."""
log = logging.getLogger("forethought")


@dataclass(frozen=True)
class MultiGammaConfig:
    """Auxiliary values at further discounts, which only shape the latent state."""

    enabled: bool = False
    """Learn auxiliary values; off, nothing of them exists and training is that of the paper."""
    gammas: tuple[Gamma, ...] = ()
    """The primary discount first (the word primary, or its number), then the auxiliary ones."""
    head: Literal["joint", "separate"] = "joint"
    """One linear layer for all auxiliary discounts, or one for each."""
    loss_weight: float = 0.5
    """Weight of each auxiliary discount's loss."""
    debug_logging: bool = False
    """Rich snapshots at evaluations; off, short ones."""
    log_num_examples: int = 8
    """Most slices shown in a snapshot; a short one shows at most 4."""

    def __post_init__(self) -> None:
        shown, where = _listed(self.gammas), "agent.multi_gamma."
        rule = "a list that begins with the primary discount, such as [primary, 0.97, 0.995]"
        require(bool(self.gammas) or not self.enabled, KEY, shown, f"{rule}, when it is enabled")
        require(len(self.gammas) <= MOST, KEY, shown, f"at most {MOST} discounts")
        for i, gamma in enumerate(self.gammas):
            if isinstance(gamma, str):
                rule = "a number: only the first is the primary discount"
                require(i == 0, f"{KEY}[{i}]", gamma, rule)
            else:
                rule = "above 0 and below 1 (or primary, as the first)"
                require(0 < gamma < 1, f"{KEY}[{i}]", gamma, rule)
        numbers = [gamma for gamma in self.gammas if not isinstance(gamma, str)]
        for i, gamma in enumerate(numbers):
            require(not _among(gamma, numbers[:i]), KEY, shown, f"without {gamma} twice")
        weight, examples = self.loss_weight, self.log_num_examples
        rule = "above 0 and finite (enabled false turns it off)"
        require(0 < weight < math.inf, where + "loss_weight", weight, rule)
        require(examples >= 1, where + "log_num_examples", examples, "at least 1")

    def check_primary(self, primary: float, whose: str) -> None:
        """The first discount is the one that the policy and the planner use."""
        first = self.gammas[0] if self.enabled else "primary"
        rule = f"primary or {primary}, {whose}"
        require(isinstance(first, str) or _among(first, [primary]), f"{KEY}[0]", first, rule)

    def auxiliary(self, primary: float, task: str) -> tuple[float, ...]:
        """The auxiliary discounts in a task of this primary one; none: the baseline.

        With the word primary a list fits every task, so one of its discounts may be that of the
        task itself. The primary value learns it already; no head is made for it.
        """
        if not self.enabled:
            return ()
        if task.startswith("multi:"):
            raise ConfigError(
                f"agent.multi_gamma.enabled is true, but {task} is several tasks, each with a "
                "discount of its own: train one task, or leave agent.multi_gamma out."
            )
        self.check_primary(primary, f"the discount of {task}")
        others = [gamma for gamma in self.gammas[1:] if not isinstance(gamma, str)]
        return tuple(gamma for gamma in others if not _among(gamma, [primary]))

    def warn_of_nothing(self, primary: float, kept: tuple[float, ...]) -> None:
        """Says when discounts that were asked for have no effect."""
        if self.enabled and len(kept) < len(self.gammas) - 1:
            log.warning(
                "The auxiliary discount %s is the primary one of this task, and gets no head of "
                "its own.",
                primary,
            )
        if self.enabled and not kept:
            log.warning(
                "agent.multi_gamma is enabled, but no auxiliary discount stands beside the "
                "primary %s: this is the baseline.",
                primary,
            )


def _among(gamma: float, others: Iterable[float]) -> bool:
    return any(abs(gamma - other) <= SAME for other in others)


def _listed(gammas: Iterable[Gamma]) -> str:
    return f"[{', '.join(map(str, gammas))}]"
