"""Event time up to which the joined topics have been read, and the clock that it is compared with. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from doll.records.join_log import FEATURES, Progress


class BrokerClock:
    """This machine's clock, as the broker's clock would say it: joiners with wrong clocks close the same windows.

    Attributes:
        correction_ms: what is added to this machine's clock. It is 0 if both may be equal.
    """

    def __init__(self) -> None:
        self.correction_ms = 0

    def note(self, sent_ms: int, written_ms: int, confirmed_ms: int) -> None:
        """Note when the broker has written a record, and when, by this clock, it was sent and confirmed. The corrected
        time is not later than the broker's, and earlier by the time from then until the confirmation at most."""
        self.correction_ms = 0 if sent_ms <= written_ms <= confirmed_ms else written_ms - confirmed_ms


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

    def newest_ms(self) -> int:
        """Return the newest watermark of a partition; -1: there is none."""
        return max(self.times_ms.values(), default=-1)

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
