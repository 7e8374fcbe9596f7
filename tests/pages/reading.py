"""The documentation as data: its blocks, commands and tables, and the flags that it may name.

In a page, a block whose first line is a comment with a file's name is that file.
"""

import dataclasses
import re
import shlex
from pathlib import Path

import pytest

from forethought import config as conf
from forethought import presets

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", *DOCS.rglob("*.md")])
OF_EVERY_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# ([\w.]+\.(?:py|yaml))\n")
COMMAND = re.compile(r"^(?:\$ )?((?:forethought|make) \S.*)$", re.MULTILINE)


def blocks(page):
    """(language, text) of every fenced block."""
    return FENCE.findall(page.read_text(encoding="utf-8"))


def files_in(page):
    return {found[1]: text for _, text in blocks(page) if (found := FILE.match(text))}


def programs(page):
    """The Python blocks of a page that are no files."""
    codes = [text for language, text in blocks(page) if language == "python"]
    return [code for code in codes if not FILE.match(code)]


def commands(page):
    """Every `forethought ...` and `make ...` of a page, in blocks and in running text, as words."""
    text = page.read_text(encoding="utf-8")
    found = [line for _, code in FENCE.findall(text) for line in COMMAND.findall(code)]
    prose = FENCE.sub("", text)
    found += re.findall(r"`((?:forethought|make) [^`]*)`", prose)
    return [shlex.split(line, comments=True) for line in dict.fromkeys(found)]


def table(page, heading):
    """The rows, as lists of cells, of the first table under a heading."""
    text = page.read_text(encoding="utf-8")
    part = re.split(rf"^#+ {re.escape(heading)}\n", text, flags=re.MULTILINE)[1]
    lines = re.search(r"^\|.*\n\|---.*\n((?:\|.*\n)+)", part, re.MULTILINE)[1].splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def first_names(page, heading):
    """The names in the first column of that table."""
    return [row[0].split("`")[1] for row in table(page, heading)]


def console_examples():
    text = "".join(code for lang, code in blocks(DOCS / "configuration.md") if lang == "console")
    return re.findall(r"^\$ forethought (.*)\n(.*)$", text, re.MULTILINE)


def every_flag(cls, prefix=""):
    """The flags of a configuration class, those of every kind of a group included."""
    for name, annotation in conf.field_types(cls).items():
        kinds = conf.union_members(annotation)
        group = [annotation] if dataclasses.is_dataclass(annotation) else list(kinds.values())
        if not group or kinds:
            yield prefix + name
        for member in group:
            yield from every_flag(member, f"{prefix}{name}.")


def shown(text):
    if text == "derived":
        return None
    return text if text == "off" else presets.parse_scalar(text.replace(",", ""))
