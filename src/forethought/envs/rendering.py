"""Which OpenGL backend draws the pictures of MuJoCo tasks here: EGL, then OSMesa, else none.

MuJoCo and dm_control read MUJOCO_GL once, when they are imported, and a backend that does not work
raises in the middle of that import or ends the process. So backends are tried in a process of their
own, and everything that needs no picture is imported with rendering switched off.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache

from forethought.config import ForethoughtError

BACKENDS = {"egl": "libegl1", "osmesa": "libosmesa6"}
"""Backends that need no screen, best first, and the Debian package of each."""
OFF = ("disable", "disabled", "off", "false", "0")
"""What MUJOCO_GL says to switch rendering off."""
PROBE_SECONDS = 60.0
PROBE = """
import mujoco
ball = '<mujoco><worldbody><light pos="0 0 3"/><geom size="1"/></worldbody></mujoco>'
model = mujoco.MjModel.from_xml_string(ball)
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
renderer = mujoco.Renderer(model, 32, 32)
renderer.update_scene(data)
assert renderer.render().std() > 0, "the picture is empty"
renderer.close()
"""


@cache
def probe(backend: str) -> str | None:
    """Draws one picture with a backend, in another process; None if it works, else the reason."""
    given = {"MUJOCO_GL": backend, "PYOPENGL_PLATFORM": backend}
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROBE],
            env={**os.environ, **given},
            capture_output=True,
            text=True,
            check=False,
            timeout=PROBE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"no picture within {PROBE_SECONDS:.0f} s"
    except OSError as error:
        return f"it could not be tried: {error.strerror}"
    if done.returncode == 0:
        return None
    # What an object says while it is being thrown away comes after the error itself.
    said = [line for line in done.stderr.splitlines() if line and not line.startswith(" ")]
    errors = [line for line in said if "Error" in line.partition(":")[0]]
    return next(iter(errors or said[-1:]), f"it ended with exit code {done.returncode}")


def choose_backend() -> str:
    """Settles MUJOCO_GL for this process and its children, before anything draws a picture.

    The user's own choice is never replaced, only refused in a sentence where it does not work.
    """
    given = os.environ.get("MUJOCO_GL", "").strip().lower()
    if given in OFF:
        raise ForethoughtError(
            f"MUJOCO_GL is {given}, so there are no pictures of MuJoCo tasks: unset it."
        )
    reasons = {}
    for backend in (given,) if given else BACKENDS:
        reason = probe(backend)
        if reason is None:
            os.environ["MUJOCO_GL"] = os.environ["PYOPENGL_PLATFORM"] = backend
            return backend
        reasons[backend] = reason
    told = "; ".join(f"{backend}: {reason}" for backend, reason in reasons.items())
    if given:
        raise ForethoughtError(
            f"MUJOCO_GL is {given}, which draws no pictures here ({told}): unset it, and the first "
            "backend that works is taken."
        )
    raise ForethoughtError(
        f"Pictures of MuJoCo tasks need EGL or OSMesa, and neither works here ({told}): install "
        f"{' or '.join(BACKENDS.values())}."
    )


@contextlib.contextmanager
def switched_off() -> Iterator[None]:
    """MUJOCO_GL says for the length of a block that nothing will be drawn.

    dm_control, left to itself, looks for a display when it is imported, which costs a second; and a
    backend that the user chose may not work, which must not matter to training.
    """
    before = os.environ.get("MUJOCO_GL")
    os.environ["MUJOCO_GL"] = "disable"
    try:
        yield
    finally:
        if before is None:
            del os.environ["MUJOCO_GL"]
        else:
            os.environ["MUJOCO_GL"] = before
