"""The DQN agent: acting, exploration, target periods, masks, priorities, saving."""

from __future__ import annotations

from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from forethought.agents.dqn.act import epsilon_at
from forethought.agents.dqn.config import LinearEpsilon, NoEpsilon
from forethought.agents.dqn.heads import QNetwork
from forethought.clock import Clock
from forethought.config import ConfigError, ForethoughtError
from forethought.replay.rows import LIFE_LOST
from forethought.replay.starts import PrioritizedStarts
from forethought.spaces.spec import Column
from tests.dqn.small_agents import (
    ACTIONS,
    DISTRIBUTIONS,
    OBS,
    fill,
    image_spec,
    make_agent,
    options,
    prioritized,
    vector_spec,
)

ALWAYS = {"kind": "linear", "start": 1.0, "end": 1.0}


def acting(agent, envs=4, index=0):
    return agent.new_state(envs, agent.streams, "planner", index)


def observations(envs=4, seed=0):
    return np.random.default_rng(seed).normal(size=(envs, OBS)).astype(np.float32)


def act(agent, obs, state, explore=True, info=None):
    envs = len(obs)
    return agent.act_batch(obs, state, np.ones(envs, bool), info or [{}] * envs, explore)[0]


def greedy_actions(agent, obs):
    with torch.no_grad():
        q = agent.online.expected(agent.online(torch.from_numpy(obs), None, None))
    return q.argmax(1).numpy()


# Exploration


def test_finding_6_epsilon_starts_at_its_start_and_ends_at_its_end():
    schedule = LinearEpsilon(start=1.0, end=0.1, decay_agent_steps=1_000_000)
    assert epsilon_at(schedule, 0) == 1.0
    assert epsilon_at(schedule, 500_000) == pytest.approx(0.55, abs=1e-12)
    assert epsilon_at(schedule, 1_000_000) == 0.1 == epsilon_at(schedule, 10**9)
    assert epsilon_at(NoEpsilon(), 0) == 0.0
    off = LinearEpsilon(end=0.1, decay_agent_steps=10, off_after_agent_steps=20)
    assert [epsilon_at(off, n) for n in (19, 20)] == [0.1, 0.0]


def test_finding_6_random_play_before_learning_does_not_move_epsilon():
    """The clock of epsilon counts the agent's own decisions, summed over environments."""
    agent = make_agent(options(epsilon={"kind": "linear", "decay_agent_steps": 80, "end": 0.0}))
    agent.clock.agent_steps = 50_000  # all of it warm-up
    state, told = acting(agent), []
    for _ in range(21):
        act(agent, observations(), state)
        told.append(agent.acting_statistics(state)["epsilon"])
    assert told[0] == 1.0 and told[10] == pytest.approx(0.5) and told[20] == 0.0


def test_finding_21_epsilon_one_is_random_play_and_needs_no_forward_pass(monkeypatch):
    agent = make_agent(options(epsilon=ALWAYS))
    monkeypatch.setattr(QNetwork, "forward", lambda *given: pytest.fail("nothing looks at Q"))
    state = acting(agent)
    chosen = np.concatenate([act(agent, observations(), state) for _ in range(750)])
    counts = np.bincount(chosen, minlength=ACTIONS)
    assert ((counts - 1000) ** 2 / 1000).sum() < 13.8  # chi squared, 2 degrees, p = 0.001


def test_finding_21_epsilon_zero_is_greedy():
    agent = make_agent(options(epsilon={"kind": "none"}))
    obs = observations(50)
    assert (act(agent, obs, acting(agent, 50)) == greedy_actions(agent, obs)).all()


def test_epsilon_mixes_random_and_greedy_decisions():
    agent = make_agent(options(epsilon={"kind": "linear", "start": 0.3, "end": 0.3}))
    obs, state = observations(1000), acting(agent, 1000)
    differ = (act(agent, obs, state) != greedy_actions(agent, obs)).mean()
    assert differ == pytest.approx(0.3 * (ACTIONS - 1) / ACTIONS, abs=0.04)


def test_evaluation_is_greedy_and_does_not_move_the_clock_of_epsilon():
    agent = make_agent(options(epsilon=ALWAYS))
    obs, state = observations(50), acting(agent, 50)
    assert (act(agent, obs, state, explore=False) == greedy_actions(agent, obs)).all()
    assert state.decisions == 0


@pytest.mark.parametrize("given", [{}, {"in_evaluation": True}])
def test_noise_of_noisy_layers_in_evaluation_is_a_flag(given):
    agent = make_agent(options(noisy={"kind": "factorised", "sigma": 5.0, **given}))
    obs, state = np.repeat(observations(1), 200, 0), acting(agent, 200)
    assert (len(set(act(agent, obs, state, explore=False))) > 1) == bool(given)
    assert len(set(act(agent, obs, state))) > 1, "exploring is noisy, and without random actions"
    assert agent.acting_statistics(state) == {"epsilon": 0.0}


def test_noisy_layers_have_epsilon_beside_them_only_where_it_is_set():
    noisy = {"kind": "factorised"}
    assert options(noisy=noisy).exploration == NoEpsilon()
    assert options().exploration == LinearEpsilon()
    both = options(noisy=noisy, epsilon={"kind": "linear", "end": 0.2})
    assert both.exploration == LinearEpsilon(end=0.2)


def test_acting_depends_on_its_own_stream_only():
    """Evaluating, or acting elsewhere, never shifts what training draws."""
    config = options(noisy={"kind": "factorised"}, epsilon={"kind": "linear", "start": 0.5})
    agent = make_agent(config)

    def play(disturb):
        state, chosen = acting(agent), []
        for n in range(20):
            chosen += act(agent, observations(seed=n), state).tolist()
            if disturb:
                act(agent, observations(), acting(agent, index=1), explore=False)
        return chosen

    assert play(False) == play(True)


def test_a_run_is_told_its_schedules_in_agent_steps_and_in_frames():
    epsilon = {"kind": "linear", "end": 0.1, "decay_agent_steps": 250_000}
    agent = make_agent(options(epsilon=epsilon, dueling=True), spec=vector_spec(action_repeat=4))
    assert agent.notes[-1] == (
        "DQN: network mlp, dueling, 1-step returns, epsilon 1 to 0.1 over 250,000 agent steps "
        "(1,000,000 frames), target copied every 8,000 agent steps (32,000 frames)."
    )
    config = options(
        network={"kind": "minatar"},
        noisy={"kind": "factorised"},
        target={"kind": "updates", "period_updates": 500},
    )
    assert make_agent(config, spec=image_spec((12, 12))).notes[-1] == (
        "DQN: network minatar, stacks of 4, 1-step returns, noisy factorised, no epsilon, target "
        "copied every 500 updates."
    )
    greedy = make_agent(options(epsilon={"kind": "none"}), spec=vector_spec())
    assert "no exploration (neither epsilon nor noisy layers)" in greedy.notes[-1]


# Target periods


def synced(agent):
    pairs = zip(agent.online.parameters(), agent.learner.target.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_confirmed_target_sync_comes_exactly_at_the_period_in_updates():
    """Seed 004, confirmed correct 'Target sync'; the unit is in the key."""
    agent = make_agent(options(target={"kind": "updates", "period_updates": 5}))
    fill(agent)
    agent.clock.agent_steps = 1_000_003  # another unit does not matter
    seen = []
    for _ in range(11):
        agent.train(1)
        seen.append(synced(agent))
    assert [n + 1 for n, equal in enumerate(seen) if equal] == [5, 10]


@pytest.mark.parametrize("jump", [1, 4])
def test_confirmed_target_sync_comes_exactly_at_the_period_in_agent_steps(jump):
    """After a warm-up of 30 with a period of 20: at 40 and 60, though nothing was copied before."""
    agent = make_agent(
        options(target={"kind": "agent_steps", "period_agent_steps": 20}), num_envs=jump
    )
    fill(agent)
    clock, seen = Clock(agent_steps=28 + jump), []
    agent.follow(clock, 1000)
    while clock.agent_steps <= 64:
        agent.train(1)
        if synced(agent):
            seen.append(clock.agent_steps)
        clock.agent_steps += jump
    assert seen == [40, 60]


def test_a_target_that_nobody_would_ever_copy_is_told_of_once(caplog):
    agent = make_agent(options(target={"kind": "agent_steps", "period_agent_steps": 20}))
    fill(agent)
    agent.train(3)
    [told] = [record.message for record in caplog.records]
    assert "copied every 20 agent steps, but nobody counts them" in told
    other = make_agent(options(target={"kind": "updates"}))
    fill(other)
    other.train(1)
    assert len(caplog.records) == 1


def test_target_is_the_online_network_when_learning_begins():
    assert synced(make_agent(options(noisy={"kind": "factorised"}, dueling=True)))


# Priorities


@pytest.mark.parametrize("kind", DISTRIBUTIONS)
def test_priorities_of_the_drawn_transitions_follow_their_errors(kind, monkeypatch):
    agent = make_agent(options(distribution=DISTRIBUTIONS[kind]), prioritized(alpha=1.0))
    fill(agent)
    given = []
    put = agent.transitions.update_priorities
    monkeypatch.setattr(
        agent.transitions,
        "update_priorities",
        lambda rows, errors: (given.append((rows.clone(), errors.clone())), put(rows, errors)),
    )
    agent.train(1)
    [(rows, errors)] = given
    assert torch.equal(rows, agent.last_batch.rows)
    assert (errors >= 0).all() and errors.shape == (8,) and errors.std() > 0
    streams, starts = rows.numpy()
    leaves = agent.transitions._starts.tree.leaves  # alpha is 1: error + epsilon
    kept = leaves[agent.transitions._storage.slots(streams, starts)]
    last = {int(row): error for row, error in zip(starts, errors.tolist(), strict=True)}
    assert kept == pytest.approx([last[int(row)] + 1e-6 for row in starts], rel=1e-6)
    assert len(last) > 1 and not np.allclose(kept, 1.0)


def test_a_skipped_update_leaves_priorities_alone(monkeypatch):
    agent = make_agent(options(), prioritized())
    fill(agent)
    batch = agent.transitions.sample(8, beta=0.4)
    monkeypatch.setattr(
        agent.transitions, "update_priorities", lambda *given: pytest.fail("not finite")
    )
    bad = replace(batch, reward=batch.reward * float("nan"))
    assert agent.update(bad, agent.draw_noise())["nonfinite"] == 1.0


def test_importance_weights_reach_the_loss():
    agent = make_agent(options(), prioritized(alpha=1.0, beta_start=1.0))
    fill(agent)
    for _ in range(5):
        agent.train(1)
    batch = agent.transitions.sample(8, beta=1.0)
    assert batch.weights.std() > 0
    same, other = agent._tensors(batch), agent._tensors(replace(batch, weights=batch.weights * 0))
    assert torch.equal(same.weights, batch.weights)
    metrics, _ = agent.learner.update(other, agent.draw_noise())
    assert metrics["loss"] == 0.0 and metrics["grad_norm"] == 0.0


# Frames


def test_the_stack_seen_in_acting_is_the_stack_replayed(monkeypatch):
    """One rule for both: zeros before an episode's first frame. Stored once, as bytes."""
    spec = image_spec((12, 12), actions=3)
    agent = make_agent(options(network={"kind": "minatar"}, epsilon={"kind": "none"}), spec=spec)
    rng, seen, state = np.random.default_rng(0), [], acting(agent, 1)
    real = QNetwork.forward
    monkeypatch.setattr(
        QNetwork,
        "forward",
        lambda self, x, *rest: (seen.append(x.clone()), real(self, x, *rest))[1],
    )
    for t in range(13):
        frame = rng.integers(1, 256, (12, 12), dtype=np.uint8)
        first = t % 7 == 0
        row = {"obs": frame, "terminated": t % 7 == 6, "truncated": False, "is_first": first}
        if not first:
            row |= {"action": np.int64(0), "reward": 0.0}
        agent.store_transition(row)
        agent.act_batch(frame[None], state, np.array([first]), [{}], True)
    batch = agent.transitions.sample(200)
    assert batch.obs.dtype == batch.next_obs.dtype == torch.uint8
    assert batch.obs.shape == (200, 4, 12, 12)
    for b in range(200):
        row = int(batch.rows[1, b])
        assert torch.equal(batch.obs[b], seen[row][0])
        assert torch.equal(batch.next_obs[b], seen[row + 1][0])
    assert not seen[0][0, :3].any() and not seen[7][0, :3].any() and seen[3].all()


def test_frames_of_random_play_before_learning_are_in_the_acting_stack(monkeypatch):
    """Somebody else decides the first steps; the agent's own first decision sees their frames."""
    spec = image_spec((12, 12), actions=3)
    given = {"network": {"kind": "minatar"}, "epsilon": {"kind": "none"}, "frames": 3}
    agent = make_agent(options(**given), spec=spec)
    state, rng, seen = acting(agent, 1), np.random.default_rng(0), []
    monkeypatch.setattr(
        agent.online, "forward", lambda x, *rest: (seen.append(x), torch.zeros(1, 3, 1))[1]
    )
    frames = [rng.integers(1, 256, (12, 12), dtype=np.uint8) for _ in range(6)]
    for t, frame in enumerate(frames[:-1]):
        assert agent.observe(frame[None], state, np.array([t == 0]))
    agent.act_batch(frames[-1][None], state, np.array([False]), [{}], True)
    assert torch.equal(seen[0][0], torch.from_numpy(np.stack(frames[-3:])))


def test_the_replay_has_what_the_agent_and_the_task_say():
    """n steps, signs of rewards, lost lives as ends, and as many frames as configured."""
    lost = Column(LIFE_LOST, (), np.dtype(np.bool_), "life_lost")
    spec = replace(image_spec((12, 12), actions=3), columns=(lost,), sign_rewards=True)
    given = {"network": {"kind": "minatar"}, "n_step": 3, "frames": 2, "gamma": 0.5}
    agent = make_agent(options(**given), spec=spec)
    for t in range(9):
        row = {"obs": np.full((12, 12), t, np.uint8), "terminated": False, "truncated": t == 8}
        row |= {"is_first": t == 0, LIFE_LOST: t == 5}
        if t:
            row |= {"action": np.int64(0), "reward": 5.0 if t % 2 else -7.0}
        agent.store_transition(row)
    batch = agent.transitions.sample(200)
    assert batch.obs.shape == (200, 2, 12, 12)
    found = {}
    for b in range(200):
        now, later = int(batch.obs[b, -1, 0, 0]), int(batch.next_obs[b, -1, 0, 0])
        found[now] = (later - now, batch.reward[b].item(), batch.discount[b].item())
    # From x_1 on the rewards are -1, 1, -1: their sum with gamma 0.5 is -0.75, then 0.125 follows.
    assert found[1] == (3, -0.75, 0.125)
    assert found[0] == (3, 0.75, 0.125)
    # The life is lost on the way to x_5: what lies behind does not count.
    assert (found[4][1], found[4][2]) == (1.0, 0.0)
    assert (found[3][1], found[3][2]) == (-1.0 + 0.5 * 1.0, 0.0)
    assert found[5][1:] == (-0.75, 0.125)


@pytest.mark.parametrize(
    ("given", "counter", "unit"),
    [
        ({"beta_anneal_updates": 4}, "updates", 1),
        ({"beta_anneal_updates": None, "beta_anneal_agent_steps": 40}, "agent_steps", 10),
        ({"beta_anneal_updates": None}, "agent_steps", 25),  # the whole run
    ],
)
def test_finding_1_beta_of_the_agent_s_own_updates_ends_at_1(monkeypatch, given, counter, unit):
    agent = make_agent(replay=prioritized(beta_start=0.4, **given))
    fill(agent)
    clock = Clock(4)
    agent.follow(clock, 100)
    seen, weights = [], PrioritizedStarts.weights
    monkeypatch.setattr(
        PrioritizedStarts,
        "weights",
        lambda self, slots, beta: (seen.append(beta), weights(self, slots, beta))[1],
    )
    for passed in (0, 1, 2, 3, 4, 9):
        setattr(clock, counter, passed * unit)
        clock.env_frames = 4 * clock.agent_steps
        agent.train(1)
    assert seen == pytest.approx([0.4, 0.55, 0.7, 0.85, 1.0, 1.0], abs=1e-12)


def test_policy_of_iqn_looks_at_as_many_fractions_as_configured(monkeypatch):
    agent = make_agent(options(distribution=DISTRIBUTIONS["iqn"], epsilon={"kind": "none"}))
    seen = []
    real = QNetwork.forward
    monkeypatch.setattr(
        QNetwork,
        "forward",
        lambda self, x, noise=None, tau=None: (seen.append(tau), real(self, x, noise, tau))[1],
    )
    agent.act(np.zeros(OBS, np.float32))
    assert seen[0].shape[-1] == 6


# Masks and other action spaces


def masked_spec():
    mask = Column("action_mask", (ACTIONS,), np.dtype(np.bool_), "legal")
    return vector_spec(columns=(mask,))


@pytest.mark.parametrize("epsilon", [ALWAYS, {"kind": "none"}])
def test_only_legal_actions_are_taken(epsilon):
    agent = make_agent(options(epsilon=epsilon), spec=masked_spec())
    legal = np.random.default_rng(1).random((300, ACTIONS)) < 0.5
    legal[np.arange(300), np.random.default_rng(2).integers(0, ACTIONS, 300)] = True
    info = [{"legal": row} for row in legal]
    chosen = act(agent, observations(300), acting(agent, 300), info=info)
    assert legal[np.arange(300), chosen].all()
    assert len(set(chosen)) == ACTIONS


def test_targets_look_at_legal_actions_only():
    agent = make_agent(options(n_step=1, gamma=0.9), spec=masked_spec())
    rng = np.random.default_rng(0)
    for i in range(40):
        row = {
            "obs": rng.normal(size=OBS).astype(np.float32),
            "action_mask": np.array([True, False, i % 2 == 0]),
            "terminated": False,
            "truncated": i % 10 == 9,
            "is_first": i % 10 == 0,
        }
        row |= {} if i % 10 == 0 else {"action": np.int64(0), "reward": 0.0}
        agent.store_transition(row)
    batch = agent._tensors(agent.transitions.sample(64))
    y = agent.learner.targets(batch, agent.draw_noise())[:, 0]
    q = agent.online.expected(agent.online(batch.next_obs, None, None))
    q = torch.where(batch.next_legal, q, torch.tensor(-torch.inf)).max(1).values
    torch.testing.assert_close(y, 0.9 * q)
    assert batch.next_legal[:, 2].any() and not batch.next_legal[:, 1].any()


def test_a_last_row_without_legal_actions_spoils_no_update():
    """Where all is over nothing may be legal; a soft value over nothing would be no number."""
    agent = make_agent(options(n_step=1, munchausen={"kind": "on"}), spec=masked_spec())
    rng = np.random.default_rng(0)
    for i in range(40):
        last = i % 10 == 9
        row = {
            "obs": rng.normal(size=OBS).astype(np.float32),
            "action_mask": np.full(ACTIONS, not last),
            "terminated": last,
            "truncated": False,
            "is_first": i % 10 == 0,
        }
        row |= {} if i % 10 == 0 else {"action": np.int64(0), "reward": 1.0}
        agent.store_transition(row)
    assert agent.train(5)["nonfinite"] == 0


def test_a_missing_mask_is_told():
    agent = make_agent(spec=masked_spec())
    with pytest.raises(ForethoughtError, match="there is no 'legal' in the info given"):
        agent.act(observations(1)[0])


@pytest.mark.parametrize("space", [spaces.Discrete(ACTIONS), spaces.Discrete(ACTIONS, start=4)])
def test_plain_numbers_need_no_table_and_are_the_rows_of_it(space):
    agent = make_agent(spec=vector_spec(action_space=space))
    rows = np.arange(ACTIONS)
    assert (agent.codec.decode(rows) - agent.first_action == rows).all()
    assert make_agent(spec=vector_spec(action_space=spaces.MultiBinary(2))).first_action is None


def test_a_declared_table_of_plain_numbers_is_looked_up():
    agent = make_agent(spec=vector_spec(distinct_actions=((2,), (0,), (1,))))
    fill(agent)
    batch = agent.transitions.sample(50)
    wanted = torch.tensor([1, 2, 0])[batch.action]
    assert torch.equal(agent._tensors(batch).action, wanted)


def test_structured_actions_have_one_value_each():
    spec = vector_spec(action_space=spaces.MultiDiscrete([2, 3]))
    agent = make_agent(spec=spec)
    assert agent.online.actions == 6
    chosen = act(agent, observations(100), acting(agent, 100))
    assert chosen.shape == (100, 2) and set(chosen[:, 1]) == {0, 1, 2}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"action_space": spaces.Box(-1, 1, (2,), np.float32)}, "dqn takes discrete actions"),
        (
            {"observation_space": spaces.Dict({"a": spaces.Box(0, 1, (2,), np.float32)})},
            "dqn takes an image or one vector",
        ),
        ({"tasks": (vector_spec(), vector_spec())}, "dqn plays one task"),
    ],
)
def test_a_task_that_does_not_fit_is_refused_in_a_sentence(changes, words):
    with pytest.raises(ConfigError, match=words):
        make_agent(spec=vector_spec(**changes))


def test_act_is_the_simple_face_for_one_environment():
    agent = make_agent(options(epsilon={"kind": "none"}))
    env = gymnasium.make("CartPole-v1")
    small = make_agent(
        options(),
        spec=vector_spec(observation_space=env.observation_space, action_space=env.action_space),
        for_acting=True,
    )
    obs, _ = env.reset(seed=0)
    assert small.act(obs) in (0, 1)
    obs = observations(1)
    assert agent.act(obs[0]) == greedy_actions(agent, obs)[0]


# Saving


@pytest.mark.parametrize("kind", DISTRIBUTIONS)
def test_a_saved_agent_goes_on_exactly(kind, tmp_path):
    config = options(
        distribution=DISTRIBUTIONS[kind],
        noisy={"kind": "factorised"},
        dueling=True,
        double=True,
        n_step=3,
        target={"kind": "updates", "period_updates": 4},
        optimiser={"kind": "deepmind_rmsprop"} if kind == "none" else {"kind": "adam"},
    )
    agent, other = make_agent(config, prioritized()), make_agent(config, prioritized(), seed=9)
    fill(agent)
    agent.train(6)
    agent.save(tmp_path / "agent")
    other.load(tmp_path / "agent")
    assert agent.train(5) == other.train(5)
    mine, theirs = agent.state()[1], other.state()[1]
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_spectral_vectors_are_saved_with_the_weights(tmp_path):
    config = options(network={"kind": "impala", "width": 1, "pool_cells": 2})
    spec = image_spec((16, 16), actions=3)
    agent, other = make_agent(config, spec=spec), make_agent(config, spec=spec, seed=2)
    x = torch.randint(0, 256, (3, 4, 16, 16), dtype=torch.uint8)
    agent.online(x, None, None).sum().backward()
    agent.save(tmp_path / "agent")
    other.load(tmp_path / "agent")
    with torch.no_grad():
        assert torch.equal(agent.online(x, None, None), other.online(x, None, None))
        # The target still has the vectors of the beginning.
        assert not torch.equal(agent.online(x, None, None), agent.learner.target(x, None, None))


def test_weights_of_another_network_are_refused(tmp_path):
    make_agent().save(tmp_path / "agent")
    with pytest.raises(ForethoughtError, match="value"):
        make_agent(options(dueling=True)).load(tmp_path / "agent")
