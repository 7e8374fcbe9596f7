"""One table of all distinct actions of a discrete space, however it is nested.

An action of Discrete, MultiDiscrete, MultiBinary, or a Dict of such is a tuple of choices, one per
factor, and the table lists the distinct ones. Row i is action i for networks, planners and masks;
`decode` makes of i what the environment takes, `encode` finds i again.

    factor          aircraft   command    altitude   heading
    choices             2          2          3          2
    action 0            0       altitude      0        (none)     where a factor does not matter,
    action 1            0       altitude      1        (none)     -1 stands in the table
    ...
    action 9            1       heading     (none)       1

Without a declaration every tuple is an action of its own. An environment in which many tuples do
the same declares `distinct_actions`, so that no agent has to learn that they are the same.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from forethought.config import ConfigError
from forethought.spaces.nested import Tree, flatten, unflatten
from forethought.spaces.structure import EnvError, subspaces

Ints = NDArray[np.int64]
Table = tuple[tuple[int, ...], ...]
MOST_ACTIONS = 100_000
"""Rows of a table; beyond, an environment has to say which of its actions are distinct."""
ANY = -1
"""In a table: the factor does not matter."""


@dataclass(frozen=True)
class Leaf:
    """One array of the action: its factors are the elements, in row-major order."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    choices: tuple[int, ...]
    start: Ints

    @property
    def factors(self) -> int:
        return len(self.choices)


class ActionCodec:
    """The table of a space, and the way from its rows to actions and back."""

    def __init__(self, space: gymnasium.Space[Any], distinct: Table | None = None) -> None:
        self.leaves: list[Leaf] = []
        _collect(space, "", self.leaves)
        if not self.leaves:
            raise ConfigError(f"The actions {space} have no member: there is nothing to decide.")
        self.choices = tuple(n for leaf in self.leaves for n in leaf.choices)
        self.names = tuple(name for leaf in self.leaves for name in _names(leaf))
        self.table: Ints = self._product() if distinct is None else self._declared(distinct)
        self._filled = np.maximum(self.table, 0)
        self._start = np.concatenate([leaf.start for leaf in self.leaves])
        self._keys = [self._key_of(relevant) for relevant in np.unique(self.table >= 0, axis=0)]
        self._refuse_overlaps()

    @property
    def size(self) -> int:
        """Distinct actions."""
        return len(self.table)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Places of each factor in a one-hot: its choices, and one for not to matter if it may."""
        spare = (self.table == ANY).any(0)
        return tuple(n + int(extra) for n, extra in zip(self.choices, spare))

    @property
    def width(self) -> int:
        """Length of an action as networks see it: a one-hot per factor, one after the other."""
        return sum(self.sizes)

    @cached_property
    def columns(self) -> Ints:
        """Where the ones of each action's one-hots are: [N, F]."""
        place = np.where(self.table == ANY, self.choices, self.table)
        columns: Ints = place + np.cumsum((0, *self.sizes[:-1]))
        return columns

    def one_hot(self, index: Any) -> NDArray[np.float32]:
        """What networks see of actions, written out: [..., width]."""
        rows = np.zeros((self.size, self.width), np.float32)
        np.put_along_axis(rows, self.columns, 1.0, axis=1)
        found: NDArray[np.float32] = rows[np.asarray(index)]
        return found

    def decode(self, index: Any) -> Tree:
        """Actions as environments take them; a factor that does not matter is at its first choice.

        Leading axes of `index` lead every leaf.
        """
        index = np.asarray(index)
        if np.any((index < 0) | (index >= self.size)):
            raise EnvError(f"There is no action {index}: there are {self.size}, counted from 0.")
        values = self._filled[index] + self._start  # [..., F]
        parts = np.split(values, np.cumsum([leaf.factors for leaf in self.leaves])[:-1], axis=-1)
        return unflatten(
            {
                leaf.path: part.reshape(index.shape + leaf.shape).astype(leaf.dtype)
                for leaf, part in zip(self.leaves, parts)
            }
        )

    def encode(self, action: Tree) -> Ints:
        """The rows of the table that these actions are; leading axes stay."""
        flat, known = flatten(action), {leaf.path for leaf in self.leaves}
        if flat.keys() != known:
            raise EnvError(
                f"The action has {_listed(flat)}, but must have {_listed(known)} and nothing else."
            )
        for path, values in flat.items():
            if np.asarray(values).dtype.kind not in "biu":
                name = f"'{path}' of the action" if path else "The action"
                raise EnvError(f"{name} is {values}, but a choice is a whole number.")
        parts = [
            np.asarray(flat[leaf.path]).reshape(*_leading(flat[leaf.path], leaf), leaf.factors)
            for leaf in self.leaves
        ]
        choices = np.concatenate(parts, axis=-1).astype(np.int64) - self._start  # [..., F]
        outside = (choices < 0) | (choices >= np.array(self.choices))
        if outside.any():
            *where, factor = np.argwhere(outside)[0]
            raise EnvError(
                f"The action has {int(choices[(*where, factor)] + self._start[factor])} for "
                f"{self.names[factor]}, which has {self.choices[factor]} choices from "
                f"{self._start[factor]} on."
            )
        found = self._find(choices)
        if np.any(found < 0):
            raise EnvError(
                f"The choices {choices[found < 0][0].tolist()} (of {', '.join(self.names)}) are no "
                "action of the table that the environment declares as distinct_actions."
            )
        return found

    def check_mask(self, shape: tuple[int, ...]) -> None:
        """Refuse a declared `action_mask` that is not flat over the table."""
        if tuple(shape) != (self.size,):
            raise ConfigError(
                f"The column action_mask is declared with shape {tuple(shape)}, but needs one "
                f"entry for each of the {self.size} distinct actions: shape ({self.size},)."
            )

    def _product(self) -> Ints:
        total = math.prod(self.choices)
        if total > MOST_ACTIONS:
            raise ConfigError(
                f"The action space has {total:,} tuples of choices, and at most {MOST_ACTIONS:,} "
                "can be listed; let the environment declare its distinct_actions."
            )
        return np.indices(self.choices).reshape(len(self.choices), -1).T.astype(np.int64)

    def _declared(self, distinct: Table) -> Ints:
        table = np.array(distinct, np.int64)
        if table.ndim != 2 or table.shape[1] != len(self.choices) or not len(table):
            raise ConfigError(
                f"distinct_actions has shape {table.shape}, but must have a row for each distinct "
                f"action and a column for each of {', '.join(self.names)}."
            )
        if len(table) > MOST_ACTIONS:
            raise ConfigError(
                f"distinct_actions lists {len(table):,} actions, but may list {MOST_ACTIONS:,}."
            )
        outside = (table < ANY) | (table >= np.array(self.choices))
        if outside.any():
            row, factor = np.argwhere(outside)[0]
            raise ConfigError(
                f"Row {row} of distinct_actions has {table[row, factor]} for {self.names[factor]}, "
                f"but must have {ANY} (does not matter) or a choice from 0 to "
                f"{self.choices[factor] - 1}."
            )
        return table

    def _key_of(self, relevant: NDArray[np.bool_]) -> tuple[Ints, Ints, Ints]:
        """For the rows in which just these factors matter: weights that make a number of a tuple,
        the numbers of these rows in ascending order, and the rows."""
        weights = self._weights(relevant)
        rows = np.flatnonzero(((self.table >= 0) == relevant).all(axis=1))
        keys = self._filled[rows] @ weights
        order = np.argsort(keys, kind="stable")
        return weights, keys[order], rows[order]

    def _weights(self, factors: NDArray[np.bool_]) -> Ints:
        """What makes a number of these factors' choices, each tuple of them another one."""
        counts = np.where(factors, self.choices, 1)
        if math.prod(counts.tolist()) >= 2**62:
            raise ConfigError("The action space has too many factors to number its actions.")
        weights: Ints = np.concatenate([np.cumprod(counts[::-1])[::-1][1:], [1]]) * factors
        return weights

    def _refuse_overlaps(self) -> None:
        """No action in two rows: such rows agree in every factor that matters in both."""
        patterns = np.unique(self.table >= 0, axis=0)  # [P, F]
        rows = [self._filled[((self.table >= 0) == own).all(axis=1)] for own in patterns]
        for i, j in itertools.combinations_with_replacement(range(len(patterns)), 2):
            weights = self._weights(patterns[i] & patterns[j])
            one, other = rows[i] @ weights, rows[j] @ weights
            twice = len(np.unique(one)) < len(one) if i == j else np.isin(one, other).any()
            if twice:
                raise ConfigError(
                    "Two rows of distinct_actions stand for the same action; list each one once."
                )

    def _find(self, choices: Ints) -> Ints:
        """Rows of tuples [..., F] within range; -1 where a tuple is in no row."""
        found = np.full(choices.shape[:-1], -1, np.int64)
        for weights, keys, rows in self._keys:
            key = choices @ weights
            place = np.minimum(np.searchsorted(keys, key), len(keys) - 1)
            found = np.where(keys[place] == key, rows[place], found)
        return found


def table_of(space: gymnasium.Space[Any], declared: Any) -> Table:
    """A declared table with its columns in the order of the space's factors.

    `declared` is an array [actions, factors], or, for a Dict space, a dict of one column per key.
    """
    leaves: list[Leaf] = []
    _collect(space, "", leaves)
    if isinstance(declared, Mapping):
        flat, known = flatten(declared), [leaf.path for leaf in leaves]
        if set(flat) != set(known):
            raise ConfigError(
                f"distinct_actions has columns for {', '.join(sorted(flat))}, but the action has "
                f"{', '.join(known)}."
            )
        lengths = {path: len(np.asarray(flat[path])) for path in known}
        if len(set(lengths.values())) > 1:
            raise ConfigError(f"The columns of distinct_actions differ in length: {lengths}.")
        columns = [np.reshape(flat[x.path], (lengths[x.path], x.factors)) for x in leaves]
        declared = np.concatenate(columns, axis=1)
    return tuple(tuple(map(int, row)) for row in np.asarray(declared))


def is_discrete(space: gymnasium.Space[Any]) -> bool:
    """Whether every member of an action space is a choice among finitely many."""
    members = subspaces(space)
    if members is not None:
        return all(is_discrete(member) for _, member in members)
    return isinstance(space, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary)


def _collect(space: gymnasium.Space[Any], path: str, leaves: list[Leaf]) -> None:
    members = subspaces(space)
    if members is not None:
        for key, member in members:
            _collect(member, f"{path}/{key}" if path else key, leaves)
    elif isinstance(space, spaces.Discrete):
        start = np.array([space.start], np.int64)
        leaves.append(Leaf(path, (), np.dtype(np.int64), (int(space.n),), start))
    elif isinstance(space, spaces.MultiDiscrete):
        counts = tuple(int(n) for n in space.nvec.flat)
        start = np.asarray(space.start, np.int64).reshape(-1)
        leaves.append(Leaf(path, tuple(space.shape), np.dtype(np.int64), counts, start))
    elif isinstance(space, spaces.MultiBinary):
        bits = math.prod(space.shape)
        leaves.append(
            Leaf(path, tuple(space.shape), np.dtype(np.int8), (2,) * bits, np.zeros(bits, np.int64))
        )
    else:
        where = f"'{path}' of the action" if path else "the action"
        raise ConfigError(
            f"{where} is {space}, which is no choice among finitely many, so the actions cannot be "
            "listed; Discrete, MultiDiscrete, MultiBinary and Dicts of them can."
        )


def _names(leaf: Leaf) -> list[str]:
    name = leaf.path or "the action"
    if leaf.shape == ():
        return [name]
    return [f"{name}{list(map(int, place))}" for place in np.ndindex(leaf.shape)]


def _listed(paths: Iterable[str]) -> str:
    return ", ".join(path or "one value" for path in sorted(paths)) or "nothing"


def _leading(value: Any, leaf: Leaf) -> tuple[int, ...]:
    shape: tuple[int, ...] = np.shape(value)
    end = len(shape) - len(leaf.shape)
    if end < 0 or shape[end:] != leaf.shape:
        name = f"'{leaf.path}' of the action" if leaf.path else "The action"
        raise EnvError(f"{name} has shape {shape}, but must end in {leaf.shape}.")
    return shape[:end]
