"""Weights of another run as a beginning: from many tasks to a new one, or between like tasks.

A first layer's inputs come in blocks (observation or latent, task embedding, action), a continuous
policy's outputs in two (mean, log std). Of each block as much is taken as both sides have; what is
only here keeps its new weights. Where this run has one task, the embedding of a task there becomes
part of the biases: W_e e + b. So nothing is lost, and the network is that of any single task.
Discrete actions carry over whole, or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from forethought.agents.tdmpc2.config import TDMPC2Config
from forethought.agents.tdmpc2.model import WorldModel
from forethought.config import ConfigError

Tensors = Mapping[str, Tensor]
EMBEDDING = "tasks.embedding"
WITH_ACTION = ("dynamics", "reward", "q", "target_q")
OPTIONAL = ("termination", "aux_value", "tasks")
"""Parts that one side may lack."""
MEANING = {
    "model": ("symlog_obs", "simnorm_dim", "bin_low", "bin_high"),
    "": ("log_std_min", "log_std_max"),
}
"""Values of `agent.model` and of `agent` that leave every shape and change what weights mean."""


@dataclass(frozen=True)
class Sizes:
    """Lengths of the blocks in one model."""

    obs: int
    latent: int
    task: int
    action: int
    outputs: int
    """Of the policy: two per continuous action, one for each choice among discrete ones."""

    @property
    def discrete(self) -> bool:
        return self.outputs == self.action

    @classmethod
    def of(cls, weights: Tensors) -> Sizes:
        """Read off the weights of a model; KeyError where it has other networks."""
        task = weights[EMBEDDING].shape[1] if EMBEDDING in weights else 0
        latent = weights["policy.0.weight"].shape[1]
        return cls(
            obs=weights["encoder.0.weight"].shape[1] - task,
            latent=latent - task,
            task=task,
            action=weights["reward.0.weight"].shape[1] - latent,
            outputs=weights["policy.2.bias"].shape[0],
        )

    @property
    def words(self) -> str:
        """The actions."""
        what = f"{self.action} choices" if self.discrete else f"{self.action} numbers"
        return f"{'discrete' if self.discrete else 'continuous'} ({what})"

    def inputs(self, part: str) -> dict[str, int]:
        """The blocks that the first layer of a part sees, in their order."""
        first = {"obs": self.obs} if part == "encoder" else {"latent": self.latent}
        last = {"action": self.action} if part in WITH_ACTION else {}
        return {**first, "task": self.task, **last}


@dataclass(frozen=True)
class Source:
    """Where the weights come from."""

    told: str
    """For people: the run, its step and its task."""
    weights: Tensors
    tasks: tuple[str, ...]
    """Its tasks in their order; one where it had a single one."""
    like: str | None = None
    """The task there whose embedding a task begins with that is not among them."""


@dataclass
class Transfer:
    """What became of each part."""

    weights: dict[str, Tensor]
    notes: dict[str, list[str]] = field(default_factory=dict)

    def table(self, source: Source) -> tuple[str, ...]:
        """A line per part, below one that says where the weights come from."""
        lines = [f"  {part:<13}{'; '.join(dict.fromkeys(own))}" for part, own in self.notes.items()]
        return f"Begins with the weights of {source.told}:", *lines


def transfer(
    model: WorldModel, tasks: Sequence[str], source: Source, generator: torch.Generator
) -> Transfer:
    """The weights that a model of `tasks` begins with; ConfigError where they do not fit."""
    here, there = dict(model.state_dict()), source.weights
    try:
        own, old = Sizes.of(here), Sizes.of(there)
    except KeyError as error:
        raise ConfigError(
            f"The weights of {source.told} cannot carry over to this run: both must learn from one "
            f"vector of observations, and one of them has no {error.args[0]}, so that it sees "
            "images or a dict."
        ) from None
    if own.discrete != old.discrete or (own.discrete and own.action != old.action):
        raise ConfigError(
            f"The actions of {source.told} are {old.words}, but those of this run are {own.words}: "
            "continuous actions carry over to continuous ones, discrete ones to as many choices."
        )
    embeddings = _embeddings(source, tasks, model, generator)
    done = Transfer(here)
    for name, weight in here.items():
        part = name.split(".")[0]
        notes = done.notes.setdefault(part, [])
        if name == EMBEDDING:
            done.weights[name] = _new_rows(weight, tasks, source, embeddings, notes)
        elif name not in there:
            if part not in OPTIONAL:
                raise _unfit(source, name, "absent", tuple(weight.shape))
            notes.append("new")
        elif _is_first(name):
            blocks = own.inputs(part), old.inputs(part)
            done.weights[name] = _columns(weight, there[name], *blocks, notes)
        elif name in ("policy.2.weight", "policy.2.bias") and not own.discrete:
            done.weights[name] = _outputs(weight, there[name], own.action, old.action)
            if own.action != old.action:
                notes.append(f"actions: {_share(own.action, old.action)}")
        else:
            done.weights[name] = there[name]
        if done.weights[name].shape != weight.shape:
            raise _unfit(source, name, tuple(done.weights[name].shape), tuple(weight.shape))
    if old.task and not own.task:
        (chosen, words), *_ = embeddings.values()
        for name in [name for name in here if _is_first(name) and name in there]:
            part = name.split(".")[0]
            bias, at = name.replace("weight", "bias"), sum(_before_task(old.inputs(part)))
            done.weights[bias] = there[bias] + there[name][:, at : at + old.task] @ chosen
            done.notes[part].append(f"the embedding of {words} is in its bias")
    for name in there.keys() - here.keys():
        part = name.split(".")[0]
        if part not in OPTIONAL:
            raise _unfit(source, name, tuple(there[name].shape), "absent")
        if part != "tasks":  # which the biases tell of
            done.notes[part] = ["left out, this run has none"]
    del done.notes["target_q"]  # as q
    done.notes = {part: notes or ["all"] for part, notes in done.notes.items()}
    return done


def check_meaning(told: str, there: Mapping[str, Any], here: TDMPC2Config) -> None:
    """Refuse weights that were learned to be read otherwise; `there` is their `agent` as saved.

    A key that was not saved had its default: it is younger than the run.
    """
    for group, names in MEANING.items():
        saved, own = (there.get(group, {}), here.model) if group else (there, here)
        usual = type(own)()
        for name in names:
            learned = saved.get(name, getattr(usual, name))
            if learned != getattr(own, name):
                key = ".".join(filter(None, ("agent", group, name)))
                raise ConfigError(
                    f"{key} is {getattr(own, name)}, but {told} learned with {learned}, so its "
                    "weights would mean something else here; give this run the same."
                )


def _is_first(name: str) -> bool:
    """Whether a weight is that of a network's first layer."""
    part, *rest = name.split(".")
    return rest[-2:] == ["0", "weight"] and len(rest) == (3 if part in ("q", "target_q") else 2)


def _before_task(blocks: dict[str, int]) -> list[int]:
    names = list(blocks)
    return [blocks[name] for name in names[: names.index("task")]]


def _columns(
    new: Tensor, old: Tensor, own: dict[str, int], theirs: dict[str, int], notes: list[str]
) -> Tensor:
    """The inputs that both sides have, from there; the others as they are here."""
    if new.shape[0] != old.shape[0]:
        return old  # the caller names both shapes
    mixed = new.clone()
    at = start = 0
    for name, width in own.items():
        both = min(width, theirs[name])
        mixed[:, at : at + both] = old[:, start : start + both]
        at, start = at + width, start + theirs[name]
        if name != "task" and width != theirs[name]:
            notes.append(f"{name} inputs: {_share(width, theirs[name])}")
    return mixed


def _share(here: int, there: int) -> str:
    return f"{here} of {there} taken" if here < there else f"{there} taken, {here - there} new"


def _outputs(new: Tensor, old: Tensor, own: int, theirs: int) -> Tensor:
    """The policy's means and log stds of the actions that both sides have."""
    if new.shape[1:] != old.shape[1:]:
        return old
    mixed, both = new.clone(), min(own, theirs)
    mixed[:both], mixed[own : own + both] = old[:both], old[theirs : theirs + both]
    return mixed


def _embeddings(
    source: Source, tasks: Sequence[str], model: WorldModel, generator: torch.Generator
) -> dict[str, tuple[Tensor, str]]:
    """For each task here the embedding that it begins with, and whose it is in words."""
    if EMBEDDING not in source.weights:
        if source.like is not None:
            raise ConfigError(
                f"train.init_task is {source.like}, but {source.told} has one task and no "
                "embeddings; leave it out."
            )
        return {}
    table = source.weights[EMBEDDING]
    if source.like is not None and source.like not in source.tasks:
        known = ", ".join(source.tasks)
        raise ConfigError(
            f"train.init_task is {source.like}, which is no task of {source.told}; choose from "
            f"{known}."
        )
    found = {}
    for task in tasks:
        like = task if task in source.tasks else source.like
        if like is None:
            fresh = torch.rand(table.shape[1], generator=generator) * 0.04 - 0.02
            found[task] = fresh.to(table), f"a new task ({task})"
        else:
            found[task] = table[source.tasks.index(like)], like
    return found


def _new_rows(
    fresh: Tensor,
    tasks: Sequence[str],
    source: Source,
    embeddings: dict[str, tuple[Tensor, str]],
    notes: list[str],
) -> Tensor:
    """The embeddings of several tasks here."""
    if not embeddings:
        notes.append("new")
        return fresh
    if source.weights[EMBEDDING].shape[1] != fresh.shape[1]:
        return source.weights[EMBEDDING]
    notes += [f"{task} as {words}" for task, (_, words) in embeddings.items()]
    return torch.stack([embedding for embedding, _ in embeddings.values()]).to(fresh)


def _unfit(source: Source, name: str, there: object, here: object) -> ConfigError:
    return ConfigError(
        f"The weights of {source.told} do not fit this run: {name} is {there} there and {here} "
        f"here. Give this run the agent.model (and agent.model.task_dim) of {source.told}."
    )
