"""The parameter server that may serve a job: one that has the checkpoints of the run that its topics hold.

A new generation may begin if `updates` is empty, or if the caller knows that what is there belongs to earlier
runs (`--fresh`). Without these checks a server without the checkpoints would begin again at version 0, and a run would
take an earlier run's records for its own. Calls raise ServiceUnavailableError if Kafka does not answer.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from doll.errors import ConfigError, RecordError, SchemaVersionError
from doll.kafka import topics
from doll.kafka.range_reader import RangeReader
from doll.ledger.lineage import Lineage, UpdatesRecord
from doll.ledger.snapshot_counts import decode_counts, read_counts
from doll.records.control import decode

if TYPE_CHECKING:
    from doll.config import JobConfig
    from doll.services import Services
    from doll.storage.checkpoints import Checkpoint, CheckpointStore

AFTER_TERM_ENV: Final = "DOLL_AFTER_TERM"  # terms up to this one are of earlier runs; from `doll up` to its roles
ANY_TERM: Final = 1 << 62
RUN_ID_ENV: Final = "DOLL_RUN_ID"  # of this session of `doll up` or `doll resume`; to its parameter servers
_TAIL_RECORDS: Final = 1000  # a fenced server writes a few records at most, so the newest term is among the last


def new_run_id() -> str:
    """A run's random name: 16 hexadecimal digits."""
    return secrets.token_hex(8)


def read_lineage(config: JobConfig, services: Services, *, tail_only: bool = False) -> Lineage:
    """Read the lineage from the job's `updates`; it is empty if the topic does not exist. Raises ConfigError if another
    release of DOLL has written records of another schema version. `tail_only` reads the last records, which hold the
    newest term; origins and generation may then be unknown."""
    topic = config.topic("updates")
    if not topics.exists(config, services, topic):
        return Lineage()
    with RangeReader(config, services) as reader:
        low, high = reader.bounds(topic, 0)
        lo = max(low, high - _TAIL_RECORDS) if tail_only else low
        return fold_lineage(reader.read(topic, 0, lo, high), f"topic {topic} on Kafka at {services.kafka}", config.job)


def recorded_partitions(store: CheckpointStore) -> int | None:
    """How many partitions the job of these checkpoints reads; None if they do not say so. Raises CheckpointError if the
    store cannot be read."""
    checkpoint = store.load_newest(None)
    counts = None if checkpoint is None else decode_counts(checkpoint.state)
    return None if counts is None else len(counts.origins)


def fold_lineage(values: Iterable[tuple[int, bytes | None]], location: str, job: str) -> Lineage:
    """The lineage that records (offset, value) of `updates` at `location` tell, in the order of the log. Pure. Raises
    ConfigError if one has another schema version: skipping it would make a server begin again at version 0.

    Values that are no record are skipped: the audit reports them.
    """
    lineage = Lineage()
    for offset, value in values:
        try:
            record = decode(value)
        except SchemaVersionError as exc:
            raise ConfigError(
                f"{location} holds records of another release of DOLL (offset {offset}: {exc}). Choose one: go on "
                f"with the release that wrote them; take another name (--set job={job}-2); or delete the job's topics "
                "and checkpoints to start over"
            ) from exc
        except RecordError:
            continue
        if isinstance(record, UpdatesRecord):
            lineage.feed(record)
    return lineage


def admit(config: JobConfig, services: Services, store: CheckpointStore, location: object, after_term: int) -> Lineage:
    """Read the lineage if a parameter server may serve the job from `store` at `location`; asked before anything is
    claimed. Terms up to `after_term` are known to be of earlier runs. Raises CheckpointError if the store cannot be
    read, and ConfigError, which says what to do, if the topics hold a run whose checkpoints are not in the store, or
    records of another release."""
    # The topic first: a server that begins meanwhile saves its first checkpoint before it writes its first record.
    lineage = read_lineage(config, services, tail_only=bool(store.versions()))
    versions = store.versions()
    if not versions:
        refuse_earlier_run(config, services, lineage, after_term, location)
        return lineage
    if lineage.newest_term > versions[-1][0]:
        # Of a later run; or of a server of this one that saved nothing, or whose checkpoints a backup does not have.
        lineage = read_lineage(config, services)
        checkpoint = store.load_newest(None)
        if checkpoint is not None:
            refuse_later_run(config, services, lineage, read_counts(config, checkpoint.state).generation, location)
            _refuse_abandoned(config, services, lineage, checkpoint, location)
    return lineage


def _refuse_abandoned(
    config: JobConfig, services: Services, lineage: Lineage, checkpoint: Checkpoint, location: object
) -> None:
    """Return if each later server has begun from this checkpoint or a later one; raises ConfigError if one had an older
    copy of the store: both would go on with versions of the same numbers."""
    for term, version in lineage.resumed.items():
        if term > checkpoint.term and version < checkpoint.version:
            raise ConfigError(
                f"job {config.job} on Kafka at {services.kafka} has gone on from version {version} (term {term}), with "
                f"other checkpoints than those in {location}, which are at version {checkpoint.version}: a run goes on "
                "in one place. Choose one: go on there (doll resume RUN, or its checkpoints in checkpoint.folder); or "
                f"begin a job of its own with these weights (doll up --set training.init_from={location} --set "
                f"job={config.job}-2)"
            )


def refuse_earlier_run(
    config: JobConfig, services: Services, lineage: Lineage, after_term: int, location: object, resume: str = "RUN"
) -> None:
    """Return if a new generation may begin: there are no records, or only such of terms up to `after_term`. Raises
    ConfigError, which says what to do, if there are others, and no checkpoint in `location`; `resume` is the folder of
    that run, if it is known."""
    if lineage.newest_term <= after_term:
        return
    raise ConfigError(
        f"the topics of job {config.job} on Kafka at {services.kafka} hold an earlier run ({lineage}), and there is no "
        f"checkpoint of it in {location}. Choose one: go on with it, from its run folder (doll resume {resume}) or "
        "with its checkpoints in checkpoint.folder; start over on the same topics with --fresh (in containers FRESH=1; "
        f"from data.start: {config.data.start}); or take another name (--set job={config.job}-2)"
    )


def refuse_later_run(
    config: JobConfig, services: Services, lineage: Lineage, generation: int, location: object
) -> None:
    """Return if no other run has begun on these topics since the one whose checkpoints, of this generation, are in
    `location`; raises ConfigError if one has."""
    if lineage.generation <= generation:
        return
    raise ConfigError(
        f"a later run has begun on these topics: job {config.job} on Kafka at {services.kafka} is at "
        f"{lineage}, and the checkpoints in {location} are of the run before. Choose one: go on with the later run "
        "(doll resume RUN, or its checkpoints in checkpoint.folder); start over with --fresh and an empty "
        f"checkpoint.folder; or take another name (--set job={config.job}-2)"
    )
