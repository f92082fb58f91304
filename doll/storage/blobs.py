"""Parameter blobs: a flat float32 vector after a fixed header, so that an incomplete or foreign blob is refused.

The header has 128 bytes, little-endian: magic `DLBB`, u8 schema version = 2, u8 kind (`w` weights, `g` gradient), u8
dtype (1 = float32), u8 reserved = 0, job and run in 96 bytes (see `scope_of`, padded with zeros), i64 model version,
u64 numel, u32 crc32 of the body, u32 crc32 of the header so far. The body, numel float32, follows. The length of the
header is a multiple of 32 bytes, so the body is aligned.

The argument `job` of a function is the scope of the job and its run (`scope_of`): runs of a job may share a Redis.

A blob of dtype 0 holds numel bytes in another format, which depends on its kind: see `doll.storage.sections`.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from isal.isal_zlib import crc32  # zlib's crc32, ten times as fast (ADR 0010): each blob is checked twice

from doll.errors import BlobError

Buffer: TypeAlias = bytes | bytearray | memoryview
Kind: TypeAlias = Literal["w", "g"]
BytesKind: TypeAlias = Literal["d", "p", "q", "r"]

MAGIC: Final = b"DLBB"
SCHEMA_VERSION: Final = 2
FLOAT32: Final = 1
BYTES: Final = 0
MAX_BLOB_BYTES: Final = 8_000_001_000  # of 2 billion float32 values; nobody has tried more
_HEADER: Final = struct.Struct("<4sBcBB96sqQII")
HEADER_BYTES: Final = _HEADER.size
_JOB_BYTES: Final = 96
_KINDS: Final = {"w": "weights", "g": "gradient", "d": "delta", "p": "push", "q": "row request", "r": "rows"}


class Blobs(Protocol):
    """A store for weights and gradients between two processes: a cache with a time to live, never the only copy.

    Calls block while the service is unreachable, and raise `ServiceUnavailableError` if they stop waiting. Each call
    may be repeated.
    """

    def put(self, key: str, parts: Sequence[Buffer], ttl_s: float) -> None:
        """Store `parts`, joined, under `key` for `ttl_s` seconds, replacing an earlier blob. Raise BlobError if they
        are larger than `MAX_BLOB_BYTES`."""

    def put_soon(self, key: str, parts: Sequence[Buffer], ttl_s: float) -> bool:
        """Store as `put` does, and return whether the store already has the blob. If the store is far, the call may
        return False before the store has the blob. Then do not change `parts` before `settle`, and tell readers to call
        `get_soon`."""
        ...

    def settle(self) -> None:
        """Return after the store has the blob that was given to `put_soon`. Raise what `put` would have raised."""

    def reserve(self, size_bytes: int) -> memoryview | None:
        """Return memory that `put` stores without a copy if it is the only part; None if there is no such memory. The
        memory stays readable while a view of it exists. Do not write to it after `put`.
        """

    def get(self, key: str) -> Buffer | None:
        """Return the blob under `key`; None if there is none, or none any more."""

    def get_soon(self, key: str) -> Buffer | None:
        """Return the blob under `key` that another process has announced (`put_soon`), after a limited wait."""

    @property
    def is_far(self) -> bool:
        """Whether a call takes so long that its caller should do something else in the meantime."""
        ...

    def prefetch(self, keys: Sequence[str]) -> None:
        """Announce that `get` of these keys follows. A far store reads them in one round trip."""

    def delete(self, *keys: str) -> None:
        """Delete `keys`. A missing key is not an error."""


class NearBlobs(ABC):
    """The common methods of `Blobs` in stores that answer immediately. Subclasses define `put` and `get`."""

    is_far: Final = False

    @abstractmethod
    def put(self, key: str, parts: Sequence[Buffer], ttl_s: float) -> None: ...

    @abstractmethod
    def get(self, key: str) -> Buffer | None: ...

    def put_soon(self, key: str, parts: Sequence[Buffer], ttl_s: float) -> bool:
        self.put(key, parts, ttl_s)
        return True

    def settle(self) -> None:  # noqa: B027 - nothing is under way, of any near store
        """Do nothing, because no blob is being stored."""

    def get_soon(self, key: str) -> Buffer | None:
        return self.get(key)


def scope_of(job: str, run_id: str) -> str:
    """Return the name of job and run for keys, headers and control streams, so that a run does not use data of other
    runs. The `run_id` is that of `doll.ps.start.Start`; "" if it is unknown."""
    return f"{job}:{run_id}" if run_id else job


def key_prefix(scope: str) -> str:
    """Return the prefix of the keys of a scope. The braces put all keys of a job into one Cluster hash slot.

    >>> key_prefix("digits:ab12")
    'doll:{digits}:ab12'
    """
    job, colon, run_id = scope.partition(":")
    return f"doll:{{{job}}}{colon}{run_id}"


def weights_key(job: str, term: int, version: int) -> str:
    """Return the key of the weights of `version`. It contains the term: a fenced server cannot overwrite its
    successor's weights."""
    return f"{key_prefix(job)}:w:{term}:{version}"


def delta_key(job: str, term: int, version: int) -> str:
    """Return the key of the changes of the weights in `version` (see `doll.storage.deltas`)."""
    return f"{key_prefix(job)}:d:{term}:{version}"


def gradient_key(job: str, term: int, grant_id: int) -> str:
    """Return the key of the gradient that answers a grant."""
    return f"{key_prefix(job)}:g:{term}:{grant_id}"


def row_request_key(job: str, term: int, worker: int, session: int, number: int) -> str:
    """Return the key of a worker's request `number` for rows of tables."""
    return f"{key_prefix(job)}:q:{term}:{worker}:{session}:{number}"


def rows_key(job: str, term: int, worker: int, session: int, number: int) -> str:
    """Return the key of the answer to a worker's request `number`."""
    return f"{key_prefix(job)}:r:{term}:{worker}:{session}:{number}"


def changed_rows_key(job: str, term: int, worker: int, version: int) -> str:
    """Return the key of the changed rows that a worker gets together with a version, without a request."""
    return f"{key_prefix(job)}:c:{term}:{worker}:{version}"


def row_changes_key(job: str, term: int, version: int) -> str:
    """Return the key of the rows of all tables that have changed in `version` (see `doll.storage.row_changes`)."""
    return f"{key_prefix(job)}:t:{term}:{version}"


def followed_key(job: str) -> str:
    """Return the key of a value that a model server stores repeatedly. While it does, changes of rows are published."""
    return f"{key_prefix(job)}:t:followed"


def latest_key(job: str) -> str:
    """Return the key of the pointer to the newest weights (see `Latest`)."""
    return f"{key_prefix(job)}:w:latest"


class Latest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The pointer to the newest published weights. It is written after the blob that it names."""

    term: int
    version: int
    key: str


def encode_latest(latest: Latest) -> list[Buffer]:
    """Return `latest` as MessagePack, as parts for `Blobs.put`."""
    return [msgspec.msgpack.encode(latest)]


def decode_latest(data: Buffer) -> Latest:
    """Return the pointer in `data`. Raise BlobError if it is not a pointer of this schema."""
    try:
        return msgspec.msgpack.decode(data, type=Latest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise BlobError(
            f"expected a pointer to the newest weights (term, version, key), got {len(data)} other bytes"
        ) from exc


def encode_blob(array: npt.NDArray[np.float32], *, job: str, kind: Kind, version: int) -> list[Buffer]:
    """Return header and body of a blob of `array`, contiguous float32 of shape (numel,). `version` is the version of
    the weights, or the version at which a gradient was computed. The body is a view, not a copy: do not change `array`
    before the blob is stored. Raise ValueError if `array` has another dtype or shape."""
    if array.dtype != np.dtype("<f4") or array.ndim != 1 or not array.flags.c_contiguous:
        raise ValueError(f"expected contiguous float32 of shape (numel,), got {array.dtype} of shape {array.shape}")
    body = array.view(np.uint8).data
    return [_header(job, kind, FLOAT32, version, array.size, crc32(body)), body]


def finish_blob(memory: memoryview, *, job: str, kind: Kind, version: int) -> None:
    """Write the header of a blob whose float32 body is already in `memory`, from `HEADER_BYTES` on."""
    body = memory[HEADER_BYTES:]
    memory[:HEADER_BYTES] = _header(job, kind, FLOAT32, version, len(body) // 4, crc32(body))


def decode_blob(data: Buffer, *, job: str, kind: Kind, version: int, numel: int) -> npt.NDArray[np.float32]:
    """Return the vector in `data`: float32, shape (numel,), a view that is read-only if `data` is. Raise BlobError if
    the blob is incomplete, damaged, or of another job, kind, version or size; the message states which."""
    body, _ = _open(data, job=job, kind=kind, dtype=FLOAT32, version=version, numel=numel)
    return np.frombuffer(body, dtype="<f4")


def encode_bytes(parts: Sequence[Buffer], *, job: str, kind: BytesKind, version: int) -> list[Buffer]:
    """Return header and body of a blob in another format than float32: `parts` are bytes, which are not copied."""
    checksum = 0
    for part in parts:
        checksum = crc32(part, checksum)
    return [_header(job, kind, BYTES, version, sum(map(len, parts)), checksum), *parts]


def decode_bytes(data: Buffer, *, job: str, kind: BytesKind, version: int | None) -> tuple[memoryview, int]:
    """Return the body of a blob that `encode_bytes` has encoded, as a view of `data`, and its version. Raise the same
    errors as `decode_blob`.

    Args:
        version: expected version. None: any version.
    """
    return _open(data, job=job, kind=kind, dtype=BYTES, version=version, numel=None)


class BlobInfo(NamedTuple):
    """The content of a blob's header."""

    job: str
    kind: str
    version: int
    numel: int


def blob_info(data: Buffer) -> BlobInfo:
    """Return the header of `data`, for readers that do not know the version in advance. Only the format of the header
    is checked. Raise BlobError if `data` is not a blob of this schema."""
    if len(data) < HEADER_BYTES:
        raise BlobError(f"expected a blob header of {HEADER_BYTES} bytes, got {len(data)} bytes")
    magic, schema, kind, _, _, job, version, numel, _, _ = _HEADER.unpack_from(data)
    if magic != MAGIC or schema != SCHEMA_VERSION:
        raise BlobError(f"expected a blob (magic {MAGIC!r}, schema {SCHEMA_VERSION}), got {magic!r}, {schema}")
    return BlobInfo(job.rstrip(b"\0").decode("utf-8", "replace"), kind.decode("latin-1"), version, numel)


def _open(
    data: Buffer, *, job: str, kind: Kind | BytesKind, dtype: int, version: int | None, numel: int | None
) -> tuple[memoryview, int]:
    """Return the body of the blob in `data` and its version, after a check of expected values (None: any) and
    checksums."""
    what = f"{_KINDS[kind]} blob of job {job!r}" + ("" if version is None else f", version {version}")
    if len(data) < HEADER_BYTES:
        raise BlobError(f"{what}: expected a header of {HEADER_BYTES} bytes, got {len(data)} bytes")
    magic, schema, kind_, dtype_, _, job_, version_, numel_, body_crc, header_crc = _HEADER.unpack_from(data)
    if magic != MAGIC or schema != SCHEMA_VERSION:
        raise BlobError(f"{what}: expected magic {MAGIC!r}, schema {SCHEMA_VERSION}; got {magic!r}, {schema}")
    view = memoryview(data)
    if crc32(view[: HEADER_BYTES - 4]) != header_crc:
        raise BlobError(f"{what}: the header's checksum does not match: changed on the way")
    actual = (job_.rstrip(b"\0").decode("utf-8", "replace"), kind_.decode("latin-1"), dtype_, version_, numel_)
    names = ("job", "kind", "dtype", "version", "numel")
    for name, expected, got in zip(names, (job, kind, dtype, version, numel), actual, strict=True):
        if expected is not None and expected != got:
            raise BlobError(f"{what}: expected {name} {expected!r}, got {got!r}")
    body = view[HEADER_BYTES:]
    num_bytes, form = (4 * numel_, "float32") if dtype == FLOAT32 else (numel_, "sections")
    if len(body) != num_bytes:
        raise BlobError(f"{what}: expected {num_bytes} bytes of {form}, got {len(body)}")
    if crc32(body) != body_crc:
        raise BlobError(f"{what}: the body's checksum does not match: changed on the way")
    return body, version_


def _header(job: str, kind: Kind | BytesKind, dtype: int, version: int, numel: int, body_crc: int) -> bytes:
    name = job.encode()
    if len(name) > _JOB_BYTES:
        raise ValueError(f"expected a job and run of at most {_JOB_BYTES} bytes, got {job!r}")
    head = _HEADER.pack(MAGIC, SCHEMA_VERSION, kind.encode(), dtype, 0, name, version, numel, body_crc, 0)[:-4]
    return head + struct.pack("<I", crc32(head))
