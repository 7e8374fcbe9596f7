"""Runs of a benchmark, several at a time: what ends one of them ends them all."""

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
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


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_ends_in_a_sentence(times):
    """Signals as a terminal sends them, to a process whose run takes a while to end."""
    program = (
        "import sys, time\n"
        f"sys.path.insert(0, {str(BENCHMARKS)!r})\n"
        "import runs\n"
        "def learn(number):\n"
        "    print('begun', flush=True)\n"
        "    time.sleep(1.5)\n"
        "runs.at_once(1, learn, [1, 2])\n"
    )
    command = [sys.executable, "-c", program]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        said = process.stdout.readline()
        if times == 2:  # while the run saves
            process.send_signal(signal.SIGINT)
        told, wrong = process.communicate(timeout=30)
    assert said == "Interrupted. The same command goes on where this one stops.\n"
    assert (process.returncode, told, wrong) == (130, "", "")
