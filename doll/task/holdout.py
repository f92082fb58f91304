"""Which records of its stream a job holds out (`evaluation.holdout`): a pure function of the record and the job file.

Workers leave these records out of their gradients, and the audit computes the same function again. So every worker,
restart and replay holds out the same records.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Final, Self

import msgspec
import numpy as np
import numpy.typing as npt

from doll.config import JobConfig
from doll.config.holdout import HoldoutConfig
from doll.records.event_times import NO_TIME
from doll.task.event_clock import event_clock
from doll.task.hashing import hash_ids
from doll.task.records import Envelope

_SIZE: Final = 1 << 62
_SEED: Final = 131  # not that of the ids of a model's tables; the same in all jobs, which hold out the same keys
_CORRECTION: Final[Any] = msgspec.json.Decoder(msgspec.defstruct("Fields", [("doll_is_correction", bool)]))


class Split:
    """Divides records into those that are learned and those that are held out."""

    def __init__(self, config: JobConfig, section: HoldoutConfig) -> None:
        join = config.data.join
        self._has_early_samples = join is not None and join.early_after_s is not None
        self._share, self._by = section.share, section.by
        self._begin_ms = 0 if section.begin is None else max(0, round(1000 * section.begin.timestamp()))
        self._until_ms = _SIZE if section.until is None else round(1000 * section.until.timestamp())
        self._times_ms = event_clock(config.freshness.time)
        fields: Any = msgspec.defstruct("Fields", [("key", str | int)], rename={"key": section.by.field or ""})
        self._decode = msgspec.json.Decoder(fields).decode

    @classmethod
    def of_job(cls, config: JobConfig) -> Self | None:
        """Return the split of a job; None if it learns all records of its stream."""
        section = config.evaluation.holdout
        return None if section is None or section.topic is not None else cls(config, section)

    def held_out(
        self, partition: int, offsets: Sequence[int], values: Sequence[bytes | None], records: Sequence[Envelope | None]
    ) -> npt.NDArray[np.bool_]:
        """Return whether each record is held out, shape (n,). `records`: their keys, headers and timestamps; None: the
        record cannot be read. Such a record is not held out, because it becomes a dead letter."""
        result = np.fromiter((record is not None for record in records), np.bool_, len(offsets))
        read = [(value, record) for value, record in zip(values, records, strict=True) if record is not None]
        if self._share is None:
            times_ms = np.array(self._times_ms([record for _, record in read], [value for value, _ in read]), np.int64)
            result[result] = (times_ms >= self._begin_ms) & (times_ms < self._until_ms) & (times_ms != NO_TIME)
        else:
            keys = [self._key(value, record) for value, record in read]
            own = np.asarray(offsets, np.int64)[result]
            ids = hash_ids(np.full(len(own), partition), own, size=_SIZE, seed=_SEED)
            has_key = np.fromiter(map(bool, keys), np.bool_, len(keys))
            ids = np.where(has_key, hash_ids(keys, size=_SIZE, seed=_SEED), ids)
            result[result] = ids < int(self._share * _SIZE)
        return result

    def _key(self, value: bytes | None, record: Envelope) -> bytes | None:
        """Return the key; None or b"": the record has none that can be read."""
        key: bytes | None = None
        with contextlib.suppress(Exception):  # bytes from outside; also headers that the client cannot read
            if self._by.field is not None:
                key = str(self._decode(value or b"").key).encode()
            elif self._by.header is not None:
                key = dict(record.headers() or ()).get(self._by.header)
            else:
                key = record.key()
        return key

    def has_final_label(self, value: bytes | None) -> bool:
        """Return whether the label of a held-out record is final, so that its samples are scored. If the join writes
        early samples, only that of a correction is."""
        if not self._has_early_samples:
            return True
        with contextlib.suppress(Exception):  # not a record of the join
            return bool(_CORRECTION.decode(value or b"").doll_is_correction)
        return False
