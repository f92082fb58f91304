"""Short forms of sections: bitmaps of keys, some values of rows, halves of values; what is hostile is refused."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import pytest
from doll.errors import BlobError, NotFiniteError
from doll.storage import sections
from doll.storage.blobs import HEADER_BYTES, encode_bytes
from doll.storage.sections import RowRequest, decode_bitmap, encode_bitmap
from doll.tables.rows import CHUNK, Patch, Rows, TableShape
from hypothesis import given
from hypothesis import strategies as st

JOB, NAME, WIDTH = "clicks", "embed.weight", 3
SHAPES: sections.Shapes = {NAME: TableShape(200, WIDTH)}
HEAD = 8  # of the first section
KEYS = HEAD + 40 + 16  # behind its name

ids_ = st.sets(st.integers(0, 199)).map(sorted)


def joined(encoded: sections.EncodedBlob) -> bytes:
    return b"".join(encoded.parts)


def rebuilt(data: bytes, kind: str, change: Callable[[bytearray], object]) -> bytes:
    """`data` with a body that `change` has changed, under checksums that are right."""
    raw = bytearray(data[HEADER_BYTES:])
    change(raw)
    return b"".join(encode_bytes([bytes(raw)], job=JOB, kind=kind, version=7))  # type: ignore[arg-type]


def pushed(rows: Rows) -> bytes:
    return joined(sections.encode_push({NAME: rows}, SHAPES, job=JOB, version=7))


def taken(data: bytes) -> Rows:
    rows = sections.decode_push(data, SHAPES, job=JOB, version=7)[NAME]
    assert isinstance(rows, Rows)
    return rows


def some_rows(ids: list[int], seed: int, share: float, *, bits: int = 32) -> Rows:
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(len(ids), WIDTH)).astype(np.float32)
    values[rng.random(values.shape) >= share] = 0.0
    if bits == 16:
        values = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return Rows(np.array(ids, np.int64), values)


# --- bitmaps ----------------------------------------------------------------------------------------------------------


@given(ids_, st.integers(200, 220))
def test_a_bitmap_comes_back(ids: list[int], limit: int) -> None:
    data = encode_bitmap(np.array(ids, np.uint64), limit)
    assert len(data) == (limit + 7) // 8
    assert decode_bitmap(data, count=len(ids), limit=limit).tolist() == ids


def test_many_keys_are_a_bitmap_and_few_are_differences() -> None:
    codings = {}
    for count in (25, 26):
        data = pushed(some_rows(list(range(count)), 0, 1.0))
        codings[count] = data[HEADER_BYTES + HEAD + 1], struct.unpack_from("<Q", data, HEADER_BYTES + HEAD + 24)[0]
    assert codings == {25: (0, 25), 26: (1, 25)}


@pytest.mark.parametrize(
    ("data", "count", "limit", "says"),
    [
        (b"\x01", 1, 9, "expected 2 bytes of bits for 9 keys, got 1"),
        (b"\x01\x00\x00", 1, 9, "expected 2 bytes of bits for 9 keys, got 3"),
        (b"\x01\x02", 1, 9, "expected 9 keys, got a bit of one behind these"),
        (b"\x03\x00", 1, 9, "expected 1 keys, got 2 in a bitmap"),
        (b"\x01\x00", 10**18, 9, "expected 1000000000000000000 keys, got 1"),
        (b"\x01", 1, 2**62, "bytes of bits for 4611686018427387904 keys, got 1"),
    ],
)
def test_a_wrong_bitmap_is_refused(data: bytes, count: int, limit: int, says: str) -> None:
    with pytest.raises(BlobError, match=says):
        decode_bitmap(np.frombuffer(data, np.uint8), count=count, limit=limit)


@pytest.mark.parametrize("keys", [[1, 1], [2, 1]])
def test_keys_that_do_not_increase_are_no_bitmap(keys: list[int]) -> None:
    with pytest.raises(ValueError, match="increase strictly"):
        encode_bitmap(np.array(keys, np.uint64), 9)


# --- values that are there, and halves --------------------------------------------------------------------------------


@given(ids_, st.integers(0, 2**32), st.sampled_from([0.0, 0.1, 0.5, 1.0]), st.sampled_from([16, 32]), st.booleans())
def test_a_push_comes_back_to_the_bit(ids: list[int], seed: int, share: float, bits: int, mixed: bool) -> None:
    rows = some_rows(ids, seed, share, bits=bits)
    if mixed and len(ids):
        rows.values[0] = some_rows(ids, seed + 1, 1.0).values[0]
    got = taken(pushed(rows))
    assert got.ids.tolist() == ids
    assert got.values.tobytes() == rows.values.tobytes()


def test_short_values_take_half_the_bytes_and_few_may_be_long() -> None:
    ids = list(range(0, 200, 2))
    long, short = some_rows(ids, 1, 1.0), some_rows(ids, 1, 1.0, bits=16)
    size = len(pushed(long))
    assert size - len(pushed(short)) == 2 * 300 - 16  # and one head
    short.values[5] = long.values[5]
    assert len(pushed(short)) < size - 550
    short.values[:50] = long.values[:50]
    assert len(pushed(short)) == size, "else it would be longer"


FORMS = {
    "bits": some_rows([3, 40, 199], 2, 0.4),
    "bitmap": some_rows(list(range(60)), 2, 0.4),
    "halves": some_rows(list(range(0, 200, 8)), 2, 1.0, bits=16),
    "halves and bits": some_rows(list(range(0, 200, 2)), 2, 0.5, bits=16),
}
FORMS["halves and bits"].values[4, 0] = np.float32(0.1)


@pytest.mark.parametrize("form", FORMS)
def test_a_hostile_body_is_refused_or_whole(form: str) -> None:
    """Under right checksums: every byte changed, and every truncation."""
    good, refused = pushed(FORMS[form]), 0
    for at in range(len(good) - HEADER_BYTES):
        for byte in (0, 1, 127, 128, 255):
            changed = rebuilt(good, "p", lambda raw, at=at, byte=byte: raw.__setitem__(at, byte))  # type: ignore[misc]
            try:
                got = taken(changed)
            except BlobError:
                refused += 1
                continue
            assert (np.diff(got.ids) > 0).all()
            assert not len(got.ids) or (got.ids[0] >= 0 and got.ids[-1] < 200)
            assert got.values.shape == (len(got.ids), WIDTH)
            assert np.isfinite(got.values).all()
    assert refused > 250
    for end in range(len(good) - HEADER_BYTES):
        with pytest.raises(BlobError):
            taken(rebuilt(good, "p", lambda raw, end=end: raw.__delitem__(slice(end, None))))  # type: ignore[misc]


# --- two bits ---------------------------------------------------------------------------------------------------------


VECTOR: sections.Shapes = {"v": 2 * CHUNK + 100}


def two_magnitudes(count: int, seed: int) -> Rows:
    """Values of a vector of three chunks, of two magnitudes in each."""
    rng = np.random.default_rng(seed)
    ids = np.sort(rng.choice(2 * CHUNK + 100, count, replace=False)).astype(np.int64)
    magnitudes = np.sort(rng.random((3, 2)).astype(np.float32) + np.float32(0.1), axis=1)
    sizes = magnitudes[ids // CHUNK, rng.integers(0, 2, count)]
    signs = rng.choice(np.array([-1, 1], np.float32), count)
    return Rows(ids, (sizes * signs).reshape(-1, 1))


def of_vector(rows: Rows) -> bytes:
    return joined(sections.encode_push({"v": rows}, VECTOR, job=JOB, version=7))


def vector_taken(data: bytes) -> Rows:
    rows = sections.decode_push(data, VECTOR, job=JOB, version=7)["v"]
    assert isinstance(rows, Rows)
    return rows


@given(st.integers(1, 3000), st.integers(0, 2**32), st.booleans())
def test_values_of_two_magnitudes_come_back_to_the_bit(count: int, seed: int, has_other: bool) -> None:
    rows = two_magnitudes(count, seed)
    if has_other:
        rows.values[count // 2] = 3.25
    got = vector_taken(of_vector(rows))
    assert (got.ids == rows.ids).all()
    assert got.values.tobytes() == rows.values.tobytes()


def test_values_of_two_magnitudes_take_two_bits_and_a_key_a_byte() -> None:
    rows = two_magnitudes(164, 1)  # 2 %
    other = Rows(rows.ids, rows.values.copy())
    other.values[7] = 3.25
    saved = len(of_vector(other)) - len(of_vector(rows))
    assert saved == 4 * 164 - (164 // 4 + 3 * 8 + 7)
    assert len(of_vector(rows)) - HEADER_BYTES < 64 + 1.2 * 164 + 24 + 41


def test_a_hostile_body_of_two_bits_is_refused_or_whole() -> None:
    good, refused = of_vector(two_magnitudes(164, 1)), 0
    for at in range(len(good) - HEADER_BYTES):
        for byte in (0, 1, 127, 128, 255):
            changed = rebuilt(good, "p", lambda raw, at=at, byte=byte: raw.__setitem__(at, byte))  # type: ignore[misc]
            try:
                got = vector_taken(changed)
            except BlobError:
                refused += 1
                continue
            assert (np.diff(got.ids) > 0).all()
            assert np.isfinite(got.values).all()
    assert refused > 150
    for end in range(len(good) - HEADER_BYTES):
        with pytest.raises(BlobError):
            vector_taken(rebuilt(good, "p", lambda raw, end=end: raw.__delitem__(slice(end, None))))  # type: ignore[misc]


@pytest.mark.parametrize(
    ("form", "at", "number", "says"),
    [
        ("bits", HEAD + 1, 4, "a coding of its keys, got 'm', 4"),
        ("bits", HEAD + 16, 4, "expected 4 keys, got 3 in"),
        ("bits", KEYS + 9, 0xFF, "got a bit of one behind these"),
        ("bitmap", HEAD + 16, 61, "expected 61 keys, got 60 in a bitmap|the bits"),
        ("bitmap", HEAD + 24, 24, "bytes of bits for 200 keys, got 24|expected zeros"),
        ("halves and bits", KEYS + 32 + 40, 0xFF, "halves|places|keys"),
    ],
)
def test_says_what_is_wrong(form: str, at: int, number: int, says: str) -> None:
    with pytest.raises(BlobError, match=says):
        taken(rebuilt(pushed(FORMS[form]), "p", lambda raw: raw.__setitem__(at, number)))


def test_an_absurd_count_of_rows_is_refused_before_memory_is_taken() -> None:
    shapes: sections.Shapes = {NAME: TableShape(2**40, 1000)}
    head = struct.pack("<cBHIQQQq", b"m", 0, len(NAME), 1000, 2**40, 2**39, 0, 0)
    body = struct.pack("<II", 1, 0) + head + NAME.encode() + bytes(4)
    data = b"".join(encode_bytes([body], job=JOB, kind="p", version=7))
    with pytest.raises(BlobError, match="the bits of"):
        sections.decode_push(data, shapes, job=JOB, version=7)
    head = struct.pack("<cBHIQQQq", b"r", 2, len(NAME), 1000, 2**40, 2**39, 0, 0)
    body = struct.pack("<II", 1, 0) + head + NAME.encode() + bytes(4) + struct.pack("<QQ", 2**60, 0)
    data = b"".join(encode_bytes([body], job=JOB, kind="p", version=7))
    with pytest.raises(BlobError, match="expected 549755813888 keys, got 0"):
        sections.decode_push(data, shapes, job=JOB, version=7)


# --- requests and answers ---------------------------------------------------------------------------------------------


@given(ids_, st.dictionaries(st.integers(0, 199), st.integers(0, 5)))
def test_each_row_is_known_since_a_version_of_its_own(ids: list[int], known: dict[int, int]) -> None:
    numbers = sorted(known)
    since = np.array([known[number] for number in numbers], np.int64)
    request = RowRequest(np.array(ids, np.int64), np.array(numbers, np.int64), since)
    data = joined(sections.encode_row_request({NAME: request}, SHAPES, job=JOB, version=7))
    back, _ = sections.decode_row_request(data, SHAPES, job=JOB)
    if ids or numbers:
        assert back[NAME].ids.tolist() == ids
        assert back[NAME].known.tolist() == numbers
        assert np.broadcast_to(back[NAME].since, len(numbers)).tolist() == since.tolist()


def test_a_row_that_is_known_since_two_versions_is_refused() -> None:
    request = RowRequest(np.array([], np.int64), np.array([3, 5]), np.array([1, 2]))
    data = joined(sections.encode_row_request({NAME: request}, SHAPES, job=JOB, version=7))
    other = HEAD + 40 + 16 + 8  # the second section
    with pytest.raises(BlobError, match="known since one version, got one since two"):
        sections.decode_row_request(
            rebuilt(data, "q", lambda raw: raw.__setitem__(other + 40 + 16, 3)), SHAPES, job=JOB
        )
    with pytest.raises(BlobError, match="expected it once, got it again"):
        sections.decode_row_request(
            rebuilt(data, "q", lambda raw: struct.pack_into("<q", raw, other + 32, 1)), SHAPES, job=JOB
        )


@given(ids_, st.integers(0, 2**32), st.integers(0, 2**32 - 1))
def test_an_answer_of_rows_and_numbers_comes_back(ids: list[int], seed: int, checksum: int) -> None:
    is_there = np.random.default_rng(seed).random((len(ids), WIDTH)) < 0.3
    rows = some_rows(ids, seed, 1.0)
    patch = Patch(rows.ids, is_there, rows.values[is_there], checksum)
    data = joined(sections.encode_rows({NAME: rows}, SHAPES, job=JOB, version=7, patches={NAME: patch}))
    answer = sections.decode_rows(data, SHAPES, job=JOB)
    assert answer.version == 7
    assert answer.rows[NAME].values.tobytes() == rows.values.tobytes()
    got = answer.patches[NAME]
    assert (got.ids.tolist(), got.is_there.tolist(), got.checksum) == (ids, is_there.tolist(), checksum)
    assert got.values.tobytes() == patch.values.tobytes()


def test_numbers_of_an_answer_are_finite() -> None:
    patch = Patch(np.array([1]), np.array([[True, False, False]]), np.array([np.inf], np.float32), 0)
    data = joined(sections.encode_rows({}, SHAPES, job=JOB, version=7, patches={NAME: patch}))
    with pytest.raises(NotFiniteError, match="expected finite values"):
        sections.decode_rows(data, SHAPES, job=JOB)


def test_bits_of_another_shape_are_not_sent() -> None:
    patch = Patch(np.array([1]), np.ones((1, 2), np.bool_), np.ones(2, np.float32), 0)
    with pytest.raises(ValueError, match=r"expected bits of shape \(1, 3\), got \(1, 2\)"):
        sections.encode_rows({}, SHAPES, job=JOB, version=7, patches={NAME: patch})
