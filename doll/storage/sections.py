"""Blobs with several sections: what a worker pushes, and the rows of tables that it asks for. Pure.

A *push* (kind `p`) holds any vectors, dense or as some of their values, and rows of any tables; a *delta* (`d`) holds
what is other in a version than in an older one, in the same form. A *row request* (`q`) holds ids, its answer (`r`)
rows. The header and its checksums are as in every blob (`doll.storage.blobs`).

The body, little-endian: u32 number of sections, u32 0; then each section:

    form (1 byte), 0 (1 byte), u16 bytes of the name, u32 width, u64 size, u64 count, u64 bytes of the keys, i64 since
    name (UTF-8), keys, the values (float32)

each of the three padded with zeros to 8 bytes, so that values are aligned. `size` is the number of rows of the table,
or of values of the vector. No section has the same form and name as another one.

Keys increase strictly. Each is coded as its difference to the one before it, in 7 bits a byte (LEB128), the first to 0:
the lowest bits first; a byte's top bit says that another one follows. There is one coding of each sequence of keys: a
longer one of the same numbers is refused.

What encodes raises ValueError as `encode_push` does, what decodes raises BlobError and NotFiniteError as `decode_push`.

| form | keys | values | means |
|---|---|---|---|
| `d` | - | size of 1 | a vector, dense |
| `r` | count | count of width | rows of a table; of width 1: some values of a vector |
| `v` | count | count of 1 | some values of a table, of which value j of row i has the key i width + j |
| `k` | count | - | send these rows |
| `c` | count | - | send the rows of these that have changed since version `since` |
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from doll.errors import BlobError, NotFiniteError
from doll.storage.blobs import Buffer, BytesKind, decode_bytes, encode_bytes
from doll.tables.rows import Ids, Rows, TableShape

Keys = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]

_MORE: Final = 0x80
_BITS: Final = 0x7F
_MAX_BYTES: Final = 10  # of one difference: 64 bits, 7 a byte
Vector: TypeAlias = npt.NDArray[np.float32]
# A vector's number of values, or a table's shape, by name.
Shapes: TypeAlias = Mapping[str, int | TableShape]

_COUNT: Final = struct.Struct("<II")
_HEAD: Final = struct.Struct("<cBHIQQQq")
_ALIGNMENT: Final = 8
_SPARSE_BYTES: Final = 5.2  # of a value with its key, about


def encode_keys(keys: Keys) -> Bytes:
    """The bytes of `keys`, shape (n,), strictly increasing: 1 to 10 for each.

    Raises:
        ValueError: the keys do not increase strictly.
    """
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
    """The `count` keys in `data`, strictly increasing and below `limit`.

    No more memory than a small multiple of `data` is allocated, whatever `count` says.

    Raises:
        BlobError: not the coding of such keys; the message says why.
    """
    if not len(data) and not count:
        return np.empty(0, np.uint64)
    is_last = data < _MORE
    if (coded := int(np.count_nonzero(is_last))) != count or not is_last[-1]:
        raise BlobError(f"expected {count} keys, got {coded} in {len(data)} bytes{_cut_off(is_last)}")
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


def _cut_off(is_last: npt.NDArray[np.bool_]) -> str:
    return "" if not len(is_last) or is_last[-1] else ", the last one cut off"


class WireSize(NamedTuple):
    """Bytes of what a blob holds."""

    plain_bytes: int  # with 8 bytes for each key
    coded_bytes: int  # of the blob, header included


class Encoded(NamedTuple):
    """A blob in parts, as `Blobs.put` takes them: views of the arrays that were given, which must not change before."""

    parts: list[Buffer]
    size: WireSize


class RowRequest(NamedTuple):
    """Rows of one table that a worker needs."""

    ids: Ids  # int64, strictly increasing: of rows to be sent
    # int64, strictly increasing: of rows that the worker has as they were at version `since` or later; only rows that
    # have changed after it are sent.
    known: Ids
    since: int = 0  # a version; without meaning where `known` is empty


class _Section(NamedTuple):
    form: str
    name: str
    shape: TableShape
    since: int
    ids: Ids | None
    values: npt.NDArray[np.float32] | None  # shape (count, width)


def encode_push(pieces: Mapping[str, Vector | Rows], shapes: Shapes, *, job: str, version: int) -> Encoded:
    """The blob of a push.

    Args:
        pieces: by name: float32 of shape (numel,), or some rows; of a vector, rows of width 1.
        version: of the weights that it was computed on.

    Raises:
        ValueError: ids that do not increase strictly, or values of another shape than `shapes` says.
    """
    sections = _sections(pieces, shapes, since=0)
    return _encode([_shorter(section) for section in sections], job=job, kind="p", version=version)


def encode_delta(pieces: Mapping[str, Vector | Rows], shapes: Shapes, *, job: str, since: int, version: int) -> Encoded:
    """The blob of what is in `version` other than it was in version `since`; as `encode_push`."""
    return _encode(_sections(pieces, shapes, since=since), job=job, kind="d", version=version)


def decode_push(data: Buffer, shapes: Shapes, *, job: str, version: int) -> dict[str, Vector | Rows]:
    """What `encode_push` was given: views of `data`, read-only where that is. A vector or table may be left out.

    Dense vectors may hold any bytes, as in other blobs: what makes a model of them checks them.

    Raises:
        BlobError: as `decode_blob`; or a section of a name, form, shape or length that does not fit `shapes`; or keys
            that do not increase strictly or are out of range.
        NotFiniteError: a value of some row is NaN or infinite.
    """
    body, _ = decode_bytes(data, job=job, kind="p", version=version)
    return _pieces(body, shapes, forms="drv")[0]


def decode_delta(data: Buffer, shapes: Shapes, *, job: str, version: int) -> tuple[dict[str, Vector | Rows], int]:
    """What `encode_delta` was given, and the version that it is compared with; raises as `decode_push`.

    Raises:
        BlobError: also where it is not compared with one version below its own.
    """
    body, _ = decode_bytes(data, job=job, kind="d", version=version)
    pieces, sinces = _pieces(body, shapes, forms="dr")
    if len(sinces) != 1 or not 0 <= (since := sinces.pop()) < version:
        raise BlobError(f"delta of version {version}: expected one version below it that it is compared with")
    return pieces, since


def encode_row_request(requests: Mapping[str, RowRequest], shapes: Shapes, *, job: str, version: int) -> Encoded:
    """The blob of a request for rows of several tables, as of `version` or later."""
    sections = []
    for name, request in requests.items():
        shape = _table_shape(shapes[name])
        if len(request.ids):
            sections.append(_Section("k", name, shape, 0, request.ids, None))
        if len(request.known):
            sections.append(_Section("c", name, shape, request.since, request.known, None))
    return _encode(sections, job=job, kind="q", version=version)


def decode_row_request(data: Buffer, shapes: Shapes, *, job: str) -> tuple[dict[str, RowRequest], int]:
    """The requests, by the name of the table, and the oldest version that the rows may be of."""
    body, version = decode_bytes(data, job=job, kind="q", version=None)
    none = np.empty(0, np.int64)
    requests: dict[str, RowRequest] = {}
    for section in _decode(body, shapes, forms="kc"):
        ids = none if section.ids is None else section.ids
        before = requests.get(section.name, RowRequest(none, none))
        requests[section.name] = (
            before._replace(ids=ids) if section.form == "k" else before._replace(known=ids, since=section.since)
        )
    return requests, version


def encode_rows(rows: Mapping[str, Rows], shapes: Shapes, *, job: str, version: int) -> Encoded:
    """The blob of rows as they are in `version`."""
    sections = [_Section("r", name, _table_shape(shapes[name]), 0, *piece) for name, piece in rows.items()]
    return _encode(sections, job=job, kind="r", version=version)


def decode_rows(data: Buffer, shapes: Shapes, *, job: str) -> tuple[dict[str, Rows], int]:
    """Rows by the name of their table, views of `data`; and the version that they are of."""
    body, version = decode_bytes(data, job=job, kind="r", version=None)
    return {section.name: _rows(section) for section in _decode(body, shapes, forms="r")}, version


def _encode(sections: Sequence[_Section], *, job: str, kind: BytesKind, version: int) -> Encoded:
    parts: list[Buffer] = [_COUNT.pack(len(sections), 0)]
    plain = 0
    for form, name, shape, since, ids, values in sections:
        keys = np.empty(0, np.uint8) if ids is None else _coded(name, ids, _num_keys(form, shape))
        count = shape.num_rows if ids is None else len(ids)
        width = 1 if form == "v" else shape.width
        if values is not None and (values.shape != (count, width) or values.dtype != np.float32):
            raise ValueError(
                f"{name!r}: expected float32 values of shape {(count, width)}, got {values.dtype} of {values.shape}"
            )
        plain += (0 if ids is None else 8 * count) + (0 if values is None else 4 * values.size)
        title = name.encode()
        parts.append(_HEAD.pack(form.encode(), 0, len(title), shape.width, shape.num_rows, count, len(keys), since))
        body = b"" if values is None else np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
        for part in (title, keys.data, body):
            parts += [part, bytes(-len(part) % _ALIGNMENT)]
    blob = encode_bytes([part for part in parts if len(part)], job=job, kind=kind, version=version)
    return Encoded(blob, WireSize(plain, sum(map(len, blob))))


def _sections(pieces: Mapping[str, Vector | Rows], shapes: Shapes, *, since: int) -> list[_Section]:
    sections = []
    for name, piece in pieces.items():
        shape = _table_shape(shapes[name])
        if not isinstance(piece, Rows):
            sections.append(_Section("d", name, shape, since, None, piece.reshape(-1, 1)))
        else:
            sections.append(_Section("r", name, shape, since, *piece))
    return sections


def _shorter(section: _Section) -> _Section:
    """The shorter form of what is added to a table: its rows, or their values that are not zero."""
    form, name, shape, since, ids, values = section
    if form != "r" or shape.width == 1 or ids is None or values is None or values.shape != (len(ids), shape.width):
        return section
    if _SPARSE_BYTES * np.count_nonzero(values) >= len(ids) * (4 * shape.width + 1):
        return section
    if not values.any(axis=1).all():  # optimizers with a state step such a row as well
        return section
    at, column = np.nonzero(values)
    return _Section("v", name, shape, since, ids[at] * shape.width + column, values[at, column].reshape(-1, 1))


def _whole_rows(section: _Section) -> Rows:
    """The rows of form `v`: values that are not there are 0."""
    assert section.ids is not None, "a section of values has keys"
    assert section.values is not None, "a section of values has values"
    width = section.shape.width
    ids = section.ids // width
    is_first = np.diff(ids, prepend=-1) > 0
    rows = np.zeros((int(np.count_nonzero(is_first)), width), np.float32)
    rows[np.cumsum(is_first) - 1, section.ids % width] = section.values[:, 0]
    return _rows(section._replace(ids=ids[is_first], values=rows))


def _pieces(body: memoryview, shapes: Shapes, *, forms: str) -> tuple[dict[str, Vector | Rows], set[int]]:
    """The pieces by name; what their sections say of `since`."""
    pieces: dict[str, Vector | Rows] = {}
    sinces = set()
    for section in _decode(body, shapes, forms=forms):
        if section.name in pieces:
            raise BlobError(f"section {section.name!r}: expected it once, got it in two forms")
        if section.form == "v":
            pieces[section.name] = _whole_rows(section)
        elif section.ids is not None:
            pieces[section.name] = _rows(section)
        elif section.values is not None:
            pieces[section.name] = section.values.reshape(-1)
        sinces.add(section.since)
    return pieces, sinces


def _coded(name: str, ids: Ids, num_rows: int) -> npt.NDArray[np.uint8]:
    if len(ids) and not (ids[0] >= 0 and ids[-1] < num_rows):
        raise ValueError(f"{name!r}: expected ids of 0 to {num_rows - 1}, got {ids[0]} to {ids[-1]}")
    return encode_keys(ids.astype(np.uint64))


def _decode(body: memoryview, shapes: Shapes, *, forms: str) -> Iterator[_Section]:
    reader = _Reader(body)
    num_sections, zero = _COUNT.unpack(reader.take(_COUNT.size, "the number of sections"))
    if zero:
        raise BlobError(f"expected zero behind the number of sections, got {zero}")
    seen: set[tuple[str, str]] = set()
    for _ in range(num_sections):  # each takes bytes of the body: a number too large ends it
        section = _decode_section(reader, shapes, forms)
        if (section.form, section.name) in seen:
            raise BlobError(f"section {section.name!r}: expected it once, got it again")
        seen.add((section.form, section.name))
        yield section
    if reader.num_left:
        raise BlobError(f"expected {num_sections} sections and nothing more, got {reader.num_left} further bytes")


def _decode_section(reader: _Reader, shapes: Shapes, forms: str) -> _Section:
    head = _HEAD.unpack(reader.take(_HEAD.size, "the head of a section"))
    form, zero, title_bytes, width, size, count, key_bytes, since = head
    try:
        name, letter = bytes(reader.padded(title_bytes, "a section's name")).decode(), form.decode()
    except UnicodeDecodeError as exc:
        raise BlobError(f"expected a form and a name in UTF-8, got {form!r} and bytes that are not") from exc
    if letter not in forms or zero:
        raise BlobError(f"section {name!r}: expected a form of {'/'.join(forms)} and zero, got {letter!r}, {zero}")
    if name not in shapes:
        raise BlobError(f"section {name!r}: expected one of {sorted(shapes)}: no such vector or table")
    expected = shapes[name]
    shape = _table_shape(expected)
    if shape.num_rows != size or shape.width != width:
        raise BlobError(f"section {name!r}: expected {shape.num_rows} rows of {shape.width}, got {size} of {width}")
    if letter == "d" and not (isinstance(expected, int) and count == size and not key_bytes):
        raise BlobError(f"section {name!r}: expected rows of a table, or all values of a vector, got {count} values")
    # Before anything is allocated: both lengths must be there.
    keys = np.frombuffer(reader.padded(key_bytes, f"the keys of {name!r}"), np.uint8)
    per_key = {"d": width, "r": width, "v": 1}.get(letter, 0)
    num_bytes = 4 * count * per_key
    values = np.frombuffer(reader.padded(num_bytes, f"the values of {name!r}"), "<f4")
    ids = None
    if letter != "d":
        try:
            limit = min(_num_keys(letter, shape), 1 << 63)
            ids = decode_keys(keys, count=count, limit=limit).view(np.int64)
        except BlobError as exc:
            raise BlobError(f"section {name!r}: {exc}") from exc
    return _Section(letter, name, shape, since, ids, values.reshape(count, per_key) if per_key else None)


def _num_keys(form: str, shape: TableShape) -> int:
    return shape.num_rows * shape.width if form == "v" else shape.num_rows


def _rows(section: _Section) -> Rows:
    assert section.ids is not None, "a section of rows has ids"
    assert section.values is not None, "a section of rows has values"
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
    """Takes pieces off the front of a body, and refuses what is not there."""

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
        """As `take`, and the zeros behind it up to the alignment."""
        piece = self.take(num_bytes, what)
        padding = self.take(-num_bytes % _ALIGNMENT, f"the padding of {what}")
        if any(padding):
            raise BlobError(f"expected zeros behind {what}, got {bytes(padding)!r}")
        return piece
