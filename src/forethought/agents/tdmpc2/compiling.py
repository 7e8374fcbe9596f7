"""What `agent.compile` does to the model: fused C kernels, torch.compile, or nothing.

What is compiled was decided by measuring. On a CPU (one thread, size 5, ms): LayerNorm with Mish
of 512 x 512 takes 1.04 as tensor operations, 0.98 compiled by torch, 0.49 in C; with its gradient
(768 x 512) 4.1, 7.9 and 1.5; SimNorm 1.17, 0.86 and 0.57; the two-hot loss of 3840 x 101 with its
gradient 2.0 and 1.5. So there `full` is the C kernels and a compiled loss. On CUDA, where launching
many small kernels costs most, every network is one graph, and so are the model's losses.
"""

from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING, Any

import torch

from forethought.nets.compiled import (
    Backend,
    Compiled,
    CompiledTwoHot,
    cannot_compile,
    keep_compiled,
)
from forethought.nets.kernels import native_kernels
from forethought.nets.layers import MLP, use_kernels

if TYPE_CHECKING:
    from forethought.agents.tdmpc2.model import WorldModel
    from forethought.agents.tdmpc2.update import Learner

NETWORK_METHODS = ("joined", "from_latent_part")
"""Ways through a network of z and a; others are those of an MLP."""


def choose(mode: str, device: torch.device) -> str:
    """off, kernels or full: what a mode means on a device; auto is the one that gains there."""
    if mode != "auto":
        return mode
    if device.type == "cuda":
        return "full"
    return "kernels" if device.type == "cpu" and native_kernels(device)[0] else "off"


def compile_model(model: WorldModel, mode: str, device: torch.device) -> tuple[str, ...]:
    """Prepares the model; sentences that say what was done."""
    chosen = choose(mode, device)
    notes: tuple[str, ...] = ()
    if chosen == "off":
        return notes
    if chosen == "kernels" or device.type == "cpu":
        kernels, note = native_kernels(device)
        notes += (note,)
        if kernels is not None:
            use_kernels(model, kernels)
    if chosen == "kernels":
        return notes
    reason = cannot_compile(device)
    if reason is not None:
        return (*notes, f"Nothing is compiled by torch: {reason}.")
    place = keep_compiled()
    what = "the two-hot losses"
    if device.type == "cuda":
        compile_networks(model)
        what = "the networks and the model's losses"
    model.two_hot = CompiledTwoHot(model.two_hot)
    return (*notes, f"torch.compile translates {what} at their first use, into {place}.")


def compile_networks(model: WorldModel, backend: Backend = "inductor") -> None:
    """Lets every network be one graph. Networks of the same shapes, such as all Q functions, share
    theirs: which of them is asked is no part of it."""
    shared: dict[Any, Compiled] = {}
    for network in model.modules():
        if not isinstance(network, MLP):
            continue
        names = [name for name in NETWORK_METHODS if hasattr(network, name)] or ["forward"]
        for name in names:
            function = getattr(type(network), name)
            if function not in shared:
                shared[function] = Compiled(function, "a network", backend)
            setattr(network, name, MethodType(shared[function], network))


def compile_learner(learner: Learner, mode: str, device: torch.device) -> None:
    """The model's losses as one graph, forwards and backwards, on CUDA."""
    full = choose(mode, device) == "full" and cannot_compile(device) is None
    if full and device.type == "cuda":
        compile_losses(learner)


def compile_losses(learner: Learner, backend: Backend = "inductor") -> None:
    compiled = Compiled(learner.model_losses, "the model's losses", backend)
    learner.model_losses = compiled  # type: ignore[method-assign]
