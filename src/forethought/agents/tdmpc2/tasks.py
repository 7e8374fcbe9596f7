"""Many tasks in one agent (TD-MPC2, section 3.3): what tells them apart.

Each task has a learned embedding e. The encoder sees [x, e], and the latent state that every other
network sees is [z, e]: the embedding travels behind z, so that nothing else needs to know the task,
but for two numbers of its own: which action dimensions it has, and its discount.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from forethought.agents.tdmpc2.config import TDMPC2Config
from forethought.config import ConfigError
from forethought.envs import multi
from forethought.maths import discount_for
from forethought.spaces.spec import EnvSpec

WIDE_SIZES = (1, 317)
MANY_TASKS = 80


class Tasks(nn.Module):
    """The embeddings of N tasks, their action masks and discounts."""

    masks: Tensor  # [N, A], 1 where a task has that dimension
    gammas: Tensor  # [N], float64

    def __init__(self, masks: Tensor, gammas: tuple[float, ...], dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.embedding = nn.Parameter(torch.empty(len(gammas), dim))  # [N, D]
        # Both follow from the tasks: neither belongs to the weights.
        self.register_buffer("masks", masks, persistent=False)
        exact = torch.tensor(gammas, dtype=torch.float64)
        self.register_buffer("gammas", exact, persistent=False)

    @classmethod
    def of(cls, spec: EnvSpec, config: TDMPC2Config) -> Tasks | None:
        """Those of a spec; None where it is a single task."""
        wanted = config.model.task_dim
        if not spec.tasks:
            if wanted is not None:
                raise ConfigError(
                    f"agent.model.task_dim is {wanted}, but {spec.task} is one task, which needs "
                    "no embedding; leave it out."
                )
            return None
        gammas = tuple(discount(config, own) for own in spec.tasks)
        masks = torch.from_numpy(multi.action_masks(spec))
        return cls(masks, gammas, wanted or embedding_dim(config, len(gammas)))

    def initialise(self, generator: torch.Generator | None) -> None:
        """Small and uniform, as in the official code."""
        nn.init.uniform_(self.embedding, -0.02, 0.02, generator=generator)

    def of_batch(self, task: Tensor, leading: torch.Size) -> Tensor:
        """e of tasks [B], repeated along the axes before: [..., B, D]."""
        return self.embedding[task].expand(*leading, -1)

    def discount(self, task: Tensor, dtype: torch.dtype) -> Tensor:
        """The discounts of tasks [B]."""
        return self.gammas[task].to(dtype)

    def describe(self) -> str:
        """A sentence for the start of a run."""
        low, high = float(self.gammas.min()), float(self.gammas.max())
        discounts = f"discount {low:g}" if low == high else f"discounts {low:g} to {high:g}"
        least, most = int(self.masks.sum(-1).min()), self.masks.shape[1]
        actions = f"{least} to {most}" if least < most else f"{most}"
        return (
            f"{len(self.gammas)} tasks: an embedding of {self.dim} numbers each, {discounts}, "
            f"{actions} action dimension{'' if most == 1 else 's'}."
        )

    @torch.no_grad()
    def renormalise(self) -> None:
        """No embedding is longer than 1; after each step, so that acting changes no weight."""
        self.embedding.copy_(torch.renorm(self.embedding, 2, 0, 1.0))


def embedding_dim(config: TDMPC2Config, tasks: int) -> int:
    """The official table: 96 for 80 tasks and in the smallest and largest model, else 64."""
    return 96 if tasks >= MANY_TASKS or config.model.size in WIDE_SIZES else 64


def discount(config: TDMPC2Config, spec: EnvSpec) -> float:
    """The discount that was set, or the heuristic's; of several tasks, the largest."""
    if config.gamma is not None:
        return config.gamma
    if spec.tasks:
        return max(discount(config, own) for own in spec.tasks)
    if spec.max_episode_steps is None:
        raise ConfigError(
            f"{spec.task} has no step limit to derive a discount from: set --agent.gamma (for "
            "instance 0.99) or --env.max_episode_steps."
        )
    return discount_for(
        spec.max_episode_steps, config.gamma_denominator, config.gamma_min, config.gamma_max
    )
