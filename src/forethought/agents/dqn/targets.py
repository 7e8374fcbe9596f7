"""The formulas of the family as plain functions of tensors, in any floating dtype.

B transitions, A actions, N atoms or quantiles. R is the sum of up to n discounted rewards, and
`discount` is gamma^m, or 0 where the future is cut: y = R + discount * (value of x_{t+m}).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def greedy(q: Tensor, legal: Tensor | None) -> Tensor:
    """The best legal action: q [B, A] -> [B]."""
    return (q if legal is None else q.masked_fill(~legal, -torch.inf)).argmax(-1)


def taken(out: Tensor, action: Tensor) -> Tensor:
    """Of every action's values [B, A, N] those of one action [B]: [B, N]."""
    return out.take_along_dim(action[:, None, None], 1).squeeze(1)


def huber(error: Tensor, kappa: float = 1.0) -> Tensor:
    """Half the square up to kappa, then a line; its slope is the error clipped to +-kappa."""
    size = error.abs()
    return torch.where(size <= kappa, 0.5 * error**2, kappa * (size - 0.5 * kappa))


def project(probabilities: Tensor, reward: Tensor, discount: Tensor, support: Tensor) -> Tensor:
    """C51, algorithm 1: where the masses of the shifted returns lie on the support, [B, N].

    Each return r + discount z_j, kept within the support, shares its mass between its neighbours
    by nearness. Written as 1 - |distance| in units of the spacing, one that falls on an atom
    keeps all of its mass there: no case of equal neighbours, in which mass could be lost.
    """
    low, high = support[0], support[-1]
    spacing = (high - low) / (len(support) - 1)
    shifted = (reward[:, None] + discount[:, None] * support).clamp(low, high)  # [B, N]
    distance = (shifted[:, None, :] - support[None, :, None]).abs() / spacing  # [B, N, N]
    return ((1 - distance).clamp(min=0) * probabilities[:, None, :]).sum(-1)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """-sum_i m_i log p_i: [B, N] -> [B]."""
    return -(target * F.log_softmax(logits, -1)).sum(-1)


def midpoints(quantiles: int, like: Tensor) -> Tensor:
    """(2i + 1) / 2N for QR-DQN: [N]."""
    i = torch.arange(quantiles, dtype=like.dtype, device=like.device)
    return (2 * i + 1) / (2 * quantiles)


def quantile_huber(quantiles: Tensor, target: Tensor, tau: Tensor, kappa: float) -> Tensor:
    """sum_i mean_j |tau_i - 1{u_ij < 0}| huber(u_ij) / kappa with u_ij = target_j - quantile_i.

    quantiles [B, N] at the fractions tau [N] or [B, N], target [B, N'] -> [B].
    """
    u = target[:, None, :] - quantiles[:, :, None]  # [B, N, N']
    weight = (tau[..., None] - (u < 0).to(u.dtype)).abs()
    return (weight * huber(u, kappa) / kappa).mean(-1).sum(-1)


def soft_policy(q: Tensor, temperature: float, legal: Tensor | None) -> tuple[Tensor, Tensor]:
    """pi and tau log pi of softmax(q / tau) over the legal actions: [B, A] both.

    An illegal action has pi = 0, and 0 where its logarithm would be infinite: it never counts.
    """
    masked = q if legal is None else q.masked_fill(~legal, -torch.inf)
    log_pi = F.log_softmax(masked / temperature, -1)
    scaled = temperature * log_pi
    return log_pi.exp(), scaled if legal is None else scaled.masked_fill(~legal, 0.0)


def munchausen_bonus(
    q: Tensor, action: Tensor, alpha: float, temperature: float, clip: float, legal: Tensor | None
) -> Tensor:
    """alpha [tau log pi(a | s)] kept within [l_0, 0]: [B]."""
    _, scaled = soft_policy(q, temperature, legal)
    return alpha * scaled.gather(1, action[:, None]).squeeze(1).clamp(clip, 0.0)


def soft_value(out: Tensor, q: Tensor, temperature: float, legal: Tensor | None) -> Tensor:
    """sum_a pi(a) (out_a - tau log pi(a)), for each of the N values: [B, A, N] -> [B, N]."""
    pi, scaled = soft_policy(q, temperature, legal)
    return (pi[..., None] * (out - scaled[..., None])).sum(1)
