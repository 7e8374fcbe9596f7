"""What kinds of observations a task has, key by key, and how they reach the encoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from forethought.agents.tdmpc2.config import ImageConfig
from forethought.config import ConfigError, require
from forethought.nets.conv import LARGE, Layers, layers_for, sides
from forethought.nets.images import FrameLayout
from forethought.spaces.images import Image, image_of
from forethought.spaces.masks import entity_keys
from forethought.spaces.nested import Tree, flatten
from forethought.spaces.spec import EnvSpec
from forethought.spaces.structure import subspaces

FRAMES = 3
"""Frames per stack of a camera's pictures."""
SHIFT_PIXELS = 3
"""How far a large image is moved in training."""
MOST_ONE_HOT = 65_536
"""Numbers that the one-hot keys of a task may take together."""


@dataclass(frozen=True)
class Numbers:
    """Numbers or bits, flattened."""

    path: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class OneHot:
    """Discrete or MultiDiscrete: each choice becomes as many numbers as it has values."""

    path: str
    shape: tuple[int, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Picture:
    """An image, or a stack of its last frames."""

    path: str
    layout: FrameLayout
    axes: int
    """Of one image in memory: two where it has no axis of channels."""
    frames: int
    pad: int
    """Pixels by which training moves it at most."""
    layers: Layers


@dataclass(frozen=True)
class Entities:
    """Rows of which a mask says which are present."""

    path: str
    mask: str
    shape: tuple[int, ...]


Key = Numbers | OneHot | Picture | Entities


@dataclass(frozen=True)
class Observations:
    """The keys in the order of the space; `vector` is the length where all is one vector."""

    keys: tuple[Key, ...]
    vector: int | None = None

    @property
    def pictures(self) -> tuple[Picture, ...]:
        return tuple(key for key in self.keys if isinstance(key, Picture))

    @property
    def pads(self) -> tuple[int, ...]:
        """Of each image that training moves: its offsets go from 0 to twice this."""
        return tuple(key.pad for key in self.pictures if key.pad)

    @property
    def stack(self) -> dict[str, int]:
        """Frames per stack by column of replay, of what is stacked."""
        columns = {f"obs/{x.path}" if x.path else "obs": x.frames for x in self.pictures}
        return {column: frames for column, frames in columns.items() if frames > 1}

    def tensors(self, obs: Tree, device: torch.device) -> Tree:
        """What environments show, as the encoder takes it: a vector, or leaves by path."""
        if self.vector is not None:
            return torch.as_tensor(np.asarray(obs), dtype=torch.float32, device=device)
        flat = flatten(obs)
        return {path: torch.as_tensor(np.asarray(x), device=device) for path, x in flat.items()}

    def of_batch(self, obs: Tree) -> Tree:
        """The same for what replay gives; images stay bytes."""
        return obs.float() if self.vector is not None else flatten(obs)


def observations_of(spec: EnvSpec, config: ImageConfig) -> Observations:
    """How the observations of a task are encoded, or a sentence that says what does not fit."""
    space = spec.observation_space
    keys = tuple(_keys(space, "", config))
    values = sum(sum(key.counts) for key in keys if isinstance(key, OneHot))
    if values > MOST_ONE_HOT:
        raise ConfigError(
            f"The discrete observations of {spec.task} have {values:,} values, but tdmpc2 takes "
            f"{MOST_ONE_HOT:,} at most: give them as numbers (a Box)."
        )
    if not any(isinstance(key, Picture) for key in keys):
        for name, value in vars(config).items():
            default = ImageConfig.__dataclass_fields__[name].default
            rule = f"left out: the observations of {spec.task} have no image"
            require(value == default, f"agent.image.{name}", value, rule)
    one = isinstance(space, spaces.Box) and len(space.shape) == 1
    return Observations(keys, int(space.shape[0]) if one else None)  # type: ignore[index]


def _keys(space: gymnasium.Space[Any], path: str, config: ImageConfig) -> list[Key]:
    members = subspaces(space)
    if members is not None:
        masks = entity_keys(space)
        found: list[Key] = []
        for name, member in members:
            inner = f"{path}/{name}" if path else name
            if name in masks:
                mask = f"{path}/{masks[name]}" if path else masks[name]
                found.append(Entities(inner, mask, _shape(member)))
            elif name not in masks.values():
                found += _keys(member, inner, config)
        return found
    if isinstance(space, spaces.Discrete):
        return [OneHot(path, (), (int(space.start),), (int(space.n),))]
    if isinstance(space, spaces.MultiDiscrete):
        starts, counts = (tuple(map(int, x.flatten())) for x in (space.start, space.nvec))
        return [OneHot(path, _shape(space), starts, counts)]
    image = image_of(space, path)
    if image is None:
        return [Numbers(path, _shape(space))]
    return [_picture(image, len(_shape(space)), path, config)]


def _shape(space: gymnasium.Space[Any]) -> tuple[int, ...]:
    assert space.shape is not None  # only Dict and Tuple have none
    return tuple(space.shape)


def _picture(image: Image, axes: int, path: str, config: ImageConfig) -> Picture:
    height, width = image.height, image.width
    layout = FrameLayout(height, width, image.channels, image.channels_last, image.low, image.high)
    frames, pad = config.frames, config.shift_pixels
    if frames is None:
        frames = FRAMES if image.picture else 1
    if pad is None:
        pad = SHIFT_PIXELS if min(height, width) >= LARGE else 0
    layers = tuple(zip(config.kernels, config.strides)) or layers_for(height, width)
    if min(map(min, sides(height, width, layers))) < 1:
        raise ConfigError(
            f"agent.image.kernels {list(config.kernels)} with strides {list(config.strides)} leave "
            f"nothing of an image of {height} x {width} pixels; use smaller or fewer ones."
        )
    return Picture(path, layout, axes, frames, pad, layers)
