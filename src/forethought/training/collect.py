"""Collecting experience: steps the training environments and keeps their open episodes.

    row 0            row 1                     row 2
    x_0 is_first     x_1  a_0 -> r_1           x_2  a_1 -> r_2  terminated | truncated
    (no action)

Episode j of environment i is reset with the seed of the stream ("env", i, j), so an episode is a
function of (seed, actions). The seed and the actions of each open episode are saved; on resume
they are stepped again, and the observation reached must equal the saved one bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forethought.clock import Clock
from forethought.envs import EpisodeLog, replay_episode
from forethought.envs.episodes import legal_random, success_of
from forethought.seeding import numpy_state, restore_numpy
from forethought.spaces import nested
from forethought.tracking import Tracker
from forethought.training.build import Parts

Infos = dict[str, Any]
State = tuple[dict[str, Any], dict[str, Tensor]]


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
        self.first = np.ones(n, dtype=np.bool_)
        self.open = [self._lined_up(i, 0) for i in range(n)]
        self.obs: list[Any] = [None] * n
        self.infos: list[Infos] = [{} for _ in range(n)]
        """Only the declared columns: all that an agent may rely on, here and after a resume."""

    def begin(self) -> None:
        """Starts the first episode of every environment."""
        self._reset(np.ones(self.env.num_envs, dtype=np.bool_))

    def step(self) -> None:
        """One decision in every environment: act, step, store, close what ended."""
        n = self.env.num_envs
        actions = self._actions()
        obs, rewards, terminated, truncated, infos = self.env.step(actions)
        self.clock.agent_steps += n
        self.clock.env_frames += n * self.env.spec_for_agent.action_repeat
        self._see(obs, infos)
        for i, episode in enumerate(self.open):
            action = nested.index(actions, i)
            episode.log.add(action)
            episode.total += float(rewards[i])
            ends = {"terminated": bool(terminated[i]), "truncated": bool(truncated[i])}
            self._store(i, action=action, reward=rewards[i], is_first=False, **ends)
            if terminated[i] or truncated[i]:
                self._close(i, success=success_of(infos, i), **ends)
        if np.any(terminated | truncated):
            self._reset(terminated | truncated)

    def state(self) -> State:
        """Everything that decides the coming steps."""
        act_json, tensors = self.agent.acting_state(self.act_state)
        tensors = {f"act/{name}": tensor for name, tensor in tensors.items()}
        episodes = []
        for i, episode in enumerate(self.open):
            log, actions = episode.log.state()
            episodes.append({"number": episode.number, "total": episode.total, "log": log})
            arrays = {f"action/{i}/{path}": leaf for path, leaf in actions.items()}
            arrays |= {f"obs/{i}/{path}": x for path, x in nested.flatten(self.obs[i]).items()}
            tensors |= {name: torch.from_numpy(np.array(leaf)) for name, leaf in arrays.items()}
        data = {
            "exploration": numpy_state(self.exploration),
            "act": act_json,
            "first": self.first.tolist(),
            "open": episodes,
        }
        return data, tensors

    def restore(self, data: dict[str, Any], tensors: dict[str, Tensor]) -> dict[int, str]:
        """Steps the open episodes again; returns the environments whose episode was lost, and why.

        A lost episode ends here, marked as truncated, and the environment's next one begins.
        """
        restore_numpy(self.exploration, data["exploration"])
        self.first = np.array(data["first"], dtype=np.bool_)
        self.act_state = self.agent.restore_acting_state(
            self.act_state, data["act"], _below("act/", tensors)
        )
        lost: dict[int, str] = {}
        for i, saved in enumerate(data["open"]):
            arrays = {k: v.numpy() for k, v in _below(f"action/{i}/", tensors).items()}
            log = EpisodeLog.restored(saved["log"], arrays)
            self.open[i] = OpenEpisode(saved["number"], log, saved["total"])
            leaves = {k: v.numpy() for k, v in _below(f"obs/{i}/", tensors).items()}
            reason = replay_episode(self.env, i, log, nested.unflatten(leaves))
            if reason is not None:
                lost[i] = reason
                self.agent.replay.close_episode(i)
                self._close(i, terminated=False, truncated=True, success=None)
        # Also when none is lost: nothing is reset then, but all environments show where they are.
        self._reset(np.isin(np.arange(self.env.num_envs), list(lost)))
        return lost

    def _actions(self) -> Any:
        if self.clock.agent_steps < self.seed_agent_steps:
            return legal_random(self.env.spec_for_agent, self.exploration, self.infos)
        actions, self.act_state = self.agent.act_batch(
            nested.stack(self.obs), self.act_state, self.first, self.infos, explore=True
        )
        self.first = np.zeros_like(self.first)
        self.tracker.add(self.agent.acting_statistics(self.act_state))
        return actions

    def _see(self, obs: Any, infos: Infos) -> None:
        """Takes the batched observations and declared columns apart."""
        columns = self.env.spec_for_agent.columns
        for i in range(self.env.num_envs):
            self.obs[i] = nested.index(obs, i)
            self.infos[i] = {c.source: infos[c.source][i] for c in columns}

    def _store(self, i: int, **row: Any) -> None:
        columns = {c.name: self.infos[i][c.source] for c in self.env.spec_for_agent.columns}
        self.agent.store_transition({"obs": self.obs[i], **row, **columns}, i)

    def _close(self, i: int, terminated: bool, truncated: bool, success: float | None) -> None:
        """Reports the episode of environment i and lines up the next."""
        episode = self.open[i]
        self.clock.episodes += 1
        self.tracker.episode(
            {
                "env_index": i,
                "return": episode.total,
                "length_agent_steps": len(episode.log.actions),
                "success": success,
                "terminated": terminated,
                "truncated": truncated,
                "seed": episode.log.seed,
            }
        )
        self.open[i] = self._lined_up(i, episode.number + 1)

    def _lined_up(self, i: int, number: int) -> OpenEpisode:
        return OpenEpisode(number, EpisodeLog(self.streams.seed("env", i, number)))

    def _reset(self, which: NDArray[np.bool_]) -> None:
        """Starts the episodes that are lined up in the environments marked in `which`."""
        seeds = [episode.log.seed for episode in self.open]
        self._see(*self.env.reset(seed=seeds, options={"reset_mask": which}))
        self.first = self.first | which
        for i in np.flatnonzero(which).tolist():
            self._store(i, terminated=False, truncated=False, is_first=True)


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
