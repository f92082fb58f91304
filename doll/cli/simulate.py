"""`doll simulate`: a whole job in virtual time, from a job file or from flags."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from doll.cli import options
from doll.cli.described_job import optional_job, stream_rates
from doll.cli.errors import usage
from doll.cli.output import emit, progress_bar


class ComputeTime(StrEnum):
    exponential = "exponential"
    constant = "constant"


def simulate(
    job: options.JobArgument = None,
    job_option: options.JobOption = None,
    overrides: options.SetOption = None,
    workers: options.WorkersOption = None,
    rate: options.RateOption = None,
    batch_size: options.BatchSizeOption = None,
    group_size: options.GroupSizeOption = None,
    updates: Annotated[
        int | None, typer.Option("--updates", "-J", min=1, help="Stop after this many updates.", show_default=False)
    ] = None,
    duration: Annotated[
        float | None,
        options.duration("Stop at this virtual time."),
    ] = None,
    service: options.ServiceOption = None,
    compute: Annotated[ComputeTime, typer.Option(help="Distribution of gradient times.")] = ComputeTime.exponential,
    arrival_scv: Annotated[
        float, typer.Option(min=0, help="Squared coefficient of variation of arrivals: 1 Poisson, 0 regular.")
    ] = 1.0,
    spot: Annotated[int, typer.Option(min=0, help="Slots on spot, the slowest streams first.")] = 0,
    alpha: options.AlphaOption = None,
    cycle: options.CycleOption = None,
    machines_per_worker: options.MachinesOption = None,
    availability_of: options.AvailabilityOfOption = None,
    trace: options.TraceOption = None,
    pool: options.PoolOption = None,
    deadline: options.DeadlineOption = None,
    replan: Annotated[
        float,
        options.duration("Interval between plans [default: 1m]."),
    ] = 60.0,
    boot: options.BootOption = None,
    spot_price: options.SpotPriceOption = None,
    on_demand_price: options.OnDemandPriceOption = None,
    instance: options.InstanceOption = None,
    region: options.RegionOption = None,
    replacement: Annotated[
        bool,
        typer.Option("--replacement/--no-replacement", help="Requeue batches of lost workers, or wait for them."),
    ] = True,
    arrivals_pause: Annotated[
        bool,
        typer.Option(
            "--arrivals-pause/--arrivals-queue",
            help="Samples for a worker that is down: none arrive, or they queue up.",
        ),
    ] = True,
    random_phase: Annotated[
        bool, typer.Option("--random-phase/--synchronized", help="Start with batches filled at random, or all empty.")
    ] = True,
    seed: options.SeedOption = 0,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for summary.json, updates.csv and simulation.png.")
    ] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Simulate a job in virtual time: arrivals, batches, groups, gradients, preemptions, the planner.

    It runs the parameter server's own engine and policies. Prints the update rate with the formula's.

    Without prices in the job file, the prices of --instance in --region are used, from a table that ships with DOLL.
    Defaults without a job file are the paper's: 64 workers of 125 samples/s, K = 20, b = 256, 10000 updates; --alpha
    0.9, --cycle 1000, --service 20ms, --boot 0, --spot-price 0.158, --on-demand-price 0.286. With --deadline the
    planner moves slots between the markets to finish in time; --trace replays recorded availability instead of --alpha.

    Example: doll simulate -N 64 -K 20 --spot 30 --alpha 0.9 --out simulated
    """
    from doll.config import PlanConfig
    from doll.provisioner.planning.plan_request import changed_plan
    from doll.provisioner.prices.shipped import with_prices
    from doll.simulation import job as jobs
    from doll.simulation.report import summarise, write_report

    config = optional_job(job, job_option, overrides)
    if machines_per_worker is None:
        machines_per_worker = 1 if config is None else config.machines_per_worker
    if availability_of is None and config is not None:
        availability_of = options.AvailabilityOf(config.plan.availability_of)
    papers = {"spot_usd_per_h": jobs.PAPER_SPOT_USD_PER_H, "on_demand_usd_per_h": jobs.PAPER_ON_DEMAND_USD_PER_H}
    stated = config.plan if config is not None else changed_plan(PlanConfig(), **papers)
    stated = changed_plan(stated, spot_usd_per_h=spot_price, on_demand_usd_per_h=on_demand_price)
    notes: list[str] = []
    prices = with_prices(config, stated, instance, region, notes)
    settings = jobs.simulation_settings(
        config, stream_rates(config, workers, rate, default=(jobs.PAPER_RATE_PER_S, jobs.PAPER_WORKERS)),
        batch_size=batch_size, group_size=group_size, updates=updates, seconds=duration, arrival_scv=arrival_scv,
        compute_s=jobs.PAPER_SERVICE_S if service is None else service, compute=compute.value,
        random_phase=random_phase, replacement=replacement, arrivals_pause=arrivals_pause,
        spot_usd_per_hour=prices.spot_usd_per_h or 0.0, on_demand_usd_per_hour=prices.on_demand_usd_per_h or 0.0,
        machines_per_worker=machines_per_worker, seed=seed,
    )  # fmt: skip
    if spot > settings.num_workers:
        raise usage(f"--spot: expected 0 .. {settings.num_workers} (the workers), got {spot}")
    if pool is not None and trace is None:
        raise usage("--pool: expected --trace too")
    preemption, availability = jobs.preemptions(
        settings, jobs.PAPER_ALPHA if alpha is None else alpha, jobs.PAPER_CYCLE_S if cycle is None else cycle,
        trace, pool, one_by_one=availability_of is not options.AvailabilityOf.worker,
    )  # fmt: skip
    if deadline is None:
        system = jobs.fixed_mix(settings, spot, preemption, boot_s=boot or 0.0, measure=True)
    else:
        system = jobs.planned(
            settings, preemption, deadline_s=deadline, replan_s=replan, boot_s=boot or 0.0, measure=True
        )
    with progress_bar("simulating", settings.updates if settings.updates is not None else settings.seconds) as bar:
        system.run(
            lambda done, now_s: bar(
                completed=done if settings.updates is not None else now_s,
                description=f"{done} updates, {now_s:.0f} s simulated",
            )
        )
    summary = summarise(system, availability)
    text = "\n".join([summary.text(deadline, settings.updates), *(f"- {note}" for note in notes)])
    if out is not None:
        write_report(system, summary, out)
        text += f"\nwritten: {out / 'summary.json'}, updates.csv, simulation.png"
    emit(as_json, summary.to_dict(), text)
