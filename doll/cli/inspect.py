"""Commands that show the state of a job and of its services: audit, topics, status, dashboard, doctor."""

from __future__ import annotations

import dataclasses
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from doll.cli import output
from doll.cli.options import JsonOption, RunFolderOption, RunOptions
from doll.cli.output import emit, emit_result
from doll.extras import require


def audit(
    job: RunOptions,
    run_folder: RunFolderOption = None,
    finished: Annotated[
        bool, typer.Option("--finished", help="Also fail if the job has not ended, or has ended with an error.")
    ] = False,
    independent: Annotated[
        bool, typer.Option("--independent", help="Audit again with other code, from topics alone, and compare.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Verify that every sample is applied exactly once, from checkpoint, updates and offsets. Exit code 4 if not.

    With data.join, also verify that each record of the joined topics is in one sample, dropped, refused or open; with
    source.kind: history, that each row and each record is in one sample.

    Example: doll audit my.yaml
    """
    from doll.run.status import audit_target, inputs_audit_of, require_finished, second_audit_of

    job_target = job.target(run_folder)
    joined = inputs_audit_of(job_target)
    report = audit_target(job_target)
    second = second_audit_of(job_target, report) if independent else None
    losses = report.losses() if report.loss_allowed else ()
    details = [*report.violations(), *losses, *report.unread_records(), *report.rolled_back()]
    name = "history" if job_target.config.data.join is None else "join"
    of_join = {} if joined is None else {name: dataclasses.asdict(joined)}
    texts = ["\n  ".join([report.summary(), *details]), *(item.text() for item in (joined, second) if item is not None)]
    of_second = {} if second is None else {"independent": second.to_dict()}
    emit(as_json, report.to_dict() | of_join | of_second, "\n".join(texts))
    if not report.ok or any(item is not None and not item.ok for item in (joined, second)):
        raise typer.Exit(4)
    if finished:
        require_finished(job_target)


def topics(
    job: RunOptions,
    create: Annotated[bool, typer.Option("--create", help="Create the topics that are missing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the job's topics, or create the missing ones.

    Example: doll topics my.yaml --create
    """
    from doll.run.status import topics_of

    job_topics = topics_of(job.target(), create=create)
    emit(as_json, [dataclasses.asdict(topic) for topic in job_topics.topics], job_topics.text())


def status(job: RunOptions, as_json: JsonOption = False) -> None:
    """Show the state of a job: updates, error, rates, workers. If a run has ended, show its report.

    Example: doll status runs/digits-20260101-120000
    """
    from doll.run.status import status_of

    emit_result(as_json, status_of(job.target()))


def dashboard(
    job: RunOptions,
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port of the page; 0: any free port.")] = 0,
    host: Annotated[
        str, typer.Option(help="Address to listen on. If other machines can reach it, --token-file is required.")
    ] = "127.0.0.1",
    token_file: Annotated[
        Path | None,
        typer.Option(help="File with the secret that users must enter to open the page."),
    ] = None,
    read_token_file: Annotated[
        Path | None,
        typer.Option(help="File with another such secret, for those who may not ask the model server for answers."),
    ] = None,
    model_server: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Also show the model server (doll serve) at this address; its token is in DOLL_SERVE_READ_TOKEN or "
            "DOLL_SERVE_TOKEN.",
        ),
    ] = None,
    run_folder: RunFolderOption = None,
) -> None:
    """Serve the live page of a job: its learning progress, time, cost, data safety, and the state of each worker.

    The page only reads: from the job's topics while they are available, otherwise from the run folder. For a folder
    with several runs, such as the output of doll compare, the page shows the runs side by side. Ctrl-C ends the
    command. doll up serves such a page itself and prints its address.

    Example: doll dashboard runs/digits-20260101-120000
    """
    require("doll dashboard", "serve")
    from doll.credentials import secret
    from doll.dashboard.model_server import metrics_of
    from doll.dashboard.runs_folder import is_runs_folder
    from doll.process.connections import READ_TOKEN_ENV, TOKEN_ENV
    from doll.process.http_access import address_of, listen, read_tokens
    from doll.run.page import serve_runs, serve_target

    tokens = read_tokens(token_file, read_token_file)
    metrics = None
    if model_server is not None:
        metrics = metrics_of(model_server, secret(READ_TOKEN_ENV) or secret(TOKEN_ENV) or "")
    target = None if job.job is not None and is_runs_folder(job.job) else job.target(run_folder)
    with listen(host, port, tokens) as listener:
        note = " (it asks for the token)" if tokens else ""

        def say(text: str) -> None:
            output.say(f"{text}: {address_of(listener)}{note}")

        if target is not None:
            serve_target(target, listener, tokens, say, metrics)
        elif job.job is not None:
            serve_runs(job.job, listener, tokens, say)


# The roles of `doll.kafka.permissions.Role`, as values of an option.
RoleName = StrEnum("RoleName", ["producer", "worker", "server", "evaluator", "provisioner", "joiner"])


def doctor(
    job: RunOptions,
    roles: Annotated[
        list[RoleName] | None, typer.Option("--role", help="Check only this role; may be repeated [default: all].")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check whether the roles of a job can work from this machine: services, access rights, files and settings.

    It changes nothing, except that it writes a probe key to Redis and deletes it again. Exit code 1 if a check has
    failed.

    Example: doll doctor my.yaml --role worker
    """
    from doll.kafka.permissions import ROLES
    from doll.run.doctor.examine import examine

    report = examine(job.target(), [role for role in ROLES if not roles or RoleName(role) in roles])
    emit_result(as_json, report)
    if not report.ok:
        raise typer.Exit(1)
