"""`doll spot`: `doll up` with workers on a replayed spot market."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from doll.cli import options
from doll.cli.output import emit


def spot(
    job: options.JobOptions,
    trace: options.TraceOption = None,
    pool: options.PoolOption = None,
    alpha: options.AlphaOption = None,
    cycle: options.CycleOption = None,
    speed_up: Annotated[
        float | None, typer.Option(help="Market seconds per second of real time.", show_default=False)
    ] = None,
    deadline: options.DeadlineOption = None,
    seed: options.SeedOption = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Plan and predict; start nothing.")] = False,
    runs_folder: options.RunsFolderOption = Path("runs"),
    fresh: options.FreshOption = False,
    page: options.PageOption = True,
    as_json: options.JsonOption = False,
) -> None:
    """Run a whole job on this machine with workers on a spot market, which preempts them with or without a notice.

    Prices and preemptions replay a recorded market, or a Markov chain of up and down times, at a chosen speed. A
    controller meets the deadline at the least cost. The report compares the cost with the predicted cost and with the
    cost of all on-demand, and lists moves with their reasons, preemptions, accuracy and the audit. Exit code 3 if the
    plan shows that the deadline cannot be met.

    --deadline is in real time, --cycle in market time.

    Example: doll spot market --seed 3
    """
    from doll.monitor.views.run_report import summary
    from doll.run.local.up import run_up

    from doll_lab.spot.preparation import SpotRun
    from doll_lab.spot.workers import SpotWorkerPool

    given = {
        "fleet.trace": trace.resolve() if trace is not None else None, "fleet.pool": pool, "plan.alpha": alpha,
        "plan.cycle_s": cycle, "fleet.speed_up": speed_up, "plan.deadline_s": deadline,
    }  # fmt: skip
    changes = [f"{key}={value}" for key, value in given.items() if value is not None]
    config = replace(job, overrides=[*(job.overrides or []), *changes]).target().config
    spot_run = SpotRun.of(config, seed)
    problem = spot_run.assessment.problem
    if problem is not None or dry_run:
        emit(as_json, spot_run.to_dict(), spot_run.text())
        raise typer.Exit(0 if problem is None else problem.exit_code)
    report = run_up(
        config, runs_folder, fresh=fresh, page=page,
        hook=lambda run, display: SpotWorkerPool(config, spot_run, run, display),
    )  # fmt: skip
    emit(as_json, report, summary(report))
    raise typer.Exit(int(report["exit_code"]))
