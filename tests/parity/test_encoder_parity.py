"""Images, dicts and entities against the slow encoders: alone, and in whole updates and plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from forethought.agents.tdmpc2.config import ImageConfig, TDMPC2Config
from forethought.agents.tdmpc2.model import WorldModel
from forethought.agents.tdmpc2.noise import shifts
from forethought.agents.tdmpc2.observations import Observations, observations_of
from forethought.agents.tdmpc2.update import TensorBatch
from forethought.nets.images import FrameLayout, prepared
from forethought.nets.kernels import native_kernels
from forethought.nets.layers import use_kernels
from forethought.spaces.spec import EnvSpec

from . import reference_encoders as slow_encoders
from . import reference_tdmpc2 as reference
from .reference_encoders import Camera, Choice, Plain, Rows
from .test_tdmpc2_parity import (
    ACTION,
    BATCH,
    METRIC_PAIRS,
    TINY,
    Case,
    assert_close,
    make_learner,
    make_update_noise,
    settings_of,
)

IMAGES = ImageConfig(frames=2, shift_pixels=2, channels=4, kernels=(5, 3), strides=(2, 1))
STRIDES = (2, 1)
SPACE = spaces.Dict(
    {
        "camera": spaces.Box(0, 255, (12, 12, 3), np.uint8),
        "craft": spaces.Box(-np.inf, np.inf, (4, 3), np.float32),
        "craft_mask": spaces.MultiBinary(4),
        "depth": spaces.Box(-1.0, 3.0, (2, 12, 12), np.float32),
        "inside": spaces.Dict(
            {"gear": spaces.Discrete(4, start=1), "lamps": spaces.MultiBinary((2, 2))}
        ),
    }
)
KINDS = {
    "camera": Camera(0, 255, 2, STRIDES, frames=2),
    "craft": Rows("craft_mask"),
    "depth": Camera(-1, 3, 2, STRIDES, first=True, frames=2),
    "inside/gear": Choice(1, 4),
    "inside/lamps": Plain(),
}
LONE = spaces.Box(0, 255, (12, 12, 3), np.uint8)
LONE_KINDS = {"": Camera(0, 255, 2, STRIDES, frames=2)}
BOTH = pytest.mark.parametrize(
    ("space", "kinds"), [(SPACE, KINDS), (LONE, LONE_KINDS)], ids=["dict", "image"]
)


def observations(space: gymnasium.Space[Any], images: ImageConfig = IMAGES) -> Observations:
    action = spaces.Box(-1, 1, (ACTION,), np.float32)
    return observations_of(EnvSpec("stub", space, action, 10, 1, False), images)


def make_case(space: gymnasium.Space[Any], dtype: torch.dtype) -> Case:
    config = TDMPC2Config(model=TINY, image=IMAGES)
    generator = torch.Generator().manual_seed(5)
    model = WorldModel(observations(space), ACTION, config, False, generator).to(dtype)
    case = Case(model, config, generator)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * case.normal(*parameter.shape)
    return case


def leaves(case: Case, space: gymnasium.Space[Any], *lead: int) -> dict[str, Tensor]:
    """Random observations by path; entities and their masks so that some have no row at all."""
    g = case.generator
    camera = torch.randint(0, 256, (*lead, 2, 12, 12, 3), generator=g, dtype=torch.uint8)
    if space is LONE:
        return {"": camera}
    mask = torch.rand(*lead, 4, generator=g) > 0.6
    return {
        "camera": camera,
        "craft": torch.where(mask[..., None], case.normal(*lead, 4, 3), torch.nan),
        "craft_mask": mask.to(torch.int8),
        "depth": torch.rand(*lead, 2, 2, 12, 12, generator=g) * 4 - 1,
        "inside/gear": torch.randint(1, 5, lead, generator=g),
        "inside/lamps": torch.randint(0, 2, (*lead, 2, 2), generator=g, dtype=torch.int8),
    }


def offsets(case: Case, space: gymnasium.Space[Any], *lead: int) -> Tensor:
    found = shifts(case.generator, lead, observations(space).pads)
    assert found is not None
    return found


@BOTH
@pytest.mark.parametrize("moved", [True, False])
def test_encoders_in_float64(
    space: gymnasium.Space[Any], kinds: dict[str, Any], moved: bool
) -> None:
    case = make_case(space, torch.float64)
    obs = leaves(case, space, 2, 3)
    shift = offsets(case, space, 2, 3) if moved else None
    fast = case.model.encode(obs, shift)  # [2, 3, Z] in one call
    settings = settings_of(case.config, False)
    for t in range(2):
        row = {path: leaf[t] for path, leaf in obs.items()}
        given = None if shift is None else shift[t]
        slow = slow_encoders.encode(case.params, row, given, kinds, settings)
        torch.testing.assert_close(fast[t], slow, rtol=1e-9, atol=1e-9)


@BOTH
def test_whole_update_in_float64(
    space: gymnasium.Space[Any], kinds: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adam's moments included, and the targets' images, which are moved too."""

    def encode(params: Any, obs: Any, settings: Any) -> Tensor:
        return slow_encoders.encode(params, *obs, kinds, settings)

    monkeypatch.setattr(reference, "encode", encode)
    case = make_case(space, torch.float64)
    learner, horizon = make_learner(case), case.config.horizon
    params, scale = case.params, torch.ones((), dtype=torch.float64)
    moments, settings = reference.new_optimiser_state(params), settings_of(case.config, False)
    for _ in range(2):
        noise, slow_noise = make_update_noise(case)
        shift = offsets(case, space, horizon + 1, BATCH)
        obs = leaves(case, space, horizon + 1, BATCH)
        batch = TensorBatch(
            obs=obs,
            action=torch.tanh(case.normal(horizon, BATCH, ACTION)),
            reward=3 * case.normal(horizon, BATCH),
            terminated=torch.zeros(horizon, BATCH, dtype=torch.float64),
        )
        metrics = learner.update(batch, replace(noise, shift=shift))
        rows = [
            ({path: leaf[t] for path, leaf in obs.items()}, shift[t]) for t in range(horizon + 1)
        ]
        slow_batch: dict[str, Any] = {"obs": rows, "action": batch.action}
        slow_batch |= {"reward": batch.reward, "terminated": batch.terminated}
        params, moments, scale, slow = reference.update(
            params, moments, scale, slow_batch, slow_noise, settings
        )
        for fast_name, slow_name in METRIC_PAIRS.items():
            if fast_name in metrics:
                fast = torch.tensor(metrics[fast_name], dtype=torch.float64)
                assert_close(fast_name, fast, slow[slow_name].detach(), torch.float64)
    for name, value in case.model.state_dict().items():
        assert_close(name, value, params[name], torch.float64)


def test_the_c_kernel_encodes_the_same() -> None:
    kernels, why = native_kernels(torch.device("cpu"))
    if kernels is None:
        pytest.skip(why)
    case = make_case(SPACE, torch.float32)
    obs, shift = leaves(case, SPACE, 2, 3), offsets(case, SPACE, 2, 3)
    plain = case.model.encode(obs, shift)
    use_kernels(case.model, kernels)
    torch.testing.assert_close(case.model.encode(obs, shift), plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("pad", [1, 3])
def test_the_random_shift_is_what_drq_samples(pad: int) -> None:
    """DrQ-v2 reads a padded image at places between -1 and 1, from its first pixel centre on."""
    images = torch.randint(0, 256, (5, 1, 9, 9, 3), dtype=torch.uint8)
    offset = torch.randint(0, 2 * pad + 1, (5, 2))
    offset[0], offset[1] = torch.tensor([0, 2 * pad]), torch.tensor([2 * pad, 0])
    fast = prepared(images, FrameLayout(9, 9, 3, True), offset, pad, torch.float64)
    full = 9 + 2 * pad
    x = torch.nn.functional.pad(
        images[:, 0].permute(0, 3, 1, 2).double() / 255 - 0.5, [pad] * 4, mode="replicate"
    )
    centres = (2 * torch.arange(9, dtype=torch.float64) + 1) / full - 1
    rows, columns = (
        centres + 2 * offset[:, i, None].double() / full for i in (0, 1)
    )  # [5, 9] both
    grid = torch.stack(
        [columns[:, None, :].expand(-1, 9, -1), rows[:, :, None].expand(-1, -1, 9)], dim=-1
    )
    slow = torch.nn.functional.grid_sample(x, grid, align_corners=False)
    torch.testing.assert_close(fast, slow, rtol=0, atol=1e-9)
