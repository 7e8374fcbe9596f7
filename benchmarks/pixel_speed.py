"""How close TD-MPC2's update and plan from pixels come to the arithmetic limit of this machine.

The limit is the multiplications and additions of convolutions and matrix products alone, without
redundant ones (same maths), at the speed of the best 512 x 512 x 512 product measured in the same
round. `flops` counts them from the configuration. Random shift, conversion of bytes to floats,
norms, activations and optimisers are no part of the limit.

    python benchmarks/pixel_speed.py [--presets tdmpc2_pixels tdmpc2_small_pixels] [--rounds 15]
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any, cast

import gymnasium
import numpy as np
import torch

from forethought import presets
from forethought.agents.tdmpc2.agent import TDMPC2
from forethought.agents.tdmpc2.config import TDMPC2Config
from forethought.config import EpisodeReplayConfig, RunConfig, build_run_config
from forethought.nets.conv import sides
from forethought.seeding import Streams
from forethought.spaces.spec import EnvSpec
from forethought.training.device import keep_freed_memory
from results import carry_out, median_p10, not_its_own, write
from tdmpc2_speed import product_seconds, seconds

ACTION = 1
"""Of dmc:cartpole-balance, the task of the small preset."""


def preset(name: str) -> RunConfig:
    layers = presets.layers([name], None, "tdmpc2")
    return build_run_config("tdmpc2", "dmc:cartpole-balance", TDMPC2Config, layers)


def make_agent(config: TDMPC2Config) -> TDMPC2:
    """With replay of two episodes of noise: what pictures show costs no time."""
    spec = EnvSpec(
        task="synthetic",
        observation_space=gymnasium.spaces.Box(0, 255, (64, 64, 3), np.uint8),
        action_space=gymnasium.spaces.Box(-1, 1, (ACTION,), np.float32),
        max_episode_steps=250,
        action_repeat=4,
        terminates=False,
    )
    replay = EpisodeReplayConfig(capacity_rows=2_000)
    agent = TDMPC2(spec, config, replay, streams=Streams(1), device=torch.device("cpu"))
    rng = np.random.default_rng(0)
    for i in range(2 * 251):
        row = {
            "obs": rng.integers(0, 256, (64, 64, 3), dtype=np.uint8),
            "terminated": False,
            "truncated": i % 251 == 250,
            "is_first": i % 251 == 0,
        }
        if not row["is_first"]:
            row |= {"action": rng.uniform(-1, 1, ACTION).astype(np.float32), "reward": 0.5}
        agent.store_transition(row)
    return agent


def flops(agent: TDMPC2) -> dict[str, float]:
    """Least work of an update and of a plan, in units of 1e9.

    A layer's forward pass is one product, its backward pass two: by its weights and by its inputs.
    The first convolution needs no gradient by its inputs.
    """
    config, size = agent.config, agent.config.model.resolved
    t, b, z, h, bins = config.horizon, config.batch_size, size.latent_dim, size.mlp_units, 101
    (key,) = agent.observations.pictures
    at = sides(64, 64, key.layers)
    channels = [key.layout.channels * key.frames] + [config.image.channels] * len(key.layers)
    convolutions = [
        2 * at[i + 1][0] * at[i + 1][1] * channels[i] * channels[i + 1] * kernel**2
        for i, (kernel, _) in enumerate(key.layers)
    ]
    features = channels[-1] * at[-1][0] * at[-1][1]
    encode = sum(convolutions) + 2 * features * z
    encode_backward = 2 * encode - convolutions[0]

    def mlp(inputs: int, outputs: int) -> int:
        return 2 * (inputs * h + h * h + h * outputs)

    za = z + ACTION
    dynamics, head, policy = mlp(za, z), mlp(za, bins), mlp(z, 2 * ACTION)
    rows = t * b
    targets = rows * (encode + policy + 2 * head)
    rollout = b * (encode + encode_backward) + rows * 3 * dynamics
    losses = rows * 3 * (head + size.num_q * head)
    # Backwards, the policy's first layer ends at the latent, and its two heads lead to the action.
    to_action = 2 * (h * h + h * bins + ACTION * h)
    policy_step = (t + 1) * b * (3 * policy - 2 * z * h + 2 * (head + to_action))
    update = targets + rollout + losses + policy_step

    planner = config.planner
    own, drawn = planner.policy_samples, planner.samples - planner.policy_samples
    iterations = planner.iterations_for(ACTION)
    latent = 2 * 2 * z * h  # of two first layers, at t = 0 the same for all sequences
    sequence = t * (dynamics + head) - latent
    # The policy's sequences stay the same, but the bootstrap is drawn anew in every iteration.
    plan = encode + latent + own * (t * policy + sequence) + iterations * drawn * sequence
    plan += iterations * planner.samples * (policy + 2 * head)
    return {"update": update / 1e9, "plan": plan / 1e9, "encode_one": encode / 1e9}


def measure(name: str, rounds: int) -> dict[str, Any]:
    run = preset(name)
    threads = torch.get_num_threads()
    if run.train.threads is not None:
        torch.set_num_threads(run.train.threads)
    agent = make_agent(cast(TDMPC2Config, run.agent))
    work = flops(agent)
    rng = np.random.default_rng(0)
    frame = rng.integers(0, 256, (1, 64, 64, 3), dtype=np.uint8)
    state = agent.new_state(1, Streams(1), "planner")
    agent.act_batch(frame, state, np.array([True]), [{}], True)
    jobs = {
        "plan": lambda: agent.act_batch(frame, state, np.array([False]), [{}], True),
        "update": lambda: agent.train(1),
    }
    for job in jobs.values():
        for _ in range(3):
            job()
    x, w, bias = torch.randn(512, 512), torch.randn(512, 512), torch.randn(512)
    rows: list[dict[str, float]] = []
    for _ in range(rounds):
        row: dict[str, float] = {}
        for job_name, job in jobs.items():
            products = product_seconds(x, w, bias)
            took = seconds(job)
            products += product_seconds(x, w, bias)
            peak = 2 * 512**3 / min(products) / 1e9
            row[f"{job_name}_ms"] = took * 1e3
            row[f"{job_name}_peak_gflops"] = peak
            row[f"{job_name}_ratio"] = took / (work[job_name] / peak)
            row[f"{job_name}_product_ratio"] = statistics.median(products) / min(products)
        rows.append(row)
    torch.set_num_threads(threads)
    print(f"{name}: {agent.log_architecture()['total']:,} parameters. {' '.join(agent.notes)}")
    summary: dict[str, Any] = {}
    for job_name in jobs:
        ratio, ratio_p10 = median_p10([row[f"{job_name}_ratio"] for row in rows])
        ms, ms_p10 = median_p10([row[f"{job_name}_ms"] for row in rows])
        product, _ = median_p10([row[f"{job_name}_product_ratio"] for row in rows])
        print(
            f"  {job_name:6s} median {ratio:.2f} x limit, p10 {ratio_p10:.2f}; {ms:.1f} ms, p10 "
            f"{ms_p10:.1f}; {work[job_name]:.2f} GFLOP; a lone product: {product:.2f} x its best"
        )
        summary[job_name] = {
            "ratio_median": ratio,
            "ratio_p10": ratio_p10,
            "ms_median": ms,
            "ms_p10": ms_p10,
            "lone_product_ratio_median": product,
            "gflop": work[job_name],
        }
    both, both_p10 = median_p10([row["plan_ms"] + row["update_ms"] for row in rows])
    print(f"  decision with its update: median {both:.1f} ms, p10 {both_p10:.1f}")
    summary["decision_with_update"] = {"ms_median": both, "ms_p10": both_p10}
    return {
        "threads": run.train.threads or threads,
        "encode_one_gflop": work["encode_one"],
        "summary": summary,
        "rounds": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--presets", nargs="+", default=["tdmpc2_pixels", "tdmpc2_small_pixels"])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    trial = bool(not_its_own(parser, options))
    keep_freed_memory()  # as every training run does
    result = {"presets": {name: measure(name, options.rounds) for name in options.presets}}
    if not trial:
        print(f"written: {write('pixel_speed', result)}")


if __name__ == "__main__":
    carry_out(main)
