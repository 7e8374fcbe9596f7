"""The world model of TD-MPC2: encoder, dynamics, reward, termination, policy, Q ensemble.

Shapes: Z latent, A action, K bins, B any batch. Logits stay logits; `TwoHot.decode` turns those of
reward and Q into numbers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forethought.agents.tdmpc2.config import TDMPC2Config
from forethought.agents.tdmpc2.discounts import AuxiliaryValues
from forethought.config import ForethoughtError
from forethought.maths import TwoHot, symlog
from forethought.nets.init import trunc_normal_linears, zero_last_weight
from forethought.nets.layers import MLP, NormedLinear

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class LatentActionMLP(MLP):
    """An MLP on (z, a). Its first layer can be cut into the latent's part and the action's.

    W [z, a] + b = W_z z + (W_a a + b): when many actions share one latent, or when only the
    action's part needs a gradient, the first term is computed once.
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

    def forward(self, z: Tensor, a: Tensor, keep: Tensor | None = None) -> Tensor:  # type: ignore[override]
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

    def from_latent_part(self, part: Tensor, a: Tensor, keep: Tensor | None = None) -> Tensor:
        """The whole network, given `latent_part(z)`, which broadcasts against the actions."""
        product = F.linear(a, self.first.weight[:, self.latent :])
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
        za = torch.cat((z, a), dim=-1)
        masks = [None] * len(chosen) if keep is None else list(keep)
        return torch.stack([self[h].joined(za, m) for h, m in zip(chosen, masks, strict=True)])  # type: ignore[operator]


class PolicyOutput(NamedTuple):
    """A squashed Gaussian, one sample of it, and its entropy."""

    action: Tensor  # [B, A]
    mean: Tensor  # [B, A]
    entropy: Tensor  # [B]
    scaled_entropy: Tensor  # [B], what the policy's loss uses


class Rollout(NamedTuple):
    """An imagined trajectory."""

    latents: Tensor  # [H+1, B, Z]
    rewards: Tensor  # [H, B]
    termination: Tensor  # [H, B], probabilities


class WorldModel(nn.Module):
    """All networks. `target_q` is a slow copy of `q` that no optimiser touches."""

    def __init__(
        self,
        obs_dim: int,
        action_dim: int,
        config: TDMPC2Config,
        episodic: bool,
        generator: torch.Generator | None,
    ) -> None:
        super().__init__()
        options, size = config.model, config.model.resolved
        latent, hidden = size.latent_dim, [size.mlp_units] * 2
        self.config, self.action_dim = config, action_dim
        self.two_hot = TwoHot(options.bins, options.bin_low, options.bin_high)
        encoder_hidden = [size.encoder_units] * max(size.encoder_layers - 1, 1)
        self.encoder = MLP(
            obs_dim, encoder_hidden, latent, "simnorm", simnorm_group=options.simnorm_dim
        )
        self.dynamics = LatentActionMLP(
            latent, action_dim, hidden, latent, simnorm_group=options.simnorm_dim
        )
        self.reward = LatentActionMLP(latent, action_dim, hidden, options.bins)
        self.termination = MLP(latent, hidden, 1) if episodic else None
        self.policy = MLP(latent, hidden, 2 * action_dim)
        self.q = QEnsemble(
            LatentActionMLP(latent, action_dim, hidden, options.bins, dropout=options.dropout)
            for _ in range(size.num_q)
        )
        trunc_normal_linears(self, generator)
        for head in (self.reward, *self.q):
            zero_last_weight(head)
        self.target_q = copy.deepcopy(self.q).requires_grad_(False)
        self.aux_value: AuxiliaryValues | None = None

    def encode(self, obs: Tensor) -> Tensor:
        """z = h(x): [B, O] -> [B, Z]."""
        x = symlog(obs) if self.config.model.symlog_obs else obs
        return self.encoder(x)  # type: ignore[no-any-return]

    def next(self, z: Tensor, a: Tensor) -> Tensor:
        """z' = d(z, a): [B, Z]."""
        return self.dynamics(z, a)  # type: ignore[no-any-return]

    def decode(self, logits: Tensor) -> Tensor:
        """The number that two-hot logits of reward or Q stand for: [..., K] -> [...]."""
        return self.dynamics.first.kernels.decode(logits, self.two_hot)

    def values(self, q: QEnsemble, z: Tensor, a: Tensor, heads: Sequence[int]) -> Tensor:
        """What the chosen heads say, as numbers and without a gradient: [heads, B]."""
        za = torch.cat((z, a), dim=-1)
        return torch.stack([self.decode(q[h].joined(za)) for h in heads])  # type: ignore[operator]

    def pi(self, z: Tensor, eps: Tensor | None = None) -> PolicyOutput:
        """The policy at z, sampled with standard normal `eps`; without it, its mean."""
        config = self.config
        mu, raw = self.policy(z).chunk(2, dim=-1)
        span = config.log_std_max - config.log_std_min
        log_std = config.log_std_min + 0.5 * span * (torch.tanh(raw) + 1)
        if eps is None:
            eps = torch.zeros_like(mu)
        action = torch.tanh(mu + eps * log_std.exp())
        entropy, scaled = self._entropy(eps, log_std, action)
        return PolicyOutput(action, torch.tanh(mu), entropy, scaled)

    def _entropy(self, eps: Tensor, log_std: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        dims = self.action_dim
        residual = (-0.5 * eps**2 - log_std).sum(-1)
        if self.config.entropy == "jacobian":
            # The formula of 2024 and before: Jacobian of tanh included, Gaussian part times A.
            squash = torch.log(1 - action**2 + 1e-6).sum(-1)
            entropy = -(dims * (residual - HALF_LOG_2PI) - squash)
            return entropy, entropy
        log_gauss = residual - dims * HALF_LOG_2PI
        squash = torch.log(torch.relu(1 - action**2) + 1e-6).sum(-1)
        # In today's official code the Jacobian cancels from what the loss uses.
        return -(log_gauss - squash), -dims * log_gauss

    def policy_action(self, z: Tensor, eps: Tensor) -> Tensor:
        """Only the sampled action, for planning."""
        config = self.config
        mu, raw = self.policy(z).chunk(2, dim=-1)
        span = config.log_std_max - config.log_std_min
        std = (config.log_std_min + 0.5 * span * (torch.tanh(raw) + 1)).exp_()
        return torch.tanh(std.mul_(eps).add_(mu))

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
