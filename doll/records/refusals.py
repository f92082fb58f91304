"""Refused records: their reasons and their number, in the whole job and among its last records. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

import msgspec

from doll.records.bounded import short
from doll.records.control import DeadLetterCode

MAX_REASONS: Final = 20  # distinct reasons; dead letters with further reasons are counted as `OTHER`
MAX_REASON_CHARS: Final = 200
OTHER: Final = "other reasons"
_BUCKETS: Final = 20
_NUMBER: Final = re.compile(r"\d+")


class UnreadValue(bytes):
    """A placeholder for a value that was not read or not kept. Its bytes are empty. It is never decoded."""

    code: DeadLetterCode  # code of its dead letter
    reason: str
    num_bytes: int  # size of the value; 0: unknown
    head: bytes  # first bytes of the value

    @classmethod
    def with_reason(cls, code: DeadLetterCode, reason: str, num_bytes: int = 0, head: bytes = b"") -> UnreadValue:
        self = cls()
        self.code, self.reason, self.num_bytes, self.head = code, reason, num_bytes, head
        return self


class ReasonCounts:
    """The number of dead letters for each reason. Reasons that differ only in numbers are counted under the first of
    them."""

    def __init__(self, counts: Iterable[tuple[str, int]] = ()) -> None:
        self._names: dict[str, str] = {}
        self._counts: dict[str, int] = {}
        for reason, letters in counts:
            self.add(reason, letters)

    def add(self, reason: str, letters: int = 1) -> None:
        """Count `letters` dead letters with this reason."""
        reason = short(reason, MAX_REASON_CHARS)
        key = _NUMBER.sub("#", reason)
        if key not in self._counts and len(self._counts) >= MAX_REASONS:
            key = reason = OTHER
        self._names.setdefault(key, reason)
        self._counts[key] = self._counts.get(key, 0) + letters

    def in_order(self) -> tuple[tuple[str, int], ...]:
        """Return each reason and its number of letters, in the order in which the reasons first occurred."""
        return tuple((self._names[key], letters) for key, letters in self._counts.items())


class RefusalState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of `Refusals` in a checkpoint."""

    reasons: tuple[tuple[str, int], ...] = ()
    window: tuple[tuple[int, int], ...] = ()  # (records, refused records) of each bucket, the oldest first
    skipped: tuple[tuple[str, int], ...] = ()

    def without_reasons(self) -> RefusalState:
        """Return the state with the same numbers and no text of a reason, which can quote a record."""
        reasons, skipped = (
            ((OTHER, sum(number for _, number in counts)),) if counts else () for counts in (self.reasons, self.skipped)
        )
        return msgspec.structs.replace(self, reasons=reasons, skipped=skipped)


class Refusals:
    """The refused records among the records that a job has applied.

    The last records are counted in up to `_BUCKETS` sums, so that memory does not grow with the window. Therefore the
    length of the window may be wrong by a twentieth.
    """

    def __init__(self, window_records: int, state: RefusalState | None = None) -> None:
        state = state or RefusalState()
        self.reasons = ReasonCounts(state.reasons)
        self.skipped = ReasonCounts(state.skipped)  # samples that tasks have left out; these are not refusals
        self._window_records = window_records
        self._buckets = [list(bucket) for bucket in state.window]
        self.recent_records = sum(records for records, _ in self._buckets)
        self.recent_refused = sum(refused for _, refused in self._buckets)

    def add(self, records: int, refused: int, reasons: Iterable[tuple[str, int]] = ()) -> None:
        """Count `records` applied records, of which `refused` are dead-lettered for these reasons."""
        for reason, letters in reasons:
            self.reasons.add(reason, letters)
        if not self._buckets or self._buckets[-1][0] * _BUCKETS >= self._window_records:
            self._buckets.append([0, 0])
        self._buckets[-1][0] += records
        self._buckets[-1][1] += refused
        self.recent_records += records
        self.recent_refused += refused
        while self.recent_records - self._buckets[0][0] >= self._window_records:
            gone_records, gone_refused = self._buckets.pop(0)
            self.recent_records -= gone_records
            self.recent_refused -= gone_refused

    def problem(self, share: float | None, first_records: int) -> str | None:
        """Return the reason for which the job must end; None if it continues. The job ends if the window has at least
        `first_records` records, of which at least the share `share` was refused."""
        records, refused = self.recent_records, self.recent_refused
        if share is None or not refused or records < first_records or refused < share * records:
            return None
        first = "; ".join(f"{reason} ({letters})" for reason, letters in self.reasons.in_order()[:3])
        return f"{refused:,} of the last {records:,} records were refused, the first for: {first or 'no reason given'}"

    def forget_recent(self) -> None:
        """Begin a new window, because the refusals in the present one were reported to a person."""
        self._buckets.clear()
        self.recent_records = self.recent_refused = 0

    def state(self) -> RefusalState:
        """Return the state for a checkpoint."""
        window = tuple((records, refused) for records, refused in self._buckets)
        return RefusalState(reasons=self.reasons.in_order(), window=window, skipped=self.skipped.in_order())
