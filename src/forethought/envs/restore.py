"""Open episodes across a resume: the seed and the actions so far rebuild the exact state.

An episode is a function of (seed, actions), so re-stepping it needs no support of the simulator.
The last observation tells whether it worked: it must be equal bit for bit. Where an environment can
save its state whole (Atari), that is restored instead, in no time; the actions are kept for the
case that the emulator does not come out as it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forethought.envs.vector import VectorEnv
from forethought.spaces import nested
from forethought.spaces.nested import Tree
from forethought.spaces.structure import EnvError, EnvFailure


@dataclass
class EpisodeLog:
    """What happened in one environment since its last reset."""

    seed: int = 0
    """Seed of that reset."""
    actions: list[Tree] = field(default_factory=list)
    """Actions since then, as the agent gave them."""

    def start(self, seed: int) -> None:
        """A new episode began."""
        self.seed, self.actions = seed, []

    def add(self, action: Tree) -> None:
        """A decision was made; the action is copied."""
        self.actions.append(nested.tree_map(np.array, action))

    def state(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """JSON values, and arrays by path with the decisions along the first axis."""
        arrays = nested.flatten(nested.stack(self.actions)) if self.actions else {}
        return {"seed": self.seed, "decisions": len(self.actions)}, arrays

    @classmethod
    def restored(cls, values: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> EpisodeLog:
        """The log that `state` described."""
        actions = nested.unflatten(arrays) if values["decisions"] else None
        return cls(
            int(values["seed"]), [nested.index(actions, t) for t in range(values["decisions"])]
        )


def replay_episode(
    envs: VectorEnv,
    i: int,
    log: EpisodeLog,
    last_obs: Tree,
    snapshot: dict[str, Any] | None = None,
) -> str | EnvFailure | None:
    """Restore the open episode of environment `i` from a snapshot, or re-step it; None when its
    last observation is bit-equal.

    Else the reason why the episode is lost: a sentence, or the failure of the environment. That is
    then wherever it is: the caller begins a new episode and says so.
    """
    try:
        found = envs.restore_one(i, snapshot) if snapshot else None
        if found is not None and nested.bitwise_equal(found[0], last_obs):
            return None
        obs, _ = envs.reset_one(i, log.seed)
        for number, action in enumerate(log.actions, start=1):
            obs, _, terminated, truncated, _ = envs.step_one(i, action)
            if terminated or truncated:  # an open episode cannot have ended
                return f"It ended at step {number}, though it was open after {len(log.actions)}."
    except EnvFailure as failure:
        return failure
    except EnvError as error:
        return str(error)
    if not nested.bitwise_equal(obs, last_obs):
        return "Its last observation differs."
    return None
