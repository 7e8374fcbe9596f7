"""The fast TD-MPC2 against the slow reference: same weights, batch and noise, same numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from forethought.agents.tdmpc2.act import plan
from forethought.agents.tdmpc2.agent import PARTS
from forethought.agents.tdmpc2.config import (
    LearningRates,
    ModelConfig,
    NStep,
    OneStep,
    PlannerConfig,
    TDLambda,
    TDMPC2Config,
)
from forethought.agents.tdmpc2.model import WorldModel
from forethought.agents.tdmpc2.noise import (
    UpdateNoise,
    draw_plan_noise,
    draw_update_noise,
)
from forethought.agents.tdmpc2.rates import RATE_OF
from forethought.agents.tdmpc2.update import Learner, TensorBatch
from forethought.nets.kernels import native_kernels
from forethought.nets.layers import use_kernels
from forethought.nets.optimisers import adam

from . import reference_tdmpc2 as reference

OBS, ACTION, BATCH, GAMMA = 7, 3, 8, 0.97


@dataclass
class Case:
    """A model with perturbed weights, so that nothing is zero or one by initialisation."""

    model: WorldModel
    config: TDMPC2Config
    generator: torch.Generator

    @property
    def params(self) -> dict[str, Tensor]:
        return {k: v.detach().clone() for k, v in self.model.state_dict().items()}

    def normal(self, *shape: int) -> Tensor:
        dtype = next(self.model.parameters()).dtype
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(dtype)


def make_case(config: TDMPC2Config, dtype: torch.dtype, episodic: bool = False) -> Case:
    generator = torch.Generator().manual_seed(5)
    model = WorldModel(OBS, ACTION, config, episodic, generator).to(dtype)
    case = Case(model, config, generator)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * case.normal(*parameter.shape)
    return case


def settings_of(config: TDMPC2Config, episodic: bool) -> reference.ReferenceSettings:
    kind = config.returns.kind
    return reference.ReferenceSettings(
        gamma=GAMMA,
        rho=config.rho,
        tau=config.tau,
        lr=config.lr.dynamics,
        enc_lr_scale=config.lr.encoder / config.lr.dynamics,
        grad_clip_norm=config.grad_clip_norm,
        consistency_coef=config.consistency_coef,
        reward_coef=config.reward_coef,
        value_coef=config.value_coef,
        termination_coef=config.termination_coef,
        entropy_coef=config.entropy_coef,
        log_std_min=config.log_std_min,
        log_std_max=config.log_std_max,
        min_std=config.planner.min_std,
        max_std=config.planner.max_std,
        temperature=config.planner.temperature,
        num_bins=config.model.bins,
        vmin=config.model.bin_low,
        vmax=config.model.bin_high,
        simnorm_dim=config.model.simnorm_dim,
        entropy="jacobian" if config.entropy == "jacobian" else "main",
        horizon=config.horizon,
        num_samples=config.planner.samples,
        num_elites=config.planner.elites,
        num_pi_trajs=config.planner.policy_samples,
        iterations=config.planner.iterations_for(ACTION),
        episodic=episodic,
        td=kind,
        td_steps=config.returns.n if isinstance(config.returns, NStep) else 3,
        td_lambda=config.returns.lam if isinstance(config.returns, TDLambda) else 0.95,
    )


def make_batch(case: Case) -> TensorBatch:
    horizon = case.config.horizon
    return TensorBatch(
        obs=case.normal(horizon + 1, BATCH, OBS),
        action=torch.tanh(case.normal(horizon, BATCH, ACTION)),
        reward=3 * case.normal(horizon, BATCH),
        terminated=(case.normal(horizon, BATCH) > 1.0).to(case.normal(1).dtype),
    )


def make_update_noise(case: Case) -> tuple[UpdateNoise, dict[str, Tensor]]:
    """The same random numbers in both forms: keep masks here, scaled masks in the reference."""
    config, size = case.config, case.config.model.resolved
    noise = draw_update_noise(
        case.generator,
        horizon=config.horizon,
        batch=BATCH,
        action_dim=ACTION,
        num_q=size.num_q,
        units=size.mlp_units,
        dropout=config.model.dropout,
    )
    dtype = next(case.model.parameters()).dtype
    noise = replace(
        noise, target_policy=noise.target_policy.to(dtype), policy=noise.policy.to(dtype)
    )
    assert noise.value_keep is not None
    assert noise.policy_keep is not None
    scale = 1 / (1 - config.model.dropout)
    slow = {
        "target_policy": noise.target_policy,
        "target_heads": torch.tensor(noise.target_heads),
        "value_dropout": (noise.value_keep.to(dtype) * scale).view(
            size.num_q, config.horizon, BATCH, -1
        ),
        "policy": noise.policy,
        "policy_heads": torch.tensor(noise.policy_heads),
        "policy_dropout": (noise.policy_keep.to(dtype) * scale).view(
            2, config.horizon + 1, BATCH, -1
        ),
    }
    return noise, slow


def make_learner(case: Case) -> Learner:
    rates = case.config.lr
    groups = [
        {"params": list(part.parameters()), "lr": getattr(rates, RATE_OF.get(name, name))}
        for name in PARTS
        if (part := getattr(case.model, name)) is not None
    ]
    policy = [{"params": list(case.model.policy.parameters()), "lr": rates.policy}]
    return Learner(case.model, case.config, GAMMA, adam(groups, 1e-8), adam(policy, 1e-5))


def assert_close(name: str, fast: Tensor, slow: Tensor, dtype: torch.dtype) -> None:
    if dtype is torch.float64:
        torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-9, msg=lambda m: f"{name}: {m}")
    else:
        error = (fast - slow).norm() / slow.norm().clamp(min=1e-6)
        assert error < 1e-4, f"{name}: relative error {error:.2e}"


def check_update(case: Case, episodic: bool, updates: int = 2) -> None:
    """Several updates in a row, so that Adam's moments and the running scale count too."""
    dtype = next(case.model.parameters()).dtype
    learner = make_learner(case)
    params, scale = case.params, torch.ones((), dtype=dtype)
    moments = reference.new_optimiser_state(params)
    settings = settings_of(case.config, episodic)
    for _ in range(updates):
        batch, (noise, slow_noise) = make_batch(case), make_update_noise(case)
        metrics = learner.update(batch, noise)
        slow_batch = {k: getattr(batch, k) for k in ("obs", "action", "reward", "terminated")}
        params, moments, scale, slow = reference.update(
            params, moments, scale, slow_batch, slow_noise, settings
        )
        for fast_name, slow_name in METRIC_PAIRS.items():
            if fast_name in metrics:
                fast = torch.tensor(metrics[fast_name], dtype=dtype)
                assert_close(fast_name, fast, slow[slow_name].detach(), dtype)
    for name, fast in case.model.state_dict().items():
        assert_close(name, fast, params[name], dtype)
    assert_close("q_scale", learner.scale.value, scale, dtype)


METRIC_PAIRS = {
    "consistency_loss": "consistency_loss",
    "reward_loss": "reward_loss",
    "value_loss": "value_loss",
    "termination_loss": "termination_loss",
    "total_loss": "total_loss",
    "grad_norm": "grad_norm",
    "policy_loss": "pi_loss",
    "policy_grad_norm": "pi_grad_norm",
    "policy_entropy": "pi_entropy",
    "td_target_mean": "td_target_mean",
    "q_scale": "pi_scale",
}

TINY = ModelConfig(size=1, encoder_units=24, mlp_units=32, latent_dim=16, num_q=3, dropout=0.2)


@pytest.mark.parametrize("size", [1, 5])
def test_whole_update_in_float64(size: int) -> None:
    check_update(make_case(TDMPC2Config(model=ModelConfig(size=size)), torch.float64), False)


@pytest.mark.parametrize("size", [1, 5])
def test_whole_update_in_float32(size: int) -> None:
    check_update(make_case(TDMPC2Config(model=ModelConfig(size=size)), torch.float32), False, 1)


@pytest.mark.parametrize("episodic", [False, True])
@pytest.mark.parametrize("entropy", ["gaussian", "jacobian"])
@pytest.mark.parametrize("returns", [OneStep(), NStep(2), TDLambda(0.8)], ids=lambda r: r.kind)
def test_whole_update_with_every_option(
    episodic: bool, entropy: str, returns: OneStep | NStep | TDLambda
) -> None:
    config = TDMPC2Config(model=TINY, returns=returns, entropy=entropy)  # type: ignore[arg-type]
    check_update(make_case(config, torch.float64, episodic), episodic, updates=3)


UNUSUAL = TDMPC2Config(
    model=replace(TINY, simnorm_dim=4, bins=51, bin_low=-5.0, bin_high=6.0, dropout=0.3),
    planner=PlannerConfig(
        samples=40, elites=8, policy_samples=5, iterations=3, min_std=0.3, max_std=1.5,
        temperature=2.0,
    ),
    lr=LearningRates(*[1e-3] * 6),
    horizon=4,
    rho=0.8,
    tau=0.2,
    consistency_coef=3.0,
    reward_coef=0.7,
    value_coef=0.4,
    termination_coef=0.3,
    entropy_coef=0.05,
    log_std_min=-3.0,
    log_std_max=1.0,
    grad_clip_norm=0.01,
)  # fmt: skip
"""No value is its default, so that a number written into the code would show."""


def test_whole_update_with_every_number_changed() -> None:
    check_update(make_case(UNUSUAL, torch.float64, episodic=True), True, updates=3)


def test_plan_with_every_number_changed() -> None:
    check_plan(make_case(UNUSUAL, torch.float64, episodic=True), True, explore=True)


def test_whole_update_with_the_c_kernels() -> None:
    kernels, why = native_kernels(torch.device("cpu"))
    if kernels is None:
        pytest.skip(why)
    case = make_case(TDMPC2Config(model=ModelConfig(size=1)), torch.float32)
    use_kernels(case.model, kernels)
    check_update(case, False, 1)


def check_plan(case: Case, episodic: bool, explore: bool, envs: int = 2) -> None:
    config, dtype = case.config, next(case.model.parameters()).dtype
    planner = config.planner
    drawn = draw_plan_noise(
        case.generator,
        horizon=config.horizon,
        envs=envs,
        samples=planner.samples,
        policy_samples=planner.policy_samples,
        elites=planner.elites,
        iterations=planner.iterations_for(ACTION),
        action_dim=ACTION,
        num_q=config.model.resolved.num_q,
    )
    noise = replace(
        drawn,
        policy=drawn.policy.to(dtype),
        bootstrap=drawn.bootstrap.to(dtype),
        mppi=type(drawn.mppi)(*(x.to(dtype) for x in drawn.mppi)),
    )
    slow_noise = {
        "policy": noise.policy,
        "samples": noise.mppi.samples,
        "heads": torch.tensor(noise.heads),
        "bootstrap": noise.bootstrap,
        "gumbel": noise.mppi.gumbel,
        "explore": noise.mppi.explore,
    }
    obs, mean = case.normal(envs, OBS), torch.tanh(case.normal(config.horizon, envs, ACTION))
    first = torch.tensor([True] + [False] * (envs - 1))
    with torch.inference_mode():
        fast = plan(case.model, obs, mean, first, noise, GAMMA, explore)
    slow = reference.plan(
        case.params, obs, mean, first, slow_noise, settings_of(config, episodic), explore
    )
    assert torch.equal(fast.elites, slow["elite_indices"]), "elite sets differ"
    for name, value in (("action", fast.action), ("mean", fast.mean), ("std", fast.std)):
        assert_close(name, value, slow[name], dtype)
    best = slow["values"][-1].gather(-1, slow["elite_indices"][-1])
    assert_close("values", fast.values, best, dtype)


@pytest.mark.parametrize("size", [1, 5])
def test_plan_in_float64(size: int) -> None:
    planner = PlannerConfig(samples=64, elites=12, policy_samples=6)
    config = TDMPC2Config(model=ModelConfig(size=size), planner=planner)
    check_plan(make_case(config, torch.float64), False, explore=True)


def test_plan_in_float32() -> None:
    """Near-ties may order elites differently in float32, so few are kept of few."""
    planner = PlannerConfig(samples=32, elites=4, policy_samples=4)
    config = TDMPC2Config(model=ModelConfig(size=1), planner=planner)
    check_plan(make_case(config, torch.float32), False, explore=True)


@pytest.mark.parametrize("explore", [False, True])
@pytest.mark.parametrize("policy_samples", [0, 5])
def test_plan_in_an_episodic_task(explore: bool, policy_samples: int) -> None:
    planner = PlannerConfig(samples=40, elites=8, policy_samples=policy_samples, iterations=3)
    config = TDMPC2Config(model=TINY, planner=planner, horizon=4)
    check_plan(make_case(config, torch.float64, episodic=True), True, explore, envs=3)


def test_plan_at_the_official_size() -> None:
    check_plan(make_case(TDMPC2Config(model=TINY), torch.float64), False, explore=False)
