"""The table of discrete actions: a bijection, one flat mask, and what it refuses."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from forethought.config import ConfigError
from forethought.envs import make_env
from forethought.spaces import ActionCodec, EnvError, EnvSpec, nested, random_action
from forethought.spaces.action_codec import ANY, is_discrete, table_of
from tests.discrete_actions import (
    ACTIONS,
    DISTINCT,
    SPACE,
    TABLE,
    CommandEnv,
    airspace,
    small_codec,
)
from tests.stubs import task_env

SPACES = [
    spaces.Discrete(5, start=-2),
    spaces.MultiDiscrete([[2, 3], [1, 4]], start=[[0, 1], [5, 0]]),
    spaces.MultiBinary(3),
    spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Dict({"c": spaces.MultiDiscrete([3, 2])})}),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_rows_and_actions_are_one_to_one(space: Any) -> None:
    codec = ActionCodec(space)
    rows = np.arange(codec.size)
    actions = codec.decode(rows)
    seen = set()
    for i in rows:
        action = nested.index(actions, i)
        assert space.contains(
            nested.tree_map(np.asarray, action) if codec.leaves[0].shape else action
        )
        seen.add(str(action))
        assert codec.encode(action) == i
    assert len(seen) == codec.size == np.prod(codec.choices)
    np.testing.assert_array_equal(codec.encode(actions), rows)
    block = rows[: codec.size // 2 * 2].reshape(2, -1)
    np.testing.assert_array_equal(codec.encode(codec.decode(block)), block)


def test_26460_commands_are_441_distinct_ones() -> None:
    """Airspace: only the parameter that the command names matters."""
    space, distinct = airspace()
    codec = ActionCodec(space, table_of(space, distinct))
    assert codec.size == 441
    np.testing.assert_array_equal(codec.encode(codec.decode(np.arange(441))), np.arange(441))
    keys = list(space.spaces)
    every = np.array(list(itertools.product(*(range(space[k].n) for k in keys))))
    assert len(every) == 26_460
    rows = codec.encode({key: every[:, i] for i, key in enumerate(keys)})
    assert set(rows.tolist()) == set(range(441)), "all are reachable"
    same = codec.decode(rows)
    altitude = every[:, keys.index("command_type")] == 0
    altitude &= every[:, keys.index("aircraft_id")] < 20
    assert (same["altitude"][altitude] == every[altitude, keys.index("altitude")]).all()
    assert (same["heading"][altitude] == 0).all(), "what does not matter is at its first choice"


def test_each_factor_has_its_one_hot_and_not_to_matter_is_a_place_of_its_own() -> None:
    codec = small_codec()
    assert codec.names == ("level", "what", "who")  # gymnasium sorts the keys of a Dict
    assert codec.sizes == (4, 3, 3)
    nobody, climb, other = codec.one_hot([0, 2, 8])
    assert nobody.tolist() == [0, 0, 0, 1, 0, 0, 1, 0, 0, 1]
    assert climb.tolist() == [0, 1, 0, 0, 1, 0, 0, 1, 0, 0]
    assert other.tolist() == [0, 0, 0, 1, 0, 1, 0, 0, 1, 0]
    flat = ActionCodec(spaces.Discrete(3, start=4))
    assert flat.one_hot(np.arange(3)).tolist() == np.eye(3).tolist()


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: ActionCodec(spaces.MultiDiscrete([100] * 3)), "has 1,000,000 tuples of choices"),
        (lambda: ActionCodec(SPACE, TABLE + TABLE[:1]), "Two rows of distinct_actions"),
        (
            lambda: ActionCodec(spaces.MultiDiscrete([2, 2]), ((0, -1), (0, 1), (1, 0))),
            "Two rows of distinct_actions",
        ),
        (
            lambda: ActionCodec(spaces.MultiDiscrete([2, 2]), ((0, -1), (-1, 1))),
            "Two rows of distinct_actions",
        ),
        (lambda: ActionCodec(SPACE, ((0, 0),)), r"has shape \(1, 2\), but must have a row"),
        (lambda: ActionCodec(SPACE, ((0, 2, 0),)), "Row 0 of distinct_actions has 2 for what"),
        (lambda: table_of(SPACE, {"who": [0]}), "has columns for who, but the action has"),
        (lambda: table_of(SPACE, {**DISTINCT, "who": [0]}), "differ in length"),
        (
            lambda: ActionCodec(spaces.Dict({"gas": spaces.Box(-1, 1, (1,))})),
            "'gas' of the action is Box.* which is no choice among finitely many",
        ),
        (lambda: small_codec().check_mask((8,)), r"one entry for each of the 9 distinct actions"),
    ],
)  # fmt: skip
def test_tables_that_make_no_sense_are_refused(make: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make()


def test_actions_that_do_not_exist_are_refused() -> None:
    codec = small_codec()
    with pytest.raises(EnvError, match="has 3 for level, which has 3 choices from 0 on"):
        codec.encode({"who": 0, "what": 0, "level": 3})
    with pytest.raises(EnvError, match="There is no action 9: there are 9, counted from 0"):
        codec.decode(9)
    half = ActionCodec(SPACE, tuple(row for row in TABLE if row[2] != 1))
    with pytest.raises(EnvError, match=r"\[0, 0, 1\] \(of level, what, who\) are no action"):
        half.encode({"who": 1, "what": 0, "level": 0})
    with pytest.raises(EnvError, match="has what, who, but must have level, what, who"):
        codec.encode({"who": 0, "what": 0})
    with pytest.raises(EnvError, match="has level, more, what, who, but must have level"):
        codec.encode({"who": 0, "what": 0, "level": 0, "more": 1})
    with pytest.raises(EnvError, match=r"'who' of the action is 0\.5, but a choice is a whole"):
        codec.encode({"who": 0.5, "what": 0, "level": 0})
    with pytest.raises(EnvError, match=r"has shape \(3,\), but must end in \(2,\)"):
        ActionCodec(spaces.MultiDiscrete([2, 2])).encode(np.zeros(3, int))


def test_which_spaces_are_discrete() -> None:
    assert all(map(is_discrete, SPACES))
    assert not is_discrete(spaces.Box(0, 1, (1,)))
    assert not is_discrete(spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Box(0, 1, (1,))}))


def test_random_play_is_uniform_over_distinct_legal_actions() -> None:
    spec = EnvSpec("stub", spaces.Discrete(2), SPACE, None, 1, True, distinct_actions=TABLE)
    rng, n = np.random.default_rng(0), 9000
    counts = np.bincount(spec.action_codec.encode(random_action(spec, rng, n)), minlength=ACTIONS)
    assert abs(counts - 1000).max() < 120  # four standard deviations
    legal = np.tile(np.arange(ACTIONS) % 2 == 0, (n, 1))
    drawn = spec.action_codec.encode(random_action(spec, rng, n, legal))
    assert set(drawn.tolist()) == {0, 2, 4, 6, 8}
    assert abs(np.bincount(drawn)[::2] - 1800).max() < 160


def test_an_environments_table_reaches_the_agents_spec() -> None:
    env = make_env("gym:tests.discrete_actions:stub/Command-v0", 2)
    assert env.spec_for_agent.distinct_actions == TABLE
    assert env.spec_for_agent.action_codec.size == ACTIONS
    assert env.spec_for_agent.mask_source == "action_mask"
    env.close()


def test_a_mask_with_no_legal_action_stops_at_the_environment() -> None:
    env = task_env(CommandEnv)
    env.reset(seed=0)
    env.unwrapped.mask = lambda: np.zeros(ACTIONS, bool)  # type: ignore[attr-defined]
    with pytest.raises(EnvError, match="action_mask of environment 0 at step 0 allows no action"):
        env.reset(seed=0)


def test_when_all_is_over_nothing_needs_to_be_legal() -> None:
    env = task_env(lambda: CommandEnv(length=1))
    env.reset(seed=0)
    _, _, terminated, _, info = env.step({"who": 2, "what": 0, "level": 0})
    assert terminated
    assert not info["action_mask"].any()


def test_unused_factors_are_marked_by_minus_one() -> None:
    assert ANY == -1
    assert TABLE[0] == (ANY, ANY, 2)
