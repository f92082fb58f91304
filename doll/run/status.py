"""The state of a job from its topics, or the report and the audit of a run that has ended."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from doll.amounts import aligned, clock
from doll.config import HistorySource, JobConfig
from doll.errors import ConfigError, DollError, ServiceUnavailableError
from doll.kafka import topics
from doll.kafka.foreign_topic import with_partitions
from doll.kafka.reader import Tail
from doll.ledger.admission import read_lineage
from doll.ledger.audit import audit
from doll.ledger.balance import LedgerReport, named
from doll.ledger.lineage import GenerationFilter, UpdatesRecord
from doll.ledger.snapshot_counts import read_counts
from doll.monitor.state.freshness import freshness_text
from doll.monitor.state.heartbeats import RoleHeartbeats
from doll.monitor.state.progress import JobSnapshot, ProgressModel, skipped_text
from doll.monitor.views.run_report import summary
from doll.monitor.views.text import one_line, shard_lines, table_lines, worker_table
from doll.process.files import read_json
from doll.process.metric_names import TERM, joiner_of
from doll.records.control import AnyRecord, Metric, ServerStatus
from doll.run.target import Target
from doll.service_checks import require_kafka
from doll.services import Services
from doll.storage.stores import open_store

if TYPE_CHECKING:
    from doll.join.audit import JoinReport
    from doll.ledger.second_audit import SecondReport
    from doll.producers.history import HistoryReport

_SILENT = {
    "provisioner": "; its machines keep running and nothing enforces the budget: start it again (doll provision run), "
    "or terminate them (doll provision drain)",
    "ps": "; nothing is learned until it runs again (doll ps, doll resume)",
    "joiner": "; other joiners, if there are any, join its partitions: start it again (doll join --joiner NUMBER)",
}


@dataclass(frozen=True)
class JobStatus:
    """The state of a job from its topics.

    Attributes:
        silent_s: seconds since the last heartbeat of each role that is silent for longer than allowed.
    """

    config: JobConfig
    snapshot: JobSnapshot
    silent_s: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        content = {**dataclasses.asdict(self.snapshot), "prequential": self.snapshot.prequential._asdict()}
        content["margin"] = self.snapshot.margin._asdict()
        content["policy"] = None if self.snapshot.policy is None else self.snapshot.policy.to_dict()
        content.pop("seconds")
        return {**content, "silent_s": self.silent_s}

    def text(self) -> str:
        snapshot = self.snapshot
        state = f"finished: {snapshot.finished}" if snapshot.finished else "running, or waiting to be resumed"
        lines = [f"{self.config.job} ({state})", one_line(snapshot, self.config.stop), worker_table(snapshot)]
        lines += [*shard_lines(snapshot), *table_lines(snapshot)]
        lines += (f"slow: worker {line.worker}: {line.slow}" for line in snapshot.workers if line.slow)
        reasons = dict.fromkeys(line.waiting_for for line in snapshot.workers if line.waiting_for)
        for reason in reasons:
            workers = ", ".join(str(line.worker) for line in snapshot.workers if line.waiting_for == reason)
            lines.append(f"waiting: worker {workers}: {reason}")
        if snapshot.limit and not snapshot.finished:
            lines.append(f"limits: {snapshot.limit}")
        if snapshot.policy is not None:
            lines.append(snapshot.policy.text())
        if snapshot.history:
            lines.append(f"history: {snapshot.history}")
        if snapshot.join is not None:
            lines.append(snapshot.join.text() + ("; see doll dead list" if snapshot.join.refused else ""))
        if fresh := freshness_text(snapshot.freshness):
            lines.append(fresh)
        if dead := snapshot.dead.text():
            lines.append(f"{dead}; see doll dead list")
        if skipped := skipped_text(snapshot.skipped):
            lines.append(skipped)
        if snapshot.held_out_records is not None:
            lines.append(snapshot.held_out_records.text())
        if snapshot.lost:
            lost = named(snapshot.lost)
            lines.append(f"lost: {lost}: deleted from the log before they were learned (see data.on_data_loss)")
        for role, age_s in self.silent_s.items():
            todo = _SILENT["joiner"] if joiner_of(role) is not None else _SILENT.get(role, "")
            lines.append(f"silent: {role}: no heartbeat for {clock(age_s)}{todo}")
        return "\n".join(lines)


@dataclass(frozen=True)
class FinalReport:
    """The state of a run that has ended: its report."""

    report: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return self.report

    def text(self) -> str:
        return summary(self.report)


def status_of(target: Target) -> JobStatus | FinalReport:
    """Return the state of a job.

    Raises:
        ServiceUnavailableError: the broker does not answer and there is no report.
        ConfigError: the report cannot be read.
    """
    if target.is_run_folder and target.run.report.exists():
        ended = FinalReport(read_json(target.run.report))
        try:
            ended.text()
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"{target.run.report}: expected a report of this release ({type(error).__name__}: {error})"
            ) from error
        return ended
    target, services = reachable_kafka(target)
    config = target.config
    model, heartbeats = ProgressModel(config, time.monotonic()), RoleHeartbeats()
    with Tail(config, services, (config.topic("updates"), config.topic("metrics"))) as tail:
        for record in history_of(target, tail):
            model.feed(record)
            heartbeats.feed(record)
        bounds = tail.bounds_of_partitions(config.topic("samples"), sorted(model.next_offsets))
    for partition, (first, _) in bounds.items():
        next_offset = model.next_offsets[partition]
        if next_offset < first and model.history.finished is None:
            model.add_lost(partition, next_offset, first)
    snapshot = model.snapshot(time.monotonic())
    return JobStatus(config, snapshot, {} if snapshot.finished else heartbeats.silent(time.time()))


def audit_target(target: Target) -> LedgerReport:
    """Audit the job.

    Raises:
        ServiceUnavailableError: the broker does not answer; for a run that has ended, the message names its report.
        CheckpointError: the checkpoint cannot be read.
    """
    target, services = reachable_kafka(target)
    return audit(target.config, services, open_store(target.config, target.run.path))


def second_audit_of(target: Target, first: LedgerReport) -> SecondReport:
    """Audit the job again with other code, and compare with the first audit. Raise ServiceUnavailableError if the
    broker does not answer."""
    from doll.ledger.second_audit import audit_again

    target, services = reachable_kafka(target)
    return audit_again(target.config, services, first)


def inputs_audit_of(target: Target) -> JoinReport | HistoryReport | None:
    """Audit the join of the job, or its history; None: it has neither. Raise ServiceUnavailableError if the broker does
    not answer."""
    if isinstance(target.config.source, HistorySource):
        from doll.producers.history import audit_history

        target, services = reachable_kafka(target)
        return audit_history(target.config, services)
    if target.config.data.join is None:
        return None
    from doll.join.audit import audit_join

    target, services = reachable_kafka(target)
    return audit_join(target.config, services)


def require_finished(target: Target) -> None:
    """Return if the job has ended by its stop rule or on request.

    Raises:
        DollError: the job has not ended, or has ended with an error.
        ServiceUnavailableError: the broker does not answer.
    """
    _, services = reachable_kafka(target)
    lineage = read_lineage(target.config, services, tail_only=True)
    if lineage.error:
        raise DollError(f"job {target.config.job} could not go on: {lineage.error}")
    if not lineage.finished:
        raise DollError(f"job {target.config.job} has not ended: {lineage}")


@dataclass(frozen=True)
class JobTopics:
    """The topics of a job, and warnings about their settings."""

    job: str
    kafka: str
    topics: list[topics.TopicInfo]
    warnings: list[str]

    def text(self) -> str:
        if not self.topics:
            return f"no topic of job {self.job} at {self.kafka}; create them with: doll topics JOB.yaml --create"
        rows = [("topic", "partitions", "records", "offsets")]
        for topic in self.topics:
            records = sum(topic.high) - sum(topic.low)
            spans = ", ".join(f"{low}..{high}" for low, high in zip(topic.low[:8], topic.high[:8], strict=True))
            more = ", ..." if topic.partitions > 8 else ""
            rows.append((topic.name, str(topic.partitions), str(records), f"{spans}{more}"))
        return "\n".join([*aligned(rows, "<>><"), *(f"warning: {warning}" for warning in self.warnings)])


def topics_of(target: Target, *, create: bool) -> JobTopics:
    """Return the topics of a job with their partitions and offsets; with `create`, missing topics are created.

    Raises:
        ConfigError: the number of partitions of a topic differs from that of the job.
        ServiceUnavailableError: the broker does not answer.
    """
    target, services = reachable_kafka(target)
    warnings = topics.ensure(target.config, services) if create else []
    return JobTopics(target.config.job, services.kafka, topics.describe(target.config, services), warnings)


def history_of(target: Target, tail: Tail) -> list[AnyRecord]:
    """Return the records of `updates` and `metrics`. For a run folder, leave out records of later runs."""
    records = [entry.record for entry in tail.read_history()]
    generation = generation_of(target)
    if generation is None:
        return records
    own = GenerationFilter(generation)
    updates = list(own.records([record for record in records if isinstance(record, UpdatesRecord)]))
    if own.next_generation is None:
        return records
    until = own.next_generation
    metrics = [
        record
        for record in records
        if (isinstance(record, Metric) and record.values.get(TERM, until) < until)
        or (isinstance(record, ServerStatus) and record.term < until)
    ]
    return [*updates, *metrics]


def generation_of(target: Target) -> int | None:
    """Return the generation of a run folder, by its newest checkpoint. Return None if there is no checkpoint, or if
    `target` is a job file. Raise CheckpointError if the checkpoint cannot be read or does not fit the job file."""
    checkpoint = open_store(target.config, target.run.path).load_newest_state() if target.is_run_folder else None
    return None if checkpoint is None else read_counts(target.config, checkpoint.state).generation


def reachable_kafka(target: Target) -> tuple[Target, Services]:
    """Return the job, with the number of partitions that it reads, and its services. Its Kafka answers.

    Raises:
        ServiceUnavailableError: the broker does not answer.
        ConfigError: the topic that the job reads is missing, and its number of partitions is not recorded.
    """
    address = ""
    try:
        services = target.services(needs_redis=False)
        address = f" ({services.kafka})"
        require_kafka(target.config, services, timeout_s=5.0)
    except ServiceUnavailableError as error:
        if not target.is_run_folder:
            raise
        rest = f": its audit, made before it ended, is in {target.run.report} under 'audit'"
        if not target.run.report.exists():
            rest = (
                ", and the run left no report: it was killed. Its checkpoints are in "
                f"{target.run.path / 'checkpoints'}; `doll export` reads them"
            )
        raise ServiceUnavailableError(f"the broker of this run is gone{address}{rest}") from error
    if target.config.data.asks_kafka:
        recorded = len(read_lineage(target.config, services).origins) or None
        target = dataclasses.replace(target, config=with_partitions(target.config, services, recorded=recorded))
    return target, services
