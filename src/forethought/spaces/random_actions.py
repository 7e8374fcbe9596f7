"""Random actions from a stream of ours, not from gymnasium's spaces.

`Space.sample` draws from a generator inside the space, which no checkpoint saves; these draws
belong to the caller's stream, so a resumed seed phase goes on exactly.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from forethought.config import ConfigError
from forethought.spaces.masks import legal_actions
from forethought.spaces.nested import Tree
from forethought.spaces.spec import EnvSpec
from forethought.spaces.structure import subspaces


def random_action(spec: EnvSpec, rng: np.random.Generator, n: int, mask: Any = None) -> Tree:
    """`n` random actions, batched along the first axis, each uniform over what is legal.

    `mask` (an `action_mask`) [n, distinct actions] has 1 or True where an action is legal.
    """
    if mask is None and spec.distinct_actions is None:
        return _draw(spec.action_space, rng, n)
    codec = spec.action_codec
    return codec.decode(_choose(rng, n, codec.size, mask))


def _draw(space: gymnasium.Space[Any], rng: np.random.Generator, n: int) -> Tree:
    members = subspaces(space)
    if members is not None:
        return {key: _draw(member, rng, n) for key, member in members}
    if isinstance(space, spaces.Discrete):
        return _choose(rng, n, int(space.n)) + int(space.start)
    if isinstance(space, spaces.MultiDiscrete):
        parts = [_choose(rng, n, int(count)) for count in space.nvec.flat]
        return np.stack(parts, axis=-1).reshape(n, *space.shape) + space.start
    if isinstance(space, spaces.MultiBinary):
        return rng.integers(0, 2, (n, *space.shape), dtype=np.int8)
    if isinstance(space, spaces.Box):
        return _draw_box(space, rng, n)
    raise ConfigError(f"Random actions of a {type(space).__name__} space do not exist.")


def _draw_box(space: spaces.Box, rng: np.random.Generator, n: int) -> NDArray[Any]:
    shape = (n, *space.shape)
    if space.dtype.kind in "iu":
        low, high = space.low.astype(np.int64), space.high.astype(np.int64)
        return rng.integers(low, high, shape, endpoint=True).astype(space.dtype)
    if space.is_bounded("both"):
        return rng.uniform(space.low, space.high, shape).astype(space.dtype)
    # Nothing is uniform over an endless interval; agents that need bounds refuse such a space.
    return np.clip(rng.standard_normal(shape), space.low, space.high).astype(space.dtype)


def _choose(rng: np.random.Generator, n: int, choices: int, mask: Any = None) -> NDArray[np.int64]:
    """One of `choices` per row; with a mask, one of the legal ones."""
    if mask is None:
        return rng.integers(0, choices, n)
    legal = legal_actions(mask, (n, choices))
    # The largest of independent uniforms lies on each legal choice equally often.
    draws: NDArray[np.float64] = np.where(legal, rng.random((n, choices)), -1.0)
    chosen: NDArray[np.int64] = draws.argmax(axis=1)
    return chosen
