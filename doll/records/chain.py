"""The chain of updates: each update record has a hash of itself and of the update before it in the model. Pure.

A checkpoint has the hash of its last update. So a record of `updates` that was changed, left out or added afterwards is
noticed, unless all later records and the checkpoint were changed as well (`doll audit --independent`).
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

import msgspec

from doll.records.control import Update, encode

_BYTES: Final = 16


def chained(record: Update, before: bytes) -> Update:
    """Return the record with its hash. `before`: the hash of the update before it; b"": there is none."""
    return msgspec.structs.replace(record, chain=next_hash(encode(record), before))


def next_hash(encoded: bytes, before: bytes) -> bytes:
    """Return the hash of an update record. `encoded`: the record as in the topic, with an empty hash."""
    return blake2b(encoded, digest_size=_BYTES, key=before).digest()
