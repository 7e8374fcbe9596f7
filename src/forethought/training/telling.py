"""What a run tells the person who started it: at its beginning, at its end, and when it fails."""

from __future__ import annotations

import contextlib
import logging
import shlex
import statistics
import sys
from pathlib import Path

from forethought import files
from forethought.config import ForethoughtError
from forethought.files import FileError
from forethought.training.dump import DUMPS
from forethought.training.trainer import Trainer

log = logging.getLogger("forethought")


def say_hello(trainer: Trainer, checkpoint: Path | None) -> None:
    """What is trained, how large it is, and what its parts have to say."""
    config, agent = trainer.config, trainer.agent
    lines = [
        f"{config.agent_name} on {config.task}, seed {config.seed}, in {trainer.run.path}",
        f"{agent.log_architecture()['total']:,} parameters on {agent.device}; replay: "
        f"{agent.replay.describe()}",
        *agent.notes,
        *_limits(trainer),
        *_units(trainer),
        *_saved(trainer),
    ]
    if checkpoint is not None:
        lines.append(f"Resumed at {trainer.clock.told} (checkpoint {checkpoint.name}).")
    trainer.tracker.event("about", lines=lines)
    if config.track.console:
        _tell("\n".join(lines))


def _tell(text: str) -> None:
    """To the person, if one is there: a terminal that is gone, or a log on a full disk, stops no
    training."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _units(trainer: Trainer) -> list[str]:
    """The run's length in agent steps, frames and updates: schedules are told in any of them."""
    if trainer.collector is None:
        return []  # an offline run counts updates alone
    spec, (steps, updates) = trainer.agent.spec, trainer.whole()
    # Each task has as many environments as any other.
    repeat = statistics.mean(task.action_repeat for task in spec.tasks or (spec,))
    seed_steps, seed_updates = trainer.seed_phase
    parts = [f"{seed_updates:,} at once"] if seed_updates else []
    parts.append(f"{trainer.config.train.updates_per_agent_step:g} a step")
    after = f" after the first {seed_steps:,}" if seed_steps else ""
    return [
        f"{steps:,} agent steps are {round(steps * repeat):,} frames ({repeat:g} each) and "
        f"{updates:,} updates ({', then '.join(parts)}{after})."
    ]


def _limits(trainer: Trainer) -> list[str]:
    """That episodes do not end where the task would end them: a preset may have said so."""
    env = trainer.config.env
    ends = {"training": env.training["max_episode_steps"]}
    if trainer.collector is None:
        ends = {}  # an offline run plays in evaluations only
    if trainer.config.eval.protocol is None:  # which has a limit of its own
        ends["evaluation"] = env.evaluation["max_episode_steps"]
    told = [f"in {kind} after {n:,} decisions" for kind, n in ends.items() if n is not None]
    if not told:
        return []
    return [
        f"Episodes end {' and '.join(told)} at most, whatever the task's own limit is "
        "(env.max_episode_steps, env.eval_max_episode_steps)."
    ]


def _saved(trainer: Trainer) -> list[str]:
    """That little is saved on the way: presets of long runs save seldom, and --steps is short."""
    config, every = trainer.config, trainer.save_every.period
    length = config.offline.updates if config.is_offline else config.steps
    if 0 < every < length:
        return []
    key, unit = _saving(trainer)
    if not every:
        return [f"Nothing is saved before the end ({key} is 0): a run that is killed is lost."]
    return [
        f"Between beginning and end the best evaluation alone is saved ({key} is {every:,}, the "
        f"run has {length:,} {unit}): what was learned since is lost where the process is killed."
    ]


def say_if_diverged(trainer: Trainer) -> None:
    """Whoever resumes a diverged run learns what to expect; its counters are as they were."""
    if trainer.run.run_json["status"] == "diverged":
        log.warning(
            "This run diverged at %s (see %s); it goes on from there, and the next "
            "update that is not finite halts it again.",
            trainer.clock.told,
            trainer.run.path / DUMPS,
        )


def sentence(error: BaseException) -> str:
    """An error in words."""
    return str(error) if isinstance(error, ForethoughtError) else f"{type(error).__name__}: {error}"


def say_how_to_go_on(trainer: Trainer, error: BaseException) -> None:
    """As a note of the error, so that whoever shows the error shows this last."""
    try:
        can_go_on = bool(files.published(trainer.run.checkpoints)) or trainer.run.unbegun
    except (OSError, FileError):  # the disk may be what failed; then nobody knows, and resume tells
        can_go_on = True
    if can_go_on:
        error.add_note(
            f"Stopped by an error at {trainer.clock.told}. When it is mended: "
            f"forethought resume {shlex.quote(str(trainer.run.path))}"
        )


def _why_none(trainer: Trainer) -> str:
    """Why there is no checkpoint: they are turned off, or somebody deleted them."""
    if trainer.save_every.period:
        return ""
    return f" ({_saving(trainer)[0]} is 0)"


def _saving(trainer: Trainer) -> tuple[str, str]:
    """The key that says how often checkpoints are made, and what it counts."""
    if trainer.config.is_offline:
        return "offline.checkpoint_every_updates", "updates"
    return "train.checkpoint_every_agent_steps", "agent steps"


def say_farewell(trainer: Trainer, status: str, cut_short: bool) -> None:
    """How it ended, and what to do next."""
    path, told = trainer.run.path, trainer.clock.told
    again = f"Continue with: forethought resume {shlex.quote(str(path))}"
    saved = files.published(trainer.run.checkpoints)
    if cut_short and saved:
        text = f"Stopped without a new checkpoint; the newest is {saved[-1].name}. {again}"
    elif cut_short and trainer.run.unbegun:
        text = f"Stopped before the first checkpoint: nothing was begun. {again}"
    elif cut_short:
        text = f"Stopped at {told} without a checkpoint{_why_none(trainer)}: nothing was saved."
    elif status == "interrupted":
        # In a burst of updates only these grow.
        learned = "" if trainer.collector is None else f", {trainer.clock.updates:,} updates"
        text = f"Stopped at {told}{learned}. {again}"
    elif status == "diverged":
        text = f"Diverged at {told}; see {path / DUMPS} and {path / 'events.jsonl'}."
    else:
        score, random = trainer.score, trainer.gates.random_score
        text = f"Done: mean return {score:.6g} (random play {random:.6g}) in {path}"
    _tell(text)
