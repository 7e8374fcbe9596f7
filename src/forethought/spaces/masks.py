"""Entity observations: a set of rows of which only some are present.

In a Dict space the key `K_mask` says which rows of `K` are present. What stands in an absent row
must never matter: whoever pools over entities does it with the mask.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from forethought.config import ConfigError

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
