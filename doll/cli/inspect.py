"""Commands that show the state of a job and of its services: audit, topics, status, doctor."""

from __future__ import annotations

import dataclasses
from enum import StrEnum
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
    losses = report.losses() if report.loss_allowed else ()
    details = [*report.violations(), *losses, *report.unread_records(), *report.rolled_back()]
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


class RoleName(StrEnum):
    """As `doll.kafka.permissions.Role`."""

    producer = "producer"
    worker = "worker"
    server = "server"
    evaluator = "evaluator"
    provisioner = "provisioner"


def doctor(
    job: RunOptions,
    roles: Annotated[
        list[RoleName] | None, typer.Option("--role", help="Check for this role only; may be repeated [default: all].")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check what each role of a job must be able to do, from this machine and with its credentials.

    It changes nothing: only a probe key is written to Redis, and deleted. Exit code 1 if a check has failed.

    Example: doll doctor my.yaml --role worker
    """
    from doll.kafka.permissions import ROLES
    from doll.run.doctor.gather import examine

    report = examine(job.target(), [role for role in ROLES if not roles or RoleName(role) in roles])
    emit(as_json, report.to_dict(), report.text())
    if not report.ok:
        raise typer.Exit(1)
