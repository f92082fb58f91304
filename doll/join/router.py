"""Divides what a joiner reads of the joined topics into packs of the join log. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Final, NamedTuple

from doll.join.extract import Bad, Extractor, Headers
from doll.records.bounded import printable
from doll.records.join_log import MAX_PAYLOAD_BYTES, Pack, Progress, RefusedRecord, Routed, partition_of

if TYPE_CHECKING:
    from doll.config.join import JoinConfig

MAX_PACK_RECORDS: Final = 1_000
MAX_PACK_BYTES: Final = 4 * 1024 * 1024

Input = tuple[int, int]  # source and partition


class Read(NamedTuple):
    """Records of one partition, in their order: a list for each part of a record, all of the same length.

    `timestamps`: see `Extractor.read`. `headers`: empty if the join does not read them.
    """

    offsets: Sequence[int]
    values: Sequence[bytes | None]
    keys: Sequence[bytes | None]
    timestamps: Sequence[tuple[int, int]]
    headers: Sequence[Headers] = ()


class Router:
    """The records, and the progress, that have not been written to the log yet.

    Attributes:
        next_offsets: of each input, the offset after the last record that was read.
        refused: records that cannot be joined.
    """

    def __init__(self, config: JoinConfig, num_partitions: int, max_record_bytes: int) -> None:
        """`num_partitions`: of the join log."""
        sources = range(len(config.labels) + 1)
        extractors = [Extractor(config, source, max_record_bytes=max_record_bytes) for source in sources]
        self._extractors = {extractor.topic: extractor for extractor in extractors}
        self._max_ahead_ms = round(1000 * config.max_ahead_s)
        self._open_ms = round(1000 * (config.window_s + config.lateness_s))
        self.next_offsets: dict[Input, int] = {}
        self.refused: list[RefusedRecord] = []
        self._times_ms: dict[Input, int] = {}
        self._written: dict[Input, tuple[int, int]] = {}
        self._routed: list[list[Routed]] = [[] for _ in range(num_partitions)]

    def source_of(self, topic: str) -> int:
        return self._extractors[topic].source

    def begin(self, topic: str, partition: int, offset: int) -> None:
        """Begin to read a partition at an offset."""
        self.next_offsets[self.source_of(topic), partition] = offset

    def end(self, topic: str, partition: int) -> None:
        """Forget a partition that another joiner reads now."""
        key = self.source_of(topic), partition
        for known in (self.next_offsets, self._times_ms, self._written):
            known.pop(key, None)

    def add(self, topic: str, partition: int, read: Read, now_ms: int) -> None:
        """Route records of a partition in their order, or refuse them."""
        extractor = self._extractors[topic]
        source = extractor.source
        self.next_offsets[source, partition] = read.offsets[-1] + 1
        parts = None if read.headers else extractor.read_all(read.values, read.keys, read.timestamps)
        latest_ms = now_ms + self._max_ahead_ms
        if parts is None or max(parts[1]) > latest_ms:
            self._add_each(extractor, partition, read, now_ms)
            return
        keys, times_ms, contents = parts
        self._advance((source, partition), max(times_ms), now_ms)
        routed = map(Routed, repeat(source), repeat(partition), read.offsets, times_ms, keys, contents)
        logs = self._routed
        for at, record in zip(map(partition_of, keys, repeat(len(logs))), routed, strict=True):
            logs[at].append(record)

    def _add_each(self, extractor: Extractor, partition: int, read: Read, now_ms: int) -> None:
        source, latest_ms = extractor.source, now_ms + self._max_ahead_ms
        for offset, value, key, timestamp, headers in zip(
            read.offsets, read.values, read.keys, read.timestamps, read.headers or repeat(()), strict=False
        ):
            try:
                record_key, time_ms, content = extractor.read(value, key, timestamp, headers)
                if time_ms > latest_ms:
                    ahead_s = (time_ms - now_ms) / 1000
                    raise Bad(
                        "ahead", f"its event time is {ahead_s:.0f} s in the future: a wrong clock, or another unit"
                    )
            except Bad as bad:
                cut = (value or b"")[:MAX_PAYLOAD_BYTES]
                reason = printable(" ".join(str(bad).split()))
                named = (key or b"")[:MAX_PAYLOAD_BYTES]
                self.refused.append(RefusedRecord(source, partition, offset, -1, named, cut, bad.code, reason))
                continue
            self._advance((source, partition), time_ms, now_ms)
            self._routed[partition_of(record_key, len(self._routed))].append(
                Routed(source, partition, offset, time_ms, record_key, content)
            )

    def _advance(self, where: Input, time_ms: int, now_ms: int) -> None:
        """Note an event time. One in the future closes no window before its time."""
        self._times_ms[where] = max(self._times_ms.get(where, -1), min(time_ms, now_ms))

    def read_until(self, times_ms: Mapping[Input, int], now_ms: int, newest_ms: int) -> list[Input]:
        """Note that all records have been read that each of these partitions had at a time.

        The event time of a partition that was read to its end (its time is `now_ms`) is now. In others, records come
        all the time. Their event time follows the newest one of all partitions, `newest_ms`, by a window at most.
        Otherwise one producer with a wrong clock would keep all windows open. Return those that were behind it.
        """
        newest_ms = max(newest_ms, *self._times_ms.values(), -1)
        behind = []
        for where, time_ms in times_ms.items():
            if time_ms < now_ms:
                time_ms = min(time_ms, newest_ms) - self._open_ms
                if time_ms <= self._times_ms.get(where, -1):
                    continue
                behind.append(where)
            self._advance(where, time_ms, now_ms)
        return behind

    def take(self, now_ms: int) -> list[tuple[int, Pack]]:
        """Return the packs to write, with their partitions of the log, in order; none if nothing has changed."""
        marks = {
            key: (offset, self._times_ms[key]) for key, offset in self.next_offsets.items() if key in self._times_ms
        }
        progress = [Progress(*key, *mark) for key, mark in marks.items() if self._written.get(key) != mark]
        self._written.update(marks)
        packs = []
        for partition, records in enumerate(self._routed):
            if not records and not progress:
                continue
            parts = list(_parts(records)) or [[]]
            packs += [(partition, Pack(now_ms, part, [])) for part in parts[:-1]]
            packs.append((partition, Pack(now_ms, parts[-1], progress)))
            self._routed[partition] = []
        return packs


def _parts(records: list[Routed]) -> Iterator[list[Routed]]:
    """Divide records into packs that are not too long."""
    for begin in range(0, len(records), MAX_PACK_RECORDS):
        part = records[begin : begin + MAX_PACK_RECORDS]
        sizes_bytes = [len(record.value) for record in part]
        if sum(sizes_bytes) <= MAX_PACK_BYTES:
            yield part
            continue
        first, size_bytes = 0, 0
        for at, record_bytes in enumerate(sizes_bytes):
            if at > first and size_bytes + record_bytes > MAX_PACK_BYTES:
                yield part[first:at]
                first, size_bytes = at, 0
            size_bytes += record_bytes
        yield part[first:]
