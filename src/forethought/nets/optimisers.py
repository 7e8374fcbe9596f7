"""Optimisers: Adam in its fused form, DeepMind's RMSProp, gradient clipping, and their state as
tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

ADAM = {"step", "exp_avg", "exp_avg_sq"}
"""What Adam remembers of a parameter."""


class FusedAdam(torch.optim.Adam):
    """Adam by the fused kernels of torch, called directly: bit for bit the same steps and state.

    What lies between torch.optim's `step` and its kernel (hooks, profiler, sorting by device and
    type) takes longer than the kernel itself where networks are small. Parameters of a group are
    on one device, and all of them have gradients or none.
    """

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of every group that has gradients."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            states = [self.state[p] for p in parameters]
            if not all(states):
                self._begin([p for p, state in zip(parameters, states) if not state])
            steps = [state["step"] for state in states]
            beta1, beta2 = group["betas"]
            with torch.no_grad():
                torch._foreach_add_(steps, 1)
                torch._fused_adam_(
                    parameters,
                    [p.grad for p in parameters],
                    [state["exp_avg"] for state in states],
                    [state["exp_avg_sq"] for state in states],
                    [],
                    steps,
                    lr=group["lr"],
                    beta1=beta1,
                    beta2=beta2,
                    weight_decay=0.0,
                    eps=group["eps"],
                    amsgrad=False,
                    maximize=False,
                )

    step.hooked = True  # type: ignore[attr-defined]  # torch.optim wraps what does not say so

    def _begin(self, parameters: list[Tensor]) -> None:
        for p in parameters:
            state = self.state[p]
            state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
            state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Gradients are dropped, not zeroed."""
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None


def adam(groups: list[dict[str, Any]], eps: float) -> FusedAdam:
    """Adam with one learning rate per group. Fused: a quarter of the default's time on a CPU."""
    return FusedAdam(groups, eps=eps, fused=True)


class DeepMindRMSProp(torch.optim.Optimizer):
    """RMSProp as DeepMind's released DQN code has it, for a loss summed over the batch:

        g  <- decay g  + (1 - decay) dw
        g2 <- decay g2 + (1 - decay) dw^2
        w  <- w - lr dw / sqrt(g2 - g^2 + epsilon)

    Centred, epsilon inside the root, no momentum: what the paper calls the gradient's momentum is
    the decay of g. torch.optim.RMSprop has its epsilon outside the root.
    """

    remembers = {"grad_avg", "square_avg"}

    def __init__(
        self, parameters: Iterable[nn.Parameter], lr: float, decay: float, epsilon: float
    ) -> None:
        super().__init__(parameters, {"lr": lr, "decay": decay, "epsilon": epsilon})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step along the gradients that there are."""
        for group in self.param_groups:
            weights: list[Tensor] = [p for p in group["params"] if p.grad is not None]
            dw: list[Tensor] = [p.grad for p in weights if p.grad is not None]
            if not weights:
                continue
            for p in weights:
                if not self.state[p]:
                    self.state[p] = {key: torch.zeros_like(p) for key in sorted(self.remembers)}
            g = [self.state[p]["grad_avg"] for p in weights]
            g2 = [self.state[p]["square_avg"] for p in weights]
            keep = 1 - group["decay"]
            torch._foreach_lerp_(g, dw, keep)
            torch._foreach_mul_(g2, group["decay"])
            torch._foreach_addcmul_(g2, dw, dw, value=keep)
            root = torch._foreach_addcmul(g2, g, g, value=-1.0)
            # A variance: where a gradient hardly changes, rounding takes it below 0, and beyond
            # epsilon if the gradient is large.
            torch._foreach_clamp_min_(root, 0.0)
            torch._foreach_add_(root, group["epsilon"])
            torch._foreach_sqrt_(root)
            torch._foreach_addcdiv_(weights, dw, root, value=-group["lr"])


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float) -> float:
    """Scale all gradients so that their joint norm is at most `limit`; returns the norm before.

    Nothing is written where nothing has to be scaled, which is nearly always, nor where the norm is
    not finite: no step follows then, and the gradients still tell where it comes from.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = float(nn.utils.get_total_norm(gradients, foreach=True))
    if limit < norm < math.inf:
        torch._foreach_mul_(gradients, limit / (norm + 1e-6))
    return norm


def optimiser_tensors(
    optimiser: torch.optim.Optimizer, names: dict[Tensor, str]
) -> dict[str, Tensor]:
    """Everything the optimiser remembers, by parameter name: `layer.weight/exp_avg`."""
    return {
        f"{names[parameter]}/{key}": torch.as_tensor(value)
        for parameter, state in optimiser.state.items()
        for key, value in state.items()
    }


def restore_optimiser(
    optimiser: torch.optim.Optimizer, names: dict[Tensor, str], tensors: dict[str, Tensor]
) -> None:
    """The inverse of `optimiser_tensors`; ValueError if they are of other parameters."""
    by_name = {name: parameter for parameter, name in names.items()}
    memory: set[str] = getattr(optimiser, "remembers", ADAM)
    optimiser.state.clear()
    for path, value in tensors.items():
        name, _, key = path.rpartition("/")
        parameter = by_name[name]
        wanted = torch.Size() if key == "step" else parameter.shape
        if key not in memory or value.shape != wanted:
            raise ValueError(f"{path} is {tuple(value.shape)}, but must be {tuple(wanted)}")
        # Fused Adam keeps everything beside its parameter, the count of its steps too.
        optimiser.state[parameter][key] = value.clone().to(parameter.device)
    for parameter, state in optimiser.state.items():
        if state.keys() != memory:
            kept = f"not all that {type(optimiser).__name__} keeps"
            raise ValueError(f"{names[parameter]} has {', '.join(state)}, {kept}")
