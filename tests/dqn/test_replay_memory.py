"""What a replay of Atari frames takes, where it lies, and what is said when it does not fit."""

from __future__ import annotations

import os
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from forethought.config import ConfigError, PrioritizedReplayConfig, UniformReplayConfig
from forethought.replay import NStepReplay, memory
from forethought.spaces import EnvSpec
from tests.dqn.nstep_reference import Case, Reference

CPU = torch.device("cpu")
ATARI = EnvSpec(
    "stub:atari", spaces.Box(0, 255, (84, 84), np.uint8), spaces.Discrete(18), None, 4, True
)


def atari(kind: Any = PrioritizedReplayConfig, num_envs: int = 8, **options: Any) -> NStepReplay:
    config = kind(capacity_rows=1_000_000, **options)
    rng = np.random.default_rng(0)
    return NStepReplay(ATARI, config, num_envs, 3, 0.99, rng, CPU, {"obs": 4})


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's page counts")
def test_a_million_atari_transitions_take_7_5_gb_at_most_and_nothing_at_first(monkeypatch):
    """One copy of each frame: 7,056 bytes and 40 others a row. Made, it touches under 40 MB."""
    monkeypatch.setattr(memory, "available_bytes", lambda device: 10**11)
    before = resident_bytes()
    replay = atari()
    for i in range(10):
        row = {"obs": np.zeros((84, 84), np.uint8), "action": 1, "reward": 0.0}
        replay.add({**row, "is_first": i == 0, "terminated": False, "truncated": False}, 0)
    assert 7.0e9 < replay.bytes_total <= 7.5e9
    assert resident_bytes() - before < 40e6
    assert replay.describe() == (
        "8 rings of 125,000 rows, 7.1 kB a row, 7.1 GB on cpu when full; transitions of up to 3 "
        "steps, drawn by priority (beta 0.4 to 1 over the whole run)"
    )


def test_memory_that_does_not_fit_is_refused_with_the_largest_capacity_that_does(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda device: 4 * 10**9)
    with pytest.raises(ConfigError, match=r"takes 7\.1 GB .* but 4\.0 GB are free on cpu") as error:
        atari()
    largest = int(str(error.value).rpartition(" is ")[2].rstrip("."))
    assert largest == pytest.approx(0.9 * 4e9 / 7094, rel=0.001)
    rng = np.random.default_rng(0)
    fits = PrioritizedReplayConfig(capacity_rows=largest)
    NStepReplay(ATARI, fits, 8, 3, 0.99, rng, CPU, {"obs": 4})
    one_more = PrioritizedReplayConfig(capacity_rows=largest + 8)
    with pytest.raises(ConfigError, match="the largest that fits"):
        NStepReplay(ATARI, one_more, 8, 3, 0.99, rng, CPU, {"obs": 4})


Usage = namedtuple("Usage", "total used free")


def test_a_disk_without_room_for_mapped_rows_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(memory.shutil, "disk_usage", lambda path: Usage(0, 0, 10**9))
    with pytest.raises(ConfigError, match=r"but 1\.0 GB are free on .*; the largest that fits is"):
        atari(mapped_folder=str(tmp_path))


def test_a_mapped_folder_must_be_one(tmp_path):
    absent = str(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"replay.mapped_folder is .*absent, but must be a fold"):
        atari(mapped_folder=absent)


@pytest.mark.parametrize("kind", ["uniform", "prioritized"])
def test_mapped_rows_are_drawn_as_rows_in_main_memory_and_leave_no_file(kind, tmp_path):
    ends = ["", "", "", "terminated", "", "", "truncated", "life", ""]
    case = Case(kind, 2, 20, 2, 4, "zeros", False, [(i % 2, ends[i % 9]) for i in range(90)])
    reference, plain = Reference(case), case.replay()
    mapped = case.replay(mapped_folder=str(tmp_path))
    for env, what in case.events:
        reference.apply(env, what, plain, mapped)
    a, b = (replay.sample(64, beta=case.beta) for replay in (plain, mapped))
    assert torch.equal(a.obs["frame"], b.obs["frame"])
    assert torch.equal(a.next_obs["where"], b.next_obs["where"])
    assert torch.equal(a.reward, b.reward)
    assert str(tmp_path) in mapped.describe()
    other = case.replay(seed=5, mapped_folder=str(tmp_path))
    other.restore(*plain.state(whole=True), None)
    assert torch.equal(other.sample(9, beta=case.beta).rows, plain.sample(9, beta=case.beta).rows)
    assert list(tmp_path.iterdir()) == []


def test_uniform_replay_takes_no_leaf_for_a_row(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda device: 10**11)
    assert atari(UniformReplayConfig).bytes_total < atari().bytes_total - 8_000_000


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"beta_anneal_updates": 5_000}, "beta 0.4 to 1 over 5,000 updates"),
        ({"beta_anneal_agent_steps": 90}, "beta 0.4 to 1 over 90 agent steps"),
    ],
)
def test_what_beta_does_is_told_with_its_unit(given, told):
    assert told in atari(**given).describe()
