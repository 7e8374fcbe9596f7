"""Bad input through the whole house: one sentence that names the thing, before work begins."""

import errno
import importlib.util
import json
import os
import re
import shutil
import sys

import pytest
import torch

from forethought import make_agent, make_env
from forethought.agents import registry
from forethought.agents.sac.config import SACConfig
from forethought.agents.td3.config import TD3Config
from forethought.agents.tdmpc2.agent import TDMPC2, _refuse_idle_termination
from forethought.agents.tdmpc2.config import LearningRates, TDMPC2Config
from forethought.cli import main
from forethought.config import ConfigError, MemoryRefused, from_dict
from forethought.extras import install_extra
from forethought.files import load_tensors, save_tensors
from forethought.presets.flags import nested
from forethought.replay import blocks
from forethought.training.device import networks_must_fit
from tests.forked import forked

PENDULUM = "gym:Pendulum-v1"
pytestmark = pytest.mark.usefixtures("empty_folder")


@pytest.fixture
def hide(monkeypatch):
    """Makes a package look as if it were not installed."""

    def hidden(module):
        find = importlib.util.find_spec

        def find_others(name, *args):
            return None if name.split(".")[0] == module else find(name, *args)

        monkeypatch.setattr(importlib.util, "find_spec", find_others)
        monkeypatch.setitem(sys.modules, module, None)

    return hidden


def train(*flags, task=PENDULUM):
    return ["train", "tdmpc2", task, "--preset", "debug", *flags]


@pytest.mark.parametrize(
    ("task", "nearest"),
    [
        ("dmc:cartpole-swingpu", "dmc:cartpole-swingup"),
        ("gym:Pendulm-v1", "gym:Pendulum-v1"),
        ("minatar:brekout", "minatar:breakout"),
        ("dcm:cartpole-swingup", "dmc:cartpole-swingup"),
        ("Pendulum-v1", "gym:Pendulum-v1"),
    ],
)
def test_an_unknown_task_names_the_nearest(refused, task, nearest):
    commands = [train(task=task), ["evaluate", task, "--policy", "random"]]
    for command in commands if ":" in task else commands[:1]:
        sentence = refused(*command)
        assert sentence.startswith(f"There is no task {task}. Did you mean {nearest}?")


def test_a_task_unlike_any_other_says_where_to_look(refused):
    assert "'forethought list tasks'" in refused(*train(task="zzzzqqqq"))


def test_an_unknown_preset_agent_or_key_names_the_nearest(refused, empty_folder):
    assert "Did you mean debug?" in refused("train", "tdmpc2", PENDULUM, "--preset", "debgu")
    assert "Did you mean tdmpc2?" in refused("train", "tdmcp2", PENDULUM)
    assert "Did you mean --agent.horizon?" in refused(*train("--agent.horizn", "3"))
    (empty_folder / "mine.yaml").write_text("agent: {horizn: 3}")
    assert "Did you mean agent.horizon?" in refused(*train("--config", "mine.yaml"))
    (empty_folder / "mine.yaml").write_text("replay: {kind: episodes, alpha: 0.6}")
    sentence = refused(*train("--config", "mine.yaml"))
    assert "replay.alpha belongs to replay of kind prioritized" in sentence


def test_episodes_in_which_no_slice_fits_are_refused(refused):
    """Nothing would ever be learned."""
    sentence = refused(*train("--env.max_episode_steps", "2"))
    told = "agent.horizon is 3, but must be at most 2, the decisions of an episode of"
    assert sentence.startswith(told)
    assert "must be at most 50" in refused(*train("--agent.horizon", "60"))


def test_a_replay_without_room_for_a_whole_episode_is_refused(refused):
    """Drawn per episode, only the last rows of each would be learned from: 51 rows twice."""
    flags = ("--replay.capacity_rows", "101", "--env.num_envs", "2")
    sentence = refused(*train(*flags))
    assert "must be at least 102, a whole episode of gym:Pendulum-v1 for each of 2" in sentence
    assert "--replay transitions" in sentence


@pytest.mark.parametrize("device", ["cuda", "cuda:7", "mps"])
def test_a_device_that_is_not_here_is_named(refused, monkeypatch, device):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert device in refused(*train("--device", device))


def test_a_replay_that_does_not_fit_or_has_no_device_is_refused(refused):
    sentence = refused(*train("--replay.capacity_rows", "100000000000"))
    assert sentence.startswith("replay.capacity_rows is 100000000000, which takes")
    sentence = refused(*train("--replay.storage_device", "cuda:99"))  # on no machine
    assert sentence.startswith("replay.storage_device is cuda:99, which cannot be used here")


@pytest.mark.parametrize(
    ("task", "module", "extra"),
    [
        ("dmc:cartpole-swingup", "dm_control", "dmc"),
        ("minatar:breakout", "minatar", "minatar"),
        ("gym:HalfCheetah-v5", "mujoco", "mujoco"),
    ],
)
def test_a_missing_extra_of_a_task_says_what_to_install(refused, hide, task, module, extra):
    hide(module)
    assert install_extra(extra) in refused(*train(task=task))


@pytest.mark.parametrize("sink", ["tensorboard", "wandb"])
def test_a_missing_extra_of_a_sink_says_what_to_install(refused, hide, sink):
    hide(sink)
    assert install_extra(sink) in refused(*train(f"--track.{sink}"))


def give_up_privileges() -> None:
    """Root may read everything."""
    if os.getuid() == 0:
        os.setresuid(65534, 65534, 65534)


@pytest.mark.parametrize("verb", ["resume", "evaluate", "watch", "report", "compare"])
def test_a_run_directory_that_may_not_be_read_is_named(finished_run, verb):
    mode = finished_run.stat().st_mode
    words = [str(finished_run)] * (2 if verb == "compare" else 1)
    finished_run.chmod(0)
    try:
        with forked(verb, *words, prepare=give_up_privileges) as process:
            told = process.stderr.read()
            code = process.wait(30)
    finally:
        finished_run.chmod(mode)
    assert code == 1
    verdict = "(read|used): Permission denied"
    assert re.fullmatch(rf"{re.escape(str(finished_run))}\S* cannot be {verdict}\.\n", told)


def test_a_name_that_no_disk_takes_is_named(refused):
    name = "x" * 300
    assert refused("resume", name, codes=(1,)) == f"{name} cannot be read: File name too long."
    assert refused("evaluate", name).startswith(f"There is no run directory {name}")
    assert "File name too long" in refused("data", "verify", name, codes=(1,))


def test_the_name_of_many_tasks_may_be_longer_than_that_of_a_file(refused):
    """It is looked up as what it is, and what is wrong with it is named."""
    task = "multi:" + ",".join(["dmc:hopper-hop"] * 20)
    assert "names dmc:hopper-hop twice" in refused("evaluate", task, "--policy", "random")


@pytest.mark.parametrize("module", ["./puck", "..x", "folder/puck", "folder\\\\puck"])
def test_a_path_in_the_place_of_a_module_is_named(refused, module):
    told = f"{module} in the task gym:{module}:Puck-v0 is no name of a module"
    assert refused(*train(task=f"gym:{module}:Puck-v0")).startswith(told)


@pytest.mark.parametrize(
    ("flag", "value", "rule"),
    [
        ("--agent.gamma", "9" * 320, "must be finite"),
        ("--train.threads", "3000000000", "must be at least 1, at most 1024"),
        ("--replay.block_rows", "9", "must be at least 13: a checkpoint lists at most 80,000"),
        ("--agent.termination_coef", "5", "gym:Pendulum-v1 never terminates"),
        ("--agent.lr.termination", "0.1", "gym:Pendulum-v1 never terminates"),
    ],
)
def test_a_value_without_use_or_end_is_named(refused, flag, value, rule):
    sentence = refused(
        *train(flag, value, "--replay.capacity_rows", "1000000", "--steps", "900000")
    )
    assert sentence.startswith(f"{flag[2:]} is {value}") and rule in sentence


def test_what_a_new_run_is_refused_for_strands_no_old_one(finished_run, monkeypatch):
    """A run that was begun with them goes on, and has no way to change its blocks."""
    monkeypatch.setattr(blocks, "MOST_BLOCKS", 1)
    assert main(train("--steps", "100")) == 2
    assert main(["resume", str(finished_run), "--steps", "40"]) == 0


def test_rates_that_a_preset_raised_together_are_no_wish_for_a_termination_head():
    raised = LearningRates(dynamics=5e-4, termination=1e-3, q=1e-3)
    _refuse_idle_termination("gym:Crane-v0", TDMPC2Config(lr=raised))
    wish = TDMPC2Config(lr=LearningRates(termination=2e-3))
    with pytest.raises(ConfigError, match=r"agent\.lr\.termination is 0\.002"):
        _refuse_idle_termination("gym:Crane-v0", wish)


@pytest.mark.parametrize("verb", ["resume", "evaluate"])
def test_a_run_directory_that_is_none_is_named(refused, empty_folder, verb):
    assert "nowhere" in refused(verb, "./nowhere", codes=(1, 2))

    (empty_folder / "foreign").mkdir()
    (empty_folder / "foreign" / "notes.txt").write_text("mine")
    assert "foreign" in refused(verb, "foreign", codes=(1, 2))

    (empty_folder / "foreign" / "run.json").write_text("{half")
    assert "foreign" in refused(verb, "foreign", codes=(1, 2))

    (empty_folder / "foreign" / "run.json").write_text(json.dumps({"some": "thing"}))
    assert "foreign" in refused(verb, "foreign", codes=(1, 2))

    (empty_folder / "file").write_text("x")
    assert "file" in refused(verb, "file", codes=(1, 2))


def test_a_new_run_never_goes_over_something_else(refused, empty_folder):
    (empty_folder / "taken").mkdir()
    (empty_folder / "taken" / "notes.txt").write_text("mine")
    assert "taken" in refused(*train("--out", "taken"), codes=(1, 2))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of a few steps."""
    out = tmp_path_factory.mktemp("trained") / "done"
    flags = ["--steps", "20", "--train.seed_agent_steps", "20", "--train.seed_updates", "0"]
    assert main(train(*flags, "--eval.episodes", "1", "--out", str(out))) == 0
    return out


@pytest.fixture
def finished_run(trained, empty_folder, capsys):
    """A copy of it, in the folder `done`."""
    shutil.copytree(trained, empty_folder / "done")
    capsys.readouterr()
    return empty_folder / "done"


@pytest.fixture
def two_checkpoints(finished_run, capsys):
    """It goes on, which leaves a second checkpoint; in the folder `two`."""
    assert main(["resume", "done", "--steps", "40"]) == 0
    capsys.readouterr()
    return finished_run.rename("two")


def test_an_unknown_policy_or_checkpoint_is_named(refused, finished_run):
    assert "rnadom" in refused("evaluate", PENDULUM, "--policy", "rnadom")
    assert "rnadom" in refused("evaluate", "done", "--policy", "rnadom")
    assert "no checkpoint at step 3; it has:" in refused("evaluate", "done", "--checkpoint", "3")
    assert "checkpoint is newest" in refused("evaluate", "done", "--checkpoint", "newest")
    assert "done" in refused(*train("--out", "done"), codes=(1, 2))


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("schema", "two", "a whole number"),
        ("schema", True, "a whole number"),
        ("seed", "1", "a whole number"),
        ("status", ["done"], "text"),
        ("agent", None, "text"),
        ("tags", "needs-inspection", "a list"),
        ("best", 3, "a group of keys"),
        ("random_score", "high", "a number"),
    ],
)
def test_a_wrong_type_in_a_runs_description_is_named(refused, finished_run, key, value, rule):
    file = finished_run / "run.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    for verb in ("resume", "evaluate"):
        sentence = refused(verb, "done", codes=(1, 2))
        assert sentence.endswith(f"run.json is damaged: {key} is {value!r}, but must be {rule}.")


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("agent_name: [half", "config.yaml"),
        ("- 1", "config.yaml"),
        ("agent_name: dqn0\ntask: gym:Pendulum-v1", "dqn0"),
        ("agent_name: tdmpc2\ntask: gym:Pendulum-v1\nagent: {horizn: 3}", "agent.horizn"),
        ("agent_name: tdmpc2\ntask: gym:Pendulm-v1", "gym:Pendulm-v1"),
    ],
)
def test_a_damaged_configuration_of_a_run_is_named(refused, finished_run, content, named):
    (finished_run / "config.yaml").write_text(content)
    for verb in ("resume", "evaluate"):
        assert named in refused(verb, "done", codes=(1, 2))


@pytest.mark.parametrize("agent", ["sac", "td3", "dqn", "tdmpc2"])
@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("std::bad_alloc")])
def test_networks_that_fit_into_no_memory_are_refused(refused, monkeypatch, agent, error):
    """By the command and by the function."""

    def full(self, *spec, **options):
        raise error

    task = "gym:CartPole-v1" if agent == "dqn" else "gym:Pendulum-v1"
    monkeypatch.setattr(registry.agent_class(agent), "__init__", full)
    sentence = (
        f"The networks of {agent} do not fit into the memory of cpu: choose smaller sizes, or for "
        "a trained agent a machine with more."
    )
    assert refused("train", agent, task, "--preset", "debug", "--out", "x") == sentence
    env = make_env(task)
    with pytest.raises(ConfigError) as told:
        make_agent(agent, env)
    env.close()
    assert str(told.value) == sentence


def test_other_errors_of_building_an_agent_are_not_taken_for_memory():
    with pytest.raises(RuntimeError, match="shapes"), networks_must_fit("x", torch.device("cpu")):
        raise RuntimeError("shapes do not fit")


@pytest.mark.parametrize(
    ("error", "where"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."), "cuda:1"),
        (RuntimeError("MPS backend out of memory (MPS allocated: 9.00 GB)"), "cuda:1"),
        (MemoryError(), "cpu"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), "cuda:1"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "cpu"),
        (RuntimeError("Storage size calculation overflowed with sizes=[10000000000]"), "cpu"),
    ],
)
def test_the_device_whose_memory_was_too_small_is_named(error, where):
    """Weights are drawn by the CPU, also for an agent that lives elsewhere."""
    told = pytest.raises(ConfigError, match=f"networks of x do not fit into the memory of {where}:")
    with told, networks_must_fit("x", torch.device("cuda:1")):
        raise error


@pytest.mark.parametrize(
    ("agent", "key", "before", "least", "most"),
    [
        ("sac", "agent.critics", (), 1, 100),
        ("td3", "agent.critics", (), 1, 100),
        ("dqn", "agent.distribution.atoms", ("--agent.distribution", "c51"), 2, 65_536),
        ("dqn", "agent.distribution.quantiles", ("--agent.distribution", "qr"), 1, 65_536),
        ("dqn", "agent.distribution.taus", ("--agent.distribution", "iqn"), 1, 65_536),
        ("tdmpc2", "agent.model.bins", (), 2, 65_536),
        ("dqn", "agent.network.pool_cells", ("--agent.network", "impala"), 1, 4_096),
        ("tdmpc2", "agent.model.mlp_units", (), 1, 65_536),
        ("tdmpc2", "agent.model.encoder_units", (), 1, 65_536),
        ("tdmpc2", "agent.model.latent_dim", (), 1, 65_536),
        ("tdmpc2", "agent.model.task_dim", (), 1, 65_536),
        ("tdmpc2", "agent.model.simnorm_dim", (), 2, 65_536),
        ("tdmpc2", "agent.model.encoder_layers", (), 2, 100),
        ("tdmpc2", "agent.model.num_q", (), 2, 100),
        ("tdmpc2", "agent.image.channels", (), 1, 4_096),
        ("tdmpc2", "agent.planner.samples", (), 1, 65_536),
    ],
)
def test_a_size_beyond_all_networks_is_named(refused, agent, key, before, least, most):
    task = "gym:CartPole-v1" if agent == "dqn" else "gym:Pendulum-v1"
    words = ["train", agent, task, "--preset", "debug", *before, f"--{key}"]
    for size in (least - 1, most + 1, 10**19):
        said = refused(*words, str(size), "--out", "x")
        assert said == f"{key} is {size}, but must be from {least} to {most:,}."


@pytest.mark.parametrize(
    ("config", "key", "most"),
    [
        (SACConfig, "agent.hidden", 65_536),
        (TD3Config, "agent.hidden", 65_536),
        (TDMPC2Config, "agent.image.kernels", 4_096),
        (TDMPC2Config, "agent.image.strides", 4_096),
    ],
)
def test_units_of_each_layer_and_their_number_have_a_limit(config, key, most):
    def said(*sizes):
        with pytest.raises(ConfigError) as told:
            from_dict(config, nested({key: sizes})["agent"], "agent")
        return str(told.value)

    assert said(64, most + 1) == f"{key} is [64, {most + 1}], but must be from 1 to {most:,} each."
    assert said(*[8] * 101) == f"{key} has 101 layers, but at most 100 may be."


def test_the_largest_sizes_are_taken():
    from_dict(SACConfig, {"critics": 100, "hidden": [65_536] * 100}, "agent")
    model = {"num_q": 100, "encoder_layers": 100, "bins": 65_536, "mlp_units": 65_536}
    from_dict(TDMPC2Config, {"model": model, "planner": {"samples": 65_536}}, "agent")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("std::bad_alloc"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
)
@pytest.mark.parametrize("verb", ["resume", "evaluate"])
def test_memory_that_a_checkpoint_does_not_find_is_no_damage(
    refused, two_checkpoints, monkeypatch, verb, error
):
    """An agent that is loaded on a full device keeps its newest checkpoint: an older one, which
    would fit a moment later, is not taken in its place."""
    restore = TDMPC2.restore

    def full_at_first(self, json, tensors):
        monkeypatch.setattr(TDMPC2, "restore", restore)
        raise error

    before = sorted((two_checkpoints / "checkpoints").glob("step-*"))
    assert len(before) == 2
    monkeypatch.setattr(TDMPC2, "restore", full_at_first)
    steps = ["--steps", "60"] if verb == "resume" else []
    said = refused(verb, "two", *steps, codes=(1,))
    assert "There is not enough memory for " in said and "step-000000040" in said
    assert sorted((two_checkpoints / "checkpoints").glob("step-*")) == before


def test_memory_that_weights_to_begin_from_do_not_find_is_a_sentence(
    refused, finished_run, monkeypatch
):
    def full(self, *given):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(TDMPC2, "begin_with", full)
    said = refused(*train("--train.init_from", "done", "--out", "x"), codes=(1,))
    assert "There is not enough memory for " in said


def test_memory_that_a_file_of_tensors_does_not_find_is_no_damage(tmp_path, monkeypatch):
    def full(path, device):
        raise MemoryError

    save_tensors(tmp_path / "x.safetensors", {"x": torch.zeros(3)})
    monkeypatch.setattr("safetensors.torch.load_file", full)
    with pytest.raises(MemoryRefused, match=r"not enough memory for .*x\.safetensors"):
        load_tensors(tmp_path / "x.safetensors")
