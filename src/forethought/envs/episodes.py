"""The one episode runner: every evaluation, random play included, steps environments here.

An episode is a function of its seed and of the policy's noise, and the runner draws neither: the
caller passes the seeds and a policy that owns its stream. So how often, or beside what, episodes
are played never changes training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from forethought.config import ForethoughtError
from forethought.envs import EnvError, VectorEnv, multi
from forethought.spaces import EnvSpec, Structure, nested, random_action

MOST_FAILURES = 30
"""Failed episodes after which none are begun any more, where steps are counted and not episodes."""


class EvaluationError(ForethoughtError):
    """No episode of an evaluation could be played, or none of one of several tasks."""


class EvaluationInterrupted(Exception):
    """The caller's stop flag was set while episodes were being played."""


class Policy(Protocol):
    """Whoever chooses the actions; the runner owns the state it passes along."""

    def start(self, num_envs: int) -> Any:
        """A fresh acting state for this many environments."""
        ...

    def act(
        self, obs: Any, state: Any, first: NDArray[np.bool_], infos: Sequence[dict[str, Any]]
    ) -> tuple[Any, Any]:
        """Batched actions and the next state."""
        ...


@dataclass(frozen=True)
class Episode:
    """One finished episode."""

    seed: int
    total: float
    """Undiscounted sum of raw rewards."""
    length: int
    """agent_steps."""
    terminated: bool
    truncated: bool
    success: float | None
    """info["success"] of the last step, or None where the environment reports none."""
    task: str | None = None
    """Which of several tasks it was; None where there is one."""


@dataclass
class _Open:
    """An episode being played."""

    number: int
    seed: int
    obs: Any
    info: dict[str, Any]
    first: bool = True
    total: float = 0.0
    length: int = 0


@dataclass(frozen=True)
class Played:
    """What the runner hands back: episodes in the order of their seeds, and the failures."""

    episodes: list[Episode] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def run_episodes(
    policy: Policy,
    env: VectorEnv,
    seeds: Sequence[int],
    *,
    min_steps: int | None = None,
    stop: Callable[[], bool] = lambda: False,
    on_step: Callable[[], None] = lambda: None,
) -> Played:
    """Plays one episode per seed; environment i plays the seeds i, i + N, i + 2N, ...

    With `min_steps`, an episode counts only if those of the seeds before it took fewer agent steps
    than that, as if they were played one after the other; others are not begun, or left out.

    Strategy: an episode whose environment raises an EnvError counts as failed, the others go on;
    an environment that failed is built anew before its next episode, in this evaluation or in a
    later one. When all episodes fail, EvaluationError. Any other exception is a programming error
    and passes. A limit of steps belongs to the environment (it truncates), not to the runner.
    """
    n = env.num_envs
    state = policy.start(n)
    waiting = [list(range(i, len(seeds), n)) for i in range(n)]
    done: dict[int, Episode] = {}
    failures: list[EnvError] = []
    columns = env.spec_for_agent.columns
    zeros = Structure.of(env.spec_for_agent.observation_space).zeros()
    nothing = {c.source: np.ones(c.shape, c.dtype) for c in columns}  # ones: a mask allows all
    running: list[_Open | None] = [None] * n

    def enough(number: int) -> bool:
        """Whether the episodes before this one have taken all the steps that are wanted."""
        if min_steps is None or len(failures) >= MOST_FAILURES:
            return min_steps is not None
        ended = sum(episode.length for k, episode in done.items() if k < number)
        under_way = sum(e.length for e in running if e is not None and e.number < number)
        return ended + under_way >= min_steps

    while True:
        for i in range(n):
            while running[i] is None and waiting[i] and not enough(waiting[i][0]):
                number = waiting[i].pop(0)
                try:
                    if i in env.failed:
                        env.rebuild(i)
                    obs, info = env.reset_one(i, seeds[number])
                    running[i] = _Open(number, seeds[number], obs, info)
                except EnvError as error:
                    failures.append(error)
        if not any(running):
            break
        # Idle environments get a blank row: the batch keeps its size, their actions go nowhere.
        obs = nested.stack([zeros if e is None else e.obs for e in running])
        first = np.array([e is None or e.first for e in running])
        infos = [
            nothing if e is None else {c.source: e.info[c.source] for c in columns} for e in running
        ]
        actions, state = policy.act(obs, state, first, infos)
        for i, episode in enumerate(running):
            if episode is None:
                continue
            try:
                ended = _advance(env, i, nested.index(actions, i), episode)
            except EnvError as error:
                failures.append(error)
                running[i] = None
                continue
            if ended is not None:
                done[episode.number] = ended
                running[i] = None
        on_step()
        if stop():
            raise EvaluationInterrupted
    if failures and not done:
        raise _all_failed(failures)
    counted = [done[number] for number in sorted(done) if not enough(number)]
    return Played(counted, [str(failure) for failure in failures])


def _all_failed(failures: Sequence[EnvError]) -> EvaluationError:
    """One error for all, with the traceback of the first."""
    first, count = failures[0], len(failures)
    whole = EvaluationError(
        f"The only evaluation episode failed: {first}"
        if count == 1
        else f"All {count} evaluation episodes failed; the first said: {first}"
    )
    for note in getattr(first, "__notes__", ()):
        whole.add_note(note)
    return whole


def _advance(env: VectorEnv, i: int, action: Any, episode: _Open) -> Episode | None:
    """One step of environment i; returns the episode when that step ended it."""
    obs, reward, terminated, truncated, info = env.step_one(i, action)
    episode.obs, episode.info, episode.first = obs, info, False
    episode.total += float(reward)
    episode.length += 1
    if not (terminated or truncated):
        return None
    spec = env.spec_for_agent
    return Episode(
        seed=episode.seed,
        total=episode.total,
        length=episode.length,
        terminated=bool(terminated),
        truncated=bool(truncated),
        success=success_of(info),
        task=spec.tasks[int(info["task"])].task if spec.tasks else None,
    )


def success_of(info: dict[str, Any]) -> float | None:
    """The environment's own verdict, if any; gymnasium-robotics calls it `is_success`."""
    for key in ("success", "is_success"):
        if key in info:
            return float(info[key])
    return None


class EpsilonGreedy:
    """A policy of whose decisions some are replaced by random actions, from a stream of its own."""

    def __init__(
        self, policy: Policy, epsilon: float, spec: EnvSpec, stream: np.random.Generator
    ) -> None:
        self.policy, self.epsilon, self.spec, self.stream = policy, epsilon, spec, stream

    def start(self, num_envs: int) -> Any:
        return self.policy.start(num_envs)

    def act(
        self, obs: Any, state: Any, first: NDArray[np.bool_], infos: Sequence[dict[str, Any]]
    ) -> tuple[Any, Any]:
        actions, state = self.policy.act(obs, state, first, infos)
        chosen = self.stream.random(len(first)) < self.epsilon  # [N]
        random = legal_random(self.spec, self.stream, infos)
        rows = [nested.index(random if chosen[i] else actions, i) for i in range(len(first))]
        return nested.stack(rows), state


def legal_random(
    spec: EnvSpec, stream: np.random.Generator, infos: Sequence[dict[str, Any]]
) -> Any:
    """A random action per environment, within the `action_mask` where the task declares one; of
    several tasks, zero where it is padding."""
    if spec.tasks:
        taken = multi.action_masks(spec)[[multi.number_of(info["task"], spec) for info in infos]]
        return random_action(spec, stream, len(infos)) * taken
    source = spec.mask_source
    mask = None if source is None else np.stack([info[source] for info in infos])
    return random_action(spec, stream, len(infos), mask)
