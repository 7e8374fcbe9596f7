"""SAC: its policy's density, what its losses may touch, its delay and its temperature."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from forethought.agents.sac.config import (
    AutoEntropy,
    ClampedLogStd,
    FixedEntropy,
    SACConfig,
    SquashedLogStd,
)
from forethought.agents.sac.policy import GaussianPolicy, log_tanh_slope
from forethought.config import ConfigError
from tests.actor_critics import (
    ACTION,
    BATCH,
    HALF_RANGE,
    OBS,
    make_agent,
    make_batch,
    make_spec,
    weights,
)

# The policy's density


class OneAction(GaussianPolicy):
    """A policy over one action with a given mean and log std, whatever it sees."""

    def __init__(self, mean: float, log_std: float, log_units: float = 0.0) -> None:
        super().__init__(1, 1, (2,), ClampedLogStd(), log_units)
        self.given = (mean, log_std)

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log_std = self.given
        return torch.full_like(obs, mean), torch.full_like(obs, log_std)


def density(policy: OneAction, action: torch.Tensor) -> torch.Tensor:
    """p(a) at given actions in (-1, 1), by the noise that leads to each."""
    mean, log_std = policy.given
    noise = (torch.atanh(action) - mean) / math.exp(log_std)
    drawn = policy.draw(torch.zeros(len(action), 1, dtype=action.dtype), noise[:, None])
    torch.testing.assert_close(drawn.action[:, 0], action, rtol=0, atol=1e-12)
    return drawn.log_prob.exp()


@pytest.mark.parametrize(("mean", "log_std"), [(0.0, 0.0), (0.7, -1.0), (-1.5, 0.5)])
def test_the_density_of_an_action_integrates_to_the_gaussian_it_comes_from(mean, log_std) -> None:
    """P(a <= c) = Phi((atanh c - mean) / std): change of variables, by a plain sum."""
    edges = torch.tanh(torch.linspace(-14, 14, 200_001, dtype=torch.float64))
    middle, width = (edges[1:] + edges[:-1]) / 2, edges.diff()
    inside = width > 0
    middle, width = middle[inside], width[inside]
    mass = torch.cumsum(density(OneAction(mean, log_std), middle) * width, 0)
    for c in (-0.9, 0.0, 0.6, 0.99):
        z = (math.atanh(c) - mean) / math.exp(log_std)
        wanted = 0.5 * (1 + math.erf(z / math.sqrt(2)))
        found = mass[int(torch.searchsorted(middle, c)) - 1].item()
        assert found == pytest.approx(wanted, abs=1e-3)
    assert mass[-1].item() == pytest.approx(1.0, abs=1e-5)


def test_in_units_of_the_environment_the_density_integrates_over_its_range() -> None:
    """The rescaling's Jacobian: an action of [-2, 2] is spread twice as thin as one of [-1, 1]."""
    half = 2.0
    action = torch.linspace(-1, 1, 20_003, dtype=torch.float64)[1:-1]
    per_unit = density(OneAction(0.2, -0.5, log_units=math.log(half)), action)
    assert torch.trapezoid(per_unit, half * action).item() == pytest.approx(1.0, abs=1e-5)


def test_only_with_environment_units_the_ranges_count() -> None:
    obs, noise = torch.randn(4, OBS), torch.randn(4, ACTION)
    ours, theirs = (
        make_agent("sac", action_units=units).model.actor.draw(obs, noise)
        for units in ("normalised", "environment")
    )
    constant = sum(math.log(half) for half in HALF_RANGE)
    torch.testing.assert_close(ours.log_prob - theirs.log_prob, torch.full((4,), constant))
    torch.testing.assert_close(ours.action, theirs.action, rtol=0, atol=0)


def test_without_known_ranges_environment_units_are_refused() -> None:
    spec = make_spec(action_half_range=None)
    with pytest.raises(ConfigError, match=r"agent\.action_units is environment, but the actions"):
        make_agent("sac", spec, action_units="environment")


def test_the_slope_of_tanh_is_exact_where_it_rounds_to_zero() -> None:
    u = torch.tensor([-40.0, -9.5, -0.3, 0.0, 2.0, 9.5, 40.0])
    wanted = [math.log(4) - 2 * abs(x) - 2 * math.log1p(math.exp(-2 * abs(x))) for x in u.tolist()]
    torch.testing.assert_close(log_tanh_slope(u), torch.tensor(wanted))
    assert torch.isinf(torch.log(1 - torch.tanh(u[-1]) ** 2))  # what is avoided


def test_the_gradient_of_a_far_action_is_finite() -> None:
    policy = OneAction(30.0, 0.0)
    noise = torch.ones(1, 1, requires_grad=True)
    action, log_prob = policy.draw(torch.zeros(1, 1), noise)
    (action.sum() + log_prob.sum()).backward()
    assert torch.isfinite(noise.grad).all()


@pytest.mark.parametrize(
    ("bounds", "raw", "wanted"),
    [
        (ClampedLogStd(-20, 2), [-30.0, 0.5, 9.0], [-20.0, 0.5, 2.0]),
        (SquashedLogStd(-5, 2), [-30.0, 0.0, 30.0], [-5.0, -1.5, 2.0]),
    ],
)
def test_log_std_stays_within_its_bounds(
    bounds: Any, raw: list[float], wanted: list[float]
) -> None:
    policy = GaussianPolicy(1, 3, (2,), bounds)
    mean, log_std = policy.bounded(torch.tensor([[7.0, 8.0, 9.0, *raw]]))
    assert mean[0].tolist() == [7.0, 8.0, 9.0]
    torch.testing.assert_close(log_std[0], torch.tensor(wanted))


def test_what_a_policy_gives_is_bounded() -> None:
    actor = make_agent("sac").model.actor
    with torch.no_grad():
        actor.net.biases[-1][..., ACTION:] = 50.0
    _, log_std = actor(torch.zeros(1, OBS))
    assert log_std.tolist() == [[2.0] * ACTION]


# What a loss may touch


def test_the_critics_loss_never_reaches_actor_or_temperature() -> None:
    agent = make_agent("sac", policy_delay=2)
    before = weights(agent)
    agent.update(make_batch(), agent.draw_noise(False))  # not the actor's turn
    after = weights(agent)
    changed = {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"critic", "target_critic"}
    assert all(p.grad is None for p in agent.model.actor.parameters())
    assert agent.model.temperature.log_alpha.grad is None
    assert all(p.grad is None for p in agent.model.target_critic.parameters())


def test_the_actors_loss_never_reaches_the_critics() -> None:
    agent = make_agent("sac")
    before = weights(agent)
    agent.learner.update_actor(make_batch().obs[0], torch.randn(BATCH, ACTION))
    after = weights(agent)
    changed = {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"actor", "temperature"}
    assert all(p.grad is None for p in agent.model.critic.parameters())
    assert all(p.requires_grad for p in agent.model.critic.parameters())


def test_the_temperatures_loss_never_reaches_the_actor() -> None:
    agent = make_agent("sac")
    drawn = agent.model.actor.draw(torch.randn(BATCH, OBS), torch.randn(BATCH, ACTION))
    agent.learner.alpha_loss(drawn.log_prob).backward()
    assert agent.model.temperature.log_alpha.grad is not None
    assert all(p.grad is None for p in agent.model.actor.parameters())


def test_the_targets_never_build_a_graph() -> None:
    agent = make_agent("sac")
    batch = make_batch()
    noise = agent.draw_noise(True)
    from forethought.agents.actor_critic.update import Transitions

    assert not agent.learner.targets(Transitions.of(batch), noise.target).requires_grad


# The delay and the temperature


def test_a_delayed_actor_makes_up_for_its_delay() -> None:
    """CleanRL's form: with a delay of 3 it rests twice, then makes three steps at once."""
    agent = make_agent("sac", policy_delay=3)
    counts = []
    for seed in range(6):
        agent.update(make_batch(seed), agent.draw_noise(agent.actor_turn))
        state = agent.learner.optimisers["actor"].state.get(agent.learner.actor_parameters[0], {})
        counts.append(int(state.get("step", 0)))
    assert counts == [0, 0, 3, 3, 3, 6]


@pytest.mark.parametrize(("target", "sign"), [(-50.0, -1), (50.0, 1)])
def test_alpha_falls_where_entropy_is_above_its_target_and_rises_below(target, sign) -> None:
    agent = make_agent("sac", entropy=AutoEntropy(target=target, lr=0.01))
    for seed in range(5):
        agent.update(make_batch(seed), agent.draw_noise(True))
    assert math.copysign(1, agent.model.temperature.log_alpha.item()) == sign


def test_the_target_entropy_is_minus_the_number_of_actions_unless_set() -> None:
    assert make_agent("sac").target_entropy == -ACTION
    assert make_agent("sac", entropy=AutoEntropy(target=-0.5)).target_entropy == -0.5


def test_a_fixed_temperature_stays_and_has_no_loss() -> None:
    agent = make_agent("sac", entropy=FixedEntropy(0.2))
    metrics = agent.update(make_batch(), agent.draw_noise(True))
    assert metrics["alpha"] == pytest.approx(0.2)
    assert "alpha_loss" not in metrics and "alpha_loss" not in agent.metric_names
    assert agent.model.temperature.log_alpha.item() == pytest.approx(math.log(0.2))


def test_a_fixed_temperature_does_not_spoil_the_dump_of_a_bad_update() -> None:
    """It has no parameter, of which there is then no norm."""
    json, _ = make_agent("sac", entropy=FixedEntropy(0.2)).diagnostics()
    assert json["parts"]["temperature"] == {"parameters": 0}
    assert json["parts"]["actor"]["parameter_norm"] > 0


def test_a_temperature_of_zero_leaves_reward_alone() -> None:
    agent = make_agent("sac", entropy=FixedEntropy(0.0))
    metrics = agent.update(make_batch(), agent.draw_noise(True))
    assert metrics["nonfinite"] == 0.0 and metrics["alpha"] == 0.0


def test_the_temperature_has_a_learning_rate_of_its_own() -> None:
    agent = make_agent("sac", entropy=AutoEntropy(lr=0.01))
    rates = [group["lr"] for group in agent.learner.optimisers["actor"].param_groups]
    assert rates == [3e-4, 0.01]
    agent.update(make_batch(), agent.draw_noise(True))
    # Adam's first step is as long as its rate.
    assert abs(agent.model.temperature.log_alpha.item()) == pytest.approx(0.01, rel=1e-4)


def test_a_temperature_that_is_not_finite_leaves_the_actor_as_it_is() -> None:
    agent = make_agent("sac")
    before = weights(agent)
    metrics = agent.learner.update_actor(
        make_batch().obs[0], torch.full((BATCH, ACTION), torch.inf)
    )
    assert metrics["nonfinite"] == 1.0
    after = weights(agent)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: AutoEntropy(initial=0.0), r"agent\.entropy\.initial is 0\.0, but must be above 0"),
        (lambda: FixedEntropy(alpha=-1), r"agent\.entropy\.alpha is -1, but must be at least 0"),
        (lambda: ClampedLogStd(2, -5), r"agent\.log_std\.min is 2, but must be below .* \(-5\)"),
        (lambda: SACConfig(policy_delay=0), r"agent\.policy_delay is 0, but must be at least 1"),
        (lambda: SACConfig(critics=0), r"agent\.critics is 0, but must be from 1 to 100"),
        (lambda: SACConfig(gamma=1.5), r"agent\.gamma is 1\.5, but must be above 0"),
        (lambda: SACConfig(tau=0.0), r"agent\.tau is 0\.0, but must be above 0"),
    ],
)
def test_values_out_of_range_are_refused(build: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        build()
