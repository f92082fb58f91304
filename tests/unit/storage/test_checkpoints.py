"""The checkpoint's bytes: what comes back, and what is noticed."""

from __future__ import annotations

import numpy as np
import pytest
from doll.storage.checkpoints import Checkpoint, DamagedError, decode_checkpoint, encode_checkpoint
from hypothesis import given
from hypothesis import strategies as st

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
