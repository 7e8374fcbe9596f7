"""Nested values, structures of spaces, the boundary check, masks, the action codec, random play."""

import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from gymnasium import spaces

from forethought.config import ConfigError
from forethought.spaces import (
    Column,
    EnvError,
    EnvSpec,
    Structure,
    entity_keys,
    masked_mean,
    nested,
    random_action,
)
from forethought.spaces.agent_view import agent_space, native_action
from forethought.spaces.masks import stored_legal
from tests.stubs import EntityEnv

TREE = {"a": {"b": np.array([1, 2]), "c": np.array([3, 4])}, "d": np.array([5, 6])}


def test_spaces_do_not_import_torch():
    code = "import sys, forethought.spaces; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Nested values


def test_flatten_joins_keys_and_unflatten_undoes_it():
    flat = nested.flatten(TREE)
    assert list(flat) == ["a/b", "a/c", "d"]
    assert nested.bitwise_equal(nested.unflatten(flat), TREE)
    assert nested.flatten(7) == {"": 7}
    assert nested.unflatten({"": 7}) == 7


def test_tree_map_walks_several_trees_and_refuses_unequal_ones():
    total = nested.tree_map(lambda x, y: int(x.sum() + y.sum()), TREE, TREE)
    assert total == {"a": {"b": 6, "c": 14}, "d": 22}
    with pytest.raises(ValueError, match="Trees differ: keys a, d beside a"):
        nested.tree_map(lambda x, y: x, TREE, {"a": TREE["a"]})


def test_stack_and_index_are_inverse_and_copy():
    stacked = nested.stack([TREE, nested.tree_map(lambda x: x + 10, TREE)])
    assert stacked["a"]["b"].tolist() == [[1, 2], [11, 12]]
    assert nested.bitwise_equal(nested.index(stacked, 0), TREE)
    stacked["d"][0, 0] = 99
    assert TREE["d"][0] == 5


def test_stack_and_index_serve_torch():
    tree = nested.tree_map(torch.from_numpy, TREE)
    stacked = nested.stack([tree, tree, tree])
    assert isinstance(stacked["d"], torch.Tensor)
    assert stacked["a"]["c"].shape == (3, 2)
    assert nested.index(stacked, 2)["d"].tolist() == [5, 6]


def test_bitwise_equal_sees_types_keys_and_the_sign_of_zero():
    zero = np.zeros(1, np.float32)
    assert nested.bitwise_equal({"a": zero}, {"a": zero.copy()})
    assert not nested.bitwise_equal({"a": zero}, {"a": -zero})
    assert not nested.bitwise_equal({"a": zero}, {"a": zero.astype(np.float64)})
    assert not nested.bitwise_equal({"a": zero}, {"b": zero})


# Structures

EVERYTHING = spaces.Dict(
    {
        "box": spaces.Box(-1.0, 1.0, (2,), np.float64),
        "image": spaces.Box(0, 255, (2, 2), np.uint8),
        "flag": spaces.Box(0, 1, (3,), np.bool_),
        "pair": spaces.Tuple((spaces.Discrete(3, start=1), spaces.MultiDiscrete([2, 4]))),
        "bits": spaces.MultiBinary(5),
    }
)


def value():
    return {
        "box": np.array([0.5, -0.5]),
        "image": np.full((2, 2), 7, np.uint8),
        "flag": np.array([True, False, True]),
        "pair": (3, np.array([1, 3])),
        "bits": np.ones(5, np.int8),
    }


def test_structure_names_shapes_and_stored_types():
    leaves = {leaf.path: (leaf.shape, leaf.dtype.name) for leaf in Structure.of(EVERYTHING).leaves}
    assert leaves == {
        "bits": ((5,), "int8"),
        "box": ((2,), "float32"),  # float64 is stored as float32
        "flag": ((3,), "bool"),
        "image": ((2, 2), "uint8"),
        "pair/0": ((), "int64"),
        "pair/1": ((2,), "int64"),
    }
    bare = Structure.of(spaces.Box(-1, 1, (4, 3), np.float32)).leaves[0]
    assert (bare.path, bare.nbytes) == ("", 48)


def test_zeros_have_leading_axes():
    zeros = Structure.of(EVERYTHING).zeros((6, 2))
    assert zeros["image"].shape == (6, 2, 2, 2)
    assert zeros["pair"]["0"].shape == (6, 2)
    assert not any(leaf.any() for leaf in nested.flatten(zeros).values())


def test_check_gives_a_copy_in_stored_types():
    given = value()
    checked = Structure.of(EVERYTHING).check(given, "observation", 0, 0)
    assert checked["box"].dtype == np.float32
    assert checked["pair"]["0"] == 3
    given["image"][:] = 0
    assert (checked["image"] == 7).all()


@pytest.mark.parametrize(
    ("key", "bad", "words"),
    [
        ("box", np.array([0.0, np.nan]), "'box' of environment 4 at step 17 is not finite"),
        ("box", np.array([0.0, 1e300]), "is not finite as float32: it holds 1e.300"),
        ("box", np.array([0.0, np.inf]), "it holds inf"),
        ("box", np.zeros(3), r"has shape \(3,\), but its space says \(2,\)"),
        ("box", [[1.0], [1.0, 2.0]], "'box' of environment 4 at step 17 is not a regular array"),
        ("box", {"x": 1.0}, "is a dict, but its space says an array"),
        ("image", np.zeros((2, 2)), "has dtype float64, but its space says uint8"),
        ("image", np.zeros((2, 2), np.int64), "has dtype int64"),
        ("pair", (4, np.array([0, 0])), "'pair/0' .* holds 4, which lies outside"),
        ("pair", (0, np.array([0, 0])), "'pair/0' .* holds 0"),  # starts at 1
        ("pair", (1, np.array([0, 4])), "'pair/1' .* holds 4"),
        ("pair", (1,), r"'pair' .* has keys \['0'\], but its space says \['0', '1'\]"),
        ("bits", np.full(5, 2, np.int8), "holds 2"),
        ("flag", np.array([0.0, 1.0, 0.0]), "has dtype float64"),
    ],
)
def test_a_bad_value_is_refused_with_environment_step_and_key(key, bad, words):
    with pytest.raises(EnvError, match=words):
        Structure.of(EVERYTHING).check({**value(), key: bad}, "observation", 4, 17)


def test_missing_and_extra_keys_are_refused():
    short = {k: v for k, v in value().items() if k != "box"}
    with pytest.raises(EnvError, match="has keys"):
        Structure.of(EVERYTHING).check(short, "observation", 0, 1)
    with pytest.raises(EnvError, match="has keys"):
        Structure.of(EVERYTHING).check({**value(), "more": 1}, "observation", 0, 1)
    with pytest.raises(EnvError, match="is a int, but its space has keys"):
        Structure.of(EVERYTHING).check(3, "observation", 0, 1)


def test_spaces_that_cannot_be_stored_are_refused():
    with pytest.raises(ConfigError, match="A Text space at 'name' cannot be stored"):
        Structure.of(spaces.Dict({"name": spaces.Text(5)}))
    with pytest.raises(ConfigError, match="'a/b' of a Dict space"):
        Structure.of(spaces.Dict({"a/b": spaces.Discrete(2)}))
    with pytest.raises(ConfigError, match="is empty"):
        Structure.of(spaces.Dict({}))


# Masks


def test_entity_keys_pair_a_key_with_its_mask():
    assert entity_keys(EntityEnv().observation_space) == {"craft": "craft_mask"}
    assert entity_keys(spaces.Box(-1, 1, (2,))) == {}
    wrong = spaces.Dict({"craft": spaces.Box(-1, 1, (4, 2)), "craft_mask": spaces.MultiBinary(3)})
    with pytest.raises(ConfigError, match="'craft_mask' must be boolean with one entry per row"):
        entity_keys(wrong)


@pytest.mark.parametrize("convert", [np.array, torch.tensor], ids=["numpy", "torch"])
def test_masked_mean_ignores_absent_rows_even_nan(convert):
    rows = convert([[[1.0, 2.0], [3.0, 6.0], [float("nan"), 1e9]], [[1.0, 1.0]] * 3])
    mask = convert([[True, True, False], [False, False, False]])
    assert masked_mean(rows, mask).tolist() == [[2.0, 4.0], [0.0, 0.0]]


@pytest.mark.parametrize("kind", [torch.bool, torch.uint8, torch.float32])
def test_a_stored_mask_of_any_type_says_what_is_legal(kind):
    """Where all is over nothing may be legal; then all counts as legal."""
    mask = torch.tensor([[[1, 0], [0, 1]], [[0, 0], [1, 1]]], dtype=kind)  # [T, B, N]
    legal = [[[True, False], [False, True]], [[True, True], [True, True]]]
    assert stored_legal(mask).tolist() == stored_legal(mask.numpy()).tolist() == legal


# The action codec


def test_bounded_boxes_become_one_interval_and_come_back():
    native = spaces.Box(np.array([-2.0, 0.0]), np.array([2.0, 10.0]), dtype=np.float64)
    seen = agent_space(native, action=True)
    assert (seen.dtype, seen.low.tolist(), seen.high.tolist()) == (np.float32, [-1, -1], [1, 1])
    for given, expected in [([-1, -1], [-2, 0]), ([0, 0], [0, 5]), ([1, 0.5], [2, 7.5])]:
        action = native_action(native, np.array(given, np.float32))
        assert action.tolist() == expected
        assert action.dtype == np.float64


def test_unit_boxes_pass_untouched_and_observations_keep_their_bounds():
    unit = spaces.Box(-1.0, 1.0, (2,), np.float32)
    action = np.array([0.1, -0.7], np.float32)
    assert native_action(unit, action).tobytes() == action.tobytes()
    wide = agent_space(spaces.Box(-8.0, 8.0, (1,), np.float64), action=False)
    assert (wide.low[0], wide.dtype) == (-8.0, np.float32)
    free = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    assert native_action(free, np.array([3.0], np.float32)) == 3.0


def test_tuples_are_dicts_for_agents_and_tuples_for_environments():
    native = spaces.Tuple((spaces.Discrete(3), spaces.Box(0.0, 4.0, (1,), np.float32)))
    seen = agent_space(native, action=True)
    assert isinstance(seen, spaces.Dict) and list(seen) == ["0", "1"]
    action = native_action(native, {"0": np.array(2), "1": np.zeros(1, np.float32)})
    assert isinstance(action, tuple) and native.contains(action)
    assert {2: "found"}[action[0]] == "found"  # tabular environments use it as a key


@pytest.mark.parametrize(
    ("low", "high", "inside", "outside"),
    [
        (-1.0, 1.0, [-1.0, np.nextafter(np.float32(1), np.float32(2))], [-1.001, 1.001]),
        (-4000.0, 4000.0, [-4000.0, 4000.0005], [-4000.1, 4000.1]),  # rounding grows with numbers
        (0.0, np.inf, [0.0, 3e38], [-0.001]),
        (-np.inf, 0.1, [-3e38, np.float64(0.1)], [0.2]),
        (-np.inf, np.inf, [-3e38, 3e38], []),
        (-np.finfo(np.float32).max, np.finfo(np.float32).max, [-3e38, 3e38], []),
    ],
)
def test_floats_are_held_to_their_bounds_up_to_rounding(low, high, inside, outside):
    structure = Structure.of(spaces.Box(low, high, (2,), np.float32))
    for x in inside:
        given = np.array([max(low, 0.0), x])
        assert structure.check(given, "observation", 0, 1)[1] == np.float32(x)
    for x in outside:
        with pytest.raises(EnvError, match=f"holds {x}, which lies outside its space"):
            structure.check(np.array([min(high, 0.0), x]), "action", 0, 1)


def test_bounds_of_each_element_are_its_own():
    box = spaces.Box(np.array([-1, -10], np.float32), np.array([1, 10], np.float32))
    Structure.of(box).check(np.array([0.5, 5.0]), "observation", 0, 1)
    with pytest.raises(EnvError, match=r"holds 5.0, which lies outside its space \[-1, 1\]"):
        Structure.of(box).check(np.array([5.0, 5.0]), "action", 0, 1)


@pytest.mark.parametrize(
    ("low", "high", "told"), [(-0.5, 0.5, "[-0.5, 0.5]"), (0, 2 * np.pi, "[0, 6.28319]")]
)
def test_the_bounds_that_are_told_are_those_that_were_declared(low, high, told):
    """Without the little that rounding may add to them."""
    structure = Structure.of(spaces.Box(low, high, (1,), np.float32))
    with pytest.raises(EnvError, match=re.escape(f"lies outside its space {told}")):
        structure.check(np.array([7.0]), "action", 0, 1)
    many = Structure.of(spaces.Discrete(10_000_000))
    with pytest.raises(
        EnvError, match=re.escape("10000000, which lies outside its space [0, 9999999]")
    ):
        many.check(10_000_000, "action", 0, 1)


# Random actions


def spec_for(action_space: spaces.Space) -> EnvSpec:
    return EnvSpec("stub", spaces.Discrete(2), action_space, None, 1, True)


def test_random_actions_are_in_the_space_and_reproducible():
    native = spaces.Dict(
        {
            "box": spaces.Box(-1.0, 1.0, (2,), np.float32),
            "choice": spaces.Discrete(4, start=3),
            "grid": spaces.MultiDiscrete([[2, 3], [4, 5]]),
            "bits": spaces.MultiBinary(3),
            "level": spaces.Box(0, 255, (1,), np.uint8),
            "free": spaces.Box(-np.inf, np.inf, (1,), np.float32),
        }
    )
    spec = spec_for(native)
    batch = random_action(spec, np.random.default_rng(1), 500)
    for i in range(500):
        assert native.contains(nested.index(batch, i))
    assert nested.bitwise_equal(batch, random_action(spec, np.random.default_rng(1), 500))
    assert not nested.bitwise_equal(batch, random_action(spec, np.random.default_rng(2), 500))


def test_random_actions_are_uniform():
    rng = np.random.default_rng(0)
    box = random_action(spec_for(spaces.Box(-1.0, 1.0, (1,), np.float32)), rng, 20_000)
    assert abs(box.mean()) < 0.02 and abs(box.std() - 1 / np.sqrt(3)) < 0.02
    counts = np.bincount(random_action(spec_for(spaces.Discrete(4)), rng, 20_000))
    assert abs(counts - 5000).max() < 250  # four standard deviations: 245


def test_random_actions_respect_the_mask_and_stay_uniform():
    mask = np.tile([False, True, False, True], (20_000, 1))
    choice = random_action(
        spec_for(spaces.Discrete(4, start=10)), np.random.default_rng(0), 20_000, mask
    )
    assert set(choice.tolist()) == {11, 13}
    assert abs((choice == 11).sum() - 10_000) < 300  # standard deviation 71
    pair = spec_for(spaces.MultiDiscrete([2, 3]))
    masked = random_action(pair, np.random.default_rng(0), 2, np.array([[0, 0, 0, 0, 0, 1]] * 2))
    assert masked.tolist() == [[1, 2], [1, 2]]
    both = spec_for(spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Discrete(2)}))
    only = random_action(both, np.random.default_rng(0), 8, np.array([[0, 0, 1, 0]] * 8))
    assert only["a"].tolist() == [1] * 8 and only["b"].tolist() == [0] * 8


def test_a_mask_that_allows_nothing_or_has_another_shape_is_refused():
    spec, rng = spec_for(spaces.Discrete(3)), np.random.default_rng(0)
    with pytest.raises(EnvError, match="environment 1 allows no choice"):
        random_action(spec, rng, 2, np.array([[1, 0, 0], [0, 0, 0]]))
    with pytest.raises(EnvError, match=r"has shape \(2, 2\), but \(2, 3\) is needed"):
        random_action(spec, rng, 2, np.ones((2, 2)))


def test_columns_are_part_of_the_spec():
    assert EntityEnv.columns == (Column("action_mask", (3,), np.dtype(bool), "action_mask"),)
