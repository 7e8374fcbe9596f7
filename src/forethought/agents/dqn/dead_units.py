"""Units that answer to nothing any more: ReLUs that are 0 for every one of many observations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from forethought.agents.dqn.heads import CosineEmbedding, QNetwork, Stream
from forethought.agents.dqn.networks import Residual

LOOKED_AT = 256
"""Observations from replay that are shown to the network."""


@torch.no_grad()
def dead_share(network: QNetwork, obs: Tensor, tau: Tensor | None) -> float:
    """The share of units (channels, of convolutions) that a ReLU leaves at 0 for all of `obs`."""
    alive: list[Tensor] = []

    def look(module: nn.Module, given: Any, out: Tensor) -> None:
        rest = (0, 2, 3) if out.ndim == 4 else tuple(range(out.ndim - 1))
        alive.append((out > 0).any(rest))

    hooks = [module.register_forward_hook(look) for module in _before_relu(network)]
    try:
        network.head(network.trunk.layers(obs), None, tau)  # one by one, or no hook is called
    finally:
        for hook in hooks:
            hook.remove()
    assert len(alive) >= len(hooks), "a layer was computed without being called"
    return 1.0 - torch.cat(alive).float().mean().item()


def _before_relu(network: QNetwork) -> list[nn.Module]:
    """The ReLUs that are layers, and the layers that one follows."""
    found: list[nn.Module] = []
    for module in network.modules():
        if isinstance(module, nn.ReLU):
            found.append(module)
        elif isinstance(module, Stream):
            found.append(module.hidden)
        elif isinstance(module, Residual):
            found.append(module.first)
        elif isinstance(module, CosineEmbedding):
            found.append(module.linear)
    return found
