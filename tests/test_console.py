"""The status line: what it says, how often, and that it fits."""

import io
import re

import pytest
from rich.console import Console

from forethought.tracking.console import ConsoleSink
from tests.test_run_directory import new_run


def console_sink(tmp_path, terminal, seconds, steps=1000, width=160):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=width, _environ={})
    sink = ConsoleSink(steps, console, now=lambda: seconds[0])
    sink.start(new_run(tmp_path / "run"))
    return sink, out


def shown(out):
    """What a terminal was sent, without colours and movements of the cursor."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())


def test_without_a_terminal_a_plain_line_comes_now_and_then(tmp_path):
    seconds = [0.0]
    sink, out = console_sink(tmp_path, False, seconds)
    sink.episode({"return": 12.34})
    sink.evaluation({"return_mean": 56.78})
    for step in range(300):  # ten steps a second, for thirty seconds
        sink.progress(step, "")
        seconds[0] += 0.1
    lines = out.getvalue().splitlines()
    assert len(lines) == 2
    assert "\x1b" not in out.getvalue()
    assert lines[0].startswith(" 10% · stub gym:Stub-v0 · 10")
    assert "10.0/s" in lines[0]
    assert "ETA 0:01:30" in lines[0]  # 900 steps are left
    assert lines[0].endswith("return 12.3 · eval 56.8")


def test_a_terminal_is_redrawn_at_most_four_times_a_second(tmp_path, monkeypatch):
    seconds = [0.0]
    sink, out = console_sink(tmp_path, True, seconds)
    draws = []
    draw = sink._draw
    monkeypatch.setattr(sink, "_draw", lambda: (draws.append(seconds[0]), draw()))
    for step in range(1000):  # two seconds
        sink.progress(step, "")
        seconds[0] += 0.002
    assert 7 <= len(draws) <= 8
    sink.progress(1000, "")
    sink.close()
    assert re.search("100% ━{24} 1,000/1,000 · ", shown(out))
    assert "\x1b[?25h" in out.getvalue()  # the cursor is visible again


@pytest.mark.parametrize("width", [60, 80, 100])
def test_the_live_line_fits_the_terminal(tmp_path, width):
    seconds = [0.0]
    sink, out = console_sink(tmp_path, True, seconds, steps=1_000_000, width=width)
    sink.episode({"return": 812.34})
    sink.evaluation({"return_mean": 756.78})
    sink.progress(450_000, "")
    seconds[0] = 10.0
    sink.progress(450_100, "")  # 549,900 steps are left at 10 a second
    line = shown(out).split("\r")[-1].rstrip()
    assert len(line) < width
    assert line.startswith(" 45% ") and "450,100/1,000,000" in line
    assert line.endswith("ETA 15:16:30 · return 812.3 · eval 756.8") or width == 60
    assert width == 60 or ("━━━━" in line) == (width == 100)  # the bar is what gives way
    assert "…" not in line and "stub" not in line
    seconds[0] = 20.0
    sink.progress(450_100, "evaluating")
    line = shown(out).split("\r")[-1].rstrip()
    assert len(line) < width and line.endswith("eval 756.8 · evaluating")


def test_a_phase_shows_no_speed_and_leaves_none_behind(tmp_path):
    seconds = [0.0]
    sink, out = console_sink(tmp_path, False, seconds)
    for at, step, phase in [
        (0, 0, ""),
        (10, 100, ""),  # ten steps a second
        (50, 100, "learning 1,691/2,500 updates"),
        (60, 100, ""),
        (70, 200, ""),
    ]:
        seconds[0] = at
        sink.progress(step, phase)
    before, burst, begun, after = out.getvalue().splitlines()
    assert begun.endswith("100/1,000 agent steps")  # nothing measured yet
    assert "10.0/s · ETA 0:01:30" in before
    assert burst.endswith("100/1,000 agent steps · learning 1,691/2,500 updates")
    assert "10.0/s · ETA 0:01:20" in after  # the forty seconds of the burst do not count


def test_random_play_has_a_speed_but_says_nothing_about_the_time_that_is_left(tmp_path):
    seconds = [0.0]
    sink, out = console_sink(tmp_path, False, seconds, steps=1_000_000)
    for at, step, phase in [
        (0, 0, "random play"),
        (10, 20_000, "random play"),  # 2000 a second
        (11, 22_000, "random play"),
        (11.5, 22_000, "learning 1/4 updates"),
        (12, 22_000, ""),
        (12.5, 22_005, ""),
        (20, 22_080, ""),  # 80 steps in 8 seconds
    ]:
        seconds[0] = at
        sink.progress(step, phase)
    random, learning = out.getvalue().splitlines()
    assert random.endswith("20,000/1,000,000 agent steps · 2000.0/s · random play")
    assert learning.endswith("22,080/1,000,000 agent steps · 10.0/s · ETA 27:09:52")


def test_the_speed_is_that_of_the_last_half_minute(tmp_path):
    seconds = [0.0]
    sink, out = console_sink(tmp_path, False, seconds, steps=10_000)
    for at in range(101):  # a hundred steps a second, from second 50 on ten
        seconds[0] = at
        sink.progress(100 * at if at <= 50 else 5000 + 10 * (at - 50), "")
    assert "5,500/10,000 agent steps · 10.0/s · ETA 0:07:30" in out.getvalue().splitlines()[-1]


def test_a_run_that_stops_in_random_play_leaves_no_estimate_behind(tmp_path):
    seconds = [0.0]
    sink, out = console_sink(tmp_path, False, seconds)
    sink.progress(0, "random play")
    seconds[0] = 5.0
    sink.progress(500, "random play")
    sink.close()
    assert out.getvalue() == " 50% · stub gym:Stub-v0 · 500/1,000 agent steps\n"


def test_the_last_line_names_no_phase(tmp_path):
    seconds = [0.0]
    sink, out = console_sink(tmp_path, False, seconds)
    sink.progress(1000, "evaluating")
    sink.close()
    assert out.getvalue() == "100% · stub gym:Stub-v0 · 1,000/1,000 agent steps\n"


def test_a_resumed_run_does_not_count_old_steps_as_speed(tmp_path):
    seconds = [0.0]
    sink, out = console_sink(tmp_path, False, seconds, steps=2000)
    sink.progress(1000, "")
    seconds[0] = 10.0
    sink.progress(1050, "")
    assert "· 5.0/s" in out.getvalue()
