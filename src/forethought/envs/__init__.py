"""Environments: gymnasium ids, DeepMind Control and MinAtar, one or many, here or in workers."""

from forethought.envs.restore import EpisodeLog, replay_episode
from forethought.envs.task_env import TaskEnv
from forethought.envs.tasks import check_task, known_tasks, make_env, make_single, spec_of
from forethought.envs.vector import VectorEnv
from forethought.spaces.structure import EnvError, EnvFailure

__all__ = [
    "EnvError",
    "EnvFailure",
    "EpisodeLog",
    "TaskEnv",
    "VectorEnv",
    "check_task",
    "known_tasks",
    "make_env",
    "make_single",
    "replay_episode",
    "spec_of",
]
