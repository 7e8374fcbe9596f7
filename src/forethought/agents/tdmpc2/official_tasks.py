"""Official checkpoints of many tasks: mt30 and mt80.

They hold an embedding for each task and which action dimensions it has, but not its name: the
number of tasks tells the set, and the set their order. Every network sees [x, e] or [z, e, a] as
ours do, so that `transfer` brings them over to one of the tasks, or to several.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from forethought.config import ConfigError, unknown
from forethought.data.tdmpc2_tasks import MT30, MT80
from forethought.files import FileError
from forethought.spaces.spec import EnvSpec

State = dict[str, Tensor]
EMBEDDING, MASKS = "_task_emb.weight", "_action_masks"
SETS = {len(names): names for names in (MT30, MT80)}


@dataclass(frozen=True)
class OfficialTasks:
    """The tasks of a file."""

    names: tuple[str, ...]
    """In the order of their numbers."""
    embedding: Tensor  # [N, D]
    action_dims: tuple[int, ...] | None
    """Of each task, where the file tells."""

    @property
    def dim(self) -> int:
        return self.embedding.shape[1]

    def check(self, path: Path, spec: EnvSpec, observation_dim: int, action_dim: int) -> None:
        """Refuse tasks that are not in the set, or have other observations or actions there."""
        for own in spec.tasks or (spec,):
            if own.task not in self.names:
                see = f"{path} was trained on {len(self.names)} tasks, and this is none of them."
                raise unknown("task", own.task, self.names, see)
            observed, acted = own.observation_space.shape, own.action_space.shape
            dims = self.action_dims
            wanted = action_dim if dims is None else dims[self.names.index(own.task)]
            vectors = all(shape is not None and len(shape) == 1 for shape in (observed, acted))
            if not vectors or observed[0] > observation_dim or acted != (wanted,):  # type: ignore[index]
                raise ConfigError(
                    f"{path} knows {own.task} with at most {observation_dim} observations and "
                    f"{wanted} actions, but here it has observations {own.shapes['observations']} "
                    f"and actions {own.shapes['actions']}: give the task as it was trained on."
                )


def take_tasks(path: Path, state: State) -> tuple[OfficialTasks | None, State]:
    """The tasks of a state dict, None where it is of one, and the state dict without them."""
    rest = {name: x for name, x in state.items() if name not in (EMBEDDING, MASKS)}
    if len(rest) == len(state):
        return None, rest
    embedding, masks = state.get(EMBEDDING), state.get(MASKS)
    if embedding is None or embedding.ndim != 2 or embedding.numel() == 0:
        raise FileError(f"{path} is damaged: it has several tasks, but no embedding of each.")
    count = len(embedding)
    if count not in SETS:
        raise FileError(
            f"{path} is a checkpoint of {count} tasks, and does not name them: only those of the "
            f"official sets of {' and '.join(map(str, SETS))} tasks are known."
        )
    if masks is not None and (masks.ndim != 2 or len(masks) != count):
        raise FileError(f"{path} is damaged: {MASKS} is {tuple(masks.shape)} for {count} tasks.")
    dims = None if masks is None else tuple(int(n) for n in (masks != 0).sum(1))
    # The official code keeps embeddings within length 1 when it looks them up.
    short = torch.renorm(embedding, 2, 0, 1.0)
    return OfficialTasks(SETS[count], short, dims), rest
