"""The DQN family: every part a toggle, from Nature DQN to Rainbow and beyond.

config.py    options                  update.py    one gradient step, in the papers' order
targets.py   the formulas alone       networks.py  images or vectors to features; heads.py, Q of them
act.py       acting and epsilon       agent.py     the agent: replay, optimiser, save and load
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forethought.agents.dqn.config import DQNConfig

if TYPE_CHECKING:
    from forethought.agents.dqn.agent import DQN

__all__ = ["DQN", "DQNConfig"]


def __getattr__(name: str) -> Any:
    """The agent is imported when it is used: reading the options must not import torch."""
    if name == "DQN":
        from forethought.agents.dqn.agent import DQN

        return DQN
    raise AttributeError(f"module {__name__} has no attribute {name}")
