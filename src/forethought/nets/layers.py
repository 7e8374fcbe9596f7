"""Linear layers with LayerNorm and Mish or SimNorm, and the MLPs made of them (TD-MPC2, 3.1)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from forethought.nets.kernels import EPS, Kernels, TorchKernels

Activation = Literal["mish", "simnorm"]


class NormedLinear(nn.Linear):
    """Linear -> dropout -> LayerNorm -> activation.

    Dropout comes before the norm, as in the official code. Its mask is drawn outside and passed
    in, so that an update is a function of weights, batch and noise.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        activation: Activation = "mish",
        dropout: float = 0.0,
        simnorm_group: int = 8,
    ) -> None:
        super().__init__(inputs, outputs)
        self.norm = nn.LayerNorm(outputs, eps=EPS)
        self.activation = activation
        self.dropout = dropout
        self.simnorm_group = simnorm_group
        self.kernels: Kernels = TorchKernels()

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        return self.activate(F.linear(x, self.weight, self.bias), keep)

    def activate(self, y: Tensor, keep: Tensor | None = None) -> Tensor:
        """What follows the matrix product; planners that share a product call it directly."""
        norm = self.norm
        if self.activation == "simnorm":
            return self.kernels.norm_simnorm(y, norm.weight, norm.bias, self.simnorm_group)
        return self.kernels.norm_mish(y, norm.weight, norm.bias, keep, 1 / (1 - self.dropout))


class MLP(nn.Sequential):
    """Hidden layers with Mish; the last layer is plain, or ends in `activation` where given.

    Dropout, where asked for, acts on the first hidden layer only.
    """

    def __init__(
        self,
        inputs: int,
        hidden: list[int],
        outputs: int,
        activation: Activation | None = None,
        dropout: float = 0.0,
        simnorm_group: int = 8,
    ) -> None:
        layers: list[nn.Module] = []
        for i, units in enumerate(hidden):
            layers.append(NormedLinear(inputs, units, "mish", dropout if i == 0 else 0.0))
            inputs = units
        if activation is None:
            layers.append(nn.Linear(inputs, outputs))
        else:
            layers.append(NormedLinear(inputs, outputs, activation, simnorm_group=simnorm_group))
        super().__init__(*layers)

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        first, *rest = self
        x = first(x, keep) if keep is not None else first(x)
        for layer in rest:
            x = layer(x)
        return x

    def after_first(self, y: Tensor, keep: Tensor | None = None) -> Tensor:
        """Go on from the first layer's matrix product, for callers that share parts of it."""
        first, *rest = self
        assert isinstance(first, NormedLinear)
        x = first.activate(y, keep)
        for layer in rest:
            x = layer(x)
        return x


def use_kernels(model: nn.Module, kernels: Kernels) -> None:
    """Let every layer of the model use these activations."""
    for module in model.modules():
        if isinstance(module, NormedLinear):
            module.kernels = kernels


@contextmanager
def frozen(module: nn.Module) -> Iterator[None]:
    """Inside, gradients flow through the module but not into its parameters."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    for p in parameters:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in parameters:
            p.requires_grad_(True)
