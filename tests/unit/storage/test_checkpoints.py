"""The checkpoint's bytes: what comes back, and what is noticed."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import safetensors.numpy
from doll.storage.checkpoints import Checkpoint, DamagedError, decode_checkpoint, encode_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

TENSORS = {"weights": np.arange(64, dtype=np.float32), "step": np.array(20)}
CHECKPOINT = Checkpoint(job="digits", fingerprint="f1", term=1, version=20, state=b"state", tensors=TENSORS)
BYTES = b"".join(encode_checkpoint(CHECKPOINT))


def test_what_was_encoded_comes_back() -> None:
    decoded = decode_checkpoint(BYTES)
    for name in ("job", "fingerprint", "term", "version", "state"):
        assert getattr(decoded, name) == getattr(CHECKPOINT, name)
    assert decoded.tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        np.testing.assert_array_equal(decoded.tensors[name], tensor, strict=True)


DTYPES = ("f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "?")


@given(
    st.dictionaries(
        st.text(max_size=5),
        hnp.arrays(st.sampled_from(DTYPES), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)),
        max_size=4,
    ),
    st.booleans(),
)
def test_tensors_are_as_safetensors_reads_them(tensors: dict[str, np.ndarray], transposed: bool) -> None:
    made = {name: tensor.T if transposed else tensor for name, tensor in tensors.items()}
    parts = encode_checkpoint(_with(made))
    data = b"".join(parts)
    for decoded in (decode_checkpoint(data).tensors, decode_checkpoint(data, in_place=True).tensors):
        assert decoded.keys() == made.keys()
        for name, tensor in made.items():
            np.testing.assert_array_equal(decoded[name], tensor, strict=True)


def test_the_bytes_of_the_tensors_are_those_of_safetensors() -> None:
    tensors = {"w": np.arange(5, dtype=np.float32), "optimizer.step": np.array(3.0), "n": np.ones((2, 2), np.int64)}
    assert safetensors.numpy.save(tensors) in b"".join(encode_checkpoint(_with(tensors)))


def test_tensors_are_not_copied() -> None:
    weights = np.arange(64, dtype=np.float32)
    parts = encode_checkpoint(_with({"weights": weights}))
    assert any(np.shares_memory(np.frombuffer(part, np.uint8), weights) for part in parts if len(part))


def test_a_dtype_that_safetensors_does_not_hold_is_refused() -> None:
    with pytest.raises(ValueError, match=r"names: expected a dtype that safetensors holds, got <U3"):
        encode_checkpoint(_with({"names": np.array(["abc"])}))


def _with(tensors: dict[str, np.ndarray]) -> Checkpoint:
    return dataclasses.replace(CHECKPOINT, tensors=tensors)


def test_every_flipped_bit_is_noticed() -> None:
    for bit in range(0, 8 * len(BYTES), 3):
        bad = bytearray(BYTES)
        bad[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(DamagedError):
            decode_checkpoint(bytes(bad))


@given(st.binary(max_size=200))
def test_garbage_is_damaged(data: bytes) -> None:
    with pytest.raises(DamagedError):
        decode_checkpoint(data)
