"""The formulas of the DQN family written slowly: loops over numbers, in float64, from the papers.

Nothing here knows the package. Values of a state are lists over actions; of a distribution, lists
of lists.
"""

from __future__ import annotations

import math

import numpy as np


def n_step_target(rewards, terminated, values, gamma, n):
    """y for the first state of a slice: rewards[k] and terminated[k] on arriving at state k + 1,
    values[k] = what state k is worth. The slice may be shorter than n: the episode ends there."""
    total, k = 0.0, 0
    while k < min(n, len(rewards)):
        total += gamma**k * rewards[k]
        k += 1
        if terminated[k - 1]:
            return total
    return total + gamma**k * values[k]


def huber(u, kappa=1.0):
    return 0.5 * u * u if abs(u) <= kappa else kappa * (abs(u) - 0.5 * kappa)


def best(values):
    return max(range(len(values)), key=lambda a: values[a])


def dueling(value, advantages):
    mean = sum(advantages) / len(advantages)
    return [value + a - mean for a in advantages]


def project(probabilities, reward, discount, v_min, v_max):
    """Algorithm 1 of C51; where a return falls on an atom, both halves of its mass go there."""
    atoms = len(probabilities)
    spacing = (v_max - v_min) / (atoms - 1)
    m = [0.0] * atoms
    for j in range(atoms):
        z = v_min + j * spacing
        b = (min(max(reward + discount * z, v_min), v_max) - v_min) / spacing
        if abs(b - round(b)) < 1e-12:
            b = float(round(b))  # what is an integer on paper may lie beside it in binary
        low, high = math.floor(b), math.ceil(b)
        if low == high:
            m[low] += probabilities[j]
        else:
            m[low] += probabilities[j] * (high - b)
            m[high] += probabilities[j] * (b - low)
    return m


def softmax(x):
    top = max(x)
    e = [math.exp(v - top) for v in x]
    return [v / sum(e) for v in e]


def cross_entropy(logits, target):
    return -sum(m * math.log(p) for m, p in zip(target, softmax(logits), strict=True))


def quantile_huber(quantiles, target, tau, kappa):
    total = 0.0
    for theta, fraction in zip(quantiles, tau, strict=True):
        inner = 0.0
        for y in target:
            u = y - theta
            inner += abs(fraction - (1.0 if u < 0 else 0.0)) * huber(u, kappa) / kappa
        total += inner / len(target)
    return total


def log_policy(q, temperature):
    """log softmax(q / tau), stable."""
    top = max(q)
    log_sum = math.log(sum(math.exp((v - top) / temperature) for v in q))
    return [(v - top) / temperature - log_sum for v in q]


def munchausen_target(reward, discount, q_now, action, q_next, alpha, temperature, clip):
    """r + alpha [tau log pi(a|s)]_{l_0}^0 + gamma sum_a' pi(a'|s') (q(s', a') - tau log pi)."""
    now = log_policy(q_now, temperature)[action]
    bonus = alpha * min(max(temperature * now, clip), 0.0)
    logs = log_policy(q_next, temperature)
    value = sum(math.exp(p) * (q - temperature * p) for p, q in zip(logs, q_next, strict=True))
    return reward + bonus + discount * value


def released_rmsprop(weight, gradients, lr=0.00025, decay=0.95, epsilon=0.01):
    """The update of DeepMind's released Lua code, line by line: `deltas` has momentum 0, and its
    gradient points uphill, so that it is added. Yields the weight after each step."""
    w, g, g2 = weight.copy(), np.zeros_like(weight), np.zeros_like(weight)
    deltas = np.zeros_like(weight)
    for downhill in gradients:
        dw = -downhill
        g = decay * g + (1 - decay) * dw
        g2 = decay * g2 + (1 - decay) * dw * dw
        tmp = g * g
        tmp = -tmp + g2
        tmp = tmp + epsilon
        tmp = np.sqrt(tmp)
        deltas = 0 * deltas + lr * dw / tmp
        w = w + deltas
        yield w.copy()


def cosine_embedding(tau, weight, bias):
    """phi_j = relu(sum_i cos(pi i tau) w_ji + b_j), i from 0."""
    cosines = [math.cos(math.pi * i * tau) for i in range(len(weight[0]))]
    return [
        max(0.0, sum(c * w for c, w in zip(cosines, row, strict=True)) + b)
        for row, b in zip(weight, bias, strict=True)
    ]


def noisy_linear(x, mu_w, sigma_w, mu_b, sigma_b, raw_in, raw_out):
    """(mu + sigma * f(e_out) f(e_in)^T) x + mu_b + sigma_b * f(e_out), entry by entry."""

    def f(e):
        return math.copysign(math.sqrt(abs(e)), e)

    out = []
    for i, row in enumerate(mu_w):
        total = mu_b[i] + sigma_b[i] * f(raw_out[i])
        for j, mu in enumerate(row):
            total += (mu + sigma_w[i][j] * f(raw_out[i]) * f(raw_in[j])) * x[j]
        out.append(total)
    return out
