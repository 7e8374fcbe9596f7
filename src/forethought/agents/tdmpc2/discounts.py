"""Auxiliary values at several discounts: heads, targets, loss, snapshots.

Each auxiliary discount gamma_i has a linear head on the imagined latents, which predicts

    y_i = r + gamma_i (1 - terminated) V(x'),

where V(x') is the very number that the primary target bootstraps from. The heads are trained with
the model, and their gradient shapes encoder and dynamics; neither policy nor planner ever reads
them. Without auxiliary discounts nothing in here is made, and nothing draws a random number.

Shapes: T horizon, B batch, Z latent, K bins, n auxiliary discounts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from forethought.agents.tdmpc2.gammas import MultiGammaConfig
from forethought.files import FileError
from forethought.maths import TwoHot, mean_of, std_of

if TYPE_CHECKING:
    from forethought.agents.tdmpc2.config import TDMPC2Config
    from forethought.agents.tdmpc2.model import WorldModel

FEW = 4
"""Slices that a short snapshot shows at most."""
METRICS = ("aux_value_ce", "aux_value_mean", "aux_value_std")
"""Of each auxiliary discount: cross-entropy, and mean and spread of the decoded predictions."""


def label(gamma: float) -> str:
    """g0.97"""
    return f"g{gamma}"


def metric_names(gammas: tuple[float, ...]) -> tuple[str, ...]:
    """What an update with these auxiliary discounts reports; nothing without any."""
    own = tuple(f"{name}/{label(gamma)}" for name in METRICS for gamma in gammas)
    return (*own, "aux_value_ce/mean") if gammas else ()


class AuxiliaryValues(nn.Module):
    """Linear value heads on the latent, one for each auxiliary discount.

    All weights start at zero, as those of the reward's and Q's last layers do: every other
    network begins with the same numbers as without the heads.
    """

    def __init__(self, latent: int, bins: int, gammas: tuple[float, ...], head: str) -> None:
        super().__init__()
        self.gammas, self.bins, self.head = gammas, bins, head
        widths = [len(gammas) * bins] if head == "joint" else [bins] * len(gammas)
        self.heads = nn.ModuleList(
            nn.utils.skip_init(nn.Linear, latent, width)  # type: ignore[no-untyped-call]
            for width in widths
        )
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, z: Tensor) -> Tensor:
        """[..., Z] -> logits [..., n, K]."""
        if self.head == "joint":
            flat: Tensor = self.heads[0](z)  # [..., n * K]
            return flat.view(*z.shape[:-1], len(self.gammas), self.bins)
        return torch.stack([head(z) for head in self.heads], dim=-2)

    def facts(self, primary: float) -> dict[str, Any]:
        """For a checkpoint's manifest."""
        return {"gammas": [primary, *self.gammas], "head": self.head}

    def describe(self, primary: float) -> str:
        """One sentence for the start of a run."""
        count = sum(parameter.numel() for parameter in self.parameters())
        word = "discount" if len(self.gammas) == 1 else "discounts"
        listed = ", ".join(map(str, self.gammas))
        return (
            f"Auxiliary values at {word} {listed} beside the primary {primary}: {self.head} "
            f"{'heads' if self.head == 'separate' else 'head'}, {count:,} parameters."
        )


def same_heads(there: Mapping[str, Any], here: Mapping[str, Any]) -> bool:
    """Whether two runs learn auxiliary values of the same discounts in heads of the same kind; the
    primary discount may differ, as tasks do."""
    own, other = (facts.get("multi_gamma") or {"gammas": []} for facts in (here, there))
    return bool((own["gammas"][1:], own.get("head")) == (other["gammas"][1:], other.get("head")))


def make_heads(config: TDMPC2Config, gammas: tuple[float, ...]) -> AuxiliaryValues:
    """The heads of an agent with these auxiliary discounts."""
    model = config.model
    return AuxiliaryValues(model.resolved.latent_dim, model.bins, gammas, config.multi_gamma.head)


def check_same_gammas(path: Path, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Refuse a file whose auxiliary heads learned other discounts than this agent's."""
    saved, own = (facts.get("multi_gamma", {}).get("gammas", [])[1:] for facts in (there, here))
    if saved != own:
        raise FileError(
            f"{path} was written with auxiliary discounts {saved or 'none'}, but this agent has "
            f"{own or 'none'}: use the agent.multi_gamma that it was trained with."
        )


def auxiliary_targets(reward: Tensor, terminated: Tensor, value: Tensor, gammas: Tensor) -> Tensor:
    """y_i = r + gamma_i (1 - terminated) V(x'): three of [T, B] and gammas [n] -> [T, B, n]."""
    bootstrap = ((1 - terminated) * value).unsqueeze(-1)  # [T, B, 1]
    return reward.unsqueeze(-1) + gammas * bootstrap


@dataclass(frozen=True)
class AuxiliaryLoss:
    """The auxiliary part of the model's loss, and what an update reports of it."""

    heads: AuxiliaryValues
    config: MultiGammaConfig
    gammas: Tensor  # [n]
    rho: Tensor  # [T], rho^t
    two_hot: TwoHot
    decode: Callable[[Tensor], Tensor]

    @classmethod
    def of(cls, model: WorldModel, rho: Tensor) -> AuxiliaryLoss | None:
        """None for a model without auxiliary heads; `rho` holds its powers from 0 to T."""
        heads = model.aux_value
        if heads is None:
            return None
        gammas = torch.tensor(heads.gammas, dtype=rho.dtype, device=rho.device)
        options = model.config.multi_gamma
        return cls(heads, options, gammas, rho[:-1], model.two_hot, model.decode)

    def __call__(
        self,
        z: Tensor,
        reward: Tensor,
        terminated: Tensor,
        value: Tensor,
        present: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """loss_weight * sum_i (1/T) sum_t rho^t CE_i at z_0 .. z_{T-1} [T, B, Z], and the metrics.

        `value` is V(x_{t+1}) [T, B] of the primary target, without gradient; `present` [T, B] says
        which steps count, as in the primary loss.
        """
        logits = self.heads(z)  # [T, B, n, K]
        y = auxiliary_targets(reward, terminated, value, self.gammas)  # [T, B, n]
        ce = self.over_time(self.two_hot.cross_entropy(logits, y), present)  # [n]
        with torch.no_grad():
            predicted = self.decode(logits).unbind(-1)  # n of [T, B]
            means, stds = ([of(x, present) for x in predicted] for of in (mean_of, std_of))
            values = [*ce.unbind(), *means, *stds]
            metrics = dict(zip(metric_names(self.heads.gammas), [*values, ce.mean()], strict=True))
        return self.config.loss_weight * ce.sum(), metrics

    def over_time(self, loss: Tensor, present: Tensor | None = None) -> Tensor:
        """[T, B, n] -> [n]: mean over the batch, then (1/T) sum of rho^t."""
        loss = loss if present is None else loss * present.unsqueeze(-1)
        return (self.rho[: len(loss)].unsqueeze(-1) * loss.mean(1)).mean(0)


def snapshot(
    loss: AuxiliaryLoss,
    z: Tensor,
    reward: Tensor,
    terminated: Tensor,
    value: Tensor,
    present: Tensor | None = None,
) -> dict[str, Any]:
    """What the heads predict at z [T, B, Z] and what they should; JSON-able, bounded.

    Statistics are over all slices. Of the first few slices it shows targets and predictions of
    every step (those that are `present` [T, B] alone) and the predicted distribution of the first;
    with `debug_logging` of more slices, and what these numbers are made of.
    """
    config, heads, slices = loss.config, loss.heads, z.shape[1]
    logits = heads(z)  # [T, B, n, K]
    logits = logits.float() if logits.dtype.itemsize < 4 else logits
    bootstrap = (1 - terminated) * value  # [T, B]
    y = auxiliary_targets(reward, terminated, value, loss.gammas)  # [T, B, n]
    ce = loss.two_hot.cross_entropy(logits, y)  # [T, B, n]
    predicted = loss.decode(logits)  # [T, B, n]
    number = min(config.log_num_examples, slices if config.debug_logging else FEW, slices)
    counting = torch.ones_like(reward) if present is None else present
    steps = [slice(int(count)) for count in counting[:, :number].sum(0).tolist()]
    examples: list[dict[str, Any]] = [
        {"reward": reward[own, b].tolist()} for b, own in enumerate(steps)
    ]
    if config.debug_logging:
        for b, own in enumerate(steps):
            examples[b]["bootstrap"] = bootstrap[own, b].tolist()
    per_gamma = {}
    for i, gamma in enumerate(heads.gammas):
        per_gamma[label(gamma)] = _statistics(predicted[..., i], y[..., i], present)
        per_gamma[label(gamma)]["ce"] = loss.over_time(ce, present)[i].item()
        if config.debug_logging:
            per_step = ((ce[..., i] * counting).sum(1) / counting.sum(1)).tolist()
            per_gamma[label(gamma)]["ce_per_step"] = [
                x if math.isfinite(x) else None for x in per_step
            ]
        for b, example in enumerate(examples):
            own = steps[b]
            at = (predicted[own, b, i], y[own, b, i], logits[own, b, i].softmax(-1))
            example[label(gamma)] = _example(*at)
            if config.debug_logging:
                example[label(gamma)] |= _details(loss.two_hot, *at[1:])
    return {
        "tier": "debug" if config.debug_logging else "standard",
        "gammas": list(heads.gammas),
        "head": heads.head,
        "loss_weight": config.loss_weight,
        "slices": slices,
        "per_gamma": per_gamma,
        "examples": examples,
    }


def _statistics(predicted: Tensor, y: Tensor, present: Tensor | None) -> dict[str, Any]:
    """Of one discount over all steps and slices [T, B]."""
    error = predicted - y
    return {
        "mae": mean_of(error.abs(), present).item(),
        "rmse": mean_of(error**2, present).sqrt().item(),
        "prediction_mean": mean_of(predicted, present).item(),
        "prediction_std": std_of(predicted, present).item(),
        "target_mean": mean_of(y, present).item(),
    }


def _example(predicted: Tensor, y: Tensor, share: Tensor) -> dict[str, Any]:
    """One slice's steps [T] at one discount; of the distributions [T, K] the first."""
    return {
        "target": y.tolist(),
        "prediction": predicted.tolist(),
        "abs_error": (predicted - y).abs().tolist(),
        "distribution": [round(p, 6) for p in share[0].tolist()],
    }


def _details(two_hot: TwoHot, y: Tensor, share: Tensor) -> dict[str, Any]:
    """The bins that a step's target lies in, and the two likeliest bins of its prediction."""
    lower, above = two_hot.position(y)  # [T] both
    top = share.topk(2, dim=-1)  # [T, 2]
    return {
        "target_bins": [[k, (k + 1) % two_hot.bins] for k in lower.tolist()],
        "target_weights": [[1 - w, w] for w in above.tolist()],
        "top_bins": top.indices.tolist(),
        "top_probabilities": top.values.tolist(),
    }
