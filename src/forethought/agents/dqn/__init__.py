"""The DQN family: every part a toggle, from Nature DQN to Rainbow and beyond.

update.py    one gradient step, in the papers' order    targets.py   its formulas alone
networks.py  images or vectors to features              heads.py     from features to values
act.py       acting and epsilon                         config.py    options
agent.py     the agent: replay, optimiser, save and load
dead_units.py  a look at units that answer to nothing
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
