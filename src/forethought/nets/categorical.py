"""A categorical policy over a table of actions, decided factor by factor (autoregressive).

    features h(z) -> factor 0 -> factor 1, knowing 0 -> factor 2, knowing 0 and 1 -> ...

What was decided gates the features: the logits of factor f are W_f (h * (1 + sum of the gates of
the choices so far)) + b_f. So choices generalise (a command for aircraft 3 is read from the same
rows as one for aircraft 4), and still all conditional distributions of a state are one product
with h: probability and entropy are exact over the whole table. One factor is a plain softmax.

The table's rows are the leaves of a tree of prefixes. A choice that leads to no row, or to illegal
rows only, has probability zero; every distribution is normalised over the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from forethought.maths import draw_index
from forethought.nets.layers import MLP


class CategoricalPolicy(MLP):
    """From latents [..., Z] to a distribution over the table's rows [N].

    `table` [N, F] holds the choice of each factor, -1 where a factor does not matter. A factor that
    matters in fewer rows is decided later; not to matter is a choice like the others.
    """

    def __init__(
        self, latent: int, hidden: list[int], table: NDArray[np.int64], choices: Sequence[int]
    ) -> None:
        matters = (table >= 0).sum(0)  # [F], in so many rows
        order = np.argsort(-matters, kind="stable")
        sizes = [choices[f] + int(matters[f] < len(table)) for f in order]
        super().__init__(latent, hidden, sum(sizes))
        self.sizes, self.offsets = sizes, np.cumsum([0, *sizes]).tolist()
        self.actions, self.factors = len(table), len(sizes)
        rows = np.where(table < 0, np.array(choices), table)[:, order]  # "none" is the last choice
        # Gates start at zero: at first the factors are decided independently.
        gates = nn.Parameter(torch.zeros(sum(sizes[:-1]), hidden[-1]))
        self.gates = gates if self.factors > 1 else None
        self.full = []
        """Of each factor: whether every choice leads on, whatever was decided."""
        node = np.zeros(len(rows), np.int64)  # the prefix of each row, by number
        for f, size in enumerate(sizes):
            child = node * size + rows[:, f]
            prefixes, first = np.unique(node, return_index=True)
            after = np.unique(child, return_inverse=True)[1]
            if f == self.factors - 1:
                after = np.arange(len(rows))
            children = np.full((len(prefixes), size), -1, np.int64)
            children.flat[child] = after
            branches = np.flatnonzero((children >= 0).sum(1) > 1)
            place = np.full(len(prefixes), -1, np.int64)
            place[branches] = np.arange(len(branches))
            slot = np.where(place[node] < 0, len(branches) * size, place[node] * size + rows[:, f])
            before = rows[first[branches], :f] + np.array(self.offsets[:f], np.int64)
            self._keep(f, child=child, children=children, slot=slot, before=before)
            self._keep(f, exists=(children >= 0)[branches])
            self.full.append(bool((children >= 0).all()))
            node = after

    def _keep(self, level: int, **arrays: NDArray[Any]) -> None:
        """Follows from the table, so no file holds it."""
        for name, array in arrays.items():
            self.register_buffer(f"{name}_{level}", torch.from_numpy(array), persistent=False)

    def _of(self, name: str, level: int) -> Tensor:
        kept: Tensor = getattr(self, f"{name}_{level}")
        return kept

    def features(self, z: Tensor) -> Tensor:
        """h(z), before the last layer."""
        for layer in list(self)[:-1]:
            z = layer(z)
        return z

    def _rows(self, level: int) -> tuple[Tensor, Tensor]:
        """The last layer's weight [n, H] and bias [n] for one factor."""
        last, part = self[-1], slice(self.offsets[level], self.offsets[level + 1])
        return last.weight[part], last.bias[part]  # type: ignore[index]

    def log_probs(self, z: Tensor, legal: Tensor | None = None) -> Tensor:
        """Of every row of the table: [..., N]; -inf where `legal` [..., N] says no."""
        h = self.features(z)
        total = h.new_zeros(*h.shape[:-1], self.actions)
        for level, size in enumerate(self.sizes):
            exists, slot = self._of("exists", level), self._of("slot", level)
            if not len(exists):
                continue  # this factor follows from those before it
            weight, bias = self._rows(level)
            if level > 0:
                assert self.gates is not None
                gate = 1 + self.gates[self._of("before", level)].sum(1, keepdim=True)
                weight, bias = (weight * gate).flatten(0, 1), bias.repeat(len(exists))
            logits = _grouped(F.linear(h, weight, bias), size)  # [..., nodes, n]
            open_ = exists
            if legal is not None:
                counted = _counted(legal, slot, exists.numel() + 1)[..., :-1] > 0
                open_ = _grouped(counted, size)
                # Below an illegal prefix nothing is open; its rows are ruled out at the end.
                open_ = open_ | (exists & ~open_.any(-1, keepdim=True))
            chosen = logits.masked_fill(~open_, -torch.inf).log_softmax(-1).flatten(-2)
            total = total + F.pad(chosen, (0, 1)).index_select(-1, slot)
        return total if legal is None else total.masked_fill(~legal, -torch.inf)

    def sample(self, z: Tensor, uniform: Tensor, legal: Tensor | None = None) -> Tensor:
        """Rows drawn with one uniform number per factor: [..., Z], [..., F] -> [...].

        Here and below, latents and masks broadcast: many draws from one state compute h(z) once.
        """
        h = self.features(z)
        walk = _Walk(self, h.expand(*uniform.shape[:-1], h.shape[-1]), legal)
        for level in range(self.factors):
            choice = draw_index(walk.logits(level).softmax(-1), uniform[..., level : level + 1])
            walk.go(level, choice.squeeze(-1))
        return walk.node

    def log_prob(self, z: Tensor, action: Tensor, legal: Tensor | None = None) -> Tensor:
        """Of given rows [...], without looking at the others."""
        h = self.features(z)
        walk = _Walk(self, h.expand(*action.shape, h.shape[-1]), legal)
        total = torch.zeros_like(action, dtype=walk.h.dtype)
        for level, size in enumerate(self.sizes):
            choice = self._of("child", level)[action] % size
            decided = walk.logits(level).log_softmax(-1)  # [..., n]
            total = total + decided.gather(-1, choice.unsqueeze(-1)).squeeze(-1)
            walk.go(level, choice)
        return total

    def likeliest(
        self, z: Tensor, count: int, legal: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Up to `count` rows of high probability, as a beam search finds them, and their
        log-probabilities: [..., count] both; -inf where there are fewer.

        It keeps the `count` best prefixes after each factor: with one factor these are the
        likeliest rows, with `count` at least the table's size all of them.
        """
        h = self.features(z).unsqueeze(-2)  # [..., 1, H]
        walk = _Walk(self, h, None if legal is None else legal.unsqueeze(-2))
        score = h.new_zeros(h.shape[:-1])  # [..., 1]
        for level, size in enumerate(self.sizes):
            grown = score.unsqueeze(-1) + walk.logits(level).log_softmax(-1)  # [..., kept, n]
            grown = grown.flatten(-2)
            score, best = grown.topk(min(count, grown.shape[-1]), dim=-1)
            kept = best.div(size, rounding_mode="floor")
            walk.keep(kept)
            walk.go(level, best % size)
        return walk.node, score


class _Walk:
    """Where some rows stand in the tree, and the features gated by what they have decided."""

    def __init__(self, policy: CategoricalPolicy, h: Tensor, legal: Tensor | None) -> None:
        self.policy, self.h, self.legal = policy, h, legal
        self.node = torch.zeros(h.shape[:-1], dtype=torch.int64, device=h.device)
        self.gate: Tensor | None = None

    def logits(self, level: int) -> Tensor:
        """Of the choices of the next factor: [..., n], -inf where none may be made."""
        policy, h = self.policy, self.h
        if self.gate is not None:
            h = h * (1 + self.gate)
        logits = F.linear(h, *policy._rows(level))
        if self.legal is None and policy.full[level]:
            return logits
        children = policy._of("children", level)  # [nodes, n]
        open_ = children[self.node] >= 0
        if self.legal is not None:
            counted = _counted(self.legal, policy._of("child", level), children.numel()) > 0
            counted = _grouped(counted, children.shape[-1]).expand(*self.node.shape, -1, -1)
            at = self.node[..., None, None].expand(*self.node.shape, 1, children.shape[-1])
            legal = counted.gather(-2, at).squeeze(-2)
            # A beam holds places that are no longer likely at all; they stay numbers.
            open_ = legal | (open_ & ~legal.any(-1, keepdim=True))
        return logits.masked_fill(~open_, -torch.inf)

    def go(self, level: int, choice: Tensor) -> None:
        """One factor on."""
        policy = self.policy
        self.node = policy._of("children", level)[self.node, choice].clamp(min=0)
        if level + 1 < policy.factors:
            assert policy.gates is not None
            more = F.embedding(choice + policy.offsets[level], policy.gates)
            self.gate = more if self.gate is None else self.gate + more

    def keep(self, kept: Tensor) -> None:
        """Go on from some of the rows [..., k], of which several may be the same one."""
        self.node = self.node.gather(-1, kept)
        if self.gate is not None:
            at = kept.unsqueeze(-1).expand(*kept.shape, self.gate.shape[-1])
            self.gate = self.gate.gather(-2, at)


def _counted(legal: Tensor, place: Tensor, places: int) -> Tensor:
    """How many legal rows each place has: [..., N] -> [..., places]."""
    zeros = torch.zeros(*legal.shape[:-1], places, device=legal.device)
    return zeros.index_add_(-1, place, legal.float())


def _grouped(x: Tensor, size: int) -> Tensor:
    """[..., nodes * n] -> [..., nodes, n]"""
    return x.view(*x.shape[:-1], -1, size)
