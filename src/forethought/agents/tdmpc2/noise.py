"""Every random number of TD-MPC2, drawn here and passed in.

An update and a plan are thus functions of their arguments, which the slow references, parity
checks and 'off means identical' tests rely on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from forethought.planning.categorical import CategoricalNoise
from forethought.planning.mppi import MPPINoise

Draw = Callable[..., Tensor]
"""torch.randn or torch.rand."""


@dataclass(frozen=True)
class UpdateNoise:
    """T horizon, B batch, H units of Q's first layer, A action dimensions.

    Discrete actions take uniform numbers, one per factor and draw, where they draw at all.
    """

    target_policy: Tensor  # [T, B, A] standard normal
    target_heads: tuple[int, int]
    value_keep: Tensor | None  # [num_q, T*B, H] bool, None without dropout
    policy: Tensor  # [T+1, B, A]
    policy_heads: tuple[int, int]
    policy_keep: Tensor | None  # [2, (T+1)*B, H]
    shift: Tensor | None = None  # [T+1, B, images, 2] whole pixels, None without images

    def shift_at(self, rows: int | slice) -> Tensor | None:
        """How the images of these rows of a slice are moved."""
        return None if self.shift is None else self.shift[rows]


@dataclass(frozen=True)
class PlanNoise:
    """E environments, P policy sequences, N sequences in all, I iterations."""

    policy: Tensor  # [T, E, P, A] standard normal
    heads: tuple[tuple[int, int], ...]  # I pairs of Q heads
    bootstrap: Tensor  # [I, E, N, A]
    mppi: MPPINoise | CategoricalNoise


def draw_update_noise(
    generator: torch.Generator,
    *,
    horizon: int,
    batch: int,
    action_dim: int,
    num_q: int,
    units: int,
    dropout: float,
    policy_dim: int | None = None,
    draw: Draw = torch.randn,
    pads: tuple[int, ...] = (),
) -> UpdateNoise:
    """The random numbers of one update. The policy's loss may need `policy_dim` for each state;
    `pads` are the most pixels by which images are moved."""
    policy_dim = action_dim if policy_dim is None else policy_dim

    def drawn(*shape: int) -> Tensor:
        return draw(shape, generator=generator, device=generator.device)

    return UpdateNoise(
        target_policy=drawn(horizon, batch, action_dim),
        target_heads=two_heads(generator, num_q),
        value_keep=keep_masks(generator, (num_q, horizon * batch, units), dropout),
        policy=drawn(horizon + 1, batch, policy_dim),
        policy_heads=two_heads(generator, num_q),
        policy_keep=keep_masks(generator, (2, (horizon + 1) * batch, units), dropout),
        shift=shifts(generator, (horizon + 1, batch), pads),
    )


def shifts(
    generator: torch.Generator, lead: tuple[int, ...], pads: tuple[int, ...]
) -> Tensor | None:
    """Offsets of rows and columns, 0 to twice the pad of each image, all equally likely."""
    if not pads:
        return None
    device = generator.device
    found = [
        torch.randint(0, 2 * pad + 1, (*lead, 2), generator=generator, device=device)
        for pad in pads
    ]
    return torch.stack(found, dim=-2)


def draw_plan_noise(
    generator: torch.Generator,
    *,
    horizon: int,
    envs: int,
    samples: int,
    policy_samples: int,
    elites: int,
    iterations: int,
    action_dim: int,
    num_q: int,
) -> PlanNoise:
    """The random numbers of one plan for all environments."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=generator.device)

    uniform = torch.rand((envs, elites), generator=generator, device=generator.device)
    return PlanNoise(
        policy=normal(horizon, envs, policy_samples, action_dim),
        heads=tuple(two_heads(generator, num_q) for _ in range(iterations)),
        bootstrap=normal(iterations, envs, samples, action_dim),
        mppi=MPPINoise(
            samples=normal(iterations, horizon, envs, samples - policy_samples, action_dim),
            gumbel=-torch.log(-torch.log(uniform.clamp(min=1e-20))),
            explore=normal(envs, action_dim),
        ),
    )


def draw_categorical_plan_noise(
    generator: torch.Generator,
    *,
    horizon: int,
    envs: int,
    samples: int,
    policy_samples: int,
    iterations: int,
    factors: int,
    num_q: int,
) -> PlanNoise:
    """The same for a plan over a table of actions with so many factors; all uniform in [0, 1)."""

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=generator.device)

    return PlanNoise(
        policy=uniform(horizon, envs, policy_samples, factors),
        heads=tuple(two_heads(generator, num_q) for _ in range(iterations)),
        bootstrap=uniform(iterations, envs, samples, factors),
        mppi=CategoricalNoise(
            samples=uniform(iterations, horizon, envs, samples - policy_samples),
            explore=uniform(envs, 1),
        ),
    )


def two_heads(generator: torch.Generator, num_q: int) -> tuple[int, int]:
    """Two different heads, all pairs equally likely."""
    order = torch.randperm(num_q, generator=generator, device=generator.device)
    first, second = order[:2].tolist()
    return first, second


def keep_masks(generator: torch.Generator, shape: tuple[int, ...], dropout: float) -> Tensor | None:
    """Independent masks, True with probability 1 - dropout.

    The distances between dropped units are geometric, so drawing those distances gives exactly the
    same distribution with a hundredth of the random numbers at dropout 0.01.
    """
    if dropout == 0:
        return None
    total = math.prod(shape)
    device = generator.device
    keep = torch.ones(total, dtype=torch.bool, device=device)
    expected = total * dropout
    draws = int(expected + 6 * math.sqrt(expected) + 16)
    reached = -1
    while reached < total:  # one round, but for a chance of about 1e-9
        uniform = torch.rand(draws, generator=generator, device=device)  # below 1, in 2^-24 steps
        gaps = torch.floor(torch.log1p(-uniform) / math.log1p(-dropout)).long()
        dropped = reached + torch.cumsum(gaps + 1, dim=0)
        keep[dropped[dropped < total]] = False
        reached = int(dropped[-1])
    return keep.view(shape)
