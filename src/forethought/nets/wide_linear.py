"""A linear layer with many weights and few rows, in the C of `wide_linear.c`.

Such a layer is bound by the memory that its weights lie in, and a general product of matrices reads
them in an order that suits small ones.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

MANY_WEIGHTS = 2**18
"""A megabyte; with fewer, the general product is as fast."""


def declare(library: ctypes.CDLL) -> None:
    """The types of the C functions."""
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    library.wide_fits.argtypes, library.wide_fits.restype = [size] * 3, size
    library.wide_forward.argtypes = [*[pointer] * 4, *[size] * 2]
    library.wide_inputs.argtypes = [*[pointer] * 3, *[size] * 2]
    library.wide_weights.argtypes = [*[pointer] * 4, *[size] * 2]


def fits(library: ctypes.CDLL, x: Tensor, layer: nn.Linear) -> bool:
    """Whether C is made for x [B, K] and the layer."""
    weight, bias = layer.weight, layer.bias
    return (
        bias is not None
        and all(t.is_cpu and t.dtype is torch.float32 for t in (x, weight, bias))
        and bias.shape == weight.shape[:1]
        and x.ndim == 2
        and x.shape[1] == weight.shape[1]
        and weight.numel() >= MANY_WEIGHTS
        and not torch.is_autocast_enabled("cpu")
        and bool(library.wide_fits(*weight.shape, len(x)))
    )


def wide_linear(library: ctypes.CDLL, x: Tensor, layer: nn.Linear) -> Tensor:
    """x W^T + b, where `fits` says so."""
    given = x, layer.weight, layer.bias
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        y: Tensor = _WideLinear.apply(library, *given)  # type: ignore[no-untyped-call]
        return y
    return _forward(library, *given)


def _forward(library: ctypes.CDLL, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    weight, bias, across = weight.contiguous(), bias.contiguous(), x.t().contiguous()
    (n, k), y = weight.shape, weight.new_empty(len(weight), len(x))
    library.wide_forward(weight.data_ptr(), bias.data_ptr(), across.data_ptr(), y.data_ptr(), n, k)
    # A copy of a few kilobytes, for torch lets nobody change a view that such a function returns.
    return y.t().contiguous()


class _WideLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, library: ctypes.CDLL, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.library = library
        ctx.save_for_backward(x, weight)
        return _forward(library, x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = (t.contiguous() for t in ctx.saved_tensors)
        across = grads[0].t().contiguous()
        (n, k), dx, dw, db = weight.shape, None, None, None
        if ctx.needs_input_grad[1]:
            found = weight.new_empty(k, len(x))
            ctx.library.wide_inputs(weight.data_ptr(), across.data_ptr(), found.data_ptr(), n, k)
            dx = found.t()
        if any(ctx.needs_input_grad[2:]):
            dw, db = torch.empty_like(weight), weight.new_empty(n)
            ctx.library.wide_weights(
                across.data_ptr(), x.data_ptr(), dw.data_ptr(), db.data_ptr(), n, k
            )
        return None, dx, dw, db
