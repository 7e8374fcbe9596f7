"""`dmc:<domain>-<task>`: DeepMind Control behind gymnasium's interface, names as TD-MPC2 uses them.

One step here is one control step of the suite, of which a decision repeats two. The suite's own
time limit is switched off, because limits are ours: 500 decisions unless the run says otherwise.
"""

from __future__ import annotations

import importlib
import logging
import sys
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from forethought.config import unknown
from forethought.envs import rendering
from forethought.envs.families import LIST_HINT, Built, require_extra
from forethought.spaces.agent_view import rescale

ACTION_REPEAT = 2
FRAMES = 1000
PICTURE = (360, 480)
"""Height and width of a picture: in a square one, the cart of cartpole leaves it at both ends."""
PIXELS = (64, 64)
"""Height and width of what an agent sees."""
CAMERAS = {"quadruped": 2}
"""Cameras that the official TD-MPC2 sees by, where it is not the first."""
PLAIN = {"shadow": False, "reflection": False}
"""Without a graphics card, shadows take four fifths of the time."""

# A copy of dm_control.suite.ALL_TASKS (a test compares them): listing must not import MuJoCo.
TASKS = {
    "acrobot": ("swingup", "swingup_sparse"),
    "ball_in_cup": ("catch",),
    "cartpole": (
        "balance",
        "balance_sparse",
        "swingup",
        "swingup_sparse",
        "two_poles",
        "three_poles",
    ),
    "cheetah": ("run",),
    "dog": ("stand", "walk", "trot", "run", "fetch"),
    "finger": ("spin", "turn_easy", "turn_hard"),
    "fish": ("upright", "swim"),
    "hopper": ("stand", "hop"),
    "humanoid": ("stand", "walk", "run", "run_pure_state"),
    "humanoid_CMU": ("stand", "walk", "run"),
    "lqr": ("lqr_2_1", "lqr_6_2"),
    "manipulator": ("bring_ball", "bring_peg", "insert_ball", "insert_peg"),
    "pendulum": ("swingup",),
    "point_mass": ("easy", "hard"),
    "quadruped": ("walk", "run", "escape", "fetch"),
    "reacher": ("easy", "hard"),
    "stacker": ("stack_2", "stack_4"),
    "swimmer": ("swimmer6", "swimmer15"),
    "walker": ("stand", "walk", "run"),
}
SHORT = {"ball_in_cup": "cup", "point_mass": "pointmass"}
"""Domains that the official TD-MPC2 calls by another name; both names are accepted."""
RANDOM_MODEL = ("lqr",)
"""Domains that draw the model itself at random, and so must be built anew for every episode."""
TERMINATING = ("lqr",)
"""Domains whose episodes may end with discount 0."""

NEEDS_GL = (("quadruped", "escape"),)
"""Tasks that fail without rendering, because each reset uploads its terrain for it."""


def names() -> list[str]:
    """Each task once, by the name that TD-MPC2 uses."""
    return [
        f"{SHORT.get(domain, domain)}-{task.replace('_', '-')}"
        for domain, tasks in TASKS.items()
        for task in tasks
    ]


def suite_name(name: str) -> tuple[str, str]:
    """The suite's (domain, task) of a name such as cup-catch or cartpole-swingup-sparse."""
    for domain, tasks in TASKS.items():
        for task in tasks:
            spellings = {
                f"{d}-{t}"
                for d in (domain, SHORT.get(domain, domain))
                for t in (task, task.replace("_", "-"))
            }
            if name in spellings:
                return domain, task
    raise unknown("task", f"dmc:{name}", [f"dmc:{known}" for known in names()], LIST_HINT)


def check(name: str) -> None:
    """Refuse an unknown task, or a missing extra."""
    suite_name(name)
    require_extra(f"dmc:{name}", "dmc", "dm_control", "mujoco")


def build(name: str, render_mode: str | None, obs: str | None = None) -> Built:
    """The environment with the suite's defaults."""
    domain, task = suite_name(name)
    env = DmcEnv(domain, task, render_mode, obs)
    return Built(env, ACTION_REPEAT, FRAMES, terminates=domain in TERMINATING)


class DmcEnv(gymnasium.Env[Any, NDArray[np.float32]]):
    """One task: observations flattened in the suite's order to float32, actions in [-1, 1].

    With `obs` they are the camera's pictures instead, [64, 64, 3].
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 50}

    def __init__(
        self, domain: str, task: str, render_mode: str | None = None, obs: str | None = None
    ) -> None:
        self.render_mode = render_mode
        self._domain, self._task, self._obs = domain, task, obs
        drawn = render_mode is not None or obs is not None
        self._pictures = drawn or (domain, task) in NEEDS_GL
        self._env = self._load(seed=0)
        self._camera: Any = None
        self.metadata = {
            **self.metadata,
            "render_fps": 1.0 / float(self._env.control_timestep()),
        }
        sizes = [int(np.prod(s.shape)) for s in self._env.observation_spec().values()]
        space: Any = gymnasium.spaces.Box(-np.inf, np.inf, (sum(sizes),), np.float32)
        self.observation_space = (
            space if obs is None else gymnasium.spaces.Box(0, 255, (*PIXELS, 3), np.uint8)
        )
        action = self._env.action_spec()
        # The forces of lqr have no limit, which the suite writes as 1e10; they act as they are.
        limited = np.broadcast_to(action.maximum, action.shape) < 1e10
        self._low = np.where(limited, action.minimum, -1.0)
        self._high = np.where(limited, action.maximum, 1.0)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, action.shape, np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """A new episode. The task's random state starts afresh from the seed, so that the episode
        is a function of (seed, actions) whatever happened before."""
        super().reset(seed=seed)
        task_seed = int(self.np_random.integers(2**31))
        if self._domain in RANDOM_MODEL:
            self._env.close()
            self._env, self._camera = self._load(task_seed), None
        self._env.task.random.seed(task_seed)
        return self._seen(self._env.reset().observation), {}

    def step(self, action: NDArray[np.float32]) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """One control step; only a discount of 0 terminates."""
        now = self._env.step(rescale(np.asarray(action, np.float64), self._low, self._high))
        terminated = bool(now.last() and now.discount == 0.0)
        truncated = bool(now.last() and not terminated)
        return self._seen(now.observation), float(now.reward or 0.0), terminated, truncated, {}

    def render(self) -> NDArray[np.uint8] | None:
        """The first camera's picture, [360, 480, 3]."""
        if self.render_mode is None:
            return None
        pixels = self._env.physics.render(*PICTURE, camera_id=0)
        return np.array(pixels, np.uint8)

    def draw(self) -> NDArray[np.uint8]:
        """What the agent sees, [64, 64, 3]: a fresh array."""
        physics = self._env.physics
        if self._camera is None:  # kept: making one costs as much as a picture
            engine = importlib.import_module("dm_control.mujoco.engine")
            self._camera = engine.Camera(physics, *PIXELS, CAMERAS.get(self._domain, 0))
        flags = PLAIN if self._obs == "plain_pixels" else None
        return np.array(self._camera.render(render_flag_overrides=flags), np.uint8)

    def _seen(self, observation: dict[str, Any]) -> Any:
        """Pictures are drawn when TaskEnv asks: of repeated frames nobody sees the first ones."""
        return _flat(observation) if self._obs is None else self.draw

    def close(self) -> None:
        """Free the simulation and its rendering context."""
        self._env.close()

    def _load(self, seed: int) -> Any:
        return _import_suite(self._pictures).load(
            self._domain, self._task, task_kwargs={"time_limit": float("inf"), "random": seed}
        )


def _flat(observation: dict[str, Any]) -> NDArray[np.float32]:
    return np.concatenate([np.ravel(value) for value in observation.values()]).astype(np.float32)


def _worth_reading(record: logging.LogRecord) -> bool:
    """Whether it concerns a person: what MuJoCo finds old in the suite's models is not theirs."""
    return "is deprecated and will be removed" not in record.getMessage()


def _import_suite(pictures: bool) -> Any:
    """dm_control.suite, with a rendering backend only where one is asked for."""
    logging.getLogger("absl").addFilter(_worth_reading)
    if "dm_control._render" not in sys.modules:
        with rendering.switched_off():
            importlib.import_module("dm_control.suite")
    render = sys.modules["dm_control._render"]
    if pictures and render.BACKEND not in ("egl", "osmesa", "glfw"):
        rendering.choose_backend()
        importlib.reload(render)  # others reach it by its module, so they see the new backend
    return importlib.import_module("dm_control.suite")
