"""Seed 003, phase 1: configuration."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from forethought import presets
from forethought.agents.tdmpc2 import TDMPC2Config
from forethought.agents.tdmpc2 import agent as agent_module
from forethought.agents.tdmpc2.gammas import MultiGammaConfig
from forethought.config import ConfigError, to_dict
from forethought.presets import flags
from tests.multi_gamma.agents import (
    ON,
    built,
    with_gammas,
)
from tests.tdmpc2_agents import CONFIG, make_agent, make_spec


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
            "agent.multi_gamma.loss_weight is 0.0, but must be above 0 and finite (enabled false "
            "turns it off).",
        ),
        (
            {"gammas": ("primary", 0.97), "loss_weight": math.inf},
            "agent.multi_gamma.loss_weight is inf, but must be above 0 and finite (enabled false "
            "turns it off).",
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
