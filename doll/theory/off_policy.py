"""The value of a policy from the log of another one: what the mean reward would have been if it had chosen. Pure."""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from doll.theory.checks import Floats

_Z: Final = 1.959964  # 95 %


class Choices(NamedTuple):
    """Logged choices.

    Attributes:
        action: index of the chosen action, shape (n,).
        probability: probability with which the logged policy chose it, above 0, shape (n,).
        reward: what came of it, shape (n,).
    """

    action: npt.NDArray[np.int64]
    probability: Floats
    reward: Floats


class PolicyValue(NamedTuple):
    """An estimated mean reward with its 95 % interval, for a log of a fixed length.

    Attributes:
        effective: number of logged choices that count, (Σ w)² / Σ w² with the weights w = π(a) / p. Below a hundred or
            so the interval is too narrow.
    """

    mean: float
    low: float
    high: float
    effective: float


def inverse_propensity(choices: Choices, policy: Floats) -> PolicyValue:
    """Return the mean of w r (Horvitz and Thompson, 1952). It is unbiased.

    Args:
        policy: π, the probability of each action under the other policy, shape (n, A).

    Raises:
        ValueError: shapes or numbers are not those of logged choices.
    """
    weights = _weights(choices, policy)
    return _value(weights * choices.reward, weights)


def self_normalized(choices: Choices, policy: Floats) -> PolicyValue:
    """Return Σ w r / Σ w, with the error of the delta method (Swaminathan and Joachims, NeurIPS 2015). Its bias falls
    with 1 / n, its variance is lower; it does not change if a constant is added to all rewards."""
    weights = _weights(choices, policy)
    total = float(weights.sum())
    mean = float(weights @ choices.reward) / total if total else math.nan
    return _value(mean + weights * (choices.reward - mean) * len(weights) / total if total else weights * mean, weights)


def doubly_robust(choices: Choices, policy: Floats, predicted: Floats) -> PolicyValue:
    """Return the mean of Σ_a π(a) q(a) + w (r - q(a)) (Dudík, Langford and Li, ICML 2011). It is unbiased whatever q
    is, and its variance is low if q is good.

    Args:
        predicted: q, a prediction of the reward of each action, shape (n, A). It should not have learned these rewards.
    """
    weights = _weights(choices, policy)
    if predicted.shape != policy.shape:
        raise ValueError(f"expected a predicted reward for each action, shape {policy.shape}, got {predicted.shape}")
    of_chosen = predicted[np.arange(len(weights)), choices.action]
    return _value((policy * predicted).sum(axis=1) + weights * (choices.reward - of_chosen), weights)


def probabilities_of(chosen: Any) -> Floats:
    """Return the result of `Task.choose` as an array of shape (n, A). Raise ValueError if it has no probabilities."""
    policy = np.asarray(chosen, dtype=np.float64)
    if policy.ndim != 2 or not policy.shape[1]:
        raise ValueError(f"choose: expected the probability of each action, shape (n, actions), got {policy.shape}")
    if not (np.isfinite(policy).all() and (policy >= 0).all() and np.allclose(policy.sum(axis=1), 1, atol=1e-3)):
        raise ValueError("choose: expected probabilities of 0 or more that add up to 1")
    return policy


def _weights(choices: Choices, policy: Floats) -> Floats:
    count = len(choices.action)
    if policy.ndim != 2 or len(policy) != count:
        raise ValueError(f"expected a probability of each action, shape ({count}, actions), got {policy.shape}")
    if not count:
        raise ValueError("expected logged choices, got none")
    if choices.action.min() < 0 or choices.action.max() >= policy.shape[1]:
        raise ValueError(f"expected actions from 0 to {policy.shape[1] - 1}, got {choices.action.max()}")
    if not ((choices.probability > 0) & (choices.probability <= 1)).all() or not np.isfinite(choices.reward).all():
        raise ValueError("expected logged probabilities above 0 and rewards that are finite")
    chosen: Floats = policy[np.arange(count), choices.action] / choices.probability
    return chosen


def _value(terms: Floats, weights: Floats) -> PolicyValue:
    count, squares = len(terms), float(weights @ weights)
    mean = float(terms.mean())
    reach = _Z * float(terms.std(ddof=1)) / math.sqrt(count) if count > 1 else math.inf
    return PolicyValue(mean, mean - reach, mean + reach, float(weights.sum()) ** 2 / squares if squares else 0.0)
