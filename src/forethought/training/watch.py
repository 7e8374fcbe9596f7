"""Watching an agent: episodes filmed into a file, or shown in a window while they are played.

The episodes are those of `evaluate`, one after the other in one environment, played by the one
episode runner. A video has one picture per decision and runs at the task's own speed.
"""

from __future__ import annotations

import functools
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from forethought import files
from forethought.agents.base import AgentPolicy
from forethought.config import ConfigError, unknown
from forethought.envs import TaskEnv, VectorEnv, make_single, multi
from forethought.envs.episodes import EpsilonGreedy, Played, Policy, run_episodes
from forethought.envs.film import FilmedEnv, Shot
from forethought.envs.protocols import evaluation_options, protocol_of
from forethought.seeding import Streams
from forethought.tracking import RunDirectory
from forethought.tracking.video import check_file, write_video
from forethought.training.build import load_agent, read_config
from forethought.training.checkpoint import Checkpoints
from forethought.training.contents import step_of
from forethought.training.device import set_threads
from forethought.training.evaluate import EvalResult, Tell, Watched


def watch_run(
    path: Path,
    *,
    video: Path | None = None,
    episodes: int = 1,
    checkpoint: str = "latest",
    seed: int | None = None,
    device: str = "auto",
    task: str | None = None,
    tell: Tell | None = None,
) -> EvalResult:
    """Plays episodes of a run's agent, into a video or in a window.

    `task` says which one, where the run has several; None is the first. `tell` is called before
    each step with how far it is.
    """
    run = RunDirectory.open(path)
    config = read_config(run)
    seed = config.seed if seed is None else seed
    shown, number = _shown(config.task, task)
    if video is not None:
        check_file(video)
    else:
        _require_window(shown, path)
    set_threads(config.train.threads)
    folder, _ = Checkpoints(run).find(checkpoint)
    step = step_of(files.read_manifest(folder).meta)
    agent = load_agent(path, checkpoint=str(step), device=device)

    streams = Streams(seed)
    seeds = [streams.seed("eval", 0, episode) for episode in range(episodes)]
    made_with = evaluation_options(config.task, config.env, config.eval.protocol)
    rules = protocol_of(config.eval.protocol, config.task)
    epsilon = config.eval.epsilon if rules is None else rules.epsilon
    policy: Policy = AgentPolicy(agent, streams, 0)
    if epsilon:
        stream = streams.numpy("eval-epsilon", 0)
        policy = EpsilonGreedy(policy, epsilon, agent.spec, stream)
    if tell is not None:
        policy = Watched(policy, tell, episodes)
    if video is not None:
        title = f"{shown}, {agent.name} at step {step:,}"
        played = film(policy, seeds, config.task, made_with, video, title, number=number)
    else:
        played = _show(policy, seeds, config.task, made_with, number)
    result = replace(EvalResult.of(played, shown, agent.name), tasks=())
    return replace(result, run=str(path), checkpoint=checkpoint, checkpoint_step=step, seed=seed)


def film(
    policy: Policy,
    seeds: Sequence[int],
    task: str,
    made_with: dict[str, Any],
    path: Path,
    title: str,
    *,
    number: int = 0,
    polls: dict[str, Any] | None = None,
    **options: Any,
) -> Played:
    """Plays one episode per seed into a video, in an environment that is `made_with` these options;
    `number` is the place of the task among several, `options` are those of the vector.

    Below each picture stand the title, and how far the episode is.
    """
    with ExitStack() as stack:
        env = FilmedEnv(_maker(task, made_with, "rgb_array", number), **options)
        stack.callback(env.close)
        add = stack.enter_context(write_video(path, env.frames_per_second))

        def show(shot: Shot) -> None:
            add(shot.picture, [title, f"decision {shot.length}, return {shot.total:.1f}"])

        env.show = show
        return run_episodes(policy, env, seeds, **(polls or {}))


def _shown(task: str, wanted: str | None) -> tuple[str, int]:
    """The task to show, and its place among several."""
    names = multi.members(task) if multi.is_multi(task) else (task,)
    if wanted is not None and wanted not in names:
        raise unknown("task", f"{wanted} in this run", names, f"It has {', '.join(names)}.")
    return wanted or names[0], names.index(wanted or names[0])


def _show(
    policy: Policy, seeds: Sequence[int], task: str, made_with: dict[str, Any], number: int
) -> Played:
    """Plays in a window, which the environment itself opens and keeps to the task's speed."""
    env = VectorEnv([_maker(task, made_with, "human", number)])
    try:
        return run_episodes(policy, env, seeds)
    finally:
        env.close()


def _maker(
    task: str, options: dict[str, Any], render_mode: str, number: int
) -> Callable[[], TaskEnv]:
    """The run's evaluation environment, with pictures."""
    return functools.partial(
        make_single, task, render_mode=render_mode, env_index=number, **options
    )


def _require_window(task: str, path: Path) -> None:
    """Refuse to show what cannot be shown here, before anything is loaded."""
    run = shlex.quote(str(path))
    instead = f"write a video instead: forethought watch {run} --video agent.mp4"
    screen = sys.platform != "linux" or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))
    if not task.startswith("gym:"):
        raise ConfigError(f"Only gym: tasks can be shown in a window, not {task}; {instead}")
    if not screen:
        raise ConfigError(f"There is no screen to show {task} on; {instead}")
