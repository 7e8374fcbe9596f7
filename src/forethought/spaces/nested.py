"""Nested dicts of arrays: the one shape in which observations, actions and masks travel.

A tree is a leaf (a numpy array, a torch tensor or a scalar) or a dict from names to trees. The same
functions serve numpy and torch; torch is never imported here, because a leaf that is a tensor can
only exist when somebody else has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

Tree = Any
"""A leaf, or a dict from names to trees (a recursive type would infect every caller with casts)."""


def tree_map(f: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """Apply `f` to the leaves of equally shaped trees; the first tree gives the key order."""
    if not isinstance(tree, Mapping):
        return f(tree, *others)
    for other in others:
        if not isinstance(other, Mapping) or other.keys() != tree.keys():
            raise ValueError(f"Trees differ: keys {_keys(tree)} beside {_keys(other)}.")
    return {key: tree_map(f, child, *(o[key] for o in others)) for key, child in tree.items()}


def flatten(tree: Tree, prefix: str = "") -> dict[str, Any]:
    """Leaves by path: {"a": {"b": x}} gives {"a/b": x}; a bare leaf has the prefix as its path."""
    if not isinstance(tree, Mapping):
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for key, child in tree.items():
        flat.update(flatten(child, f"{prefix}/{key}" if prefix else str(key)))
    return flat


def unflatten(flat: Mapping[str, Any]) -> Tree:
    """The inverse of `flatten` (with an empty prefix)."""
    if set(flat) == {""}:
        return flat[""]
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return tree


def stack(trees: Sequence[Tree]) -> Tree:
    """Equally shaped trees, stacked along a new first axis into fresh memory."""
    return tree_map(lambda *leaves: _stack_leaves(leaves), *trees)


def index(tree: Tree, i: Any) -> Tree:
    """Element, slice or selection `i` of the first axis of every leaf."""
    return tree_map(lambda leaf: leaf[i], tree)


def bitwise_equal(a: Tree, b: Tree) -> bool:
    """Whether two numpy trees have the same paths, types, shapes and bits (so 0.0 is not -0.0)."""
    flat_a, flat_b = flatten(a), flatten(b)
    if flat_a.keys() != flat_b.keys():
        return False
    pairs = ((np.asarray(flat_a[path]), np.asarray(flat_b[path])) for path in flat_a)
    return all(
        x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes() for x, y in pairs
    )


def _stack_leaves(leaves: Sequence[Any]) -> Any:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(leaves[0], torch.Tensor):
        return torch.stack(list(leaves))
    return np.stack(leaves)


def _keys(tree: Tree) -> str:
    return _listed(tree.keys()) if isinstance(tree, Mapping) else "none (a leaf)"


def _listed(names: Iterable[object]) -> str:
    return ", ".join(str(name) for name in names) or "none"
