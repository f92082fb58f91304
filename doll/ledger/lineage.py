"""The lineage of a job's model: which records in its topics belong to the current run, and which to earlier runs.

The topics of a job are kept after its runs have ended. A *generation* is one model with its checkpoints, from its first
to its last version, over any number of parameter servers. The number of a generation is the `term` of its first server;
the first generation on the topics has number 0. A server claims a term above all terms in `updates`. So later
generations have higher numbers, and servers of earlier generations, which may still write, have lower terms. Each
TermStarted record names its generation.

Each reader of `updates` builds a `Lineage` from the records: admission, audit, views, drills and the provisioner.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias, TypeVar

from doll.records.control import DeadLetter, Finished, TermStarted, Update

UpdatesRecord: TypeAlias = TermStarted | Update | Finished
T = TypeVar("T", bound=UpdatesRecord)


class LineageChange(Enum):
    """The change that a record of `updates` makes to the lineage."""

    FENCED = "nothing: its server had been replaced"
    NONE = "no server or run begins with it"
    TERM = "a server has begun, and resumes the run"
    GENERATION = "a server has begun, and another run with it"


@dataclass(slots=True)
class Lineage:
    """The lineage in `updates`, built from its records in log order. Pure."""

    newest_term: int = 0  # the highest `term` in `updates`; 0: no record
    generation: int = 0  # the newest generation
    # For each partition, the offset at which the newest generation began; empty if no TermStarted record was read.
    origins: tuple[int, ...] = ()
    version: int = 0  # its last version
    finished: str = ""  # the reason why it ended; "": it has not ended
    error: str = ""  # the error that ended it; "": none
    resumed: dict[int, int] = field(default_factory=dict, compare=False)  # by term: the first version of its server

    def is_current(self, term: int) -> bool:
        """Return whether records of this term belong to the newest generation."""
        return term >= self.generation

    def feed(self, record: UpdatesRecord) -> LineageChange:
        """Add the next record, and return the change that it makes."""
        if record.term < self.newest_term:
            return LineageChange.FENCED
        self.newest_term = record.term
        match record:
            case TermStarted():
                self.version, self.finished, self.error = record.resumed_version, "", ""
                self.resumed[record.term] = record.resumed_version
                is_new = record.generation > self.generation
                if is_new or not record.grid:
                    self.origins = record.origins
                else:  # the grid's origins are the ends of the earlier grid; added partitions begin at 0
                    self.origins += (0,) * (len(record.origins) - len(self.origins))
                self.generation = max(self.generation, record.generation)
                return LineageChange.GENERATION if is_new else LineageChange.TERM
            case Update():
                self.version = record.version
            case Finished():
                self.finished, self.error = record.reason, record.error
        return LineageChange.NONE

    def __str__(self) -> str:
        ended = f"finished: {self.finished}" if self.finished else "not finished"
        return f"term {self.newest_term}, version {self.version}, {ended}"


class GenerationFilter:
    """A filter that selects the records of one generation. Pure."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        # The generation after it, as far as the records were read. None: it is the newest.
        self.next_generation: int | None = None

    def records(self, records: Iterable[T]) -> Iterator[T]:
        """Yield the records of `updates` of this generation, in log order, until the next generation begins."""
        lineage = Lineage()
        for record in records:
            lineage.feed(record)
            if lineage.generation > self.generation:
                self.next_generation = lineage.generation
                return
            if lineage.generation == self.generation and lineage.is_current(record.term):
                yield record

    def letters(self, letters: Iterable[DeadLetter]) -> Iterator[DeadLetter]:
        """Yield the dead letters from workers of this generation. Letters may come in any order. Call it after
        `records` was read to its end."""
        for letter in letters:
            if letter.term >= self.generation and (self.next_generation is None or letter.term < self.next_generation):
                yield letter
