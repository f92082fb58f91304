"""The rule that a server may serve a job only if its store has the checkpoints of the run in the job's topics.

A new generation may begin if `updates` is empty, or if the caller knows that its records belong to earlier runs
(`--fresh`). Without these checks, a server that lacks the checkpoints would begin again at version 0, and a run would
use records of an earlier run as its own. Calls raise ServiceUnavailableError if Kafka does not answer.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Final

from doll.config import JobConfig
from doll.errors import ConfigError, RecordError, SchemaVersionError
from doll.kafka import topics
from doll.kafka.range_reader import RangeReader
from doll.ledger.lineage import Lineage, UpdatesRecord
from doll.ledger.snapshot_counts import decode_counts, read_counts
from doll.records.control import decode
from doll.services import Services
from doll.storage.checkpoints import Checkpoint, CheckpointStore

AFTER_TERM_ENV: Final = "DOLL_AFTER_TERM"  # terms up to it belong to earlier runs; set by `doll up` for its roles
ENDED_TERM_ENV: Final = "DOLL_ENDED_TERM"  # terms up to it have ended before this run began; set by `doll up` also
ANY_TERM: Final = 1 << 62
RUN_ID_ENV: Final = "DOLL_RUN_ID"  # run id that `doll up` or `doll resume` passes to its parameter servers
_TAIL_RECORDS: Final = 1000  # a fenced server writes only a few records, so the last ones contain the newest term


def new_run_id() -> str:
    """Return a random name for a run: 16 hexadecimal digits."""
    return secrets.token_hex(8)


def read_lineage(config: JobConfig, services: Services, *, tail_only: bool = False) -> Lineage:
    """Read the lineage from the job's topic `updates`. The lineage is empty if the topic does not exist. Raise
    ConfigError if the topic holds records of another schema version, from another release of DOLL. `tail_only`: read
    only the last records. They contain the newest term, but origins and generation may be unknown."""
    topic = config.topic("updates")
    if not topics.exists(config, services, topic):
        return Lineage()
    with RangeReader(config, services) as reader:
        low, high = reader.bounds(topic, 0)
        lo = max(low, high - _TAIL_RECORDS) if tail_only else low
        return fold_lineage(reader.read(topic, 0, lo, high), f"topic {topic} on Kafka at {services.kafka}", config.job)


def recorded_partitions(store: CheckpointStore) -> int | None:
    """Return the number of partitions that the job of these checkpoints reads; None if no checkpoint contains it. Raise
    CheckpointError if the store cannot be read."""
    checkpoint = store.load_newest_state()
    counts = None if checkpoint is None else decode_counts(checkpoint.state)
    return None if counts is None else len(counts.origins)


def fold_lineage(values: Iterable[tuple[int, bytes | None]], location: str, job: str) -> Lineage:
    """Build the lineage from records (offset, value) of `updates`, in log order. Pure. Raise ConfigError, which names
    `location`, if a record has another schema version. A server that skipped it could begin again at version 0.

    Values that are not a control record are skipped; the audit reports them.
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
    """Return the lineage if a parameter server may serve the job from `store`, which is at `location`. Call this
    function before the server claims a term. Terms up to `after_term` belong to earlier runs. Raise CheckpointError if
    the store cannot be read. Raise ConfigError, which says what to do, in two cases: the topics hold a run whose
    checkpoints are not in the store, or the topics hold records of another release."""
    # Read the topic first: a server that starts now saves its first checkpoint before it writes its first record.
    lineage = read_lineage(config, services, tail_only=bool(store.versions()))
    versions = store.versions()
    if not versions:
        refuse_earlier_run(config, services, lineage, after_term, location)
        return lineage
    if lineage.newest_term > versions[-1][0]:
        # The newest term belongs to a later run, or to a server of this run whose checkpoints are not in the store.
        lineage = read_lineage(config, services)
        checkpoint = store.load_newest_state()
        if checkpoint is not None:
            refuse_later_run(config, services, lineage, read_counts(config, checkpoint.state).generation, location)
            _refuse_abandoned(config, services, lineage, checkpoint, location)
    return lineage


def _refuse_abandoned(
    config: JobConfig, services: Services, lineage: Lineage, checkpoint: Checkpoint, location: object
) -> None:
    """Raise ConfigError if a later server has begun from an older version than this checkpoint. That server has another
    copy of the store, so both copies would continue with the same version numbers."""
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
    """Raise ConfigError, which says what to do, if the topics hold records of terms above `after_term`, so that no new
    generation may begin. `location`: the store, which has no checkpoint of that run. `resume`: the folder of that run,
    if it is known."""
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
    """Raise ConfigError if another run has begun on these topics after the run whose checkpoints (of generation
    `generation`) are in `location`."""
    if lineage.generation <= generation:
        return
    raise ConfigError(
        f"a later run has begun on these topics: job {config.job} on Kafka at {services.kafka} is at "
        f"{lineage}, and the checkpoints in {location} are of the run before. Choose one: go on with the later run "
        "(doll resume RUN, or its checkpoints in checkpoint.folder); start over with --fresh and an empty "
        f"checkpoint.folder; or take another name (--set job={config.job}-2)"
    )
