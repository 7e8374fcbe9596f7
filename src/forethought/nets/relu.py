"""Plain MLPs with ReLU: one, or several equal ones that are computed together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


def relu_mlp(inputs: int, hidden: Sequence[int], outputs: int) -> nn.Sequential:
    """Linear layers with ReLU between them; the last one is plain."""
    layers: list[nn.Module] = []
    for before, after in pairwise([inputs, *hidden]):
        layers += [nn.Linear(before, after), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Linear([inputs, *hidden][-1], outputs))


class MLPEnsemble(nn.Module):
    """Several MLPs of one shape. Each layer is one batched product for all of them."""

    def __init__(self, count: int, inputs: int, hidden: Sequence[int], outputs: int) -> None:
        super().__init__()
        shapes = list(pairwise([inputs, *hidden, outputs]))
        # [N, out, in], as nn.Linear has it: both products of the backward pass then read their
        # operands as they lie in memory.
        self.weights = nn.ParameterList(torch.empty(count, after, to) for to, after in shapes)
        self.biases = nn.ParameterList(torch.empty(count, 1, after) for _, after in shapes)

    def forward(self, x: Tensor, count: int | None = None) -> Tensor:
        """[B, in] -> [N, B, out]; with `count`, of the first so many members."""
        last = len(self.weights) - 1
        x = x.expand(count or len(self.weights[0]), *x.shape)
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases)):
            if count is not None:
                weight, bias = weight[:count], bias[:count]
            x = torch.baddbmm(bias, x, weight.mT)
            if i < last:
                x = x.relu_()
        return x
