"""How close plan and update of TD-MPC2 come to the arithmetic limit of this machine.

The limit is the work in matrix products alone, without redundant ones (same maths), at the speed
of the best 512 x 512 x 512 product measured in the same round. A ratio of 1 would mean that
nothing but matrix products takes time, and these at their very best. How far a lone product's
usual time lies above its best is printed beside it, as a measure of the machine's noise. The
official code stands at 3.2 (plan) and 3.5 (update) at size 5.

    python benchmarks/tdmpc2_speed.py [--sizes 5 1] [--rounds 30] [--compile kernels|off]
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, cast

import gymnasium
import numpy as np
import torch
import torch.nn.functional as F

from forethought import presets
from forethought.agents.tdmpc2.agent import TDMPC2
from forethought.agents.tdmpc2.config import ModelConfig, TDMPC2Config
from forethought.agents.tdmpc2.gammas import MultiGammaConfig
from forethought.config import EpisodeReplayConfig, build_run_config
from forethought.replay import Batch
from forethought.seeding import Streams
from forethought.spaces.spec import EnvSpec
from forethought.training.device import keep_freed_memory
from results import carry_out, median_p10, not_its_own, write

GFLOP = {5: {"plan": 31.7, "update": 29.0}, 1: {"plan": 12.2, "update": 8.4}}
"""Least work in matrix products, from the shapes of cheetah-run (17 observations, 6 actions)."""
TARGET = {5: {"plan": 1.6, "update": 1.8}}
AUXILIARY = {"two": (0.97, 0.995), "five": (0.9, 0.95, 0.97, 0.995, 0.999)}
"""Auxiliary discounts whose cost is measured; five may cost 15 percent of an update."""
OBS, ACTION = 17, 6


def official(size: int, compile_: str) -> TDMPC2Config:
    return TDMPC2Config(
        model=ModelConfig(size=cast(Literal[1, 5], size)),
        compile=cast(Literal["off", "kernels"], compile_),
    )


def small() -> TDMPC2Config:
    """The preset for machines without a GPU."""
    layers = presets.layers(["tdmpc2_small"], None, "tdmpc2")
    run = build_run_config("tdmpc2", "dmc:cheetah-run", TDMPC2Config, layers)
    return cast(TDMPC2Config, run.agent)


def make_agent(config: TDMPC2Config) -> TDMPC2:
    spec = EnvSpec(
        task="synthetic",
        observation_space=gymnasium.spaces.Box(-np.inf, np.inf, (OBS,), np.float32),
        action_space=gymnasium.spaces.Box(-1, 1, (ACTION,), np.float32),
        max_episode_steps=500,
        action_repeat=2,
        terminates=False,
    )
    replay = EpisodeReplayConfig(capacity_rows=10_000)
    return TDMPC2(spec, config, replay, streams=Streams(1), device=torch.device("cpu"))


def make_batch(agent: TDMPC2) -> Batch:
    horizon, batch = agent.config.horizon, agent.config.batch_size
    return Batch(
        obs=torch.randn(horizon + 1, batch, OBS),
        action=torch.tanh(torch.randn(horizon, batch, ACTION)),
        reward=torch.rand(horizon, batch),
        terminated=torch.zeros(horizon, batch),
        truncated=torch.zeros(horizon, batch, dtype=torch.bool),
        is_first=torch.zeros(horizon + 1, batch, dtype=torch.bool),
        extras={},
    )


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def product_seconds(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> list[float]:
    """Times of some 512 x 512 x 512 products; the best of them is the machine's peak."""
    with torch.inference_mode():
        return [seconds(lambda: F.linear(x, w, b)) for _ in range(12)]


def work_of(agent: TDMPC2) -> dict[str, Callable[[], Any]]:
    """A decision and an update, both warmed up."""
    batch, obs = make_batch(agent), np.random.default_rng(0).normal(size=(1, OBS))
    state, first = agent.new_state(1, Streams(1), "planner"), np.array([False])
    work: dict[str, Callable[[], Any]] = {
        "plan": lambda: agent.act_batch(obs, state, first, [{}], True),
        "update": lambda: agent.update(batch, agent.draw_noise()),
    }
    for warm_up in work.values():
        for _ in range(3):
            warm_up()
    return work


def measure_small(rounds: int) -> dict[str, Any]:
    """A decision with its update, on one core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    agent = make_agent(small())
    work = work_of(agent)
    rows = [{name: seconds(run) * 1e3 for name, run in work.items()} for _ in range(rounds)]
    torch.set_num_threads(threads)
    both, p10 = median_p10([row["plan"] + row["update"] for row in rows])
    print(
        f"tdmpc2_small, one core: {agent.log_architecture()['total']:,} parameters\n"
        f"  decision with its update: median {both:.1f} ms (target 50), p10 {p10:.1f} ms"
    )
    return {"ms_median": both, "ms_p10": p10, "target_ms": 50, "rounds_ms": rows}


def measure(size: int, rounds: int, compile_: str) -> dict[str, Any]:
    agent = make_agent(official(size, compile_))
    print(f"size {size}: {agent.log_architecture()['total']:,} parameters. {' '.join(agent.notes)}")
    work = work_of(agent)
    x, w, b = torch.randn(512, 512), torch.randn(512, 512), torch.randn(512)
    rows = []
    for i in range(rounds):
        row: dict[str, float] = {}
        for name, run in work.items():
            products = product_seconds(x, w, b)
            took = seconds(run)
            products += product_seconds(x, w, b)
            peak = 2 * 512**3 / min(products) / 1e9
            row[f"{name}_product_ratio"] = statistics.median(products) / min(products)
            row[f"{name}_ms"] = took * 1e3
            row[f"{name}_peak_gflops"] = peak
            row[f"{name}_ratio"] = took / (GFLOP[size][name] / peak)
        rows.append(row)
        print(
            f"  round {i + 1:2d}  plan {row['plan_ms']:6.1f} ms = {row['plan_ratio']:.2f} x limit"
            f"   update {row['update_ms']:6.1f} ms = {row['update_ratio']:.2f} x limit"
            f"   (peak {row['plan_peak_gflops']:.0f} GFLOP/s)"
        )
    summary = {}
    for name in work:
        ratio, ratio_p10 = median_p10([row[f"{name}_ratio"] for row in rows])
        ms, ms_p10 = median_p10([row[f"{name}_ms"] for row in rows])
        product, _ = median_p10([row[f"{name}_product_ratio"] for row in rows])
        target = TARGET.get(size, {}).get(name)
        goal = f" (target {target})" if target else ""
        print(
            f"  {name:6s} median {ratio:.2f} x limit{goal}, p10 {ratio_p10:.2f}; "
            f"{ms:.1f} ms, p10 {ms_p10:.1f}; a lone product: {product:.2f} x its own best"
        )
        summary[name] = {
            "ratio_median": ratio,
            "ratio_p10": ratio_p10,
            "ms_median": ms,
            "ms_p10": ms_p10,
            "lone_product_ratio_median": product,
            "gflop": GFLOP[size][name],
            "target_ratio": target,
        }
    return {"summary": summary, "rounds": rows}


def auxiliary_overhead(
    config: TDMPC2Config, gammas: dict[str, tuple[float, ...]], rounds: int
) -> dict[str, Any]:
    """What auxiliary discounts add to an update: each variant beside the baseline in each round.

    Their order is drawn anew in each round, so that none always comes after the same other.
    """
    configs = {"none": config} | {
        name: replace(config, multi_gamma=MultiGammaConfig(True, ("primary", *values)))
        for name, values in gammas.items()
        if values
    }
    agents = {name: make_agent(variant) for name, variant in configs.items()}
    work = {name: work_of(agent)["update"] for name, agent in agents.items()}
    rows, order, rng = [], list(work), random.Random(1)
    for _ in range(rounds):
        rng.shuffle(order)
        rows.append({name: seconds(work[name]) * 1e3 for name in order})
    total = agents["none"].log_architecture()["total"]
    result = {}
    for name, agent in agents.items():
        ratio, ratio_p10 = median_p10([row[name] / row["none"] for row in rows])
        ms, ms_p10 = median_p10([row[name] for row in rows])
        parameters = agent.log_architecture().get("aux_value", 0)
        result[name] = {
            "gammas": list(gammas.get(name, ())),
            "ms_median": ms,
            "ms_p10": ms_p10,
            "overhead_percent": 100 * (ratio - 1),
            "overhead_percent_p10": 100 * (ratio_p10 - 1),
            "parameters": parameters,
            "parameters_percent": 100 * parameters / total,
            "bytes_in_training": 16 * parameters,  # float32 weight, gradient, Adam's two moments
        }
        print(
            f"  {name:5s} update {ms:6.1f} ms, {100 * (ratio - 1):+5.1f} percent; "
            f"{parameters:,} parameters ({100 * parameters / total:.1f} percent)"
        )
    return result


def measure_auxiliary(rounds: int, compile_: str) -> dict[str, Any]:
    """At size 5 with all threads, and in the small preset on one core."""
    print("auxiliary discounts, size 5 (target for five: 15 percent)")
    large = auxiliary_overhead(official(5, compile_), AUXILIARY, rounds)
    print("auxiliary discounts, tdmpc2_small, one core")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    small_ = auxiliary_overhead(small(), AUXILIARY, rounds)
    torch.set_num_threads(threads)
    return {"size_5": large, "small": small_, "target_percent_of_five": 15}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sizes", type=int, nargs="+", default=[5, 1], choices=sorted(GFLOP))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--compile", default="kernels", choices=["kernels", "off"])
    options = parser.parse_args()
    trial = bool(not_its_own(parser, options))
    keep_freed_memory()  # as every training run does
    sizes = {str(s): measure(s, options.rounds, options.compile) for s in options.sizes}
    result = {"compile": options.compile, "sizes": sizes, "small": measure_small(options.rounds)}
    result["auxiliary"] = measure_auxiliary(options.rounds, options.compile)
    if not trial:
        print(f"written: {write('tdmpc2_speed', result)}")


if __name__ == "__main__":
    carry_out(main)
