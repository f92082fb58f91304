"""Event time up to which the joined topics have been read. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from doll.records.join_log import FEATURES, Progress


class Watermarks:
    """The watermarks of all partitions of the joined topics.

    Attributes:
        offsets, times_ms: by source and partition.
    """

    def __init__(self, partitions: Mapping[int, int]) -> None:
        """`partitions`: the number of partitions of each source."""
        self._partitions = partitions
        self.offsets: dict[tuple[int, int], int] = {}
        self.times_ms: dict[tuple[int, int], int] = {}

    def advance(self, progress: Progress) -> None:
        """Note progress. A watermark never falls: a joiner that takes over may know less than the one before."""
        key = progress.source, progress.partition
        if progress.offset >= self.offsets.get(key, 0):
            self.offsets[key] = progress.offset
        self.times_ms[key] = max(self.times_ms.get(key, progress.time_ms), progress.time_ms)

    def features_ms(self) -> int | None:
        """Return the event time up to which all features have been read; None: nothing is known of a partition."""
        return self._least([FEATURES])

    def labels_ms(self) -> int | None:
        """Return the event time up to which all labels have been read; None: nothing is known of a partition."""
        return self._least([source for source in self._partitions if source != FEATURES])

    def _least(self, sources: list[int]) -> int | None:
        known = [self.times_ms.get((source, at)) for source in sources for at in range(self._partitions[source])]
        times_ms = [time_ms for time_ms in known if time_ms is not None]
        return min(times_ms) if times_ms and len(times_ms) == len(known) else None

    def state(self) -> list[list[int]]:
        """Return the state for `restore`."""
        return [[*key, self.offsets.get(key, 0), time_ms] for key, time_ms in sorted(self.times_ms.items())]

    def restore(self, state: list[list[int]]) -> None:
        for source, partition, offset, time_ms in state:
            self.advance(Progress(source, partition, offset, time_ms))
