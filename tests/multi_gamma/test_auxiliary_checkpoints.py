"""Checkpoints of agents with auxiliary discounts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forethought import files
from forethought.files import FileError
from tests.multi_gamma.agents import (
    AUX,
    ON,
    agent_with,
    assert_same,
    with_gammas,
)
from tests.tdmpc2_agents import CONFIG, fill, make_agent


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
