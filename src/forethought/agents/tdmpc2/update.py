"""One gradient step of TD-MPC2, in the paper's order (equations 3 to 6, appendix).

row            0      1      2      3          a slice of T + 1 = 4 rows
observation    x_0    x_1    x_2    x_3
action                a_0    a_1    a_2        a_t leads from x_t to x_{t+1}
reward                r_0    r_1    r_2        r_t is received on arriving at x_{t+1}
encoded        z_0    z~_1   z~_2   z~_3       targets, no gradient
imagined       z_0 -> z_1 -> z_2 -> z_3        from z_0 alone: errors compound as in planning
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from forethought.agents.tdmpc2.config import NStep, TDLambda, TDMPC2Config
from forethought.agents.tdmpc2.discounts import AuxiliaryLoss
from forethought.agents.tdmpc2.model import WorldModel
from forethought.agents.tdmpc2.noise import UpdateNoise
from forethought.maths import (
    RunningScale,
    lambda_returns,
    mean_of,
    n_step_returns,
    one_step_returns,
)
from forethought.nets.optimisers import clip_gradients
from forethought.spaces.nested import Tree, index

Metrics = dict[str, float]

METRICS = (
    "total_loss",
    "consistency_loss",
    "reward_loss",
    "value_loss",
    "policy_loss",
    "grad_norm",
    "policy_grad_norm",
    "td_target_mean",
    "td_error_abs",
    "q_mean",
    "q_max",
    "q_scale",
    "policy_entropy",
    "lr",
    "nonfinite",
)
"""Keys of every update's metrics; episodic tasks add `termination_loss`, auxiliary discounts those
of `discounts.metric_names`."""


@dataclass(frozen=True)
class TensorBatch:
    """A batch of slices on the agent's device."""

    obs: Tree  # [T+1, B, O], or leaves by path [T+1, B, ...]
    action: Tensor  # [T, B, A], or rows of the table of actions [T, B]
    reward: Tensor  # [T, B]
    terminated: Tensor  # [T, B], 0 or 1; truncation is not in here: it never cuts the bootstrap
    legal: Tensor | None = None  # [T+1, B, N] bool, which actions may be taken; None: all
    task: Tensor | None = None  # [B], which of several tasks each slice is of
    present: Tensor | None = None  # [T+1, B], 1 until the episode has terminated; None: all count

    @property
    def steps(self) -> Tensor | None:
        """Which steps count [T, B]: those that begin in a state that is present."""
        return None if self.present is None else self.present[:-1]


def until_the_end(terminated: Tensor) -> Tensor:
    """[T, B] -> [T+1, B]: 1 for the states before an episode has terminated, 0 from then on."""
    going_on = torch.cat([torch.ones_like(terminated[:1]), 1 - terminated])
    return going_on.cumprod(0)


class Learner:
    """The pieces that an update changes: weights, optimisers, the running scale of Q."""

    def __init__(
        self,
        model: WorldModel,
        config: TDMPC2Config,
        gamma: float,
        optimiser: torch.optim.Optimizer,
        policy_optimiser: torch.optim.Optimizer,
    ) -> None:
        weight = next(model.parameters())
        self.model, self.config, self.gamma = model, config, gamma
        self.optimiser, self.policy_optimiser = optimiser, policy_optimiser
        self.scale = RunningScale(config.tau, weight.dtype, weight.device)
        self.rho = torch.tensor(
            [config.rho**t for t in range(config.horizon + 1)],
            dtype=weight.dtype,
            device=weight.device,
        )
        self.auxiliary = AuxiliaryLoss.of(model, self.rho)
        policy = set(model.policy.parameters())
        target = set(model.target_q.parameters())
        self.model_parameters = [p for p in model.parameters() if p not in policy | target]

    def update(self, batch: TensorBatch, noise: UpdateNoise) -> Metrics:
        """Targets, rollout, losses, step; then the policy; then the target networks.

        A step whose loss or gradient is not finite is left out and reported as `nonfinite`: the
        model's, and with it all that follows; or the policy's alone.
        """
        next_z, y, value = self.targets(batch, noise)
        losses, zs = self.model_losses(batch, next_z, y, value, noise)
        total = losses["total_loss"]
        self.optimiser.zero_grad(set_to_none=True)
        total.backward()  # type: ignore[no-untyped-call]
        norm = clip_gradients(self.model_parameters, self.config.grad_clip_norm)
        metrics = {name: loss.item() for name, loss in losses.items()}
        metrics |= {"grad_norm": norm, "td_target_mean": mean_of(y, batch.steps).item()}
        # The targets too: two-hot clamps an infinite one into a finite loss.
        if not all(
            math.isfinite(metrics[k]) for k in ("total_loss", "grad_norm", "td_target_mean")
        ):
            return metrics | {"nonfinite": 1.0}
        self.optimiser.step()
        if self.model.tasks is not None:
            self.model.tasks.renormalise()

        metrics |= self.update_policy(zs, noise, batch.legal, batch.task, batch.present)
        self.update_targets()
        return metrics

    @torch.no_grad()
    def targets(self, batch: TensorBatch, noise: UpdateNoise) -> tuple[Tensor, Tensor, Tensor]:
        """The latents to predict [T, B, Z], the values to predict [T, B] and V(x_{t+1}) [T, B]."""
        model, config = self.model, self.config
        after = slice(1, None)
        shift = noise.shift_at(after)
        next_z = model.encode(index(batch.obs, after), shift, task=batch.task)  # [T, B, Z]
        legal = None if batch.legal is None else batch.legal[1:]
        mask = legal if batch.task is None else model.mask_of(batch.task)
        value = model.actions.next_value(model, next_z, noise, mask)  # [T, B]
        returns = (batch.reward, batch.terminated, value, self.gamma_of(batch))
        match config.returns:
            case NStep(n):
                y = n_step_returns(*returns, n)
            case TDLambda(lam):
                y = lambda_returns(*returns, lam)
            case _:
                y = one_step_returns(*returns)
        return next_z, y, value

    def gamma_of(self, batch: TensorBatch) -> float | Tensor:
        """The discount, or that of each slice's task [B]."""
        if self.model.tasks is None or batch.task is None:
            return self.gamma
        return self.model.tasks.discount(batch.task, batch.reward.dtype)

    def model_losses(
        self, batch: TensorBatch, next_z: Tensor, y: Tensor, value: Tensor, noise: UpdateNoise
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Consistency, reward, value and termination losses, and the imagined latents.

        Auxiliary values, where there are any, bootstrap from the primary one's own `value`.
        """
        model, config, two_hot = self.model, self.config, self.model.two_hot
        z = model.encode(index(batch.obs, 0), noise.shift_at(0), task=batch.task)  # [B, Z]
        latents = [z]
        for a in batch.action:
            z = model.next(z, a)
            latents.append(z)
        before, after = torch.stack(latents[:-1]), torch.stack(latents[1:])  # [T, B, Z]

        steps = batch.steps
        difference = model.state_of(after) - model.state_of(next_z)
        consistency = self.over_time((difference**2).mean(-1), steps)
        reward_logits = model.reward(before, batch.action)  # [T, B, K]
        reward = self.over_time(two_hot.cross_entropy(reward_logits, batch.reward), steps)
        flat_z, flat_a = before.flatten(0, 1), batch.action.flatten(0, 1)
        q_logits = model.q(flat_z, flat_a, keep=noise.value_keep)
        q_logits = q_logits.unflatten(1, y.shape)  # [num_q, T, B, K]
        ce = two_hot.cross_entropy(q_logits, y.expand(q_logits.shape[:-1]))  # [num_q, T, B]
        value_loss = self.over_time(ce.mean(0), steps)
        total = (
            config.consistency_coef * consistency
            + config.reward_coef * reward
            + config.value_coef * value_loss
        )
        losses = {"consistency_loss": consistency, "reward_loss": reward, "value_loss": value_loss}
        if model.termination is not None:
            predicted = model.termination(after).squeeze(-1)  # [T, B]
            ending = mean_of(
                F.binary_cross_entropy_with_logits(predicted, batch.terminated, reduction="none"),
                steps,
            )
            losses["termination_loss"] = ending
            total = total + config.termination_coef * ending
        if self.auxiliary is not None:
            aux, seen = self.auxiliary(before, batch.reward, batch.terminated, value, steps)
            losses |= seen
            total = total + aux
        with torch.no_grad():
            losses["td_error_abs"] = mean_of((model.decode(q_logits[0]) - y).abs(), steps)
        return losses | {"total_loss": total}, torch.stack([z.detach() for z in latents])

    def over_time(self, loss: Tensor, present: Tensor | None = None) -> Tensor:
        """[T, B] -> scalar: mean over the batch, then (1/T) sum of rho^t. What is not present is 0:
        a step weighs the same whatever else is in its slice."""
        loss = loss if present is None else loss * present
        return (self.rho[: len(loss)] * loss.mean(1)).mean()

    def update_policy(
        self,
        zs: Tensor,
        noise: UpdateNoise,
        legal: Tensor | None = None,
        task: Tensor | None = None,
        present: Tensor | None = None,
    ) -> Metrics:
        """Maximise Q and entropy at the imagined latents [T+1, B, Z] of the old weights.

        The embeddings of several tasks are the model's: the policy's loss does not move them.
        """
        model, config = self.model, self.config
        with torch.no_grad():
            zs = model.with_task(zs, task)
        mask = legal if task is None else model.mask_of(task)
        q, entropy, scaled_entropy = model.actions.policy_terms(model, zs, noise, mask)  # [T+1, B]
        scale = self.scale.after(q[0])  # updated before it is used
        gain = config.entropy_coef * scaled_entropy + q / scale
        loss = self.over_time(-gain, present)
        self.policy_optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = clip_gradients(model.policy.parameters(), config.grad_clip_norm)
        metrics = {
            "policy_loss": loss.item(),
            "policy_grad_norm": norm,
            "policy_entropy": mean_of(entropy, present).item(),
            "q_mean": mean_of(q, present).item(),
            "q_max": (q if present is None else q[present != 0]).max().item(),
            "q_scale": scale.item(),
            "lr": self.policy_optimiser.param_groups[0]["lr"],
        }
        finite = math.isfinite(metrics["policy_loss"]) and math.isfinite(norm)
        if finite:
            self.scale.value = scale
            self.policy_optimiser.step()
        return metrics | {"nonfinite": 0.0 if finite else 1.0}

    @torch.no_grad()
    def update_targets(self) -> None:
        """target <- lerp(target, online, tau)."""
        target: list[Tensor] = list(self.model.target_q.parameters())
        online: list[Tensor] = list(self.model.q.parameters())
        torch._foreach_lerp_(target, online, self.config.tau)
