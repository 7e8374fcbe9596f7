"""The world model of TD-MPC2: encoder, dynamics, reward, termination, policy, Q ensemble.

Shapes: Z latent, A action, K bins, B any batch. Logits stay logits; `TwoHot.decode` turns those of
reward and Q into numbers. A discrete action is the number of its row in the table of actions: where
a continuous one is [B, A], it is [B]. With several tasks a latent is [z, e], Z + D long: the task's
embedding travels behind z (see tasks.py), and masks [B, A] are 1 where an action dimension is the
task's.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forethought.agents.tdmpc2.actions import Actions, BoxActions, PolicyOutput
from forethought.agents.tdmpc2.categorical import CategoricalActions
from forethought.agents.tdmpc2.config import TDMPC2Config
from forethought.agents.tdmpc2.discounts import AuxiliaryValues
from forethought.agents.tdmpc2.encoders import make_encoder
from forethought.agents.tdmpc2.observations import Observations
from forethought.agents.tdmpc2.tasks import Tasks
from forethought.config import ForethoughtError
from forethought.maths import TwoHot, symlog
from forethought.nets.init import trunc_normal_linears, uniform_convolutions, zero_last_weight
from forethought.nets.layers import MLP, NormedLinear
from forethought.spaces.action_codec import ActionCodec
from forethought.spaces.nested import Tree

LARGEST_TABLE = 4096
"""Actions up to which what a first layer makes of each is kept during a plan."""


class LatentActionMLP(MLP):
    """An MLP on (z, a). Its first layer can be cut into the latent's part and the action's.

    W [z, a] + b = W_z z + (W_a a + b): when many actions share one latent, or when only the
    action's part needs a gradient, the first term is computed once.

    With `columns` [N, F] actions are rows of a table, and row i is a vector of zeros with ones at
    columns[i]: W_a a is then a sum of columns of W_a, which are looked up.
    """

    def __init__(
        self,
        latent: int,
        action: int,
        hidden: list[int],
        outputs: int,
        *,
        simnorm_group: int | None = None,
        dropout: float = 0.0,
        columns: Tensor | None = None,
    ) -> None:
        super().__init__(
            latent + action,
            hidden,
            outputs,
            activation=None if simnorm_group is None else "simnorm",
            dropout=dropout,
            simnorm_group=simnorm_group or 8,
        )
        self.latent = latent
        self.columns: Tensor | None
        self.register_buffer("columns", columns, persistent=False)

    def forward(self, z: Tensor, a: Tensor, keep: Tensor | None = None) -> Tensor:  # type: ignore[override]
        if self.columns is not None:
            return self.from_latent_part(self.latent_part(z), a, keep)
        return self.joined(torch.cat((z, a), dim=-1), keep)

    def joined(self, za: Tensor, keep: Tensor | None = None) -> Tensor:
        """The network on z and a side by side, for callers that join them once for several."""
        return super().forward(za, keep)

    @property
    def first(self) -> NormedLinear:
        layer = self[0]
        assert isinstance(layer, NormedLinear)
        return layer

    def latent_part(self, z: Tensor) -> Tensor:
        """W_z z of the first layer."""
        return F.linear(z, self.first.weight[:, : self.latent])

    def action_part(self, a: Tensor, table: Tensor | None = None) -> Tensor:
        """W_a a of the first layer, looked up in `action_table()` where it is given."""
        weight = self.first.weight[:, self.latent :]  # [H, A]
        if self.columns is None:
            return F.linear(a, weight)
        if table is not None:
            return F.embedding(a, table)
        ones = F.embedding(self.columns[a], weight.t().contiguous())  # [..., F, H]
        return ones.squeeze(-2) if ones.shape[-2] == 1 else ones.sum(-2)

    def action_table(self) -> Tensor | None:
        """W_a a of every action in the table [N, H], for those who look up many of them.

        None where actions are vectors, or too many.
        """
        if self.columns is None or len(self.columns) > LARGEST_TABLE:
            return None
        return self.action_part(torch.arange(len(self.columns), device=self.columns.device))

    def from_latent_part(
        self, part: Tensor, a: Tensor, keep: Tensor | None = None, table: Tensor | None = None
    ) -> Tensor:
        """The whole network, given `latent_part(z)`, which broadcasts against the actions."""
        product = self.action_part(a, table)
        bias: Tensor = self.first.bias
        if part.numel() == bias.numel():  # one latent for all actions: as good as a bias
            bias = bias + part.flatten()
        else:
            product += part
        return self.after_hidden(self.first.activate(product, keep, pre=bias))


class QEnsemble(nn.ModuleList):
    """Q functions with separate weights.

    A loop over heads: on a CPU it beats batched products, and only the heads that are asked for
    are computed.
    """

    def forward(
        self,
        z: Tensor,
        a: Tensor,
        heads: Sequence[int] | None = None,
        keep: Tensor | None = None,
    ) -> Tensor:
        """Logits [heads, B, K]; `keep` are dropout masks [heads, B, H] in the same order."""
        chosen = range(len(self)) if heads is None else heads
        masks = [None] * len(chosen) if keep is None else list(keep)
        if not a.is_floating_point():  # rows of a table: there is nothing to join
            return torch.stack([self[h](z, a, m) for h, m in zip(chosen, masks, strict=True)])
        za = torch.cat((z, a), dim=-1)
        return torch.stack([self[h].joined(za, m) for h, m in zip(chosen, masks, strict=True)])  # type: ignore[operator]


class Rollout(NamedTuple):
    """An imagined trajectory."""

    latents: Tensor  # [H+1, B, Z]
    rewards: Tensor  # [H, B]
    termination: Tensor  # [H, B], probabilities


class WorldModel(nn.Module):
    """All networks. `target_q` is a slow copy of `q` that no optimiser touches.

    `observations` is what the encoder sees; a number stands for one vector of that length.
    """

    def __init__(
        self,
        observations: Observations | int,
        action_dim: int,
        config: TDMPC2Config,
        episodic: bool,
        generator: torch.Generator | None,
        codec: ActionCodec | None = None,
        tasks: Tasks | None = None,
    ) -> None:
        """With a `codec` actions are the rows of its table, and `action_dim` is its width."""
        super().__init__()
        options, size = config.model, config.model.resolved
        task_dim = 0 if tasks is None else tasks.dim
        outputs, hidden = size.latent_dim, [size.mlp_units] * 2
        latent = outputs + task_dim
        self.config, self.action_dim, self.latent_dim = config, action_dim, outputs
        self.actions: Actions = (
            BoxActions(action_dim, config) if codec is None else CategoricalActions(codec, config)
        )
        columns = None if codec is None else torch.from_numpy(codec.columns)
        self.two_hot = TwoHot(options.bins, options.bin_low, options.bin_high)
        self.encoder = make_encoder(observations, config, task_dim)
        self.dynamics = LatentActionMLP(
            latent, action_dim, hidden, outputs, simnorm_group=options.simnorm_dim, columns=columns
        )
        self.reward = LatentActionMLP(latent, action_dim, hidden, options.bins, columns=columns)
        self.termination = MLP(latent, hidden, 1) if episodic else None
        self.policy = self.actions.make_policy(latent, hidden)
        self.q = QEnsemble(
            LatentActionMLP(
                latent, action_dim, hidden, options.bins, dropout=options.dropout, columns=columns
            )
            for _ in range(size.num_q)
        )
        trunc_normal_linears(self, generator)
        uniform_convolutions(self, generator)
        for head in (self.reward, *self.q):
            zero_last_weight(head)
        self.target_q = copy.deepcopy(self.q).requires_grad_(False)
        self.aux_value: AuxiliaryValues | None = None
        self.tasks = tasks
        if tasks is not None:
            tasks.initialise(generator)

    def encode(
        self, obs: Tree, shift: Tensor | None = None, *, task: Tensor | None = None
    ) -> Tensor:
        """z = h(x): [..., B, O], or leaves by path, -> [..., B, Z].

        `shift` moves images, in training only; with several tasks, `task` [B] tells which.
        """
        x = symlog(obs) if self.config.model.symlog_obs else obs
        if self.tasks is None:
            return self.encoder(x, shift)  # type: ignore[no-any-return]
        if task is None:
            raise ForethoughtError(
                "This model has several tasks: encode(obs, task=...) needs to know which one each "
                "observation is of."
            )
        e = self.tasks.of_batch(task, x.shape[:-1])
        return torch.cat((self.encoder(torch.cat((x, e), dim=-1)), e), dim=-1)

    def next(self, z: Tensor, a: Tensor) -> Tensor:
        """z' = d(z, a): [B, Z]."""
        return self.beside_task_of(z, self.dynamics(z, a))

    def beside_task_of(self, z: Tensor, state: Tensor) -> Tensor:
        """The latent of a new state in the task that z is of."""
        if self.tasks is None:
            return state
        return torch.cat((state, z[..., self.latent_dim :].expand(*state.shape[:-1], -1)), dim=-1)

    def state_of(self, z: Tensor) -> Tensor:
        """A latent without its task."""
        return z if self.tasks is None else z[..., : self.latent_dim]

    def with_task(self, z: Tensor, task: Tensor | None) -> Tensor:
        """A latent beside its task's embedding of now, which may have changed since."""
        if self.tasks is None or task is None:
            return z
        return torch.cat((self.state_of(z), self.tasks.of_batch(task, z.shape[:-1])), dim=-1)

    def mask_of(self, task: Tensor | None) -> Tensor | None:
        """The action masks [B, A] of tasks [B]; None where there is one task."""
        return None if self.tasks is None or task is None else self.tasks.masks[task]

    def decode(self, logits: Tensor) -> Tensor:
        """The number that two-hot logits of reward or Q stand for: [..., K] -> [...]."""
        return self.dynamics.first.kernels.decode(logits, self.two_hot)

    def values(
        self,
        q: QEnsemble,
        z: Tensor,
        a: Tensor,
        heads: Sequence[int],
        tables: Mapping[int, Tensor | None] | None = None,
    ) -> Tensor:
        """What the chosen heads say, as numbers and without a gradient: [heads, B].

        `tables` are the heads' `action_table()`, where somebody has them.
        """
        if a.is_floating_point():
            za = torch.cat((z, a), dim=-1)
            return torch.stack([self.decode(q[h].joined(za)) for h in heads])  # type: ignore[operator]
        found = []
        for h in heads:
            table = None if tables is None else tables[h]
            logits = q[h].from_latent_part(q[h].latent_part(z), a, None, table)  # type: ignore[operator]
            found.append(self.decode(logits))
        return torch.stack(found)

    def pi(
        self, z: Tensor, noise: Tensor | None = None, mask: Tensor | None = None
    ) -> PolicyOutput:
        """The policy at z, sampled with `noise`; without it, its mean, or its likeliest action."""
        return self.actions.pi(self.policy, z, noise, mask)

    def policy_action(self, z: Tensor, noise: Tensor, mask: Tensor | None = None) -> Tensor:
        """Only the sampled action, for planning."""
        return self.actions.sample(self.policy, z, noise, mask)

    def rollout_dynamics_multi_step(
        self, z0: Tensor, actions: Tensor, opponent_id: int | None = None
    ) -> Rollout:
        """Imagine from z0 [B, Z] along actions [H, B, A]; decoded rewards, no gradient cut."""
        if opponent_id is not None:
            raise ForethoughtError(
                f"opponent_id is {opponent_id}, but this model simulates no opponent: pass None."
            )
        zs, rewards, ends = [z0], [], []
        for a in actions:
            rewards.append(self.decode(self.reward(zs[-1], a)))
            zs.append(self.next(zs[-1], a))
            ends.append(self.termination_probability(zs[-1]))
        return Rollout(torch.stack(zs), torch.stack(rewards), torch.stack(ends))

    def termination_probability(self, z: Tensor) -> Tensor:
        """[B]; zero in tasks that are not episodic."""
        if self.termination is None:
            return z.new_zeros(z.shape[:-1])
        return torch.sigmoid(self.termination(z)).squeeze(-1)
