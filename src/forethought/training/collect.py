"""Collecting experience: steps the training environments and keeps their open episodes.

    row 0            row 1                     row 2
    x_0 is_first     x_1  a_0 -> r_1           x_2  a_1 -> r_2  terminated | truncated
    (no action)

Episode j of environment i is reset with the seed of the stream ("env", i, j), so an episode is a
function of (seed, actions). The seed and the actions of each open episode are saved; on resume
they are stepped again, and the observation reached must equal the saved one bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forethought.clock import Clock
from forethought.envs import EpisodeLog, replay_episode
from forethought.seeding import numpy_state, restore_numpy
from forethought.spaces import nested, random_action
from forethought.tracking import Tracker
from forethought.training.build import Parts
from forethought.training.episodes import success_of


@dataclass
class OpenEpisode:
    """The unfinished episode of one environment."""

    number: int
    """Counts the episodes of this environment; part of the reset seed."""
    log: EpisodeLog
    """Seed and actions."""
    total: float = 0.0
    """Sum of raw rewards so far."""


class Collector:
    """The training environments and what is open in them."""

    def __init__(self, parts: Parts, clock: Clock, tracker: Tracker, seed_agent_steps: int) -> None:
        self.env, self.agent, self.streams = parts.env, parts.agent, parts.streams
        self.clock, self.tracker = clock, tracker
        self.seed_agent_steps = seed_agent_steps
        n = self.env.num_envs
        self.exploration = self.streams.numpy("exploration")
        self.act_state = self.agent.new_state(n, self.streams, "planner")
        # True where the acting state holds nothing of the open episode yet: after a reset, and
        # at the agent's first decision when the seed phase ended inside an episode.
        self.first = np.ones(n, dtype=bool)
        self.obs: list[Any] = [None] * n
        self.infos: list[dict[str, Any]] = [{} for _ in range(n)]
        self.open: list[OpenEpisode] = []

    def begin(self) -> None:
        """Starts the first episode of every environment."""
        for i in range(self.env.num_envs):
            self.open.append(OpenEpisode(0, EpisodeLog(self.streams.seed("env", i, 0))))
        self._reset(np.ones(self.env.num_envs, dtype=bool))

    def step(self) -> None:
        """One decision in every environment: act, step, store, close what ended."""
        n = self.env.num_envs
        actions = self._actions(n)
        obs, rewards, terminated, truncated, infos = self.env.step(actions)
        self.clock.agent_steps += n
        self.clock.env_frames += n * self.env.spec_for_agent.action_repeat
        ended = np.asarray(terminated | truncated)
        for i, episode in enumerate(self.open):
            action, reward = nested.index(actions, i), float(rewards[i])
            episode.log.append(action)
            episode.total += reward
            self.obs[i], self.infos[i] = nested.index(obs, i), infos[i]
            self._store(
                i,
                action=action,
                reward=reward,
                terminated=bool(terminated[i]),
                truncated=bool(truncated[i]),
                is_first=False,
            )
            if ended[i]:
                self._close(i, terminated=bool(terminated[i]), truncated=bool(truncated[i]))
        if ended.any():
            self._reset(ended)

    def _actions(self, n: int) -> Any:
        if self.clock.agent_steps < self.seed_agent_steps:
            return random_action(self.env.spec_for_agent, self.exploration, n)
        actions, self.act_state = self.agent.act_batch(
            nested.stack(self.obs), self.act_state, self.first, self.infos, explore=True
        )
        self.first = np.zeros(n, dtype=bool)
        return actions

    def _store(self, i: int, **row: Any) -> None:
        columns = {c.name: self.infos[i][c.source] for c in self.env.spec_for_agent.columns}
        self.agent.store_transition({"obs": self.obs[i], **row, **columns}, i)

    def _close(self, i: int, terminated: bool, truncated: bool) -> None:
        """Reports the episode of environment i and lines up the next."""
        episode = self.open[i]
        self.clock.episodes += 1
        self.tracker.episode(
            {
                "env_index": i,
                "return": episode.total,
                "length_agent_steps": len(episode.log),
                "success": success_of(self.infos[i]),
                "terminated": terminated,
                "truncated": truncated,
                "seed": episode.log.seed,
            }
        )
        number = episode.number + 1
        self.open[i] = OpenEpisode(number, EpisodeLog(self.streams.seed("env", i, number)))

    def _reset(self, which: np.ndarray) -> None:
        """Starts the episodes that are lined up in the environments marked in `which`."""
        seeds = [episode.log.seed for episode in self.open]
        obs, infos = self.env.reset(seed=seeds, options={"reset_mask": which})
        for i in np.flatnonzero(which).tolist():
            self.obs[i], self.infos[i], self.first[i] = nested.index(obs, i), infos[i], True
            self._store(i, terminated=False, truncated=False, is_first=True)
