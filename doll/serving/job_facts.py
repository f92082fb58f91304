"""Facts on a job's versions from its topics: when each was made, of how many samples, and if the job goes on. Pure.

It is told the time, in monotonic seconds, if it needs it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, NamedTuple

from doll.evaluation.stored_weights import Place
from doll.ledger.lineage import Lineage, UpdatesRecord
from doll.records.control import AnyRecord, Finished, ServerStatus, Update

_KEPT: Final = 1000  # versions: one that is served may be older than the newest by so many


class VersionOrigin(NamedTuple):
    """How a version was made: the Unix time of its update, and the usable samples that it has learned from."""

    time_s: float
    samples: int


class JobFacts:
    """Folds records of `updates` and `metrics`.

    Attributes:
        samples: usable samples in the newest version; -1: not known.
        is_finished: the job has ended, and no server has begun since.
    """

    def __init__(self, silent_after_s: float, now_s: float) -> None:
        """
        Args:
            silent_after_s: a parameter server that says nothing for so long is away.
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
                self._origins[Place(record.term, record.version)] = VersionOrigin(record.time_s, record.samples_total)
                if len(self._origins) > _KEPT:
                    self._origins.popitem(last=False)

    @property
    def term(self) -> int:
        """The newest one that is known; 0: none."""
        return self._lineage.newest_term

    def origin(self, place: Place) -> VersionOrigin | None:
        """How this version was made; None if its update was not seen."""
        return self._origins.get(place)

    def silence(self, now_s: float) -> str:
        """Why no new version may be expected; "" while the parameter server is there, or the job has ended."""
        silent_s = now_s - self._heard_s
        if self.is_finished or silent_s < self._silent_after_s:
            return ""
        return f"the parameter server has been silent for {silent_s:.0f} s"
