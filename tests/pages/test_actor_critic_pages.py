"""The pages of SAC and TD3 have every option with its value, and every metric."""

from __future__ import annotations

from typing import Any

import pytest

from forethought import presets
from forethought.agents.registry import config_class
from forethought.agents.sac.update import METRICS as SAC_METRICS
from forethought.agents.td3.update import METRICS as TD3_METRICS
from forethought.config import build_run_config
from forethought.tracking import columns
from tests.pages.reading import DOCS, every_flag, first_names, shown, table

NAMES = {"sac": ("sac_sb3", "sac_cleanrl"), "td3": ("td3_sb3",)}
"""The agents, and the presets that have a column."""
NEVER_SHOWN = {"agent.entropy.alpha"}
"""In the text only: of a kind that no preset of the table has."""
BOTH = pytest.mark.parametrize("name", NAMES)


def run_of(name: str, *names: str) -> Any:
    layers = presets.layers(names, None, name)
    return build_run_config(name, "gym:Pendulum-v1", config_class(name), layers)


def value_of(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    config = list(config) if isinstance(config, tuple) else config
    return getattr(config, "kind", config)


def read(cell: str) -> Any:
    """What a cell shows; a list has commas of its own."""
    return presets.parse_scalar(cell) if cell.startswith("[") else shown(cell)


@BOTH
def test_hyper_parameters_on_the_page_are_those_of_the_presets(name: str) -> None:
    page = DOCS / "agents" / f"{name}.md"
    for key, default, _, *others, _ in table(page, "Hyper-parameters"):
        key = key.strip("`")
        assert value_of(run_of(name), key) == read(default), key
        for preset, cell in zip(NAMES[name], others):
            wanted = read(default if cell == "same" else cell)
            assert value_of(run_of(name, preset), key) == wanted, f"{preset} {key}"


@BOTH
def test_the_preset_for_mujoco_has_the_defaults_of_the_agent(name: str) -> None:
    assert run_of(name, f"{name}_mujoco").agent == run_of(name).agent
    assert run_of(name, f"{name}_mujoco").train.seed_agent_steps == value_of(
        run_of(name), "train.seed_agent_steps"
    )


@BOTH
def test_every_option_is_on_the_page(name: str) -> None:
    page = DOCS / "agents" / f"{name}.md"
    rows = {row[0].strip("`") for row in table(page, "Hyper-parameters")}
    missing = set(every_flag(config_class(name), "agent.")) - rows
    assert missing <= NEVER_SHOWN
    assert all(f"--{key}" in page.read_text(encoding="utf-8") for key in missing)


@pytest.mark.parametrize(("name", "metrics"), [("sac", SAC_METRICS), ("td3", TD3_METRICS)])
def test_every_metric_is_explained(name: str, metrics: tuple[str, ...]) -> None:
    own = set(columns.train_columns(metrics)) - set(columns.LEADING) - set(columns.TRAIN_TIMES)
    assert set(first_names(DOCS / "agents" / f"{name}.md", "Metrics")) == own
