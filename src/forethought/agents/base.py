"""What every agent is: it acts for a caller, stores what happened, learns, and can be saved whole.

The caller owns the acting state (planner warm start and random stream), so evaluation, opponents
and any number of environments never disturb training. The agent never counts agent steps: it reads
the run's clock.
"""

from __future__ import annotations

import functools
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from forethought import files
from forethought.clock import Clock
from forethought.config import ConfigError, ForethoughtError, ReplayConfig
from forethought.data import Dataset, OfflineReplay
from forethought.envs import VectorEnv, multi
from forethought.envs.episodes import Played, run_episodes
from forethought.replay import Batch, NStepBatch, NStepReplay, RingReplay
from forethought.seeding import Streams
from forethought.spaces import nested
from forethought.spaces.spec import EnvSpec
from forethought.spaces.structure import Structure

Json = dict[str, Any]
Tensors = dict[str, Tensor]
Metrics = dict[str, float]
log = logging.getLogger("forethought")
SAVED = ("agent.json", "agent.safetensors", "replay.safetensors", files.MANIFEST)
"""What `Agent.save` writes."""


AS_RETURNED = (
    "pass the observation of one environment; reset and step of make_env's return a batch of them"
)


class Agent(ABC):
    """An agent for one kind of environment. Built for acting only, it has neither replay nor
    optimisers."""

    name: ClassVar[str]
    metric_names: tuple[str, ...]
    """Every key that `train` and `acting_statistics` may return."""
    notes: tuple[str, ...] = ()
    """Sentences about how it was built, told when a run starts."""

    def __init__(
        self,
        spec: EnvSpec,
        config: Any,
        replay_config: ReplayConfig,
        *,
        streams: Streams,
        device: torch.device,
        num_envs: int = 1,
        for_acting: bool = False,
    ) -> None:
        self.spec, self.config, self.replay_config = spec, config, replay_config
        self.streams, self.device, self.num_envs = streams, device, num_envs
        self.for_acting = for_acting
        self.clock = Clock()
        """The run's own counters, to be read and never changed; see `follow`."""
        self.total_agent_steps = 0
        """The length of the run; 0 without one."""
        self.last_batch: Batch | NStepBatch | None = None
        """Of the last update, by reference: what a dump shows if it was not finite."""
        self._replay: RingReplay | OfflineReplay | None = None
        self._own_state: Any = None
        self._own_episode = 0  # of `act`: each has noise of its own

    def follow(self, clock: Clock, total_agent_steps: int) -> None:
        """Let schedules follow the counters of a run of this length."""
        self.clock, self.total_agent_steps = clock, total_agent_steps

    # ---- acting ----

    @abstractmethod
    def new_state(self, num_envs: int, streams: Streams, stream: str, *index: int) -> Any:
        """A fresh acting state for this many environments, drawing from the named stream."""

    @abstractmethod
    def act_batch(
        self,
        obs: Any,
        state: Any,
        first: NDArray[np.bool_],
        info: Sequence[dict[str, Any]] | dict[str, Any],
        explore: bool,
    ) -> tuple[Any, Any]:
        """Actions for a batch of observations, and the next state. `first` marks new episodes;
        `info` is what `make_env`'s environments return, or a dict for each of them."""

    def observe(self, obs: Any, state: Any, first: NDArray[np.bool_]) -> bool:
        """Let an acting state see a step that somebody else decides, as in the random phase.

        False, if it remembers nothing of what it sees: then nothing has happened.
        """
        return False

    def act_with_stats(
        self,
        obs: Any,
        explore: bool = False,
        info: dict[str, Any] | None = None,
        task: str | int | None = None,
    ) -> tuple[Any, dict[str, float]]:
        """One environment's action, and what the planner thought; arguments as in `act`."""
        if task is not None:
            raise ForethoughtError(
                f"This agent plays {self.spec.task} alone, so `act` takes no task ({task!r})."
            )
        alone, first = self._alone(obs), self._own_state is None
        if first:
            self._own_state = self.new_state(1, self.streams, "own-acting", self._own_episode)
            self._own_episode += 1
        action, self._own_state = self.act_batch(
            alone, self._own_state, np.array([first]), [info or {}], explore
        )
        return nested.index(action, 0), self.acting_statistics(self._own_state)

    def _alone(self, obs: Any) -> Any:
        """One observation as a batch of one; what has another shape than the task's is refused."""
        own: Any = self._observation_shapes.get("", self._observation_shapes)
        try:
            batch = nested.stack([obs])
        except ValueError as error:  # numpy's word for parts of unequal shapes
            raise ForethoughtError(
                f"Something irregular was given, but observations of {self.spec.task} have the "
                f"shape {own}: {AS_RETURNED}."
            ) from error
        found = {path: tuple(np.shape(leaf)[1:]) for path, leaf in nested.flatten(batch).items()}
        if found != self._observation_shapes:
            advice = f": {AS_RETURNED}"
            if self.spec.tasks:
                advice = (
                    ", padded to the widest of its tasks. For the observation of one task alone, "
                    "name the task: act(obs, task=NAME)"
                )
            raise ForethoughtError(
                f"An observation of shape {found.get('', found)} was given, but those of "
                f"{self.spec.task} have {own}{advice}."
            )
        return batch

    @functools.cached_property
    def _observation_shapes(self) -> dict[str, tuple[int, ...]]:
        """By path; the path of an observation without parts is empty."""
        return {leaf.path: leaf.shape for leaf in Structure.of(self.spec.observation_space).leaves}

    def acting_statistics(self, state: Any) -> Metrics:
        """What a person may want to know about the last decision made with this state."""
        return {}

    def act(
        self,
        obs: Any,
        explore: bool = False,
        info: dict[str, Any] | None = None,
        task: str | int | None = None,
    ) -> Any:
        """The action for one environment; the agent keeps the state between calls.

        A task that declares columns, such as an `action_mask`, says them in its `info`. An agent of
        several tasks is told by `task` which one this is, by its name or number: observation and
        action are then those that the task has alone. Without `task`, both are padded to the
        widest, and `info` says which it is, as the environments of several tasks give it.
        """
        return self.act_with_stats(obs, explore, info, task)[0]

    def on_episode_start(self) -> None:
        """Tell `act` that its environment was reset."""
        self._own_state = None

    def on_episode_end(self) -> None:
        """Tell `act` that its episode is over."""
        self._own_state = None

    @abstractmethod
    def acting_state(self, state: Any) -> tuple[Json, Tensors]:
        """An acting state as JSON and tensors, for a checkpoint."""

    @abstractmethod
    def restore_acting_state(self, state: Any, json: Json, tensors: Tensors) -> Any:
        """The acting state that `acting_state` described; `state` is a fresh one to fill."""

    def evaluate(self, env: VectorEnv, episodes: int = 10, seed: int = 1) -> Played:
        """Play episodes without exploration; the acting state and streams are their own."""
        streams = Streams(seed)
        number = episodes * max(1, len(env.spec_for_agent.tasks))  # of several tasks, so many each
        seeds = [streams.seed("eval", 0, episode) for episode in range(number)]
        return run_episodes(AgentPolicy(self, streams, 0), env, seeds)

    # ---- learning ----

    @abstractmethod
    def make_replay(self) -> RingReplay:
        """The replay that this agent learns from."""

    @property
    def replay(self) -> RingReplay | OfflineReplay:
        """Created on first use; a dataset with the same `sample` may take its place."""
        if self._replay is None:
            self._refuse_if_acting("replay: load it with for_acting=False to train on")
            self._replay = self.make_replay()
        return self._replay

    @replay.setter
    def replay(self, replay: RingReplay | OfflineReplay) -> None:
        self._replay = replay

    def _refuse_if_acting(self, what: str) -> None:
        if self.for_acting:
            raise ForethoughtError(f"This agent was loaded for acting only, so it has no {what}.")

    def check_new(self, steps: int) -> None:
        """Refuse what a new run of so many agent steps (offline: updates) should not begin with,
        though one that has begun so may go on."""
        if isinstance(self.replay, RingReplay):
            self.replay.check_new(steps)

    def learn_from(self, datasets: Sequence[Dataset], storage: str) -> None:
        """Put recorded data into the place of the replay; data that does not fit is refused."""
        raise ConfigError(f"{self.name} does not learn from recorded data; leave out offline.data.")

    def begin_with(
        self, tensors: Tensors, task: str, told: str, init_task: str | None, meta: Json
    ) -> tuple[str, ...]:
        """Take over what fits of the weights that another run of this agent saved for `task`.

        `meta` is what its manifest says, its `facts` among it; `told` names that run in sentences;
        `init_task` is the task there that a new one is like.
        Returns lines that tell what was taken.
        """
        raise ConfigError(
            f"{self.name} cannot begin with the weights of {told}; leave out train.init_from."
        )

    def store_transition(self, row: dict[str, Any], env_index: int = 0) -> None:
        """Keep one row (DESIGN's time convention) of one environment."""
        if self.spec.tasks and multi.TASK.name in row:
            multi.number_of(row[multi.TASK.name], self.spec)
        self.replay.add(row, env_index)

    @abstractmethod
    def train(self, updates: int = 1) -> Metrics:
        """Sample and update; means over these updates. `nonfinite` above 0: steps were skipped."""

    @abstractmethod
    def log_architecture(self) -> dict[str, int]:
        """Parameters per part, and their `total`."""

    def snapshots(self, position: int) -> dict[str, Json]:
        """What an evaluation leaves behind as snapshots/<name>-<position>.json, by name.

        `position` is how far the run is in its own unit: agent steps, of an offline run updates.
        It must not change the future: random numbers come from streams of its own.
        """
        return {}

    def replay_diagnostics(self) -> Metrics:
        """What is drawn from replay now, for train.csv; nothing where replay does not tell.

        The stream is that of the step, so that looking never changes what training draws.
        """
        replay, clock = self._replay, self.clock
        if not isinstance(replay, NStepReplay):
            return {}
        stream = self.streams.numpy("replay-diagnostics", clock.agent_steps)
        beta = replay.beta_at(clock, self.total_agent_steps)
        return replay.diagnostics(self.config.batch_size, stream, beta)

    def diagnostics(self) -> tuple[Json, Tensors]:
        """What helps to find why the last update was not finite, and the tensors of its batch.

        An agent adds `parts`: the `health` of each of its networks.
        """
        rows = None if self._replay is None else self._replay.last_draw()
        batch = {} if self.last_batch is None else nested.flatten(vars(self.last_batch))
        return {"batch_rows": rows}, batch

    # ---- saving ----

    @abstractmethod
    def state(self) -> tuple[Json, Tensors]:
        """Everything that training on needs, but for the replay."""

    @abstractmethod
    def restore(self, json: Json, tensors: Tensors) -> None:
        """The inverse of `state`."""

    def save(self, path: str | Path) -> None:
        """Write the whole agent, replay included, into a directory of its own, in the place of what
        `save` wrote there before; a directory that holds anything else is refused."""
        self._refuse_if_acting("optimisers to save: load it with for_acting=False")
        path = Path(path)
        stands = files.standing(path)
        _refuse_other(stands)
        if stands != path:
            stands.rename(path)
        json, tensors = self.state()
        parts = {"agent.safetensors": tensors}
        if self._replay is not None:
            replay_json, parts["replay.safetensors"] = self._replay.state(whole=True)
            json = json | {"replay": replay_json}
        needed = sum(map(files.tensor_bytes, parts.values())) + len(files.json_text(json))
        with files.publish(path, self.origin() | self.facts(), needed) as folder:
            for name, part in parts.items():
                files.save_tensors(folder / name, part)
            files.write_json(folder / "agent.json", json)

    def load(self, path: str | Path, replay_folder: Path | None = None) -> None:
        """Become the agent that `save` wrote, or that a run's checkpoint holds, whose replay has
        its sealed blocks in `replay_folder`. One of another agent or of other shapes is refused."""
        path = files.standing(Path(path))
        manifest = files.verify(path)
        self.check_origin(path, manifest.meta)
        files.require_files(path, manifest, ("agent.json", "agent.safetensors"))
        json = files.read_json(path / "agent.json")
        with files.content_of(path):
            self.restore(json, files.load_tensors(path / "agent.safetensors"))
            if "replay" in json and not self.for_acting:
                files.require_files(path, manifest, ("replay.safetensors",))
                tensors = files.load_tensors(path / "replay.safetensors")
                self.replay.restore(json["replay"], tensors, replay_folder)

    def origin(self) -> Json:
        """Who writes a file and for what, for its manifest."""
        return {"agent": self.name, "task": self.spec.task, **self.spec.shapes}

    def facts(self) -> Json:
        """What else a file's manifest tells of its writer, for people and for `check_origin`."""
        return {}

    def check_origin(self, path: Path, meta: Json) -> None:
        """Refuse the file of another agent or of other shapes; say when the task is another."""
        here = self.origin()
        there = {key: meta.get(key, here[key]) for key in here}  # older files do not tell
        if there == here:
            return
        sides = [
            f"{side['agent']} for {side['task']} (observations {side['observations']}; actions "
            f"{side['actions']})"
            for side in (there, here)
        ]
        if {**there, "task": here["task"]} != here:
            raise files.FileError(
                f"{path} was written by {sides[0]}, but this is {sides[1]}: use the agent and task "
                "that it was trained with."
            )
        log.warning("%s was written by %s, but this is %s.", path, *sides)


def check_shapes(model: nn.Module, saved: Tensors) -> None:
    """One sentence where saved weights belong to another model."""
    own = model.state_dict()
    for name in sorted(own.keys() | saved.keys()):
        here = tuple(own[name].shape) if name in own else "absent"
        there = tuple(saved[name].shape) if name in saved else "absent"
        if here != there:
            raise ForethoughtError(
                f"The saved weights are of another model: {name} is {there} in the file and {here} "
                "in this agent. Use the configuration and task that it was trained with."
            )


def _refuse_other(path: Path) -> None:
    """Only a saved agent, or an empty directory, may be replaced by a saved agent."""
    if not os.path.lexists(path):
        return
    own = path.is_dir() and not path.is_symlink()
    inside = {entry.name for entry in path.iterdir()} if own else None
    ours = inside is not None and inside <= set(SAVED) and files.MANIFEST in inside
    if inside != set() and not ours:
        raise files.FileError(
            f"{path} is there and is no saved agent, so it is not replaced: save into a directory "
            "of another name, or remove this one."
        )


def below(prefix: str, tensors: Tensors) -> Tensors:
    """The tensors whose names begin with `prefix/`, without it."""
    return {k[len(prefix) + 1 :]: v for k, v in tensors.items() if k.startswith(prefix + "/")}


def parameter_names(model: nn.Module) -> dict[Tensor, str]:
    """The name of each parameter, by which its optimiser's state is saved."""
    return {parameter: name for name, parameter in model.named_parameters()}


@dataclass(frozen=True)
class AgentPolicy:
    """An agent without exploration, drawing from the stream ("eval-planner", index)."""

    agent: Agent
    streams: Streams
    index: int

    def start(self, num_envs: int) -> Any:
        return self.agent.new_state(num_envs, self.streams, "eval-planner", self.index)

    def act(
        self, obs: Any, state: Any, first: NDArray[np.bool_], infos: Sequence[dict[str, Any]]
    ) -> tuple[Any, Any]:
        return self.agent.act_batch(obs, state, first, infos, explore=False)
