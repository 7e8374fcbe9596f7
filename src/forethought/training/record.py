"""Recording a dataset: episodes of a run's agent, or of random play, packed as they end; or what a
run's replay holds, which is how the agent played while it learned.

The strategy for failures: an episode whose environment fails is left out and told; another is
played in its place only by asking for more. When all fail nothing is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forethought import config as conf
from forethought import files
from forethought.agents.base import Agent
from forethought.config import ConfigError, EnvConfig
from forethought.data import Dataset, from_gym_steps, write_dataset
from forethought.data.writer import check_out
from forethought.envs import multi
from forethought.envs.episodes import Policy, run_episodes
from forethought.envs.recorded import RecordedEnv, Take
from forethought.replay import RingReplay
from forethought.seeding import Streams
from forethought.spaces.spec import EnvSpec
from forethought.tracking import RunDirectory
from forethought.training.build import load_agent, read_config, task_spec
from forethought.training.checkpoint import Checkpoints
from forethought.training.contents import step_of
from forethought.training.device import set_threads
from forethought.training.evaluate import PARALLEL_ENVS, RandomPolicy, Tell, Watched

EPISODES = 10
STREAM = "record"
"""Names the seeds of recorded episodes: no evaluation meets the same starts."""


@dataclass(frozen=True)
class RecordingPolicy:
    """An agent, with or without exploration, drawing from the stream ("record-planner", 0)."""

    agent: Agent
    streams: Streams
    explore: bool

    def start(self, num_envs: int) -> Any:
        return self.agent.new_state(num_envs, self.streams, f"{STREAM}-planner", 0)

    def act(self, obs: Any, state: Any, first: NDArray[np.bool_], infos: Any) -> tuple[Any, Any]:
        return self.agent.act_batch(obs, state, first, infos, explore=self.explore)


@dataclass(frozen=True)
class _Player:
    """Who plays, where."""

    task: str
    env: EnvConfig
    spec: EnvSpec
    policy: Policy
    told: str


def record(
    out: Path,
    *,
    run: Path | None = None,
    task: str | None = None,
    episodes: int | None = None,
    checkpoint: str | None = None,
    explore: bool = False,
    seed: int | None = None,
    device: str | None = None,
    held_out: float = 0.0,
    tell: Tell | None = None,
) -> tuple[Dataset, tuple[str, ...]]:
    """Plays episodes of a run's agent, or random ones of a task, into a new dataset.

    There are ten, unless `episodes` says otherwise. `explore` adds the noise that the agent trains
    with; the share `held_out` of the episodes is marked as never to be learned from. Returns the
    dataset and a sentence for each episode that failed. `tell` is called before
    each step with the episodes ended and the steps.
    """
    episodes = EPISODES if episodes is None else episodes
    conf.require(episodes >= 1, "episodes", episodes, "at least 1")
    conf.require(seed is None or seed >= 0, "seed", seed, "at least 0")
    check_out(out)
    if (run is None) == (task is None):
        raise ConfigError(
            "Say who plays, and once: --run RUN for a run's agent, or --agent random --task TASK."
        )
    if run is not None:
        player, seed = _of_run(run, checkpoint, explore, seed, device)
    else:
        for key, value in (("checkpoint", checkpoint), ("device", device), ("explore", explore)):
            rule = "left out: it has no effect on random play"
            conf.require(not value, key, value, rule)
        seed = 1 if seed is None else seed
        _require_one_task(str(task))
        player = _random(str(task), seed)
    source = f"forethought data record, seed {seed}"
    told = [player.told]
    with write_dataset(out, [player.spec], told, source=source, held_out=held_out) as writer:

        def keep(take: Take) -> None:
            writer.append_episode(from_gym_steps(**take.stacked()), success=take.success)

        env = RecordedEnv(
            player.task,
            min(episodes, PARALLEL_ENVS),
            keep,
            timeout_seconds=player.env.timeout_seconds,
            **player.env.training,
        )
        try:
            streams = Streams(seed)
            seeds = [streams.seed(STREAM, episode) for episode in range(episodes)]
            policy = player.policy if tell is None else Watched(player.policy, tell, episodes)
            played = run_episodes(policy, env, seeds)
        finally:
            env.close()
    return Dataset.open(out), tuple(played.failures)


def record_replay(
    out: Path, *, run: Path, checkpoint: str | None = None, held_out: float = 0.0
) -> Dataset:
    """Packs the episodes in the replay of a run's checkpoint, the last 'replay.capacity_rows' of
    its experience; an episode that is not held from its first row on, or has no second, is left
    out."""
    check_out(out)
    _, step, which = _checkpoint(run, checkpoint)
    agent = load_agent(run, checkpoint=str(step), for_acting=False, device="cpu")
    told = f"{agent.name} while it learned, up to step {step} of {run.name}"
    source = f"the replay of {run.name}, {which} checkpoint"
    if not isinstance(agent.replay, RingReplay):
        raise ConfigError(f"{run} learned from a dataset: it has no replay of its own to record.")
    extras = agent.replay.row_spec.extras
    with write_dataset(out, [agent.spec], [told], source=source, held_out=held_out) as writer:
        for rows in agent.replay.episodes():
            if len(rows["reward"]) > 1:
                named = {f"info/{k}" if k in extras else k: x for k, x in rows.items()}
                writer.append_episode(named)
    return Dataset.open(out)


def _checkpoint(path: Path, checkpoint: str | None) -> tuple[RunDirectory, int, str]:
    """The run, the step of the checkpoint that was asked for, and how it was asked for."""
    run = RunDirectory.open(path)
    _require_one_task(str(run.run_json["task"]))
    which = checkpoint or "latest"
    folder, _ = Checkpoints(run).find(which)
    # By its step from here on: a run in training may save a newer one meanwhile.
    return run, step_of(files.read_manifest(folder).meta), which


def _require_one_task(task: str) -> None:
    """Rows on the disk are those of one task; padding is made when they are drawn."""
    if multi.is_multi(task):
        raise ConfigError(
            f"A recording is of one task, but {task} is several: record a run of each, or random "
            "play (--agent random --task TASK), and train with --offline.data DIR,DIR."
        )


def _of_run(
    path: Path, checkpoint: str | None, explore: bool, seed: int | None, device: str | None
) -> tuple[_Player, int]:
    run, step, _ = _checkpoint(path, checkpoint)
    config = read_config(run)
    set_threads(config.train.threads)
    agent = load_agent(path, checkpoint=str(step), device=device or "auto")
    seed = config.seed if seed is None else seed
    noise = ", exploring" if explore else ""
    told = f"{agent.name} at step {step} of {path.name}{noise}"
    policy = RecordingPolicy(agent, Streams(seed), explore)
    return _Player(config.task, config.env, agent.spec, policy, told), seed


def _random(task: str, seed: int) -> _Player:
    env = EnvConfig()
    spec = task_spec(task, env)
    return _Player(task, env, spec, RandomPolicy(spec, Streams(seed), 0), "random")
