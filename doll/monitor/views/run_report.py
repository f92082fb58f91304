"""The report of a run: `report.json`, and its summary in a few lines. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import doll
from doll.amounts import clock, number, usd
from doll.config.step_size import advice, step_factor, step_samples, step_text
from doll.ledger.balance import LedgerReport
from doll.monitor.state.freshness import freshness_text
from doll.monitor.state.history import EVALUATION_COLUMNS, HeldOutRecords
from doll.monitor.state.join_progress import JoinCounts
from doll.monitor.state.progress import DeadLetterCounts, ProgressModel, skipped_text
from doll.process.files import json_safe
from doll.provisioner.prices.shipped import ec2_estimate
from doll.theory.cost import SECONDS_PER_HOUR


@dataclass
class RunOutcome:
    """The facts about the end of a run that are not in its records.

    Attributes:
        reason: why it ended: the stop rule, or "failed".
        error: the error; None if the job ended normally.
        seconds: seconds of this session from the start of the first role to the end of learning.
        started_at_s: Unix time when this session began; earlier updates belong to earlier sessions of the run.
    """

    reason: str
    exit_code: int
    seconds: float
    error: str | None = None
    started_at_s: float = 0.0
    restarts: dict[str, int] = field(default_factory=dict)
    kafka_kind: str = ""
    redis_kind: str = ""
    notes: tuple[str, ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)


INTERRUPTED: Final = "stopped by you"


def build_report(model: ProgressModel, outcome: RunOutcome, ledger: LedgerReport | None) -> dict[str, Any]:
    """Return the content of `report.json`: names of numbers contain their units; unmeasured values are null."""
    history, config = model.history, model.config
    evaluation = history.evaluations.last() or {}
    running, window = history.prequential.running(), history.prequential.windowed()
    margin, held_out = model.margin(), history.held_out_loss_trend()
    held_out_records = history.held_out_records()
    earlier = history.before(outcome.started_at_s)
    policy, dead, join = model.policy_summary(), model.dead_letters(), model.join()
    report = {
        "job": config.job,
        "doll_version": doll.__version__,
        "reason": outcome.reason,
        "error": outcome.error,
        "exit_code": outcome.exit_code,
        "seconds": round(earlier.seconds + outcome.seconds, 3),
        "session": {
            "seconds": round(outcome.seconds, 3),
            "updates": history.learned_updates - earlier.updates,
            "samples": history.samples_total - earlier.samples,
        },
        "training_seconds": history.last_time_s - history.first_time_s,
        "updates": history.learned_updates,
        "version": history.version,
        "samples": history.samples_total,
        "accuracy": evaluation.get("accuracy"),
        "loss": evaluation.get("loss"),
        "metrics": {name: value for name, value in evaluation.items() if name not in (*EVALUATION_COLUMNS, "void")},
        "evaluated_version": None if not evaluation else int(evaluation["version"]),
        "evaluated_average": config.training.evaluates_average,
        "prequential": {
            "samples": running.samples,
            "loss": running.loss,
            **running.metrics,
            "window_updates": history.prequential.window,
            "window_loss": window.loss,
            **{f"window_{name}": value for name, value in window.metrics.items()},
            "best_window_loss": history.loss_trend.best,
            "best_window_version": history.loss_trend.best_version,
        },
        "held_out_records": None if held_out_records is None else asdict(held_out_records),
        "best_loss": held_out.best,
        "best_loss_version": held_out.best_version,
        "diverged": model.diverged,
        "loss_worsened": history.loss_trend.worsened or held_out.worsened,
        "update_rate_measured_per_s": model.rate_measured(),
        "update_rate_predicted_per_s": model.rate_predicted(),
        "arrival_rates_per_s": model.arrival_rates_per_s(),
        "arrival_rates_stated": model.rate_is_stated,
        "proposition_1": {
            "margin": margin.sufficient,
            "margin_necessary": margin.necessary,
            "batch_service_s": history.service_s(),
        },
        "workers": config.data.workers,
        "worker_lines": [asdict(line) for line in model.worker_lines()],
        "batch_size": config.data.batch_size,
        "records_per_batch": config.data.records_per_batch,
        "group_size": config.group_size,
        "policy": config.training.policy.name,
        "step": step_text(config),
        "step_factor": step_factor(config),
        "advice": advice(config),
        "step_samples": step_samples(config),
        "measures": None if policy is None else policy.to_dict(),
        "stop": config.stop.model_dump(exclude_none=True),
        "restarts": sum(outcome.restarts.values()),
        "restarts_by_role": dict(sorted(outcome.restarts.items())),
        "ps_resumes": history.restarts,
        "events": [{"at_s": at_s, "text": text} for at_s, text in model.all_events],
        "kafka_kind": outcome.kafka_kind,
        "redis_kind": outcome.redis_kind,
        "dead_letters": dead.letters,
        "dead_reasons": [{"reason": reason, "letters": letters} for reason, letters in dead.reasons],
        "skipped": [{"reason": reason, "samples": samples} for reason, samples in model.skipped()],
        "join": None if join is None else asdict(join),
        "freshness": {stage.stage: asdict(stage) for stage in model.freshness.stages()},
        "freshness_text": freshness_text(model.freshness.stages()),
        "notes": list(outcome.notes),
        "audit": None if ledger is None else audit_counts(ledger),
        "files": outcome.files,
        "ec2_estimate": ec2_estimate(config, outcome.seconds),
        **outcome.extra,
    }
    cleaned: dict[str, Any] = json_safe(report)
    return cleaned


def audit_counts(ledger: LedgerReport) -> dict[str, Any]:
    """Return the audit as counts of offsets and as text; `violations` names missing and repeated offsets."""
    return {
        "ok": ledger.ok,
        "produced": ledger.produced,
        "applied": ledger.applied,
        "pending": ledger.pending,
        "missing": sum(item.hi - item.lo for item in ledger.missing),
        "duplicate": sum(item.hi - item.lo for item in ledger.twice),
        "dead": ledger.dead,
        "gaps": ledger.gaps,
        "lost": ledger.lost,
        "losses": ledger.losses(),
        "unread": ledger.unread,
        "skipped": ledger.skipped,
        "held_out": ledger.held_out,
        "forgotten": ledger.forgotten,
        "rolled_back": ledger.rolled_back(),
        "summary": ledger.summary(),
        "violations": ledger.violations(),
    }


def summary(report: Mapping[str, Any]) -> str:
    """Return a report in a few lines."""
    lines = [
        f"{report['job']}: {report['updates']:,} updates, {report['samples']:,} samples "
        f"in {clock(report['seconds'])} ({report['reason']})"
    ]
    session = report.get("session")
    if session and session["seconds"] < report["seconds"]:
        lines.append(
            f"  since it was resumed: {session['updates']:,} updates, "
            f"{session['samples']:,} samples in {clock(session['seconds'])}"
        )
    error = _error_line(report)
    if error:
        lines.append(f"  {error}")
    diverged = report.get("diverged") or ""  # a report of an earlier release does not have it
    if diverged and diverged not in (report["error"] or ""):
        lines.append(f"  warning: {diverged}; an earlier checkpoint may be better")
    elif report["loss_worsened"] and not diverged:
        lines.append(f"  warning: {_worsened(report)}")
    measured, predicted = number(report["update_rate_measured_per_s"]), number(report["update_rate_predicted_per_s"])
    margin = number(report["proposition_1"]["margin"])
    lines.append(f"  update rate {measured}/s, by theory Nλ/(Kb) {predicted}/s; Proposition 1 margin {margin}")
    if report["restarts"]:
        roles = ", ".join(f"{role} {count}" for role, count in report["restarts_by_role"].items())
        lines.append(f"  restarts: {report['restarts']} ({roles})")
    audit = report["audit"]
    lines.append(f"  {audit['summary']}" if audit else "  audit: none")
    violations = (audit or {}).get("violations", [])
    lines.extend(f"  {violation}" for violation in violations)
    lines.extend(f"  {loss}" for loss in (audit or {}).get("losses", []) if loss not in violations)
    lines.extend(f"  {text}" for text in (audit or {}).get("rolled_back", []))
    if report.get("dead_reasons"):
        counts = tuple((item["reason"], item["letters"]) for item in report["dead_reasons"])
        lines.append(f"  {DeadLetterCounts(counts).text()}")
    if report.get("skipped"):
        lines.append(f"  {skipped_text([(item['reason'], item['samples']) for item in report['skipped']])}")
    if report.get("held_out_records"):
        lines.append(f"  {HeldOutRecords(**report['held_out_records']).text()}")
    if report.get("join"):
        lines.append(f"  join: {JoinCounts(**report['join']).totals_text()}")
    if report.get("freshness_text"):
        lines.append(f"  {report['freshness_text']}")
    if report["error"]:
        lines.append(f"  failed: {report['error']}")
    lines += report.get("lines", [])  # lines of the run's hook, or of a drill
    if report.get("ec2_estimate") and "cost_usd" not in report:
        lines.append(f"  {_on_ec2(report['ec2_estimate'])}")
    lines.extend(f"  note: {note}" for note in report["notes"])
    lines.extend(f"  {name}: {path}" for name, path in report["files"].items())
    return "\n".join(lines)


def _on_ec2(estimate: Mapping[str, Any]) -> str:
    """Return the text of `ec2_estimate`: what the run would have cost on EC2, on machines of the same speed."""
    place = f"{estimate['region']}, prices of {estimate['as_of']}"
    if (services_usd := estimate.get("services_usd")) is None:  # a report of an earlier release
        services_usd = estimate["stack_usd_per_h"] * estimate["seconds"] / SECONDS_PER_HOUR
    return (
        f"on EC2 its workers would have cost {usd(estimate['on_demand_usd'])} USD on-demand, "
        f"{usd(estimate['spot_usd'])} USD on spot; Kafka, cache and control host {usd(services_usd)} USD\n"
        f"    ({estimate['machines']} x {estimate['instance']} for {clock(estimate['seconds'])} in {place})"
    )


def _error_line(report: Mapping[str, Any]) -> str:
    parts = []
    if report["accuracy"] is not None:
        parts.append(f"held-out accuracy {report['accuracy']:.4f}")
    metrics = report.get("metrics") or {}  # a report of an earlier release does not have them
    parts += [f"held-out {name} {value:.4f}" for name, value in metrics.items() if value is not None]
    if report["loss"] is not None:
        what = "the average of version" if report.get("evaluated_average") else "version"
        parts.append(f"held-out loss {report['loss']:.4f} at {what} {report['evaluated_version']}")
    prequential = report["prequential"]
    if prequential["window_loss"] is not None:
        count = min(prequential["window_updates"], report["updates"])
        parts.append(f"prequential loss {prequential['window_loss']:.4f} over the last {count} updates")
    return ", ".join(parts)


def _worsened(report: Mapping[str, Any]) -> str:
    prequential = report["prequential"]
    bests = [
        f"{name} loss {number(best)} at version {version}"
        for name, best, version in (
            ("prequential", prequential["best_window_loss"], prequential["best_window_version"]),
            ("held-out", report["best_loss"], report["best_loss_version"]),
        )
        if version is not None
    ]
    return (
        f"the loss ended far above its best ({', '.join(bests) or 'it was never finite'}): look for bad samples "
        "(doll dead list), a stream that has changed, or a learning rate that is too high (training.optimizer.lr, "
        "training.clip_norm); an earlier checkpoint may be better"
    )
