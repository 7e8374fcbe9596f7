"""Many tasks in one agent against the slow reference of a single task.

To a task with embedding e, a network that sees [x, e] is one that sees x alone, with W_e e added to
its bias; and an action that is always zero needs no weights. So what the agent does with a slice of
task k must be what the reference of one task does with weights cut to that task: no padding, no
mask and no embedding is left to be forgotten.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from forethought.agents.tdmpc2.act import plan
from forethought.agents.tdmpc2.config import (
    ModelConfig,
    NStep,
    OneStep,
    PlannerConfig,
    TDLambda,
    TDMPC2Config,
)
from forethought.agents.tdmpc2.model import WorldModel
from forethought.agents.tdmpc2.noise import PlanNoise, draw_plan_noise
from forethought.agents.tdmpc2.tasks import Tasks
from forethought.agents.tdmpc2.update import TensorBatch

from . import reference_tdmpc2 as reference
from .test_tdmpc2_parity import (
    BATCH,
    METRIC_PAIRS,
    TINY,
    Case,
    assert_close,
    make_learner,
    make_update_noise,
    settings_of,
)

OBS, ACTION, DIM = 7, 3, 5
WIDTHS = ((7, 1), (4, 3), (5, 2))
"""Observation and action of each task; the padded ones are 7 and 3."""
GAMMAS = (0.99, 0.9, 0.95)
EXACT = torch.float64


def make_case(config: TDMPC2Config, episodic: bool = False) -> Case:
    """Weights that are nowhere zero, and embeddings that are too long before the first step."""
    generator = torch.Generator().manual_seed(5)
    masks = torch.tensor([[float(i < width) for i in range(ACTION)] for _, width in WIDTHS])
    tasks = Tasks(masks, GAMMAS, DIM)
    case = Case(
        WorldModel(OBS, ACTION, config, episodic, generator, tasks=tasks), config, generator
    )
    case.model.to(EXACT)
    with torch.no_grad():
        for parameter in case.model.parameters():
            parameter += 0.05 * case.normal(*parameter.shape)
        tasks.embedding += case.normal(len(GAMMAS), DIM)
    return case


def of_task(params: dict[str, Tensor], k: int) -> dict[str, Tensor]:
    """The weights of task k alone; autograd follows them back to the whole ones."""
    observed, acted = WIDTHS[k]
    e, found = params["tasks.embedding"][k], dict(params)
    for name, weight in params.items():
        network, bias = name.split(".")[0], name.replace(".weight", ".bias")
        if name == "tasks.embedding":
            del found[name]
        elif name == "policy.2.weight" or name == "policy.2.bias":
            mu, log_std = weight[:ACTION], weight[ACTION:]
            found[name] = torch.cat((mu[:acted], log_std[:acted]))
        elif network in ("q", "target_q") and name.split(".")[2:] != ["0", "weight"]:
            continue
        elif name.endswith(".0.weight"):
            first = OBS if network == "encoder" else weight.shape[1] - DIM
            if network in ("dynamics", "reward", "q", "target_q"):
                first -= ACTION
            found[bias] = params[bias] + weight[:, first : first + DIM] @ e
            kept = observed if network == "encoder" else first
            columns = [weight[:, :kept]]
            if network in ("dynamics", "reward", "q", "target_q"):
                columns.append(weight[:, first + DIM :][:, :acted])
            found[name] = torch.cat(columns, dim=1)
    return found


def slow_update(params, moments, scale, batch, noise, settings):
    """`reference.update` for slices of several tasks, each with the weights of its own."""
    params = {name: value.detach() for name, value in params.items()}
    groups = {k: torch.nonzero(batch["task"] == k).flatten() for k in range(len(WIDTHS))}
    groups = {k: own for k, own in groups.items() if len(own)}

    def slices(k):
        observed, acted = WIDTHS[k]
        own = groups[k]
        data = {
            "obs": batch["obs"][:, own, :observed],
            "action": batch["action"][:, own, :acted],
            "reward": batch["reward"][:, own],
            "terminated": batch["terminated"][:, own],
        }
        drawn = {
            **noise,
            "target_policy": noise["target_policy"][:, own, :acted],
            "policy": noise["policy"][:, own, :acted],
            "value_dropout": noise["value_dropout"][:, :, own],
            "policy_dropout": noise["policy_dropout"][:, :, own],
        }
        return data, drawn, replace(settings, gamma=GAMMAS[k]), len(own) / BATCH

    leaves = reference.leaves_of(params, "model")
    leaves["tasks.embedding"] = params["tasks.embedding"].clone().requires_grad_(True)
    losses, latents, targets = {}, {}, []
    for k in groups:
        data, drawn, own_settings, share = slices(k)
        next_z, y = reference.targets(of_task(params, k), data, drawn, own_settings)
        own, zs = reference.model_losses(
            of_task({**params, **leaves}, k), data, next_z, y, drawn, own_settings
        )
        latents[k] = zs.detach()
        targets.append(y.flatten())
        for name, loss in own.items():
            losses[name] = losses.get(name, 0.0) + share * loss
    gradients, grad_norm = reference.clip_by_global_norm(
        reference.gradients_of(losses["total_loss"], leaves), settings.grad_clip_norm
    )

    def rate(name):
        return settings.lr * (settings.enc_lr_scale if name.startswith("encoder.") else 1.0)

    params, model_state = reference.adam(params, gradients, moments["model"], rate, eps=1e-8)
    length = params["tasks.embedding"].norm(dim=1, keepdim=True)
    params["tasks.embedding"] = torch.where(
        length > 1, params["tasks.embedding"] / (length + 1e-7), params["tasks.embedding"]
    )

    leaves = reference.leaves_of(params, "policy")
    steps = settings.horizon + 1
    qs = torch.zeros(steps, BATCH, dtype=EXACT)
    entropy, scaled = torch.zeros_like(qs), torch.zeros_like(qs)
    for k, own in groups.items():
        weights = of_task({**params, **leaves}, k)
        _, drawn, own_settings, _ = slices(k)
        for t in range(steps):
            z = latents[k][t]
            chosen = reference.policy(weights, z, drawn["policy"][t], own_settings)
            for i, head in enumerate(noise["policy_heads"]):
                mask = drawn["policy_dropout"][i, t]
                logits = reference.q_logits(weights, f"q.{int(head)}", z, chosen["action"], mask)
                qs[t, own] = qs[t, own] + reference.decode(logits, own_settings) / 2
            entropy[t, own] = chosen["entropy"]
            scaled[t, own] = chosen["scaled_entropy"]
    scale = reference.running_scale(scale, qs[0].detach(), settings.tau)
    gain = (settings.entropy_coef * scaled + qs / scale).mean(1)
    loss = sum(-(settings.rho**t) * gain[t] for t in range(steps)) / steps
    gradients, pi_norm = reference.clip_by_global_norm(
        reference.gradients_of(loss, leaves), settings.grad_clip_norm
    )
    params, policy_state = reference.adam(
        params, gradients, moments["policy"], lambda name: settings.lr, eps=1e-5
    )
    for name in params:
        if name.startswith("target_q."):
            online = params[name.removeprefix("target_")]
            params[name] = params[name] + settings.tau * (online - params[name])
    metrics = {name: torch.as_tensor(value).detach() for name, value in losses.items()}
    metrics |= {
        "grad_norm": grad_norm,
        "pi_grad_norm": pi_norm,
        "pi_loss": loss.detach(),
        "pi_entropy": entropy.detach().mean(),
        "pi_scale": scale,
        "td_target_mean": torch.cat(targets).mean(),
    }
    return params, {"model": model_state, "policy": policy_state}, scale, metrics


def make_batch(case: Case) -> TensorBatch:
    """Zeros where a task has no observation or action, as its environment gives them."""
    horizon = case.config.horizon
    task = torch.randint(len(WIDTHS), (BATCH,), generator=case.generator)
    task[:3] = torch.arange(3)
    obs, action = case.normal(horizon + 1, BATCH, OBS), case.normal(horizon, BATCH, ACTION).tanh()
    for b, k in enumerate(task.tolist()):
        obs[:, b, WIDTHS[k][0] :] = 0
        action[:, b, WIDTHS[k][1] :] = 0
    reward = 3 * case.normal(horizon, BATCH)
    terminated = (case.normal(horizon, BATCH) > 1.0).to(EXACT)
    return TensorBatch(obs, action, reward, terminated, task=task)


def check_update(config: TDMPC2Config, episodic: bool) -> None:
    case = make_case(config, episodic)
    learner, params = make_learner(case), case.params
    scale, settings = torch.ones((), dtype=EXACT), settings_of(config, episodic)
    moments = reference.new_optimiser_state(params)
    for moment in ("m", "v"):
        moments["model"][moment]["tasks.embedding"] = torch.zeros_like(params["tasks.embedding"])
    for _ in range(3):
        batch, (noise, slow_noise) = make_batch(case), make_update_noise(case)
        metrics = learner.update(batch, noise)
        slow_batch = {
            name: getattr(batch, name) for name in ("obs", "action", "reward", "terminated", "task")
        }
        params, moments, scale, slow = slow_update(
            params, moments, scale, slow_batch, slow_noise, settings
        )
        for fast_name, slow_name in METRIC_PAIRS.items():
            if fast_name in metrics:
                fast = torch.tensor(metrics[fast_name], dtype=EXACT)
                assert_close(fast_name, fast, slow[slow_name].detach(), EXACT)
    for name, fast in case.model.state_dict().items():
        assert_close(name, fast, params[name], EXACT)
    assert_close("q_scale", learner.scale.value, scale, EXACT)
    assert case.model.tasks is not None
    assert case.model.tasks.embedding.norm(dim=1).max() <= 1


@pytest.mark.parametrize("episodic", [False, True])
@pytest.mark.parametrize("entropy", ["gaussian", "jacobian"])
@pytest.mark.parametrize("returns", [OneStep(), NStep(2), TDLambda(0.8)], ids=lambda r: r.kind)
def test_whole_update_of_many_tasks(
    episodic: bool, entropy: str, returns: OneStep | NStep | TDLambda
) -> None:
    config = TDMPC2Config(model=TINY, returns=returns, entropy=entropy)  # type: ignore[arg-type]
    check_update(config, episodic)


def test_whole_update_of_many_tasks_at_size_one() -> None:
    check_update(TDMPC2Config(model=ModelConfig(size=1)), False)


def draw(case: Case, envs: int) -> PlanNoise:
    planner = case.config.planner
    drawn = draw_plan_noise(
        case.generator,
        horizon=case.config.horizon,
        envs=envs,
        samples=planner.samples,
        policy_samples=planner.policy_samples,
        elites=planner.elites,
        iterations=planner.iterations_for(ACTION),
        action_dim=ACTION,
        num_q=case.config.model.resolved.num_q,
    )
    return replace(
        drawn,
        policy=drawn.policy.to(EXACT),
        bootstrap=drawn.bootstrap.to(EXACT),
        mppi=type(drawn.mppi)(*(x.to(EXACT) for x in drawn.mppi)),
    )


@pytest.mark.parametrize("episodic", [False, True])
@pytest.mark.parametrize("explore", [False, True])
@pytest.mark.parametrize("policy_samples", [0, 5])
def test_plan_of_many_tasks(explore: bool, episodic: bool, policy_samples: int) -> None:
    planner = PlannerConfig(samples=40, elites=8, policy_samples=policy_samples, iterations=3)
    config = TDMPC2Config(model=TINY, planner=planner)
    case = make_case(config, episodic)
    task = torch.tensor([2, 0, 1, 1])
    envs, noise = len(task), draw(case, len(task))
    obs, mean = case.normal(envs, OBS), case.normal(config.horizon, envs, ACTION).tanh()
    for e, k in enumerate(task.tolist()):
        obs[e, WIDTHS[k][0] :] = 0
    first = torch.tensor([True, False, False, True])
    with torch.inference_mode():
        fast = plan(case.model, obs, mean, first, noise, float("nan"), explore, task=task)
    for e, k in enumerate(task.tolist()):
        observed, acted = WIDTHS[k]
        one = {
            "policy": noise.policy[:, e, :, :acted],
            "samples": noise.mppi.samples[:, :, e, :, :acted],
            "heads": torch.tensor(noise.heads),
            "bootstrap": noise.bootstrap[:, e, :, :acted],
            "gumbel": noise.mppi.gumbel[e],
            "explore": noise.mppi.explore[e, :acted],
        }
        settings = replace(settings_of(config, episodic), gamma=GAMMAS[k])
        slow = reference.plan_one(
            of_task(case.params, k),
            obs[e, :observed],
            mean[:, e, :acted],
            bool(first[e]),
            one,
            settings,
            explore,
        )
        assert torch.equal(fast.elites[:, e], slow["elite_indices"]), "elite sets differ"
        for name, value in (
            ("action", fast.action[e]),
            ("mean", fast.mean[:, e]),
            ("std", fast.std[:, e]),
        ):
            assert_close(name, value[..., :acted], slow[name], EXACT)
            assert (value[..., acted:] == 0).all(), f"{name} is not zero in the padding"
        best = slow["values"][-1].gather(-1, slow["elite_indices"][-1])
        assert_close("values", fast.values[e], best, EXACT)
