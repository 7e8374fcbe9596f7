"""Named random streams: reproducible, apart from each other, restorable."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from forethought.config import ConfigError, ForethoughtError
from forethought.seeding import Streams, numpy_state, restore_numpy

NAMES = ("env", "exploration", "replay", "init", "update", "planner", "eval", "eval-planner")


def draws(streams: Streams, name: str, *index: int) -> list[float]:
    return streams.numpy(name, *index).random(4).tolist()


def test_the_same_seed_gives_the_same_streams():
    assert draws(Streams(7), "replay") == draws(Streams(7), "replay")
    first = torch.randn(4, generator=Streams(7).torch("init"))
    assert torch.equal(first, torch.randn(4, generator=Streams(7).torch("init")))
    assert Streams(7).seed("env", 0, 3) == Streams(7).seed("env", 0, 3)


def test_streams_are_equal_in_another_process():
    """Python salts hash() per process; a stream must not depend on it."""
    code = "from forethought.seeding import Streams; print(Streams(7).seed('env', 1, 2))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(other.stdout) == Streams(7).seed("env", 1, 2)


def test_seeds_of_released_runs_never_change():
    """A changed rule would change every published run; these numbers would tell."""
    assert [Streams(1).seed("env", 0, episode) for episode in range(3)] == [
        1668032391,
        1268778024,
        1837606278,
    ]


def test_another_seed_name_or_index_gives_another_stream():
    base = Streams(1)
    assert draws(base, "replay") != draws(Streams(2), "replay")
    assert draws(base, "replay") != draws(base, "exploration")
    assert draws(base, "env", 0) != draws(base, "env", 1)
    assert draws(base, "env", 0) != draws(base, "env", 0, 0)
    assert len({base.seed(name) for name in NAMES}) == len(NAMES)


def test_drawing_from_one_stream_leaves_the_others_alone():
    """Seed 004 item 4: evaluating more often must not change what training sees."""
    streams = Streams(3)
    training = streams.numpy("exploration")
    head = training.random(2).tolist()
    for index in range(5):
        streams.numpy("eval", index).random(100)
        streams.torch("eval-planner", index)
    assert head + training.random(2).tolist() == draws(Streams(3), "exploration")


def test_environment_seeds_fit_31_bits_and_differ_per_episode():
    seeds = [Streams(0).seed("env", env, episode) for env in range(8) for episode in range(250)]
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert len(set(seeds)) == len(seeds)


def test_a_numpy_stream_continues_exactly_from_its_json_state():
    stream = Streams(5).numpy("replay")
    stream.integers(0, 10, size=3, dtype=np.int32)  # leaves half of a 64-bit draw in the generator
    state = json.loads(json.dumps(numpy_state(stream)))
    expected = stream.integers(0, 10, size=9, dtype=np.int32)
    other = Streams(99).numpy("replay")
    restore_numpy(other, state)
    assert np.array_equal(other.integers(0, 10, size=9, dtype=np.int32), expected)


def test_a_state_of_another_kind_of_generator_is_refused():
    state = numpy_state(np.random.Generator(np.random.Philox(1)))
    with pytest.raises(ForethoughtError, match="kind Philox, but this version draws from PCG64"):
        restore_numpy(Streams(1).numpy("replay"), state)


def test_a_negative_seed_is_refused():
    with pytest.raises(ConfigError, match="seed is -1, but must be at least 0"):
        Streams(-1)
