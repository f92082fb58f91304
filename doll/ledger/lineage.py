"""The lineage of a job's model: which records of its topics are of the current run, and which of an earlier one.

The topics of a job on a given Kafka outlive its runs. A *generation* is one model with its checkpoints, from its first
version to its last, over any number of parameter servers. Its number is the `term` of its first server, 0 for the
first one on the topics: terms are claimed above all that `updates` holds, so a later generation has the higher number,
and what servers of earlier ones may still write carries lower terms. Each TermStarted record names its generation.

Whoever follows `updates` folds it with `Lineage`: admission, audit, views, drills and the provisioner.
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
    """The change that a record of `updates` makes."""

    FENCED = "nothing: its server had been replaced"
    NONE = "no server or run begins with it"
    TERM = "a server has begun, and resumes the run"
    GENERATION = "a server has begun, and another run with it"


@dataclass(slots=True)
class Lineage:
    """The lineage in `updates`, folded in the order of the log. Pure."""

    newest_term: int = 0  # the highest `term` in it; 0 if there is no record
    generation: int = 0  # the newest one
    # At which offsets that generation began, per partition; empty if no TermStarted record was seen.
    origins: tuple[int, ...] = ()
    version: int = 0  # its last one
    finished: str = ""  # why it ended; "" if it has not
    error: str = ""  # why it could not go on, if that ended it
    resumed: dict[int, int] = field(default_factory=dict, compare=False)  # by term: the version that its server had

    def is_current(self, term: int) -> bool:
        """Whether records of this term belong to the newest generation."""
        return term >= self.generation

    def feed(self, record: UpdatesRecord) -> LineageChange:
        """Add the next record."""
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
                else:  # the grid's own are where an earlier one ended; partitions that were added begin at 0
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
    """Selects the records of one generation. Pure."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        # The generation after it, as far as the records have been read; None: it is the newest.
        self.next_generation: int | None = None

    def records(self, records: Iterable[T]) -> Iterator[T]:
        """The records of `updates` that are of this generation, in log order; ends where the next one begins."""
        lineage = Lineage()
        for record in records:
            lineage.feed(record)
            if lineage.generation > self.generation:
                self.next_generation = lineage.generation
                return
            if lineage.generation == self.generation and lineage.is_current(record.term):
                yield record

    def letters(self, letters: Iterable[DeadLetter]) -> Iterator[DeadLetter]:
        """The letters of its workers, in any order; call it after `records` was read to its end."""
        for letter in letters:
            if letter.term >= self.generation and (self.next_generation is None or letter.term < self.next_generation):
                yield letter
