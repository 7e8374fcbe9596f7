"""Help on the terminal: the overview of the commands, and the flags of one of them.

tyro draws the flags; their texts are the docstrings of the configuration's fields. Nothing here
imports torch.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass, make_dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal, TextIO

from forethought import config as conf


def wanted(tokens: Sequence[str]) -> bool:
    """Whether a command line asks for help."""
    return "-h" in tokens or "--help" in tokens


ABOUT = "Agents that learn a model of their world, plan in it, and are checked."
EXAMPLE = "train tdmpc2 dmc:cartpole-swingup --preset tdmpc2_small --seed 1 --steps 50000"


def show_overview(
    commands: Mapping[str, tuple[str, str]],
    stream: TextIO,
    program: str = "forethought",
    purpose: str = ABOUT,
    example: str = EXAMPLE,
) -> int:
    """Every command by name: what follows it, and what it is for. Returns the exit code."""
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for name, (usage, about) in commands.items():
        table.add_row(f"[bold]{name}[/] {usage}", about)
    console = Console(file=stream, highlight=False)
    console.print(f"usage: [bold]{program}[/] COMMAND ...   (COMMAND --help explains each)\n")
    console.print(f"{purpose}\n")
    console.print(Panel(table, title="commands", title_align="left", border_style="dim"))
    console.print(f"\n{program} {example}", soft_wrap=True)  # to be copied as one line
    return 0 if stream is sys.stdout else 2


def show(command: str, about: str, options: list[Any]) -> int:
    """Draws a command's help; the values shown as defaults are those after presets and file."""
    import tyro

    default = _for_help(options)
    try:
        tyro.cli(
            type(default),
            default=default,
            prog=f"forethought {command}",
            description=f"{about[0].upper()}{about[1:]}.",
            args=["--help"],
            use_underscores=True,
        )
    except SystemExit as shown:
        return int(shown.code or 0)
    return 0


def _for_help(parts: list[Any]) -> Any:
    """One dataclass instance with the fields of all parts, as tyro needs it to draw the help.

    Groups are narrowed to the classes they have here, selectors become choices, and no rules run,
    for the values shown were checked already.
    """
    import tyro

    shown: list[tuple[str, Any]] = []
    values: dict[str, Any] = {}
    for part in parts:
        texts = _texts(type(part))
        for name, annotation in conf.field_types(type(part)).items():
            if name in values:  # of an earlier part: --task is a flag of one verb, a word of others
                continue
            value = getattr(part, name)
            members = list(conf.union_members(annotation))
            if isinstance(part, conf.RunConfig) and name == "replay" and part.agent is not None:
                members = list(conf.replay_kinds(type(part.agent)))
            if len(members) > 1 and value is not None:
                text = f"Which {name}; --help beside a choice shows that one's own options."
                arg = tyro.conf.arg(name=name, help=text)
                shown.append((f"{name}_kind", Annotated[Literal[tuple(members)], arg]))
                values[f"{name}_kind"] = value.kind
            if is_dataclass(value):
                values[name] = _for_help([value])
                about = tyro.conf.arg(help=type(value).__doc__)
                shown.append((name, Annotated[type(values[name]), about]))
            else:
                values[name] = value
                word = isinstance(part, conf.RunConfig) and name in ("agent_name", "task", "agent")
                # tyro would write "(default: )".
                hint = "(default: none)" if value == () else None
                marker: Any = tyro.conf.arg(help=texts.get(name), help_behavior_hint=hint)
                if word:  # or not known yet
                    marker = tyro.conf.Suppress
                annotation = Annotated[annotation, marker]
                if name == "preset":
                    annotation = Annotated[annotation, tyro.conf.UseAppendAction]
                shown.append((name, annotation))
    cls = make_dataclass(
        type(parts[-1]).__name__,
        shown,
        bases=tuple(type(part) for part in parts),
        namespace={"__post_init__": lambda self: None},
        frozen=True,
        kw_only=True,
    )
    return cls(**values)


def _texts(cls: type) -> dict[str, str]:
    """The docstrings of a dataclass's fields, each as one line (tyro keeps the source's breaks)."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not is_dataclass(base):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for line, after in pairwise(tree.body):
            if isinstance(line, ast.AnnAssign) and isinstance(after, ast.Expr):
                found[ast.unparse(line.target)] = " ".join(ast.literal_eval(after.value).split())
    return found
