"""Convolutions over images: how many, how wide, and the network made of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from forethought.nets.convolutions import after
from forethought.nets.images import FrameLayout
from forethought.nets.kernels import Kernels, TorchKernels

OFFICIAL = ((7, 2), (5, 2), (3, 2), (3, 1))
"""Kernel and stride of TD-MPC2's four layers, made for 64 x 64 pixels."""
LARGE = 48
"""Pixels of the shorter side from which on these fit; below, kernels are 3."""
HALVED = 16
"""Pixels from which on a layer halves a small image."""
SMALLEST = 4
"""Cells of the shorter side that small images keep, so that it stays known what is where."""
CHUNK = 64
"""Images converted and convolved together where no gradient is asked for: they stay in caches."""

Layers = tuple[tuple[int, int], ...]


def layers_for(height: int, width: int) -> Layers:
    """Kernel and stride of each layer: the official ones, or milder ones where they do not fit.

    A grid of 10 x 10 goes through three layers without a stride, to 4 x 4.
    """
    side = min(height, width)
    if side >= LARGE:
        return OFFICIAL
    chosen: list[tuple[int, int]] = []
    while len(chosen) < len(OFFICIAL):
        stride = 2 if side >= HALVED else 1
        side = after(side, 3, stride)
        if side < SMALLEST:
            break
        chosen.append((3, stride))
    return tuple(chosen)


def sides(height: int, width: int, layers: Layers) -> list[tuple[int, int]]:
    """Height and width in front of each layer, and behind the last."""
    found = [(height, width)]
    for kernel, stride in layers:
        height, width = after(height, kernel, stride), after(width, kernel, stride)
        found.append((height, width))
    return found


class ConvNet(nn.Sequential):
    """Stacks of frames [N, F, ...] -> features [N, D]: convolutions, each followed by a ReLU.

    `offset` [N, 2] moves each stack within `pad` pixels, see `images.py`.
    """

    def __init__(
        self, layout: FrameLayout, frames: int, channels: int, layers: Layers, pad: int
    ) -> None:
        modules: list[nn.Module] = []
        inputs = layout.channels * frames
        for kernel, stride in layers:
            modules += [nn.Conv2d(inputs, channels, kernel, stride), nn.ReLU(inplace=True)]
            inputs = channels
        super().__init__(*modules, nn.Flatten())
        self.layout, self.pad = layout, pad
        height, width = sides(layout.height, layout.width, layers)[-1]
        self.features = inputs * height * width
        self.kernels: Kernels = TorchKernels()

    def forward(self, frames: Tensor, offset: Tensor | None, dtype: torch.dtype) -> Tensor:  # type: ignore[override]
        if torch.is_grad_enabled() or len(frames) <= CHUNK:
            return self._features(frames, offset, dtype)
        chunks = [slice(i, i + CHUNK) for i in range(0, len(frames), CHUNK)]
        offsets = [None if offset is None else offset[chunk] for chunk in chunks]
        parts = zip(chunks, offsets, strict=True)
        return torch.cat([self._features(frames[c], moved, dtype) for c, moved in parts])

    def _features(self, frames: Tensor, offset: Tensor | None, dtype: torch.dtype) -> Tensor:
        x = self.kernels.images(frames, self.layout, offset, self.pad, dtype)
        return super().forward(x)  # type: ignore[no-any-return, no-untyped-call]
