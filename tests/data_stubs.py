"""Small datasets whose every number says where it belongs."""

from pathlib import Path

import gymnasium
import numpy as np

from forethought.data import from_gym_steps, write_dataset
from forethought.spaces.spec import Column, EnvSpec


def spec(task="stub:a", obs=3, action=2, columns=(), steps=50):
    return EnvSpec(
        task=task,
        observation_space=gymnasium.spaces.Box(-np.inf, np.inf, (obs,), np.float32),
        action_space=gymnasium.spaces.Box(-1, 1, (action,), np.float32),
        max_episode_steps=steps,
        action_repeat=1,
        terminates=True,
        columns=columns,
    )


TASK_COLUMN = Column("task", (), np.dtype(np.int64), "task")


def stamp(episode, row):
    """The number that stands in every column of a row."""
    return 1000.0 * (episode + 1) + row


def episode_rows(number, steps, obs=3, action=2, terminated=False):
    """An episode whose observation, action and reward of row t all tell (number, t)."""
    t = np.arange(steps + 1)
    marks = stamp(number, t)
    return from_gym_steps(
        np.repeat(marks[:, None], obs, axis=1),
        np.repeat(marks[1:, None], action, axis=1) / 1e6,
        marks[1:],
        (t[1:] == steps) & terminated,
        (t[1:] == steps) & (not terminated),
    )


def make_dataset(path: Path, lengths=(5, 9, 3, 12), specs=None, shard_bytes=1200, held_out=()):
    """Episodes of these lengths, dealt to the tasks in turn; several shards."""
    specs = specs or [spec()]
    with write_dataset(
        path, specs, ["random"] * len(specs), source="stub", shard_bytes=shard_bytes
    ) as writer:
        for number, steps in enumerate(lengths):
            task = number % len(specs)
            width = specs[task].observation_space.shape[0]
            actions = specs[task].action_space.shape[0]
            rows = episode_rows(number, steps, width, actions, terminated=number % 2 == 0)
            split = "held-out" if number in held_out else "train"
            writer.append_episode(rows, task, split=split)
    return path
