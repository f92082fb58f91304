"""`doll plan`: whether a job can meet its goals, with which workers on spot, at what cost, before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from doll.cli import options
from doll.cli.described_job import optional_job, stream_rates
from doll.cli.errors import usage
from doll.cli.output import emit


def plan(
    job: options.JobArgument = None,
    job_option: options.JobOption = None,
    overrides: options.SetOption = None,
    updates: Annotated[float | None, typer.Option("--updates", "-J", help="J: updates to the error target.")] = None,
    target_error: Annotated[float | None, typer.Option(help="Error target; J is then taken from --pilot.")] = None,
    pilot: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Folder of a pilot run that J is estimated from.")
    ] = None,
    workers: options.WorkersOption = None,
    rate: options.RateOption = None,
    group_size: options.GroupSizeOption = None,
    batch_size: options.BatchSizeOption = None,
    deadline: options.DeadlineOption = None,
    budget: Annotated[float | None, typer.Option(help="USD for all workers.")] = None,
    spot_price: options.SpotPriceOption = None,
    on_demand_price: options.OnDemandPriceOption = None,
    instance: options.InstanceOption = None,
    region: options.RegionOption = None,
    stack: options.StackOption = "self_managed",
    alpha: options.AlphaOption = None,
    cycle: options.CycleOption = None,
    machines_per_worker: options.MachinesOption = None,
    availability_of: options.AvailabilityOfOption = None,
    boot: options.BootOption = None,
    risk: Annotated[
        float | None, typer.Option(help="Accepted probability of missing the deadline, at most 0.5.")
    ] = None,
    service: options.ServiceOption = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="PNG", help="Plot cost and risk over the number of spot workers.")
    ] = None,
    pipeline: Annotated[
        Path | None,
        typer.Option(metavar="FLEET", help="Plan pipelines of stages on the devices of this table (YAML or CSV)."),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(help="With --pipeline: file of doll profile [default: worker.pipeline.profile]."),
    ] = None,
    stages: Annotated[
        int | None,
        typer.Option(min=1, help="With --pipeline: devices of each worker [default: worker.pipeline.stages]."),
    ] = None,
    clock_distance: Annotated[
        int | None, typer.Option(min=0, help="With --pipeline: D, in waves [default: the job file's, or 0].")
    ] = None,
    in_flight: Annotated[
        int | None,
        typer.Option(min=1, help="With --pipeline: N_m, minibatches in flight [default: the best one]."),
    ] = None,
    optimizer_copies: Annotated[
        float | None,
        typer.Option(
            min=0, help="With --pipeline: arrays of the weights' size besides them [default: as DOLL runs it]."
        ),
    ] = None,
    within_node: Annotated[
        float | None, typer.Option(min=1e-6, help="With --pipeline: GB/s between devices of one node.")
    ] = None,
    between_nodes: Annotated[float | None, typer.Option(min=1e-6, help="With --pipeline: GB/s between nodes.")] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Plan a job: whether it can meet error target, deadline and budget, and which workers to run on spot.

    Values are taken from the options, else from the job file's plan section. Without prices: prices of --instance in
    --region are taken from a table that ships with DOLL. Exit 3 if the plan is not feasible. With --pipeline FLEET:
    which devices of a fleet form a worker together, as stages of a pipeline, and how fast they are.

    Example: doll plan digits --instance c7g.large --region eu-west-1 --deadline 4m

    Example: doll plan -N 64 --rate 125 -K 20 -b 256 -J 10000 --alpha 0.9 --deadline 112m
    --spot-price 0.158 --on-demand-price 0.286
    """
    from doll.config import PlanConfig
    from doll.monitor.state.pilot_run import with_pilot
    from doll.provisioner.planning.assessment import assess, report_text
    from doll.provisioner.planning.plan_request import changed_plan, plan_request
    from doll.provisioner.planning.stack_cost import PARTS, StackKind
    from doll.provisioner.prices.shipped import with_prices

    config = optional_job(job, job_option, overrides)
    if pipeline is not None:
        from doll.cli.plan_pipeline import plan_pipeline

        plan_pipeline(
            pipeline, config, profile_path=profile, stages=stages, clock_distance=clock_distance, in_flight=in_flight,
            optimizer_copies=optimizer_copies, within_node_gb_per_s=within_node, between_nodes_gb_per_s=between_nodes,
            plot=plot, as_json=as_json,
        )  # fmt: skip
        return
    given = {
        "--profile": profile, "--stages": stages, "--clock-distance": clock_distance, "--in-flight": in_flight,
        "--optimizer-copies": optimizer_copies, "--within-node": within_node, "--between-nodes": between_nodes,
    }  # fmt: skip
    if alone := [name for name, value in given.items() if value is not None]:
        raise usage(f"{alone[0]}: expected --pipeline FLEET with it")
    section = changed_plan(
        config.plan if config is not None else PlanConfig(), updates=updates, target_error=target_error,
        pilot=pilot.resolve() if pilot else None, deadline_s=deadline, budget_usd=budget, spot_usd_per_h=spot_price,
        on_demand_usd_per_h=on_demand_price, alpha=alpha, cycle_s=cycle, risk=risk, service_s=service, boot_s=boot,
        machines_per_worker=machines_per_worker,
        availability_of=None if availability_of is None else availability_of.value,
    )  # fmt: skip
    if (spot_price is not None or on_demand_price is not None) and (instance is not None or region is not None):
        raise usage("expected --instance and --region, or --spot-price and --on-demand-price, got some of both")
    section, pilot_notes = with_pilot(config, section)
    price_notes: list[str] = []
    section = with_prices(config, section, instance, region, price_notes)
    request, notes = plan_request(config, section, stream_rates(config, workers, rate), group_size, batch_size)
    notes = [*price_notes, *pilot_notes, *notes]
    simulated = config is not None and getattr(config.fleet, "speed_up", 1) != 1  # nothing of it runs on AWS
    kind: StackKind | None = None if stack == "none" or simulated else stack
    assessment = assess(request)
    if plot is not None:
        from doll.monitor.views.plan_plot import draw

        draw(assessment, plot)
        notes.append(f"plot: {plot}")
    beside = None if kind is None else {"kind": kind, "usd_per_h": {part.name: part.usd_per_h for part in PARTS[kind]}}
    emit(as_json, {**assessment.to_dict(), "notes": notes, "stack": beside}, report_text(assessment, notes, kind))
    if assessment.problem is not None:
        raise typer.Exit(assessment.problem.exit_code)
