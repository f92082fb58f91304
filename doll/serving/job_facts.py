"""Facts about a job's versions from its topics: their times and numbers of samples, how long events take until they are
served, and whether the job runs.

Pure: methods that need the time get it as an argument, in monotonic seconds.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Final, NamedTuple

from doll.config.freshness import FreshnessConfig
from doll.evaluation.stored_weights import Place
from doll.ledger.lineage import Lineage, UpdatesRecord
from doll.records.control import AnyRecord, Finished, ServerStatus, TermStarted, Update
from doll.records.event_times import NO_LATENCIES, EventSpan, EventTimes

_KEPT_BATCHES: Final = 100_000  # batches that no served version has
_KEPT: Final = 1000  # versions: a served one may be older than the newest by this number


class VersionOrigin(NamedTuple):
    """The origin of a version: the Unix time of its update, and the samples that it has learned, with event times."""

    time_s: float
    samples: int
    events: EventSpan


class JobFacts:
    """Collects facts from records of `updates` and `metrics`.

    Attributes:
        samples: number of usable samples in the newest version; -1: not known.
        is_finished: whether the job has ended and no server has started since.
    """

    def __init__(self, silent_after_s: float, now_s: float) -> None:
        """Args:
        silent_after_s: seconds without a record after which the parameter server counts as unavailable.
        """
        self.samples = -1
        self.is_finished = False
        self._lineage = Lineage()
        self._silent_after_s = silent_after_s
        self._heard_s = now_s
        self._origins: OrderedDict[Place, VersionOrigin] = OrderedDict()

    def feed(self, record: AnyRecord, now_s: float) -> None:
        """Process the next record."""
        if isinstance(record, ServerStatus):
            if record.term >= self._lineage.newest_term:
                self._heard_s = now_s
                self.samples = record.samples_total
        elif isinstance(record, UpdatesRecord):
            if record.term < self._lineage.newest_term:
                return
            self._lineage.feed(record)
            self._heard_s = now_s
            self.is_finished = isinstance(record, Finished)
            if isinstance(record, Update):
                self.samples = record.samples_total
                origin = VersionOrigin(record.time_s, record.samples_total, record.events)
                self._origins[Place(record.term, record.version)] = origin
                if len(self._origins) > _KEPT:
                    self._origins.popitem(last=False)

    @property
    def term(self) -> int:
        """The newest known term; 0: none is known."""
        return self._lineage.newest_term

    def origin(self, place: Place) -> VersionOrigin | None:
        """Return the origin of a version; None if its update was not read."""
        return self._origins.get(place)

    def silence(self, now_s: float) -> str:
        """Return the reason why no new version is expected; "" if the server is active or the job has ended."""
        silent_s = now_s - self._heard_s
        if self.is_finished or silent_s < self._silent_after_s:
            return ""
        return f"the parameter server has been silent for {silent_s:.0f} s"


class ServedEvents:
    """Counts the events of each update when a version with this update is served, whichever is known first. Those of
    the first version do not count, because they may have been served before."""

    def __init__(self, config: FreshnessConfig) -> None:
        self.served = NO_LATENCIES
        self._limits_s = config.event_to_served_s, config.max_ahead_s
        self._swaps: deque[tuple[Place, float]] = deque(maxlen=1_000)
        self._waiting: deque[tuple[Place, EventTimes]] = deque()
        self._newest = Place(0, 0)

    def feed(self, record: UpdatesRecord) -> None:
        """Process a record of `updates`."""
        place = Place(record.term, record.version if isinstance(record, Update) else 0)
        if isinstance(record, TermStarted) and place > self._newest:
            self._newest = Place(record.term, record.resumed_version)
            self._waiting = deque(item for item in self._waiting if item[0].version <= record.kept_version)
        if not isinstance(record, Update) or place <= self._newest:
            return
        self._newest = place
        at_s = next((at_s for swapped, at_s in self._swaps if swapped >= place), None)
        for times in (member.known_times for member in record.members):
            if at_s is not None:
                self._count(times, at_s)
            else:
                self._waiting.append((place, times))
        while len(self._waiting) > _KEPT_BATCHES:  # nothing newer is served: these are late, however they end
            times = self._waiting.popleft()[1]
            self._count(EventTimes(bad=times.count + times.bad), 0.0)

    def swapped(self, place: Place, at_s: float) -> None:
        """Note that this version is served from `at_s` on."""
        is_first = not self._swaps
        self._swaps.append((place, at_s))
        while self._waiting and self._waiting[0][0] <= place:
            times = self._waiting.popleft()[1]
            if not is_first:
                self._count(times, at_s)
        self._newest = max(self._newest, place) if is_first else self._newest

    def _count(self, times: EventTimes, at_s: float) -> None:
        self.served = self.served.with_batch(times, at_s, *self._limits_s)
