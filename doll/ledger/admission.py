"""Which parameter server may serve a job: one that has the checkpoints of the run that its topics hold.

A new generation may begin where `updates` is empty, or where whoever starts it knows that what is there is of earlier
runs (`--fresh`). A server without the checkpoints would otherwise begin again at version 0 in silence, and a run would
take the records of the one before it for its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from doll.errors import ConfigError, RecordError
from doll.kafka import topics
from doll.kafka.range_reader import RangeReader
from doll.ledger.generations import Lineage
from doll.ledger.snapshot_counts import read_counts
from doll.records import Finished, TermStarted, Update, decode
from doll.services import Services

if TYPE_CHECKING:
    from doll.config import JobConfig
    from doll.storage.checkpoints import CheckpointStore

AFTER_TERM_ENV: Final = "DOLL_AFTER_TERM"  # terms up to this one are of earlier runs; from `doll up` to its roles
ANY_TERM: Final = 1 << 62
_TAIL_RECORDS: Final = 1000  # records: who was fenced writes a few more at most, so the newest term is among the last


def read(config: JobConfig, services: Services, *, tail_only: bool = False) -> Lineage:
    """What the job's `updates` says; nothing where the topic does not exist.

    Args:
        tail_only: read the last records only, which say the newest term; origins and generation may then be unknown.

    Raises:
        ServiceUnavailableError: Kafka does not answer.
    """
    topic = config.topic("updates")
    lineage = Lineage()
    if not topics.exists(config, services, topic):
        return lineage
    with RangeReader(config, services) as reader:
        low, high = reader.bounds(topic, 0)
        for _, value in reader.read(topic, 0, max(low, high - _TAIL_RECORDS) if tail_only else low, high):
            try:
                record = decode(value)
            except RecordError:
                continue  # the audit tells of it
            if isinstance(record, TermStarted | Update | Finished):
                lineage.feed(record)
    return lineage


def admit(config: JobConfig, services: Services, store: CheckpointStore, place: object, after_term: int) -> Lineage:
    """What `updates` says, if a parameter server may serve the job from `store`; asked before anything is claimed.

    Args:
        place: of the store, for messages.
        after_term: terms up to this one are known to be of earlier runs.

    Raises:
        ConfigError: the topics hold a run whose checkpoints are not in the store; the message says what to do.
        ServiceUnavailableError: Kafka does not answer.
        CheckpointError: the store does not.
    """
    versions = store.versions()
    if not versions:
        seen = read(config, services)
        refuse_earlier_run(config, services, seen, after_term, place)
        return seen
    seen = read(config, services, tail_only=True)
    if seen.newest_term > versions[-1][0]:
        # Of a later run; or of a server of this one that saved nothing, or whose checkpoints a backup does not have.
        seen = read(config, services)
        checkpoint = store.load_newest(None)
        if checkpoint is not None:
            refuse_later_run(config, services, seen, read_counts(config, checkpoint).generation, place)
    return seen


def refuse_earlier_run(
    config: JobConfig, services: Services, lineage: Lineage, after_term: int, place: object, resume: str = "RUN"
) -> None:
    """Return if a new generation may begin: there are no records, or only such of terms up to `after_term`.

    Args:
        place: where no checkpoint is.
        resume: the folder of that run, where it is known.

    Raises:
        ConfigError: there are others; it says the three ways to go on.
    """
    if lineage.newest_term <= after_term:
        return
    raise ConfigError(
        f"the topics of job {config.job} on Kafka at {services.kafka} hold an earlier run ({lineage}), and there is no "
        f"checkpoint of it in {place}. Choose one: go on with it, from its run folder (doll resume {resume}) or with "
        "its checkpoints in checkpoint.folder; begin anew on the same topics with --fresh (from data.start: "
        f"{config.data.start}); or take another name (--set job={config.job}-2)"
    )


def refuse_later_run(config: JobConfig, services: Services, lineage: Lineage, generation: int, place: object) -> None:
    """Return if no other run has begun on these topics since the one whose checkpoints are in `place`.

    Args:
        generation: of those checkpoints.

    Raises:
        ConfigError: one has.
    """
    if lineage.generation <= generation:
        return
    raise ConfigError(
        f"a later run has begun on these topics: job {config.job} on Kafka at {services.kafka} is at "
        f"{lineage}, and the checkpoints in {place} are of the run before. Choose one: go on with the later run "
        "(doll resume RUN, or its checkpoints in checkpoint.folder); begin anew with --fresh and an empty "
        f"checkpoint.folder; or take another name (--set job={config.job}-2)"
    )
