"""A slow, obvious replay of n-step transitions: plain lists of rows, and the rules one by one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from hypothesis import strategies as st

from forethought.config import PrioritizedReplayConfig, UniformReplayConfig
from forethought.replay import NStepReplay
from forethought.spaces import Column, EnvSpec

CPU = torch.device("cpu")
GAMMA = 0.9
SPEC = EnvSpec(
    "stub:transitions",
    spaces.Dict(
        {
            "where": spaces.Box(0, 1e6, (2,), np.float32),  # environment, row: finds the row again
            "frame": spaces.Box(0, 255, (2,), np.uint8),
        }
    ),
    spaces.Discrete(9),
    None,
    1,
    True,
    (Column("life_lost", (), np.dtype(np.bool_), "life_lost"),),
)
ENDS = ("terminated", "truncated", "both", "close")


@dataclass
class Case:
    """A small replay and what happens to it."""

    kind: str
    num_envs: int
    capacity: int  # per environment
    n_step: int
    frames: int
    pad: str
    clip: bool
    events: list[tuple[int, str]]  # environment; '', 'life', or how the episode ends
    options: dict[str, Any] = field(default_factory=dict)

    def replay(self, seed: int = 0, **options: Any) -> NStepReplay:
        make: Any = PrioritizedReplayConfig if self.kind == "prioritized" else UniformReplayConfig
        rows = self.capacity * self.num_envs
        return NStepReplay(
            SPEC,
            make(capacity_rows=rows, block_rows=3, **{**self.options, **options}),
            self.num_envs,
            self.n_step,
            GAMMA,
            np.random.default_rng(seed),
            CPU,
            {"obs/frame": self.frames} if self.frames > 1 else {},
            self.pad,
            clip_rewards=self.clip,
            cut="life_lost",
        )

    @property
    def beta(self) -> float | None:
        return 0.6 if self.kind == "prioritized" else None


@st.composite
def cases(draw: Any) -> Case:
    num_envs, n_step = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    frames = draw(st.sampled_from([1, 2, 4]))
    capacity = n_step + frames + draw(st.integers(0, 9))
    # Mostly plain steps, so that some episodes outlast the ring; or mostly ends, so that many have
    # a single row.
    step = draw(st.sampled_from([1, 4, 20]))
    what = st.sampled_from([""] * step + ["life", *ENDS])
    events = st.lists(st.tuples(st.integers(0, num_envs - 1), what), min_size=5, max_size=70)
    kind = draw(st.sampled_from(["uniform", "prioritized"]))
    pad, clip = draw(st.sampled_from(["zeros", "first"])), draw(st.booleans())
    return Case(kind, num_envs, capacity, n_step, frames, pad, clip, draw(events))


class Reference:
    """All rows ever stored, and all priorities."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.rng = np.random.default_rng(99)
        self.rows: list[list[dict[str, Any]]] = [[] for _ in range(case.num_envs)]
        self.finished: list[set[int]] = [set() for _ in range(case.num_envs)]
        self.priority: dict[tuple[int, int], float] = {}
        self.max_priority = 1.0

    def apply(self, env: int, what: str, *replays: NStepReplay) -> None:
        """The next row of an environment, or the end of its episode without one."""
        rows, finished = self.rows[env], self.finished[env]
        first = not rows or rows[-1]["episode"] in finished
        if what == "close":
            for replay in replays:
                replay.close_episode(env)
            if not first:
                finished.add(rows[-1]["episode"])
        else:
            row = self._row(env, len(rows), first, what)
            for replay in replays:
                replay.add(row, env)
            age = 0 if first else rows[-1]["age"] + 1
            rows.append({**row, "episode": len(finished), "age": age})
            if what in ENDS:
                finished.add(len(finished))
        valid = self.valid()
        alpha = 0.5
        self.priority = {
            key: self.priority.get(key, self.max_priority**alpha) for key in sorted(valid)
        }

    def _row(self, env: int, number: int, first: bool, what: str) -> dict[str, Any]:
        rng = self.rng
        return {
            "obs": {
                "where": np.array([env, number], np.float32),
                "frame": rng.integers(1, 256, 2).astype(np.uint8),
            },
            "action": int(rng.integers(0, 9)) * (not first),
            "reward": np.float32(rng.choice([-2.0, -0.5, 0.0, 0.3, 7.0]) * (not first)),
            "terminated": what in ("terminated", "both"),
            "truncated": what in ("truncated", "both"),
            "is_first": first,
            "life_lost": what == "life",
        }

    def valid(self) -> set[tuple[int, int]]:
        """Every (environment, row) that may be drawn."""
        case, found = self.case, set()
        for env, rows in enumerate(self.rows):
            oldest = max(0, len(rows) - case.capacity)
            for start in range(oldest, len(rows) - 1):
                row = rows[start]
                goes_on = rows[start + 1]["episode"] == row["episode"]
                last = start + case.n_step
                whole = last < len(rows) and rows[last]["episode"] == row["episode"]
                ended = row["episode"] in self.finished[env]
                stacked = start - min(row["age"], case.frames - 1) >= oldest
                if goes_on and (whole or ended) and stacked:
                    found.add((env, start))
        return found

    def transition(self, env: int, start: int) -> tuple[float, float, int]:
        """The n-step return, the discount and the last row, step by step."""
        rows, total, last = self.rows[env], 0.0, start
        for k in range(self.case.n_step):
            if start + k + 1 >= len(rows):
                break
            row = rows[start + k + 1]
            if row["episode"] != rows[start]["episode"]:
                break
            reward = float(row["reward"])
            total += GAMMA**k * (np.sign(reward) if self.case.clip else reward)
            last = start + k + 1
            if row["terminated"] or row["life_lost"]:
                return total, 0.0, last
        return total, GAMMA ** (last - start), last

    def frames(self, env: int, number: int) -> np.ndarray:
        """The stack of a row, frame by frame; a single frame where nothing is stacked."""
        stack, age = [], self.rows[env][number]["age"]
        for back in range(self.case.frames - 1, -1, -1):
            frame = self.rows[env][number - min(back, age)]["obs"]["frame"]
            blank = back > age and self.case.pad == "zeros"
            stack.append(np.zeros_like(frame) if blank else frame)
        return np.stack(stack) if self.case.frames > 1 else stack[0]

    def update(self, keys: list[tuple[int, int]], errors: np.ndarray) -> None:
        """Late or not: what may no longer be drawn keeps out."""
        for key, error in zip(keys, errors.tolist()):
            if key in self.priority:
                self.priority[key] = (error + 1e-6) ** 0.5
                self.max_priority = max(self.max_priority, error + 1e-6)
