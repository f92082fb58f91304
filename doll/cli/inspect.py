"""Commands that show the state of a job: audit, topics, status."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from doll.cli.options import JsonOption, RunFolderOption, RunOptions
from doll.cli.output import emit


def audit(
    job: RunOptions,
    run_folder: RunFolderOption = None,
    finished: Annotated[
        bool, typer.Option("--finished", help="Fail also if the job has not ended, or has ended with an error.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Verify from checkpoint, updates and offsets that every sample is applied exactly once. Exit code 4 if not.

    Example: doll audit my.yaml
    """
    from doll.run.status import audit_target, require_finished

    job_target = job.target(run_folder)
    report = audit_target(job_target)
    details = [*report.violations(), *(report.losses() if report.loss_allowed else ()), *report.rolled_back()]
    emit(as_json, report.to_dict(), "\n  ".join([report.summary(), *details]))
    if not report.ok:
        raise typer.Exit(4)
    if finished:
        require_finished(job_target)


def topics(
    job: RunOptions,
    create: Annotated[bool, typer.Option("--create", help="Create the topics that are missing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the job's topics, or create them.

    Example: doll topics my.yaml --create
    """
    from doll.run.status import topics_of

    job_topics = topics_of(job.target(), create=create)
    emit(as_json, [dataclasses.asdict(topic) for topic in job_topics.topics], job_topics.text())


def status(job: RunOptions, as_json: JsonOption = False) -> None:
    """Show the state of a job: updates, error, rates, workers. For a run that has ended: its report.

    Example: doll status runs/digits-20260101-120000
    """
    from doll.run.status import status_of

    job_status = status_of(job.target())
    emit(as_json, job_status.to_dict(), job_status.text())
