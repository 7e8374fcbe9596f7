"""The configuration of a run: frozen dataclasses, layers, validation, differences. No torch here.

A dataclass field carries its help text as a docstring and its rules in `__post_init__`, so a
configuration that exists is a valid one. YAML files, presets and flags all become nested dicts
that are layered and then read by `from_dict`: one check of names, types and ranges for all three.

errors.py    sentences for people        groups.py   environments, replay, training, evaluation, ...
reading.py   dataclasses from plain data and back    layers.py   layering, what is idle, differences
run.py       the whole run
"""

from forethought.config.errors import (
    ConfigError,
    ForethoughtError,
    MemoryRefused,
    memory_refused,
    nearest,
    require,
    unknown,
)
from forethought.config.groups import (
    ATARI,
    LONGEST_TIMEOUT_SECONDS,
    AtariConfig,
    EnvConfig,
    EpisodeReplayConfig,
    EvalConfig,
    OfflineConfig,
    PrioritizedReplayConfig,
    ReplayConfig,
    TrackConfig,
    TrainConfig,
    TransitionReplayConfig,
    UniformReplayConfig,
    check_device,
    default_replay,
    replay_kinds,
)
from forethought.config.layers import diff, flatten, layer, merge, refuse_idle
from forethought.config.limits import (
    MOST_CHANNELS,
    MOST_PARTS,
    MOST_UNITS,
    require_size,
    require_sizes,
)
from forethought.config.reading import default_kind, field_types, from_dict, to_dict, union_members
from forethought.config.run import RunConfig, build_run_config, check_options, refuse_idle_groups

__all__ = [
    "ATARI",
    "LONGEST_TIMEOUT_SECONDS",
    "MOST_CHANNELS",
    "MOST_PARTS",
    "MOST_UNITS",
    "AtariConfig",
    "ConfigError",
    "EnvConfig",
    "EpisodeReplayConfig",
    "EvalConfig",
    "ForethoughtError",
    "MemoryRefused",
    "OfflineConfig",
    "PrioritizedReplayConfig",
    "ReplayConfig",
    "RunConfig",
    "TrackConfig",
    "TrainConfig",
    "TransitionReplayConfig",
    "UniformReplayConfig",
    "build_run_config",
    "check_device",
    "check_options",
    "default_kind",
    "default_replay",
    "diff",
    "field_types",
    "flatten",
    "from_dict",
    "layer",
    "memory_refused",
    "merge",
    "nearest",
    "refuse_idle",
    "refuse_idle_groups",
    "replay_kinds",
    "require",
    "require_size",
    "require_sizes",
    "to_dict",
    "union_members",
    "unknown",
]
