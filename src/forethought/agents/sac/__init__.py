"""Soft actor-critic (Haarnoja et al., 2018): read `update.py` for learning, `policy.py` for acting.

config.py   options       policy.py   the squashed Gaussian, its log-probability
update.py   one gradient step, in the paper's order       agent.py   networks, noise, metrics
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forethought.agents.sac.config import SACConfig

if TYPE_CHECKING:
    from forethought.agents.sac.agent import SAC

__all__ = ["SAC", "SACConfig"]


def __getattr__(name: str) -> Any:
    """The agent is imported when it is used: reading the options must not import torch."""
    if name == "SAC":
        from forethought.agents.sac.agent import SAC

        return SAC
    raise AttributeError(f"module {__name__} has no attribute {name}")
