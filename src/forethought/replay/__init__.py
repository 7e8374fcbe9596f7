"""Replay: what the agent has seen, kept in rows and drawn in pieces that never cross an episode:
slices for models, n-step transitions for values."""

from forethought.replay.diagnostics import replay_metric_names
from forethought.replay.nstep import NStepBatch, NStepReplay
from forethought.replay.replay import Replay
from forethought.replay.ring_replay import RingReplay
from forethought.replay.rows import Batch, ReplayError, RowSpec
from forethought.replay.stacks import FrameStacker

__all__ = [
    "Batch",
    "FrameStacker",
    "NStepBatch",
    "NStepReplay",
    "Replay",
    "ReplayError",
    "RingReplay",
    "RowSpec",
    "replay_metric_names",
]
