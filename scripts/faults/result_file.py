"""Writing what a script measured: every value, with command, commit, date, machine, versions."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from forethought import files

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
PAGE = ROOT / "docs" / "faults.md"


def carry_out(main: Callable[[], int], about: str) -> NoReturn:
    """Runs a script that measures, `about` said first; Ctrl-C is a sentence, for what was cut short
    is no result."""
    print(about, flush=True)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("Interrupted: nothing was written.", file=sys.stderr)
        sys.exit(130)


def write(out: Path, result: dict[str, Any]) -> None:
    """`result` as JSON, after what a reader needs to run it again; names of temporary folders,
    which mean nothing to others, are left out."""
    text = json.dumps(provenance() | result, indent=1) + "\n"
    text = re.sub(re.escape(tempfile.gettempdir()) + r"/tmp\w+/", "", text)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")


def put_in_page(name: str, out: Path, table: str, page: Path = PAGE) -> None:
    """Puts a table of the result in its place in docs/faults.md, under a line that tells where it
    is from; a result that was written elsewhere (a trial) does not go there."""
    if out.resolve() != (RESULTS / f"{name}.json").resolve():
        return
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    text = page.read_text(encoding="utf-8")
    before, after = text.partition(begin)[0], text.partition(end)[2]
    assert begin in text and end in text, f"{page} has no place for {name}"
    page.write_text(f"{before}{begin}{origin(out)}\n\n{table}\n{end}{after}", encoding="utf-8")


def origin(out: Path) -> str:
    """When and by what a result was measured, in a line."""
    told = json.loads(out.read_text(encoding="utf-8"))
    commit, _, changed = (told["git_commit"] or "unknown").partition("+")
    return (
        f"Measured {told['date_utc'][:10]} by `{told['command']}` in {told['seconds']:.0f} s on "
        f"{told['machine']}, commit {commit[:9]}{' with changes' if changed else ''}."
    )


def provenance() -> dict[str, Any]:
    """Where these figures come from."""
    changed = git("status", "--porcelain", "--", "src", "scripts")
    commit = git("rev-parse", "HEAD")
    return {
        "command": " ".join(["python", script(), *sys.argv[1:]]),
        "git_commit": commit + "+changes" if commit and changed else commit or None,
        "date_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{processor()}, {os.cpu_count()} cores",
        "versions": files.versions(),
    }


def script() -> str:
    """The script that runs, as somebody in the checkout would name it."""
    path = Path(sys.argv[0]).resolve()
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name


def git(*words: str) -> str:
    asked = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return asked.stdout.strip()


def processor() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
