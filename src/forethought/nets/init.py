"""Initialisation of networks."""

from __future__ import annotations

import torch
from torch import nn

from forethought.nets.relu import MLPEnsemble, ReluMLP


def trunc_normal_linears(
    model: nn.Module, generator: torch.Generator | None, std: float = 0.02
) -> None:
    """Every linear weight ~ N(0, std) cut at +-2 (100 std: in effect not at all), biases zero.

    The whole ensemble of Q functions included: the official code missed it from 2024-11 to
    2026-07, after its published results.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=std, generator=generator)
            nn.init.zeros_(module.bias)


def uniform_convolutions(model: nn.Module, generator: torch.Generator | None) -> None:
    """Weights and biases of convolutions ~ U(-b, b), b = 1 / sqrt(inputs of one output): PyTorch's
    own rule, but drawn from the generator."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            bound = module.weight[0].numel() ** -0.5
            nn.init.uniform_(module.weight, -bound, bound, generator=generator)
            assert module.bias is not None
            nn.init.uniform_(module.bias, -bound, bound, generator=generator)


def uniform_linears(model: nn.Module, generator: torch.Generator | None) -> None:
    """Weights and biases of plain MLPs ~ U(-b, b), b = 1 / sqrt(inputs): PyTorch's own rule, but
    drawn from the generator, and every member of an ensemble for itself."""
    for module in model.modules():
        if isinstance(module, ReluMLP | MLPEnsemble):
            for weight, bias in module.layers:
                bound = weight.shape[-1] ** -0.5
                nn.init.uniform_(weight, -bound, bound, generator=generator)
                nn.init.uniform_(bias, -bound, bound, generator=generator)


def zero_last_weight(mlp: nn.Sequential) -> None:
    """The head starts by predicting the same distribution for every input."""
    last = mlp[-1]
    assert isinstance(last, nn.Linear)
    nn.init.zeros_(last.weight)
