"""Blobs of sections: pushes, row requests and rows come back; anything else is refused, and allocates nothing first."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from doll.errors import BlobError, NotFiniteError
from doll.storage import sections
from doll.storage.blobs import HEADER_BYTES, encode_bytes
from doll.storage.sections import RowRequest
from doll.tables.rows import Rows, TableShape
from hypothesis import given
from hypothesis import strategies as st

JOB, VERSION = "clicks", 7
FLAT = ""
SHAPES: sections.Shapes = {FLAT: 10, "embed.weight": TableShape(1000, 3), "bias": TableShape(2**40, 1)}


def rows(ids: list[int], width: int = 3, fill: float = 1.5) -> Rows:
    values = np.arange(len(ids) * width, dtype=np.float32).reshape(-1, width) + np.float32(fill)
    return Rows(np.array(ids, np.int64), values)


def push(**changes: Rows) -> bytes:
    pieces: dict[str, sections.Vector | Rows] = {FLAT: np.arange(10, dtype=np.float32)}
    pieces |= {"embed.weight": rows([3, 900]), "bias": rows([0, 2**39], 1), **changes}
    return joined(sections.encode_push(pieces, SHAPES, job=JOB, version=VERSION))


def joined(encoded: sections.EncodedBlob) -> bytes:
    data = b"".join(encoded.parts)
    assert len(data) == encoded.size.coded_bytes
    return data


def decode(data: bytes) -> dict[str, sections.Vector | Rows]:
    return sections.decode_push(data, SHAPES, job=JOB, version=VERSION)


def body(data: bytes, change: Callable[[bytearray], object]) -> bytes:
    """`data` with a body that `change` has changed, under checksums that are right."""
    raw = bytearray(data[HEADER_BYTES:])
    change(raw)
    return b"".join(encode_bytes([bytes(raw)], job=JOB, kind="p", version=VERSION))


ids_ = st.sets(st.integers(0, 999)).map(sorted)
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(ids=ids_, other=st.sets(st.integers(0, 2**40 - 1)).map(sorted), fill=finite, dense=st.booleans())
def test_a_push_comes_back(ids: list[int], other: list[int], fill: float, dense: bool) -> None:
    few = [at for at in ids if at < 10]
    flat = np.full(10, fill, np.float32) if dense else rows(few, 1, fill)
    pieces = {FLAT: flat, "embed.weight": rows(ids), "bias": rows(other, 1)}
    encoded = sections.encode_push(pieces, SHAPES, job=JOB, version=VERSION)
    back = decode(joined(encoded))
    assert list(back) == list(pieces)
    for name, piece in pieces.items():
        got = back[name]
        if isinstance(piece, Rows):
            assert isinstance(got, Rows)
            assert got.ids.tolist() == piece.ids.tolist()
            assert got.values.tobytes() == piece.values.tobytes()
            assert got.values.shape == piece.values.shape
        else:
            assert not isinstance(got, Rows)
            assert got.tobytes() == piece.tobytes()
    values = (10 if dense else len(few)) + 3 * len(ids) + len(other)
    keys = (0 if dense else len(few)) + len(ids) + len(other)
    assert encoded.size.plain_bytes == 4 * values + 8 * keys


def test_what_is_left_out_is_no_error_and_values_are_not_copied() -> None:
    data = np.frombuffer(
        joined(sections.encode_push({"bias": rows([4], 1)}, SHAPES, job=JOB, version=VERSION)), np.uint8
    )
    back = sections.decode_push(data.data, SHAPES, job=JOB, version=VERSION)
    assert list(back) == ["bias"]
    bias = back["bias"]
    assert isinstance(bias, Rows)
    assert np.shares_memory(bias.values, data)
    assert bias.values.flags.aligned
    assert decode(joined(sections.encode_push({}, SHAPES, job=JOB, version=VERSION))) == {}


@given(ids=ids_, known=ids_, since=st.integers(0, 2**62))
def test_a_row_request_comes_back(ids: list[int], known: list[int], since: int) -> None:
    request = RowRequest(np.array(ids, np.int64), np.array(known, np.int64), since if known else 0)
    data = joined(sections.encode_row_request({"embed.weight": request}, SHAPES, job=JOB, version=5))
    back, version = sections.decode_row_request(data, SHAPES, job=JOB)
    assert version == 5
    assert list(back) == ["embed.weight"][: bool(ids or known)]
    for got in back.values():
        assert (got.ids.tolist(), got.known.tolist(), got.since) == (ids, known, request.since)


@given(st.sets(st.tuples(st.integers(0, 999), st.integers(0, 2)), min_size=1).map(sorted), finite.filter(bool))
def test_rows_of_few_values_are_sent_as_these(places: list[tuple[int, int]], value: float) -> None:
    """To the bit, in 4 bytes for each value, and a short key and 3 bits for each row."""
    numbers = sorted({row for row, _ in places})
    piece = Rows(np.array(numbers), np.zeros((len(numbers), 3), np.float32))
    for row, column in places:
        piece.values[numbers.index(row), column] = value
    encoded = sections.encode_push({"embed.weight": piece}, SHAPES, job=JOB, version=VERSION)
    got = decode(joined(encoded))["embed.weight"]
    assert isinstance(got, Rows)
    assert got.ids.tolist() == numbers
    assert got.values.tobytes() == piece.values.tobytes()
    assert encoded.size.coded_bytes < HEADER_BYTES + 104 + 4 * len(places) + 1.4 * len(numbers)


def test_a_row_of_zeros_is_sent_as_a_row() -> None:
    """An optimizer with a state may step it."""
    piece = Rows(np.array([4, 7]), np.array([[0, 0, 0], [0, 2, 0]], np.float32))
    got = decode(joined(sections.encode_push({"embed.weight": piece}, SHAPES, job=JOB, version=VERSION)))
    assert got["embed.weight"][0].tolist() == [4, 7]


def test_rows_come_back_with_their_version() -> None:
    data = joined(sections.encode_rows({"embed.weight": rows([1, 2])}, SHAPES, job=JOB, version=9))
    back, version, patches = sections.decode_rows(data, SHAPES, job=JOB)
    assert (version, patches) == (9, {})
    assert back["embed.weight"].ids.tolist() == [1, 2]
    assert back["embed.weight"].values.tolist() == rows([1, 2]).values.tolist()


def test_keys_close_to_each_other_take_a_byte_each() -> None:
    ids = list(range(0, 1000, 2))
    size = sections.encode_push({"embed.weight": rows(ids)}, SHAPES, job=JOB, version=1).size
    assert size.plain_bytes == len(ids) * (8 + 12)
    assert size.coded_bytes < len(ids) * (1 + 12) + HEADER_BYTES + 80


# --- refusals --------------------------------------------------------------------------------------------------------


def test_every_truncation_and_every_flipped_bit_is_refused() -> None:
    good = push()
    for end in range(len(good)):
        with pytest.raises(BlobError):
            decode(good[:end])
    with pytest.raises(BlobError):
        decode(good + b"\0")
    for bit in range(8 * len(good)):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(BlobError):
            decode(bytes(bad))


def test_a_hostile_body_under_right_checksums_is_refused_or_whole() -> None:
    good = push()
    num_refused = 0
    for at in range(len(good) - HEADER_BYTES):
        for byte in (0, 1, 127, 128, 255):
            if good[HEADER_BYTES + at] == byte:
                continue
            changed = body(good, lambda raw, at=at, byte=byte: raw.__setitem__(at, byte))  # type: ignore[misc]
            try:
                back = decode(changed)
            except BlobError:
                num_refused += 1
                continue
            for name, piece in back.items():
                if isinstance(piece, Rows):
                    assert (np.diff(piece.ids) > 0).all()
                    assert piece.ids[-1] < sections._table_shape(SHAPES[name]).num_rows
                    assert np.isfinite(piece.values).all()
    assert num_refused > 500
    for end in range(len(good) - HEADER_BYTES):
        with pytest.raises(BlobError):
            decode(body(good, lambda raw, end=end: raw.__delitem__(slice(end, None))))  # type: ignore[misc]


@given(st.binary(max_size=200))
def test_garbage_raises_only_blob_errors(data: bytes) -> None:
    for start in (b"", struct.pack("<II", 1, 0)):
        blob = b"".join(encode_bytes([start, data], job=JOB, kind="p", version=VERSION))
        try:
            assert decode(blob) == {}  # no section
        except BlobError:
            continue
        assert (start + data)[:8] == bytes(8)


def test_an_absurd_count_allocates_nothing() -> None:
    absurd = struct.pack("<II", 1, 0) + struct.pack("<cBHIQQQq", b"r", 0, 4, 1, 2**40, 2**39, 0, 0) + b"bias" + bytes(4)
    data = b"".join(encode_bytes([absurd], job=JOB, kind="p", version=VERSION))
    tracemalloc.start()
    try:
        with pytest.raises(BlobError, match="section 'bias': expected 549755813888 keys, got 0"):
            decode(data)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def _at(offset: int, form: str, *values: object) -> Callable[[bytearray], object]:
    return lambda raw: struct.pack_into(form, raw, offset, *values)


HEAD = 8  # of the first section, the flat vector's


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_at(0, "<I", 4), "the head of a section"),
        (_at(0, "<I", 2), "expected 2 sections and nothing more"),
        (_at(4, "<I", 1), "expected zero behind the number of sections, got 1"),
        (_at(HEAD, "<c", b"x"), "expected a form of d/r/m and a coding of its keys, got 'x', 0"),
        (_at(HEAD, "<c", b"k"), "expected a form of d/r/m and a coding of its keys, got 'k', 0"),
        (_at(HEAD, "<c", b"\xff"), "in UTF-8"),
        (_at(HEAD + 1, "<B", 1), "a coding of its keys, got 'd', 1"),
        (_at(HEAD + 4, "<I", 2), "section '': expected 10 rows of 1, got 10 of 2"),
        (_at(HEAD + 8, "<Q", 11), "section '': expected 10 rows of 1, got 11 of 1"),
        (_at(HEAD + 16, "<Q", 9), "or all values of a vector, got 9 values"),
        (_at(HEAD + 24, "<Q", 8), "or all values of a vector"),
        (_at(HEAD + 2, "<H", 60000), "expected 60000 bytes for a section's name"),
    ],
)  # fmt: skip
def test_says_what_is_wrong_with_a_section(change: Callable[[bytearray], object], says: str) -> None:
    with pytest.raises(BlobError, match=says):
        decode(body(push(), change))


def test_padding_is_zero() -> None:
    good = push()
    behind_name = good.index(b"embed.weight") + len(b"embed.weight") - HEADER_BYTES
    with pytest.raises(BlobError, match="expected zeros behind a section's name, got b'\\\\x00\\\\x01"):
        decode(body(good, _at(behind_name, "<H", 256)))


def test_names_and_forms_are_checked() -> None:
    one = joined(sections.encode_push({"bias": rows([4], 1)}, {"bias": TableShape(9, 1)}, job=JOB, version=VERSION))
    twice = body(one, lambda raw: raw.extend(raw[8:]) or _at(0, "<I", 2)(raw))
    with pytest.raises(BlobError, match="section 'bias': expected it once, got it again"):
        sections.decode_push(twice, {"bias": TableShape(9, 1)}, job=JOB, version=VERSION)
    with pytest.raises(BlobError, match="no such vector or table"):
        sections.decode_push(one, {FLAT: 3}, job=JOB, version=VERSION)
    with pytest.raises(BlobError, match="expected kind 'r', got 'p'"):
        sections.decode_rows(one, SHAPES, job=JOB)
    with pytest.raises(BlobError, match="expected version 8, got 7"):
        sections.decode_push(one, SHAPES, job=JOB, version=8)
    # A table of width 1 cannot come as a dense vector: its gradient would be dense.
    dense = joined(sections.encode_push({"bias": np.ones(9, np.float32)}, {"bias": 9}, job=JOB, version=VERSION))
    with pytest.raises(BlobError, match="expected rows of a table"):
        sections.decode_push(dense, {"bias": TableShape(9, 1)}, job=JOB, version=VERSION)
    both: sections.Shapes = {FLAT: 4}
    blob = joined(sections.encode_push({FLAT: np.ones(4, np.float32)}, both, job=JOB, version=VERSION))
    few = joined(sections.encode_push({FLAT: rows([1], 1)}, both, job=JOB, version=VERSION))
    mixed = body(blob, lambda raw: raw.extend(few[HEADER_BYTES + 8 :]) or _at(0, "<I", 2)(raw))
    with pytest.raises(BlobError, match="got it in two forms"):
        sections.decode_push(mixed, both, job=JOB, version=VERSION)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_an_error_of_its_own(bad: float) -> None:
    piece = rows([3, 5, 900])
    piece.values[1, 2] = bad
    with pytest.raises(NotFiniteError, match=r"got NaN or infinity in 1 rows, the first of them 5"):
        decode(push(**{"embed.weight": piece}))


@pytest.mark.parametrize(
    ("piece", "says"),
    [
        (rows([5, 3]), "increase strictly"),
        (rows([3, 3]), "increase strictly"),
        (rows([3, 1000]), "expected ids of 0 to 999, got 3 to 1000"),
        (rows([-1, 3]), "expected ids of 0 to 999, got -1 to 3"),
        (rows([3], 2), r"expected float32 values of shape \(1, 3\)"),
        (Rows(np.array([3]), np.ones((1, 3))), "got float64"),  # type: ignore[arg-type]
    ],
)
def test_does_not_encode_what_would_be_refused(piece: Rows, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        push(**{"embed.weight": piece})
