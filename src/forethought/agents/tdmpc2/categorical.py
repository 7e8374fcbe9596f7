"""Discrete actions of any structure, as the rows of one table: policy, values, planning.

Where the table is short enough nothing is sampled in an update: value targets take the greatest
target Q over all legal actions, and the policy's loss its expectation of Q and its entropy over
all of them. Q is computed for legal pairs of state and action only, in chunks, with the state's
part of the first layer computed once per state.

Shapes: R states, N actions in the table, F factors, M pairs of a state and an action.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forethought.agents.tdmpc2.actions import Actions, PolicyOutput, PolicyTerms, refuse_options
from forethought.agents.tdmpc2.config import TDMPC2Config
from forethought.agents.tdmpc2.noise import PlanNoise, UpdateNoise, draw_categorical_plan_noise
from forethought.nets.categorical import CategoricalPolicy
from forethought.planning.categorical import (
    CategoricalNoise,
    CategoricalPlan,
    CategoricalSettings,
    Score,
    categorical_mppi,
)
from forethought.spaces.action_codec import ActionCodec

if TYPE_CHECKING:
    from forethought.agents.tdmpc2.model import QEnsemble, WorldModel

MOST_LISTED = 512
"""Actions up to which an update looks at all of them."""
LIKELIEST = 64
"""Beyond, value targets take the greatest Q of so many, unless agent.q_target_top_k is given."""
SAMPLES = 16
"""And the policy's loss, or its expectation of Q, are estimated from so many draws per state."""
CHUNK = 4096
"""Pairs of state and action whose Q is computed at once: what a processor's cache holds."""


class CategoricalActions(Actions):
    """Actions that are rows of a codec's table."""

    plan_metric = "plan_entropy"
    masks_stay = False  # what later states allow is not known

    def __init__(self, codec: ActionCodec, config: TDMPC2Config) -> None:
        self.codec, self.config = codec, config
        self.noise_dim, self.plan_width = len(codec.choices), codec.size
        self.draw = torch.rand
        self.target = config.q_target or "max"
        self.top_k = config.q_target_top_k
        if self.top_k is None and codec.size > MOST_LISTED:
            self.top_k = LIKELIEST
        self.lists_all = self.top_k is None

    @staticmethod
    def check(config: TDMPC2Config, task: str) -> None:
        """Refuse options that mean something for continuous actions only."""
        rule = f"left out: the actions of {task} are discrete, and it has no effect on them"
        names = ("planner.min_std", "planner.max_std", "entropy", "log_std_min", "log_std_max")
        refuse_options(config, dict.fromkeys(names, rule))

    def describe(self) -> str:
        """One sentence for the start of a run."""
        count = f"{self.codec.size:,} distinct actions"
        if self.noise_dim > 1:
            count += f" of {self.noise_dim} choices each"
        if self.lists_all:
            return f"{count}: an update looks at all of them (agent.q_target {self.target})."
        many = f"more than {MOST_LISTED}" if self.codec.size > MOST_LISTED else "limited by option"
        target = {
            "max": f"value targets take the greatest Q of the {self.top_k} that the policy finds "
            "likeliest (agent.q_target_top_k)",
            "policy": "value targets take Q of one draw from the policy",
            "expected": f"value targets take the mean Q of {SAMPLES} draws from the policy",
        }[self.target]
        return f"{count}, {many}: {target}, and the policy's loss takes {SAMPLES} draws per state."

    # ---- the policy ----

    def make_policy(self, latent: int, hidden: list[int]) -> CategoricalPolicy:
        return CategoricalPolicy(latent, hidden, self.codec.table, self.codec.choices)

    def pi(
        self,
        policy: CategoricalPolicy,
        z: Tensor,
        noise: Tensor | None,
        mask: Tensor | None = None,
    ) -> PolicyOutput:
        """A categorical distribution, sampled with uniform noise; without it, the likeliest."""
        log_p = policy.log_probs(z, mask)  # [..., N]
        entropy = _entropy(log_p)
        best = log_p.argmax(-1)
        action = best if noise is None else policy.sample(z, noise, mask)
        return PolicyOutput(action, best, entropy, entropy)

    def sample(
        self, policy: CategoricalPolicy, z: Tensor, noise: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        return policy.sample(z, noise, mask)

    def no_sequences(self, noise: Tensor) -> Tensor:
        return noise.new_zeros(noise.shape[:-1], dtype=torch.int64)

    # ---- what a state is worth ----

    def next_value(
        self, model: WorldModel, z: Tensor, noise: UpdateNoise, mask: Tensor | None
    ) -> Tensor:
        """max: the greatest over actions of the lesser of two target Q; policy: that lesser one at
        a draw from the policy; expected: its mean under the policy."""
        shape = z.shape[:-1]  # [T, B]
        z, legal = z.flatten(0, -2), None if mask is None else mask.flatten(0, -2)  # [R, ...]
        policy, heads = model.policy, noise.target_heads
        assert isinstance(policy, CategoricalPolicy)
        if self.target == "max" and not self.lists_all:
            assert self.top_k is not None
            action, log_p = policy.likeliest(z, self.top_k, legal)  # [R, k]
            q = chosen_values(model, model.target_q, z, heads, action, log_p > -torch.inf)
            return q.amin(0).amax(-1).view(shape)
        if self.target == "policy" or not self.lists_all:
            action = self._draws(policy, z, noise.target_policy, legal)  # [R, S]
            q = chosen_values(model, model.target_q, z, heads, action)
            return q.amin(0).mean(-1).view(shape)
        least = table_values(model, model.target_q, z, heads, legal).amin(0)  # [R, N]
        if self.target == "max":
            return least.amax(-1).view(shape)
        return _mean(policy.log_probs(z, legal), least).view(shape)

    def policy_terms(
        self, model: WorldModel, zs: Tensor, noise: UpdateNoise, mask: Tensor | None
    ) -> PolicyTerms:
        """The policy's expectation of Q (the mean of two heads, with dropout) and its entropy.

        Q is a number here: the gradient goes through the probabilities alone. Dropout draws one
        mask per state, the same for all of its actions.
        """
        shape = zs.shape[:-1]  # [T+1, B]
        z, legal = zs.flatten(0, -2), None if mask is None else mask.flatten(0, -2)
        policy, heads, keep = model.policy, noise.policy_heads, noise.policy_keep
        assert isinstance(policy, CategoricalPolicy)
        if self.lists_all:
            with torch.no_grad():
                each = table_values(model, model.q, z, heads, legal, keep).mean(0)  # [R, N]
            log_p = policy.log_probs(z, legal)
            q, entropy = _mean(log_p, each), _entropy(log_p)
        else:
            with torch.no_grad():
                action = self._draws(policy, z, noise.policy, legal)  # [R, S]
                each = chosen_values(model, model.q, z, heads, action, keep=keep).mean(0)
            log_p = policy.log_prob(z.unsqueeze(1), action, _for_draws(legal))  # [R, S]
            q, entropy = score_mean(each, log_p), score_mean(-log_p.detach(), log_p)
        return PolicyTerms(q.view(shape), entropy.view(shape), entropy.view(shape))

    def _draws(
        self, policy: CategoricalPolicy, z: Tensor, noise: Tensor, legal: Tensor | None
    ) -> Tensor:
        """As many draws from the policy per state as there is noise [..., S * F] for: [R, S]."""
        uniform = noise.reshape(len(z), -1, self.noise_dim)  # [R, S, F]
        return policy.sample(z.unsqueeze(1), uniform, _for_draws(legal))

    def update_noise(self) -> dict[str, Any]:
        """Nothing is drawn where nothing is sampled."""
        targets = {"max": 0, "policy": 1, "expected": 0 if self.lists_all else SAMPLES}
        draws = 0 if self.lists_all else SAMPLES
        return {
            "action_dim": targets[self.target] * self.noise_dim,
            "policy_dim": draws * self.noise_dim,
            "draw": self.draw,
        }

    # ---- planning ----

    def plan_noise(
        self, generator: torch.Generator, horizon: int, envs: int, num_q: int
    ) -> PlanNoise:
        sizes = self.plan_sizes(horizon, envs, num_q)
        return draw_categorical_plan_noise(generator, **sizes, factors=self.noise_dim)

    def search(
        self,
        score: Score,
        policy_actions: Tensor,
        last: Tensor,
        first: Tensor,
        noise: PlanNoise,
        mask: Tensor | None,
        explore: bool,
    ) -> CategoricalPlan:
        planner = self.config.planner
        settings = CategoricalSettings(
            elites=planner.elites,
            min_probability=planner.min_probability,
            temperature=planner.temperature,
        )
        assert isinstance(noise.mppi, CategoricalNoise)
        return categorical_mppi(
            score, policy_actions, last, first, mask, noise.mppi, settings, explore
        )

    def plan_spread(self, plan: CategoricalPlan) -> Tensor:
        """The entropy of the first action's distribution."""
        each: Tensor = torch.special.entr(plan.mean[0])  # [E, N]
        return each.sum(-1).mean()


def table_values(
    model: WorldModel,
    q: QEnsemble,
    z: Tensor,
    heads: Sequence[int],
    legal: Tensor | None,
    keep: Tensor | None = None,
) -> Tensor:
    """Q of every legal action: [heads, R, N], -inf where an action is not legal."""
    states, actions = len(z), model.actions.plan_width
    if legal is None:
        legal = torch.ones(states, actions, dtype=torch.bool, device=z.device)
    row, action = legal.nonzero(as_tuple=True)  # [M]
    values = pair_values(model, q, z, heads, row, action, keep)  # [heads, M]
    table = values.new_full((len(heads), states, actions), -torch.inf)
    table[:, row, action] = values
    return table


def chosen_values(
    model: WorldModel,
    q: QEnsemble,
    z: Tensor,
    heads: Sequence[int],
    action: Tensor,
    real: Tensor | None = None,
    keep: Tensor | None = None,
) -> Tensor:
    """Q of some actions [R, k] of each state: [heads, R, k], -inf where they are not `real`."""
    row = torch.arange(len(z), device=z.device).unsqueeze(1).expand_as(action).flatten()
    values = pair_values(model, q, z, heads, row, action.flatten(), keep)
    values = values.view(len(heads), *action.shape)
    return values if real is None else values.masked_fill(~real, -torch.inf)


def pair_values(
    model: WorldModel,
    q: QEnsemble,
    z: Tensor,
    heads: Sequence[int],
    row: Tensor,
    action: Tensor,
    keep: Tensor | None = None,
) -> Tensor:
    """Q of pairs of a state, a row of z [R, Z], and an action: [heads, M]; no gradient.

    `keep` are dropout masks [heads, R, H].
    """
    found = []
    for i, head in enumerate(heads):
        network = q[head]
        part, table = network.latent_part(z), network.action_table()  # type: ignore[operator]
        for start in range(0, len(row), CHUNK):
            some = slice(start, start + CHUNK)
            kept = None if keep is None else keep[i][row[some]]
            logits = network.from_latent_part(part[row[some]], action[some], kept, table)  # type: ignore[operator]
            found.append(model.decode(logits))
    return torch.cat(found).view(len(heads), -1)


def score_mean(value: Tensor, log_p: Tensor) -> Tensor:
    """The mean over draws [R, S], whose gradient is that of the expectation it estimates.

    The gradient of E[f] is E[f grad log p]; subtracting from each f the mean of the other draws
    leaves it unbiased and far less noisy.
    """
    draws = value.shape[-1]
    others = (value.sum(-1, keepdim=True) - value) / (draws - 1)
    pull = (log_p * (value - others)).mean(-1)
    return value.mean(-1) + (pull - pull.detach())


def _mean(log_p: Tensor, value: Tensor) -> Tensor:
    """The expectation of [..., N], both -inf where an action is not legal."""
    legal = log_p > -torch.inf
    return (log_p.exp() * value.masked_fill(~legal, 0.0)).sum(-1)


def _entropy(log_p: Tensor) -> Tensor:
    """Of [..., N]; what is not legal adds nothing, and has no gradient."""
    return -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0.0)).sum(-1)


def _for_draws(legal: Tensor | None) -> Tensor | None:
    """Masks [R, N] for several draws from each state: [R, 1, N]."""
    return None if legal is None else legal.unsqueeze(1)
