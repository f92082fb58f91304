"""The open keys of one partition of the join log, with their deadlines. Pure.

The newest are in memory, the others in an `Overflow`. No entry is durable state: after a restart, the joiner makes all
of them again from the log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import Final, Literal, Protocol

import msgspec

from doll.records.join_log import Routed

_ENTRY_BYTES: Final = 600  # memory of an entry without the value of its features
_LABEL_BYTES: Final = 250
_SPILLED_SHARE: Final = 0.5
_MOST_STALE: Final = 10_000  # deadlines of entries that have others, or none


State = Literal["waiting", "open", "early", "sent", "closed"]


class Entry(msgspec.Struct, array_like=True, gc=False):
    """What is known of a key.

    Attributes:
        state: `waiting`: labels without features. `open`: features without a sample. `early`: a first sample has been
            written, and a label may correct it. `sent`: the sample has been written. `closed`: the window has closed,
            and late labels correct the sample.
        deadline_ms: when the state changes, in event time.
        number: the serial of the record with which the entry began: that of the features, if they have come. Deadlines
            of equal times are in this order.
        segment: part of the log in which the entry began.
        features: the record of the features; None: it has not come.
        labels, serials: records of labels, in the order of the log, and their numbers in the log.
        shown: labels of the newest sample, as they were written; None: no sample has been written.
        size_bytes: approximate size in memory.
    """

    key: bytes
    state: State
    deadline_ms: int
    number: int
    segment: int
    features: Routed | None
    labels: list[Routed]
    serials: list[int]
    shown: bytes | None = None
    size_bytes: int = 0


_Due = tuple[int, int, bytes]  # deadline_ms, number and key of an entry


class Overflow(Protocol):
    """A store for entries that do not fit into memory."""

    def put_all(self, entries: Sequence[Entry]) -> None:
        """Store entries. None of their keys is in the store."""

    def take(self, keys: list[bytes]) -> list[Entry]:
        """Return the stored entries of these keys, and remove them."""

    def take_due(self, waiting: bool, until_ms: int) -> list[Entry]:
        """Return some entries whose deadlines come until this time, and remove them; further ones may be among them.
        An empty list: there are none. `waiting`: those of labels without features, or the others."""

    def close(self) -> None: ...


class Entries:
    """Open keys by key and by deadline.

    Args:
        memory_bytes: limit of the memory; beyond it, the oldest entries go to `overflow`.
    """

    def __init__(self, memory_bytes: int, overflow: Overflow) -> None:
        self._memory_bytes = memory_bytes
        self._overflow = overflow
        self._entries: dict[bytes, Entry] = {}
        self._bytes = 0
        self._due: dict[bool, list[_Due]] = {False: [], True: []}  # heaps, for waiting labels and for features
        self._knows_due = True  # the heaps have all entries in memory
        self._stale = 0
        self.spilled = 0  # entries in `overflow`
        self.spilled_waiting = 0  # those of labels without features
        self.get: Callable[[bytes], Entry | None] = self._entries.get  # call `fetch` before it

    def __len__(self) -> int:
        return len(self._entries) + self.spilled

    def fetch(self, keys: Iterable[bytes]) -> None:
        """Bring the entries of these keys into memory, if they exist."""
        if self.spilled and (missing := [key for key in set(keys) if key not in self._entries]):
            self._admit(self._overflow.take(missing))

    def add(self, entry: Entry) -> None:
        """Add a new entry."""
        features_bytes = 0 if entry.features is None else len(entry.features.value)
        entry.size_bytes = _ENTRY_BYTES + features_bytes + _LABEL_BYTES * len(entry.labels)
        self._bytes += entry.size_bytes
        self._entries[entry.key] = entry
        heappush(self._due[entry.features is None], (entry.deadline_ms, entry.number, entry.key))

    def add_all(self, entries: list[Entry]) -> None:
        """Add new entries with features: faster than one by one."""
        by_key, total_bytes = self._entries, self._bytes
        for entry in entries:
            assert entry.features is not None
            entry.size_bytes = _ENTRY_BYTES + len(entry.features.value) + _LABEL_BYTES * len(entry.labels)
            total_bytes += entry.size_bytes
            by_key[entry.key] = entry
        self._bytes = total_bytes
        self._knows_due = False

    def rearm(self, entry: Entry) -> None:
        """Note that an entry has another deadline."""
        self._stale += 1
        heappush(self._due[entry.features is None], (entry.deadline_ms, entry.number, entry.key))

    def complete(self, entry: Entry) -> None:
        """Note that an entry has got its features. It has no deadline until `rearm`."""
        assert entry.features is not None
        size_bytes = len(entry.features.value)
        entry.size_bytes += size_bytes
        self._bytes += size_bytes

    def grew(self, num_labels: int, entry: Entry) -> None:
        """Note that an entry has this many more labels."""
        entry.size_bytes += _LABEL_BYTES * num_labels
        self._bytes += _LABEL_BYTES * num_labels

    def remove(self, entry: Entry) -> None:
        del self._entries[entry.key]
        self._bytes -= entry.size_bytes
        self._stale += 1

    def due(self, waiting: bool, until_ms: int) -> Iterator[Entry]:
        """Yield the entries whose deadline has come, in order. The caller removes each, or gives it a later deadline.

        `waiting`: labels without features, or the others.
        """
        if self.spilled:
            while due := self._overflow.take_due(waiting, until_ms):
                self._admit(due)
        if not self._knows_due:
            self._find_due()
        heap = self._due[waiting]
        while heap and heap[0][0] <= until_ms:
            item = heappop(heap)
            if self._is_live(item, waiting):
                yield self._entries[item[2]]
            else:
                self._stale -= 1

    def tidy(self) -> None:
        """Keep within the limit of memory. Call it between packs."""
        moved: list[Entry] = []
        if self._bytes > self._memory_bytes:
            goal_bytes = self._memory_bytes * _SPILLED_SHARE
            for entry in self._entries.values():
                if self._bytes <= goal_bytes:
                    break
                moved.append(entry)
                self._bytes -= entry.size_bytes
            for entry in moved:
                del self._entries[entry.key]
                self.spilled_waiting += entry.features is None
            self.spilled += len(moved)
            self._overflow.put_all(moved)
        if moved or self._stale > _MOST_STALE + 2 * len(self._entries):
            self._knows_due = False

    def _find_due(self) -> None:
        for waiting in self._due:
            self._due[waiting] = [
                (entry.deadline_ms, entry.number, key)
                for key, entry in self._entries.items()
                if (entry.features is None) == waiting
            ]
            heapify(self._due[waiting])
        self._stale, self._knows_due = 0, True

    def close(self) -> None:
        self._overflow.close()

    def _admit(self, entries: list[Entry]) -> None:
        self.spilled -= len(entries)
        for entry in entries:
            self.spilled_waiting -= entry.features is None
            self.add(entry)

    def _is_live(self, item: _Due, waiting: bool) -> bool:
        deadline_ms, number, key = item
        entry = self._entries.get(key)
        if entry is None or (entry.features is None) != waiting:
            return False
        return entry.deadline_ms == deadline_ms and entry.number == number
