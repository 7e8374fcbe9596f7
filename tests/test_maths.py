"""Formulas with numbers that a person can check."""

from __future__ import annotations

import math

import pytest
import torch

from forethought.maths import (
    RunningScale,
    TwoHot,
    discount_for,
    lambda_returns,
    n_step_returns,
    one_step_returns,
    percentile_range,
    symexp,
    symlog,
)

SMALL = TwoHot(bins=5, low=-2, high=2)  # centres -2, -1, 0, 1, 2


def column(*values: float) -> torch.Tensor:
    """[T, 1]"""
    return torch.tensor(values, dtype=torch.float64).unsqueeze(1)


def test_symlog_squashes_and_symexp_undoes_it() -> None:
    x = torch.tensor([0.0, 1.0, -1.0, math.e - 1, -1000.0], dtype=torch.float64)
    assert symlog(x)[3].item() == pytest.approx(1.0)
    assert symlog(x)[2].item() == pytest.approx(-math.log(2))
    torch.testing.assert_close(symexp(symlog(x)), x)


def test_two_hot_of_a_value_on_a_bin_is_one_hot() -> None:
    x = torch.tensor([0.0, math.e - 1], dtype=torch.float64)  # symlog 0 and 1
    expected = torch.tensor([[0, 0, 1, 0, 0], [0, 0, 0, 1, 0]], dtype=torch.float64)
    torch.testing.assert_close(SMALL.encode(x), expected, atol=1e-12, rtol=0)


def test_two_hot_between_bins_splits_by_distance() -> None:
    x = symexp(torch.tensor([0.25, -1.9], dtype=torch.float64))
    expected = torch.tensor([[0, 0, 0.75, 0.25, 0], [0.9, 0.1, 0, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(SMALL.encode(x), expected, atol=1e-12, rtol=0)


def test_two_hot_clamps_what_is_off_the_scale() -> None:
    x = torch.tensor([1e6, -1e6])
    encoded = SMALL.encode(x)
    assert encoded[0].tolist() == [0, 0, 0, 0, 1]
    assert encoded[1].tolist() == [1, 0, 0, 0, 0]


def test_official_bins_are_a_fifth_apart() -> None:
    """symlog(1) = 0.693: between bin 53 (0.6) and 54 (0.8), nearer the first."""
    lower, above = TwoHot().position(torch.tensor(1.0, dtype=torch.float64))
    assert lower.item() == 53
    assert above.item() == pytest.approx((math.log(2) - 0.6) / 0.2)


def test_decode_undoes_encode() -> None:
    x = torch.tensor([-300.0, -1.5, 0.0, 0.3, 7.0, 2000.0], dtype=torch.float64)
    logits = torch.log(TwoHot().encode(x) + 1e-300)
    torch.testing.assert_close(TwoHot().decode(logits), x)


def test_decode_of_equal_logits_is_zero() -> None:
    assert TwoHot().decode(torch.zeros(101)).item() == pytest.approx(0, abs=1e-5)


def test_half_precision_logits_are_decoded_in_full() -> None:
    """Half precision would give 502 for 500."""
    x = torch.tensor([50.0, 200.0, 500.0])
    logits = torch.log(TwoHot().encode(x) + 1e-30)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(TwoHot().decode(logits), x, rtol=1e-3, atol=0)
        assert TwoHot().decode(logits.bfloat16()).dtype is torch.float32
        assert TwoHot().cross_entropy(logits.bfloat16(), x).dtype is torch.float32


def test_cross_entropy_equals_the_sum_over_all_bins() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50, 101, generator=generator, dtype=torch.float64)
    target = 100 * torch.randn(50, generator=generator, dtype=torch.float64)
    slow = -(TwoHot().encode(target) * torch.log_softmax(logits, -1)).sum(-1)
    torch.testing.assert_close(TwoHot().cross_entropy(logits, target), slow)


def test_one_step_target_by_hand() -> None:
    y = one_step_returns(column(1.0), column(0.0), column(10.0), gamma=0.9)
    assert y.item() == pytest.approx(10.0)  # 1 + 0.9 * 10


def test_termination_cuts_the_bootstrap() -> None:
    assert one_step_returns(column(1.0), column(1.0), column(10.0), gamma=0.9).item() == 1.0


def test_n_step_target_by_hand() -> None:
    """Two rewards and the value after them; at the end of the slice only one reward is left."""
    y = n_step_returns(column(1, 2, 3), column(0, 0, 0), column(10, 20, 30), gamma=0.5, n=2)
    assert y.squeeze(1).tolist() == [1 + 0.5 * 2 + 0.25 * 20, 2 + 0.5 * 3 + 0.25 * 30, 3 + 15]


def test_n_step_stops_at_a_termination() -> None:
    y = n_step_returns(column(1, 2, 3), column(0, 1, 0), column(10, 20, 30), gamma=0.5, n=3)
    assert y.squeeze(1).tolist() == [1 + 0.5 * 2, 2, 3 + 15]


def test_lambda_returns_lie_between_one_step_and_the_whole_slice() -> None:
    args = (column(1, 2, 3), column(0, 0, 0), column(10, 20, 30), 0.5)
    torch.testing.assert_close(lambda_returns(*args, lam=0.0), one_step_returns(*args))
    torch.testing.assert_close(lambda_returns(*args, lam=1.0), n_step_returns(*args, n=3))
    y = lambda_returns(*args, lam=0.5).squeeze(1)
    # From the end: 3 + .5*30 = 18; 2 + .5*(10 + 9) = 11.5; 1 + .5*(5 + 5.75) = 6.375
    assert y.tolist() == [6.375, 11.5, 18.0]


def test_lambda_returns_stop_at_a_termination() -> None:
    y = lambda_returns(column(1, 2), column(1, 0), column(10, 20), 0.5, lam=0.9)
    assert y[0].item() == 1.0


def test_percentile_range_interpolates() -> None:
    """Of 0..20, the 5th percentile is 1 and the 95th is 19; of 0..10, 0.5 and 9.5."""
    assert percentile_range(torch.arange(21.0)).item() == pytest.approx(18.0)
    assert percentile_range(torch.arange(11.0)).item() == pytest.approx(9.0)


def test_running_scale_moves_a_hundredth_of_the_way() -> None:
    scale = RunningScale(0.01, torch.float64, torch.device("cpu"))
    wide = scale.after(torch.arange(21.0, dtype=torch.float64))
    assert wide.item() == pytest.approx(1 + 0.01 * (18 - 1))
    assert scale.value.item() == 1.0, "only the caller decides to keep it"


def test_running_scale_never_aims_below_one() -> None:
    scale = RunningScale(0.01, torch.float64, torch.device("cpu"))
    assert scale.after(torch.zeros(10, dtype=torch.float64)).item() == 1.0


@pytest.mark.parametrize(
    ("length", "gamma"), [(500, 0.99), (100, 0.95), (200, 0.975), (1000, 0.995), (10, 0.95)]
)
def test_discount_heuristic(length: int, gamma: float) -> None:
    assert discount_for(length) == pytest.approx(gamma)
