"""Creates the results of a run that has ended: audit, model, report, page."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from doll import extensions
from doll.dashboard.ended_run import ended_run
from doll.dashboard.saved_page import save_run
from doll.errors import AuditError, DollError, ServiceUnavailableError
from doll.ledger.audit import audit
from doll.ledger.balance import LedgerReport
from doll.ledger.dead_letters import dead_records, save_dead_records
from doll.local.processes import describe_exit, tail
from doll.monitor.state.csv_file import CsvFile
from doll.monitor.state.folder_logs import save_updates
from doll.monitor.state.progress import ProgressModel
from doll.monitor.views.run_report import RunOutcome, build_report
from doll.process.files import unwritable, write_json
from doll.records.bounded import short
from doll.run.folder import RunFolder, display_path
from doll.run.local.context import LocalRun
from doll.storage.stores import open_store

EXPORT_S = 60.0


def finish_run(run: LocalRun, model: ProgressModel, outcome: RunOutcome) -> dict[str, Any]:
    """Create audit, model, report and page, in this order. If one of them fails, the others are still created.

    The files, the notes, and the exit code of a failure are added to `outcome`. If the page fails, only a note is
    added.

    Returns:
        The content of `report.json`.
    """
    config, folder, say = run.config, run.folder, run.display.say
    problems: list[str] = []
    ledger: LedgerReport | None = None
    with _collect_errors(problems, "audit"):
        say("auditing the ledger")
        ledger = _audit(run)
        outcome.files["ledger"] = display_path(folder.path / "audit.json")
    if ledger is not None and not ledger.ok and outcome.exit_code == 0:
        outcome.exit_code = AuditError.exit_code
    if model.dead_letters().letters:
        with _collect_errors(problems, "list of dead letters"):
            letters = dead_records(config, run.stack.services, open_store(config, folder.path))
            save_dead_records(folder.dead, letters)
            outcome.files["dead letters"] = display_path(folder.dead)
    if model.history.samples_total or not outcome.error:  # otherwise the model has learned nothing
        with _collect_errors(problems, "export"):
            say("exporting the model")
            _export(run)
            outcome.files["model"] = display_path(folder.model / "model.safetensors")
    with _collect_errors(problems, "tables"):
        save_updates(folder.path, model.newest_updates)
        CsvFile(folder.path / "updates.csv", model.history.updates).sync()
        if not config.evaluation.enabled or not (folder.path / "evaluations.csv").exists():
            CsvFile(folder.path / "evaluations.csv", model.history.evaluations).sync()
    outcome.files |= {
        "updates": display_path(folder.path / "updates.csv"),
        "evaluations": display_path(folder.path / "evaluations.csv"),
        "logs": display_path(folder.logs),
        "report": display_path(folder.report),
    }
    outcome.notes += tuple(problems)
    if problems and outcome.exit_code == 0:
        outcome.exit_code, outcome.error = 1, problems[0]
    report = _write_report(folder, build_report(model, outcome, ledger))
    try:
        panels_of = extensions.find(extensions.PICTURES, "pipelines") if config.worker.pipeline is not None else None
        save_run(
            ended_run(config, folder.path), folder.page, [] if panels_of is None else panels_of(config, folder.path)
        )
        outcome.files["page"] = display_path(folder.page)
    except Exception as error:  # the report is valid, whatever the error of the page is
        outcome.notes += (f"no page: {type(error).__name__}: {short(error)}",)
    return _write_report(folder, {**report, "files": outcome.files, "notes": [*outcome.notes]})


def _write_report(run: RunFolder, report: dict[str, Any]) -> dict[str, Any]:
    """Write `report.json`. If this fails (for example on a full disk), return the report with the error in it."""
    try:
        write_json(run.report, report)
    except OSError as error:
        problem = f"cannot write the report: {unwritable(error)}"
        failed = {"exit_code": 1, "error": problem} if not report["exit_code"] else {}
        notes = [note for note in report["notes"] if note != problem]
        return {**report, **failed, "notes": [*notes, problem]}
    return report


def _audit(run: LocalRun) -> LedgerReport:
    ledger = audit(run.config, run.stack.services, open_store(run.config, run.folder.path))
    write_json(run.folder.path / "audit.json", ledger.to_dict())
    return ledger


def _export(run: LocalRun) -> None:
    log_path = run.folder.logs / "export.log"
    arguments = [str(run.folder.job), str(run.folder.path), str(run.folder.model)]
    role = run.forks.start_role("doll.run.local.roles:export_role", arguments, log_path=log_path, name="export")
    code = role.wait(EXPORT_S)
    if code != 0:
        role.kill()
        how = "timeout" if code is None else describe_exit(code)
        raise ServiceUnavailableError(f"{how}: {tail(log_path, 1)}")


@contextlib.contextmanager
def _collect_errors(problems: list[str], what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        problems.append(f"{what} failed: {unwritable(error)}")
    except DollError as error:
        problems.append(f"{what} failed: {error}")
