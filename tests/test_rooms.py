"""The order of the rooms, read from the imports, and the torch-free doors of the house."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "forethought"

# The design's list, lowest first: a module imports only from its own line or lines above it.
LINES = [
    ["config", "presets"],
    ["maths"],
    ["clock", "extras", "seeding"],
    ["files"],
    ["spaces"],
    ["nets"],
    ["tracking"],
    ["replay", "data"],
    ["envs"],
    ["planning"],
    ["agents"],
    ["training"],
    ["arena"],
    ["report"],
    ["dashboard", "scale"],
    ["doctor"],  # room 6 as well: one page that tries the rooms above, beside no other
    ["cli", "cli_data", "commands", "__main__", "__init__"],
]
LINE_OF = {room: number for number, rooms in enumerate(LINES) for room in rooms}
MODULES = sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(source: str, module: str) -> set[str]:
    """The rooms that a module imports anywhere: at its top, in functions, or for types only."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: -node.level]
                base = ".".join([*parents, base]).rstrip(".")
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            package, *rest = name.split(".")
            if package == "forethought":
                is_room = bool(rest) and rest[0] in LINE_OF
                found.add(rest[0] if is_room else "__init__")
    return found


def wrong_imports(room: str, source: str, module: str) -> set[str]:
    return {other for other in imported_rooms(source, module) if LINE_OF[other] > LINE_OF[room]}


def test_every_module_stands_in_a_room_of_the_list():
    assert {room_of(path) for path in MODULES} <= set(LINE_OF)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_from_its_own_line_or_above(path):
    module = ".".join(["forethought", *path.relative_to(PACKAGE).with_suffix("").parts])
    wrong = wrong_imports(room_of(path), path.read_text(encoding="utf-8"), module)
    assert not wrong, f"{module} imports {sorted(wrong)}, which stand below it in the list"


@pytest.mark.parametrize(
    "source",
    [
        "from forethought.agents.base import Agent",
        "import forethought.training.loop",
        "from forethought import envs",
        "from forethought import train",
        "from ..agents import base",
        "def f():\n    from forethought.training import loop",
        "if TYPE_CHECKING:\n    from forethought.envs import VectorEnv",
    ],
)
def test_a_lower_room_that_imports_a_higher_one_is_found(source):
    assert wrong_imports("replay", source, "forethought.replay.memory")


def test_a_higher_room_may_import_a_lower_one():
    source = "from forethought.spaces.spec import EnvSpec\nfrom forethought import config, seeding"
    assert imported_rooms(source, "forethought.replay.memory") == {"spaces", "config", "seeding"}
    assert not wrong_imports("replay", source, "forethought.replay.memory")


def test_folders_are_at_most_two_below_the_package():
    assert max(len(path.relative_to(PACKAGE).parts) for path in MODULES) <= 3


COMMANDS = [
    ["--help"],
    ["train", "--help"],
    ["train", "tdmpc2", "--help"],
    ["train", "dqn", "--help"],
    ["watch", "--help"],
    ["doctor", "--help"],
    ["data", "--help"],
    ["data", "record", "--help"],
    ["list", "agents"],
    ["list", "tasks"],
    ["list", "presets"],
]


def test_import_help_and_list_do_not_import_torch():
    """One process runs them all; the first command that brings torch along is named."""
    program = f"""
import contextlib, io, json, sys
import forethought
brought = ["import forethought"] if "torch" in sys.modules else []
from forethought.cli import main
codes = []
for command in {COMMANDS!r}:
    with contextlib.redirect_stdout(io.StringIO()):
        codes.append(main(command))
    if "torch" in sys.modules and not brought:
        brought.append(" ".join(command))
print(json.dumps([codes, brought]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    codes, brought = json.loads(done.stdout.splitlines()[-1])
    assert codes == [0] * len(COMMANDS)
    assert brought == []
