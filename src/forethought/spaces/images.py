"""Which observations are images, and how their axes lie.

An image is a Box of bytes, truth values or bounded floats with the axes [height, width, channels]
or [channels, height, width], or of bytes or truth values with [height, width] alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from forethought.config import ConfigError
from forethought.spaces.structure import subspaces

FILMED = (1, 3)
"""Channels of grey and of coloured pictures: one alone shows no motion, so they are stacked."""


@dataclass(frozen=True)
class Image:
    """The axes of one image, and its range of values."""

    height: int
    width: int
    channels: int
    channels_last: bool
    low: float
    high: float
    picture: bool
    """Whether it is a camera's picture: bytes, grey or in colours."""


def image_of(space: gymnasium.Space[Any], path: str = "") -> Image | None:
    """The image that a space holds; None if it holds something else.

    Of the first and the last axis the shorter one is that of the channels; of two equal ones the
    last, which is gymnasium's own order.
    """
    if not isinstance(space, spaces.Box) or space.dtype.kind not in "fub":
        return None
    bytes_or_bits, axes = space.dtype in (np.uint8, np.bool_), len(space.shape)
    if axes < 2 or (axes == 2 and not bytes_or_bits):
        return None
    name = f"The observation '{path}'" if path else "The observation"
    if axes > 3:
        raise ConfigError(
            f"{name} has {axes} axes {space.shape}, but an image has height, width and channels; "
            "leave out what stacks its frames (agents stack them themselves) or flatten it."
        )
    low, high = float(np.min(space.low)), float(np.max(space.high))
    if not np.isfinite(low) or not np.isfinite(high) or low >= high:
        raise ConfigError(
            f"{name} of shape {space.shape} looks like an image, but its values lie in [{low:g}, "
            f"{high:g}]; declare finite bounds, or flatten it if it is none."
        )
    shape = space.shape if axes == 3 else (*space.shape, 1)
    last = shape[2] <= shape[0]
    height, width, channels = shape if last else (*shape[1:], shape[0])
    picture = space.dtype == np.uint8 and channels in FILMED
    return Image(height, width, channels, last, low, high, picture)


def has_image(space: gymnasium.Space[Any]) -> bool:
    """Whether an observation is an image, or has one among its members."""
    members = subspaces(space)
    if members is None:
        return image_of(space) is not None
    return any(has_image(member) for _, member in members)
