"""Records that are refused: why, how many of a job were, over all of it and among the last ones. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

import msgspec

from doll.records.bounded import short
from doll.records.control import DeadLetterCode

MAX_REASONS: Final = 20  # distinct ones that are kept; letters with others are counted as `OTHER`
MAX_REASON_CHARS: Final = 200
OTHER: Final = "other reasons"
_BUCKETS: Final = 20
_NUMBER: Final = re.compile(r"\d+")


class UnreadValue(bytes):
    """Stands for a value that was not read, or not kept: as bytes it is empty, so it is never decoded."""

    code: DeadLetterCode  # of its dead letter
    reason: str
    num_bytes: int  # of the value; 0 if it is not known
    head: bytes  # its first bytes

    @classmethod
    def with_reason(cls, code: DeadLetterCode, reason: str, num_bytes: int = 0, head: bytes = b"") -> UnreadValue:
        self = cls()
        self.code, self.reason, self.num_bytes, self.head = code, reason, num_bytes, head
        return self


class ReasonCounts:
    """Dead letters by their reason. Reasons that differ in their numbers only are one, named by the first of them."""

    def __init__(self, counts: Iterable[tuple[str, int]] = ()) -> None:
        self._names: dict[str, str] = {}
        self._counts: dict[str, int] = {}
        for reason, letters in counts:
            self.add(reason, letters)

    def add(self, reason: str, letters: int = 1) -> None:
        """`letters` dead letters have this reason."""
        reason = short(reason, MAX_REASON_CHARS)
        key = _NUMBER.sub("#", reason)
        if key not in self._counts and len(self._counts) >= MAX_REASONS:
            key = reason = OTHER
        self._names.setdefault(key, reason)
        self._counts[key] = self._counts.get(key, 0) + letters

    def in_order(self) -> tuple[tuple[str, int], ...]:
        """Reason and number of letters, in the order in which the reasons came."""
        return tuple((self._names[key], letters) for key, letters in self._counts.items())


class RefusalState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of `Refusals` in a checkpoint."""

    reasons: tuple[tuple[str, int], ...] = ()
    window: tuple[tuple[int, int], ...] = ()  # records and refused ones, the oldest first
    skipped: tuple[tuple[str, int], ...] = ()


class Refusals:
    """The refused records among the records that a job has applied.

    The last records are kept as up to `_BUCKETS` sums, so that the memory does not grow with the window: the window is
    exact to a twentieth of its length.
    """

    def __init__(self, window_records: int, state: RefusalState | None = None) -> None:
        state = state or RefusalState()
        self.reasons = ReasonCounts(state.reasons)
        self.skipped = ReasonCounts(state.skipped)  # samples that tasks have left out, which are no refusals
        self._window_records = window_records
        self._buckets = [list(bucket) for bucket in state.window]
        self.recent_records = sum(records for records, _ in self._buckets)
        self.recent_refused = sum(refused for _, refused in self._buckets)

    def add(self, records: int, refused: int, reasons: Iterable[tuple[str, int]] = ()) -> None:
        """`records` were applied, and `refused` of them are dead-lettered for these reasons."""
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
        """The reason why the job ends; None: it goes on. After `first_records`, at least `share` must be refused."""
        records, refused = self.recent_records, self.recent_refused
        if share is None or not refused or records < first_records or refused < share * records:
            return None
        first = "; ".join(f"{reason} ({letters})" for reason, letters in self.reasons.in_order()[:3])
        return f"{refused:,} of the last {records:,} records were refused, the first for: {first or 'no reason given'}"

    def forget_recent(self) -> None:
        """Begin a new window: a person has been told of this one."""
        self._buckets.clear()
        self.recent_records = self.recent_refused = 0

    def state(self) -> RefusalState:
        """The state for a checkpoint."""
        window = tuple((records, refused) for records, refused in self._buckets)
        return RefusalState(reasons=self.reasons.in_order(), window=window, skipped=self.skipped.in_order())
