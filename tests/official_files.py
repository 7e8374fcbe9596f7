"""The official networks of TD-MPC2, written from the specification alone: random weights in each of
the three layouts of official checkpoints, and what such networks compute, in float64.

A network is a list of layers (weight, bias, norm weight, norm bias); the last two are None in a
plain last layer. Ensembles have the heads as the first axis of every tensor.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Layer = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
KINDS = ("weight", "bias", "ln.weight", "ln.bias")
LAYOUTS = ("2023", "2024", "newest")


@dataclass(frozen=True)
class OfficialNetworks:
    """The weights of one agent."""

    encoder: list[Layer]
    dynamics: list[Layer]
    reward: list[Layer]
    policy: list[Layer]
    q: list[Layer]
    target_q: list[Layer]
    termination: list[Layer] | None = None
    symlog: bool = False
    embedding: Tensor | None = None
    """Of each of several tasks [N, D]; the networks then see it behind observation and latent."""
    masks: Tensor | None = None

    @classmethod
    def random(
        cls,
        obs: int,
        action: int,
        *,
        encoder_units: int = 16,
        encoder_layers: int = 2,
        units: int = 24,
        latent: int = 16,
        heads: int = 3,
        bins: int = 101,
        episodic: bool = False,
        seed: int = 0,
        tasks: int = 0,
        task_dim: int = 0,
    ) -> OfficialNetworks:
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int, around: float = 0.0) -> Tensor:
            return around + 0.3 * torch.randn(shape, generator=generator)

        def mlp(sizes: list[int], normed_last: bool, *stack: int) -> list[Layer]:
            layers: list[Layer] = []
            for i, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
                plain = i == len(sizes) - 2 and not normed_last
                norm = None if plain else draw(*stack, outputs, around=1.0)
                shift = None if plain else draw(*stack, outputs)
                layers.append((draw(*stack, outputs, inputs), draw(*stack, outputs), norm, shift))
            return layers

        seen, hidden = latent + task_dim, [units, units]
        joint = seen + action
        masks = torch.ones(tasks, action) if tasks else None
        return cls(
            embedding=draw(tasks, task_dim) if tasks else None,
            masks=masks,
            encoder=mlp([obs + task_dim, *[encoder_units] * (encoder_layers - 1), latent], True),
            dynamics=mlp([joint, *hidden, latent], True),
            reward=mlp([joint, *hidden, bins], False),
            policy=mlp([seen, *hidden, 2 * action], False),
            q=mlp([joint, *hidden, bins], False, heads),
            target_q=mlp([joint, *hidden, bins], False, heads),
            termination=mlp([seen, *hidden, 1], False) if episodic else None,
        )

    # ---- what they compute ----

    def outputs(self, obs: Tensor, action: Tensor, task: int = 0) -> dict[str, Tensor]:
        """Everything that a model can be asked for, at these observations and actions."""
        x, a = obs.double(), action.double()
        e = x[..., :0]
        if self.embedding is not None:
            short = self.embedding[task].double()
            short = short / max(1.0, float(short.norm()))
            e = short.expand(*x.shape[:-1], -1)
        x = torch.cat((x, e), -1)
        z = run(self.encoder, torch.sign(x) * torch.log1p(x.abs()) if self.symlog else x)
        z_and_e = torch.cat((z, e), -1)
        z_and_a = torch.cat((z_and_e, a), -1)
        mean, width = run(self.policy, z_and_e).chunk(2, -1)
        found = {
            "encode": z,
            "next": run(self.dynamics, z_and_a),
            "reward": run(self.reward, z_and_a),
            "q": torch.stack([run(head, z_and_a) for head in heads_of(self.q)]),
            "target_q": torch.stack([run(head, z_and_a) for head in heads_of(self.target_q)]),
            "pi": torch.tanh(mean),
            "log_std": -10 + 6 * (torch.tanh(width) + 1),
        }
        if self.termination is not None:
            found["termination"] = torch.sigmoid(run(self.termination, z_and_e))[..., 0]
        return found

    # ---- how each layout writes them down ----

    def state(self, layout: str) -> OrderedDict[str, Any]:
        state = {"2023": self.of_2023, "2024": self.of_2024, "newest": self.newest}[layout]()
        if self.embedding is not None:
            state |= {"_task_emb.weight": self.embedding, "_action_masks": self.masks}
        return state

    def save(self, path: Path, layout: str) -> OfficialNetworks:
        """Writes the file; the networks as that layout means them."""
        torch.save({"model": self.state(layout)}, path)
        return replace(self, symlog=layout == "2023")

    def of_2023(self) -> OrderedDict[str, Any]:
        state: OrderedDict[str, Any] = OrderedDict()
        flat(state, "_encoder.state", self.encoder, first=1)
        flat(state, "_dynamics.0", self.dynamics, norm_of_last="_dynamics.1")
        flat(state, "_reward", self.reward)
        flat(state, "_pi", self.policy)
        return state | numbered("_Qs.params", self.q) | numbered("_target_Qs.params", self.target_q)

    def of_2024(self) -> OrderedDict[str, Any]:
        state = self.networks()
        return state | numbered("_Qs.params", self.q) | numbered("_target_Qs.params", self.target_q)

    def newest(self) -> OrderedDict[str, Any]:
        state: OrderedDict[str, Any] = OrderedDict(
            log_std_min=torch.tensor(-10), log_std_dif=torch.tensor(12)
        )
        state |= self.networks()
        heads = len(self.q[0][0])
        for prefix, stack in (
            ("_Qs.params", self.q),
            ("_detach_Qs_params", self.q),
            ("_target_Qs_params", self.target_q),
        ):
            state |= named(prefix, stack)
            state[f"{prefix}.__batch_size"] = torch.Size([heads])
            state[f"{prefix}.__device"] = torch.device("cpu")
        return state

    def networks(self) -> OrderedDict[str, Any]:
        state = named("_encoder.state", self.encoder)
        for prefix, network in (
            ("_dynamics", self.dynamics),
            ("_reward", self.reward),
            ("_termination", self.termination),
            ("_pi", self.policy),
        ):
            state |= {} if network is None else named(prefix, network)
        return state


def run(network: list[Layer], x: Tensor) -> Tensor:
    """One MLP: LayerNorm and Mish after each hidden layer; a normed last layer ends in SimNorm."""
    for i, (weight, bias, scale, shift) in enumerate(network):
        x = x @ weight.double().T + bias.double()
        if scale is None or shift is None:
            continue
        centred = x - x.mean(-1, keepdim=True)
        x = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        x = x * scale.double() + shift.double()
        if i < len(network) - 1:
            x = x * torch.tanh(torch.log1p(torch.exp(x)))
        else:
            groups = x.view(*x.shape[:-1], -1, 8).exp()
            x = (groups / groups.sum(-1, keepdim=True)).flatten(-2)
    return x


def heads_of(stack: list[Layer]) -> list[list[Layer]]:
    count = len(stack[0][0])
    return [
        [tuple(None if t is None else t[h] for t in layer) for layer in stack]  # type: ignore[misc]
        for h in range(count)
    ]


def named(prefix: str, network: list[Layer]) -> OrderedDict[str, Any]:
    return OrderedDict(
        (f"{prefix}.{i}.{kind}", tensor)
        for i, layer in enumerate(network)
        for kind, tensor in zip(KINDS, layer)
        if tensor is not None
    )


def numbered(prefix: str, network: list[Layer]) -> OrderedDict[str, Any]:
    tensors = [tensor for layer in network for tensor in layer if tensor is not None]
    return OrderedDict((f"{prefix}.{i}", tensor) for i, tensor in enumerate(tensors))


def flat(
    state: OrderedDict[str, Any],
    prefix: str,
    network: list[Layer],
    first: int = 0,
    norm_of_last: str | None = None,
) -> None:
    """A sequence of linear, norm and activation, each with a place of its own."""
    for i, (weight, bias, scale, shift) in enumerate(network):
        place = f"{prefix}.{first + 3 * i}"
        state |= {f"{place}.weight": weight, f"{place}.bias": bias}
        if scale is not None:
            last = i == len(network) - 1 and norm_of_last is not None
            norm = norm_of_last if last else f"{prefix}.{first + 3 * i + 1}"
            state |= {f"{norm}.weight": scale, f"{norm}.bias": shift}
