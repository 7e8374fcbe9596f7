"""What a plan over 441 discrete actions costs beside a continuous plan of the same network.

Both search three steps ahead with 512 sequences and six iterations. The discrete actions are once
one choice among 441, once the commands of air-traffic control (five choices each, of which 441
tuples are distinct) with some of them illegal. Each round times every plan once, in an order that
rotates, and its ratio is to the continuous plan of the same round.

    python benchmarks/categorical_speed.py [--sizes 5 1] [--rounds 30] [--compile kernels|off]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from forethought.agents.tdmpc2.agent import TDMPC2
from forethought.config import EpisodeReplayConfig
from forethought.seeding import Streams
from forethought.spaces import Column, EnvSpec
from forethought.spaces.action_codec import ANY, Table, table_of
from forethought.training.device import keep_freed_memory
from results import carry_out, median_p10, not_its_own, write
from tdmpc2_speed import ACTION, OBS, official, seconds

ACTIONS = 441
AIRCRAFT = 20
TARGET = 1.3


def commands() -> tuple[gymnasium.Space[Any], Table]:
    """Which aircraft, what to change, and to which of 9 altitudes, 7 headings or 4 speeds."""
    names = ("aircraft_id", "command_type", "altitude", "heading", "speed")
    rows = [(AIRCRAFT, ANY, ANY, ANY, ANY)]
    for who in range(AIRCRAFT):
        rows += [(who, 0, level, ANY, ANY) for level in range(9)]
        rows += [(who, 1, ANY, turn, ANY) for turn in range(7)]
        rows += [(who, 2, ANY, ANY, speed) for speed in range(4)]
        rows += [(who, 3, ANY, ANY, ANY), (who, 4, ANY, ANY, ANY)]
    assert len(rows) == ACTIONS
    sizes = (AIRCRAFT + 1, 5, 9, 7, 4)
    space = spaces.Dict({name: spaces.Discrete(n) for name, n in zip(names, sizes)})
    return space, table_of(space, dict(zip(names, zip(*rows))))


def plan_of(
    size: int, compile_: str, space: gymnasium.Space[Any], table: Table | None = None
) -> Callable[[], Any]:
    """A decision, warmed up; with a table half of the actions are legal."""
    mask = Column("action_mask", (ACTIONS,), np.dtype(np.bool_), "action_mask")
    spec = EnvSpec(
        task="synthetic",
        observation_space=spaces.Box(-np.inf, np.inf, (OBS,), np.float32),
        action_space=space,
        max_episode_steps=500,
        action_repeat=1,
        terminates=False,
        columns=() if table is None else (mask,),
        distinct_actions=table,
    )
    replay = EpisodeReplayConfig(capacity_rows=10_000)
    options = {"streams": Streams(1), "device": torch.device("cpu")}
    agent = TDMPC2(spec, official(size, compile_), replay, **options)  # type: ignore[arg-type]
    obs = np.random.default_rng(0).normal(size=(1, OBS))
    state, first = agent.new_state(1, Streams(1), "planner"), np.array([False])
    info = [{"action_mask": np.arange(ACTIONS) % 2 == 0}]

    def plan() -> Any:
        return agent.act_batch(obs, state, first, info, True)

    for _ in range(3):
        plan()
    return plan


def measure(size: int, rounds: int, compile_: str) -> dict[str, Any]:
    structured, table = commands()
    box = spaces.Box(-1, 1, (ACTION,), np.float32)
    work = {
        "continuous": plan_of(size, compile_, box),
        "discrete_441": plan_of(size, compile_, spaces.Discrete(ACTIONS)),
        "commands_441": plan_of(size, compile_, structured, table),
    }
    rows, order = [], list(work)
    for _ in range(rounds):
        rows.append({name: seconds(work[name]) * 1e3 for name in order})
        order = order[1:] + order[:1]
    summary = {}
    for name in work:
        ms, ms_p10 = median_p10([row[name] for row in rows])
        ratio, ratio_p10 = median_p10([row[name] / row["continuous"] for row in rows])
        goal = "" if name == "continuous" else f" (target {TARGET})"
        print(f"  size {size} {name:13s} {ms:6.1f} ms, {ratio:.2f} x the continuous plan{goal}")
        summary[name] = {
            "ms_median": ms,
            "ms_p10": ms_p10,
            "ratio_median": ratio,
            "ratio_p10": ratio_p10,
        }
    return {"summary": summary, "target_ratio": TARGET, "rounds_ms": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sizes", type=int, nargs="+", default=[5, 1], choices=[1, 5])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--compile", default="kernels", choices=["kernels", "off"])
    options = parser.parse_args()
    trial = bool(not_its_own(parser, options))
    keep_freed_memory()  # as every training run does
    print("Plans over 441 actions, three steps ahead, 512 sequences, six iterations")
    sizes = {str(s): measure(s, options.rounds, options.compile) for s in options.sizes}
    if not trial:
        result = {"compile": options.compile, "sizes": sizes}
        print(f"written: {write('categorical_speed', result)}")


if __name__ == "__main__":
    carry_out(main)
