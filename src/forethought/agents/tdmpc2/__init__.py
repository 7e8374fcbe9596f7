"""TD-MPC2 (Hansen, Su and Wang, 2024): read `update.py` for learning, `act.py` for planning.

config.py   options                    model.py   networks and rollouts
noise.py    every random number        update.py  one gradient step, in the paper's order
observations.py   what a task shows, by kind     encoders.py   networks for it
act.py      acting and planning        agent.py   the agent: replay, save and load
tasks.py    many tasks in one agent    rates.py   optimisers and their learning rates
actions.py  policy, values, planner    categorical.py   the same for discrete actions
official.py  official checkpoints, read by weights_file.py, official_tasks.py: those of many tasks
transfer.py  weights of another run    compiling.py   agent.compile
gammas.py   auxiliary discounts: rules   discounts.py   their heads, targets, loss, snapshots
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forethought.agents.tdmpc2.config import TDMPC2Config

if TYPE_CHECKING:
    from forethought.agents.tdmpc2.agent import TDMPC2

__all__ = ["TDMPC2", "TDMPC2Config"]


def __getattr__(name: str) -> Any:
    """The agent is imported when it is used: reading the options must not import torch."""
    if name == "TDMPC2":
        from forethought.agents.tdmpc2.agent import TDMPC2

        return TDMPC2
    raise AttributeError(f"module {__name__} has no attribute {name}")
