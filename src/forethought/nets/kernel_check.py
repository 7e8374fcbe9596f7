"""Are the C kernels of a machine right? Each of them beside plain tensor operations, on small
inputs that nothing cancels in, forwards and backwards."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from forethought.maths import TwoHot
from forethought.nets.images import FrameLayout
from forethought.nets.kernels import Kernels, TorchKernels

TOLERANCE = 1e-4
"""Of a result, relative to its greatest value: a hundred times what rounding makes of it."""


def wrong_ones(kernels: Kernels) -> dict[str, float]:
    """Results and gradients that are not those of tensor operations, and how far off they are."""
    pairs = zip(_results(kernels), _results(TorchKernels()), strict=True)
    gaps = {
        name: float((found - right).abs().max() / right.abs().max())
        for (name, found), (_, right) in pairs
    }
    return {name: gap for name, gap in gaps.items() if not gap < TOLERANCE}  # NaN is wrong, too


def _results(kernels: Kernels) -> Iterator[tuple[str, Tensor]]:
    rng = torch.Generator().manual_seed(1)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng).requires_grad_()

    def with_slopes(name: str, y: Tensor, **inputs: Tensor) -> Iterator[tuple[str, Tensor]]:
        yield name, y.detach()
        slopes = torch.autograd.grad(y, list(inputs.values()), numbers(*y.shape))
        yield from zip((f"{name}, gradient of {of}" for of in inputs), slopes, strict=True)

    x, pre, weight, bias = numbers(6, 32), numbers(32), numbers(32), numbers(32)
    own = {"x": x, "pre": pre, "weight": weight, "bias": bias}
    keep = torch.rand(6, 32, generator=rng) > 0.2
    yield from with_slopes("mish", kernels.norm_mish(x, pre, weight, bias, keep, 1.25), **own)
    yield from with_slopes("simnorm", kernels.norm_simnorm(x, pre, weight, bias, 8), **own)
    with torch.no_grad():  # where what is given may be overwritten
        mish = kernels.norm_mish(x.clone(), pre, weight, bias)
        simnorm = kernels.norm_simnorm(x.clone(), pre, weight, bias, 8)
        decoded = kernels.decode(numbers(6, 101), TwoHot())
    yield from (("mish in acting", mish), ("simnorm in acting", simnorm), ("decoding", decoded))

    frames = torch.randint(0, 256, (2, 4, 30, 30, 1), generator=rng, dtype=torch.uint8)
    grey, offset = FrameLayout(30, 30, 1, True, least=0.0), torch.tensor([[0, 3], [5, 6]])
    yield "images", kernels.images(frames, grey, offset, 3, torch.float32)
    yield "images in their place", kernels.images(frames, grey, None, 0, torch.float32)

    convs = [nn.Conv2d(4, 32, 4, 2), nn.Conv2d(32, 64, 4, 2)]
    wide = nn.Linear(1024, 256)
    for learned in (p for layer in (*convs, wide) for p in layer.parameters()):
        learned.data.copy_(0.05 * numbers(*learned.shape))
    layers = {
        f"{name} {number}": getattr(conv, name)
        for number, conv in enumerate(convs, 1)
        for name in ("weight", "bias")
    }
    features = kernels.features(frames, grey, convs, torch.float32)
    yield from with_slopes("convolutions", features, **layers)
    features = kernels.features(frames.float(), grey, convs, torch.float32)
    yield from with_slopes("convolutions of floats", features, **layers)
    for rows in (16, 32):  # one of them is C's
        x = numbers(rows, 1024)
        own = {"x": x, "weight": wide.weight, "bias": wide.bias}
        yield from with_slopes(f"wide layer of {rows} rows", kernels.linear(x, wide), **own)
