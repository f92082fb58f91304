"""Facts about a job's versions from its topics: time and number of samples of each version, and whether the job runs.

Pure: methods that need the time get it as an argument, in monotonic seconds.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, NamedTuple

from doll.evaluation.stored_weights import Place
from doll.ledger.lineage import Lineage, UpdatesRecord
from doll.records.control import AnyRecord, Finished, ServerStatus, Update
from doll.records.event_times import EventSpan

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
