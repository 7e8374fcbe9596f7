"""Images to features by convolutions with a ReLU behind each, in the C of `convolutions.c`.

Image by image through all layers, and back, in float32 on a CPU. torch convolves layer by layer,
and between two layers of a batch the values leave the processor's cache.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from forethought.nets.images import FrameLayout


def after(side: int, kernel: int, stride: int) -> int:
    """The length of a side behind a layer without padding; below 1 where the kernel is longer."""
    return (side - kernel) // stride + 1


def layer_by_layer(x: Tensor, convs: Sequence[nn.Conv2d]) -> Tensor:
    """The reference, on every device and dtype: [B, C, H, W] -> [B, D]."""
    for conv in convs:
        x = F.relu(conv(x), inplace=True)
    return x.flatten(1)


class LayerShape(ctypes.Structure):
    """`Layer` of convolutions.c."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in (
            *("height", "width", "channels", "kernel", "stride"),
            *("rows", "columns", "outputs"),
        )
    )


class Images(ctypes.Structure):
    """`Images` of convolutions.c."""

    _fields_ = (
        ("floats", ctypes.c_void_p),
        ("bytes", ctypes.c_void_p),
        ("next_stack", ctypes.c_int64),
        ("next_frame", ctypes.c_int64),
        ("scale", ctypes.c_float),
    )

    @classmethod
    def of_floats(cls, x: Tensor) -> Images:
        """Values with their channels together: x [B, H, W, C], contiguous."""
        return cls(x.data_ptr(), None, 0, 0, 0.0)

    @classmethod
    def of_bytes(cls, frames: Tensor, layout: FrameLayout) -> Images | None:
        """Stacks [B, F, ...] of grey frames that are whole and begin at 0; None for others."""
        one_byte = frames.dtype in (torch.uint8, torch.bool)
        grey_ones = layout.channels == 1 and frames.shape[2:] == layout.shape
        if layout.bias != 0 or not one_byte or not grey_ones:
            return None
        grey = frames.select(-1 if layout.channels_last else 2, 0)  # [B, F, H, W]
        if grey.stride()[2:] != (layout.width, 1):
            return None
        return cls(None, grey.data_ptr(), *grey.stride()[:2], layout.scale)


def declare(library: ctypes.CDLL) -> None:
    """The types of the C functions."""
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    library.stack_fits.argtypes = [pointer, size]
    library.stack_forward.argtypes = [pointer, size, *[pointer] * 6, size]
    library.stack_backward.argtypes = [pointer, size, *[pointer] * 8, *[size] * 2]
    for function in (library.stack_fits, library.stack_forward, library.stack_backward):
        function.restype = size


def stack_of(
    library: ctypes.CDLL, image: tuple[int, int, int], convs: Sequence[nn.Conv2d]
) -> Any | None:
    """The shapes of the layers (an array of LayerShape) over images of these channels, this height
    and width; None where C cannot compute them."""
    layers = tuple(
        (conv.in_channels, conv.out_channels, *conv.kernel_size, *conv.stride)
        for conv in convs
        if conv.padding == (0, 0) and conv.dilation == (1, 1) and conv.groups == 1
        if conv.weight.shape == (conv.out_channels, conv.in_channels, *conv.kernel_size)
        if conv.bias is not None and conv.bias.shape == conv.weight.shape[:1]
        if all(t.is_cpu and t.dtype is torch.float32 for t in (conv.weight, conv.bias))
    )
    return _stack(library, image, layers) if len(layers) == len(convs) else None


@lru_cache(maxsize=64)
def _stack(
    library: ctypes.CDLL, image: tuple[int, int, int], layers: tuple[tuple[int, ...], ...]
) -> Any | None:
    (channels, height, width), shapes = image, []
    for inputs, outputs, kernel, kernel_across, stride, stride_across in layers:
        if (inputs, kernel, stride) != (channels, kernel_across, stride_across):
            return None
        rows, columns = after(height, kernel, stride), after(width, kernel, stride)
        shapes.append(LayerShape(height, width, channels, kernel, stride, rows, columns, outputs))
        height, width, channels = rows, columns, outputs
    stack = (LayerShape * len(shapes))(*shapes)
    return stack if library.stack_fits(stack, len(shapes)) else None


def convolved(library: ctypes.CDLL, stack: Any, x: Tensor, convs: Sequence[nn.Conv2d]) -> Tensor:
    """What `layer_by_layer` gives of x [B, C, H, W], up to rounding."""
    x = x.permute(0, 2, 3, 1).contiguous()  # as it comes from `prepared` nothing is copied
    return _features(library, stack, x, None, convs)


def convolved_bytes(
    library: ctypes.CDLL,
    stack: Any,
    frames: Tensor,
    layout: FrameLayout,
    convs: Sequence[nn.Conv2d],
) -> Tensor:
    """The same of frames that `Images.of_bytes` takes; they become numbers one by one.

    To learn from them they are kept as they are, not as a copy: whoever changes them before the
    gradient is found changes it, or is stopped by torch.
    """
    return _features(library, stack, frames, layout, convs)


def _features(
    library: ctypes.CDLL,
    stack: Any,
    x: Tensor,
    layout: FrameLayout | None,
    convs: Sequence[nn.Conv2d],
) -> Tensor:
    weights, biases = [conv.weight for conv in convs], [conv.bias for conv in convs]
    learned = any(p is not None and p.requires_grad for p in (*weights, *biases))
    if torch.is_grad_enabled() and learned:
        features: Tensor = _Convolutions.apply(library, stack, x, layout, *weights, *biases)  # type: ignore[no-untyped-call]
        return features
    return _forward(library, stack, x, layout, weights, biases, None)


def _images(x: Tensor, layout: FrameLayout | None) -> Images:
    images = Images.of_floats(x) if layout is None else Images.of_bytes(x, layout)
    assert images is not None  # the caller has asked
    return images


def _pointers(tensors: Sequence[Tensor]) -> Any:
    return (ctypes.c_void_p * len(tensors))(*[x.data_ptr() for x in tensors])


def _forward(
    library: ctypes.CDLL,
    stack: Any,
    x: Tensor,
    layout: FrameLayout | None,
    weights: Sequence[Tensor],
    biases: Sequence[Any],
    given: Sequence[Tensor] | None,
) -> Tensor:
    """Features [B, D]; `given` takes what each layer gave [B, rows, columns, outputs]."""
    weights, biases = ([p.contiguous() for p in each] for each in (weights, biases))
    last, new = stack[-1], weights[0].new_empty
    packed = new(sum(weight.numel() for weight in weights))
    features = new(len(x), last.rows * last.columns * last.outputs)
    failed = library.stack_forward(
        stack, len(stack), ctypes.byref(_images(x, layout)), _pointers(weights), _pointers(biases),
        packed.data_ptr(), None if given is None else _pointers(given), features.data_ptr(), len(x),
    )  # fmt: skip
    _require_memory(failed)
    return features


def _require_memory(failed: int) -> None:
    if failed:
        raise MemoryError("There is no memory for convolutions; close other programs.")


class _Convolutions(torch.autograd.Function):
    """Images are data: no gradient goes into them."""

    @staticmethod
    def forward(
        ctx: Any,
        library: ctypes.CDLL,
        stack: Any,
        x: Tensor,
        layout: FrameLayout | None,
        *parameters: Any,
    ) -> Tensor:
        weights, biases = parameters[: len(stack)], parameters[len(stack) :]
        new = weights[0].new_empty
        given = [new(len(x), own.rows, own.columns, own.outputs) for own in stack]
        features = _forward(library, stack, x, layout, weights, biases, given)
        ctx.library, ctx.stack, ctx.layout = library, stack, layout
        ctx.save_for_backward(x, *given, *weights)
        return features

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        stack = ctx.stack
        x, *rest = ctx.saved_tensors
        given, weights = rest[: len(stack)], [w.contiguous() for w in rest[len(stack) :]]
        slope, parts = grads[0].contiguous(), torch.get_num_threads()
        new = weights[0].new_empty
        dw = [torch.empty_like(weight) for weight in weights]
        db = [new(own.outputs) for own in stack]
        numbers = sum(weight.numel() for weight in weights)
        packed, sums = new(numbers), new(parts, numbers + sum(own.outputs for own in stack))
        failed = ctx.library.stack_backward(
            stack, len(stack), ctypes.byref(_images(x, ctx.layout)), _pointers(weights),
            _pointers(given), slope.data_ptr(), packed.data_ptr(), sums.data_ptr(), _pointers(dw),
            _pointers(db), len(x), parts,
        )  # fmt: skip
        _require_memory(failed)
        return None, None, None, None, *dw, *db
