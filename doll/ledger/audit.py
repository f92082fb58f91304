"""The audit of a running or ended job. Every record must be applied or dead-lettered once, held out, lost or pending.

The audit reads the records of the job's processes in Kafka and in the checkpoint store; `doll.ledger.balance` counts
them. It reads the checkpoint first, then the update records, the dead letters and the partition ends. An update is
recorded before the checkpoint that contains this update is saved. A dead letter is recorded before the update that
names this dead letter. So each later source contains everything that the earlier sources refer to. A server that saves
a checkpoint during the audit can still make a correct history look wrong, for instance if it begins again or ends. Then
the audit reads everything again. If the job holds out records of its stream, the audit also reads the samples, and
decides for each of them again whether it is held out.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Final

from msgspec import structs

from doll import telemetry
from doll.config import JobConfig
from doll.kafka import topics
from doll.kafka.range_reader import RangeReader
from doll.kafka.samples_topic import deleted_before, replaced_topic
from doll.ledger.balance import Ledger, LedgerReport, Range, named
from doll.ledger.lineage import GenerationFilter, Lineage, UpdatesRecord
from doll.ledger.snapshot_counts import read_counts
from doll.ledger.valid_updates import DurableModel, ValidUpdates
from doll.records.control import DeadLetter, Finished, TermStarted, Update
from doll.services import Services
from doll.storage.checkpoints import Checkpoint, CheckpointStore
from doll.task.holdout import Split

log = telemetry.get_logger(__name__)

_ATTEMPTS: Final = 3
_HOLDOUT_RECORDS: Final = 1000  # records whose keys are hashed at once
_MAX_GAP_RECORDS: Final = 200  # gaps closer than this are read in one pass, as a seek costs as much
_LONG_RECORDS: Final = 5000  # so many records are read faster by a consumer that prefetches, despite the seek to them


def audit(config: JobConfig, services: Services, store: CheckpointStore) -> LedgerReport:
    """Balance the ledger of a job against its durable model. The audit only reads, and commits no offset. Raise
    ServiceUnavailableError if Kafka does not answer or does not have the job's topics. Raise ConfigError if the samples
    topic has fewer partitions than the job had at its start. Raise CheckpointError if the newest checkpoint belongs to
    another job, is unreadable, or does not fit the job file."""
    topics.check(config, services)
    for rounds in range(1, _ATTEMPTS + 1):
        checkpoint = store.load_newest_state()
        report = _audit_once(config, services, checkpoint, store.location)
        newest = store.versions()[-1:]
        unchanged = newest == ([] if checkpoint is None else [(checkpoint.term, checkpoint.version)])
        if report.ok or unchanged:
            break
        log.info("audit_retried", round=rounds, reason="a checkpoint was saved while the topics were read")
    return report


def _audit_once(config: JobConfig, services: Services, checkpoint: Checkpoint | None, location: str) -> LedgerReport:
    dead, samples = config.topic("dead"), config.topic("samples")
    with RangeReader(config, services) as reader:
        ledger, generation = build_ledger(config, reader, checkpoint, location)
        for letter in generation.letters(reader.records(dead, (DeadLetter,))):
            ledger.add_dead_letter(letter)
        bounds = reader.bounds_of_partitions(samples, range(ledger.num_partitions))
        lows, ends = [low for low, _ in bounds.values()], [high for _, high in bounds.values()]
        loss_allowed = config.data.on_data_loss == "skip"
        is_whole = bool(deleted_before(config, generation.generation, ledger.origins))
        report_with = partial(ledger.report, ends, lows=lows, loss_allowed=loss_allowed, is_whole=is_whole)
        report = report_with()
        # Gaps whose records retention has deleted cannot be checked, so the worker's report counts.
        remaining = [gap._replace(lo=max(gap.lo, lows[gap.partition])) for gap in report.gap_ranges]
        present = _present_records(reader, samples, [gap for gap in remaining if gap.lo < gap.hi])
        if present:
            report = report_with(present=present)
        problems = [*report.problems]
        if (split := Split.of_job(config)) is not None:
            problems += _holdout_problems(split, reader, samples, report, ledger, lows)
        problems += [*reader.problems, *_other_topic(config, services, checkpoint)]
        return dataclasses.replace(report, problems=tuple(problems))


def _other_topic(config: JobConfig, services: Services, checkpoint: Checkpoint | None) -> list[str]:
    """Return the problem that the samples topic was deleted and created again after learning began, if this is so."""
    expected = "" if checkpoint is None else read_counts(config, checkpoint.state).samples_id
    actual_id = topics.topic_id(config, services, "samples") if expected else ""
    problem = replaced_topic(config.topic("samples"), expected, actual_id)
    return [problem] if problem else []


def durable_updates(config: JobConfig, reader: RangeReader, checkpoint: Checkpoint) -> ValidUpdates:
    """Return the updates that `checkpoint` contains, in their order, to be iterated over once. Raises the errors of
    `build_ledger`."""
    records = _GenerationUpdates(config, reader, checkpoint)
    return ValidUpdates(records, _durable(config, reader, checkpoint, records, ""))


def build_ledger(
    config: JobConfig, reader: RangeReader, checkpoint: Checkpoint | None, location: str = "the checkpoint store"
) -> tuple[Ledger, GenerationFilter]:
    """Return the job's ledger, and the filter for its dead letters. The ledger has the updates that `checkpoint`
    contains, and no dead letters yet. Raise ServiceUnavailableError if Kafka does not send the updates, and
    CheckpointError if the checkpoint does not fit the job file."""
    records = _GenerationUpdates(config, reader, checkpoint)
    return Ledger(_durable(config, reader, checkpoint, records, location), records), records.generation


class _GenerationUpdates:
    """The records of one generation in `updates` that existed when this object was created. The generation is that of
    the checkpoint. If there is no checkpoint, it is the newest generation. The records can be iterated over several
    times, and are not kept in memory.
    """

    def __init__(self, config: JobConfig, reader: RangeReader, checkpoint: Checkpoint | None) -> None:
        self._name = config.topic("updates")
        self._reader = reader
        self._bounds = reader.bounds(self._name, 0)
        self.generation = GenerationFilter(
            self._newest_generation() if checkpoint is None else read_counts(config, checkpoint.state).generation
        )

    def _newest_generation(self) -> int:
        lineage = Lineage()
        for record in self._all():
            lineage.feed(record)
        return lineage.generation

    def _all(self) -> Iterator[UpdatesRecord]:
        self._reader.problems.clear()  # each pass collects them again
        return self._reader.records(self._name, (TermStarted, Update, Finished), self._bounds)

    def __iter__(self) -> Iterator[UpdatesRecord]:
        return self.generation.records(self._all())


def _durable(
    config: JobConfig, reader: RangeReader, checkpoint: Checkpoint | None, records: _GenerationUpdates, location: str
) -> DurableModel:
    """Return the model in the checkpoint. Without a checkpoint, return a model that has learned nothing since the
    origins that the first server recorded.

    Partitions that were added later are not learned yet: the next checkpoint of a server will contain them.
    """
    samples = config.topic("samples")
    if checkpoint is not None:
        counts = structs.asdict(read_counts(config, checkpoint.state)) | {"version": checkpoint.version}
        durable = DurableModel(**counts, term=checkpoint.term, location=location, chain=checkpoint.chain)
    else:
        first = next((record for record in records if isinstance(record, TermStarted)), None)
        if first is None:
            bounds = reader.bounds_of_partitions(samples, range(config.data.num_partitions))
            origins = tuple(low for low, _ in bounds.values())
        else:
            origins = first.origins
        durable = DurableModel(
            term=0, version=0, applied=(0,) * len(origins), origins=origins,
            records_per_batch=config.data.records_per_batch, location=location,
        )  # fmt: skip
    added = (0,) * (reader.num_partitions(samples) - len(durable.origins))  # their origins and counts
    left_out = durable.left_out + added if durable.left_out else ()
    return structs.replace(durable, applied=durable.applied + added, origins=durable.origins + added, left_out=left_out)


def _holdout_problems(
    split: Split, reader: RangeReader, topic: str, report: LedgerReport, ledger: Ledger, lows: Sequence[int]
) -> list[str]:
    """Read the records of the durable model again, as far as the log holds them, and decide again which of them are
    held out. Return the problems: records that were learned and should not have been, and the other way round."""
    wrong, known = dict[str, list[Range]](), len(reader.problems)
    for line, low in zip(report.partitions, lows, strict=True):
        messages = reader.client_messages(topic, line.partition, max(low, line.origin), line.applied_until)
        while chunk := list(islice(messages, _HOLDOUT_RECORDS)):
            offsets = [int(message.offset()) for message in chunk]
            mask = split.held_out(line.partition, offsets, [message.value() for message in chunk], chunk)
            for offset, is_held_out in zip(offsets, mask.tolist(), strict=True):
                state = ledger.offset_state(line.partition, offset)
                if state in ("applied", "partly") if is_held_out else state == "held out":
                    what = "learned, but to be held out" if is_held_out else "held out, but to be learned"
                    wrong.setdefault(what, []).append(Range(line.partition, offset, offset + 1))
    del reader.problems[known:]  # of batches that cannot be read: their records are dead, or the worker could read them
    return [f"{what} (evaluation.holdout): {named(ranges)}" for what, ranges in wrong.items()]


def _present_records(reader: RangeReader, topic: str, gaps: Sequence[Range]) -> list[Range]:
    """Return the offsets in `gaps` at which the broker holds a record."""
    ordered = sorted(gaps)
    spans: list[Range] = []
    for gap in ordered:
        last = spans[-1] if spans else None
        if last is not None and last.partition == gap.partition and gap.lo - last.hi < _MAX_GAP_RECORDS:
            spans[-1] = last._replace(hi=max(last.hi, gap.hi))
        else:
            spans.append(gap)
    present = []
    for sparse in (True, False):
        chosen = [span for span in spans if (span.hi - span.lo < _LONG_RECORDS) is sparse]
        for partition, offset in reader.read_together(topic, chosen, sparse=sparse):
            nearest = ordered[bisect_right(ordered, (partition, offset, math.inf)) - 1]
            if nearest.partition == partition and nearest.lo <= offset < nearest.hi:
                present.append(Range(partition, offset, offset + 1))
    return present
