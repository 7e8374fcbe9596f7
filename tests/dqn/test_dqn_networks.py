"""Networks of the DQN family: sizes, beginnings, gradients, pixels."""

from __future__ import annotations

import dataclasses
import itertools

import gymnasium
import numpy as np
import pytest
import torch

from forethought.agents.dqn.dead_units import dead_share
from forethought.agents.dqn.networks import Pixels, network_for
from forethought.config import ConfigError
from forethought.nets import wide_linear
from forethought.nets.kernels import TorchKernels, native_kernels
from forethought.nets.noisy import draw_noise
from forethought.spaces.images import image_of
from tests.dqn import formula_reference as slow
from tests.dqn.small_agents import (
    DISTRIBUTIONS,
    image_spec,
    make_agent,
    make_network,
    options,
    vector_spec,
)

NATURE = {"network": {"kind": "nature"}}
BTR = {"network": {"kind": "impala", "width": 1}}


def frames(rows=2, shape=(4, 84, 84), seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (rows, *shape), dtype=torch.uint8, generator=g)


def noise_and_tau(network, rows, seed=0):
    g = torch.Generator().manual_seed(seed)
    noise = draw_noise(network.noisy_layers, g) or None
    return noise, torch.rand(rows, 4, generator=g) if network.embedding is not None else None


@pytest.mark.parametrize("actions", [4, 6, 18])
def test_finding_21_parameter_count_of_the_nature_network(actions):
    network = make_network(image_spec(actions=actions), options(**NATURE))
    count = sum(p.numel() for p in network.parameters())
    assert count == 1_684_128 + 513 * actions == network.log_architecture()["total"]


def test_confirmed_conv_output_is_7_x_7_x_64():
    """Seed 004, confirmed correct 'Conv output'."""
    network = make_network(image_spec(), options(**NATURE))
    assert network.trunk.features == 3136
    assert network.features(frames()).shape == (2, 3136)


CASES = {
    "nature": (image_spec(), NATURE, (4, 84, 84)),
    "impala": (image_spec(), BTR, (4, 84, 84)),
    "impala plain": (
        image_spec((21, 25)),
        {"network": {"kind": "impala", "width": 1, "spectral_norm": False, "pool_cells": None}},
        (4, 21, 25),
    ),
    "minatar": (
        image_spec((10, 10, 4), dtype=np.bool_),
        {"network": {"kind": "auto"}},
        (10, 10, 4),
    ),
    "mlp": (vector_spec(), {}, (5,)),
}


@pytest.mark.parametrize(
    ("case", "distribution"),
    [*((case, "none") for case in CASES), ("mlp", "c51"), ("mlp", "qr"), ("nature", "iqn")],
)
def test_finding_21_gradient_reaches_every_parameter(case, distribution):
    spec, given, shape = CASES[case]
    config = options(
        **given,
        distribution=DISTRIBUTIONS[distribution],
        dueling=True,
        noisy={"kind": "factorised"},
    )
    network = make_network(spec, config)
    x = frames(shape=shape) if case != "mlp" else torch.randn(2, *shape)
    out = network((x > 127) if case == "minatar" else x, *noise_and_tau(network, 2))
    assert out.shape[:2] == (2, spec.action_codec.size)
    assert network.expected(out).shape == (2, spec.action_codec.size)
    (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(1))).sum().backward()
    without = [n for n, p in network.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == []


@pytest.mark.parametrize("init", ["torch7", "orthogonal", "kaiming"])
@pytest.mark.parametrize("dueling", [False, True])
def test_finding_13_output_layer_has_no_relu_gain(init, dueling):
    network = make_network(image_spec(), options(**NATURE, init=init, dueling=dueling))
    streams = [network.advantage] + ([network.value] if network.value is not None else [])
    for stream in streams:
        assert stream.output.weight.abs().max() <= 512**-0.5 + 1e-6
        assert stream.output.bias.abs().max() <= 512**-0.5 + 1e-6
    if init == "torch7":
        q = network.expected(network(frames(8), None, None))
        assert q.std(0).max() < 0.1  # over random observations


def test_init_torch7_is_uniform_within_the_inverse_root_of_the_inputs():
    network = make_network(image_spec(), options(**NATURE))
    for name, p in network.named_parameters():
        inputs = {"trunk.layers.1": 256, "trunk.layers.3": 512, "trunk.layers.5": 576}.get(
            name.rpartition(".")[0], 3136 if "hidden" in name else 512
        )
        assert 0.9 * inputs**-0.5 < p.abs().max() <= inputs**-0.5 + 1e-7 or p.numel() < 40


@pytest.mark.parametrize("init", ["orthogonal", "kaiming"])
def test_hidden_layers_keep_the_relu_gain(init):
    network = make_network(image_spec(), options(**NATURE, init=init))
    hidden = network.advantage.hidden.weight  # [512, 3136]
    row = 2.0 if init == "orthogonal" else 2 / 3136 * 3136
    assert hidden.square().sum(1).mean().item() == pytest.approx(row, rel=0.02)
    assert not network.advantage.hidden.bias.any()


def test_confirmed_dueling_takes_off_the_mean_not_the_maximum():
    """Seed 004, confirmed correct 'Dueling': the mean over actions of Q - V is 0."""
    network = make_network(vector_spec(), options(dueling=True)).double()
    x = torch.randn(4, 5, dtype=torch.float64)
    q = network.expected(network(x, None, None))
    features = network.features(x)
    value = network.value(features, None)  # [4, 1]
    advantage = network.advantage(features, None)  # [4, 3]
    torch.testing.assert_close((q - value).mean(1), torch.zeros(4).double())
    wanted = [slow.dueling(v.item(), a.tolist()) for v, a in zip(value, advantage, strict=True)]
    np.testing.assert_allclose(q.detach(), wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["c51", "qr", "iqn"])
def test_confirmed_dueling_of_distributions_takes_off_the_mean_over_actions_alone(kind):
    """Seed 004, the same line: atom by atom, and quantile by quantile."""
    config = options(dueling=True, distribution=DISTRIBUTIONS[kind])
    network = make_network(vector_spec(), config).double()
    x = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tau = torch.linspace(0.1, 0.9, 20).double().view(4, 5) if kind == "iqn" else None
    out = network(x, None, tau)  # [4, A, N]
    features = network.features(x)
    if kind == "iqn":
        features = features[:, None] * network.embedding(tau)
    value = network.value(features, None).reshape(4, -1)  # [4, N]
    advantage = network.advantage(features, None)
    if kind == "iqn":
        advantage = advantage.transpose(1, 2)
    advantage = advantage.reshape(4, 3, -1)  # [4, A, N]
    for b in range(4):
        for n in range(value.shape[1]):
            wanted = slow.dueling(value[b, n].item(), advantage[b, :, n].tolist())
            np.testing.assert_allclose(out[b, :, n].detach(), wanted, rtol=1e-9, atol=1e-12)


def conv_parameters(inputs, outputs):
    return 9 * inputs * outputs + outputs


@pytest.mark.parametrize(("width", "parameters"), [(1, 97_744), (2, 389_024)])
def test_impala_has_three_blocks_of_two_residuals_of_its_width(width, parameters):
    """Espeholt et al., 2018: 16, 32, 32 channels; a convolution and four of the residuals each."""
    network = make_network(image_spec(), options(network={"kind": "impala", "width": width}))
    sizes = [4, 16 * width, 32 * width, 32 * width]
    by_hand = sum(
        conv_parameters(a, b) + 4 * conv_parameters(b, b) for a, b in itertools.pairwise(sizes)
    )
    assert sum(p.numel() for p in network.trunk.parameters()) == by_hand == parameters
    assert network.trunk.features == 6 * 6 * 32 * width


def test_impala_is_its_layers_by_hand():
    """Convolution, pooling, twice x + conv(relu(conv(relu(x)))), three times; pooling; ReLU."""
    given = {"kind": "impala", "width": 1, "spectral_norm": False, "pool_cells": 2}
    network = make_network(image_spec((21, 25)), options(network=given)).double()
    x = frames(2, (4, 21, 25))
    weights = iter(list(network.trunk.parameters()))

    def convolved(h):
        return torch.nn.functional.conv2d(h, next(weights), next(weights), padding=1)

    h = x.double() / 255
    for _ in range(3):
        h = torch.nn.functional.max_pool2d(convolved(h), 3, 2, 1)
        for _ in range(2):
            h = h + convolved(convolved(h.relu()).relu())
    h = torch.nn.functional.adaptive_max_pool2d(h, 2).flatten(1)
    assert (h < 0).any(), "else the last ReLU would not be seen"
    torch.set_default_dtype(torch.float64)
    try:
        found = network.features(x)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(found, h.relu())


def test_noise_begins_at_sigma_over_the_root_of_the_inputs():
    """Fortunato et al., 2018, section 3.2, factorised: weights and biases alike."""
    noisy = {"kind": "factorised", "sigma": 0.4}
    network = make_network(vector_spec(), options(noisy=noisy, dueling=True))
    assert len(network.noisy_layers) == 4
    for layer in network.noisy_layers:
        for sigma in (layer.weight_sigma, layer.bias_sigma):
            assert torch.allclose(sigma, torch.tensor(0.4 / layer.inputs**0.5))


def test_confirmed_pixels_are_scaled_once_in_the_encoder():
    """Seed 004, confirmed correct 'uint8 normalization only in encoder'."""
    image = image_of(image_spec().observation_space)
    assert image is not None
    x = Pixels(image, 4)(torch.full((1, 4, 84, 84), 255, dtype=torch.uint8))
    assert x.shape == (1, 4, 84, 84) and x.min() == x.max() == 1.0
    assert Pixels(image, 4)(torch.zeros(1, 4, 84, 84, dtype=torch.uint8)).abs().max() == 0


@pytest.mark.parametrize("mode", ["off", "auto"])
def test_confirmed_pixels_are_scaled_once_on_their_way_through_convolutions_too(mode):
    """Seed 004, the same line: what the trunk computes in one go is its layers one by one."""
    trunk = make_agent(options(**NATURE, compile=mode), spec=image_spec()).online.trunk
    x = frames(3, (4, 84, 84))
    assert trunk.convs
    with torch.no_grad():
        torch.testing.assert_close(trunk(x), trunk.layers(x), rtol=1e-4, atol=1e-6)


def test_the_wide_layer_of_every_stream_is_computed_in_c(monkeypatch):
    """At the batch that C takes; values and gradients are those without it."""
    native = native_kernels(torch.device("cpu"))[0]
    if native is None:
        pytest.skip("no C compiler here")
    calls, plain = [], wide_linear.wide_linear
    monkeypatch.setattr(wide_linear, "wide_linear", lambda *given: calls.append(1) or plain(*given))
    agents = {
        mode: make_agent(options(**NATURE, dueling=True, compile=mode), spec=image_spec())
        for mode in ("auto", "off")
    }
    layer = agents["auto"].online.advantage.hidden
    (rows,) = [n for n in (16, 32) if native.library.wide_fits(*layer.weight.shape, n)]
    x, found = frames(rows, (4, 84, 84)), {}
    for mode, agent in agents.items():
        q = agent.online(x, None, None)
        q.square().mean().backward()
        gradients = [p.grad for p in agent.online.parameters()]
        found[mode] = [q.detach(), *gradients]
        assert len(calls) == 2  # the value's and the advantages' hidden layer; none with off
    for ours, wanted in zip(found["auto"], found["off"], strict=True):
        assert float((ours - wanted).norm()) <= 1e-4 * float(wanted.norm())


@pytest.mark.parametrize("shape", [(10, 10, 3), (3, 10, 10)])
def test_scaling_never_touches_the_batch(shape):
    """A batch of floats may have the network's type and order already; target and online network
    both look at it, and the second must not see what the first has scaled."""
    spec = image_spec(shape, dtype=np.float32)
    network = make_network(spec, options(network={"kind": "minatar"}))
    x = 255 * torch.rand(2, *shape, generator=torch.Generator().manual_seed(0))
    before = x.clone()
    once = network(x, None, None)
    assert torch.equal(x, before)
    assert torch.equal(network(x, None, None), once)


@pytest.mark.parametrize(("shape", "stack"), [((84, 84), 4), ((3, 84, 84), 1)])
def test_compiled_or_not_the_values_are_the_same(shape, stack):
    """agent.compile: images bit for bit, what follows up to rounding; both networks are as
    asked."""
    x = frames(3, (stack, *shape) if stack > 1 else shape)
    native = type(native_kernels(torch.device("cpu"))[0] or TorchKernels())
    images, values = [], []
    for mode, kind in {"kernels": native, "auto": native, "off": TorchKernels}.items():
        agent = make_agent(options(**NATURE, frames=stack, compile=mode), spec=image_spec(shape))
        for network in (agent.online, agent.learner.target):
            assert type(network.trunk.layers[0].kernels) is kind
        # Without a compiler auto says nothing.
        assert (len(agent.notes) > 1) == (mode == "kernels" or kind is not TorchKernels)
        with torch.no_grad():
            images.append(agent.online.trunk.layers[0](x))
            values.append(agent.online(x, None, None))
    for other in (0, 1):
        assert torch.equal(images[other], images[2])
        torch.testing.assert_close(values[other], values[2], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "space",
    [
        gymnasium.spaces.Box(-1, 1, (5,)),
        gymnasium.spaces.Box(16, 255, (84, 84), np.uint8),
        gymnasium.spaces.Box(0, 1, (10, 10, 4), np.bool_),
        gymnasium.spaces.Box(0, 1, (3, 10, 10), np.float32),
    ],
    ids=["vector", "above 0", "nothing moves", "floats"],
)
def test_kernels_are_refused_where_they_would_not_be_used(space):
    spec = dataclasses.replace(image_spec(), observation_space=space)
    auto = {"network": {"kind": "auto"}}
    agent = make_agent(options(**auto), spec=spec)  # auto does not mind
    assert len(agent.notes) == 1
    for layer in agent.online.trunk.layers:
        assert isinstance(getattr(layer, "kernels", None), TorchKernels | None)
    with pytest.raises(ConfigError, match=r"agent.compile is kernels, which scale stacks"):
        make_agent(options(**auto, compile="kernels"), spec=spec)


def test_channels_of_a_grid_stand_first_and_keep_their_cells():
    image = image_of(image_spec((10, 10, 4), dtype=np.bool_).observation_space)
    assert image is not None
    x = torch.zeros(1, 10, 10, 4, dtype=torch.bool)
    x[0, 2, 7, 3] = True
    seen = Pixels(image, 1)(x)
    assert seen.shape == (1, 4, 10, 10) and seen.sum() == 1 and seen[0, 3, 2, 7] == 1


@pytest.mark.parametrize("distribution", ["none", "iqn"])
def test_dead_units_are_those_that_no_observation_moves(distribution):
    """Of 16 channels 4 are dead, of 128 hidden units 32, and of IQN's embedding none."""
    config = options(network={"kind": "minatar"}, distribution=DISTRIBUTIONS[distribution])
    network = make_network(image_spec((10, 10, 4), dtype=np.bool_), config)
    x = torch.rand(64, 10, 10, 4, generator=torch.Generator().manual_seed(0)) < 0.5
    tau = torch.linspace(0, 1, 64 * 6).reshape(64, 6) if network.embedding is not None else None
    layers = [(network.trunk.layers[1], 4), (network.advantage.hidden, 32)]
    layers += [] if network.embedding is None else [(network.embedding.linear, 0)]
    with torch.no_grad():
        for layer, dead in layers:  # the weights hardly count beside the biases
            layer.weight.mul_(1e-3)
            layer.bias.fill_(9.0)
            layer.bias[:dead] = -99.0
    embedded = 16 * 8 * 8 if network.embedding is not None else 0
    wanted = 36 / (16 + 128 + embedded)
    assert dead_share(network, x, tau) == pytest.approx(wanted, abs=1e-6)
    assert not network.advantage.hidden._forward_hooks


def test_dead_units_of_convolutions_that_c_computes_are_seen_too():
    """Of 32, 64 and 64 channels 8 each are dead, of 512 hidden units 36."""
    agent = make_agent(options(**NATURE), spec=image_spec())
    network = agent.online
    convs = network.trunk.convs
    with torch.no_grad():
        for layer, dead in [*((conv, 8) for conv in convs), (network.advantage.hidden, 36)]:
            layer.weight.mul_(1e-4)
            layer.bias.fill_(9.0)
            layer.bias[:dead] = -99.0
    share = dead_share(network, frames(8, (4, 84, 84)), None)
    assert share == pytest.approx(60 / (32 + 64 + 64 + 512), abs=1e-6)


def test_iqn_embedding_agrees_with_equation_4():
    network = make_network(vector_spec(), options(distribution=DISTRIBUTIONS["iqn"])).double()
    tau = torch.rand(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ours = network.embedding(tau).detach()
    linear = network.embedding.linear
    for b in range(2):
        for n in range(3):
            wanted = slow.cosine_embedding(
                tau[b, n].item(), linear.weight.tolist(), linear.bias.tolist()
            )
            np.testing.assert_allclose(ours[b, n], wanted, rtol=1e-9, atol=1e-12)


def test_iqn_features_are_multiplied_before_the_hidden_layer():
    network = make_network(vector_spec(), options(distribution=DISTRIBUTIONS["iqn"]))
    x, tau = torch.randn(2, 5), torch.rand(2, 4)
    features = network.features(x)
    by_hand = network.advantage(features[:, None] * network.embedding(tau), None)  # [2, 4, 3]
    torch.testing.assert_close(network(x, None, tau), by_hand.transpose(1, 2))


def test_each_environment_has_noise_of_its_own_in_acting():
    network = make_network(vector_spec(), options(noisy={"kind": "factorised", "sigma": 2.0}))
    x = torch.randn(1, 5).expand(3, 5)
    q = network(x, draw_noise(network.noisy_layers, torch.Generator().manual_seed(0), 3), None)
    gaps = [(q[i] - q[j]).abs().max() for i, j in ((0, 1), (0, 2), (1, 2))]
    assert min(gaps) > 1e-2  # far above the rounding of rows in one matrix product
    same = network(x, draw_noise(network.noisy_layers, torch.Generator().manual_seed(0)), None)
    torch.testing.assert_close(same[0], same[1])


@pytest.mark.parametrize(
    ("spec", "given", "words"),
    [
        (vector_spec(), NATURE, "agent.network is nature, but stub shows a vector: use mlp"),
        (image_spec(), {"network": {"kind": "mlp"}}, "shows images: use nature, impala or minatar"),
        (image_spec((20, 20)), NATURE, "leave nothing of the images of stub, 20 x 20 pixels"),
        (vector_spec(), {"frames": 4}, "agent.frames is 4, but must be left out"),
    ],
)
def test_a_network_that_does_not_fit_the_task_is_refused(spec, given, words):
    with pytest.raises(ConfigError, match=words):
        network_for(spec, options(**given))


def test_auto_takes_the_network_that_fits():
    auto = options(network={"kind": "auto"})
    kinds = [network_for(s, auto)[0].kind for s, *_ in CASES.values()]
    assert kinds == ["nature", "nature", "minatar", "minatar", "mlp"]
    assert [network_for(s, auto)[2] for s, *_ in CASES.values()] == [4, 4, 4, 1, 1]
