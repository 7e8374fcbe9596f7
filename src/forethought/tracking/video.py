"""Videos: pictures in, an mp4 or GIF file out, which is either whole or absent.

Needs the extra `video` (imageio, which brings ffmpeg and Pillow along). A run keeps its own under
`videos/`, named after the agent steps at which they were taken.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import struct
import subprocess
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forethought.config import ConfigError, ForethoughtError
from forethought.extras import install_extra
from forethought.files import fsync_dir, fsync_file

Picture = NDArray[np.uint8]
"""[height, width, 3]."""

SUFFIXES = (".mp4", ".gif")
LEAST_SIDE = 320
"""Pixels that the shorter side has at least; smaller pictures are enlarged by a whole factor."""
GIF_FPS = 25
"""A GIF has no more frames per second: it is large, and many viewers show no more than 50. Each
stays for a whole number of hundredths of a second, which is all that the format can say."""
PREVIEW_SECONDS = 120.0
FONT_SIZES = (15, 13, 11, 9)
INK, PAPER = (235, 235, 235), (24, 26, 30)


class VideoError(ForethoughtError):
    """A video could not be written."""


def require_video(what: str) -> None:
    """Refuse, before any work, what needs the extra that is not installed."""
    if any(importlib.util.find_spec(name) is None for name in ("imageio", "imageio_ffmpeg")):
        raise ConfigError(f"{what} needs imageio with ffmpeg: run {install_extra('video')}.")


def check_file(path: Path) -> None:
    """Refuse, before any work, a file that cannot be a video or cannot be written there."""
    require_video(f"The video {path}")
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"The video {path} must end in {' or '.join(SUFFIXES)}.")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"The video {path} cannot be written: there is no folder {folder}.")
    if path.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"The video {path} cannot be written there: choose another file.")


@contextlib.contextmanager
def write_video(path: Path, fps: float) -> Iterator[Callable[[Picture, Sequence[str]], None]]:
    """Yields what takes the pictures, each with lines to stand below it.

    The file appears at `path` when the block ends well, and replaces an older one. `fps` is the
    task's own rate, so that the video runs at the task's own speed.
    """
    gif = path.suffix.lower() == ".gif"
    hundredths = math.ceil(round(100 / min(fps, GIF_FPS), 6))
    every = hundredths * fps / 100 if gif else 1.0  # pictures given for each one kept
    temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    count = kept = 0

    def add(picture: Picture, lines: Sequence[str] = ()) -> None:
        nonlocal count, kept
        if count >= kept * every:
            kept += 1
            with _failing_as_video(path):
                writer.append_data(_even(_captioned(_enlarged(picture), lines)))
        count += 1

    try:
        with _failing_as_video(path):
            writer: Any = _Gif(temporary, 10 * hundredths) if gif else _mp4(temporary, fps)
        try:
            yield add
        except BaseException:
            with contextlib.suppress(VideoError), _failing_as_video(path):
                writer.close()  # the first error is the one to show
            raise
        with _failing_as_video(path):
            writer.close()
            if not gif:
                _check_whole(temporary, kept)
            fsync_file(temporary)
            temporary.replace(path)
            fsync_dir(path.absolute().parent)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _failing_as_video(path: Path) -> Iterator[None]:
    """What imageio and ffmpeg fail with, as one sentence."""
    try:
        yield
    except (OSError, RuntimeError, ValueError, OverflowError, subprocess.SubprocessError) as error:
        why = str(error).strip().splitlines() or [type(error).__name__]  # then ffmpeg's command
        raise VideoError(f"The video {path} could not be written: {why[0]}") from error


def _mp4(path: Path, fps: float) -> Any:
    """What sends pictures to ffmpeg."""
    import imageio.v2 as imageio

    return imageio.get_writer(
        path,
        format="FFMPEG",
        mode="I",
        fps=fps,
        codec="libx264",
        macro_block_size=1,  # our pictures are even; it would stretch them to multiples
        quality=7,
        ffmpeg_log_level="error",
        output_params=["-movflags", "+faststart"],  # a browser plays it before it has it all
    )


def _check_whole(path: Path, pictures: int) -> None:
    """imageio does not ask how ffmpeg ended: on a full disk it leaves a stump without a word."""
    import imageio_ffmpeg

    try:
        found, _ = imageio_ffmpeg.count_frames_and_secs(path)
    except RuntimeError:
        found = 0
    if found != pictures:
        raise OSError(f"ffmpeg kept {found} of {pictures} pictures. Is the disk full?")


class _Gif:
    """Pillow writes a GIF at once; imageio's way to it fails a second time when it is let go."""

    def __init__(self, path: Path, milliseconds: int) -> None:
        self.path, self.milliseconds = path, milliseconds
        self._pictures: list[Any] = []

    def append_data(self, picture: Picture) -> None:
        from PIL import Image

        self._pictures.append(Image.fromarray(picture))

    def close(self) -> None:
        if not self._pictures:
            raise ValueError("there is no picture.")
        first, *rest = self._pictures
        first.save(
            self.path,
            format="GIF",
            save_all=True,
            append_images=rest,
            duration=self.milliseconds,
            loop=0,
        )


def preview(path: Path, fps: int = 10, width: int = 256) -> tuple[bytes, tuple[int, int]]:
    """A video as a small GIF, for viewers that take no other, and its (width, height)."""
    import imageio_ffmpeg

    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", str(path)]
    command += ["-vf", f"fps={fps},scale={width}:-1", "-loop", "0", "-f", "gif", "-"]
    done = subprocess.run(command, capture_output=True, check=False, timeout=PREVIEW_SECONDS)
    if done.returncode != 0:
        raise VideoError(f"{path} could not be made a GIF: {done.stderr.decode().strip()}")
    gif = done.stdout
    return gif, struct.unpack("<HH", gif[6:10])  # the GIF's header


def _enlarged(picture: Picture) -> Picture:
    factor = math.ceil(LEAST_SIDE / min(picture.shape[:2]))
    return picture.repeat(factor, axis=0).repeat(factor, axis=1) if factor > 1 else picture


def _even(picture: Picture) -> Picture:
    """Encoders halve the colours' resolution, so both sides must be even."""
    height, width, _ = picture.shape
    return np.pad(picture, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")


def _captioned(picture: Picture, lines: Sequence[str]) -> Picture:
    """The picture with a strip of text below it, in the largest size at which all lines fit."""
    if not lines:
        return picture
    from PIL import Image, ImageDraw

    # The strip is as high for small letters as for large ones: all pictures must have one size.
    width, margin, step = picture.shape[1], 6, FONT_SIZES[0] + 4
    strip = Image.new("RGB", (width, step * len(lines) + margin), PAPER)
    draw = ImageDraw.Draw(strip)
    for size in FONT_SIZES:
        font = _font(size)
        if max(draw.textlength(line, font=font) for line in lines) <= width - 2 * margin:
            break
    for number, line in enumerate(lines):
        draw.text((margin, margin // 2 + step * number), line, fill=INK, font=font)
    return np.concatenate([picture, np.asarray(strip)])


@cache
def _font(size: int) -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(size)
