"""Seed 003, phase 4: the loss."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from forethought.agents.tdmpc2.act import plan
from forethought.agents.tdmpc2.agent import PARTS
from forethought.agents.tdmpc2.gammas import MultiGammaConfig
from forethought.agents.tdmpc2.noise import draw_plan_noise
from forethought.agents.tdmpc2.rates import optimisers_of
from forethought.agents.tdmpc2.update import Learner, TensorBatch
from tests.multi_gamma.agents import (
    AUX,
    ON,
    agent_with,
    assert_same,
    stir,
    tensors_of,
)
from tests.multi_gamma.reference import head_weights, slow_loss
from tests.tdmpc2_agents import CONFIG, OBS, make_agent, make_batch, make_spec


@pytest.mark.parametrize("head", ["joint", "separate"])
@pytest.mark.parametrize("terminates", [False, True])
def test_phase_4_the_loss_and_its_gradient_are_those_of_the_slow_reference(
    head: Any, terminates: bool
) -> None:
    """In float64, within 1e-9: the auxiliary part, the whole, and what reaches each weight."""
    options = replace(ON, gammas=("primary", *AUX, 0.5), head=head, loss_weight=0.7)
    model = replace(CONFIG.model, bins=21, bin_low=-4.0, bin_high=3.0)
    config = replace(CONFIG, multi_gamma=options, model=model, batch_size=4, rho=0.6)
    agent, baseline = (
        make_agent(c, spec=make_spec(terminates=terminates))
        for c in (config, replace(config, multi_gamma=MultiGammaConfig()))
    )
    for one in (agent, baseline):
        one.model.double()
        stir(one)
        optimisers = optimisers_of(one.model, one.config.lr, PARTS)
        one.learner = Learner(one.model, one.config, one.gamma, *optimisers)
    batch, noise = tensors_of(agent, ends=terminates), agent.draw_noise()
    batch = TensorBatch(*(x.double() for x in vars(batch).values() if x is not None))
    noise = replace(noise, target_policy=noise.target_policy.double())

    next_z, y, value = agent.learner.targets(batch, noise)
    losses, _ = agent.learner.model_losses(batch, next_z, y, value, noise)
    losses["total_loss"].backward()  # type: ignore[no-untyped-call]
    fast = {n: p.grad.clone() for n, p in agent.model.named_parameters() if p.grad is not None}
    agent.model.zero_grad(set_to_none=True)

    without, _ = baseline.learner.model_losses(batch, next_z, y, value, noise)
    without["total_loss"].backward()  # type: ignore[no-untyped-call]
    latents = [agent.model.encode(batch.obs[0])]
    for a in batch.action[:-1]:
        latents.append(agent.model.next(latents[-1], a))
    heads = agent.model.aux_value
    assert heads is not None
    given = (torch.stack(latents), batch.reward, batch.terminated, value)
    slow, ces = slow_loss(head_weights(heads), *given, (*AUX, 0.5), 0.6, 0.7, model)
    slow.backward()  # type: ignore[no-untyped-call]

    exact: dict[str, float] = {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(losses["total_loss"], without["total_loss"] + slow, **exact)
    for gamma, ce in zip((*AUX, 0.5), ces, strict=True):
        torch.testing.assert_close(losses[f"aux_value_ce/g{gamma}"], ce.detach(), **exact)
    torch.testing.assert_close(losses["aux_value_ce/mean"], sum(ces).detach() / 3, **exact)  # type: ignore[union-attr]
    plain = {n: p.grad for n, p in baseline.model.named_parameters() if p.grad is not None}
    extra = {n: p.grad for n, p in agent.model.named_parameters() if p.grad is not None}
    assert fast.keys() == plain.keys() | extra.keys()
    for name, gradient in fast.items():
        parts = [g[name] for g in (plain, extra) if name in g]
        torch.testing.assert_close(gradient, sum(parts), **exact, msg=lambda m, n=name: f"{n}: {m}")


def test_phase_4_its_gradient_reaches_encoder_and_dynamics_and_nothing_else() -> None:
    """Exactly none into the policy, nor into reward, Q and the target networks."""
    agent = agent_with()
    stir(agent)
    batch = tensors_of(agent)
    _, _, value = agent.learner.targets(batch, agent.draw_noise())
    z0 = agent.model.encode(batch.obs[0])
    z = torch.stack([z0, agent.model.next(z0, batch.action[0]), z0])
    assert agent.learner.auxiliary is not None
    loss, _ = agent.learner.auxiliary(z, batch.reward, batch.terminated, value)
    loss.backward()  # type: ignore[no-untyped-call]
    parts = {name.partition(".")[0] for name, _ in agent.model.named_parameters()}
    reached = {
        name.partition(".")[0]
        for name, p in agent.model.named_parameters()
        if p.grad is not None and p.grad.abs().sum() > 0
    }
    assert reached == {"encoder", "dynamics", "aux_value"}
    assert {"policy", "reward", "q", "target_q"} <= parts
    assert all(p.grad is None for p in agent.model.policy.parameters())


def test_phase_4_the_policys_step_is_that_of_the_baseline() -> None:
    """From the same weights and latents: the same loss, gradient and weights, bit for bit."""
    agent, baseline = agent_with(), make_agent()
    zs = torch.rand(4, 8, 16, generator=torch.Generator().manual_seed(4))
    for one in (agent, baseline):
        stir(one)
    noise = baseline.draw_noise()
    assert agent.learner.update_policy(zs, noise) == baseline.learner.update_policy(zs, noise)
    assert_same(agent.model.policy.state_dict(), baseline.model.policy.state_dict())


def test_phase_4_the_planners_output_is_that_of_the_baseline() -> None:
    agent, baseline = agent_with(), make_agent()
    for one in (agent, baseline):
        stir(one)
    planner = CONFIG.planner
    noise = draw_plan_noise(
        torch.Generator().manual_seed(5),
        horizon=3,
        envs=2,
        samples=planner.samples,
        policy_samples=planner.policy_samples,
        elites=planner.elites,
        iterations=2,
        action_dim=2,
        num_q=3,
    )
    obs, first = torch.ones(2, OBS), torch.tensor([True, False])
    with torch.inference_mode():
        made = [
            plan(one.model, obs, torch.zeros(3, 2, 2), first, noise, 0.99, True)
            for one in (agent, baseline)
        ]
    assert all(map(torch.equal, *made))


def test_phase_4_repeated_updates_on_one_batch_lower_every_cross_entropy() -> None:
    agent = agent_with()
    batch = make_batch(agent)
    seen = [agent.update(batch, agent.draw_noise()) for _ in range(100)]
    for gamma in AUX:
        name = f"aux_value_ce/g{gamma}"
        uniform = math.log(101) * (1 + 0.5 + 0.25) / 3  # zero weights predict every bin alike
        assert seen[0][name] == pytest.approx(uniform, abs=1e-4)
        assert seen[-1][name] < 0.975 * uniform
