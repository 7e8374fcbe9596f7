"""Environments stepped together, with gymnasium's disabled autoreset and masked resets.

    obs, info = envs.reset(seed=[...])
    obs, reward, terminated, truncated, info = envs.step(actions)      # every environment moves
    obs, info = envs.reset(seed=[...], options={"reset_mask": ended})  # only those that ended

No action is ignored and no step invented, so counts are exact. One class serves environments in
this process and in workers: only the handle differs, and so trajectories are equal bit for bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from forethought.config import LONGEST_TIMEOUT_SECONDS, ForethoughtError, require
from forethought.envs.handles import Handle, LocalHandle
from forethought.envs.task_env import Step, TaskEnv
from forethought.envs.watchdog import Watchdog
from forethought.envs.workers import WorkerHandle
from forethought.seeding import Streams
from forethought.spaces import nested
from forethought.spaces.nested import Tree
from forethought.spaces.structure import EnvError, EnvFailure

T = TypeVar("T")
Infos = dict[str, Any]
log = logging.getLogger("forethought")


class VectorEnv(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """N equal environments; see the module for the protocol.

    A reset without a seed takes the run's stream "env" (environment, episode), so that every
    episode has a seed of its own. Observations are fresh arrays, safe to keep.

    An environment that fails (see EnvFailure) is named in `failed` until `rebuild` puts a new one
    into its place. `reset` and `step` raise the first failure; `reset_each` and `step_each` hand it
    over among the answers of the others, none of which is lost.
    """

    def __init__(
        self,
        makers: Sequence[Callable[[], TaskEnv]],
        seed: int = 0,
        *,
        workers: bool = False,
        timeout_seconds: float | None = None,
    ) -> None:
        """A request that lasts longer than `timeout_seconds` is an EnvFailure; None: for ever."""
        require(len(makers) >= 1, "num_envs", len(makers), "at least 1")
        ok = timeout_seconds is None or 0 < timeout_seconds <= LONGEST_TIMEOUT_SECONDS
        rule = f"above 0 and at most {LONGEST_TIMEOUT_SECONDS}"
        require(ok, "timeout_seconds", timeout_seconds, rule)
        self.closed = False
        self.num_envs = len(makers)
        self.failed: set[int] = set()
        self._makers, self._workers, self._timeout = list(makers), workers, timeout_seconds
        self._streams = Streams(seed)
        self._episodes = [0] * self.num_envs
        self._handles: list[Handle] = []
        in_process = None if workers else timeout_seconds
        self._watchdog = None if in_process is None else Watchdog(in_process)
        try:
            for i in range(self.num_envs):
                self._handles.append(self._handle(i))
            specs = self._all("spec")
        except BaseException:
            self.close()
            raise
        self.spec_for_agent = specs[0]
        for i, spec in enumerate(specs):
            if spec != self.spec_for_agent:
                self.close()
                raise EnvError(
                    f"Environment {i} differs from environment 0 in its spaces or limits; "
                    "environments that are stepped together must be equal."
                )
        self.metadata = {**self._all("metadata")[0], "autoreset_mode": AutoresetMode.DISABLED}
        self.single_observation_space = self.spec_for_agent.observation_space
        self.single_action_space = self.spec_for_agent.action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._obs: list[Tree] = [None] * self.num_envs
        self._column_infos: list[Infos] = [{}] * self.num_envs

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Tree, Infos]:
        """Begin new episodes: everywhere, or where `options["reset_mask"]` is True.

        An int seeds environment i with seed + i. The observation and the declared columns in info
        are those of all environments; other entries of info only of those that were reset.
        """
        options = dict(options or {})
        mask = self._mask(options.pop("reset_mask", None))
        seeds = self._seeds(seed)
        chosen = {i: seeds[i] for i in range(self.num_envs) if mask[i]}
        infos: list[Infos] = [dict(info) for info in self._column_infos]
        for i, answer in self.reset_each(chosen, options).items():
            infos[i] = _sound(answer)[1]
        return nested.stack(self._obs), batch_infos(infos)

    def step(
        self, actions: Tree
    ) -> tuple[Tree, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], Infos]:
        """One decision in every environment; each must be running."""
        steps = [_sound(answer) for answer in self.step_each(actions)]
        return (
            nested.stack(self._obs),
            np.array([step[1] for step in steps], np.float64),
            np.array([step[2] for step in steps], np.bool_),
            np.array([step[3] for step in steps], np.bool_),
            batch_infos([step[4] for step in steps]),
        )

    def reset_each(
        self, seeds: Mapping[int, int], options: dict[str, Any] | None = None
    ) -> dict[int, tuple[Tree, Infos] | EnvFailure]:
        """Begin new episodes in these environments; nothing is batched, failures are handed over.

        Any other error is raised, after all have answered.
        """
        for i, seed in seeds.items():
            self._handles[i].request("reset", seed, options or {})
            self._episodes[i] += 1
        answers = dict(zip(seeds, self._results(list(seeds))))
        for i, answer in answers.items():
            if not isinstance(answer, EnvFailure):
                self._keep(i, *answer)
        return answers

    def step_each(self, actions: Tree) -> list[Step | EnvFailure]:
        """One decision in every environment; nothing is batched, failures are handed over.

        Any other error, as that of an illegal action, is raised after all have answered.
        """
        for path, leaf in nested.flatten(actions).items():
            if len(leaf) != self.num_envs:
                name = f"actions '{path}'" if path else "actions"
                raise EnvError(
                    f"There are {len(leaf)} {name} for {self.num_envs} environments; give one each."
                )
        for i, handle in enumerate(self._handles):
            handle.request("step", nested.index(actions, i))
        steps: list[Step | EnvFailure] = self._results(range(self.num_envs))
        for i, step in enumerate(steps):
            if not isinstance(step, EnvFailure):
                self._keep(i, step[0], step[4])
        return steps

    def reset_one(self, i: int, seed: int | None = None) -> tuple[Tree, Infos]:
        """Begin a new episode in environment `i` alone; observation and info are not batched."""
        seed = self._seeds(None)[i] if seed is None else seed
        self._handles[i].request("reset", seed, {})
        self._episodes[i] += 1
        obs, info = _sound(self._results([i])[0])
        self._keep(i, obs, info)
        return obs, info

    def step_one(self, i: int, action: Tree) -> Step:
        """One decision in environment `i` alone; nothing is batched."""
        self._handles[i].request("step", action)
        result: Step = _sound(self._results([i])[0])
        self._keep(i, result[0], result[4])
        return result

    def snapshots(self) -> list[dict[str, Any] | None]:
        """The state of each environment, for `restore_one`; None where it cannot be taken, also of
        one that has died: what to do about that is decided at its next step."""
        for handle in self._handles:
            handle.request("snapshot")
        answers = self._results(range(self.num_envs))
        return [None if isinstance(answer, EnvFailure) else answer for answer in answers]

    def restore_one(self, i: int, snapshot: dict[str, Any]) -> tuple[Tree, Infos] | None:
        """Go on in environment `i` where `snapshot` was taken; None if that is not exact there."""
        self._handles[i].request("restore", snapshot)
        found: tuple[Tree, Infos] | None = _sound(self._results([i])[0])
        if found is not None:
            self._keep(i, *found)
        return found

    def current(self, i: int) -> tuple[Tree, Infos]:
        """The last observation of environment `i` and the declared columns beside it."""
        return self._obs[i], self._column_infos[i]

    def rebuild(self, i: int) -> None:
        """Put a new environment into the place of number `i`; it must be reset before its first
        step. An EnvFailure if it cannot be built; `i` then stays among the `failed`."""
        _close(self._handles[i])
        self._handles[i] = self._handle(i)
        self._handles[i].request("spec")
        if _sound(self._results([i])[0]) != self.spec_for_agent:
            raise EnvError(
                f"Environment {i} has other spaces or limits since it was built anew; it must be "
                "the same each time."
            )
        self.failed.discard(i)

    def render(self) -> tuple[Any, ...]:
        """One picture per environment; needs `render_mode="rgb_array"`."""
        return tuple(self._all("render"))

    def close_extras(self, **kwargs: Any) -> None:
        """End every environment and its process; one that fails in that is only warned about."""
        try:
            for handle in self._handles:
                _close(handle)
        finally:
            if self._watchdog is not None:
                self._watchdog.close()

    def _handle(self, i: int) -> Handle:
        if self._workers:
            return WorkerHandle(self._makers[i], i, self._timeout)
        return LocalHandle(self._makers[i], i, self._watchdog)

    def _all(self, command: str) -> list[Any]:
        for handle in self._handles:
            handle.request(command)
        return [_sound(answer) for answer in self._results(range(self.num_envs))]

    def _results(self, chosen: Sequence[int]) -> list[Any]:
        """The answers of environments that were asked, a failure in the place of its answer.

        All are awaited before another error is raised, so that no late answer is taken for that
        of a later request."""
        results: list[Any] = []
        errors: list[ForethoughtError] = []
        for i in chosen:
            try:
                results.append(self._handles[i].result())
            except EnvFailure as failure:
                self.failed.add(i)
                results.append(failure)
            except ForethoughtError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return results

    def _keep(self, i: int, obs: Tree, info: Infos) -> None:
        self._obs[i] = obs
        sources = (column.source for column in self.spec_for_agent.columns)
        self._column_infos[i] = {source: info[source] for source in sources}

    def _seeds(self, seed: int | Sequence[int | None] | None) -> list[int]:
        if isinstance(seed, int | np.integer):
            return [int(seed) + i for i in range(self.num_envs)]
        given = [None] * self.num_envs if seed is None else list(seed)
        if len(given) != self.num_envs:
            raise EnvError(
                f"There are {len(given)} seeds for {self.num_envs} environments; give one each."
            )
        return [
            self._streams.seed("env", i, self._episodes[i]) if value is None else int(value)
            for i, value in enumerate(given)
        ]

    def _mask(self, mask: Any) -> NDArray[np.bool_]:
        if mask is None:
            return np.ones(self.num_envs, np.bool_)
        chosen: NDArray[Any] = np.asarray(mask)
        if chosen.dtype != np.bool_ or chosen.shape != (self.num_envs,):
            raise EnvError(
                f"reset_mask has dtype {chosen.dtype} and shape {chosen.shape}, but must be "
                f"boolean with one entry for each of the {self.num_envs} environments."
            )
        for i in np.flatnonzero(~chosen):
            if self._obs[int(i)] is None:
                raise EnvError(f"Environment {i} was never reset; the first reset takes no mask.")
        return chosen


def _close(handle: Handle) -> None:
    """Nobody needs it any more: a failure now must not hide an earlier one, nor spare the rest."""
    try:
        handle.close()
    except EnvFailure as failure:
        log.warning("%s", failure)


def _sound(answer: T | EnvFailure) -> T:
    """The answer, if it is one."""
    if isinstance(answer, EnvFailure):
        raise answer
    return answer


def batch_infos(infos: Sequence[Infos]) -> Infos:
    """Gymnasium's form of infos: an array per key, beside `_key` that says who gave one.

    Numbers and arrays of one shape become a numeric array (zeros where absent), dicts are batched
    recursively, anything else becomes an array of objects. Numbers are promoted, never truncated.
    """
    batched: Infos = {}
    for key in dict.fromkeys(key for info in infos for key in info):
        present = np.array([key in info for info in infos], np.bool_)
        values = [info[key] for info in infos if key in info]
        if all(isinstance(value, dict) for value in values):
            batched[key] = batch_infos([info.get(key, {}) for info in infos])
        else:
            batched[key] = _batch_values(values, present)
        batched[f"_{key}"] = present
    return batched


def infos_of_each(infos: Sequence[Infos] | Infos, count: int) -> Sequence[Infos]:
    """What each of `count` environments said, from gymnasium's form or as it is."""
    if not isinstance(infos, dict):
        return infos
    own: list[Infos] = [{} for _ in range(count)]
    for key, values in infos.items():
        if isinstance(values, dict):
            values = infos_of_each(values, count)
        if f"_{key}" in infos:
            for i in np.flatnonzero(infos[f"_{key}"]):
                own[i][key] = values[i]
    return own


def _batch_values(values: Sequence[Any], present: NDArray[np.bool_]) -> NDArray[Any]:
    numeric = all(isinstance(v, bool | int | float | np.generic | np.ndarray) for v in values)
    if numeric and len({np.shape(value) for value in values}) == 1:
        stacked = np.stack([np.asarray(value) for value in values])
        batch = np.zeros((len(present), *stacked.shape[1:]), stacked.dtype)
        batch[present] = stacked
        return batch
    objects = np.full(len(present), None, object)
    for i, value in zip(np.flatnonzero(present), values):
        objects[i] = value
    return objects
