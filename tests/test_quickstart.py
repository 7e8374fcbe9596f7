"""The script behind `make quickstart`: what it says is what was made, and its exit code too."""

import importlib
import json
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from forethought.training.loop import resume_run, train_run
from tests.stub_agent import register, stub_run

SCRIPTS = Path(__file__).parents[1] / "scripts"
FILES = {"learning curve": "learning_curve.png", "report": "report.html", "video": "video.mp4"}


@pytest.fixture
def quickstart(monkeypatch):
    """The script, with quick evaluations of an agent that learns in no time."""
    register(monkeypatch)
    monkeypatch.syspath_prepend(SCRIPTS)
    script = importlib.import_module("quickstart")
    monkeypatch.setattr(script, "EPISODES", 2)
    return script


@pytest.fixture
def out(quickstart, tmp_path):
    """A run that is trained already, in a folder whose name a shell would take apart."""
    return train_run(stub_run(steps=100, eval={"episodes": 1}), tmp_path / "my run; $HOME").path


def answer(quickstart, monkeypatch, **codes):
    """Commands are not carried out, but end with these exit codes."""
    asked = []

    def command(tokens):
        asked.append(tokens)
        return codes.get(tokens[0], 0)

    monkeypatch.setattr(quickstart, "command", command)
    return asked


def test_everything_that_was_made_is_listed(quickstart, out, capsys, monkeypatch):
    asked = answer(quickstart, monkeypatch)
    assert quickstart.main(["--out", str(out)]) == 0
    assert [tokens[0] for tokens in asked] == ["report", "report", "watch"]
    said = capsys.readouterr().out
    for name, file in FILES.items():
        assert f"  {name:<15} {out / file}" in said.splitlines()
    assert "was not made" not in said


@pytest.mark.parametrize(
    ("verb", "lost"), [("watch", ["video"]), ("report", ["learning curve", "report"])]
)
def test_an_older_file_is_not_told_as_what_failed_to_be_made(
    quickstart, out, capsys, monkeypatch, verb, lost
):
    for file in FILES.values():
        (out / file).write_bytes(b"of an earlier call")
    answer(quickstart, monkeypatch, **{verb: 2})
    assert quickstart.main(["--out", str(out)]) == 1
    said = capsys.readouterr().out.splitlines()
    for name, file in FILES.items():
        told = "was not made, see above" if name in lost else str(out / file)
        assert f"  {name:<15} {told}" in said
    assert said[-1] == f"Not everything was made: the {' and the '.join(lost)} failed, see above."


def test_a_stop_while_it_films_is_the_exit_code(quickstart, out, monkeypatch):
    answer(quickstart, monkeypatch, watch=130)
    assert quickstart.main(["--out", str(out)]) == 130


def test_training_that_fails_is_the_exit_code_and_nothing_follows(
    quickstart, tmp_path, monkeypatch
):
    asked = answer(quickstart, monkeypatch, train=3)
    assert (
        quickstart.main(["--seed", "2", "--out", str(tmp_path / "new"), "--", "--steps", "9"]) == 3
    )
    (tokens,) = asked
    assert tokens[0] == "train" and tokens[-6:-2] == ["--steps", "9", "--seed", "2"]


def test_a_run_that_was_stopped_is_resumed(quickstart, out, monkeypatch):
    about = json.loads((out / "run.json").read_text())
    (out / "run.json").write_text(json.dumps(about | {"status": "interrupted"}))
    asked = answer(quickstart, monkeypatch, resume=143)
    assert quickstart.main(["--out", str(out)]) == 143
    assert asked == [["resume", str(out)]]


def break_description(out):
    (out / "run.json").write_text("{")


def lose_checkpoints(out):
    shutil.rmtree(out / "checkpoints")


def lose_evaluations(out):
    (out / "eval.csv").write_text("")


@pytest.mark.parametrize("harm", [break_description, lose_checkpoints, lose_evaluations])
def test_a_damaged_run_is_one_sentence(quickstart, out, capsys, monkeypatch, harm):
    answer(quickstart, monkeypatch)
    harm(out)
    assert quickstart.main(["--out", str(out)]) == 1
    told = capsys.readouterr().err
    assert str(out) in told and told.count("\n") == 1 and "Traceback" not in told


def test_a_stop_says_how_forethought_comes_onto_the_path(quickstart, tmp_path, capsys, monkeypatch):
    answer(quickstart, monkeypatch, train=130)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "activate").touch()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.chdir(tmp_path)
    assert quickstart.main(["--out", str(tmp_path / "new")]) == 130
    assert capsys.readouterr().out.endswith(
        "Not finished; the same command goes on from here. "
        "For commands of forethought, first: source bin/activate\n"
    )


def test_what_to_try_next_can_be_pasted(quickstart, out, capsys, monkeypatch):
    answer(quickstart, monkeypatch)
    quickstart.main(["--out", str(out)])
    said = capsys.readouterr().out.partition("Try next:")[2]
    (line,) = [line for line in said.splitlines() if "resume" in line]
    words = ["forethought", "resume", str(out), "--steps", "50000"]
    assert shlex.split(line, comments=True) == words


def test_the_time_of_training_is_that_of_the_whole_run_after_a_resume(quickstart, out):
    """Twenty steps more take less than the hundred before them: alone they would be too few."""
    before = quickstart.training_minutes(out)
    assert before > 0
    resume_run(out, steps=120)
    assert quickstart.training_minutes(out) > before
