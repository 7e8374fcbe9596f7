"""What the code of an environment raises, as an error of ours that shows the environment's lines.

An environment that calls `sys.exit` has failed like one that raises: it must not end the run, and
least of all with an exit code that means something else. Subclasses of SystemExit are not meant
here, for a signal is told so; they pass.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import gymnasium

from forethought.config import ForethoughtError

Error = TypeVar("Error", bound=ForethoughtError)
GYMNASIUM = Path(gymnasium.__file__).parent
ON_THE_WAY = (
    str(Path(__file__).parents[1]),
    str(GYMNASIUM / "core.py"),
    str(GYMNASIUM / "wrappers"),
    str(GYMNASIUM / "envs" / "registration.py"),
    str(Path(traceback.__file__).parent / "importlib"),
    "<frozen importlib",
)
"""Beginnings of file names that lie between a request and the environment's own code."""
RAISED = (Exception, SystemExit)
"""What `passes` decides about."""


def passes(error: BaseException) -> bool:
    """Whether it is not the environment's: already a sentence of ours, or the word of a signal."""
    ours = isinstance(error, ForethoughtError)
    return ours or (isinstance(error, SystemExit) and type(error) is not SystemExit)


def wrapped(kind: type[Error], sentence: str, error: BaseException) -> Error:
    """The error of ours, with the traceback of the environment's as a note."""
    ours = kind(sentence)
    trace = _from_its_own_code(error.__traceback__)
    ours.add_note("".join(traceback.format_exception(type(error), error, trace)).rstrip())
    return ours


def _from_its_own_code(trace: TracebackType | None) -> TracebackType | None:
    """Without the frames that led there; the last one stays, whosever it is."""
    while trace is not None and trace.tb_next is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(ON_THE_WAY):
            break
        trace = trace.tb_next
    return trace
