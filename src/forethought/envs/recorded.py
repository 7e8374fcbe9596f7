"""Environments that keep the rows of their episodes and hand each one over when it ends.

The episode runner plays in them as in any others; an episode that failed is forgotten.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from forethought.envs.episodes import success_of
from forethought.envs.task_env import Step
from forethought.envs.tasks import make_single
from forethought.envs.vector import VectorEnv
from forethought.spaces import nested
from forethought.spaces.nested import Tree


@dataclass
class Take:
    """One episode as it was played: T + 1 observations and infos, T of everything else."""

    obs: list[Tree] = field(default_factory=list)
    columns: list[dict[str, Any]] = field(default_factory=list)
    """The declared columns beside each observation."""
    actions: list[Tree] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    terminated: list[bool] = field(default_factory=list)
    truncated: list[bool] = field(default_factory=list)
    success: float | None = None

    def stacked(self) -> dict[str, Any]:
        """Observations, actions and extras as arrays, for the writer of a dataset."""
        return {
            "obs": nested.stack(self.obs),
            "action": nested.stack(self.actions),
            "reward": self.rewards,
            "terminated": self.terminated,
            "truncated": self.truncated,
            "extras": nested.stack(self.columns) if self.columns[0] else {},
        }


class RecordedEnv(VectorEnv):
    """Environments of one task; `keep` is given every episode that was played to its end."""

    def __init__(
        self,
        task: str,
        num_envs: int,
        keep: Callable[[Take], None],
        *,
        timeout_seconds: float | None = None,
        **options: Any,
    ) -> None:
        """`options` are those of a single environment."""
        makers = [
            functools.partial(make_single, task, env_index=i, **options) for i in range(num_envs)
        ]
        super().__init__(makers, timeout_seconds=timeout_seconds)
        self.keep = keep
        self._takes = [Take() for _ in makers]

    def reset_one(self, i: int, seed: int | None = None) -> tuple[Tree, dict[str, Any]]:
        """As in any other; what an unfinished episode left is dropped."""
        obs, info = super().reset_one(i, seed)
        self._takes[i] = Take()
        self._see(i, obs, info)
        return obs, info

    def step_one(self, i: int, action: Tree) -> Step:
        """As in any other, and a row."""
        obs, reward, terminated, truncated, info = super().step_one(i, action)
        take = self._takes[i]
        take.actions.append(action)
        take.rewards.append(reward)
        take.terminated.append(terminated)
        take.truncated.append(truncated)
        self._see(i, obs, info)
        if terminated or truncated:
            take.success = success_of(info)
            self.keep(take)
        return obs, reward, terminated, truncated, info

    def _see(self, i: int, obs: Tree, info: dict[str, Any]) -> None:
        columns = {c.name: info[c.source] for c in self.spec_for_agent.columns}
        self._takes[i].obs.append(obs)
        self._takes[i].columns.append(columns)
