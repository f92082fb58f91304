"""`doll simulate`: a whole job in virtual time, from a job file or from flags."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from doll.cli.durations import METAVAR, seconds
from doll.cli.errors import usage
from doll.cli.options import (
    AlphaOption,
    BatchSizeOption,
    BootOption,
    CycleOption,
    DeadlineOption,
    GroupSizeOption,
    JobArgument,
    JobOption,
    JsonOption,
    OnDemandPriceOption,
    PoolOption,
    RateOption,
    SeedOption,
    ServiceOption,
    SetOption,
    SpotPriceOption,
    TraceOption,
    WorkersOption,
    rates,
    target,
)  # fmt: skip
from doll.cli.output import emit

if TYPE_CHECKING:
    from doll.config import JobConfig
    from doll.provisioner.traces.availability import Preemption
    from doll.simulation.report import Summary
    from doll.simulation.settings import SimulationSettings
    from doll.simulation.system import System


# Without a job file and options: the paper's setting.
_ALPHA, _CYCLE_S, _SERVICE_S, _SPOT_USD, _ON_DEMAND_USD = 0.9, 1000.0, 0.02, 0.158, 0.286


class ComputeTime(StrEnum):
    exponential = "exponential"
    constant = "constant"


def simulate(
    job: JobArgument = None,
    job_option: JobOption = None,
    overrides: SetOption = None,
    workers: WorkersOption = None,
    rate: RateOption = None,
    batch_size: BatchSizeOption = None,
    group_size: GroupSizeOption = None,
    updates: Annotated[
        int | None, typer.Option("--updates", "-J", min=1, help="End after so many updates.", show_default=False)
    ] = None,
    duration: Annotated[
        float | None,
        typer.Option(parser=seconds, metavar=METAVAR, help="End at this virtual time.", show_default=False),
    ] = None,
    service: ServiceOption = None,
    compute: Annotated[ComputeTime, typer.Option(help="Distribution of gradient times.")] = ComputeTime.exponential,
    arrival_scv: Annotated[float, typer.Option(min=0, help="Variation of arrivals: 1 Poisson, 0 regular.")] = 1.0,
    spot: Annotated[int, typer.Option(min=0, help="Preemptible slots, the slowest streams first.")] = 0,
    alpha: AlphaOption = None,
    cycle: CycleOption = None,
    trace: TraceOption = None,
    pool: PoolOption = None,
    deadline: DeadlineOption = None,
    replan: Annotated[
        float,
        typer.Option(
            parser=seconds,
            metavar=METAVAR,
            help="How often the planner is asked [default: 1m].",
            show_default=False,
        ),
    ] = 60.0,
    boot: BootOption = None,
    spot_price: SpotPriceOption = None,
    on_demand_price: OnDemandPriceOption = None,
    replacement: Annotated[
        bool,
        typer.Option("--replacement/--literal", help="Replace batches of lost workers, or wait (paper as printed)."),
    ] = True,
    arrivals_pause: Annotated[
        bool,
        typer.Option("--arrivals-pause/--arrivals-queue", help="What samples do while their worker is down."),
    ] = True,
    random_phase: Annotated[
        bool, typer.Option("--random-phase/--in-step", help="Begin with batches filled at random, or all empty.")
    ] = True,
    seed: SeedOption = 0,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for summary.json, updates.csv and simulation.png.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Simulate a whole job in virtual time: arrivals, batches, groups, gradients, preemptions, the planner.

    The parameter server's engine and policies are the production ones; nothing sleeps. Prints the update rate beside
    the formula's.

    Without a job file and options: the paper's 64 workers of 125 samples/s, K = 20, b = 256, 10000 updates; --alpha
    0.9, --cycle 1000, --service 20ms, --boot 0, --spot-price 0.158, --on-demand-price 0.286. With --deadline the
    planner moves slots so that the updates are done by then; --trace takes recorded availability in place of --alpha.

    Example: doll simulate -N 64 -K 20 --spot 30 --alpha 0.9 --out simulated
    """
    from doll.simulation.settings import SimulationSettings

    config = None
    if job is not None or job_option is not None:
        config = target(job, job_option, overrides).config
    elif overrides:
        raise usage("--set: expected a job file beside it")
    settings = SimulationSettings(
        **_settings(config, workers, rates(rate), batch_size, group_size, updates, duration),
        arrival_scv=arrival_scv, compute_s=_SERVICE_S if service is None else service, compute=compute.value,
        random_phase=random_phase, replacement=replacement, arrivals_pause=arrivals_pause,
        spot_usd_per_hour=_SPOT_USD if spot_price is None else spot_price,
        on_demand_usd_per_hour=_ON_DEMAND_USD if on_demand_price is None else on_demand_price, seed=seed,
    )  # fmt: skip
    if spot > settings.num_workers:
        raise usage(f"--spot: expected 0 .. {settings.num_workers} (the workers), got {spot}")
    if pool is not None and trace is None:
        raise usage("--pool: expected --trace beside it")
    preemption, share = _preemption(
        settings, _ALPHA if alpha is None else alpha, _CYCLE_S if cycle is None else cycle, trace, pool
    )
    system = _system(settings, spot, preemption, deadline, replan, boot or 0.0)
    _run(system)
    from doll.monitor.history import json_safe
    from doll.simulation.report import draw, summarise, write_csv

    summary = summarise(system, share)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_csv(system.trajectory, out / "updates.csv")
        (out / "summary.json").write_text(json.dumps(json_safe(summary.to_dict()), indent=2) + "\n", encoding="utf-8")
        draw(system.trajectory, summary, out / "simulation.png")
    emit(as_json, summary.to_dict(), _text(summary, settings, deadline, out))


def _settings(
    config: JobConfig | None, workers: int | None, rate: list[float] | None, batch_size: int | None,
    group_size: int | None, updates: int | None, duration: float | None,
) -> dict[str, Any]:  # fmt: skip
    """Streams, batch, policy and end: flags first, then the job file, then the paper's setting."""
    from doll.config.policy import PolicyConfig
    from doll.ps.policies.doll import DollPolicyConfig

    policy: PolicyConfig = DollPolicyConfig(group_size=group_size or 20)
    if config is not None:
        workers = workers or config.data.workers
        batch_size = batch_size or config.data.batch_size
        if group_size is None:
            policy = config.training.policy
        if rate is None:
            rate = config.rates_per_s()
            if config.arrivals.process == "asap":
                raise usage("the job file's source sends as fast as it can: expected --rate, samples per second")
            rate = rate if len(set(rate)) > 1 else rate[:1]
        if updates is None and duration is None:
            updates, duration = config.stop.updates, config.stop.seconds
    rate, workers = rate or [125.0], workers or (len(rate) if rate and len(rate) > 1 else 64)
    if len(rate) not in (1, workers):
        raise usage(f"--rate: expected one, or one for each of {workers} workers, got {len(rate)}")
    if updates is None and duration is None:
        updates = 10_000
    rates = rate * workers if len(rate) == 1 else rate
    return {
        "rates_per_s": rates, "batch_size": batch_size or 256, "policy": policy, "updates": updates,
        "seconds": duration,
    }  # fmt: skip


def _preemption(
    settings: SimulationSettings, alpha: float, cycle_s: float, traces: Path | None, pool: str | None
) -> tuple[Preemption, float]:
    """When preemptible machines are up, and for which share of the time."""
    import numpy as np

    from doll.provisioner.traces.availability import Markov, Recorded

    if traces is None:
        # A stream of its own: what arrives does not depend on how machines vanish.
        return Markov(alpha, cycle_s, np.random.default_rng((settings.seed, 1))), alpha
    from doll.provisioner.traces.recordings import pool_of

    chosen = pool_of(traces, pool, "--pool")
    return Recorded.of(chosen, settings.num_workers), chosen.alpha


def _system(
    settings: SimulationSettings, spot: int, preemption: Preemption, deadline_s: float | None, replan_s: float,
    boot_s: float,
) -> System:  # fmt: skip
    from doll.simulation.system import System

    n = settings.num_workers
    if deadline_s is None:
        slowest = sorted(range(n), key=lambda slot: settings.rates_per_s[slot])[:spot]
        return System(settings, spot=[slot in set(slowest) for slot in range(n)], preemption=preemption, boot_s=boot_s)
    if settings.updates is None:
        raise usage("--deadline: expected --updates too, the work that is to be done by then")
    from doll.provisioner.planning.state import PlannerSettings
    from doll.simulation.provisioning import PlannerProvisioner
    from doll.simulation.report import group_size

    size = group_size(settings)
    planner = PlannerSettings(
        samples=settings.updates * size * settings.batch_size, group_size=size, batch_size=settings.batch_size,
        deadline_s=deadline_s, replan_s=replan_s, boot_s=boot_s,
    )  # fmt: skip
    return System(
        settings, spot=[True] * n, preemption=preemption, provisioner=PlannerProvisioner(planner), boot_s=boot_s
    )


def _run(system: System) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    settings = system.settings
    total = settings.updates if settings.updates is not None else settings.seconds
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f} %"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("simulating", total=total)

        def show(updates: int, seconds: float) -> None:
            done = updates if settings.updates is not None else seconds
            bar.update(task, completed=done, description=f"{updates} updates, {seconds:.0f} s simulated")

        system.run(show)


def _text(summary: Summary, settings: SimulationSettings, deadline_s: float | None, out: Path | None) -> str:
    ratio = summary.rate_measured / summary.rate_at_observed_uptime
    lines = [
        f"{summary.updates} updates in {summary.seconds:.1f} simulated s; {summary.workers} workers, "
        f"{summary.mean_up:.2f} up on average, {summary.preemptions} preemptions",
        f"update rate: {summary.rate_measured:.5g} /s; formula {summary.rate_formula:.5g} /s; with the up-time drawn "
        f"{summary.rate_at_observed_uptime:.5g} /s (measured {100 * (ratio - 1):+.2f} %)",
        f"queue: {summary.mean_waiting_batches:.2f} batches on average, {summary.max_waiting_batches} at most; a group "
        f"takes {summary.mean_group_s:.4g} s",
        f"Proposition 1: margin {summary.margin_sufficient:.3g} in the sufficient form, "
        f"{summary.margin_necessary:.3g} in the necessary one (above 1 is stable)",
        f"cost: {summary.usd:.2f} USD, {100 * summary.cost_ratio:.2f} % of all on demand; {summary.moves} moves",
    ]
    if deadline_s is not None:
        done = settings.updates is not None and summary.updates >= settings.updates
        met = done and summary.seconds <= deadline_s
        lines.append(f"deadline {deadline_s:.1f} s: {'met' if met else 'MISSED'}")
    if out is not None:
        lines.append(f"written: {out / 'summary.json'}, updates.csv, simulation.png")
    return "\n".join(lines)
