"""Encoders of images, dicts and entities written slowly, pixel by pixel and row by row.

As `reference_tdmpc2`: no code of the package is imported, random numbers are passed in. The trunk
of key i has its parameters under `encoder.trunks.i`, the layer that joins them is `encoder.join`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .reference_tdmpc2 import Params, ReferenceSettings, mish, normed_linear, simnorm


@dataclass(frozen=True)
class Camera:
    """Frames [F, H, W, C], or [F, C, H, W] where `first` says so; without F where there is one."""

    low: float
    high: float
    pad: int
    strides: tuple[int, ...]
    first: bool = False
    frames: int = 1


@dataclass(frozen=True)
class Choice:
    start: int
    count: int


@dataclass(frozen=True)
class Rows:
    mask: str


@dataclass(frozen=True)
class Plain:
    pass


def encode(
    params: Params,
    obs: dict[str, Tensor],
    offsets: Tensor | None,
    kinds: dict[str, Any],
    settings: ReferenceSettings,
) -> Tensor:
    """Leaves by path [B, ...] and offsets [B, images, 2] -> [B, Z]; one observation at a time."""
    batch = len(next(iter(obs.values())))
    latents = []
    for b in range(batch):
        one = {path: leaf[b] for path, leaf in obs.items()}
        moved = None if offsets is None else offsets[b]
        latents.append(encode_one(params, one, moved, kinds, settings))
    return torch.stack(latents)


def encode_one(
    params: Params,
    obs: dict[str, Tensor],
    offsets: Tensor | None,
    kinds: dict[str, Any],
    settings: ReferenceSettings,
) -> Tensor:
    ends, images, dtype = [], 0, params["encoder.join.weight"].dtype
    for i, (path, kind) in enumerate(kinds.items()):
        name, x = f"encoder.trunks.{i}", obs[path]
        if isinstance(kind, Camera):
            offset = (kind.pad, kind.pad)  # the middle: as it is
            if offsets is not None and kind.pad:
                offset = (int(offsets[images, 0]), int(offsets[images, 1]))
            images += kind.pad > 0
            end = convolved(params, f"{name}.conv", picture(x, kind, offset, dtype), kind.strides)
            if f"{name}.hidden.0.weight" in params:
                end = normed_linear(params, f"{name}.hidden.0", end, mish)
        elif isinstance(kind, Choice):
            numbers = torch.zeros(kind.count, dtype=dtype)
            numbers[int(x) - kind.start] = 1
            end = normed_linear(params, f"{name}.layers.0", numbers, mish)
        elif isinstance(kind, Rows):
            end = pooled(params, name, x.to(dtype), obs[kind.mask])
        else:
            end = normed_linear(params, f"{name}.layers.0", x.reshape(-1).to(dtype), mish)
        ends.append(end)
    return normed_linear(
        params, "encoder.join", torch.cat(ends), lambda h: simnorm(h, settings.simnorm_dim)
    )


def picture(x: Tensor, kind: Camera, offset: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """[F * C, H, W] in [-1/2, 1/2], moved; what comes in from outside repeats the edge."""
    frames = x if kind.frames > 1 else x.unsqueeze(0)
    planes = []
    for frame in frames:
        channels = frame if kind.first else frame.permute(2, 0, 1)
        for plane in channels:
            height, width = plane.shape
            out = torch.zeros(height, width, dtype=dtype)
            for y in range(height):
                for column in range(width):
                    row_from = min(max(y + offset[0] - kind.pad, 0), height - 1)
                    column_from = min(max(column + offset[1] - kind.pad, 0), width - 1)
                    value = plane[row_from, column_from].to(dtype)
                    out[y, column] = (value - kind.low) / (kind.high - kind.low) - 0.5
            planes.append(out)
    return torch.stack(planes)


def convolved(params: Params, name: str, x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """[C, H, W] -> [features]; layer i is `name.2i`, a ReLU follows each."""
    for i, stride in enumerate(strides):
        weight, bias = params[f"{name}.{2 * i}.weight"], params[f"{name}.{2 * i}.bias"]
        kernel = weight.shape[-1]
        rows = []
        for y in range(0, x.shape[1] - kernel + 1, stride):
            row = []
            for column in range(0, x.shape[2] - kernel + 1, stride):
                patch = x[:, y : y + kernel, column : column + kernel]
                row.append((weight * patch).sum(dim=(1, 2, 3)) + bias)
            rows.append(torch.stack(row, dim=-1))
        x = torch.clamp(torch.stack(rows, dim=1), min=0)
    return x.reshape(-1)


def pooled(params: Params, name: str, rows: Tensor, mask: Tensor) -> Tensor:
    """Mean and maximum of what each present row becomes; zeros where none is present."""
    units = params[f"{name}.each.0.weight"].shape[0]
    mean = highest = torch.zeros(units, dtype=rows.dtype)
    seen = [
        normed_linear(params, f"{name}.each.0", row.reshape(-1), mish)
        for row, present in zip(rows, mask.tolist(), strict=True)
        if present
    ]
    if seen:
        mean = torch.stack(seen).sum(dim=0) / len(seen)
        highest = seen[0]
        for row in seen[1:]:
            highest = torch.maximum(highest, row)
    return normed_linear(params, f"{name}.all.0", torch.cat([mean, highest]), mish)
