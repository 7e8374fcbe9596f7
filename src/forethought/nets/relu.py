"""Plain MLPs with ReLU: one, or several equal ones that are computed together.

Small networks on a CPU spend much of their time between the products, so the layers are kept in a
plain list (finding a parameter of a module by its name costs more than some of the products), and
`trace` and `learn` are a forward and a backward pass by hand: without a graph, into memory that is
there already, and with every gradient made as its weight lies, which autograd would have to copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Layer = tuple[nn.Parameter, nn.Parameter]
REGISTER, WIDE = 16, 256
"""Numbers that a processor multiplies at once, and how many inputs hide a few that are left."""


@dataclass(frozen=True)
class Trace:
    """A forward pass, as far as the way back needs it."""

    out: Tensor  # [..., B, out], of this pass alone
    inputs: list[Tensor]  # [..., B, units] of every layer; the next pass overwrites the hidden ones


class _Layers(nn.Module):
    """Weights and biases of linear layers, in the order in which they are used."""

    affine: Callable[..., Tensor]
    """bias + x @ weight"""
    product: Callable[..., Tensor]

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(weights)
        self.biases = nn.ParameterList(biases)
        self.layers: list[Layer] = list(zip(self.weights, self.biases, strict=True))
        self._hidden: list[Tensor] = []  # room for the values of hidden layers, and on the way
        self._slopes: list[Tensor] = []  # back for the slopes of the loss in them

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """On some devices a move makes new parameters."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.layers = list(zip(self.weights, self.biases, strict=True))
        self._hidden, self._slopes = [], []
        return self

    def spread(self, x: Tensor) -> Tensor:
        """The inputs [B, in], as the first layer takes them."""
        return x

    @torch.no_grad()
    def trace(self, x: Tensor) -> Trace:
        """The forward pass [B, in] -> [..., B, out], with what `learn` needs."""
        *hidden, (weight, bias) = self.layers
        inputs = [self.spread(x)]
        for (w, b), room in zip(hidden, self._room(len(x)), strict=True):
            inputs.append(self.affine(b, inputs[-1], w.mT, out=room).relu_())
        return Trace(self.affine(bias, inputs[-1], weight.mT), inputs)

    @torch.no_grad()
    def learn(self, trace: Trace, slope: Tensor) -> None:
        """Leaves the gradients of all parameters in their `grad`, given the slope of a loss in the
        outputs [..., B, out] of the last trace. What was there is overwritten, not added to."""
        for k in reversed(range(len(self.layers))):
            (weight, bias), x = self.layers[k], trace.inputs[k]
            self._weigh(slope, x, _gradient(weight))
            torch.sum(slope, -2, keepdim=bias.ndim > 1, out=_gradient(bias))
            if k > 0:
                below = self._slopes[k - 1]
                self.product(slope, weight, out=below)
                # Through the ReLU: nothing where it gave 0.
                slope = torch.ops.aten.threshold_backward.grad_input(below, x, 0, grad_input=below)

    def _weigh(self, slope: Tensor, x: Tensor, gradient: Tensor) -> None:
        """gradient <- slope^T x. A product with few columns that fill no registers (a first layer
        of 23 inputs) takes up to five times as long as the same one with few rows."""
        inputs = x.shape[-1]
        if inputs % REGISTER == 0 or inputs >= WIDE:
            self.product(slope.mT, x, out=gradient)
        else:
            gradient.copy_(self.product(x.mT, slope).mT)

    def _room(self, batch: int) -> list[Tensor]:
        """Memory for the hidden layers of so many inputs."""
        if not self._hidden or self._hidden[0].shape[-2] != batch:
            shapes = [(*w.shape[:-2], batch, w.shape[-2]) for w, _ in self.layers[:-1]]
            like = self.layers[0][0]
            self._hidden, self._slopes = ([like.new_empty(s) for s in shapes] for _ in range(2))
        return self._hidden


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.empty_like(parameter)
    return parameter.grad


class ReluMLP(_Layers):
    """Linear layers with ReLU between them; the last one is plain."""

    affine = staticmethod(torch.addmm)
    product = staticmethod(torch.mm)

    def __init__(self, inputs: int, hidden: Sequence[int], outputs: int) -> None:
        shapes = list(pairwise([inputs, *hidden, outputs]))
        super().__init__(
            [torch.empty(after, before) for before, after in shapes],
            [torch.empty(after) for _, after in shapes],
        )

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        *hidden, (weight, bias) = self.layers
        for w, b in hidden:
            x = F.linear(x, w, b).relu_()
        return F.linear(x, weight, bias)


class MLPEnsemble(_Layers):
    """Several such MLPs of one shape. Each layer is one batched product for all of them."""

    affine = staticmethod(torch.baddbmm)
    product = staticmethod(torch.bmm)

    def __init__(self, count: int, inputs: int, hidden: Sequence[int], outputs: int) -> None:
        shapes = list(pairwise([inputs, *hidden, outputs]))
        # [N, out, in], as F.linear has it: both products of the backward pass then read their
        # operands as they lie in memory.
        super().__init__(
            [torch.empty(count, after, before) for before, after in shapes],
            [torch.empty(count, 1, after) for _, after in shapes],
        )

    def spread(self, x: Tensor) -> Tensor:
        """All members see the same: [B, in] -> [N, B, in], without a copy."""
        return x.expand(len(self.layers[0][0]), *x.shape)

    def forward(self, x: Tensor, count: int | None = None) -> Tensor:
        """[B, in] -> [N, B, out]; with `count`, of the first so many members."""
        *hidden, (weight, bias) = self._first(count)
        x = x.expand(len(weight), *x.shape)
        for w, b in hidden:
            x = torch.baddbmm(b, x, w.mT).relu_()
        return torch.baddbmm(bias, x, weight.mT)

    @torch.no_grad()
    def least(self, x: Tensor, slopes: int, count: int | None = None) -> tuple[Tensor, Tensor]:
        """[B, in] -> [B]: the least output of all members, or of the first `count`; and its slope
        in the last `slopes` inputs [B, slopes].

        Only the member that gave it has a slope there, so the way back takes the rows of each
        member apart: of two critics that is half of the products. It takes
        the room of an earlier `trace`, which must have been learned from by then.
        """
        *hidden, (weight, bias) = self._first(count)
        members = len(weight)
        inputs = [x.expand(members, *x.shape)]
        for (w, b), room in zip(hidden, self._room(len(x)), strict=True):
            inputs.append(torch.baddbmm(b, inputs[-1], w.mT, out=room[:members]).relu_())
        least, member = torch.baddbmm(bias, inputs[-1], weight.mT).squeeze(-1).min(0)  # [B]
        found = x.new_empty(len(x), slopes)
        for n in range(members):
            rows = (member == n).nonzero().squeeze(-1) if members > 1 else None  # [R]
            slope = weight[n].expand(len(x) if rows is None else len(rows), -1)  # [R, units]
            for k in reversed(range(len(hidden))):
                slope = torch.ops.aten.threshold_backward(slope, _rows(inputs[k + 1][n], rows), 0)
                into = hidden[k][0][n]  # [units, units before]
                slope = slope @ (into if k > 0 else into[:, -slopes:])
            if not hidden:
                slope = slope[:, -slopes:]
            found = slope if rows is None else found.index_copy_(0, rows, slope)
        return least, found

    def _first(self, count: int | None) -> Sequence[tuple[Tensor, Tensor]]:
        if count is None:
            return self.layers
        return [(weight[:count], bias[:count]) for weight, bias in self.layers]


def _rows(x: Tensor, rows: Tensor | None) -> Tensor:
    """These rows, or all of them without a copy."""
    return x if rows is None else x.index_select(0, rows)
