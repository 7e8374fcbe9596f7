"""Shared by all tests: one thread per process, set before anything imports torch; bad commands."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest


@pytest.fixture
def empty_folder(tmp_path, monkeypatch):
    """The working directory: empty, so that any trace of work would be seen."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def refused(capsys, empty_folder):
    """Runs a command that must be refused and returns its sentence."""

    def run(*tokens, codes=(2,)):
        before = sorted(empty_folder.rglob("*"))
        from forethought.cli import main

        assert main([*tokens]) in codes
        out, err = capsys.readouterr()
        assert out == ""
        assert "Traceback" not in err
        assert err.count("\n") == 1, err
        assert err.endswith((".\n", "?\n")), err
        assert sorted(empty_folder.rglob("*")) == before, "a refused command left files behind"
        return err.strip()

    return run
