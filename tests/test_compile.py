"""agent.compile: what each mode means, equal results, and what happens where compiling fails."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from forethought.agents.tdmpc2 import TDMPC2, compiling
from forethought.agents.tdmpc2.compiling import choose, compile_losses, compile_networks
from forethought.cli import main
from forethought.envs import spec_of
from forethought.maths import TwoHot
from forethought.nets import compiled as compiled_module
from forethought.nets import kernels as kernel_module
from forethought.nets.compiled import Compiled, CompiledTwoHot
from forethought.nets.kernels import native_kernels
from forethought.nets.layers import frozen
from forethought.seeding import Streams
from tests.discrete_actions import discrete_agent
from tests.tdmpc2_agents import CONFIG, OBS, fill, make_agent, make_spec

CPU = torch.device("cpu")
SHORT = replace(CONFIG, horizon=1, planner=replace(CONFIG.planner, iterations=1))
"""Few shapes, so that little is compiled."""
SMALL = replace(SHORT, model=replace(SHORT.model, num_q=2))
"""And few networks."""
PAIR = "multi:gym:tests.many_tasks:tasks/Short-v0,gym:tests.many_tasks:tasks/Long-v0"
# While torch's compiler traces, it looks where ordinary code should not, and catches what it is
# told about that; as errors the warnings would stop it.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*function.Function'> should not be instantiated"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
]


@pytest.fixture(autouse=True)
def forgotten():
    """Each test compiles afresh."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def counting() -> Any:
    """A compiler that counts its graphs; imported here, for that takes seconds."""
    from torch._dynamo.testing import CompileCounterWithBackend

    return CompileCounterWithBackend("eager")


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Our sentences; torch's compiler writes its own diary."""
    return [record.message for record in caplog.records if record.name == "forethought"]


@pytest.mark.parametrize("mode", ["off", "kernels", "full"])
@pytest.mark.parametrize("device", ["cpu", "cuda", "mps"])
def test_a_mode_that_is_named_is_the_same_everywhere(mode: str, device: str) -> None:
    assert choose(mode, torch.device(device)) == mode


def test_auto_is_what_gains_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose("auto", torch.device("cuda")) == "full"
    assert choose("auto", torch.device("mps")) == "off"
    monkeypatch.setattr(compiling, "native_kernels", lambda device: ("kernels", "built"))
    assert choose("auto", CPU) == "kernels"
    monkeypatch.setattr(compiling, "native_kernels", lambda device: (None, "no compiler"))
    assert choose("auto", CPU) == "off"


def test_auto_on_a_cpu_computes_what_kernels_compute() -> None:
    a, b = (make_agent(replace(CONFIG, compile=mode)) for mode in ("auto", "kernels"))
    assert a.notes == b.notes
    assert_same(learnt(a), learnt(b), exactly=True)


def learnt(agent: TDMPC2, updates: int = 3) -> TDMPC2:
    fill(agent)
    agent.train(updates)
    return agent


def assert_same(a: TDMPC2, b: TDMPC2, exactly: bool = False) -> None:
    """Weights, and what they would do; Adam's first steps magnify rounding."""
    ours, theirs = a.model.state_dict(), b.model.state_dict()
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        tolerance = {"rtol": 0.0, "atol": 0.0} if exactly else {"rtol": 1e-2, "atol": 1e-5}
        torch.testing.assert_close(
            weight, theirs[name], **tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
    obs, first = np.ones((2, OBS), np.float32), np.array([True, True])
    plans = [
        x.act_batch(obs, x.new_state(2, Streams(3), "x"), first, [{}] * 2, True)[0] for x in (a, b)
    ]
    np.testing.assert_allclose(*plans, atol=0.0 if exactly else 1e-3)


def whole_steps(agent: TDMPC2, backend: Any, of_networks: Any = None) -> TDMPC2:
    """The agent as CUDA would have it, on this device."""
    compile_networks(agent.model, of_networks or backend)
    compile_losses(agent.learner, backend)
    agent.model.two_hot = CompiledTwoHot(agent.model.two_hot, backend)
    return agent


def test_networks_in_graphs_have_the_same_outputs_and_gradients(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As the policy's loss asks them: through the action into the policy, Q itself fixed."""
    found = []
    for backend in (None, "aot_eager"):
        model = make_agent(SMALL).model
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
        if backend is not None:
            compile_networks(model, backend)
        z, q = torch.linspace(0, 1, 64).view(4, 16), model.q[0]
        with frozen(model.q):
            action = model.policy(z)[:, :2].tanh()
            value = q.from_latent_part(q.latent_part(z), action).logsumexp(-1).sum()
        value.backward()
        found.append((value.detach(), model.policy[0].weight.grad))
    torch.testing.assert_close(*found)
    assert found[0][1].abs().sum() > 0
    assert not told(caplog)


def test_the_networks_of_an_ensemble_share_a_graph() -> None:
    """Else every pair of Q functions that is drawn would be compiled."""
    agent, counter = make_agent(), counting()
    compile_networks(agent.model, counter)
    z, a = torch.rand(4, 16), torch.rand(4, 2)
    with torch.no_grad():
        agent.model.q(z, a, heads=[0])
        assert counter.frame_count == 1
        agent.model.q(z, a)
        assert counter.frame_count == 1
        agent.model.target_q(z, a, heads=[2, 1])
    assert counter.frame_count == 2  # their weights have no gradient, which is another graph


def test_the_model_losses_are_one_graph_whatever_heads_are_drawn(
    caplog: pytest.LogCaptureFixture,
) -> None:
    agent, counter = make_agent(SHORT), counting()
    compile_losses(agent.learner, counter)
    learnt(agent, updates=4)
    assert not told(caplog)
    assert counter.frame_count == 1


def test_compiled_losses_of_two_hot_distributions_are_equal() -> None:
    plain = TwoHot(21, -3.0, 4.0)
    fast = CompiledTwoHot(plain, "aot_eager")
    logits, target = torch.randn(6, 21), torch.linspace(-40, 40, 6)
    torch.testing.assert_close(
        fast.cross_entropy(logits, target), plain.cross_entropy(logits, target)
    )
    torch.testing.assert_close(fast.decode(logits), plain.decode(logits))


# ---- where compiling fails ----


def broken(graph: Any, inputs: Any) -> Any:
    raise RuntimeError("the assembler is on holiday\nand more")


def test_a_failing_compiler_is_one_sentence_and_the_same_numbers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    double = Compiled(lambda x: 2 * x, "doubling", broken)
    with caplog.at_level(logging.WARNING, "forethought"):
        assert [double(torch.ones(1)).item() for _ in range(3)] == [2.0] * 3
    (sentence,) = told(caplog)
    assert "torch.compile failed on doubling" in sentence
    assert "the assembler is on holiday" in sentence
    assert sentence.endswith("so it is computed uncompiled.")
    assert "\n" not in sentence


def test_an_agent_goes_on_where_compiling_fails(caplog: pytest.LogCaptureFixture) -> None:
    plain, broken_down = make_agent(SMALL), whole_steps(make_agent(SMALL), broken)
    assert_same(learnt(plain, updates=1), learnt(broken_down, updates=1), exactly=True)
    assert told(caplog)


def test_an_error_of_the_function_itself_is_raised() -> None:
    def picky(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] != 1:
            raise ValueError("one at a time")
        return x + 1

    function = Compiled(picky, "picking", "eager")
    with pytest.raises(ValueError, match="one at a time"):
        function(torch.ones(2))
    assert function(torch.ones(1)).item() == 2


def test_without_a_c_plus_plus_compiler_full_is_told_and_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiled_module.shutil, "which", lambda name: None)
    agent = make_agent(replace(CONFIG, compile="full"))
    assert agent.notes[-1] == "Nothing is compiled by torch: no C++ compiler was found."
    assert type(agent.model.two_hot) is TwoHot


def test_full_on_a_cpu_keeps_the_c_kernels_and_says_what_is_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv(compiled_module.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(compiling, "cannot_compile", lambda device: None)
    agent = make_agent(replace(CONFIG, compile="full"))
    kernels, note = native_kernels(CPU)
    assert agent.notes == (
        note,
        f"torch.compile translates the two-hot losses at their first use, into {tmp_path}.",
    )
    assert isinstance(agent.model.two_hot, CompiledTwoHot)
    used = agent.model.dynamics.first.kernels
    assert type(used) is (kernel_module.TorchKernels if kernels is None else type(kernels))


# ---- with torch's own compiler, which takes its time ----


@pytest.mark.slow
def test_whole_steps_in_graphs_learn_and_plan_as_without(caplog: pytest.LogCaptureFixture) -> None:
    """Through dynamo, and the losses through autograd's ahead-of-time graphs too: all but the last
    stage of a compiler. The networks' own such graphs have a test above, which takes less time."""
    plain, graphs = make_agent(SMALL), whole_steps(make_agent(SMALL), "aot_eager", "eager")
    assert_same(learnt(plain, updates=2), learnt(graphs, updates=2))
    assert not told(caplog)  # else it did not compile


def of_kind(kind: str) -> TDMPC2:
    """An agent whose losses have parts that those of one vector and a continuous action lack; its
    replay holds what its spaces draw."""
    if kind == "discrete":
        agent = discrete_agent(SMALL)
    elif kind == "pixels":
        picture = gymnasium.spaces.Box(0, 255, (12, 12, 3), np.uint8)
        agent = make_agent(SMALL, spec=make_spec(observation_space=picture))
    else:
        agent = make_agent(SMALL, spec=spec_of(PAIR))
    spec, tasks = agent.spec, len(agent.spec.tasks)
    for space in (spec.observation_space, spec.action_space):
        space.seed(0)
    for i in range(60):
        first, last = i % 20 == 0, i % 20 == 19
        row = {"obs": spec.observation_space.sample(), "is_first": first, "terminated": False}
        row |= {"truncated": last, **({"task": i // 20 % tasks} if tasks else {})}
        row |= {} if first else {"action": spec.action_space.sample(), "reward": 0.1 * i}
        agent.store_transition(row)
    return agent


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["discrete", "pixels", "many tasks"])
def test_whole_steps_in_graphs_learn_as_without_whatever_the_kind(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain, graphs = of_kind(kind), whole_steps(of_kind(kind), "aot_eager", "eager")
    before = {name: weight.clone() for name, weight in plain.model.state_dict().items()}
    for agent in (plain, graphs):
        agent.train(2)
    ours, theirs = plain.model.state_dict(), graphs.model.state_dict()
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], rtol=1e-2, atol=1e-5)
    assert any((ours[name] != weight).any() for name, weight in before.items())
    assert not told(caplog)  # else it did not compile


@pytest.mark.skipif(compiling.cannot_compile(CPU) is not None, reason="no compiler here")
def test_full_learns_as_off_does(caplog: pytest.LogCaptureFixture) -> None:
    assert_same(learnt(make_agent()), learnt(make_agent(replace(CONFIG, compile="full"))))
    assert not told(caplog)


@pytest.mark.slow
def test_whole_steps_compiled_by_torch_learn_as_off_does(caplog: pytest.LogCaptureFixture) -> None:
    assert_same(learnt(make_agent()), learnt(whole_steps(make_agent(), "inductor")))
    assert not told(caplog)


@pytest.mark.slow
def test_a_run_with_full_resumes_and_evaluates(tmp_path: Any) -> None:
    words = ["train", "tdmpc2", "gym:Pendulum-v1", "--preset", "debug", "--agent.compile", "full"]
    run = str(tmp_path / "run")
    assert main([*words, "--steps", "120", "--out", run]) == 0
    assert main(["resume", run, "--steps", "140"]) == 0
    assert main(["evaluate", run, "--episodes", "1"]) == 0
