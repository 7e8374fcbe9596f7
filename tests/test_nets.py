"""Layers, activations, initialisation, optimisers."""

from __future__ import annotations

import copy
import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forethought.config import ConfigError
from forethought.files import FileError
from forethought.maths import TwoHot
from forethought.nets import kernels as kernel_module
from forethought.nets.cache import user_cache
from forethought.nets.compiled import CACHE_VARIABLE, keep_compiled
from forethought.nets.images import FrameLayout
from forethought.nets.init import trunc_normal_linears, zero_last_weight
from forethought.nets.kernel_check import wrong_ones
from forethought.nets.kernels import Kernels, NativeKernels, TorchKernels, _load, native_kernels
from forethought.nets.layers import MLP, NormedLinear, frozen
from forethought.nets.optimisers import adam, clip_gradients, optimiser_tensors, restore_optimiser
from forethought.nets.precision import autocast


def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)


def both_kernels() -> list[Kernels]:
    native, _ = native_kernels(torch.device("cpu"))
    return [TorchKernels()] if native is None else [TorchKernels(), native]


def gradients(y: Tensor, *inputs: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad((y * normal(*y.shape, dtype=y.dtype)).sum(), inputs))


def mish_by_definition(x: Tensor) -> Tensor:
    return x * torch.tanh(F.softplus(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kernels", both_kernels(), ids=lambda k: type(k).__name__)
def test_norm_mish_and_its_gradient(
    kernels: Kernels, biased: bool, dropped: bool, dtype: torch.dtype
) -> None:
    x, w, b = (v.to(dtype).requires_grad_() for v in (normal(33, 48), normal(48), normal(48)))
    pre = normal(1, 48)[0].to(dtype).requires_grad_() if biased else None
    keep = normal(33, 48, scale=2) > -1 if dropped else None
    fast = kernels.norm_mish(x, pre, w, b, keep, 1.25)
    biased = x if pre is None else x + pre
    masked = biased if keep is None else biased * keep * 1.25
    slow = mish_by_definition(F.layer_norm(masked.double(), (48,), w.double(), b.double()))
    tolerance = 1e-10 if dtype is torch.float64 else 2e-5
    torch.testing.assert_close(fast.double(), slow, atol=tolerance, rtol=tolerance)
    inputs = (x, w, b) if pre is None else (x, w, b, pre)
    for a, e in zip(gradients(fast, *inputs), gradients(slow, *inputs), strict=True):
        torch.testing.assert_close(a.double(), e.double(), atol=10 * tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kernels", both_kernels(), ids=lambda k: type(k).__name__)
def test_norm_simnorm_and_its_gradient(kernels: Kernels, biased: bool, dtype: torch.dtype) -> None:
    x, w, b = (
        v.to(dtype).requires_grad_() for v in (normal(33, 48), normal(48, scale=4), normal(48))
    )
    pre = normal(1, 48)[0].to(dtype).requires_grad_() if biased else None
    fast = kernels.norm_simnorm(x, pre, w, b, 8)
    h = F.layer_norm((x if pre is None else x + pre).double(), (48,), w.double(), b.double())
    slow = torch.softmax(h.view(33, 6, 8), -1).view(33, 48)
    tolerance = 1e-10 if dtype is torch.float64 else 2e-5
    torch.testing.assert_close(fast.double(), slow, atol=tolerance, rtol=tolerance)
    inputs = (x, w, b) if pre is None else (x, w, b, pre)
    for a, e in zip(gradients(fast, *inputs), gradients(slow, *inputs), strict=True):
        torch.testing.assert_close(a.double(), e.double(), atol=10 * tolerance, rtol=tolerance)


@pytest.mark.parametrize("kernels", both_kernels(), ids=lambda k: type(k).__name__)
def test_decoding_two_hot_logits(kernels: Kernels) -> None:
    logits = normal(20, 101, scale=3)
    logits[0] = 0  # zero, by symmetry
    logits[1, 100] = 1e4  # the top bin: symexp(10)
    expected = TwoHot().decode(logits)
    decoded = kernels.decode(logits.float(), TwoHot())
    torch.testing.assert_close(decoded.double(), expected, rtol=1e-4, atol=1e-5)
    assert decoded[1].item() == pytest.approx(math.exp(10) - 1, rel=1e-4)
    logits[2, 5] = math.nan
    assert kernels.decode(logits.float(), TwoHot())[2].isnan()


@pytest.mark.parametrize("kernels", both_kernels(), ids=lambda k: type(k).__name__)
@pytest.mark.parametrize(("stack", "channels", "last"), [(4, 1, True), (4, 3, False), (3, 1, True)])
def test_bytes_of_frames_become_numbers(
    kernels: Kernels, stack: int, channels: int, last: bool
) -> None:
    """Each byte times the scale, at its channel's place; stacks may overlap, as in a window."""
    shape = (5, 6, channels) if last else (channels, 5, 6)
    rows = torch.randint(0, 256, (stack + 8, *shape), dtype=torch.uint8)
    frames = rows.unfold(0, stack, 1).movedim(-1, 1)  # [9, F, ...], neighbours share frames
    layout = FrameLayout(5, 6, channels, last, least=0.0)
    x = kernels.images(frames, layout, None, 0, torch.float32)
    assert x.shape == (9, stack * channels, 5, 6)
    assert x.is_contiguous(memory_format=torch.channels_last)
    for f in range(stack):
        for c in range(channels):
            plane = frames[:, f, :, :, c] if last else frames[:, f, c]
            assert torch.equal(x[:, f * channels + c], plane.float() * (1 / 255))


@pytest.mark.parametrize("kernels", both_kernels(), ids=lambda k: type(k).__name__)
@pytest.mark.parametrize("last", [True, False])
def test_frames_stay_as_they_are(kernels: Kernels, last: bool) -> None:
    """Floats with the channels last have the type and order of a convolution already."""
    frames = torch.rand(2, 1, 5, 6, 3) if last else torch.rand(2, 1, 3, 5, 6)
    before = frames.clone()
    kernels.images(frames, FrameLayout(5, 6, 3, last, 0.0, 1.0), None, 0, torch.float32)
    assert torch.equal(frames, before)


def test_a_large_low_end_costs_no_digits() -> None:
    frames = (10_000 + torch.tensor([0.0, 0.125, 0.25])).view(1, 1, 1, 3, 1)
    layout = FrameLayout(1, 3, 1, True, 10_000.0, 10_000.25, least=0.0)
    x = TorchKernels().images(frames, layout, None, 0, torch.float32)
    assert x.flatten().tolist() == [0.0, 0.5, 1.0]


def test_a_model_with_kernels_can_be_copied() -> None:
    for kernels in both_kernels():
        assert type(copy.deepcopy(kernels)) is type(kernels)


def test_without_a_home_nothing_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container of a user that has no name, for instance."""

    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nobody)
    kernels, why = _load.__wrapped__()
    assert kernels is None
    assert "no home directory: set XDG_CACHE_HOME" in why or "No C compiler" in why
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    assert keep_compiled() == Path(tempfile.gettempdir()) and CACHE_VARIABLE not in os.environ
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert user_cache() == Path("/somewhere/forethought")


@pytest.mark.parametrize("kernels", both_kernels(), ids=lambda k: type(k).__name__)
def test_activations_without_gradient_equal_those_with(kernels: Kernels) -> None:
    x, w, b = normal(5, 16, dtype=torch.float32), torch.ones(16), torch.zeros(16)
    with torch.inference_mode():  # which may overwrite its input
        plain = (
            kernels.norm_mish(x.clone(), None, w, b),
            kernels.norm_simnorm(x.clone(), None, w, b, 8),
        )
    w = w.requires_grad_()
    grad = kernels.norm_mish(x, None, w, b), kernels.norm_simnorm(x, None, w, b, 8)
    for a, e in zip(plain, grad, strict=True):
        assert torch.equal(a, e.detach())


@pytest.mark.parametrize("kernels", both_kernels(), ids=lambda k: type(k).__name__)
def test_extreme_inputs_stay_finite_and_nan_is_not_hidden(kernels: Kernels) -> None:
    """A bias of 200 is beyond exp's range in float32; a NaN must come out as a NaN."""
    x = normal(4, 16, dtype=torch.float32)
    w = torch.ones(16)
    bias = torch.tensor([200.0, -200.0] * 8)
    y = kernels.norm_mish(x.clone(), None, w, bias)
    torch.testing.assert_close(y[:, ::2], F.layer_norm(x, (16,), w, bias)[:, ::2])
    assert y[:, 1::2].abs().max() < 1e-30
    assert torch.isfinite(kernels.norm_simnorm(x.clone(), None, 300 * w, bias, 8)).all()
    x[1, 3] = math.nan
    assert kernels.norm_mish(x.clone(), None, w, bias)[1].isnan().all()
    assert kernels.norm_simnorm(x.clone(), None, w, bias, 8)[1].isnan().all()


def test_no_compiler_is_one_sentence_and_a_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "")
    monkeypatch.setattr(kernel_module.shutil, "which", lambda _: None)
    found, why = _load.__wrapped__()
    assert found is None
    assert why == "No C compiler was found, so plain tensor operations are used."


def _emptied(whole: bytes) -> bytes:
    return b""


def _cut(whole: bytes) -> bytes:
    return whole[: len(whole) // 2]


def _half_zeros(whole: bytes) -> bytes:
    return whole[: len(whole) // 2] + bytes(len(whole) - len(whole) // 2)


@pytest.mark.parametrize("spoil", [_emptied, _cut, _half_zeros])
def test_a_spoiled_file_in_the_cache_is_built_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, spoil: Callable[[bytes], bytes]
) -> None:
    """As a full disk or a power cut leaves one: loading it would end the process, or cost the speed
    of every run from then on."""
    if native_kernels(torch.device("cpu"))[0] is None:
        pytest.skip("no C compiler here")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiler = str(shutil.which("cc") or shutil.which("gcc"))
    library, fresh = kernel_module._build(compiler)
    whole = library.read_bytes()
    assert fresh and kernel_module._build(compiler) == (library, False)
    library.unlink()  # not written over: this process may have it open
    library.write_bytes(spoil(whole))
    found, why = _load.__wrapped__()
    assert found is not None and "C kernels built with" in why
    assert len(library.read_bytes()) == len(whole)
    library.with_suffix(".sha256").unlink()  # killed between the two
    assert kernel_module._build(compiler) == (library, True)


SHORT, DOUBLE, APART = torch.ones(16), torch.ones(32, dtype=torch.float64), torch.ones(64)[::2]
UNITS = torch.ones(32)


@pytest.mark.parametrize("wrong", [SHORT, DOUBLE, APART], ids=["short", "double", "apart"])
@pytest.mark.parametrize("place", ["pre", "weight", "bias"])
def test_what_c_cannot_read_goes_to_torch(place: str, wrong: Tensor) -> None:
    """Which refuses it, or takes it for what it is."""
    native, _ = native_kernels(torch.device("cpu"))
    if native is None:
        pytest.skip("no C compiler here")
    x = normal(4, 32, dtype=torch.float32)
    given = {"pre": UNITS, "weight": UNITS, "bias": UNITS, place: wrong}

    def outcome(kernels: Kernels, name: str, *more: int) -> Tensor | type:
        try:
            return getattr(kernels, name)(x.clone(), *given.values(), *more)
        except RuntimeError as error:
            return type(error)

    for name, *more in (("norm_mish",), ("norm_simnorm", 8)):
        mine, right = (outcome(kernels, name, *more) for kernels in (native, TorchKernels()))
        if isinstance(right, Tensor):
            torch.testing.assert_close(mine, right)
        else:
            assert mine is right


def test_c_is_given_neither_odd_groups_nor_odd_marks_nor_other_bins() -> None:
    native, _ = native_kernels(torch.device("cpu"))
    if native is None:
        pytest.skip("no C compiler here")
    x = normal(4, 32, dtype=torch.float32)
    with pytest.raises(RuntimeError):
        native.norm_simnorm(x.clone(), None, UNITS, UNITS, 5)
    with pytest.raises(RuntimeError):
        native.decode(x, TwoHot())
    apart = torch.rand(32, 4).round().bool().t()  # [4, 32], but not in this order in memory
    for keep in (torch.rand(4, 32).round(), torch.ones(32, dtype=torch.bool), apart):
        mine, right = (
            kernels.norm_mish(x.clone(), None, UNITS, UNITS, keep, 1.25)
            for kernels in (native, TorchKernels())
        )
        torch.testing.assert_close(mine, right)


@pytest.mark.parametrize("learned", ["pre", "bias"])
@pytest.mark.parametrize(("name", "more"), [("norm_mish", ()), ("norm_simnorm", (8,))])
def test_what_alone_is_learned_gets_its_gradient(
    name: str, more: tuple[int, ...], learned: str
) -> None:
    native, _ = native_kernels(torch.device("cpu"))
    if native is None:
        pytest.skip("no C compiler here")
    found = []
    for kernels in (native, TorchKernels()):
        units = {"pre": UNITS.clone(), "weight": 2 * UNITS, "bias": UNITS.clone()}
        units[learned].requires_grad_()
        x = normal(4, 32, dtype=torch.float32)
        y = getattr(kernels, name)(x, *units.values(), *more)
        found.append(gradients(y, units[learned])[0])
    torch.testing.assert_close(found[0], found[1], atol=2e-5, rtol=2e-5)
    assert found[1].abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_where_shifted_images_begin_may_be_numbers_of_either_size(dtype: torch.dtype) -> None:
    native, _ = native_kernels(torch.device("cpu"))
    if native is None:
        pytest.skip("no C compiler here")
    frames = torch.randint(0, 256, (5, 3, 8, 8, 1), dtype=torch.uint8)
    offset = torch.randint(0, 5, (5, 2)).to(dtype)
    mine, right = (
        kernels.images(frames, FrameLayout(8, 8, 1, True), offset, 2, torch.float32)
        for kernels in (native, TorchKernels())
    )
    torch.testing.assert_close(mine, right)


@pytest.mark.parametrize(
    "problem", [AttributeError("undefined symbol: images"), FileError("k.so: no room")]
)
def test_a_library_that_cannot_be_used_is_one_sentence_and_a_fallback(
    monkeypatch: pytest.MonkeyPatch, problem: Exception
) -> None:
    def opened(path: Path) -> None:
        raise problem

    monkeypatch.setattr(kernel_module, "_build", lambda compiler: (Path("k.so"), False))
    monkeypatch.setattr(kernel_module, "_opened", opened)
    monkeypatch.setattr(kernel_module.shutil, "which", lambda name: f"/usr/bin/{name}")
    found, why = _load.__wrapped__()
    assert found is None
    assert why == f"The C kernels could not be built ({problem}), so tensor operations are used."


C_FUNCTIONS = (
    *("norm_mish", "norm_mish_backward", "norm_simnorm", "norm_simnorm_backward"),
    *("two_hot_decode", "images", "stack_forward", "stack_backward"),
    *("wide_forward", "wide_inputs", "wide_weights"),
)


class WithoutOne:
    """The library, but one of its functions does nothing."""

    def __init__(self, library: Any, name: str) -> None:
        self.library, self.name = library, name

    def __getattr__(self, name: str) -> Any:
        return (lambda *given: 0) if name == self.name else getattr(self.library, name)


@pytest.mark.parametrize("name", C_FUNCTIONS)
def test_the_check_of_kernels_sees_every_function_that_does_nothing(name: str) -> None:
    native, _ = native_kernels(torch.device("cpu"))
    if native is None:
        pytest.skip("no C compiler here")
    assert wrong_ones(native) == {}
    torch.use_deterministic_algorithms(True)  # new memory is then NaN, not what lay there before
    try:
        assert wrong_ones(NativeKernels(WithoutOne(native.library, name)))
    finally:
        torch.use_deterministic_algorithms(False)


def test_other_devices_use_tensor_operations() -> None:
    found, why = native_kernels(torch.device("meta"))
    assert found is None
    assert why == "C kernels are for CPUs; on meta tensor operations are used."


def test_a_failing_compiler_is_one_sentence_and_a_fallback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    def fail(*_: object, **__: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 1, "", "ld: no space")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernel_module.subprocess, "run", fail)
    found, why = _load.__wrapped__()
    assert found is None
    assert "ld: no space" in why


def test_simnorm_groups_each_sum_to_one() -> None:
    z = NormedLinear(6, 32, "simnorm")(normal(4, 6, dtype=torch.float32))
    torch.testing.assert_close(z.view(4, 4, 8).sum(-1), torch.ones(4, 4))


def test_mlp_has_dropout_in_its_first_layer_only() -> None:
    mlp = MLP(4, [8, 8], 2, dropout=0.3)
    assert [getattr(layer, "dropout", None) for layer in mlp] == [0.3, 0.0, None]


def test_dropping_a_unit_changes_the_output_and_scales_the_rest() -> None:
    layer = NormedLinear(3, 8, dropout=0.5)
    x, keep = normal(1, 3, dtype=torch.float32), torch.tensor([[True] * 4 + [False] * 4])
    masked = F.linear(x, layer.weight, layer.bias) * keep * 2.0
    expected = F.mish(layer.norm(masked))
    torch.testing.assert_close(layer(x, keep), expected)


def test_after_hidden_continues_from_the_first_layer() -> None:
    mlp, x = MLP(4, [8, 8], 2), normal(5, 4, dtype=torch.float32)
    torch.testing.assert_close(mlp.after_hidden(mlp[0](x)), mlp(x))


def test_frozen_passes_gradients_through_but_not_in() -> None:
    layer, x = nn.Linear(3, 1), torch.ones(1, 3, requires_grad=True)
    with frozen(layer):
        layer(x).backward()
    assert x.grad is not None
    assert layer.weight.grad is None
    assert layer.weight.requires_grad


def test_linear_weights_start_with_std_two_hundredths() -> None:
    model = nn.Sequential(MLP(300, [400], 200), nn.Linear(200, 300))
    trunc_normal_linears(model, torch.Generator().manual_seed(0))
    for layer in (m for m in model.modules() if isinstance(m, nn.Linear)):
        assert layer.weight.std().item() == pytest.approx(0.02, rel=0.02)
        assert abs(layer.weight.mean().item()) < 2e-4
        assert (layer.bias == 0).all()


def test_zeroed_head_predicts_the_same_for_every_input() -> None:
    mlp = MLP(4, [8], 3)
    zero_last_weight(mlp)
    out = mlp(normal(10, 4, dtype=torch.float32))
    assert torch.equal(out, out[:1].expand(10, 3))


def test_gradients_are_clipped_to_one_joint_norm() -> None:
    a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    a.grad, b.grad = torch.tensor([3.0]), torch.tensor([4.0])
    norm = clip_gradients([a, b], 1.0)
    assert norm == pytest.approx(5.0)
    assert (a.grad.item(), b.grad.item()) == pytest.approx((0.6, 0.8), rel=1e-5)


def test_gradients_below_the_limit_stay_as_they_are() -> None:
    a = nn.Parameter(torch.zeros(1))
    a.grad = torch.tensor([3.0])
    assert clip_gradients([a], 20.0) == 3.0
    assert a.grad.item() == 3.0


def test_optimiser_state_round_trips_bit_for_bit() -> None:
    def make() -> tuple[nn.Linear, torch.optim.Adam]:
        layer = nn.Linear(3, 2)
        with torch.no_grad():
            layer.weight.copy_(normal(2, 3))
        return layer, adam([{"params": list(layer.parameters()), "lr": 1e-2}], eps=1e-8)

    def step(layer: nn.Linear, optimiser: torch.optim.Adam) -> None:
        optimiser.zero_grad()
        layer(normal(4, 3, dtype=torch.float32)).square().sum().backward()
        optimiser.step()

    layer, optimiser = make()
    step(layer, optimiser)
    names = {p: n for n, p in layer.named_parameters()}
    saved = {k: v.clone() for k, v in optimiser_tensors(optimiser, names).items()}
    assert set(saved) == {
        f"{p}/{k}" for p in ("weight", "bias") for k in ("step", "exp_avg", "exp_avg_sq")
    }
    other, fresh = make()
    other.load_state_dict(layer.state_dict())
    restore_optimiser(fresh, {p: n for n, p in other.named_parameters()}, saved)
    step(layer, optimiser)
    step(other, fresh)
    assert torch.equal(layer.weight, other.weight)


def test_restored_optimiser_state_lies_where_its_parameter_does() -> None:
    """All of it: on an accelerator fused Adam reads its step count there. `meta` stands for one."""
    weight = nn.Parameter(torch.empty(3, device="meta"))
    optimiser = adam([{"params": [weight]}], eps=1e-8)
    saved = {
        "w/step": torch.tensor(7.0),
        "w/exp_avg": torch.zeros(3),
        "w/exp_avg_sq": torch.ones(3),
    }
    restore_optimiser(optimiser, {weight: "w"}, saved)
    assert {x.device.type for x in optimiser.state[weight].values()} == {"meta"}


def test_bf16_is_refused_where_it_is_emulated() -> None:
    with pytest.raises(ConfigError, match="bf16 is offered on CUDA only"):
        autocast("bf16", torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_our_adam_steps_bit_for_bit_like_that_of_torch(dtype: torch.dtype) -> None:
    """State and weights, with two groups, a part that gets its first gradient late, and none."""

    def run(make: Any) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        one, two, never = (
            torch.nn.Parameter(torch.randn(size, generator=generator, dtype=dtype))
            for size in ((5, 3), (4,), (2,))
        )
        optimiser = make([{"params": [one], "lr": 0.1}, {"params": [two, never], "lr": 0.01}])
        for number in range(6):
            optimiser.zero_grad()
            one.grad = torch.randn(5, 3, generator=generator, dtype=dtype)
            if number >= 2:
                two.grad = torch.randn(4, generator=generator, dtype=dtype)
            optimiser.step()
            for group in optimiser.param_groups:
                group["lr"] *= 0.9
        assert never not in optimiser.state or not optimiser.state[never]
        kept = [optimiser.state[p][key] for p in (one, two) for key in ("step", "exp_avg")]
        return [one.detach(), two.detach(), *kept, optimiser.state[one]["exp_avg_sq"]]

    ours = run(lambda groups: adam(groups, eps=1e-5))
    theirs = run(lambda groups: torch.optim.Adam(groups, eps=1e-5, fused=True))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == other.dtype and torch.equal(mine, other)
