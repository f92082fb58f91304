"""Blobs: what is encoded comes back unchanged and uncopied; anything else is refused with the reason."""

from __future__ import annotations

import numpy as np
import pytest
from doll.errors import BlobError
from doll.storage import blobs
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

JOB = "digits"


def _blob(numel: int = 10, *, job: str = JOB, kind: blobs.Kind = "w", version: int = 7) -> bytes:
    return b"".join(blobs.encode_blob(np.arange(numel, dtype=np.float32), job=job, kind=kind, version=version))


@given(
    array=hnp.arrays(np.float32, st.integers(0, 200)),  # nan, inf and -0.0 among them: their bits must survive
    job=st.from_regex(r"[a-z0-9][a-z0-9_-]{0,62}(:[0-9a-f]{16})?", fullmatch=True),
    kind=st.sampled_from(["w", "g"]),
    version=st.integers(0, 2**62),
)
def test_comes_back_bit_for_bit(array: np.ndarray, job: str, kind: blobs.Kind, version: int) -> None:
    data = b"".join(blobs.encode_blob(array, job=job, kind=kind, version=version))
    back = blobs.decode_blob(data, job=job, kind=kind, version=version, numel=array.size)
    assert back.dtype == np.float32
    assert back.tobytes() == array.tobytes()
    assert blobs.blob_info(data) == (job, kind, version, array.size)


def test_neither_way_copies_the_body() -> None:
    array = np.zeros(1000, np.float32)
    _, body = blobs.encode_blob(array, job=JOB, kind="g", version=1)
    assert np.shares_memory(np.frombuffer(body, np.float32), array)
    data = np.frombuffer(_blob(1000), np.uint8)
    back = blobs.decode_blob(data.data, job=JOB, kind="w", version=7, numel=1000)
    assert np.shares_memory(back, data)
    assert back.flags.aligned


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (_blob(job="other"), "expected job 'digits', got 'other'"),
        (_blob(job=blobs.scope_of("digits", "ab")), "expected job 'digits', got 'digits:ab'"),
        (_blob(kind="g"), "expected kind 'w', got 'g'"),
        (_blob(version=8), "expected version 7, got 8"),
        (_blob(numel=11), "expected numel 10, got 11"),
        (b"", "expected a header of 128 bytes, got 0"),
        (_blob()[:127], "expected a header of 128 bytes, got 127"),
        (_blob()[:-1], "expected 40 bytes of float32, got 39"),
        (_blob() + b"\0", "expected 40 bytes of float32, got 41"),
        (b"XXXX" + _blob()[4:], "expected magic"),
        (b"DLBB\x01" + _blob()[5:], "expected magic b'DLBB', schema 2; got b'DLBB', 1"),
    ],
)
def test_refuses_what_is_not_asked_for(data: bytes, says: str) -> None:
    with pytest.raises(BlobError, match=says):
        blobs.decode_blob(data, job=JOB, kind="w", version=7, numel=10)


def test_refuses_every_flipped_bit() -> None:
    good = _blob()
    for bit in range(8 * len(good)):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(BlobError):
            blobs.decode_blob(bad, job=JOB, kind="w", version=7, numel=10)


@given(st.binary(max_size=300))
def test_garbage_raises_only_blob_errors(data: bytes) -> None:
    for prefix in (b"", b"DLBB\x01"):
        with pytest.raises(BlobError):
            blobs.decode_blob(prefix + data, job=JOB, kind="w", version=7, numel=10)
        with pytest.raises(BlobError):
            blobs.decode_latest(b"\xc1" + data)


@pytest.mark.parametrize(
    "array", [np.zeros(4), np.zeros((2, 2), np.float32), np.zeros(8, np.float32)[::2], np.zeros(4, ">f4")]
)
def test_encodes_only_flat_float32(array: np.ndarray) -> None:
    with pytest.raises(ValueError, match="expected contiguous float32"):
        blobs.encode_blob(array, job=JOB, kind="w", version=0)


def test_keys_and_pointer() -> None:
    assert blobs.weights_key("j", 2, 30) == "doll:{j}:w:2:30"
    assert blobs.gradient_key("j", 2, 99) == "doll:{j}:g:2:99"
    assert blobs.latest_key("j") == "doll:{j}:w:latest"
    assert blobs.weights_key(blobs.scope_of("j", "ab12"), 2, 30) == "doll:{j}:ab12:w:2:30"
    latest = blobs.Latest(term=2, version=30, key="doll:{j}:w:2:30")
    assert blobs.decode_latest(b"".join(blobs.encode_latest(latest))) == latest
    with pytest.raises(BlobError, match="expected a pointer"):
        blobs.decode_latest(_blob())
