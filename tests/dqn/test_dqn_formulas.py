"""The formulas of the DQN family against slow references in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from forethought.agents.dqn import targets
from forethought.nets.noisy import NoisyLinear
from forethought.nets.optimisers import DeepMindRMSProp
from forethought.nets.spectral import SpectralConv2d
from tests.dqn import formula_reference as slow

RNG = np.random.default_rng(6)
B, A, N = 7, 4, 5


def numbers(*shape, scale=3.0):
    return torch.from_numpy(RNG.normal(size=shape) * scale)


def near(a, b):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-9, atol=1e-9)


def test_huber_is_the_paper_s_clipped_error():
    u = torch.linspace(-3, 3, 61, dtype=torch.float64, requires_grad=True)
    near(targets.huber(u).detach(), [slow.huber(x) for x in u.tolist()])
    near(targets.huber(u, 0.5).detach(), [slow.huber(x, 0.5) for x in u.tolist()])
    targets.huber(u).sum().backward()
    near(u.grad, u.detach().clamp(-1, 1))


def test_action_gather_takes_the_taken_action_not_the_best():
    """Seed 004, confirmed correct 'Action gather'."""
    out = numbers(B, A, N)
    action = torch.tensor([0, 1, 2, 3, 0, 1, 2])
    picked = targets.taken(out, action)
    near(picked, [out[b, action[b]].tolist() for b in range(B)])


def test_the_best_action_is_legal():
    q = torch.tensor([[1.0, 5.0, 3.0]])
    assert targets.greedy(q, None).tolist() == [1]
    assert targets.greedy(q, torch.tensor([[True, False, True]])).tolist() == [2]


# C51


@pytest.mark.parametrize("discount", [0.0, 0.37, 0.99])
def test_c51_projection_agrees_with_algorithm_1(discount):
    probabilities = torch.softmax(numbers(B, 51), -1)
    reward, support = numbers(B, scale=6.0), torch.linspace(-10, 10, 51, dtype=torch.float64)
    discounts = torch.full((B,), discount, dtype=torch.float64)
    ours = targets.project(probabilities, reward, discounts, support)
    for b in range(B):
        wanted = slow.project(probabilities[b].tolist(), reward[b].item(), discount, -10, 10)
        near(ours[b], wanted)
    near(ours.sum(-1), np.ones(B))


@pytest.mark.parametrize("reward", [-3.0, 0.0, 1.0, 25.0, -25.0])
def test_c51_keeps_all_mass_where_a_return_falls_on_an_atom(reward):
    """With l == u the textbook form loses it: (u - b) and (b - l) are both 0."""
    support = torch.linspace(-10, 10, 21, dtype=torch.float64)  # spacing 1
    probabilities = torch.softmax(numbers(1, 21), -1)
    for discount in (1.0, 0.0):
        pair = torch.tensor([reward], dtype=torch.float64), torch.tensor([discount]).double()
        ours = targets.project(probabilities, *pair, support)
        assert ours.sum().item() == pytest.approx(1.0, abs=1e-12)
        near(ours[0], slow.project(probabilities[0].tolist(), reward, discount, -10, 10))


def test_c51_loss_is_the_cross_entropy_of_each_transition():
    logits, target = numbers(B, N), torch.softmax(numbers(B, N), -1)
    ours = targets.cross_entropy(logits, target)
    near(ours, [slow.cross_entropy(*map(torch.Tensor.tolist, x)) for x in zip(logits, target)])


# Quantiles


@pytest.mark.parametrize("kappa", [1.0, 0.25])
def test_qr_loss_sums_over_quantiles_and_averages_over_targets(kappa):
    theta, goal = numbers(B, N), numbers(B, 3)
    tau = targets.midpoints(N, theta)
    near(tau, [(2 * i + 1) / (2 * N) for i in range(N)])
    ours = targets.quantile_huber(theta, goal, tau, kappa)
    wanted = [
        slow.quantile_huber(theta[b].tolist(), goal[b].tolist(), tau.tolist(), kappa)
        for b in range(B)
    ]
    near(ours, wanted)


def test_iqn_loss_has_fractions_of_each_transition():
    theta, goal, tau = numbers(B, N), numbers(B, 3), torch.rand(B, N, dtype=torch.float64)
    ours = targets.quantile_huber(theta, goal, tau, 1.0)
    wanted = [
        slow.quantile_huber(theta[b].tolist(), goal[b].tolist(), tau[b].tolist(), 1.0)
        for b in range(B)
    ]
    near(ours, wanted)


def test_quantiles_of_a_known_distribution_are_a_minimum_of_the_qr_loss():
    """Against a slip that both the loss and its reference could share: the answer is known."""
    goal = torch.arange(1.0, 101.0, dtype=torch.float64)[None] / 100  # uniform on (0, 1]
    theta = torch.full((1, 4), 0.5, dtype=torch.float64, requires_grad=True)
    tau = targets.midpoints(4, theta.detach())
    for _ in range(500):
        loss = targets.quantile_huber(theta, goal, tau, 0.001).sum()
        (gradient,) = torch.autograd.grad(loss, theta)
        with torch.no_grad():
            theta -= 0.01 * gradient
    np.testing.assert_allclose(theta.detach()[0], [0.125, 0.375, 0.625, 0.875], atol=0.02)


# Munchausen


def test_munchausen_target_agrees_with_the_paper():
    q_now, q_next = numbers(B, A, scale=0.1), numbers(B, A, scale=0.1)
    reward, discount = numbers(B), torch.rand(B, dtype=torch.float64)
    action = torch.tensor([0, 1, 2, 3, 0, 1, 2])
    constants = {"alpha": 0.9, "temperature": 0.03, "clip": -1.0}
    bonus = targets.munchausen_bonus(q_now, action, *constants.values(), None)
    value = targets.soft_value(q_next[..., None], q_next, 0.03, None).squeeze(-1)
    ours = reward + bonus + discount * value
    for b in range(B):
        wanted = slow.munchausen_target(
            reward[b].item(),
            discount[b].item(),
            q_now[b].tolist(),
            int(action[b]),
            q_next[b].tolist(),
            **constants,
        )
        assert ours[b].item() == pytest.approx(wanted, rel=1e-9)
    assert (bonus <= 0).all() and (bonus >= -0.9).all()


def test_munchausen_bonus_is_clipped_and_stable_for_distant_values():
    q = torch.tensor([[0.0, 1000.0]], dtype=torch.float64)
    bad = targets.munchausen_bonus(q, torch.tensor([0]), 0.9, 0.03, -1.0, None)
    good = targets.munchausen_bonus(q, torch.tensor([1]), 0.9, 0.03, -1.0, None)
    assert (bad.item(), good.item()) == (pytest.approx(-0.9), pytest.approx(0.0))


def test_munchausen_spreads_over_legal_actions_only():
    q = numbers(B, A, scale=0.1)
    legal = torch.ones(B, A, dtype=torch.bool)
    legal[:, 2] = False
    kept = q[:, [0, 1, 3]]
    value = targets.soft_value(q[..., None], q, 0.03, legal)
    near(value, targets.soft_value(kept[..., None], kept, 0.03, None))
    bonus = targets.munchausen_bonus(q, torch.full((B,), 3), 0.9, 0.03, -1.0, legal)
    alone = targets.munchausen_bonus(kept, torch.full((B,), 2), 0.9, 0.03, -1.0, None)
    near(bonus, alone)


# Layers and optimiser


def test_noisy_layer_agrees_with_the_full_noisy_matrix():
    layer = NoisyLinear(6, 3, 0.5, torch.Generator().manual_seed(0)).double()
    raw_in, raw_out, x = numbers(6), numbers(3), numbers(2, 6)
    factor = [e.sign() * e.abs().sqrt() for e in (raw_in, raw_out)]
    ours = layer(x, (factor[0], factor[1]))
    parts = (layer.weight, layer.weight_sigma, layer.bias, layer.bias_sigma)
    for row, out in zip(x, ours, strict=True):
        near(
            out.detach(),
            slow.noisy_linear(
                row.tolist(), *(p.tolist() for p in parts), raw_in.tolist(), raw_out.tolist()
            ),
        )
    near(layer(x, None).detach(), (x @ layer.weight.T + layer.bias).detach())


def test_spectral_convolution_has_norm_one_and_learns_through_it():
    layer = SpectralConv2d(3, 5, 3, padding=1).double()
    with torch.no_grad():  # singular values 5, 4, 3, 2, 1, so that 200 steps reach the largest
        u, _, v = torch.linalg.svd(layer.weight.flatten(1), full_matrices=False)
        sigmas = torch.arange(5.0, 0.0, -1.0, dtype=torch.float64)
        layer.weight.copy_((u * sigmas @ v).view_as(layer.weight))
    layer.settle(torch.Generator().manual_seed(0))
    layer.iterate(200)
    sigma = torch.linalg.matrix_norm(layer.weight.flatten(1), 2)
    x = numbers(2, 3, 4, 4)
    wanted = torch.nn.functional.conv2d(x, layer.weight / sigma, layer.bias, padding=1)
    near(layer(x).detach(), wanted.detach())
    # W / sigma(W) does not depend on the length of W, so the gradient is at right angles to it.
    layer(x).square().sum().backward()
    assert (layer.weight.grad * layer.weight).sum().abs() < 1e-9 * layer.weight.grad.norm()


def test_spectral_vectors_move_with_gradients_only():
    """Acting more often must not change what is learned."""
    layer = SpectralConv2d(3, 5, 3, padding=1)
    layer.settle(torch.Generator().manual_seed(0))
    before = layer.left.clone()
    with torch.no_grad():
        layer(torch.ones(1, 3, 4, 4))
    assert torch.equal(layer.left, before)
    layer(torch.ones(1, 3, 4, 4))
    assert not torch.equal(layer.left, before)


def gradients(steps=50):
    """Of a parameter's two scales: epsilon weighs much in one and little in the other."""
    scale = np.where(np.arange(12) < 6, 0.05, 5.0)
    return [RNG.normal(size=12) * scale for _ in range(steps)]


def test_confirmed_rmsprop_agrees_with_the_released_code_over_50_steps():
    """Seed 004, confirmed correct 'DeepMind RMSProp' (which had a momentum that is not there)."""
    start, dws = RNG.normal(size=12), gradients()
    weight = torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimiser = DeepMindRMSProp([weight], lr=2.5e-4, decay=0.95, epsilon=0.01)
    wanted = slow.released_rmsprop(start, dws)
    for dw, after in zip(dws, wanted, strict=True):
        weight.grad = torch.from_numpy(dw)
        optimiser.step()
        np.testing.assert_allclose(weight.detach().numpy(), after, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("epsilon", [1e-5, 0.01])
def test_rmsprop_stays_finite_where_gradients_hardly_change(epsilon):
    """In float32 the variance of a constant is rounded below zero, and further than epsilon."""
    weight = torch.nn.Parameter(torch.zeros(1000))
    optimiser = DeepMindRMSProp([weight], lr=2.5e-4, decay=0.95, epsilon=epsilon)
    same = 300 * torch.rand(1000, generator=torch.Generator().manual_seed(0))
    for _ in range(400):
        weight.grad = same.clone()
        optimiser.step()
    assert torch.isfinite(weight).all()


@pytest.mark.parametrize("momentum", [0.0, 0.95])
def test_rmsprop_is_not_torch_s(momentum):
    start, dws = RNG.normal(size=12), gradients()
    *_, wanted = slow.released_rmsprop(start, dws)
    weight = torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimiser = torch.optim.RMSprop(
        [weight], lr=2.5e-4, alpha=0.95, eps=0.01, centered=True, momentum=momentum
    )
    for dw in dws:
        weight.grad = torch.from_numpy(dw)
        optimiser.step()
    assert np.abs(weight.detach().numpy() - wanted).max() > 1e-4


def test_rmsprop_of_a_sum_is_that_of_a_mean_with_epsilon_over_the_batch_squared():
    """How DQN Zoo writes it: 0.01 / 32^2 with a mean."""
    start, dws = RNG.normal(size=12), gradients()
    *_, summed = slow.released_rmsprop(start, [32 * dw for dw in dws], epsilon=0.01)
    *_, mean = slow.released_rmsprop(start, dws, epsilon=0.01 / 32**2)
    np.testing.assert_allclose(summed, mean, rtol=1e-12)
