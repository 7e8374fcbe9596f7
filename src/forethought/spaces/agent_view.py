"""The action codec: spaces as agents see them, and their actions as environments want them.

Agents see a bounded Box as float32 in [-1, 1], every other float as float32, a Tuple as a Dict with
the keys "0", "1", ... The mapping is one to one, so the action that is stored is the one executed.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from forethought.spaces.nested import Tree
from forethought.spaces.structure import stored_dtype, subspaces


def agent_space(space: gymnasium.Space[Any], *, action: bool) -> gymnasium.Space[Any]:
    """The space as agents see it; actions are rescaled, observations are not."""
    members = subspaces(space)
    if members is not None:
        return spaces.Dict({key: agent_space(member, action=action) for key, member in members})
    if not isinstance(space, spaces.Box) or space.dtype.kind != "f":
        return space
    if action and space.is_bounded("both"):
        return spaces.Box(-1.0, 1.0, space.shape, np.float32)
    with np.errstate(over="ignore"):  # a bound beyond float32 becomes infinite, which is right
        low, high = space.low.astype(np.float32), space.high.astype(np.float32)
    return spaces.Box(low, high, space.shape, stored_dtype(space.dtype).type)


def native_action(space: gymnasium.Space[Any], action: Tree) -> Any:
    """A checked action in the form that the environment, with its own `space`, expects."""
    if isinstance(space, spaces.Tuple):
        return tuple(native_action(m, action[str(i)]) for i, m in enumerate(space.spaces))
    if isinstance(space, spaces.Dict):
        return {key: native_action(member, action[key]) for key, member in space.spaces.items()}
    if isinstance(space, spaces.Discrete):
        return np.int64(action)  # a scalar, because tabular environments look it up in dicts
    if isinstance(space, spaces.Box) and space.dtype.kind == "f" and space.is_bounded("both"):
        action = rescale(action, space.low, space.high)
    return np.asarray(action, space.dtype)


def rescale(action: NDArray[Any], low: NDArray[Any], high: NDArray[Any]) -> NDArray[Any]:
    """From [-1, 1] to [low, high]; nothing is computed where both are the same interval."""
    inside: NDArray[Any] = np.clip(action, -1.0, 1.0)
    if (low == -1.0).all() and (high == 1.0).all():
        return inside
    low, high = low.astype(np.float64), high.astype(np.float64)
    scaled: NDArray[Any] = low + (inside + 1.0) * 0.5 * (high - low)
    return scaled.clip(low, high)


def half_range(space: gymnasium.Space[Any]) -> tuple[float, ...] | None:
    """How much longer one unit of each action is for the environment than for an agent."""
    if not (isinstance(space, spaces.Box) and space.dtype.kind == "f" and space.is_bounded("both")):
        return None
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    return tuple(((high - low) / 2).ravel().tolist())


def agent_action(space: gymnasium.Space[Any], action: Tree) -> Tree:
    """The inverse of `native_action` for recorded actions, which may have leading axes; `action` is
    nested in dicts, and what lies outside its bounds stays outside."""
    members = subspaces(space)
    if members is not None:
        return {key: agent_action(member, action[key]) for key, member in members}
    if not (isinstance(space, spaces.Box) and space.dtype.kind == "f" and space.is_bounded("both")):
        return action
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    width = np.where(high > low, high - low, 1.0)  # a bound on both sides leaves no choice: 0
    scaled = (np.asarray(action, np.float64) - low) / width * 2.0 - 1.0
    return np.where(high > low, scaled, 0.0)
