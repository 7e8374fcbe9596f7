"""The doctor: what works is tried for real, what is missing is named with its remedy."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from forethought import doctor, extras
from forethought.cli import main
from forethought.doctor import Finding
from forethought.envs import rendering
from forethought.nets import kernels

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MODULES = {
    "torch": "torch",
    "numpy": "numpy",
    "gymnasium": "gymnasium",
    "tyro": "tyro",
    "PyYAML": "yaml",
    "safetensors": "safetensors",
    "rich": "rich",
}
"""What the core needs, and as what it is imported."""


def test_outside_a_terminal_a_line_is_never_broken(capsys):
    advice = "pip install " + " ".join(["a-package"] * 30)
    doctor.show([Finding("extra", False, "no package", advice)])
    assert f"no package: {advice}" in capsys.readouterr().out


def find(check, name):
    return {finding.name: finding for finding in check()}[name]


def test_the_core_works_here_and_json_says_so(capsys):
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    names = [finding["name"] for finding in report["findings"]]
    assert names[:3] == ["python", "forethought", "torch"]
    assert names[2:9] == list(MODULES)
    assert {"C kernels", "rendering", "ffmpeg", "disk", "runs", "extra dmc"} <= set(names)
    assert "extra all" not in names and "extra dev" not in names
    found = {finding["name"]: finding["found"] for finding in report["findings"]}
    assert found["torch"] == torch.__version__ and "cpu" in found["devices"]


def test_the_table_shows_the_command_of_a_missing_extra(capsys, monkeypatch):
    version = importlib.metadata.version

    def absent(name):
        if name == "minatar":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    monkeypatch.setattr(extras, "CHECKOUT", Path("nowhere"))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(doctor, "CHECKS", (doctor._python, doctor._extras))
    assert main(["doctor"]) == 0  # an extra is not the core
    lines = capsys.readouterr().out.splitlines()
    rows = [line.rstrip().split(maxsplit=3) for line in lines]
    row = next(row for row in rows if row[:2] == ["extra", "minatar"])
    assert row[2:] == ["not", "ok  no minatar: pip install 'forethought[minatar]'"]
    assert rows[-1] == ["The", "core", "works;", "1 other part does not."]


def test_in_a_checkout_the_advice_names_the_constraints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(extras, "CHECKOUT", tmp_path)
    assert extras.install_extra("dmc") == "pip install 'forethought[dmc]'"
    (tmp_path / "constraints.txt").touch()
    assert extras.install_extra("dmc") == "pip install -c constraints.txt -e '.[dmc]'"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert extras.install_extra("dmc") == "pip install -c ../constraints.txt -e '..[dmc]'"
    assert extras.install("tyro>=1") == "pip install -c ../constraints.txt 'tyro>=1'"


def test_videos_need_pygame_which_draws_the_classic_control_tasks(monkeypatch):
    needed = [f'{name}; extra == "video"' for name in PROJECT["optional-dependencies"]["video"]]
    monkeypatch.setattr(importlib.metadata, "requires", lambda package: needed)
    monkeypatch.setattr(doctor, "_version", lambda name: None if "pygame" in name else "2.34")
    found = find(doctor._extras, "extra video")
    assert not found.ok and found.found == "no pygame-ce"
    assert found.advice == extras.install_extra("video")


# Requirements


def installed_as(monkeypatch, **versions):
    """The metadata says these versions, whatever is installed."""
    real = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: versions.get(name) or real(name)
    )


def test_the_core_is_what_the_project_declares():
    names = [line.split(">")[0] for line in PROJECT["dependencies"]]
    needed = [one for one in doctor.requirements() if one.extra is None]
    assert names == [one.name for one in needed] == list(MODULES)
    assert [one.module for one in needed] == list(MODULES.values())


@pytest.mark.parametrize("name", MODULES)
def test_without_one_of_its_requirements_the_core_does_not_work(name, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, MODULES[name], None)
    monkeypatch.setattr(doctor, "CHECKS", (doctor._python, doctor._core))
    assert main(["doctor", "--json"]) == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    (bad,) = [finding for finding in findings if not finding["ok"]]
    assert bad["name"] == name and f"'{name}>=" in bad["advice"]


def test_a_requirement_that_raises_when_it_is_imported_is_told(monkeypatch, tmp_path):
    (tmp_path / "brittle.py").write_text("raise AttributeError('old numpy')\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(importlib.metadata, "requires", lambda package: ["brittle>=1"])
    installed_as(monkeypatch, brittle="1.5")
    (found,) = doctor._core()
    assert not found.ok and found.core
    assert found.found == "brittle cannot be imported (AttributeError: old numpy)"


def test_with_nothing_installed_doctor_still_says_what_to_install():
    """No table can be drawn and no preset read; a process of its own, where nothing is imported."""
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({list(MODULES.values())}))\n"
        "from forethought.cli import main; sys.exit(main(['doctor']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    bad = {line.split()[0] for line in done.stdout.splitlines() if " not ok " in line}
    assert set(MODULES) <= bad
    assert done.stdout.splitlines()[-1].startswith("The core does not work; mend torch, numpy, ")


def test_metadata_without_requirements_is_not_taken_for_health(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "requires", lambda package: None)
    (found,) = doctor._core()
    assert not found.ok and found.core and found.advice == "reinstall forethought"


def test_a_version_that_an_extra_does_not_take_is_told(monkeypatch):
    installed_as(monkeypatch, mujoco="4.0.0")
    found = find(doctor._extras, "extra dmc")
    assert not found.ok and found.found == "mujoco 4.0.0, but must be <4,>=3.17"
    assert found.advice == extras.install_extra("dmc")


def test_a_version_that_the_core_does_not_take_is_told(monkeypatch):
    installed_as(monkeypatch, torch="2.6.0+cpu")
    found = find(doctor._core, "torch")
    assert not found.ok and found.found == "torch 2.6.0+cpu, but must be >=2.7"


@pytest.mark.parametrize(
    ("version", "wanted", "fit"),
    [
        ("2.13.0+cpu", ">=2.7", True),  # numbers, not text: 13 is more than 7
        ("3.17.0", "<4,>=3.17", True),
        ("3.9", "<4,>=3.17", False),
        ("4.0.0rc1", "<4", False),
        ("4.0.0", "<=4", True),
        ("4.0", "==4.0.0", True),
        ("4.0", "!=4", False),
        ("4.0.1", ">4", True),
        ("1.0", "", True),
        ("1.0", "~=1.0", False),  # not understood: better asked for than passed over
    ],
)
def test_versions_are_compared_by_their_numbers(version, wanted, fit):
    assert doctor.fits(version, wanted) is fit


def test_help_of_doctor_imports_no_torch():
    code = (
        "import sys; from forethought.cli import main; assert main(['doctor', '--help']) == 0; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


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
    for name in ("norm_mish", "features", "linear"):  # each of them by itself
        wrong, right = kernels.TorchKernels(), getattr(kernels.TorchKernels(), name)
        setattr(wrong, name, lambda *given, right=right: right(*given) + 1)
        monkeypatch.setattr(
            kernels, "native_kernels", lambda device, wrong=wrong: (wrong, "C kernels built.")
        )
        found = find(doctor._kernels, "C kernels")
        assert not found.ok and "not torch's" in found.found
        assert found.advice == "train with --agent.compile off"
    monkeypatch.setattr(kernels, "native_kernels", lambda device: (None, "No C compiler."))
    found = find(doctor._kernels, "C kernels")
    assert not found.ok and "apt-get install gcc" in found.advice
    homeless = "The C kernels could not be built (the user has no home directory)."
    monkeypatch.setattr(kernels, "native_kernels", lambda device: (None, homeless))
    found = find(doctor._kernels, "C kernels")
    assert not found.ok and "compiler" not in found.advice


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
