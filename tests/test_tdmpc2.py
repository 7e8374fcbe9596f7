"""TD-MPC2: sizes, initialisation, noise, acting, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import gymnasium
import numpy as np
import pytest
import torch

from forethought.agents.base import AgentPolicy
from forethought.agents.tdmpc2 import TDMPC2Config
from forethought.agents.tdmpc2.act import plan, plan_metrics
from forethought.agents.tdmpc2.config import (
    SIZES,
    LearningRates,
    ModelConfig,
    NStep,
    PlannerConfig,
)
from forethought.agents.tdmpc2.model import WorldModel
from forethought.agents.tdmpc2.noise import keep_masks, two_heads
from forethought.config import (
    ConfigError,
    ForethoughtError,
)
from forethought.seeding import Streams
from tests.tdmpc2_agents import (
    ACTION,
    CONFIG,
    OBS,
    fill,
    make_agent,
    make_batch,
    make_spec,
)

# ---- sizes and initialisation ----


def count_mlp(inputs: int, hidden: list[int], outputs: int, last_norm: bool) -> int:
    """Weights and biases of each layer, and scale and shift of each norm."""
    total = 0
    for units in hidden:
        total += inputs * units + units + 2 * units
        inputs = units
    return total + inputs * outputs + outputs + (2 * outputs if last_norm else 0)


@pytest.mark.parametrize(
    ("size", "encoder", "mlp", "latent", "hidden_layers", "heads"),
    [
        (1, 256, 384, 128, 1, 2),
        (5, 256, 512, 512, 1, 5),
        (19, 1024, 1024, 768, 2, 5),
        (48, 1792, 1792, 768, 3, 5),
        (317, 4096, 4096, 1376, 4, 8),
    ],
)
def test_parameter_counts_of_every_size(
    size: int, encoder: int, mlp: int, latent: int, hidden_layers: int, heads: int
) -> None:
    """Counted by hand from the paper's table, for the shapes of cheetah-run."""
    with torch.device("meta"):
        config = TDMPC2Config(model=ModelConfig(size=cast(Any, size)))
        model = WorldModel(17, 6, config, episodic=True, generator=None)
    expected = {
        "encoder": count_mlp(17, [encoder] * hidden_layers, latent, True),
        "dynamics": count_mlp(latent + 6, [mlp, mlp], latent, True),
        "reward": count_mlp(latent + 6, [mlp, mlp], 101, False),
        "termination": count_mlp(latent, [mlp, mlp], 1, False),
        "policy": count_mlp(latent, [mlp, mlp], 12, False),
        "q": heads * count_mlp(latent + 6, [mlp, mlp], 101, False),
    }
    expected["target_q"] = expected["q"]
    counted = {n: sum(p.numel() for p in m.parameters()) for n, m in model.named_children()}
    assert counted == expected


def test_size_five_has_five_million_parameters() -> None:
    """17 x 256 + ... by hand, once as a plain number."""
    spec = make_spec(observation_space=gymnasium.spaces.Box(-1, 1, (17,), np.float32))
    spec = replace(spec, action_space=gymnasium.spaces.Box(-1, 1, (6,), np.float32))
    counts = make_agent(TDMPC2Config(), spec=spec).log_architecture()
    assert counts["encoder"] == (17 * 256 + 256 + 2 * 256) + (256 * 512 + 512 + 2 * 512)
    assert counts["q"] == 5 * (518 * 512 + 3 * 512 + 512 * 512 + 3 * 512 + 512 * 101 + 101)
    assert counts["total"] == 4_958_826


def test_the_table_of_sizes_is_the_papers() -> None:
    assert sorted(SIZES) == [1, 5, 19, 48, 317]


ZEROED = {f"{head}.2.weight" for head in ("reward", "q.0", "q.1", "target_q.0", "target_q.1")}


def test_every_linear_layer_starts_truncated_normal_and_the_q_ensemble_too() -> None:
    model = make_agent(TDMPC2Config(model=ModelConfig(size=1))).model
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight"):
            assert (weight == 1).all()
        elif name.endswith("bias") or name in ZEROED:
            assert (weight == 0).all(), name
        else:
            assert weight.std().item() == pytest.approx(0.02, rel=0.05), name


def test_heads_start_different_and_targets_start_equal() -> None:
    model = make_agent().model
    assert not torch.equal(model.q[0][0].weight, model.q[1][0].weight)
    for online, target in zip(model.q.parameters(), model.target_q.parameters(), strict=True):
        assert torch.equal(online, target)
        assert not target.requires_grad


def test_two_agents_share_nothing() -> None:
    """The official encoder was one object for all agents of a process."""
    first, second = make_agent(), make_agent()
    memory = {p.data_ptr() for p in first.model.parameters()}
    assert memory.isdisjoint(p.data_ptr() for p in second.model.parameters())


# ---- noise ----


def test_dropout_masks_drop_one_in_a_hundred_independently() -> None:
    keep = keep_masks(torch.Generator().manual_seed(0), (4, 2000, 2000), 0.01)
    assert keep is not None
    dropped = ~keep
    assert dropped.float().mean().item() == pytest.approx(0.01, rel=0.02)
    neighbours = (dropped[..., 1:] & dropped[..., :-1]).float().mean().item()
    assert neighbours == pytest.approx(1e-4, rel=0.1), "neighbours are dropped independently"
    per_row = dropped.float().sum(-1)  # Binomial(2000, 0.01): variance 19.8
    assert per_row.var().item() == pytest.approx(19.8, rel=0.1)
    assert dropped[:, 0].any() or dropped[:, -1].any()


def test_dropout_masks_reach_both_ends() -> None:
    """First and last position are dropped as often as any other."""
    generator = torch.Generator().manual_seed(0)
    total = torch.zeros(10)
    for _ in range(3000):
        keep = keep_masks(generator, (10,), 0.3)
        assert keep is not None
        total += ~keep
    torch.testing.assert_close(total / 3000, torch.full((10,), 0.3), atol=0.03, rtol=0)


def test_no_dropout_needs_no_mask() -> None:
    assert keep_masks(torch.Generator(), (3, 3), 0.0) is None


def test_two_heads_are_different_and_all_pairs_occur() -> None:
    generator = torch.Generator().manual_seed(0)
    pairs = {frozenset(two_heads(generator, 3)) for _ in range(100)}
    assert pairs == {frozenset(p) for p in ((0, 1), (0, 2), (1, 2))}


# ---- acting ----


def test_batched_planning_equals_planning_one_by_one() -> None:
    """Shapes and per-environment state: environment 0's plan does not see environment 1's."""
    agent = make_agent()
    obs = np.random.default_rng(0).normal(size=(3, OBS)).astype(np.float32)
    state = agent.new_state(3, Streams(7), "planner")
    first = np.array([True, True, True])
    actions, after = agent.act_batch(obs, state, first, [{}] * 3, explore=True)
    changed = obs.copy()
    changed[1] += 1
    other, _ = agent.act_batch(
        changed, agent.new_state(3, Streams(7), "planner"), first, [{}] * 3, explore=True
    )
    assert actions.shape == (3, ACTION)
    assert actions.dtype == np.float32
    assert np.abs(actions).max() <= 1
    assert after.mean.shape == (agent.config.horizon, 3, ACTION)
    np.testing.assert_allclose(actions[[0, 2]], other[[0, 2]], rtol=1e-4, atol=1e-5)
    assert not np.allclose(actions[1], other[1])


def test_the_next_plan_begins_with_the_last_ones_mean() -> None:
    """Spec 1.6: shifted by a step; only an episode's first plan begins with zeros."""
    agent = make_agent()
    fill(agent)
    agent.train(5)
    obs = np.ones((1, OBS), np.float32)
    state = agent.new_state(1, Streams(3), "test")
    _, state = agent.act_batch(obs, state, np.array([True]), [{}], explore=False)
    assert state.plan is not None and torch.equal(state.mean, state.plan.mean)
    assert state.mean.abs().sum() > 0
    drawn = state.generator.get_state()
    found = {}
    for first in (False, True):
        state.generator.set_state(drawn)
        _, later = agent.act_batch(obs, state, np.array([first]), [{}], explore=False)
        state.generator.set_state(drawn)
        noise = agent.model.actions.plan_noise(state.generator, 3, 1, len(agent.model.q))
        args = (agent.model, torch.from_numpy(obs), state.mean, torch.tensor([first]), noise)
        with torch.inference_mode():
            wanted = plan(*args, agent.gamma, False)
        assert torch.equal(later.mean, wanted.mean)
        found[first] = later.mean
    assert not torch.equal(found[False], found[True])


def test_acting_elsewhere_does_not_disturb_the_training_stream() -> None:
    def play(disturbed: bool) -> np.ndarray:
        agent = make_agent()
        state = agent.new_state(1, agent.streams, "planner")
        obs, actions = np.zeros((1, OBS), np.float32), []
        for i in range(4):
            if disturbed:
                mine = agent.new_state(2, agent.streams, "eval-planner", i)
                agent.act_batch(np.zeros((2, OBS)), mine, np.ones(2, bool), [{}] * 2, False)
                agent.act(np.zeros(OBS))
            action, state = agent.act_batch(obs, state, np.array([i == 0]), [{}], True)
            actions.append(action)
        return np.concatenate(actions)

    np.testing.assert_array_equal(play(False), play(True))


def test_evaluation_draws_from_a_stream_of_its_own() -> None:
    agent = make_agent()
    drawn = AgentPolicy(agent, Streams(1), 3).start(2).generator.get_state()
    assert torch.equal(drawn, Streams(1).torch("eval-planner", 3).get_state())
    for other in (("eval-planner", 4), ("planner",), ("update",)):
        assert not torch.equal(drawn, Streams(1).torch(*other).get_state())


@pytest.mark.parametrize("envs", [1, 3])
def test_first_layers_in_two_parts_equal_the_whole(envs: int) -> None:
    network = make_agent().model.dynamics
    z, a = torch.rand(envs, 1, 16), torch.rand(envs, 7, ACTION)
    whole = network(z.expand(-1, 7, -1), a)
    torch.testing.assert_close(network.from_latent_part(network.latent_part(z), a), whole)


def test_act_keeps_its_own_state_until_the_episode_ends() -> None:
    def two_episodes() -> list[np.ndarray]:
        agent, obs = make_agent(), np.zeros(OBS, np.float32)
        actions = []
        for _ in range(2):
            agent.on_episode_start()
            actions += [agent.act(obs, explore=True), agent.act(obs, explore=True)]
            agent.on_episode_end()
        return actions

    actions = two_episodes()
    assert not np.array_equal(actions[0], actions[1])
    assert not np.array_equal(actions[0], actions[2]), "each episode has noise of its own"
    np.testing.assert_array_equal(actions, two_episodes())


def test_act_with_stats_tells_what_the_planner_saw() -> None:
    _, stats = make_agent().act_with_stats(np.zeros(OBS))
    assert set(stats) == set(plan_metrics("plan_std_mean"))
    assert all(np.isfinite(v) for v in stats.values())


def test_without_mpc_the_policys_mean_acts_in_evaluation() -> None:
    agent = make_agent(replace(CONFIG, mpc=False, planner=PlannerConfig()))
    obs = np.random.default_rng(0).normal(size=(2, OBS)).astype(np.float32)
    state = agent.new_state(2, Streams(1), "planner")
    calm = [agent.act_batch(obs, state, np.zeros(2, bool), [{}] * 2, False)[0] for _ in range(2)]
    bold = [agent.act_batch(obs, state, np.zeros(2, bool), [{}] * 2, True)[0] for _ in range(2)]
    np.testing.assert_array_equal(*calm)
    assert not np.array_equal(*bold)
    with torch.no_grad():
        mean = agent.model.pi(agent.model.encode(torch.from_numpy(obs))).mean
    np.testing.assert_allclose(calm[0], mean.numpy(), rtol=1e-5)


@pytest.mark.parametrize(
    ("formula", "logged", "in_loss"),
    [
        # Two dimensions, eps (1, 0), log std 0, mean 0: action (tanh 1, 0). Gaussian log density
        # -1/2 - ln(2 pi) = -2.33788; ln(1 - tanh(1)^2) = -0.86756.
        ("gaussian", 2.33788 - 0.86756, 2 * 2.33788),
        # 2 (-1/2 - ln(2 pi) / 2) = -2.83788, and the Jacobian.
        ("jacobian", 2.83788 - 0.86756, 2.83788 - 0.86756),
    ],
)
def test_entropy_by_hand(formula: Any, logged: float, in_loss: float) -> None:
    model = make_agent(replace(CONFIG, entropy=formula, log_std_min=-1.0, log_std_max=1.0)).model
    for parameter in model.policy.parameters():
        torch.nn.init.zeros_(parameter)
    output = model.pi(torch.zeros(1, 16), torch.tensor([[1.0, 0.0]]))
    assert output.action.tolist() == [pytest.approx([np.tanh(1.0), 0.0])]
    assert output.entropy.item() == pytest.approx(logged, abs=2e-5)
    assert output.scaled_entropy.item() == pytest.approx(in_loss, abs=2e-5)


def test_rollout_shapes_and_rewards() -> None:
    agent = make_agent(spec=make_spec(terminates=True))
    for parameter in agent.model.reward.parameters():
        torch.nn.init.normal_(parameter)  # a new one gives 0 everywhere
    z0, actions = torch.softmax(torch.randn(4, 16), -1), torch.randn(6, 4, ACTION)
    latents, rewards, ends = agent.model.rollout_dynamics_multi_step(z0, actions)
    assert latents.shape == (7, 4, 16)
    assert rewards.shape == ends.shape == (6, 4)
    assert torch.equal(latents[0], z0)
    torch.testing.assert_close(latents[1], agent.model.next(z0, actions[0]))
    for t in range(6):
        reward = agent.model.decode(agent.model.reward(latents[t], actions[t]))
        torch.testing.assert_close(rewards[t], reward)
    assert rewards.unique().numel() == rewards.numel()  # no two places are taken for each other
    torch.testing.assert_close(ends[2], agent.model.termination_probability(latents[3]))
    with pytest.raises(ForethoughtError, match="simulates no opponent"):
        agent.model.rollout_dynamics_multi_step(z0, actions, opponent_id=1)


def test_rollout_without_termination_head_never_ends() -> None:
    ends = make_agent().model.rollout_dynamics_multi_step(torch.zeros(1, 16), torch.zeros(2, 1, 2))
    assert (ends.termination == 0).all()


# ---- bad input ----


BOX = gymnasium.spaces.Box(-1, 1, (1,), np.float32)


@pytest.mark.parametrize(
    "space",
    [
        gymnasium.spaces.Dict({"gear": gymnasium.spaces.Discrete(3), "gas": BOX}),
        gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32),
        gymnasium.spaces.Box(-1, 1, (2, 2), np.float32),
        gymnasium.spaces.Box(-1, 1, (2,), np.int64),
    ],
    ids=str,
)
def test_actions_it_cannot_take_are_refused(space: gymnasium.Space[Any]) -> None:
    with pytest.raises(ConfigError, match="tdmpc2 takes continuous actions"):
        make_agent(spec=make_spec(action_space=space))


@pytest.mark.parametrize(
    "space", [gymnasium.spaces.Discrete(1), gymnasium.spaces.MultiDiscrete([1, 1])]
)
def test_a_single_action_is_nothing_to_decide(space: gymnasium.Space[Any]) -> None:
    with pytest.raises(ConfigError, match="stub has a single action: there is nothing to decide"):
        make_agent(spec=make_spec(action_space=space))


def test_actions_without_members_are_refused() -> None:
    with pytest.raises(ConfigError, match="have no member: there is nothing to decide"):
        make_agent(spec=make_spec(action_space=gymnasium.spaces.Dict({})))


def test_observations_of_integers_are_learned_from_as_numbers() -> None:
    bytes_ = gymnasium.spaces.Box(0, 255, (OBS,), np.uint8)
    agent = make_agent(spec=make_spec(observation_space=bytes_))
    batch = replace(make_batch(agent), obs=torch.randint(0, 255, (4, 8, OBS), dtype=torch.uint8))
    assert agent.update(batch, agent.draw_noise())["nonfinite"] == 0


def test_observations_it_cannot_take_are_refused() -> None:
    boundless = gymnasium.spaces.Box(-np.inf, np.inf, (64, 64, 3), np.float32)
    with pytest.raises(ConfigError, match="looks like an image, but its values lie in"):
        make_agent(spec=make_spec(observation_space=boundless))


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: TDMPC2Config(gamma=1.5), "agent.gamma is 1.5, but must be above 0 and at most 1"),
        (lambda: TDMPC2Config(horizon=0), "agent.horizon is 0"),
        (lambda: TDMPC2Config(batch_size=0), "agent.batch_size is 0"),
        (lambda: TDMPC2Config(tau=0.0), "agent.tau is 0.0"),
        (lambda: TDMPC2Config(rho=2.0), "agent.rho is 2.0"),
        (lambda: TDMPC2Config(returns=NStep(4)), "agent.returns.n is 4"),
        (lambda: PlannerConfig(samples=32, elites=64), "agent.planner.elites is 64"),
        (lambda: PlannerConfig(samples=8, elites=4, policy_samples=8), "policy_samples is 8"),
        (lambda: ModelConfig(latent_dim=12), "agent.model.latent_dim is 12"),
        (lambda: ModelConfig(num_q=1), "agent.model.num_q is 1"),
        (lambda: ModelConfig(encoder_layers=1), "agent.model.encoder_layers is 1"),
        (lambda: TDMPC2Config(gamma=0.9, gamma_max=0.96), "no effect when agent.gamma is set"),
        (lambda: LearningRates(q=0.0), "agent.lr.q is 0.0"),
    ],
)
def test_values_out_of_range_are_refused(build: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        build()
    assert sentence in str(error.value)


def test_eight_iterations_from_twenty_action_dimensions_on() -> None:
    assert PlannerConfig().iterations_for(19) == 6
    assert PlannerConfig().iterations_for(20) == 8
    assert PlannerConfig(iterations=3).iterations_for(20) == 3
