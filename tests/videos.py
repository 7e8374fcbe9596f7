"""Reading videos that were made."""

from __future__ import annotations

import warnings
from pathlib import Path

import imageio.v2 as imageio
import numpy as np


def frame(path: Path, number: int) -> np.ndarray:
    """One picture of a video, [height, width, 3]."""
    with warnings.catch_warnings():
        # imageio-ffmpeg leaves its pipes open where ffmpeg has ended before it is told to.
        warnings.simplefilter("ignore", ResourceWarning)
        with imageio.get_reader(path) as reader:
            return np.array(reader.get_data(number))
