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
    """Return the record with its hash: that of its bytes in the topic, while the hash is empty. `before`: the hash of
    the update before it; b"": there is none."""
    return msgspec.structs.replace(record, chain=blake2b(encode(record), digest_size=_BYTES, key=before).digest())
