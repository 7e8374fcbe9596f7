"""The documentation runs: its Python blocks and its commands, carried out in a small world.

All pages are read in one folder with a finished run in it, for which RUN stands. Python blocks of a
page are one program. Commands are carried out, each once: training and resuming stop after a few
steps. Only what make does is not done.
"""

import csv
import dataclasses
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from forethought import cli, presets
from forethought import config as conf
from forethought.envs import check_task, make_env, rendering
from forethought.presets import flags
from forethought.tracking.catalog import Entry
from tests.data_stubs import make_dataset
from tests.import_stubs import (
    box_json,
    chunk_columns,
    minari_episode,
    write_chunk,
    write_minari,
)
from tests.pages.reading import (
    DOCS,
    OF_EVERY_PAGE,
    PAGES,
    ROOT,
    commands,
    console_examples,
    files_in,
    first_names,
    programs,
)

pytestmark = pytest.mark.pages

WORDS = {"AGENT": "tdmpc2", "TASK": "gym:Pendulum-v1", "STEP": "400"}
"""What stands for a word in capitals, besides RUN."""
SMALL = {
    "--preset": "debug",
    "--steps": "50",
    "--env.max_episode_steps": "20",
    "--train.seed_agent_steps": "40",
    "--train.seed_updates": "2",
    "--eval.episodes": "1",
}
"""What makes any training one of seconds, in the place of what a page says."""
SMALL_PIXELS = {
    **SMALL,
    "--steps": "12",
    "--env.max_episode_steps": "5",
    "--train.seed_agent_steps": "10",
}
"""Fewer pictures: without a graphics card, one takes longer than a decision."""
SMALL_OFFLINE = {
    "--preset": "debug",
    "--offline.updates": "4",
    "--env.max_episode_steps": "20",
    "--eval.episodes": "1",
}
"""The same for a training from recorded data."""
SMALLER = {
    "env": {"max_episode_steps": 20},
    "train": {"seed_agent_steps": 380, "seed_updates": 4},
    "eval": {"episodes": 1},
}
"""Laid over the preset debug: 20 of its 400 steps are planned and learned from."""
FURTHER = "60"
"""Steps in all, where a page resumes a run with more steps."""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the files of all pages, and a run on the environment that one of them makes.

    It is trained by the installed command, in workers: neither has the folder on its path.
    """
    folder = tmp_path_factory.mktemp("docs")
    for page in PAGES:
        for name, text in files_in(page).items():
            (folder / name).write_text(text, encoding="utf-8")
    command = next(
        words for words in commands(DOCS / "your_environment.md") if "--env.workers" in words
    )
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    script = Path(sys.executable).parent / command[0]
    smaller = [f"--{group}.{key}={x}" for group, keys in SMALLER.items() for key, x in keys.items()]
    done = subprocess.run(
        [script, *command[1:], *smaller, "--out", "RUN"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return SimpleNamespace(folder=folder, run=folder / "RUN", carried_out=set())


@pytest.fixture(scope="module")
def world(place):
    """The same, with two small runs of a task that can be filmed, for RUN and OTHER_RUN, and data
    of others."""
    runs = {"RUN": place.folder / "filmed", "OTHER_RUN": place.folder / "other"}
    for seed, out in enumerate(runs.values(), start=1):
        words = ["train", WORDS["AGENT"], WORDS["TASK"], "--seed", str(seed), "--out", str(out)]
        assert cli.main(made_small(words)) == 0
    return SimpleNamespace(place=place, runs={**runs, **sources(place.folder / "sources")})


def sources(folder):
    """Data of others to import, for MINARI and CHUNKS, and a DATASET."""
    (folder / "chunks").mkdir(parents=True)
    walkers = chunk_columns([1, 0], rows=501, obs=24, action=6, widths=[(24, 6)] * 2)
    write_chunk(folder / "chunks" / "chunk_0.pt", walkers)
    columns = chunk_columns([3, 3], rows=501, obs=24, action=6, widths={3: (17, 6)})
    write_chunk(folder / "chunks" / "chunk_1.pt", columns)
    spaces = {"obs_space": box_json(3, -9.0, 9.0), "action_space": box_json(2, -2.0, 2.0)}
    minari = write_minari(folder / "minari", [minari_episode(9)], **spaces)
    dataset = make_dataset(folder / "dataset")
    return {"MINARI": minari, "CHUNKS": folder / "chunks", "DATASET": dataset}


@pytest.fixture
def here(place, monkeypatch):
    """Being in that folder, with a path of one's own to import from."""
    monkeypatch.chdir(place.folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return place


# Examples


def test_an_environment_in_the_current_folder_trains_by_name_and_in_workers(place):
    with (place.run / "episodes.csv").open(newline="") as file:
        seen = {row["env_index"] for row in csv.DictReader(file)}
    assert seen == {"0", "1"}
    assert json.loads((place.run / "run.json").read_text())["task"] == "gym:puck:Puck-v0"


@OF_EVERY_PAGE
def test_python_blocks_run_from_top_to_bottom(here, page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("RUN").symlink_to(here.run)
    for module in here.folder.glob("*.py"):  # of the run's own task
        Path(module.name).symlink_to(module)
    of_presets = presets.layers
    monkeypatch.setattr(presets, "layers", lambda *given: [*of_presets(*given), SMALLER])
    names = {"__name__": "__main__"}
    for code in programs(page):
        exec(compile(code, page.name, "exec"), names)  # noqa: S102


def test_extra_columns_of_the_example_reach_a_row(here):
    env = make_env("gym:windy:WindyPuck-v0")
    _, infos = env.reset(seed=[3])
    assert infos["wind"].shape == (1, 2)
    assert env.spec_for_agent.columns[0].name == "wind"
    env.close()


def test_a_module_that_raises_is_told_with_its_traceback(here):
    (here.folder / "broken_env.py").write_text("width = 1 / 0\n", encoding="utf-8")
    with pytest.raises(conf.ConfigError) as caught:
        check_task("gym:broken_env:X-v0")
    assert "gym:broken_env:X-v0 raised ZeroDivisionError" in str(caught.value)
    assert "width = 1 / 0" in caught.value.__notes__[0]


def test_an_id_without_its_module_is_told_how_to_name_it(here):
    with pytest.raises(conf.ConfigError, match="is named gym:MODULE:ID"):
        check_task("gym:rink/Puck-v0")


# Commands


@OF_EVERY_PAGE
def test_every_command_works_as_it_is_written(page, world, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("MUJOCO_GL", "")  # both are chosen by whoever draws first
    monkeypatch.setenv("PYOPENGL_PLATFORM", "")
    for file in world.place.folder.glob("*.*"):
        Path(file.name).symlink_to(file)
    refused = [shlex.split(command) for command, _ in console_examples()]
    carried_out = world.place.carried_out
    elsewhere = []
    for program, *words in commands(page):
        words = [word for word in words if word not in ("...", "…")]
        if (program, *words) in carried_out or words in refused:
            continue  # another page has it, too; what is refused is compared below
        if program == "make":
            assert words[0] in make_targets(), f"make {words[0]}"
        elif len(words) == 1 and words[0] not in ("doctor", *HELP):
            assert words[0] in cli.VERBS, f"forethought {words[0]}"  # speaks of it in general
        else:
            elsewhere += carry_out(words, world.runs, capsys)
        carried_out.add((program, *words))
    carry_out_elsewhere([words for words in elsewhere if draws_pixels(words)])
    carry_out_elsewhere([words for words in elsewhere if not draws_pixels(words)])


HELP = ("--help", "--version")
BOX2D = "gym:LunarLander-v3"
"""A library that crashes an interpreter which has drawn with others."""


def carry_out(words, runs, capsys):
    """Runs a command in this process; what it asks for must be there afterwards.

    Returns it instead, in a list, where it needs a process of its own.
    """
    if words[0] == "resume":  # it changes the run, which others read
        copy = Path(f"resumed-{len(list(Path.cwd().glob('resumed-*')))}")
        shutil.copytree(runs["RUN"], copy)
        runs = {**runs, "RUN": copy}
    if words[0] == "watch" and "--task" in words:  # of several: the page has trained them before
        runs = {**runs, "RUN": next(Path("runs").glob("multi-*/*/*"))}
    asked = [put_in(word, runs) for word in words]
    if asked[0] == "train" and "--help" not in asked:
        asked = made_small(asked)
    elif "--steps" in asked:
        asked[asked.index("--steps") + 1] = FURTHER
    elif asked[0] == "import-tdmpc2":
        asked += ["--env.max_episode_steps", "20"]  # its episodes are played below
    if asked[0] == "watch" and not can_draw(asked[1]):
        read_only(*asked)
        return []
    if draws_pixels(asked) or BOX2D in asked:
        return [asked]
    capsys.readouterr()
    assert cli.main(asked) == 0, f"{asked}: {capsys.readouterr().err}"
    for flag in ("--out", "--video"):
        if flag in asked:
            assert Path(asked[asked.index(flag) + 1]).exists(), asked
    if "--eval.video_every_evaluations" in asked and can_draw(run_in(Path("runs"))):
        assert list(Path("runs").rglob("videos/*.mp4")), asked  # without, training only warns
    return []


def draws_pixels(words):
    return any("pixels" in word for word in words)


ELSEWHERE = """
import json, sys
from forethought.cli import main

for words in json.loads(sys.argv[1]):
    if main(words) != 0:
        sys.exit(f"{words} failed")
"""


def carry_out_elsewhere(asked):
    """One after the other in a process of their own: two back-ends of OpenGL in one interpreter
    crash it."""
    if asked and (not draws_pixels(asked[0]) or there_is_gl()):
        assert not any({"--out", "--video"} & set(words) for words in asked), "look for these, too"
        command = [sys.executable, "-c", ELSEWHERE, json.dumps(asked)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def run_in(folder):
    return next(folder.rglob("run.json")).parent


def put_in(word, runs):
    name, slash, rest = word.partition("/")
    return f"{runs[name]}{slash}{rest}" if name in runs else WORDS.get(word, word)


def made_small(words):
    """A training command that takes seconds; its own presets and flags are still read."""
    kept = list(words)
    small = SMALL_PIXELS if draws_pixels(kept) else SMALL
    small = SMALL_OFFLINE if "--offline.data" in kept else small
    for flag in ("--steps", "--offline.updates"):  # the only ones of them that pages give
        if flag in kept:
            at = kept.index(flag)
            del kept[at : at + 2]
    if "--env.num_envs" in kept:
        kept[kept.index("--env.num_envs") + 1] = "2"
    return [*kept, *(word for pair in small.items() for word in pair)]


def can_draw(run):
    """Whether there is an OpenGL for MuJoCo; Gymnasium draws its own tasks by itself."""
    if json.loads((Path(run) / "run.json").read_text())["task"].startswith("gym:"):
        return True
    return there_is_gl()


def there_is_gl():
    return any(rendering.probe(backend) is None for backend in rendering.BACKENDS)


def read_only(verb, *words):
    """Whether a verb has these flags, without doing what they ask for."""
    options = getattr(cli, f"{verb.capitalize()}Options")
    given = flags.read(words, conf.field_types(options))[1]
    conf.from_dict(options, given)


def make_targets():
    return re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)


# The run directory


def test_the_page_of_the_run_directory_has_every_file_of_a_checkpoint(place):
    folder = max((place.run / "checkpoints").glob("step-*"))
    names = sorted(path.name for path in folder.iterdir())
    assert sorted(first_names(DOCS / "run_directory.md", "Checkpoints")) == names


def test_the_page_of_the_run_directory_names_every_entry_of_a_run(place):
    page = DOCS / "run_directory.md"
    entries = {name.rstrip("/") for name in first_names(page, "The run directory")}
    assert {path.name for path in place.run.iterdir()} <= entries
    keys = first_names(page, "run.json")
    assert set(json.loads((place.run / "run.json").read_text())) <= set(keys)
    fields = [field.name for field in dataclasses.fields(Entry)]
    text = page.read_text(encoding="utf-8").split("lists them:")[1]
    assert re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)[: len(fields)] == fields
