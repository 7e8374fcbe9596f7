"""The line that installs what is missing: the same wherever it is missed."""

from __future__ import annotations

import os
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
"""Where the project is, if it is used from its sources."""


def install_extra(extra: str) -> str:
    """The command for one of the package's extras."""
    if not _constraints().is_file():
        return install(f"forethought[{extra}]")
    return install(f"{os.path.relpath(CHECKOUT)}[{extra}]", "-e ")


def install(what: str, flags: str = "") -> str:
    """In a checkout with the tested versions: without them pip may take another torch."""
    tested = f"-c {os.path.relpath(_constraints())} " if _constraints().is_file() else ""
    return f"pip install {tested}{flags}'{what}'"


def _constraints() -> Path:
    return CHECKOUT / "constraints.txt"
