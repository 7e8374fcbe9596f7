"""Stacks of frames as a convolution takes them, moved at random in training.

A stack [N, F, ...] of F frames, oldest first, becomes [N, F * C, H, W] with the values of its space
mapped to a range of length 1. What is given stays as it is: it may be somebody's observation. In
training it may first be moved by whole pixels (Yarats et al.: *Mastering Visual Continuous
Control*, DrQ-v2): cut, at `offset` [N, 2] (row and column, 0 to 2 pad), out of itself padded by
`pad` repetitions of its edge. All frames of a stack move alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class FrameLayout:
    """How one frame lies in memory, and what its values mean."""

    height: int
    width: int
    channels: int
    channels_last: bool
    low: float = 0.0
    high: float = 255.0
    least: float = -0.5
    """What `low` becomes; `high` becomes one more."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of one frame, with its channels where they lie."""
        if self.channels_last:
            return self.height, self.width, self.channels
        return self.channels, self.height, self.width

    @property
    def scale(self) -> float:
        return 1.0 / (self.high - self.low)

    @property
    def bias(self) -> float:
        """values * scale + bias lies in [least, least + 1]."""
        return self.least - self.low * self.scale

    def moves(self, frames: int) -> bool:
        """Whether the values of a stack of so many lie elsewhere when the channels lie together."""
        return frames > 1 or (self.channels > 1 and not self.channels_last)


def prepared(
    frames: Tensor, layout: FrameLayout, offset: Tensor | None, pad: int, dtype: torch.dtype
) -> Tensor:
    """Tensor operations for every device and dtype; the C kernel does the same in one pass."""
    count = len(frames)
    size = layout.height, layout.width
    if layout.channels_last:
        frames = frames.movedim(-1, -3)  # [N, F, C, H, W]
    x = frames.reshape(count, -1, *size)
    if offset is not None:
        x = shifted(x, offset, pad)
    # A CPU convolves in half the time when the channels lie together.
    order = torch.channels_last if x.is_cpu else torch.contiguous_format
    # A copy always: what has that type and order already would else be scaled in place.
    x = x.to(dtype, memory_format=order, copy=True)
    if layout.low:
        x.sub_(layout.low)  # first: next to a large `low` the rest would be lost in rounding
    x.mul_(layout.scale)
    return x.add_(layout.least) if layout.least else x


def shifted(x: Tensor, offset: Tensor, pad: int) -> Tensor:
    """[N, C, H, W], each cut out of its padded self: torch has no such padding for bytes."""
    height, width = x.shape[-2:]
    left, right = (edge.expand(-1, -1, -1, pad) for edge in (x[..., :1], x[..., -1:]))
    x = torch.cat([left, x, right], dim=3)
    above, below = (edge.expand(-1, -1, pad, -1) for edge in (x[:, :, :1], x[:, :, -1:]))
    x = torch.cat([above, x, below], dim=2)
    windows = x.unfold(2, height, 1).unfold(3, width, 1)  # [N, C, 2 pad + 1, 2 pad + 1, H, W]
    return windows[torch.arange(len(x), device=x.device), :, offset[:, 0], offset[:, 1]]
