"""Contributions in the shorter of two forms: what comes out is what went in, and what does not fit is refused."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from doll.errors import BlobError
from doll.storage.blobs import blob_info, encode_blob
from doll.storage.contributions import Compressor, decode_contribution
from doll.storage.sections import encode_push
from doll.tables.rows import Rows
from hypothesis import given
from hypothesis import strategies as st

PARAMETERS, NUMEL = 40, 46


def encoded(values: npt.NDArray[np.float32], num_parameters: int = PARAMETERS) -> bytes:
    return b"".join(Compressor("j", num_parameters).compress(values, version=3))


def decoded(data: bytes, num_parameters: int = PARAMETERS, numel: int = NUMEL) -> npt.NDArray[np.float32]:
    return decode_contribution(data, num_parameters, job="j", version=3, numel=numel).values


@given(seed=st.integers(0, 2**32 - 1), num_sent=st.integers(0, PARAMETERS), tail=st.sampled_from([0, 6]))
def test_what_comes_out_is_what_went_in(seed: int, num_sent: int, tail: int) -> None:
    rng = np.random.default_rng(seed)
    values = np.zeros(PARAMETERS + tail, np.float32)
    values[rng.permutation(PARAMETERS)[:num_sent]] = rng.normal(size=num_sent)
    values[PARAMETERS:] = rng.integers(0, 2**32, tail, np.uint32).view(np.float32)  # any bytes, as of counters
    data = encoded(values)
    again = decode_contribution(data, PARAMETERS, job="j", version=3, numel=len(values))
    assert again.values.tobytes() == values.tobytes()
    sparse = num_sent <= 0.6 * PARAMETERS
    assert blob_info(data).kind == ("p" if sparse else "g")
    assert again.num_sent == (num_sent + tail if sparse else len(values))


def test_the_sparse_form_is_much_shorter() -> None:
    values = np.zeros(100_000, np.float32)
    values[::1000] = 1.0
    assert len(encoded(values, 100_000)) < 1_000


def test_the_dense_form_is_not_copied() -> None:
    values = np.ones(NUMEL, np.float32)
    parts = Compressor("j", PARAMETERS).compress(values, version=3)
    assert np.shares_memory(np.frombuffer(parts[-1], np.float32), values)


@pytest.mark.parametrize(("num_parameters", "numel"), [(39, 45), (40, 45), (40, 40), (46, 46)])
def test_one_of_another_model_is_refused(num_parameters: int, numel: int) -> None:
    data = encoded(np.zeros(NUMEL, np.float32))
    with pytest.raises(BlobError):
        decoded(data, num_parameters, numel)


def test_a_flipped_byte_is_refused() -> None:
    values = np.zeros(NUMEL, np.float32)
    values[3] = 2.0
    data = encoded(values)
    for at in range(len(data)):
        spoiled = bytearray(data)
        spoiled[at] ^= 0x41
        with pytest.raises(BlobError):
            decoded(bytes(spoiled))


def test_a_value_that_is_no_number_is_refused() -> None:
    rows = Rows(np.array([3]), np.array([[np.nan]], np.float32))
    shapes = {"parameters": PARAMETERS, "tail": NUMEL - PARAMETERS}
    data = b"".join(encode_push({"parameters": rows}, shapes, job="j", version=3).parts)
    with pytest.raises(BlobError, match=r"NaN|not finite"):
        decoded(data)


def test_a_gradient_of_today_is_read_as_before() -> None:
    values = np.arange(NUMEL, dtype=np.float32)
    data = b"".join(encode_blob(values, job="j", kind="g", version=3))
    assert decoded(data).tobytes() == values.tobytes()
