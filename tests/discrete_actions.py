"""Discrete actions for tests: a structured space whose tuples partly do the same, and agents."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from forethought.agents.tdmpc2 import TDMPC2, TDMPC2Config
from forethought.replay import Batch
from forethought.spaces import ActionCodec, Column
from forethought.spaces.action_codec import ANY, table_of
from tests.stubs import CounterEnv, Step
from tests.tdmpc2_agents import CONFIG, OBS, make_agent, make_spec

SPACE = spaces.Dict(
    {"who": spaces.Discrete(3), "what": spaces.Discrete(2), "level": spaces.Discrete(3)}
)
"""who 2 is nobody; what 0 sets the level, what 1 does not."""
DISTINCT = {
    "who": [2, *[0] * 4, *[1] * 4],
    "what": [ANY, *[0, 0, 0, 1] * 2],
    "level": [ANY, *[0, 1, 2, ANY] * 2],
}
TABLE = table_of(SPACE, DISTINCT)
ACTIONS = 9
MASK = Column("action_mask", (ACTIONS,), np.dtype(np.bool_), "action_mask")


def small_codec() -> ActionCodec:
    return ActionCodec(SPACE, TABLE)


def airspace(aircraft: int = 20) -> tuple[spaces.Dict, dict[str, list[int]]]:
    """Commands of air-traffic control: 1 + 22 per aircraft are distinct."""
    space = spaces.Dict(
        {
            "aircraft_id": spaces.Discrete(aircraft + 1),
            "command_type": spaces.Discrete(5),
            "altitude": spaces.Discrete(9),
            "heading": spaces.Discrete(7),
            "speed": spaces.Discrete(4),
        }
    )
    rows = [(aircraft, ANY, ANY, ANY, ANY)]
    for who in range(aircraft):
        rows += [(who, 0, level, ANY, ANY) for level in range(9)]
        rows += [(who, 1, ANY, turn, ANY) for turn in range(7)]
        rows += [(who, 2, ANY, ANY, speed) for speed in range(4)]
        rows += [(who, 3, ANY, ANY, ANY), (who, 4, ANY, ANY, ANY)]
    names = ("aircraft_id", "command_type", "altitude", "heading", "speed")
    return space, dict(zip(names, map(list, zip(*rows)), strict=True))


class CommandEnv(CounterEnv):
    """A counter with the structured actions above, of which some are legal at each step."""

    columns = (MASK,)
    distinct_actions = DISTINCT
    logs: list[list[dict[str, int]]] = []
    """Of every instance, in the order of their making, all actions that it received."""

    def __init__(self, length: int | None = 5, *, truncates: bool = False) -> None:
        super().__init__(length, truncates=truncates)
        self.action_space = SPACE
        self.logs.append([])
        self.log = self.logs[-1]

    def mask(self) -> Any:
        return np.arange(ACTIONS) % 4 == self.t % 4

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        obs, info = super().reset(seed=seed)
        return obs, {**info, "action_mask": self.mask()}

    def step(self, action: Any) -> Step:
        if not self.mask()[small_codec().encode(action)]:
            raise ValueError(f"{action} is illegal at step {self.t}")
        self.log.append({key: int(choice) for key, choice in action.items()})
        obs, reward, terminated, truncated, info = super().step(action)
        mask = self.mask() & (not terminated)  # when all is over, nothing is legal
        return obs, reward, terminated, truncated, {**info, "action_mask": mask}


if "stub/Command-v0" not in gymnasium.registry:
    gymnasium.register("stub/Command-v0", CommandEnv)


def discrete_agent(
    config: TDMPC2Config = CONFIG,
    space: gymnasium.Space[Any] = SPACE,
    *,
    masked: bool = False,
    terminates: bool = True,
    **options: Any,
) -> TDMPC2:
    spec = make_spec(
        action_space=space,
        terminates=terminates,
        columns=(MASK,) if masked else (),
        distinct_actions=TABLE if space is SPACE else None,
    )
    return make_agent(config, spec=spec, **options)


def random_masks(*shape: int, actions: int = ACTIONS, seed: int = 0) -> torch.Tensor:
    """Half of the actions legal, and always one."""
    generator = torch.Generator().manual_seed(seed)
    legal = torch.rand(*shape, actions, generator=generator) < 0.5
    one = torch.randint(actions, (*shape, 1), generator=generator)
    return legal.scatter(-1, one, True)


def discrete_batch(agent: TDMPC2, masked: bool = False, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    t, b = agent.config.horizon, agent.config.batch_size
    assert agent.codec is not None
    rows = torch.randint(agent.codec.size, (t, b), generator=generator)
    action = agent.codec.decode(rows.numpy())
    convert = torch.from_numpy
    return Batch(
        obs=torch.randn(t + 1, b, OBS, generator=generator),
        action={k: convert(v) for k, v in action.items()}
        if isinstance(action, dict)
        else convert(action),
        reward=torch.randn(t, b, generator=generator),
        terminated=(torch.rand(t, b, generator=generator) < 0.2).float(),
        truncated=torch.zeros(t, b, dtype=torch.bool),
        is_first=torch.zeros(t + 1, b, dtype=torch.bool),
        extras={"action_mask": random_masks(t + 1, b, actions=agent.codec.size)} if masked else {},
    )
