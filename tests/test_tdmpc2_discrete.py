"""TD-MPC2 with discrete actions: acting, learning, saving, and what it refuses."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

import forethought
from forethought import files
from forethought.agents.tdmpc2 import TDMPC2Config
from forethought.agents.tdmpc2.categorical import (
    LIKELIEST,
    MOST_LISTED,
    CategoricalActions,
    score_mean,
    table_values,
)
from forethought.agents.tdmpc2.config import LearningRates, PlannerConfig
from forethought.agents.tdmpc2.gammas import MultiGammaConfig
from forethought.config import ConfigError, ForethoughtError
from forethought.replay import Batch
from forethought.seeding import Streams
from forethought.spaces import Column, nested
from forethought.tracking import RunDirectory
from tests.discrete_actions import (
    ACTIONS,
    SPACE,
    CommandEnv,
    discrete_agent,
    discrete_batch,
    random_masks,
)
from tests.tdmpc2_agents import CONFIG, OBS, make_agent, make_spec

POLICY_ONLY = replace(CONFIG, mpc=False, planner=PlannerConfig())
LARGE = spaces.MultiDiscrete([30, 20])
UPDATES = 120


def stir(agent: Any, size: float = 0.3) -> None:
    """Weights that tell actions apart: fresh heads are zero."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in agent.model.parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator)


# ---- acting ----


@pytest.mark.parametrize(
    "space", [spaces.Discrete(4, start=2), spaces.MultiDiscrete([2, 3]), SPACE]
)
@pytest.mark.parametrize("config", [CONFIG, POLICY_ONLY], ids=["planned", "policy"])
@pytest.mark.parametrize("explore", [True, False])
def test_actions_are_those_of_the_space(space: Any, config: TDMPC2Config, explore: bool) -> None:
    agent = discrete_agent(config, space)
    obs = np.random.default_rng(0).normal(size=(3, OBS)).astype(np.float32)
    state = agent.new_state(3, Streams(7), "planner")
    for step in range(3):
        actions, state = agent.act_batch(obs, state, np.full(3, step == 0), [{}] * 3, explore)
        for i in range(3):
            action = nested.index(actions, i)
            assert space.contains(nested.tree_map(np.int64, action) if space is SPACE else action)


@pytest.mark.parametrize("config", [CONFIG, POLICY_ONLY], ids=["planned", "policy"])
@pytest.mark.parametrize("explore", [True, False])
def test_only_legal_actions_are_taken(config: TDMPC2Config, explore: bool) -> None:
    agent = discrete_agent(config, masked=True)
    stir(agent)
    rng = np.random.default_rng(0)
    state, taken = agent.new_state(2, Streams(7), "planner"), set()
    for seed in range(20):
        masks = random_masks(2, seed=seed).numpy()
        info = [{"action_mask": mask} for mask in masks]
        obs = rng.normal(size=(2, OBS)).astype(np.float32)
        actions, state = agent.act_batch(obs, state, np.zeros(2, bool), info, explore)
        rows = agent.codec.encode(actions)
        assert masks[np.arange(2), rows].all()
        taken |= set(rows.tolist())
    assert len(taken) > 3


def test_without_exploration_the_best_sequence_acts_and_with_it_another_may() -> None:
    agent = discrete_agent(replace(CONFIG, planner=replace(CONFIG.planner, min_probability=0.9)))
    stir(agent)
    obs = np.ones((30, OBS), np.float32)

    def first_actions(explore: bool) -> set[int]:
        state = agent.new_state(30, Streams(1), "planner")
        acted, _ = agent.act_batch(obs, state, np.ones(30, bool), [{}] * 30, explore)
        return set(agent.codec.encode(acted).tolist())

    assert len(first_actions(False)) < len(first_actions(True))


def test_act_takes_the_mask_from_info() -> None:
    agent = discrete_agent(masked=True)
    mask = np.arange(ACTIONS) == 5
    action, stats = agent.act_with_stats(np.zeros(OBS), info={"action_mask": mask})
    assert agent.codec.encode(action) == 5
    assert "plan_entropy" in stats and np.isfinite(list(stats.values())).all()
    assert set(stats) <= set(agent.metric_names)
    with pytest.raises(ForethoughtError, match=r"as in act\(obs, info=info\)"):
        agent.act(np.zeros(OBS))
    with pytest.raises(ForethoughtError, match="environment 0 allows no choice"):
        agent.act(np.zeros(OBS), info={"action_mask": mask & False})


def test_what_replay_stores_is_what_the_environment_received(tmp_path: Path) -> None:
    """A real run of two terminating environments: random phase, planning, evaluation."""
    task = "gym:tests.discrete_actions:stub/Command-v0"
    before = len(CommandEnv.logs)
    options: dict[str, Any] = {"presets": ["debug"], "steps": 140, "env": {"num_envs": 2}}
    run = forethought.train("tdmpc2", task, out=tmp_path / "run", **options)
    received = CommandEnv.logs[before:]
    kept = forethought.load(run, for_acting=False).replay.state(whole=True)[1]
    for i in range(2):
        rows = {key: kept[f"tail/{i}/column/action/{key}"].tolist() for key in SPACE.spaces}
        first = (kept[f"tail/{i}/age"] == 0).tolist()  # a reset has no action
        stored = [dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)]
        stored = [row for row, begins in zip(stored, first, strict=True) if not begins]
        assert len(stored) == 70
        assert stored in received
    assert forethought.evaluate(run, episodes=1).mean == 15, "1 + 2 + 3 + 4 + 5"


# ---- learning ----


@pytest.mark.parametrize("space", [spaces.Discrete(4), SPACE, LARGE], ids=["flat", "dict", "large"])
@pytest.mark.parametrize("q_target", ["max", "policy", "expected"])
def test_every_part_learns(space: Any, q_target: Any) -> None:
    agent = discrete_agent(replace(CONFIG, q_target=q_target), space)
    batch = discrete_batch(agent)
    # Two updates move the zeroed heads, and so Q, which the policy then learns from.
    agent.update(batch, agent.draw_noise())
    agent.update(batch, agent.draw_noise())
    before = {k: v.clone() for k, v in agent.model.state_dict().items()}
    metrics = agent.update(batch, agent.draw_noise())
    assert metrics["nonfinite"] == 0
    assert all(map(np.isfinite, metrics.values()))
    for name, old in before.items():
        assert not torch.equal(agent.model.state_dict()[name], old), f"{name} did not move"


def test_masks_reach_targets_and_policy() -> None:
    agent = discrete_agent(masked=True)
    stir(agent)
    batch = discrete_batch(agent, masked=True)
    tensors = agent._tensors(batch)
    assert torch.equal(tensors.legal, batch.extras["action_mask"])
    with torch.no_grad():
        next_z, _, value = agent.learner.targets(tensors, agent.draw_noise())
        noise = agent.draw_noise()
        q = table_values(
            agent.model, agent.model.target_q, next_z.flatten(0, 1), noise.target_heads, None
        )
    best = q.amin(0).masked_fill(~tensors.legal[1:].flatten(0, 1), -torch.inf).amax(-1)
    again = agent.model.actions.next_value(agent.model, next_z, noise, tensors.legal[1:])
    torch.testing.assert_close(again.flatten(), best)
    assert value.isfinite().all()


def test_a_row_after_the_end_may_have_no_legal_action() -> None:
    agent = discrete_agent(masked=True)
    batch = discrete_batch(agent, masked=True)
    batch.extras["action_mask"][2] = False
    batch.terminated[1] = 1.0  # on arriving at row 2
    _, y, _ = agent.learner.targets(agent._tensors(batch), agent.draw_noise())
    assert torch.equal(y[1], batch.reward[1])
    assert agent.update(batch, agent.draw_noise())["nonfinite"] == 0


@pytest.mark.parametrize("masked", [True, False])
def test_the_likeliest_of_all_actions_give_the_exact_maximum(masked: bool) -> None:
    exact = discrete_agent(masked=masked)
    limited = discrete_agent(replace(CONFIG, q_target_top_k=ACTIONS), masked=masked)
    few = discrete_agent(replace(CONFIG, q_target_top_k=1), masked=masked)
    batch, values = discrete_batch(exact, masked=masked), []
    for agent in (exact, limited, few):
        stir(agent)
        values.append(agent.learner.targets(agent._tensors(batch), exact.draw_noise())[2])
    torch.testing.assert_close(
        exact.learner.targets(exact._tensors(batch), (n := exact.draw_noise()))[2],
        limited.learner.targets(limited._tensors(batch), n)[2],
    )
    top, one = (a.learner.targets(a._tensors(batch), n)[2] for a in (limited, few))
    assert (one <= top + 1e-6).all() and (one < top - 1e-3).any()


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = discrete_agent()
    stir(agent)
    z, legal = torch.rand(10, 16), random_masks(10)
    with torch.no_grad():
        whole = table_values(agent.model, agent.model.q, z, (0, 2), legal)
        monkeypatch.setattr("forethought.agents.tdmpc2.categorical.CHUNK", 7)
        torch.testing.assert_close(
            table_values(agent.model, agent.model.q, z, (0, 2), legal), whole
        )
    assert torch.equal(whole[0] > -torch.inf, legal)


def test_q_of_the_table_is_q_of_one_hot_vectors() -> None:
    """W_a times a one-hot is a column of W_a; and per factor, a sum of columns."""
    agent = discrete_agent()
    stir(agent)
    z, q = torch.rand(6, 16), agent.model.q[1]
    rows = torch.tensor([0, 1, 4, 8, 8, 3])
    joined = torch.cat((z, torch.from_numpy(agent.codec.one_hot(rows.numpy()))), dim=-1)
    hidden = q.first.activate(joined @ q.first.weight.T + q.first.bias)
    torch.testing.assert_close(q(z, rows), q.after_hidden(hidden))
    with torch.no_grad():
        part = q.latent_part(z)
        torch.testing.assert_close(
            q.from_latent_part(part, rows, None, q.action_table()), q(z, rows)
        )
        torch.testing.assert_close(agent.model.q(z, rows)[1], q(z, rows))


def test_the_sampled_gradient_is_that_of_the_expectation_on_average() -> None:
    """All pairs of draws, each with its probability: the mean gradient is the exact one."""
    logits = torch.tensor([0.3, -1.0, 0.8], dtype=torch.float64, requires_grad=True)
    value = torch.tensor([2.0, -1.0, 0.5], dtype=torch.float64)
    (exact,) = torch.autograd.grad((logits.softmax(0) * value).sum(), logits)
    total, mean = torch.zeros(3, dtype=torch.float64), 0.0
    p = logits.softmax(0).detach()
    for i, j in itertools.product(range(3), repeat=2):
        pair = torch.tensor([[i, j]])
        estimate = score_mean(value[pair], logits.log_softmax(0)[pair])[0]
        (gradient,) = torch.autograd.grad(estimate, logits)
        total += p[i] * p[j] * gradient
        mean += (p[i] * p[j] * estimate).item()
    torch.testing.assert_close(total, exact, rtol=1e-9, atol=1e-12)
    assert mean == pytest.approx((p * value).sum().item(), abs=1e-12)


def test_draws_that_are_all_worth_the_same_pull_nowhere() -> None:
    log_p = torch.tensor([[-1.0, -2.0, -0.5]], requires_grad=True)
    score_mean(torch.full((1, 3), 7.0), log_p).sum().backward()
    assert log_p.grad is not None
    assert (log_p.grad == 0).all()


def test_a_policy_alone_learns_which_action_pays() -> None:
    """Reward 1 for one action out of four, else 0; the policy finds it, planned or not."""
    config = replace(POLICY_ONLY, batch_size=32, gamma=0.5, lr=LearningRates(*[3e-3] * 6))
    agent = discrete_agent(config, spaces.Discrete(4), terminates=False)
    for seed in range(80):
        batch = discrete_batch(agent, seed=seed)
        paid = replace(batch, reward=(batch.action == 2).float(), terminated=batch.terminated * 0)
        agent.update(paid, agent.draw_noise())
    obs = torch.randn(50, OBS)
    with torch.no_grad():
        likely = agent.model.pi(agent.model.encode(obs)).mean
    assert (likely == 2).float().mean() > 0.9


# Two states, two actions, discount 0.5: from state 0, action 0 leads to state 1 for nothing, and
# action 1 stays for 1; state 1 pays 4 or -4 and leads back. Whoever plays best goes to state 1;
# whoever plays at random is better off not to.
REWARD, NEXT = [[0.0, 1.0], [4.0, -4.0]], [[1, 0], [0, 0]]
BEST = [[8 / 3, 7 / 3], [16 / 3, -8 / 3]]
LEGAL_BEST = [[2.5, 2.0], [5.0, -3.0]]
"""Where action 0 is not legal in state 0."""
RANDOM = [[0.2, 1.4], [4.4, -3.6]]


@pytest.mark.parametrize(
    ("q_target", "masked", "expected"),
    [("max", False, BEST), ("max", True, LEGAL_BEST), ("expected", False, RANDOM)],
)
def test_targets_reach_the_values_that_they_stand_for(
    q_target: Any, masked: bool, expected: Any
) -> None:
    """Airspace 2.2: max learns Q*, whoever acts; the policy, here a random one, learns its own."""
    np.testing.assert_allclose(learnt_values(q_target, masked), expected, atol=0.15)


def test_a_draw_from_the_policy_does_not_reach_the_best_values() -> None:
    values = learnt_values("policy")
    assert values[0][0] < values[0][1] - 0.5
    assert abs(values[0][0] - BEST[0][0]) > 1


def learnt_values(q_target: Any, masked: bool = False) -> Any:
    """Q of both states and actions after learning from all four transitions, again and again.

    The entropy's weight keeps the policy random.
    """
    config = replace(
        CONFIG,
        model=replace(CONFIG.model, dropout=0.0, bins=31, bin_low=-3.0, bin_high=3.0, num_q=2),
        lr=LearningRates(*[2e-2] * 6),
        q_target=q_target,
        horizon=1,
        gamma=0.5,
        tau=0.2,
        entropy_coef=1e3,
        consistency_coef=0.0,
    )
    column = Column("action_mask", (2,), np.dtype(np.bool_), "action_mask")
    spec = make_spec(action_space=spaces.Discrete(2), columns=(column,) if masked else ())
    agent = make_agent(config, spec=spec)
    state, action = torch.arange(2).repeat_interleave(2).repeat(2), torch.arange(2).repeat(4)
    after = torch.tensor(NEXT)[state, action]
    states = torch.stack((state, after))  # [2, 8]
    legal = torch.tensor([[False, True], [True, True]])[states]
    batch = Batch(
        obs=torch.nn.functional.one_hot(states, OBS).float(),
        action=action[None],
        reward=torch.tensor(REWARD)[state, action][None],
        terminated=torch.zeros(1, 8),
        truncated=torch.zeros(1, 8, dtype=torch.bool),
        is_first=torch.zeros(2, 8, dtype=torch.bool),
        extras={"action_mask": legal} if masked else {},
    )
    for _ in range(UPDATES):
        agent.update(batch, agent.draw_noise())
    with torch.no_grad():
        z = agent.model.encode(batch.obs[0, :4])
        return agent.model.values(agent.model.q, z, action[:4], [0, 1]).mean(0).view(2, 2).numpy()


def test_auxiliary_discounts_go_with_discrete_actions() -> None:
    config = replace(CONFIG, multi_gamma=MultiGammaConfig(True, ("primary", 0.9)))
    agent = discrete_agent(config)
    metrics = agent.update(discrete_batch(agent), agent.draw_noise())
    assert np.isfinite(metrics["aux_value_ce/g0.9"])


def test_kernels_give_the_same_update() -> None:
    eager, native = discrete_agent(), discrete_agent(replace(CONFIG, compile="kernels"))
    batch = discrete_batch(eager)
    for agent in (eager, native):
        for _ in range(3):
            agent.update(batch, agent.draw_noise())
    for (name, a), b in zip(eager.model.named_parameters(), native.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


# ---- saving ----


@pytest.mark.parametrize("space", [spaces.Discrete(4), SPACE, LARGE], ids=["flat", "dict", "large"])
def test_saved_and_loaded_agent_goes_on_bit_for_bit(space: Any, tmp_path: Path) -> None:
    agents = [discrete_agent(CONFIG, space, seed=seed) for seed in (1, 1, 9)]
    straight, saved, fresh = agents
    for agent in (straight, saved):
        agent.update(discrete_batch(agent), agent.draw_noise())
    saved.save(tmp_path / "agent")
    fresh.load(tmp_path / "agent")
    for agent in (straight, fresh):
        agent.update(discrete_batch(agent, seed=1), agent.draw_noise())
    for name, value in straight.state()[1].items():
        assert torch.equal(value, fresh.state()[1][name]), name


def test_a_file_names_how_many_actions_are_distinct(tmp_path: Path) -> None:
    """The same space with another table is another agent, though its words are the same."""
    agent = discrete_agent()
    agent.save(tmp_path / "agent")
    assert files.read_manifest(tmp_path / "agent").meta["distinct_actions"] == ACTIONS
    whole = make_agent(spec=replace(agent.spec, distinct_actions=None))
    with pytest.raises(files.FileError, match="for 9 distinct actions, but this agent has 18"):
        whole.load(tmp_path / "agent")
    assert "distinct_actions" not in make_agent().facts()


def test_a_run_names_how_many_actions_are_distinct(tmp_path: Path) -> None:
    options = {"steps": 12, "env": {"max_episode_steps": 5}, "eval": {"episodes": 1}}
    task = "gym:tests.discrete_actions:stub/Command-v0"
    run = forethought.train(
        "tdmpc2", task, presets="debug", out=tmp_path / "run", track={"console": False}, **options
    )
    (started,) = [e for e in RunDirectory.open(run.path).events() if e["kind"] == "started"]
    assert started["distinct_actions"] == ACTIONS
    (manifest, *_) = (run.path / "checkpoints").glob("step-*/manifest.json")
    assert files.read_manifest(manifest.parent).meta["distinct_actions"] == ACTIONS


def test_acting_state_round_trips() -> None:
    agent = discrete_agent()
    obs, first = np.ones((2, OBS), np.float32), np.array([False, False])
    start = agent.new_state(2, Streams(3), "x")
    _, state = agent.act_batch(obs, start, ~first, [{}] * 2, True)
    json, tensors = agent.acting_state(state)
    tensors = {k: v.clone() for k, v in tensors.items()}
    expected, _ = agent.act_batch(obs, state, first, [{}] * 2, True)
    restored = agent.restore_acting_state(agent.new_state(2, Streams(4), "y"), json, tensors)
    again, _ = agent.act_batch(obs, restored, first, [{}] * 2, True)
    assert nested.bitwise_equal(expected, again)


# ---- what is told, and what is refused ----


def test_the_limit_is_told_at_the_start() -> None:
    assert (
        "9 distinct actions of 3 choices each: an update looks at all" in discrete_agent().notes[0]
    )
    actions = discrete_agent(CONFIG, LARGE).model.actions
    assert isinstance(actions, CategoricalActions)
    assert MOST_LISTED < 600
    assert actions.top_k == LIKELIEST
    told = actions.describe()
    assert "600 distinct actions of 2 choices each, more than 512" in told
    assert "the greatest Q of the 64 that the policy finds likeliest" in told


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"q_target": "max"}, "agent.q_target is max, but must be policy"),
        ({"q_target": "expected"}, "agent.q_target is expected, but must be policy"),
        ({"q_target_top_k": 8}, "agent.q_target_top_k is 8, but must be left out"),
        ({"planner": replace(CONFIG.planner, min_probability=0.2)}, "min_probability is 0.2"),
    ],
)
def test_options_of_discrete_actions_are_refused_for_continuous_ones(
    changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make_agent(replace(CONFIG, **changes))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"entropy": "jacobian"}, "agent.entropy is jacobian, but must be left out"),
        ({"log_std_min": -5.0}, "agent.log_std_min is -5.0"),
        ({"log_std_max": 1.0}, "agent.log_std_max is 1.0"),
        ({"planner": replace(CONFIG.planner, min_std=0.1)}, "agent.planner.min_std is 0.1"),
        ({"planner": replace(CONFIG.planner, max_std=1.0)}, "agent.planner.max_std is 1.0"),
    ],
)
def test_options_of_continuous_actions_are_refused_for_discrete_ones(
    changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        discrete_agent(replace(CONFIG, **changes))


def test_contradictions_are_refused_before_there_is_an_agent() -> None:
    with pytest.raises(ConfigError, match="q_target_top_k is 0"):
        TDMPC2Config(q_target_top_k=0)
    with pytest.raises(ConfigError, match=r"left out: agent\.q_target is expected"):
        TDMPC2Config(q_target="expected", q_target_top_k=8)
    with pytest.raises(ConfigError, match=r"min_probability is 1\.0"):
        PlannerConfig(min_probability=1.0)


def test_a_mask_of_another_size_and_mixed_actions_are_refused() -> None:
    column = Column("action_mask", (8,), np.dtype(np.bool_), "action_mask")
    with pytest.raises(ConfigError, match="needs one entry for each of the 4 distinct actions"):
        make_agent(spec=make_spec(action_space=spaces.Discrete(4), columns=(column,)))
    both = spaces.Dict({"gas": spaces.Box(-1, 1, (1,)), "gear": spaces.Discrete(3)})
    with pytest.raises(ConfigError, match="but not both together"):
        make_agent(spec=make_spec(action_space=both))
