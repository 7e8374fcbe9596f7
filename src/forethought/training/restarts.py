"""Restarts of training environments that failed: how many there were, and when it is enough.

An environment that fails again and again without finishing an episode will not mend itself, so the
number of restarts in a row is bounded; a finished episode begins the count anew.
"""

from __future__ import annotations

import logging
from typing import Any

from forethought.spaces.structure import EnvFailure
from forethought.tracking import Tracker

log = logging.getLogger("forethought")


class Restarts:
    """The counts of one run, part of its saved state."""

    def __init__(self, allowed: int, num_envs: int, tracker: Tracker) -> None:
        self.allowed = allowed
        """In a row, per environment; 0 halts at the first failure."""
        self.in_a_row = [0] * num_envs
        self.total = 0
        self._tracker = tracker

    def count(self, i: int, failure: EnvFailure) -> None:
        """One more of environment i, told in the events and as a warning; the failure is raised
        when no more are allowed."""
        if self.in_a_row[i] >= self.allowed:
            raise self._last(i, failure)
        self.in_a_row[i] += 1
        self.total += 1
        log.warning(
            "Environment %d failed and is built anew (restart %d of at most %d in a row): %s",
            i,
            self.in_a_row[i],
            self.allowed,
            failure,
        )
        self._tracker.event(
            "env-restarted",
            env=i,
            reason=str(failure),
            in_a_row=self.in_a_row[i],
            total=self.total,
            traceback=_notes(failure),
        )

    def episode_finished(self, i: int) -> None:
        """Environment i works."""
        self.in_a_row[i] = 0

    def state(self) -> dict[str, Any]:
        return {"in_a_row": list(self.in_a_row), "total": self.total}

    def restore(self, state: dict[str, Any] | None) -> None:
        """None is a run that was saved before restarts were counted."""
        if state is not None:
            self.in_a_row, self.total = list(state["in_a_row"]), state["total"]

    def _last(self, i: int, failure: EnvFailure) -> EnvFailure:
        if not self.allowed:
            return failure
        last = EnvFailure(
            f"{str(failure).rstrip('.')}; environment {i} was restarted {self.allowed} times in a "
            "row without a finished episode (env.max_restarts), so the run halts."
        )
        for note in _notes(failure):
            last.add_note(note)
        last.__cause__ = failure.__cause__
        return last


def _notes(failure: EnvFailure) -> list[str]:
    """The original tracebacks."""
    return list(getattr(failure, "__notes__", ()))
