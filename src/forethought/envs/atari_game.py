"""One game of the Atari 2600 as agents see it: a frame of 84 x 84 grey pixels per decision.

The order: no-ops and FIRE at a reset; the action held for some frames, their rewards summed; of the
last two frames the brighter value of each pixel, for sprites flicker; grey; 84 x 84 by INTER_AREA.
Frames come singly: agents stack them by the rule of replay/stacks.py. With the same seed and
actions all frames equal those of gymnasium's AtariPreprocessing, but for the last one of a game
that ends before its decision does: gymnasium shows the frame before that again.

Loading a game takes ALE many times as long as a reset, and gymnasium loads it anew at every reset
with a seed. Here it is loaded once, and each game begins from a copy of the first state. In Berzerk
and DoubleDunk, ALE draws numbers of its stickiness while it resets, so there the seeds of gymnasium
give other games where actions stick.
"""

from __future__ import annotations

import importlib
from typing import Any

import gymnasium
import numpy as np
from gymnasium.utils import seeding
from numpy.typing import NDArray

from forethought.config import AtariConfig
from forethought.spaces.spec import Column

SIDE = 84
FRAMES_PER_SECOND = 60
NOOP, FIRE = 0, 1
"""ALE's numbers of these actions."""
KEEP_EVERY = 16
"""Decisions between states that are kept for snapshots."""
MOST_FRAMES = 10_000_000
"""Frames of one game that a snapshot may tell of."""
LIFE_LOST = Column("life_lost", (), np.dtype(np.bool_), "life_lost")
"""Ends the future for learning, though the game goes on."""
Frame = NDArray[np.uint8]
Snapshot = dict[str, NDArray[Any]]


class Stickiness:
    """Which frames obey a new action, by the rule and the numbers of ALE.

    ALE would do this itself, but the action that it sticks to is no part of the state that it
    saves, so that a game could not be resumed exactly. It draws two numbers per frame, one for each
    player, from std::mt19937, which RandomState is too.
    """

    BLOCK = 4096

    def __init__(self, probability: float, seed: int) -> None:
        self.seed = seed
        self.frames = 0
        """Taken so far."""
        # ALE compares in float64 with a probability that it stores as float32.
        self._least = int(np.ceil(float(np.float32(probability)) * 2**32))
        self._numbers = np.random.RandomState(seed)
        self._block: list[bool] = []
        self._at = 0

    def take(self, frames: int) -> list[bool]:
        """Whether each of the next frames obeys."""
        while self._at + frames > len(self._block):
            drawn = self._numbers.randint(0, 2**32, size=2 * self.BLOCK, dtype=np.uint32)
            self._block = self._block[self._at :] + (drawn[::2] >= self._least).tolist()
            self._at = 0
        taken = self._block[self._at : self._at + frames]
        self._at += frames
        self.frames += frames
        return taken


class AtariGame(gymnasium.Env[Frame, np.int64]):
    """Steps are decisions; rewards are the game's own, and only the game's end terminates."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": FRAMES_PER_SECOND}

    def __init__(
        self,
        rom: str,
        options: AtariConfig,
        sticky: float,
        action_repeat: int,
        render_mode: str | None = None,
    ) -> None:
        """`rom` is ALE's name; `sticky` takes the place of what the options leave to the name."""
        self.render_mode = render_mode
        self.frames_per_step = action_repeat
        self.sign_rewards = options.clip_rewards
        self.columns = (LIFE_LOST,) if options.life_loss else ()
        self._options, self._probability = options, sticky
        ale_py, self._cv2 = importlib.import_module("ale_py"), importlib.import_module("cv2")
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        self._ale = ale_py.ALEInterface()
        self._state_of = ale_py.ALEState
        self._ale.setFloat("repeat_action_probability", 0.0)  # see Stickiness
        self._ale.setInt("random_seed", 0)  # else the clock seeds what a reset may draw
        self._ale.loadROM(importlib.import_module("ale_py.roms").get_rom_path(rom))
        self._ale.reset_game()
        # Without ALE's random numbers: they decide nothing where ALE itself is not sticky.
        self._beginning = self._ale.cloneState()
        self._state_bytes = len(self._beginning.serialize())
        minimal, every = self._ale.getMinimalActionSet(), self._ale.getLegalActionSet()
        self._actions = [int(a.value) for a in (every if options.full_action_set else minimal)]
        self.action_space = gymnasium.spaces.Discrete(len(self._actions))
        pixels: Any = gymnasium.spaces.Box(0, 255, (SIDE, SIDE), np.uint8)
        self.observation_space = pixels
        # The last two frames of a decision, and what is made of them.
        *self._screens, self._shown = (
            np.zeros(self._ale.getScreenDims(), np.uint8) for _ in range(3)
        )
        self._first_screen: Frame = self._ale.getScreenGrayscale()
        self._sticky: Stickiness | None = None
        self._pressed = NOOP  # what the console saw in the last frame
        self._lives, self._life_lost = 0, False
        self._older: tuple[Any, list[int]] | None = None  # see `_keep`
        self._newer: tuple[Any, list[int]] | None = None
        self._since: list[int] = []

    @property
    def can_fire(self) -> bool:
        """Whether FIRE is among the actions."""
        return FIRE in self._actions

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Frame, dict[str, Any]]:
        """A new game, by the seeds that gymnasium would take."""
        super().reset(seed=seed)
        seed = int(self.np_random.integers(2**31)) if seed is None else seed
        of_noops, of_ale = (int(x) for x in np.random.SeedSequence(seed).generate_state(2))
        most = self._options.noop_max
        frames = int(seeding.np_random(of_noops)[0].integers(1, most + 1)) if most else 0
        self._begin(of_ale)
        for _ in range(frames):
            self._press(NOOP)
            if self._ale.game_over(with_truncation=False):
                self._begin(of_ale)
        self._ale.getScreenGrayscale(self._shown)
        if self._options.fire_on_reset:
            self._hold(FIRE)  # a decision like any other: it leaves what is to be shown
            if self._ale.game_over(with_truncation=False):
                self._begin(of_ale)
        if self._ale.getEpisodeFrameNumber() == self._beginning.getEpisodeFrameNumber():
            self._shown[:] = self._first_screen  # a state comes back without its picture
        self._lives, self._life_lost = self._ale.lives(), False
        self._keep_beginning()
        return self._show(), self._info()

    def step(self, action: np.int64) -> tuple[Frame, float, bool, bool, dict[str, Any]]:
        """One decision; it ends early only where the game does."""
        reward = self._hold(self._actions[int(action)])
        lives = self._ale.lives()
        self._lives, self._life_lost = lives, lives < self._lives
        terminated = self._ale.game_over(with_truncation=False)
        self._keep(int(action))
        return self._show(), float(reward), terminated, False, self._info()

    def render(self) -> Frame | None:
        """The screen in colours, [210, 160, 3] in most games."""
        if self.render_mode is None:
            return None
        picture: Frame = self._ale.getScreenRGB()
        return picture

    def snapshot(self) -> Snapshot | None:
        """What decides the rest of the game: the emulator some decisions ago, the actions since,
        and the two screens that they must lead to, one for each of the buffers that ALE draws into
        by turns. None where there are no such two: decisions take one frame, or none was made yet.
        """
        if self.frames_per_step == 1 or not self._since:
            return None
        assert self._older is not None
        state, numbers = self._older
        return {
            "ale": np.frombuffer(state.serialize(), np.uint8),
            "numbers": np.array(numbers, np.int64),
            "actions": np.array(self._since, np.int64),
            "screens": np.stack(self._screens),
        }

    def restore(self, snapshot: Snapshot) -> tuple[Frame, dict[str, Any]] | None:
        """The last observation and info of the game that `snapshot` described, which goes on here.

        None where a screen is another one. A few games (Qbert, Tetris) draw over old pictures,
        which ALE does not save; and so may an emulator of another version. Both screens count, not
        the brighter of them that is shown: what is missing in one may hide behind the other.
        """
        if not self._fits(snapshot):
            return None
        self._ale.reset_game()
        self._ale.restoreState(self._state_of(snapshot["ale"].tobytes()))
        seed, frames, pressed, lives, lost = (int(x) for x in snapshot["numbers"])
        self._begin_sticking(seed)
        if self._sticky is not None:
            self._sticky.take(frames)
        self._pressed, self._lives, self._life_lost = pressed, lives, bool(lost)
        self._keep_beginning()
        for action in snapshot["actions"]:
            self.step(action)
        if not np.array_equal(self._screens, snapshot["screens"]):
            return None
        return self._show(), self._info()

    def _fits(self, snapshot: Snapshot) -> bool:
        """Whether it can be one of this game: ALE reads past the end of a state that is too short,
        and a file may hold anything."""
        two = (2, *self._shown.shape)
        shapes = {"ale": (self._state_bytes,), "numbers": (5,), "screens": two}
        if any(snapshot.get(key, np.zeros(0)).shape != shape for key, shape in shapes.items()):
            return False
        actions = snapshot.get("actions", np.zeros((0, 0)))
        if actions.ndim != 1 or not 1 <= len(actions) < 2 * KEEP_EVERY:
            return False
        seed, frames, pressed = (int(x) for x in snapshot["numbers"][:3])
        known = bool(np.all((actions >= 0) & (actions < len(self._actions))))
        # ALE ends the whole process at an action that it does not know.
        known = known and (pressed == NOOP or pressed in self._actions)
        return known and 0 <= seed < 2**32 and 0 <= frames <= MOST_FRAMES

    def _keep_beginning(self) -> None:
        self._older = self._newer = self._key()
        self._since = []

    def _keep(self, action: int) -> None:
        """Remembers an action, and now and then the state."""
        self._since.append(action)
        if len(self._since) % KEEP_EVERY == 0:
            if len(self._since) == 2 * KEEP_EVERY:
                self._older, self._since = self._newer, self._since[KEEP_EVERY:]
            self._newer = self._key()

    def _key(self) -> tuple[Any, list[int]]:
        """The emulator's state, and what decides the game beside it."""
        sticky = self._sticky
        position = [sticky.seed, sticky.frames] if sticky else [0, 0]
        return self._ale.cloneState(), [*position, self._pressed, self._lives, self._life_lost]

    def _begin(self, seed: int) -> None:
        """The game's first state, before any no-op."""
        self._ale.reset_game()  # only this clears the picture, over which some games draw
        self._ale.restoreState(self._beginning)
        self._begin_sticking(seed)

    def _begin_sticking(self, seed: int) -> None:
        self._sticky = Stickiness(self._probability, seed) if self._probability else None
        self._pressed = NOOP

    def _press(self, action: int) -> float:
        """One frame."""
        if self._sticky is None or self._sticky.take(1)[0]:
            self._pressed = action
        return float(self._ale.act(self._pressed))

    def _hold(self, action: int) -> float:
        """An action for the frames of one decision, and the sum of their rewards.

        Shows the brighter pixels of the last two frames. If the game ends before those, it is its
        last frame: never one of an earlier decision.
        """
        ale, last, reward = self._ale, self.frames_per_step - 1, 0
        first, second = self._screens
        obeys = None if self._sticky is None else self._sticky.take(last + 1)
        for frame in range(last + 1):
            if obeys is None or obeys[frame]:
                self._pressed = action
            reward += ale.act(self._pressed)
            if ale.game_over(with_truncation=False):
                break
            if frame == last - 1:
                ale.getScreenGrayscale(first)
        ale.getScreenGrayscale(second)
        np.maximum(first if frame == last > 0 else second, second, out=self._shown)
        return reward

    def _show(self) -> Frame:
        cv2 = self._cv2
        shown: Frame = cv2.resize(self._shown, (SIDE, SIDE), interpolation=cv2.INTER_AREA)
        return shown

    def _info(self) -> dict[str, Any]:
        lost = {LIFE_LOST.source: self._life_lost} if self.columns else {}
        return {"lives": self._lives, **lost}
