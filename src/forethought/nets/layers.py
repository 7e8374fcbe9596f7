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
        if self.kernels.adds_bias:
            return self.activate(F.linear(x, self.weight), keep, pre=self.bias)
        return self.activate(F.linear(x, self.weight, self.bias), keep)

    def activate(
        self, y: Tensor, keep: Tensor | None = None, *, pre: Tensor | None = None
    ) -> Tensor:
        """What follows the matrix product, to which the bias `pre` is added first if given."""
        weight, bias = self.norm.weight, self.norm.bias
        if self.activation == "simnorm":
            return self.kernels.norm_simnorm(y, pre, weight, bias, self.simnorm_group)
        return self.kernels.norm_mish(y, pre, weight, bias, keep, 1 / (1 - self.dropout))


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
        first = self[0]
        return self.after_hidden(first(x) if keep is None else first(x, keep))

    def after_hidden(self, x: Tensor) -> Tensor:
        """Go on from the first layer's output."""
        for layer in list(self)[1:]:
            x = layer(x)
        return x


def use_kernels(model: nn.Module, kernels: Kernels) -> None:
    """Let every part of the model that has kernels use these."""
    for module in model.modules():
        if hasattr(module, "kernels"):
            module.kernels = kernels  # type: ignore[assignment]


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
