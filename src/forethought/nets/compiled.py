"""torch.compile, with a way back: what cannot be compiled is computed as it is written.

A function is compiled at its first call, again for other shapes, and the result is kept in the
user's cache for later processes. Where compiling fails, one sentence says so and the function goes
on uncompiled; its results are the same up to rounding. An error of the function itself is no
failure of the compiler, and is raised.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forethought.maths import TwoHot
from forethought.nets.cache import user_cache

log = logging.getLogger("forethought")
Backend = str | Callable[..., Any]
"""What torch.compile hands its graphs to."""
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


class Compiled:
    """A function that torch.compile translates when it is first called."""

    def __init__(
        self, function: Callable[..., Any], name: str, backend: Backend = "inductor"
    ) -> None:
        self.function, self.name, self.backend = function, name, backend
        self._compiled: Callable[..., Any] | None = None
        self.failed = False

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self.failed or torch.compiler.is_compiling():  # inside another graph: part of that one
            return self.function(*args, **options)
        if self._compiled is not None:
            return self._attempt(self._compiled, *args, **options)
        with warnings.catch_warnings():
            # Constants that are kept between calls become constants of the graph, as they should;
            # and torch's compiler brings along modules that torch itself advises against.
            warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru")
            warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
            # Shapes hardly ever change in a run, and a graph of fixed shapes is the faster one.
            compiled = torch.compile(self.function, dynamic=False, backend=self.backend)
            result = self._attempt(compiled, *args, **options)
        self._compiled = compiled
        return result

    def _attempt(self, compiled: Callable[..., Any], *args: Any, **options: Any) -> Any:
        from torch._dynamo.exc import TorchDynamoException  # slow to import, and only needed here

        try:
            return compiled(*args, **options)
        except TorchDynamoException as error:
            self.failed = True
            cause = getattr(error, "inner_exception", error)
            reason = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
            log.warning(
                "torch.compile failed on %s (%s), so it is computed uncompiled.", self.name, reason
            )
            return self.function(*args, **options)


class CompiledTwoHot(TwoHot):
    """Two-hot distributions whose loss is compiled."""

    def __init__(self, plain: TwoHot, backend: Backend = "inductor") -> None:
        super().__init__(plain.bins, plain.low, plain.high)
        loss = Compiled(plain.cross_entropy, "the two-hot loss", backend)
        object.__setattr__(self, "_loss", loss)  # frozen as its parent is

    def cross_entropy(self, logits: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = self._loss(logits, target)  # type: ignore[attr-defined]
        return loss


def cannot_compile(device: torch.device) -> str | None:
    """Why torch.compile cannot work here, as far as can be told without trying; None if it may."""
    if device.type == "cuda":
        from importlib.util import find_spec

        return None if find_spec("triton") else "triton is not installed"
    if device.type != "cpu":
        return f"torch.compile is not used on {device.type}"
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    return None if compiler and shutil.which(compiler) else "no C++ compiler was found"


def keep_compiled() -> Path:
    """Where compiled code is kept: torch would put it into a folder that a restart empties, and
    does so for a user without a home."""
    if CACHE_VARIABLE not in os.environ:
        try:
            os.environ[CACHE_VARIABLE] = str(user_cache() / "torch-compile")
        except OSError:
            return Path(tempfile.gettempdir())
    return Path(os.environ[CACHE_VARIABLE])
