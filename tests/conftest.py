"""Shared by all tests: one thread per process, set before anything imports torch; bad commands."""

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import copy
import functools
import gc

import pytest

from forethought.envs import rendering

# Under nohup, or in the background of a shell, both are ignored, and so by whatever a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

with rendering.switched_off():
    from dm_control.mujoco.wrapper import core


def pytest_collection_finish(session):
    """What is imported by now stays: no collection of garbage need look at it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _models_compiled_once():
    """MuJoCo draws a starry sky for every model that it compiles: tests share a few models."""
    compile_xml = core._get_model_ptr_from_xml

    @functools.cache
    def compiled(xml, assets):
        return compile_xml(xml_string=xml, assets=dict(assets))

    def model(xml_path=None, xml_string=None, assets=None):
        if xml_path is not None:
            return compile_xml(xml_path=xml_path)
        return copy.copy(compiled(xml_string, tuple(sorted((assets or {}).items()))))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "_get_model_ptr_from_xml", model)
        yield


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
