"""Configuration: reading, layering, validation, round trips, differences, presets."""

import dataclasses
import json
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import pytest
import yaml

from forethought import presets
from forethought.agents.registry import AGENTS, config_class
from forethought.config import (
    ConfigError,
    EnvConfig,
    EpisodeReplayConfig,
    RunConfig,
    TrackConfig,
    TransitionReplayConfig,
    build_run_config,
    diff,
    flatten,
    from_dict,
    layer,
    nearest,
    require,
    to_dict,
    unknown,
)
from forethought.presets.loader import LOADERS


@dataclass(frozen=True)
class Uniform:
    kind: ClassVar[str] = "uniform"
    capacity: int = 10


@dataclass(frozen=True)
class Prioritized:
    kind: ClassVar[str] = "prioritized"
    capacity: int = 10
    alpha: float = 0.6


@dataclass(frozen=True)
class Stub:
    batch_size: int = 4
    horizon: int = 2
    gamma: float = 0.9
    hidden: tuple[int, ...] = (8, 8)
    norm: Literal["layer", "none"] = "layer"
    size: Literal[1, 5] = 5
    weights: dict[str, float] = field(default_factory=dict)
    limit: int | None = None
    memory: Uniform | Prioritized = field(default_factory=Prioritized)

    def __post_init__(self) -> None:
        require(0 < self.gamma <= 1, "agent.gamma", self.gamma, "above 0 and at most 1")


def build(*layers: dict) -> RunConfig:
    return build_run_config("stub", "gym:Pendulum-v1", Stub, list(layers))


def fields_match(config: object, data: dict) -> bool:
    """Every dataclass field is a key and every key a field, at every depth."""
    keys = set(data) - ({"kind"} if hasattr(config, "kind") else set())
    names = {f.name for f in dataclasses.fields(config)}
    inner = [(getattr(config, n), data[n]) for n in names & keys]
    return names == keys and all(
        fields_match(value, part) for value, part in inner if dataclasses.is_dataclass(value)
    )


# Round trip (airspace.md section 5, rows 1.2 and 4.1).

SOME = {
    "seed": 7,
    "agent": {
        "hidden": [16, 32],
        "weights": {"encoder": 0.5},
        "memory": {"kind": "uniform", "capacity": 3},
    },
    "replay": {"kind": "transitions", "capacity_rows": 99},
    "env": {"num_envs": 2, "workers": True},
    "track": {"wandb": True, "wandb_project": "planes"},
}


def test_a_kind_may_be_named_alone_in_a_file_as_in_a_flag():
    from forethought.agents.tdmpc2.config import CosineRate, TDMPC2Config

    assert from_dict(TDMPC2Config, {"schedule": "cosine"}).schedule == CosineRate()


def test_a_dotted_key_in_a_file_is_told_to_nest():
    from forethought.agents.tdmpc2.config import TDMPC2Config

    with pytest.raises(ConfigError, match=r"nested, as in \{planner: \{samples: 5\}\}"):
        from_dict(TDMPC2Config, {"planner.samples": 5})


def test_to_dict_has_every_field_at_every_depth():
    config = build(SOME)
    assert fields_match(config, to_dict(config))
    assert to_dict(config)["replay"]["kind"] == "transitions"


@pytest.mark.parametrize("name", AGENTS)
def test_a_whole_run_survives_json_and_yaml(name):
    config = build_run_config(name, "gym:Pendulum-v1", config_class(name), [])
    assert fields_match(config, to_dict(config))
    for data in (
        json.loads(json.dumps(to_dict(config))),
        yaml.safe_load(yaml.dump(to_dict(config))),
    ):
        again = build_run_config(name, data["task"], config_class(name), [data])
        assert again == config


def test_tuples_and_unions_come_back_as_they_were():
    config = build(SOME)
    again = build(json.loads(json.dumps(to_dict(config))))
    assert again == config
    assert again.agent.hidden == (16, 32)
    assert again.agent.memory == Uniform(capacity=3)
    assert again.replay == TransitionReplayConfig(capacity_rows=99)


def test_a_run_of_another_agent_is_refused_as_a_layer():
    with pytest.raises(ConfigError, match="agent_name is dqn, but must be stub"):
        build({"agent_name": "dqn"})


# Layers.


def test_later_layers_win_and_leave_the_rest():
    assert layer({"a": {"x": 1, "y": 2}}, {"a": {"y": 3}}, {"b": 4}) == {
        "a": {"x": 1, "y": 3},
        "b": 4,
    }


def test_layering_does_not_change_its_inputs():
    base, over = {"a": {"x": 1}}, {"a": {"y": 2}, "b": {"z": 3}}
    merged = layer(base, over)
    merged["b"]["z"] = merged["a"]["x"] = 9
    assert base == {"a": {"x": 1}}
    assert over == {"a": {"y": 2}, "b": {"z": 3}}


def test_a_new_kind_drops_the_keys_of_the_old_one():
    base = {"memory": {"kind": "prioritized", "alpha": 0.5}}
    assert layer(base, {"memory": {"kind": "uniform"}}) == {"memory": {"kind": "uniform"}}
    assert layer(base, {"memory": {"alpha": 0.7}})["memory"] == {
        "kind": "prioritized",
        "alpha": 0.7,
    }


def test_another_kind_of_replay_keeps_what_both_have():
    base = {"replay": {"kind": "prioritized", "capacity_rows": 99, "alpha": 0.6}}
    uniform = layer(base, {"replay": {"kind": "uniform", "block_rows": 3}})
    assert uniform == {"replay": {"kind": "uniform", "capacity_rows": 99, "block_rows": 3}}
    assert layer(base, {"replay": {"kind": "none such"}}) == {"replay": {"kind": "none such"}}


def test_a_word_for_a_group_is_its_kind_whatever_the_layers_around_it_say():
    base = {"replay": {"kind": "uniform", "capacity_rows": 99}}
    word, flag = {"replay": "prioritized"}, {"replay": {"alpha": 0.7}}
    assert layer(base, word)["replay"] == {"kind": "prioritized", "capacity_rows": 99}
    assert layer(word, flag)["replay"] == {"kind": "prioritized", "alpha": 0.7}
    assert layer(base, word, flag)["replay"] == {
        "kind": "prioritized",
        "capacity_rows": 99,
        "alpha": 0.7,
    }


def test_a_first_kind_keeps_what_was_set_before_it():
    """The debug preset sets a capacity without a kind: it holds for whichever kind follows."""
    base = {"replay": {"capacity_rows": 99}}
    assert build(base, {"replay": {"kind": "transitions"}}).replay == TransitionReplayConfig(99)


def test_a_group_without_a_kind_means_the_default_kind():
    assert build({"agent": {"memory": {"alpha": 0.1}}}).agent.memory == Prioritized(alpha=0.1)


# Unknown and meaningless keys.


def test_an_unknown_key_names_itself_and_the_nearest():
    with pytest.raises(ConfigError, match=r"no key agent.gama. Did you mean agent.gamma\?"):
        build({"agent": {"gama": 0.9}})
    with pytest.raises(ConfigError, match=r"no key stepps. Did you mean steps\?"):
        build({"stepps": 3})


def test_uniform_with_alpha_is_an_error_that_names_the_key():
    """dqn.md section 3, item 20: an option of another kind is never ignored."""
    with pytest.raises(ConfigError, match=r"agent.memory.alpha belongs to .* kind prioritized"):
        build({"agent": {"memory": {"kind": "uniform", "alpha": 0.6}}})
    with pytest.raises(ConfigError, match=r"replay.alpha belongs to replay of kind prioritized"):
        build({"replay": {"kind": "episodes", "alpha": 0.6}})


def test_an_unknown_kind_lists_the_kinds():
    with pytest.raises(ConfigError, match=r"kind episode. Did you mean episodes\? Choose from"):
        build({"replay": {"kind": "episode"}})


def test_a_project_without_wandb_is_an_error():
    with pytest.raises(ConfigError, match=r"track.wandb_project is planes, but has no effect"):
        TrackConfig(wandb_project="planes")


def test_nearest_looks_in_the_same_group_first():
    keys = ["agent.horizon", "replay.capacity_rows", "train.threads"]
    assert nearest("agent.horizn", keys) == " Did you mean agent.horizon?"
    assert nearest("horizon", keys) == " Did you mean agent.horizon?"
    assert nearest("replay.alpha", keys) == ""


def test_unknown_reads_as_one_message():
    tasks = ["dmc:walker-walk", "dmc:walker-run"]
    assert str(
        unknown("task", "dmc:walker_walk", tasks, "'forethought list tasks' shows all.")
    ) == (
        "There is no task dmc:walker_walk. Did you mean dmc:walker-walk? "
        "'forethought list tasks' shows all."
    )


# Types and values (airspace.md section 5, row 3.4: bad nested values fail at construction).


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"seed": "x"}, "seed is 'x', but must be a whole number."),
        ({"seed": 1.5}, "seed is 1.5, but must be a whole number."),
        ({"seed": True}, "seed is True, but must be a whole number."),
        ({"env": {"workers": 1}}, "env.workers is 1, but must be true or false."),
        ({"agent": {"gamma": "high"}}, "agent.gamma is 'high', but must be a number."),
        ({"agent": {"norm": "batch"}}, "agent.norm is batch, but must be one of layer, none."),
        ({"agent": {"size": True}}, "agent.size is True, but must be one of 1, 5."),
        ({"agent": {"hidden": 8}}, "agent.hidden is 8, but must be a list."),
        ({"agent": {"hidden": [8, "x"]}}, "agent.hidden[1] is 'x', but must be a whole number."),
        ({"agent": {"limit": "x"}}, "agent.limit is 'x', but must be a whole number."),
        ({"agent": {"weights": 3}}, "agent.weights is 3, but must be a group of keys."),
        ({"env": 3}, "env is 3, but must be a group of keys."),
        ({"replay": 3}, "replay is 3, but must be a group of keys."),
        ({"device": 0}, "device is 0, but must be text."),
        ({"agent": {"gamma": float("inf")}}, "agent.gamma is inf, but must be finite."),
    ],
)
def test_a_wrong_type_is_one_sentence(data, sentence):
    with pytest.raises(ConfigError) as error:
        build(data)
    assert str(error.value) == sentence


@pytest.mark.parametrize(
    ("data", "key"),
    [
        ({"seed": -1}, "seed is -1"),
        ({"steps": 0}, "steps is 0"),
        ({"steps": -5}, "steps is -5"),
        ({"device": "gpu"}, "device is gpu"),
        ({"device": "cuda:x"}, "device is cuda:x"),
        ({"agent": {"gamma": 1.01}}, "agent.gamma is 1.01"),
        ({"agent": {"gamma": float("nan")}}, "agent.gamma is nan"),
        ({"env": {"num_envs": 0}}, "env.num_envs is 0"),
        ({"env": {"action_repeat": 0}}, "env.action_repeat is 0"),
        ({"env": {"max_episode_steps": 0}}, "env.max_episode_steps is 0"),
        ({"env": {"eval_max_episode_steps": -1}}, "env.eval_max_episode_steps is -1"),
        ({"replay": {"capacity_rows": 0}}, "replay.capacity_rows is 0"),
        ({"replay": {"block_rows": 0}}, "replay.block_rows is 0"),
        ({"replay": {"storage_device": "auto"}}, "replay.storage_device is auto"),
        ({"train": {"seed_agent_steps": -1}}, "train.seed_agent_steps is -1"),
        ({"train": {"seed_updates": -1}}, "train.seed_updates is -1"),
        ({"train": {"updates_per_agent_step": 0}}, "train.updates_per_agent_step is 0"),
        ({"train": {"checkpoint_every_agent_steps": -1}}, "train.checkpoint_every_agent_steps"),
        ({"train": {"keep_checkpoints": 0}}, "train.keep_checkpoints is 0"),
        ({"train": {"threads": 0}}, "train.threads is 0"),
        ({"eval": {"every_agent_steps": -1}}, "eval.every_agent_steps is -1"),
        ({"eval": {"episodes": 0}}, "eval.episodes is 0"),
        ({"track": {"every_agent_steps": 0}}, "track.every_agent_steps is 0"),
    ],
)
def test_a_value_out_of_range_names_its_key(data, key):
    with pytest.raises(ConfigError) as error:
        build(data)
    assert str(error.value).startswith(key)


def test_the_replay_must_hold_one_batch_and_one_slice_per_environment():
    build({"replay": {"capacity_rows": 12}})  # batch 4 x (horizon 2 + 1)
    with pytest.raises(ConfigError, match=r"is 11, but must be at least .* = 12\."):
        build({"replay": {"capacity_rows": 11}})
    with pytest.raises(ConfigError, match=r"is 12, but must be at least env.num_envs .* = 15\."):
        build({"replay": {"capacity_rows": 12}, "env": {"num_envs": 5}})


def test_whole_numbers_may_be_written_with_a_point_or_an_exponent():
    config = build({"steps": 1e6, "agent": {"gamma": 1}})
    assert config.steps == 1_000_000
    assert type(config.steps) is int
    assert type(config.agent.gamma) is float


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:3", "mps"])
def test_known_device_names_pass(device):
    assert build({"device": device}).device == device


def test_a_missing_required_key_is_named():
    with pytest.raises(ConfigError, match=r"agent_name is missing\."):
        from_dict(RunConfig, {})


def test_a_configuration_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        EnvConfig().num_envs = 3


# Differences (dqn.md section 3, item 22).


def test_finding_22_diff_gives_exactly_the_rows_that_differ():
    a = {"seed": 1, "env": {"num_envs": 1, "workers": False}, "old": 3}
    b = {"seed": 2, "env": {"num_envs": 1, "workers": False, "limit": 7}}
    assert diff(a, b) == [
        ("seed", "changed", 1, 2),
        ("old", "removed", 3, None),
        ("env.limit", "added", None, 7),
    ]


def test_flatten_keeps_empty_groups():
    assert flatten({"a": {"b": {"c": 1}}, "d": {}}) == {"a.b.c": 1, "d": {}}


# Presets and files.


def test_debug_is_tiny_for_an_agent_without_a_part_of_its_own():
    config = build(*presets.layers(["debug"], None, "stub"))
    assert config.steps <= 1000
    assert config.replay == EpisodeReplayConfig(capacity_rows=10_000, block_rows=64)


@pytest.mark.parametrize("name", presets.names())
def test_every_preset_says_what_it_is_and_builds_for_the_agents_it_names(name):
    data = presets.load(name)
    assert 10 <= len(data["about"]) <= 100
    assert set(data.get("agents", {})) <= set(AGENTS)
    for agent in data.get("agents", AGENTS):
        layers = presets.layers([name], None, agent)
        build_run_config(agent, "gym:Pendulum-v1", config_class(agent), layers)


def test_the_part_for_one_agent_wins_over_the_general_part(tmp_path, monkeypatch):
    text = "about: x\nsteps: 5\nseed: 3\nagents:\n  dqn: {steps: 9}\n"
    (tmp_path / "both.yaml").write_text(text)
    (tmp_path / "one.yaml").write_text("about: x\nagents:\n  dqn: {steps: 9}\n")
    monkeypatch.setattr(presets, "FOLDER", tmp_path)
    assert presets.for_agent("both", "dqn") == {"steps": 9, "seed": 3}
    assert presets.for_agent("both", "sac") == {"steps": 5, "seed": 3}
    with pytest.raises(ConfigError, match="Preset one has nothing for agent sac; it is for dqn"):
        presets.for_agent("one", "sac")


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(ConfigError, match=r"no preset debgu. Did you mean debug\?"):
        presets.load("debgu")


@pytest.mark.parametrize("kind", LOADERS)
def test_plain_values_are_those_of_yaml_1_2(kind, tmp_path, monkeypatch):
    """PyYAML alone reads 3e-4 as text and `off` as false."""
    monkeypatch.setattr("forethought.presets.loader.LOADERS", [kind])
    path = tmp_path / "a.yaml"
    path.write_text("{a: 3e-4, b: -1E3, c: 0.5, d: 7, e: e4, f: off, g: true, h: False, i: 1_000}")
    assert presets.load_file(path) == {
        **{"a": 3e-4, "b": -1000.0, "c": 0.5, "d": 7, "e": "e4"},
        **{"f": "off", "g": True, "h": False, "i": 1000},
    }


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "cannot be read: No such file or directory."),
        (b"\xff\xfe\x00", "cannot be read: it is not text."),
        (b"a: [1,\nb: 2", "is not YAML in line 2"),
        (b"- 1\n- 2", "must hold keys with values"),
        (b"agent: {}\nsteps: 9\nagent: {horizon: 2}", "line 3"),
        (b"agent: {horizon: 2,\n  horizon: 3}", "horizon stands there twice; write it once"),
    ],
)
def test_an_unreadable_file_is_one_sentence_that_names_it(tmp_path, content, sentence):
    path = tmp_path / "mine.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        presets.load_file(path)
    assert str(path) in str(error.value)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_every_preset_reads_alike_with_and_without_the_library():
    texts = [file.read_text() for file in sorted(presets.FOLDER.glob("*.yaml"))]
    slow, fast = ([yaml.load(text, kind) for text in texts] for kind in (LOADERS[0], LOADERS[-1]))
    assert slow == fast and len(texts) > 10


def test_an_empty_file_changes_nothing(tmp_path):
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert presets.load_file(tmp_path / "empty.yaml") == {}
