"""`doll bill`: what a job has cost, compared with AWS's Cost and Usage Report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from doll.cli import options
from doll.cli.output import emit


def bill(
    job: options.RunOptions,
    *,
    run_folder: options.RunFolderOption = None,
    cur: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Cost and Usage Report of AWS: .csv, .csv.gz or .parquet."),
    ] = None,
    stack: options.StackOption = "self_managed",
    as_json: options.JsonOption = False,
) -> None:
    """Show what a provisioned job has cost: each instance, and each service beside them with the source of its price.

    With --cur, the bill is compared with AWS's lines of the job, by instance and by category. Lines without a known
    category are named. The command changes nothing and asks no service except the store of the checkpoints.

    Example: doll bill my.yaml --cur report.csv.gz
    """
    from doll.config import Ec2FleetConfig
    from doll.errors import CheckpointError
    from doll.provisioner.cost_reports import read_report
    from doll.provisioner.job_bill import JobBill, aws_costs, billed_instances
    from doll.provisioner.prices.shipped import service_costs
    from doll.provisioner.state_store import state_of
    from doll.provisioner.status import last_decision

    at = job.target(run_folder)
    store = state_of(at.config, at.run.path)
    decision = last_decision(store, f"doll provision run {at.path}")
    started_s, until_s = float(decision["started_s"]), float(decision["time_s"])
    try:
        kept = store.load()
    except CheckpointError:  # reported by `last_decision`
        kept = None
    instances = billed_instances(store.journal, kept, started_s)
    running = [item["id"] for item in decision["instances"] if item.get("ended_s") is None]
    running_usd = max(0.0, decision["spent_usd"] - sum(instance.usd for instance in instances))
    services = [] if stack == "none" else service_costs(stack, at.config.plan.services, until_s - started_s)
    costs = None
    if cur is not None:
        fleet = at.config.fleet
        costs = aws_costs(
            read_report(cur), ids={*running, *(instance.id for instance in instances)}, job=at.config.job,
            stack=fleet.cluster or "" if isinstance(fleet, Ec2FleetConfig) else "", start_s=started_s, end_s=until_s,
        )  # fmt: skip
    whole = JobBill(at.config.job, started_s, until_s, instances, running, running_usd, services, costs)
    emit(as_json, whole.to_dict(), whole.text())
