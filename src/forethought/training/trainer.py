"""What one run holds while it trains, the pieces of work that the loop strings together, and the
state of it all."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from forethought import files
from forethought.clock import Clock, Every, UpdateBudget
from forethought.config import RunConfig, to_dict
from forethought.envs.episodes import EvaluationInterrupted
from forethought.envs.multi import task_names
from forethought.envs.protocols import human_normalised
from forethought.files import FileError, reach
from forethought.tracking import RunDirectory, Sink, Tracker
from forethought.tracking.run_directory import git_commit
from forethought.training.build import Parts, seed_phase
from forethought.training.checkpoint import Checkpoints, State
from forethought.training.collect import Collector, learned_in
from forethought.training.dump import DUMPS, keep_first_and_newest, readable, write_dump
from forethought.training.evaluate import EvalResult, Evaluator
from forethought.training.gates import Alarm, Gates, Pace
from forethought.training.signals import Interrupted, Stop
from forethought.training.videos import EvaluationVideos

log = logging.getLogger("forethought")


class Trainer:
    """The parts of a run in training."""

    def __init__(
        self, config: RunConfig, run: RunDirectory, parts: Parts, sinks: Sequence[Sink]
    ) -> None:
        spec, rhythm = parts.agent.spec, config.rhythm
        self.config, self.run, self.parts, self.agent = config, run, parts, parts.agent
        self.clock = self.make_clock()
        self.agent.follow(self.clock, config.steps)
        self.seed_phase = seed_phase(config.train, spec, parts.agent.num_envs)
        self.random_agent_steps = self.seed_phase[0] if config.train.seed_policy == "random" else 0
        """Of the seed phase, those that random actions play."""
        self.budget = self.make_budget()
        names, human = task_names(spec), human_normalised(config.task, 0.0) is not None
        self.tracker = Tracker(
            run,
            sinks,
            self.clock,
            self.agent.metric_names,
            tasks=names,
            human=human,
            learned=learned_in(spec),
        )
        self.collector = self.make_collector()
        self.evaluator = Evaluator(
            config.task,
            config.env,
            parts.streams,
            config.eval.episodes,
            tell=self._take_progress,
            protocol=config.eval.protocol,
            epsilon=config.eval.epsilon,
        )
        self._played: tuple[int, int, int | None] = (0, 0, None)
        """Of the evaluation under way: episodes ended, steps taken, episodes in all."""
        self.videos = EvaluationVideos(config, self.tracker)
        self.checkpoints = Checkpoints(run, config.train.keep_checkpoints, to_dict(config))
        self.gates, self.pace = Gates(), Pace()
        self.total = rhythm.total
        """Where the run ends, in its unit."""
        self.log_every = Every(rhythm.log_every)
        self.eval_every = Every(rhythm.eval_every)
        self.save_every = Every(rhythm.save_every)
        self.diagnose_every = Every(getattr(config.replay, "diagnostics_every_agent_steps", 0))
        self.evaluations = 0
        """Of the agent, finished; the next one's index is one more."""
        self.evaluation_pending = False
        """An evaluation is due and not finished: it is done first after a resume."""
        self.score: float | None = None
        """Mean return of the last evaluation."""
        self.scored_at = -1
        """Where the run stood at that evaluation, in its unit."""
        self.checkpoint_failures = 0
        self.write_failures = 0
        """Of files beside the checkpoints, without which training goes on."""
        self.recent: deque[dict[str, float]] = deque(maxlen=200)
        """Metrics of the last updates, for the dump of a run that diverges."""

    # ---- what an offline run has otherwise (see offline.py) ----

    def make_clock(self) -> Clock:
        """The counters of the run."""
        return Clock()

    def make_budget(self) -> UpdateBudget:
        """The updates that its steps earn."""
        return UpdateBudget(self.config.train.updates_per_agent_step, *self.seed_phase)

    def make_collector(self) -> Collector | None:
        """Its training environments."""
        random = self.random_agent_steps
        return Collector(self.parts, self.clock, self.tracker, random, self.config.env)

    def advance(self) -> bool:
        """One step further; True when a gate halts the run."""
        self.step()
        return False

    # ---- the beginning ----

    def begin(self) -> None:
        """The first episodes of a new run."""
        self.agent.replay.seal_to(self.run.replay)
        if self.collector is not None:
            self.collector.begin()

    def save_beginning(self) -> None:
        """A checkpoint of the beginning, so that a kill before the first interval loses nothing.
        What cannot be written fails here, before any work."""
        if self.save_every.period:
            self.save()
        counts, facts = self.agent.log_architecture(), self.agent.facts()
        self.tracker.event("started", parameters=counts, **facts)

    # ---- pieces of work ----

    def update(self) -> bool:
        """One update that is owed; True when a gate halts the run."""
        self.budget.take()
        return self.learn()

    def learn(self) -> bool:
        """One update; True when a gate halts the run."""
        metrics = self.agent.train(1)
        self.clock.updates += 1
        self.recent.append(metrics)
        self.tracker.add(metrics)
        self.tracker.tick(self._learning())
        alarms = self.gates.after_update(metrics, self.clock.updates)
        halted = self._sound(self._dump(alarm) if alarm.dump else alarm for alarm in alarms)
        reach(f"update-{self.clock.updates}")
        return halted

    def step(self) -> None:
        """One decision in every environment, and the updates that it earns."""
        assert self.collector is not None
        phase = self._collecting()
        self.collector.step()
        self.budget.advance(self.clock.agent_steps)
        self.tracker.tick(phase)
        reach(f"step-{self.clock.agent_steps}")

    def _collecting(self) -> str:
        """What is done at the next step instead of learning, and how long; "" once it has begun."""
        steps, seeding = self.clock.agent_steps, self.seed_phase[0]
        if steps >= seeding:
            return ""
        what = "random play" if steps < self.random_agent_steps else "collecting"
        return f"{what}, learning begins at {seeding:,}"

    def report(self) -> None:
        """What is due in train.csv: what replay gives now and then, and a row per interval."""
        if self.diagnose_every.due(self.clock.agent_steps):
            self.tracker.add(self.agent.replay_diagnostics())
        if self.log_every.due(self.clock.position):
            pace = self.tracker.flush_train(self.clock).get("updates_per_s")
            if isinstance(pace, float):
                self._sound(self.pace.after_interval(pace))

    def evaluate(self, stop: Stop) -> bool:
        """The pending evaluation; True when its score is the best so far."""
        index = self.evaluations + 1
        filmed = self.videos.due(index)
        with _apart():
            result = self.evaluator.agent(self.agent, index, filmed, **self._polls(stop, index))
        self.evaluations, self.evaluation_pending = index, False
        self.score, self.scored_at = result.mean, self.clock.position
        best = self.gates.best_score is None or result.mean > self.gates.best_score
        self.tracker.evaluation({"evaluation_index": index, **result.row()})
        self._tell_failures(result)
        self._keep_snapshots()
        self._sound(self.gates.after_evaluation(result.mean))
        if self.evaluator.recorded is not None:
            polls = {"stop": lambda: bool(stop), "on_step": lambda: self.tracker.tick("filming")}
            with _apart():
                self.videos.film(self.evaluator.recorded, result, self.clock.position, polls)
        return best

    def _keep_snapshots(self) -> None:
        """Writes down what the agent wants to be seen of it at this evaluation."""
        folder, steps = self.run.path / "snapshots", self.clock.position
        for name, data in self.agent.snapshots(steps).items():
            with self._going_on(f"The snapshot {name}"):
                folder.mkdir(exist_ok=True)
                files.write_json(folder / f"{name}-{steps}.json", readable(data))

    def play_randomly(self, stop: Stop) -> None:
        """The score of random play, once per run: the gates' anchor, every report's yardstick."""
        if self.gates.random_score is None:
            with _apart():
                result = self.evaluator.random(**self._polls(stop, 0))
            self._tell_failures(result)
            self.gates.random_score = result.mean
            with self._going_on("The score of random play in run.json"):
                self.run.update(random_score=result.mean)

    def save(self) -> None:
        """A checkpoint; FileError if it cannot be written."""
        score = self.score if self.scored_at == self.clock.position else None
        counters, unit = self.clock.row(), self.clock.unit
        self.checkpoints.save(self.agent, self.state(), counters, score, unit)
        self.agent.replay.prune(self.run.replay, self.checkpoints.needed_blocks())
        best, random = self.checkpoints.catalog.best(), self.gates.random_score
        scores: dict[str, Any] = {} if random is None else {"random_score": random}
        told = None if best is None else {"step": best.step, "eval_score": best.eval_score}
        scores["best"] = told  # none, if the only one that was evaluated is gone
        with self._going_on("The scores in run.json"):
            self.run.update(**scores)

    def try_save(self) -> None:
        """A checkpoint on the way: a failure is told and counted, the next interval tries again."""
        try:
            self.save()
        except (FileError, OSError) as error:
            self.checkpoint_failures += 1
            log.warning("The checkpoint was not saved, training goes on: %s", error)
            self.tracker.event(
                "checkpoint-failed", reason=str(error), failures=self.checkpoint_failures
            )

    def close(self) -> None:
        """Ends environments and sinks."""
        self.parts.close()
        self.evaluator.close()
        self.tracker.close()

    def warn_if_idle(self) -> None:
        """Says at the start when a run is too short for a single update."""
        if self.whole()[1] == 0:
            self._warn(
                "never-learns",
                f"This run will not learn: steps is {self.config.steps}, which earns no update, "
                f"for the first {self.seed_phase[0]} only collect (train.seed_agent_steps).",
            )

    def whole(self) -> tuple[int, int]:
        """Agent steps of the whole run, and the updates that they earn; environments step
        together, so the last of them may go beyond `steps`."""
        n, budget = self.agent.num_envs, self.make_budget()
        length = math.ceil(self.config.steps / n) * n
        budget.advance(length)
        return length, budget.owed

    def finish(self) -> None:
        """The last words of a run that has ended and is saved, the open interval among them.

        The checkpoint is older than that row, so a resume with more steps cuts it off and goes on
        with the interval as it was.
        """
        self.tracker.flush_train(self.clock)
        if self.budget.owed and not self.agent.replay.can_sample():
            why = "too few steps were made; train longer"
            if self.clock.episodes:
                why = "every episode so far was too short for one; train longer"
            elif self.config.replay.kind == "episodes":
                why = "no episode has ended; train longer, or set a shorter env.max_episode_steps"
            self._warn(
                "updates-owed",
                f"{self.budget.owed} updates were never made: replay holds no whole slice to learn "
                f"from, for {why}.",
            )

    # ---- state ----

    def state(self) -> State:
        """All that decides the future, but for the agent itself."""
        data = {
            **self._own_state(),
            **{name: part.state() for name, part in self._counting_parts().items()},
            "tracker": self.tracker.state(),
        }
        if self.collector is None:
            return data, {}
        collector, tensors = self.collector.state()
        return {**data, "collector": collector}, tensors

    def restore(self, folder: Path) -> None:
        """Becomes the run that wrote this checkpoint; CSV rows after it are cut off.

        An open episode that does not come out the same when stepped again is told of: the run goes
        on, but is no longer exact.
        """
        data, tensors = files.read_json(folder / "loop.json"), folder / "loop.safetensors"
        self.agent.load(folder, self.run.replay)
        self.agent.replay.seal_to(self.run.replay)
        for name, start in self._own_state().items():
            setattr(self, name, data.get(name, start))
        for name, part in self._counting_parts().items():
            if name in data:  # one of an older version may lack the newest of them
                part.restore(data[name])
        self.tracker.restore(data["tracker"])
        lost: dict[int, str] = {}
        if self.collector is not None:
            lost = self.collector.restore(data["collector"], files.load_tensors(tensors))
        reasons = list(lost.values())
        self.tracker.event(
            "resumed",
            checkpoint=folder.name,
            git_commit=git_commit(),
            lost_episodes=list(lost),
            reasons=reasons,
        )
        for i, reason in lost.items():
            log.warning(
                "The open episode of environment %d did not come out the same when stepped again; "
                "it is marked truncated and a new one begins, so this run is no longer exact. %s",
                i,
                reason,
            )

    def _own_state(self) -> dict[str, Any]:
        names = (
            "evaluations",
            "evaluation_pending",
            "score",
            "scored_at",
            "checkpoint_failures",
            "write_failures",
        )
        return {name: getattr(self, name) for name in names}

    def _counting_parts(self) -> dict[str, Any]:
        names = ["clock", "budget", "gates", "log_every", "eval_every", "save_every"]
        names += ["diagnose_every"] if self.diagnose_every.period else []
        return {name: getattr(self, name) for name in names}

    # ---- saying what happens ----

    def _learning(self) -> str:
        """How far a burst of updates is; "" for the few that each step earns."""
        usual = self.config.train.updates_per_agent_step * self.agent.num_envs
        owed, made = self.budget.owed, self.clock.updates
        return f"learning {made:,}/{made + owed:,} updates" if owed > max(1.0, usual) else ""

    def _polls(self, stop: Stop, index: int) -> dict[str, Any]:
        """What the episode runner calls at each step of evaluation `index`."""
        count = itertools.count(1)
        what = "evaluating" if index else "measuring random play"

        def on_step() -> None:
            ended, steps, of = self._played
            share = f"{ended:,}" if of is None else f"{ended:,}/{of:,}"
            self.tracker.tick(f"{what}: {share} episodes, step {steps:,}")
            reach(f"evaluation-{index}-{next(count)}")

        return {"stop": lambda: bool(stop), "on_step": on_step}

    def _take_progress(self, ended: int, steps: int, of: int | None) -> None:
        self._played = ended, steps, of

    def _sound(self, alarms: Iterable[Alarm]) -> bool:
        """Tells each alarm; True when one of them halts the run."""
        halt = False
        for alarm in alarms:
            log.warning("%s", alarm.message)
            self.tracker.event(alarm.kind, message=alarm.message)
            if alarm.tag is not None:
                with self._going_on(f"The tag {alarm.tag}"):
                    self.run.tag(alarm.tag)
            halt = halt or alarm.halt
        return halt

    def _tell_failures(self, result: EvalResult) -> None:
        if result.failures:
            failed = f"{result.n_failed:,} evaluation episode{'s' * (result.n_failed != 1)} failed"
            log.warning("%s: %s", failed, result.failures[0])
            self.tracker.event("evaluation-episodes-failed", reasons=list(result.failures))

    def _warn(self, kind: str, message: str) -> None:
        log.warning("%s", message)
        self.tracker.event(kind, message=message)

    @contextlib.contextmanager
    def _going_on(self, what: str) -> Iterator[None]:
        """A write that must not stop training: a failure is told and counted."""
        try:
            yield
        except (FileError, OSError) as error:
            self.write_failures += 1
            log.warning("%s was not written, training goes on: %s", what, error)
            self.tracker.event(
                "write-failed", what=what, reason=str(error), failures=self.write_failures
            )

    def _dump(self, alarm: Alarm) -> Alarm:
        """Writes down what helps to find the cause; the alarm that says where it is."""
        kind = "diverged" if alarm.halt else "nonfinite"
        folder = self.run.path / DUMPS / f"{kind}-{self.clock.updates:09d}"
        about = {
            "alarm": alarm.message,
            "clock": self.clock.row(),
            "gates": self.gates.state(),
            "recent_updates": list(self.recent),
            "config": to_dict(self.config),
        }
        with self._going_on("The dump"):
            write_dump(folder, self.agent, about)
            keep_first_and_newest(folder.parent, kind)
            return replace(alarm, message=f"{alarm.message} A dump of it is in {folder}.")
        return alarm


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """Work in environments and streams of its own: given up half-way it leaves nothing half done
    that a checkpoint holds, so one can be written and the steps since the last are not lost."""
    try:
        yield
    except Interrupted as error:
        raise EvaluationInterrupted from error
