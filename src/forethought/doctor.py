"""What works on this machine, and what to install for the rest.

Each check is a function that returns rows; what it tries, it tries for real: the C kernels are
built and compared with torch, a picture is drawn in a process of its own, a file is written.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from forethought.config import ForethoughtError
from forethought.envs import rendering

PACKAGE = "forethought"
NOT_FOR_USERS = ("all", "dev")
"""Extras that only gather others."""
CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
"""Exists in a checkout only."""
LEAST_DISK_GB = 2.0
LEAST_MEMORY_GB = 2.0


@dataclass(frozen=True)
class Finding:
    """One row: what was looked at, what was found, and what to do about it."""

    name: str
    ok: bool
    found: str
    advice: str = ""
    """What to install or change; empty where all is well."""
    core: bool = False
    """Without it nothing can be trained."""


def examine() -> list[Finding]:
    """Every check, the most important first; a check that fails itself is a finding, too."""
    findings: list[Finding] = []
    for check in CHECKS:
        try:
            findings += check()
        except (OSError, ImportError, RuntimeError, subprocess.SubprocessError) as error:
            name, reason = check.__name__.strip("_"), f"{type(error).__name__}: {error}"
            core = check in (_python, _torch)
            findings.append(Finding(name, False, reason, "reinstall what it names", core=core))
    return findings


def healthy(findings: list[Finding]) -> bool:
    """Whether agents can be trained here; extras may be missing."""
    return all(finding.ok for finding in findings if finding.core)


def to_json(findings: list[Finding]) -> dict[str, object]:
    """The whole report, JSON-able."""
    return {"ok": healthy(findings), "findings": [asdict(finding) for finding in findings]}


def show(findings: list[Finding]) -> None:
    """Draws the table, then says in one line how things stand."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        bad = "[red]missing[/]" if finding.core else "[yellow]missing[/]"
        told = f"{finding.found}: {finding.advice}" if finding.advice else finding.found
        table.add_row(finding.name, "[green]ok[/]" if finding.ok else bad, Text(told))
    console = Console(highlight=False)
    console.print(table)
    missing = sum(not finding.ok for finding in findings)
    if not healthy(findings):
        console.print("\nThe core does not work; mend what is missing in red.")
    elif missing:
        parts = "1 optional part is" if missing == 1 else f"{missing} optional parts are"
        console.print(f"\nThe core works; {parts} missing.")
    else:
        console.print("\nEverything works.")


# ---- the checks ----


def _python() -> Iterator[Finding]:
    found = f"{platform.python_version()}, {sys.executable}"
    good = sys.version_info >= (3, 11)
    yield Finding("python", good, found, "" if good else "install Python 3.11 or newer", core=True)
    version = importlib.metadata.version(PACKAGE)
    yield Finding(PACKAGE, True, f"{version}, {Path(__file__).parent}", core=True)


def _torch() -> Iterator[Finding]:
    import torch

    devices = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    devices += ["mps"] if torch.backends.mps.is_available() else []
    found = (
        f"{torch.__version__}, devices {', '.join([*devices, 'cpu'])}; "
        f"{torch.get_num_threads()} threads for {os.cpu_count()} processors"
    )
    works = bool(torch.ones(3) @ torch.ones(3) == 3)
    yield Finding("torch", works, found, "" if works else "reinstall torch", core=True)


def _kernels() -> Iterator[Finding]:
    import torch

    from forethought.nets.kernels import TorchKernels, native_kernels

    native, sentence = native_kernels(torch.device("cpu"))
    advice = "install a C compiler (apt-get install gcc), else planning is slower"
    if native is None:
        yield Finding("C kernels", False, sentence.rstrip("."), advice)
        return
    x, weight, bias = torch.linspace(-3, 3, 64).reshape(2, 32), torch.ones(32), torch.zeros(32)
    ours = native.norm_mish(x.clone(), None, weight, bias)
    gap = float((ours - TorchKernels().norm_mish(x.clone(), None, weight, bias)).abs().max())
    same = gap < 1e-4
    found = f"they differ from torch by {gap:.1g}"
    wrong = "train with --agent.compile off"
    good = sentence.removeprefix("C kernels ").rstrip(".")
    yield Finding("C kernels", same, good if same else found, "" if same else wrong)


def _rendering() -> Iterator[Finding]:
    if importlib.util.find_spec("mujoco") is None:
        yield Finding("rendering", False, "MuJoCo is not installed", _install("dmc"))
        return
    try:
        backend = rendering.choose_backend()
    except ForethoughtError as error:
        yield Finding("rendering", False, "none", str(error).rstrip("."))
        return
    yield Finding("rendering", True, f"{backend.upper()} draws MuJoCo tasks")


def _extras() -> Iterator[Finding]:
    """Read from the package's own metadata, so that no list of extras stands here."""
    needed: dict[str, list[str]] = {}
    for line in importlib.metadata.requires(PACKAGE) or ():
        found = re.match(r"([\w.-]+).*extra == ['\"]([\w-]+)", line)
        if found and found[2] not in NOT_FOR_USERS:
            needed.setdefault(found[2], []).append(found[1])
    for extra, names in needed.items():
        versions = {name: _version(name) for name in names}
        missing = [name for name, version in versions.items() if version is None]
        told = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
        if missing:
            told = f"no {', '.join(missing)}"
        yield Finding(f"extra {extra}", not missing, told, _install(extra) if missing else "")


def _ffmpeg() -> Iterator[Finding]:
    if importlib.util.find_spec("imageio_ffmpeg") is None:
        yield Finding("ffmpeg", False, "no videos", _install("video"))
        return
    import imageio_ffmpeg

    program = imageio_ffmpeg.get_ffmpeg_exe()
    done = subprocess.run(
        [program, "-version"], capture_output=True, text=True, check=False, timeout=60
    )
    good = done.returncode == 0
    found = " ".join(done.stdout.split()[:3]) if good else "it does not start"
    yield Finding("ffmpeg", good, found, "" if good else _install("video"))


def _machine() -> Iterator[Finding]:
    free = shutil.disk_usage(Path.cwd()).free / 1e9
    enough = free >= LEAST_DISK_GB
    advice = "" if enough else f"a run may need {LEAST_DISK_GB:g} GB; choose another place by --out"
    yield Finding("disk", enough, f"{free:.1f} GB free in {Path.cwd()}", advice)

    memory = free_memory_gb()
    if memory is not None:
        enough = memory >= LEAST_MEMORY_GB
        advice = "" if enough else f"a run may need {LEAST_MEMORY_GB:g} GB; close other programs"
        yield Finding("memory", enough, f"{memory:.1f} GB free", advice)


def _runs_folder() -> Iterator[Finding]:
    folder = Path("runs")
    place = folder if folder.is_dir() else Path.cwd()
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        found = f"{folder.absolute()} cannot be written ({error.strerror})"
        yield Finding("runs", False, found, "train with --out DIR, in a folder that can be written")
        return
    yield Finding("runs", True, f"{folder.absolute()} can be written")


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    _python,
    _torch,
    _kernels,
    _rendering,
    _ffmpeg,
    _machine,
    _runs_folder,
    _extras,
)


def free_memory_gb() -> float | None:
    """Memory that can be had without swapping; None where the system does not say."""
    info = Path("/proc/meminfo")
    if not info.exists():
        return None
    found = re.search(r"MemAvailable:\s+(\d+) kB", info.read_text())
    return int(found[1]) * 1024 / 1e9 if found else None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _install(extra: str) -> str:
    """In a checkout with the tested versions: without them pip may take another torch."""
    with_file = f"-c {os.path.relpath(CONSTRAINTS)} " if CONSTRAINTS.is_file() else ""
    return f"pip install {with_file}'forethought[{extra}]'"
