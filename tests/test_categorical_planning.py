"""Categorical MPPI on problems whose best sequence is known."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from forethought.maths import draw_index
from forethought.planning.categorical import (
    CategoricalNoise,
    CategoricalPlan,
    CategoricalSettings,
    categorical_mppi,
    even,
    refit,
    warm_start,
)

SETTINGS = CategoricalSettings(elites=16, min_probability=0.05, temperature=2.0)


def run(
    table: Tensor,
    *,
    samples: int = 128,
    iterations: int = 6,
    legal: Tensor | None = None,
    explore: bool = False,
    policy: Tensor | None = None,
    seed: int = 0,
    settings: CategoricalSettings = SETTINGS,
) -> CategoricalPlan:
    """Plan where the value of a sequence is table[a0, a1, a2]."""
    generator = torch.Generator().manual_seed(seed)
    actions = len(table)
    noise = CategoricalNoise(
        torch.rand(iterations, 3, 1, samples, generator=generator),
        torch.rand(1, 1, generator=generator),
    )
    none = torch.zeros(3, 1, 0, dtype=torch.int64)

    def score(a: Tensor, _: int) -> Tensor:
        return table[a[0], a[1], a[2]]

    last, first = torch.zeros(3, 1, actions), torch.tensor([True])
    proposals = none if policy is None else policy
    return categorical_mppi(score, proposals, last, first, legal, noise, settings, explore)


def test_iterating_finds_the_best_of_8000_sequences() -> None:
    """Values that add up: each iteration knows more; one round of random sequences does not."""
    generator = torch.Generator().manual_seed(1)
    steps = torch.randn(3, 20, generator=generator)
    table = steps[0][:, None, None] + steps[1][:, None] + steps[2]
    found = run(table)
    assert found.values.max() == table.max()
    assert found.action.item() == int(steps[0].argmax())
    assert run(table, iterations=1).values.max() < table.max()


def test_only_the_first_step_keeps_to_the_legal_actions() -> None:
    table = torch.zeros(6, 6, 6)
    table[5] = 10.0  # would be best, but is illegal now
    table[2, 5, 5] = 1.0
    legal = torch.tensor([[True, True, True, False, True, False]])
    found = run(table, legal=legal)
    assert found.action.item() == 2
    assert found.values[0, 0] == 1.0, "later steps may take it"
    assert (found.mean[0, 0, ~legal[0]] == 0).all()
    assert (found.mean[1:] > 0).all()
    drawn = {run(table, legal=legal, explore=True, seed=s).action.item() for s in range(60)}
    assert drawn <= {0, 1, 2, 4}


def test_policy_sequences_compete_and_can_win() -> None:
    table = torch.zeros(50, 50, 50)
    table[7, 8, 9] = 5.0
    policy = torch.tensor([7, 8, 9]).view(3, 1, 1)
    found = run(table, policy=policy, samples=8, settings=CategoricalSettings(4, 0.05, 2.0))
    assert found.action.item() == 7
    assert 8 in found.elites[-1].tolist()[0], "the policy's are the last columns"


def test_exploration_draws_from_the_refitted_distribution() -> None:
    table = torch.zeros(4, 4, 4)
    table[3] = 20.0
    settings = CategoricalSettings(elites=8, min_probability=0.4, temperature=2.0)
    counts = torch.zeros(4)
    for seed in range(200):
        found = run(table, samples=32, iterations=2, explore=True, seed=seed, settings=settings)
        counts[found.action] += 1
    torch.testing.assert_close(found.mean[0, 0], torch.tensor([0.1, 0.1, 0.1, 0.7]))
    assert abs(counts[3].item() - 140) < 26  # four standard deviations
    assert (counts[:3] > 4).all()


def test_refit_by_hand() -> None:
    base = torch.full((1, 1, 4), 0.25, dtype=torch.float64)
    weights = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64)
    elites = torch.tensor([[[1, 3, 1]]])
    expected = 0.9 * torch.tensor([0.0, 0.7, 0.0, 0.3], dtype=torch.float64) + 0.1 * 0.25
    torch.testing.assert_close(refit(weights, elites, base, 0.1)[0, 0], expected)


def test_warm_start_by_hand() -> None:
    last = torch.tensor([[0.9, 0.1, 0.0], [0.2, 0.2, 0.6]]).view(2, 1, 3).repeat(1, 3, 1)
    legal = torch.tensor([[True, True, True], [True, True, True], [True, False, False]])
    base = even(legal, last)
    begun = warm_start(last, torch.tensor([True, False, False]), base)
    torch.testing.assert_close(begun[:, 0], torch.full((2, 3), 1 / 3))
    half = 0.5 / 3 + 0.5 * torch.tensor([0.2, 0.2, 0.6])
    torch.testing.assert_close(begun[0, 1], half)
    assert begun[0, 2].tolist() == [1.0, 0.0, 0.0], "what was planned, as far as it is legal"
    torch.testing.assert_close(begun[1], torch.full((3, 3), 1 / 3))


def test_a_plan_of_which_nothing_is_legal_is_forgotten() -> None:
    last = torch.tensor([0.0, 0.0, 1.0]).expand(2, 1, 3)
    begun = warm_start(last, torch.tensor([False]), even(torch.tensor([[True, True, False]]), last))
    assert begun[0, 0].tolist() == [0.5, 0.5, 0.0]


def test_sequences_without_a_value_count_as_zero() -> None:
    table = torch.full((3, 3, 3), -1.0)
    table[1, 1, 1] = math.nan
    assert run(table).action.item() == 1


@pytest.mark.parametrize("n", [1, 2, 441])
def test_draws_follow_the_probabilities_and_never_take_what_has_none(n: int) -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(n, generator=generator)
    p[1::3] = 0.0
    ends = torch.tensor([0.0, 1 - 2**-24])  # the least and the greatest that torch.rand gives
    uniform = torch.cat((torch.rand(20_000, generator=generator), ends))
    drawn = draw_index(p, uniform)
    assert (p[drawn] > 0).all()
    share = torch.bincount(drawn, minlength=n) / len(drawn)
    torch.testing.assert_close(share, p / p.sum(), atol=0.02, rtol=0)


def test_the_slow_way_to_the_best_sequence_agrees() -> None:
    """Exhaustive search over 216 sequences, ten problems without any structure."""
    for seed in range(10):
        table = torch.randn(6, 6, 6, generator=torch.Generator().manual_seed(seed))
        best = max(itertools.product(range(6), repeat=3), key=lambda a, t=table: t[a].item())
        found = run(table, samples=512, seed=seed)
        assert found.action.item() == best[0]
