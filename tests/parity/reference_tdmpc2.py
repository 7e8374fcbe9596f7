"""TD-MPC2 written slowly and obviously, to hold the fast code against.

Nothing here is clever: plain functions on dicts of tensors, loops where a loop is clearer, every
formula written out (only gradients come from autograd). No code of the package is imported.
Works in float32 and float64: the dtype of the parameters decides.

Parameters are a flat dict. Layer i of a network has `name.i.weight` and `name.i.bias` and, where
a LayerNorm follows, `name.i.norm.weight` and `name.i.norm.bias`. Networks: encoder, dynamics,
reward, policy, termination (episodic only), q.0 .. q.{n-1}, target_q.0 .. target_q.{n-1}.

Noise is passed in, never drawn.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Params = dict[str, Tensor]
OptimiserState = dict[str, dict]


@dataclass(frozen=True)
class ReferenceSettings:
    """The official names and defaults (config.yaml); gamma is that of 500-step DMC episodes."""

    gamma: float = 0.99
    rho: float = 0.5
    tau: float = 0.01
    """Rate of the target heads and of the running scale."""
    lr: float = 3e-4
    enc_lr_scale: float = 0.3
    grad_clip_norm: float = 20.0
    consistency_coef: float = 20.0
    reward_coef: float = 0.1
    value_coef: float = 0.1
    termination_coef: float = 1.0
    log_std_min: float = -10.0
    log_std_max: float = 2.0
    entropy_coef: float = 1e-4
    entropy: str = "main"
    """'main': no tanh Jacobian, times action dim. 'jacobian': official code up to Dec 2024."""
    min_std: float = 0.05
    max_std: float = 2.0
    temperature: float = 0.5
    """Multiplies the gap between an elite's value and the best value."""
    horizon: int = 3
    num_samples: int = 512
    """Sequences per iteration, policy sequences included."""
    num_elites: int = 64
    num_pi_trajs: int = 24
    iterations: int = 6
    num_bins: int = 101
    vmin: float = -10.0
    vmax: float = 10.0
    simnorm_dim: int = 8
    episodic: bool = False
    td: str = "one_step"
    """'one_step', 'n_step' (uses td_steps) or 'td_lambda' (uses td_lambda)."""
    td_steps: int = 3
    td_lambda: float = 0.95


# ---------------------------------------------------------------- building blocks


def symlog(x: Tensor) -> Tensor:
    return torch.sign(x) * torch.log(1 + torch.abs(x))


def symexp(x: Tensor) -> Tensor:
    return torch.sign(x) * (torch.exp(torch.abs(x)) - 1)


def log_softmax(x: Tensor) -> Tensor:
    shifted = x - x.max(dim=-1, keepdim=True).values
    return shifted - torch.log(torch.exp(shifted).sum(dim=-1, keepdim=True))


def mish(x: Tensor) -> Tensor:
    softplus = torch.logaddexp(x, torch.zeros_like(x))  # ln(1 + e^x)
    return x * torch.tanh(softplus)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    mean = x.mean(dim=-1, keepdim=True)
    variance = ((x - mean) ** 2).mean(dim=-1, keepdim=True)
    return (x - mean) / torch.sqrt(variance + 1e-5) * weight + bias


def simnorm(x: Tensor, group: int) -> Tensor:
    """Softmax within consecutive groups of the last dimension."""
    groups = [torch.exp(log_softmax(part)) for part in torch.split(x, group, dim=-1)]
    return torch.cat(groups, dim=-1)


def two_hot(x: Tensor, settings: ReferenceSettings) -> Tensor:
    """[...] -> [..., num_bins]: the two bins next to symlog(x) share the mass."""
    bin_size = (settings.vmax - settings.vmin) / (settings.num_bins - 1)
    position = (torch.clamp(symlog(x), settings.vmin, settings.vmax) - settings.vmin) / bin_size
    lower = torch.floor(position)
    offset = position - lower
    lower_index = lower.long()
    upper_index = (lower_index + 1) % settings.num_bins
    target = torch.zeros(*x.shape, settings.num_bins, dtype=x.dtype)
    target.scatter_(-1, lower_index.unsqueeze(-1), (1 - offset).unsqueeze(-1))
    target.scatter_(-1, upper_index.unsqueeze(-1), offset.unsqueeze(-1))
    return target


def decode(logits: Tensor, settings: ReferenceSettings) -> Tensor:
    """[..., num_bins] -> [...]: expectation in symlog space, then symexp."""
    bins = torch.linspace(settings.vmin, settings.vmax, settings.num_bins, dtype=logits.dtype)
    return symexp((torch.exp(log_softmax(logits)) * bins).sum(dim=-1))


def soft_ce(logits: Tensor, target: Tensor, settings: ReferenceSettings) -> Tensor:
    return -(two_hot(target, settings) * log_softmax(logits)).sum(dim=-1)


# ---------------------------------------------------------------- networks


def linear(params: Params, name: str, x: Tensor) -> Tensor:
    return x @ params[f"{name}.weight"].T + params[f"{name}.bias"]


def normed_linear(
    params: Params,
    name: str,
    x: Tensor,
    activation: Callable[[Tensor], Tensor],
    dropout: Tensor | None = None,
) -> Tensor:
    """Linear, dropout (a mask of 0 or 1/(1-p)), LayerNorm, activation."""
    x = linear(params, name, x)
    if dropout is not None:
        x = x * dropout
    x = layer_norm(x, params[f"{name}.norm.weight"], params[f"{name}.norm.bias"])
    return activation(x)


def head(params: Params, name: str, x: Tensor, dropout: Tensor | None = None) -> Tensor:
    """Two hidden layers and a plain last one; dropout acts on the first hidden layer only."""
    x = normed_linear(params, f"{name}.0", x, mish, dropout)
    x = normed_linear(params, f"{name}.1", x, mish)
    return linear(params, f"{name}.2", x)


def count_layers(params: Params, name: str) -> int:
    """How many of name.0, name.1, ... there are."""
    count = 0
    while any(key.startswith(f"{name}.{count}.") for key in params):
        count += 1
    return count


def encode(params: Params, obs: Tensor, settings: ReferenceSettings) -> Tensor:
    layers = count_layers(params, "encoder")
    x = obs
    for i in range(layers - 1):
        x = normed_linear(params, f"encoder.{i}", x, mish)
    return normed_linear(
        params, f"encoder.{layers - 1}", x, lambda h: simnorm(h, settings.simnorm_dim)
    )


def dynamics(params: Params, z: Tensor, action: Tensor, settings: ReferenceSettings) -> Tensor:
    x = torch.cat([z, action], dim=-1)
    x = normed_linear(params, "dynamics.0", x, mish)
    x = normed_linear(params, "dynamics.1", x, mish)
    return normed_linear(params, "dynamics.2", x, lambda h: simnorm(h, settings.simnorm_dim))


def reward_logits(params: Params, z: Tensor, action: Tensor) -> Tensor:
    return head(params, "reward", torch.cat([z, action], dim=-1))


def termination_logit(params: Params, z: Tensor) -> Tensor:
    return head(params, "termination", z).squeeze(-1)


def q_logits(
    params: Params, name: str, z: Tensor, action: Tensor, dropout: Tensor | None = None
) -> Tensor:
    """`name` is one head: 'q.0', 'target_q.3', ..."""
    return head(params, name, torch.cat([z, action], dim=-1), dropout)


def policy(
    params: Params, z: Tensor, eps: Tensor, settings: ReferenceSettings
) -> dict[str, Tensor]:
    """A squashed Gaussian: action, mean, log_std [..., A]; entropy, scaled_entropy [...].

    scaled_entropy is what the policy loss uses, entropy what is logged. For 'main' the loss uses
    -A * logp of the Gaussian before the tanh (the official quotient with its 1e-8 cancels to it).
    """
    action_dim = eps.shape[-1]
    output = head(params, "policy", z)
    mu, raw = output[..., :action_dim], output[..., action_dim:]
    spread = settings.log_std_max - settings.log_std_min
    log_std = settings.log_std_min + 0.5 * spread * (torch.tanh(raw) + 1)
    action = torch.tanh(mu + eps * torch.exp(log_std))

    half_log_2pi = 0.5 * math.log(2 * math.pi)
    log_jacobian = torch.log(torch.clamp(1 - action**2, min=0) + 1e-6).sum(dim=-1)
    residual = (-0.5 * eps**2 - log_std).sum(dim=-1)
    if settings.entropy == "main":
        log_gaussian = residual - action_dim * half_log_2pi
        entropy = -(log_gaussian - log_jacobian)
        scaled_entropy = -action_dim * log_gaussian
    elif settings.entropy == "jacobian":
        log_pi = action_dim * (residual - half_log_2pi) - log_jacobian
        entropy = -log_pi
        scaled_entropy = -log_pi
    else:
        raise ValueError(f"entropy is {settings.entropy}, but must be 'main' or 'jacobian'.")
    return {
        "action": action,
        "mean": torch.tanh(mu),
        "log_std": log_std,
        "entropy": entropy,
        "scaled_entropy": scaled_entropy,
    }


# ---------------------------------------------------------------- optimisation by hand


def new_optimiser_state(params: Params) -> OptimiserState:
    """Adam before its first step: {'model'|'policy': {'step': 0, 'm': {name: 0}, 'v': ...}}."""
    state: OptimiserState = {}
    for group in ("model", "policy"):
        names = [name for name in params if belongs_to(name, group)]
        state[group] = {
            "step": 0,
            "m": {name: torch.zeros_like(params[name]) for name in names},
            "v": {name: torch.zeros_like(params[name]) for name in names},
        }
    return state


def belongs_to(name: str, group: str) -> bool:
    """Which optimiser owns a parameter; the target heads belong to none."""
    network = name.split(".")[0]
    if group == "model":
        return network in ("encoder", "dynamics", "reward", "termination", "q")
    return network == "policy"


def clip_by_global_norm(gradients: Params, limit: float) -> tuple[Params, Tensor]:
    """PyTorch's rule: all are multiplied by min(1, limit / (norm + 1e-6)). Returns the norm too."""
    squares = [(gradient**2).sum() for gradient in gradients.values()]
    norm = torch.sqrt(torch.stack(squares).sum())
    factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
    return {name: gradient * factor for name, gradient in gradients.items()}, norm


def adam(
    params: Params, gradients: Params, state: dict, lr_of: Callable[[str], float], eps: float
) -> tuple[Params, dict]:
    """One Adam step, betas 0.9 and 0.999, of the parameters that have a gradient."""
    step = state["step"] + 1
    new_params, new_m, new_v = dict(params), dict(state["m"]), dict(state["v"])
    for name, gradient in gradients.items():
        m = 0.9 * state["m"][name] + 0.1 * gradient
        v = 0.999 * state["v"][name] + 0.001 * gradient**2
        m_hat = m / (1 - 0.9**step)
        v_hat = v / (1 - 0.999**step)
        new_params[name] = params[name] - lr_of(name) * m_hat / (torch.sqrt(v_hat) + eps)
        new_m[name], new_v[name] = m, v
    return new_params, {"step": step, "m": new_m, "v": new_v}


def percentile(x: Tensor, percent: float) -> Tensor:
    """Of a vector, linearly interpolated between the two nearest ranks."""
    ordered = torch.sort(x).values
    position = percent / 100 * (len(ordered) - 1)
    lower = math.floor(position)
    upper = min(lower + 1, len(ordered) - 1)
    weight = position - lower
    return (1 - weight) * ordered[lower] + weight * ordered[upper]


def running_scale(scale: Tensor, q: Tensor, tau: float) -> Tensor:
    """lerp towards the 5-to-95 percentile range of q [B], which counts as 1 if smaller."""
    value = torch.clamp(percentile(q, 95) - percentile(q, 5), min=1.0)
    return scale + tau * (value - scale)


# ---------------------------------------------------------------- the update


def td_targets(
    reward: Tensor, terminated: Tensor, next_value: Tensor, settings: ReferenceSettings
) -> Tensor:
    """All [T, B]; next_value[t] is V(x_{t+1}). Returns y_0 .. y_{T-1}.

    one_step   y_t = r_t + gamma (1 - d_t) V(x_{t+1})
    n_step     y_t = sum_{k<m} gamma^k r_{t+k} + gamma^m V(x_{t+m}), m = min(n, T - t); a
               termination ends the sum (its reward counts) and drops the bootstrap
    td_lambda  y_t = r_t + gamma (1 - d_t) [(1 - lambda) V(x_{t+1}) + lambda y_{t+1}], where
               y_T, past the slice's end, is V(x_T)
    """
    steps, batch_size = reward.shape
    gamma = settings.gamma
    y = torch.zeros_like(reward)
    for b in range(batch_size):
        for t in reversed(range(steps)):
            alive = 1 - terminated[t, b]
            if settings.td == "one_step":
                y[t, b] = reward[t, b] + gamma * alive * next_value[t, b]
            elif settings.td == "n_step":
                m = min(settings.td_steps, steps - t)
                total, ended = torch.zeros_like(y[t, b]), False
                for k in range(m):
                    total = total + gamma**k * reward[t + k, b]
                    if terminated[t + k, b] > 0.5:
                        ended = True
                        break
                if not ended:
                    total = total + gamma**m * next_value[t + m - 1, b]
                y[t, b] = total
            elif settings.td == "td_lambda":
                later = y[t + 1, b] if t + 1 < steps else next_value[t, b]
                mixed = (1 - settings.td_lambda) * next_value[t, b] + settings.td_lambda * later
                y[t, b] = reward[t, b] + gamma * alive * mixed
            else:
                raise ValueError(
                    f"td is {settings.td}, but must be 'one_step', 'n_step' or 'td_lambda'."
                )
    return y


def targets(
    params: Params, batch: dict[str, Tensor], noise: dict[str, Tensor], settings: ReferenceSettings
) -> tuple[Tensor, Tensor]:
    """Step 1 of an update, without gradients or dropout: next_z [T, B, Z] and y [T, B]."""
    steps = batch["action"].shape[0]
    next_z, next_value = [], []
    with torch.no_grad():
        for t in range(steps):
            z = encode(params, batch["obs"][t + 1], settings)
            action = policy(params, z, noise["target_policy"][t], settings)["action"]
            values = [
                decode(q_logits(params, f"target_q.{int(h)}", z, action), settings)
                for h in noise["target_heads"]
            ]
            next_z.append(z)
            next_value.append(torch.minimum(values[0], values[1]))
        y = td_targets(batch["reward"], batch["terminated"], torch.stack(next_value), settings)
    return torch.stack(next_z), y


def model_losses(
    params: Params,
    batch: dict[str, Tensor],
    next_z: Tensor,
    y: Tensor,
    noise: dict[str, Tensor],
    settings: ReferenceSettings,
) -> tuple[dict[str, Tensor], Tensor]:
    """Steps 2 to 4: the losses (unweighted, and total_loss), and the latents zs [T+1, B, Z]."""
    action, reward, terminated = batch["action"], batch["reward"], batch["terminated"]
    steps, num_q = action.shape[0], count_layers(params, "q")

    # The rollout starts at the first observation and then lives on its own predictions.
    zs = [encode(params, batch["obs"][0], settings)]
    for t in range(steps):
        zs.append(dynamics(params, zs[t], action[t], settings))

    consistency = reward_loss = value = termination = torch.zeros((), dtype=reward.dtype)
    for t in range(steps):
        weight = settings.rho**t
        consistency = consistency + weight * ((zs[t + 1] - next_z[t]) ** 2).mean()
        predicted = reward_logits(params, zs[t], action[t])
        reward_loss = reward_loss + weight * soft_ce(predicted, reward[t], settings).mean()
        for h in range(num_q):
            mask = noise["value_dropout"][h, t]
            predicted = q_logits(params, f"q.{h}", zs[t], action[t], mask)
            value = value + weight * soft_ce(predicted, y[t], settings).mean()
        if settings.episodic:
            # Binary cross-entropy with logits, of the state the step leads to; no rho here.
            x = termination_logit(params, zs[t + 1])
            zero = torch.zeros_like(x)
            log_yes, log_no = -torch.logaddexp(zero, -x), -torch.logaddexp(zero, x)
            bce = -(terminated[t] * log_yes + (1 - terminated[t]) * log_no)
            termination = termination + bce.mean()
    losses = {
        "consistency_loss": consistency / steps,
        "reward_loss": reward_loss / steps,
        "value_loss": value / (steps * num_q),
        "termination_loss": termination / steps,
    }
    losses["total_loss"] = (
        settings.consistency_coef * losses["consistency_loss"]
        + settings.reward_coef * losses["reward_loss"]
        + settings.value_coef * losses["value_loss"]
        + settings.termination_coef * losses["termination_loss"]
    )
    return losses, torch.stack(zs)


def policy_loss(
    params: Params,
    zs: Tensor,
    scale: Tensor,
    noise: dict[str, Tensor],
    settings: ReferenceSettings,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Step 5: the loss, the new running scale (updated before use) and what is logged."""
    qs, entropies, scaled_entropies = [], [], []
    for t in range(len(zs)):
        chosen = policy(params, zs[t], noise["policy"][t], settings)
        values = []
        for i in range(2):
            name, mask = f"q.{int(noise['policy_heads'][i])}", noise["policy_dropout"][i, t]
            values.append(decode(q_logits(params, name, zs[t], chosen["action"], mask), settings))
        qs.append((values[0] + values[1]) / 2)
        entropies.append(chosen["entropy"])
        scaled_entropies.append(chosen["scaled_entropy"])

    new_scale = running_scale(scale, qs[0].detach(), settings.tau)
    loss = torch.zeros((), dtype=zs.dtype)
    for t in range(len(zs)):
        objective = settings.entropy_coef * scaled_entropies[t] + qs[t] / new_scale
        loss = loss + settings.rho**t * -objective.mean()
    loss = loss / len(zs)
    metrics = {
        "pi_loss": loss.detach(),
        "pi_entropy": torch.stack(entropies).detach().mean(),
        "pi_scaled_entropy": torch.stack(scaled_entropies).detach().mean(),
        "pi_scale": new_scale,
    }
    return loss, new_scale, metrics


def gradients_of(loss: Tensor, leaves: Params) -> Params:
    found = torch.autograd.grad(loss, list(leaves.values()))
    return dict(zip(leaves, found, strict=True))


def leaves_of(params: Params, group: str) -> Params:
    """Fresh copies that autograd watches."""
    return {
        name: value.detach().clone().requires_grad_(True)
        for name, value in params.items()
        if belongs_to(name, group)
    }


def update(
    params: Params,
    optimiser_state: OptimiserState,
    scale: Tensor,
    batch: dict[str, Tensor],
    noise: dict[str, Tensor],
    settings: ReferenceSettings,
) -> tuple[Params, OptimiserState, Tensor, dict[str, Tensor]]:
    """One update; changes nothing in place.

    batch: obs [T+1, B, O], action [T, B, A], reward [T, B], terminated [T, B] (0.0 or 1.0).
    noise: target_policy [T, B, A], target_heads [2], value_dropout [num_q, T, B, H],
           policy [T+1, B, A], policy_heads [2], policy_dropout [2, T+1, B, H].
    Returns params, optimiser state, scale, metrics (0-d tensors; grad norms are before clipping).
    """
    params = {name: value.detach() for name, value in params.items()}
    next_z, y = targets(params, batch, noise, settings)

    # The model: encoder, dynamics, reward, termination and q are clipped together.
    leaves = leaves_of(params, "model")
    losses, zs = model_losses({**params, **leaves}, batch, next_z, y, noise, settings)
    gradients, grad_norm = clip_by_global_norm(
        gradients_of(losses["total_loss"], leaves), settings.grad_clip_norm
    )

    def model_lr(name: str) -> float:
        return settings.lr * (settings.enc_lr_scale if name.startswith("encoder.") else 1.0)

    params, model_state = adam(params, gradients, optimiser_state["model"], model_lr, eps=1e-8)

    # The policy: latents of the old weights, but the q heads as just updated.
    leaves = leaves_of(params, "policy")
    loss, scale, policy_metrics = policy_loss(
        {**params, **leaves}, zs.detach(), scale, noise, settings
    )
    gradients, pi_grad_norm = clip_by_global_norm(
        gradients_of(loss, leaves), settings.grad_clip_norm
    )
    params, policy_state = adam(
        params, gradients, optimiser_state["policy"], lambda name: settings.lr, eps=1e-5
    )

    for name in params:
        if name.startswith("target_q."):
            online = params[name.removeprefix("target_")]
            params[name] = params[name] + settings.tau * (online - params[name])

    metrics = {name: value.detach() for name, value in losses.items()}
    metrics |= {"grad_norm": grad_norm, "pi_grad_norm": pi_grad_norm, "td_target_mean": y.mean()}
    metrics |= policy_metrics
    return params, {"model": model_state, "policy": policy_state}, scale, metrics


# ---------------------------------------------------------------- the planner


def sequence_values(
    params: Params,
    z: Tensor,
    actions: Tensor,
    heads: Tensor,
    bootstrap_eps: Tensor,
    settings: ReferenceSettings,
) -> Tensor:
    """Value [N] of action sequences [T, N, A] from latents z [N, Z]; no dropout.

    Once a predicted state is terminal, later rewards and the bootstrap count nothing; the reward
    of the step that led to it counts.
    """
    total = torch.zeros(z.shape[0], dtype=z.dtype)
    ended = torch.zeros(z.shape[0], dtype=z.dtype)
    for t in range(settings.horizon):
        reward = decode(reward_logits(params, z, actions[t]), settings)
        total = total + settings.gamma**t * (1 - ended) * reward
        z = dynamics(params, z, actions[t], settings)
        if settings.episodic:
            probability = 1 / (1 + torch.exp(-termination_logit(params, z)))
            ended = torch.clamp(ended + (probability > 0.5).to(z.dtype), max=1.0)
    last = policy(params, z, bootstrap_eps, settings)["action"]
    q = torch.zeros_like(total)
    for h in heads:
        q = q + decode(q_logits(params, f"q.{int(h)}", z, last), settings) / len(heads)
    return total + settings.gamma**settings.horizon * (1 - ended) * q


def elite_weights(values: Tensor, temperature: float) -> Tensor:
    """[K] -> [K], sum 1: exp(temperature * (v - best)) divided by its plain sum."""
    score = torch.exp(temperature * (values - values.max()))
    return score / score.sum()


def weighted_moments(weights: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and std [T, A] of elites [T, K, A], before the clamp of std.

    As in the official code: the weights are already normalised, and both moments are divided by
    (sum of the normalised weights + 1e-9), that is by 1 + 1e-9.
    """
    divisor = weights.sum() + 1e-9
    mean = torch.zeros_like(actions[:, 0])
    for k in range(len(weights)):
        mean = mean + weights[k] * actions[:, k]
    mean = mean / divisor
    square = torch.zeros_like(mean)
    for k in range(len(weights)):
        square = square + weights[k] * (actions[:, k] - mean) ** 2
    return mean, torch.sqrt(square / divisor)


def plan(
    params: Params,
    obs: Tensor,
    prev_mean: Tensor,
    first: Tensor,
    noise: dict[str, Tensor],
    settings: ReferenceSettings,
    explore: bool,
) -> dict[str, Tensor]:
    """MPPI for E environments, one after the other; changes nothing in place.

    obs [E, O], prev_mean [T, E, A], first [E] bool (True: the old plan is forgotten).
    noise: policy [T, E, P, A], samples [I, T, E, N-P, A], heads [I, 2] (shared by the
           environments), bootstrap [I, E, N, A], gumbel [E, K], explore [E, A] (only if explore).
    The N sequences are ordered: N-P Gaussian ones, then the P policy ones. Elites are ordered by
    value, best first.
    Weights w = exp(temperature * (v - best)) / sum, without epsilon; mean = sum(w a) / (sum w +
    1e-9) and std = sqrt(sum(w (a - mean)^2) / (sum w + 1e-9)) with these normalised w; the elite
    drawn is argmax(log w + gumbel), with the w of the last iteration.

    Returns action [E, A], mean, std [T, E, A] (of the last iteration, std clamped),
    elite_indices, weights [I, E, K], values [I, E, N], means, stds [I, T, E, A] (of every
    iteration), drawn [E] (position among the elites), policy_actions [T, E, P, A].
    """
    per_env = []
    with torch.no_grad():
        for e in range(obs.shape[0]):
            env_noise = {
                "policy": noise["policy"][:, e],
                "samples": noise["samples"][:, :, e],
                "heads": noise["heads"],
                "bootstrap": noise["bootstrap"][:, e],
                "gumbel": noise["gumbel"][e],
            }
            if explore:
                env_noise["explore"] = noise["explore"][e]
            per_env.append(
                plan_one(
                    params, obs[e], prev_mean[:, e], bool(first[e]), env_noise, settings, explore
                )
            )

    # Where the environments' axis stands in each result.
    env_axis = {"action": 0, "drawn": 0, "means": 2, "stds": 2}
    return {
        key: torch.stack([result[key] for result in per_env], dim=env_axis.get(key, 1))
        for key in per_env[0]
    }


def plan_one(
    params: Params,
    obs: Tensor,
    prev_mean: Tensor,
    first: bool,
    noise: dict[str, Tensor],
    settings: ReferenceSettings,
    explore: bool,
) -> dict[str, Tensor]:
    """`plan` for one environment: the same shapes without E."""
    z0 = encode(params, obs, settings)  # [Z]

    z = z0.expand(settings.num_pi_trajs, -1)
    policy_actions = []
    for t in range(settings.horizon):
        policy_actions.append(policy(params, z, noise["policy"][t], settings)["action"])
        z = dynamics(params, z, policy_actions[t], settings)
    from_policy = torch.stack(policy_actions)  # [T, P, A]

    # The mean is last decision's plan moved one step forward; the std always starts wide.
    mean = torch.zeros_like(prev_mean)
    if not first:
        mean[:-1] = prev_mean[1:]
    std = torch.full_like(prev_mean, settings.max_std)

    kept: dict[str, list[Tensor]] = {
        key: [] for key in ("values", "elite_indices", "weights", "means", "stds")
    }
    for i in range(settings.iterations):
        gaussian = torch.clamp(mean[:, None] + std[:, None] * noise["samples"][i], -1, 1)
        actions = torch.cat([gaussian, from_policy], dim=1)  # [T, N, A]
        values = sequence_values(
            params,
            z0.expand(settings.num_samples, -1),
            actions,
            noise["heads"][i],
            noise["bootstrap"][i],
            settings,
        ).nan_to_num(0.0)
        elites = torch.sort(values, descending=True, stable=True).indices[: settings.num_elites]
        elite_actions = actions[:, elites]  # [T, K, A]
        weights = elite_weights(values[elites], settings.temperature)
        mean, std = weighted_moments(weights, elite_actions)
        std = torch.clamp(std, settings.min_std, settings.max_std)
        kept["values"].append(values)
        kept["elite_indices"].append(elites)
        kept["weights"].append(weights)
        kept["means"].append(mean)
        kept["stds"].append(std)

    drawn = torch.argmax(torch.log(weights) + noise["gumbel"])
    action = elite_actions[0, drawn]
    if explore:
        action = action + std[0] * noise["explore"]
    result = {key: torch.stack(tensors) for key, tensors in kept.items()}
    result |= {
        "action": torch.clamp(action, -1, 1),
        "mean": mean,
        "std": std,
        "drawn": drawn,
        "policy_actions": from_policy,
    }
    return result
