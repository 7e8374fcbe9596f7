"""The pages agree with the code: flags, links and the tables that the code decides."""

import ast
import re
import shlex
from operator import attrgetter

import gymnasium
import pytest

import forethought
from forethought import cli, presets
from forethought import config as conf
from forethought.agents.registry import AGENTS, config_class
from forethought.agents.tdmpc2.config import TDMPC2Config
from forethought.envs import make_single
from forethought.tracking import columns
from tests.pages.reading import (
    DOCS,
    OF_EVERY_PAGE,
    PAGES,
    ROOT,
    commands,
    console_examples,
    every_flag,
    files_in,
    first_names,
    programs,
    shown,
    table,
)
from tests.stubs import CounterEnv

HYPER = DOCS / "agents" / "tdmpc2.md"


def test_the_pages_for_python_have_examples():
    pages = ("README.md", "docs/python_api.md", "docs/run_directory.md")
    assert all(programs(ROOT / page) for page in pages)


def test_a_script_for_workers_has_the_guard_that_it_tells_of():
    code = files_in(DOCS / "your_environment.md")["train_puck.py"]
    assert [type(node) for node in ast.parse(code).body][-1] is ast.If
    compile(code, "train_puck.py", "exec")


def test_an_own_environment_may_bear_the_name_of_one_that_never_terminates(monkeypatch):
    spec = gymnasium.envs.registration.EnvSpec("Pusher-v9", entry_point=CounterEnv)
    monkeypatch.setitem(gymnasium.registry, "Pusher-v9", spec)
    assert make_single("gym:Pusher-v9").spec_for_agent.terminates
    assert not make_single("gym:Pendulum-v1").spec_for_agent.terminates


def test_every_verb_is_in_the_documentation():
    used = {words[1] for page in PAGES for words in commands(page) if words[0] == "forethought"}
    assert set(cli.VERBS) <= used


@pytest.mark.parametrize(("command", "said"), console_examples())
def test_what_makes_no_sense_is_refused_in_the_words_of_the_page(command, said, capsys):
    assert cli.main(shlex.split(command)) == 2
    assert capsys.readouterr().err.strip() == said


@OF_EVERY_PAGE
def test_every_dotted_flag_exists(page):
    known = set(every_flag(conf.RunConfig))
    known |= {key for name in AGENTS for key in every_flag(config_class(name), "agent.")}
    for flag in re.findall(r"--((?:\w+\.)+[\w-]+)", page.read_text(encoding="utf-8")):
        key = flag.replace("-", "_")
        assert key in known or key.replace(".no_", ".") in known or "horzon" in key, f"--{flag}"


@OF_EVERY_PAGE
def test_every_link_leads_somewhere(page):
    text = page.read_text(encoding="utf-8")
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
    ],
)
def test_the_page_of_the_run_directory_has_every_column_in_order(heading, names):
    assert first_names(DOCS / "run_directory.md", heading) == list(names)


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
    if groups[-1:] == ["model"] and hasattr(inner.resolved, name):
        return getattr(inner.resolved, name)
    if name == "iterations":
        return inner.iterations_for(6)
    value = getattr(inner, name)
    value = list(value) if isinstance(value, tuple) else value
    return getattr(value, "kind", value)


def test_hyper_parameters_on_the_page_are_those_of_the_presets():
    for key, default, _, small, _ in table(HYPER, "Hyper-parameters"):
        key = key.strip("`")
        assert value_of(default_config(), key) == shown(default), key
        small = default if small == "same" else small
        assert value_of(default_config("tdmpc2_small"), key) == shown(small), key


def test_what_the_presets_for_discrete_actions_have_is_on_the_page_of_tdmpc2():
    """Every key that one of them sets otherwise than the defaults; rates like Q's in a sentence."""
    names = ("tdmpc2_discrete", "tdmpc2_minatar")
    rows = {row[0].strip("`"): row[1:] for row in table(HYPER, "Discrete actions")}
    plain = default_config()
    own = [default_config(name) for name in names]
    for key, cells in rows.items():
        for config, told in zip(own, cells, strict=True):
            assert value_of(config, key) == shown(told), key
    changed = {
        key for config in own for key, *_ in conf.diff(conf.to_dict(plain), conf.to_dict(config))
    }
    of_q = {f"agent.lr.{name}" for name in ("dynamics", "reward", "termination", "policy")}
    for config in own:
        assert {value_of(config, key) for key in of_q} == {config.agent.lr.q}
    kinds = {"agent.model.size", "agent.returns.kind", "replay.kind"}
    assert changed - of_q - kinds - set(rows) == set()


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
