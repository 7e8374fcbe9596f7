"""Replay: what the agent has seen, kept in rows and drawn in slices that never cross an episode."""

from forethought.replay.replay import Replay
from forethought.replay.rows import Batch, ReplayError, RowSpec
from forethought.replay.stacks import FrameStacker

__all__ = ["Batch", "FrameStacker", "Replay", "ReplayError", "RowSpec"]
