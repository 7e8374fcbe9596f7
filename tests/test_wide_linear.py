"""A linear layer with many weights in C: the same as torch's, up to rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forethought.nets.kernels import NativeKernels, TorchKernels
from forethought.nets.wide_linear import MANY_WEIGHTS, fits
from tests.test_convolutions import library

__all__ = ["library"]


def made(outputs: int = 512, inputs: int = 3136) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs)


def with_bias(bias: Tensor) -> nn.Linear:
    layer = made()
    layer.bias = nn.Parameter(bias)
    return layer


def rows(library: Any, layer: nn.Linear) -> int:
    """As many as C takes at a time, on this width of registers."""
    (count,) = [n for n in (16, 32) if fits(library, torch.zeros(n, layer.in_features), layer)]
    return count


def both(library: Any, layer: nn.Linear, x: Tensor) -> list[list[Tensor]]:
    """Output and gradients of C, and of torch in double precision."""
    found = []
    for kernels, dtype in ((NativeKernels(library), torch.float32), (TorchKernels(), torch.double)):
        own = nn.Linear(layer.in_features, layer.out_features, dtype=dtype)
        own.load_state_dict(layer.state_dict())
        given = x.detach().clone().to(dtype).requires_grad_()
        y = kernels.linear(given, own)
        slope = torch.linspace(-1, 1, y.numel(), dtype=dtype).view_as(y)
        y.backward(slope)  # type: ignore[no-untyped-call]
        gradients = (given.grad, own.weight.grad, own.bias.grad)
        found.append([y.detach(), *(g for g in gradients if g is not None)])
    return found


@pytest.mark.parametrize("shape", [(512, 3136), (64, 4096), (1024, 288)])
def test_output_and_gradients_are_those_of_torch(library: Any, shape: tuple[int, int]) -> None:
    layer = made(*shape)
    x = torch.randn(rows(library, layer), shape[1], generator=torch.Generator().manual_seed(1))
    ours, wanted = both(library, layer, x)
    assert len(ours) == len(wanted) == 4
    for a, b in zip(ours, wanted, strict=True):
        assert a.shape == b.shape
        assert float((a - b).abs().max()) <= 1e-5 * float(b.abs().max())


def test_without_a_gradient_the_output_is_the_same_bits(library: Any) -> None:
    layer, kernels = made(), NativeKernels(library)
    x = torch.randn(rows(library, layer), 3136)
    learning = kernels.linear(x, layer)
    with torch.no_grad():
        assert torch.equal(kernels.linear(x, layer), learning)
    assert learning.requires_grad


@pytest.mark.parametrize("frozen", ["x", "weight", "bias"])
def test_what_is_frozen_has_no_gradient_and_the_rest_has(library: Any, frozen: str) -> None:
    layer = made()
    x = torch.randn(rows(library, layer), 3136, requires_grad=True)
    parts = {"x": x, "weight": layer.weight, "bias": layer.bias}
    parts[frozen].requires_grad_(False)
    NativeKernels(library).linear(x, layer).sum().backward()  # type: ignore[no-untyped-call]
    assert {name for name, part in parts.items() if part.grad is None} == {frozen}


def test_the_output_may_be_changed_in_place(library: Any) -> None:
    """As torch's may: the network behind it need not know who computed it."""
    layer = made()
    x = torch.randn(rows(library, layer), 3136)
    y = NativeKernels(library).linear(x, layer).relu_()
    y.sum().backward()  # type: ignore[no-untyped-call]
    assert layer.weight.grad is not None and y.min() == 0


def test_what_is_not_a_number_stays_so(library: Any) -> None:
    layer = made()
    x = torch.randn(rows(library, layer), 3136)
    x[3, 7] = torch.nan
    y = NativeKernels(library).linear(x, layer)
    assert y[3].isnan().all() and y[:3].isfinite().all()


def test_rows_and_weights_that_lie_otherwise_are_read_right(library: Any) -> None:
    layer, kernels = made(), NativeKernels(library)
    x = torch.randn(rows(library, layer), 3136)
    with torch.no_grad():
        wanted = kernels.linear(x, layer)
        layer.weight = nn.Parameter(layer.weight.t().contiguous().t())
        assert torch.equal(kernels.linear(x.t().contiguous().t(), layer), wanted)


def test_other_sizes_and_types_are_left_to_torch(library: Any) -> None:
    layer = made()
    count = rows(library, layer)
    x = torch.zeros(count, 3136)
    assert fits(library, x, layer)
    few = made(64, 512)
    assert few.weight.numel() < MANY_WEIGHTS
    for other, given in (
        (layer, x[:-1]),
        (layer, torch.zeros(2 * count, 3136)),
        (layer, torch.zeros(count, 1, 3136)),
        (layer, torch.zeros(count, 3100)),
        (layer, x.double()),
        (made().double(), x.double()),
        (few, torch.zeros(count, 512)),
        (made(511), x),
        (made(512, 3137), torch.zeros(count, 3137)),
        (made(512, 3144), torch.zeros(count, 3144)),  # a multiple of 8, not of 16
        (nn.Linear(3136, 512, bias=False), x),
        (with_bias(torch.zeros(512, dtype=torch.double)), x),
        (with_bias(torch.zeros(3)), x),
    ):
        assert not fits(library, given, other)
    with torch.autocast("cpu", torch.bfloat16):
        assert not fits(library, x, layer)
    y = NativeKernels(library).linear(x[:-1], layer)
    assert torch.equal(y, layer(x[:-1]))
