"""Formulas that several agents share: symlog, two-hot, returns, running scales.

Everything works for any floating dtype and any leading shape, so that the tests can compare in
float64 with slow references.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


def symlog(x: Tensor) -> Tensor:
    """sign(x) ln(1 + |x|): squashes large values, linear near zero."""
    return torch.sign(x) * torch.log1p(torch.abs(x))


def symexp(x: Tensor) -> Tensor:
    """The inverse of symlog."""
    return torch.sign(x) * torch.expm1(torch.abs(x))


@dataclass(frozen=True)
class TwoHot:
    """A scalar as a distribution over evenly spaced bins in symlog space (TD-MPC2, appendix)."""

    bins: int = 101
    low: float = -10.0
    high: float = 10.0

    @property
    def width(self) -> float:
        return (self.high - self.low) / (self.bins - 1)

    def position(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Lower bin and the weight of the bin above it."""
        place = (symlog(x).clamp(self.low, self.high) - self.low) / self.width
        lower = place.floor()
        # The clamp matters for NaN only: it is no index, and shows in the weight instead.
        return lower.long().clamp(0, self.bins - 1), place - lower

    def encode(self, x: Tensor) -> Tensor:
        """[...] -> [..., bins]; the weights sum to one. The fast losses never build this."""
        lower, above = self.position(x)
        upper = (lower + 1) % self.bins  # at the top bin `above` is 0, so the wrap adds nothing
        out = torch.zeros(*x.shape, self.bins, dtype=x.dtype, device=x.device)
        out.scatter_add_(-1, lower.unsqueeze(-1), (1 - above).unsqueeze(-1))
        return out.scatter_add_(-1, upper.unsqueeze(-1), above.unsqueeze(-1))

    def decode(self, logits: Tensor) -> Tensor:
        """[..., bins] -> [...]: the expectation in symlog space, then symexp.

        Never in half precision, whose steps around 500 are as wide as 4: logits of bf16 networks
        are decoded in float32, and the sum is no matrix product, which autocast would narrow.
        """
        logits = logits.float() if logits.dtype.itemsize < 4 else logits
        centres = _centres(self, logits.dtype, logits.device)
        return symexp((torch.softmax(logits, dim=-1) * centres).sum(-1))

    def cross_entropy(self, logits: Tensor, target: Tensor) -> Tensor:
        """-sum two_hot(target) log_softmax(logits), by reading the two bins that have weight."""
        logits = logits.float() if logits.dtype.itemsize < 4 else logits
        lower, above = self.position(target)
        both = torch.stack((lower, (lower + 1) % self.bins), dim=-1)  # [..., 2]
        chosen = logits.gather(-1, both)  # [..., 2]
        at_target = chosen[..., 0] * (1 - above) + chosen[..., 1] * above
        return torch.logsumexp(logits, dim=-1) - at_target


@lru_cache(maxsize=32)
def _centres(two_hot: TwoHot, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # cached: it must also serve a later backward pass
        return torch.linspace(two_hot.low, two_hot.high, two_hot.bins, dtype=dtype, device=device)


def one_step_returns(
    reward: Tensor, terminated: Tensor, value: Tensor, gamma: float | Tensor
) -> Tensor:
    """y_t = r_t + gamma (1 - terminated_t) V(x_{t+1}); all [T, B], `value[t]` is V(x_{t+1}).

    Here and below, gamma is one number or [B], one for each slice.
    """
    return reward + gamma * (1 - terminated) * value


def n_step_returns(
    reward: Tensor, terminated: Tensor, value: Tensor, gamma: float | Tensor, n: int
) -> Tensor:
    """The sum of up to n rewards and the bootstrap after them, within the slice.

    Near the slice's end fewer than n rewards are left; a termination inside ends the sum with
    its own reward and no bootstrap.
    """
    horizon = reward.shape[0]
    y = torch.empty_like(reward)
    for t in range(horizon):
        total = torch.zeros_like(reward[t])
        alive = torch.ones_like(reward[t])
        last = min(t + n, horizon)
        for k in range(t, last):
            total = total + gamma ** (k - t) * alive * reward[k]
            alive = alive * (1 - terminated[k])
        y[t] = total + gamma ** (last - t) * alive * value[last - 1]
    return y


def lambda_returns(
    reward: Tensor, terminated: Tensor, value: Tensor, gamma: float | Tensor, lam: float
) -> Tensor:
    """TD(lambda): y_t = r_t + gamma (1 - term_t) ((1 - lam) V_{t+1} + lam y_{t+1})."""
    y = torch.empty_like(reward)
    ahead = value[-1]
    for t in reversed(range(reward.shape[0])):
        ahead = (1 - lam) * value[t] + lam * ahead
        ahead = reward[t] + gamma * (1 - terminated[t]) * ahead
        y[t] = ahead
    return y


def mean_of(x: Tensor, present: Tensor | None) -> Tensor:
    """The mean of what is present."""
    return x.mean() if present is None else (x * present).sum() / present.sum()


def std_of(x: Tensor, present: Tensor | None) -> Tensor:
    """The population standard deviation of what is present."""
    return mean_of((x - mean_of(x, present)) ** 2, present).sqrt()


def percentile_range(x: Tensor, low: float = 0.05, high: float = 0.95) -> Tensor:
    """The distance between two percentiles, linearly interpolated, over all entries."""
    ends = torch.quantile(x.flatten(), torch.tensor((low, high), dtype=x.dtype, device=x.device))
    return ends[1] - ends[0]


class RunningScale:
    """A slow average of the spread of Q, so that the policy's loss has one size in every task."""

    def __init__(self, tau: float, dtype: torch.dtype, device: torch.device) -> None:
        self.tau = tau
        self.value = torch.ones((), dtype=dtype, device=device)

    def after(self, q: Tensor) -> Tensor:
        """lerp(S, max(p95 - p5, 1), tau): the next value, for the caller to keep if finite."""
        return torch.lerp(self.value, percentile_range(q.detach()).clamp(min=1), self.tau)


def discount_for(
    episode_length: int, denominator: float = 5.0, low: float = 0.95, high: float = 0.995
) -> float:
    """TD-MPC2's heuristic: longer episodes look further ahead. 500 decisions give 0.99."""
    fraction = episode_length / denominator
    return min(max((fraction - 1) / fraction, low), high)


def draw_index(probability: Tensor, uniform: Tensor) -> Tensor:
    """Indices drawn by inverting the cumulative distribution: [..., n], [..., m] -> [..., m].

    One uniform number in [0, 1) per draw, where the Gumbel trick takes n; what has probability
    zero is never drawn. The probabilities need not sum to one.
    """
    cumulative = probability.cumsum(-1)
    target = (uniform * cumulative[..., -1:]).contiguous()
    return torch.searchsorted(cumulative, target, right=True)
