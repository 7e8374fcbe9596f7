"""Convolutions in C: the same as torch's, layer by layer, up to rounding."""

from __future__ import annotations

import copy
import platform
import shutil
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forethought.nets import kernels as kernel_module
from forethought.nets.convolutions import convolved, layer_by_layer, stack_of
from forethought.nets.images import FrameLayout
from forethought.nets.kernels import NativeKernels, TorchKernels, native_kernels

NATURE = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
OTHERS = {
    "two layers, not square": ((2, 30, 41), ((32, 4, 2), (32, 4, 2))),
    "one layer": ((8, 20, 20), ((64, 3, 1),)),
    "positions that fill no tile": ((4, 25, 25), ((64, 4, 3), (128, 3, 1))),
}
CPU = torch.device("cpu")


def made(channels: int, layers: Any, seed: int = 0) -> list[nn.Conv2d]:
    torch.manual_seed(seed)
    convs = []
    for outputs, kernel, stride in layers:
        convs.append(nn.Conv2d(channels, outputs, kernel, stride))
        channels = outputs
    return convs


def images(count: int, channels: int, height: int, width: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, channels, height, width, generator=generator)


def shape_of(x: Tensor) -> tuple[int, int, int]:
    return x.shape[1], x.shape[2], x.shape[3]


@pytest.fixture(scope="module", params=["this processor", "without AVX-512"])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The C functions, also in the form for narrower registers."""
    if native_kernels(CPU)[0] is None:
        pytest.skip("no C compiler here")
    if request.param == "this processor":
        return native_kernels(CPU)[0].library  # type: ignore[union-attr]
    if platform.machine().lower() not in ("x86_64", "amd64"):
        pytest.skip("this processor has one width")
    patch = pytest.MonkeyPatch()
    patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    patch.setattr(kernel_module, "FLAGS", (*kernel_module.FLAGS, "-mno-avx512f"))
    try:
        path, _ = kernel_module._build(str(shutil.which("cc") or shutil.which("gcc")))
    finally:
        patch.undo()
    return kernel_module._opened(path)


def both(library: Any, x: Tensor, convs: list[nn.Conv2d]) -> tuple[Any, Any]:
    """Features and gradients of C, and of torch in double precision."""
    found = []
    for name in ("c", "torch"):
        own = copy.deepcopy(convs)
        if name == "c":
            stack = stack_of(library, shape_of(x), own)
            assert stack is not None
            features = convolved(library, stack, x, own)
        else:
            own = [conv.double() for conv in own]
            features = layer_by_layer(x.double(), own)
        slope = torch.linspace(0.1, 1, features.numel()).view_as(features).to(features.dtype)
        features.backward(slope)  # type: ignore[no-untyped-call]
        found.append((features.detach(), [p.grad for conv in own for p in conv.parameters()]))
    return found[0], found[1]


def close(ours: Tensor, wanted: Tensor) -> bool:
    assert ours.shape == wanted.shape
    return bool((ours - wanted).abs().max() <= 1e-5 * wanted.abs().max())


def nearly(ours: Tensor, wanted: Tensor) -> bool:
    """As a whole: where a sum is 0 but for rounding, a ReLU may let through what another stops."""
    assert ours.shape == wanted.shape
    return bool((ours - wanted).norm() <= 1e-4 * wanted.norm())


@pytest.mark.parametrize("count", [1, 2, 7, 32])
@pytest.mark.parametrize("positive", [True, False])
def test_features_and_gradients_are_those_of_torch(
    library: Any, count: int, positive: bool
) -> None:
    """With positive weights no ReLU stops anything, and every number can be compared."""
    convs = made(4, NATURE)
    if positive:
        with torch.no_grad():
            for conv in convs:
                conv.weight.abs_()
                conv.bias.abs_()  # type: ignore[union-attr]
    (features, gradients), (wanted, slopes) = both(library, images(count, 4, 84, 84), convs)
    assert close(features, wanted)
    same = close if positive else nearly
    assert all(same(a, b) for a, b in zip(gradients, slopes, strict=True))


@pytest.mark.parametrize("name", OTHERS)
def test_other_shapes_are_those_of_torch_too(library: Any, name: str) -> None:
    shape, layers = OTHERS[name]
    (features, gradients), (wanted, slopes) = both(
        library, images(3, *shape), made(shape[0], layers)
    )
    assert close(features, wanted)
    assert all(nearly(a, b) for a, b in zip(gradients, slopes, strict=True))


def test_without_a_gradient_the_features_are_the_same_bits(library: Any) -> None:
    """Acting, targets and learning see one network; an image's features are its own alone."""
    x, convs = images(5, 4, 84, 84), made(4, NATURE)
    stack = stack_of(library, shape_of(x), convs)
    learning = convolved(library, stack, x, convs)
    with torch.no_grad():
        assert torch.equal(convolved(library, stack, x, convs), learning)
        assert torch.equal(convolved(library, stack, x[2:3], convs), learning[2:3])


def test_the_same_threads_give_the_same_bits(library: Any) -> None:
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            first, again = (
                both(library, images(8, 4, 84, 84), made(4, NATURE))[0] for _ in range(2)
            )
            assert torch.equal(first[0], again[0])
            assert all(torch.equal(a, b) for a, b in zip(first[1], again[1], strict=True))
    finally:
        torch.set_num_threads(before)


def test_what_is_not_a_number_is_not_hidden(library: Any) -> None:
    """A ReLU written as 'greater than 0, else 0' would swallow it, and no gate would see it."""
    x, convs = images(2, 4, 84, 84), made(4, NATURE)
    x[1, 0, 40, 40] = torch.nan
    features = convolved(library, stack_of(library, shape_of(x), convs), x, convs)
    assert features[0].isfinite().all() and features[1].isnan().any()
    features.sum().backward()  # type: ignore[no-untyped-call]
    assert all(conv.weight.grad.isnan().any() for conv in convs)  # type: ignore[union-attr]


def test_weights_that_lie_otherwise_are_read_right(library: Any) -> None:
    x, convs = images(2, 4, 84, 84), made(4, NATURE)
    with torch.no_grad():
        wanted = convolved(library, stack_of(library, shape_of(x), convs), x, convs)
        for conv in convs:
            conv.to(memory_format=torch.channels_last)
        assert torch.equal(
            convolved(library, stack_of(library, shape_of(x), convs), x, convs), wanted
        )


@pytest.mark.parametrize(
    ("shape", "layer"),
    [
        ((4, 84, 84), {"out_channels": 24}),
        ((3, 84, 84), {"kernel_size": 7}),
        ((4, 10, 10), {"stride": 3}),
        ((4, 84, 84), {"padding": 1}),
        ((4, 84, 84), {"bias": False}),
        ((4, 84, 84), {"dilation": 2}),
        ((4, 84, 84), {"groups": 2}),
        ((4, 84, 84), {"kernel_size": (8, 4)}),
        ((4, 84, 84), {"stride": (4, 2)}),
        ((4, 3, 3), {"stride": 1}),  # the kernel is longer than the image, both ways
    ],
    ids=lambda x: str(x),
)
def test_what_c_cannot_compute_is_left_to_torch(
    library: Any, shape: tuple[int, int, int], layer: dict[str, Any]
) -> None:
    conv = nn.Conv2d(shape[0], **{"out_channels": 32, "kernel_size": 8, "stride": 4, **layer})
    assert stack_of(library, shape, [conv]) is None


def test_other_types_are_left_to_torch(library: Any) -> None:
    doubles = [conv.double() for conv in made(4, NATURE)]
    assert stack_of(library, (4, 84, 84), doubles) is None


# ---- from bytes ----

LAYOUTS = {
    "stacks of grey frames": ((4, 84, 84, 1), FrameLayout(84, 84, 1, True, least=0.0)),
    "eight at a time": ((8, 84, 84, 1), FrameLayout(84, 84, 1, True, least=0.0)),
    "channels first": ((4, 1, 84, 84), FrameLayout(84, 84, 1, False, least=0.0)),
    "colours": ((1, 84, 84, 4), FrameLayout(84, 84, 4, True, least=0.0)),
    "around 0": ((4, 84, 84, 1), FrameLayout(84, 84, 1, True)),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("learning", [True, False])
def test_bytes_become_the_features_of_their_images(library: Any, name: str, learning: bool) -> None:
    """Bit for bit those of the images by themselves; and also where stacks overlap, as in replay,
    or lie with gaps between their rows."""
    kernels = NativeKernels(library)
    shape, layout = LAYOUTS[name]
    generator = torch.Generator().manual_seed(3)
    one = torch.randint(0, 256, (3, *shape), dtype=torch.uint8, generator=generator)
    wide = torch.randint(0, 256, (3, *shape[:-1], 90), dtype=torch.uint8, generator=generator)
    convs = made(shape[0] * layout.channels, NATURE)
    given = [one, wide[..., : shape[-1]]]
    if shape[0] > 1:
        row = torch.randint(0, 256, (9, *shape[1:]), dtype=torch.uint8, generator=generator)
        given.append(row.unfold(0, shape[0], 1).movedim(-1, 1))
    for frames in given:
        x = kernels.images(frames, layout, None, 0, torch.float32)
        stack = stack_of(kernels.library, shape_of(x), convs)
        with torch.set_grad_enabled(learning):
            features = kernels.features(frames, layout, convs, torch.float32)
            wanted = convolved(kernels.library, stack, x, convs)
        assert torch.equal(features, wanted)
        if learning:
            slopes = [
                torch.autograd.grad(y.sum(), [c.weight for c in convs]) for y in (features, wanted)
            ]
            assert all(torch.equal(a, b) for a, b in zip(*slopes, strict=True))


def test_what_is_not_computed_by_c_is_computed_by_torch() -> None:
    kernels = native_kernels(CPU)[0] or TorchKernels()
    layout = FrameLayout(20, 20, 1, True, least=0.0)
    frames = torch.randint(0, 256, (2, 4, 20, 20, 1), dtype=torch.uint8)
    odd = made(4, ((24, 3, 1),))
    plain = TorchKernels().features(frames, layout, odd, torch.float32)
    assert torch.equal(kernels.features(frames, layout, odd, torch.float32), plain)
    doubles = [conv.double() for conv in made(4, ((32, 4, 2),))]
    assert kernels.features(frames, layout, doubles, torch.float64).dtype == torch.float64
    floats = frames.float().requires_grad_()
    kernels.features(floats, layout, made(4, ((32, 4, 2),)), torch.float32).sum().backward()  # type: ignore[no-untyped-call]
    assert floats.grad is not None and floats.grad.abs().sum() > 0


@pytest.mark.parametrize(
    "shape", [(8, 84, 84, 1), (3, 84, 84, 1), (4, 40, 84, 1), (4, 84, 40, 1), (4, 84, 84, 2)]
)
def test_frames_that_torch_refuses_are_refused(library: Any, shape: tuple[int, ...]) -> None:
    """C does not ask: more frames than the weights know would be written beyond their end."""
    layout = FrameLayout(84, 84, 1, True, least=0.0)
    frames = torch.zeros(2, *shape, dtype=torch.uint8)
    for kernels in (NativeKernels(library), TorchKernels()):
        with pytest.raises(RuntimeError):
            kernels.features(frames, layout, made(4, NATURE), torch.float32)


def test_frames_of_several_channels_that_come_first_are_refused_too(library: Any) -> None:
    """All but the first channel would be left out without a word."""
    layout = FrameLayout(84, 84, 1, False, least=0.0)
    frames = torch.zeros(2, 4, 2, 84, 84, dtype=torch.uint8)
    for kernels in (NativeKernels(library), TorchKernels()):
        with pytest.raises(RuntimeError):
            kernels.features(frames, layout, made(4, NATURE), torch.float32)


@pytest.mark.parametrize("bias", [torch.zeros(32, dtype=torch.double), torch.zeros(3)])
def test_a_bias_of_another_type_or_length_is_not_for_c(library: Any, bias: Tensor) -> None:
    convs = made(4, NATURE)
    assert stack_of(library, (4, 84, 84), convs) is not None
    convs[0].bias = nn.Parameter(bias)
    assert stack_of(library, (4, 84, 84), convs) is None


def test_a_weight_of_another_shape_than_its_layer_says_is_not_for_c(library: Any) -> None:
    convs = made(4, NATURE)
    convs[0].weight = nn.Parameter(convs[0].weight[..., :4, :4].detach().clone())
    assert stack_of(library, (4, 84, 84), convs) is None


def nature_bytes(library: Any) -> tuple[Any, Tensor, FrameLayout]:
    generator = torch.Generator().manual_seed(4)
    frames = torch.randint(0, 256, (2, 4, 84, 84, 1), dtype=torch.uint8, generator=generator)
    return NativeKernels(library), frames, FrameLayout(84, 84, 1, True, least=0.0)


def test_gradients_come_from_what_was_saved(library: Any) -> None:
    """Whoever saves tensors elsewhere gives them back; where they lay before is nobody's."""
    kernels, frames, layout = nature_bytes(library)
    convs, found = made(4, NATURE), []
    for hooks in (False, True):
        given = frames.clone()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, hooks=hooks: x.clone() if hooks else x, lambda x: x
        ):
            features = kernels.features(given, layout, convs, torch.float32)
        if hooks:
            given.zero_()
        found.append(torch.autograd.grad(features.sum(), [conv.weight for conv in convs]))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_there_is_no_second_gradient(library: Any) -> None:
    kernels, frames, layout = nature_bytes(library)
    convs = made(4, NATURE)
    features = kernels.features(frames, layout, convs, torch.float32)
    (slope,) = torch.autograd.grad((features**2).sum(), convs[0].weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_what_is_frozen_has_no_gradient_and_the_rest_has(library: Any, frozen: str) -> None:
    kernels, frames, layout = nature_bytes(library)
    convs = made(4, NATURE)
    for conv in convs:
        getattr(conv, frozen).requires_grad_(False)
    kernels.features(frames, layout, convs, torch.float32).sum().backward()
    for conv in convs:
        assert (conv.weight.grad is None) == (frozen == "weight")
        assert (conv.bias.grad is None) == (frozen == "bias")  # type: ignore[union-attr]


def test_the_default_type_decides_nothing(library: Any) -> None:
    kernels, frames, layout = nature_bytes(library)
    convs = made(4, NATURE)
    wanted = kernels.features(frames, layout, convs, torch.float32)
    torch.set_default_dtype(torch.float64)
    try:
        found = kernels.features(frames, layout, convs, torch.float32)
        found.sum().backward()
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, wanted)
    assert convs[0].weight.grad.dtype == torch.float32  # type: ignore[union-attr]


def test_a_lack_of_memory_is_told(library: Any) -> None:
    full = types.SimpleNamespace(stack_forward=lambda *given: 1)
    convs = made(4, NATURE)
    stack = stack_of(library, (4, 84, 84), convs)
    with pytest.raises(MemoryError, match="There is no memory for convolutions"):
        convolved(full, stack, images(2, 4, 84, 84), convs)  # type: ignore[arg-type]
