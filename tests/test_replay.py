"""Replay: rows in, slices out, by hand-made cases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from forethought.config import ConfigError, EpisodeReplayConfig, TransitionReplayConfig
from forethought.files import size_in_words
from forethought.replay import FrameStacker, Replay, ReplayError, memory
from forethought.replay.storage import DeviceColumns
from forethought.spaces import Column, EnvSpec

CPU = torch.device("cpu")
KINDS = {"episodes": EpisodeReplayConfig, "transitions": TransitionReplayConfig}


def env_spec(observation: spaces.Space | None = None, columns: tuple[Column, ...] = ()) -> EnvSpec:
    observation = observation or spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action = spaces.Box(-1, 1, (1,), np.float32)
    return EnvSpec("stub:count", observation, action, None, 1, True, columns)


def make(kind: str = "episodes", capacity: int = 100, slice_rows: int = 3, num_envs: int = 1,
         spec: EnvSpec | None = None, **options: Any) -> Replay:  # fmt: skip
    config = KINDS[kind](capacity_rows=capacity)
    rng = np.random.default_rng(0)
    return Replay(spec or env_spec(), config, num_envs, slice_rows, rng, CPU, **options)


def row(value: float, first: bool = False, end: str = "", **more: Any) -> dict[str, Any]:
    """A row whose observation is `value`, whose action is value / 100 and whose reward 10 value."""
    return {
        "obs": np.full(1, value, np.float32),
        "action": np.full(1, value / 100, np.float32),
        "reward": 10.0 * value,
        "terminated": end == "terminated",
        "truncated": end == "truncated",
        "is_first": first,
        **more,
    }


def add_episode(replay: Replay, first: int, length: int, env: int = 0, end: str = "truncated"):
    """Rows first, first + 1, ...; with end='' the episode stays open."""
    for i in range(length):
        last = i == length - 1
        replay.add(row(first + i, first=i == 0, end=end if last else ""), env)


def starts(replay: Replay, draws: int = 2000) -> set[int]:
    """The first observations of all slices that are ever drawn."""
    return {int(x) for x in replay.sample(draws).obs[0].flatten().tolist()}


# ---- the row convention ----


def test_a_slice_pairs_each_observation_with_what_led_to_it():
    """Rows 1, 2, 3: action and reward of a row arrive with its observation; row 0 has neither."""
    replay = make()
    add_episode(replay, 1, 3, end="terminated")
    batch = replay.sample(1)
    assert batch.obs.flatten().tolist() == [1, 2, 3]
    assert batch.action.flatten().tolist() == pytest.approx([0.02, 0.03])
    assert batch.reward.flatten().tolist() == [20, 30]
    assert batch.terminated.flatten().tolist() == [0.0, 1.0]
    assert batch.truncated.flatten().tolist() == [False, False]
    assert batch.is_first.flatten().tolist() == [True, False, False]


def test_truncation_is_not_termination():
    replay = make()
    add_episode(replay, 1, 3, end="truncated")
    batch = replay.sample(1)
    assert batch.terminated.flatten().tolist() == [0.0, 0.0]
    assert batch.truncated.flatten().tolist() == [False, True]


def test_the_first_row_has_zero_action_and_reward_given_or_not():
    replay = make("transitions", slice_rows=1)
    replay.add(row(7, first=True), 0)  # action 0.07, reward 70 are not of this episode
    replay.add(row(8, end="terminated"), 0)
    first = row(9, first=True)
    del first["action"], first["reward"]
    replay.add(first, 0)
    stored = replay.state()[1]
    assert stored["tail/0/column/action"].flatten().tolist() == pytest.approx([0, 0.08, 0])
    assert stored["tail/0/column/reward"].tolist() == [0, 80, 0]


def test_shapes_dtypes_and_nesting_come_back_as_declared():
    observation = spaces.Dict(
        {
            "state": spaces.Box(-1, 1, (2,), np.float64),
            "cameras": spaces.Dict({"left": spaces.Box(0, 255, (3, 3), np.uint8)}),
            "planes": spaces.Box(-1, 1, (4, 2), np.float32),
            "planes_mask": spaces.MultiBinary(4),
        }
    )
    action = spaces.Dict({"move": spaces.Box(-1, 1, (2,), np.float32), "jump": spaces.Discrete(3)})
    columns = (
        Column("task", (), np.dtype(np.int64), "task"),
        Column("action_mask", (3,), np.dtype(np.bool_), "action_mask"),
    )
    spec = EnvSpec("stub:nested", observation, action, None, 1, True, columns)
    replay = make(spec=spec, slice_rows=3)
    for t in range(4):
        replay.add(
            {
                "obs": {
                    "state": np.full(2, t / 10),
                    "cameras": {"left": np.full((3, 3), t, np.uint8)},
                    "planes": np.full((4, 2), t, np.float32),
                    "planes_mask": np.array([1, 1, t % 2, 0], np.int8),
                },
                "action": {"move": np.full(2, t / 10, np.float32), "jump": t % 3},
                "reward": t,
                "terminated": False,
                "truncated": t == 3,
                "is_first": t == 0,
                "task": 5,
                "action_mask": np.array([True, t > 1, False]),
            },
            0,
        )
    batch = replay.sample(64)
    found = {
        "state": batch.obs["state"],
        "left": batch.obs["cameras"]["left"],
        "planes": batch.obs["planes"],
        "mask": batch.obs["planes_mask"],
        "move": batch.action["move"],
        "jump": batch.action["jump"],
        "task": batch.extras["task"],
        "action_mask": batch.extras["action_mask"],
    }
    assert {k: (v.dtype, tuple(v.shape)) for k, v in found.items()} == {
        "state": (torch.float32, (3, 64, 2)),
        "left": (torch.uint8, (3, 64, 3, 3)),
        "planes": (torch.float32, (3, 64, 4, 2)),
        "mask": (torch.int8, (3, 64, 4)),
        "move": (torch.float32, (2, 64, 2)),
        "jump": (torch.int64, (2, 64)),
        "task": (torch.int64, (3, 64)),
        "action_mask": (torch.bool, (3, 64, 3)),
    }
    t = batch.obs["cameras"]["left"][..., 0, 0].long()  # which row of the episode
    assert torch.equal(found["mask"][..., 2].long(), t % 2)
    assert torch.equal(found["jump"], t[1:] % 3)
    assert torch.equal(found["action_mask"][..., 1], t > 1)


# ---- what may be drawn ----


def test_an_open_episode_is_drawn_per_transition_but_not_per_episode():
    for kind, drawable in (("episodes", False), ("transitions", True)):
        replay = make(kind)
        add_episode(replay, 0, 5, end="")
        assert replay.can_sample(8) is drawable
        replay.close_episode(0)
        assert starts(replay) == {0, 1, 2}


def test_a_partly_overwritten_episode_shrinks_and_then_leaves():
    """Ring of 8, slices of 3. Rows 0-4 are an episode; an open one then pushes them out."""
    replay = make("episodes", capacity=8)
    add_episode(replay, 0, 5)
    add_episode(replay, 100, 4, end="")  # 9 rows: row 0 is gone
    assert starts(replay) == {1, 2}
    replay.add(row(104), 0)
    assert starts(replay) == {2}
    replay.add(row(105), 0)  # two rows of it are left
    assert not replay.can_sample(1)
    with pytest.raises(ReplayError, match=r"no finished episode has 3 rows \(2 steps\)"):
        replay.sample(1)


def test_an_episode_longer_than_the_ring_keeps_its_newest_rows():
    replay = make("episodes", capacity=6)
    add_episode(replay, 0, 20)
    assert starts(replay) == {14, 15, 16, 17}
    assert replay.rows == 6


def test_episodes_shorter_than_a_slice_are_never_drawn():
    for kind in KINDS:
        replay = make(kind)
        add_episode(replay, 0, 1)
        add_episode(replay, 10, 2)
        assert not replay.can_sample(1)
        add_episode(replay, 20, 3)
        assert starts(replay) == {20}


def test_each_environment_has_its_own_ring():
    """Two rings of 5 rows: environment 1 never pushes out rows of environment 0."""
    replay = make("transitions", capacity=10, num_envs=2)
    add_episode(replay, 0, 4, env=0)
    add_episode(replay, 100, 50, env=1)
    assert starts(replay) == {0, 1, 145, 146, 147}
    assert replay.rows == 9


# ---- bad input ----


def test_rows_out_of_order_are_refused_in_words():
    replay = make()
    with pytest.raises(ReplayError, match="environment 0 must have is_first"):
        replay.add(row(1), 0)
    add_episode(replay, 0, 2, end="terminated")
    with pytest.raises(ReplayError, match="environment 0 must have is_first"):
        replay.add(row(2), 0)
    replay.add(row(3, first=True), 0)
    with pytest.raises(ReplayError, match="still open after 1 rows"):
        replay.add(row(4, first=True), 0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"obs": np.zeros(2, np.float32)}, r"obs .* has shape \(2,\), but must have \(1,\)"),
        ({"obs": np.array(["x"])}, "obs .* dtype <U1, which cannot be stored as float32"),
        ({"terminated": 0.5}, "terminated .* dtype float64, which cannot be stored as bool"),
        ({"opponent": 1}, "has opponent too"),
        ({"obs": None}, "lacks obs"),
    ],
)
def test_a_bad_row_is_refused_in_words_and_changes_nothing(change, words):
    replay = make("transitions", capacity=3)
    add_episode(replay, 0, 3, end="")
    before = replay.state()[1]
    bad = {k: v for k, v in {**row(3), **change}.items() if v is not None}
    with pytest.raises(ReplayError, match=words):
        replay.add(bad, 0)
    after = replay.state()[1]
    assert all(torch.equal(before[name], after[name]) for name in before)
    replay.add(row(3), 0)
    assert starts(replay) == {1}


def test_an_unknown_environment_is_refused():
    with pytest.raises(ReplayError, match="no environment -1: there are 2"):
        make(num_envs=2).add(row(0, first=True), -1)


def test_a_capacity_below_one_slice_per_environment_is_refused():
    with pytest.raises(ConfigError, match=r"replay.capacity_rows is 7, but must be at least 8"):
        make(capacity=7, slice_rows=4, num_envs=2)


def test_extra_columns_may_not_take_a_name_that_rows_have():
    with pytest.raises(ConfigError, match="extra column reward"):
        make(spec=env_spec(columns=(Column("reward", (), np.dtype(np.float32), "r"),)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_an_absent_storage_device_is_refused_in_words():
    config = EpisodeReplayConfig(capacity_rows=10, storage_device="cuda")
    with pytest.raises(ConfigError, match=r"replay.storage_device is cuda, which cannot be used"):
        Replay(env_spec(), config, 1, 3, np.random.default_rng(0), CPU)


# ---- memory ----


def test_what_does_not_fit_is_refused_with_the_largest_that_does(monkeypatch):
    """A row takes 4 + 4 + 4 + 1 + 1 bytes and 4 for its age: 18. 90 % of 2000 bytes hold 100."""
    monkeypatch.setattr(memory, "available_bytes", lambda device: 2000)
    assert make(capacity=100).bytes_total == 1800
    with pytest.raises(ConfigError, match=r"capacity_rows is 101, .* largest that fits is 100\."):
        make(capacity=101)
    with pytest.raises(ConfigError, match=r"the largest that fits is 99\."):
        make(capacity=300, num_envs=3)


def test_the_size_is_said_in_words():
    assert make(capacity=1_000_000).describe() == (
        "1 ring of 1,000,000 rows, 18 bytes a row, 18.0 MB on cpu when full; "
        "slices of 3 rows, drawn by episodes"
    )
    assert size_in_words(56_400_000_000) == "56.4 GB"


def test_the_limit_of_a_container_counts(tmp_path: Path):
    """1000 allowed, 700 used, of which 100 are cached files that can be dropped: 400 free."""
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 600\ninactive_file 100\n")
    assert memory._container_bytes(tmp_path) == 400
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._container_bytes(tmp_path) is None
    assert memory._container_bytes(tmp_path / "nowhere") is None


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's page counts")
def test_an_empty_ring_costs_no_memory():
    """400 MB of ring: fewer than 40 MB of pages are touched by making it and adding a row."""
    resident = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * 4096  # noqa: E731
    before = resident()
    wide = env_spec(spaces.Box(-1, 1, (100,), np.float32))
    replay = make("transitions", capacity=1_000_000, spec=wide)
    replay.add({**row(0, first=True), "obs": np.zeros(100, np.float32)}, 0)
    assert replay.bytes_total > 400e6
    assert resident() - before < 40e6


def test_rows_on_a_device_are_drawn_as_rows_in_main_memory():
    host, device = make(capacity=20), make(capacity=20)
    device._storage.columns = DeviceColumns(device.row_spec.leaves, 20, CPU)
    for replay in (host, device):
        for episode in range(5):
            add_episode(replay, 10 * episode, 6)
    a, b = host.sample(64), device.sample(64)
    for name in ("obs", "action", "reward", "terminated", "truncated", "is_first"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    state, tensors = device.state()
    device.restore(state, tensors, None)
    assert torch.equal(host.sample(64).obs, device.sample(64).obs)


# ---- frame stacks ----


@pytest.mark.parametrize(("pad", "before"), [("zeros", 0), ("first", 1)])
def test_a_stack_holds_the_frames_before_a_row_of_its_own_episode(pad, before):
    """Frames 1 to 5, stacks of 3; before frame 1 lies padding, never the episode before it."""
    replay = make(slice_rows=2, stack={"obs": 3}, stack_pad=pad)
    add_episode(replay, 91, 2)
    add_episode(replay, 1, 5)
    stacks = replay.sample(500).obs[..., 0]  # [2, B, 3]
    assert stacks.shape == (2, 500, 3)
    found = {tuple(x) for x in stacks[0].tolist() if x[-1] < 90}
    p = before
    assert found == {(p, p, 1), (p, 1, 2), (1, 2, 3), (2, 3, 4)}
    pairs = {(x[-1], tuple(y)) for x, y in zip(stacks[0].tolist(), stacks[1].tolist())}
    assert (4, (3, 4, 5)) in pairs and (1, (p, 1, 2)) in pairs


def test_rows_that_lost_part_of_their_stack_are_not_drawn():
    """Ring of 8 holds rows 3 to 10; a stack of 3 at row 5 needs row 3, one at row 4 lacks row 2."""
    for kind in KINDS:
        replay = make(kind, capacity=8, slice_rows=2, stack={"obs": 3})
        add_episode(replay, 0, 11)
        stacks = replay.sample(500).obs[0, :, :, 0]
        assert {tuple(x) for x in stacks.tolist()} == {(r - 2, r - 1, r) for r in range(5, 10)}


@pytest.mark.parametrize("pad", ["zeros", "first"])
def test_the_agent_acts_on_the_very_stacks_it_later_learns_from(pad):
    """Two interleaved environments, pixels stacked by 4 beside a vector that is not."""
    pixels = spaces.Box(0, 255, (2, 2), np.uint8)
    observation = spaces.Dict({"pixels": pixels, "id": spaces.Box(0, 1e6, (1,), np.float32)})
    stack = {"obs/pixels": 4}
    config = TransitionReplayConfig(capacity_rows=400)
    replay = Replay(env_spec(observation), config, 2, 2, np.random.default_rng(0), CPU, stack, pad)
    stacker = FrameStacker(stack, pad, 2)
    rng = np.random.default_rng(1)
    acted: dict[int, np.ndarray] = {}
    first = np.array([True, True])
    for t in range(60):
        obs = {
            "pixels": rng.integers(1, 256, (2, 2, 2)).astype(np.uint8),
            "id": np.array([[2 * t], [2 * t + 1]], np.float32),
        }
        if t == 30:  # saved and restored in the middle
            saved, stacker = stacker.state(), FrameStacker(stack, pad, 2)
            stacker.restore(saved)
        seen = stacker.push(obs, first)
        ends = rng.random(2) < 0.2
        for env in range(2):
            acted[2 * t + env] = seen["pixels"][env]
            own = {key: value[env] for key, value in obs.items()}
            end = "terminated" if ends[env] else ""
            replay.add({**row(0, first=bool(first[env]), end=end), "obs": own}, env)
        first = ends
    batch = replay.sample(2000)
    ids = batch.obs["id"].flatten().long().tolist()
    replayed = batch.obs["pixels"].flatten(0, 1).numpy()  # [2 * B, 4, 2, 2]
    assert len(set(ids)) > 80
    for i, frames in zip(ids, replayed):
        assert np.array_equal(frames, acted[i])


def test_acting_must_begin_with_an_episode():
    stacker = FrameStacker({"obs": 2}, "zeros", 2)
    with pytest.raises(ValueError, match="must begin an episode"):
        stacker.push(np.zeros((2, 1), np.float32), np.array([True, False]))


def test_an_unknown_column_to_stack_is_refused_with_the_nearest_name():
    spec = env_spec(spaces.Dict({"camera": spaces.Box(0, 255, (2, 2), np.uint8)}))
    with pytest.raises(ConfigError, match=r"no observation column obs/camra .*obs/camera"):
        make(spec=spec, stack={"obs/camra": 4})
    with pytest.raises(ConfigError, match="stack_pad is mirror, but must be zeros or first"):
        make(stack={"obs": 4}, stack_pad="mirror")
