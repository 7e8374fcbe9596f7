"""Collecting experience: steps the training environments and keeps their open episodes.

    row 0            row 1                     row 2
    x_0 is_first     x_1  a_0 -> r_1           x_2  a_1 -> r_2  terminated | truncated
    (no action)

Episode j of environment i is reset with the seed of the stream ("env", i, j), so an episode is a
function of (seed, actions). The seed and the actions of each open episode are saved; on resume
they are stepped again, or the state is restored where an environment offers that, and the
observation reached must equal the saved one bit for bit.

The strategy for failures (env.on_env_error): halt, or build the environment anew as often as
`Restarts` allows. A decision that failed is neither stored nor counted; its episode is closed as
truncated, so that no slice crosses the restart, and the next one begins with the next seed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forethought.clock import Clock
from forethought.config import EnvConfig
from forethought.envs import EnvFailure, EpisodeLog, replay_episode
from forethought.envs.episodes import legal_random, success_of
from forethought.replay.rows import LIFE_LOST
from forethought.seeding import numpy_state, restore_numpy
from forethought.spaces import EnvSpec, nested
from forethought.tracking import Tracker
from forethought.tracking.columns import CLIPPED_RETURN, LIVES_EPISODES, learned_columns
from forethought.training.build import Parts
from forethought.training.restarts import Restarts

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
    clipped: float = 0.0
    """Sum of the rewards' signs so far."""
    lives_lost: int = 0
    """So far, where the task tells of them."""


class Collector:
    """The training environments and what is open in them."""

    def __init__(
        self,
        parts: Parts,
        clock: Clock,
        tracker: Tracker,
        random_agent_steps: int,
        config: EnvConfig,
    ) -> None:
        assert parts.env is not None
        self.env, self.agent, self.streams = parts.env, parts.agent, parts.streams
        self.clock, self.tracker = clock, tracker
        self.random_agent_steps = random_agent_steps
        n = self.env.num_envs
        spec = self.env.spec_for_agent
        self.learned = learned_in(spec)
        self.life_lost = next((c.source for c in spec.columns if c.name == LIFE_LOST), "")
        """Where info tells that a life was lost."""
        self.restarts = Restarts(config.allowed_restarts, n, tracker)
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
        self._reset(range(self.env.num_envs))

    def step(self) -> None:
        """One decision in every environment: act, step, store, close what ended or failed."""
        actions = self._actions()
        steps = self.env.step_each(actions)
        failures = {i: step for i, step in enumerate(steps) if isinstance(step, EnvFailure)}
        if failures and not self.restarts.allowed:
            raise _first_of(failures)
        carried_out = [i for i in range(len(steps)) if i not in failures]
        self.clock.agent_steps += len(carried_out)
        self.clock.env_frames += sum(self._frames_per_decision(i) for i in carried_out)
        over = list(failures)
        for i, step in enumerate(steps):
            if isinstance(step, EnvFailure):
                continue
            obs, reward, terminated, truncated, info = step
            self._see(i, obs, info)
            action, episode = nested.index(actions, i), self.open[i]
            episode.log.add(action)
            episode.total += reward
            ends = {"terminated": terminated, "truncated": truncated}
            if self.learned:
                episode.clipped += float(np.sign(reward))
                ended = terminated or truncated
                episode.lives_lost += not ended and bool(self.infos[i].get(self.life_lost, False))
            self._store(i, action=action, reward=reward, is_first=False, **ends)
            if terminated or truncated:
                self.restarts.episode_finished(i)
                self._close(i, success=success_of(info), **ends)
                over.append(i)
        for i, failure in failures.items():
            self._lose(i)
            self._rebuild(i, failure)
        self._reset(sorted(over))

    def state(self) -> State:
        """Everything that decides the coming steps."""
        act_json, tensors = self.agent.acting_state(self.act_state)
        tensors = {f"act/{name}": tensor for name, tensor in tensors.items()}
        episodes, snapshots = [], self.env.snapshots()
        for i, episode in enumerate(self.open):
            log, actions = episode.log.state()
            names = ("number", "total", *(("clipped", "lives_lost") if self.learned else ()))
            episodes.append({**{name: getattr(episode, name) for name in names}, "log": log})
            arrays = {f"action/{i}/{path}": leaf for path, leaf in actions.items()}
            arrays |= {f"obs/{i}/{path}": x for path, x in nested.flatten(self.obs[i]).items()}
            arrays |= {f"snapshot/{i}/{name}": x for name, x in (snapshots[i] or {}).items()}
            tensors |= {name: torch.from_numpy(np.array(leaf)) for name, leaf in arrays.items()}
        data = {
            "exploration": numpy_state(self.exploration),
            "act": act_json,
            "first": self.first.tolist(),
            "open": episodes,
            "restarts": self.restarts.state(),
        }
        return data, tensors

    def restore(self, data: dict[str, Any], tensors: dict[str, Tensor]) -> dict[int, str]:
        """Steps the open episodes again; returns the environments whose episode was lost, and why.

        A lost episode ends here, marked as truncated, and the environment's next one begins; in a
        new environment, if this one failed and may be restarted.
        """
        self.restarts.restore(data.get("restarts"))
        restore_numpy(self.exploration, data["exploration"])
        self.first = np.array(data["first"], dtype=np.bool_)
        self.act_state = self.agent.restore_acting_state(
            self.act_state, data["act"], _below("act/", tensors)
        )
        lost: dict[int, str] = {}
        for i, saved in enumerate(data["open"]):
            arrays = {k: v.numpy() for k, v in _below(f"action/{i}/", tensors).items()}
            log = EpisodeLog.restored(saved["log"], arrays)
            sums = {name: saved[name] for name in ("clipped", "lives_lost") if name in saved}
            self.open[i] = OpenEpisode(saved["number"], log, saved["total"], **sums)
            leaves = {k: v.numpy() for k, v in _below(f"obs/{i}/", tensors).items()}
            snapshot = {k: v.numpy() for k, v in _below(f"snapshot/{i}/", tensors).items()}
            reason = replay_episode(self.env, i, log, nested.unflatten(leaves), snapshot)
            if reason is None:
                self._see(i, *self.env.current(i))
                continue
            lost[i] = str(reason)
            self._lose(i)
            if isinstance(reason, EnvFailure) and self.restarts.allowed:
                self._rebuild(i, reason)
        self._reset(list(lost))
        return lost

    def _actions(self) -> Any:
        if self.clock.agent_steps < self.random_agent_steps:
            if self.agent.observe(nested.stack(self.obs), self.act_state, self.first):
                self.first = np.zeros_like(self.first)
            return legal_random(self.env.spec_for_agent, self.exploration, self.infos)
        actions, self.act_state = self.agent.act_batch(
            nested.stack(self.obs), self.act_state, self.first, self.infos, explore=True
        )
        self.first = np.zeros_like(self.first)
        self.tracker.add(self.agent.acting_statistics(self.act_state))
        return actions

    def _frames_per_decision(self, i: int) -> int:
        spec = self.env.spec_for_agent
        return self._task_of(i).action_repeat if spec.tasks else spec.action_repeat

    def _task_of(self, i: int) -> EnvSpec:
        """Which of several tasks environment i plays."""
        spec: EnvSpec = self.env.spec_for_agent
        return spec.tasks[int(self.infos[i]["task"])]

    def _see(self, i: int, obs: Any, info: Infos) -> None:
        """Takes an observation, and of the info the declared columns."""
        self.obs[i] = obs
        self.infos[i] = {c.source: info[c.source] for c in self.env.spec_for_agent.columns}

    def _store(self, i: int, **row: Any) -> None:
        columns = {c.name: self.infos[i][c.source] for c in self.env.spec_for_agent.columns}
        self.agent.store_transition({"obs": self.obs[i], **row, **columns}, i)

    def _close(self, i: int, terminated: bool, truncated: bool, success: float | None) -> None:
        """Reports the episode of environment i and lines up the next."""
        episode = self.open[i]
        several = bool(self.env.spec_for_agent.tasks)
        learned = {CLIPPED_RETURN: episode.clipped, LIVES_EPISODES: episode.lives_lost + 1}
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
                **{name: learned[name] for name in self.learned},
                **({"task": self._task_of(i).task} if several else {}),
            }
        )
        self.open[i] = self._lined_up(i, episode.number + 1)

    def _lined_up(self, i: int, number: int) -> OpenEpisode:
        return OpenEpisode(number, EpisodeLog(self.streams.seed("env", i, number)))

    def _reset(self, which: Iterable[int]) -> None:
        """Starts the episodes that are lined up in these environments; where that fails and a
        restart is allowed, the next ones."""
        waiting = list(which)
        while waiting:
            answers = self.env.reset_each({i: self.open[i].log.seed for i in waiting})
            waiting = []
            for i, answer in answers.items():
                if isinstance(answer, EnvFailure):
                    self._rebuild(i, answer)
                    self.open[i] = self._lined_up(i, self.open[i].number + 1)
                    waiting.append(i)
                    continue
                self._see(i, *answer)
                self.first[i] = True
                self._store(i, terminated=False, truncated=False, is_first=True)

    def _lose(self, i: int) -> None:
        """Ends the open episode of environment i where it is, as truncated."""
        self.agent.replay.close_episode(i)
        self._close(i, terminated=False, truncated=True, success=None)

    def _rebuild(self, i: int, failure: EnvFailure) -> None:
        """A new environment i, however often it takes; the failure where that is too often."""
        while True:
            self.restarts.count(i, failure)
            try:
                self.env.rebuild(i)
                return
            except EnvFailure as again:
                failure = again


def learned_in(spec: EnvSpec) -> tuple[str, ...]:
    """What episodes.csv tells besides of a task of which learning sees less than what happened."""
    lives = any(column.name == LIFE_LOST for column in spec.columns)
    return learned_columns(spec.sign_rewards, lives)


def _first_of(failures: dict[int, EnvFailure]) -> EnvFailure:
    """The failure to raise, with a note about each other one of the same step."""
    first, *others = failures.values()
    for other in others:
        first.add_note(f"In the same step: {other}")
    return first


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
