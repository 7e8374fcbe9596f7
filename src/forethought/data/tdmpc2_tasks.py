"""The tasks of the official many-task sets, in the order of their numbers in the files."""

from __future__ import annotations

# fmt: off
DMC = (
    "walker-stand", "walker-walk", "walker-run", "cheetah-run", "reacher-easy",
    "reacher-hard", "acrobot-swingup", "pendulum-swingup", "cartpole-balance",
    "cartpole-balance-sparse", "cartpole-swingup", "cartpole-swingup-sparse", "cup-catch",
    "finger-spin", "finger-turn-easy", "finger-turn-hard", "fish-swim", "hopper-stand",
    "hopper-hop",
)
DMC_CHANGED = (
    "walker-walk-backwards", "walker-run-backwards", "cheetah-run-backwards",
    "cheetah-run-front", "cheetah-run-back", "cheetah-jump", "hopper-hop-backwards",
    "reacher-three-easy", "reacher-three-hard", "cup-spin", "pendulum-spin",
)
"""Tasks that the authors made for DeepMind Control; this package has no environments for them."""
META_WORLD = (
    "assembly", "basketball", "button-press-topdown", "button-press-topdown-wall",
    "button-press", "button-press-wall", "coffee-button", "coffee-pull", "coffee-push",
    "dial-turn", "disassemble", "door-open", "door-close", "drawer-close", "drawer-open",
    "faucet-open", "faucet-close", "hammer", "handle-press-side", "handle-press",
    "handle-pull-side", "handle-pull", "lever-pull", "peg-insert-side", "peg-unplug-side",
    "pick-out-of-hole", "pick-place", "pick-place-wall", "plate-slide", "plate-slide-side",
    "plate-slide-back", "plate-slide-back-side", "push-back", "push", "push-wall", "reach",
    "reach-wall", "shelf-place", "soccer", "stick-push", "stick-pull", "sweep-into", "sweep",
    "window-open", "window-close", "bin-picking", "box-close", "door-lock", "door-unlock",
    "hand-insert",
)
# fmt: on


def without_environment() -> tuple[str, ...]:
    """Tasks of the sets that this package has no environments for."""
    return (*(f"dmc:{name}" for name in DMC_CHANGED), *(f"metaworld:{x}" for x in META_WORLD))


MT30 = tuple(f"dmc:{name}" for name in (*DMC, *DMC_CHANGED))
MT80 = (*MT30, *(f"metaworld:{name}" for name in META_WORLD))
TASK_SETS = {501: MT30, 101: MT80}
"""By the rows of an episode, as the official trainer tells the two sets apart."""
