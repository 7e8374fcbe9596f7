"""Twin delayed DDPG (Fujimoto, van Hoof and Meger, 2018): read `update.py` for learning.

config.py   options       update.py   one gradient step, in the paper's order
agent.py    networks, noise, metrics
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forethought.agents.td3.config import TD3Config

if TYPE_CHECKING:
    from forethought.agents.td3.agent import TD3

__all__ = ["TD3", "TD3Config"]


def __getattr__(name: str) -> Any:
    """The agent is imported when it is used: reading the options must not import torch."""
    if name == "TD3":
        from forethought.agents.td3.agent import TD3

        return TD3
    raise AttributeError(f"module {__name__} has no attribute {name}")
