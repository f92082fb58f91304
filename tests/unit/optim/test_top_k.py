"""Sparse rounds: what is sent and what is held back make up the changes, whatever is computed again."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import pytest
from doll.config.policy import SparsePush
from doll.optim.significance_filter import Array
from doll.optim.top_k import TopK
from doll.tables.rows import CHUNK
from hypothesis import given, settings
from hypothesis import strategies as st

SIZE = 2 * CHUNK + 100


def residual(density: float = 0.02, bits: Literal[2, 32] = 2, size: int = SIZE) -> TopK:
    return TopK(SparsePush(density, bits, 1.0), size)


def changes(seed: int, count: int, size: int = SIZE) -> list[Array]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=size).astype(np.float32) * np.float32(10.0 ** rng.integers(-3, 2)) for _ in range(count)]


def send(of: TopK, change: Array, batch: int, *, included: int = 0, whole: bool = False) -> Array:
    sent = change.copy()
    of.send(sent, batch, included=included, whole=whole)
    return sent


@pytest.mark.parametrize("bits", [2, 32])
@pytest.mark.parametrize("density", [0.01, 0.3])
def test_what_is_sent_and_the_rest_are_the_sum_of_the_changes(density: float, bits: Literal[2, 32]) -> None:
    held, made = residual(density, bits), changes(1, 20)
    sent = [send(held, change, 3 * at + 2) for at, change in enumerate(made)]
    rest = held.below(60)
    assert rest is not None
    total, expected = np.sum(sent, axis=0, dtype=np.float64) + rest, np.sum(made, axis=0, dtype=np.float64)
    assert np.abs(total - expected).max() < 1e-5 * np.abs(made).max() * len(made)
    assert send(held, made[0], 62, whole=True) == pytest.approx(rest + made[0], abs=1e-5)
    assert not held.is_held
    assert held.below(63) is None


@pytest.mark.parametrize("bits", [2, 32])
def test_the_largest_numbers_of_each_chunk_are_sent(bits: Literal[2, 32]) -> None:
    (change,) = changes(2, 1)
    sent = send(residual(0.02, bits), change, 0)
    for begin in range(0, SIZE, CHUNK):
        chunk, of = sent[begin : begin + CHUNK], change[begin : begin + CHUNK]
        is_sent = chunk != 0
        assert np.count_nonzero(is_sent) == math.ceil(0.02 * len(chunk))
        assert np.abs(of[is_sent]).min() >= np.abs(of[~is_sent]).max()
        assert (np.sign(chunk[is_sent]) == np.sign(of[is_sent])).all()
        if bits == 2:
            assert len(np.unique(np.abs(chunk[is_sent]))) == 2
            assert np.abs(chunk).sum() == pytest.approx(np.abs(of[is_sent]).sum(), rel=1e-5), "the means are kept"
        else:
            assert (chunk[is_sent] == of[is_sent]).all()


def test_a_change_of_few_numbers_is_sent_without_others() -> None:
    change = np.zeros(SIZE, np.float32)
    change[[5, CHUNK + 7]] = [0.5, -2.0]
    held = residual()
    assert (send(held, change, 0) == change).all()
    assert not held.is_held


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_pushes_that_are_computed_again_leave_nothing_behind(seed: int) -> None:
    """Compare with a residual that has never seen the pushes that were taken back."""
    rng = np.random.default_rng(seed)
    held, again, applied = residual(0.1, size=300), residual(0.1, size=300), 0
    for change in changes(seed, 6, 300):
        for at, void in enumerate(changes(seed + 1, int(rng.integers(0, 4)), 300)):
            send(held, void, applied + at, included=applied, whole=bool(rng.integers(0, 2)))
            settled = held.below(applied), again.below(applied)
            assert (settled[0] is None) == (settled[1] is None)
            assert settled[0] is None or (settled[0] == settled[1]).all(), "what is in the model is not void"
        held.take_back(applied)
        sent = [send(of, change, applied + 2, included=applied) for of in (held, again)]
        assert (sent[0] == sent[1]).all()
        applied += 3
    rest, expected = held.below(applied), again.below(applied)
    assert rest is not None
    assert expected is not None
    assert (rest == expected).all()
