"""TD-MPC2: learning and saving."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from forethought.agents.tdmpc2.act import plan_metrics
from forethought.agents.tdmpc2.config import (
    ConstantRate,
    CosineRate,
    LearningRates,
    LinearRate,
)
from forethought.agents.tdmpc2.rates import rate_schedule
from forethought.config import (
    ConfigError,
    ForethoughtError,
    TransitionReplayConfig,
)
from forethought.replay import Batch
from forethought.seeding import Streams
from tests.tdmpc2_agents import (
    CONFIG,
    OBS,
    TINY,
    fill,
    make_agent,
    make_batch,
    make_spec,
)

# ---- learning ----


def test_every_part_learns_and_targets_move_a_hundredth() -> None:
    agent = make_agent(spec=make_spec(terminates=True))
    batch = make_batch(agent)
    # One update moves the zeroed heads off zero; only then does gradient reach what is before them.
    agent.update(batch, agent.draw_noise())
    before = {k: v.clone() for k, v in agent.model.state_dict().items()}
    metrics = agent.update(batch, agent.draw_noise())
    after = agent.model.state_dict()
    for name, old in before.items():
        new = after[name]
        if name.startswith("target_q"):
            online = after[name.replace("target_q", "q")]
            torch.testing.assert_close(new, torch.lerp(old, online, 0.01))
        else:
            assert not torch.equal(new, old), f"{name} did not move"
    assert set(metrics) == set(agent.metric_names) - set(plan_metrics("plan_std_mean"))
    assert metrics["nonfinite"] == 0


def test_repeated_updates_on_one_batch_lower_the_loss() -> None:
    agent = make_agent()
    batch = make_batch(agent)
    losses = [agent.update(batch, agent.draw_noise())["total_loss"] for _ in range(150)]
    assert np.mean(losses[-10:]) < 0.8 * np.mean(losses[:10])


def test_training_is_a_function_of_the_seed() -> None:
    def weights(seed: int) -> torch.Tensor:
        agent = make_agent(seed=seed)
        fill(agent)
        agent.train(3)
        return torch.cat([p.detach().flatten() for p in agent.model.parameters()])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


@pytest.mark.parametrize(
    ("spoiled", "value"), [("obs", np.nan), ("reward", np.nan), ("reward", np.inf)]
)
def test_a_step_that_is_not_finite_changes_nothing(spoiled: str, value: float) -> None:
    """An infinite target too, which two-hot would clamp into a finite loss."""
    agent = make_agent()
    agent.update(make_batch(agent), agent.draw_noise())
    before = copy.deepcopy(agent.state()[1])
    batch = make_batch(agent)
    getattr(batch, spoiled)[0, 0] = value
    metrics = agent.update(batch, agent.draw_noise())
    assert metrics["nonfinite"] == 1
    for name, old in before.items():
        if name != "update_stream":
            assert torch.equal(agent.state()[1][name], old), name


def test_policy_step_that_is_not_finite_keeps_policy_and_scale() -> None:
    agent = make_agent()
    agent.update(make_batch(agent), agent.draw_noise())
    noise = agent.draw_noise()
    noise.policy[0, 0, 0] = np.nan
    policy = [p.clone() for p in agent.model.policy.parameters()]
    scale = agent.learner.scale.value.clone()
    assert agent.update(make_batch(agent), noise)["nonfinite"] == 1
    assert all(map(torch.equal, policy, agent.model.policy.parameters()))
    assert torch.equal(agent.learner.scale.value, scale)


def test_learning_rates_per_part() -> None:
    expected = {
        "encoder": 1e-5,
        "dynamics": 2e-5,
        "reward": 3e-5,
        "q": 4e-5,
        "policy": 5e-5,
        "termination": 6e-5,
    }
    config = replace(CONFIG, lr=LearningRates(**expected))
    agent = make_agent(config, spec=make_spec(terminates=True))
    agent.update(make_batch(agent), agent.draw_noise())
    groups = agent.learner.optimiser.param_groups + agent.learner.policy_optimiser.param_groups
    rate_of = {parameter: group["lr"] for group in groups for parameter in group["params"]}
    for part, rate in expected.items():
        assert {rate_of[p] for p in getattr(agent.model, part).parameters()} == {rate}


def test_learning_rate_schedules() -> None:
    linear = rate_schedule(replace(CONFIG, schedule=LinearRate(100, 0.5, 10)))
    assert linear.value(9) == pytest.approx(1.0)
    assert linear.value(60) == pytest.approx(0.75)
    assert linear.value(1000) == 0.5
    cosine = rate_schedule(replace(CONFIG, schedule=CosineRate(100, 0.0)))
    assert cosine.value(50) == pytest.approx(0.5)
    assert rate_schedule(replace(CONFIG, schedule=ConstantRate())).value(10**6) == 1.0


def test_the_schedule_reaches_the_optimiser() -> None:
    agent = make_agent(replace(CONFIG, schedule=LinearRate(2, 0.5)))
    lrs = [agent.update(make_batch(agent), agent.draw_noise())["lr"] for _ in range(4)]
    assert lrs == pytest.approx([3e-4, 2.25e-4, 1.5e-4, 1.5e-4])


def test_discount_is_taken_from_the_episode_length_or_set() -> None:
    assert make_agent().gamma == pytest.approx(0.99)
    assert make_agent(replace(CONFIG, gamma=0.9)).gamma == 0.9
    with pytest.raises(ConfigError, match=r"set --agent\.gamma"):
        make_agent(spec=make_spec(max_episode_steps=None))


def test_episodic_follows_the_task_unless_set() -> None:
    assert make_agent().model.termination is None
    assert make_agent(spec=make_spec(terminates=True)).model.termination is not None
    off = replace(CONFIG, episodic=False)
    assert make_agent(off, spec=make_spec(terminates=True)).model.termination is None


# ---- saving ----


def test_saved_and_loaded_agent_goes_on_bit_for_bit(tmp_path: Path) -> None:
    straight, saved, fresh = make_agent(), make_agent(), make_agent(seed=9)
    for agent in (straight, saved):
        fill(agent)
        agent.train(3)
    saved.save(tmp_path / "agent")
    fresh.load(tmp_path / "agent")
    straight.train(3)
    fresh.train(3)
    (json_a, a), (json_b, b) = straight.state(), fresh.state()
    assert json_a == json_b
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.equal(value, b[name]), name


def test_only_a_saved_agent_is_replaced_by_a_saved_agent(tmp_path: Path) -> None:
    agent, thesis, empty = make_agent(), tmp_path / "thesis", tmp_path / "empty"
    for folder in (thesis, empty):
        folder.mkdir()
    (thesis / "chapter1.txt").write_text("three years of work")
    with pytest.raises(ForethoughtError, match=r"thesis is there and is no saved agent"):
        agent.save(thesis)
    assert [entry.name for entry in thesis.iterdir()] == ["chapter1.txt"]
    with pytest.raises(ForethoughtError, match=r"chapter1.txt is there and is no saved agent"):
        agent.save(thesis / "chapter1.txt")
    for _ in range(2):  # into nothing, then over itself
        agent.save(empty)
    (tmp_path / "link").symlink_to(empty)
    with pytest.raises(ForethoughtError, match="link is there and is no saved agent"):
        agent.save(tmp_path / "link")
    (empty / "notes.txt").write_text("of a person")
    with pytest.raises(ForethoughtError, match="is no saved agent"):
        agent.save(empty)


def test_an_agent_whose_saving_was_killed_between_the_renames_is_still_there(
    tmp_path: Path,
) -> None:
    saved, fresh = make_agent(), make_agent(seed=9)
    saved.save(tmp_path / "agent")
    (tmp_path / "agent").rename(tmp_path / ".old-agent")
    fresh.load(tmp_path / "agent")
    assert all(map(torch.equal, fresh.model.parameters(), saved.model.parameters()))
    assert not (tmp_path / "agent").exists()  # whoever reads changes nothing
    fresh.save(tmp_path / "agent")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["agent"]


def test_weights_of_another_model_are_refused_in_one_sentence(tmp_path: Path) -> None:
    make_agent().save(tmp_path / "agent")
    other = make_agent(replace(CONFIG, model=replace(TINY, mlp_units=32)))
    with pytest.raises(ForethoughtError, match="weights are of another model: dynamics"):
        other.load(tmp_path / "agent")


def test_compiled_kernels_are_announced_and_learn_the_same(tmp_path: Path) -> None:
    """Up to rounding, and with interchangeable checkpoints."""
    eager, native = make_agent(), make_agent(replace(CONFIG, compile="kernels"))
    assert eager.notes == ()
    assert len(native.notes) == 1
    for agent in (eager, native):
        fill(agent)
        agent.train(3)
    for (name, a), b in zip(eager.model.named_parameters(), native.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    native.save(tmp_path / "agent")
    eager.load(tmp_path / "agent")
    assert all(map(torch.equal, eager.model.parameters(), native.model.parameters()))


def test_loaded_for_acting_has_neither_replay_nor_optimisers(tmp_path: Path) -> None:
    agent = make_agent()
    fill(agent)
    agent.train(1)
    agent.save(tmp_path / "agent")
    actor = make_agent(seed=9, for_acting=True)
    actor.load(tmp_path / "agent")
    assert not hasattr(actor, "learner")
    with pytest.raises(ForethoughtError, match="for acting only"):
        _ = actor.replay
    with pytest.raises(ForethoughtError, match="for acting only, so it has no optimisers to save"):
        actor.save(tmp_path / "other")
    assert not (tmp_path / "other").exists()
    obs = np.ones((1, OBS), np.float32)
    actions = [
        a.act_batch(obs, a.new_state(1, Streams(3), "x"), np.array([True]), [{}], False)[0]
        for a in (agent, actor)
    ]
    np.testing.assert_array_equal(*actions)


def test_acting_state_round_trips() -> None:
    agent = make_agent()
    obs, first = np.ones((2, OBS), np.float32), np.array([False, False])
    _, state = agent.act_batch(
        obs, agent.new_state(2, Streams(3), "x"), np.array([True, True]), [{}] * 2, True
    )
    json, tensors = agent.acting_state(state)
    tensors = {k: v.clone() for k, v in tensors.items()}
    expected, _ = agent.act_batch(obs, state, first, [{}] * 2, True)
    restored = agent.restore_acting_state(agent.new_state(2, Streams(4), "y"), json, tensors)
    again, _ = agent.act_batch(obs, restored, first, [{}] * 2, True)
    np.testing.assert_array_equal(expected, again)


def test_any_replay_with_the_same_sample_can_take_its_place() -> None:
    agent = make_agent()

    class Dataset:
        def sample(self, batch: int) -> Batch:
            return make_batch(agent)

    agent.replay = Dataset()  # type: ignore[assignment]
    assert agent.train(2)["nonfinite"] == 0


def test_transitions_replay_works_too() -> None:
    agent = make_agent()
    agent.replay_config = TransitionReplayConfig(capacity_rows=500)
    fill(agent)
    assert np.isfinite(agent.train(2)["total_loss"])
