"""From observations to features: the trunks, and how weights begin.

A trunk takes what replay gives (bytes stay bytes until here) and scales it: an image's values lie
in [0, 1] behind `Pixels`, and nowhere before.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from forethought.agents.dqn.config import (
    AutoNetwork,
    DQNConfig,
    Impala,
    MinAtar,
    Mlp,
    Nature,
)
from forethought.config import ConfigError
from forethought.nets.conv import sides
from forethought.nets.convolutions import after
from forethought.nets.images import FrameLayout
from forethought.nets.kernels import Kernels, TorchKernels, native_kernels
from forethought.nets.spectral import SpectralConv2d
from forethought.spaces.images import Image, image_of
from forethought.spaces.spec import EnvSpec

FRAMES = 4
"""Frames per stack of a camera's pictures."""
SMALL = 36
"""Pixels of the shorter side below which nature's convolutions leave nothing."""
IMPALA_CHANNELS = (16, 32, 32)
Network = Nature | Impala | MinAtar | Mlp


class Pixels(nn.Module):
    """Stacks [B, F, ...] of images to [B, F * C, H, W] with values in [0, 1].

    The only place where pixels are scaled, by themselves or on the way through convolutions.
    """

    def __init__(self, image: Image, frames: int) -> None:
        super().__init__()
        self.frames = frames
        self.layout = layout_of(image)
        self.kernels: Kernels = TorchKernels()

    def forward(self, x: Tensor) -> Tensor:
        frames, dtype = self.stacked(x), torch.get_default_dtype()
        return self.kernels.images(frames, self.layout, None, 0, dtype)

    def stacked(self, x: Tensor) -> Tensor:
        """With an axis of frames and one of channels."""
        if self.frames == 1:
            x = x.unsqueeze(1)
        return x.unsqueeze(-1) if x.ndim == 4 else x

    def through(self, x: Tensor, convs: list[nn.Conv2d]) -> Tensor:
        """The same, and through convolutions with ReLUs: [B, D]."""
        frames, dtype = self.stacked(x), torch.get_default_dtype()
        return self.kernels.features(frames, self.layout, convs, dtype)


def layout_of(image: Image) -> FrameLayout:
    """How a frame lies, with its values scaled to [0, 1]."""
    shape = image.height, image.width, image.channels
    return FrameLayout(*shape, image.channels_last, image.low, image.high, least=0.0)


def kernels_for(
    config: DQNConfig, spec: EnvSpec, image: Image | None, frames: int, device: torch.device
) -> tuple[Kernels | None, tuple[str, ...]]:
    """What makes numbers of an image's bytes (None: tensor operations), and what to say of it."""
    mode, space = config.compile, spec.observation_space
    # Where images begin above 0 there is a bias, which C rounds together with the product.
    of_use = (
        image is not None
        and space.dtype in (np.uint8, np.bool_)
        and image.low == 0
        and layout_of(image).moves(frames)
    )
    if mode == "kernels" and not of_use:
        raise ConfigError(
            "agent.compile is kernels, which scale stacks of images of bytes that begin at 0, but "
            f"{spec.task} shows {space}, {frames} at a time: leave it out."
        )
    if mode == "off" or not of_use or (mode == "auto" and device.type != "cpu"):
        return None, ()
    kernels, note = native_kernels(device)
    return kernels, (note,) if kernels is not None or mode == "kernels" else ()


class Residual(nn.Module):
    """x + conv(relu(conv(relu(x))))."""

    def __init__(self, channels: int, spectral: bool) -> None:
        super().__init__()
        self.first, self.second = (_conv3(channels, channels, spectral) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.second(torch.relu(self.first(torch.relu(x))))
        return out


def _conv3(inputs: int, outputs: int, spectral: bool) -> nn.Conv2d:
    if spectral:
        return SpectralConv2d(inputs, outputs, 3, padding=1)
    return nn.Conv2d(inputs, outputs, 3, padding=1)


class Trunk(nn.Module):
    """Observations to `features` numbers each.

    Where all between `Pixels` and the flattened features are convolutions with ReLUs, kernels may
    compute them in one go; `layers` one by one give the same up to rounding.
    """

    def __init__(
        self, layers: list[nn.Module], features: int, hidden_units: int, plain: bool = False
    ) -> None:
        """`plain` says that the layers are Pixels, convolutions with ReLUs, and Flatten."""
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.features, self.hidden_units = features, hidden_units
        self.convs = [layer for layer in layers if plain and isinstance(layer, nn.Conv2d)]

    def forward(self, x: Tensor) -> Tensor:
        pixels = self.layers[0]
        if self.convs and isinstance(pixels, Pixels):
            return pixels.through(x, self.convs)
        out: Tensor = self.layers(x)
        return out


def network_for(spec: EnvSpec, config: DQNConfig) -> tuple[Network, Image | None, int]:
    """The kind of network, the image that it sees (None: a vector) and frames per stack; or a
    sentence that says what does not fit."""
    space, network = spec.observation_space, config.network
    image = image_of(space)
    shape = space.shape
    if image is None and (shape is None or len(shape) != 1 or space.dtype.kind not in "fiub"):  # type: ignore[union-attr]
        raise ConfigError(
            f"dqn takes an image or one vector as observation, but that of {spec.task} is {space}."
        )
    if isinstance(network, AutoNetwork):
        if image is None:
            network = Mlp()
        else:
            network = MinAtar() if min(image.height, image.width) < SMALL else Nature()
    if (image is None) != isinstance(network, Mlp):
        fits = "mlp" if image is None else "nature, impala or minatar"
        raise ConfigError(
            f"agent.network is {network.kind}, but {spec.task} shows "
            f"{'a vector' if image is None else 'images'}: use {fits}, or auto."
        )
    if image is None:
        if config.frames is not None:
            raise ConfigError(
                f"agent.frames is {config.frames}, but must be left out: {spec.task} shows no "
                "images."
            )
        return network, None, 1
    if isinstance(network, Nature):
        layers = tuple(zip(network.kernels, network.strides, strict=True))
        if min(map(min, sides(image.height, image.width, layers))) < 1:
            raise ConfigError(
                f"The convolutions of agent.network nature leave nothing of the images of "
                f"{spec.task}, {image.height} x {image.width} pixels: use minatar or impala, or "
                "smaller kernels and strides."
            )
    if isinstance(network, MinAtar) and min(image.height, image.width) < 3:
        raise ConfigError(
            f"The images of {spec.task} are smaller than the kernel of agent.network minatar, 3."
        )
    frames = config.frames or (FRAMES if image.picture else 1)
    return network, image, frames


def make_trunk(network: Network, image: Image | None, frames: int, vector: int) -> Trunk:
    """The layers before the last hidden one."""
    if isinstance(network, Mlp):
        sizes = (vector, *network.layers)
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(sizes):
            layers += [nn.Linear(inputs, outputs), nn.ReLU(inplace=True)]
        return Trunk(layers or [nn.Identity()], sizes[-1], network.hidden_units)
    assert image is not None
    inputs = image.channels * frames
    layers = [Pixels(image, frames)]
    height, width = image.height, image.width
    if isinstance(network, Impala):
        for channels in (network.width * n for n in IMPALA_CHANNELS):
            layers += [
                nn.Conv2d(inputs, channels, 3, padding=1),
                nn.MaxPool2d(3, 2, padding=1),
                *(Residual(channels, network.spectral_norm) for _ in range(2)),
            ]
            inputs = channels
            height, width = (height + 1) // 2, (width + 1) // 2
        if network.pool_cells is not None:
            layers.append(nn.AdaptiveMaxPool2d(network.pool_cells))
            height = width = network.pool_cells
        layers.append(nn.ReLU(inplace=True))
    elif isinstance(network, MinAtar):
        layers += [nn.Conv2d(inputs, network.channels, 3), nn.ReLU(inplace=True)]
        inputs, height, width = network.channels, after(height, 3, 1), after(width, 3, 1)
    else:
        stack = zip(network.channels, network.kernels, network.strides, strict=True)
        for channels, kernel, stride in stack:
            layers += [nn.Conv2d(inputs, channels, kernel, stride), nn.ReLU(inplace=True)]
            inputs = channels
            height, width = after(height, kernel, stride), after(width, kernel, stride)
    layers.append(nn.Flatten())
    plain = isinstance(network, Nature)
    return Trunk(layers, inputs * height * width, network.hidden_units, plain)


def initialise(
    network: nn.Module, outputs: list[nn.Linear], init: str, generator: torch.Generator
) -> None:
    """Draws all plain weights; noisy layers have drawn their own.

    No ReLU follows the `outputs`, so the gain that makes up for one would only inflate the first
    values: they begin as in torch7, whatever the others do.
    """
    for module in network.modules():
        if not isinstance(module, nn.Linear | nn.Conv2d):
            continue
        weight, bias = module.weight, module.bias
        assert bias is not None
        last = any(module is output for output in outputs)
        if init == "torch7" or last:
            bound = weight[0].numel() ** -0.5
            nn.init.uniform_(weight, -bound, bound, generator=generator)
            nn.init.uniform_(bias, -bound, bound, generator=generator)
        else:
            if init == "orthogonal":
                nn.init.orthogonal_(weight, math.sqrt(2), generator=generator)
            else:
                nn.init.kaiming_uniform_(weight, nonlinearity="relu", generator=generator)
            nn.init.zeros_(bias)
        if isinstance(module, SpectralConv2d):
            module.settle(generator)
