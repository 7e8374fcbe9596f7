"""Files made to do harm: nothing in a run directory is executed, followed, waited for or believed.

Every forged file here has checksums that fit, unless the test is about the checksum.
"""

from __future__ import annotations

import ast
import json
import os
import pickle
import shutil
import signal
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import forethought
from forethought import files, presets
from forethought.config import ForethoughtError
from forethought.files import FileError
from forethought.presets.loader import LOADERS
from forethought.tracking import Catalog, RunDirectory, read_rows
from forethought.tracking.events import read_events
from forethought.training.build import Parts, build_parts, load_agent
from forethought.training.checkpoint import Checkpoints
from forethought.training.contents import FILES
from forethought.training.loop import _newest_that_fits, resume_run, train_run
from tests.faults.forgery import (
    DELETE,
    NEWEST,
    forge,
    forge_block,
    forge_json,
    forge_meta,
    forge_tensors,
    newest,
    sign,
)
from tests.stub_agent import register, stub_run

TERABYTE = 10**12


@pytest.fixture(autouse=True)
def _no_hang():
    """A reader that waits for a pipe fails here, and does not stop the suite."""

    def fail(number: int, frame: object) -> None:
        raise TimeoutError("a file was waited for")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run of 300 steps, drawn by episode, with checkpoints at 200 and 300."""
    with pytest.MonkeyPatch.context() as patch:
        register(patch)
        config = stub_run(steps=300, replay={"kind": "episodes", "block_rows": 64})
        return train_run(config, tmp_path_factory.mktemp("a") / "run").path


@pytest.fixture(scope="module")
def parts() -> Parts:
    with pytest.MonkeyPatch.context() as patch:
        register(patch)
        parts = build_parts(stub_run(replay={"kind": "episodes", "block_rows": 64}))
        parts.env.close()
        return parts


@pytest.fixture
def run(trained, tmp_path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def assert_refused(run: Path, parts: Parts, name: str) -> None:
    """The newest checkpoint is skipped by one sentence that names the file; the other is taken."""
    checkpoints = Checkpoints(RunDirectory.open(run))
    folder, [reason] = _newest_that_fits(checkpoints, parts.agent, checkpoints.newest(), [])
    assert folder.name == "step-000000200"
    assert reason.startswith(f"Skipped {NEWEST}: ") and name in reason, reason
    assert "\n" not in reason


# -- pickles ---------------------------------------------------------------------------------------


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.mark,)


def bombs(mark: Path) -> list[bytes]:
    """A pickle alone, and one in torch's archive."""
    torch.save(Bomb(mark), mark.with_suffix(".pt"))
    return [pickle.dumps(Bomb(mark)), mark.with_suffix(".pt").read_bytes()]


def test_the_bomb_works(tmp_path):
    pickle.loads(bombs(tmp_path / "mark")[0])  # noqa: S301
    assert (tmp_path / "mark").exists()


UNPICKLERS = ("pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal")


def pickle_loads(code: str) -> list[str]:
    """Calls in a module that may execute what they read, whatever name they were imported by."""
    tree, names = ast.parse(code), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                # `import a.b` makes `a` a name, `import a.b as c` makes `c` one.
                names[name.asname or name.name.split(".")[0]] = name.name if name.asname else ""
        elif isinstance(node, ast.ImportFrom):
            names |= {n.asname or n.name: f"{node.module}.{n.name}" for n in node.names}
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        first, dot, rest = ast.unparse(node.func).partition(".")
        called = (names.get(first) or first) + dot + rest
        words = {word.arg: ast.unparse(word.value) for word in node.keywords}
        if called in ("torch.load", "torch.serialization.load"):
            found += [] if words.get("weights_only") == "True" else [called]
        found += [called] if called.split(".")[0] in UNPICKLERS and "dump" not in called else []
        found += [called] if words.get("allow_pickle", "False") != "False" else []
    return found


def test_finding_18_nothing_of_the_package_loads_a_pickle_by_itself():
    """Every torch.load says weights_only, and no unpickler or numpy loader of objects is called."""
    for file in sorted(Path(forethought.__file__).parent.rglob("*.py")):
        assert pickle_loads(file.read_text(encoding="utf-8")) == [], file.name


@pytest.mark.parametrize(
    "code",
    [
        "import torch; torch.load(x)",
        "import torch as t; t.load(x, weights_only=False)",
        "from torch import load; load(x)",
        "from torch import load as read; read(x, weights_only=flag)",
        "import torch; torch.serialization.load(x)",
        "import pickle; pickle.loads(x)",
        "from pickle import Unpickler as U; U(x)",
        "import numpy as np; np.load(x, allow_pickle=True)",
    ],
)
def test_finding_18_a_load_by_any_name_would_be_seen(code):
    assert len(pickle_loads(code)) == 1
    assert pickle_loads("import torch as t; t.load(x, weights_only=True); json.load(y)") == []


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
def test_case_06_a_pickle_in_place_of_a_checkpoint_file_is_refused(run, parts, tmp_path, name):
    for content in bombs(tmp_path / "mark"):
        if name == "manifest.json":
            (newest(run) / name).write_bytes(content)
        else:
            forge(newest(run), name, content)
        assert_refused(run, parts, name)
        if name.startswith("agent"):
            with pytest.raises(FileError, match=name):
                load_agent(run, checkpoint="300", for_acting=True)
    assert not (tmp_path / "mark").exists()


def test_case_06_a_pickle_in_place_of_a_replay_block_is_refused(run, parts, tmp_path):
    for content in bombs(tmp_path / "mark"):
        name = forge_block(run, content)
        assert_refused(run, parts, name)
    assert resume_run(run, steps=310).status == "done"
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("name", ["run.json", "config.yaml"])
def test_case_06_a_pickle_in_place_of_the_run_s_own_files_is_refused(run, tmp_path, name):
    for content in bombs(tmp_path / "mark"):
        (run / name).write_bytes(content)
        with pytest.raises(FileError, match=f"{name} is damaged"):
            resume_run(run, steps=310)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("name", ["train.csv", "episodes.csv", "eval.csv", "events.jsonl", "lock"])
def test_case_06_a_pickle_in_place_of_a_record_is_never_executed(run, tmp_path, name):
    for content in bombs(tmp_path / "mark"):
        (run / name).write_bytes(content)
        try:
            resume_run(run, steps=310)
        except ForethoughtError as error:
            assert name in str(error)
    assert not (tmp_path / "mark").exists()


def test_case_06_a_pickle_in_place_of_the_catalog_is_replaced_by_a_catalog(run, tmp_path):
    (run / "checkpoints" / "catalog.json").write_bytes(bombs(tmp_path / "mark")[0])
    with pytest.raises(FileError, match=r"catalog\.json is damaged"):
        load_agent(run, checkpoint="best")
    assert resume_run(run, steps=310).status == "done"
    assert [entry.step for entry in Catalog(run / "checkpoints").entries()][-1] == 310
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:os.system ['touch {mark}']",
        "agent: !!python/object/new:os.system ['touch {mark}']",
        "agent_name: !!python/name:os.system",
    ],
)
def test_case_06_yaml_that_calls_python_is_refused(run, tmp_path, text):
    (run / "config.yaml").write_text(text.format(mark=tmp_path / "mark"))
    with pytest.raises(FileError, match=r"config\.yaml is damaged: it is not valid YAML"):
        resume_run(run)
    assert not (tmp_path / "mark").exists()


# -- links, pipes and other places -----------------------------------------------------------------


def test_a_link_in_place_of_a_file_is_refused(run, parts, tmp_path):
    shutil.move(newest(run) / "loop.json", tmp_path / "elsewhere")
    (newest(run) / "loop.json").symlink_to(tmp_path / "elsewhere")
    assert_refused(run, parts, "loop.json is a link")


def test_a_link_in_place_of_a_folder_inside_a_published_directory_is_refused(tmp_path):
    with files.publish(tmp_path / "step-1") as folder:
        (folder / "replay").mkdir()
        (folder / "replay" / "tail.bin").write_text("rows")
    shutil.move(tmp_path / "step-1" / "replay", tmp_path / "elsewhere")
    (tmp_path / "step-1" / "replay").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileError, match=r"tail\.bin is a link, but a published file must be"):
        files.verify(tmp_path / "step-1")


def test_a_link_in_place_of_a_checkpoint_is_refused_and_pruning_leaves_its_target(
    run, parts, tmp_path
):
    """Step 300 is a link and has the best score so far; more steps make it go."""
    shutil.move(newest(run), tmp_path / NEWEST)
    newest(run).symlink_to(tmp_path / NEWEST)
    assert_refused(run, parts, f"{NEWEST} is a link")
    assert resume_run(run, steps=400).status == "done"
    assert files.verify(tmp_path / NEWEST).meta["agent_steps"] == 300
    assert [entry.step for entry in Catalog(run / "checkpoints").entries()][-1] == 400


def test_a_link_in_place_of_a_replay_block_is_refused(run, parts, tmp_path):
    name = forge_block(run, (run / "replay" / "stream00-block00000003.safetensors").read_bytes())
    shutil.move(run / "replay" / name, tmp_path / name)
    (run / "replay" / name).symlink_to(tmp_path / name)
    assert_refused(run, parts, f"{name} is a link")


@pytest.mark.parametrize(
    "name",
    ["run.json", "config.yaml", "events.jsonl", "train.csv", "lock", "checkpoints", "replay"],
)
def test_a_link_in_the_run_directory_is_refused_and_its_target_untouched(run, tmp_path, name):
    """Else a resume would append to, cut off or clear somebody's own files."""
    shutil.move(run / name, tmp_path / "target")
    before = sorted((tmp_path / "target").rglob("*")) or (tmp_path / "target").read_bytes()
    (run / name).symlink_to(tmp_path / "target")
    with pytest.raises(FileError, match=f"{name} is a link or no regular file"):
        resume_run(run, steps=310)
    assert (
        sorted((tmp_path / "target").rglob("*")) or (tmp_path / "target").read_bytes()
    ) == before


def test_a_run_directory_may_itself_be_reached_by_a_link(run, tmp_path):
    (tmp_path / "latest").symlink_to(run)
    assert resume_run(tmp_path / "latest", steps=310).status == "done"


def test_a_dangling_lock_link_makes_no_file_elsewhere(tmp_path, run):
    (run / "lock").unlink()
    (run / "lock").symlink_to(tmp_path / "made")
    with pytest.raises(FileError, match="lock could not be opened"), RunDirectory(run).lock():
        pytest.fail("held")
    assert not (tmp_path / "made").exists()


def test_what_killed_writers_left_is_cleared_without_following_links(run, tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").write_text("...")
    (run / "checkpoints" / ".tmp-a").symlink_to(tmp_path / "precious")
    (run / "checkpoints" / ".old-b").symlink_to(tmp_path / "precious")
    (run / "replay" / ".tmp-c").symlink_to(tmp_path / "precious" / "thesis.tex")
    assert resume_run(run, steps=310).status == "done"
    assert (tmp_path / "precious" / "thesis.tex").read_text() == "..."
    assert not (run / "replay" / ".tmp-c").is_symlink()


@pytest.mark.parametrize("name", ["loop.json", "agent.safetensors", "manifest.json"])
def test_a_pipe_in_place_of_a_checkpoint_file_is_refused_at_once(run, parts, name):
    (newest(run) / name).unlink()
    os.mkfifo(newest(run) / name)
    assert_refused(run, parts, f"{name} is not a regular file")


def test_a_pipe_in_place_of_a_replay_block_is_refused_at_once(run, parts):
    block = max((run / "replay").iterdir())
    block.unlink()
    os.mkfifo(block)
    assert_refused(run, parts, f"{block.name} is not a regular file")


@pytest.mark.parametrize("name", ["run.json", "config.yaml", "events.jsonl", "eval.csv", "lock"])
def test_a_pipe_in_the_run_directory_is_refused_at_once(run, name):
    (run / name).unlink()
    os.mkfifo(run / name)
    with pytest.raises(FileError, match=f"{name} is a link or no regular file"):
        resume_run(run, steps=310)
    if name == "lock":
        with pytest.raises(FileError, match="lock is not a regular file"), RunDirectory(run).lock():
            pytest.fail("held")


def test_a_pipe_in_place_of_the_catalog_is_replaced(run):
    (run / "checkpoints" / "catalog.json").unlink()
    os.mkfifo(run / "checkpoints" / "catalog.json")
    assert resume_run(run, steps=310).status == "done"


@pytest.mark.parametrize(
    "name", ["../elsewhere", "/etc/hostname", "a/../../b", "a\0b", "", ".", "é"]
)
def test_a_manifest_that_points_outside_is_refused(run, parts, name):
    manifest = files.read_manifest(newest(run))
    entry = {"sha256": "0" * 64, "bytes": 1}
    sign(newest(run), {**manifest.files, name: entry}, manifest.meta)
    assert_refused(run, parts, "manifest.json names")


@pytest.mark.parametrize("path", ["../../../elsewhere", "/etc", "step-1/../../x", "..", 7, None])
def test_a_catalog_that_points_outside_is_refused(run, path):
    file = run / "checkpoints" / "catalog.json"
    entries = json.loads(file.read_text())
    file.write_text(json.dumps([{**entry, "path": path} for entry in entries]))
    with pytest.raises(FileError, match=r"catalog\.json is damaged"):
        load_agent(run, checkpoint="best")


@pytest.mark.parametrize("name", ["../../secret.safetensors", "/etc/passwd", "x", "a\0b", 7])
def test_a_replay_block_outside_its_folder_is_refused(run, parts, name):
    """Named so in both places, for a difference between them is refused anyway."""
    forge_json(newest(run), "agent.json", "replay.streams.0.blocks.0.name", name)
    hashes = {
        block["name"]: block["sha256"]
        for block in files.read_json(newest(run) / "agent.json")["replay"]["streams"][0]["blocks"]
    }
    forge_meta(newest(run), lambda meta: meta.update(replay_blocks=json.loads(json.dumps(hashes))))
    assert_refused(run, parts, "block")


# -- sizes -----------------------------------------------------------------------------------------


def make_endless(file: Path) -> None:
    """A terabyte that takes no room on the disk."""
    with file.open("wb") as opened:
        opened.truncate(TERABYTE)


@pytest.mark.parametrize("name", ["run.json", "config.yaml"])
def test_a_terabyte_of_description_is_not_read(run, name):
    make_endless(run / name)
    with pytest.raises(FileError, match=f"{name} is larger than the"):
        resume_run(run)


@pytest.mark.parametrize("name", ["events.jsonl", "train.csv", "episodes.csv", "eval.csv"])
def test_a_terabyte_of_lines_is_not_read(run, name):
    """By a resume, which looks at the end of such a file, and by readers of the whole."""
    with (run / name).open("r+b") as opened:
        opened.truncate(TERABYTE)
    with pytest.raises(FileError, match=f"{name} is damaged: its last line is longer than 16.8 MB"):
        resume_run(run, steps=400)
    with (run / name).open("r+b") as opened:
        opened.seek(-1, os.SEEK_END)
        opened.write(b"\n")
    with pytest.raises(FileError, match=f"{name} is larger than the 268.4 MB"):
        read_events(run / name) if name == "events.jsonl" else read_rows(run / name)
    if name != "events.jsonl":  # whose lines no checkpoint counts
        assert resume_run(run, steps=400).status == "done"
        assert (run / name).stat().st_size < 10**6


def test_a_terabyte_of_manifest_or_catalog_is_not_read(run, parts):
    make_endless(newest(run) / "manifest.json")
    make_endless(run / "checkpoints" / "catalog.json")
    assert_refused(run, parts, "manifest.json is larger than the 16.8 MB")
    with pytest.raises(FileError, match=r"catalog\.json is larger than the 16\.8 MB"):
        Catalog(run / "checkpoints").entries()


def test_json_that_could_not_be_read_again_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_JSON_BYTES", 1000)
    files.write_json(tmp_path / "a.json", "x" * 900)
    with pytest.raises(FileError, match=r"b\.json would be 1\.1 kB of JSON, but at most 1\.0 kB"):
        files.write_json(tmp_path / "b.json", "x" * 1100)
    assert files.read_json(tmp_path / "a.json") == "x" * 900
    with (
        pytest.raises(FileError, match=r"manifest of .* more than is read again"),
        files.publish(tmp_path / "step-1", {"words": "x" * 1100}),
    ):
        pass
    assert not (tmp_path / "step-1").exists()


def test_a_manifest_of_thousands_of_files_is_refused(run, parts):
    entry = {"sha256": "0" * 64, "bytes": 0}
    named = {f"file{number}": entry for number in range(5000)}
    sign(newest(run), named, files.read_manifest(newest(run)).meta)
    assert_refused(run, parts, "manifest.json names 5000 files, but at most 1000 may be")


@pytest.mark.parametrize("name", ["loop.json", "agent.json", "manifest.json"])
@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "[" * 400 + "]" * 400])
def test_deeply_nested_json_is_refused(run, parts, name, text):
    if name == "manifest.json":
        (newest(run) / name).write_text(f'{{"schema": 1, "files": {{}}, "versions": {text}')
    else:
        forge(newest(run), name, text.encode())
    assert_refused(run, parts, name)


ALIASES = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi")
)
MERGES = "a: &a {k: 1}\n" + "".join(
    f"{b}: &{b} {{<<: [{','.join([f'*{a}'] * 9)}]}}\n" for a, b in zip("abcdefgh", "bcdefghi")
)


NONSENSE = ["!!int x", "!!int", "!!bool x", '!!float ""', "!!timestamp x", "!!timestamp 2001-99-99"]
NONSENSE += ["1" + ":00" * 200 + ".5"]


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("text", NONSENSE)
def test_a_value_that_is_not_what_its_tag_says_is_refused_with_its_line(kind, text, monkeypatch):
    monkeypatch.setattr("forethought.presets.loader.LOADERS", [kind])
    with pytest.raises(yaml.YAMLError) as raised:
        presets.parse(f"a: 1\nb: {text}")
    assert presets.yaml_problem(raised.value).startswith(" in line 2: it cannot be read (")


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("text", [ALIASES, MERGES, "[" * 5_000, "a: &a [*a]"])
def test_yaml_that_stands_for_more_than_it_says_is_refused(run, tmp_path, text, kind, monkeypatch):
    """Nine lines of aliases are 387 million values."""
    monkeypatch.setattr("forethought.presets.loader.LOADERS", [kind])
    (run / "config.yaml").write_text(text)
    with pytest.raises(FileError, match=r"config\.yaml is damaged: it is not valid YAML"):
        resume_run(run)
    (tmp_path / "own.yaml").write_text(text)
    with pytest.raises(ForethoughtError, match=r"own\.yaml is not YAML"):
        presets.load_file(tmp_path / "own.yaml")


# -- tensors ---------------------------------------------------------------------------------------


def tensor_file(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def described(shape: list[int], end: int, dtype: str = "F32") -> bytes:
    return json.dumps({"w": {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}}).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01",
        tensor_file(b"{}", length=2**63),
        tensor_file(b"{}", length=100),
        tensor_file(described([2**40], 2**42)),
        tensor_file(described([2**62, 2**62], 8), bytes(8)),
        tensor_file(described([0, 2**63], 0)),
        tensor_file(described([-1], 4), bytes(4)),
        tensor_file(described([1], 4, "PICKLE"), bytes(4)),
        tensor_file(described([1], 4), bytes(4000)),
        tensor_file(b'{"w": ' + b"[" * 10_000, bytes(4)),
        tensor_file(b'{"__metadata__": {"a": "' + b"x" * (5 * 2**20) + b'"}}'),
    ],
    ids=lambda content: f"{len(content)} bytes",
)
@pytest.mark.parametrize("name", ["agent.safetensors", "replay.safetensors", "loop.safetensors"])
def test_a_tensor_file_with_a_wrong_or_huge_header_is_refused(run, parts, name, content):
    forge(newest(run), name, content)
    assert_refused(run, parts, name)


def no_weight(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["weight"]


def short_noise(tensors: dict[str, torch.Tensor]) -> None:
    tensors["noise"] = torch.zeros(3, dtype=torch.uint8)


def fewer_rows(tensors: dict[str, torch.Tensor]) -> None:
    tensors["tail/0/column/obs"] = tensors["tail/0/column/obs"][:-1]


def other_type(tensors: dict[str, torch.Tensor]) -> None:
    tensors["tail/0/column/obs"] = tensors["tail/0/column/obs"].double()


def no_table(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["sampler/episodes"]


def absent_stream(tensors: dict[str, torch.Tensor]) -> None:
    tensors["sampler/episodes"][0, 0] = 10**6


def negative_stream(tensors: dict[str, torch.Tensor]) -> None:
    tensors["sampler/episodes"][0, 0] = -1


def future_rows(tensors: dict[str, torch.Tensor]) -> None:
    tensors["sampler/episodes"][2, -1] = 10**9


def short_episode(tensors: dict[str, torch.Tensor]) -> None:
    tensors["sampler/episodes"][2, 0] = tensors["sampler/episodes"][1, 0] + 1


def other_acting_state(tensors: dict[str, torch.Tensor]) -> None:
    tensors["act/last"] = torch.zeros(7, 7)


def no_generator(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["act/generator"]


def many_actions(tensors: dict[str, torch.Tensor]) -> None:
    tensors["action/0/"] = torch.zeros(5, 1)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("agent.safetensors", no_weight),
        ("agent.safetensors", short_noise),
        ("replay.safetensors", fewer_rows),
        ("replay.safetensors", other_type),
        ("replay.safetensors", no_table),
        ("replay.safetensors", absent_stream),
        ("replay.safetensors", negative_stream),
        ("replay.safetensors", future_rows),
        ("replay.safetensors", short_episode),
        ("loop.safetensors", other_acting_state),
        ("loop.safetensors", no_generator),
        ("loop.safetensors", many_actions),
    ],
)
def test_tensors_that_do_not_fit_are_refused(run, parts, name, change):
    forge_tensors(newest(run), name, change)
    checkpoints = Checkpoints(RunDirectory.open(run))
    folder, [reason] = _newest_that_fits(checkpoints, parts.agent, checkpoints.newest(), [])
    assert folder.name == "step-000000200" and reason.startswith(f"Skipped {NEWEST}: ")


def test_an_episode_of_a_trillion_empty_actions_is_refused(run, parts):
    """[10^12, 0] takes no bytes, but re-stepping it would take for ever."""
    forge_json(newest(run), "loop.json", "collector.open.0.log.decisions", TERABYTE)
    forge_tensors(newest(run), "loop.safetensors", lambda x: x.update({"action/0/": EMPTY}))
    assert_refused(run, parts, "loop.safetensors")


EMPTY = torch.zeros(TERABYTE, 0)


def test_a_block_of_other_columns_is_refused(run, parts, tmp_path):
    files.save_tensors(tmp_path / "x", {"age": torch.zeros(64, dtype=torch.int32)})
    name = forge_block(run, (tmp_path / "x").read_bytes())
    assert_refused(run, parts, f"{name} is not of this replay: column/obs is absent")


# -- counters --------------------------------------------------------------------------------------

NONSENSE = (-1, 10**30, 1.5, "7", None, True, [], {})
COUNTERS = ("clock.agent_steps", "clock.updates", "budget.taken", "collector.open.0.log.decisions")


@pytest.mark.parametrize("keys", COUNTERS)
def test_a_count_that_is_none_is_refused(run, parts, keys):
    whole = (newest(run) / "loop.json").read_bytes()
    for value in NONSENSE:
        forge_json(newest(run), "loop.json", keys, value)
        assert_refused(run, parts, "loop.json")
        forge(newest(run), "loop.json", whole)


@pytest.mark.parametrize(
    ("name", "keys", "value"),
    [
        ("loop.json", "clock", DELETE),
        ("loop.json", "clock.agent_steps", 299),
        ("loop.json", "budget.agent_steps", 10**9),
        ("loop.json", "score", "high"),
        ("loop.json", "gates", {"best_score": "high"}),
        ("loop.json", "log_every", 3),
        ("loop.json", "tracker.files.train.bytes", -5),
        ("loop.json", "tracker.files.train.pending", [1]),
        ("loop.json", "tracker.interval.sums", {"loss": "x"}),
        ("loop.json", "collector.exploration", {"bit_generator": "PCG64"}),
        ("loop.json", "collector.exploration.state.state", -(10**60)),
        ("loop.json", "collector.first", []),
        ("loop.json", "collector.open", []),
        ("loop.json", "collector.open.0.log.decisions", 10**15),
        ("agent.json", "updates", -1),
        ("agent.json", "updates", DELETE),
        ("agent.json", "replay", DELETE),
        ("agent.json", "replay.layout", {}),
        ("agent.json", "replay.rng", {}),
        ("agent.json", "replay.streams", []),
        ("agent.json", "replay.streams.0", 7),
        ("agent.json", "replay.streams.0.written", 10**18),
        ("agent.json", "replay.streams.0.written", 10**6),
        ("agent.json", "replay.streams.0.tail_row", -1),
        ("agent.json", "replay.streams.0.tail_row", 0),
        ("agent.json", "replay.streams.0.open_rows", 10**6),
        ("agent.json", "replay.streams.0.blocks", DELETE),
        ("agent.json", "replay.streams.0.blocks", [{}]),
        ("agent.json", "replay.streams.0.blocks.0.first_row", -64),
        ("agent.json", "replay.streams.0.blocks.1.first_row", 70),
        ("agent.json", "replay.streams.0.blocks.0.first_row", 10**18),
    ],
)
def test_a_value_that_cannot_be_is_refused(run, parts, name, keys, value):
    forge_json(newest(run), name, keys, value)
    checkpoints = Checkpoints(RunDirectory.open(run))
    folder, [reason] = _newest_that_fits(checkpoints, parts.agent, checkpoints.newest(), [])
    assert folder.name == "step-000000200" and reason.startswith(f"Skipped {NEWEST}: ")


@pytest.mark.parametrize("text", ["[]", "null", "3", "{}", '"x"', "NaN"])
@pytest.mark.parametrize("name", ["loop.json", "agent.json"])
def test_nonsense_in_place_of_a_state_is_refused(run, parts, name, text):
    forge(newest(run), name, text.encode())
    assert_refused(run, parts, name)


@pytest.mark.parametrize(
    "change",
    [
        lambda meta: meta.clear(),
        lambda meta: meta.update(agent_steps=10**30),
        lambda meta: meta.update(agent_steps=200),
        lambda meta: meta.update(eval_score="high"),
        lambda meta: meta.update(replay_blocks=[]),
        lambda meta: meta.update(replay_blocks={}),
    ],
)
def test_a_manifest_that_tells_nonsense_of_its_run_is_refused(run, change):
    forge_meta(newest(run), change)
    folder, [reason] = Checkpoints(RunDirectory.open(run)).newest()
    assert folder.name == "step-000000200" and reason.startswith(f"Skipped {NEWEST}: ")


def test_a_checkpoint_is_of_the_step_that_its_name_says(run):
    forge_meta(newest(run), lambda meta: meta.update(agent_steps=200))
    with pytest.raises(FileError, match=f"{NEWEST} is of step 200, though its name says 300"):
        load_agent(run, checkpoint="300")


@pytest.mark.parametrize("text", ["[]", "{}", "3", '{"schema": "x"}', '{"schema": 1}', "[" * 99999])
def test_nonsense_instead_of_a_manifest_is_damage(run, parts, text):
    (newest(run) / "manifest.json").write_text(text)
    assert_refused(run, parts, "manifest.json is damaged")


def test_a_manifest_that_does_not_vouch_for_a_file_is_refused(run, parts):
    """Else the file would be read unchecked."""
    for name in FILES:
        manifest = files.read_manifest(newest(run))
        rest = {key: entry for key, entry in manifest.files.items() if key != name}
        sign(newest(run), rest, manifest.meta)
        assert_refused(run, parts, f"does not name {name}")
        sign(newest(run), manifest.files, manifest.meta)


@pytest.mark.parametrize(
    ("name", "value"),
    [("status", "exploded"), ("seed", "1"), ("seed", 2), ("tags", {}), ("best", 3), ("schema", 99)],
)
def test_nonsense_in_run_json_is_refused(run, name, value):
    about = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**about, name: value}))
    with pytest.raises(FileError, match=r"run\.json"):
        resume_run(run, steps=310)


@pytest.mark.parametrize(
    "text", ['{"pid": 0, "host": "x", "started": 1}', '{"pid": Infinity}', "[" * 4000]
)
def test_nonsense_in_the_lock_is_a_free_lock(run, text):
    """Process 0 would be the whole group, and always alive."""
    (run / "lock").write_text(text)
    with RunDirectory.open(run).lock():
        pass
