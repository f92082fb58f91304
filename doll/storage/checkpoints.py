"""Checkpoints: the durable model, from which every restart begins; their format, and the port of their stores.

A checkpoint is one file: magic `DLCK`, u8 schema version = 2, three zero bytes, u64 length of the head, the head in
MessagePack (see `_Header`), the engine's state, the tensors as safetensors, and the sha256 of all that. A later
parameter server has a higher `term`, and what it writes is newer even where its version is lower: it may have had to
go back.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy

from doll.errors import CheckpointError
from doll.records.bounded import short
from doll.storage.blobs import Buffer

MAGIC: Final = b"DLCK"
SCHEMA_VERSION: Final = 2
_PREFIX: Final = struct.Struct("<4sB3xQ")
_DIGEST_BYTES: Final = 32
_DTYPES: Final = (
    {  # as safetensors names them
        np.dtype(name): f"{kind}{8 * int(name[2:])}"
        for kind, names in (("F", "<f8 <f4 <f2"), ("I", "<i8 <i4 <i2 <i1"), ("U", "<u8 <u4 <u2 <u1"))
        for name in names.split()
    }
    | {np.dtype("?"): "BOOL"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One durable model.

    Attributes:
        fingerprint: see `doll.config.fingerprint`, which also says which changes a job may make and go on from here.
        term: of the parameter server that wrote it.
        version: model version, J.
        state: the engine's snapshot (MessagePack), opaque to stores.
        tensors: weights and optimizer state by name, any dtype that safetensors holds.
    """

    job: str
    fingerprint: str
    term: int
    version: int
    state: bytes
    tensors: Mapping[str, npt.NDArray[Any]]


class CheckpointStore(Protocol):
    """Where one job's checkpoints are. All calls raise `CheckpointError` where the store cannot be read or written.

    Attributes:
        location: a folder or URL, for messages.
    """

    location: str

    def claim_term(self, above: int = 0) -> int:
        """A term above all that the store has seen, durably the caller's own: two callers never get the same.

        Not to be repeated lightly: each call fences every earlier one.

        Args:
            above: the highest term that was seen elsewhere, as in the job's topics; the new one is above it too.
        """

    def newest_term(self) -> int:
        """The highest term claimed or saved, 0 without one; a server with a lower term is fenced. Repeatable."""

    def save(self, checkpoint: Checkpoint) -> None:
        """Store `checkpoint`, whole or not at all; durable on return. May be repeated.

        Raises:
            FencedError: a higher term has been claimed. Nothing is stored.
            CheckpointError: another job's, or a version below one that this term has saved.
        """

    def load_newest(self, fingerprint: str | None) -> Checkpoint | None:
        """The newest checkpoint that is whole; None without any checkpoint. May be repeated.

        A damaged one is passed over with a warning.

        Args:
            fingerprint: what the checkpoint must have, except what a resume may change; None accepts any, for tools
                that only look.

        Raises:
            CheckpointError: it belongs to another job or fingerprint, or there are checkpoints but none is whole.
        """

    def versions(self) -> list[tuple[int, int]]:
        """(term, version) of each checkpoint held, oldest first, whole or not. May be repeated."""


class DamagedError(CheckpointError):
    """The bytes are torn or changed: an earlier checkpoint may serve."""


_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Header(msgspec.Struct, frozen=True, kw_only=True):
    job: str
    fingerprint: str
    term: _Count
    version: _Count
    state_bytes: _Count
    tensors_bytes: _Count


def encode_checkpoint(checkpoint: Checkpoint) -> list[Buffer]:
    """The bytes of a checkpoint, in parts to be written one after the other; the tensors are not copied.

    Raises:
        ValueError: a tensor of a dtype that safetensors does not hold.
    """
    tensors = _encode_tensors(checkpoint.tensors)
    head = msgspec.msgpack.encode(
        _Header(
            job=checkpoint.job,
            fingerprint=checkpoint.fingerprint,
            term=checkpoint.term,
            version=checkpoint.version,
            state_bytes=len(checkpoint.state),
            tensors_bytes=sum(map(len, tensors)),
        )
    )
    parts = [_PREFIX.pack(MAGIC, SCHEMA_VERSION, len(head)), head, checkpoint.state, *tensors]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return [*parts, digest.digest()]


def _encode_tensors(tensors: Mapping[str, npt.NDArray[Any]]) -> list[Buffer]:
    """What `safetensors.numpy.save` makes of `tensors`, in parts: that function copies them twice."""
    header: dict[str, dict[str, Any]] = {}
    bodies: list[Buffer] = []
    at = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])):
        if tensor.dtype not in _DTYPES:
            raise ValueError(f"{name}: expected a dtype that safetensors holds, got {tensor.dtype}")
        # An array that is not C-contiguous has its numbers in another order.
        body = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data
        bodies.append(body)
        offsets = [at, at := at + len(body)]
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
    head = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    head += b" " * (-len(head) % 8)
    return [struct.pack("<Q", len(head)), head, *bodies]


def decode_checkpoint(data: bytes) -> Checkpoint:
    """The checkpoint in `data`.

    Raises:
        DamagedError: torn or changed.
        CheckpointError: whole, but of a schema that this build does not read.
    """
    if len(data) < _PREFIX.size + _DIGEST_BYTES:
        raise DamagedError(f"expected a checkpoint, got {len(data)} bytes")
    view = memoryview(data)
    if hashlib.sha256(view[:-_DIGEST_BYTES]).digest() != view[-_DIGEST_BYTES:]:
        raise DamagedError("the checksum does not match: torn or changed")
    magic, schema, head_bytes = _PREFIX.unpack_from(data)
    if magic != MAGIC or schema != SCHEMA_VERSION:
        raise CheckpointError(
            f"expected a checkpoint of schema {SCHEMA_VERSION}, got {magic!r}, schema {schema}: use the release that "
            "wrote it"
        )
    try:
        head = msgspec.msgpack.decode(view[_PREFIX.size : _PREFIX.size + head_bytes], type=_Header)
        start = _PREFIX.size + head_bytes
        middle = start + head.state_bytes
        if middle + head.tensors_bytes != len(data) - _DIGEST_BYTES:
            raise ValueError(f"{head.state_bytes} bytes of state and {head.tensors_bytes} of tensors are not all of it")
        tensors = safetensors.numpy.load(data[middle : middle + head.tensors_bytes])
    except (
        *(msgspec.MsgspecError, safetensors.SafetensorError),
        *(KeyError, ValueError),  # a dtype or a shape that safetensors knows and numpy does not
        *(RecursionError, MemoryError, OverflowError),  # a head nested too deeply, or with impossible lengths
    ) as exc:
        raise DamagedError(f"the contents do not fit the schema: {type(exc).__name__}: {short(exc)}") from exc
    return Checkpoint(
        job=head.job,
        fingerprint=head.fingerprint,
        term=head.term,
        version=head.version,
        state=data[start:middle],
        tensors=tensors,
    )
