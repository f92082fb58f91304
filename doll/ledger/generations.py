"""Generations: which records of a job's topics are of the run at hand, and which are of an earlier one.

The topics of a job on a given Kafka outlive its runs. A *generation* is one model with its checkpoints, from its first
version to its last, over any number of parameter servers. Its name is the `ps_epoch` of its first server, 0 for the
first one on the topics: epochs are claimed above all that `updates` holds, so a later generation has the higher name,
and what servers of earlier ones may still write carries lower epochs. Each Epoch record names its generation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from doll.records import DeadLetter, Epoch, Finished, Update

T = TypeVar("T", bound=Epoch | Update | Finished)


@dataclass(slots=True)
class Lineage:
    """What `updates` says, folded in the order of the log. Pure.

    Attributes:
        newest_epoch: the highest `ps_epoch` in it; 0 where there is no record.
        generation: the newest one.
        origins: of that generation, per partition; empty where no Epoch record was seen.
        version: its last one.
        finished: why it ended; "" where it has not.
    """

    newest_epoch: int = 0
    generation: int = 0
    origins: tuple[int, ...] = ()
    version: int = 0
    finished: str = ""

    def feed(self, record: Epoch | Update | Finished) -> None:
        """Take in the next record."""
        if record.ps_epoch < self.newest_epoch:
            return  # of a server that was fenced
        self.newest_epoch = record.ps_epoch
        match record:
            case Epoch():
                self.generation = max(self.generation, record.generation)
                self.origins, self.version, self.finished = record.origins, record.resumed_version, ""
            case Update():
                self.version = record.version
            case Finished():
                self.finished = record.reason

    def __str__(self) -> str:
        ended = f"finished: {self.finished}" if self.finished else "not finished"
        return f"epoch {self.newest_epoch}, version {self.version}, {ended}"


class OfGeneration:
    """Passes on what is of one generation. Pure.

    Attributes:
        following: the name of the generation after it, as far as the records have been read; None: it is the newest.
    """

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.following: int | None = None

    def records(self, records: Iterable[T]) -> Iterator[T]:
        """Those records of `updates` that are of it, in the order of the log; ends where the next generation begins."""
        current = 0
        for record in records:
            if isinstance(record, Epoch):
                current = max(current, record.generation)
            if current > self.generation:
                self.following = current
                return
            if current == self.generation and record.ps_epoch >= self.generation:
                yield record

    def letters(self, letters: Iterable[DeadLetter]) -> Iterator[DeadLetter]:
        """The letters of its workers; ask after `records` has been read, in any order."""
        for letter in letters:
            if letter.ps_epoch >= self.generation and (self.following is None or letter.ps_epoch < self.following):
                yield letter


def newest(records: Iterable[Epoch | Update | Finished]) -> int:
    """The newest generation among records of `updates`. Pure."""
    return max((record.generation for record in records if isinstance(record, Epoch)), default=0)
