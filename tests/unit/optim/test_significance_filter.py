"""The filter on rows: what is sent and what is held add up to the bit, and what is held is not significant."""

from __future__ import annotations

import math

import numpy as np
import pytest
from doll.optim import significance_filter
from doll.optim.significance_filter import Residual, RowResidual
from doll.tables.rows import Rows
from hypothesis import given
from hypothesis import strategies as st

WIDTH = 4


def split(residual: RowResidual, change: Rows, weights: np.ndarray, batch: int, version: int) -> Rows:
    return residual.split(
        change, lambda ids: (weights[ids], np.ones(len(ids), np.bool_)), batch, version
    )  # rows that are here


def is_short(values: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(values).view(np.uint32) & 0xFFFF) == 0


@given(
    st.integers(0, 2**32), st.sampled_from([0.0, 0.1, 0.7, 5.0]), st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 1e30]),
    st.booleans(),
)  # fmt: skip
def test_nothing_is_lost_and_what_is_held_is_not_significant(
    seed: int, threshold: float, size: float, rounds: bool
) -> None:
    rng = np.random.default_rng(seed)
    weights = (rng.normal(size=(20, WIDTH)) * rng.choice([0.0, 1e-3, 1.0], size=(20, WIDTH))).astype(np.float32)
    residual = RowResidual(threshold, WIDTH, rounds=rounds)
    for batch in range(5):
        held = np.zeros((20, WIDTH), np.float32)
        held[residual.held.ids] = residual.held.values
        ids = np.unique(rng.integers(0, 20, 8))
        change = Rows(ids, (size * rng.normal(size=(len(ids), WIDTH))).astype(np.float32))
        total = held.copy()
        total[ids] += change.values
        version = int(rng.integers(0, 1000))
        sent = split(residual, change, weights, batch, version)
        back, left = np.zeros((2, 20, WIDTH), np.float32)
        back[sent.ids] = sent.values
        left[residual.held.ids] = residual.held.values
        assert (back + left).tobytes() == (total + np.float32(0.0)).tobytes()
        assert (back.astype(np.float64) + left == total).all(), "in exact arithmetic too"
        limit = np.float32(threshold / math.sqrt(version + 1)) * np.abs(weights)
        touched = np.isin(np.arange(20), [*ids, *residual.held.ids])
        rest = np.where(back, np.abs(total) / 2**8, 0.0) if rounds else 0.0  # what rounding takes
        assert (np.abs(left) <= np.maximum(limit, rest))[touched].all()
        assert (back[np.abs(total) <= limit] == 0).all()


@pytest.mark.parametrize("threshold", [0.0, 0.7])
@pytest.mark.parametrize("rounds", [False, True])
def test_what_is_sent_needs_16_bits_if_it_is_rounded_and_only_then_whatever_the_threshold(
    threshold: float, rounds: bool
) -> None:
    rng = np.random.default_rng(1)
    weights = rng.normal(size=(1000, WIDTH)).astype(np.float32)
    change = rng.normal(size=(1000, WIDTH)).astype(np.float32)
    rows = split(RowResidual(threshold, WIDTH, rounds=rounds), Rows(np.arange(1000), change), weights, 0, 100)
    dense, step = Residual(threshold, weights.size, rounds=rounds), change.reshape(-1).copy()
    if dense.is_used:  # otherwise the worker does not ask it
        dense.split(step, weights.reshape(-1), 0, 100)
    for sent in (rows.values.reshape(-1), step):
        assert is_short(sent[sent != 0]).all() == rounds
    if threshold or rounds:
        assert (rows.values.reshape(-1) == step[step.reshape(-1, WIDTH).any(axis=1).repeat(WIDTH)]).all()
        held = dense.below(-1)
        assert held is not None
        assert (held + step == change.reshape(-1)).all(), "in float32, so nothing is lost"


def test_a_number_too_large_to_be_rounded_is_sent_as_it_is() -> None:
    change = np.array([[3.4028e38, 1.0, 0.0, 0.0]], np.float32)
    sent = split(RowResidual(0.0, WIDTH, rounds=True), Rows(np.array([0]), change), np.ones((1, WIDTH)), 0, 0)
    assert sent.values.tobytes() == change.tobytes()


def test_a_filter_that_holds_more_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = significance_filter._limit
    monkeypatch.setattr(significance_filter, "_limit", lambda *args: np.float32(1.5) * limit(*args))
    with pytest.raises(AssertionError):
        test_nothing_is_lost_and_what_is_held_is_not_significant()


def test_rows_that_are_not_here_are_sent_whole() -> None:
    change = Rows(np.array([3]), np.full((1, WIDTH), 0.1, np.float32))
    residual = RowResidual(5.0, WIDTH)
    sent = residual.split(change, lambda ids: (np.ones((1, WIDTH), np.float32), np.zeros(1, np.bool_)), 0, 0)
    assert sent.values.tobytes() == change.values.tobytes()
    assert not len(residual.held.ids)
