"""`doll doctor`: whether this machine, with its credentials, can do what a job's roles do."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from doll.cli.options import JsonOption, RunOptions
from doll.cli.output import emit


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
