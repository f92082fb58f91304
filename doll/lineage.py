"""Generations: which records of a job's topics are of the run at hand, and which are of an earlier one.

The topics of a job on a given Kafka outlive its runs. A *generation* is one model with its checkpoints, from its first
version to its last, over any number of parameter servers. Its name is the `ps_epoch` of its first server, 0 for the
first one on the topics: epochs are claimed above all that `updates` holds, so a later generation has the higher name,
and what servers of earlier ones may still write carries lower epochs. Each Epoch record names its generation.

A parameter server may begin a generation where `updates` is empty, or where it was told that what is there is of
earlier runs (`--fresh`). Otherwise it needs a checkpoint, and one of the newest generation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

from doll import topics
from doll.errors import ConfigError, RecordError
from doll.records import DeadLetter, Epoch, Finished, Update, decode
from doll.services import Services
from doll.topic_reader import TopicReader

if TYPE_CHECKING:
    from doll.config import JobConfig

T = TypeVar("T", bound=Epoch | Update | Finished)

ABOVE_ENV: Final = "DOLL_FRESH_ABOVE"  # epochs up to this one are of earlier runs; from `doll up` to its roles
ANY_EPOCH: Final = 1 << 62
_TAIL: Final = 1000  # records: who was fenced writes a few more at most, so the newest epoch is among the last


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


def read(config: JobConfig, services: Services, *, only_end: bool = False) -> Lineage:
    """What the job's `updates` says; nothing where the topic does not exist.

    Args:
        only_end: read the last records only, which say the newest epoch; origins and generation may then be unknown.

    Raises:
        ServiceUnavailableError: Kafka does not answer.
    """
    topic = config.topic("updates")
    lineage = Lineage()
    if not topics.exists(config, services, topic):
        return lineage
    with TopicReader(config, services) as reader:
        low, high = reader.bounds(topic, 0)
        for _, value in reader.read(topic, 0, max(low, high - _TAIL) if only_end else low, high):
            try:
                record = decode(value)
            except RecordError:
                continue  # the audit tells of it
            if isinstance(record, Epoch | Update | Finished):
                lineage.feed(record)
    return lineage


def refuse_earlier_run(config: JobConfig, services: Services, lineage: Lineage, above: int, place: object) -> None:
    """Return if a new generation may begin: there are no records, or only such of epochs up to `above`.

    Args:
        place: where no checkpoint is: a checkpoint store, or the name of a folder to resume.

    Raises:
        ConfigError: there are others; it says the three ways to go on.
    """
    if lineage.newest_epoch <= above:
        return
    raise ConfigError(
        f"the topics of job {config.job} on Kafka at {services.kafka} hold an earlier run ({told(lineage)}), and there "
        f"is no checkpoint of it in {place}: expected a run of its own. Choose one: go on with it, from its run folder "
        "(doll resume RUN) or with its checkpoints in checkpoint.folder; begin anew on the same topics with --fresh "
        f"(from data.start: {config.data.start}); or take another name (--set job={config.job}-2)"
    )


def refuse_later_run(config: JobConfig, services: Services, lineage: Lineage, claimed: int, place: object) -> None:
    """Return if no other run has begun on these topics since the checkpoints in `place`.

    Args:
        lineage: of the end of `updates`.
        claimed: the highest epoch that was ever claimed in `place`: what is above was claimed somewhere else.

    Raises:
        ConfigError: one has.
    """
    if lineage.newest_epoch <= claimed:
        return
    raise ConfigError(
        f"a later run has begun on these topics: job {config.job} on Kafka at {services.kafka} is at epoch "
        f"{lineage.newest_epoch}, and the checkpoints in {place} end at epoch {claimed}. Go on with that run (doll "
        "resume RUN, or its checkpoints in checkpoint.folder), begin anew without these checkpoints (--fresh), or take "
        f"another name (--set job={config.job}-2)"
    )


def told(lineage: Lineage) -> str:
    """A lineage in words."""
    ended = f"finished: {lineage.finished}" if lineage.finished else "not finished"
    return f"epoch {lineage.newest_epoch}, version {lineage.version}, {ended}"
