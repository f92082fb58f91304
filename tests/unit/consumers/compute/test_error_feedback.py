"""Contributions in 16 bits: half the bytes, and over time the sum that would have been sent in 32."""

from __future__ import annotations

import json
from typing import Literal

import numpy as np
import numpy.typing as npt
import pytest
from doll.config import parse
from doll.consumers.compute.error_feedback import ErrorFeedback
from doll.errors import BlobError, ConfigError
from doll.storage.blobs import blob_info, encode_bytes
from doll.storage.contributions import Compressor, decode_contribution
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.slow  # loads torch
PARAMETERS, TAIL = 4097, 6
FORMS: list[Literal["bf16", "fp16"]] = ["bf16", "fp16"]
BITS = {"bf16": 8, "fp16": 11}


def sent(compressor: Compressor, values: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.float32], bytes]:
    blob = b"".join(compressor.compress(values, version=3))
    return decode_contribution(blob, PARAMETERS, job="j", version=3, numel=PARAMETERS + TAIL).values, blob


def gradients(seed: int, scale: float) -> npt.NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    values = np.empty(PARAMETERS + TAIL, np.float32)
    values[:PARAMETERS] = scale * rng.normal(size=PARAMETERS)
    values[PARAMETERS:] = rng.integers(0, 2**32, TAIL, np.uint32).view(np.float32)  # counters: any bytes
    return values


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=examples(30), deadline=None)
@given(seed=st.integers(0, 2**32 - 1), power=st.integers(-60, 60))
def test_the_sum_of_what_is_sent_differs_by_one_rounding(form: Literal["bf16", "fp16"], seed: int, power: int) -> None:
    compressor = Compressor("j", PARAMETERS, rounding=ErrorFeedback(form).round)
    wanted, got, largest = np.zeros(PARAMETERS), np.zeros(PARAMETERS), 0.0
    for number in range(20):
        values = gradients(seed + number, 2.0**power)
        arrived, blob = sent(compressor, values)
        assert arrived[PARAMETERS:].tobytes() == values[PARAMETERS:].tobytes()
        assert len(blob) < 0.52 * 4 * PARAMETERS + 300
        assert blob_info(blob).kind == "p"
        wanted += values[:PARAMETERS]
        got += arrived[:PARAMETERS]
        largest = max(largest, float(np.abs(arrived[:PARAMETERS]).max()))
    # One rounding of the last contribution, and the roundings of float32 in error and sum.
    assert np.abs(wanted - got).max() <= largest * (2.0 ** -BITS[form] + 20 * 2.0**-23)


@pytest.mark.parametrize("form", FORMS)
def test_numbers_from_far_apart_neither_overflow_nor_vanish_for_good(form: Literal["bf16", "fp16"]) -> None:
    compressor = Compressor("j", PARAMETERS, rounding=ErrorFeedback(form).round)
    values = np.full(PARAMETERS + TAIL, 1e-3, np.float32)
    values[0] = 3e38
    total = np.zeros(PARAMETERS)
    for _ in range(3):
        arrived, _ = sent(compressor, values)
        assert np.isfinite(arrived[:PARAMETERS]).all()
        total += arrived[:PARAMETERS]
        values[0] = 1e-3  # what was too small beside it is sent now
    np.testing.assert_allclose(total[1:], 3e-3, rtol=0.01)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_sent_as_it_is_and_does_not_stay(form: Literal["bf16", "fp16"], bad: float) -> None:
    compressor = Compressor("j", PARAMETERS, rounding=ErrorFeedback(form).round)
    values = gradients(0, 1.0)
    values[7] = bad
    arrived, blob = sent(compressor, values)
    assert blob_info(blob).kind == "g"
    assert arrived.tobytes() == values.tobytes()
    assert np.isfinite(sent(compressor, gradients(1, 1.0))[0][:PARAMETERS]).all()


def test_a_sparse_step_is_sent_whole() -> None:
    compressor = Compressor("j", PARAMETERS, rounding=ErrorFeedback("bf16").round)
    values = np.zeros(PARAMETERS + TAIL, np.float32)
    values[[3, 99]] = 1 / 3, -1 / 7
    assert sent(compressor, values)[0].tobytes() == values.tobytes()


def test_a_blob_with_another_exponent_than_a_float_may_have_is_refused() -> None:
    compressor = Compressor("j", PARAMETERS, rounding=ErrorFeedback("fp16").round)
    _, blob = sent(compressor, gradients(0, 1.0))
    body = bytearray(blob[-len(blob) + 128 :])
    at = body.index(b"parameters") - 8
    body[at : at + 8] = (10_000).to_bytes(8, "little")
    again = b"".join(encode_bytes([bytes(body)], job="j", kind="p", version=3))
    with pytest.raises(BlobError, match="exponent"):
        decode_contribution(again, PARAMETERS, job="j", version=3, numel=PARAMETERS + TAIL)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"training": {"policy": {"name": "isp"}}, "blobs": {"contributions": "fp16"}},
            "blobs.contributions: expected float32 or bf16 with training.policy isp",
        ),
        (
            {
                "training": {"policy": {"name": "wsp"}}, "data": {"workers": 2},
                "worker": {"pipeline": {"stages": 2, "devices": [["cpu", "cpu"]]}},
            },
            "blobs.contributions: expected float32 with worker.pipeline",
        ),
    ],
)  # fmt: skip
def test_where_it_would_break_a_promise_it_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(json.dumps({"job": "j", "task": {"class": "a:B"}, "blobs": {"contributions": "bf16"}, **changes}))
