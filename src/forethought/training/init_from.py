"""A new run that begins with the weights of another: `--train.init_from RUN`.

Only weights carry over: the optimisers, the replay, the counters and the configuration are the new
run's own. Once it has a checkpoint, a resume needs the other run no more.
"""

from __future__ import annotations

from pathlib import Path

from forethought import files
from forethought.agents.base import Agent
from forethought.config import ConfigError, RunConfig
from forethought.tracking import RunDirectory
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
    held, own = meta.get("config", {}).get("env", {}).get("action_repeat"), config.env.action_repeat
    if held != own:
        agent.notes += (
            f"env.action_repeat is {_or_usual(own)} here and was {_or_usual(held)} there: a step "
            "of its world may be longer or shorter than here.",
        )


def _or_usual(action_repeat: int | None) -> str:
    return "the task's own" if action_repeat is None else str(action_repeat)
