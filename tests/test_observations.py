"""What TD-MPC2 sees: images, dicts, entities; stacks, random shifts, and a vector as ever."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from forethought.agents.tdmpc2.config import ImageConfig, TDMPC2Config
from forethought.agents.tdmpc2.noise import draw_update_noise, shifts
from forethought.agents.tdmpc2.observations import Numbers, OneHot, Picture, observations_of
from forethought.config import ConfigError
from forethought.envs import make_env, make_single
from forethought.nets import conv
from forethought.nets.conv import OFFICIAL, ConvNet, layers_for, sides
from forethought.nets.images import FrameLayout
from forethought.nets.layers import MLP
from forethought.seeding import Streams
from forethought.spaces import nested
from forethought.spaces.images import image_of
from tests.shown_envs import SIDE
from tests.tdmpc2_agents import ACTION, CONFIG, OBS, TINY, make_agent, make_batch, make_spec

BALL, ROOM = "gym:tests.shown_envs:shown/Ball-v0", "gym:tests.shown_envs:shown/Room-v0"
SEEN = replace(CONFIG, image=ImageConfig(frames=3, shift_pixels=2, channels=4))


def agent_for(task: str, config: TDMPC2Config = SEEN, **options: Any) -> Any:
    return make_agent(config, spec=make_single(task).spec_for_agent, **options)


def play(agent: Any, task: str, episodes: int = 3) -> list[Any]:
    """Random play into replay; the observations of the last episode."""
    env, rng = make_env(task), np.random.default_rng(0)
    for number in range(episodes):
        obs, _ = env.reset_one(0, number)
        seen, end = [obs], False
        agent.store_transition(dict(obs=obs, terminated=False, truncated=False, is_first=True))
        while not end:
            action = rng.uniform(-1, 1, 1).astype(np.float32)
            obs, reward, _, end, _ = env.step_one(0, action)
            ends = {"terminated": False, "truncated": end, "is_first": False}
            agent.store_transition(dict(obs=obs, action=action, reward=reward, **ends))
            seen.append(obs)
    env.close()
    return seen


# ---- which observations are images ----


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((64, 48, 3), np.uint8, (64, 48, 3, True, True)),
        ((3, 64, 48), np.uint8, (64, 48, 3, False, True)),
        ((4, 84, 84), np.uint8, (84, 84, 4, False, False)),  # somebody else's stack
        ((10, 10, 10), np.bool_, (10, 10, 10, True, False)),  # MinAtar's seaquest
        ((9, 7), np.uint8, (9, 7, 1, True, True)),
    ],
)
def test_axes_of_images(shape: Any, dtype: Any, expected: Any) -> None:
    image = image_of(spaces.Box(0, 1 if dtype is np.bool_ else 255, shape, dtype))
    assert image is not None
    assert (image.height, image.width, image.channels) == expected[:3]
    assert (image.channels_last, image.picture) == expected[3:]


def test_vectors_and_tables_of_floats_are_no_images() -> None:
    assert image_of(spaces.Box(0, 255, (7,), np.uint8)) is None
    assert image_of(spaces.Box(-1, 1, (4, 3), np.float32)) is None


@pytest.mark.parametrize(
    ("space", "sentence"),
    [
        (spaces.Box(0, 255, (4, 8, 8, 3), np.uint8), "has 4 axes"),
        (spaces.Box(-np.inf, np.inf, (8, 8, 3), np.float32), "declare finite bounds"),
        (spaces.Discrete(100_000), "have 100,000 values, but tdmpc2 takes 65,536 at most"),
    ],
    ids=["axes", "bounds", "values"],
)
def test_what_cannot_be_encoded_is_refused(space: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make_agent(spec=make_spec(observation_space=space))


@pytest.mark.parametrize(
    ("image", "sentence"),
    [
        ({"frames": 4}, "agent.image.frames is 4, but must be left out: .* stub have no image"),
        ({"channels": 16}, "agent.image.channels is 16, but must be left out"),
    ],
)
def test_options_of_images_have_no_meaning_for_a_vector(image: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make_agent(replace(CONFIG, image=ImageConfig(**image)))


def test_convolutions_that_leave_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="leave nothing of an image of 12 x 12 pixels"):
        agent_for(BALL, replace(CONFIG, image=ImageConfig(kernels=(8, 8), strides=(2, 1))))
    with pytest.raises(ConfigError, match=r"strides is \[2\], but must be as many as"):
        ImageConfig(kernels=(3, 3), strides=(2,))


def test_kinds_and_defaults_by_key() -> None:
    found = observations_of(make_single(ROOM).spec_for_agent, ImageConfig())
    kinds = {key.path: type(key).__name__ for key in found.keys}
    assert kinds == {
        "camera": "Picture",
        "craft": "Entities",
        "inside/gear": "OneHot",
        "inside/lamps": "Numbers",
        "place": "Numbers",
    }
    assert found.stack == {"obs/camera": 3}
    assert found.pads == ()  # a small image is not moved
    large = spaces.Box(0, 255, (64, 64, 3), np.uint8)
    (key,) = observations_of(make_spec(observation_space=large), ImageConfig()).keys
    assert isinstance(key, Picture)
    assert (key.frames, key.pad, key.layers) == (3, 3, OFFICIAL)
    choices = spaces.MultiDiscrete([2, 5], start=[0, -1])
    (key,) = observations_of(make_spec(observation_space=choices), ImageConfig()).keys
    assert key == OneHot("", (2,), (0, -1), (2, 5))
    table = spaces.Box(-1, 1, (4, 3), np.float32)
    (key,) = observations_of(make_spec(observation_space=table), ImageConfig()).keys
    assert key == Numbers("", (4, 3))


# ---- networks ----


@pytest.mark.parametrize(
    ("side", "behind"),
    [
        (64, [29, 13, 6, 4]),  # the official layers: 32 x 4 x 4 features
        (84, [39, 18, 8, 6]),
        (32, [15, 13, 11, 9]),
        (16, [7, 5]),
        (10, [8, 6, 4]),  # MinAtar: no stride at all
        (4, []),
    ],
)
def test_convolutions_fit_the_image(side: int, behind: list[int]) -> None:
    found = sides(side, side + 2, layers_for(side, side + 2))
    assert [height for height, _ in found] == [side, *behind]


@pytest.mark.parametrize("size", [1, 5, 19, 48, 317])
def test_every_model_size_takes_pixels(size: Any) -> None:
    with torch.device("meta"):
        config = TDMPC2Config(model=replace(TDMPC2Config().model, size=size))
        from forethought.agents.tdmpc2.encoders import make_encoder

        pixels = spaces.Box(0, 255, (64, 64, 3), np.uint8)
        found = observations_of(make_spec(observation_space=pixels), config.image)
        encoder = make_encoder(found, config)
    latent = config.model.resolved.latent_dim
    assert encoder.join.weight.shape == (latent, 32 * 4 * 4)
    convolutions = 32 * 9 * 49 + 32 * 32 * (25 + 9 + 9) + 4 * 32
    expected = convolutions + 512 * latent + 3 * latent
    assert sum(p.numel() for p in encoder.parameters()) == expected


def test_convolutions_start_as_pytorch_starts_them_but_from_the_seed() -> None:
    """U(-b, b) with b = 1 / sqrt(inputs): standard deviation b / sqrt(3)."""
    pixels = make_spec(observation_space=spaces.Box(0, 255, (64, 64, 3), np.uint8))
    one, same, other = (make_agent(spec=pixels, seed=seed).model.encoder for seed in (1, 1, 2))
    weight, bound = one.trunks[0].conv[2].weight, (32 * 25) ** -0.5
    assert weight.abs().max().item() <= bound
    assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.02)
    for a, b, c in zip(one.parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.ndim < 2 or not torch.equal(a, c)


def test_chunks_do_not_change_what_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    net = ConvNet(FrameLayout(12, 12, 3, True), 2, 4, ((5, 2),), pad=2)
    frames = torch.randint(0, 256, (13, 2, 12, 12, 3), dtype=torch.uint8)
    offset = torch.randint(0, 5, (13, 2))
    whole = net(frames, offset, torch.float32).detach()
    monkeypatch.setattr(conv, "CHUNK", 4)
    with torch.no_grad():
        torch.testing.assert_close(net(frames, offset, torch.float32), whole)


def test_what_stands_in_absent_rows_does_not_matter() -> None:
    agent = agent_for(ROOM)
    env = make_single(ROOM)
    env.reset(seed=1)
    obs = env.step(np.zeros(1, np.float32))[0]  # one of three rows is present
    changed = {**obs, "craft": np.where([[True], [False], [False]], obs["craft"], np.nan)}
    moved = {**obs, "craft": obs["craft"] + np.array([1, 0], np.float32)}
    z = [agent.model.encode(agent.observations.tensors(single(x), agent.device)) for x in
         (obs, changed, moved)]  # fmt: skip
    assert torch.equal(z[0], z[1])
    assert not torch.allclose(z[0], z[2])


def test_encode_takes_observations_as_a_task_shows_them() -> None:
    """An image as it is, a nested dict as it is; leaves by path are the same."""
    ball = agent_for(BALL).model
    image = torch.randint(0, 255, (2, 3, 12, 12, 3), dtype=torch.uint8)
    assert torch.equal(ball.encode(image), ball.encode({"": image}))
    room, env = agent_for(ROOM), make_single(ROOM)
    obs = nested.tree_map(torch.as_tensor, single(env.reset(seed=1)[0]))
    assert torch.equal(room.model.encode(obs), room.model.encode(nested.flatten(obs)))


def single(obs: Any) -> Any:
    """A batch of one, its camera as a stack of equal frames."""
    batch = nested.stack([obs])
    return {**batch, "camera": np.stack([batch["camera"]] * 3, axis=1)}


# ---- the random shift ----


def test_all_shifts_are_equally_likely_and_images_have_their_own() -> None:
    drawn = shifts(torch.Generator().manual_seed(0), (70, 70), (3, 1))
    assert drawn is not None
    assert drawn.shape == (70, 70, 2, 2)
    for image, choices in ((0, 7), (1, 3)):
        for axis in (0, 1):
            share = torch.bincount(drawn[:, :, image, axis].flatten()) / 4900
            torch.testing.assert_close(
                share, torch.full((choices,), 1 / choices), atol=0.02, rtol=0
            )
    assert not torch.equal(drawn[..., 1, 0], drawn[..., 1, 1])


def test_images_are_moved_in_updates_and_never_in_acting() -> None:
    agent = agent_for(BALL)
    play(agent, BALL)
    batch, noise = agent.replay.sample(8), agent.draw_noise()
    assert noise.shift is not None
    still = replace(noise, shift=torch.full_like(noise.shift, 2))  # the middle: not moved
    latents: list[Any] = []
    encode = agent.model.encode
    agent.model.encode = lambda obs, shift=None, task=None: (
        latents.append((encode(obs, shift), shift)) or (latents[-1][0])
    )
    agent.update(batch, noise)
    (after, rows), (first, row) = latents[:2]
    assert torch.equal(rows, noise.shift[1:]) and torch.equal(row, noise.shift[0])
    assert after.shape == (3, 8, 16) and first.shape == (8, 16)
    latents.clear()
    agent.act(nested.index(batch.obs, (0, 0, -1)).numpy())
    assert [shift for _, shift in latents] == [None]
    leaves = agent.observations.of_batch(nested.index(batch.obs, 0))
    torch.testing.assert_close(encode(leaves, still.shift[0]), encode(leaves))
    assert not torch.allclose(encode(leaves, noise.shift[0]), encode(leaves))


# ---- stacks ----


def test_the_agent_acts_on_the_stacks_that_it_learns_from() -> None:
    """Also across a save of the acting state, and when somebody else decides the first steps."""
    agent = agent_for(BALL)
    frames = play(agent, BALL)
    seen: list[Any] = []
    encode = agent.model.encode
    agent.model.encode = lambda obs, task=None: seen.append(obs[""][0]) or encode(obs)
    state = agent.new_state(1, Streams(1), "planner")
    for i, frame in enumerate(frames):
        if i < 5:
            assert agent.observe(frame[None], state, np.array([i == 0]))
            continue
        if i == 7:
            saved = agent.acting_state(state)
            state = agent.new_state(1, Streams(1), "planner")
            state = agent.restore_acting_state(state, *saved)
        _, state = agent.act_batch(frame[None], state, np.array([False]), [{}], True)
    agent.model.encode = encode
    learned = set()
    for _ in range(40):
        obs = agent.replay.sample(8).obs  # [4, 8, 3, 12, 12, 3]
        learned |= {stack.numpy().tobytes() for stack in obs.flatten(0, 1)}
    assert len(seen) == len(frames) - 5
    assert {stack.numpy().tobytes() for stack in seen} <= learned
    assert frames[6].tobytes() == seen[1].numpy()[-1].tobytes()


def test_before_the_first_frame_lies_that_frame() -> None:
    agent = agent_for(BALL)
    seen: list[Any] = []
    encode = agent.model.encode
    agent.model.encode = lambda obs, task=None: seen.append(obs[""][0]) or encode(obs)
    frame = play(agent, BALL, 1)[0]
    agent.act(frame)
    assert [one.tobytes() for one in seen[0].numpy()] == [frame.tobytes()] * 3


def test_frames_are_stored_once() -> None:
    agent = agent_for(BALL)
    assert agent.replay.row_spec.row_bytes < SIDE * SIDE * 3 + 20


# ---- learning ----


@pytest.mark.parametrize("task", [BALL, ROOM])
def test_every_part_learns(task: str) -> None:
    agent = agent_for(task)
    play(agent, task)
    agent.train(1)  # moves the zeroed heads off zero; only then does gradient reach the encoder
    before = {k: v.clone() for k, v in agent.model.encoder.state_dict().items()}
    metrics = agent.train(2)
    assert metrics["nonfinite"] == 0
    for name, new in agent.model.encoder.state_dict().items():
        assert not torch.equal(new, before[name]), f"{name} did not move"


def test_grids_of_minatar_are_encoded() -> None:
    grid = spaces.Box(0, 1, (10, 10, 4), np.bool_)
    agent = make_agent(spec=make_spec(observation_space=grid))
    assert (agent.observations.stack, agent.observations.pads) == ({}, ())
    assert agent.act(np.zeros((10, 10, 4), np.bool_)).shape == (ACTION,)
    batch = replace(make_batch(agent), obs=torch.rand(4, 8, 10, 10, 4) > 0.5)
    assert agent.update(batch, agent.draw_noise())["nonfinite"] == 0


# ---- a vector, as ever ----


def test_a_vector_keeps_its_network_weights_and_random_numbers() -> None:
    agent = make_agent()
    assert isinstance(agent.model.encoder, MLP)
    g = Streams(1).torch("init")
    mlp = MLP(OBS, [16], 16, "simnorm")
    for layer in mlp:  # the encoder's weights are the first that are drawn
        torch.nn.init.trunc_normal_(layer.weight, std=0.02, generator=g)
    names = ["0.weight", "0.bias", "0.norm.weight", "0.norm.bias"]
    names += [name.replace("0", "1", 1) for name in names]
    assert list(agent.model.encoder.state_dict()) == names
    for name in ("0.weight", "1.weight"):
        assert torch.equal(agent.model.encoder.state_dict()[name], mlp.state_dict()[name])
    noise, stream = agent.draw_noise(), Streams(1).torch("update")
    options = {"horizon": 3, "batch": 8, "action_dim": ACTION, "num_q": TINY.num_q, "units": 24}
    assert noise.shift is None
    assert torch.equal(noise.policy, draw_update_noise(stream, dropout=0.01, **options).policy)
    assert torch.equal(agent.update_stream.get_state(), stream.get_state())
    assert not agent.observe(np.zeros((1, OBS)), agent.new_state(1, Streams(1), "x"), np.ones(1))
