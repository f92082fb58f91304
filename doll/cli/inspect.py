"""Commands that look at a job from outside: its topics, its state, its ledger."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from doll.errors import ConfigError, ServiceUnavailableError
from doll.process.files import read_json
from doll.run.target import Target

if TYPE_CHECKING:
    from doll.ledger.report import LedgerReport
    from doll.records import AnyRecord
    from doll.services import Services


_SILENT = {
    "provisioner": "; its machines run on and nobody watches the budget: start it again (doll provision run), or end "
    "them (doll provision drain)",
    "ps": "; nothing is learned until it runs again (doll ps, doll resume)",
}


class CommandOutput(NamedTuple):
    """A finding in both forms: for `--json`, and for people."""

    content: Any
    text: str


def audit_target(target: Target) -> LedgerReport:
    """Audit the job.

    Raises:
        ServiceUnavailableError: its broker is not there; for a run that has ended, the message names its report.
        CheckpointError: the checkpoint cannot be read.
    """
    from doll.ledger.audit import audit
    from doll.storage.stores import open_store

    services = _reachable_services(target)
    return audit(target.config, services, open_store(target.config, target.run.path))


def topics_of(target: Target, *, create: bool) -> CommandOutput:
    """The job's topics with their partitions and offsets.

    Raises:
        ConfigError: a topic has another number of partitions than the job.
        ServiceUnavailableError: the broker is not there.
    """
    from doll.kafka import topics

    services = _reachable_services(target)
    warnings = topics.ensure(target.config, services) if create else []
    infos = topics.describe(target.config, services)
    if not infos:
        hint = (
            f"no topic of job {target.config.job} at {services.kafka}; create them with: doll topics JOB.yaml --create"
        )
        return CommandOutput([], hint)
    width = max(len(info.name) for info in infos)
    lines = [f"{'topic':<{width}}  partitions     records  offsets"]
    for info in infos:
        records = sum(info.high) - sum(info.low)
        spans = ", ".join(f"{low}..{high}" for low, high in zip(info.low[:8], info.high[:8], strict=True))
        more = ", ..." if info.partitions > 8 else ""
        lines.append(f"{info.name:<{width}}  {info.partitions:>10}  {records:>10}  {spans}{more}")
    lines += [f"warning: {warning}" for warning in warnings]
    return CommandOutput([dataclasses.asdict(info) for info in infos], "\n".join(lines))


def status_of(target: Target) -> CommandOutput:
    """Where the job stands, from its topics; for a run that has ended, from its report.

    Raises:
        ServiceUnavailableError: the broker is not there and there is no report.
    """
    if target.is_run_folder and target.run.report.exists():
        report = read_json(target.run.report)
        from doll.monitor.run_report import summary

        try:
            return CommandOutput(report, summary(report))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            why = f"{type(error).__name__}: {error}"
            raise ConfigError(f"{target.run.report}: expected a report of this release ({why})") from error
    from doll.kafka.tail import Tail
    from doll.ledger.report import named
    from doll.monitor.display import clock, one_line, worker_table
    from doll.monitor.heartbeats import RoleHeartbeats
    from doll.monitor.progress import ProgressModel

    services = _reachable_services(target)
    config = target.config
    model, beats = ProgressModel(config, time.monotonic()), RoleHeartbeats()
    with Tail(config, services, (config.topic("updates"), config.topic("metrics"))) as tail:
        for record in _of_this_run(target, [one.record for one in tail.read_history()]):
            model.feed(record)
            beats.feed(record)
        low = [tail.partition_bounds(config.topic("samples"), n)[0] for n in range(config.data.workers)]
    for partition, first in enumerate(low):
        reached = model.next_offsets.get(partition, first)
        if reached < first and model.history.finished is None:
            model.add_lost(partition, reached, first)
    snapshot = model.snapshot(time.monotonic())
    state = "finished: " + snapshot.finished if snapshot.finished else "running, or waiting to go on"
    content = {**dataclasses.asdict(snapshot), "prequential": snapshot.prequential._asdict()}
    content["margin"] = snapshot.margin._asdict()
    content.pop("seconds")
    silent = {} if snapshot.finished else beats.silent(time.time())
    content["silent_s"] = silent
    text = f"{config.job} ({state})\n{one_line(snapshot, config.stop)}\n{worker_table(snapshot)}"
    if snapshot.lost:
        text += f"\nlost: {named(snapshot.lost)}: deleted from the log before they were learned (see data.on_data_loss)"
    for role, age_s in silent.items():
        text += f"\nsilent: {role}: no sign of life for {clock(age_s)}" + _SILENT.get(role, "")
    return CommandOutput(content, text)


def _of_this_run(target: Target, records: list[AnyRecord]) -> list[AnyRecord]:
    """Records of `updates` and `metrics`; of a run's folder, without those of later runs on the same topics."""
    from doll.ledger.generations import GenerationFilter
    from doll.ledger.snapshot_counts import read_counts
    from doll.records import Finished, Metric, TermStarted, Update
    from doll.storage.stores import open_store

    checkpoint = open_store(target.config, target.run.path).load_newest(None) if target.is_run_folder else None
    if checkpoint is None:
        return records
    own = GenerationFilter(read_counts(target.config, checkpoint).generation)
    updates = list(own.records([record for record in records if isinstance(record, TermStarted | Update | Finished)]))
    if own.next_generation is None:
        return records
    until = own.next_generation
    metrics = [record for record in records if isinstance(record, Metric) and record.values.get("term", until) < until]
    return [*updates, *metrics]


def _reachable_services(target: Target) -> Services:
    from doll.service_checks import require_services

    services = target.services()
    try:
        require_services(target.config, services, timeout_s=5.0)
    except ServiceUnavailableError as error:
        if target.is_run_folder and target.run.report.exists():
            raise ServiceUnavailableError(
                f"the broker of this run is gone ({services.kafka}): its audit, made before it ended, is in "
                f"{target.run.report} under 'audit'"
            ) from error
        if target.is_run_folder:
            raise ServiceUnavailableError(
                f"the broker of this run is gone ({services.kafka}), and it left no report: it was killed before its "
                f"end. Its checkpoints are in {target.run.path / 'checkpoints'}; `doll export` reads them"
            ) from error
        raise
    return services
