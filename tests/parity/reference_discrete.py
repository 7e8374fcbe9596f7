"""TD-MPC2 with discrete actions, written slowly from the formulas: one state, one row at a time.

Networks take actions as one-hot vectors here, joined to the latent; what the fast code looks up,
shares or leaves out is computed in full.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import reference_tdmpc2 as slow
from .reference_tdmpc2 import Params, ReferenceSettings


@dataclass(frozen=True)
class Table:
    """rows[i][f] is the choice of factor f (in the order of decision) in action i."""

    rows: list[tuple[int, ...]]
    sizes: list[int]
    one_hot: Tensor  # [N, A]
    min_probability: float = 0.05
    warm: float = 0.5


def features(params: Params, z: Tensor) -> Tensor:
    h = slow.normed_linear(params, "policy.0", z, slow.mish)
    return slow.normed_linear(params, "policy.1", h, slow.mish)


def conditional(
    params: Params, h: Tensor, prefix: tuple[int, ...], open_rows: list[int], table: Table
) -> dict[int, Tensor]:
    """Probabilities of the next factor's choices, given a prefix, among the open rows."""
    level = len(prefix)
    gate = torch.zeros_like(h)
    for f, choice in enumerate(prefix):
        gate = gate + params["policy.gates"][sum(table.sizes[:f]) + choice]
    offset = sum(table.sizes[:level])
    possible = sorted({table.rows[i][level] for i in open_rows})
    logits = torch.stack(
        [
            params["policy.2.weight"][offset + c] @ (h * (1 + gate))
            + params["policy.2.bias"][offset + c]
            for c in possible
        ]
    )
    return dict(zip(possible, torch.exp(slow.log_softmax(logits)), strict=True))


def log_probs(params: Params, z: Tensor, legal: list[bool], table: Table) -> Tensor:
    """[Z] -> [N]; -inf where an action is not legal."""
    h = features(params, z)
    found = []
    for i, row in enumerate(table.rows):
        open_rows = [j for j in range(len(table.rows)) if legal[j]]
        total = torch.zeros((), dtype=z.dtype)
        for level in range(len(table.sizes)):
            if i not in open_rows:
                total = total - torch.inf
                break
            total = total + torch.log(
                conditional(params, h, row[:level], open_rows, table)[row[level]]
            )
            open_rows = [j for j in open_rows if table.rows[j][level] == row[level]]
        found.append(total)
    return torch.stack(found)


def sample(params: Params, z: Tensor, uniform: Tensor, legal: list[bool], table: Table) -> int:
    """One number per factor: the first choice whose cumulative probability exceeds it."""
    h = features(params, z)
    open_rows = [j for j in range(len(table.rows)) if legal[j]]
    prefix: tuple[int, ...] = ()
    for level in range(len(table.sizes)):
        probability = torch.zeros(table.sizes[level], dtype=z.dtype)
        for choice, p in conditional(params, h, prefix, open_rows, table).items():
            probability[choice] = p
        prefix = (*prefix, pick(probability, float(uniform[level])))
        open_rows = [j for j in open_rows if table.rows[j][level] == prefix[level]]
    (row,) = open_rows
    return row


def q_of_all(
    params: Params, z: Tensor, heads: Tensor, name: str, settings: ReferenceSettings, table: Table,
    dropout: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """[heads, N] for one state [Z]; dropout [heads, H]."""
    return torch.stack(
        [
            torch.stack(
                [
                    slow.decode(
                        slow.q_logits(
                            params,
                            f"{name}.{int(h)}",
                            z,
                            a,
                            None if dropout is None else dropout[i],
                        ),
                        settings,
                    )
                    for a in table.one_hot
                ]
            )
            for i, h in enumerate(heads)
        ]
    )


def next_value(
    params: Params, z: Tensor, legal: list[bool], uniform: Tensor, heads: Tensor, q_target: str,
    settings: ReferenceSettings, table: Table,
) -> Tensor:  # fmt: skip
    q = q_of_all(params, z, heads, "target_q", settings, table)
    least = torch.minimum(q[0], q[1])
    if q_target == "max":
        return torch.stack([least[i] for i in range(len(legal)) if legal[i]]).max()
    if q_target == "policy":
        return least[sample(params, z, uniform, legal, table)]
    p = torch.exp(log_probs(params, z, legal, table))
    return sum((p[i] * least[i] for i in range(len(legal)) if legal[i]), torch.zeros(()))


def policy_loss(
    params: Params, zs: Tensor, legal: Tensor, scale: Tensor, noise: dict[str, Tensor],
    settings: ReferenceSettings, table: Table,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The loss, the new scale and the mean entropy. Q is a number; only probabilities move."""
    qs, entropies = [], []
    for t in range(len(zs)):
        for b in range(zs.shape[1]):
            log_p = log_probs(params, zs[t, b], legal[t, b].tolist(), table)
            dropout = noise["policy_dropout"][:, t, b]
            heads = noise["policy_heads"]
            with torch.no_grad():
                q = q_of_all(params, zs[t, b], heads, "q", settings, table, dropout).mean(0)
            allowed = [i for i in range(len(table.rows)) if legal[t, b, i]]
            qs.append(sum(torch.exp(log_p[i]) * q[i] for i in allowed))
            entropies.append(-sum(torch.exp(log_p[i]) * log_p[i] for i in allowed))
    q = torch.stack(qs).view(zs.shape[:2])  # type: ignore[arg-type]
    entropy = torch.stack(entropies).view(zs.shape[:2])  # type: ignore[arg-type]
    new_scale = slow.running_scale(scale, q[0].detach(), settings.tau)
    loss = torch.zeros((), dtype=zs.dtype)
    for t in range(len(zs)):
        gain = settings.entropy_coef * entropy[t] + q[t] / new_scale
        loss = loss + settings.rho**t * -gain.mean() / len(zs)
    return loss, new_scale, entropy.detach().mean()


def update(
    params: Params, scale: Tensor, batch: dict[str, Tensor], noise: dict[str, Tensor],
    settings: ReferenceSettings, table: Table, q_target: str,
) -> tuple[Params, Tensor, dict[str, Tensor]]:  # fmt: skip
    """The first update of a run (Adam's moments are zero); batch has `legal` and rows `index`."""
    state = slow.new_optimiser_state(params)
    batch = {**batch, "action": table.one_hot[batch["index"]]}
    steps, size = batch["reward"].shape
    with torch.no_grad():
        next_z = torch.stack(
            [slow.encode(params, batch["obs"][t + 1], settings) for t in range(steps)]
        )
        values = torch.zeros(steps, size, dtype=next_z.dtype)
        for t in range(steps):
            for b in range(size):
                values[t, b] = next_value(
                    params, next_z[t, b], batch["legal"][t + 1, b].tolist(),
                    noise["target_policy"][t, b], noise["target_heads"], q_target, settings, table,
                )  # fmt: skip
        y = slow.td_targets(batch["reward"], batch["terminated"], values, settings)

    leaves = slow.leaves_of(params, "model")
    losses, zs = slow.model_losses({**params, **leaves}, batch, next_z, y, noise, settings)
    gradients, _ = slow.clip_by_global_norm(
        slow.gradients_of(losses["total_loss"], leaves), settings.grad_clip_norm
    )

    def rate(name: str) -> float:
        return settings.lr * (settings.enc_lr_scale if name.startswith("encoder.") else 1.0)

    params, _ = slow.adam(params, gradients, state["model"], rate, eps=1e-8)
    leaves = slow.leaves_of(params, "policy")
    loss, scale, entropy = policy_loss(
        {**params, **leaves}, zs.detach(), batch["legal"], scale, noise, settings, table
    )
    gradients, _ = slow.clip_by_global_norm(
        slow.gradients_of(loss, leaves), settings.grad_clip_norm
    )
    params, _ = slow.adam(params, gradients, state["policy"], lambda name: settings.lr, eps=1e-5)
    for name in params:
        if name.startswith("target_q."):
            online = params[name.removeprefix("target_")]
            params[name] = params[name] + settings.tau * (online - params[name])
    metrics = {"total_loss": losses["total_loss"].detach(), "td_target_mean": y.mean()}
    metrics |= {"policy_loss": loss.detach(), "policy_entropy": entropy}
    return params, scale, metrics


# ---------------------------------------------------------------- the planner


def pick(probability: Tensor, uniform: float) -> int:
    """The first action whose cumulative probability exceeds `uniform`."""
    total = 0.0
    for a, p in enumerate(probability.tolist()):
        total += p
        if total > uniform and p > 0:
            return a
    raise AssertionError("the probabilities do not sum to one")


def sequence_value(
    params: Params, z: Tensor, sequence: list[int], heads: Tensor, uniform: Tensor,
    settings: ReferenceSettings, table: Table,
) -> Tensor:  # fmt: skip
    total, alive = torch.zeros((), dtype=z.dtype), 1.0
    for t, index in enumerate(sequence):
        a = table.one_hot[index]
        reward = slow.decode(slow.reward_logits(params, z, a), settings)
        total = total + settings.gamma**t * alive * reward
        z = slow.dynamics(params, z, a, settings)
        if settings.episodic and torch.sigmoid(slow.termination_logit(params, z)) > 0.5:
            alive = 0.0
    everything = [True] * len(table.rows)
    a = table.one_hot[sample(params, z, uniform, everything, table)]
    values = [slow.decode(slow.q_logits(params, f"q.{int(h)}", z, a), settings) for h in heads]
    return total + settings.gamma ** len(sequence) * alive * (values[0] + values[1]) / 2


def plan_one(
    params: Params, obs: Tensor, last: Tensor, first: bool, legal: list[bool],
    noise: dict[str, Tensor], settings: ReferenceSettings, table: Table, explore: bool,
) -> dict[str, Tensor]:  # fmt: skip
    """One environment: last [T, N]; noise policy [T, P, F], samples [I, T, S], heads [I, 2],
    bootstrap [I, S + P, F], explore [1]."""
    horizon, count = last.shape
    z0 = slow.encode(params, obs, settings)
    everything = [True] * count
    proposals = []
    for p in range(noise["policy"].shape[1]):
        z, sequence = z0, []
        for t in range(horizon):
            allowed = legal if t == 0 else everything
            sequence.append(sample(params, z, noise["policy"][t, p], allowed, table))
            z = slow.dynamics(params, z, table.one_hot[sequence[-1]], settings)
        proposals.append(sequence)

    base = torch.zeros_like(last)
    for t in range(horizon):
        allowed = legal if t == 0 else everything
        base[t] = torch.tensor([float(ok) for ok in allowed]) / sum(allowed)
    probability = base.clone()
    for t in range(horizon - 1):
        ahead = last[t + 1] * (base[t] > 0)
        if not first and ahead.sum() > 0:
            probability[t] = (1 - table.warm) * base[t] + table.warm * ahead / ahead.sum()

    for i in range(noise["samples"].shape[0]):
        sequences = [
            [pick(probability[t], float(noise["samples"][i, t, s])) for t in range(horizon)]
            for s in range(noise["samples"].shape[2])
        ] + proposals
        values = torch.stack(
            [
                sequence_value(
                    params,
                    z0,
                    sequence,
                    noise["heads"][i],
                    noise["bootstrap"][i, n],
                    settings,
                    table,
                )
                for n, sequence in enumerate(sequences)
            ]
        )
        elites = torch.sort(values, descending=True, stable=True).indices[: settings.num_elites]
        weights = slow.elite_weights(values[elites], settings.temperature)
        probability = table.min_probability * base
        for w, n in zip(weights, elites.tolist(), strict=True):
            for t in range(horizon):
                probability[t, sequences[n][t]] += (1 - table.min_probability) * w
    action = sequences[int(elites[0])][0]
    if explore:
        action = pick(probability[0], float(noise["explore"][0]))
    return {"action": torch.tensor(action), "mean": probability, "values": values[elites]}
