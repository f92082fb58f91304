"""Made-up inputs for decoders of what comes from outside: valid ones, changed a little.

What is random from the first byte on is refused by its magic. A slice runs by default; `DOLL_FUZZ=1` runs all of them,
`DOLL_FUZZ=<n>` others.
"""

from __future__ import annotations

import os
import random
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

_ASKED = os.environ.get("DOLL_FUZZ", "")
SEED = int(_ASKED) if _ASKED.isdigit() else 1
SHARE = 1.0 if _ASKED else 0.05  # of the 100 000 inputs
ALL_EXAMPLES = os.environ.get("DOLL_EXAMPLES", "") == "all"  # `make test-all`; `make test` takes a fifth
MAX_INPUT_S = 10.0  # of processor time for one input: far above all that was seen, far below a hang
# Pieces that break readers of JSON: depth, numbers without end, values of another type, halves of characters.
JSON_WORDS = [
    b"[" * 3_000, b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 3_000, b"[]", b"{}", b"null", b"true", b"-1", b"1e999",
    b"-Infinity", b"NaN", b"9" * 5_000, b'""', b'"\\ud800"', b'"\\u0000"', b"\xff\xfe", b"\xf0\x9f", b"\0",
    b'"0001-01-01T00:00:00"', b'"9999-12-31T23:59:59.999999-23:59"',
]  # fmt: skip

# Lengths, counts and signs that break arithmetic.
INTERESTING = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFF_FFFF, 0xFFFF_FFFF, 2**63 - 1, 2**63, 2**64 - 1)


def examples(count: int) -> int:
    """The number of Hypothesis' examples of a test that has `count` of them in `make test-all`."""
    return count if ALL_EXAMPLES else max(5, count // 5)


def seeds(count: int) -> range:
    """The seeds of a random test that has `count` of them in `make test-all`."""
    return range(count if ALL_EXAMPLES else -(-count // 5))


def mutated(rng: random.Random, valid: bytes, other: bytes) -> bytes:
    """`valid`, changed in one to four places: bits, bytes, numbers, cuts, repeats, pieces of `other`, or all new."""
    if rng.random() < 0.02:
        return rng.randbytes(rng.randrange(200))
    data = bytearray(valid)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(8):
            case 0 if data:
                data[at % len(data)] ^= 1 << rng.randrange(8)
            case 1 if data:
                data[at % len(data)] = rng.randrange(256)
            case 2:
                packed = struct.pack("<Q", rng.choice(INTERESTING))[: rng.choice((1, 2, 4, 8))]
                packed = packed if rng.random() < 0.5 else packed[::-1]
                data[at : at + len(packed)] = packed
            case 3:
                del data[at:]
            case 4:
                del data[at : at + rng.randrange(1, 9)]
            case 5:
                data[at:at] = data[at : at + rng.randrange(1, 40)]
            case 6:
                start = rng.randrange(len(other) + 1)
                data[at : at + rng.randrange(9)] = other[start : start + rng.randrange(1, 40)]
            case _:
                data[at:at] = rng.randbytes(rng.randrange(1, 9))
    return bytes(data)


def inputs(name: str, count: int, seeds: Sequence[bytes], words: Sequence[bytes] = ()) -> Iterator[bytes]:
    """`count` (of the full number) inputs made from `seeds`; each may take `MAX_INPUT_S` of processor time.

    Args:
        words: pieces that are known to break readers of this form; one is put into every third input.
    """
    rng = random.Random(f"{SEED} {name}")
    for number in range(max(50, round(count * SHARE))):
        data = mutated(rng, rng.choice(seeds), rng.choice(seeds))
        if words and rng.random() < 0.3:
            at, until = sorted(rng.randrange(len(data) + 1) for _ in range(2))
            until = min(until, at + rng.choice((0, 1, 4, 40)))
            data = data[:at] + rng.choice(words) + data[until:]
        began_s = time.process_time()
        yield data
        took_s = time.process_time() - began_s
        assert took_s < MAX_INPUT_S, f"input {number} took {took_s:.1f} s: {data[:200]!r}"


def call_or_none(
    error: type[Exception] | tuple[type[Exception], ...],
    data: bytes,
    call: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """What `call` returns; None where it refuses `data` with `error`. Any other exception fails with the input."""
    try:
        return call(*args, **kwargs)
    except error:
        return None
    except Exception as exc:
        pytest.fail(f"{type(exc).__name__}: {exc} for {data[:400]!r} ({len(data)} bytes)")
