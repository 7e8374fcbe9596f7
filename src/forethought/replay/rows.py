"""What one row holds, and what a drawn batch looks like.

Time runs as everywhere in the package: row t holds the observation x_t, the action that led to
it, and the reward, `terminated` and `truncated` received on arriving. Row 0 of an episode has
neither action nor reward:

    row      0      1      2      3
    obs      x0     x1     x2     x3
    action   -      a0     a1     a2        (stored as zeros in row 0)
    reward   -      r1     r2     r3

A slice of L rows therefore has L observations and L-1 actions and rewards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forethought.config import ConfigError, ForethoughtError, nearest, require
from forethought.spaces.spec import EnvSpec
from forethought.spaces.structure import Leaf, Structure, column_leaf

LIFE_LOST = "life_lost"
"""The extra column that cuts the bootstrap though the episode goes on."""
RESERVED = ("obs", "action", "reward", "terminated", "truncated", "is_first")


class ReplayError(ForethoughtError):
    """A row, a block file or a request that replay cannot take."""


def join(head: str, path: str) -> str:
    """The column of a leaf: 'obs' for a bare leaf, 'obs/camera' for a nested one."""
    return f"{head}/{path}" if path else head


@dataclass(frozen=True)
class RowSpec:
    """The columns of a row. `is_first` is not among them: it follows from the row's age."""

    leaves: tuple[Leaf, ...]
    """One leaf per column: 'obs/...', 'action/...', 'reward', 'terminated', 'truncated', extras."""
    extras: tuple[str, ...] = ()
    """Names of the declared extra columns."""
    stack: Mapping[str, int] = field(default_factory=dict)
    """Frames per stack, by observation column; stacks are built on sampling."""
    stack_pad: str = "zeros"
    """What stands before an episode's first frame: 'zeros', or the 'first' frame again."""
    sign_rewards: bool = False
    """Whether a batch has the signs of the rewards."""

    @classmethod
    def of(
        cls, spec: EnvSpec, stack: Mapping[str, int] | None = None, stack_pad: str = "zeros"
    ) -> RowSpec:
        """The row of an environment, checked."""
        stack = dict(stack or {})
        leaves = [
            Leaf(join(head, leaf.path), leaf.shape, leaf.dtype)
            for head, space in (("obs", spec.observation_space), ("action", spec.action_space))
            for leaf in Structure.of(space).leaves
        ]
        observed = [leaf.path for leaf in leaves if leaf.path.split("/")[0] == "obs"]
        leaves.append(Leaf("reward", (), np.dtype(np.float32)))
        leaves += [Leaf(name, (), np.dtype(np.bool_)) for name in ("terminated", "truncated")]
        for column in spec.columns:
            taken = {*RESERVED, *(leaf.path for leaf in leaves)}
            if column.name in taken or "/" in column.name:
                raise ConfigError(
                    f"The extra column {column.name} cannot have this name: it is taken or has a "
                    "slash; give it another one."
                )
            leaves.append(column_leaf(column.name, tuple(column.shape), column.dtype))
        for path, frames in stack.items():
            if path not in observed:
                raise ConfigError(
                    f"There is no observation column {path} to stack.{nearest(path, observed)}"
                )
            require(frames >= 1, f"stack of {path}", frames, "at least 1 frame")
        require(stack_pad in ("zeros", "first"), "stack_pad", stack_pad, "zeros or first")
        extras = tuple(c.name for c in spec.columns)
        return cls(tuple(leaves), extras, stack, stack_pad, spec.sign_rewards)

    @property
    def history(self) -> int:
        """Rows before a slice that its stacks may need."""
        return max(self.stack.values(), default=1) - 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one stored row."""
        return sum(leaf.nbytes for leaf in self.leaves)


@dataclass(frozen=True)
class Batch:
    """B slices of L rows. Nested observations and actions come back nested."""

    obs: Any
    """[L, B, ...]; a stacked column is [L, B, frames, ...], oldest frame first."""
    action: Any
    """[L-1, B, ...]; action[t] leads from obs[t] to obs[t+1]."""
    reward: Tensor
    """[L-1, B]; reward[t] is received on arriving at obs[t+1]."""
    terminated: Tensor
    """[L-1, B] float, 1.0 where obs[t+1] ended the episode for good: it cuts the bootstrap. A lost
    life does so too (where the task declares that column), and there the slice goes on."""
    truncated: Tensor
    """[L-1, B] bool; it never cuts the bootstrap."""
    is_first: Tensor
    """[L, B] bool, True where obs[t] began an episode (only ever in obs[0])."""
    extras: dict[str, Tensor]
    """[L, B, ...] per declared extra column."""


def as_learned(batch: Batch, rows: RowSpec) -> Batch:
    """The batch with what learning sees in place of what happened: the signs of rewards, and lost
    lives as ends, where the task asks for that."""
    if rows.sign_rewards:
        batch = replace(batch, reward=batch.reward.sign())
    if LIFE_LOST in rows.extras:
        lost = batch.extras[LIFE_LOST][1:].float()
        batch = replace(batch, terminated=torch.maximum(batch.terminated, lost))
    return batch
