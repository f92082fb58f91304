"""The state of a run that has ended, from the files of its folder: report, tables, dead letters, decisions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec

from doll.amounts import or_nan
from doll.config import JobConfig
from doll.errors import ConfigError
from doll.ledger.dead_letters import saved_dead_records
from doll.monitor.state.csv_file import rows_if_any
from doll.monitor.state.folder_logs import DecisionLog, saved_updates
from doll.monitor.state.history import HeldOutRecords, History
from doll.monitor.state.policy_summary import PolicySummary
from doll.monitor.state.progress import DeadLetterCounts, JobSnapshot, WorkerLine
from doll.monitor.state.watched_job import MAX_EVENTS, MAX_LETTERS, Decisions, Event, PageState
from doll.process.files import read_json
from doll.theory.queueing import Stability


def ended_run(config: JobConfig, folder: Path) -> PageState:
    """Return the state of the run in `folder`. A killed run has no report; its state is then read from its tables.

    Raises:
        ConfigError: a file does not have the format of this release.
    """
    path = folder / "report.json"
    report = read_json(path) if path.exists() else {}
    try:
        history = History.of_rows(rows_if_any(folder / "updates.csv"), rows_if_any(folder / "evaluations.csv"))
        updates, dead = saved_updates(folder), folder / "dead.json"
        letters = saved_dead_records(dead) if dead.exists() else []
        decisions = Decisions()
        for decision in DecisionLog(folder, config.job).read():
            decisions.add(decision)
        return PageState(
            config=config,
            snapshot=_snapshot(config, report, history),
            history=history,
            decisions=decisions,
            now_s=history.last_time_s,
            is_live=False,
            report=report,
            updates=updates,
            letters=[item.letter for item in letters[-MAX_LETTERS:]],
            events=list(_events(report, history))[-MAX_EVENTS:],
            next_offsets={member.partition: member.hi for update in updates for member in update.members},
            served_by={member.partition: member.worker for update in updates for member in update.members},
            restarts=report.get("restarts_by_role", {}),
            problem="" if report else "no report: this run was killed, or its Kafka does not answer",
        )
    except (KeyError, TypeError, ValueError, AttributeError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path}: expected a report of this release ({type(error).__name__}: {error})") from error


def _events(report: Mapping[str, Any], history: History) -> Iterator[Event]:
    """Yield the events with Unix times. Their times in the report are relative to the start of its session, which is
    close to the first update."""
    for event in report.get("events", []):
        yield history.first_time_s + or_nan(event["at_s"]), str(event["text"])


def _snapshot(config: JobConfig, report: Mapping[str, Any], history: History) -> JobSnapshot:
    evaluation = history.evaluations.last() or {}
    proposition = report.get("proposition_1", {})
    measures, held_out = report.get("measures"), report.get("held_out_records")
    names = {field.name for field in fields(WorkerLine)}
    workers = [
        WorkerLine(**{name: value for name, value in line.items() if name in names and value is not None})
        for line in report.get("worker_lines", [])
    ]
    return JobSnapshot(
        job=config.job,
        seconds=or_nan(report.get("seconds")),
        version=history.version,
        samples=history.samples_total,
        prequential=history.prequential.windowed(),
        held_out_version=int(evaluation["version"]) if evaluation else None,
        held_out_loss=evaluation.get("loss", math.nan),
        held_out_accuracy=evaluation.get("accuracy", math.nan),
        rate_measured=or_nan(report.get("update_rate_measured_per_s")),
        rate_predicted=or_nan(report.get("update_rate_predicted_per_s")),
        rate_stated=bool(report.get("arrival_rates_stated", True)),
        margin=Stability(or_nan(proposition.get("margin")), or_nan(proposition.get("margin_necessary"))),
        service_s=or_nan(proposition.get("batch_service_s")),
        durable_version=None if not report or report["error"] else history.version,
        workers=tuple(workers or map(WorkerLine, range(config.data.workers))),
        ps_restarts=report.get("ps_resumes", 0),
        finished=report.get("reason", ""),
        policy=None if measures is None else msgspec.convert(measures, PolicySummary, strict=False),
        updates=history.learned_updates,
        dead=DeadLetterCounts(tuple((item["reason"], item["letters"]) for item in report.get("dead_reasons", []))),
        skipped=tuple((item["reason"], item["samples"]) for item in report.get("skipped", [])),
        held_out_records=HeldOutRecords(**held_out) if held_out else history.held_out_records(),
    )
