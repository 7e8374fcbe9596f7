"""The reference is the yardstick, so it is itself checked, with numbers a person can work out."""

import math

import pytest
import torch
from torch import Tensor

from . import reference_tdmpc2 as ref
from .reference_tdmpc2 import ReferenceSettings

DEFAULTS = ReferenceSettings()
OBS, ACT, LATENT, HIDDEN, NUM_Q = 3, 2, 16, 12, 3
SMALL = ReferenceSettings(num_samples=10, num_elites=4, num_pi_trajs=3, iterations=2)


def vector(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def random_params(
    seed: int = 0, episodic: bool = False, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """Small networks whose every layer, the last ones too, is random."""
    generator = torch.Generator().manual_seed(seed)
    params: dict[str, Tensor] = {}

    def add(name: str, sizes: list[int], normed_last: bool) -> None:
        for i in range(len(sizes) - 1):
            shapes = {"weight": (sizes[i + 1], sizes[i]), "bias": (sizes[i + 1],)}
            if i < len(sizes) - 2 or normed_last:
                shapes |= {"norm.weight": (sizes[i + 1],), "norm.bias": (sizes[i + 1],)}
            for part, shape in shapes.items():
                value = torch.randn(shape, generator=generator, dtype=torch.float64) * 0.3
                params[f"{name}.{i}.{part}"] = (value + (part == "norm.weight")).to(dtype)

    add("encoder", [OBS, HIDDEN, LATENT], True)
    add("dynamics", [LATENT + ACT, HIDDEN, HIDDEN, LATENT], True)
    add("reward", [LATENT + ACT, HIDDEN, HIDDEN, 101], False)
    add("policy", [LATENT, HIDDEN, HIDDEN, 2 * ACT], False)
    if episodic:
        add("termination", [LATENT, HIDDEN, HIDDEN, 1], False)
    for h in range(NUM_Q):
        add(f"q.{h}", [LATENT + ACT, HIDDEN, HIDDEN, 101], False)
        add(f"target_q.{h}", [LATENT + ACT, HIDDEN, HIDDEN, 101], False)
    return params


def random_batch_and_noise(
    seed: int = 1, steps: int = 3, size: int = 4, dtype: torch.dtype = torch.float64
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    batch = {
        "obs": normal(steps + 1, size, OBS),
        "action": torch.tanh(normal(steps, size, ACT)),
        "reward": normal(steps, size),
        "terminated": torch.zeros(steps, size, dtype=dtype),
    }
    batch["terminated"][-1, 0] = 1.0
    noise = {
        "target_policy": normal(steps, size, ACT),
        "target_heads": torch.tensor([2, 0]),
        "value_dropout": (normal(NUM_Q, steps, size, HIDDEN) > -1.5).to(dtype) / 0.9,
        "policy": normal(steps + 1, size, ACT),
        "policy_heads": torch.tensor([0, 1]),
        "policy_dropout": (normal(2, steps + 1, size, HIDDEN) > -1.5).to(dtype) / 0.9,
    }
    return batch, noise


def random_plan_noise(envs: int, settings: ReferenceSettings, seed: int = 2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    s = settings
    gaussian = s.num_samples - s.num_pi_trajs
    return {
        "policy": normal(s.horizon, envs, s.num_pi_trajs, ACT),
        "samples": normal(s.iterations, s.horizon, envs, gaussian, ACT),
        "heads": torch.tensor([[0, 1], [2, 0]]),
        "bootstrap": normal(s.iterations, envs, s.num_samples, ACT),
        "gumbel": normal(envs, s.num_elites),
        "explore": normal(envs, ACT),
    }


def constant_head(params: dict[str, Tensor], name: str, bin_index: int) -> None:
    """Make a two-hot head answer one bin, whatever its input."""
    params[f"{name}.2.weight"] = torch.zeros_like(params[f"{name}.2.weight"])
    params[f"{name}.2.bias"] = torch.full_like(params[f"{name}.2.bias"], -1e3)
    params[f"{name}.2.bias"][bin_index] = 1e3


# ---------------------------------------------------------------- building blocks


def test_two_hot_on_a_bin_is_one_hot() -> None:
    target = ref.two_hot(vector(0.0, 1e9), DEFAULTS)
    assert target[0].nonzero().flatten().tolist() == [50]  # symlog 0 = 0, in the middle
    assert target[0, 50] == 1.0
    assert target[1, 100] == 1.0  # clamped at 10, the last bin
    assert target[1].sum() == 1.0


def test_two_hot_between_bins_shares_by_distance() -> None:
    # symlog(x) = 0.25: bins 51 (0.2) and 52 (0.4), a quarter of the way.
    target = ref.two_hot(vector(math.exp(0.25) - 1, 1 - math.exp(0.25)), DEFAULTS)
    assert target[0, 51].item() == pytest.approx(0.75)
    assert target[0, 52].item() == pytest.approx(0.25)
    assert target[0].sum().item() == pytest.approx(1.0)
    assert target[1, 49].item() == pytest.approx(0.75)  # -0.25: bins 49 (-0.2) and 48 (-0.4)
    assert target[1, 48].item() == pytest.approx(0.25)


def test_decode_undoes_two_hot() -> None:
    x = vector(-300.0, -0.7, 0.0, 2.5, 900.0)
    logits = torch.log(ref.two_hot(x, DEFAULTS) + 1e-300)
    torch.testing.assert_close(ref.decode(logits, DEFAULTS), x)


def test_soft_cross_entropy_of_even_logits_is_log_of_the_bins() -> None:
    loss = ref.soft_ce(torch.zeros(1, 101, dtype=torch.float64), vector(3.3), DEFAULTS)
    assert loss.item() == pytest.approx(math.log(101))


def test_simnorm_is_a_softmax_per_group() -> None:
    x = vector(0.0, math.log(3), 5.0, 5.0)
    torch.testing.assert_close(ref.simnorm(x, 2), vector(0.25, 0.75, 0.5, 0.5))


def test_blocks_agree_with_torch() -> None:
    x = torch.linspace(-30, 30, 24, dtype=torch.float64).reshape(2, 12)
    weight, bias = torch.linspace(0.5, 2, 12).double(), torch.linspace(-1, 1, 12).double()
    torch.testing.assert_close(ref.mish(x), torch.nn.functional.mish(x))
    expected = torch.nn.functional.layer_norm(x, (12,), weight, bias)
    torch.testing.assert_close(ref.layer_norm(x, weight, bias), expected)
    for percent in (5, 50, 95):
        expected = torch.quantile(x[0], percent / 100)
        torch.testing.assert_close(ref.percentile(x[0], percent), expected)


@pytest.mark.parametrize(
    ("formula", "entropy", "scaled"),
    [
        # A = 2, mu = 0, s = 0: log_std = -4, eps = 0, so a = 0 and the Jacobian is 2 ln(1+1e-6).
        ("main", -8 + math.log(2 * math.pi), 2 * (-8 + math.log(2 * math.pi))),
        ("jacobian", None, -2 * (8 - 0.5 * math.log(2 * math.pi))),
    ],
)
def test_entropy_formulas(formula: str, entropy: float | None, scaled: float) -> None:
    params = random_params()
    for part in ("weight", "bias"):
        params[f"policy.2.{part}"] = torch.zeros_like(params[f"policy.2.{part}"])
    out = ref.policy(
        params,
        torch.zeros(1, LATENT, dtype=torch.float64),
        torch.zeros(1, ACT, dtype=torch.float64),
        ReferenceSettings(entropy=formula),
    )
    assert out["log_std"].tolist() == [[-4.0, -4.0]]
    assert out["scaled_entropy"].item() == pytest.approx(scaled, abs=3e-6)
    expected = scaled if entropy is None else entropy
    assert out["entropy"].item() == pytest.approx(expected, abs=3e-6)


# ---------------------------------------------------------------- optimisation


def test_first_adam_step_is_lr_times_sign() -> None:
    params = {"q.0.2.bias": vector(1.0, 1.0, 1.0)}
    gradients = {"q.0.2.bias": vector(0.5, -7.0, 0.0)}
    state = ref.new_optimiser_state(params)["model"]
    new, state = ref.adam(params, gradients, state, lambda name: 0.1, eps=1e-8)
    torch.testing.assert_close(new["q.0.2.bias"], vector(0.9, 1.1, 1.0), rtol=0, atol=1e-8)
    assert state["step"] == 1
    assert params["q.0.2.bias"].tolist() == [1.0, 1.0, 1.0]


def test_adam_agrees_with_torch_over_some_steps() -> None:
    leaf = vector(1.0, -2.0).requires_grad_(True)
    optimiser = torch.optim.Adam([leaf], lr=0.01, eps=1e-5)
    params = {"policy.2.bias": leaf.detach().clone()}
    state = ref.new_optimiser_state(params)["policy"]
    for gradient in (vector(0.3, 1.0), vector(-2.0, 0.001), vector(0.0, -5.0)):
        leaf.grad = gradient.clone()
        optimiser.step()
        gradients = {"policy.2.bias": gradient}
        params, state = ref.adam(params, gradients, state, lambda name: 0.01, eps=1e-5)
    torch.testing.assert_close(params["policy.2.bias"], leaf.detach())


def test_clip_is_by_the_norm_of_all_together() -> None:
    clipped, norm = ref.clip_by_global_norm({"a": vector(3.0), "b": vector(4.0)}, 1.0)
    assert norm.item() == pytest.approx(5.0)
    assert clipped["a"].item() == pytest.approx(0.6, rel=1e-6)
    assert clipped["b"].item() == pytest.approx(0.8, rel=1e-6)
    untouched, _ = ref.clip_by_global_norm({"a": vector(3.0)}, 20.0)
    assert untouched["a"].item() == 3.0


def test_running_scale_moves_a_hundredth() -> None:
    q = torch.arange(101, dtype=torch.float64)  # p5 = 5, p95 = 95
    assert ref.running_scale(torch.tensor(1.0), q, 0.01).item() == pytest.approx(1.89)
    # A range below 1 counts as 1: 3 + 0.01 * (1 - 3).
    assert ref.running_scale(torch.tensor(3.0), q / 1000, 0.01).item() == pytest.approx(2.98)


# ---------------------------------------------------------------- targets


REWARD = vector(1.0, 2.0, 4.0).reshape(3, 1)
VALUE = vector(10.0, 20.0, 40.0).reshape(3, 1)


@pytest.mark.parametrize(
    ("settings", "terminated", "expected"),
    [
        (ReferenceSettings(gamma=0.5), (0, 1, 0), (6.0, 2.0, 24.0)),
        # Two steps: 1 + 2/2 + 20/4; 2 + 4/2 + 40/4; the last has one step left: 4 + 40/2.
        (ReferenceSettings(gamma=0.5, td="n_step", td_steps=2), (0, 0, 0), (7.0, 14.0, 24.0)),
        # Terminated at the second step: 1 + 2/2, no bootstrap; 2 alone; then as before.
        (ReferenceSettings(gamma=0.5, td="n_step", td_steps=3), (0, 1, 0), (2.0, 2.0, 24.0)),
        (ReferenceSettings(gamma=0.5, td="n_step", td_steps=1), (0, 1, 0), (6.0, 2.0, 24.0)),
        # From the end: 4 + 40/2 = 24; 2 + (20+24)/4 = 13; 1 + (10+13)/4 = 6.75.
        (ReferenceSettings(gamma=0.5, td="td_lambda", td_lambda=0.5), (0, 0, 0), (6.75, 13, 24)),
        # Cut in the middle: 2; then 1 + (10+2)/4 = 4.
        (ReferenceSettings(gamma=0.5, td="td_lambda", td_lambda=0.5), (0, 1, 0), (4.0, 2.0, 24)),
    ],
)
def test_targets_by_hand(
    settings: ReferenceSettings, terminated: tuple[int, ...], expected: tuple[float, ...]
) -> None:
    y = ref.td_targets(REWARD, vector(*terminated).reshape(3, 1), VALUE, settings)
    assert y.flatten().tolist() == pytest.approx(list(expected))


# ---------------------------------------------------------------- the update


@pytest.mark.parametrize("episodic", [False, True])
def test_update_moves_everything_once_and_nothing_in_place(episodic: bool) -> None:
    settings = ReferenceSettings(episodic=episodic)
    params = random_params(episodic=episodic)
    before = {name: value.clone() for name, value in params.items()}
    batch, noise = random_batch_and_noise()
    state = ref.new_optimiser_state(params)
    scale = torch.tensor(1.0, dtype=torch.float64)
    new, new_state, new_scale, metrics = ref.update(params, state, scale, batch, noise, settings)

    assert all(torch.equal(params[name], before[name]) for name in params)
    assert state["model"]["step"] == 0
    assert new_state["model"]["step"] == new_state["policy"]["step"] == 1
    for name in params:
        step = (new[name] - params[name]).abs().max().item()
        limit = 9e-5 if name.startswith("encoder.") else 3e-4
        if name.startswith("target_q."):
            online = new[name.removeprefix("target_")]
            torch.testing.assert_close(new[name], 0.99 * params[name] + 0.01 * online)
        else:
            assert 0 < step <= limit * (1 + 1e-9), name
    assert metrics["total_loss"].item() == pytest.approx(
        20 * metrics["consistency_loss"].item()
        + 0.1 * metrics["reward_loss"].item()
        + 0.1 * metrics["value_loss"].item()
        + metrics["termination_loss"].item()
    )
    assert (metrics["termination_loss"].item() > 0) == episodic
    assert new_scale.item() == metrics["pi_scale"].item() >= 1.0


def test_policy_is_trained_on_the_updated_heads_and_the_old_latents() -> None:
    params = random_params()
    batch, noise = random_batch_and_noise()
    scale = torch.tensor(1.0, dtype=torch.float64)
    new, _, _, metrics = ref.update(
        params, ref.new_optimiser_state(params), scale, batch, noise, DEFAULTS
    )
    next_z, y = ref.targets(params, batch, noise, DEFAULTS)
    _, old_zs = ref.model_losses(params, batch, next_z, y, noise, DEFAULTS)
    _, new_zs = ref.model_losses(new, batch, next_z, y, noise, DEFAULTS)
    updated = {**params, **{name: new[name] for name in new if name.startswith("q.")}}

    right, _, _ = ref.policy_loss(updated, old_zs, scale, noise, DEFAULTS)
    old_heads, _, _ = ref.policy_loss(params, old_zs, scale, noise, DEFAULTS)
    late_latents, _, _ = ref.policy_loss(updated, new_zs, scale, noise, DEFAULTS)
    assert metrics["pi_loss"].item() == pytest.approx(right.item(), rel=1e-12)
    assert metrics["pi_loss"].item() != pytest.approx(old_heads.item(), rel=1e-9)
    assert metrics["pi_loss"].item() != pytest.approx(late_latents.item(), rel=1e-9)


def test_float32_stays_float32_and_agrees_with_float64() -> None:
    results = {}
    for dtype in (torch.float32, torch.float64):
        params = random_params(dtype=dtype)
        batch, noise = random_batch_and_noise(dtype=dtype)
        state, scale = ref.new_optimiser_state(params), torch.tensor(1.0, dtype=dtype)
        new, _, new_scale, metrics = ref.update(params, state, scale, batch, noise, DEFAULTS)
        assert {value.dtype for value in new.values()} == {dtype}
        assert new_scale.dtype == dtype
        results[dtype] = metrics
    for name, value in results[torch.float64].items():
        assert results[torch.float32][name].item() == pytest.approx(value.item(), rel=1e-4), name


def test_losses_of_heads_that_know_nothing_are_weighted_by_rho() -> None:
    params = random_params(episodic=True)
    for name in ("reward", "termination", *(f"q.{h}" for h in range(NUM_Q))):
        for part in ("weight", "bias"):
            params[f"{name}.2.{part}"] = torch.zeros_like(params[f"{name}.2.{part}"])
    batch, noise = random_batch_and_noise()
    settings = ReferenceSettings(episodic=True)
    next_z, y = ref.targets(params, batch, noise, settings)
    losses, zs = ref.model_losses(params, batch, next_z, y, noise, settings)
    even = (1 + 0.5 + 0.25) / 3 * math.log(101)
    assert losses["reward_loss"].item() == pytest.approx(even)
    assert losses["value_loss"].item() == pytest.approx(even)  # the mean over heads
    assert losses["termination_loss"].item() == pytest.approx(math.log(2))  # without rho
    # Latents that are off by 0.1, 0.2, 0.3: (0.01 + 0.04 / 2 + 0.09 / 4) / 3.
    wrong = zs[1:].detach() + vector(0.1, 0.2, 0.3).reshape(3, 1, 1)
    losses, _ = ref.model_losses(params, batch, wrong, y, noise, settings)
    assert losses["consistency_loss"].item() == pytest.approx(0.0525 / 3)


def test_policy_loss_of_constant_heads() -> None:
    params = random_params()
    constant_head(params, "q.0", 60)  # e^2 - 1
    constant_head(params, "q.1", 50)  # 0
    _, noise = random_batch_and_noise()
    zs = torch.full((4, 4, LATENT), 1 / 8, dtype=torch.float64)
    scale = torch.tensor(3.0, dtype=torch.float64)
    settings = ReferenceSettings(entropy_coef=0.0)
    loss, new_scale, _ = ref.policy_loss(params, zs, scale, noise, settings)
    assert new_scale.item() == pytest.approx(2.98)  # the range 0 counts as 1, and acts at once
    weight = (1 + 0.5 + 0.25 + 0.125) / 4
    assert loss.item() == pytest.approx(-weight * (math.e**2 - 1) / 2 / 2.98)


def test_dropout_acts_before_the_norm() -> None:
    params = random_params()
    z = torch.linspace(0, 1, LATENT, dtype=torch.float64).reshape(1, LATENT)
    action = vector(0.3, -0.2).reshape(1, ACT)
    plain = ref.q_logits(params, "q.0", z, action)
    # The norm takes out a common factor, so a mask that is 50 everywhere nearly changes nothing.
    same = ref.q_logits(params, "q.0", z, action, torch.full((1, HIDDEN), 50.0).double())
    torch.testing.assert_close(same, plain, rtol=1e-3, atol=1e-3)
    mask = torch.ones(1, HIDDEN, dtype=torch.float64)
    mask[0, 0] = 0.0
    assert (ref.q_logits(params, "q.0", z, action, mask) - plain).abs().max() > 1e-2


# ---------------------------------------------------------------- the planner


def test_two_elites_weigh_by_half_the_gap() -> None:
    # Gap 2 ln 3, temperature 0.5: the better one weighs three times as much.
    weights = ref.elite_weights(vector(5.0, 5.0 - 2 * math.log(3)), 0.5)
    assert weights.tolist() == pytest.approx([0.75, 0.25])
    mean, std = ref.weighted_moments(weights, vector(1.0, -1.0).reshape(1, 2, 1))
    assert mean.item() == pytest.approx(0.5)  # 0.75 - 0.25
    assert std.item() == pytest.approx(math.sqrt(0.75))  # 0.75 * 0.5^2 + 0.25 * 1.5^2 = 0.75


@pytest.mark.parametrize(
    ("episodic", "logit", "expected"),
    [
        # Every reward e - 1, every q e^2 - 1, gamma 1/2, three steps.
        (False, 0.0, 1.75 * (math.e - 1) + 0.125 * (math.e**2 - 1)),
        (True, -5.0, 1.75 * (math.e - 1) + 0.125 * (math.e**2 - 1)),
        (True, 5.0, math.e - 1),  # ends in the first predicted state: its reward only
    ],
)
def test_value_of_a_sequence_by_hand(episodic: bool, logit: float, expected: float) -> None:
    params = random_params(episodic=episodic)
    constant_head(params, "reward", 55)  # bin 55 is 1.0
    for h in range(NUM_Q):
        constant_head(params, f"q.{h}", 60)  # bin 60 is 2.0
    if episodic:
        params["termination.2.weight"] = torch.zeros_like(params["termination.2.weight"])
        params["termination.2.bias"] = torch.full_like(params["termination.2.bias"], logit)
    value = ref.sequence_values(
        params,
        ref.encode(params, torch.ones(1, OBS, dtype=torch.float64), DEFAULTS),
        torch.zeros(3, 1, ACT, dtype=torch.float64),
        torch.tensor([0, 2]),
        torch.zeros(1, ACT, dtype=torch.float64),
        ReferenceSettings(gamma=0.5, episodic=episodic),
    )
    assert value.item() == pytest.approx(expected)


def test_plan_shifts_the_old_mean_only_after_the_first_step() -> None:
    params = random_params()
    obs = torch.ones(2, OBS, dtype=torch.float64)  # the same situation twice
    noise = random_plan_noise(2, SMALL)
    for key in ("policy", "samples", "bootstrap", "gumbel", "explore"):
        axis = {"policy": 1, "samples": 2, "bootstrap": 1, "gumbel": 0, "explore": 0}[key]
        one = noise[key].narrow(axis, 0, 1)
        noise[key] = torch.cat([one, one], dim=axis)
    prev_mean = torch.full((3, 2, ACT), 0.4, dtype=torch.float64)

    def run(first: list[bool], mean: Tensor, explore: bool = False) -> dict[str, Tensor]:
        return ref.plan(params, obs, mean, torch.tensor(first), noise, SMALL, explore)

    out = run([True, False], prev_mean)
    assert not torch.equal(out["mean"][:, 0], out["mean"][:, 1])
    forgotten = run([True, True], prev_mean)
    torch.testing.assert_close(forgotten["mean"][:, 1], out["mean"][:, 0])
    # A zero plan moved forward is the same as none; row 0 of the old plan is spent.
    spent = torch.zeros_like(prev_mean)
    spent[0] = 0.9
    torch.testing.assert_close(run([False, False], spent)["mean"], forgotten["mean"])

    shapes = {key: tuple(value.shape) for key, value in out.items()}
    assert shapes == {
        "action": (2, ACT),
        "mean": (3, 2, ACT),
        "std": (3, 2, ACT),
        "means": (2, 3, 2, ACT),
        "stds": (2, 3, 2, ACT),
        "elite_indices": (2, 2, 4),
        "weights": (2, 2, 4),
        "values": (2, 2, 10),
        "drawn": (2,),
        "policy_actions": (3, 2, 3, ACT),
    }
    explored = run([True, False], prev_mean, explore=True)["action"]
    expected = torch.clamp(out["action"] + out["std"][0] * noise["explore"], -1, 1)
    torch.testing.assert_close(explored, expected)


def test_gumbel_noise_draws_the_elite_and_policy_sequences_come_last() -> None:
    params = random_params()
    settings = ReferenceSettings(
        num_samples=4, num_elites=4, num_pi_trajs=3, iterations=1, horizon=1
    )
    noise = random_plan_noise(1, settings)
    noise["gumbel"] = vector(0.0, 0.0, 1e6, 0.0).reshape(1, 4)
    obs, mean = torch.ones(1, OBS).double(), torch.zeros(1, 1, ACT).double()
    out = ref.plan(params, obs, mean, torch.tensor([True]), noise, settings, explore=False)
    gaussian = torch.clamp(2.0 * noise["samples"][0, 0, 0], -1, 1)  # mean 0, std 2
    sequences = torch.cat([gaussian, out["policy_actions"][0, 0]])
    assert out["drawn"].tolist() == [2]
    chosen = out["elite_indices"][0, 0, 2]
    torch.testing.assert_close(out["action"][0], sequences[chosen])
    ordered = out["values"][0, 0][out["elite_indices"][0, 0]]
    assert torch.equal(ordered, torch.sort(ordered, descending=True).values)
