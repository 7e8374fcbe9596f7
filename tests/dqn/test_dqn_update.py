"""One gradient step of the DQN family against references, and what it must leave alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from forethought.agents.dqn.update import draw_update_noise
from tests.dqn import formula_reference as slow
from tests.dqn.small_agents import (
    ACTIONS,
    DISTRIBUTIONS,
    make_learner,
    options,
    transitions,
)

NOISY = {"kind": "factorised", "sigma": 1.0}


def drawn(learner, rows=8, seed=0):
    """Noise in the learner's own precision."""
    noise = draw_update_noise(
        learner.online, learner.config, rows, torch.Generator().manual_seed(seed)
    )

    def double(x):
        if isinstance(x, torch.Tensor):
            return x.double()
        return None if x is None else [(a.double(), b.double()) for a, b in x]

    return replace(noise, **{name: double(value) for name, value in vars(noise).items()})


def values(network, x, noise=None, tau=None):
    with torch.no_grad():
        return network(x, noise, tau)


def same(ours, wanted):
    np.testing.assert_allclose(np.asarray(ours), np.asarray(wanted), rtol=1e-9, atol=1e-9)


# Targets


@pytest.mark.parametrize("double", [False, True])
def test_confirmed_double_chooses_by_the_online_and_values_by_the_target_network(double):
    """Seed 004, confirmed correct 'Double DQN'."""
    learner, batch = make_learner(options(double=double)), transitions(64)
    ours = learner.targets(batch, drawn(learner, 64))
    online = values(learner.online, batch.next_obs)[..., 0].tolist()
    target = values(learner.target, batch.next_obs)[..., 0].tolist()
    chosen = [slow.best(q) for q in (online if double else target)]
    wanted = [
        r + d * q[a]
        for r, d, q, a in zip(batch.reward, batch.discount, target, chosen, strict=True)
    ]
    same(ours[:, 0], wanted)
    others = [slow.best(q) for q in (target if double else online)]
    assert chosen != others, "the two networks must disagree somewhere, else nothing is shown"


def test_confirmed_done_mask_cuts_the_future_of_terminated_transitions_only():
    """Seed 004, confirmed correct 'Done mask': discount 0 leaves the reward."""
    learner, batch = make_learner(options()), transitions(4)
    batch = replace(batch, discount=torch.tensor([0.0, 0.9, 0.0, 0.9]).double())
    y = learner.targets(batch, drawn(learner, 4))[:, 0]
    assert torch.equal(y[[0, 2]], batch.reward[[0, 2]])
    assert not torch.isclose(y[[1, 3]], batch.reward[[1, 3]]).any()


@pytest.mark.parametrize("double", [False, True])
def test_c51_target_is_the_projected_distribution_of_the_best_action(double):
    config = options(distribution=DISTRIBUTIONS["c51"], double=double)
    learner, batch = make_learner(config), transitions(32)
    ours = learner.targets(batch, drawn(learner, 32))

    def chances(network, b):
        logits = values(network, batch.next_obs)[b]
        return [slow.softmax(logits[a].tolist()) for a in range(ACTIONS)]

    def best(found):
        return slow.best([float(np.dot(p, np.linspace(-8, 12, 11))) for p in found])

    disagree = 0
    for b in range(32):
        of_online, of_target = chances(learner.online, b), chances(learner.target, b)
        a = best(of_online if double else of_target)
        disagree += best(of_online) != best(of_target)
        reward, discount = batch.reward[b].item(), batch.discount[b].item()
        same(ours[b], slow.project(of_target[a], reward, discount, -8, 12))
    assert disagree, "the two networks must disagree somewhere, else nothing is shown"


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("kind", ["qr", "iqn"])
def test_quantile_target_is_that_of_the_action_with_the_best_mean(kind, double):
    learner = make_learner(options(distribution=DISTRIBUTIONS[kind], double=double))
    batch, noise = transitions(32), drawn(learner, 32)
    ours = learner.targets(batch, noise)
    out = values(learner.target, batch.next_obs, None, noise.target_tau)
    chooser = learner.online if double else learner.target
    means = values(chooser, batch.next_obs, None, noise.select_tau).mean(-1)
    assert means.shape == (32, ACTIONS)
    for b in range(32):
        a = slow.best(means[b].tolist())
        same(ours[b], [batch.reward[b] + batch.discount[b] * z for z in out[b, a]])
    assert ours.shape[1] == {"qr": 6, "iqn": 5}[kind]


@pytest.mark.parametrize("noisy", [{"kind": "none"}, NOISY], ids=["plain", "noisy"])
@pytest.mark.parametrize("kind", ["none", "qr", "iqn"])
def test_munchausen_target_of_each_distribution(kind, noisy):
    munchausen = {"kind": "on", "alpha": 0.8, "temperature": 0.05, "clip": -0.06}
    given = {"distribution": DISTRIBUTIONS[kind], "munchausen": munchausen, "noisy": noisy}
    learner = make_learner(options(**given))
    batch, noise = transitions(), drawn(learner)
    ours = learner.targets(batch, noise)
    of_target = noise.target
    out = values(learner.target, batch.next_obs, of_target, noise.target_tau)  # [B, A, N']
    q_next = values(learner.target, batch.next_obs, of_target, noise.select_tau).mean(-1)
    q_now = values(learner.target, batch.obs, of_target, noise.now_tau).mean(-1)
    clipped = 0
    for b in range(8):
        now = slow.log_policy(q_now[b].tolist(), 0.05)[int(batch.action[b])]
        clipped += 0.05 * now < -0.06
        reward = batch.reward[b].item() + 0.8 * min(max(0.05 * now, -0.06), 0.0)
        logs = slow.log_policy(q_next[b].tolist(), 0.05)
        soft = [
            sum(np.exp(p) * (z - 0.05 * p) for p, z in zip(logs, out[b, :, n].tolist()))
            for n in range(out.shape[2])
        ]
        same(ours[b], [reward + batch.discount[b].item() * v for v in soft])
    if kind == "none":
        wanted = slow.munchausen_target(
            batch.reward[0].item(), 0.9, q_now[0].tolist(), int(batch.action[0]),
            q_next[0].tolist(), 0.8, 0.05, -0.06,
        )  # fmt: skip
        assert ours[0, 0].item() == pytest.approx(wanted, rel=1e-6)
    assert 0 < clipped < 8, "the bonus must be clipped somewhere, and not everywhere"


# Loss and step


def slow_loss(learner, batch, y, noise, b):
    out = values(learner.online, batch.obs, noise.online, noise.tau)[b, batch.action[b]].tolist()
    goal, kind = y[b].tolist(), learner.config.distribution.kind
    kappa = {"qr": 0.7, "iqn": 1.4}.get(kind, 1.0)
    if kind == "none":
        return slow.huber(goal[0] - out[0])
    if kind == "c51":
        return slow.cross_entropy(out, goal)
    n = len(out)
    tau = noise.tau[b].tolist() if kind == "iqn" else [(2 * i + 1) / (2 * n) for i in range(n)]
    return slow.quantile_huber(out, goal, tau, kappa)


@pytest.mark.parametrize("noisy", [{"kind": "none"}, NOISY], ids=["plain", "noisy"])
@pytest.mark.parametrize("kind", DISTRIBUTIONS)
def test_loss_and_priorities_agree_with_the_slow_ones(kind, noisy):
    learner = make_learner(options(distribution=DISTRIBUTIONS[kind], noisy=noisy, dueling=True))
    weights = torch.rand(8, generator=torch.Generator().manual_seed(3)).double()
    batch, noise = transitions(weights=weights), drawn(learner)
    y = learner.targets(batch, noise)
    each = [slow_loss(learner, batch, y, noise, b) for b in range(8)]
    q = learner.online.expected(values(learner.online, batch.obs, noise.online, noise.tau))
    metrics, priority = learner.update(batch, noise)
    assert metrics["loss"] == pytest.approx(np.mean(weights.numpy() * each), rel=1e-9)
    assert metrics["nonfinite"] == 0.0
    if kind == "none":
        taken = q.gather(1, batch.action[:, None])[:, 0]
        same(priority, (y[:, 0] - taken).abs())
        assert metrics["td_error_abs"] == pytest.approx(priority.mean().item(), rel=1e-9)
        assert metrics["q_mean"] == pytest.approx(taken.mean().item(), rel=1e-9)
        assert metrics["td_target_mean"] == pytest.approx(y.mean().item(), rel=1e-9)
    else:
        same(priority, each)
    assert metrics["q_max"] == pytest.approx(q.max().item(), rel=1e-9)


def gradient(config, batch):
    learner = make_learner(config)
    learner.update(batch, drawn(learner, len(batch.action)))
    return torch.cat([p.grad.flatten() for p in learner.online.parameters()])


def test_confirmed_importance_weights_come_before_the_mean():
    """Seed 004, confirmed correct 'IS weights': weights 0 and 1 give half of the second loss."""
    batch = transitions(2, weights=torch.tensor([0.0, 1.0]).double())
    alone = replace(
        batch,
        **{name: value[1:] for name, value in vars(batch).items() if value is not None},
    )
    torch.testing.assert_close(gradient(options(), batch), gradient(options(), alone) / 2)


def test_rmsprop_sums_over_the_batch_and_adam_averages():
    batch = transitions()
    summed = gradient(options(optimiser={"kind": "deepmind_rmsprop"}), batch)
    torch.testing.assert_close(summed, 8 * gradient(options(), batch))


@pytest.mark.parametrize(
    ("optimiser", "wanted"),
    [
        ({"kind": "adam", "lr": 3e-5, "epsilon": 7e-4}, {"lr": 3e-5, "eps": 7e-4}),
        (
            {"kind": "deepmind_rmsprop", "lr": 3e-5, "decay": 0.9, "epsilon": 0.02},
            {"lr": 3e-5, "decay": 0.9, "epsilon": 0.02},
        ),
    ],
)
def test_the_optimiser_has_what_the_configuration_says(optimiser, wanted):
    (group,) = make_learner(options(optimiser=optimiser)).optimiser.param_groups
    assert {name: group[name] for name in wanted} == wanted


def test_confirmed_only_the_taken_action_is_learned():
    """Seed 004, confirmed correct 'Action gather': what others are worth changes no loss."""
    learner, batch = make_learner(options()), transitions(action=torch.zeros(8).long())
    first, _ = learner.update(batch, drawn(learner))
    other = make_learner(options())
    with torch.no_grad():
        other.online.advantage.output.bias[1:] += 100.0
    second, _ = other.update(batch, drawn(other))
    assert first["loss"] == pytest.approx(second["loss"], rel=1e-9)
    assert not other.online.advantage.output.weight.grad[1:].any()
    assert other.online.advantage.output.weight.grad[0].any()


def test_gradients_are_clipped_where_asked():
    batch = transitions(reward=torch.full((8,), 500.0).double())
    free, bound = gradient(options(), batch), gradient(options(grad_clip_norm=0.5), batch)
    assert free.norm() > 0.5
    torch.testing.assert_close(bound, free * (0.5 / (free.norm() + 1e-6)))


def test_values_are_told_beside_what_the_rewards_can_add_up_to():
    """Spec 2.8: max |Q| over r_max / (1 - gamma), with the greatest return of all updates."""
    learner = make_learner(options(gamma=0.9))
    with torch.no_grad():
        learner.online.advantage.output.weight.zero_()
        learner.online.advantage.output.bias.copy_(torch.tensor([3.0, -500.0, 7.0]))
    still = torch.optim.SGD(learner.parameters, lr=0.0)
    learner.optimiser, nothing = still, torch.zeros(8).double()
    told = [
        learner.update(transitions(reward=nothing + r), drawn(learner))[0].get("q_bound_share")
        for r in (0.0, -2.0, 1.0, 5.0)
    ]
    assert told == [None, pytest.approx(25.0), pytest.approx(25.0), pytest.approx(10.0)]
    learner = make_learner(options(gamma=1.0))
    assert "q_bound_share" not in learner.update(transitions(), drawn(learner))[0]
    learner = make_learner(options(gamma=0.5, munchausen={"kind": "on", "alpha": 0.5}))
    q = values(learner.online, transitions().obs).abs().max().item()
    batch = transitions(reward=nothing + 1.5)
    share = learner.update(batch, drawn(learner))[0]["q_bound_share"]
    assert share == pytest.approx(q / ((1.5 + 0.5) / 0.5))


# The target network


def test_finding_10_target_has_no_gradients_and_no_place_in_the_optimiser():
    learner = make_learner(options(noisy=NOISY, distribution=DISTRIBUTIONS["iqn"]))
    learner.update(transitions(), drawn(learner))
    owned = {id(p) for group in learner.optimiser.param_groups for p in group["params"]}
    for p in learner.target.parameters():
        assert not p.requires_grad and p.grad is None and id(p) not in owned
    assert all(p.grad is not None for p in learner.online.parameters())
    assert owned == {id(p) for p in learner.online.parameters()}


def test_finding_10_sync_makes_the_target_bit_equal_and_leaves_it_apart():
    learner = make_learner(options())
    pairs = list(zip(learner.online.parameters(), learner.target.parameters(), strict=True))
    assert not any(torch.equal(a, b) for a, b in pairs)
    learner.sync()
    assert all(torch.equal(a, b) and a.data_ptr() != b.data_ptr() for a, b in pairs)


def test_online_selecting_and_target_networks_draw_independent_noise():
    learner = make_learner(options(noisy=NOISY, double=True))
    noise = drawn(learner)
    draws = [noise.online, noise.select, noise.target]
    flat = [torch.cat([f.flatten() for pair in d for f in pair]) for d in draws]
    for a in range(3):
        for b in range(a):
            assert abs(np.corrcoef(flat[a], flat[b])[0, 1]) < 0.5
            assert not torch.isclose(flat[a], flat[b]).any()


def test_noise_reaches_target_online_and_selection_each_for_itself():
    batch = transitions()
    for changed in ("online", "target", "select"):
        learner = make_learner(options(noisy=NOISY, double=True))
        noise = drawn(learner)
        moved = replace(noise, **{changed: getattr(drawn(learner, seed=1), changed)})
        y, z = learner.targets(batch, noise), learner.targets(batch, moved)
        differ = {"online": False, "target": True}.get(changed)
        if differ is not None:
            assert torch.equal(y, z) != differ
        else:
            q = [values(learner.online, batch.next_obs, n.select)[..., 0] for n in (noise, moved)]
            assert not torch.equal(q[0].argmax(1), q[1].argmax(1))
            assert not torch.equal(y, z)


# Gates


@pytest.mark.parametrize("kind", DISTRIBUTIONS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_finding_3_an_update_that_is_not_finite_changes_no_weight(bad, kind):
    """C51 too, whose projection would clamp an infinite return to a finite one."""
    learner = make_learner(options(distribution=DISTRIBUTIONS[kind]))
    before = [p.detach().clone() for p in learner.online.parameters()]
    reward = torch.zeros(8).double()
    reward[3] = bad
    metrics, _ = learner.update(transitions(reward=reward), drawn(learner))
    assert metrics["nonfinite"] == 1.0
    assert all(torch.equal(a, b) for a, b in zip(before, learner.online.parameters(), strict=True))
    assert not learner.optimiser.state


def test_finding_3_a_gradient_that_is_not_finite_changes_no_weight_though_the_loss_is():
    learner = make_learner(options())
    weight = learner.online.advantage.output.weight
    weight.register_hook(lambda gradient: gradient * float("nan"))
    before = [p.detach().clone() for p in learner.online.parameters()]
    metrics, _ = learner.update(transitions(), drawn(learner))
    assert np.isfinite(metrics["loss"]) and metrics["nonfinite"] == 1.0
    assert all(torch.equal(a, b) for a, b in zip(before, learner.online.parameters(), strict=True))
