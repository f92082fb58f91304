"""Checkpoints: the durable model, from which every restart begins. This module defines their format and the rules for
all stores: names, owners, who may save, and the choice of the newest undamaged checkpoint.

A checkpoint is one file: magic `DLCK`, u8 schema version = 2, three zero bytes, u64 length of the head, the head in
MessagePack (see `CheckpointHead`), the engine's state, the tensors as safetensors, and the sha256 of all of these. A
later parameter server has a higher `term`. Its checkpoints are newer even if their versions are lower, because it may
have started from an earlier version.

If the model has shards, each of them stores its tensors as a part: a file of the same format. The checkpoint is stored
after its parts. It has no tensors, and names the checksums of its parts (docs/decisions/0141).

A checkpoint with schema version 3 is differential: of tensors with rows it has only the rows that have changed since a
whole checkpoint, its base. The stores combine both, so that readers always get all rows (docs/decisions/0138). Parts
of shards can be differential, too: all with the same base, of which each refers to its own part.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import mmap
import re
import struct
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Final, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy

from doll.config.fingerprint import differences, parse, resume_refusal
from doll.errors import CheckpointError, FencedError, VersionUnknownError
from doll.model.layout import NO_LAYOUT, WeightsLayout
from doll.records.bounded import short
from doll.storage.blobs import Buffer
from doll.storage.differences import Base, BaseReference, Patch, RowChanges, difference, difference_bytes, patched
from doll.storage.version_marks import (
    LATEST,
    MARKS,
    NO_HISTORY,
    StoredVersion,
    VersionHistory,
    VersionMarks,
    decode_marks,
    encode_marks,
    obsolete,
    unknown_version,
)
from doll.tables.checkpointed import Make, by_row, joined_table
from doll.telemetry import get_logger

log = get_logger(__name__)

MAGIC: Final = b"DLCK"
SCHEMA_VERSION: Final = 2
DIFFERENTIAL: Final = 3  # schema version of a differential checkpoint, which earlier releases refuse
_PREFIX: Final = struct.Struct("<4sB3xQ")
_DIGEST_BYTES: Final = 32
_READ_ATTEMPTS: Final = 5  # a running server may delete checkpoints that a tool has just listed
_MARK_ATTEMPTS: Final = 50
_HEAD_BYTES: Final = 65_536  # most heads are shorter
_HASHED_BYTES: Final = 64 << 20  # of a mapped file that are in memory at once
_NUMBER: Final = re.compile(r"[0-9]{1,18}")
_CHECKPOINT: Final = re.compile(r"checkpoint-(\d{8,})-(\d{10,})\.doll")
_CLAIM: Final = re.compile(r"term-(\d+)\.claim")
_PART: Final = re.compile(r"checkpoint-(\d{8,})-(\d{10,})\.part-\d+-of-\d+\.doll")
_OF_TERM: Final = re.compile(r"term-(\d+)\.")
KEPT_CLAIMS: Final = 8
_DTYPES: Final = (
    {  # as safetensors names them
        np.dtype(name): f"{kind}{8 * int(name[2:])}"
        for kind, names in (("F", "<f8 <f4 <f2"), ("I", "<i8 <i4 <i2 <i1"), ("U", "<u8 <u4 <u2 <u1"))
        for name in names.split()
    }
    | {np.dtype("?"): "BOOL"}
)
_NO_PATCHES: Final[Mapping[str, Patch]] = {}
_NAMED_DTYPES: Final = {name: dtype for dtype, name in _DTYPES.items()}


class CheckpointPart(msgspec.Struct, frozen=True, omit_defaults=True):
    """The part of a checkpoint that one shard has stored, `number` of `count`.

    Attributes:
        checksum: the end of its file.
        base: version of the checkpoint whose part it needs, because it has only the rows that have changed since; None:
            it is whole.
        whole_bytes: size of all rows of all tensors, if it is not whole.
    """

    number: int
    count: int
    size_bytes: int
    checksum: bytes
    base: int | None = None
    whole_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A durable state of the model."""

    job: str
    fingerprint: str  # see `doll.config.fingerprint`, which also lists the changes that a job may make
    term: int  # term of the parameter server that wrote it
    version: int  # model version, J
    state: bytes  # the engine's snapshot (MessagePack), opaque to stores
    tensors: Mapping[str, npt.NDArray[Any]]  # weights and optimizer state by name, any dtype of safetensors
    layout: WeightsLayout = NO_LAYOUT  # layout of the weights; empty in a checkpoint of an earlier release
    code: str = ""  # see `doll.task.base.source_checksum`; "": unknown
    chain: bytes = b""  # hash of the model's last update (`doll.records.chain`); b"": it has none
    parts: tuple[CheckpointPart, ...] = ()  # of a model with shards, in order; then a file has no tensors
    sliced: tuple[str, ...] = ()  # in a part: the tensors of which it has a slice; it has the others whole
    row_slices_of: tuple[str, ...] = ()  # in a part: the tables of which it has some rows (`doll.tables.row_slices`)
    changes: RowChanges | None = None  # which rows have changed; None: unknown, so the checkpoint is stored whole


class BaseDeletedError(CheckpointError):
    """The base of a checkpoint was deleted before the checkpoint was stored."""


class DamagedError(CheckpointError):
    """The bytes of a checkpoint are incomplete or changed. An earlier checkpoint may be usable."""


_Count = Annotated[int, msgspec.Meta(ge=0)]


class CheckpointHead(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The fields of a checkpoint except its tensors; see `Checkpoint`. In the file, `state` comes last."""

    job: str
    fingerprint: str
    term: _Count
    version: _Count
    state_bytes: _Count
    tensors_bytes: _Count
    layout: WeightsLayout = NO_LAYOUT
    code: str = ""
    chain: bytes = b""
    parts: tuple[CheckpointPart, ...] = ()
    sliced: tuple[str, ...] = ()
    row_slices_of: tuple[str, ...] = ()
    state: bytes = b""
    base: BaseReference | None = None  # None: the checkpoint is whole
    patches: dict[str, Patch] = {}  # by name, the tensors of which only changed rows are stored
    whole_bytes: _Count = 0  # size of all rows of all tensors of a differential checkpoint

    @property
    def base_version(self) -> int | None:
        """Version of the base of this checkpoint, or of its parts; None: all is whole."""
        return _base_version(self.base, self.parts)


class _TensorHead(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[_Count, ...]
    data_offsets: tuple[_Count, _Count]


class EncodedCheckpoint(NamedTuple):
    """The bytes of a checkpoint, in parts to be written in order. `base`: the base of a differential one."""

    parts: list[Buffer]
    base: BaseReference | None = None

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.parts))


def _base_version(base: BaseReference | None, parts: Iterable[CheckpointPart]) -> int | None:
    return next((part.base for part in parts if part.base is not None), None) if base is None else base.version


def encode_checkpoint(
    checkpoint: Checkpoint, base: BaseReference | None = None, patches: Mapping[str, Patch] = _NO_PATCHES,
    whole_bytes: int = 0,
) -> list[Buffer]:  # fmt: skip
    """Return the bytes of a checkpoint, in parts to be written in order; the tensors are not copied. Raise ValueError
    if safetensors does not support the dtype of a tensor.

    `base`, `patches`, `whole_bytes`: those of a differential checkpoint, whose tensors are those of
    `differences.difference`.
    """
    tensors = _encode_tensors(checkpoint.tensors)
    head = msgspec.msgpack.encode(
        CheckpointHead(
            job=checkpoint.job,
            fingerprint=checkpoint.fingerprint,
            term=checkpoint.term,
            version=checkpoint.version,
            state_bytes=len(checkpoint.state),
            tensors_bytes=sum(map(len, tensors)),
            layout=checkpoint.layout,
            code=checkpoint.code,
            chain=checkpoint.chain,
            parts=checkpoint.parts,
            sliced=checkpoint.sliced,
            row_slices_of=checkpoint.row_slices_of,
            base=base,
            patches=dict(patches),
            whole_bytes=whole_bytes,
        )
    )
    schema = SCHEMA_VERSION if _base_version(base, checkpoint.parts) is None else DIFFERENTIAL
    parts = [_PREFIX.pack(MAGIC, schema, len(head)), head, checkpoint.state, *tensors]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return [*parts, digest.digest()]


def _encode_tensors(tensors: Mapping[str, npt.NDArray[Any]]) -> list[Buffer]:
    """Return in parts the bytes that `safetensors.numpy.save` would return. That function makes two copies."""
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


def checksum_of(tensors: Mapping[str, npt.NDArray[Any]]) -> str:
    """Return the SHA-256 of all tensors, with their names, types and shapes: equal if all bits are. The order of the
    slots of tables does not count: it depends on the number of shards."""
    digest = hashlib.sha256()
    for name, tensor in sorted(by_row(tensors).items()):
        digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
        digest.update(np.ascontiguousarray(tensor).data)
    return digest.hexdigest()


def decode_checkpoint(data: bytes | mmap.mmap, *, in_place: bool = False) -> Checkpoint:
    """Return the checkpoint in `data`. Raise DamagedError if it is incomplete or changed, and CheckpointError if this
    release does not read its schema, or if it is differential: only a store can read it, with its base.

    Args:
        in_place: False: the tensors are copies. True: they are read-only views of `data`, which may be unaligned.
    """
    checkpoint, head = _decode(data, in_place=in_place)
    if head.base is not None:
        raise CheckpointError(
            f"expected a whole checkpoint, got the difference to version {head.base.version}: read it with the store "
            "in which it is, which combines both"
        )
    return checkpoint


def _decode(data: bytes | mmap.mmap, *, in_place: bool, writable: bool = False) -> tuple[Checkpoint, CheckpointHead]:
    """Return the checkpoint in `data`, and its head. `writable`: the views of `data` are writable if it is."""
    if len(data) < _PREFIX.size + _DIGEST_BYTES:
        raise DamagedError(f"expected a checkpoint, got {len(data)} bytes")
    view = memoryview(data)
    if _sha256(data, len(data) - _DIGEST_BYTES) != view[-_DIGEST_BYTES:]:
        raise DamagedError("the checksum does not match: torn or changed")
    head_bytes = _length_of_head(data)
    try:
        head = msgspec.msgpack.decode(view[_PREFIX.size : _PREFIX.size + head_bytes], type=CheckpointHead)
        start = _PREFIX.size + head_bytes
        middle = start + head.state_bytes
        if middle + head.tensors_bytes != len(data) - _DIGEST_BYTES:
            raise ValueError(f"{head.state_bytes} bytes of state and {head.tensors_bytes} of tensors are not all of it")
        body = view[middle : middle + head.tensors_bytes]
        if in_place:
            tensors = _tensors_in(body if writable else body.toreadonly())
        else:
            tensors = safetensors.numpy.load(bytes(body))
    except (
        *(msgspec.MsgspecError, safetensors.SafetensorError),
        *(KeyError, ValueError),  # a dtype or a shape that safetensors knows and numpy does not
        *(RecursionError, MemoryError, OverflowError),  # a head nested too deeply, or with impossible lengths
    ) as exc:
        raise DamagedError(f"the contents do not fit the schema: {type(exc).__name__}: {short(exc)}") from exc
    checkpoint = Checkpoint(
        job=head.job,
        fingerprint=head.fingerprint,
        term=head.term,
        version=head.version,
        state=bytes(view[start:middle]),
        tensors=tensors,
        layout=head.layout,
        code=head.code,
        chain=head.chain,
        parts=head.parts,
        sliced=head.sliced,
        row_slices_of=head.row_slices_of,
    )
    return checkpoint, head


def _sha256(data: bytes | mmap.mmap, size: int) -> bytes:
    """Return the SHA-256 of the first `size` bytes. Pages of a mapped file leave this process's memory."""
    digest, view = hashlib.sha256(), memoryview(data)
    for start in range(0, size, _HASHED_BYTES):
        digest.update(view[start : min(start + _HASHED_BYTES, size)])
        if isinstance(data, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            data.madvise(mmap.MADV_DONTNEED, start, min(_HASHED_BYTES, len(data) - start))
    return digest.digest()


def _tensors_in(body: memoryview) -> dict[str, npt.NDArray[Any]]:
    """Return views of the tensors that `_encode_tensors` wrote. Raise ValueError or KeyError if they do not fit."""
    (head_bytes,) = struct.unpack_from("<Q", body)
    header = msgspec.json.decode(body[8 : 8 + head_bytes], type=dict[str, _TensorHead])
    values = body[8 + head_bytes :]
    tensors = {}
    for name, tensor in header.items():
        begin, end = tensor.data_offsets
        if not 0 <= begin <= end <= len(values):
            raise ValueError(f"{name}: expected a tensor among {len(values)} bytes, got {begin} to {end}")
        tensors[name] = np.frombuffer(values[begin:end], _NAMED_DTYPES[tensor.dtype]).reshape(tensor.shape)
    return tensors


def _length_of_head(data: bytes | mmap.mmap) -> int:
    magic, schema, head_bytes = _PREFIX.unpack_from(data)
    if magic != MAGIC or schema not in (SCHEMA_VERSION, DIFFERENTIAL):
        raise CheckpointError(
            f"expected a checkpoint of schema {SCHEMA_VERSION} or {DIFFERENTIAL}, got {magic!r}, schema {schema}: use "
            "the release that wrote it"
        )
    return int(head_bytes)


def decode_head(data: bytes) -> CheckpointHead | int:
    """Return the head at the beginning of a checkpoint's bytes; if `data` is too short, return the size needed.

    The checksum of the whole checkpoint is not verified. Raise DamagedError if the head is incomplete or changed, and
    CheckpointError if this release does not read its schema.
    """
    if len(data) < _PREFIX.size:
        raise DamagedError(f"expected a checkpoint, got {len(data)} bytes")
    start = _PREFIX.size + _length_of_head(data)
    if len(data) < start:
        return start
    try:
        head = msgspec.msgpack.decode(memoryview(data)[_PREFIX.size : start], type=CheckpointHead)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, MemoryError) as exc:
        raise DamagedError(f"the head does not fit the schema: {short(exc)}") from exc
    until = start + head.state_bytes
    if len(data) < until:
        return until
    return msgspec.structs.replace(head, state=data[start:until])


class VersionStore(Protocol):
    """The part of a `CheckpointStore` that a server uses while it serves."""

    def save(self, checkpoint: Checkpoint) -> None: ...

    def newest_term(self) -> int: ...


class CheckpointStore(ABC):
    """Port (interface): the store of one job's checkpoints.

    All calls raise `CheckpointError` if the store cannot be read or written. Calls except `claim_term` may be repeated.

    Args:
        job: name of the job that owns the checkpoints. None: any job; the store is then only read.
        location: folder or URL, for messages.
        keep: number of newest checkpoints that are kept; at least 2, so that a damaged one has a predecessor.
        history: rule for older checkpoints that are kept in addition to those with an alias or a pin.
    """

    def __init__(self, job: str | None, location: str, keep: int, history: VersionHistory = NO_HISTORY) -> None:
        if keep < 2:
            raise ValueError(f"expected keep >= 2, got {keep}")
        self._job = job
        self.location = location
        self._keep = keep
        self._history = history
        self._base: Base | None = None
        self._bases: dict[tuple[int, int], int | None] = {}  # version of the base of each checkpoint, where it is known

    @abstractmethod
    def claim_term(self, above: int = 0) -> int:
        """Durably claim a term above all terms in the store for this caller alone, and return it.

        Each call fences all earlier callers. The new term is also above `above`, the highest term seen elsewhere.
        """

    @abstractmethod
    def newest_term(self) -> int:
        """Return the highest term claimed or saved, 0 if there is none. A server with a lower term is fenced."""

    @abstractmethod
    def save(self, checkpoint: Checkpoint) -> None:
        """Store `checkpoint` completely or not at all; it is durable on return. Raise FencedError if a higher term was
        claimed. Raise CheckpointError if it belongs to another job, or this term has saved a higher version."""

    def save_part(
        self, checkpoint: Checkpoint, number: int, count: int, base: BaseReference | None = None
    ) -> CheckpointPart:
        """Store the tensors of one shard, `number` of `count`, before the checkpoint that names them is saved. Raises
        the errors of `save`.

        `base`: the same shard's part of a whole checkpoint. Only the rows that have changed since are stored, if they
        have fewer bytes than all rows. The same arguments make the same bytes.
        """
        self._check_owner(checkpoint)
        whole_bytes = _num_bytes(checkpoint.tensors)
        encoded = _encoded(checkpoint, base, lambda num_bytes: num_bytes < whole_bytes)
        self._write_part(part_name(checkpoint.term, checkpoint.version, number, count), encoded.parts, checkpoint)
        checksum = bytes(encoded.parts[-1])
        if encoded.base is None:
            return CheckpointPart(number, count, encoded.num_bytes, checksum)
        return CheckpointPart(number, count, encoded.num_bytes, checksum, encoded.base.version, whole_bytes)

    def read_part(self, term: int, version: int, part: CheckpointPart) -> Checkpoint:
        """Return a part of a checkpoint with all rows, as `load_newest` with `in_place`. Raise DamagedError if it or
        its base is missing, damaged, or not the one that was stored for this checkpoint, and FileNotFoundError if the
        checkpoint was deleted meanwhile."""
        name = _file_name(term, version, part)
        try:
            return self._load(term, version, in_place=True, part=part)
        except FileNotFoundError:
            if (term, version) not in self.versions():
                raise
            raise DamagedError(f"{name} is missing") from None
        except DamagedError as exc:
            raise DamagedError(f"{name}: {exc}") from exc

    @abstractmethod
    def _write_part(self, name: str, data: Sequence[Buffer], checkpoint: Checkpoint) -> None:
        """Durably store a file beside the checkpoints, if `save` would accept the checkpoint."""

    @abstractmethod
    def _read_file(self, name: str, size: int | None = None) -> bytes:
        """Return the bytes of a checkpoint or of a file beside it, or the first `size`. Raise FileNotFoundError if it
        does not exist (any more)."""

    @abstractmethod
    def versions(self) -> list[tuple[int, int]]:
        """Return (term, version) of each stored checkpoint, oldest first, including damaged ones."""

    @abstractmethod
    def stored(self) -> list[StoredVersion]:
        """Return the checkpoints that `versions` lists, with their sizes and the times when they were saved."""

    @abstractmethod
    def delete(self, keys: Iterable[tuple[int, int]]) -> None:
        """Delete these checkpoints, (term, version), also if they have marks. Raise CheckpointError if one of them
        cannot be deleted or is the base of another one that stays, and ValueError if the newest checkpoint is among
        them."""

    def _map(self, name: str, access: int) -> mmap.mmap:
        """Return the bytes of `_read_file` as a mapped file, read when used. Raises its errors, and ValueError if the
        file is empty."""
        with tempfile.TemporaryFile() as file:
            file.write(self._read_file(name))
            file.flush()
            return mmap.mmap(file.fileno(), 0, access=access)

    @abstractmethod
    def read_document(self, name: str) -> tuple[bytes | None, Any]:
        """Return the content of a small file beside the checkpoints (None: it does not exist), and its state for
        `replace_document`."""

    @abstractmethod
    def replace_document(self, name: str, data: bytes, known: Any) -> Any:
        """Durably replace the content by `data`, if the content still has the state `known`, and return the new state.
        Return None if the content has another state. The content is then unchanged, except that after a lost answer of
        the store it may be `data` already."""

    def read_marks(self) -> VersionMarks:
        """Return the aliases and pins of versions."""
        return decode_marks(self.read_document(MARKS)[0], f"{self.location}/{MARKS}")

    def change_marks(self, change: Callable[[VersionMarks], VersionMarks]) -> VersionMarks:
        """Replace the marks by the result of `change`, and return the result. Concurrent changes are applied one after
        the other, so `change` may be called several times. Raise VersionUnknownError if a version that gets a mark is
        not kept, and CheckpointError if it is damaged."""
        for _ in range(_MARK_ATTEMPTS):
            data, known = self.read_document(MARKS)
            before = decode_marks(data, f"{self.location}/{MARKS}")
            after = change(before)
            new = after.added_since(before)
            self._require_kept(after, new)
            for version in new:
                self.load_newest(None, version, in_place=True, with_parts=False)
            if after == before:
                return before
            if self.replace_document(MARKS, encode_marks(after), known) is not None:
                try:
                    self._require_kept(after, new)  # a server may have deleted a checkpoint in the meantime
                except VersionUnknownError:
                    self._forget_missing()
                    raise
                return after
        raise CheckpointError(f"{self.location}/{MARKS} was changed {_MARK_ATTEMPTS} times while it was to be changed")

    def _but_newest(self, keys: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the keys, the newest first, so that no base is deleted before its differences. Raise ValueError if the
        newest checkpoint is among them, and CheckpointError if the base of another checkpoint is."""
        chosen, held = sorted(keys, reverse=True), self.versions()
        if held[-1:] == chosen[:1] != []:
            raise ValueError(f"expected checkpoints other than the newest one, got {chosen[0]}")
        for key in self._bases_of(set(held).difference(chosen), among=chosen):
            raise CheckpointError(
                f"{self.location}/{checkpoint_name(*key)} cannot be deleted: checkpoints that stay contain only the "
                "rows that have changed since; delete these as well"
            )
        return chosen

    def _require_kept(self, marks: VersionMarks, wanted: Iterable[int]) -> None:
        if not (wanted := set(wanted)):
            return
        kept = [version for _, version in self.versions()]
        if missing := sorted(wanted.difference(kept)):
            raise VersionUnknownError(unknown_version(self.location, missing[0], kept, marks.only(kept)))

    def _forget_missing(self) -> None:
        data, known = self.read_document(MARKS)
        kept = [version for _, version in self.versions()]
        self.replace_document(MARKS, encode_marks(decode_marks(data, self.location).only(kept)), known)

    def read_head(self, term: int, version: int) -> CheckpointHead:
        """Return the head of a checkpoint, without reading its tensors. Raise VersionUnknownError if the checkpoint was
        deleted after it was listed, and CheckpointError if it is damaged or belongs to another job."""
        size = _HEAD_BYTES
        name = f"{self.location}/{checkpoint_name(term, version)}"
        try:
            while isinstance(head := decode_head(data := self._read_file(checkpoint_name(term, version), size)), int):
                if head <= size:
                    raise DamagedError(f"it ends after {len(data)} bytes")
                size = head
        except FileNotFoundError:
            raise VersionUnknownError(f"{name}: version {version} was deleted while it was read") from None
        except DamagedError as exc:
            raise DamagedError(f"{name}: {exc}") from exc
        self._check_job(head.job, name)
        return head

    def whole_bytes(self, item: StoredVersion) -> int:
        """Return the size that the checkpoint has, or would have if it contained all rows. Raises the errors of
        `read_head`."""
        head = self.read_head(*item.key)
        return (head.whole_bytes or item.size_bytes) + sum(part.whole_bytes or part.size_bytes for part in head.parts)

    def _obsolete(self, stored: Sequence[StoredVersion]) -> list[StoredVersion]:
        """Return the checkpoints of `stored` that may be deleted, the newest first, so that no base is deleted before
        its differences. Return none if the marks or the heads of checkpoints cannot be read.

        If the newest checkpoint is differential, the newest whole one before its base is also kept: a damaged base
        must have a predecessor.
        """
        if len(stored) <= self._keep:
            return []
        self._bases = {item.key: self._bases[item.key] for item in stored if item.key in self._bases}
        try:
            marked = self.read_marks().marked
            gone = obsolete(stored, marked, keep=self._keep, history=self._history, now_s=time.time())
            keys = [item.key for item in gone]
            needed = self._bases_of({item.key for item in stored}.difference(keys), among=keys)
            newest = stored[-1].key
            base = self._base_version(newest)
            if base is not None:
                older = (item.key for item in reversed(stored) if item.key < (newest[0], base))
                if (before := next((key for key in older if self._base_version(key) is None), None)) is not None:
                    needed.add(before)
        except CheckpointError as exc:
            log.warning("marks_unreadable", error=str(exc), action="no checkpoint is deleted")
            return []
        return [item for item in reversed(gone) if item.key not in needed]

    # --- differential checkpoints ------------------------------------------------------------------------------------

    def _encode(self, checkpoint: Checkpoint, held: Iterable[tuple[int, int]]) -> EncodedCheckpoint:
        """Return the bytes to save: the difference to the last whole checkpoint, if it is among the stored ones `held`
        and the difference is small enough."""
        base = self._base
        if base is None or base.term != checkpoint.term or base.reference.version >= checkpoint.version:
            return _encoded(checkpoint)
        return _encoded(checkpoint, base.reference if base.key in held else None, base.is_worth)

    def _require_base(
        self, checkpoint: Checkpoint, encoded: EncodedCheckpoint, held: Iterable[tuple[int, int]]
    ) -> None:
        """Raise BaseDeletedError if another process has deleted the base of `encoded` since it was made."""
        version = _base_version(encoded.base, checkpoint.parts)
        if version is not None and (key := (checkpoint.term, version)) not in held:
            raise BaseDeletedError(f"{self.location}/{checkpoint_name(*key)} was deleted: the next save is whole")

    def _note_saved(self, checkpoint: Checkpoint, encoded: EncodedCheckpoint) -> None:
        """Note that `checkpoint` is durable."""
        self._bases[checkpoint.term, checkpoint.version] = _base_version(encoded.base, checkpoint.parts)
        num_bytes = encoded.num_bytes
        if encoded.base is not None and self._base is not None:
            self._base.note_difference(num_bytes)
        elif checkpoint.changes is not None:
            reference = BaseReference(checkpoint.version, bytes(encoded.parts[-1]))
            self._base = Base(checkpoint.term, reference, num_bytes)

    def _base_version(self, key: tuple[int, int]) -> int | None:
        """Return the version of the base of a checkpoint. None: it is whole; -1: it is damaged, or deleted. Raise
        CheckpointError if the store cannot be read."""
        if key not in self._bases:
            try:
                self._bases[key] = self.read_head(*key).base_version
            except (DamagedError, VersionUnknownError):
                return -1
        return self._bases[key]

    def _bases_of(self, keys: Iterable[tuple[int, int]], *, among: Sequence[tuple[int, int]]) -> set[tuple[int, int]]:
        """Return which of the checkpoints `among` are bases of `keys`."""
        oldest: dict[int, int] = {}
        for term, version in among:
            oldest[term] = min(version, oldest.get(term, version))
        # Only the heads that matter are read: a store may keep thousands of checkpoints.
        wanted = [key for key in keys if key[1] > oldest.get(key[0], key[1])]
        return {(key[0], base) for key in wanted if (base := self._base_version(key)) is not None}.intersection(among)

    def load_newest(
        self, fingerprint: str | None, version: int | None = None, *, in_place: bool = False, with_parts: bool = True
    ) -> Checkpoint | None:
        """Return the newest undamaged checkpoint, or None if there are no checkpoints. Log a warning for each damaged
        one. Raise CheckpointError if its job or fingerprint is another one, or all checkpoints are damaged.

        Args:
            fingerprint: required fingerprint, except for the fields that may change on a resume. None: any, for tools
                that only read.
            version: consider only the checkpoints of this version.
            in_place: True: the tensors are mapped from their file, which may be deleted. The system can reclaim their
                memory. They are read-only, and may be unaligned.
            with_parts: False: check the parts of shards, and leave out their tensors.
        """
        for _ in range(_READ_ATTEMPTS):
            with suppress(FileNotFoundError):
                return self._newest_whole(fingerprint, version, in_place, with_parts)
        raise CheckpointError(
            f"checkpoints vanish from {self.location} while they are read: is something else deleting them?"
        )

    def load_newest_state(self) -> Checkpoint | None:
        """Return the same as `load_newest` for readers that need no tensors. No tensor takes memory."""
        return self.load_newest(None, in_place=True, with_parts=False)

    def _newest_whole(
        self, fingerprint: str | None, wanted: int | None, in_place: bool, with_parts: bool
    ) -> Checkpoint | None:
        held = self.versions()
        versions = held if wanted is None else [item for item in held if item[1] == wanted]
        if held and not versions:
            kept = [version for _, version in held]
            raise VersionUnknownError(unknown_version(self.location, wanted, kept, self.read_marks()))
        reason = ""
        for term, version in reversed(versions):
            name = checkpoint_name(term, version)
            try:
                checkpoint = self._load(term, version, in_place)
                if checkpoint.parts:
                    checkpoint = self._with_tensors(checkpoint, with_parts, in_place)
            except DamagedError as exc:
                reason = reason or str(exc)
                if wanted is None or (term, version) != versions[0]:
                    log.warning("checkpoint_damaged", file=name, error=str(exc), hint="using the one before it")
                continue
            self._check_owner(checkpoint, f"{self.location}/{name}", fingerprint)
            return checkpoint
        if versions and len(versions) < len(held):
            raise CheckpointError(
                f"{self.location}: version {wanted} is damaged ({reason}): restore its file from a backup, or name "
                f"another version; {len(held) - len(versions)} more are kept"
            )
        if versions:
            raise CheckpointError(
                f"none of the {len(versions)} checkpoints in {self.location} is whole: restore one from a backup, or "
                "move them away to start the job over"
            )
        return None

    def _with_tensors(self, checkpoint: Checkpoint, with_parts: bool, in_place: bool) -> Checkpoint:
        parts = (self.read_part(checkpoint.term, checkpoint.version, part) for part in checkpoint.parts)
        if with_parts:
            tensors = joined(parts, _zeros_in_file if in_place else np.zeros)
            if not in_place:
                tensors = {name: np.require(tensor, None, ["A", "W"]) for name, tensor in tensors.items()}
            return dataclasses.replace(checkpoint, tensors=_frozen(tensors) if in_place else tensors)
        for _ in parts:  # one after the other, so that one at a time is in memory
            pass
        return checkpoint

    def _load(self, term: int, version: int, in_place: bool, part: CheckpointPart | None = None) -> Checkpoint:
        """Return a checkpoint, or a part of it, with all rows. Raise DamagedError if it or its base is damaged, and
        FileNotFoundError if it was deleted meanwhile."""
        checkpoint, head, digest = self._decoded(term, version, in_place, part)
        if part is not None and digest != part.checksum:
            raise DamagedError("it is not the part that was stored for this checkpoint")
        if head.base is None:
            return checkpoint
        name = _file_name(term, head.base.version, part)
        try:
            base, head_of_base, digest = self._decoded(term, head.base.version, in_place, part, is_patched=True)
        except FileNotFoundError:
            if (term, version) not in self.versions():
                raise
            raise DamagedError(f"{name} is missing: this file contains only the rows that have changed since") from None
        except DamagedError as exc:
            raise DamagedError(f"{name}, on which it is based: {exc}") from exc
        if head_of_base.base is not None or digest != head.base.digest:
            raise DamagedError(f"{name} is not the checkpoint on which it is based: replaced")
        try:
            make = _zeros_in_file if in_place else np.zeros
            tensors = patched(checkpoint.tensors, head.patches, base.tensors, make=make)
        except (KeyError, ValueError, MemoryError, OverflowError) as exc:
            raise DamagedError(f"the changed rows do not fit {name}: {type(exc).__name__}: {short(exc)}") from exc
        return dataclasses.replace(checkpoint, tensors=_frozen(tensors) if in_place else tensors)

    def _decoded(
        self, term: int, version: int, in_place: bool, part: CheckpointPart | None, *, is_patched: bool = False
    ) -> tuple[Checkpoint, CheckpointHead, bytes]:
        """Return a stored checkpoint or part, its head and its SHA-256. `is_patched`: its tensors are writable; writes
        do not change the store."""
        name = _file_name(term, version, part)
        data: bytes | mmap.mmap
        if in_place:
            try:
                data = self._map(name, mmap.ACCESS_COPY if is_patched else mmap.ACCESS_READ)
            except ValueError as exc:  # an empty file
                raise DamagedError(str(exc)) from exc
        else:
            data = self._read_file(name)
        checkpoint, head = _decode(data, in_place=in_place, writable=is_patched)
        if isinstance(data, mmap.mmap) and hasattr(mmap, "MADV_RANDOM"):
            data.madvise(mmap.MADV_RANDOM)  # few rows will be read
        if (checkpoint.term, checkpoint.version) != (term, version):
            raise DamagedError(f"it holds term {checkpoint.term}, version {checkpoint.version}: renamed")
        return checkpoint, head, bytes(data[-_DIGEST_BYTES:])

    def _check_owner(self, checkpoint: Checkpoint, location: str = "", fingerprint: str | None = None) -> None:
        """Raise CheckpointError if another job, or the same job with another model, has written the checkpoint."""
        self._check_job(checkpoint.job, location)
        if fingerprint is None or fingerprint == checkpoint.fingerprint:
            return
        saved, wanted = parse(checkpoint.fingerprint), parse(fingerprint)
        if refused := resume_refusal(saved, wanted):
            raise CheckpointError(f"{location or self.location}: {refused}")
        log.info("resumed_with_changes", changes=differences(saved, wanted))

    def _check_job(self, job: str, location: str = "") -> None:
        if self._job is not None and job != self._job:
            raise CheckpointError(
                f"{location or self.location}: expected a checkpoint of job {self._job!r}, got one of job {job!r}: "
                "give each job its own checkpoint.folder"
            )

    def _refuse_if_superseded(
        self, checkpoint: Checkpoint, newest_term: int, versions: Iterable[tuple[int, int]]
    ) -> None:
        """Raise an error if the term of `checkpoint` is not the newest one, or has already saved a higher version."""
        if newest_term > checkpoint.term:
            raise FencedError(
                f"parameter server term {checkpoint.term} is over: term {newest_term} has claimed {self.location}; "
                "this process must stop"
            )
        last = max((version for term, version in versions if term == checkpoint.term), default=0)
        if checkpoint.version < last:
            raise CheckpointError(
                f"expected version {last} or later of term {checkpoint.term}, got {checkpoint.version}"
            )


def _num_bytes(tensors: Mapping[str, npt.NDArray[Any]]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _encoded(
    checkpoint: Checkpoint, base: BaseReference | None = None, is_worth: Callable[[int], bool] = lambda num_bytes: False
) -> EncodedCheckpoint:
    """Return the bytes of a checkpoint or part: the difference to `base`, if its number of bytes is worth it."""
    if base is not None and checkpoint.changes is not None:
        changed = checkpoint.changes(base.version)
        if is_worth(difference_bytes(checkpoint.tensors, changed)):
            tensors, patches = difference(checkpoint.tensors, changed)
            stored = dataclasses.replace(checkpoint, tensors=tensors)
            return EncodedCheckpoint(encode_checkpoint(stored, base, patches, _num_bytes(checkpoint.tensors)), base)
    return EncodedCheckpoint(encode_checkpoint(checkpoint))


def _frozen(tensors: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """Make these tensors read-only, and return them."""
    for tensor in tensors.values():
        tensor.flags.writeable = False
    return tensors


def _zeros_in_file(shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return zeros whose memory the system can write to a file."""
    if not (num_bytes := math.prod(shape) * dtype.itemsize):
        return np.zeros(shape, dtype)
    with tempfile.TemporaryFile() as file:
        file.truncate(num_bytes)
        return np.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype).reshape(shape)


def checkpoint_name(term: int, version: int) -> str:
    """Return the name of a checkpoint in any store; the names sort in the order of the checkpoints."""
    return f"checkpoint-{term:08d}-{version:010d}.doll"


def checkpoints_among(names: Iterable[str]) -> list[tuple[int, int]]:
    """Return (term, version) of each name of a checkpoint, oldest first."""
    return sorted((int(match[1]), int(match[2])) for name in names if (match := _CHECKPOINT.fullmatch(name)))


def part_name(term: int, version: int, number: int, count: int) -> str:
    """Return the name of the part of a checkpoint that shard `number` of `count` stores."""
    return f"checkpoint-{term:08d}-{version:010d}.part-{number}-of-{count}.doll"


def _file_name(term: int, version: int, part: CheckpointPart | None) -> str:
    return checkpoint_name(term, version) if part is None else part_name(term, version, part.number, part.count)


def unused_parts(names: Iterable[str]) -> list[str]:
    """Return the names of parts that belong to no checkpoint of `names`, and will not, because a newer one is there."""
    names = list(names)
    kept = checkpoints_among(names)
    keys = {name: (int(match[1]), int(match[2])) for name in names if (match := _PART.fullmatch(name))}
    return [name for name, key in keys.items() if key not in kept and key < max(kept, default=(0, 0))]


def joined(parts: Iterable[Checkpoint], make: Make = np.zeros) -> dict[str, npt.NDArray[Any]]:
    """Return the tensors of a checkpoint from its parts, in order. `make`: function that allocates what is joined.
    Raise DamagedError if they do not fit together."""
    items = list(parts)
    tensors = dict(items[0].tensors)
    try:
        for name in items[0].sliced:
            if name in tensors:
                pieces = [item.tensors[name] for item in items]
                whole = make((sum(map(len, pieces)), *pieces[0].shape[1:]), pieces[0].dtype)
                tensors[name] = np.concatenate(pieces, out=whole)
        for table in items[0].row_slices_of:
            tensors |= joined_table([item.tensors for item in items], table, make)
    except (KeyError, ValueError, TypeError) as exc:
        raise DamagedError(f"its parts do not fit together: {exc}") from exc
    return tensors


def claim_name(term: int) -> str:
    """Return the name of the file that claims `term`. The claims of the newest terms are kept: see `is_forgotten`."""
    return f"term-{term:08d}.claim"


def is_forgotten(term: int, newest_term: int) -> bool:
    """Return whether the claim of `term` may have been deleted. If so, a missing claim does not prove that the term is
    free.

    A server that was suspended between its listing and its claim may claim such a term a second time. It therefore
    checks `newest_term`, which never decreases, again after the claim.
    """
    return term <= newest_term - KEPT_CLAIMS


def old_claims(names: Iterable[str], newest_term: int) -> list[str]:
    """Return the names of claims and of bases (S3) that are not needed any more."""
    return [name for name in names if (match := _OF_TERM.match(name)) and is_forgotten(int(match[1]), newest_term)]


def claims_among(names: Iterable[str]) -> list[int]:
    """Return the term of each name of a claim."""
    return [int(match[1]) for name in names if (match := _CLAIM.fullmatch(name))]


def resolve_version(store: CheckpointStore, name: str) -> int:
    """Return the version that `name` (`latest`, a number, or an alias) refers to now. Raise VersionUnknownError, which
    lists the valid names, if there is no such name or its version is not kept. Raise CheckpointError if the store
    cannot be read."""
    kept = [version for _, version in store.versions()]
    if not kept:
        raise VersionUnknownError(f"{store.location}: no version is kept: nothing has been learned yet")
    if name == LATEST:
        return kept[-1]
    marks = store.read_marks()
    version = int(name) if _NUMBER.fullmatch(name) else marks.aliases.get(name)
    if version is not None and version in kept:
        return version
    raise VersionUnknownError(unknown_version(store.location, name, kept, marks))
