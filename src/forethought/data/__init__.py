"""Datasets on disk: packed episodes, their writer, reader and checks, and learning from them."""

from forethought.data.dataset import Dataset
from forethought.data.layout import DatasetError, Statistics, TaskInfo
from forethought.data.offline_replay import OfflineReplay
from forethought.data.verify import verify
from forethought.data.writer import from_gym_steps, write_dataset

__all__ = [
    "Dataset",
    "DatasetError",
    "OfflineReplay",
    "Statistics",
    "TaskInfo",
    "from_gym_steps",
    "verify",
    "write_dataset",
]
