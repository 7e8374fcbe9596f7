"""Acting: epsilon-greedy on the expected return, with noisy layers where there are any.

Without exploration it is greedy; what an evaluation adds to that is the evaluation's to say.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forethought.agents.dqn.config import IQN, DQNConfig, FactorisedNoise, LinearEpsilon, NoEpsilon
from forethought.agents.dqn.heads import QNetwork
from forethought.agents.dqn.targets import greedy
from forethought.nets.noisy import draw_noise
from forethought.replay.stacks import FrameStacker


@dataclass
class ActState:
    """What one caller's acting depends on, besides the weights."""

    choices: np.random.Generator
    """Draws random actions, and whether there is one."""
    generator: torch.Generator
    """Draws noise and fractions."""
    frames: FrameStacker | None = None
    decisions: int = 0
    """Exploring decisions so far: the clock of epsilon. Random play before learning is not made
    with this state, so the clock starts when the warm-up ends."""
    epsilon: float | None = None
    """Of the last decision."""


def epsilon_at(config: LinearEpsilon | NoEpsilon, decisions: int) -> float:
    """The probability of a random action after so many decisions of the agent."""
    if isinstance(config, NoEpsilon):
        return 0.0
    off = config.off_after_agent_steps
    if off is not None and decisions >= off:
        return 0.0
    progress = decisions / config.decay_agent_steps
    if progress >= 1.0:
        return config.end  # exactly, without the rounding of the sum below
    return config.start + (config.end - config.start) * progress


def choose(
    network: QNetwork,
    config: DQNConfig,
    obs: Tensor,
    state: ActState,
    explore: bool,
    legal: NDArray[np.bool_] | None,
) -> NDArray[np.int64]:
    """One action per environment: [E]. Counts the decisions if they explore."""
    count = len(obs)
    epsilon = epsilon_at(config.exploration, state.decisions) if explore else 0.0
    state.epsilon = epsilon
    state.decisions += count if explore else 0
    at_random = np.zeros(count, np.bool_)
    random = np.zeros(count, np.int64)
    if epsilon > 0:
        at_random = state.choices.random(count) < epsilon
        draws = state.choices.random((count, network.actions))
        # The largest of independent uniforms lies on each legal action equally often.
        random = (draws if legal is None else np.where(legal, draws, -1.0)).argmax(1)
    if at_random.all():
        return random  # nothing would look at the values
    best = _best(network, config, obs, state, explore, legal)
    return np.where(at_random, random, best)


@torch.inference_mode()
def _best(
    network: QNetwork,
    config: DQNConfig,
    obs: Tensor,
    state: ActState,
    explore: bool,
    legal: NDArray[np.bool_] | None,
) -> NDArray[np.int64]:
    noise, tau, rows = None, None, len(obs)
    kind, noisy = config.distribution, config.noisy
    if isinstance(noisy, FactorisedNoise) and (explore or noisy.in_evaluation):
        noise = draw_noise(network.noisy_layers, state.generator, rows)
    if isinstance(kind, IQN):
        device = state.generator.device
        tau = torch.rand(rows, kind.policy_taus, generator=state.generator, device=device)
    q = network.expected(network(obs, noise, tau))  # [E, A]
    allowed = None if legal is None else torch.from_numpy(legal).to(q.device)
    chosen: NDArray[np.int64] = greedy(q, allowed).cpu().numpy()
    return chosen
