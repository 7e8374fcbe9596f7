"""TD3: its delay, its smoothed targets, and what its losses may touch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forethought.agents.actor_critic.update import Transitions
from forethought.agents.td3.config import TD3Config
from forethought.config import ConfigError
from tests.actor_critics import ACTION, BATCH, make_agent, make_batch, weights


def changed(before: dict[str, torch.Tensor], agent: Any) -> set[str]:
    after = weights(agent)
    return {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}


def inputs_of(net: Any, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What a network is asked from now on."""
    seen: list[torch.Tensor] = []
    answer = net.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        seen.append(x)
        return answer(x)

    monkeypatch.setattr(net, "forward", forward)
    return seen


def test_the_actor_and_all_targets_move_at_every_second_update() -> None:
    agent = make_agent("td3")
    for number in range(1, 5):
        before = weights(agent)
        metrics = agent.update(make_batch(number), agent.draw_noise(agent.actor_turn))
        everything = {"critic", "actor", "target_critic", "target_actor"}
        assert changed(before, agent) == ({"critic"} if number % 2 else everything)
        assert ("actor_loss" in metrics) == (number % 2 == 0)


@pytest.mark.parametrize(("clip", "far"), [(0.5, 0.5), (0.1, 0.1)])
def test_target_noise_is_clipped_in_units_of_the_normalised_action(
    clip: float, far: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the range of the environment: the noise is added to actions of [-1, 1]."""
    agent = make_agent("td3", target_noise=0.2, target_noise_clip=clip)
    seen = inputs_of(agent.model.target_critic, monkeypatch)
    with torch.no_grad():  # the target actor says 0 everywhere
        for parameter in agent.model.target_actor.parameters():
            parameter.zero_()
    noise = torch.zeros(BATCH, ACTION)
    noise[0], noise[1], noise[2] = 100.0, -100.0, 0.25
    agent.learner.targets(Transitions.of(make_batch()), noise)
    action = seen[0][:, -ACTION:]
    torch.testing.assert_close(action[0], torch.full((ACTION,), far))
    torch.testing.assert_close(action[1], torch.full((ACTION,), -far))
    torch.testing.assert_close(action[2], torch.full((ACTION,), 0.05))
    assert not action[3:].any()


def test_a_smoothed_action_stays_in_its_range(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = make_agent("td3")
    seen = inputs_of(agent.model.target_critic, monkeypatch)
    with torch.no_grad():
        agent.model.target_actor.net.biases[-1].fill_(9.0)
    agent.learner.targets(Transitions.of(make_batch()), torch.full((BATCH, ACTION), 3.0))
    assert seen[0][:, -ACTION:].max() == 1.0


def test_the_actor_follows_the_first_critic_alone() -> None:
    agent, other = make_agent("td3"), make_agent("td3")
    with torch.no_grad():
        for weight in other.model.critic.weights:
            weight[1].mul_(-3.0)
    for one in (agent, other):
        one.learner.update_actor(make_batch().obs[0])
    for ours, theirs in zip(agent.model.actor.parameters(), other.model.actor.parameters()):
        assert torch.equal(ours, theirs)


def test_losses_reach_only_what_they_are_for() -> None:
    agent = make_agent("td3")
    before = weights(agent)
    agent.learner.critics.update(Transitions.of(make_batch()), torch.zeros(BATCH))
    assert changed(before, agent) == {"critic"}
    assert all(p.grad is None for p in agent.model.actor.parameters())
    for parameter in agent.model.critic.parameters():
        parameter.grad = None
    before = weights(agent)
    agent.learner.update_actor(make_batch().obs[0])
    assert changed(before, agent) == {"actor"}
    assert all(p.grad is None for p in agent.model.critic.parameters())
    for name in ("target_actor", "target_critic"):
        for parameter in getattr(agent.model, name).parameters():
            assert parameter.grad is None and not parameter.requires_grad


def test_exploration_noise_has_its_width_and_evaluation_has_none() -> None:
    agent = make_agent("td3", exploration_noise=0.1)
    obs = torch.zeros(4000, 5)
    plain = agent.decide(obs, None)
    noise = torch.randn(4000, ACTION, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        bump = agent.decide(obs, noise) - plain
    assert bump.std().item() == pytest.approx(0.1, rel=0.05)
    loud = agent.decide(obs, 100 * noise)
    assert loud.abs().max() == 1.0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"exploration_noise": -0.1}, r"agent\.exploration_noise is -0\.1, but must be at least 0"),
        ({"target_noise_clip": 0.0}, r"target_noise_clip is 0\.0, but must be above 0; for no"),
        ({"target_noise_clip": -1.0}, r"agent\.target_noise_clip is -1\.0, but must be at least 0"),
        (
            {"target_noise": 0.0, "target_noise_clip": 0.3},
            r"target_noise_clip is 0\.3, but must be left out: .* agent\.target_noise is 0\.0",
        ),
        ({"policy_delay": 0}, r"agent\.policy_delay is 0, but must be at least 1"),
        ({"hidden": (0,)}, r"agent\.hidden is \[0\], but must be from 1 to 65,536 each"),
    ],
)
def test_values_out_of_range_are_refused(options: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        TD3Config(**options)
