"""Convolutions with a ReLU behind each, from images to features, by the C of `convolutions.c`.

Image by image through all layers, and back, on float32 tensors of a CPU. torch convolves layer by
layer, and between two layers of a batch the values leave the processor's cache.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def after(side: int, kernel: int, stride: int) -> int:
    """The length of a side behind a layer without padding; below 1 where the kernel is longer."""
    return (side - kernel) // stride + 1


class LayerShape(ctypes.Structure):
    """`Layer` of convolutions.c."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in (
            *("height", "width", "channels", "kernel", "stride"),
            *("rows", "columns", "outputs"),
        )
    )


def layer_by_layer(x: Tensor, convs: Sequence[nn.Conv2d]) -> Tensor:
    """The reference, on every device and dtype: [B, C, H, W] -> [B, D]."""
    for conv in convs:
        x = F.relu(conv(x), inplace=True)
    return x.flatten(1)


def declare(library: ctypes.CDLL) -> None:
    """The types of the C functions."""
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    library.stack_fits.argtypes, library.stack_fits.restype = [pointer, size], size
    library.stack_pack_forward.argtypes = [pointer] * 3
    library.stack_pack_backward.argtypes = [pointer] * 3
    library.stack_forward.argtypes = [pointer, size, *[pointer] * 5, size]
    library.stack_forward.restype = size
    library.stack_backward.argtypes = [pointer, size, *[pointer] * 6, *[size] * 2]
    library.stack_backward.restype = size
    library.stack_unpack.argtypes = [pointer, pointer, size, pointer]


def stack_of(library: ctypes.CDLL, x: Tensor, convs: Sequence[nn.Conv2d]) -> Any:
    """The shapes of the layers where C can compute them (an array of LayerShape), else None."""
    plain = all(
        conv.padding == (0, 0)
        and conv.dilation == (1, 1)
        and conv.groups == 1
        and conv.bias is not None
        and conv.kernel_size[0] == conv.kernel_size[1]
        and conv.stride[0] == conv.stride[1]
        for conv in convs
    )
    if not plain:
        return None
    layers = tuple((conv.out_channels, conv.kernel_size[0], conv.stride[0]) for conv in convs)
    return _stack(library, (x.shape[2], x.shape[3], x.shape[1]), layers)


@lru_cache(maxsize=64)
def _stack(
    library: ctypes.CDLL, image: tuple[int, int, int], layers: tuple[tuple[int, int, int], ...]
) -> Any:
    height, width, channels = image
    shapes = []
    for outputs, kernel, stride in layers:
        rows, columns = after(height, kernel, stride), after(width, kernel, stride)
        shapes.append(LayerShape(height, width, channels, kernel, stride, rows, columns, outputs))
        height, width, channels = rows, columns, outputs
    stack = (LayerShape * len(shapes))(*shapes)
    return stack if library.stack_fits(stack, len(shapes)) else None


def convolved(library: ctypes.CDLL, stack: Any, x: Tensor, convs: Sequence[nn.Conv2d]) -> Tensor:
    """What `layer_by_layer` gives, up to rounding."""
    parameters = [p for conv in convs for p in (conv.weight, conv.bias)]
    if torch.is_grad_enabled() and any(p is not None and p.requires_grad for p in parameters):
        features: Tensor = _Convolutions.apply(library, stack, x, *parameters)  # type: ignore[no-untyped-call]
        return features
    return _forward(library, stack, _channels_together(x), parameters, None)


def _channels_together(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1).contiguous()  # as it comes from Pixels nothing is copied


def _pointers(tensors: Sequence[Tensor]) -> Any:
    return (ctypes.c_void_p * len(tensors))(*(x.data_ptr() for x in tensors))


def _forward(
    library: ctypes.CDLL,
    stack: Any,
    x: Tensor,
    parameters: Sequence[Any],
    given: Sequence[Tensor] | None,
) -> Tensor:
    """Features [B, D]; `given` takes what each layer gave [B, rows, columns, outputs]."""
    weights, biases = ([p.contiguous() for p in parameters[i::2]] for i in range(2))
    packed = [torch.empty_like(weight) for weight in weights]
    for layer, weight, room in zip(stack, weights, packed):
        library.stack_pack_forward(ctypes.byref(layer), weight.data_ptr(), room.data_ptr())
    last = stack[-1]
    features = x.new_empty(len(x), last.rows * last.columns * last.outputs)
    failed = library.stack_forward(
        stack, len(stack), x.data_ptr(), _pointers(packed), _pointers(biases),
        None if given is None else _pointers(given), features.data_ptr(), len(x),
    )  # fmt: skip
    return _unless(failed, features)


def _unless(failed: int, found: Tensor) -> Tensor:
    if failed:
        raise MemoryError("There is no memory for convolutions; close other programs.")
    return found


class _Convolutions(torch.autograd.Function):
    """Images are data: no gradient goes into them."""

    @staticmethod
    def forward(ctx: Any, library: ctypes.CDLL, stack: Any, x: Tensor, *parameters: Any) -> Tensor:
        x = _channels_together(x)
        given = [x.new_empty(len(x), own.rows, own.columns, own.outputs) for own in stack]
        features = _forward(library, stack, x, parameters, given)
        ctx.library, ctx.stack = library, stack
        ctx.save_for_backward(x, *given, *parameters[::2])
        return features

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        library, stack = ctx.library, ctx.stack
        x, *rest = ctx.saved_tensors
        given, weights = rest[: len(stack)], rest[len(stack) :]
        parts = torch.get_num_threads()
        weights = [weight.contiguous() for weight in weights]
        packed = [torch.empty_like(weight) for weight in weights]
        for layer, weight, room in zip(stack, weights, packed):
            library.stack_pack_backward(ctypes.byref(layer), weight.data_ptr(), room.data_ptr())
        dw = [w.new_zeros(parts, w.numel()) for w in weights]
        db = [w.new_zeros(parts, len(w)) for w in weights]
        slope = grads[0].contiguous()
        failed = library.stack_backward(
            stack, len(stack), x.data_ptr(), _pointers(packed), _pointers(given),
            slope.data_ptr(), _pointers(dw), _pointers(db), len(x), parts,
        )  # fmt: skip
        _unless(failed, slope)
        found: list[Tensor | None] = []
        for layer, weight, part, bias in zip(stack, weights, dw, db):
            gradient = torch.empty_like(weight)
            library.stack_unpack(ctypes.byref(layer), part.data_ptr(), parts, gradient.data_ptr())
            found += [gradient, bias.sum(0)]
        return None, None, None, *found
