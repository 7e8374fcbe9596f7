"""The training loop, on one page: read `_train` from top to bottom.

    envs -> store -> updates owed -> train.csv -> evaluation -> checkpoint -> envs ...

A run stops at its last step, at a signal or at a gate; each way ends with a checkpoint, and
`resume_run` goes on from there exactly. Strategy for errors: an exception of an environment, of an
update or of the last checkpoint ends the run with status `failed` and reaches the caller; what may
fail without harm is handled where it happens (sinks, checkpoints on the way, single evaluation
episodes).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml

from forethought import files
from forethought.agents.base import Agent
from forethought.config import ConfigError, ForethoughtError, MemoryRefused, RunConfig, to_dict
from forethought.envs.episodes import EvaluationInterrupted
from forethought.files import FileError
from forethought.tracking import RunDirectory, make_sinks
from forethought.training.build import build_parts, changed_keys, read_config
from forethought.training.checkpoint import Checkpoints
from forethought.training.contents import step_of, try_out
from forethought.training.init_from import begin_from
from forethought.training.offline import OfflineTrainer, with_whole_paths
from forethought.training.signals import AS_IT_WAS, NOT_BEGUN, Interrupted, Stop
from forethought.training.telling import (
    say_farewell,
    say_hello,
    say_how_to_go_on,
    say_if_diverged,
    sentence,
)
from forethought.training.trainer import Trainer

log = logging.getLogger("forethought")


@dataclass(frozen=True)
class Run:
    """What is left of a run that has stopped; everything else is in its directory."""

    path: Path
    status: str
    """done, interrupted or diverged."""
    exit_code: int
    """0 done, 3 diverged, 129, 130 or 143 by signal."""
    agent_steps: int
    """Decisions taken; none in an offline run."""
    score: float | None
    """Mean return of the last evaluation."""
    random_score: float | None
    """Mean return of random play in the same task."""


def train_run(config: RunConfig, out: Path | None = None) -> Run:
    """Trains an agent from the start, in a new run directory."""
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(Stop(NOT_BEGUN))
        config = with_whole_paths(config)

        def create() -> RunDirectory:
            about = config.agent_name, config.task, config.seed
            run = RunDirectory.create(out, to_dict(config), *about)
            stack.enter_context(run.lock())
            return run

        return _begin(config, create, stack, stop)


def resume_run(path: Path, steps: int | None = None, override: bool = False) -> Run:
    """Continues a run where its newest whole checkpoint left it; `steps` is the new total.

    With `override` changes in config.yaml are taken over; else they are refused.
    """
    run = RunDirectory.open(Path(path))
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(Stop(AS_IT_WAS))
        stack.enter_context(run.lock())
        config = read_config(run)
        checkpoints = Checkpoints(run)
        for note in (*files.recover(run.checkpoints), *checkpoints.catalog.sync()):
            run.event("checkpoints-mended", note=note)
        if run.unbegun:
            config = config.with_total(steps or config.rhythm.total)
            _write_config(run, config)
            return _begin(config, lambda: run, stack, stop)
        folder, skipped = checkpoints.newest()
        changes = changed_keys(folder, config)
        if changes and not override:
            raise ConfigError(
                f"{run.path / 'config.yaml'} has changed since {folder.name} was written; put the "
                f"old values back, or accept the new ones with --override: {'; '.join(changes)}."
            )
        at, total = step_of(files.read_manifest(folder).meta), config.rhythm.total
        if steps is not None and steps < at and steps != total:
            raise ConfigError(
                f"steps is {steps}, but the run already stands at {at}; give a greater total."
            )
        if run.run_json["status"] == "done" and (steps or total) <= at:
            _tell_skipped(run, skipped)
            words = config.rhythm.unit.replace("_", " ")
            told = f"{run.path} is complete at {at:,} {words}"
            print(f"{told}; a greater total (--steps) takes it further.")
            score = files.read_json(folder / "loop.json").get("score")
            decisions = 0 if config.is_offline else at
            return Run(run.path, "done", 0, decisions, score, run.run_json.get("random_score"))
        was, config = config, config.with_total(steps or total)
        parts = build_parts(config)
        stack.callback(parts.close)
        folder, skipped = _newest_that_fits(checkpoints, parts.agent, (folder, skipped), changes)
        _tell_skipped(run, skipped)
        _tell_versions(run, folder)
        if changes:
            run.event("configuration-overridden", checkpoint=folder.name, changes=changes)
            print(f"Goes on with what config.yaml says now: {'; '.join(changes)}.")
        if config != was:
            _write_config(run, config)
        checkpoints.set_aside_newer(folder)
        sinks = make_sinks(config.track, config.rhythm.total, config.rhythm.unit)
        trainer = _trainer_of(config)(config, run, parts, sinks)
        return _carry_out(trainer, folder, stop)


def _begin(
    config: RunConfig,
    directory: Callable[[], RunDirectory],
    stack: contextlib.ExitStack,
    stop: Stop,
) -> Run:
    """Trains a run from its start; `directory` is asked for when all else is there."""
    sinks = make_sinks(config.track, config.rhythm.total, config.rhythm.unit)
    parts = build_parts(config)
    stack.callback(parts.close)
    begin_from(parts.agent, config)
    parts.agent.check_new(config.rhythm.total)
    stop.politely()
    return _carry_out(_trainer_of(config)(config, directory(), parts, sinks), None, stop)


def _write_config(run: RunDirectory, config: RunConfig) -> None:
    text = yaml.safe_dump(to_dict(config), sort_keys=False)
    files.write_text_atomic(run.path / "config.yaml", text)


def _trainer_of(config: RunConfig) -> type[Trainer]:
    return OfflineTrainer if config.is_offline else Trainer


def _newest_that_fits(
    checkpoints: Checkpoints, agent: Agent, found: tuple[Path, list[str]], changes: list[str]
) -> tuple[Path, list[str]]:
    """The newest checkpoint that the agent can be restored from, and why newer ones cannot.

    `found` is what `newest` said just now: to ask again would read the whole replay again. Where
    none fits though some are whole, the `changes` of the configuration are what is wrong.
    """
    unfit: dict[str, str] = {}
    while True:
        try:
            folder, skipped = checkpoints.newest(unfit) if unfit else found
        except FileError as error:
            if not changes:
                raise
            raise ConfigError(
                f"What was saved does not fit the changes in {checkpoints.run.path / 'config.yaml'}"
                f" ({'; '.join(changes)}); put the old values back, or start a new run with the "
                f"new ones: {next(iter(unfit.values()))}"
            ) from error
        try:
            try_out(folder, agent, checkpoints.run.replay)
        except MemoryRefused:
            raise  # an older checkpoint would cost what was learned since, and needs as much
        except ForethoughtError as error:
            unfit[folder.name] = str(error)
        else:
            return folder, skipped


def _tell_skipped(run: RunDirectory, skipped: list[str]) -> None:
    for reason in skipped:
        log.warning("%s", reason)
        run.event("checkpoint-skipped", reason=reason)


def _tell_versions(run: RunDirectory, folder: Path) -> None:
    """Says once when other versions of packages wrote the checkpoint."""
    old, new = files.read_manifest(folder).versions, files.versions()
    changes = [
        f"{name} {old.get(name)} -> {new.get(name)}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]
    if changes:
        text = "; ".join(changes)
        log.warning("%s was written by other versions; the run may not be exact: %s", folder, text)
        run.event("versions-changed", checkpoint=folder.name, changes=changes)


def _carry_out(trainer: Trainer, checkpoint: Path | None, stop: Stop) -> Run:
    """Begins or restores, trains, saves, and leaves the run's status behind."""
    run, cut_short, began = trainer.run, False, False
    try:
        if checkpoint is None:
            trainer.begin()
            with stop.unhurried():
                trainer.save_beginning()
        else:
            with files.content_of(checkpoint):
                trainer.restore(checkpoint)
            say_if_diverged(trainer)
            stop.politely()
        run.update(status="running")
        say_hello(trainer, checkpoint)
        trainer.warn_if_idle()
        trainer.tracker.start()
        began = True
        status = _train(trainer, stop)
        stop.settle()
        trainer.save()  # the last one: a failure here raises
        if status != "interrupted":
            trainer.finish()
        run.update(status=status)
    except Interrupted:
        # What is in memory is half a step or half restored: the newest checkpoint stands.
        status, cut_short = "interrupted", True
        with contextlib.suppress(FileError):
            run.update(status=status)
    except BaseException as error:
        # The disk may be what failed; then the first error is the one to show.
        with contextlib.suppress(FileError):
            run.update(status="failed", error=sentence(error))
        trainer.tracker.event("failed", error=sentence(error))
        if began or checkpoint is None:
            say_how_to_go_on(trainer, error)
        raise
    finally:
        stop.settle()
        trainer.close()
    exit_code = {"done": 0, "diverged": 3, "interrupted": stop.exit_code}[status]
    trainer.tracker.event(status)
    say_farewell(trainer, status, cut_short)
    return Run(
        run.path,
        status,
        exit_code,
        trainer.clock.agent_steps,
        trainer.score,
        trainer.gates.random_score,
    )


def _train(trainer: Trainer, stop: Stop) -> str:
    """Runs until the last step, a signal or a gate; returns the run's status.

    Whatever is due is settled before the next step, and each piece says in the saved state that it
    is settled only when it is. So a run that stops between any two pieces goes on with the next.
    """
    t, clock = trainer, trainer.clock
    try:
        if stop:  # it came while the beginning was saved
            return "interrupted"
        t.play_randomly(stop)
        while True:
            # 1. Learn: the updates that the steps so far have earned, the burst after the seed
            #    phase among them. None can be made before replay holds a whole slice.
            while t.budget.owed and t.agent.replay.can_sample():
                if stop:
                    return "interrupted"
                if t.update():
                    return "diverged"
            finished = clock.position >= t.total

            # 2. Report: one row of train.csv per interval.
            t.report()

            # 3. Evaluate, always at the end; once, also when killed after the last checkpoint.
            last = finished and t.scored_at != clock.position
            if t.eval_every.due(clock.position) or last:
                t.evaluation_pending = True
            best = t.evaluate(stop) if t.evaluation_pending else False

            # 4. Save, also what is best so far; the caller saves at the end.
            due = t.save_every.due(clock.position)
            if finished:
                return "done"
            if due or (best and t.save_every.period):
                with stop.unhurried():
                    t.try_save()

            # 5. Step every environment once; offline, make one update.
            if stop:
                return "interrupted"
            if t.advance():
                return "diverged"
    except EvaluationInterrupted:
        return "interrupted"
