"""A convolution divided by its largest singular value (Miyato et al., 2018)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FIRST_ITERATIONS = 15
"""Of the power method, when a layer is made: afterwards one per update keeps up with the weight."""


class SpectralConv2d(nn.Conv2d):
    """W / sigma(W), where W is seen as a matrix [outputs, inputs x kernel].

    sigma = u^T W v is followed by the power method. Its vectors are buffers, saved with the
    weights; one iteration is made in each forward pass that has a gradient. Acting and targets
    have none, so how often an agent acts never changes what it learns.
    """

    left: Tensor
    right: Tensor

    def __init__(self, inputs: int, outputs: int, kernel: int, padding: int) -> None:
        super().__init__(inputs, outputs, kernel, padding=padding)
        self.register_buffer("left", torch.ones(outputs))
        self.register_buffer("right", torch.ones(self.weight[0].numel()))

    def settle(self, generator: torch.Generator | None) -> None:
        """Begin anew for a weight that was just drawn."""
        self.left.copy_(torch.randn(self.left.shape, generator=generator))
        self.iterate(FIRST_ITERATIONS)

    @torch.no_grad()
    def iterate(self, times: int = 1) -> None:
        """Steps of the power method."""
        matrix = self.weight.flatten(1)
        for _ in range(times):
            self.right.copy_(F.normalize(matrix.T @ self.left, dim=0))
            self.left.copy_(F.normalize(matrix @ self.right, dim=0))

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and self.weight.requires_grad:
            self.iterate()
        # Clones: the buffers change in place at the next update, the graph must keep these.
        sigma = self.left.clone() @ (self.weight.flatten(1) @ self.right.clone())
        return F.conv2d(x, self.weight / sigma, self.bias, padding=self.padding)
