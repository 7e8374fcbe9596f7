"""Options of TD3. The defaults are those of the authors' code; nothing imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from forethought.agents.actor_critic.config import ActorCriticConfig
from forethought.config import refuse_idle


@dataclass(frozen=True)
class TD3Config(ActorCriticConfig):
    """Twin delayed DDPG: a deterministic actor, smoothed targets, an actor that follows slowly."""

    run_defaults: ClassVar[Mapping[str, Any]] = {
        "train": {"seed_agent_steps": 25_000, "seed_updates": 0}
    }
    idle: ClassVar[Mapping[tuple[str, Any], tuple[str, ...]]] = {
        ("target_noise", 0.0): ("target_noise_clip",)
    }
    """Without noise on the target actor's actions there is nothing to clip."""
    critic_loss: Literal["half_sum", "sum", "mean"] = "sum"
    """How the squared errors of the critics are joined: half their sum, their sum or their mean."""
    policy_delay: int = 2
    """Updates of the critics per update of the actor and of all target networks."""
    exploration_noise: float = 0.1
    """Standard deviation of the noise on actions in training; actions go from -1 to 1."""
    target_noise: float = 0.2
    """Standard deviation of the noise on the target actor's actions, in the same units."""
    target_noise_clip: float = 0.5
    """Largest noise on the target actor's actions."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("policy_delay", self.policy_delay >= 1, "at least 1")
        for name in ("exploration_noise", "target_noise", "target_noise_clip"):
            self.check(name, getattr(self, name) >= 0, "at least 0")
        ok = self.target_noise == 0 or self.target_noise_clip > 0
        self.check("target_noise_clip", ok, "above 0; for no noise set agent.target_noise 0 alone")
        refuse_idle(self, "agent")
