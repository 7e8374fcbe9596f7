"""Evaluation: episodes of an agent, or of random play, in environments and streams of their own.

The seeds of evaluation k come from the streams ("eval", k, episode), the agent's noise from
("eval-planner", k) and the random actions of an epsilon from ("eval-epsilon", k), never from a
training stream. Evaluation 0 is random play, the yardstick that stands beside every result; the
agent's evaluations count from 1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forethought import config as conf
from forethought import files
from forethought.agents.base import Agent, AgentPolicy
from forethought.config import EnvConfig
from forethought.envs import EpisodeLog, VectorEnv, make_env, multi
from forethought.envs.episodes import (
    EpsilonGreedy,
    EvaluationError,
    Played,
    Policy,
    legal_random,
    run_episodes,
)
from forethought.envs.film import Recording
from forethought.envs.protocols import evaluation_options, human_normalised, protocol_of
from forethought.seeding import Streams
from forethought.spaces import EnvSpec
from forethought.tracking import RunDirectory
from forethought.training.build import load_agent, read_config
from forethought.training.checkpoint import Checkpoints
from forethought.training.contents import step_of
from forethought.training.device import set_threads

PARALLEL_ENVS = 10
"""Environments that an evaluation steps together at most; of several tasks, at least one each."""
EPISODES = 10
"""Played by `evaluate`, where nobody says how many."""
PER_EPISODE = ("returns", "lengths", "seeds", "terminated", "truncated", "success")
"""Fields of a result that have one entry per episode."""


@dataclass(frozen=True)
class EvalResult:
    """The episodes of one evaluation, in the order of their seeds."""

    task: str
    policy: str
    """The agent's name, or `random`."""
    returns: tuple[float, ...]
    lengths: tuple[int, ...]
    """agent_steps."""
    seeds: tuple[int, ...]
    terminated: tuple[bool, ...]
    truncated: tuple[bool, ...]
    success: tuple[float | None, ...]
    failures: tuple[str, ...]
    """One sentence per episode that could not be played to its end."""
    run: str | None = None
    """Directory of the run that was evaluated; None for a task alone."""
    checkpoint: str | None = None
    """Which checkpoint was asked for: latest, best or a step; None for random play."""
    checkpoint_step: int | None = None
    """agent_steps at which that checkpoint was saved; None for random play."""
    seed: int | None = None
    """The seed that the episodes' own seeds come from."""
    tasks: tuple[str, ...] = ()
    """Which of several tasks each episode was of; empty where there is one."""
    protocol: str | None = None
    """The published way in which it was played, if it was one."""
    epsilon: float = 0.0
    """Probability with which a decision was replaced by a random action."""

    @classmethod
    def of(cls, played: Played, task: str, policy: str) -> EvalResult:
        """Collects what the episode runner played."""
        episodes = played.episodes
        return cls(
            task=task,
            policy=policy,
            returns=tuple(e.total for e in episodes),
            lengths=tuple(e.length for e in episodes),
            seeds=tuple(e.seed for e in episodes),
            terminated=tuple(e.terminated for e in episodes),
            truncated=tuple(e.truncated for e in episodes),
            success=tuple(e.success for e in episodes),
            failures=tuple(played.failures),
            tasks=tuple(e.task for e in episodes if e.task is not None),
        )

    @property
    def player(self) -> str:
        """Who played, for example `tdmpc2 at step 2500 (latest)`."""
        if self.checkpoint_step is None:
            return self.policy
        asked = "" if str(self.checkpoint).isdigit() else f" ({self.checkpoint})"
        return f"{self.policy} at step {self.checkpoint_step}{asked}"

    @property
    def n_failed(self) -> int:
        """Episodes that could not be played."""
        return len(self.failures)

    @property
    def mean(self) -> float:
        """Mean return; of several tasks, the mean of their means."""
        if self.tasks:
            return float(np.mean([own.mean for own in self.by_task().values()]))
        return float(np.mean(self.returns))

    def by_task(self) -> dict[str, EvalResult]:
        """The episodes of each of several tasks, as a result of its own."""
        found = {}
        for task in dict.fromkeys(self.tasks):
            chosen = [i for i, name in enumerate(self.tasks) if name == task]
            own: dict[str, Any] = {
                name: tuple(getattr(self, name)[i] for i in chosen) for name in PER_EPISODE
            }
            found[task] = replace(self, task=task, tasks=(), failures=(), **own)
        return found

    @property
    def normalised_score(self) -> float | None:
        """From 0 to 100, as TD-MPC2's tables have it: return / 10 in DeepMind Control, else the
        share of successes in percent; None where a task has neither. Of several tasks, the mean."""
        if self.tasks:
            own = [result.normalised_score for result in self.by_task().values()]
            known = [score for score in own if score is not None]
            return float(np.mean(known)) if len(known) == len(own) else None
        if self.task.startswith("dmc:"):
            return self.mean / 10
        return None if self.success_mean is None else 100 * self.success_mean

    @property
    def human_normalised(self) -> float | None:
        """0 for random play, 1 for a person, by published scores; None where there are none."""
        return human_normalised(self.task, self.mean)

    @property
    def std(self) -> float:
        """Population standard deviation of the returns."""
        return float(np.std(self.returns))

    @property
    def median(self) -> float:
        """Median return."""
        return float(np.median(self.returns))

    @property
    def iqm(self) -> float:
        """Interquartile mean: without the lowest and the highest quarter (rounded down)."""
        cut = len(self.returns) // 4
        return float(np.mean(sorted(self.returns)[cut : len(self.returns) - cut]))

    @property
    def success_mean(self) -> float | None:
        """Share of successes among the episodes that report one."""
        known = [s for s in self.success if s is not None]
        return float(np.mean(known)) if known else None

    def statistics(self) -> dict[str, float | int | None]:
        """The summary columns of eval.csv."""
        human = self.human_normalised
        return {
            "episodes": len(self.returns),
            "n_failed": self.n_failed,
            "return_mean": self.mean,
            "return_std": self.std,
            "return_median": self.median,
            "return_iqm": self.iqm,
            "return_min": min(self.returns),
            "return_max": max(self.returns),
            "length_mean": float(np.mean(self.lengths)),
            "success_mean": self.success_mean,
            **({} if human is None else {"human_normalised": human}),
        }

    def to_json(self) -> dict[str, Any]:
        """Everything, JSON-able: the statistics, then the episodes."""
        several = {}
        if self.tasks:
            own = {
                task: {**result.statistics(), "normalised_score": result.normalised_score}
                for task, result in self.by_task().items()
            }
            several = {"normalised_score": self.normalised_score, "by_task": own}
        own_fields = {k: v for k, v in asdict(self).items() if k != "tasks" or self.tasks}
        return {
            "task": self.task,
            "policy": self.policy,
            **self.statistics(),
            **several,
            **own_fields,
        }

    def row(self) -> dict[str, Any]:
        """The columns of eval.csv, but for the counters."""
        statistics = self.statistics()
        several: dict[str, Any] = {}
        if self.tasks:
            several = {"normalised_score": self.normalised_score}
        for task, own in self.by_task().items():
            several[f"return_mean/{task}"] = own.mean
            several[f"normalised_score/{task}"] = own.normalised_score
        return {
            "eval_episodes": statistics.pop("episodes"),
            **statistics,
            "returns": self.returns,
            "lengths": self.lengths,
            "seeds": self.seeds,
            "truncated": self.truncated,
            **several,
        }


@dataclass(frozen=True)
class RandomPolicy:
    """Uniform legal actions, drawing from the stream ("eval-planner", index)."""

    spec: EnvSpec
    streams: Streams
    index: int = 0

    def start(self, num_envs: int) -> np.random.Generator:
        return self.streams.numpy("eval-planner", self.index)

    def act(
        self,
        obs: Any,
        state: np.random.Generator,
        first: NDArray[np.bool_],
        infos: Sequence[dict[str, Any]],
    ) -> tuple[Any, np.random.Generator]:
        return legal_random(self.spec, state, infos), state


Tell = Callable[[int, int, int | None], None]
"""Told before each step: episodes ended, steps taken, episodes in all (None: not known)."""


class Watched:
    """A policy that tells, before each step, how many episodes have ended and steps were taken, and
    of how many episodes in all, if that is known.

    An environment's row is `first` again when its episode has ended, whether or not another begins.
    """

    def __init__(self, policy: Policy, tell: Tell, episodes: int | None = None) -> None:
        self.policy, self.tell, self.episodes = policy, tell, episodes
        self.ended = self.steps = 0
        self._under_way: NDArray[np.bool_] | None = None

    def start(self, num_envs: int) -> Any:
        return self.policy.start(num_envs)

    def act(
        self, obs: Any, state: Any, first: NDArray[np.bool_], infos: Sequence[dict[str, Any]]
    ) -> tuple[Any, Any]:
        if self._under_way is not None:
            self.ended += int(np.sum(self._under_way & first))
        self.tell(self.ended, self.steps, self.episodes)
        self._under_way = ~first
        self.steps += 1
        return self.policy.act(obs, state, first, infos)


class Seeds(Sequence[int]):
    """The seeds of evaluation `index`, each made when it is asked for."""

    def __init__(self, streams: Streams, index: int, number: int) -> None:
        self.streams, self.evaluation, self.number = streams, index, number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, episode: Any) -> Any:
        return self.streams.seed("eval", self.evaluation, range(self.number)[episode])


class Evaluator:
    """The evaluation environments of one task, made when first needed and kept until `close`."""

    def __init__(
        self,
        task: str,
        config: EnvConfig,
        streams: Streams,
        episodes: int,
        tell: Tell | None = None,
        *,
        protocol: str | None = None,
        shortened: bool = False,
        epsilon: float = 0.0,
    ) -> None:
        """`tell` is called before each step with how far it is. A `protocol` by name takes
        the place of `episodes` and `epsilon`; `shortened`, of `epsilon` alone, and as that is not
        what was published, the results do not name it."""
        self.task = task
        self.config = config
        self.streams = streams
        self.protocol, self.rules = protocol, protocol_of(protocol, task)
        self.shortened = shortened
        self.episodes, self.epsilon = episodes, epsilon
        if self.rules is not None:
            if shortened:
                self.rules = replace(self.rules, episodes=episodes, agent_steps=None)
            # An episode has at least one step, so no more of them than steps are ever needed.
            self.episodes = self.rules.episodes or self.rules.agent_steps or episodes
            self.epsilon = self.rules.epsilon
        self.tell = tell
        self.several = len(multi.members(task)) if multi.is_multi(task) else 1
        """Tasks, each of which has so many episodes."""
        self._env: VectorEnv | None = None
        self.recorded: EpisodeLog | None = None
        """The first episode of the last evaluation, if that was to be recorded."""

    @property
    def known_episodes(self) -> int | None:
        """How many an evaluation plays, of all tasks; None where steps decide it."""
        if self.rules is not None and self.rules.agent_steps is not None:
            return None
        return self.episodes * self.several

    @property
    def env(self) -> VectorEnv:
        """In process, whatever training uses: an evaluation steps them one by one."""
        if self._env is None:
            together = max(1, PARALLEL_ENVS // self.several)
            self._env = make_env(
                self.task,
                min(self.episodes, together),
                timeout_seconds=self.config.timeout_seconds,
                **evaluation_options(self.task, self.config, self.protocol),
            )
        return self._env

    def agent(
        self, agent: Agent, index: int, record: bool = False, **polls: Callable[..., Any]
    ) -> EvalResult:
        """Evaluation `index` of an agent; `polls` are those of the episode runner."""
        policy: Policy = AgentPolicy(agent, self.streams, index)
        if self.epsilon:
            stream = self.streams.numpy("eval-epsilon", index)
            policy = EpsilonGreedy(policy, self.epsilon, self.env.spec_for_agent, stream)
        self.recorded = None
        if record:
            self.recorded = EpisodeLog(self.streams.seed("eval", index, 0))
            policy = Recording(policy, self.recorded)
        result = self._play(policy, agent.name, index, **polls)
        return replace(result, epsilon=self.epsilon)

    def random(self, **polls: Callable[..., Any]) -> EvalResult:
        """Random play: evaluation 0. It looks at nothing, so dmc tasks draw no pictures for it."""
        if self.config.obs is not None:
            with closing(self._without_pictures()) as blind:
                return blind.random(**polls)
        policy = RandomPolicy(self.env.spec_for_agent, self.streams)
        return self._play(policy, "random", 0, **polls)

    def _without_pictures(self) -> Evaluator:
        """The same episodes with the task's own observations, which cost far less."""
        return Evaluator(
            self.task,
            replace(self.config, obs=None),
            self.streams,
            self.episodes,
            self.tell,
            protocol=self.protocol,
            shortened=self.shortened,
            epsilon=self.epsilon,
        )

    def _play(
        self, policy: Policy, name: str, index: int, **polls: Callable[..., Any]
    ) -> EvalResult:
        if self.tell is not None:
            policy = Watched(policy, self.tell, self.known_episodes)
        seeds = Seeds(self.streams, index, self.episodes * self.several)
        steps = None if self.rules is None else self.rules.agent_steps
        played = run_episodes(policy, self.env, seeds, min_steps=steps, **polls)
        check_every_task(played, self.env.spec_for_agent)
        followed = None if self.shortened else self.protocol
        return replace(EvalResult.of(played, self.task, name), protocol=followed)

    def close(self) -> None:
        """Ends the environments."""
        if self._env is not None:
            self._env.close()
            self._env = None


def check_every_task(played: Played, spec: EnvSpec) -> None:
    """Of several tasks each must have been played: a mean of those that were left would rise where
    the others fail, and pass for the best."""
    found = {episode.task for episode in played.episodes}
    for own in spec.tasks:
        if own.task not in found:
            whole = re.compile(rf"{re.escape(own.task)}(?![\w-])")  # not the beginning of another
            why = next((said for said in played.failures if whole.search(said)), "")
            raise EvaluationError(
                f"No evaluation episode of {own.task} could be played, so there is no mean of all "
                f"tasks. {why or played.failures[0] if played.failures else ''}".rstrip()
            )


def _is_folder(name: str) -> bool:
    """Whether a run is meant; the name of many tasks is longer than any disk takes."""
    try:
        return files.is_there(Path(name)) and Path(name).is_dir()
    except PermissionError:
        return True  # there is something, and whoever opens it says that it may not be read
    except OSError:
        return False


def evaluate_target(
    target: str,
    *,
    policy: str | None = None,
    episodes: int | None = None,
    protocol: str | None = None,
    checkpoint: str | int | None = None,
    seed: int | None = None,
    device: str | None = None,
    tell: Tell | None = None,
) -> EvalResult:
    """Plays episodes of a run's agent, or of random play in a task or in a run's environments.

    The episodes are those of evaluation 0, so an agent and random play meet the same starts, which
    are other ones than those of the agent's evaluations during training. A `protocol` decides how
    much is played and how; None is that of the run, if it has one, of which `episodes` change only
    how much is played. `tell` is called before each step with how far it is.
    """
    whole = episodes is None or (isinstance(episodes, int) and episodes >= 1)
    conf.require(whole, "episodes", episodes, "a whole number, at least 1")
    run: RunDirectory | None = None
    shortened = False
    if _is_folder(target):
        run = RunDirectory.open(Path(target))
        config = read_config(run)
        set_threads(config.train.threads)  # sums are split by it: the same numbers as in training
        task, env, seed = config.task, config.env, config.seed if seed is None else seed
        names, epsilon = [config.agent_name, "random"], config.eval.epsilon
        if protocol is None:
            protocol, shortened = config.eval.protocol, episodes is not None
    elif ":" in target:
        task, env, seed, names = target, EnvConfig(), 1 if seed is None else seed, ["random"]
        epsilon = 0.0
    else:
        raise conf.ConfigError(
            f"There is no run directory {target}, and a task is written like gym:Pendulum-v1."
        )
    policy = names[0] if policy is None else policy
    if policy not in names:
        raise conf.unknown("policy", policy, names, f"Here there is: {', '.join(names)}.")
    if policy == "random":
        for key, value in (("checkpoint", checkpoint), ("device", device)):
            rule = "left out: it has no effect on random play"
            conf.require(value is None, key, value, rule)
    which = "latest" if checkpoint is None else str(checkpoint)
    if protocol is not None and not shortened:
        rule = f"left out: the protocol {protocol} decides it"
        conf.require(episodes is None, "episodes", episodes, rule)
    number = EPISODES if episodes is None else episodes
    options: dict[str, Any] = {"protocol": protocol, "shortened": shortened, "epsilon": epsilon}
    evaluator = Evaluator(task, env, Streams(seed), number, tell, **options)
    place = None if run is None else str(run.path)
    try:
        if run is None or policy == "random":
            return replace(evaluator.random(), run=place, seed=seed)
        # By its step from here on: a run in training may save a newer one meanwhile.
        folder, _ = Checkpoints(run).find(which)
        step = step_of(files.read_manifest(folder).meta)
        agent = load_agent(target, checkpoint=str(step), device=device or "auto")
        result = evaluator.agent(agent, 0)
        return replace(result, run=place, checkpoint=which, checkpoint_step=step, seed=seed)
    finally:
        evaluator.close()
