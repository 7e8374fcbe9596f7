"""Official TD-MPC2 checkpoints: three layouts give the outputs of the official networks, and what
is no such checkpoint is refused in one sentence without being executed."""

from __future__ import annotations

import pickle
import random
import stat
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from forethought.agents.tdmpc2.config import SIZES, TDMPC2Config
from forethought.agents.tdmpc2.model import WorldModel
from forethought.agents.tdmpc2.official import OfficialCheckpoint, newest_state, read_checkpoint
from forethought.config import ConfigError, build_run_config
from forethought.data.tdmpc2_tasks import MT30
from forethought.envs.multi import joint_spec
from forethought.files import FileError
from forethought.spaces.spec import EnvSpec
from tests.official_files import LAYOUTS, OfficialNetworks
from tests.tdmpc2_agents import ACTION, OBS, make_agent, make_spec

EVERY_LAYOUT = pytest.mark.parametrize("layout", LAYOUTS)


def model_of(checkpoint: OfficialCheckpoint, episodic: bool = False) -> WorldModel:
    """Our model with the weights and options of a checkpoint."""
    spec = make_spec(
        observation_space=gymnasium.spaces.Box(-np.inf, np.inf, (checkpoint.observation_dim,)),
        action_space=gymnasium.spaces.Box(-1, 1, (checkpoint.action_dim,)),
        terminates=episodic,
    )
    start = {"agent": {"model": {"symlog_obs": checkpoint.symlogs_observations}}}
    layers = [start, checkpoint.decided(spec)]
    config = build_run_config("tdmpc2", "stub", TDMPC2Config, layers).agent
    model = make_agent(config, spec=spec, for_acting=True).model
    checkpoint.fill(model)
    return model


def outputs_of(model: WorldModel, obs: torch.Tensor, action: torch.Tensor) -> dict[str, Any]:
    z = model.encode(obs)
    found = {
        "encode": z,
        "next": model.next(z, action),
        "reward": model.reward(z, action),
        "q": model.q(z, action),
        "target_q": model.target_q(z, action),
        "pi": model.pi(z).mean,
    }
    if model.termination is not None:
        found["termination"] = model.termination_probability(z)
    return found


def inputs(batch: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    obs = 3 * torch.randn(batch, OBS, generator=generator)
    return obs, torch.rand(batch, ACTION, generator=generator) * 2 - 1


@EVERY_LAYOUT
@pytest.mark.parametrize("gradient", [False, True])
def test_equal_weights_give_equal_outputs(layout: str, gradient: bool, tmp_path: Path) -> None:
    official = OfficialNetworks.random(OBS, ACTION, encoder_layers=3)
    official = official.save(tmp_path / "agent.pt", layout)
    checkpoint = read_checkpoint(tmp_path / "agent.pt")
    assert checkpoint.layout == layout
    with torch.set_grad_enabled(gradient):  # the model takes other ways with and without
        ours = outputs_of(model_of(checkpoint), *inputs())
    expected = official.outputs(*inputs())
    assert ours["q"].shape == (3, 7, 101)
    for name, tensor in ours.items():
        torch.testing.assert_close(
            tensor.double(), expected[name], rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_the_policys_range_is_read_from_the_file(tmp_path: Path) -> None:
    official = OfficialNetworks.random(OBS, ACTION)
    state = official.newest() | {"log_std_min": torch.tensor(-5), "log_std_dif": torch.tensor(6)}
    torch.save({"model": state}, tmp_path / "agent.pt")
    model = model_of(read_checkpoint(tmp_path / "agent.pt"))
    assert (model.config.log_std_min, model.config.log_std_max) == (-5, 1)


def test_a_termination_head_is_taken_where_the_task_terminates(tmp_path: Path) -> None:
    official = OfficialNetworks.random(OBS, ACTION, episodic=True).save(
        tmp_path / "agent.pt", "newest"
    )
    checkpoint = read_checkpoint(tmp_path / "agent.pt")
    ours = outputs_of(model_of(checkpoint, episodic=True), *inputs())
    expected = official.outputs(*inputs())["termination"]
    torch.testing.assert_close(ours["termination"].double(), expected, rtol=1e-5, atol=1e-5)
    # For two months of 2025 the official code wrote one that it never trained.
    assert model_of(checkpoint, episodic=False).termination is None


@EVERY_LAYOUT
@pytest.mark.parametrize("row", [1, 5])
def test_sizes_are_found_from_shapes(layout: str, row: int, tmp_path: Path) -> None:
    size = SIZES[row]
    official = OfficialNetworks.random(
        9,
        4,
        encoder_units=size.encoder_units,
        encoder_layers=size.encoder_layers,
        units=size.mlp_units,
        latent=size.latent_dim,
        heads=size.num_q,
    )
    official.save(tmp_path / "agent.pt", layout)
    found = read_checkpoint(tmp_path / "agent.pt")
    assert (found.size, found.observation_dim, found.action_dim) == (size, 9, 4)
    model = found.decided(make_spec())["agent"]["model"]
    assert model["size"] == row
    assert model["latent_dim"] is None


def test_sizes_of_no_row_are_written_out(tmp_path: Path) -> None:
    OfficialNetworks.random(OBS, ACTION).save(tmp_path / "agent.pt", "newest")
    found = read_checkpoint(tmp_path / "agent.pt").decided(make_spec())["agent"]["model"]
    assert found == {
        "size": 5,
        "encoder_units": 16,
        "mlp_units": 24,
        "latent_dim": 16,
        "encoder_layers": 2,
        "num_q": 3,
        "bins": 101,
    }


def test_the_first_compiled_version_wrote_its_q_functions_thrice(tmp_path: Path) -> None:
    """From November 2024 to January 2025, with second names for the same tensors."""
    official = OfficialNetworks.random(OBS, ACTION)
    state = official.newest()
    for second, first in (("_detach_Qs.", "_detach_Qs_"), ("_target_Qs.", "_target_Qs_")):
        state |= {
            name.replace(first, second): value
            for name, value in state.items()
            if name.startswith(first)
        }
    torch.save({"model": state}, tmp_path / "agent.pt")
    ours = outputs_of(model_of(read_checkpoint(tmp_path / "agent.pt")), *inputs())
    expected = official.outputs(*inputs())["target_q"]
    torch.testing.assert_close(ours["target_q"].double(), expected, rtol=1e-5, atol=1e-5)


def test_a_bare_state_dict_without_targets_is_read_too(tmp_path: Path) -> None:
    state = OfficialNetworks.random(OBS, ACTION).of_2024()
    kept = {name: value for name, value in state.items() if "_target" not in name}
    torch.save(kept, tmp_path / "agent.pt")
    found = read_checkpoint(tmp_path / "agent.pt")
    assert found.notes == (
        "The file has no target Q functions: they begin as copies of the Q functions.",
    )
    model = model_of(found)
    assert all(map(torch.equal, model.q.parameters(), model.target_q.parameters()))


@pytest.mark.parametrize("episodic", [False, True])
def test_what_is_exported_is_the_newest_layout_to_the_letter(
    episodic: bool, tmp_path: Path
) -> None:
    """Names, order, shapes and values; the rest of the official code's own file is tensordict's."""
    official = OfficialNetworks.random(OBS, ACTION, episodic=episodic)
    official.save(tmp_path / "agent.pt", "newest")
    exported = newest_state(model_of(read_checkpoint(tmp_path / "agent.pt"), episodic))
    expected = official.newest()
    assert list(exported) == list(expected)
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(exported[name], value), name
            assert exported[name].dtype == value.dtype or value.dim() == 0
        elif name.endswith("__batch_size"):
            assert exported[name] == value
    torch.save({"model": exported}, tmp_path / "again.pt")
    again = read_checkpoint(tmp_path / "again.pt")
    assert again.weights.keys() == read_checkpoint(tmp_path / "agent.pt").weights.keys()


# ---- bad input ----


def refusal(path: Path, match: str, kind: type[Exception] = FileError) -> str:
    with pytest.raises(kind, match=match) as caught:
        read_checkpoint(path)
    text = str(caught.value)
    assert "\n" not in text
    assert str(path) in text
    return text


class Hostile:
    """What a pickle may do when it is opened."""

    def __init__(self, victim: Path) -> None:
        self.victim = victim

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.victim,))


@pytest.mark.parametrize("kind", ["bare", "inside"])
def test_case_25_a_pickle_posing_as_a_checkpoint_is_not_executed(kind: str, tmp_path: Path) -> None:
    path, victim = tmp_path / "agent.pt", tmp_path / "victim"
    content = {"model": Hostile(victim)}
    if kind == "bare":
        path.write_bytes(pickle.dumps(content))
        refusal(path, "a pickle, which could run code and was not opened")
    else:
        torch.save(content, path)
        refusal(path, "it asks for getattr, and only weights are taken from a checkpoint")
    assert sorted(tmp_path.iterdir()) == [path]


def rewritten(path: Path, rename: Any = lambda name: name, compress: int = 0) -> None:
    with zipfile.ZipFile(path) as archive:
        entries = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(path, "w", compress) as archive:
        for name, content in entries.items():
            archive.writestr(rename(name), content)


@pytest.mark.parametrize("name", ["../../data/0", "..\\..\\data", "/data/0"])
def test_case_07_an_archive_with_names_that_lead_out_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "agent.pt"
    OfficialNetworks.random(OBS, ACTION).save(path, "newest")
    rewritten(path, lambda old: name if old.endswith("/data/0") else old)
    refusal(path, "lies outside: refused")
    assert sorted(tmp_path.iterdir()) == [path]


def test_case_07_an_archive_with_a_link_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "agent.pt"
    OfficialNetworks.random(OBS, ACTION).save(path, "newest")
    with zipfile.ZipFile(path, "a") as archive:
        link = zipfile.ZipInfo(f"{archive.namelist()[0].partition('/')[0]}/link")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "/etc/passwd")
    refusal(path, "which is a link")


def test_a_compressed_archive_which_could_be_a_bomb_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "agent.pt"
    OfficialNetworks.random(OBS, ACTION).save(path, "newest")
    rewritten(path, compress=zipfile.ZIP_DEFLATED)
    refusal(path, "an archive that torch.save did not write")


def test_an_archive_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "agent.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("agent/readme.txt", "hello")
    refusal(path, "an archive of something else")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    refusal(tmp_path / "agent.pt", "There is no file", ConfigError)
    refusal(tmp_path, "There is no file", ConfigError)


def test_text_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "agent.pt").write_text("not found")
    refusal(tmp_path / "agent.pt", "torch.save writes an archive, and this is none")


def test_a_file_that_was_cut_short_or_damaged_is_refused_or_whole(tmp_path: Path) -> None:
    """Flipped bytes may hit a weight; whatever else they hit is one sentence, never a traceback."""
    path, generator = tmp_path / "agent.pt", random.Random(0)
    OfficialNetworks.random(OBS, ACTION, latent=8, units=8).save(path, "newest")
    whole = path.read_bytes()
    refused = 0
    for trial in range(60):
        content = bytearray(whole)
        if trial < 10:
            content = content[: generator.randrange(len(content))]
        else:
            for _ in range(3):
                content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        path.write_bytes(content)
        try:
            model_of(read_checkpoint(path))
        except FileError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused >= 10


CHANGES: dict[str, tuple[Any, str]] = {
    "another model": (lambda s: {"fc.weight": torch.ones(2, 2)}, "it holds fc.weight"),
    "nothing": (lambda s: {}, "it holds nothing"),
    "pixels": (lambda s: s | {"_encoder.rgb.2.weight": torch.ones(1)}, "was trained on pixels"),
    "strange key": (lambda s: s | {"_value.0.weight": torch.ones(2, 2)}, "holds _value.0.weight"),
    "no policy": (lambda s: {k: v for k, v in s.items() if "_pi" not in k}, "it has no policy"),
    "a hole": (
        lambda s: {k: v for k, v in s.items() if k != "_dynamics.1.bias"},
        r"dynamics.1.bias is absent in it, but must be \(24,\)",
    ),
    "a shape": (
        lambda s: s | {"_reward.1.weight": torch.ones(24, 23)},
        r"reward.1.weight is \(24, 23\) in it, but must be \(24, 24\)",
    ),
    "a huge network": (
        lambda s: s | {"_reward.0.weight": torch.ones(10**6, 18)},
        "no whole TD-MPC2 checkpoint: dynamics.0.bias",
    ),
    "a far layer": (
        lambda s: s | {"_encoder.state.999999999.bias": torch.ones(16)},
        "holds _encoder.state.999999999.bias",
    ),
    "axes": (lambda s: s | {"_pi.0.bias": torch.tensor(1.0)}, r"damaged: _pi.0.bias is \(\)"),
    "a list": (lambda s: s | {"_pi.0.bias": [1.0]}, "_pi.0.bias, which is no plain tensor"),
    "no content": (lambda s: s | {"_pi.0.bias": torch.ones(24, device="meta")}, "no plain tensor"),
    "complex": (lambda s: s | {"_pi.0.bias": torch.ones(24) * 1j}, "no plain tensor"),
    "not finite": (lambda s: s | {"_pi.0.bias": torch.full((24,), torch.nan)}, "not finite"),
    "a promise": (
        lambda s: s | {"_pi.0.bias": torch.ones(1).expand(10**12)},
        "_pi.0.bias, which is no plain tensor with its own content",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_no_checkpoint_of_one_task_is_told(change: str, tmp_path: Path) -> None:
    mend, match = CHANGES[change]
    path = tmp_path / "agent.pt"
    torch.save({"model": mend(OfficialNetworks.random(OBS, ACTION).newest())}, path)
    with pytest.raises(FileError, match=match) as caught:
        model_of(read_checkpoint(path))
    assert "\n" not in str(caught.value)


def test_rewards_by_regression_are_refused(tmp_path: Path) -> None:
    OfficialNetworks.random(OBS, ACTION, bins=1).save(tmp_path / "agent.pt", "newest")
    refusal(tmp_path / "agent.pt", r"num_bins=1\), but tdmpc2 here")


# ---- many tasks ----

SWINGUP, REACHER = "dmc:cartpole-swingup", "dmc:reacher-easy"


def many(path: Path, layout: str = "newest", **options: Any) -> OfficialNetworks:
    """mt30 with observations of 9 numbers and actions of 3, of which these two have 1 and 2."""
    options = {"tasks": 30, "task_dim": 8, **options}
    networks = OfficialNetworks.random(9, 3, **options)
    if networks.embedding is not None:
        networks.embedding.mul_(10)  # longer than 1, to which the official code cuts them
        assert networks.embedding.norm(dim=-1).max() > 1
    if networks.masks is not None and options["tasks"] == 30:
        for task, width in ((SWINGUP, 1), (REACHER, 2)):
            networks.masks[MT30.index(task), width:] = 0
    return networks.save(path, layout)


def spec_of(task: str) -> EnvSpec:
    observed, acted = {SWINGUP: (5, 1), REACHER: (6, 2)}[task]
    return make_spec(
        task=task,
        observation_space=gymnasium.spaces.Box(-np.inf, np.inf, (observed,), np.float32),
        action_space=gymnasium.spaces.Box(-1, 1, (acted,), np.float32),
    )


@pytest.mark.parametrize("layout", ["2024", "newest"])
@pytest.mark.parametrize("alone", [True, False])
def test_tasks_of_a_checkpoint_of_many_give_its_outputs(
    layout: str, alone: bool, tmp_path: Path
) -> None:
    """One of mt30 alone, its embedding in the biases, or two of them side by side."""
    networks = many(tmp_path / "agent.pt", layout)
    own = (spec_of(SWINGUP), spec_of(REACHER))
    spec = own[1] if alone else joint_spec("multi:both", own)
    checkpoint = read_checkpoint(tmp_path / "agent.pt")
    checkpoint.check_task(spec)
    config = build_run_config("tdmpc2", "x", TDMPC2Config, [checkpoint.decided(spec)]).agent
    model = make_agent(config, spec=spec, for_acting=True).model
    checkpoint.fill(model, (REACHER,) if alone else (SWINGUP, REACHER))
    obs, action = torch.randn(7, 6), torch.rand(7, 2) * 2 - 1
    pad = torch.nn.functional.pad
    expected = networks.outputs(pad(obs, (0, 3)), pad(action, (0, 1)), MT30.index(REACHER))
    with torch.no_grad():
        z = model.encode(obs, task=None if alone else torch.ones(7, dtype=torch.long))
        found = {
            "encode": model.state_of(z),
            "next": model.state_of(model.next(z, action)),
            "reward": model.reward(z, action),
            "q": model.q(z, action),
            "target_q": model.target_q(z, action),
            "pi": model.pi(z).mean,
        }
    expected["pi"] = expected["pi"][:, :2]
    for name, value in found.items():
        torch.testing.assert_close(value.double(), expected[name], atol=1e-5, rtol=1e-5)


def test_checkpoints_of_many_tasks_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    path = tmp_path / "agent.pt"
    many(path, tasks=12)
    refusal(path, "of 12 tasks, and does not name them: only .* sets of 30 and 80 tasks")
    many(path, "2023")
    refusal(path, "of 30 tasks in the layout of 2023")
    state = many(path).newest()
    torch.save({"model": {**state, "_action_masks": torch.ones(30, 3)}}, path)
    refusal(path, "no embedding of each")
    torch.save({"model": {**state, "_task_emb.weight": torch.ones(30, 4)}}, path)
    refusal(path, "no whole TD-MPC2 checkpoint: .* beside its other layers")


def test_a_task_that_is_not_in_the_set_or_not_as_it_was_is_refused(tmp_path: Path) -> None:
    many(tmp_path / "agent.pt")
    found = read_checkpoint(tmp_path / "agent.pt")
    with pytest.raises(
        ConfigError, match=r"There is no task dmc:dog-run.* was trained on 30 tasks"
    ):
        found.check_task(replace(spec_of(REACHER), task="dmc:dog-run"))
    other = replace(spec_of(REACHER), action_space=spec_of(SWINGUP).action_space)
    with pytest.raises(ConfigError, match=r"knows dmc:reacher-easy with .* 2 actions, but here"):
        found.check_task(other)


def test_a_checkpoint_for_another_environment_names_both(tmp_path: Path) -> None:
    OfficialNetworks.random(17, 6).save(tmp_path / "cheetah.pt", "newest")
    found = read_checkpoint(tmp_path / "cheetah.pt")
    with pytest.raises(ConfigError) as caught:
        found.check_task(make_spec())
    assert str(caught.value).startswith(
        f"{tmp_path / 'cheetah.pt'} was trained in an environment with observations (17,) and "
        "actions (6,), but stub has observations float32 (5,) and actions float32 (2,)"
    )
    fits = replace(found, observation_dim=OBS, action_dim=ACTION)
    fits.check_task(make_spec())
