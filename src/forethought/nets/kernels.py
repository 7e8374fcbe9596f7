"""The activations of TD-MPC2's layers, each fused with the LayerNorm in front of it.

`norm_mish(x) = mish(LN(x))` and `norm_simnorm(x) = softmax over groups of 8 of LN(x)`; beside
them `decode`, which turns two-hot logits into numbers, `images`, which turns bytes into what a
convolution takes, `features`, convolutions of these with ReLUs, and `linear`, a layer with many
weights.

Mish costs more than half of the matrix product before it when PyTorch computes it on a CPU, and a
softmax over groups of eight three times as much as that product. Two remedies, with the same
results up to rounding:

- `TorchKernels`: tensor operations, on every device and dtype, with Mish in its algebraic form
  x - 2 x / ((e^x + 1)^2 + 1): one exponential, four passes. For x << 0, where Mish is next to
  nothing, its terms cancel; the error stays as small as that of PyTorch's own (1e-6).
- `NativeKernels`: the C functions of `kernels.c` and the other C files, for float32 on a CPU, built
  once by the machine's C compiler and cached. Whatever they cannot take goes to `TorchKernels`.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forethought import files
from forethought.maths import TwoHot
from forethought.nets import wide_linear
from forethought.nets.cache import user_cache
from forethought.nets.convolutions import (
    Images,
    convolved,
    convolved_bytes,
    declare,
    layer_by_layer,
    stack_of,
)
from forethought.nets.images import FrameLayout, prepared

EPS = 1e-5  # LayerNorm's, also in kernels.c
FLAGS = ("-O3", "-march=native", "-ffast-math", "-fno-finite-math-only", "-fopenmp", "-fPIC")
"""For the C compiler; what is not a number stays so."""


class Kernels(Protocol):
    """What a layer needs after its matrix product x.

    `pre` is the layer's bias, where it has not been added yet; `keep` marks the units that dropout
    leaves, `scale` is 1 / (1 - p). Where no gradient
    is asked for, x may be overwritten by the result.
    """

    adds_bias: bool
    """Whether it is faster to leave the bias to the kernel."""

    def norm_mish(
        self,
        x: Tensor,
        pre: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        keep: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor: ...

    def norm_simnorm(
        self, x: Tensor, pre: Tensor | None, weight: Tensor, bias: Tensor, group: int
    ) -> Tensor: ...

    def decode(self, logits: Tensor, two_hot: TwoHot) -> Tensor: ...

    def images(
        self,
        frames: Tensor,
        layout: FrameLayout,
        offset: Tensor | None,
        pad: int,
        dtype: torch.dtype,
    ) -> Tensor: ...

    def features(
        self, frames: Tensor, layout: FrameLayout, convs: Sequence[nn.Conv2d], dtype: torch.dtype
    ) -> Tensor:
        """`images`, which are data, through convolutions with a ReLU behind each: [B, D]."""
        ...

    def linear(self, x: Tensor, layer: nn.Linear) -> Tensor: ...


class TorchKernels:
    """Plain tensor operations: the reference, and the fallback."""

    adds_bias = False

    def norm_mish(
        self,
        x: Tensor,
        pre: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        keep: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        x = x if pre is None else x + pre
        x = x if keep is None else x * keep * scale
        h = F.layer_norm(x, weight.shape, weight, bias, EPS)
        return _Mish.apply(h) if h.requires_grad else _mish(h)  # type: ignore[no-untyped-call]

    def norm_simnorm(
        self, x: Tensor, pre: Tensor | None, weight: Tensor, bias: Tensor, group: int
    ) -> Tensor:
        h = F.layer_norm(x if pre is None else x + pre, weight.shape, weight, bias, EPS)
        return torch.softmax(h.view(*h.shape[:-1], -1, group), dim=-1).flatten(-2)

    def decode(self, logits: Tensor, two_hot: TwoHot) -> Tensor:
        return two_hot.decode(logits)

    def images(
        self,
        frames: Tensor,
        layout: FrameLayout,
        offset: Tensor | None,
        pad: int,
        dtype: torch.dtype,
    ) -> Tensor:
        return prepared(frames, layout, offset, pad, dtype)

    def features(
        self, frames: Tensor, layout: FrameLayout, convs: Sequence[nn.Conv2d], dtype: torch.dtype
    ) -> Tensor:
        return layer_by_layer(self.images(frames, layout, None, 0, dtype), convs)

    def linear(self, x: Tensor, layer: nn.Linear) -> Tensor:
        y: Tensor = layer(x)
        return y


def _mish(h: Tensor) -> Tensor:
    """h - 2 h / d with d = (e^h + 1)^2 + 1. A large h needs no clamp: an infinite d leaves h."""
    d = h.exp().add_(1).square_().add_(1)
    return torch.addcdiv(h, h, d, value=-2)


class _Mish(torch.autograd.Function):
    """`_mish`, whose slope is 1 - 2 / d + 4 h q (q - 1) / d^2 with q = e^h + 1."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        q = h.clamp(max=20).exp_().add_(1)  # clamped: the slope would be infinity over infinity
        d = q.square().add_(1)
        ctx.save_for_backward(h, q, d)
        return torch.addcdiv(h, h, d, value=-2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        h, q, d = ctx.saved_tensors
        r, g = d.reciprocal(), grads[0]
        bend = torch.addcmul(q, q, q, value=-1).mul_(h).mul_(r).add_(0.5).mul_(r)
        return torch.addcmul(g, g, bend, value=-4)


class NativeKernels:
    """The C functions, on float32 CPU tensors; anything else goes to the tensor operations."""

    adds_bias = True  # else the product first copies the bias into every row of its result

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.fallback = TorchKernels()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a model, here or in another process, looks for the library again."""
        return _loaded, ()

    def norm_mish(
        self,
        x: Tensor,
        pre: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        keep: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        if not (_native(x, pre, weight, bias) and _kept(x, keep)):
            return self.fallback.norm_mish(x, pre, weight, bias, keep, scale)
        if _wants_gradient(x, pre, weight, bias):
            y: Tensor = _NormMish.apply(self.library, x, pre, weight, bias, keep, scale)  # type: ignore[no-untyped-call]
            return y
        x = x.contiguous()
        return _norm_mish(self.library, x, x, pre, weight, bias, keep, scale, None)

    def norm_simnorm(
        self, x: Tensor, pre: Tensor | None, weight: Tensor, bias: Tensor, group: int
    ) -> Tensor:
        if not _native(x, pre, weight, bias) or x.shape[-1] % group:
            return self.fallback.norm_simnorm(x, pre, weight, bias, group)
        if _wants_gradient(x, pre, weight, bias):
            y: Tensor = _NormSimNorm.apply(self.library, x, pre, weight, bias, group)  # type: ignore[no-untyped-call]
            return y
        x = x.contiguous()
        return _norm_simnorm(self.library, x, x, pre, weight, bias, group, None)

    def decode(self, logits: Tensor, two_hot: TwoHot) -> Tensor:
        learned = torch.is_grad_enabled() and logits.requires_grad
        if learned or not _native(logits) or logits.shape[-1] != two_hot.bins:
            return self.fallback.decode(logits, two_hot)
        logits, value = logits.contiguous(), logits.new_empty(logits.shape[:-1])
        self.library.two_hot_decode(
            logits.data_ptr(), two_hot.low, two_hot.width, value.data_ptr(), value.numel(),
            two_hot.bins,
        )  # fmt: skip
        return value

    def images(
        self,
        frames: Tensor,
        layout: FrameLayout,
        offset: Tensor | None,
        pad: int,
        dtype: torch.dtype,
    ) -> Tensor:
        whole = frames.shape[2:] == layout.shape
        whole = whole and frames.stride()[2:] == frames[:1, :1].contiguous().stride()[2:]
        one_byte = frames.dtype in (torch.uint8, torch.bool)
        (count, stack), shape = frames.shape[:2], (layout.height, layout.width)
        # Where every value stays in its place, nothing is faster than the tensor operations.
        stays = offset is None and not layout.moves(stack)
        plain = frames.is_cpu and one_byte and whole and dtype is torch.float32
        if stays or not (plain and _shifts(offset, count)):
            return self.fallback.images(frames, layout, offset, pad, dtype)
        x = torch.empty((count, *shape, stack * layout.channels))
        offset = None if offset is None else offset.contiguous()
        self.library.images(
            frames.data_ptr(), *frames.stride()[:2], _pointer(offset), pad, x.data_ptr(),
            count, stack, *shape, layout.channels, layout.channels_last, layout.scale, layout.bias,
        )  # fmt: skip
        return x.permute(0, 3, 1, 2)

    def features(
        self, frames: Tensor, layout: FrameLayout, convs: Sequence[nn.Conv2d], dtype: torch.dtype
    ) -> Tensor:
        plain = frames.is_cpu and dtype is torch.float32 and not frames.requires_grad
        plain = plain and not torch.is_autocast_enabled("cpu")
        shape = frames.shape[1] * layout.channels, layout.height, layout.width
        stack = stack_of(self.library, shape, convs) if plain else None
        if stack is not None and Images.of_bytes(frames, layout) is not None:
            return convolved_bytes(self.library, stack, frames, layout, convs)
        x = self.images(frames, layout, None, 0, dtype)
        if stack is None or x.shape[1:] != shape:
            return layer_by_layer(x, convs)
        return convolved(self.library, stack, x, convs)

    def linear(self, x: Tensor, layer: nn.Linear) -> Tensor:
        if wide_linear.fits(self.library, x, layer):
            return wide_linear.wide_linear(self.library, x, layer)
        return self.fallback.linear(x, layer)


def _native(x: Tensor, *of_units: Tensor | None) -> bool:
    """Whether C may read x [..., D] and what belongs to its units, [D] each."""
    if torch.is_autocast_enabled("cpu") or not x.is_cpu or x.dtype is not torch.float32:
        return False
    units = x.shape[-1:]
    return all(
        t is None
        or (t.is_cpu and t.dtype is torch.float32 and t.shape == units and t.is_contiguous())
        for t in of_units
    )


def _kept(x: Tensor, keep: Tensor | None) -> bool:
    """Whether C may read the marks of dropout: a byte for each number of x."""
    if keep is None:
        return True
    one_byte = keep.dtype is torch.bool or keep.dtype is torch.uint8
    return one_byte and keep.is_cpu and keep.shape == x.shape and keep.is_contiguous()


def _shifts(offset: Tensor | None, count: int) -> bool:
    """Whether C may read where each of so many images begins: two whole numbers of 8 bytes."""
    if offset is None:
        return True
    return offset.is_cpu and offset.dtype is torch.int64 and offset.shape == (count, 2)


def _wants_gradient(*inputs: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _norm_mish(
    library: ctypes.CDLL,
    x: Tensor,
    y: Tensor,
    pre: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    keep: Tensor | None,
    scale: float,
    stats: Tensor | None,
) -> Tensor:
    d = x.shape[-1]
    library.norm_mish(
        x.data_ptr(), _pointer(pre), _pointer(keep), scale, weight.data_ptr(), bias.data_ptr(),
        y.data_ptr(), _pointer(stats), x.numel() // d, d,
    )  # fmt: skip
    return y


def _norm_simnorm(
    library: ctypes.CDLL,
    x: Tensor,
    y: Tensor,
    pre: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    group: int,
    stats: Tensor | None,
) -> Tensor:
    d = x.shape[-1]
    library.norm_simnorm(
        x.data_ptr(), _pointer(pre), weight.data_ptr(), bias.data_ptr(), y.data_ptr(),
        _pointer(stats), x.numel() // d, d, group,
    )  # fmt: skip
    return y


def _room_for_gradients(x: Tensor) -> tuple[Tensor, Tensor, int]:
    """dx, the partial sums of kernels.c, and into how many chunks the rows are cut."""
    chunks = torch.get_num_threads()
    return torch.empty_like(x), x.new_zeros(chunks, 4, x.shape[-1]), chunks


class _NormMish(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        library: ctypes.CDLL,
        x: Tensor,
        pre: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        keep: Tensor | None,
        scale: float,
    ) -> Tensor:
        x = x.contiguous()
        stats = x.new_empty(x.numel() // x.shape[-1], 2)
        y = _norm_mish(library, x, torch.empty_like(x), pre, weight, bias, keep, scale, stats)
        ctx.save_for_backward(x, pre, weight, bias, keep, stats)
        ctx.library, ctx.scale = library, scale
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, pre, weight, bias, keep, stats = ctx.saved_tensors
        grad, d = grads[0].contiguous(), x.shape[-1]
        dx, partial, chunks = _room_for_gradients(x)
        ctx.library.norm_mish_backward(
            grad.data_ptr(), x.data_ptr(), _pointer(pre), _pointer(keep), ctx.scale,
            weight.data_ptr(), bias.data_ptr(), stats.data_ptr(), dx.data_ptr(),
            partial.data_ptr(), chunks, x.numel() // d, d,
        )  # fmt: skip
        dweight, dbias, dpre, _ = partial.sum(0)
        return None, dx, None if pre is None else dpre, dweight, dbias, None, None


class _NormSimNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        library: ctypes.CDLL,
        x: Tensor,
        pre: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        group: int,
    ) -> Tensor:
        x = x.contiguous()
        stats = x.new_empty(x.numel() // x.shape[-1], 2)
        y = _norm_simnorm(library, x, torch.empty_like(x), pre, weight, bias, group, stats)
        ctx.save_for_backward(x, pre, y, weight, stats)
        ctx.library, ctx.group = library, group
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, pre, y, weight, stats = ctx.saved_tensors
        grad, d = grads[0].contiguous(), x.shape[-1]
        dx, partial, chunks = _room_for_gradients(x)
        ctx.library.norm_simnorm_backward(
            grad.data_ptr(), x.data_ptr(), _pointer(pre), y.data_ptr(), weight.data_ptr(),
            stats.data_ptr(), dx.data_ptr(), partial.data_ptr(), chunks, x.numel() // d, d,
            ctx.group,
        )  # fmt: skip
        dweight, dbias, dpre, _ = partial.sum(0)
        return None, dx, None if pre is None else dpre, dweight, dbias, None


def native_kernels(device: torch.device) -> tuple[NativeKernels | None, str]:
    """The C kernels, where they serve the device, and a sentence that says what happened."""
    if device.type != "cpu":
        return None, f"C kernels are for CPUs; on {device.type} tensor operations are used."
    return _load()


def _loaded() -> Kernels:
    return _load()[0] or TorchKernels()


@lru_cache(maxsize=1)
def _load() -> tuple[NativeKernels | None, str]:
    """Built on first use."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if not compiler or not shutil.which(compiler):
        return None, "No C compiler was found, so plain tensor operations are used."
    try:
        path, fresh = _build(compiler)
        kernels = NativeKernels(_opened(path))
    except (OSError, AttributeError, files.FileError, subprocess.SubprocessError) as problem:
        return None, f"The C kernels could not be built ({problem}), so tensor operations are used."
    how = f"built with {compiler}" if fresh else "taken from the cache"
    return kernels, f"C kernels {how}: {path}."


def _opened(path: Path) -> ctypes.CDLL:
    """The library, its functions with their types."""
    library = ctypes.CDLL(str(path))
    pointer, size, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    library.norm_mish.argtypes = [*[pointer] * 3, real, *[pointer] * 4, *[size] * 2]
    library.norm_mish_backward.argtypes = [*[pointer] * 4, real, *[pointer] * 5, *[size] * 3]
    library.norm_simnorm.argtypes = [*[pointer] * 6, *[size] * 3]
    library.norm_simnorm_backward.argtypes = [*[pointer] * 8, *[size] * 4]
    library.two_hot_decode.argtypes = [pointer, real, real, pointer, size, size]
    library.images.argtypes = [
        pointer, size, size, pointer, size, pointer, *[size] * 6, real, real,
    ]  # fmt: skip
    declare(library)
    wide_linear.declare(library)
    return library


def _build(compiler: str) -> tuple[Path, bool]:
    """Compile into the user's cache; the name holds everything the result depends on."""
    sources = sorted(Path(__file__).parent.glob("*.c"))
    flags = list(FLAGS)
    if platform.machine().lower() in ("x86_64", "amd64"):
        # Wide registers where there are such; reciprocals refined to full precision for division.
        flags += ["-mprefer-vector-width=512", "-mrecip"]
    processor = platform.processor() + platform.machine() + _cpu_flags()
    text = "".join(source.read_text() for source in sources)
    key = hashlib.sha256((text + compiler + str(flags) + processor).encode())
    root = user_cache()
    target = root / f"kernels-{key.hexdigest()[:16]}.so"
    if _is_whole(target):
        return target, False
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root) as scratch:
        library, objects, commands = Path(scratch, "kernels.so"), [], []
        for source in sources:
            objects.append(str(Path(scratch, source.name).with_suffix(".o")))
            commands.append([compiler, *flags, "-c", str(source), "-o", objects[-1]])
        # Linked without -fopenmp on purpose: the OpenMP calls then resolve to the runtime that
        # PyTorch has loaded, and both share one pool of threads.
        commands.append([compiler, "-shared", *objects, "-o", str(library), "-lm"])
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
            if done.returncode != 0:
                raise OSError(done.stderr.strip().splitlines()[-1] if done.stderr else "no message")
        files.fsync_file(library)
        digest = files.sha256(library)
        library.replace(target)
        files.write_text_atomic(_checksum(target), digest)
    return target, True


def _checksum(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _is_whole(library: Path) -> bool:
    """Whether it is there as it was built: one that a full disk or a power cut has spoiled would
    end the process without a word."""
    try:
        return files.read_bytes(_checksum(library), 64) == files.sha256(library).encode()
    except files.FileError:
        return False


def _cpu_flags() -> str:
    """Distinguishes processors that share a home directory: -march=native code is not portable."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return ""
    return next((line for line in info.read_text().splitlines() if line.startswith("flags")), "")
