"""Masks: which entities of an observation are present, and which actions are legal.

Entity observations are a set of rows of which only some are present. In a Dict space the key
`K_mask` says which rows of `K` are present. What stands in an absent row must never matter: whoever
pools over entities does it with the mask.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from forethought.config import ConfigError
from forethought.spaces.structure import EnvError

SUFFIX = "_mask"


def entity_keys(space: gymnasium.Space[Any]) -> dict[str, str]:
    """The entity keys of a Dict space, each with its mask's key; an ill-fitting mask is refused."""
    if not isinstance(space, spaces.Dict):
        return {}
    found = {key: key + SUFFIX for key in space.spaces if key + SUFFIX in space.spaces}
    for key, mask_key in found.items():
        rows, mask = space[key].shape, space[mask_key]
        boolean = isinstance(mask, spaces.MultiBinary) or mask.dtype == np.bool_
        if not rows or mask.shape != rows[:1] or not boolean:
            raise ConfigError(
                f"The mask '{mask_key}' must be boolean with one entry per row of '{key}', whose "
                f"shape is {rows}, but is {mask}."
            )
    return found


def masked_mean(values: Any, mask: Any) -> Any:
    """Mean over the present rows: values [..., N, D], mask [..., N]; no row present gives zeros."""
    present = mask[..., None] != 0  # [..., N, 1]
    # Selecting, not multiplying: NaN times zero would let an absent row through.
    if isinstance(values, np.ndarray):
        kept = np.where(present, values, np.zeros((), values.dtype))
        return kept.sum(-2) / np.maximum(present.sum(-2), 1)
    return values.masked_fill(~present, 0.0).sum(-2) / present.sum(-2).clamp(min=1)


def legal_actions(mask: Any, shape: tuple[int, int]) -> NDArray[np.bool_]:
    """An `action_mask` of some environments as booleans [n, actions]; each must allow an action."""
    legal: NDArray[np.bool_] = np.asarray(mask) != 0
    if legal.shape != shape:
        raise EnvError(
            f"The mask of the action has shape {legal.shape}, but {shape} is needed; correct the "
            "environment's action_mask."
        )
    if not legal.any(axis=1).all():
        row = int(np.flatnonzero(~legal.any(axis=1))[0])
        raise EnvError(
            f"The mask of the action of environment {row} allows no choice; end the episode or "
            "allow one."
        )
    return legal


def stored_legal(mask: Any) -> Any:
    """A stored `action_mask` [..., N] of any type as booleans, for learning.

    Where all is over nothing may be legal; what is there does not count, so all is.
    """
    legal = mask != 0  # of bytes, torch would take `~` bit by bit, and 254 for true
    return legal | ~legal.any(-1)[..., None]
