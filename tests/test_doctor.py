"""The doctor: what works is tried for real, what is missing is named with its remedy."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import sys
import tempfile
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from forethought import doctor
from forethought.cli import main
from forethought.doctor import Finding
from forethought.envs import rendering
from forethought.nets import kernels

ROOT = Path(__file__).parents[1]


def find(check, name):
    return {finding.name: finding for finding in check()}[name]


def test_the_core_works_here_and_json_says_so(capsys):
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    names = [finding["name"] for finding in report["findings"]]
    assert names[:3] == ["python", "forethought", "torch"]
    assert {"C kernels", "rendering", "ffmpeg", "disk", "runs", "extra dmc"} <= set(names)
    assert "extra all" not in names and "extra dev" not in names
    found = {finding["name"]: finding["found"] for finding in report["findings"]}
    assert torch.__version__ in found["torch"] and "cpu" in found["torch"]


def test_the_table_shows_the_command_of_a_missing_extra(capsys, monkeypatch):
    version = importlib.metadata.version

    def absent(name):
        if name == "minatar":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    monkeypatch.setattr(doctor, "CONSTRAINTS", Path("nowhere"))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(doctor, "CHECKS", (doctor._python, doctor._extras))
    assert main(["doctor"]) == 0  # an extra is not the core
    rows = [line.split(maxsplit=3) for line in capsys.readouterr().out.splitlines()]
    row = next(row for row in rows if row[:2] == ["extra", "minatar"])
    assert row[2] == "missing"
    assert row[3].strip() == "no minatar: pip install 'forethought[minatar]'"
    assert rows[-1] == ["The", "core", "works;", "1 optional part is missing."]


def test_in_a_checkout_the_advice_names_the_constraints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "CONSTRAINTS", tmp_path / "constraints.txt")
    assert doctor._install("dmc") == "pip install 'forethought[dmc]'"
    (tmp_path / "constraints.txt").touch()
    assert doctor._install("dmc") == "pip install -c constraints.txt 'forethought[dmc]'"


def test_videos_need_pygame_which_draws_the_classic_control_tasks(monkeypatch):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    video = extras["optional-dependencies"]["video"]
    needed = [f'{name}; extra == "video"' for name in video]
    monkeypatch.setattr(importlib.metadata, "requires", lambda package: needed)
    monkeypatch.setattr(doctor, "_version", lambda name: None if "pygame" in name else "2.34")
    found = find(doctor._extras, "extra video")
    assert not found.ok and found.found == "no pygame-ce"
    assert found.advice.endswith("'forethought[video]'")


def test_without_torch_the_core_does_not_work(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(doctor, "CHECKS", (doctor._python, doctor._torch))
    assert main(["doctor"]) == 1
    assert "The core does not work" in capsys.readouterr().out


@pytest.mark.parametrize(("ok", "core", "healthy"), [(False, False, True), (False, True, False)])
def test_only_the_core_decides(ok, core, healthy):
    assert doctor.healthy(
        [Finding("a", True, "x", core=True), Finding("b", ok, "y", core=core)]
    ) == (healthy)


def test_rendering_names_the_backend_or_the_packages(monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "")
    monkeypatch.setenv("PYOPENGL_PLATFORM", "")
    monkeypatch.setattr(rendering, "probe", lambda backend: None if backend == "osmesa" else "no")
    found = find(doctor._rendering, "rendering")
    assert found.ok and found.found == "OSMESA draws MuJoCo tasks"
    monkeypatch.setenv("MUJOCO_GL", "")
    monkeypatch.setattr(rendering, "probe", lambda backend: "no such library")
    found = find(doctor._rendering, "rendering")
    assert (found.ok, found.found) == (False, "none")
    assert "install libegl1 or libosmesa6" in found.advice


def test_kernels_are_compared_with_torch_and_a_missing_compiler_is_named(monkeypatch):
    wrong = SimpleNamespace(norm_mish=lambda x, pre, weight, bias: x + 1)
    monkeypatch.setattr(kernels, "native_kernels", lambda device: (wrong, "C kernels built."))
    found = find(doctor._kernels, "C kernels")
    assert not found.ok and "differ from torch" in found.found
    assert found.advice == "train with --agent.compile off"
    monkeypatch.setattr(kernels, "native_kernels", lambda device: (None, "No C compiler."))
    found = find(doctor._kernels, "C kernels")
    assert not found.ok and "apt-get install gcc" in found.advice


def test_a_full_disk_and_a_folder_that_cannot_be_written_are_found(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=1.5e9))
    found = find(doctor._machine, "disk")
    assert not found.ok and found.found.startswith("1.5 GB free in ")

    def refuse(dir):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    found = find(doctor._runs_folder, "runs")
    assert not found.ok and "Permission denied" in found.found and "--out" in found.advice


def test_words_are_refused(capsys):
    assert main(["doctor", "please"]) == 2
    assert capsys.readouterr().err == "doctor takes no words, but was given: please.\n"
