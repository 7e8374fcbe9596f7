"""The agents by name. Holds names only, so that listing them imports neither them nor torch."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from forethought.config import unknown

if TYPE_CHECKING:
    from forethought.agents.base import Agent


@dataclass(frozen=True)
class AgentEntry:
    """Where an agent and its options live, as `module:Class`."""

    about: str
    agent: str
    config: str


AGENTS: dict[str, AgentEntry] = {
    "tdmpc2": AgentEntry(
        about="learns a latent world model and plans in it; continuous or discrete actions",
        agent="forethought.agents.tdmpc2.agent:TDMPC2",
        config="forethought.agents.tdmpc2.config:TDMPC2Config",
    ),
    "dqn": AgentEntry(
        about="learns what actions are worth; Nature DQN to Rainbow and beyond, each part a toggle",
        agent="forethought.agents.dqn.agent:DQN",
        config="forethought.agents.dqn.config:DQNConfig",
    ),
    "sac": AgentEntry(
        about="soft actor-critic: a stochastic policy paid for reward and entropy; continuous",
        agent="forethought.agents.sac.agent:SAC",
        config="forethought.agents.sac.config:SACConfig",
    ),
    "td3": AgentEntry(
        about="twin delayed DDPG: a deterministic policy with smoothed targets; continuous",
        agent="forethought.agents.td3.agent:TD3",
        config="forethought.agents.td3.config:TD3Config",
    ),
}


def entry(name: str) -> AgentEntry:
    """The agent's entry, or an error that names the nearest one."""
    if name not in AGENTS:
        raise unknown("agent", name, list(AGENTS), "'forethought list agents' shows all.")
    return AGENTS[name]


def config_class(name: str) -> type[Any]:
    """The dataclass of the agent's options; imports no torch."""
    found: type[Any] = _resolve(entry(name).config)
    return found


def agent_class(name: str) -> type[Agent]:
    """The agent itself; imports torch."""
    found: type[Agent] = _resolve(entry(name).agent)
    return found


def _resolve(path: str) -> Any:
    module, _, attribute = path.partition(":")
    return getattr(import_module(module), attribute)
