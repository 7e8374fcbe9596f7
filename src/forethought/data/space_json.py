"""Gymnasium spaces as JSON, for what stands beside a dataset's rows.

The layout is the one in Minari's metadata, so that one reader serves both; bounds may also be one
number for all elements, and null where there is none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from forethought.config import ConfigError
from forethought.spaces.structure import subspaces

MAX_ELEMENTS = 2**24
"""Of one space: a description of a few bytes must not ask for gigabytes."""
MAX_DEPTH = 8


def space_to_json(space: gymnasium.Space[Any]) -> dict[str, Any]:
    """The description of a space; one that cannot be stored is refused."""
    members = subspaces(space)
    if members is not None:  # a Tuple counts as a Dict here, as everywhere
        return {"type": "Dict", "subspaces": {key: space_to_json(x) for key, x in members}}
    if isinstance(space, spaces.Box):
        bounds = {"low": _bound_to_json(space.low), "high": _bound_to_json(space.high)}
        return {"type": "Box", "dtype": str(space.dtype), "shape": list(space.shape), **bounds}
    if isinstance(space, spaces.Discrete):
        return {"type": "Discrete", "n": int(space.n), "start": int(space.start)}
    if isinstance(space, spaces.MultiDiscrete):
        nvec, start = space.nvec.tolist(), space.start.tolist()
        return {"type": "MultiDiscrete", "dtype": str(space.dtype), "nvec": nvec, "start": start}
    if isinstance(space, spaces.MultiBinary):
        return {"type": "MultiBinary", "n": list(space.shape)}
    raise ConfigError(f"A {type(space).__name__} space cannot be stored in a dataset.")


def space_from_json(data: Any, depth: int = 0) -> gymnasium.Space[Any]:
    """The space of a description; ValueError, TypeError or KeyError where it is none."""
    if not isinstance(data, Mapping) or depth > MAX_DEPTH:
        raise ValueError("a space is not described as one")
    kind = data["type"]
    if kind == "Dict":
        inner = [(str(k), space_from_json(x, depth + 1)) for k, x in data["subspaces"].items()]
        return spaces.Dict(inner)  # pairs keep their order, a plain dict would be sorted
    if kind == "Tuple":
        return spaces.Tuple([space_from_json(x, depth + 1) for x in data["subspaces"]])
    if kind == "Box":
        return _box(data)
    if kind == "Discrete":
        return spaces.Discrete(int(data["n"]), start=int(data["start"]))
    if kind == "MultiDiscrete":
        nvec, start = np.array(data["nvec"]), np.array(data["start"])
        return spaces.MultiDiscrete(nvec, dtype=np.dtype(data["dtype"]).type, start=start)
    if kind == "MultiBinary":
        n = data["n"]
        shape = _checked_shape([n] if isinstance(n, int) else n)
        return spaces.MultiBinary(list(shape) if len(shape) != 1 else shape[0])
    raise ConfigError(
        f"A space of kind {str(kind)[:40]!r} cannot be stored in a dataset; use Box, Discrete, "
        "MultiDiscrete, MultiBinary, Dict or Tuple."
    )


def _box(data: Mapping[str, Any]) -> spaces.Box:
    shape, dtype = _checked_shape(data["shape"]), np.dtype(data["dtype"])
    if dtype.kind not in "biuf":
        raise ValueError(f"a Box of {dtype}")
    low = _bound_from_json(data["low"], -np.inf, shape, dtype)
    high = _bound_from_json(data["high"], np.inf, shape, dtype)
    return spaces.Box(low, high, shape, dtype.type)


def _checked_shape(shape: Any) -> tuple[int, ...]:
    sizes = [int(size) for size in shape]
    # Python's integers: numpy's product would overflow where it matters.
    elements = 1
    for size in sizes:
        elements *= size
    if any(size < 0 for size in sizes) or len(sizes) > 16 or elements > MAX_ELEMENTS:
        raise ValueError(f"a space of shape {sizes[:16]}")
    return tuple(sizes)


def _bound_to_json(bound: NDArray[Any]) -> Any:
    values = bound.astype(np.float64) if bound.dtype.kind == "f" else bound
    if values.size and (values == values.flat[0]).all():
        return _without_infinity(values.flat[0].item())
    return _without_infinity(values.tolist())


def _without_infinity(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_infinity(item) for item in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


def _bound_from_json(
    value: Any, absent: float, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> NDArray[Any]:
    found = np.array(_with_infinity(value, absent), dtype)
    if found.shape not in ((), shape):
        raise ValueError(f"bounds of shape {found.shape} for a Box of shape {shape}")
    return np.broadcast_to(found, shape).copy()


def _with_infinity(value: Any, absent: float) -> Any:
    if isinstance(value, list):
        return [_with_infinity(item, absent) for item in value]
    return absent if value is None else value
