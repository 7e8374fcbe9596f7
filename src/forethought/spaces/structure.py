"""What a gymnasium space looks like in memory: named leaves with a shape and a stored dtype.

`Structure.check` is the boundary between environments and everything else: a value passes with the
right keys, shapes, types and finite numbers within its space, or stops with the environment, the
step and the key. Only an observation of floats may leave its bounds: simulators do so (gymnasium's
LunarLander when it spins), so that is told once and the number taken as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import DTypeLike, NDArray

from forethought.config import ConfigError, ForethoughtError
from forethought.spaces.nested import Tree, unflatten

log = logging.getLogger("forethought")
ROUNDING = 1e-6
"""How far beyond a bound of floats a value may lie, relative to it: rounding of float32."""


class EnvError(ForethoughtError):
    """An environment, or what it was asked to do, is at fault; the run cannot go on as it is."""


class EnvFailure(EnvError):
    """The environment itself failed: it raised, hung, died or gave a value that it must not give.

    Only such a failure may be answered by a restart: another one of the same kind may do better,
    while an illegal action of the agent would only come again.
    """


@dataclass(frozen=True)
class Leaf:
    """One array of a nested value."""

    path: str
    """Keys joined by "/"; "" when the value is not nested."""
    shape: tuple[int, ...]
    """Shape of one element, without time or batch axes."""
    dtype: np.dtype[Any]
    """Type in which it is stored."""

    @property
    def nbytes(self) -> int:
        """Bytes of one element."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class Structure:
    """The leaves of a space, in the space's order, and the checks that go with them.

    A Tuple counts as a Dict with the keys "0", "1", ...: one kind of nesting serves everywhere.
    """

    def __init__(self, leaves: tuple[Leaf, ...], ranges: Mapping[str, tuple[Any, Any]]) -> None:
        self.leaves = leaves
        self._by_path = {leaf.path: leaf for leaf in leaves}
        self._declared = dict(ranges)  # lowest and highest value, for leaves that have a bound
        floats = {leaf.path for leaf in leaves if leaf.dtype.kind == "f"}
        self._ranges = {
            path: _with_rounding(*bounds) if path in floats else bounds
            for path, bounds in ranges.items()
        }
        self._told: set[str] = set()  # leaves whose bounds were left, which is said once
        # A byte lies in 0 to 255 whatever it is: to look at every pixel of an image would be slow.
        self._whole = {x.path for x in leaves if x.path in ranges and _is_whole(x, ranges[x.path])}
        self._scalars = {x.path for x in leaves if x.shape == () and x.dtype == np.int64}

    @classmethod
    def of(cls, space: gymnasium.Space[Any]) -> Structure:
        """The structure of a space; a space that cannot be stored is refused."""
        leaves: list[Leaf] = []
        ranges: dict[str, tuple[Any, Any]] = {}
        _collect(space, "", leaves, ranges)
        return cls(tuple(leaves), ranges)

    @property
    def ranges(self) -> dict[str, tuple[Any, Any]]:
        """Lowest and highest value by path, for leaves that have a bound; of floats, with room for
        rounding."""
        return dict(self._ranges)

    def zeros(self, leading_shape: tuple[int, ...] = ()) -> Tree:
        """A nested value of zeros with `leading_shape` before every leaf's shape."""
        return unflatten(
            {leaf.path: np.zeros(leading_shape + leaf.shape, leaf.dtype) for leaf in self.leaves}
        )

    def check(self, value: Any, what: str, env_index: int, step: int) -> Tree:
        """A fresh copy of `value` in stored dtypes and the space's key order, or an EnvError.

        `what` names the value in the sentence ("observation"); `step` counts decisions since reset.
        """
        flat: dict[str, Any] = {}
        _flatten_known(value, "", self._by_path, flat, (what, env_index, step))
        checked = {
            leaf.path: self._check_leaf(leaf, flat[leaf.path], (what, env_index, step))
            for leaf in self.leaves
        }
        return unflatten(checked)

    def _check_leaf(self, leaf: Leaf, value: Any, place: tuple[str, int, int]) -> NDArray[Any]:
        try:
            array = np.asarray(value)
        except ValueError:  # numpy's word for rows of unequal length
            _refuse(leaf.path, place, "is not a regular array")
        if array.shape != leaf.shape:
            _refuse(leaf.path, place, f"has shape {array.shape}, but its space says {leaf.shape}")
        if not np.can_cast(array.dtype, leaf.dtype, "same_kind"):
            # Signed for unsigned and float for integer would change values without a word.
            _refuse(leaf.path, place, f"has dtype {array.dtype}, but its space says {leaf.dtype}")
        with np.errstate(over="ignore"):  # what does not fit is refused below, in words
            copy = array.astype(leaf.dtype)  # always a copy: environments reuse their buffers
        if leaf.dtype.kind == "f" and not np.isfinite(copy).all():
            worst = array[~np.isfinite(copy)].flat[0]
            stored = f" as {leaf.dtype}" if np.isfinite(worst) else ""
            _refuse(leaf.path, place, f"is not finite{stored}: it holds {worst}")
        free = leaf.path in self._whole and array.dtype == leaf.dtype
        if leaf.path in self._ranges and not free:
            self._check_range(leaf, array, place)
        # Gymnasium wants an element of Discrete to be a scalar, of a Box without axes an array.
        return copy[()] if leaf.path in self._scalars else copy

    def _check_range(self, leaf: Leaf, array: NDArray[Any], place: tuple[str, int, int]) -> None:
        low, high = self._ranges[leaf.path]
        beyond = (array < low) | (array > high)
        if beyond.any() and leaf.path not in self._told:
            bad, low, high = (
                np.broadcast_to(x, array.shape)[beyond][0]
                for x in (array, *self._declared[leaf.path])
            )
            if leaf.dtype.kind == "f":
                low, high = (f"{float(x):g}" for x in (low, high))
            bounds = f"[{low}, {high}]"
            problem = f"holds {bad!s}, which lies outside its space {bounds}"
            if leaf.dtype.kind != "f" or place[0] == "action":
                _refuse(leaf.path, place, problem)
            self._told.add(leaf.path)
            log.warning(
                "%s; it is taken as it is, and not told again.", _where(leaf.path, place, problem)
            )


def _is_whole(leaf: Leaf, bounds: tuple[Any, Any]) -> bool:
    """Whether the bounds are those of the stored integer type itself."""
    if leaf.dtype.kind not in "iu":
        return False
    type_ = np.iinfo(leaf.dtype)
    return bool(np.all(bounds[0] == type_.min) and np.all(bounds[1] == type_.max))


def column_leaf(name: str, shape: tuple[int, ...], dtype: DTypeLike) -> Leaf:
    """A leaf for a declared column, stored as `dtype` after the same rule as observations."""
    return Leaf(name, shape, stored_dtype(np.dtype(dtype)))


def stored_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Floats are stored as float32 (networks compute in it); everything else stays."""
    return np.dtype(np.float32) if dtype.kind == "f" else dtype


def subspaces(space: gymnasium.Space[Any]) -> list[tuple[str, gymnasium.Space[Any]]] | None:
    """Names and members of a Dict or Tuple; None for any other space."""
    if isinstance(space, spaces.Dict):
        return list(space.spaces.items())
    if isinstance(space, spaces.Tuple):
        return [(str(i), member) for i, member in enumerate(space.spaces)]
    return None


def _collect(
    space: gymnasium.Space[Any],
    path: str,
    leaves: list[Leaf],
    ranges: dict[str, tuple[Any, Any]],
) -> None:
    members = subspaces(space)
    if members is not None:
        if not members:
            raise ConfigError(f"The space at '{path}' is empty; an agent needs at least one leaf.")
        for key, member in members:
            if not isinstance(key, str) or not key or "/" in key:
                raise ConfigError(
                    f"The key {key!r} of a Dict space cannot be stored; use a name without '/'."
                )
            _collect(member, f"{path}/{key}" if path else key, leaves, ranges)
        return
    if isinstance(space, spaces.Box):
        leaf = Leaf(path, tuple(space.shape), stored_dtype(space.dtype))
        bounded = (space.bounded_below | space.bounded_above).any()
        if leaf.dtype.kind in "iu" or (leaf.dtype.kind == "f" and bounded):
            ranges[path] = (space.low, space.high)
    elif isinstance(space, spaces.Discrete):
        leaf = Leaf(path, (), np.dtype(np.int64))
        ranges[path] = (int(space.start), int(space.start + space.n - 1))
    elif isinstance(space, spaces.MultiDiscrete):
        leaf = Leaf(path, tuple(space.shape), np.dtype(np.int64))
        ranges[path] = (space.start, space.start + space.nvec - 1)
    elif isinstance(space, spaces.MultiBinary):
        leaf = Leaf(path, tuple(space.shape), np.dtype(np.int8))
        ranges[path] = (0, 1)
    else:
        where = f" at '{path}'" if path else ""
        raise ConfigError(
            f"A {type(space).__name__} space{where} cannot be stored; use Box, Discrete, "
            "MultiDiscrete, MultiBinary, Dict or Tuple."
        )
    leaves.append(leaf)


def _with_rounding(low: NDArray[Any], high: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Bounds, stored as values are, and so much wider that rounding alone never crosses them."""
    with np.errstate(over="ignore", invalid="ignore"):  # infinite bounds stay so
        low = low - ROUNDING * np.maximum(1.0, np.abs(low))
        high = high + ROUNDING * np.maximum(1.0, np.abs(high))
        return low.astype(np.float32), high.astype(np.float32)


def _flatten_known(
    value: Any,
    path: str,
    known: Mapping[str, Leaf],
    flat: dict[str, Any],
    place: tuple[str, int, int],
) -> None:
    """Flatten along the structure: a list may be a leaf in one space and a Tuple in another."""
    if path in known:
        if isinstance(value, Mapping):
            _refuse(path, place, "is a dict, but its space says an array")
        flat[path] = value
        return
    start = f"{path}/" if path else ""
    below = (p[len(start) :] for p in known if p.startswith(start))
    expected = list(dict.fromkeys(rest.split("/")[0] for rest in below))
    if isinstance(value, tuple | list):
        value = {str(i): member for i, member in enumerate(value)}
    if not isinstance(value, Mapping):
        _refuse(path, place, f"is a {type(value).__name__}, but its space has keys {expected}")
    if set(value) != set(expected):
        _refuse(path, place, f"has keys {sorted(map(str, value))}, but its space says {expected}")
    for key in expected:
        _flatten_known(value[key], start + key, known, flat, place)


def _refuse(path: str, place: tuple[str, int, int], problem: str) -> NoReturn:
    what = place[0]
    who = "agent" if what == "action" else "environment"
    error = EnvError if what == "action" else EnvFailure
    raise error(f"{_where(path, place, problem)}; correct the {who} or the space it declares.")


def _where(path: str, place: tuple[str, int, int], problem: str) -> str:
    what, env_index, step = place
    name = f"{what} '{path}'" if path else what
    return f"The {name} of environment {env_index} at step {step} {problem}"
