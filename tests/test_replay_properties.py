"""Replay against a slow, obvious reference: plain Python lists of rows, one per environment.

Whatever the order of rows, ends, environments and wrap-arounds: what is drawn is exactly what the
reference says may be drawn, with exactly the bits that were stored, as often as it should be.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from forethought.config import EpisodeReplayConfig, TransitionReplayConfig
from forethought.replay import Replay
from forethought.spaces import Column, EnvSpec

KINDS = {
    "episodes": EpisodeReplayConfig,
    "transitions": TransitionReplayConfig,
    "past ends": TransitionReplayConfig,
}
SPEC = EnvSpec(
    "stub:reference",
    spaces.Dict(
        {
            "where": spaces.Box(0, 1e6, (2,), np.float32),  # environment, row: finds the row again
            "noise": spaces.Box(-np.inf, np.inf, (3,), np.float32),
            "frame": spaces.Box(0, 255, (2,), np.uint8),
        }
    ),
    spaces.Dict({"move": spaces.Box(-1, 1, (2,), np.float32), "jump": spaces.Discrete(9)}),
    None,
    1,
    True,
    (Column("task", (), np.dtype(np.int64), "task"),),
)


@dataclass
class Case:
    """A small replay and what happens to it."""

    kind: str
    num_envs: int
    capacity: int  # per environment
    slice_rows: int
    frames: int
    pad: str
    events: list[tuple[int, str]]  # environment; '', 'terminated', 'truncated', 'both' or 'close'

    def replay(self, seed: int = 0) -> Replay:
        config = KINDS[self.kind](capacity_rows=self.capacity * self.num_envs, block_rows=3)
        rng = np.random.default_rng(seed)
        cpu = torch.device("cpu")
        stack = {"obs/frame": self.frames} if self.frames > 1 else {}
        return Replay(
            SPEC, config, self.num_envs, self.slice_rows, rng, cpu, stack, self.pad,
            past_ends=self.kind == "past ends",
        )  # fmt: skip


@st.composite
def cases(draw: Any) -> Case:
    num_envs = draw(st.integers(1, 3))
    slice_rows = draw(st.integers(1, 4))
    frames = draw(st.sampled_from([1, 1, 2, 4]))
    capacity = slice_rows + frames - 1 + draw(st.integers(0, 9))
    # Mostly plain steps, so that some episodes outlast the ring; or mostly ends.
    step = draw(st.sampled_from([1, 4, 20]))
    what = st.sampled_from([""] * step + ["terminated", "truncated", "both", "close"])
    events = st.lists(st.tuples(st.integers(0, num_envs - 1), what), min_size=5, max_size=70)
    kind, pad = draw(st.sampled_from(list(KINDS))), draw(st.sampled_from(["zeros", "first"]))
    return Case(kind, num_envs, capacity, slice_rows, frames, pad, draw(events))


@dataclass
class Reference:
    """All rows ever stored, and the rules in their plainest form."""

    case: Case
    rows: list[list[dict[str, Any]]] = field(default_factory=list)
    finished: list[set[int]] = field(default_factory=list)
    """Numbers of the finished episodes, per environment."""

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(99)
        self.rows = [[] for _ in range(self.case.num_envs)]
        self.finished = [set() for _ in range(self.case.num_envs)]

    def apply(self, env: int, what: str, replay: Replay) -> None:
        rows, finished = self.rows[env], self.finished[env]
        open_episode = bool(rows) and rows[-1]["episode"] not in finished
        if what == "close":
            replay.close_episode(env)
            if open_episode:
                finished.add(rows[-1]["episode"])
            return
        first = not open_episode
        rng = self.rng
        row = {
            "obs": {
                "where": np.array([env, len(rows)], np.float32),
                "noise": rng.standard_normal(3).astype(np.float32),
                "frame": rng.integers(1, 256, 2).astype(np.uint8),
            },
            "action": {
                "move": rng.uniform(-1, 1, 2).astype(np.float32) * (not first),
                "jump": int(rng.integers(0, 9)) * (not first),
            },
            "reward": np.float32(rng.standard_normal() * (not first)),
            "terminated": what in ("terminated", "both"),
            "truncated": what in ("truncated", "both"),
            "is_first": first,
            "task": int(rng.integers(0, 1000)),
        }
        replay.add(row, env)
        episode = len(finished)
        rows.append({**row, "episode": episode, "age": 0 if first else rows[-1]["age"] + 1})
        if what:
            finished.add(episode)

    def valid(self) -> dict[tuple[int, int], int]:
        """Every slice (environment, first row) that may be drawn, with its episode."""
        case, found = self.case, {}
        for env, rows in enumerate(self.rows):
            oldest = max(0, len(rows) - case.capacity)
            for start in range(oldest, len(rows)):
                part = self.part(env, start)
                needed = start - min(part[0]["age"], case.frames - 1)
                whole = len(part) == case.slice_rows
                if case.kind == "past ends" and len(part) > 1:
                    whole = whole or part[-1]["terminated"]
                done = part[0]["episode"] in self.finished[env] or case.kind != "episodes"
                if whole and done and needed >= oldest:
                    found[env, start] = part[0]["episode"]
        return found

    def part(self, env: int, start: int) -> list[dict[str, Any]]:
        """The rows of a slice as far as its episode goes."""
        rows = self.rows[env][start : start + self.case.slice_rows]
        return [row for row in rows if row["episode"] == rows[0]["episode"]]

    def odds(self) -> dict[tuple[int, int], float]:
        """How likely each valid slice must be."""
        valid = self.valid()
        if self.case.kind != "episodes":
            return dict.fromkeys(valid, 1 / len(valid)) if valid else {}
        starts = Counter((env, episode) for (env, _), episode in valid.items())
        return {
            (env, start): 1 / (len(starts) * starts[env, episode])
            for (env, start), episode in valid.items()
        }

    def frames(self, env: int, number: int) -> np.ndarray:
        """The stack of a row, frame by frame."""
        stack = []
        for back in range(self.case.frames - 1, -1, -1):
            age = self.rows[env][number]["age"]
            frame = self.rows[env][number - min(back, age)]["obs"]["frame"]
            blank = back > age and self.case.pad == "zeros"
            stack.append(np.zeros_like(frame) if blank else frame)
        return np.stack(stack)


def run(case: Case) -> tuple[Replay, Reference]:
    replay, reference = case.replay(), Reference(case)
    for env, what in case.events:
        reference.apply(env, what, replay)
    return replay, reference


def chi_square_fits(counts: Counter, odds: dict[Any, float], draws: int) -> bool:
    """Pearson's test at p = 1e-6: over the 225 examples of a property, chance alone fails 1 in
    4000. (Bounds in standard deviations are far too strict where there are only a few slices.)"""
    statistic = sum((counts[key] - draws * p) ** 2 / (draws * p) for key, p in odds.items())
    half = torch.tensor([(len(odds) - 1) / 2, statistic / 2], dtype=torch.float64)
    return len(odds) == 1 or float(torch.special.gammaincc(half[0], half[1])) > 1e-6


QUICK = settings(derandomize=True, database=None, deadline=None, max_examples=225)


@QUICK
@given(cases())
def test_exactly_the_valid_slices_are_drawn_and_equally_often(case: Case):
    replay, reference = run(case)
    odds = reference.odds()
    assert replay.can_sample(1) == bool(odds)
    assert replay.rows == sum(min(len(rows), case.capacity) for rows in reference.rows)
    if not odds:
        return
    draws = 3000
    where = replay.sample(draws).obs["where"].long()  # [L, B, 2]
    drawn = Counter((env, start) for env, start in where[0].tolist())
    assert set(drawn) == set(odds)
    assert chi_square_fits(drawn, odds, draws)
    # Contiguous and in one environment; that it is one episode follows from `valid`.
    lengths = [len(reference.part(env, start)) for env, start in where[0].tolist()]
    steps = torch.arange(case.slice_rows)[:, None].minimum(torch.tensor(lengths) - 1)
    assert torch.equal(where[..., 1], where[0, :, 1] + steps)
    assert torch.equal(where[..., 0], where[:1, :, 0].expand(case.slice_rows, -1))


@QUICK
@given(cases())
def test_what_is_drawn_has_the_bits_that_were_stored(case: Case):
    replay, reference = run(case)
    if not replay.can_sample(1):
        return
    batch = replay.sample(40)
    for b in range(40):
        for step in range(case.slice_rows):
            env, number = (int(x) for x in batch.obs["where"][step, b])
            row = reference.rows[env][number]
            obs = {key: value[step, b].numpy() for key, value in batch.obs.items()}
            past = step and batch.obs["where"][step - 1, b, 1] == number  # its stack is not said
            if past:
                assert row["terminated"]
            elif case.frames > 1:
                assert np.array_equal(obs["frame"], reference.frames(env, number))
            else:
                assert np.array_equal(obs["frame"], row["obs"]["frame"])
            assert obs["noise"].tobytes() == row["obs"]["noise"].tobytes()
            assert bool(batch.is_first[step, b]) == row["is_first"]
            assert int(batch.extras["task"][step, b]) == row["task"]
            if step == 0:
                continue
            assert batch.action["move"][step - 1, b].numpy().tobytes() == (
                row["action"]["move"].tobytes()
            )
            assert int(batch.action["jump"][step - 1, b]) == row["action"]["jump"]
            assert batch.reward[step - 1, b].numpy() == row["reward"]
            assert float(batch.terminated[step - 1, b]) == float(row["terminated"])
            assert bool(batch.truncated[step - 1, b]) == row["truncated"]


@QUICK
@given(cases(), st.integers(0, 70), st.sampled_from([0, 7]))
def test_a_restored_replay_goes_on_exactly(tmp_path_factory, case: Case, cut: int, seed: int):
    """Saved anywhere (wrapped or not), restored into a fresh replay, both fed the same rows."""
    folder = tmp_path_factory.mktemp("blocks")
    replay, reference = case.replay(), Reference(case)
    replay.seal_to(folder)
    for env, what in case.events[:cut]:
        reference.apply(env, what, replay)
    if replay.can_sample(1):
        replay.sample(5)
    other = case.replay(seed)
    other.restore(*replay.state(), folder)
    for env, what in case.events[cut:]:
        mirrored = Twice(replay, other)
        reference.apply(env, what, mirrored)
        if replay.can_sample(1):
            a, b = replay.sample(6), other.sample(6)
            assert torch.equal(a.obs["where"], b.obs["where"])
    if replay.can_sample(1):
        a, b = replay.sample(50), other.sample(50)
        for key in ("where", "noise", "frame"):
            assert torch.equal(a.obs[key], b.obs[key])
        for name in ("reward", "terminated", "truncated", "is_first"):
            assert torch.equal(getattr(a, name), getattr(b, name))
        assert torch.equal(a.action["move"], b.action["move"])
        assert torch.equal(a.extras["task"], b.extras["task"])


class Twice:
    """Gives every row to two replays."""

    def __init__(self, *replays: Replay) -> None:
        self.replays = replays

    def add(self, row: dict[str, Any], env: int) -> None:
        for replay in self.replays:
            replay.add(row, env)

    def close_episode(self, env: int) -> None:
        for replay in self.replays:
            replay.close_episode(env)


# ---- frequencies that a person can check ----


def uneven(kind: str) -> Replay:
    """Episodes of 3, 12 and 3 rows in three environments; slices of 3: 1, 10 and 1 starts."""
    case = Case(kind, 3, 20, 3, 1, "zeros", [])
    replay, reference = case.replay(), Reference(case)
    for env, length in enumerate((3, 12, 3)):
        for i in range(length):
            reference.apply(env, "truncated" if i == length - 1 else "", replay)
    return replay


@pytest.mark.parametrize(
    ("kind", "shares"),
    [("episodes", (1 / 3, 1 / 3, 1 / 3)), ("transitions", (1 / 12, 10 / 12, 1 / 12))],
)
def test_long_episodes_weigh_more_only_per_transition(kind, shares):
    draws = 60_000
    env = uneven(kind).sample(draws).obs["where"][0, :, 0].long()
    counts = Counter(env.tolist())
    assert chi_square_fits(counts, dict(enumerate(shares)), draws)
    assert [counts[i] / draws for i in range(3)] == pytest.approx(shares, abs=0.01)
