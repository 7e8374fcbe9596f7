"""Where compiled code is kept from one run to the next."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """The user's own: code that is loaded must not lie where others can write. OSError, where the
    user has no home."""
    given = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(given) if given else Path.home() / ".cache") / "forethought"
    except RuntimeError as error:
        raise OSError("the user has no home directory: set XDG_CACHE_HOME") from error
