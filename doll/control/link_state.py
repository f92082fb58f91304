"""The common part of both ends of a control link, for every transport: numbered frames, heartbeats, and errors. Pure.

A frame is the number of a record on its link (4 bytes, big-endian), followed by the record as in
`doll.records.control`. A missing number means that records were lost. Silence for `SILENCE_S` also counts as a loss,
because a transport can fail without notice: a stream in Redis can vanish, and a relay can drop data.
"""

from __future__ import annotations

import contextlib
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar, Final

from doll.errors import DollError, RecordError
from doll.records.control import (
    AnyRecord,
    Attach,
    Attached,
    Detach,
    GetRows,
    Grant,
    Nack,
    NewVersion,
    Ping,
    Push,
    RowsStored,
    decode,
    encode,
)

TO_SERVER: Final = (Push, Nack, GetRows, Attach, Ping, Detach)
TO_WORKER: Final = (Grant, NewVersion, RowsStored, Attached, Ping, Detach)
# No record of a worker has nearly this length, so a larger length is invalid.
MAX_FRAME_BYTES: Final = 1 << 23
PING_EVERY_S: Final = 1.0
# This is well below the default grant timeout (30 s) and the worker's lease (8 s).
SILENCE_S: Final = 4.0

_NUMBER: Final = struct.Struct(">I")
_WRAP: Final = 1 << 32


class LinkError(DollError):
    """The link has ended, and unanswered records on the link may be lost. `is_refusal`: True if the other end sent a
    record or data that is not allowed on the link."""

    def __init__(self, reason: str, *, is_refusal: bool = False) -> None:
        super().__init__(reason)
        self.is_refusal = is_refusal


def record_of(frame: bytes) -> AnyRecord:
    """Return the record in a frame, whose number is not checked. Raise RecordError if there is no record."""
    return decode(frame[_NUMBER.size :])


class LinkState:
    """The numbers and times (monotonic seconds) of one end of a link, which accepts records of the types `accepts`."""

    __slots__ = ("_accepts", "_heard_s", "_received", "_sent", "_sent_s")

    def __init__(self, accepts: tuple[type, ...], now: float) -> None:
        self._accepts = accepts
        self._sent = self._received = 0
        self._sent_s = self._heard_s = now

    def pack(self, record: AnyRecord, now: float) -> bytes:
        """Return the frame of the next record to send. Raise LinkError if the record is too long for a link."""
        frame = _NUMBER.pack(self._sent) + encode(record)
        if len(frame) > MAX_FRAME_BYTES:
            raise LinkError(f"expected a record of at most {MAX_FRAME_BYTES} bytes, got {len(frame)}")
        self._sent = (self._sent + 1) % _WRAP
        self._sent_s = now
        return frame

    def unpack(self, frame: bytes, now: float) -> AnyRecord | None:
        """Return the record of a received frame; None if it is a Ping. Raise LinkError if the frame is invalid or does
        not follow the last frame, or if its record is a Detach or is not allowed at this end."""
        if len(frame) < _NUMBER.size:
            raise LinkError(f"expected a frame, got {len(frame)} bytes", is_refusal=True)
        try:
            record = record_of(frame)
        except RecordError as exc:
            raise LinkError(str(exc), is_refusal=True) from exc
        if not isinstance(record, self._accepts):
            raise LinkError(f"{type(record).__name__} does not belong on this end of a link", is_refusal=True)
        if isinstance(record, Detach):
            raise LinkError(f"closed by the other end: {record.reason}")
        (number,) = _NUMBER.unpack_from(frame)
        if number != self._received:
            raise LinkError(f"records were lost: expected number {self._received}, got {number}")
        self._received = (self._received + 1) % _WRAP
        self._heard_s = now
        return None if isinstance(record, Ping) else record

    def ping_due(self, now: float) -> bool:
        """Return whether nothing was sent for `PING_EVERY_S`."""
        return now - self._sent_s >= PING_EVERY_S

    def check(self, now: float) -> None:
        """Raise LinkError if no record was received for `SILENCE_S`."""
        if now - self._heard_s >= SILENCE_S:
            raise LinkError(f"silent for {now - self._heard_s:.1f} s")


class Link(ABC):
    """One end of an open link. Calls never block. Each call may raise LinkError: the link has ended."""

    kind: ClassVar[str]

    def __init__(self, state: LinkState) -> None:
        self._state = state
        self._error: LinkError | None = None

    @abstractmethod
    def filenos(self) -> tuple[int, ...]:
        """Return the file descriptors that become readable when data arrives; -1 after `close`."""

    @abstractmethod
    def send(self, record: AnyRecord, now: float) -> None:
        """Send a record now, or in a later `check`."""

    @abstractmethod
    def _frames(self, now: float) -> Iterator[bytes]:
        """Yield the received frames."""

    @abstractmethod
    def _release(self) -> None:
        """Close the connection. This method may be called again."""

    def receive(self, now: float) -> list[AnyRecord]:
        """Return the received records. If the link has ended, first return the records that were received before the
        end; the next call raises LinkError."""
        records: list[AnyRecord] = []
        try:
            if self._error is not None:
                raise self._error
            for frame in self._frames(now):
                if (record := self._state.unpack(frame, now)) is not None:
                    records.append(record)
        except LinkError as exc:
            self._error = exc
            if not records:
                raise
        return records

    def check(self, now: float) -> None:
        """Send a Ping if it is due, and raise LinkError after silence. Call it often, after `receive`."""
        if self._error is not None:
            raise self._error
        self._state.check(now)
        if self._state.ping_due(now):
            self.send(Ping(), now)

    def close(self, reason: str = "", now: float = 0.0) -> None:
        """Close the connection. If `reason` is given, first send a Detach with it. This method may be called again."""
        if reason and self.filenos()[-1] >= 0:
            with contextlib.suppress(LinkError):
                self.send(Detach(reason=reason), now)
        self._release()
