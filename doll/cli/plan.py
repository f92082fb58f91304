"""`doll plan`: whether a job can meet its goals, with which workers on spot, at what cost, before anything runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from doll.cli import options
from doll.cli.output import emit
from doll.cli.plan_pipeline import PipelineOptions, plan_pipeline


@dataclass(frozen=True, kw_only=True)
class GoalOptions:
    """Goals of a job; each field has the name of the key in the plan section that it replaces."""

    updates: Annotated[float | None, typer.Option("--updates", "-J", help="J: updates to the error target.")] = None
    target_error: Annotated[float | None, typer.Option(help="Error target; J is then taken from --pilot.")] = None
    pilot: Annotated[
        Path | None,
        typer.Option(metavar="RUN", resolve_path=True, help="Folder of a pilot run that J is estimated from."),
    ] = None
    deadline_s: options.DeadlineOption = None
    budget_usd: Annotated[float | None, typer.Option("--budget", help="USD for all workers.")] = None
    risk: Annotated[float | None, typer.Option(help="Accepted probability of missing the deadline, at most 0.5.")] = (
        None
    )


def plan(
    job: options.JobOptions,
    stream: options.StreamOptions,
    goals: GoalOptions,
    market: options.MarketOptions,
    *,
    instance: options.InstanceOption = None,
    region: options.RegionOption = None,
    stack: Annotated[
        Literal["self_managed", "msk", "none"],
        typer.Option(help="What runs beside the workers: Kafka on machines of your own, MSK, or nothing."),
    ] = "self_managed",
    plot: Annotated[
        Path | None, typer.Option(metavar="PNG", help="Plot cost and risk over the number of spot workers.")
    ] = None,
    pipeline: PipelineOptions,
    as_json: options.JsonOption = False,
) -> None:
    """Plan a job: whether it can meet error target, deadline and budget, and which workers to run on spot.

    Values are taken from the options, else from the job file's plan section. Without prices: prices of --instance in
    --region are taken from a table that ships with DOLL. Exit code 3 if the plan is not feasible. With --pipeline
    FLEET: which devices of a fleet form a worker together, as stages of a pipeline, and how fast they are.

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

    config = job.config_if_named()
    if pipeline.pipeline is not None:
        plan_pipeline(pipeline.pipeline, config, pipeline, plot=plot, as_json=as_json)
        return
    if alone := [name for name, value in vars(pipeline).items() if value is not None]:
        raise typer.BadParameter(f"--{alone[0].replace('_', '-')}: expected --pipeline FLEET with it")
    section = changed_plan(config.plan if config is not None else PlanConfig(), **vars(goals), **vars(market))
    has_price = market.spot_usd_per_h is not None or market.on_demand_usd_per_h is not None
    if has_price and (instance is not None or region is not None):
        raise typer.BadParameter(
            "expected --instance and --region, or --spot-price and --on-demand-price, got some of both"
        )
    section, pilot_notes = with_pilot(config, section)
    price_notes: list[str] = []
    section = with_prices(config, section, instance, region, price_notes)
    request, notes = plan_request(config, section, stream.rates_per_s(config), stream.group_size, stream.batch_size)
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
