"""Small agents with auxiliary discounts, shared by the tests of all phases."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forethought.agents.tdmpc2 import TDMPC2Config
from forethought.agents.tdmpc2.agent import TDMPC2
from forethought.agents.tdmpc2.gammas import MultiGammaConfig
from forethought.agents.tdmpc2.update import TensorBatch
from forethought.config import build_run_config
from tests.tdmpc2_agents import CONFIG, make_agent, make_batch

TASK = "gym:Pendulum-v1"
AUX = (0.97, 0.995)
ON = MultiGammaConfig(enabled=True, gammas=("primary", *AUX))
PAGE = Path(__file__).parents[2] / "docs" / "agents" / "tdmpc2.md"


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


def built(*layers: dict[str, Any]) -> TDMPC2Config:
    agent = build_run_config("tdmpc2", TASK, TDMPC2Config, layers).agent
    assert isinstance(agent, TDMPC2Config)
    return agent
