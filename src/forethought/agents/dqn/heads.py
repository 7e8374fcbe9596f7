"""From features to the values of every action: [B, A, N], N being 1, atoms or quantiles."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from forethought.agents.dqn import targets
from forethought.agents.dqn.config import C51, IQN, QR, DQNConfig, FactorisedNoise
from forethought.agents.dqn.networks import Trunk, initialise
from forethought.nets.kernels import Kernels, TorchKernels
from forethought.nets.noisy import LayerNoise, NetNoise, NoisyLinear, noisy_layers


class Stream(nn.Module):
    """A hidden layer with ReLU and an output layer, both noisy if asked for."""

    def __init__(
        self,
        features: int,
        units: int,
        outputs: int,
        sigma: float | None,
        generator: torch.Generator,
    ) -> None:
        super().__init__()

        def layer(inputs: int, width: int) -> nn.Linear | NoisyLinear:
            if sigma is None:
                return nn.Linear(inputs, width)
            return NoisyLinear(inputs, width, sigma, generator)

        self.hidden, self.output = layer(features, units), layer(units, outputs)
        self.kernels: Kernels = TorchKernels()

    def forward(self, x: Tensor, noise: NetNoise | None) -> Tensor:
        first, second = (None, None) if noise is None else noise
        return self._through(self.output, torch.relu(self._through(self.hidden, x, first)), second)

    def _through(
        self, layer: nn.Linear | NoisyLinear, x: Tensor, noise: LayerNoise | None
    ) -> Tensor:
        if isinstance(layer, nn.Linear):
            return self.kernels.linear(x, layer)
        out: Tensor = layer(x, noise)
        return out


class CosineEmbedding(nn.Module):
    """phi_j(tau) = relu(sum_i cos(pi i tau) w_ij + b_j), i = 0 .. cosines - 1 (IQN, eq. 4)."""

    multiples: Tensor

    def __init__(self, cosines: int, features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(cosines, features)
        self.register_buffer("multiples", torch.arange(cosines), persistent=False)

    def forward(self, tau: Tensor) -> Tensor:
        """[B, N] -> [B, N, features]."""
        cosines = torch.cos(tau[..., None] * (math.pi * self.multiples.to(tau.dtype)))
        return torch.relu(self.linear(cosines))


class QNetwork(nn.Module):
    """Trunk and head. `features` is what both share, for several heads' calls on one input."""

    support: Tensor

    def __init__(
        self, trunk: Trunk, actions: int, config: DQNConfig, generator: torch.Generator
    ) -> None:
        super().__init__()
        kind = config.distribution
        self.actions, self.distribution, self.dueling = actions, kind, config.dueling
        self.trunk = trunk
        self.values = 1
        if isinstance(kind, C51):
            self.values = kind.atoms
        elif isinstance(kind, QR):
            self.values = kind.quantiles
        self.embedding: CosineEmbedding | None = None
        if isinstance(kind, IQN):
            self.embedding = CosineEmbedding(kind.cosines, trunk.features)
        sigma = config.noisy.sigma if isinstance(config.noisy, FactorisedNoise) else None
        units = trunk.hidden_units

        def stream(outputs: int) -> Stream:
            return Stream(trunk.features, units, outputs, sigma, generator)

        self.advantage = stream(actions * self.values)
        self.value = stream(self.values) if config.dueling else None
        ends = [self.advantage.output] + ([self.value.output] if self.value is not None else [])
        initialise(self, [e for e in ends if isinstance(e, nn.Linear)], config.init, generator)
        if isinstance(kind, C51):
            support = torch.linspace(kind.v_min, kind.v_max, kind.atoms)
            self.register_buffer("support", support, persistent=False)
        self.noisy_layers = noisy_layers(self)

    def features(self, x: Tensor) -> Tensor:
        """[B, ...] -> [B, D]."""
        out: Tensor = self.trunk(x)
        return out

    def head(self, features: Tensor, noise: NetNoise | None, tau: Tensor | None) -> Tensor:
        """Values of every action: [B, A, N]. Without noise the noisy layers are their means."""
        rows = len(features)
        if self.embedding is not None:
            assert tau is not None
            features = features[:, None, :] * self.embedding(tau)  # [B, N, D]
            if noise is not None:
                noise = [(_per_tau(e_in), _per_tau(e_out)) for e_in, e_out in noise]
        own, others = (None, None) if noise is None else (noise[:2], noise[2:])
        q = self._arranged(self.advantage(features, own), rows, self.actions)
        if self.value is None:
            return q
        v = self._arranged(self.value(features, others), rows, 1)
        return v + q - q.mean(1, keepdim=True)

    def _arranged(self, out: Tensor, rows: int, actions: int) -> Tensor:
        if self.embedding is not None:
            return out.transpose(1, 2)  # [B, N, A] -> [B, A, N]
        return out.reshape(rows, actions, self.values)

    def forward(self, x: Tensor, noise: NetNoise | None, tau: Tensor | None) -> Tensor:
        return self.head(self.features(x), noise, tau)

    def expected(self, out: Tensor) -> Tensor:
        """The expected return of every action: [..., A, N] -> [..., A]."""
        if isinstance(self.distribution, C51):
            return (torch.softmax(out, -1) * self.support).sum(-1)
        return out.squeeze(-1) if out.shape[-1] == 1 else out.mean(-1)

    def loss(self, predicted: Tensor, target: Tensor, tau: Tensor | None) -> Tensor:
        """Of each transition: the taken action's values [B, N] and their target [B, N'] -> [B]."""
        kind = self.distribution
        if isinstance(kind, C51):
            return targets.cross_entropy(predicted, target)
        if isinstance(kind, QR | IQN):
            tau = targets.midpoints(self.values, predicted) if tau is None else tau
            return targets.quantile_huber(predicted, target, tau, kind.kappa)
        return targets.huber(target - predicted).squeeze(-1)

    def log_architecture(self) -> dict[str, int]:
        """Parameters per part."""
        parts: dict[str, nn.Module | None] = {"trunk": self.trunk, "embedding": self.embedding}
        parts |= {"value": self.value, "advantage": self.advantage}
        counts = {
            name: sum(p.numel() for p in part.parameters())
            for name, part in parts.items()
            if part is not None
        }
        return counts | {"total": sum(counts.values())}


def _per_tau(factor: Tensor) -> Tensor:
    """One noise for all fractions of a row."""
    return factor.unsqueeze(-2) if factor.ndim == 2 else factor
