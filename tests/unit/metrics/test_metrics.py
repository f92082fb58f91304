"""The metrics are those of scikit-learn on the same samples, however the samples are divided and merged."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from doll import metrics
from doll.metrics.states import MetricState, from_bytes, merged, to_bytes
from sklearn import metrics as reference

pytestmark = pytest.mark.slow  # scikit-learn takes a second to import

Floats = npt.NDArray[np.float64]


class Data:
    """Samples of a model that is a little right; some scores are equal."""

    def __init__(self, seed: int, size: int = 700) -> None:
        rng = np.random.default_rng(seed)
        logit = np.round(rng.normal(-1, 1.5, size), 2)
        self.p: Floats = 1 / (1 + np.exp(-logit))
        self.y: Floats = (rng.random(size) < 1 / (1 + np.exp(-1.3 * logit))).astype(float)
        self.w: Floats = rng.choice([0.0, 0.25, 1.0, 3.0], size)
        self.value: Floats = 10 * logit + rng.normal(size=size)
        self.classes: Floats = rng.dirichlet([1, 2, 3], size)
        self.label = rng.integers(0, 3, size)


Make = Callable[[Data, slice | npt.NDArray[np.intp]], MetricState]
MAKE: dict[str, tuple[Make, Callable[[Data], float]]] = {
    "auc": (lambda d, s: metrics.auc(d.p[s], d.y[s]), lambda d: reference.roc_auc_score(d.y, d.p)),
    "weighted auc": (
        lambda d, s: metrics.auc(d.p[s], d.y[s], d.w[s]),
        lambda d: reference.roc_auc_score(d.y, d.p, sample_weight=d.w),
    ),
    "average precision": (
        lambda d, s: metrics.average_precision(d.p[s], d.y[s]),
        lambda d: reference.average_precision_score(d.y, d.p),
    ),
    "weighted average precision": (
        lambda d, s: metrics.average_precision(d.p[s], d.y[s], d.w[s]),
        lambda d: reference.average_precision_score(d.y, d.p, sample_weight=d.w),
    ),
    "log-loss": (lambda d, s: metrics.log_loss(d.p[s], d.y[s]), lambda d: reference.log_loss(d.y, d.p)),
    "weighted log-loss of classes": (
        lambda d, s: metrics.log_loss(d.classes[s], d.label[s], d.w[s]),
        lambda d: reference.log_loss(d.label, d.classes, sample_weight=d.w),
    ),
    "normalised entropy": (
        lambda d, s: metrics.normalized_entropy(d.p[s], d.y[s]),
        lambda d: reference.log_loss(d.y, d.p) / reference.log_loss(d.y, np.full(len(d.y), d.y.mean())),
    ),
    "calibration": (
        lambda d, s: metrics.calibration(d.p[s], d.y[s], d.w[s]),
        lambda d: (d.w * d.p).sum() / (d.w * d.y).sum(),
    ),
    "accuracy": (
        lambda d, s: metrics.accuracy(d.p[s], d.y[s], d.w[s]),
        lambda d: reference.accuracy_score(d.y, d.p >= 0.5, sample_weight=d.w),
    ),
    "accuracy of classes": (
        lambda d, s: metrics.accuracy(d.classes[s], d.label[s]),
        lambda d: reference.accuracy_score(d.label, d.classes.argmax(1)),
    ),
    "rmse": (
        lambda d, s: metrics.rmse(d.value[s], d.p[s], d.w[s]),
        lambda d: reference.root_mean_squared_error(d.p, d.value, sample_weight=d.w),
    ),
    "pinball loss": (
        lambda d, s: metrics.pinball_loss(d.value[s], d.p[s], 0.9, d.w[s]),
        lambda d: reference.mean_pinball_loss(d.p, d.value, alpha=0.9, sample_weight=d.w),
    ),
}


def shared(make: Make, data: Data, workers: int, seed: int) -> MetricState:
    """Return the state of batches of several workers, sent as records and merged in a random order, two or more at a
    time."""
    rng = np.random.default_rng(seed)
    parts = [
        from_bytes(to_bytes(make(data, batch)))
        for own in np.array_split(rng.permutation(len(data.y)), workers)
        for batch in np.array_split(own, 5)
    ]
    while len(parts) > 1:
        chosen = rng.permutation(len(parts))[: rng.integers(2, 4)]
        rest = [part for at, part in enumerate(parts) if at not in chosen]
        parts = [*rest, merged(parts[at] for at in chosen)]
    return parts[0]


@pytest.mark.parametrize("workers", [1, 7])
@pytest.mark.parametrize("name", MAKE)
def test_the_metric_is_that_of_all_samples(name: str, workers: int) -> None:
    make, expected = MAKE[name]
    for seed in range(5):
        data = Data(seed)
        state = shared(make, data, workers, seed)
        assert state.compute() == pytest.approx(expected(data), abs=1e-6, rel=1e-9)
        assert state.error_bound() == 0


@pytest.mark.parametrize("name", [name for name in MAKE if "weight" in name or name in ("calibration", "rmse")])
def test_a_state_that_fades_is_that_of_smaller_weights(name: str) -> None:
    make, expected = MAKE[name]
    data = Data(1)
    old, new = np.arange(0, 400), np.arange(400, 700)
    older = make(data, old).faded(0.25)
    assert older is not None
    faded = merged([older, make(data, new)])
    data.w[old] *= 0.25
    assert faded.compute() == pytest.approx(expected(data), rel=1e-9)
    direct = merged([make(data, old), make(data, new)])
    assert faded.stderr() == pytest.approx(direct.stderr(), rel=1e-9, nan_ok=True)


@pytest.mark.parametrize("workers", [1, 7])
@pytest.mark.parametrize("k", [None, 3])
def test_ndcg_is_the_mean_over_groups(workers: int, k: int | None) -> None:
    rng = np.random.default_rng(3)
    score, relevance = np.round(rng.normal(size=(70, 9)), 1), rng.integers(0, 4, (70, 9)).astype(float)
    relevance[5] = 0
    parts = [
        metrics.ndcg(score[of].ravel(), relevance[of].ravel(), np.repeat(of, 9), k)
        for of in np.array_split(rng.permutation(70), workers)
    ]
    assert merged(parts).compute() == pytest.approx(reference.ndcg_score(relevance, score, k=k), abs=1e-9)


def test_samples_without_a_group_have_no_ndcg() -> None:
    group = np.array([-(2**63), 7, 7])
    assert metrics.ndcg([9, 1, 2], [0, 1, 0], group).compute() == pytest.approx(1 / np.log2(3))
    assert math.isnan(metrics.ndcg([9, 1], [0, 1], None).compute())


@pytest.mark.parametrize("make", [metrics.auc, metrics.average_precision])
@pytest.mark.parametrize("skew", [1, 6])  # mean labels of 1/2 and 1/7
def test_a_sketch_is_within_its_bound_and_the_same_in_any_order(make: Callable[..., MetricState], skew: int) -> None:
    truth = reference.roc_auc_score if make is metrics.auc else reference.average_precision_score
    rng = np.random.default_rng(1)
    p = rng.random(30_000) ** skew
    y = (rng.random(30_000) < p).astype(float)
    parts = [make(p[of], y[of]) for of in np.array_split(np.arange(30_000), 41)]
    forward, backward = merged(parts), merged([merged(parts[20:]), merged(parts[:20][::-1])])
    assert forward.encode() == backward.encode()
    assert len(forward.encode()[0]) <= 1024
    error, bound = abs(forward.compute() - truth(y, p)), forward.error_bound()
    assert 0 < error <= bound
    most_error, most_bound = (3e-5, 2e-3) if make is metrics.auc else (1e-3, 6e-2)
    assert error < most_error
    assert bound < most_bound
    exact = merged(make(p[of], y[of]).in_memory() for of in np.array_split(np.arange(30_000), 41))
    assert exact.compute() == pytest.approx(truth(y, p), abs=1e-9)


# Average precision has no standard error.
@pytest.mark.parametrize("name", [name for name in MAKE if "precision" not in name])
def test_about_95_of_100_intervals_contain_the_metric(name: str) -> None:
    make, expected = MAKE[name]
    truth = np.mean([expected(Data(1000 + seed, 4000)) for seed in range(20)])
    states = [make(Data(seed, 400), slice(None)) for seed in range(100)]
    inside = [abs(state.compute() - truth) < 1.96 * state.stderr() for state in states]
    assert 0.87 <= np.mean(inside) <= 1.0


def test_a_metric_without_one_of_its_classes_is_not_known() -> None:
    for state in (metrics.auc([0.1], [1]), metrics.average_precision([0.1, 0.2], [0, 0]), metrics.mean([])):
        assert math.isnan(state.compute())
        assert math.isnan(state.stderr())
    assert merged([metrics.auc([0.1], [1]), metrics.auc([0.0], [0])]).compute() == 1


def test_scores_that_are_not_numbers_make_the_metric_unknown() -> None:
    for make in (metrics.auc, metrics.log_loss, metrics.calibration, metrics.rmse):
        state = merged([make([0.1, 0.9], [0, 1]), from_bytes(to_bytes(make([math.nan], [1])))])
        assert math.isnan(state.compute())


def test_infinite_and_negative_scores_have_an_order() -> None:
    scores = [-math.inf, -2.0, -1.0, -0.0, 0.0, 1e-300, 1.0, math.inf]
    assert metrics.auc(scores, [0, 0, 0, 0, 1, 1, 1, 1]).compute() == (16 - 0.5) / 16
    few = metrics.auc(scores, [0, 0, 0, 0, 1, 1, 1, 1], max_scores=2)
    assert len(few.encode()[0]) == 2


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: metrics.log_loss([3.0], [1]), "expected probabilities"),
        (lambda: metrics.auc([0.5], [2]), "labels 0 or 1"),
        (lambda: metrics.auc([0.5, 1], [1]), r"one size, got \[2, 1, 2\]"),
        (lambda: metrics.auc([0.5], [1], [-1]), "weights of 0 or more"),
        (lambda: metrics.auc([0.5], [1], max_scores=1), "2 to 65,536"),
        (lambda: metrics.pinball_loss([0.5], [1], 1.5), "between 0 and 1"),
        (lambda: metrics.ndcg([0.5], [1], [1, 2]), "one group for each"),
    ],
)
def test_wrong_arguments_are_refused(make: Callable[[], MetricState], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        make()
