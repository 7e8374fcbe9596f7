"""The tree of priorities against sums and searches that a person can follow."""

from __future__ import annotations

import math
import re
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forethought.replay.priority_tree import MOST, PriorityTree
from forethought.replay.rows import ReplayError

QUICK = settings(derandomize=True, database=None, deadline=None, max_examples=100)


def tree_of(priorities: list[float] | np.ndarray) -> PriorityTree:
    tree = PriorityTree(len(priorities))
    for slot, priority in enumerate(priorities):
        tree.put_one(slot, float(priority))
    return tree


def slow_find(priorities: np.ndarray, mass: float) -> int:
    """The first slot at which the running sum exceeds the mass."""
    total = 0.0
    for slot, priority in enumerate(priorities.tolist()):
        total += priority
        if total > mass:
            return slot
    raise AssertionError("the mass lies outside")


def whole_numbers(size: int) -> st.SearchStrategy[list[int]]:
    """So that sums are exact in any order, and a mass can lie exactly on a border."""
    return st.lists(st.sampled_from([0, 0, 1, 2, 3, 1000]), min_size=1, max_size=size)


@QUICK
@given(whole_numbers(80))
def test_every_mass_finds_the_slot_that_the_running_sum_finds(priorities: list[int]):
    """Borders included: a slot begins with its first unit of mass and ends before the next one."""
    tree, plain = tree_of(priorities), np.array(priorities, np.float64)
    assert tree.total == plain.sum()
    assert tree.minimum == min(plain[plain > 0], default=math.inf)
    if plain.sum() == 0:
        return
    borders = np.concatenate([[0.0], np.cumsum(plain)])
    mass = np.concatenate([borders, borders + 0.5, borders - 0.5])
    mass = mass[(mass >= 0) & (mass < plain.sum())]
    assert tree.find(mass).tolist() == [slow_find(plain, x) for x in mass]


@pytest.mark.parametrize("size", [1, 31, 32, 33, 1024, 1025, 40_000])
def test_trees_of_every_depth(size: int):
    rng = np.random.default_rng(size)
    plain = rng.integers(0, 3, size).astype(np.float64)
    plain[-1] = 2.0
    tree = PriorityTree(size)
    tree.fill(plain)
    assert tree.total == plain.sum()
    ends = np.cumsum(plain)
    mass = rng.integers(0, int(ends[-1]), 300) + 0.5
    assert np.array_equal(tree.find(mass), np.searchsorted(ends, mass, side="right"))
    assert tree.find(np.array([ends[-1] - 0.5]))[0] == size - 1


def test_finding_15_no_invalid_slot_is_ever_drawn_and_strata_hold():
    """Half of the slots cannot be drawn (0). 10,000 draws: none of those, each from its own share
    of the mass, and each as often as its priority says (chi-square, p > 1e-3)."""
    rng = np.random.default_rng(0)
    size, batch = 200, 50
    priorities = rng.uniform(0.1, 3.0, size)
    priorities[rng.permutation(size)[: size // 2]] = 0.0
    tree = tree_of(priorities)
    ends = np.cumsum(priorities)
    begins, share = ends - priorities, priorities.sum() / batch
    counts: Counter[int] = Counter()
    for _ in range(200):
        slots = tree.draw(batch, rng)
        counts.update(slots.tolist())
        stratum = np.arange(batch)
        assert np.all(priorities[slots] > 0)
        assert np.all(begins[slots] < (stratum + 1) * share + 1e-9)
        assert np.all(ends[slots] > stratum * share - 1e-9)
    draws = 200 * batch
    odds = {slot: p / priorities.sum() for slot, p in enumerate(priorities.tolist()) if p > 0}
    assert set(counts) <= set(odds)
    statistic = sum((counts[slot] - draws * p) ** 2 / (draws * p) for slot, p in odds.items())
    half = torch.tensor([(len(odds) - 1) / 2, statistic / 2], dtype=torch.float64)
    assert float(torch.special.gammaincc(half[0], half[1])) > 1e-3


def test_defect_2_5_d_no_zero_leaf_is_found_at_a_border_nor_by_rounding():
    """Priorities of very different sizes among zeros: rounding must not push a mass out of its
    node, nor a border give a mass to the zero beside it."""
    rng = np.random.default_rng(1)
    for _ in range(30):
        priorities = 10.0 ** rng.uniform(-12, 6, 3000) * (rng.random(3000) < 0.3)
        priorities[-7:] = 0.0
        tree = tree_of(priorities)
        ends = np.cumsum(priorities)
        mass = np.concatenate([ends, np.nextafter(ends, 0), np.nextafter(ends, np.inf), [0.0]])
        mass = np.concatenate([mass, [tree.total, np.nextafter(tree.total, 0)]])
        assert np.all(priorities[tree.find(mass[mass <= tree.total])] > 0)


def test_defect_2_5_d_a_mass_that_is_rounded_onto_the_end_of_its_node_stays_inside():
    """1.5 in one node, v = 2^52 + 4 in the next, where whole numbers are neighbours: the sum is
    rounded to v + 2, and v + 1, which lies below it, less 1.5 is rounded to v: the node's very end.
    The only leaf of that node is slot 32."""
    priorities = np.zeros(64)
    priorities[[0, 32]] = 1.5, 2.0**52 + 4
    tree = tree_of(priorities)
    assert tree.total == 2.0**52 + 6
    assert (2.0**52 + 5) - 1.5 == 2.0**52 + 4
    assert tree.find(np.array([2.0**52 + 5])).tolist() == [32]


def test_defect_2_5_d_nothing_drifts():
    """Case 24: ten million changes of sizes from 1e-9 to 1e9 leave what a new tree of the same
    leaves has, bit for bit; with differences added up, the small ones would be lost."""
    rng = np.random.default_rng(2)
    tree, plain = PriorityTree(5000), np.zeros(5000)
    slots, values = rng.integers(0, 5000, 20_000), 10.0 ** rng.uniform(-9, 9, 20_000)
    for _ in range(500):
        values = np.roll(values, 7)
        tree.put(slots, values)
        assert tree.total > 0  # settles the parents each time
    plain[slots] = values
    again = PriorityTree(5000)
    again.fill(plain)
    assert (tree.total, tree.minimum) == (again.total, again.minimum)
    tree.put(np.arange(5000), np.full(5000, 1e-9))
    fresh = tree_of(np.full(5000, 1e-9))
    assert tree.total == fresh.total == pytest.approx(5e-6, rel=1e-12)
    assert tree.minimum == fresh.minimum == 1e-9
    mass = rng.uniform(0, tree.total, 500)
    assert np.array_equal(tree.find(mass), fresh.find(mass))


@QUICK
@given(st.lists(st.tuples(st.integers(0, 99), st.floats(0, 1e6)), max_size=60), st.data())
def test_any_order_of_changes_leaves_the_tree_of_its_leaves(changes, data):
    tree, plain = PriorityTree(100), np.zeros(100)
    for slot, value in changes:
        tree.put_one(slot, value)
        plain[slot] = value
        if data.draw(st.booleans()):
            assert tree.total == pytest.approx(math.fsum(plain), rel=1e-12)
    fresh = PriorityTree(100)
    fresh.fill(plain)
    assert (tree.total, tree.minimum) == (fresh.total, fresh.minimum)
    assert tree.minimum == min(plain[plain > 0], default=math.inf)


def test_many_changes_without_a_draw_are_settled_on_the_way():
    tree = PriorityTree(20_000)
    for slot in range(20_000):
        tree.put_one(slot, 1.0)
    assert len(tree._unsettled) < 5000
    assert tree.total == 20_000


@pytest.mark.parametrize(
    "bad", [0.0, -1.0, math.nan, math.inf, -math.inf, math.nextafter(MOST, math.inf)]
)
def test_case_24_priorities_that_cannot_be_are_refused_and_change_nothing(bad: float):
    tree = tree_of([1.0, 2.0, 3.0])
    with pytest.raises(
        ReplayError, match=re.escape(f"A priority of {bad} cannot be kept: priorities")
    ):
        tree.put(np.array([0, 1]), np.array([5.0, bad]))
    assert tree.leaves[:3].tolist() == [1.0, 2.0, 3.0]
    assert tree.total == 6.0


def test_case_24_the_greatest_priorities_have_a_finite_sum():
    tree = PriorityTree(2**16)
    tree.put(np.arange(2**16), np.full(2**16, MOST))
    assert math.isfinite(tree.total) and tree.total / MOST == pytest.approx(2**16)
    assert math.isfinite(2.0**64 * MOST)
