"""Checkpoints of the official repository (nicklashansen/tdmpc2): three layouts in, the newest out.

Such a file is `torch.save({"model": state_dict})` and holds weights alone. How one network, an MLP
of linear layers each followed by a LayerNorm, is named in it:

    of       encoder                             dynamics, reward, _pi          Q functions, stacked
    2023     _encoder.state.1 .2  .4 .5          _pi.0 .1  .3 .4  .6            _Qs.params.0 ... .9
             (linear, norm; 0 is symlog)         _dynamics.0.0 ... .0.6, .1
    2024     _encoder.state.0.weight .bias       _pi.0.weight .bias             _Qs.params.0 ... .9
             .ln.weight .ln.bias                 .ln.weight .ln.bias
    newest   as 2024                             as 2024                        _Qs.params.0.weight

Older layouts are renamed to the newest; one reader then serves all. In the layout of 2023 the
encoder's first linear layer stands at place 1: at place 0 is a module without weights, which no
published code tells of. It is symlog: with it the released files predict their own next latent
(error 3.7e-5 of that of random pairs, cartpole-swingup seed 1) and reach their published return;
without it the error is 0.1 (measured by B. George, layernorm-lens, 2026).
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forethought.agents.tdmpc2.config import SIZES, SizeOf
from forethought.agents.tdmpc2.model import WorldModel
from forethought.agents.tdmpc2.official_tasks import OfficialTasks, take_tasks
from forethought.agents.tdmpc2.transfer import EMBEDDING, Source, transfer
from forethought.agents.tdmpc2.weights_file import load_weights
from forethought.config import ConfigError
from forethought.files import FileError
from forethought.spaces.spec import EnvSpec

State = dict[str, Tensor]
NETWORKS = {
    "encoder": "_encoder.state",
    "dynamics": "_dynamics",
    "reward": "_reward",
    "termination": "_termination",
    "policy": "_pi",
}
"""Our parts, and how the newest layout names them."""
STACKS = {"q": "_Qs.params", "target_q": "_target_Qs_params"}
"""The same for ensembles, whose tensors have the heads as their first axis."""
LAYER = ("weight", "bias", "ln.weight", "ln.bias")
"""A layer's tensors, in the order in which a list of 2023 or 2024 has them."""
COPIES = ("_detach_Qs_params.", "_detach_Qs.", "_target_Qs.")
"""Of the Q functions, under second names."""
LAYER_NUMBERS = frozenset(map(str, range(32)))
"""No network has more layers."""


@dataclass(frozen=True)
class OfficialCheckpoint:
    """What was found in a file."""

    path: Path
    layout: str
    """2023, 2024 or newest."""
    weights: State
    """By the names of our model; a termination head among them where the file has one."""
    observation_dim: int
    action_dim: int
    bins: int
    size: SizeOf
    log_std: tuple[float, float] | None
    """The policy's range, where the file tells."""
    notes: tuple[str, ...]
    many: OfficialTasks | None = None
    """Its tasks, where there are several."""

    @property
    def has_termination(self) -> bool:
        return any(name.startswith("termination.") for name in self.weights)

    @property
    def symlogs_observations(self) -> bool:
        return self.layout == "2023"

    def decided(self, spec: EnvSpec) -> dict[str, Any]:
        """The options that the file decides; the shape is that of a run's config.yaml."""
        row = next((name for name, size in SIZES.items() if size == self.size), None)
        size = vars(self.size) if row is None else dict.fromkeys(vars(self.size))
        model = {"size": row or 5, **size, "bins": self.bins}
        agent: dict[str, Any] = {"model": model}
        agent["episodic"] = self.has_termination and spec.terminates
        if self.log_std is not None:
            agent["log_std_min"], agent["log_std_max"] = self.log_std
        if self.many is not None and spec.tasks:
            model["task_dim"] = self.many.dim
        return {"agent": agent}

    def check_task(self, spec: EnvSpec) -> None:
        """Refuse a task of other observations or actions than those the weights are for."""
        if self.many is not None:
            self.many.check(self.path, spec, self.observation_dim, self.action_dim)
            return
        if spec.tasks:
            raise ConfigError(
                f"{self.path} was trained on one task, but {spec.task} are several: give the one "
                "that it was trained on with --task."
            )
        here = {"observations": spec.observation_space, "actions": spec.action_space}
        there = {"observations": self.observation_dim, "actions": self.action_dim}
        if all(here[kind].shape == (length,) for kind, length in there.items()):
            return
        raise ConfigError(
            f"{self.path} was trained in an environment with observations ({there['observations']},"
            f") and actions ({there['actions']},), but {spec.task} has observations "
            f"{spec.shapes['observations']} and actions {spec.shapes['actions']}: give the task "
            "that it was trained on with --task."
        )

    def fill(self, model: WorldModel, tasks: Sequence[str] = ()) -> None:
        """Put the weights into a model of the same sizes, for these tasks of several; auxiliary
        values stay as they are."""
        if self.many is not None:
            saved = {**self.weights, EMBEDDING: self.many.embedding}
            source = Source(str(self.path), saved, self.many.names)
            model.load_state_dict(transfer(model, tasks, source, torch.Generator()).weights)
            return
        weights = {
            name: weight
            for name, weight in self.weights.items()
            if model.termination is not None or not name.startswith("termination.")
        }
        own = {k: v for k, v in model.state_dict().items() if k.startswith("aux_value.")}
        model.load_state_dict({**own, **weights})


def read_checkpoint(path: Path) -> OfficialCheckpoint:
    """The weights of an official checkpoint; FileError if it is none."""
    many, state = take_tasks(path, load_weights(path))
    layout = layout_of(path, state)
    if many is not None and layout == "2023":
        raise FileError(
            f"{path} is a checkpoint of {len(many.names)} tasks in the layout of 2023, whose "
            "encoder squashed observations in a way that is known for single tasks only: it would "
            "act wrongly here, so it is not read. Files of 2024 and later are."
        )
    log_std = _log_std(state)
    if layout == "2023":
        state = _renamed_from_2023(state)
    if layout != "newest":
        state = _renamed_from_2024(state)
    weights, notes = _our_names(path, state)
    encoder, last = weights["encoder.0.weight"], _last_layer(weights, "encoder")
    action_dim, odd = divmod(len(weights[f"policy.{_last_layer(weights, 'policy')}.bias"]), 2)
    bins = len(weights[f"reward.{_last_layer(weights, 'reward')}.bias"])
    if odd or action_dim == 0:
        raise FileError(f"{path} is no TD-MPC2 checkpoint: its policy has no mean and width.")
    if bins < 2:
        raise FileError(
            f"{path} predicts rewards as single numbers (num_bins={bins}), but tdmpc2 here "
            "predicts distributions over 2 bins or more: such a checkpoint cannot be imported."
        )
    size = SizeOf(
        encoder_units=encoder.shape[0],
        mlp_units=weights["reward.0.weight"].shape[0],
        latent_dim=len(weights[f"encoder.{last}.bias"]),
        encoder_layers=last + 1,
        num_q=1 + max(int(name.split(".")[1]) for name in weights if name.startswith("q.")),
    )
    found = OfficialCheckpoint(
        path=path,
        layout=layout,
        weights=weights,
        observation_dim=encoder.shape[1] - (0 if many is None else many.dim),
        action_dim=action_dim,
        bins=bins,
        size=size,
        log_std=log_std,
        notes=notes,
        many=many,
    )
    _check_shapes(found)
    return found


def _check_shapes(found: OfficialCheckpoint) -> None:
    """Refuse layers that do not fit each other, before a model of their sizes is built."""
    expected = _shapes(found)
    for name in sorted(expected.keys() | found.weights.keys()):
        there = tuple(found.weights[name].shape) if name in found.weights else "absent"
        if there != expected.get(name, "absent"):
            raise FileError(
                f"{found.path} is no whole TD-MPC2 checkpoint: {name} is {there} in it, but must "
                f"be {expected.get(name, 'absent')} beside its other layers."
            )


def _shapes(found: OfficialCheckpoint) -> dict[str, tuple[int, ...]]:
    """Of every tensor, by our names, for the sizes that were found."""
    size, hidden = found.size, [found.size.mlp_units] * 2
    task = 0 if found.many is None else found.many.dim
    latent = size.latent_dim + task
    joint = latent + found.action_dim
    encoder_hidden = [size.encoder_units] * (size.encoder_layers - 1)
    sizes = {
        "encoder": [found.observation_dim + task, *encoder_hidden, size.latent_dim],
        "dynamics": [joint, *hidden, size.latent_dim],
        "reward": [joint, *hidden, found.bins],
        "policy": [latent, *hidden, 2 * found.action_dim],
    }
    if found.has_termination:
        sizes["termination"] = [latent, *hidden, 1]
    for head in range(size.num_q):
        sizes |= {f"{stack}.{head}": sizes["reward"] for stack in STACKS}
    shapes: dict[str, tuple[int, ...]] = {}
    for network, units in sizes.items():
        for layer, (inputs, outputs) in enumerate(pairwise(units)):
            place = f"{network}.{layer}"
            shapes |= {f"{place}.weight": (outputs, inputs), f"{place}.bias": (outputs,)}
            if layer < len(units) - 2 or network in ("encoder", "dynamics"):
                shapes |= {f"{place}.norm.{kind}": (outputs,) for kind in ("weight", "bias")}
    return shapes


def layout_of(path: Path, state: Mapping[str, Tensor]) -> str:
    """Which of the three layouts this is, told by the encoder and the Q functions."""
    if any(name.startswith("_encoder.rgb.") for name in state):
        raise FileError(
            f"{path} was trained on pixels: its encoder has no counterpart here; import a "
            "checkpoint that was trained on states."
        )
    if "_encoder.state.1.weight" in state and "_encoder.state.0.weight" not in state:
        return "2023"
    if "_Qs.params.0" in state:
        return "2024"
    if "_Qs.params.0.weight" in state:
        return "newest"
    known = ", ".join(list(state)[:3]) or "nothing"
    raise FileError(f"{path} is no checkpoint of the official TD-MPC2: it holds {known} ...")


def _renamed_from_2023(state: Mapping[str, Tensor]) -> State:
    """Places in a flat sequence (linear, norm, activation) become layers with a norm inside."""
    renamed: State = {}
    places = (re.fullmatch(r"_dynamics\.0\.(\d+)\.weight", name) for name in state)
    last = max((int(found[1]) for found in places if found), default=0)
    for name, tensor in state.items():
        flat = re.fullmatch(r"(_encoder\.state|_dynamics\.0|_reward|_pi)\.(\d+)\.(\w+)", name)
        if name in ("_dynamics.1.weight", "_dynamics.1.bias"):  # the norm of the last layer
            name = f"_dynamics.{last // 3}.ln.{name.rpartition('.')[2]}"
        elif flat is not None:
            network, place, kind = flat[1], int(flat[2]), flat[3]
            layer, within = divmod(place - (network == "_encoder.state"), 3)
            # An activation has no weights: one at its place keeps its name, and is refused later.
            if within < 2:
                inside = f"{layer}.ln.{kind}" if within else f"{layer}.{kind}"
                name = f"{network.removesuffix('.0')}.{inside}"
        renamed[name] = tensor
    return renamed


def _renamed_from_2024(state: Mapping[str, Tensor]) -> State:
    """Numbered lists of an ensemble's tensors become layers."""
    found: State = {}
    for name, tensor in state.items():
        listed = re.fullmatch(r"(_Qs\.params|_target_Qs\.params)\.(\d+)", name)
        if listed is not None:
            layer, kind = divmod(int(listed[2]), len(LAYER))
            stack = listed[1].replace("_target_Qs.params", "_target_Qs_params")
            name = f"{stack}.{layer}.{LAYER[kind]}"
        found[name] = tensor
    return found


def _our_names(path: Path, state: Mapping[str, Tensor]) -> tuple[State, tuple[str, ...]]:
    """The newest layout in the names of our model, and what is worth a sentence."""
    weights: State = {}
    prefixes = {theirs + ".": ours for ours, theirs in (NETWORKS | STACKS).items()}
    for name, tensor in state.items():
        prefix = next((p for p in prefixes if name.startswith(p)), None)
        layer, _, kind = name[len(prefix or "") :].partition(".")
        if name in ("log_std_min", "log_std_dif") or name.startswith(COPIES):
            continue
        if prefix is None or layer not in LAYER_NUMBERS or kind not in LAYER:
            raise FileError(f"{path} holds {name}, which no checkpoint of TD-MPC2 has.")
        part, inside = prefixes[prefix], f"{int(layer)}.{kind.replace('ln.', 'norm.')}"
        axes = (2 if kind == "weight" else 1) + (part in STACKS)
        if tensor.ndim != axes or tensor.numel() == 0:
            raise FileError(f"{path} is damaged: {name} is {tuple(tensor.shape)}.")
        if part in STACKS:
            weights |= {f"{part}.{head}.{inside}": one for head, one in enumerate(tensor)}
        else:
            weights[f"{part}.{inside}"] = tensor
    notes: tuple[str, ...] = ()
    if not any(name.startswith("target_q.") for name in weights):
        online = {name: tensor for name, tensor in weights.items() if name.startswith("q.")}
        weights |= {f"target_{name}": tensor.clone() for name, tensor in online.items()}
        notes = ("The file has no target Q functions: they begin as copies of the Q functions.",)
    for part in ("encoder", "dynamics", "reward", "policy"):
        if not {f"{part}.0.weight", f"{part}.0.bias"} <= weights.keys():
            raise FileError(f"{path} is no whole TD-MPC2 checkpoint: it has no {part}.")
    if "q.0.0.weight" not in weights:
        raise FileError(f"{path} is no whole TD-MPC2 checkpoint: it has no Q functions.")
    return weights, notes


def _last_layer(weights: Mapping[str, Tensor], part: str) -> int:
    """The number of a network's last layer that has a bias."""
    found = (re.fullmatch(rf"{part}\.(\d+)\.bias", name) for name in weights)
    return max((int(match[1]) for match in found if match), default=0)


def _log_std(state: Mapping[str, Tensor]) -> tuple[float, float] | None:
    names = ("log_std_min", "log_std_dif")
    if not all(name in state and state[name].numel() == 1 for name in names):
        return None
    low, span = state["log_std_min"].flatten(), state["log_std_dif"].flatten()
    return float(low[0]), float(low[0] + span[0])


def newest_state(model: WorldModel) -> OrderedDict[str, Any]:
    """A model of ours as the official code of today saves its own, in its order."""
    own = {name: x.detach().cpu().clone() for name, x in model.state_dict().items()}
    low, high = model.config.log_std_min, model.config.log_std_max
    state: OrderedDict[str, Any] = OrderedDict(
        log_std_min=torch.tensor(low), log_std_dif=torch.tensor(high - low)
    )
    for ours, theirs in NETWORKS.items():
        for name, tensor in own.items():
            if name.startswith(f"{ours}."):
                state[theirs + name[len(ours) :].replace("norm.", "ln.")] = tensor
    heads = len(model.q)
    stacked: dict[str, State] = {}
    for ours in STACKS:
        names = [name.removeprefix(f"{ours}.0.") for name in own if name.startswith(f"{ours}.0.")]
        stacked[ours] = {
            name.replace("norm.", "ln."): torch.stack(
                [own[f"{ours}.{head}.{name}"] for head in range(heads)]
            )
            for name in names
        }
    # Today's code wants the Q functions a second time, and what tensordict adds.
    for prefix, part in (
        ("_Qs.params", "q"),
        ("_detach_Qs_params", "q"),
        ("_target_Qs_params", "target_q"),
    ):
        state |= {f"{prefix}.{name}": tensor for name, tensor in stacked[part].items()}
        state |= {f"{prefix}.__batch_size": torch.Size([heads]), f"{prefix}.__device": None}
    return state
