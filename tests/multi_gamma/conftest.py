"""A run that the tests of several phases look at."""

from __future__ import annotations

from pathlib import Path

import pytest

from forethought import presets
from forethought.agents.tdmpc2 import TDMPC2Config
from forethought.config import build_run_config
from forethought.training.loop import train_run
from tests.multi_gamma.agents import (
    TASK,
)


@pytest.fixture(scope="package")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run of the preset a3, 0.95 being the discount of 50 decisions."""
    layers = presets.layers(["debug", "multi_gamma_a3"], None, "tdmpc2")
    small = {"steps": 220, "eval": {"every_agent_steps": 110}, "track": {"console": False}}
    config = build_run_config("tdmpc2", TASK, TDMPC2Config, [*layers, small])
    return train_run(config, tmp_path_factory.mktemp("multi") / "run").path
