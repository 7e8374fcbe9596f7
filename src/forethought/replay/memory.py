"""How much memory a replay takes, and whether this machine has it.

Rings are allocated lazily, so that a capacity too large for the machine would not fail at the
start but be killed hours later, when the ring fills. Therefore it is checked before allocating.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

from forethought.config import ConfigError
from forethought.files import size_in_words as words

HEADROOM = 0.9  # of what is free; the rest is for networks, batches and the environment
CGROUPS = (
    # (limit, used, statistics): version 2, then version 1
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)


def available_bytes(device: torch.device) -> int | None:
    """Bytes free on a device; None where nobody can tell."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    limits = [x for x in (_machine_bytes(), _container_bytes()) if x is not None]
    return min(limits, default=None)


def check_fits(row_bytes: float, num_envs: int, capacity_rows: int, device: torch.device) -> None:
    """Refuse a capacity that does not fit, and name the largest that does."""
    _check(row_bytes, num_envs, capacity_rows, available_bytes(device), str(device))


def check_disk(row_bytes: float, num_envs: int, capacity_rows: int, folder: Path) -> None:
    """Refuse a folder that cannot take the rows, and name the largest capacity that it can."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        reason = error.strerror or "it cannot be read"
        raise ConfigError(
            f"replay.mapped_folder is {folder}, but must be a folder ({reason})."
        ) from None
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"replay.mapped_folder is {folder}, which cannot be written to.")
    _check(row_bytes, num_envs, capacity_rows, free, str(folder))


def _check(row_bytes: float, envs: int, capacity_rows: int, free: int | None, where: str) -> None:
    need = int(row_bytes * capacity_rows)
    if free is None or need <= HEADROOM * free:
        return
    per_env = int(int(HEADROOM * free) // (row_bytes * envs))
    raise ConfigError(
        f"replay.capacity_rows is {capacity_rows}, which takes {words(need)} "
        f"({words(int(row_bytes))} a row), but {words(free)} are free on {where}; "
        f"the largest that fits is {per_env * envs}."
    )


def free_main_memory() -> int | None:
    """Bytes; None where nobody can say."""
    return available_bytes(torch.device("cpu"))


def check_room(what: str, need: int, free: int | None, advice: str) -> None:
    """Refuse to read into main memory what it has no room for; None where nobody knows."""
    if free is not None and need > HEADROOM * free:
        raise ConfigError(
            f"{what} takes {words(need)} in main memory, of which {words(free)} are free: {advice}."
        )


def _machine_bytes() -> int | None:
    """Free memory of the machine: what the kernel could hand out without swapping."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    if "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _container_bytes(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Free memory under the container's limit; cached files count as free, they can be dropped."""
    for limit_name, used_name, stat_name in CGROUPS:
        try:
            limit = (root / limit_name).read_text().strip()
            used = int((root / used_name).read_text())
            stat = dict(line.split() for line in (root / stat_name).read_text().splitlines())
        except (OSError, ValueError):
            continue  # not this version of control groups, or no right to read it
        if limit == "max":
            return None
        return max(0, int(limit) - used + int(stat.get("inactive_file", 0)))
    return None
