"""Frame stacks: one rule for acting and for replay.

Each frame is stored once. The stack of a row holds its frame and the ones before it in the same
episode, oldest first; what would lie before the episode's first frame is zeros or that first
frame again. `sources` is the whole rule. `FrameStacker` applies it to the frames seen while
acting, `windows` to the rows gathered from the ring, so that the two cannot differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forethought.replay.rows import RowSpec
from forethought.spaces.nested import flatten, unflatten

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def sources(age: Ints, frames: int) -> tuple[Ints, Bools]:
    """Where the frames of a stack come from, for a row `age` rows into its episode.

    Returns, with the oldest frame first, how many rows back each one lies (at most `age`: it
    never leaves the episode) and which ones lie before the episode and are padding.
    """
    wanted = np.arange(frames - 1, -1, -1).reshape(-1, *[1] * age.ndim)  # [frames, 1]
    return np.minimum(wanted, age), wanted > age


def windows(rows: Tensor, blank: Tensor | None, frames: int) -> Tensor:
    """Stacks [L, B, frames, ...] from gathered rows [frames-1+L, B, ...].

    `blank` [frames, B] marks padding to be zeroed. The result is a view: neighbouring stacks
    share their frames.
    """
    if blank is not None:
        rows[:frames].masked_fill_(blank.reshape(*blank.shape, *[1] * (rows.ndim - 2)), 0)
    return rows.unfold(0, frames, 1).movedim(-1, 2)


class FrameStacker:
    """The last frames of each environment while acting; the caller owns it, one per act state."""

    def __init__(self, stack: Mapping[str, int], pad: str, num_envs: int) -> None:
        self.stack = dict(stack)
        self.pad = pad
        self.age = np.full(num_envs, -1, np.int64)  # [N] rows since the episode began
        self.history: dict[str, NDArray[Any]] = {}  # [N, frames, ...] per column, newest last

    @classmethod
    def of(cls, rows: RowSpec, num_envs: int) -> FrameStacker:
        """For the stacked columns of a row, with room for their frames from the start."""
        stacker = cls(rows.stack, rows.stack_pad, num_envs)
        stacker.history = {
            leaf.path: np.zeros((num_envs, rows.stack[leaf.path], *leaf.shape), leaf.dtype)
            for leaf in rows.leaves
            if leaf.path in rows.stack
        }
        return stacker

    def push(self, obs: Any, first: Bools) -> Any:
        """Observations [N, ...] in, the same with stacked columns [N, frames, ...] out."""
        first = np.asarray(first, np.bool_)
        if np.any((self.age < 0) & ~first):
            raise ValueError("The first observation given to a FrameStacker must begin an episode.")
        self.age = np.where(first, 0, self.age + 1)
        columns = flatten({"obs": obs})
        for path, frames in self.stack.items():
            columns[path] = self._push_column(path, np.asarray(columns[path]), frames)
        return unflatten(columns)["obs"]

    def _push_column(self, path: str, frame: NDArray[Any], frames: int) -> NDArray[Any]:
        history = self.history.get(path)
        if history is None:
            history = np.zeros((len(frame), frames, *frame.shape[1:]), frame.dtype)
            self.history[path] = history
        history[:, :-1] = history[:, 1:]
        history[:, -1] = frame
        back, blank = sources(self.age, frames)  # [frames, N]
        stack = history[np.arange(len(frame))[:, None], frames - 1 - back.T]  # [N, frames, ...]
        if self.pad == "zeros":
            stack[blank.T] = 0
        return stack

    def state(self) -> dict[str, Tensor]:
        """Everything that decides the next stacks."""
        columns = {f"history/{k}": torch.from_numpy(v.copy()) for k, v in self.history.items()}
        return {"age": torch.from_numpy(self.age.copy()), **columns}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a saved `state`."""
        self.age = state["age"].numpy().copy()
        self.history = {
            name.removeprefix("history/"): value.numpy().copy()
            for name, value in state.items()
            if name != "age"
        }
