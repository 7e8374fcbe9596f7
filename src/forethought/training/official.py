"""Official TD-MPC2 checkpoints as runs of ours, and our runs as official checkpoints.

An imported run stands at agent step 0 with the file's weights: it can be evaluated at once, and
`resume` trains it on. The file holds neither optimisers nor replay, so these begin empty; the agent
itself, and not random play, then fills replay before the first update (train.seed_policy).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gymnasium
import torch

from forethought import files
from forethought.agents.registry import config_class
from forethought.agents.tdmpc2.agent import TDMPC2
from forethought.agents.tdmpc2.official import OfficialCheckpoint, newest_state, read_checkpoint
from forethought.config import (
    ConfigError,
    ForethoughtError,
    RunConfig,
    build_run_config,
    flatten,
    refuse_idle_groups,
    to_dict,
)
from forethought.envs import multi
from forethought.files import FileError
from forethought.tracking import RunDirectory
from forethought.training.build import Parts, build_parts, load_agent, read_config, task_spec
from forethought.training.signals import NOT_BEGUN, Stop
from forethought.training.trainer import Trainer

AGENT = "tdmpc2"
START = {"train": {"seed_policy": "agent", "seed_updates": 0}}
"""How training on begins: the agent fills replay, then one update per decision as ever. A burst of
updates on the first few episodes would wear down what the weights know."""


@dataclass(frozen=True)
class Imported:
    """A run that was made of an official checkpoint."""

    path: Path
    checkpoint: OfficialCheckpoint
    task: str
    symlogs_observations: bool
    """Whether the run squashes them; a flag may say otherwise than the file's layout."""

    def sentences(self) -> tuple[str, ...]:
        """What a person wants to know, and what can be done next."""
        found, size = self.checkpoint, self.checkpoint.size
        squashed = " of symlog observations" if self.symlogs_observations else ""
        squashed += "" if found.many is None else f", from {len(found.many.names)} tasks"
        return (
            f"{found.path} (layout {found.layout}) is now the run {self.path} for {self.task}: "
            f"latent {size.latent_dim}{squashed}, {size.num_q} Q functions.",
            "The file holds neither action repeat, step limit nor the planner's options: those of "
            "the presets and flags of this command count, or the defaults.",
            f"Play it: forethought evaluate {self.path}",
            f"Train on: forethought resume {self.path}",
        )


def import_run(
    file: Path,
    task: str,
    out: Path | None,
    layers: Iterable[Mapping[str, Any]] = (),
    flags: Mapping[str, Any] | None = None,
    file_layer: Mapping[str, Any] | None = None,
) -> Imported:
    """Makes a run of an official checkpoint; nothing is written unless all of it fits.

    `layers` and `flags` configure the run as they would for `train`; where the file decides (the
    sizes of the networks), it wins over layers, and a flag that says otherwise is refused.
    `file_layer` is what a person's file says, of all that is in `layers`.
    """
    flags = flags or {}
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(Stop(NOT_BEGUN))
        checkpoint = read_checkpoint(file)
        config = _configure(checkpoint, task, [*layers, flags], flags)
        refuse_idle_groups(config, file_layer or {}, flags)
        parts = build_parts(config)
        stack.callback(parts.close)
        assert isinstance(parts.agent, TDMPC2)
        spec = parts.agent.spec
        checkpoint.fill(parts.agent.model, multi.task_names(spec) or (spec.task,))
        stop.politely()
        stack.enter_context(stop.unhurried())  # from here on it is written, whole
        run = RunDirectory.create(out, to_dict(config), AGENT, task, config.seed)
        stack.enter_context(run.lock())
        _save(run, config, parts, checkpoint)
        return Imported(run.path, checkpoint, task, config.agent.model.symlog_obs)


def _configure(
    checkpoint: OfficialCheckpoint,
    task: str,
    layers: list[Mapping[str, Any]],
    flags: Mapping[str, Any],
) -> RunConfig:
    """The run's configuration; the task is checked on the way."""
    start: dict[str, Any] = {**START}
    start["agent"] = {"model": {"symlog_obs": checkpoint.symlogs_observations}}
    kind = config_class(AGENT)
    asked = build_run_config(AGENT, task, kind, [start, *layers])
    if asked.is_offline or asked.train.init_from is not None:
        raise ConfigError(
            "An import begins a run with the weights of a file, in its task: import it first, then "
            "train with --train.init_from and the imported run."
        )
    spec = task_spec(task, asked.env)
    checkpoint.check_task(spec)
    decided = checkpoint.decided(spec)
    if asked.agent.model.symlog_obs and not checkpoint.symlogs_observations:
        rule = f"left out: {checkpoint.path} (layout {checkpoint.layout}) was trained without it"
        raise ConfigError(f"agent.model.symlog_obs is true, but must be {rule}.")
    given = flatten(flags)
    # What a flag sets must agree with what the file holds, also where the file's row decides it.
    held = {
        **flatten(decided),
        **{f"agent.model.{name}": value for name, value in vars(checkpoint.size).items()},
    }
    for key, value in held.items():
        if key in given and given[key] not in (None, value):
            raise ConfigError(
                f"{key} is {given[key]}, but {checkpoint.path} was trained with {value}: leave it "
                "out, the file decides it."
            )
    return build_run_config(AGENT, task, kind, [start, *layers, decided])


def _save(
    run: RunDirectory, config: RunConfig, parts: Parts, checkpoint: OfficialCheckpoint
) -> None:
    """The checkpoint of step 0, from which everything else goes on."""
    trainer = Trainer(config, run, parts, sinks=())
    try:
        trainer.begin()
        trainer.save()
        run.event(
            "imported",
            file=checkpoint.path.name,
            sha256=files.sha256(checkpoint.path.resolve()),
            layout=checkpoint.layout,
            notes=list(checkpoint.notes),
        )
        run.tag("imported")
        run.update(status="interrupted")
    except BaseException as error:
        with contextlib.suppress(FileError):
            run.update(status="failed", error=str(error))
        raise
    finally:
        trainer.close()


@dataclass(frozen=True)
class Exported:
    """What an official checkpoint that was written here does not hold."""

    options: tuple[str, ...]
    """What the official configuration must be told for the weights to be read as they are."""
    action_repeat: int | None
    """Frames per decision, where they are not the task's own."""

    def sentences(self, out: Path) -> tuple[str, ...]:
        """What a person wants to know."""
        repeat = self.action_repeat
        held = "" if repeat is None else f"actions held for {repeat} frames, "
        return (
            f"{out} is written; the official evaluate.py reads it with {' '.join(self.options)}",
            f"It holds weights alone: {held}the planner's options and all else of the "
            "configuration are not in it. Whoever imports it gives the run's presets and flags "
            "again.",
        )


def export_run(path: Path, out: Path, checkpoint: str = "latest") -> Exported:
    """Writes the weights of a run as an official checkpoint of the newest layout."""
    if out.exists():
        raise ConfigError(f"{out} already exists: choose another --out.")
    agent = load_agent(path, checkpoint=checkpoint, device="cpu")
    if not isinstance(agent, TDMPC2):
        raise ConfigError(f"{path} is a run of {agent.name}, but only tdmpc2 has official files.")
    _check_exportable(path, agent)
    repeat = _unusual_repeat(read_config(RunDirectory.open(path)))
    _write(out, {"model": newest_state(agent.model)})
    return Exported(tuple(_official_options(agent)), repeat)


def _unusual_repeat(config: RunConfig) -> int | None:
    repeat = config.env.action_repeat
    if repeat is None:
        return None
    usual = task_spec(config.task, replace(config.env, action_repeat=None)).action_repeat
    return None if repeat == usual else repeat


def _check_exportable(path: Path, agent: TDMPC2) -> None:
    """Refuse what the official code has no layout for."""
    spec = agent.spec
    if spec.tasks:
        raise ForethoughtError(
            f"{path} plays {len(spec.tasks)} tasks: the official code knows no sets of tasks but "
            "its own, so none of it is written; begin a run of one task with it "
            "(--train.init_from) and export that."
        )
    vector = isinstance(spec.observation_space, gymnasium.spaces.Box)
    vector = vector and len(spec.observation_space.shape or ()) == 1
    if not vector or not isinstance(spec.action_space, gymnasium.spaces.Box):
        raise ForethoughtError(
            f"{path} has observations {spec.shapes['observations']} and actions "
            f"{spec.shapes['actions']}: an official checkpoint can only hold an agent for vectors "
            "and continuous actions."
        )
    if agent.config.model.symlog_obs:
        raise ForethoughtError(
            f"{path} squashes its observations by symlog (agent.model.symlog_obs), which today's "
            "official code does not: its weights would act wrongly there, so none are written."
        )


def _official_options(agent: TDMPC2) -> list[str]:
    """Hydra's words for the official evaluate.py: the sizes, and what differs from its defaults."""
    model, config = agent.config.model, agent.config
    size = model.resolved
    words = [
        f"num_enc_layers={size.encoder_layers}",
        f"enc_dim={size.encoder_units}",
        f"mlp_dim={size.mlp_units}",
        f"latent_dim={size.latent_dim}",
        f"num_q={size.num_q}",
    ]
    others = {
        "episodic": (agent.episodic, False),
        "num_bins": (model.bins, 101),
        "vmin": (model.bin_low, -10),
        "vmax": (model.bin_high, 10),
        "simnorm_dim": (model.simnorm_dim, 8),
        "log_std_min": (config.log_std_min, -10),
        "log_std_max": (config.log_std_max, 2),
    }
    return words + [
        f"{key}={str(value).lower()}" for key, (value, usual) in others.items() if value != usual
    ]


def _write(out: Path, content: dict[str, Any]) -> None:
    """Whole or not at all. The one pickle that is written here, because official code reads it."""
    temporary = out.with_name(f".tmp-{out.name}-{os.getpid()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        torch.save(content, temporary)
        files.fsync_file(temporary)
        temporary.replace(out)
        files.fsync_dir(out.parent)
    except (OSError, RuntimeError) as error:  # torch's writer tells of a full disk by the latter
        raise FileError(f"{out} could not be written ({error}).") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
