"""Observations of every kind, each key by a trunk of its own, joined into one latent.

    one vector   the paper's MLP                                                -> SimNorm -> z
    one image    convolutions, then one linear layer, so that every size fits   -> SimNorm -> z
    a Dict       a trunk per key, their ends side by side, one linear layer     -> SimNorm -> z

One linear layer on the ends side by side is the sum of one linear layer per key, in one product.
Every trunk in a Dict ends in a LayerNorm, so that no key drowns another by its scale:

    numbers      hidden layers; truth values count as 0 and 1
    Discrete     one-hot, then hidden layers
    image        convolutions and a hidden layer; in training it is moved at random
    entities     a hidden layer for each row, then mean and maximum over the rows that the mask
                 calls present, then a hidden layer
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forethought.agents.tdmpc2.config import TDMPC2Config
from forethought.agents.tdmpc2.observations import (
    Entities,
    Key,
    Numbers,
    Observations,
    OneHot,
    Picture,
)
from forethought.nets.conv import ConvNet
from forethought.nets.layers import MLP, NormedLinear
from forethought.spaces.masks import masked_mean
from forethought.spaces.nested import Tree, flatten


def make_encoder(
    observations: Observations | int, config: TDMPC2Config, task_dim: int = 0
) -> nn.Module:
    """The encoder of these observations; a number is the length of a single vector, beside which
    stands the embedding of its task, where there are several.

    It is called with observations and, in training, with `shift` [..., images, 2], by which images
    are moved; a single vector knows none.
    """
    options, size = config.model, config.model.resolved
    hidden = [size.encoder_units] * max(size.encoder_layers - 1, 1)
    vector = observations if isinstance(observations, int) else observations.vector
    if isinstance(observations, int) or vector is not None:
        return MLP(
            vector + task_dim,  # type: ignore[operator]
            hidden,
            size.latent_dim,
            "simnorm",
            simnorm_group=options.simnorm_dim,
        )
    return Encoder(observations, config, hidden)


class Encoder(nn.Module):
    """Observations as a task shows them, or their leaves by path, [..., *shape] -> z [..., Z]."""

    def __init__(self, observations: Observations, config: TDMPC2Config, hidden: list[int]) -> None:
        super().__init__()
        self.keys = observations.keys
        alone = len(self.keys) == 1
        trunks = [make_trunk(key, hidden, config.image.channels, alone) for key in self.keys]
        self.trunks = nn.ModuleList(trunks)
        self.join = NormedLinear(
            sum(trunk.features for trunk in trunks),
            config.model.resolved.latent_dim,
            "simnorm",
            simnorm_group=config.model.simnorm_dim,
        )

    def forward(self, obs: Tree, shift: Tensor | None = None) -> Tensor:
        leaves = flatten(obs)
        offsets = iter(() if shift is None else shift.unbind(-2))  # in the order of their keys
        dtype = self.join.weight.dtype
        ends = []
        for key, trunk in zip(self.keys, self.trunks, strict=True):
            x = leaves[key.path]
            match key:
                case Picture(pad=pad):
                    ends.append(trunk(x, dtype, next(offsets, None) if pad else None))
                case Entities():
                    ends.append(trunk(x, dtype, leaves[key.mask]))
                case _:
                    ends.append(trunk(x, dtype))
        return self.join(ends[0] if len(ends) == 1 else torch.cat(ends, dim=-1))  # type: ignore[no-any-return]


class Trunk(nn.Module):
    """What encodes one key, to [..., features], in the type of the weights."""

    features: int


def flat(x: Tensor, axes: int) -> Tensor:
    """The last `axes` axes as one."""
    return x.reshape(*x.shape[: x.ndim - axes], -1)


def make_trunk(key: Key, hidden: list[int], channels: int, alone: bool) -> Trunk:
    """`hidden` are the units of its hidden layers; an image that is alone goes without."""
    match key:
        case Numbers():
            return NumbersTrunk(key, hidden)
        case OneHot():
            return OneHotTrunk(key, hidden)
        case Picture():
            return PictureTrunk(key, channels, None if alone else hidden[-1])
        case Entities():
            return EntitiesTrunk(key, hidden[-1])


def hidden_layers(inputs: int, units: list[int]) -> MLP:
    """Linear, LayerNorm and Mish for each number of units."""
    return MLP(inputs, units[:-1], units[-1], "mish")


def size_of(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


class NumbersTrunk(Trunk):
    """[..., *shape] -> [..., H]."""

    def __init__(self, key: Numbers, hidden: list[int]) -> None:
        super().__init__()
        self.axes, self.features = len(key.shape), hidden[-1]
        self.layers = hidden_layers(size_of(key.shape), hidden)

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return self.layers(flat(x, self.axes).to(dtype))  # type: ignore[no-any-return]


class OneHotTrunk(Trunk):
    """Whole numbers [..., *shape] -> [..., H]."""

    def __init__(self, key: OneHot, hidden: list[int]) -> None:
        super().__init__()
        self.key, self.features = key, hidden[-1]
        self.layers = hidden_layers(sum(key.counts), hidden)

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        choices = flat(x, len(self.key.shape)).unbind(-1)
        parts = zip(choices, self.key.starts, self.key.counts, strict=True)
        ones = torch.cat([F.one_hot(choice - start, n) for choice, start, n in parts], dim=-1)
        return self.layers(ones.to(dtype))  # type: ignore[no-any-return]


class PictureTrunk(Trunk):
    """Images [..., *axes] or stacks of them [..., F, *axes], and offsets [..., 2] -> [..., D].

    All images of a batch, over time and over slices, go through the convolutions in one call.
    """

    def __init__(self, key: Picture, channels: int, units: int | None) -> None:
        super().__init__()
        self.key = key
        self.conv = ConvNet(key.layout, key.frames, channels, key.layers, key.pad)
        self.hidden = None if units is None else hidden_layers(self.conv.features, [units])
        self.features = units or self.conv.features

    def forward(self, x: Tensor, dtype: torch.dtype, offset: Tensor | None) -> Tensor:
        axes = self.key.axes + (self.key.frames > 1)
        lead = x.shape[: x.ndim - axes]
        if self.key.axes == 2:
            x = x.unsqueeze(-1)  # one channel
        frames = x.reshape(-1, self.key.frames, *x.shape[-3:])  # [N, F, H, W, C] or [N, F, C, H, W]
        y = self.conv(frames, None if offset is None else offset.reshape(-1, 2), dtype)
        y = y.reshape(*lead, -1)
        return y if self.hidden is None else self.hidden(y)  # type: ignore[no-any-return]


class EntitiesTrunk(Trunk):
    """Rows [..., N, *shape], their mask [..., N] -> [..., H]; no row present counts as zeros."""

    def __init__(self, key: Entities, units: int) -> None:
        super().__init__()
        self.axes, self.features = len(key.shape) - 1, units
        self.each = hidden_layers(size_of(key.shape[1:]), [units])
        self.all = hidden_layers(2 * units, [units])

    def forward(self, x: Tensor, dtype: torch.dtype, mask: Tensor) -> Tensor:
        absent = (mask == 0).unsqueeze(-1)  # [..., N, 1]
        # Emptied before, not only after: what stands in an absent row may be any number at all.
        rows = self.each(flat(x, self.axes).to(dtype).masked_fill(absent, 0.0))  # [..., N, H]
        highest = rows.masked_fill(absent, -torch.inf).amax(-2)  # [..., H]
        highest = highest.masked_fill(absent.all(-2), 0.0)
        pooled = torch.cat([masked_mean(rows, mask), highest], dim=-1)
        return self.all(pooled)  # type: ignore[no-any-return]
