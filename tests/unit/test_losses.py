"""Losses for late labels: each equals its paper's formula, and is lowest at the true probability."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from doll import losses

pytestmark = pytest.mark.slow  # loads torch

NEGATIVE, POSITIVE = (0, False, 0), (1, False, 0)  # label, is_correction, replaced_label
CORRECTED, RETRACTED, CONFIRMED = (1, True, 0), (0, True, 1), (0, True, 0)
KINDS = [NEGATIVE, POSITIVE, CORRECTED, RETRACTED, CONFIRMED]
LOGITS = np.array([-40.0, -6.0, -1.3, 0.0, 0.7, 5.0, 40.0])
EARLY_S = 900.0


def target_of(*kinds: tuple[int, bool, int], age_s: Any = EARLY_S) -> dict[str, torch.Tensor]:
    label, later, first = (np.array(values) for values in zip(*kinds, strict=True))
    return {
        "label": torch.from_numpy(label.astype(np.float32)),
        "age_s": torch.from_numpy(np.broadcast_to(np.float32(age_s), len(kinds)).copy()),
        "is_correction": torch.from_numpy(later),
        "replaced_label": torch.from_numpy(first.astype(np.float32)),
    }


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def log1(x: float) -> float:
    """Return -log f, exact for large x."""
    return math.log1p(math.exp(-x)) if x > 0 else math.log1p(math.exp(x)) - x


def log0(x: float) -> float:
    """Return -log(1 - f)."""
    return log1(-x)


# --- the papers' formulas, written again for one record -----------------------------------------------------------


def ktena_weighted(kind: Any, x: float, *_: float) -> float:
    # L = - sum over the stream of y (1 + f) log f + (1 - y)(1 - f)(1 + f) log(1 - f); the stream has each pair as a
    # negative, and each positive again.
    f = sigmoid(x)
    fake_negative, positive = (1 - f) * (1 + f) * log0(x), (1 + f) * log1(x)
    return {
        NEGATIVE: fake_negative, POSITIVE: fake_negative + positive, CORRECTED: positive, RETRACTED: -positive,
        CONFIRMED: 0.0,
    }[kind]  # fmt: skip


def ktena_calibrated(kind: Any, x: float, *_: float) -> float:
    return {
        NEGATIVE: log0(x), POSITIVE: log0(x) + log1(x), CORRECTED: log1(x), RETRACTED: -log1(x), CONFIRMED: 0.0,
    }[kind]  # fmt: skip


def yang(kind: Any, x: float, delayed: float, real: float) -> float:
    # L = - sum of v (1 + p_dp) log f + (1 - v)(1 + p_dp) p_rn log(1 - f), v: the observed label
    p_dp, p_rn = sigmoid(delayed), sigmoid(real)
    v1, v0 = (1 + p_dp) * log1(x), (1 + p_dp) * p_rn * log0(x)
    retracted = (1 + p_dp) * (log0(x) - log1(x))  # it is known to be a real negative, p_rn = 1
    return {NEGATIVE: v0, POSITIVE: v1, CORRECTED: v1, RETRACTED: retracted, CONFIRMED: 0.0}[kind]


def gu(kind: Any, x: float, delayed: float, _: float) -> float:
    # q(y = 1 | x) = f - p_dp / 2 and q(y = 0 | x) = 1 - f + p_dp / 2; the weights are p(y | x) / q(y | x)
    f = sigmoid(x)
    p_dp = min(sigmoid(delayed), f)
    v1, v0 = f / (f - p_dp / 2) * log1(x), (1 - f) / (1 - f + p_dp / 2) * log0(x)
    return {NEGATIVE: v0, POSITIVE: 2 * v1, CORRECTED: v1, RETRACTED: 2 * (v0 - v1), CONFIRMED: v0}[kind]


def dai(kind: Any, x: float, delayed: float, real: float) -> float:
    f = sigmoid(x)
    z1, z2 = sigmoid(real), 1 - f + min(sigmoid(delayed), f)
    return {
        NEGATIVE: (1 - z1) * log1(x) + z1 * log0(x), POSITIVE: log1(x), CORRECTED: log1(x),
        RETRACTED: log0(x) - log1(x), CONFIRMED: (1 - z2) * log1(x) + z2 * log0(x),
    }[kind]  # fmt: skip


def chapelle(kind: Any, x: float, log_rate: float, age: float, early: float) -> float:
    f, rate = sigmoid(x), math.exp(log_rate)
    positive = log1(x) - log_rate + rate * age
    at_age, at_early = (math.log(1 - f + f * math.exp(-rate * time)) for time in (age, early))
    return {
        NEGATIVE: -at_age, POSITIVE: positive, CORRECTED: positive + at_early, RETRACTED: log0(x) - log1(x),
        CONFIRMED: -at_age + at_early,
    }[kind]  # fmt: skip


def replaced(kind: Any, x: float, *_: float) -> float:
    loss = {0: log0(x), 1: log1(x)}
    label, later, first = kind
    return loss[label] - (loss[first] if later else 0)


METHODS: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., float], int]] = {
    "retraction": (losses.retraction, replaced, 0),
    "fnw": (losses.fnw, ktena_weighted, 0),
    "fnc": (losses.fnc, ktena_calibrated, 0),
    "es_dfm": (losses.es_dfm, yang, 2),
    "defer": (losses.defer, gu, 1),
    "ddfm": (losses.ddfm, dai, 2),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_the_papers_formula(name: str, kind: tuple[int, bool, int]) -> None:
    function, formula, num_heads = METHODS[name]
    for delayed, real in [(-2.0, 1.5), (0.4, -0.3), (-30.0, 30.0)]:
        heads = [torch.full((len(LOGITS),), value, dtype=torch.float64) for value in (delayed, real)][:num_heads]
        values = function(torch.from_numpy(LOGITS), target_of(*[kind] * len(LOGITS)), *heads)
        assert values.numpy() == pytest.approx([formula(kind, x, delayed, real) for x in LOGITS], rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_of_dfm_is_the_papers_formula(kind: tuple[int, bool, int]) -> None:
    for log_rate, age_s in [(-1.0, EARLY_S), (0.5, 200_000.0), (3.0, 5000.0)]:
        logits = torch.from_numpy(LOGITS[1:-1])
        rates = torch.full_like(logits, log_rate)
        values = losses.dfm(logits, target_of(*[kind] * len(logits), age_s=age_s), rates, early_s=EARLY_S)
        wanted = [chapelle(kind, x, log_rate, age_s / 86400, EARLY_S / 86400) for x in LOGITS[1:-1]]
        assert values.numpy() == pytest.approx(wanted, rel=1e-6, abs=1e-9)


# --- in expectation the losses teach the true probability ---------------------------------------------------------

P, LATE = 0.3, 0.12  # probability of a positive, and of a positive whose label comes after the early negative


def expected(values: torch.Tensor, *, retracted: float = 0.0) -> torch.Tensor:
    """Return the expected loss of a pair, from that of each kind. Early positives are taken back with this share."""
    counts = [1 - P + LATE, P - LATE, LATE, (P - LATE) * retracted, 1 - P]
    return (values * torch.tensor(counts, dtype=values.dtype)).sum()


def slope(name: str, logit: float, retracted: float = 0.0) -> float:
    logits = torch.full((len(KINDS),), logit, dtype=torch.float64, requires_grad=True)
    delayed = torch.full_like(logits, math.log(LATE / (1 - LATE))).detach()
    real = torch.full_like(logits, math.log((1 - P) / LATE)).detach()
    function, _, num_heads = METHODS[name]
    expected(function(logits, target_of(*KINDS), *[delayed, real][:num_heads]), retracted=retracted).backward()
    assert logits.grad is not None
    return float(logits.grad.sum())


@pytest.mark.parametrize("name", METHODS)
def test_the_expected_gradient_is_zero_at_the_true_probability(name: str) -> None:
    truth = math.log(P / (1 - P)) if name != "fnc" else math.log(P)
    assert slope(name, truth) == pytest.approx(0, abs=1e-9)
    assert slope(name, truth - 0.3) < -1e-3
    assert slope(name, truth + 0.3) > 1e-3


def test_the_log_loss_of_all_records_is_not_zero_there() -> None:
    """Show that the test above can fail: the uncorrected loss of `fnc` is too high at the true probability."""
    assert slope("fnc", math.log(P / (1 - P))) > 0.05


@pytest.mark.parametrize("name", METHODS)
def test_retractions_teach_the_probability_of_what_is_not_retracted(name: str) -> None:
    share = 0.4
    before, p = math.log(P / (1 - P)), P - share * (P - LATE)
    if name in (
        "defer",
        "ddfm",
    ):  # the weights of their second records know no retractions: the step is down, not exact
        assert slope(name, before, share) > 0.01
    else:
        truth = math.log(p / (1 - p)) if name != "fnc" else math.log(p)
        assert slope(name, truth, share) == pytest.approx(0, abs=1e-9)


def test_a_correction_undoes_the_gradient_of_its_first_record() -> None:
    for kinds, final in [((NEGATIVE, CORRECTED), 1), ((POSITIVE, RETRACTED), 0), ((NEGATIVE, CONFIRMED), 0)]:
        logits = torch.from_numpy(LOGITS).requires_grad_()
        total = torch.stack([losses.retraction(logits, target_of(*[kind] * len(LOGITS))) for kind in kinds]).sum()
        (gradient,) = torch.autograd.grad(total, logits)
        assert gradient.numpy() == pytest.approx([sigmoid(x) - final for x in LOGITS], abs=1e-12)


def test_the_heads_learn_how_often_labels_are_late_and_negatives_real() -> None:
    delayed, real = (torch.zeros(5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    optimizer = torch.optim.LBFGS([delayed, real], max_iter=50)

    def closure() -> float:
        optimizer.zero_grad()
        loss = expected(losses.delay_heads(delayed.mean().expand(5), real.mean().expand(5), target_of(*KINDS)))
        loss.backward()
        return float(loss.detach())

    optimizer.step(closure)
    assert torch.sigmoid(delayed.mean()).item() == pytest.approx(LATE, abs=1e-5)
    assert torch.sigmoid(real.mean()).item() == pytest.approx((1 - P) / (1 - P + LATE), abs=1e-5)


def test_dfm_learns_the_probability_and_the_rate_of_exponential_delays() -> None:
    rng = np.random.default_rng(0)
    n, p, rate, early, close = 200_000, 0.3, 0.7, 0.2, 4.0  # days
    delay = np.where(rng.random(n) < p, rng.exponential(1 / rate, n), np.inf)
    first = [POSITIVE if d <= early else NEGATIVE for d in delay]
    later = [(CORRECTED, d) if d <= close else (CONFIRMED, close) for d in delay[delay > early]]
    ages = np.concatenate([np.minimum(delay, early), [age for _, age in later]]) * losses.DAY_S
    target = target_of(*first, *[kind for kind, _ in later], age_s=ages)
    weights = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> float:
        optimizer.zero_grad()
        logits, log_rate = (weight.expand(len(ages)) for weight in weights)
        loss = losses.dfm(logits, target, log_rate, early_s=early * losses.DAY_S).sum() / n
        loss.backward()
        return float(loss.detach())

    optimizer.step(closure)
    assert torch.sigmoid(weights[0]).item() == pytest.approx(p, abs=0.01)
    assert weights[1].exp().item() == pytest.approx(rate, rel=0.03)


def test_the_calibrated_probability_is_that_of_the_paper() -> None:
    b = torch.tensor([1e-6, 0.01, 0.2, 0.5, 0.7], dtype=torch.float64)
    assert losses.fnc_probability(torch.logit(b)).tolist() == pytest.approx(
        [1e-6 / (1 - 1e-6), 0.01 / 0.99, 0.25, 1, 1]
    )


@pytest.mark.parametrize("rate", [1.0, 0.2, 0.01])
def test_a_model_of_a_stream_with_fewer_negatives_gets_the_odds_of_the_whole(rate: float) -> None:
    p = 0.04
    sampled = p / (p + (1 - p) * rate)
    logits = torch.tensor([math.log(sampled / (1 - sampled))], dtype=torch.float64)
    assert float(torch.sigmoid(losses.prior_correction(logits, rate))) == pytest.approx(p)
    assert float(losses.sampled_logits(losses.prior_correction(logits, rate), rate)) == pytest.approx(float(logits))


@pytest.mark.parametrize("rate", [0, -1, 1.5, math.nan])
def test_a_share_of_negatives_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="negative_rate: expected a share"):
        losses.prior_correction(torch.zeros(1), rate)


@pytest.mark.parametrize("name", [*METHODS, "dfm"])
def test_extreme_logits_give_finite_losses_and_gradients(name: str) -> None:
    for dtype in (torch.float32, torch.float64):
        logits = torch.tensor([-90.0, 0.0, 90.0] * len(KINDS), dtype=dtype, requires_grad=True)
        target = target_of(*[kind for kind in KINDS for _ in range(3)])
        head = torch.tensor([90.0, -90.0, 0.0] * len(KINDS), dtype=dtype)
        if name == "dfm":
            values = losses.dfm(logits, target, head / 30, early_s=EARLY_S)
        else:
            function, _, num_heads = METHODS[name]
            values = function(logits, target, *[head] * num_heads)
        values.sum().backward()
        assert logits.grad is not None
        assert torch.isfinite(values).all()
        assert torch.isfinite(logits.grad).all()
