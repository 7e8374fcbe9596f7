"""Discrete TD-MPC2 against its slow reference: same weights, batch and noise, same numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from forethought.agents.tdmpc2.act import plan
from forethought.agents.tdmpc2.config import ModelConfig, PlannerConfig, TDMPC2Config
from forethought.agents.tdmpc2.model import WorldModel
from forethought.agents.tdmpc2.noise import draw_update_noise
from forethought.agents.tdmpc2.update import TensorBatch
from forethought.planning.categorical import CategoricalNoise
from tests.discrete_actions import ACTIONS, random_masks, small_codec

from . import reference_discrete as reference
from .test_tdmpc2_parity import (
    GAMMA,
    OBS,
    TINY,
    Case,
    assert_close,
    make_learner,
    settings_of,
)

BATCH = 4
CONFIG = TDMPC2Config(
    model=TINY,
    planner=PlannerConfig(
        samples=14, elites=5, policy_samples=4, iterations=3, min_probability=0.1, temperature=2.0
    ),
    entropy_coef=0.3,
    horizon=2,
    tau=0.2,
    grad_clip_norm=0.5,
)


def make_case(config: TDMPC2Config, episodic: bool = True) -> Case:
    """As for continuous actions; the gates are no longer zero."""
    generator, codec = torch.Generator().manual_seed(5), small_codec()
    model = WorldModel(OBS, codec.width, config, episodic, generator, codec).double()
    case = Case(model, config, generator)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * case.normal(*parameter.shape)
    return case


def slow_table(config: TDMPC2Config) -> reference.Table:
    """who is decided first, for it always matters; then what, then the level."""
    codec = small_codec()
    rows = [
        tuple(int(c) if c >= 0 else n for c, n in zip(row[::-1], (3, 2, 3), strict=True))
        for row in codec.table
    ]
    one_hot = torch.from_numpy(codec.one_hot(range(ACTIONS))).double()
    return reference.Table(rows, [3, 3, 4], one_hot, config.planner.min_probability)


@pytest.mark.parametrize("masked", [True, False])
def test_the_policys_probabilities(masked: bool) -> None:
    case = make_case(CONFIG)
    z, legal = case.normal(4, 16), random_masks(4)
    if not masked:
        legal = torch.ones_like(legal)
    policy, table = case.model.policy, slow_table(CONFIG)
    fast = policy.log_probs(z, legal if masked else None)
    uniform = torch.rand(4, 10, 3, generator=case.generator)
    mask = legal.unsqueeze(1) if masked else None
    drawn = policy.sample(z.unsqueeze(1), uniform, mask)  # [4, 10]
    for i in range(4):
        slow = reference.log_probs(case.params, z[i], legal[i].tolist(), table)
        torch.testing.assert_close(fast[i], slow, rtol=1e-9, atol=1e-9)
        assert fast[i].exp().sum().item() == pytest.approx(1, abs=1e-12)
        torch.testing.assert_close(
            policy.log_prob(z[i], drawn[i], legal[i] if masked else None), slow[drawn[i]]
        )
        for n in range(10):
            given = (case.params, z[i], uniform[i, n], legal[i].tolist(), table)
            assert reference.sample(*given) == drawn[i, n]
    rows, scores = policy.likeliest(z, ACTIONS, legal if masked else None)
    torch.testing.assert_close(scores, fast.gather(-1, rows).where(scores > -torch.inf, scores))
    assert (scores > -torch.inf).sum(-1).tolist() == legal.sum(-1).tolist()


@pytest.mark.parametrize("q_target", ["max", "policy", "expected"])
@pytest.mark.parametrize("masked", [True, False])
def test_whole_update(q_target: str, masked: bool) -> None:
    config = replace(CONFIG, q_target=q_target)  # type: ignore[arg-type]
    case, settings = make_case(config), settings_of(config, episodic=True)
    horizon, size = config.horizon, config.model.resolved
    index = torch.randint(ACTIONS, (horizon, BATCH), generator=case.generator)
    legal = random_masks(horizon + 1, BATCH)
    batch = TensorBatch(
        obs=case.normal(horizon + 1, BATCH, OBS),
        action=index,
        reward=3 * case.normal(horizon, BATCH),
        terminated=(case.normal(horizon, BATCH) > 1.0).double(),
        legal=legal if masked else None,
    )
    noise = draw_update_noise(
        case.generator,
        horizon=horizon,
        batch=BATCH,
        num_q=size.num_q,
        units=size.mlp_units,
        dropout=config.model.dropout,
        **case.model.actions.update_noise(),
    )
    assert noise.value_keep is not None and noise.policy_keep is not None
    scale = 1 / (1 - config.model.dropout)
    slow_noise = {
        "target_policy": noise.target_policy,
        "target_heads": torch.tensor(noise.target_heads),
        "policy_heads": torch.tensor(noise.policy_heads),
        "value_dropout": noise.value_keep.double().view(size.num_q, horizon, BATCH, -1) * scale,
        "policy_dropout": noise.policy_keep.double().view(2, horizon + 1, BATCH, -1) * scale,
    }
    slow_batch = {k: getattr(batch, k) for k in ("obs", "reward", "terminated")}
    slow_batch |= {"index": index, "legal": legal if masked else torch.ones_like(legal)}
    params, slow_scale, metrics = reference.update(
        case.params, torch.ones((), dtype=torch.float64), slow_batch, slow_noise, settings,
        slow_table(config), q_target,
    )  # fmt: skip
    learner = make_learner(case)
    fast = learner.update(batch, noise)
    for name, value in metrics.items():
        assert fast[name] == pytest.approx(value.item(), rel=1e-9, abs=1e-9), name
    for name, weight in case.model.state_dict().items():
        assert_close(name, weight, params[name], torch.float64)
    assert_close("q_scale", learner.scale.value, slow_scale, torch.float64)


@pytest.mark.parametrize("explore", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_plan(explore: bool, masked: bool) -> None:
    config = replace(CONFIG, horizon=3)
    case, settings = make_case(config), settings_of(config, episodic=True)
    envs, table = 2, slow_table(config)
    noise = case.model.actions.plan_noise(case.generator, 3, envs, 3)
    noise = replace(
        noise,
        bootstrap=noise.bootstrap.double(),
        mppi=CategoricalNoise(*(x.double() for x in noise.mppi)),
    )
    obs, first = case.normal(envs, OBS), torch.tensor([True, False])
    last = torch.softmax(3 * case.normal(3, envs, ACTIONS), -1)
    legal = random_masks(envs)
    with torch.inference_mode():
        fast = plan(case.model, obs, last, first, noise, GAMMA, explore, legal if masked else None)
    allowed = legal if masked else torch.ones_like(legal)
    for e in range(envs):
        own = {
            "policy": noise.policy[:, e],
            "samples": noise.mppi.samples[:, :, e],
            "heads": torch.tensor(noise.heads),
            "bootstrap": noise.bootstrap[:, e],
            "explore": noise.mppi.explore[e],
        }
        slow = reference.plan_one(
            case.params, obs[e], last[:, e], bool(first[e]), allowed[e].tolist(), own, settings,
            table, explore,
        )  # fmt: skip
        found: dict[str, Tensor] = {
            "action": fast.action[e], "mean": fast.mean[:, e], "values": fast.values[e]
        }  # fmt: skip
        assert found["action"] == slow["action"]
        assert allowed[e, found["action"]]
        for name in ("mean", "values"):
            assert_close(name, found[name], slow[name], torch.float64)


def test_one_factor_is_a_plain_softmax() -> None:
    from gymnasium import spaces

    from forethought.spaces import ActionCodec

    codec = ActionCodec(spaces.Discrete(4))
    config = TDMPC2Config(model=ModelConfig(size=1))
    generator = torch.Generator().manual_seed(0)
    policy = WorldModel(OBS, codec.width, config, False, generator, codec).policy
    z = torch.rand(5, 128, generator=generator)
    torch.testing.assert_close(policy.log_probs(z), policy(z).log_softmax(-1))
    assert policy.gates is None
