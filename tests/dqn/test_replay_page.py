"""docs/replay.md has every option with its default and help, and every column of diagnostics."""

import inspect
from pathlib import Path

import pytest

from forethought import config as conf
from forethought.config import PrioritizedReplayConfig, UniformReplayConfig
from forethought.replay import replay_metric_names

PAGE = (Path(__file__).parents[2] / "docs" / "replay.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip().strip("`") for cell in line.replace(r"\|", "!").strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("| `replay")
]


def cell(value: object) -> str:
    return "none" if value is None else f"{value:,}" if type(value) is int else str(value)


@pytest.mark.parametrize("cls", [UniformReplayConfig, PrioritizedReplayConfig])
def test_every_option_is_on_the_page_with_its_default_and_help(cls):
    shown = {row[0]: row[1:] for row in ROWS if row[0].startswith("replay.")}
    source = "".join(inspect.getsource(base) for base in cls.__mro__ if base is not object)
    help_text = " ".join(source.split())
    common = set(conf.field_types(conf.EpisodeReplayConfig))
    for name, value in conf.to_dict(cls()).items():
        if name in common or name == "kind":
            continue
        default, meaning = shown[f"replay.{name}"]
        assert default == cell(value), name
        assert meaning.replace("!", "|") in help_text, name
    assert set(shown) == {
        f"replay.{name}" for name in set(conf.field_types(PrioritizedReplayConfig)) - common
    }


def test_every_column_of_diagnostics_is_explained_in_order():
    shown = [row[0] for row in ROWS if row[0].startswith("replay_")]
    assert shown == list(replay_metric_names(PrioritizedReplayConfig()))
