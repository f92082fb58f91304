"""Encode blobs with several sections: a worker's pushes, and the rows of tables that it requests. Pure.

A *push* (kind `p`) contains vectors and rows of tables. A vector is complete (dense), or has only some values. A
*delta* (`d`) contains, in the same format, the values of a version that differ from an older version. A *row request*
(`q`) contains the ids of rows. The answer to it (`r`) contains the rows. The header and its checksums are the same as
in every blob (`doll.storage.blobs`).

The body, little-endian: u32 number of sections, u32 0; then each section:

    form (1 byte), coding (1 byte), u16 bytes of the name, u32 width, u64 size, u64 count, u64 bytes of the keys,
    i64 since
    name (UTF-8), keys, bits (only form `m`), the values (float32)

The name, the keys, the bits and the values are each padded with zeros to a multiple of 8 bytes, so that the values are
aligned. `size` is the number of rows of the table, or the number of values of the vector. No two sections have the same
form and name, except sections of form `c`, which differ in `since` and share no key.

Keys increase strictly. There are two codings:

0.  Each key is coded as its difference to the key before it (the first key: to 0), with 7 bits in each byte (LEB128),
    lowest bits first. The top bit of a byte is 1 if another byte follows. A longer coding of the same number is
    refused.
1.  One bit for each possible key, lowest bit of a byte first; it is 1 if the key is present. This coding is shorter if
    more than an eighth of all keys are present. It is used only if `size` (the number of possible keys) is at most
    65,536.

If a section with keys has at least 64 values, and at most an eighth of them need all of their 32 bits, 2 is added to
the coding. The values are then stored as: u64 number of the values that need 32 bits, u64 bytes of their positions;
their positions, in coding 0; the upper 16 bits of all values; the lower 16 bits of the values that need them. Each of
these parts is padded with zeros to a multiple of 8 bytes. The lower bits of all other values are 0. A dense vector of
at least 64 values has this format if its sender has rounded it to bfloat16 (`RoundedVector`).

Coding 4 is for a dense vector that its sender has rounded to float16 with a common exponent (`RoundedVector.exponent`).
The values are float16 numbers; each must be multiplied by 2 to the power of `since`.

If the values of a vector's section `r` have at most two magnitudes in each chunk of 4,096 keys, 8 may be added to the
coding. The values are then stored as: for each chunk, also for one without a key, its lower and its higher magnitude
(float32); two bits for each value, lowest bits of a byte first: the lower bit is 1 if the value is negative, the higher
bit if it has the higher magnitude.

Functions that encode raise ValueError as `encode_push` does; functions that decode raise BlobError and NotFiniteError
as `decode_push` does.

| form | keys | values | means |
|---|---|---|---|
| `d` | - | size of 1 | a vector, dense |
| `r` | count | count of width | rows of a table; of width 1: some values of a vector |
| `m` | count | one for each bit that is 1 | some values of rows of a table (see the bits below) |
| `k` | count | - | send these rows |
| `c` | count | - | send the changes of these rows since version `since` |

Bit number `i * width + j` of form `m` says whether value j of the i-th row in this section is present.

In a push, the values that form `m` omits are zero. In an answer, the receiver already has the omitted values. `since`
then contains a checksum instead of a version: the CRC-32 of the current values of all rows in `RowRequest.known`, in
ascending order of ids.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from doll.errors import BlobError, NotFiniteError
from doll.storage.blobs import Buffer, BytesKind, decode_bytes, encode_bytes
from doll.tables.rows import CHUNK, Ids, Patch, Rows, TableShape

Keys = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]

_MORE: Final = 0x80
_BITS: Final = 0x7F
_MAX_BYTES: Final = 10  # maximum size of one difference: 64 bits, 7 in a byte
Vector: TypeAlias = npt.NDArray[np.float32]
# A vector's number of values, or a table's shape, by name.
Shapes: TypeAlias = Mapping[str, int | TableShape]


class RoundedVector(NamedTuple):
    """A vector whose numbers need only 16 bits."""

    values: Vector  # float32, shape (numel,): numbers of bfloat16, or of float16 times 2 ** `exponent`
    exponent: int | None = None  # None: bfloat16


_COUNT: Final = struct.Struct("<II")
_HEAD: Final = struct.Struct("<cBHIQQQq")
_ALIGNMENT: Final = 8
_DIFFERENCES: Final = 0  # codings of keys
_BITMAP: Final = 1
_MAX_BITS: Final = 1 << 16  # beyond this number, a bitmap takes more time than differences
_HALVES: Final = 2  # added to one of these codings
_HALVES_HEAD: Final = struct.Struct("<QQ")
_MAX_WHOLE: Final = 1 / 8  # maximum share of values that need 32 bits; above it, halves are not used
_LOOK: Final = 64  # number of values that are tested first; if there are fewer, all are sent unchanged
_FLOAT16: Final = 4
_MAGNITUDES: Final = 8  # is added to one of the codings of keys
_MAX_EXPONENT: Final = 150  # float32 has no number beyond 2 ** 128 or below 2 ** -149
_NO_PATCHES: Final[Mapping[str, Patch]] = {}
_NO_IDS: Final = np.empty(0, np.int64)
_NO_VALUES: Final = np.empty((0, 1), np.float32)


def encode_keys(keys: Keys) -> Bytes:
    """Return the bytes of `keys`, shape (n,): 1 to 10 bytes for each key. Raise ValueError if the keys do not increase
    strictly."""
    if not len(keys):
        return np.empty(0, np.uint8)
    rest = np.empty(len(keys), np.uint64)
    rest[0] = keys[0]
    np.subtract(keys[1:], keys[:-1], out=rest[1:])
    if not (keys[1:] > keys[:-1]).all():
        raise ValueError("expected keys that increase strictly: sort them, and add the values of equal ones")
    bits = int(rest.max()).bit_length()
    if bits <= 7:
        return rest.astype(np.uint8)
    lengths = np.ones(len(keys), np.int64)
    for shift in range(7, bits, 7):
        lengths += rest >= np.uint64(1 << shift)
    ends = np.cumsum(lengths)
    data = np.empty(int(ends[-1]), np.uint8)
    at = ends - lengths
    while len(at):
        goes_on = rest > _BITS
        data[at] = (rest & np.uint64(_BITS)).astype(np.uint8) | (goes_on.view(np.uint8) << 7)
        at, rest = at[goes_on] + 1, rest[goes_on] >> np.uint64(7)
    return data


def decode_keys(data: Bytes, *, count: int, limit: int) -> Keys:
    """Return the `count` keys in `data`, strictly increasing and below `limit`. Raise BlobError if `data` is not the
    coding of such keys. The memory that is allocated is limited to a small multiple of `data`, for any `count`."""
    if not len(data) and not count:
        return np.empty(0, np.uint64)
    is_last = data < _MORE
    if (coded := int(np.count_nonzero(is_last))) != count or not is_last[-1]:
        cut_off = ", the last one cut off" if len(data) and not is_last[-1] else ""
        raise BlobError(f"expected {count} keys, got {coded} in {len(data)} bytes{cut_off}")
    differences = data.astype(np.uint64) if coded == len(data) else _differences(data, is_last)
    keys: Keys = np.cumsum(differences, dtype=np.uint64)
    if not (keys[1:] > keys[:-1]).all():
        if not differences[1:].all():
            at = int(np.flatnonzero(differences[1:] == 0)[0]) + 1
            raise BlobError(f"expected keys that increase strictly, got {keys[at]} again at {at}: repeated")
        raise BlobError("expected keys that increase strictly, got one below the key before it: unsorted")
    if int(keys[-1]) >= limit:
        raise BlobError(f"expected keys below {limit}, got {keys[-1]}: out of range")
    return keys


def _differences(data: Bytes, is_last: npt.NDArray[np.bool_]) -> Keys:
    ends = np.flatnonzero(is_last)
    begins = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - begins + 1
    longest = int(lengths.max())
    if longest > _MAX_BYTES:
        raise BlobError(f"expected at most {_MAX_BYTES} bytes for a key, got {longest}")
    final = data[ends]
    if ((final == 0) & (lengths > 1)).any():
        raise BlobError("expected the shortest coding of each key, got one that ends with a zero byte")
    if longest == _MAX_BYTES and (final[lengths == _MAX_BYTES] > 1).any():
        raise BlobError("expected keys below 2^64, got a difference above that")
    values: Keys = (data[begins] & _BITS).astype(np.uint64)
    left = np.flatnonzero(lengths > 1)
    for byte in range(1, longest):
        values[left] |= (data[begins[left] + byte] & _BITS).astype(np.uint64) << np.uint64(7 * byte)
        left = left[lengths[left] > byte + 1]
    return values


def encode_bitmap(keys: Keys, limit: int) -> Bytes:
    """Return one bit for each number below `limit`, which is 1 if the number is in `keys`. Raise ValueError if `keys`
    are not strictly increasing and below `limit`."""
    if not (keys[1:] > keys[:-1]).all():
        raise ValueError("expected keys that increase strictly: sort them, and add the values of equal ones")
    is_in = np.zeros(limit, np.bool_)
    is_in[keys.view(np.int64)] = True
    return np.packbits(is_in, bitorder="little")


def decode_bitmap(data: Bytes, *, count: int, limit: int) -> Keys:
    """Return the `count` keys in `data`, strictly increasing and below `limit`. Raise BlobError if `data` is not their
    bitmap. The memory that is allocated is limited to a small multiple of `data`, for any `count` and `limit`."""
    is_in = _bits(data, limit, "keys")
    keys = np.flatnonzero(is_in).view(np.uint64)
    if len(keys) != count:
        raise BlobError(f"expected {count} keys, got {len(keys)} in a bitmap")
    return keys


def _bits(data: Bytes, num_bits: int, what: str) -> npt.NDArray[np.bool_]:
    """Return the bits in `data`, shape (num_bits,). Raise BlobError unless the last byte's other bits are 0."""
    if len(data) != _bytes_of(num_bits):
        raise BlobError(f"expected {_bytes_of(num_bits)} bytes of bits for {num_bits} {what}, got {len(data)}")
    bits = np.unpackbits(data, bitorder="little").view(np.bool_)
    if bits[num_bits:].any():
        raise BlobError(f"expected {num_bits} {what}, got a bit of one behind these")
    return bits[:num_bits]


def _bytes_of(num_bits: int) -> int:
    return (num_bits + 7) // 8


class WireSize(NamedTuple):
    """The size of a blob's content, in bytes."""

    plain_bytes: int  # size with 8 bytes for each key
    coded_bytes: int  # size of the blob, header included


class EncodedBlob(NamedTuple):
    """A blob in parts for `Blobs.put`: views of the given arrays, which must not change before the blob is stored."""

    parts: list[Buffer]
    size: WireSize


class RowRequest(NamedTuple):
    """A request for the rows of one table that a worker needs."""

    ids: Ids  # int64, strictly increasing: ids of the rows to send
    # int64, strictly increasing: ids of rows that the worker has, as of version `since` or later. Of these rows, only
    # later changes are sent.
    known: Ids
    # A version, or one for each of `known`, int64, shape (len(known),); not used if `known` is empty.
    since: int | npt.NDArray[np.int64] = 0


class StoredAnswer(NamedTuple):
    """The content of a blob of rows, by table name; all values are those of `version`."""

    rows: dict[str, Rows]
    version: int
    # Patches of rows that the receiver has said it knows, if the server sends single values instead of rows.
    patches: dict[str, Patch]


class _Section(NamedTuple):
    form: str
    name: str
    shape: TableShape
    since: int
    ids: Ids = _NO_IDS  # empty for form `d`
    values: npt.NDArray[np.float32] = _NO_VALUES  # shape (count, width); form `m`: one for each bit, shape (n, 1)
    is_there: npt.NDArray[np.bool_] | None = None  # shape (count, width), only for form `m`
    short: int = 0  # `_HALVES` or `_FLOAT16` if the values of form `d` need only 16 bits


def encode_push(
    pieces: Mapping[str, Vector | RoundedVector | Rows], shapes: Shapes, *, job: str, version: int
) -> EncodedBlob:  # fmt: skip
    """Return the blob of a push. Raise ValueError if ids do not increase strictly, or values have other shapes than
    `shapes`.

    Args:
        pieces: by name, a float32 vector of shape (numel,), or some rows; for a vector, rows of width 1.
        version: version of the weights at which the push was computed.
    """
    sections = _sections(pieces, shapes, since=0)
    return _encode([_shorter(section) for section in sections], job=job, kind="p", version=version)


def encode_delta(
    pieces: Mapping[str, Vector | Rows], shapes: Shapes, *, job: str, since: int, version: int
) -> EncodedBlob:
    """Return the blob of the values of `version` that differ from version `since`; see `encode_push`."""
    return _encode(_sections(pieces, shapes, since=since), job=job, kind="d", version=version)


def decode_push(data: Buffer, shapes: Shapes, *, job: str, version: int) -> dict[str, Vector | Rows]:
    """Return the pieces that were given to `encode_push`: views of `data`, read-only if `data` is. A vector or table
    may be missing.

    The values of dense vectors are not checked, as in other blobs. The code that uses the vectors checks them.

    Raises:
        BlobError: as in `decode_blob`; or a section has a name, form, shape or length that does not fit `shapes`; or
            keys do not increase strictly or are out of range.
        NotFiniteError: a value of a row is NaN or infinite.
    """
    body, _ = decode_bytes(data, job=job, kind="p", version=version)
    return _pieces(body, shapes, forms="drm")[0]


def decode_delta(data: Buffer, shapes: Shapes, *, job: str, version: int) -> tuple[dict[str, Vector | Rows], int]:
    """Return the pieces that were given to `encode_delta`, and the base version: the pieces are the values of `version`
    that differ from it. Raise the same errors as `decode_push`, and BlobError also if the base version is not lower
    than the blob's own."""
    body, _ = decode_bytes(data, job=job, kind="d", version=version)
    pieces, sinces = _pieces(body, shapes, forms="dr")
    if len(sinces) != 1 or not 0 <= (since := sinces.pop()) < version:
        raise BlobError(f"delta of version {version}: expected one version below it that it is compared with")
    return pieces, since


def encode_row_request(requests: Mapping[str, RowRequest], shapes: Shapes, *, job: str, version: int) -> EncodedBlob:
    """Return the blob of a request for rows of several tables, as of `version` or later."""
    sections = []
    for name, request in requests.items():
        shape = _table_shape(shapes[name])
        if len(request.ids):
            sections.append(_Section("k", name, shape, 0, request.ids))
        since = np.broadcast_to(request.since, len(request.known))
        for version_known in sorted(set(since.tolist())):
            sections.append(_Section("c", name, shape, version_known, request.known[since == version_known]))
    return _encode(sections, job=job, kind="q", version=version)


def decode_row_request(data: Buffer, shapes: Shapes, *, job: str) -> tuple[dict[str, RowRequest], int]:
    """Return the requests, by table name, and the oldest version that the rows may have."""
    body, version = decode_bytes(data, job=job, kind="q", version=None)
    requests: dict[str, RowRequest] = {}
    for section in _decode(body, shapes, forms="kc"):
        before = requests.get(section.name, RowRequest(_NO_IDS, _NO_IDS))
        if section.form == "k":
            requests[section.name] = before._replace(ids=section.ids)
        elif not len(before.known):
            requests[section.name] = before._replace(known=section.ids, since=section.since)
        else:
            requests[section.name] = _also_known(before, section)
    return requests, version


def _also_known(request: RowRequest, section: _Section) -> RowRequest:
    """Return `request` with the ids of `section` added to the known ids, with the version in `section`."""
    known = np.concatenate([request.known, section.ids])
    since_each = np.broadcast_to(request.since, len(request.known)), np.full(len(section.ids), section.since)
    since = np.concatenate(since_each)
    order = np.argsort(known, kind="stable")
    known = known[order]
    if not (known[1:] > known[:-1]).all():
        raise BlobError(f"section {section.name!r}: expected each row as known since one version, got one since two")
    return request._replace(known=known, since=since[order])


def encode_rows(
    rows: Mapping[str, Rows], shapes: Shapes, *, job: str, version: int, patches: Mapping[str, Patch] = _NO_PATCHES
) -> EncodedBlob:
    """Return the blob of complete rows of `version`, and of single numbers of other rows."""
    sections = [_Section("r", name, _table_shape(shapes[name]), 0, *piece) for name, piece in rows.items()]
    for name, (ids, is_there, values, checksum) in patches.items():
        shape = _table_shape(shapes[name])
        sections.append(_Section("m", name, shape, checksum, ids, values.reshape(-1, 1), is_there))
    return _encode(sections, job=job, kind="r", version=version)


def decode_rows(data: Buffer, shapes: Shapes, *, job: str) -> StoredAnswer:
    """Return the rows and patches that were given to `encode_rows`, as views of `data` if possible."""
    body, version = decode_bytes(data, job=job, kind="r", version=None)
    answer = StoredAnswer({}, version, {})
    for section in _decode(body, shapes, forms="rm"):
        if section.form == "r":
            answer.rows[section.name] = _rows(section)
        else:
            answer.patches[section.name] = _patch(section)
    return answer


def _encode(sections: Sequence[_Section], *, job: str, kind: BytesKind, version: int) -> EncodedBlob:
    parts: list[Buffer] = [_COUNT.pack(len(sections), 0)]
    plain = 0
    for form, name, shape, since, ids, values, is_there, short in sections:
        has_keys, has_values = form != "d", form in "drm"
        coding, keys = _coded(name, ids, shape.num_rows) if has_keys else (0, np.empty(0, np.uint8))
        count = len(ids) if has_keys else shape.num_rows
        expected, bits = (count, shape.width), np.empty(0, np.uint8)
        if is_there is not None:
            if is_there.shape != expected:
                raise ValueError(f"{name!r}: expected bits of shape {expected}, got {is_there.shape}")
            expected, bits = (int(np.count_nonzero(is_there)), 1), np.packbits(is_there, bitorder="little")
        if has_values and (values.shape != expected or values.dtype != np.float32):
            raise ValueError(
                f"{name!r}: expected float32 values of shape {expected}, got {values.dtype} of {values.shape}"
            )
        plain += 8 * len(ids) + 4 * values.size
        title = name.encode()
        numbers = np.ascontiguousarray(values).reshape(-1)
        body: list[Buffer] = [numbers.view(np.uint8).data]
        if short == _FLOAT16:
            coding, body = _FLOAT16, [np.ldexp(numbers, -since).astype("<f2").view(np.uint8).data]
        elif form == "r" and shape.width == 1 and (two_bits := _two_bits(ids, numbers, shape.num_rows)):
            coding, body = coding | _MAGNITUDES, two_bits
        elif (has_keys or short) and (halves := _halves(numbers.view("<u4"))):
            coding, body = coding | _HALVES, halves
        head = (form.encode(), coding, len(title), shape.width, shape.num_rows, count, len(keys), since)
        parts.append(_HEAD.pack(*head))
        for part in (title, keys.data, bits.data, *body):
            parts += [part, bytes(-len(part) % _ALIGNMENT)]
    blob = encode_bytes([part for part in parts if len(part)], job=job, kind=kind, version=version)
    return EncodedBlob(blob, WireSize(plain, sum(map(len, blob))))


def _halves(values: npt.NDArray[np.uint32]) -> list[Buffer]:
    """Return the values in two halves of 16 bits; empty if there are few, or too many need all of their bits."""
    if len(values) < _LOOK:
        return []
    for some in (values[:_LOOK], values):
        is_whole = (some & 0xFFFF) != 0
        if np.count_nonzero(is_whole) > _MAX_WHOLE * len(some):
            return []
    places = np.flatnonzero(is_whole)
    keys = encode_keys(places.astype(np.uint64))
    upper, lower = (values >> 16).astype("<u2"), values[places].astype("<u2")
    head = _HALVES_HEAD.pack(len(places), len(keys))
    return [head, keys.data, upper.view(np.uint8).data, lower.view(np.uint8).data]


def _two_bits(ids: Ids, values: Vector, size: int) -> list[Buffer]:
    """Return the magnitudes of the chunks, and two bits for each value. Return an empty list if that is not shorter, or
    if a chunk has more than two magnitudes."""
    num_chunks = -(-size // CHUNK)
    if len(values) < _LOOK or 8 * num_chunks + len(values) // 4 >= 4 * len(values):
        return []
    sizes, chunks = np.abs(values), ids // CHUNK
    if len(np.unique(sizes[:_LOOK])) > 2 * len(np.unique(chunks[:_LOOK])):
        return []
    begins = np.flatnonzero(np.diff(chunks, prepend=-1))
    magnitudes = np.zeros((num_chunks, 2), "<f4")
    magnitudes[chunks[begins], 0] = np.minimum.reduceat(sizes, begins)
    magnitudes[chunks[begins], 1] = np.maximum.reduceat(sizes, begins)
    is_high = sizes == magnitudes[chunks, 1]
    if not (is_high | (sizes == magnitudes[chunks, 0])).all():
        return []
    bits = np.packbits(np.stack([np.signbit(values), is_high], axis=1), bitorder="little")
    return [magnitudes.reshape(-1).view(np.uint8).data, bits.data]


def _from_two_bits(reader: _Reader, ids: Ids, size: int, what: str) -> npt.NDArray[np.float32]:
    """Return the values that `_two_bits` encoded."""
    magnitudes = reader.array(2 * -(-size // CHUNK), "<f4", f"the magnitudes of {what}").reshape(-1, 2)
    packed = reader.array(_bytes_of(2 * len(ids)), "u1", f"the bits of {what}")
    bits = _bits(packed, 2 * len(ids), "bits").reshape(-1, 2)
    sizes = magnitudes[ids // CHUNK, bits[:, 1].astype(np.intp)]
    return np.where(bits[:, 0], -sizes, sizes)


def _from_halves(reader: _Reader, num_values: int, what: str) -> npt.NDArray[np.float32]:
    """Return `num_values` values that were sent in two halves."""
    num_whole, key_bytes = _HALVES_HEAD.unpack(reader.take(_HALVES_HEAD.size, f"the halves of {what}"))
    keys = reader.array(key_bytes, "u1", f"the places of {what}")
    upper = reader.array(num_values, "<u2", f"the upper halves of {what}")
    lower = reader.array(num_whole, "<u2", f"the lower halves of {what}")
    values = upper.astype("<u4") << 16
    values[decode_keys(keys, count=num_whole, limit=num_values).view(np.int64)] |= lower
    return values.view("<f4")


def _sections(
    pieces: Mapping[str, Vector | RoundedVector | Rows], shapes: Shapes, *, since: int
) -> list[_Section]:  # fmt: skip
    sections = []
    for name, piece in pieces.items():
        shape = _table_shape(shapes[name])
        if isinstance(piece, RoundedVector):
            short, exponent = (_HALVES, 0) if piece.exponent is None else (_FLOAT16, piece.exponent)
            sections.append(_Section("d", name, shape, exponent, values=piece.values.reshape(-1, 1), short=short))
        elif not isinstance(piece, Rows):
            sections.append(_Section("d", name, shape, since, values=piece.reshape(-1, 1)))
        else:
            sections.append(_Section("r", name, shape, since, *piece))
    return sections


def _shorter(section: _Section) -> _Section:
    """Return the shorter form of an addition to a table: whole rows, or only their nonzero values."""
    form, name, shape, since, ids, values, *_ = section
    if form != "r" or shape.width == 1 or values.shape != (len(ids), shape.width):
        return section
    is_there = values != 0
    if not is_patch_shorter(is_there):
        return section
    sent = values.reshape(-1)[np.flatnonzero(is_there)]  # five times as fast as a mask of two dimensions
    return _Section("m", name, shape, since, ids, sent.reshape(-1, 1), is_there)


def is_patch_shorter(is_there: npt.NDArray[np.bool_]) -> bool:
    """Return whether the present values of rows, shape (n, width), take fewer bytes than the rows."""
    return 4 * int(np.count_nonzero(is_there)) + _bytes_of(is_there.size) < 4 * is_there.size


def _patch(section: _Section) -> Patch:
    assert section.is_there is not None, "a section of some values of rows has bits"
    if not np.isfinite(section.values).all():
        raise NotFiniteError(f"section {section.name!r}: expected finite values, got NaN or infinity")
    return Patch(section.ids, section.is_there, section.values[:, 0], section.since)


def _whole_rows(section: _Section) -> Rows:
    """Return the rows of form `m`; missing values are 0."""
    assert section.is_there is not None, "a section of some values of rows has bits"
    rows = np.zeros(section.is_there.shape, np.float32)  # at most as large as the table: keys increase
    rows.reshape(-1)[np.flatnonzero(section.is_there)] = section.values[:, 0]
    return _rows(section._replace(values=rows))


def _pieces(body: memoryview, shapes: Shapes, *, forms: str) -> tuple[dict[str, Vector | Rows], set[int]]:
    """Return the pieces by name, and the set of the `since` values of their sections."""
    pieces: dict[str, Vector | Rows] = {}
    sinces = set()
    for section in _decode(body, shapes, forms=forms):
        if section.name in pieces:
            raise BlobError(f"section {section.name!r}: expected it once, got it in two forms")
        if section.form == "m":
            pieces[section.name] = _whole_rows(section)
        elif section.form == "r":
            pieces[section.name] = _rows(section)
        else:
            pieces[section.name] = section.values.reshape(-1)
        sinces.add(section.since)
    return pieces, sinces


def _coded(name: str, ids: Ids, num_rows: int) -> tuple[int, Bytes]:
    """Return the coding of keys, and their bytes."""
    if len(ids) and not (ids[0] >= 0 and ids[-1] < num_rows):
        raise ValueError(f"{name!r}: expected ids of 0 to {num_rows - 1}, got {ids[0]} to {ids[-1]}")
    keys = ids.astype(np.uint64)
    if _bytes_of(num_rows) < len(ids) and num_rows <= _MAX_BITS:
        return _BITMAP, encode_bitmap(keys, num_rows)
    return _DIFFERENCES, encode_keys(keys)


def _decode(body: memoryview, shapes: Shapes, *, forms: str) -> Iterator[_Section]:
    reader = _Reader(body)
    num_sections, zero = _COUNT.unpack(reader.take(_COUNT.size, "the number of sections"))
    if zero:
        raise BlobError(f"expected zero behind the number of sections, got {zero}")
    seen: set[tuple[str, str, int]] = set()
    for _ in range(num_sections):  # each takes bytes of the body, so a wrong number ends the loop
        section = _decode_section(reader, shapes, forms)
        key = (section.form, section.name, section.since if section.form == "c" else 0)
        if key in seen:
            raise BlobError(f"section {section.name!r}: expected it once, got it again")
        seen.add(key)
        yield section
    if reader.num_left:
        raise BlobError(f"expected {num_sections} sections and nothing more, got {reader.num_left} further bytes")


def _decode_section(reader: _Reader, shapes: Shapes, forms: str) -> _Section:
    head = _HEAD.unpack(reader.take(_HEAD.size, "the head of a section"))
    form, coding, title_bytes, width, size, count, key_bytes, since = head
    try:
        name, letter = bytes(reader.padded(title_bytes, "a section's name")).decode(), form.decode()
    except UnicodeDecodeError as exc:
        raise BlobError(f"expected a form and a name in UTF-8, got {form!r} and bytes that are not") from exc
    if letter not in forms or not (
        coding <= {"r": 3, "m": 3, "k": 1, "c": 1}.get(letter, 0)
        or (letter == "d" and coding in (_HALVES, _FLOAT16))
        or (letter == "r" and coding & ~_BITMAP == _MAGNITUDES and width == 1)
    ):
        raise BlobError(
            f"section {name!r}: expected a form of {'/'.join(forms)} and a coding of its keys, got {letter!r}, {coding}"
        )
    if name not in shapes:
        raise BlobError(f"section {name!r}: expected one of {sorted(shapes)}: no such vector or table")
    expected = shapes[name]
    shape = _table_shape(expected)
    if shape.num_rows != size or shape.width != width:
        raise BlobError(f"section {name!r}: expected {shape.num_rows} rows of {shape.width}, got {size} of {width}")
    if letter == "d" and not (isinstance(expected, int) and count == size and not key_bytes):
        raise BlobError(f"section {name!r}: expected rows of a table, or all values of a vector, got {count} values")
    # Before anything is allocated, check that the body is as long as its lengths say.
    keys = reader.array(key_bytes, "u1", f"the keys of {name!r}")
    is_there, num_values = None, count * width if letter in "dr" else 0
    if letter == "m":
        packed = reader.array(_bytes_of(count * width), "u1", f"the bits of {name!r}")
        is_there = _bits(packed, count * width, "values").reshape(count, width)
        num_values = int(np.count_nonzero(is_there))
    ids = _NO_IDS
    try:
        if letter != "d":
            decode = decode_bitmap if coding & _BITMAP else decode_keys
            ids = decode(keys, count=count, limit=min(shape.num_rows, 1 << 63)).view(np.int64)
        if coding & _MAGNITUDES:
            values = _from_two_bits(reader, ids, shape.num_rows, f"{name!r}")
        elif coding & _HALVES:
            values = _from_halves(reader, num_values, f"{name!r}")
        elif coding == _FLOAT16:
            if not -_MAX_EXPONENT <= since <= _MAX_EXPONENT:
                raise BlobError(f"expected an exponent of at most {_MAX_EXPONENT}, got {since}")
            short = reader.array(num_values, "<f2", f"the values of {name!r}")
            values = np.ldexp(short.astype("<f4"), since)
        else:
            values = reader.array(num_values, "<f4", f"the values of {name!r}")
    except BlobError as exc:
        raise BlobError(f"section {name!r}: {exc}") from exc
    per_key = width if letter in "dr" else 1
    return _Section(letter, name, shape, since, ids, values.reshape(-1, per_key), is_there)


def _rows(section: _Section) -> Rows:
    is_finite = np.isfinite(section.values)
    if not is_finite.all():
        bad = np.flatnonzero(~is_finite.all(axis=1))
        raise NotFiniteError(
            f"section {section.name!r}: expected finite values, got NaN or infinity in {len(bad)} rows, the first of "
            f"them {section.ids[bad[0]]}"
        )
    return Rows(section.ids, section.values)


def _table_shape(shape: int | TableShape) -> TableShape:
    return TableShape(shape, 1) if isinstance(shape, int) else shape


class _Reader:
    """A reader that takes pieces from the front of a body. It raises BlobError if the body is too short."""

    def __init__(self, body: memoryview) -> None:
        self._body = body
        self._at = 0

    @property
    def num_left(self) -> int:
        return len(self._body) - self._at

    def take(self, num_bytes: int, what: str) -> memoryview:
        if num_bytes > self.num_left:
            raise BlobError(f"expected {num_bytes} bytes for {what}, got {self.num_left}")
        self._at += num_bytes
        return self._body[self._at - num_bytes : self._at]

    def padded(self, num_bytes: int, what: str) -> memoryview:
        """Return the next bytes, as `take` does, and skip the zeros after them up to the alignment."""
        piece = self.take(num_bytes, what)
        padding = self.take(-num_bytes % _ALIGNMENT, f"the padding of {what}")
        if any(padding):
            raise BlobError(f"expected zeros behind {what}, got {bytes(padding)!r}")
        return piece

    def array(self, count: int, dtype: str, what: str) -> npt.NDArray[Any]:
        """Return the next `count` numbers, and skip the zeros after them."""
        return np.frombuffer(self.padded(np.dtype(dtype).itemsize * count, what), dtype)
