"""Options and presets of the DQN family: what contradicts itself is refused, presets compose."""

from __future__ import annotations

import pytest
import yaml

import forethought
from forethought import files, presets
from forethought.agents.dqn import DQNConfig
from forethought.config import ConfigError, PrioritizedReplayConfig, build_run_config, from_dict

TOGGLES = ("double", "dueling", "n_step", "distribution", "noisy", "munchausen")
FAMILY = [name for name in presets.names() if name.startswith("dqn_")]


def run(*names, task="atari:Pong", **flags):
    layers = [*presets.layers(names, None, "dqn"), flags]
    return build_run_config("dqn", task, DQNConfig, layers)


def toggles(*names, task="atari:Pong"):
    config = run(*names, task=task)
    own = {name: getattr(config.agent, name) for name in TOGGLES}
    shown = {name: getattr(value, "kind", value) for name, value in own.items()}
    return shown | {"replay": config.replay.kind, "network": config.agent.network.kind}


def test_there_is_a_preset_for_each_member_of_the_family():
    wanted = "100k btr c51 dopamine iqn minatar modern nature_code nature_text qr rainbow small"
    assert [f"dqn_{name}" for name in wanted.split()] == FAMILY


PLAIN = {
    "double": False,
    "dueling": False,
    "n_step": 1,
    "distribution": "none",
    "noisy": "none",
    "munchausen": "none",
    "replay": "uniform",
    "network": "nature",
}
RAINBOW = {
    "double": True,
    "dueling": True,
    "n_step": 3,
    "distribution": "c51",
    "noisy": "factorised",
    "replay": "prioritized",
}
PARTS = {
    "dqn_nature_code": {},
    "dqn_nature_text": {},
    "dqn_dopamine": {},
    "dqn_c51": {"distribution": "c51"},
    "dqn_qr": {"distribution": "qr"},
    "dqn_iqn": {"distribution": "iqn"},
    "dqn_rainbow": RAINBOW,
    "dqn_100k": {**RAINBOW, "n_step": 20},
    "dqn_modern": {"double": True, "dueling": True, "n_step": 3, "replay": "prioritized"},
    "dqn_btr": {
        **RAINBOW,
        "double": False,
        "distribution": "iqn",
        "munchausen": "on",
        "network": "impala",
    },
}


@pytest.mark.parametrize("name", PARTS)
def test_a_preset_has_the_parts_of_its_paper(name):
    assert toggles(name) == {**PLAIN, **PARTS[name]}


@pytest.mark.parametrize("name", PARTS)
def test_minatar_keeps_the_parts_of_the_preset_before_it(name):
    alone = toggles(name)
    both = toggles(name, "dqn_minatar", task="minatar:breakout")
    assert both == {**alone, "network": "minatar"}
    config = run(name, "dqn_minatar", task="minatar:breakout")
    assert (config.steps, config.replay.capacity_rows) == (500_000, 100_000)
    epsilon = config.agent.exploration
    if name in ("dqn_rainbow", "dqn_100k"):
        assert epsilon.kind == "none", "noisy layers get no epsilon beside them"
    else:
        assert epsilon.decay_agent_steps == 100_000


def test_small_is_double_dqn_on_vectors():
    assert toggles("dqn_small") == {**PLAIN, "double": True, "n_step": 5, "network": "mlp"}


@pytest.mark.parametrize("name", ["dqn_minatar", "dqn_small", "debug"])
def test_noisy_layers_have_no_epsilon_where_only_a_preset_of_sizes_names_one(name):
    """Spec: noisy with epsilon only where epsilon is set explicitly."""
    task, noisy = "minatar:breakout", {"noisy": {"kind": "factorised"}}
    assert run(name, task=task, agent=noisy).agent.exploration.kind == "none"
    assert run(name, task=task, agent={"noisy": "factorised"}).agent.exploration.kind == "none"
    explicit = {**noisy, "epsilon": {"kind": "linear", "end": 0.5}}
    assert run(name, task=task, agent=explicit).agent.exploration.end == 0.5
    with pytest.raises(ConfigError, match=r"agent.epsilon.end belongs to .* of kind linear"):
        run(name, task=task, agent={**noisy, "epsilon": {"end": 0.5}})


@pytest.mark.parametrize("name", ["dqn_minatar", "dqn_small", "debug"])
def test_epsilon_can_be_turned_off_over_a_preset(name):
    task, off = "minatar:breakout", {"epsilon": {"kind": "none"}}
    assert run(name, task=task, agent=off).agent.exploration.kind == "none"
    rainbow = run(name, "dqn_rainbow", task=task, agent={"network": {"kind": "minatar"}})
    assert rainbow.agent.exploration.kind == "none"
    btr = run(name, "dqn_btr", task="atari:Pong", agent={"double": False})
    assert btr.agent.exploration.decay_agent_steps == 2_000_000


def test_presets_of_one_agent_are_refused_by_the_others():
    for name in presets.names():
        owner = name.split("_")[0]
        owner = {"multi": "tdmpc2", "quickstart": "tdmpc2"}.get(owner, owner)
        if owner not in ("dqn", "sac", "td3", "tdmpc2"):
            continue  # for several of them
        for agent in {"dqn", "sac", "td3", "tdmpc2"} - {owner}:
            with pytest.raises(ConfigError, match=f"Preset {name} has nothing for agent {agent}"):
                presets.for_agent(name, agent)


def test_minatar_alone_is_plain():
    assert toggles("dqn_minatar", task="minatar:breakout") == {**PLAIN, "network": "minatar"}


def test_nature_code_and_text_differ_in_the_target_s_unit_alone():
    code, text = (run(f"dqn_nature_{name}").agent for name in ("code", "text"))
    assert (code.target.kind, code.target.period_agent_steps) == ("agent_steps", 10_000)
    assert (text.target.kind, text.target.period_updates) == ("updates", 10_000)
    import dataclasses

    assert dataclasses.replace(code, target=text.target) == text


def test_the_numbers_of_the_papers():
    """A second look at what a slip of the pen in a preset would change in silence."""
    nature, rainbow, btr = (run(f"dqn_{name}") for name in ("nature_code", "rainbow", "btr"))
    optimiser = nature.agent.optimiser
    assert (optimiser.kind, optimiser.lr, optimiser.decay) == ("deepmind_rmsprop", 2.5e-4, 0.95)
    assert optimiser.epsilon == 0.01
    assert nature.train.updates_per_agent_step == 0.25 and nature.train.seed_agent_steps == 50_000
    assert nature.agent.epsilon.decay_agent_steps == 1_000_000
    assert (rainbow.replay.alpha, rainbow.replay.beta_start) == (0.5, 0.4)
    assert rainbow.agent.target.period_agent_steps == 8_000
    assert 1 / btr.train.updates_per_agent_step == 64 and btr.agent.batch_size == 256
    assert btr.agent.optimiser.epsilon == 0.005 / 256
    zoo = {name: run(f"dqn_{name}") for name in ("c51", "qr", "iqn")}
    assert {x.agent.optimiser.epsilon for x in zoo.values()} == {0.01 / 32}
    clips = {name: x.agent.grad_clip_norm for name, x in zoo.items()}
    assert clips == {"c51": 10.0, "qr": 10.0, "iqn": None}, "max_global_grad_norm of DQN Zoo"
    begins = {name: x.train.seed_agent_steps for name, x in zoo.items()}
    assert begins == {"c51": 50_000, "qr": 50_000, "iqn": 20_000}, "min_replay_capacity_fraction"
    norms = {
        name: run(f"dqn_{name}").replay.is_norm for name in ("rainbow", "100k", "btr", "modern")
    }
    assert set(norms.values()) == {"batch"}, "as Dopamine, DQN Zoo, Kaixhin's Rainbow have it"
    assert isinstance(run("dqn_modern").replay, PrioritizedReplayConfig)
    assert run("dqn_modern").replay.alpha == 0.5
    atari = run("dqn_modern").env.atari
    assert (atari.sticky_actions, atari.noop_max, atari.life_loss) == (0.25, 0, False), "Dopamine's"


def test_without_a_preset_a_run_learns_every_fourth_step_from_uniform_replay():
    config = run(task="gym:CartPole-v1")
    assert (config.replay.kind, config.train.updates_per_agent_step) == ("uniform", 0.25)
    assert config.train.seed_updates == 0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"munchausen": {"kind": "on"}, "double": True},
            "agent.double is True, but must be off .--agent.no_double.: Munchausen",
        ),
        (
            {"munchausen": {"kind": "on"}, "distribution": {"kind": "c51"}},
            "agent.munchausen is on, but agent.distribution is c51",
        ),
        (
            {"optimiser": {"kind": "adam", "decay": 0.9}},
            "agent.optimiser.decay belongs to agent.optimiser of kind deepmind_rmsprop",
        ),
        ({"noisy": {"sigma": 0.1}}, "agent.noisy.sigma belongs to agent.noisy of kind factorised"),
        (
            {"distribution": {"kind": "qr", "atoms": 51}},
            "belongs to agent.distribution of kind c51",
        ),
        ({"network": {"kind": "nature", "spectral_norm": True}}, "of kind impala"),
        ({"target": {"kind": "updates", "period_agent_steps": 8}}, "of kind agent_steps"),
        (
            {"epsilon": {"kind": "none", "end": 0.1}},
            "belongs to agent.epsilon of kind linear",
        ),
        (
            {"epsilon": {"kind": "linear", "off_after_agent_steps": 5}},
            "must be at least agent.epsilon.decay",
        ),
        ({"n_step": 0}, "agent.n_step is 0, but must be at least 1"),
        ({"gamma": 1.5}, "agent.gamma is 1.5"),
        ({"distribution": {"kind": "c51", "v_min": 10}}, "must be below agent.distribution.v_max"),
        ({"network": {"kind": "nature", "kernels": [8, 4]}}, "as many as agent.network.channels"),
        ({"duelling": True}, "Did you mean agent.dueling"),
    ],
)
def test_options_that_contradict_each_other_or_have_no_effect_are_refused(given, words):
    with pytest.raises(ConfigError, match=words):
        from_dict(DQNConfig, given, "agent")


def test_finding_19_the_paper_s_preset_refuses_an_option_of_another_optimiser(refused):
    words = ("train", "dqn", "gym:CartPole-v1", "--agent.optimiser", "deepmind_rmsprop")
    said = refused(*words, "--agent.optimiser.adam_eps", "1.5e-4")
    assert "adam_eps" in said
    with pytest.raises(ConfigError, match=r"no key agent.optimiser.adam_eps"):
        run("dqn_nature_code", agent={"optimiser": {"adam_eps": 1.5e-4}})
    with pytest.raises(ConfigError, match=r"agent\.optimiser\.decay belongs to"):
        run("dqn_dopamine", agent={"optimiser": {"decay": 0.95}})


def test_finding_20_uniform_replay_refuses_what_is_for_priorities():
    with pytest.raises(ConfigError, match=r"replay\.alpha belongs to replay of kind"):
        run("dqn_nature_code", replay={"alpha": 0.6})


def test_dqn_refuses_replay_of_slices():
    with pytest.raises(ConfigError, match="replay is episodes, but must be uniform or prioritized"):
        run(replay={"kind": "episodes"})


def test_a_group_for_another_kind_is_left_out(tmp_path, monkeypatch):
    (tmp_path / "a.yaml").write_text("about: x\nreplay: {kind: uniform}\nsteps: 5\n")
    (tmp_path / "b.yaml").write_text("about: x\nreplay: prioritized\n")
    (tmp_path / "c.yaml").write_text("about: x\nreplay: {if_kind: prioritized, alpha: 0.7}\n")
    monkeypatch.setattr(presets, "FOLDER", tmp_path)
    assert presets.layers(["a", "c"], None, "dqn")[1] == {}
    assert presets.layers(["b", "c"], None, "dqn")[1] == {"replay": {"alpha": 0.7}}
    assert presets.layers(["c"], None, "dqn") == [{"replay": {"alpha": 0.7}}]


OLD_EPSILON = {"start": 1.0, "end": 0.05, "decay_agent_steps": 900, "off_after_agent_steps": None}


@pytest.mark.parametrize(
    ("noisy", "now"),
    [("none", {"kind": "linear", **OLD_EPSILON}), ("factorised", {"kind": "auto"})],
)
def test_a_run_of_an_older_version_whose_auto_epsilon_has_keys_evaluates_and_resumes(
    tmp_path, noisy, now
):
    """As config.yaml and the manifests of its checkpoints say it."""
    flags = {"noisy": noisy} if noisy != "none" else {"epsilon": now}
    run = forethought.train(
        "dqn", "gym:CartPole-v1", presets=["dqn_small", "debug"], out=tmp_path / "run",
        steps=40, agent=flags, track={"console": False},
    )  # fmt: skip
    old = {"kind": "auto", **OLD_EPSILON}
    path = tmp_path / "run" / "config.yaml"
    config = yaml.safe_load(path.read_text())
    assert config["agent"]["epsilon"] == now
    config["agent"]["epsilon"] = old
    path.write_text(yaml.safe_dump(config))
    for folder in files.published(run.path / "checkpoints"):
        manifest = files.read_manifest(folder)
        manifest.meta["config"]["agent"]["epsilon"] = old
        (folder / "manifest.json").write_text(manifest.text)
    assert len(forethought.evaluate(run.path, episodes=1).returns) == 1
    resumed = forethought.resume(run.path, steps=60)
    assert (resumed.status, resumed.agent_steps) == ("done", 60)


@pytest.mark.parametrize(
    ("network", "words"),
    [
        ({"kind": "nature", "hidden_units": 10**9}, "hidden_units is 1000000000, .* to 65,536"),
        (
            {"kind": "nature", "channels": [32, 64, 10**9]},
            "channels is .*, but must be from 1 to 4,096 each",
        ),
        ({"kind": "impala", "width": 129}, "width is 129, but must be from 1 to 128"),
        ({"kind": "minatar", "channels": 5000}, "channels is 5000, .* to 4,096"),
        ({"kind": "mlp", "layers": [256, 70_000]}, "layers is .*, but must be from 1 to 65,536"),
    ],
)
def test_a_single_size_beyond_all_proportion_is_refused(network, words):
    task = "gym:CartPole-v1" if network["kind"] == "mlp" else "atari:Pong"
    with pytest.raises(ConfigError, match=rf"agent\.network\.{words}"):
        build_run_config("dqn", task, DQNConfig, [{"agent": {"network": network}}])
