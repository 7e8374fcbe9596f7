"""The documentation runs: its Python and shell blocks, its tables and its links are checked here.

In a page, a block whose first line is a comment with a file's name is that file. All pages are read
in one folder with a finished run in it, for which RUN stands. Python blocks of a page are one
program. Commands are carried out, each once, in a small world: training and resuming stop after a
few steps. Only what make does is not done.
"""

import ast
import csv
import dataclasses
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import pytest

import forethought
from forethought import cli, presets
from forethought import config as conf
from forethought.agents.registry import AGENTS, config_class
from forethought.agents.tdmpc2.config import TDMPC2Config
from forethought.envs import check_task, make_env, make_single, rendering
from forethought.presets import flags
from forethought.tracking import columns
from forethought.tracking.catalog import Entry
from tests.data_stubs import make_dataset
from tests.import_stubs import (
    box_json,
    chunk_columns,
    minari_episode,
    write_chunk,
    write_minari,
)
from tests.stubs import CounterEnv

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
HYPER = DOCS / "agents" / "tdmpc2.md"
PAGES = sorted([ROOT / "README.md", *DOCS.rglob("*.md")])
OF_EVERY_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# ([\w.]+\.(?:py|yaml))\n")
COMMAND = re.compile(r"^(?:\$ )?((?:forethought|make) \S.*)$", re.MULTILINE)
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


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the files of all pages, and a run on the environment that one of them makes.

    It is trained by the installed command, in workers: neither has the folder on its path.
    """
    folder = tmp_path_factory.mktemp("docs")
    for page in PAGES:
        for name, text in files_in(page).items():
            (folder / name).write_text(text, encoding="utf-8")
    command = next(words for words in commands(DOCS / "your_environment.md") if "debug" in words)
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
    write_chunk(folder / "chunks" / "chunk_0.pt", chunk_columns([1, 0], rows=501))
    columns = chunk_columns([3, 3], rows=501, widths={3: (4, 2)})
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


def test_the_pages_for_python_have_examples():
    pages = ("README.md", "docs/python_api.md", "docs/run_directory.md")
    assert all(programs(ROOT / page) for page in pages)


def test_extra_columns_of_the_example_reach_a_row(here):
    env = make_env("gym:windy:WindyPuck-v0")
    _, infos = env.reset(seed=[3])
    assert infos["wind"].shape == (1, 2)
    assert env.spec_for_agent.columns[0].name == "wind"
    env.close()


def test_a_script_for_workers_has_the_guard_that_it_tells_of():
    code = files_in(DOCS / "your_environment.md")["train_puck.py"]
    assert [type(node) for node in ast.parse(code).body][-1] is ast.If
    compile(code, "train_puck.py", "exec")


def test_a_module_that_raises_is_told_with_its_traceback(here):
    (here.folder / "broken_env.py").write_text("width = 1 / 0\n", encoding="utf-8")
    with pytest.raises(conf.ConfigError) as caught:
        check_task("gym:broken_env:X-v0")
    assert "gym:broken_env:X-v0 raised ZeroDivisionError" in str(caught.value)
    assert "width = 1 / 0" in caught.value.__notes__[0]


def test_an_id_without_its_module_is_told_how_to_name_it(here):
    with pytest.raises(conf.ConfigError, match="is named gym:MODULE:ID"):
        check_task("gym:rink/Puck-v0")


def test_an_own_environment_may_bear_the_name_of_one_that_never_terminates(monkeypatch):
    spec = gymnasium.envs.registration.EnvSpec("Pusher-v9", entry_point=CounterEnv)
    monkeypatch.setitem(gymnasium.registry, "Pusher-v9", spec)
    assert make_single("gym:Pusher-v9").spec_for_agent.terminates
    assert not make_single("gym:Pendulum-v1").spec_for_agent.terminates


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


def test_every_verb_is_in_the_documentation():
    used = {words[1] for page in PAGES for words in commands(page) if words[0] == "forethought"}
    assert set(cli.VERBS) <= used


def console_examples():
    text = "".join(code for lang, code in blocks(DOCS / "configuration.md") if lang == "console")
    return re.findall(r"^\$ forethought (.*)\n(.*)$", text, re.MULTILINE)


@pytest.mark.parametrize(("command", "said"), console_examples())
def test_what_makes_no_sense_is_refused_in_the_words_of_the_page(command, said, capsys):
    assert cli.main(shlex.split(command)) == 2
    assert capsys.readouterr().err.strip() == said


def every_flag(cls, prefix=""):
    """The flags of a configuration class, those of every kind of a group included."""
    for name, annotation in conf.field_types(cls).items():
        kinds = conf.union_members(annotation)
        group = [annotation] if dataclasses.is_dataclass(annotation) else list(kinds.values())
        if not group or kinds:
            yield prefix + name
        for member in group:
            yield from every_flag(member, f"{prefix}{name}.")


@OF_EVERY_PAGE
def test_every_dotted_flag_exists(page):
    known = set(every_flag(conf.RunConfig))
    known |= {key for name in AGENTS for key in every_flag(config_class(name), "agent.")}
    for flag in re.findall(r"--((?:\w+\.)+[\w-]+)", page.read_text(encoding="utf-8")):
        key = flag.replace("-", "_")
        assert key in known or key.replace(".no_", ".") in known or "horzon" in key, f"--{flag}"


@OF_EVERY_PAGE
def test_every_link_leads_somewhere(page):
    text = re.sub(r"!\[[^]]*\]\([^)]*\)", "", page.read_text(encoding="utf-8"))  # no pictures
    for target in re.findall(r"\]\(([^)#]*)(?:#[\w-]*)?\)", text):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


@OF_EVERY_PAGE
def test_every_anchor_is_a_heading(page):
    links = re.findall(r"\]\(([^)#:]*)#([\w-]*)\)", page.read_text(encoding="utf-8"))
    for target, anchor in links:
        other = page.parent / target if target else page
        headings = re.findall(r"^#+ (.*)$", other.read_text(encoding="utf-8"), re.MULTILINE)
        slugs = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
        assert anchor in slugs, f"{target}#{anchor}"


# Tables that the code decides


def test_every_public_name_is_on_the_python_page():
    page = DOCS / "python_api.md"
    shown = re.findall(r"^\| \[`(\w+)`\]", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(shown) == sorted(forethought.__all__)
    assert all(getattr(forethought, name).__doc__ for name in forethought.__all__)


@pytest.mark.parametrize(
    ("heading", "names"),
    [
        ("Every CSV begins with", columns.LEADING),
        ("train.csv", columns.train_columns(())[len(columns.LEADING) :]),
        ("episodes.csv", columns.EPISODE[len(columns.LEADING) :]),
        ("eval.csv", columns.EVALUATION[len(columns.LEADING) :]),
        ("Checkpoints", None),
    ],
)
def test_the_page_of_the_run_directory_has_every_column_in_order(place, heading, names):
    if names is None:  # no columns but files: those of a real checkpoint
        folder = max((place.run / "checkpoints").glob("step-*"))
        names = sorted(path.name for path in folder.iterdir())
        assert sorted(first_names(DOCS / "run_directory.md", heading)) == names
    else:
        assert first_names(DOCS / "run_directory.md", heading) == list(names)


def test_the_page_of_the_run_directory_names_every_entry_of_a_run(place):
    page = DOCS / "run_directory.md"
    entries = {name.rstrip("/") for name in first_names(page, "The run directory")}
    assert {path.name for path in place.run.iterdir()} <= entries
    keys = first_names(page, "run.json")
    assert set(json.loads((place.run / "run.json").read_text())) <= set(keys)
    fields = [field.name for field in dataclasses.fields(Entry)]
    text = page.read_text(encoding="utf-8").split("lists them:")[1]
    assert re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)[: len(fields)] == fields


def event_kinds():
    """Every kind of event that the source names: first words of `event`, `_warn` and `Alarm`."""
    for path in (ROOT / "src" / "forethought").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if name in ("event", "_event", "_warn", "Alarm"):
                    yield node.args[0].value


def test_every_kind_of_event_is_explained():
    shown = first_names(DOCS / "run_directory.md", "events.jsonl")
    assert set(event_kinds()) - set(shown) == set()


def test_every_preset_is_in_the_table_of_presets():
    assert first_names(DOCS / "configuration.md", "Presets") == presets.names()


def cell(value):
    """A value as a table shows it."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    return f"{value:,}" if isinstance(value, int | float) else str(value)


@pytest.mark.parametrize(
    "group", ["env", "env.atari", "replay", "train", "eval", "track", "offline"]
)
def test_the_page_of_the_configuration_has_every_key_with_its_default(group):
    cls = type(attrgetter(group)(default_config()))
    values = conf.to_dict(cls())
    own = [name for name in conf.field_types(cls) if not isinstance(values[name], dict)]
    wanted = [[f"`{group}.{name}`", cell(values[name])] for name in own]
    assert [row[:2] for row in table(DOCS / "configuration.md", group)] == wanted


def default_config(*names):
    layers = presets.layers(names, None, "tdmpc2")
    return conf.build_run_config("tdmpc2", "gym:Pendulum-v1", TDMPC2Config, layers)


def value_of(config, key):
    """What a run has for a key of the table, sizes and iterations resolved; None is derived."""
    *groups, name = key.split(".")
    inner = config
    for group in groups:
        inner = getattr(inner, group)
    if groups[-1] == "model" and hasattr(inner.resolved, name):
        return getattr(inner.resolved, name)
    if name == "iterations":
        return inner.iterations_for(6)
    value = getattr(inner, name)
    value = list(value) if isinstance(value, tuple) else value
    return getattr(value, "kind", value)


def shown(text):
    if text == "derived":
        return None
    return text if text == "off" else presets.parse_scalar(text.replace(",", ""))


def test_hyper_parameters_on_the_page_are_those_of_the_presets():
    for key, default, _, small, _ in table(HYPER, "Hyper-parameters"):
        key = key.strip("`")
        assert value_of(default_config(), key) == shown(default), key
        small = default if small == "same" else small
        assert value_of(default_config("tdmpc2_small"), key) == shown(small), key


def test_the_preset_tdmpc2_has_the_official_numbers():
    """The official value ends its cell; only what a word describes is not compared."""
    compared = 0
    for key, _, official, *_ in table(HYPER, "Hyper-parameters"):
        number = shown(official.split(" ")[-1])
        ours = value_of(default_config("tdmpc2"), key.strip("`"))
        if isinstance(number, int | float) and not isinstance(number, bool):
            assert ours == number, key
            compared += 1
    assert compared >= 40


def test_every_option_of_tdmpc2_is_on_its_page():
    text = HYPER.read_text(encoding="utf-8")
    rows = {row[0].strip("`") for row in table(HYPER, "Hyper-parameters")}
    own = set(every_flag(TDMPC2Config, "agent."))
    kinds = {key for key in own if re.match(r"agent\.(schedule|returns)\.", key)}
    assert own - kinds - rows == set()
    assert {key for key in kinds if key not in text} == set()


def test_every_metric_of_tdmpc2_is_explained():
    from forethought.agents.tdmpc2.act import plan_metrics
    from forethought.agents.tdmpc2.update import METRICS

    planned = (*plan_metrics("plan_std_mean"), "plan_entropy")
    names = columns.train_columns((*METRICS, "termination_loss", *planned))
    own = set(names) - set(columns.LEADING) - set(columns.TRAIN_TIMES)
    assert set(first_names(HYPER, "Metrics")) == own
