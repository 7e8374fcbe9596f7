"""The largest sizes that a network may have.

They lie far above what anybody trains: a slip of the finger stops with the name of its key, and not
when some memory is full.
"""

from __future__ import annotations

from collections.abc import Iterable

from forethought.config.errors import ConfigError, require

MOST_UNITS = 65_536
"""Units of one layer; also bins, atoms, quantiles, and sequences that a planner scores."""
MOST_CHANNELS = 4_096
"""Of one convolution; also its kernel and stride."""
MOST_PARTS = 100
"""Layers of a network, and critics: far more are built one by one until all memory is full."""


def require_size(key: str, size: int, least: int, most: int) -> None:
    """State that a size lies within its bounds."""
    require(least <= size <= most, key, size, f"from {least} to {most:,}")


def require_sizes(key: str, sizes: Iterable[int], most: int) -> None:
    """The same for a size of each layer."""
    found = list(sizes)
    if len(found) > MOST_PARTS:
        raise ConfigError(f"{key} has {len(found):,} layers, but at most {MOST_PARTS} may be.")
    require(all(1 <= size <= most for size in found), key, found, f"from 1 to {most:,} each")
