"""Losses for labels that come late: a negative is sent early, and corrected when its label comes.

from doll import JoinedRecord, JsonTask, losses

class Click(JoinedRecord):
    price: float
    purchase: bool

class Purchases(JsonTask):
    record = Click

    def samples(self, columns):
        return columns["price"][:, None], columns.feedback("purchase")

    def losses(self, output, target):
        return losses.retraction(output, target)

Labels are 0 or 1. A pair of features and label has these records, of which `target` has one in each row:

- its first record, with the label known by then: an early negative, or a positive;
- a correction of an early negative: `is_correction`, `label` 1, `replaced_label` 0;
- a retraction of a positive: `is_correction`, `label` 0, `replaced_label` 1;
- a confirmation of an early negative whose window is over: `is_correction`, `label` 0, `replaced_label` 0. Only
  `defer`, `ddfm` and `dfm` learn from it, and the first two need it.

All functions take logits of shape (n,), and return a loss of each record, shape (n,), for `Task.losses`. Weights have
no gradient. A loss may be negative: a correction takes back what the earlier record has added, as far as the model
still computes the same for it. f is the probability that the logits stand for, l1 = -log f and l0 = -log(1 - f).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch.nn.functional import softplus

Target = Mapping[str, torch.Tensor]  # as from `Columns.feedback`

DAY_S = 86_400.0


class _Kinds(NamedTuple):
    """The kind of each record, as factors of 0 or 1, shape (n,)."""

    negative: torch.Tensor
    positive: torch.Tensor
    corrected: torch.Tensor
    retracted: torch.Tensor
    confirmed: torch.Tensor


def _kinds(target: Target, like: torch.Tensor) -> _Kinds:
    label, later, first = (target[name].to(like.dtype) for name in ("label", "is_correction", "replaced_label"))
    now = 1 - later
    return _Kinds(
        now * (1 - label), now * label, later * label * (1 - first), later * (1 - label) * first,
        later * (1 - label) * (1 - first),
    )  # fmt: skip


def _probability(logits: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(logits.detach())


def _delayed(delayed_logits: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
    """Return P(positive, and late | x): at most f = P(positive | x), which another head estimates."""
    return torch.minimum(_probability(delayed_logits), f)


def retraction(logits: torch.Tensor, target: Target) -> torch.Tensor:
    """Return the log-loss of the label, minus the log-loss of the label that it replaces, if it is a correction.

    The records of a pair add up to the log-loss of its last label, so the gradient is that of the true labels, as long
    as the model still computes the same logits. The loss needs no model of the delay.
    """
    kinds = _kinds(target, logits)
    return (kinds.negative + kinds.positive) * softplus(logits) + logits * (
        kinds.retracted - kinds.corrected - kinds.positive
    )


def fnw(logits: torch.Tensor, target: Target) -> torch.Tensor:
    """Return the fake negatives weighted loss.

    S. I. Ktena et al.: Addressing delayed feedback for continuous training with neural networks in CTR prediction,
    RecSys 2019, "Fake negative weighted". Each pair comes as a negative, and each positive again with its label. In
    this stream b(y = 1 | x) = p / (1 + p), so the importance weights p(y | x) / b(y | x) are 1 + f for positives, and
    (1 - f)(1 + f) for negatives. A pair whose first label is positive counts as both records of the paper.
    """
    kinds, f = _kinds(target, logits), _probability(logits)
    negative = (1 - f) * (1 + f) * softplus(logits)
    positive = (1 + f) * softplus(-logits)
    return (kinds.negative + kinds.positive) * negative + (
        kinds.positive + kinds.corrected - kinds.retracted
    ) * positive


def fnc(logits: torch.Tensor, target: Target) -> torch.Tensor:
    """Return the log-loss of fake negatives calibration: all records of the stream of `fnw` count as they are.

    Ktena et al., RecSys 2019, "Fake negative calibration". The model learns b = p / (1 + p); `fnc_probability` computes
    p from it.
    """
    kinds = _kinds(target, logits)
    return (kinds.negative + kinds.positive) * softplus(logits) + (
        kinds.positive + kinds.corrected - kinds.retracted
    ) * softplus(-logits)


def fnc_probability(logits: torch.Tensor) -> torch.Tensor:
    """Return p = b / (1 - b) for a model that learned with `fnc`, at most 1. b is the probability of the logits, so p
    is exp(logits)."""
    return logits.clamp(max=0).exp()


def es_dfm(
    logits: torch.Tensor, target: Target, delayed_logits: torch.Tensor, real_logits: torch.Tensor
) -> torch.Tensor:
    """Return the loss of the elapsed-time sampling delayed feedback model.

    J.-Q. Yang et al.: Capturing delayed feedback in conversion rate prediction via elapsed-time sampling, AAAI 2021:
    positives, early or late, have weight 1 + p_dp, and early negatives (1 + p_dp) p_rn, with p_dp(x) the probability of
    a delayed positive, and p_rn(x) that of a real negative among early negatives.

    A retraction, which the paper does not have, replaces the positive by a real negative.

    Args:
        delayed_logits, real_logits: logits of p_dp and p_rn, shape (n,). `delay_heads` trains them.
    """
    kinds = _kinds(target, logits)
    l0, l1 = softplus(logits), softplus(-logits)
    weight, real = 1 + _probability(delayed_logits), _probability(real_logits)
    return weight * ((kinds.positive + kinds.corrected) * l1 + kinds.negative * real * l0 + kinds.retracted * (l0 - l1))


def defer(logits: torch.Tensor, target: Target, delayed_logits: torch.Tensor) -> torch.Tensor:
    """Return the loss of delayed feedback modeling with real negatives. It needs confirmations.

    S. Gu et al.: Real negatives matter: continuous training with real negatives for delayed feedback modeling, KDD
    2021. Each pair comes twice, the second time with its final label, so x has its true distribution. The weight of
    positives is f / (f - p_dp / 2), and that of negatives (1 - f) / (1 - f + p_dp / 2). A pair whose first label is
    positive counts twice here: its second record would be the same.

    Args:
        delayed_logits: logits of p_dp, shape (n,), the probability of a delayed positive. `delay_heads` trains them.
    """
    kinds, f = _kinds(target, logits), _probability(logits)
    half = _delayed(delayed_logits, f) / 2
    positive = f / (f - half).clamp(min=torch.finfo(f.dtype).tiny) * softplus(-logits)
    negative = (1 - f) / (1 - f + half).clamp(min=torch.finfo(f.dtype).tiny) * softplus(logits)
    return (
        (kinds.negative + kinds.confirmed + 2 * kinds.retracted) * negative
        + (2 * kinds.positive + kinds.corrected - 2 * kinds.retracted) * positive
    )  # fmt: skip


def ddfm(logits: torch.Tensor, target: Target, delayed_logits: torch.Tensor, real_logits: torch.Tensor) -> torch.Tensor:
    """Return the loss of the dually enhanced delayed feedback model. It needs confirmations.

    S. Dai et al.: Dually enhanced delayed feedback modeling for streaming conversion rate prediction, CIKM 2023. One
    estimator is for first records, one for second ones. Both take a negative for a mixture (1 - z) l1 + z l0, with
    z = p_rn for first records and z = 1 - f + p_dp for confirmations. Positives have weight 1.

    Args:
        delayed_logits, real_logits: as for `es_dfm`.
    """
    kinds, f = _kinds(target, logits), _probability(logits)
    l0, l1 = softplus(logits), softplus(-logits)
    real, second = _probability(real_logits), 1 - f + _delayed(delayed_logits, f)
    return (
        (kinds.positive + kinds.corrected) * l1
        + kinds.negative * (l1 + real * (l0 - l1))
        + kinds.confirmed * (l1 + second * (l0 - l1))
        + kinds.retracted * (l0 - l1)
    )


def delay_heads(delayed_logits: torch.Tensor, real_logits: torch.Tensor, target: Target) -> torch.Tensor:
    """Return the log-losses of p_dp and p_rn, the models that `es_dfm`, `defer` and `ddfm` need. Add it to their loss.

    p_dp is the probability that a pair is a delayed positive, and p_rn that an early negative is real. The papers train
    them before, on pairs with complete labels. Here they learn from the stream, as with `retraction`: each early
    negative counts as a real one, until a correction takes that back.

    Args:
        delayed_logits, real_logits: logits of p_dp and p_rn, shape (n,).
    """
    kinds = _kinds(target, delayed_logits)
    late = (kinds.negative + kinds.positive) * softplus(delayed_logits) - kinds.corrected * delayed_logits
    return late + kinds.negative * softplus(-real_logits) + kinds.corrected * real_logits


def dfm(
    logits: torch.Tensor, target: Target, log_rate: torch.Tensor, *, early_s: float, unit_s: float = DAY_S
) -> torch.Tensor:
    """Return the negative log-likelihood of the delayed feedback model: a delay is exponential with a rate of x.

    O. Chapelle: Modeling delayed feedback in display advertising, KDD 2014: -log f - log r + r d for a positive after
    a time d, and -log S(e) = -log(1 - f + f exp(-r e)) for a negative after a time e, with the rate r. Corrections and
    confirmations count under the condition of their early negative, so log S(early_s) is added.

    Args:
        log_rate: log of r, shape (n,), with r per `unit_s`.
        early_s: seconds after which the joiner sends an early negative.
        unit_s: unit of time of the rate in seconds.
    """
    kinds, age = _kinds(target, logits), target["age_s"].to(logits.dtype) / unit_s
    rate = log_rate.exp()

    def no_label_by(time: torch.Tensor | float) -> torch.Tensor:
        """Return -log S."""
        return -torch.logaddexp(-softplus(logits), -softplus(-logits) - rate * time)

    positive = softplus(-logits) - log_rate + rate * age
    later = kinds.corrected + kinds.confirmed
    return (
        (kinds.positive + kinds.corrected) * positive
        + (kinds.negative + kinds.confirmed) * no_label_by(age)
        - later * no_label_by(early_s / unit_s)
        + kinds.retracted * logits
    )


def prior_correction(logits: torch.Tensor, negative_rate: float) -> torch.Tensor:
    """Return the logits of the whole stream for a model that learned from a stream with fewer negatives.

    Its odds are 1 / negative_rate times too high (X. He et al.: Practical lessons from predicting clicks on ads at
    Facebook, ADKDD 2014, section 6.3). Use it in `Task.predict`, and in `Task.metrics` on held-out samples of the whole
    stream. If `Task.losses` corrects the logits with `sampled_logits`, the model needs no correction.

    Args:
        negative_rate: share of the negatives that were kept, above 0, at most 1.
    """
    return logits + _log_share(negative_rate)


def sampled_logits(logits: torch.Tensor, negative_rate: float) -> torch.Tensor:
    """Return what `logits` of the whole stream are in a stream with this share of its negatives: the opposite of
    `prior_correction`. A loss of these logits teaches the model the probabilities of the whole stream."""
    return logits - _log_share(negative_rate)


def _log_share(negative_rate: float) -> float:
    if not 0 < negative_rate <= 1:
        raise ValueError(f"negative_rate: expected a share above 0, at most 1, got {negative_rate}")
    return math.log(negative_rate)
