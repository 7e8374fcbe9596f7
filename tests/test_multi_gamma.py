"""Multi-discount auxiliary values: seed 003, phase by phase.

1 configuration, 2 heads, 3 targets, 4 loss, 5 metrics and snapshots, 6 off is the baseline,
7 compile; then checkpoints and the ablation's arithmetic.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch import Tensor

from forethought import files, presets
from forethought.agents.tdmpc2 import TDMPC2Config
from forethought.agents.tdmpc2 import agent as agent_module
from forethought.agents.tdmpc2.act import plan
from forethought.agents.tdmpc2.agent import PARTS, TDMPC2
from forethought.agents.tdmpc2.config import ModelConfig, NStep
from forethought.agents.tdmpc2.discounts import (
    AuxiliaryLoss,
    AuxiliaryValues,
    auxiliary_targets,
    metric_names,
    snapshot,
)
from forethought.agents.tdmpc2.gammas import MultiGammaConfig
from forethought.agents.tdmpc2.noise import draw_plan_noise
from forethought.agents.tdmpc2.rates import optimisers_of
from forethought.agents.tdmpc2.update import Learner, TensorBatch
from forethought.config import ConfigError, build_run_config, to_dict
from forethought.files import FileError
from forethought.presets import flags
from forethought.training.loop import train_run
from tests.tdmpc2_agents import CONFIG, OBS, fill, make_agent, make_batch, make_spec

TASK = "gym:Pendulum-v1"
AUX = (0.97, 0.995)
ON = MultiGammaConfig(enabled=True, gammas=("primary", *AUX))
PAGE = Path(__file__).parents[1] / "docs" / "agents" / "tdmpc2.md"


def with_gammas(*gammas: Any, **options: Any) -> TDMPC2Config:
    return replace(CONFIG, multi_gamma=MultiGammaConfig(True, gammas, **options))


def agent_with(options: MultiGammaConfig = ON, **changes: Any) -> TDMPC2:
    return make_agent(replace(CONFIG, multi_gamma=options, **changes))


def stir(agent: TDMPC2, seed: int = 3) -> None:
    """Move every weight off its beginning, so that no head predicts the same everywhere."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in sorted(agent.model.named_parameters()):
            if not name.startswith("aux_value"):
                p += 0.05 * torch.randn(p.shape, generator=generator).to(p.dtype)
        heads = agent.model.aux_value
        for p in [] if heads is None else heads.parameters():
            p += 0.3 * torch.randn(p.shape, generator=generator).to(p.dtype)


def tensors_of(agent: TDMPC2, ends: bool = False) -> TensorBatch:
    batch = make_batch(agent)
    terminated = (batch.reward > 0.8).float() if ends else batch.terminated
    return TensorBatch(batch.obs, batch.action, batch.reward, terminated)


def weights(agent: TDMPC2) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in agent.model.state_dict().items()}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


# ---- the slow reference, in float64 and by loops ----


def slow_two_hot(y: float, bins: int, low: float, high: float) -> list[float]:
    place = math.copysign(math.log1p(abs(y)), y)
    place = (min(max(place, low), high) - low) / ((high - low) / (bins - 1))
    weights = [0.0] * bins
    weights[int(place)] += 1 - (place - int(place))
    weights[(int(place) + 1) % bins] += place - int(place)
    return weights


def slow_loss(
    heads: list[tuple[Tensor, Tensor]],
    z: Tensor,
    reward: Tensor,
    terminated: Tensor,
    value: Tensor,
    gammas: tuple[float, ...],
    rho: float,
    weight: float,
    model: ModelConfig,
) -> tuple[Tensor, list[Tensor]]:
    """weight * sum_i (1/T) sum_t rho^t mean_b CE, with one (W, b) per discount."""
    horizon, batch = reward.shape
    total, ces = torch.zeros((), dtype=z.dtype), []
    for gamma, (w, b) in zip(gammas, heads, strict=True):
        ce = torch.zeros((), dtype=z.dtype)
        for t in range(horizon):
            for i in range(batch):
                v = 0.0 if terminated[t, i] else float(value[t, i])
                y = float(reward[t, i]) + gamma * v
                target = slow_two_hot(y, model.bins, model.bin_low, model.bin_high)
                log_share = torch.log_softmax(w @ z[t, i] + b, dim=0)
                ce = ce - rho**t / horizon / batch * (z.new_tensor(target) * log_share).sum()
        total, ces = total + weight * ce, [*ces, ce]
    return total, ces


def head_weights(heads: AuxiliaryValues) -> list[tuple[Tensor, Tensor]]:
    """One (W, b) per discount, whichever kind of head."""
    found = [(layer.weight, layer.bias) for layer in heads.heads]
    if heads.head == "separate":
        return found  # type: ignore[return-value]
    w, b = found[0]
    return list(zip(w.split(heads.bins), b.split(heads.bins), strict=True))  # type: ignore[operator,arg-type]


# ---- phase 1: configuration ----


def test_phase_1_the_default_is_off() -> None:
    options = TDMPC2Config().multi_gamma
    assert (options.enabled, options.gammas, options.head) == (False, (), "joint")
    assert (options.loss_weight, options.debug_logging, options.log_num_examples) == (0.5, False, 8)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"gammas": ()},
            "agent.multi_gamma.gammas is [], but must be a list that begins with the primary "
            "discount, such as [primary, 0.97, 0.995], when it is enabled.",
        ),
        (
            {"gammas": ("primary", 0.9, 0.91, 0.92, 0.93, 0.94, 0.95)},
            "agent.multi_gamma.gammas is [primary, 0.9, 0.91, 0.92, 0.93, 0.94, 0.95], but must be "
            "at most 6 discounts.",
        ),
        (
            {"gammas": ("primary", 0.97, 0.97)},
            "agent.multi_gamma.gammas is [primary, 0.97, 0.97], but must be without 0.97 twice.",
        ),
        (
            {"gammas": (0.99, 0.9900001)},
            "agent.multi_gamma.gammas is [0.99, 0.9900001], but must be without 0.9900001 twice.",
        ),
        (
            {"gammas": ("primary", 1.0)},
            "agent.multi_gamma.gammas[1] is 1.0, but must be above 0 and below 1 (or primary, as "
            "the first).",
        ),
        (
            {"gammas": (0.0, 0.97)},
            "agent.multi_gamma.gammas[0] is 0.0, but must be above 0 and below 1 (or primary, as "
            "the first).",
        ),
        (
            {"gammas": (0.99, "primary")},
            "agent.multi_gamma.gammas[1] is primary, but must be a number: only the first is the "
            "primary discount.",
        ),
        (
            {"gammas": ("primary", 0.97), "loss_weight": 0.0},
            "agent.multi_gamma.loss_weight is 0.0, but must be above 0 (enabled false turns it "
            "off).",
        ),
        (
            {"gammas": ("primary", 0.97), "log_num_examples": 0},
            "agent.multi_gamma.log_num_examples is 0, but must be at least 1.",
        ),
    ],
)
def test_phase_1_every_rule_is_one_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        MultiGammaConfig(enabled=True, **options)
    assert str(caught.value) == sentence


def built(*layers: dict[str, Any]) -> TDMPC2Config:
    agent = build_run_config("tdmpc2", TASK, TDMPC2Config, layers).agent
    assert isinstance(agent, TDMPC2Config)
    return agent


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (["primary", "high"], "gammas[1] is 'high', but must be a number."),
        ([0.99, "primry"], "gammas[1] is 'primry', but must be a number."),
        (0.97, "gammas is 0.97, but must be a list."),
    ],
)
def test_phase_1_wrong_types_are_named(text: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        built({"agent": {"multi_gamma": {"enabled": True, "gammas": text}}})
    assert str(caught.value) == f"agent.multi_gamma.{sentence}"


@pytest.mark.parametrize("values", [["primary", "0.97"], ["[primary, 0.97]"]])
def test_phase_1_flags_and_files_say_the_same_and_round_trip(values: list[str]) -> None:
    tokens = ["--agent.multi_gamma.enabled", "--agent.multi_gamma.gammas", *values]
    types, _ = flags.select(tokens, TDMPC2Config, {})
    _, given = flags.read(tokens, types)
    config = built(flags.nested(given))
    assert config == built(
        {"agent": {"multi_gamma": {"enabled": True, "gammas": ["primary", 0.97]}}}
    )
    assert config.multi_gamma.gammas == ("primary", 0.97)
    assert built({"agent": to_dict(config)}) == config


@pytest.mark.parametrize(
    ("name", "value"),
    [("gammas", ["primary", 0.97]), ("head", "separate"), ("loss_weight", 0.1),
     ("debug_logging", True), ("log_num_examples", 3)],
)  # fmt: skip
def test_phase_1_a_key_without_effect_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        built({"agent": {"multi_gamma": {name: value}}})
    assert str(caught.value) == (
        f"agent.multi_gamma.{name} is {value}, but must be left out: it has no effect while "
        "agent.multi_gamma.enabled is false."
    )


def test_phase_1_turning_it_off_drops_what_a_preset_said_about_it() -> None:
    on = presets.layers(["multi_gamma_a3"], None, "tdmpc2")
    off = {"agent": {"multi_gamma": {"enabled": False}}}
    assert built(*on, off) == TDMPC2Config()
    assert built(*on, {"agent": {"horizon": 2}}).multi_gamma == ON  # nothing else drops it


@pytest.mark.parametrize("first", [0.99, 0.99 + 9e-7, "primary"])
def test_phase_1_the_first_discount_is_the_primary_one(first: float | str) -> None:
    """500 decisions: 1 - 5 / 500 = 0.99."""
    assert make_agent(with_gammas(first, 0.97)).model.aux_value.gammas == (0.97,)  # type: ignore[union-attr]


@pytest.mark.parametrize("first", [0.98, 0.99 + 2e-6, 0.99 - 2e-6])
def test_phase_1_another_first_discount_is_refused_before_anything_is_made(
    first: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_module, "WorldModel", None)
    with pytest.raises(ConfigError) as caught:
        make_agent(with_gammas(first, 0.97))
    assert str(caught.value) == (
        f"agent.multi_gamma.gammas[0] is {first}, but must be primary or 0.99, the discount of "
        "stub."
    )


def test_phase_1_a_discount_that_was_set_is_checked_with_the_options() -> None:
    assert replace(with_gammas(0.9, 0.97), gamma=0.9).multi_gamma.gammas == (0.9, 0.97)
    with pytest.raises(ConfigError) as caught:
        replace(with_gammas(0.99, 0.97), gamma=0.9)
    assert str(caught.value) == (
        "agent.multi_gamma.gammas[0] is 0.99, but must be primary or 0.9, which is agent.gamma."
    )


def test_phase_1_several_tasks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_module, "WorldModel", None)
    spec = make_spec(task="multi:dmc:walker-walk,dmc:cheetah-run")
    with pytest.raises(ConfigError, match="is several tasks, each with a discount of its own"):
        make_agent(with_gammas("primary", 0.97), spec=spec)


def test_phase_1_presets_hold_the_discounts_of_the_ablation() -> None:
    expected: dict[str, tuple[Any, ...]] = {
        "a0": (),
        "a1": ("primary", 0.97),
        "a2": ("primary", 0.995),
        "a3": ("primary", 0.97, 0.995),
        "a4": ("primary", 0.9, 0.95, 0.97, 0.995, 0.999),
    }
    for name, gammas in expected.items():
        options = built(*presets.layers([f"multi_gamma_{name}"], None, "tdmpc2")).multi_gamma
        assert (options.enabled, options.gammas) == (name != "a0", gammas)


@pytest.mark.parametrize("name", [f"multi_gamma_a{i}" for i in range(5)])
def test_phase_1_presets_compose_with_any_other_in_both_orders(name: str) -> None:
    own = built(*presets.layers([name], None, "tdmpc2")).multi_gamma
    for other in presets.names():
        own_agents = presets.load(other).get("agents", {"tdmpc2": {}})
        if not other.startswith("multi_gamma") and "tdmpc2" in own_agents:
            plain = built(*presets.layers([other], None, "tdmpc2"))
            for both in ([name, other], [other, name]):
                config = built(*presets.layers(both, None, "tdmpc2"))
                assert config == replace(plain, multi_gamma=own)


def test_phase_1_a_later_preset_of_the_ablation_replaces_an_earlier_one() -> None:
    names = [f"multi_gamma_a{i}" for i in range(5)]
    for first in names:
        for second in names:
            both = built(*presets.layers([first, second], None, "tdmpc2"))
            assert both == built(*presets.layers([second], None, "tdmpc2"))


def test_phase_1_a_preset_fits_a_task_whose_own_discount_it_names(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """100 decisions: 0.95, which a4 names too. The primary value learns it already."""
    layers = presets.layers(["multi_gamma_a4"], None, "tdmpc2")
    config = replace(CONFIG, multi_gamma=built(*layers).multi_gamma)
    agent = make_agent(config, spec=make_spec(max_episode_steps=100))
    assert agent.gamma == 0.95
    assert agent.model.aux_value is not None
    assert agent.model.aux_value.gammas == (0.9, 0.97, 0.995, 0.999)
    assert caplog.messages == [
        "The auxiliary discount 0.95 is the primary one of this task, and gets no head of its own."
    ]


# ---- phase 2: heads ----


def test_phase_2_a_joint_head_is_one_layer_for_the_auxiliary_discounts() -> None:
    heads = agent_with().model.aux_value
    assert heads is not None
    assert [tuple(p.shape) for p in heads.parameters()] == [(2 * 101, 16), (2 * 101,)]
    assert heads(torch.zeros(3, 8, 16)).shape == (3, 8, 2, 101)


def test_phase_2_separate_heads_are_one_layer_each() -> None:
    heads = agent_with(replace(ON, head="separate")).model.aux_value
    assert heads is not None
    shapes = [tuple(p.shape) for p in heads.parameters()]
    assert shapes == [(101, 16), (101,)] * 2
    assert heads(torch.zeros(3, 8, 16)).shape == (3, 8, 2, 101)


def test_phase_2_joint_and_separate_heads_of_the_same_weights_agree() -> None:
    joint, separate = (AuxiliaryValues(16, 11, AUX, head) for head in ("joint", "separate"))
    with torch.no_grad():
        for p in joint.parameters():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
        for layer, (w, b) in zip(separate.heads, head_weights(joint), strict=True):
            layer.weight.copy_(w)  # type: ignore[operator]
            layer.bias.copy_(b)  # type: ignore[operator]
    z = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(joint(z), separate(z))


def test_phase_2_parameters_are_counted_and_told_once() -> None:
    """512 x 101 + 101 = 51,813 for each discount at size 5."""
    config = TDMPC2Config(multi_gamma=ON)
    spec = make_spec(observation_space=gymnasium.spaces.Box(-1, 1, (17,), np.float32))
    agent = make_agent(config, spec=spec)
    counts = agent.log_architecture()
    assert counts["aux_value"] == 2 * 51_813
    assert counts["total"] == sum(n for part, n in counts.items() if part != "total")
    assert agent.notes == (
        "Auxiliary values at discounts 0.97, 0.995 beside the primary 0.99: joint head, 103,626 "
        "parameters.",
    )


def test_phase_2_heads_start_at_zero_and_all_else_as_without_them() -> None:
    agent, baseline = agent_with(), make_agent()
    assert agent.model.aux_value is not None
    assert all((p == 0).all() for p in agent.model.aux_value.parameters())
    rest = {k: v for k, v in weights(agent).items() if not k.startswith("aux_value")}
    assert_same(rest, weights(baseline))


def test_phase_2_heads_learn_at_the_rate_of_q() -> None:
    agent = agent_with(lr=replace(CONFIG.lr, q=7e-4))
    groups = {g["base_lr"]: set(g["params"]) for g in agent.learner.optimiser.param_groups}
    assert agent.model.aux_value is not None
    assert set(agent.model.aux_value.parameters()) <= groups[7e-4]


# ---- phase 3: targets ----


def test_phase_3_targets_are_one_step_from_the_primary_value() -> None:
    """1 + 0.9 x 10 = 10, 1 + 0.97 x 10 = 10.7; termination leaves the reward."""
    reward, value = torch.ones(1, 2), torch.full((1, 2), 10.0)
    y = auxiliary_targets(reward, torch.tensor([[0.0, 1.0]]), value, torch.tensor([0.9, 0.97]))
    torch.testing.assert_close(y, torch.tensor([[[10.0, 10.7], [1.0, 1.0]]]))


@pytest.mark.parametrize("returns", [CONFIG.returns, NStep(2)], ids=["one_step", "n_step"])
def test_phase_3_they_bootstrap_from_the_very_tensor_of_the_primary_target(
    returns: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the primary target makes of it, the auxiliary one is one step."""
    agent = agent_with(returns=returns)
    stir(agent)
    batch, noise = tensors_of(agent), agent.draw_noise()
    _, _, value = agent.learner.targets(batch, noise)
    assert not value.requires_grad
    seen = []

    def watched(reward: Tensor, terminated: Tensor, given: Tensor, gammas: Tensor) -> Tensor:
        seen.append((reward, terminated, given))
        return auxiliary_targets(reward, terminated, given, gammas)

    monkeypatch.setattr("forethought.agents.tdmpc2.discounts.auxiliary_targets", watched)
    agent.learner.update(batch, noise)
    ((reward, terminated, given),) = seen
    assert reward is batch.reward and terminated is batch.terminated
    assert torch.equal(given, value)


def test_phase_3_no_further_random_number_is_drawn() -> None:
    agent, baseline = agent_with(), make_agent()
    for one in (agent, baseline):
        fill(one)
        one.train(3)
    assert torch.equal(agent.update_stream.get_state(), baseline.update_stream.get_state())
    assert agent.replay.state()[0]["rng"] == baseline.replay.state()[0]["rng"]


# ---- phase 4: loss ----


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


# ---- phase 5: metrics and snapshots ----


def test_phase_5_metrics_have_the_names_and_the_page_explains_them() -> None:
    assert set(metric_names(AUX)) == {
        "aux_value_ce/g0.97", "aux_value_ce/g0.995", "aux_value_ce/mean",
        "aux_value_mean/g0.97", "aux_value_mean/g0.995",
        "aux_value_std/g0.97", "aux_value_std/g0.995",
    }  # fmt: skip
    agent = agent_with()
    metrics = agent.update(make_batch(agent), agent.draw_noise())
    assert set(metric_names(AUX)) <= metrics.keys() & set(agent.metric_names)
    page = PAGE.read_text(encoding="utf-8")
    for name in {*(name.partition("/g")[0] for name in metric_names(AUX)), "aux_value_ce/mean"}:
        assert f"| `{name}" in page


def test_phase_5_mean_and_std_are_those_of_the_decoded_predictions() -> None:
    agent = agent_with()
    stir(agent)
    z = torch.rand(3, 8, 16, generator=torch.Generator().manual_seed(6))
    loss, heads = agent.learner.auxiliary, agent.model.aux_value
    assert loss is not None and heads is not None
    _, metrics = loss(z, torch.zeros(3, 8), torch.zeros(3, 8), torch.zeros(3, 8))
    decoded = agent.model.two_hot.decode(heads(z)[:, :, 1]).flatten().tolist()
    mean = sum(decoded) / 24
    assert metrics["aux_value_mean/g0.995"].item() == pytest.approx(mean, rel=1e-4)
    std = math.sqrt(sum((x - mean) ** 2 for x in decoded) / 24)
    assert metrics["aux_value_std/g0.995"].item() == pytest.approx(std, rel=1e-4)


def taken(debug: bool, examples: int = 8) -> tuple[dict[str, Any], AuxiliaryLoss, list[Tensor]]:
    """A snapshot of stirred heads, with what it was made from."""
    agent = agent_with(replace(ON, debug_logging=debug, log_num_examples=examples))
    stir(agent)
    g = torch.Generator().manual_seed(7)
    given = [torch.rand(3, 16, 16, generator=g), *(torch.randn(3, 16, generator=g) for _ in "rtv")]
    given[2] = (given[2] > 1).float()
    loss = agent.learner.auxiliary
    assert loss is not None
    with torch.no_grad():
        return snapshot(loss, *given), loss, given


@pytest.mark.parametrize(
    ("debug", "examples", "shown"),
    [(False, 8, 4), (False, 3, 3), (True, 8, 8), (True, 3, 3), (True, 99, 16)],
)
def test_phase_5_snapshots_are_bounded_by_log_num_examples(
    debug: bool, examples: int, shown: int
) -> None:
    made, _, _ = taken(debug, examples)
    assert len(made["examples"]) == shown
    assert made["slices"] == 16
    assert json.loads(json.dumps(made)) == made


def test_phase_5_a_short_snapshot_shows_distribution_target_and_prediction() -> None:
    made, _, _ = taken(False)
    assert made["tier"] == "standard"
    for example in made["examples"]:
        assert set(example) == {"reward", "g0.97", "g0.995"}
        for gamma in AUX:
            one = example[f"g{gamma}"]
            assert set(one) == {"target", "prediction", "abs_error", "distribution"}
            assert sum(one["distribution"]) == pytest.approx(1, abs=1e-4)
            assert len(one["target"]) == 3
    assert "ce_per_step" not in made["per_gamma"]["g0.97"]


def test_phase_5_a_debug_snapshot_shows_what_the_numbers_are_made_of() -> None:
    """Every number worked out again from the raw tensors, for the second slice at 0.995."""
    made, loss, (z, reward, terminated, value) = taken(True)
    assert made["tier"] == "debug"
    example, one = made["examples"][1], made["examples"][1]["g0.995"]
    bootstrap = [(1 - e) * v for e, v in zip(terminated[:, 1].tolist(), value[:, 1].tolist())]
    assert example["bootstrap"] == pytest.approx(bootstrap)
    target = [r + 0.995 * v for r, v in zip(reward[:, 1].tolist(), bootstrap)]
    assert one["target"] == pytest.approx(target, rel=1e-5)
    share = loss.heads(z)[:, 1, 1].softmax(-1)
    decoded = loss.two_hot.decode(loss.heads(z)[:, 1, 1]).tolist()
    assert one["prediction"] == pytest.approx(decoded, rel=1e-4)
    errors = [abs(a - b) for a, b in zip(decoded, target)]
    assert one["abs_error"] == pytest.approx(errors, rel=1e-3, abs=1e-4)
    for t in range(3):
        best = sorted(range(101), key=lambda k: -share[t, k].item())[:2]
        assert one["top_bins"][t] == best
        assert one["top_probabilities"][t] == pytest.approx(share[t, best].tolist(), rel=1e-5)
        two_hot = slow_two_hot(target[t], 101, -10, 10)
        for k, weight in zip(one["target_bins"][t], one["target_weights"][t], strict=True):
            assert two_hot[k] == pytest.approx(weight, abs=1e-4)
        assert sum(one["target_weights"][t]) == pytest.approx(1)


def test_phase_5_statistics_of_a_snapshot_are_over_all_slices() -> None:
    made, loss, (z, reward, terminated, value) = taken(True)
    given = made["per_gamma"]["g0.97"]
    y = reward + 0.97 * (1 - terminated) * value
    predicted = loss.two_hot.decode(loss.heads(z)[:, :, 0])
    assert given["mae"] == pytest.approx((predicted - y).abs().mean().item(), rel=1e-4)
    rmse = ((predicted - y) ** 2).mean().sqrt().item()
    assert given["rmse"] == pytest.approx(rmse, rel=1e-4)
    ce = -(loss.two_hot.encode(y) * loss.heads(z)[:, :, 0].log_softmax(-1)).sum(-1).mean(1)
    assert given["ce_per_step"] == pytest.approx(ce.tolist(), rel=1e-4)
    weighted = sum(0.5**t * ce[t].item() for t in range(3)) / 3
    assert given["ce"] == pytest.approx(weighted, rel=1e-4)


def test_phase_5_a_snapshot_changes_nothing_of_training_and_comes_out_the_same_again() -> None:
    agent, undisturbed = agent_with(), agent_with()
    for one in (agent, undisturbed):
        fill(one)
        one.train(2)
    rows = agent.replay.last_draw()
    first, again = agent.snapshots(100), agent.snapshots(100)
    assert first == again
    assert first["multi_gamma"] != agent.snapshots(200)["multi_gamma"]  # other slices
    assert agent.replay.last_draw() == rows
    for one in (agent, undisturbed):
        one.train(2)
    assert_same(agent.state()[1], undisturbed.state()[1])


def test_phase_5_before_replay_holds_a_slice_there_is_no_snapshot() -> None:
    assert agent_with().snapshots(0) == {}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run of the preset a3, 0.95 being the discount of 50 decisions."""
    layers = presets.layers(["debug", "multi_gamma_a3"], None, "tdmpc2")
    small = {"steps": 220, "eval": {"every_agent_steps": 110}, "track": {"console": False}}
    config = build_run_config("tdmpc2", TASK, TDMPC2Config, [*layers, small])
    return train_run(config, tmp_path_factory.mktemp("multi") / "run").path


def test_phase_5_a_run_leaves_a_snapshot_at_every_evaluation(run: Path) -> None:
    found = sorted(path.name for path in (run / "snapshots").iterdir())
    assert found == ["multi_gamma-110.json", "multi_gamma-220.json"]
    data = files.read_json(run / "snapshots" / found[1])
    assert (data["agent_steps"], data["primary_gamma"], data["gammas"]) == (220, 0.95, list(AUX))


def test_phase_5_parameter_counts_stand_once_in_the_events(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    (started,) = [line for line in lines if line["kind"] == "started"]
    assert started["parameters"]["aux_value"] == 2 * (16 * 101 + 101)
    (about,) = [line for line in lines if line["kind"] == "about"]
    assert sum("Auxiliary values" in line for line in about["lines"]) == 1


def test_phase_5_the_columns_of_train_csv_have_values(run: Path) -> None:
    header, *rows = (run / "train.csv").read_text().splitlines()
    place = header.split(",").index("aux_value_ce/g0.97")
    assert float(rows[-1].split(",")[place]) > 0


# ---- phase 6: off is the baseline ----


@pytest.mark.parametrize(
    ("gammas", "updates"), [(("primary",), 200), ((0.99,), 2), (("primary", 0.99), 2)]
)
def test_phase_6_one_discount_is_the_baseline_bit_for_bit_over_200_updates(
    gammas: tuple[Any, ...], updates: int, caplog: pytest.LogCaptureFixture
) -> None:
    agent, baseline = make_agent(with_gammas(*gammas)), make_agent()
    assert caplog.messages[-1] == (
        "agent.multi_gamma is enabled, but no auxiliary discount stands beside the primary 0.99: "
        "this is the baseline."
    )
    assert all(record.levelno == logging.WARNING for record in caplog.records)
    assert agent.model.aux_value is None and agent.learner.auxiliary is None
    assert agent.metric_names == baseline.metric_names and agent.notes == ()
    assert agent.log_architecture() == baseline.log_architecture()
    for one in (agent, baseline):
        fill(one)
    assert agent.train(updates) == baseline.train(updates)
    assert_same(agent.state()[1], baseline.state()[1])
    assert agent.snapshots(1) == {} and agent.facts() == {}


def test_phase_6_off_builds_nothing_draws_nothing_and_says_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one line of the feature runs: each part of it would raise."""

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("the feature is off")

    for name in ("make_heads", "snapshot", "auxiliary_targets"):
        monkeypatch.setattr(f"forethought.agents.tdmpc2.discounts.{name}", never)
    monkeypatch.setattr(AuxiliaryValues, "__init__", never)
    monkeypatch.setattr(AuxiliaryLoss, "__call__", never)
    config = built(*presets.layers(["multi_gamma_a0"], None, "tdmpc2"))
    assert config == TDMPC2Config()
    agent = make_agent()
    fill(agent)
    metrics = agent.train(3)
    assert not any("aux" in name for name in (*metrics, *agent.metric_names, *weights(agent)))
    assert caplog.messages == []


# ---- phase 7: compile ----


def test_phase_7_the_c_kernels_learn_the_same_up_to_rounding() -> None:
    eager, native = agent_with(), agent_with(compile="kernels")
    for agent in (eager, native):
        fill(agent)
        agent.train(3)
    for (name, a), b in zip(eager.model.named_parameters(), native.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_phase_7_the_loss_is_one_graph_of_fixed_shapes() -> None:
    """No branch depends on data: traced at one batch, it gives the same numbers at another."""
    agent = agent_with()
    stir(agent)
    loss = agent.learner.auxiliary
    assert loss is not None

    def given(seed: int) -> list[Tensor]:
        g = torch.Generator().manual_seed(seed)
        shapes = (3, 8, 16), (3, 8), (3, 8), (3, 8)
        return [torch.rand(shape, generator=g).round(decimals=3) for shape in shapes]

    def scalar(*tensors: Tensor) -> Tensor:
        total, metrics = loss(*tensors)
        return torch.stack([total, *metrics.values()])

    compiled = torch.compile(scalar, backend="eager", fullgraph=True, dynamic=False)
    compiled(*given(1))
    with torch.compiler.set_stance("fail_on_recompile"):
        assert torch.equal(compiled(*given(2)), scalar(*given(2)))


# ---- checkpoints ----


@pytest.mark.parametrize("head", ["joint", "separate"])
def test_a_saved_agent_with_heads_goes_on_bit_for_bit(head: Any, tmp_path: Path) -> None:
    options = replace(ON, head=head)
    straight, saved = agent_with(options), agent_with(options)
    fresh = make_agent(replace(CONFIG, multi_gamma=options), seed=9)
    for agent in (straight, saved):
        fill(agent)
        agent.train(3)
    saved.save(tmp_path / "agent")
    fresh.load(tmp_path / "agent")
    straight.train(3)
    fresh.train(3)
    assert_same(straight.state()[1], fresh.state()[1])


def test_a_checkpoints_manifest_names_the_discounts(run: Path) -> None:
    folder = max((run / "checkpoints").glob("step-*"))
    meta = files.read_manifest(folder).meta
    assert meta["multi_gamma"] == {"gammas": [0.95, *AUX], "head": "joint"}


def test_heads_of_other_discounts_are_refused_in_one_sentence(tmp_path: Path) -> None:
    agent_with().save(tmp_path / "agent")
    make_agent().save(tmp_path / "plain")
    with pytest.raises(FileError) as caught:
        make_agent(with_gammas("primary", 0.97, 0.9)).load(tmp_path / "agent")
    assert str(caught.value) == (
        f"{tmp_path / 'agent'} was written with auxiliary discounts [0.97, 0.995], but this agent "
        "has [0.97, 0.9]: use the agent.multi_gamma that it was trained with."
    )
    with pytest.raises(FileError, match=r"auxiliary discounts \[0.97, 0.995\], but .* has none"):
        make_agent().load(tmp_path / "agent")
    with pytest.raises(FileError, match=r"with auxiliary discounts none, but this agent has"):
        agent_with().load(tmp_path / "plain")


# ---- the ablation's arithmetic ----


@pytest.fixture
def ablation(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    return importlib.import_module("multi_gamma_ablation")


def made(task: str, variant: str, seed: int, auc: float) -> dict[str, Any]:
    auxiliary = {} if variant == "a0" else {"g0.97": [[100, auc, 2.0], [200, 1.0, 1.0]]}
    about = {"task": task, "variant": variant, "seed": seed, "auxiliary": auxiliary}
    return about | {"auc": auc, "final_return": 2 * auc, "peak_memory_mb": 300.0 + seed}


def test_the_ablation_compares_seed_by_seed(ablation: Any) -> None:
    """Gains of 2, 4 and 6 on a mean of 100: mean 4, interval 4 +- 4.303 x 2 / sqrt(3) = 4.97."""
    base = [made("x", "a0", seed, auc) for seed, auc in ((1, 50), (2, 100), (3, 150))]
    other = [made("x", "a1", seed, auc) for seed, auc in ((3, 156), (1, 52), (2, 104))]
    report = ablation.compare(base + other)
    gain = report["x"]["a1"]["auc_gain_percent"]
    assert gain["each"] == pytest.approx([2, 4, 6])
    assert (gain["mean"], gain["low"], gain["high"]) == pytest.approx(
        (4, -0.9686, 8.9686), abs=1e-3
    )
    assert report["x"]["a1"]["final_return_minus_a0"]["each"] == [4, 8, 12]
    assert report["x"]["a0"]["auc"]["seed_std"] == 50
    assert "auc_gain_percent" not in report["x"]["a0"]
    assert report["x"]["a1"]["auxiliary_mean"]["g0.97"] == [[100, 104, 2.0], [200, 1.0, 1.0]]


@pytest.mark.parametrize(
    ("second_task", "percent", "met"),
    [(104.0, 15.0, True), (102.0, 10.0, False), (104.0, 15.1, False)],
)
def test_the_ablations_success_test_asks_for_two_tasks_and_a_low_cost(
    ablation: Any, second_task: float, percent: float, met: bool
) -> None:
    gained = {"x": 103.0, "y": second_task}
    runs = [made(task, "a0", seed, 100.0) for task in "xy" for seed in (1, 2)]
    runs += [made(task, "a4", seed, gained[task]) for task in "xy" for seed in (1, 2)]
    judged = ablation.verdict(ablation.compare(runs), {"a4": {"overhead_percent": percent}})
    assert judged["met"] is judged["variants"]["a4"]["met"] is met
    assert judged["sentence"].endswith("was met by a4." if met else "was met by none of them.")


def test_the_ablation_reads_errors_over_time_from_a_run(ablation: Any, run: Path) -> None:
    found = ablation.auxiliary_over_time(run)
    assert {gamma: [row[0] for row in rows] for gamma, rows in found.items()} == {
        "g0.97": [110, 220],
        "g0.995": [110, 220],
    }
    assert ablation.gammas_of("a0") == () and ablation.gammas_of("a3") == AUX
