"""Which records of its stream a job holds out (`evaluation.holdout`): a pure function of the record and the job file.

Workers leave these records out of their gradients, and the audit computes the same function again. So every worker,
restart and replay holds out the same records.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec
import numpy as np
import numpy.typing as npt

from doll.config.holdout import HoldoutConfig
from doll.config.join import TimeConfig
from doll.records.event_times import NO_TIME
from doll.task.event_clock import event_clock
from doll.task.hashing import hash_ids
from doll.task.records import Envelope

if TYPE_CHECKING:
    from doll.config import JobConfig

_SIZE: Final = 1 << 62
_SEED: Final = 131  # not that of the ids of a model's tables; the same in all jobs, which hold out the same keys
_IS_CORRECTION: Final = msgspec.json.Decoder(
    msgspec.defstruct("Fields", [("is_correction", bool, False)], rename={"is_correction": "doll_is_correction"})
)
Mask = npt.NDArray[np.bool_]


class Split:
    """Divides records into those that are learned and those that are held out.

    Attributes:
        scores_corrections: whether only corrections of the join are scored, since the other samples are early: their
            label may not be the final one.
    """

    def __init__(self, section: HoldoutConfig, time: TimeConfig, *, scores_corrections: bool = False) -> None:
        self.scores_corrections = scores_corrections
        self._share, self._by = section.share, section.by
        self._times_ms = event_clock(time)
        begin_ms, until_ms = (
            None if at is None else round(1000 * at.timestamp()) for at in (section.begin, section.until)
        )
        self._begin_ms, self._until_ms = begin_ms, until_ms
        field = None if isinstance(section.by, str) else section.by.field
        fields: Any = msgspec.defstruct("Fields", [("key", str | int)], rename={"key": field or ""})
        self._decode = msgspec.json.Decoder(fields).decode

    @classmethod
    def of(cls, config: JobConfig) -> Self | None:
        """Return the split of a job; None if it learns all records of its stream."""
        section, join = config.evaluation.holdout, config.data.join
        if section is None or not section.is_of_the_stream:
            return None
        scores_corrections = join is not None and join.early_after_s is not None
        return cls(section, config.freshness.time, scores_corrections=scores_corrections)

    def held_out(
        self, partition: int, offsets: Sequence[int], values: Sequence[bytes | None], records: Sequence[Envelope | None]
    ) -> Mask:
        """Return whether each record is held out, shape (n,). `records`: their keys, headers and timestamps; None: the
        record cannot be read. Such a record is not held out, because it becomes a dead letter."""
        is_read = np.fromiter((record is not None for record in records), np.bool_, len(offsets))
        read = [(value, record) for value, record in zip(values, records, strict=True) if record is not None]
        result = np.zeros(len(offsets), np.bool_)
        if read:
            result[is_read] = (
                self._in_time(*zip(*read, strict=True))
                if self._share is None
                else self._in_share(partition, np.asarray(offsets, np.int64)[is_read], read)
            )
        return result

    def _in_time(self, values: Sequence[bytes | None], records: Sequence[Envelope]) -> Mask:
        times_ms = np.array(self._times_ms(records, values), np.int64)
        inside: Mask = times_ms != NO_TIME
        if self._begin_ms is not None:
            inside &= times_ms >= self._begin_ms
        if self._until_ms is not None:
            inside &= times_ms < self._until_ms
        return inside

    def _in_share(
        self, partition: int, offsets: npt.NDArray[np.int64], read: Sequence[tuple[bytes | None, Envelope]]
    ) -> Mask:
        assert self._share is not None
        ids = hash_ids(np.full(len(offsets), partition), offsets, size=_SIZE, seed=_SEED)
        if self._by != "offset":
            keys = [self._key(value, record) for value, record in read]
            has_key = np.fromiter(map(bool, keys), np.bool_, len(keys))
            ids = np.where(has_key, hash_ids(keys, size=_SIZE, seed=_SEED), ids)
        inside: Mask = ids < int(self._share * _SIZE)
        return inside

    def _key(self, value: bytes | None, record: Envelope) -> bytes | None:
        if isinstance(self._by, str):
            key: bytes | None = record.key()
            return key
        with contextlib.suppress(Exception):  # bytes from outside; also headers that the client cannot read
            if (header := self._by.header) is not None:
                found = [content for name, content in record.headers() or () if name == header]
                return found[-1] if found else None
            return str(self._decode(value or b"").key).encode()
        return None

    def has_final_label(self, value: bytes | None) -> bool:
        """Return whether the label of a held-out record is final, so that its samples are scored."""
        if not self.scores_corrections:
            return True
        with contextlib.suppress(Exception):  # not a record of the join: its task may decode it nevertheless
            return bool(_IS_CORRECTION.decode(value or b"").is_correction)
        return False
