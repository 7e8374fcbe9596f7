"""Replay for agents that learn values: n-step transitions, drawn uniformly or by priority."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forethought.clock import Clock, Linear
from forethought.config import (
    ConfigError,
    PrioritizedReplayConfig,
    ReplayConfig,
    UniformReplayConfig,
    require,
    unknown,
)
from forethought.replay.diagnostics import Look, describe_draws
from forethought.replay.ring_replay import RingReplay
from forethought.replay.rows import ReplayError
from forethought.replay.stacks import sources
from forethought.replay.starts import PrioritizedStarts, UniformStarts
from forethought.replay.storage import Ints
from forethought.spaces.nested import tree_map, unflatten
from forethought.spaces.spec import EnvSpec

QUEUE_BYTES, COUNT_BYTES = 8, 4
LEAF_BYTES = 8 * (1 + 3 / 31)  # a leaf, and its share of the sums and minima above it
LOOKED_AT = 2048
"""Transitions that diagnostics draw, at least."""


@dataclass(frozen=True)
class NStepBatch:
    """B transitions of m steps each, m = min(n, steps to the end):

        y = reward + discount * value(next_obs)         loss = mean(weights * l(y, Q(obs, action)))

    Nested observations and actions come back nested.
    """

    both_obs: Any
    """[2, B, ...]: x_t and x_{t+m}; a stacked column is [2, B, frames, ...], oldest frame first."""
    action: Any
    """[B, ...] the action taken at x_t."""
    reward: Tensor
    """[B] sum over k < m of gamma^k r_{t+k+1}; with clip_rewards, of the rewards' signs."""
    discount: Tensor
    """[B] gamma^m; 0 where the episode ended for good (or was cut) on the way. Truncation keeps
    it."""
    weights: Tensor
    """[B] importance weights; ones where draws are uniform."""
    steps: Tensor
    """[B] m, int64."""
    terminated: Tensor
    """[B] float, 1.0 where the future was cut off."""
    rows: Tensor
    """[2, B] int64 in main memory: environment, and row counted from the run's beginning. So a
    later `update_priorities` finds the same transition or none."""
    both_extras: dict[str, Tensor]
    """[2, B, ...] per declared extra column."""

    @property
    def obs(self) -> Any:
        """[B, ...] x_t."""
        return tree_map(lambda leaf: leaf[0], self.both_obs)

    @property
    def next_obs(self) -> Any:
        """[B, ...] x_{t+m}, for the bootstrap: at a truncation the true last observation."""
        return tree_map(lambda leaf: leaf[1], self.both_obs)

    @property
    def extras(self) -> dict[str, Tensor]:
        """[B, ...] the extra columns at x_t."""
        return {name: column[0] for name, column in self.both_extras.items()}

    @property
    def next_extras(self) -> dict[str, Tensor]:
        """[B, ...] the extra columns at x_{t+m}."""
        return {name: column[1] for name, column in self.both_extras.items()}


class NStepReplay(RingReplay):
    """Experience drawn in n-step transitions that never cross an episode's end.

    Rewards are kept raw; `clip_rewards` takes their signs when they are drawn. `cut` names a
    declared extra column that is true on arriving where no future is to be counted on though the
    episode goes on (a lost life): transitions end there, frame stacks do not.
    """

    def __init__(
        self,
        spec: EnvSpec,
        config: ReplayConfig,
        num_envs: int,
        n_step: int,
        gamma: float,
        stream: np.random.Generator,
        device: torch.device,
        stack: Mapping[str, int] | None = None,
        stack_pad: str = "zeros",
        *,
        clip_rewards: bool = False,
        cut: str | None = None,
    ) -> None:
        kinds = (UniformReplayConfig, PrioritizedReplayConfig)
        require(isinstance(config, kinds), "replay", config.kind, "uniform or prioritized here")
        require(n_step >= 1, "n_step", n_step, "at least 1")
        require(0 <= gamma <= 1, "gamma", gamma, "between 0 and 1")
        names = [column.name for column in spec.columns]
        if cut is not None and cut not in names:
            raise unknown("extra column", cut, names, f"{spec.task} declares {names or 'none'}.")
        if spec.tasks:
            raise ConfigError(
                f"replay is {config.kind}, which holds one task, but {spec.task} is several."
            )
        self.n_step, self.gamma = n_step, gamma
        self.clip_rewards, self.cut = clip_rewards, cut
        super().__init__(spec, config, num_envs, n_step + 1, stream, device, stack, stack_pad)
        self._powers = gamma ** np.arange(n_step + 1, dtype=np.float64)  # gamma^0 .. gamma^n
        self._ahead = np.arange(1, n_step + 1)[:, None]  # [n, 1]
        heads = [(leaf.path, leaf.path.split("/")[0]) for leaf in self.row_spec.leaves]
        wanted = {"obs", "action", *self.row_spec.extras}
        self._wanted = [(path, head) for path, head in heads if head in wanted]

    def make_sampler(self, spec: EnvSpec, config: ReplayConfig) -> UniformStarts:
        self._starts = (
            PrioritizedStarts(self._storage, self.n_step, self.row_spec.history, config)
            if isinstance(config, PrioritizedReplayConfig)
            else UniformStarts(self._storage, self.n_step, self.row_spec.history)
        )
        return self._starts

    def sampler_bytes(self, config: ReplayConfig) -> float:
        """A place in the queue of valid starts, a count of draws and, where there is one, a
        leaf."""
        leaf = LEAF_BYTES if isinstance(config, PrioritizedReplayConfig) else 0
        return QUEUE_BYTES + COUNT_BYTES + leaf

    @property
    def drawn_as(self) -> str:
        steps = "1 step" if self.n_step == 1 else f"up to {self.n_step} steps"
        if not isinstance(self._starts, PrioritizedStarts):
            return f"transitions of {steps}, drawn uniformly"
        config = self._starts.config
        over = "the whole run"
        if config.beta_anneal_updates is not None:
            over = f"{config.beta_anneal_updates:,} updates"
        elif config.beta_anneal_agent_steps is not None:
            over = f"{config.beta_anneal_agent_steps:,} agent steps"
        beta = f"beta {config.beta_start:g} to 1 over {over}"
        return f"transitions of {steps}, drawn by priority ({beta})"

    # ---- transitions out ----

    def beta_at(self, clock: Clock, total_agent_steps: int) -> float | None:
        """beta_0 + (1 - beta_0) min(1, counter / total), exactly 1 at the end; None where draws are
        uniform. The counters are the run's own, and so is the length."""
        if not isinstance(self._starts, PrioritizedStarts):
            return None
        config = self._starts.config
        if config.beta_anneal_updates is not None:
            counter, total = clock.updates, config.beta_anneal_updates
        else:
            counter, total = clock.agent_steps, config.beta_anneal_agent_steps or total_agent_steps
        if total < 1:
            raise ReplayError(
                "Beta rises to 1 over the run, but nobody said how long that is: set "
                "replay.beta_anneal_agent_steps, or tell the agent by `follow`."
            )
        return Linear(config.beta_start, 1.0, total).value(counter)

    def sample(
        self,
        batch: int,
        beta: float | None = None,
        stream: np.random.Generator | None = None,
    ) -> NStepBatch:
        """Draw `batch` transitions; by priority, `beta` says how far weights correct for that.

        With a `stream` of its own it is a look from outside, which training does not notice.
        """
        streams, starts = self._starts.draw(batch, stream or self._stream)  # [B], [B]
        storage = self._storage
        slots = storage.slots(streams, starts)
        weights = self._weights(slots, beta)
        if stream is None:
            self._drawn = streams, starts
            self._starts.note_drawn(slots)
        age = storage.age.take(slots).astype(np.int64)
        ahead, steps, reward, terminated = self._follow(streams, starts, age)
        last = ahead[steps - 1, np.arange(batch)]
        both = np.array([slots, last])  # [2, B]: where x_t and x_{t+m} lie
        rows, ages = np.array([starts, starts + steps]), np.array([age, age + steps])
        columns = {
            path: self._stacks(path, streams, rows, ages)
            if path in self.row_spec.stack
            else self._gather(path, ahead[0] if head == "action" else both)
            for path, head in self._wanted
        }
        nested = unflatten(columns)
        discount = self._powers.take(steps) * ~terminated
        # Made one array, so that one transfer brings them all.
        numbers = np.array([reward, discount, weights, terminated], np.float32)
        there = torch.from_numpy(numbers).to(self.device).unbind()
        return NStepBatch(
            both_obs=nested["obs"],
            action=nested["action"],
            reward=there[0],
            discount=there[1],
            weights=there[2],
            steps=torch.from_numpy(steps).to(self.device),
            terminated=there[3],
            rows=torch.from_numpy(np.array([streams, starts])),
            both_extras={name: columns[name] for name in self.row_spec.extras},
        )

    def update_priorities(self, rows: Tensor, errors: Tensor | NDArray[Any]) -> None:
        """Set the priorities of drawn transitions (`batch.rows`) from their |TD error| [B].

        It may be late: those that have been overwritten since are left alone. Where draws are
        uniform there is nothing to do.
        """
        if not isinstance(self._starts, PrioritizedStarts):
            return
        if isinstance(errors, Tensor):
            errors = errors.detach().cpu().numpy()
        streams, starts = rows.numpy()
        if errors.shape != starts.shape:
            raise ReplayError(f"{errors.shape} priorities do not fit {starts.shape} transitions.")
        self._starts.update(streams, starts, errors.astype(np.float64))

    def diagnostics(
        self, batch: int, stream: np.random.Generator, beta: float | None = None
    ) -> dict[str, float]:
        """What is drawn now, in numbers (see diagnostics.py). A look from outside: it changes
        nothing. Empty while nothing can be drawn."""
        if not self.can_sample():
            return {}
        storage, looks = self._storage, []
        for _ in range(-(-LOOKED_AT // batch)):
            streams, starts = self._starts.draw(batch, stream)
            slots = storage.slots(streams, starts)
            age = storage.age.take(slots).astype(np.int64)
            ahead, steps, _, terminated = self._follow(streams, starts, age)
            newest = np.array(storage.written).take(streams) - 1
            looks.append(
                Look(
                    slots=slots,
                    age_agent_steps=(newest - starts - steps) * self.num_envs,
                    weights=self._weights(slots, beta),
                    terminated=terminated,
                    reward=storage.columns.gather_array("reward", ahead[0]),
                )
            )
        starts_now = self._starts
        return describe_draws(
            looks,
            times_drawn=starts_now.times_drawn.take(starts_now.valid_slots()),
            priorities=starts_now.priorities()
            if isinstance(starts_now, PrioritizedStarts)
            else None,
        )

    def _weights(self, slots: Ints, beta: float | None) -> NDArray[np.float64]:
        if not isinstance(self._starts, PrioritizedStarts):
            if beta is not None:
                raise ReplayError("beta has no meaning where draws are uniform; leave it out.")
            return np.ones(len(slots))
        if beta is None:
            raise ReplayError("Prioritized replay needs beta: give sample the value of beta_at.")
        return self._starts.weights(slots, beta)

    def _follow(
        self, streams: Ints, starts: Ints, age: Ints
    ) -> tuple[Ints, Ints, NDArray[np.float64], NDArray[np.bool_]]:
        """The slots of the rows ahead [n, B]; and m, the n-step return and whether the future was
        cut off: [B] each. Slots after the m-th are those of the first row ahead."""
        storage = self._storage
        rows = starts + self._ahead  # [n, B]
        slots = storage.slots(streams, rows)
        # A row k further on is of the same episode if it is k older. Where nothing was written yet
        # lies an older row or none at all; the first row, which is always there, is read instead.
        going = rows < np.array(storage.written).take(streams)
        going &= storage.age.take(slots) == age + self._ahead
        slots = np.where(going, slots, slots[0])
        cut = storage.columns.gather_array("terminated", slots)
        if self.cut is not None:
            cut = cut | storage.columns.gather_array(self.cut, slots).astype(np.bool_)
        if self.n_step > 1 and cut.any():  # up to the first row that cuts, that row included
            going &= np.cumsum(cut, axis=0) - cut == 0
        steps = going.sum(axis=0)
        reward = storage.columns.gather_array("reward", slots).astype(np.float64)
        if self.clip_rewards:
            reward = np.sign(reward)
        total = (self._powers[:-1, None] * np.where(going, reward, 0.0)).sum(axis=0)
        return slots, steps, total, cut[steps - 1, np.arange(len(steps))]

    def _gather(self, path: str, slots: Ints) -> Tensor:
        return self._storage.columns.gather(path, slots).to(self.device)

    def _stacks(self, path: str, streams: Ints, rows: Ints, age: Ints) -> Tensor:
        """Stacks [2, B, frames, ...] of rows [2, B], by the rule of acting."""
        back, blank = (np.moveaxis(x, 0, -1) for x in sources(age, self.row_spec.stack[path]))
        slots = self._storage.slots(streams[:, None], rows[:, :, None] - back)
        stacks = self._gather(path, slots)
        if self.row_spec.stack_pad == "zeros" and blank.any():
            stacks[torch.from_numpy(blank.copy()).to(self.device)] = 0
        return stacks
