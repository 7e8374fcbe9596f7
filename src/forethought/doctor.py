"""What works on this machine, and what to install for the rest.

Each check is a function that returns rows. The package's own requirements are imported, the C
kernels built and compared with torch, a picture is drawn in a process of its own, ffmpeg started, a
file written. Of extras only the versions are compared: importing all of them takes half a minute.
This page itself imports nothing that could be missing.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import math
import operator
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from forethought.config import ForethoughtError
from forethought.extras import install, install_extra

PACKAGE = "forethought"
NOT_FOR_USERS = ("all", "dev", "hockey")
"""Extras that only gather others, and one that nothing uses yet."""
REQUIREMENT = re.compile(r"([\w.-]+)\s*(?:\[[^]]*\])?\s*\(?([^;()]*)\)?\s*(?:;(.*))?")
"""`imageio[ffmpeg]>=2.34; extra == "video"`: the name, the versions, the marker."""
COMPARE = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
FAILURES = (OSError, ImportError, RuntimeError, ValueError, subprocess.SubprocessError)
"""What a check may raise."""
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
        except FAILURES as error:
            name, reason = check.__name__.strip("_"), f"{type(error).__name__}: {error}"
            core = check in (_python, _core, _devices)
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
    rows = [
        (finding, f"{finding.found}: {finding.advice}" if finding.advice else finding.found)
        for finding in findings
    ]
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:  # it is one of the things that are looked for
        for finding, told in rows:
            print(f"{finding.name:<20} {'ok' if finding.ok else 'not ok':<7} {told}")
        print(f"\n{_verdict(findings)}")
        return
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding, told in rows:
        bad = "[red]not ok[/]" if finding.core else "[yellow]not ok[/]"
        table.add_row(finding.name, "[green]ok[/]" if finding.ok else bad, Text(told))
    # In a file or a pipe lines stay whole, so that commands in them can be copied.
    console = Console(width=None if sys.stdout.isatty() else 1000, highlight=False)
    console.print(table)
    console.print(f"\n{_verdict(findings)}")


def _verdict(findings: list[Finding]) -> str:
    bad = [finding for finding in findings if not finding.ok]
    if not healthy(findings):
        names = ", ".join(finding.name for finding in bad if finding.core)
        return f"The core does not work; mend {names}."
    if bad:
        parts = "1 other part does" if len(bad) == 1 else f"{len(bad)} other parts do"
        return f"The core works; {parts} not."
    return "Everything works."


# ---- requirements, as the package's metadata names them ----


@dataclass(frozen=True)
class Requirement:
    """A distribution that the package needs, or that one of its extras does."""

    name: str
    wanted: str
    """The versions, such as `<4,>=3.17`; empty for any."""
    extra: str | None
    """None is the core."""

    @property
    def version(self) -> str | None:
        """The one that is installed."""
        return _version(self.name)

    @property
    def module(self) -> str:
        """What it is imported as: PyYAML as yaml."""
        found = _modules().get(_plain(self.name), [])
        own = [module for module in found if _plain(module) == _plain(self.name)]
        return next(iter(own or found), self.name.replace("-", "_"))

    def problem(self) -> str:
        """What is wrong with it, as far as that is known without an import; empty for nothing."""
        version = self.version
        if version is None:
            return f"no {self.name}"
        if not fits(version, self.wanted):
            return f"{self.name} {version}, but must be {self.wanted}"
        if importlib.util.find_spec(self.module) is None:
            return f"{self.name} {version} has lost its module {self.module}"
        return ""

    def import_problem(self) -> str:
        """The same, after it was imported."""
        problem = self.problem()
        if problem:
            return problem
        try:
            importlib.import_module(self.module)
        except Exception as error:  # noqa: BLE001 - foreign code; what it raises is the finding
            return f"{self.name} cannot be imported ({type(error).__name__}: {error})"
        return ""


def requirements() -> list[Requirement]:
    """Read from the package's own metadata, so that no list of them stands here."""
    found = []
    for line in importlib.metadata.requires(PACKAGE) or ():
        parts = REQUIREMENT.fullmatch(line.strip())
        if parts is None:
            raise RuntimeError(f"the requirement {line!r} cannot be read")
        extra = re.search(r"extra == ['\"]([\w-]+)", parts[3] or "")
        if extra or not parts[3]:  # another marker may mean other machines than this one
            found.append(Requirement(parts[1], parts[2].strip(), extra[1] if extra else None))
    return found


def fits(version: str, wanted: str) -> bool:
    """Whether a version is among those that a requirement asks for.

    Compared by its release alone, so `2.13.0+cpu` is 2.13, and 4.0.0rc1 is 4, which `<4` refuses. A
    condition that is not understood is not met.
    """
    for condition in filter(None, wanted.replace(" ", "").split(",")):
        parts = re.fullmatch(r"(>=|<=|==|!=|>|<)([\d.]+)", condition)
        if parts is None or not COMPARE[parts[1]](_release(version), _release(parts[2])):
            return False
    return True


def _release(version: str) -> tuple[int, ...]:
    found = re.match(r"[\d.]*", version)
    numbers = [int(part) for part in (found[0] if found else "").split(".") if part]
    while numbers and numbers[-1] == 0:  # 4.0.0 is 4
        numbers.pop()
    return tuple(numbers)


@cache
def _modules() -> dict[str, list[str]]:
    """The public modules of every installed distribution."""
    found: dict[str, list[str]] = {}
    for module, owners in sorted(importlib.metadata.packages_distributions().items()):
        if not module.startswith("_"):
            for owner in owners:
                found.setdefault(_plain(owner), []).append(module)
    return found


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


# ---- the checks ----


def _python() -> Iterator[Finding]:
    found = f"{platform.python_version()}, {sys.executable}"
    good = sys.version_info >= (3, 11)
    yield Finding("python", good, found, "" if good else "install Python 3.11 or newer", core=True)
    version = importlib.metadata.version(PACKAGE)
    yield Finding(PACKAGE, True, f"{version}, {Path(__file__).parent}", core=True)


def _core() -> Iterator[Finding]:
    needed = [requirement for requirement in requirements() if requirement.extra is None]
    if not needed:
        found = "the package's metadata names none"
        yield Finding("requirements", False, found, f"reinstall {PACKAGE}", core=True)
    for one in needed:
        problem = one.import_problem()
        advice = install(f"{one.name}{one.wanted}") if problem else ""
        yield Finding(one.name, not problem, problem or str(one.version), advice, core=True)


def _devices() -> Iterator[Finding]:
    import torch

    devices = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    devices += ["mps"] if torch.backends.mps.is_available() else []
    threads = torch.get_num_threads()
    used = f"{threads} {'thread' if threads == 1 else 'threads'} for {os.cpu_count()} processors"
    found = f"{', '.join([*devices, 'cpu'])}; {used}"
    works = bool(torch.ones(3) @ torch.ones(3) == 3)
    yield Finding("devices", works, found, "" if works else "reinstall torch", core=True)


def _kernels() -> Iterator[Finding]:
    import torch

    from forethought.nets.kernel_check import wrong_ones
    from forethought.nets.kernels import native_kernels

    native, sentence = native_kernels(torch.device("cpu"))
    if native is None:
        missing = sentence.startswith("No C compiler")
        mend = "install a C compiler (apt-get install gcc)" if missing else "mend that"
        advice = f"{mend}, else planning is slower"
        yield Finding("C kernels", False, sentence.rstrip("."), advice)
        return
    wrong = wrong_ones(native)
    if wrong:
        worst = max(wrong, key=lambda name: math.inf if math.isnan(wrong[name]) else wrong[name])
        far = f"{worst}: off by {wrong[worst]:.1g} of its greatest value"
        found = f"{len(wrong)} of their results are not torch's ({far})"
        yield Finding("C kernels", False, found, "train with --agent.compile off")
    else:
        yield Finding("C kernels", True, sentence.removeprefix("C kernels ").rstrip("."))


def _rendering() -> Iterator[Finding]:
    if importlib.util.find_spec("mujoco") is None:
        yield Finding("rendering", False, "MuJoCo is not installed", install_extra("dmc"))
        return
    from forethought.envs import rendering

    try:
        backend = rendering.choose_backend()
    except ForethoughtError as error:
        yield Finding("rendering", False, "none", str(error).rstrip("."))
        return
    yield Finding("rendering", True, f"{backend.upper()} draws MuJoCo tasks")


def _extras() -> Iterator[Finding]:
    needed: dict[str, list[Requirement]] = {}
    for requirement in requirements():
        if requirement.extra is not None and requirement.extra not in NOT_FOR_USERS:
            needed.setdefault(requirement.extra, []).append(requirement)
    for extra, parts in needed.items():
        problems = [problem for part in parts if (problem := part.problem())]
        told = ", ".join(problems or [f"{part.name} {part.version}" for part in parts])
        yield Finding(
            f"extra {extra}", not problems, told, install_extra(extra) if problems else ""
        )


def _ffmpeg() -> Iterator[Finding]:
    if importlib.util.find_spec("imageio_ffmpeg") is None:
        yield Finding("ffmpeg", False, "no videos", install_extra("video"))
        return
    import imageio_ffmpeg

    program = imageio_ffmpeg.get_ffmpeg_exe()
    done = subprocess.run(
        [program, "-version"], capture_output=True, text=True, check=False, timeout=60
    )
    good = done.returncode == 0
    found = " ".join(done.stdout.split()[:3]) if good else "it does not start"
    yield Finding("ffmpeg", good, found, "" if good else install_extra("video"))


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
    _core,
    _devices,
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
