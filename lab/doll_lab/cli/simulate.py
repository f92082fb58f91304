"""`doll simulate`: a whole job in virtual time, from a job file or from flags."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer
from doll.cli import options
from doll.cli.output import emit, progress_bar


@dataclass(frozen=True, kw_only=True)
class SettingOptions:
    """Settings of the simulation, with their names in `doll_lab.simulation.settings`."""

    updates: Annotated[int | None, typer.Option("--updates", "-J", min=1, help="Stop after this many updates.")] = None
    seconds: Annotated[float | None, options.duration("Stop at this virtual time.", "--duration")] = None
    compute: Annotated[Literal["exponential", "constant"], typer.Option(help="Distribution of gradient times.")] = (
        "exponential"
    )
    arrival_scv: Annotated[
        float, typer.Option(min=0, help="Squared coefficient of variation of arrivals: 1 Poisson, 0 regular.")
    ] = 1.0
    replacement: Annotated[
        bool, typer.Option("--replacement/--no-replacement", help="Requeue batches of lost workers, or wait for them.")
    ] = True
    arrivals_pause: Annotated[
        bool,
        typer.Option(
            "--arrivals-pause/--arrivals-queue",
            help="Samples for a worker that is down: none arrive, or they queue up.",
        ),
    ] = True
    random_phase: Annotated[
        bool, typer.Option("--random-phase/--synchronized", help="Start with batches filled at random, or all empty.")
    ] = True
    seed: options.SeedOption = 0


def simulate(
    job: options.JobOptions,
    stream: options.StreamOptions,
    settings: SettingOptions,
    market: options.MarketOptions,
    spot: Annotated[int, typer.Option(min=0, help="Slots on spot, the slowest streams first.")] = 0,
    trace: options.TraceOption = None,
    pool: options.PoolOption = None,
    deadline: options.DeadlineOption = None,
    replan: Annotated[float, options.duration("Interval between plans [default: 1m].")] = 60.0,
    instance: options.InstanceOption = None,
    region: options.RegionOption = None,
    out: Annotated[Path | None, typer.Option(help="Folder for summary.json, updates.csv and simulation.html.")] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Simulate a job in virtual time: arrivals, batches, groups, gradients, preemptions, the planner.

    It runs the parameter server's own engine and policies. It prints the update rate, and the rate that the formula
    predicts.

    Without prices in the job file, the prices of --instance in --region are used, from a table that ships with DOLL.
    Defaults without a job file are the paper's: 64 workers of 125 samples/s, K = 20, b = 256, 10000 updates; --alpha
    0.9, --cycle 1000, --service 20ms, --boot 0, --spot-price 0.158, --on-demand-price 0.286. With --deadline the
    planner moves slots between the markets to finish in time; --trace replays recorded availability instead of --alpha.

    Example: doll simulate -N 64 -K 20 --spot 30 --alpha 0.9 --out simulated
    """
    from doll.config import PlanConfig
    from doll.provisioner.planning.plan_request import changed_plan
    from doll.provisioner.prices.shipped import with_prices

    from doll_lab.simulation import job as jobs
    from doll_lab.simulation.report import summarise, write_report

    config = job.config_if_named()
    papers = {"spot_usd_per_h": jobs.PAPER_SPOT_USD_PER_H, "on_demand_usd_per_h": jobs.PAPER_ON_DEMAND_USD_PER_H}
    plan = config.plan if config is not None else changed_plan(PlanConfig(), **papers)
    stated = changed_plan(plan, spot_usd_per_h=market.spot_usd_per_h, on_demand_usd_per_h=market.on_demand_usd_per_h)
    notes: list[str] = []
    prices = with_prices(config, stated, instance, region, notes)
    simulated = jobs.simulation_settings(
        config, stream.rates_per_s(config, default=(jobs.PAPER_RATE_PER_S, jobs.PAPER_WORKERS)),
        batch_size=stream.batch_size, group_size=stream.group_size,
        compute_s=jobs.PAPER_SERVICE_S if market.service_s is None else market.service_s,
        spot_usd_per_hour=prices.spot_usd_per_h or 0.0, on_demand_usd_per_hour=prices.on_demand_usd_per_h or 0.0,
        machines_per_worker=market.machines_per_worker or (1 if config is None else config.machines_per_worker),
        **vars(settings),
    )  # fmt: skip
    if spot > simulated.num_workers:
        raise typer.BadParameter(f"--spot: expected 0 .. {simulated.num_workers} (the workers), got {spot}")
    if pool is not None and trace is None:
        raise typer.BadParameter("--pool: expected --trace too")
    preemption, availability = jobs.preemptions(
        simulated, jobs.PAPER_ALPHA if market.alpha is None else market.alpha,
        jobs.PAPER_CYCLE_S if market.cycle_s is None else market.cycle_s, trace, pool,
        one_by_one=(market.availability_of or plan.availability_of) != "worker",
    )  # fmt: skip
    boot_s = market.boot_s or 0.0
    if deadline is None:
        system = jobs.fixed_mix(simulated, spot, preemption, boot_s=boot_s, measure=True)
    else:
        system = jobs.planned(simulated, preemption, deadline_s=deadline, replan_s=replan, boot_s=boot_s, measure=True)
    with progress_bar("simulating", simulated.updates if simulated.updates is not None else simulated.seconds) as bar:
        system.run(
            lambda done, now_s: bar(
                completed=done if simulated.updates is not None else now_s,
                description=f"{done} updates, {now_s:.0f} s simulated",
            )
        )
    summary = summarise(system, availability)
    text = "\n".join([summary.text(deadline, simulated.updates), *(f"- {note}" for note in notes)])
    if out is not None:
        write_report(system, summary, out)
        text += f"\nwritten: {out / 'summary.json'}, updates.csv, simulation.html"
    emit(as_json, summary.to_dict(), text)
