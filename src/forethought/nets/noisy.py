"""Noisy linear layers with factorised Gaussian noise (Fortunato et al., 2018, section 3).

Noise is drawn outside and passed in. With the factors e_in [p] and e_out [q] of a layer

    y = (mu_w + sigma_w * (e_out e_in^T)) x + mu_b + sigma_b * e_out
      = mu_w x + mu_b + e_out * (sigma_w (e_in * x) + sigma_b)

and the second form never builds the noisy matrix, so that each row of a batch may have noise of
its own: environments that act together explore independently.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LayerNoise = tuple[Tensor, Tensor]
"""The factors e_in [..., p] and e_out [..., q] of one layer, f already applied."""
NetNoise = Sequence[LayerNoise]
"""Those of a network's noisy layers, in the order of `noisy_layers`."""


class NoisyLinear(nn.Module):
    """mu ~ U(-1/sqrt(p), 1/sqrt(p)), sigma = sigma_0 / sqrt(p), for p inputs."""

    def __init__(
        self, inputs: int, outputs: int, sigma_0: float, generator: torch.Generator | None
    ) -> None:
        super().__init__()
        self.inputs, self.outputs = inputs, outputs
        bound = inputs**-0.5
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs))
        for mu in (self.weight, self.bias):
            nn.init.uniform_(mu, -bound, bound, generator=generator)
        self.weight_sigma = nn.Parameter(torch.full((outputs, inputs), sigma_0 * bound))
        self.bias_sigma = nn.Parameter(torch.full((outputs,), sigma_0 * bound))

    def forward(self, x: Tensor, noise: LayerNoise | None) -> Tensor:
        """Without noise, the layer of the means."""
        y = F.linear(x, self.weight, self.bias)
        if noise is None:
            return y
        e_in, e_out = noise
        return y + e_out * F.linear(e_in * x, self.weight_sigma, self.bias_sigma)


def noisy_layers(network: nn.Module) -> list[NoisyLinear]:
    """The noisy layers of a network, in the order in which noise is drawn and used."""
    return [module for module in network.modules() if isinstance(module, NoisyLinear)]


def draw_noise(
    layers: Iterable[NoisyLinear], generator: torch.Generator, rows: int | None = None
) -> list[LayerNoise]:
    """Fresh factors for every layer; with `rows`, independent ones for each row of a batch."""
    leading = () if rows is None else (rows,)
    return [
        (_factor(generator, *leading, layer.inputs), _factor(generator, *leading, layer.outputs))
        for layer in layers
    ]


def _factor(generator: torch.Generator, *shape: int) -> Tensor:
    """f(e) = sign(e) sqrt(|e|) of standard normal e."""
    e = torch.randn(shape, generator=generator, device=generator.device)
    return e.sign() * e.abs().sqrt()
