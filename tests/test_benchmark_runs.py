"""Runs of a benchmark, several at a time: what ends one of them ends them all."""

import threading
from pathlib import Path

import pytest


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    import runs

    return runs.at_once


def test_runs_are_given_in_the_order_of_their_work(at_once):
    both_there = threading.Barrier(2, timeout=10)  # passes only if two run at the same time

    def learn(number):
        both_there.wait()
        return number * 10

    assert at_once(2, learn, [1, 2, 3, 4]) == [10, 20, 30, 40]


def test_no_run_begins_after_one_was_stopped(at_once):
    begun = []
    stopped_together = threading.Barrier(2, timeout=10)

    def learn(number):
        begun.append(number)
        stopped_together.wait()
        raise SystemExit(f"run {number} was stopped")

    with pytest.raises(SystemExit, match="run 1 was stopped"):
        at_once(2, learn, [1, 2, 3, 4, 5])
    assert sorted(begun) == [1, 2]


def test_ctrl_c_ends_in_a_sentence(at_once):
    def learn(number):
        raise KeyboardInterrupt

    with pytest.raises(SystemExit, match="the same command goes on where this stopped"):
        at_once(2, learn, [1, 2, 3])
