"""`doll drill`: `doll up` with injected faults."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from doll.cli import options
from doll.cli.output import emit

from doll_lab.drill.plan import FaultTarget


def drill(
    job: options.JobOptions,
    faults: Annotated[int, typer.Option("--faults", min=1, help="Number of faults.")] = 50,
    seed: options.SeedOption = 0,
    standby: Annotated[
        bool, typer.Option("--standby", help="Also run a standby parameter server, which takes over from the leader.")
    ] = False,
    brokers: Annotated[
        int,
        typer.Option("--brokers", min=1, max=5, help="Number of Kafka brokers; with several, one fails at a time."),
    ] = 1,
    replay: Annotated[
        bool,
        typer.Option("--replay", help="Replay the run afterwards: it must make the same model, to the bit."),
    ] = False,
    every_s: Annotated[
        float | None,
        typer.Option(
            "--every",
            min=0.1,
            help="Seconds from one fault to the next [default: after each recovery; a few come sooner].",
        ),
    ] = None,
    only: Annotated[
        FaultTarget | None,
        typer.Option("--only", help="Inject faults into these processes only [default: all].", show_default=False),
    ] = None,
    runs_folder: options.RunsFolderOption = Path("runs"),
    fresh: options.FreshOption = False,
    as_json: options.JsonOption = False,
) -> None:
    """Run a whole job as doll up does, and inject faults: kill, freeze, disconnect and preempt its processes.

    The job's stop rule is ignored: the job ends when it has recovered from all faults. Then the ledger is audited, and
    a table shows the recovery time by kind of fault, and how many samples were lost or applied twice.

    Example: doll drill digits --faults 200 --seed 7 --set control.kind=local
    """
    from doll.errors import AuditError
    from doll.monitor.views.run_report import summary

    from doll_lab.drill.main import run_drill

    report, failure = run_drill(
        job.target().config, runs_folder, faults=faults, seed=seed, standby=standby, brokers=brokers, fresh=fresh,
        replay=replay, every_s=every_s, only=only,
    )  # fmt: skip
    emit(as_json, report, summary(report))
    if failure is not None:
        raise AuditError(failure)
    raise typer.Exit(report["exit_code"])
