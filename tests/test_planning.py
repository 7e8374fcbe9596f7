"""MPPI on problems whose answer is known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from forethought.planning.mppi import (
    MPPINoise,
    MPPISettings,
    elite_weights,
    moments,
    mppi,
    shift,
)

SETTINGS = MPPISettings(elites=16, min_std=0.05, max_std=2.0, temperature=0.5)


def make_noise(iterations: int, horizon: int, envs: int, samples: int, elites: int) -> MPPINoise:
    generator = torch.Generator().manual_seed(3)
    return MPPINoise(
        samples=torch.randn(iterations, horizon, envs, samples, 2, generator=generator),
        gumbel=torch.zeros(envs, elites),
        explore=torch.randn(envs, 2, generator=generator),
    )


def test_weights_of_two_elites_by_hand() -> None:
    """A gap of 2 at temperature 0.5 weighs exp(-1)."""
    weights = elite_weights(torch.tensor([[3.0, 1.0]]), temperature=0.5)
    first = 1 / (1 + math.exp(-1))
    assert weights.tolist() == [pytest.approx([first, 1 - first])]


def test_moments_of_two_elites_by_hand() -> None:
    actions = torch.tensor([0.0, 1.0]).view(1, 1, 2, 1)
    mean, std = moments(torch.tensor([[0.25, 0.75]]), actions)
    assert mean.item() == pytest.approx(0.75)
    assert std.item() == pytest.approx(math.sqrt(0.25 * 0.5625 + 0.75 * 0.0625))


def test_warm_start_shifts_and_forgets_at_a_new_episode() -> None:
    mean = torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]]).unsqueeze(-1)  # [T, E, 1]
    shifted = shift(mean, torch.tensor([False, True])).squeeze(-1)
    assert shifted.tolist() == [[2, 0], [3, 0], [0, 0]]


def goal_score(goal: Tensor) -> object:
    """Highest where every action of environment e is goal[e]."""

    def score(actions: Tensor, _: int) -> Tensor:
        return -10 * ((actions - goal[None, :, None]) ** 2).sum((0, 3))

    return score


def test_it_finds_each_environments_own_optimum() -> None:
    goal = torch.tensor([[0.5, -0.5], [-0.8, 0.1]])
    plan = mppi(
        goal_score(goal),  # type: ignore[arg-type]
        torch.zeros(3, 2, 0, 2),
        torch.zeros(3, 2, 2),
        make_noise(8, 3, 2, 256, 16),
        SETTINGS,
        explore=False,
    )
    assert (plan.mean[0] - goal).abs().max() < 0.1
    assert plan.std.max() < 0.5
    assert plan.action.shape == (2, 2)


def test_policy_sequences_compete_and_can_win() -> None:
    goal = torch.tensor([[0.9, 0.9]])
    policy = goal.view(1, 1, 1, 2).expand(3, 1, 4, 2)
    settings = MPPISettings(elites=4, min_std=0.05, max_std=2.0, temperature=0.5)
    plan = mppi(
        goal_score(goal),  # type: ignore[arg-type]
        policy,
        torch.zeros(3, 1, 2),
        make_noise(1, 3, 1, 8, 4),
        settings,
        explore=False,
    )
    assert set(plan.elites[0, 0].tolist()) == {8, 9, 10, 11}, "the policy's are the last columns"
    assert torch.equal(plan.action, goal)
    assert plan.std.unique().item() == pytest.approx(0.05), "identical elites leave the least std"


def test_exploration_adds_noise_of_the_plans_own_width() -> None:
    noise = make_noise(2, 3, 1, 64, 16)
    arguments = (goal_score(torch.zeros(1, 2)), torch.zeros(3, 1, 0, 2), torch.zeros(3, 1, 2))
    calm = mppi(*arguments, noise, SETTINGS, explore=False)  # type: ignore[arg-type]
    bold = mppi(*arguments, noise, SETTINGS, explore=True)  # type: ignore[arg-type]
    expected = (calm.action + calm.std[0] * noise.explore).clamp(-1, 1)
    torch.testing.assert_close(bold.action, expected)


def test_the_elite_that_acts_is_drawn_by_weight() -> None:
    """Gumbel noise that favours the second-best elite makes it act."""
    goal = torch.zeros(1, 2)
    noise = make_noise(1, 3, 1, 64, 16)
    favoured = noise._replace(gumbel=torch.tensor([[0.0, 1e6] + [0.0] * 14]))
    plain, other = (
        mppi(
            goal_score(goal),  # type: ignore[arg-type]
            torch.zeros(3, 1, 0, 2),
            torch.zeros(3, 1, 2),
            n,
            SETTINGS,
            explore=False,
        )
        for n in (noise, favoured)
    )
    best = (2.0 * noise.samples[0, 0, 0]).clamp(-1, 1)  # std starts at max_std
    assert torch.equal(plain.action[0], best[plain.elites[0, 0, 0]])
    assert torch.equal(other.action[0], best[other.elites[0, 0, 1]])


def test_sequences_without_a_value_count_as_zero() -> None:
    def score(actions: Tensor, _: int) -> Tensor:
        values = torch.full(actions.shape[1:3], -1.0)
        values[:, 5] = math.nan
        return values

    settings = MPPISettings(elites=1, min_std=0.05, max_std=2.0, temperature=0.5)
    plan = mppi(
        score, torch.zeros(3, 1, 0, 2), torch.zeros(3, 1, 2), make_noise(1, 3, 1, 8, 1), settings,
        explore=False,
    )  # fmt: skip
    assert plan.elites[0, 0].tolist() == [5]
