"""A new run that begins with the weights of another: `--train.init_from RUN`.

Only weights carry over: the optimisers, the replay, the counters and the configuration are the new
run's own. Once it has a checkpoint, a resume needs the other run no more.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from forethought import files
from forethought.agents.base import Agent
from forethought.config import ConfigError, ForethoughtError, RunConfig
from forethought.tracking import RunDirectory
from forethought.training.build import read_config, task_spec
from forethought.training.checkpoint import Checkpoints
from forethought.training.contents import told_step


def begin_from(agent: Agent, config: RunConfig) -> None:
    """Gives the agent the weights that the configuration names, if it names some."""
    if config.train.init_from is None:
        return
    run = RunDirectory.open(Path(config.train.init_from))
    about = run.run_json
    here = f"{config.agent_name} on {config.task}"
    if about["agent"] != config.agent_name:
        raise ConfigError(
            f"train.init_from names {run.path}, a run of {about['agent']} on {about['task']}, but "
            f"this is {here}; begin with a run of the same agent."
        )
    folder, _ = Checkpoints(run).find(config.train.init_checkpoint or "latest")
    meta = files.read_manifest(folder).meta
    told = f"{run.path} at {told_step(meta)} ({about['task']})"
    with files.content_of(folder / "agent.safetensors"):
        tensors = files.load_tensors(folder / "agent.safetensors")
        task, like = str(about["task"]), config.train.init_task
        agent.notes += agent.begin_with(tensors, task, told, like, meta)
    held = action_repeats(read_config(run))
    unequal = different_lengths(held, action_repeats(config), like)
    agent.notes += () if unequal is None else (unequal,)


def different_lengths(
    held: Mapping[str, int], own: Mapping[str, int], like: str | None = None
) -> str | None:
    """A sentence, where actions were held for other numbers of frames. A task that both have must
    be as it was there; a new one as that which it begins like (train.init_task), or any there."""
    here: set[int] = set()
    there: set[int] = set()
    for task, repeat in own.items():
        of = task if task in held else like
        before = set(held.values()) if of is None or of not in held else {held[of]}
        if repeat not in before:
            here.add(repeat)
            there |= before
    if not here and (own or not held):
        return None
    there = there or set(held.values())
    return (
        f"An action is held for {_in_words(here)} here and was for {_in_words(there)} there: a "
        "step of its world may be longer or shorter than here."
    )


def action_repeats(config: RunConfig) -> dict[str, int]:
    """By task, the frames for which a run holds an action; none where they are not to be had."""
    try:
        spec = task_spec(config.task, config.env)
    except ForethoughtError:
        return {}
    return {task.task: task.action_repeat for task in spec.tasks or (spec,)}


def _in_words(repeats: set[int]) -> str:
    if not repeats:
        return "an unknown number of frames"
    told = " or ".join(map(str, sorted(repeats)))
    return f"{told} frame{'' if repeats == {1} else 's'}"
