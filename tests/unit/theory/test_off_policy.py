"""The value of a policy from another one's log, on simulated logs whose true value is known."""

from __future__ import annotations

import numpy as np
import pytest
from doll.theory.off_policy import (
    Choices,
    doubly_robust,
    inverse_propensity,
    probabilities_of,
    self_normalized,
)
from fuzzing import ALL_EXAMPLES

MEANS = np.array([0.2, 0.5, 0.8])  # of the rewards, which are 0 or 1
LOGGED = np.array([0.6, 0.3, 0.1])
OTHER = np.array([0.1, 0.2, 0.7])
TRUE = float(OTHER @ MEANS)


def log(rng: np.random.Generator, count: int = 2_000) -> Choices:
    action = rng.choice(3, count, p=LOGGED)
    return Choices(action, LOGGED[action], (rng.random(count) < MEANS[action]).astype(float))


@pytest.mark.parametrize("estimator", ["ips", "snips", "dr", "dr of a poor model"])
def test_estimates_are_near_the_true_value_and_intervals_hold_it(estimator: str) -> None:
    count = 2_000 if ALL_EXAMPLES else 400
    rng, inside, means = np.random.default_rng(5), 0, []
    for _ in range(count):
        choices = log(rng)
        policy = np.tile(OTHER, (len(choices.action), 1))
        if estimator == "ips":
            value = inverse_propensity(choices, policy)
        elif estimator == "snips":
            value = self_normalized(choices, policy)
        else:
            predicted = MEANS if estimator == "dr" else np.array([0.9, 0.1, 0.3])
            value = doubly_robust(choices, policy, np.tile(predicted, (len(policy), 1)))
        inside += value.low <= TRUE <= value.high
        means.append(value.mean)
    assert np.mean(means) == pytest.approx(TRUE, abs=4 * np.std(means) / np.sqrt(count) + 2e-3)
    assert 0.92 <= inside / count <= 0.98


def test_a_good_prediction_makes_the_interval_narrower() -> None:
    choices = log(np.random.default_rng(0))
    policy = np.tile(OTHER, (len(choices.action), 1))
    ips, snips = inverse_propensity(choices, policy), self_normalized(choices, policy)
    robust = doubly_robust(choices, policy, np.tile(MEANS, (len(policy), 1)))
    assert robust.high - robust.low < snips.high - snips.low < ips.high - ips.low
    assert ips.effective == snips.effective == robust.effective
    assert ips.effective == pytest.approx(1 / np.sum(OTHER**2 / LOGGED) * len(policy), rel=0.1)


def test_the_logged_policy_itself_has_the_mean_of_the_log() -> None:
    choices = log(np.random.default_rng(0))
    policy = np.tile(LOGGED, (len(choices.action), 1))
    assert inverse_propensity(choices, policy).mean == pytest.approx(choices.reward.mean())
    assert inverse_propensity(choices, policy).effective == pytest.approx(len(policy))


def test_a_policy_that_chooses_nothing_of_the_log_has_no_effective_choice() -> None:
    choices = Choices(np.zeros(10, np.int64), np.ones(10), np.ones(10))
    policy = np.tile([0.0, 1.0], (10, 1))
    assert inverse_propensity(choices, policy).effective == 0
    assert np.isnan(self_normalized(choices, policy).mean)


@pytest.mark.parametrize(
    ("choices", "policy", "reason"),
    [
        (([3], [0.5], [1.0]), [[0.5, 0.5]], "actions from 0 to 1"),
        (([-1], [0.5], [1.0]), [[0.5, 0.5]], "actions from 0 to 1"),
        (([0], [0.0], [1.0]), [[0.5, 0.5]], "probabilities above 0"),
        (([0], [0.5], [np.nan]), [[0.5, 0.5]], "rewards that are finite"),
        (([0], [0.5], [1.0]), [0.5, 0.5], "shape"),
        (([], [], []), np.zeros((0, 2)), "got none"),
    ],
)
def test_what_is_no_log_is_refused(choices: tuple[list[float], ...], policy: object, reason: str) -> None:
    action, probability, reward = (np.array(column, float) for column in choices)
    with pytest.raises(ValueError, match=reason):
        inverse_propensity(Choices(action.astype(np.int64), probability, reward), np.array(policy, float))


@pytest.mark.parametrize("chosen", [[0.5, 0.5], [[0.5, 0.6]], [[-0.5, 1.5]], [[np.nan, 1.0]], np.zeros((1, 0))])
def test_what_is_no_probability_is_refused(chosen: object) -> None:
    with pytest.raises(ValueError, match="choose: expected"):
        probabilities_of(chosen)
