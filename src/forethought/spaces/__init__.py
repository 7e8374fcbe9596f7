"""Spaces: what observations and actions look like in memory, and the checks at the boundary."""

from forethought.spaces.action_codec import ActionCodec
from forethought.spaces.masks import entity_keys, masked_mean
from forethought.spaces.random_actions import random_action
from forethought.spaces.spec import Column, EnvSpec
from forethought.spaces.structure import EnvError, EnvFailure, Leaf, Structure

__all__ = [
    "ActionCodec",
    "Column",
    "EnvError",
    "EnvFailure",
    "EnvSpec",
    "Leaf",
    "Structure",
    "entity_keys",
    "masked_mean",
    "random_action",
]
