"""`doll plan`: what a job will cost, how long it takes, and what to put on spot, before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

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
    RateOption,
    ServiceOption,
    SetOption,
    SpotPriceOption,
    WorkersOption,
    rates,
    target,
)
from doll.cli.output import emit

if TYPE_CHECKING:
    from doll.config import JobConfig, PlanConfig
    from doll.provisioner.planning.assessment import Assessment, PlanRequest

HOW_TO_MEASURE = (
    "J, the number of updates that meets the error target, is not known. Measure it with a pilot run:\n"
    "  doll up JOB.yaml                               until the error is low enough, or for a few minutes\n"
    "  doll calibrate runs/<run> --target-error 0.05  J with its interval, service_s, rates\n"
    "  doll plan JOB.yaml --pilot runs/<run> --target-error 0.05 ...\n"
    "or state it: --updates J (plan.updates in the job file)"
)


def plan(
    job: JobArgument = None,
    job_option: JobOption = None,
    overrides: SetOption = None,
    updates: Annotated[float | None, typer.Option("--updates", "-J", help="J: updates that meet the target.")] = None,
    target_error: Annotated[float | None, typer.Option(help="Error to reach; J then comes from --pilot.")] = None,
    pilot: Annotated[Path | None, typer.Option(metavar="RUN", help="Folder of a run to learn J from.")] = None,
    workers: WorkersOption = None,
    rate: RateOption = None,
    group_size: GroupSizeOption = None,
    batch_size: BatchSizeOption = None,
    deadline: DeadlineOption = None,
    budget: Annotated[float | None, typer.Option(help="USD.")] = None,
    spot_price: SpotPriceOption = None,
    on_demand_price: OnDemandPriceOption = None,
    alpha: AlphaOption = None,
    cycle: CycleOption = None,
    boot: BootOption = None,
    risk: Annotated[float | None, typer.Option(help="Accepted probability of being late, up to 0.5.")] = None,
    service: ServiceOption = None,
    plot: Annotated[Path | None, typer.Option(metavar="PNG", help="Draw cost and risk over spot workers.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Say whether a job can meet its target, deadline and budget, and with which workers on spot.

    Values come from the job file's plan section, then from the options. Exit 3 when it cannot be met.

    Example: doll plan -N 64 --rate 125 -K 20 -b 256 -J 10000 --alpha 0.9 --deadline 112m
    --spot-price 0.158 --on-demand-price 0.286
    """
    from doll.config import PlanConfig
    from doll.provisioner.planning.assessment import assess

    config = target(job, job_option, overrides).config if job is not None or job_option is not None else None
    if config is None and overrides:
        raise usage("--set: expected a job file to override")
    section = config.plan if config else PlanConfig()
    given: dict[str, Any] = {
        "updates": updates,
        "target_error": target_error,
        "pilot": pilot.resolve() if pilot else None,
        "deadline_s": deadline,
        "budget_usd": budget,
        "spot_usd_per_h": spot_price,
        "on_demand_usd_per_h": on_demand_price,
        "alpha": alpha,
        "cycle_s": cycle,
        "risk": risk,
        "service_s": service,
        "boot_s": boot,
    }
    if updates is not None:
        section = section.model_copy(update={"target_error": None})
    elif target_error is not None:
        section = section.model_copy(update={"updates": None})
    section = _checked(section, {name: value for name, value in given.items() if value is not None})
    request, notes = ask(config, section, _rates(config, workers, rates(rate)), group_size, batch_size)
    assessment = assess(request)
    if plot is not None:
        from doll.monitor.plan_plot import draw

        draw(assessment, plot)
        notes.append(f"plot: {plot}")
    emit(as_json, {**assessment.to_dict(), "notes": notes}, text(assessment, notes))
    if assessment.problem is not None:
        raise typer.Exit(assessment.problem.exit_code)


def ask(
    config: JobConfig | None, section: PlanConfig, rates: list[float], group_size: int | None, batch_size: int | None
) -> tuple[PlanRequest, list[str]]:
    """The request that job file and options pose, and notes on where its numbers come from.

    Raises:
        ConfigError: a value is missing; the message names its option and its key.
    """
    from doll.errors import ConfigError
    from doll.provisioner.planning.assessment import PlanRequest
    from doll.theory.cost import Prices

    notes: list[str] = []
    section = apply_speed_up(config, section, notes)
    size = group_size or (config.group_size if config else None)
    batch = batch_size or (config.data.batch_size if config else None)
    spot, on_demand = section.spot_usd_per_h, section.on_demand_usd_per_h
    if size is None or batch is None or spot is None or on_demand is None:
        missing = [
            f"{option} ({key})"
            for option, key, value in (
                ("--group-size", "training.policy.group_size", size),
                ("--batch-size", "data.batch_size", batch),
                ("--spot-price", "plan.spot_usd_per_h", spot),
                ("--on-demand-price", "plan.on_demand_usd_per_h", on_demand),
            )
            if value is None
        ]
        raise ConfigError(f"plan: expected a value for {', '.join(missing)}")
    if config is not None and config.training.policy.name != "doll":
        notes.append(f"policy {config.training.policy.name}: planned as groups of K = {size} batches of any workers")
    updates, service_s = work(config, section, notes)
    try:
        request = PlanRequest(
            rates_per_s=rates,  # type: ignore[arg-type]  # checked and converted by PlanRequest
            group_size=size,
            batch_size=batch,
            updates=updates,
            prices=Prices(spot, on_demand),
            alpha=section.alpha,
            cycle_s=section.cycle_s,
            deadline_s=section.deadline_s,
            budget_usd=section.budget_usd,
            risk=section.risk,
            boot_s=section.boot_s,
            margin=section.margin,
            service_s=service_s,
        )
    except ValueError as error:
        raise ConfigError(f"plan: {error}") from error
    return request, notes


def apply_speed_up(config: JobConfig | None, section: PlanConfig, notes: list[str]) -> PlanConfig:
    """The section in the time of this machine, where the job's market is replayed faster: prices and cycle change."""
    from doll.config import ProcessesFleetConfig

    if config is None or not isinstance(config.fleet, ProcessesFleetConfig) or config.fleet.speed_up == 1:
        return section
    speed = config.fleet.speed_up
    notes.append(
        f"the market runs {speed:g} times as fast as the job (fleet.speed_up): a second is billed as {speed:g}, spot "
        f"goes and comes once in {section.cycle_s / speed:g} s"
    )
    prices = {
        name: None if price is None else price * speed
        for name, price in (
            ("spot_usd_per_h", section.spot_usd_per_h),
            ("on_demand_usd_per_h", section.on_demand_usd_per_h),
        )
    }
    return section.model_copy(update={**prices, "cycle_s": section.cycle_s / speed})


def work(config: JobConfig | None, section: PlanConfig, notes: list[str]) -> tuple[float, float | None]:
    """J and the service time; notes on where J comes from.

    Raises:
        ConfigError: J is not known.
    """
    from doll.errors import ConfigError

    service_s = section.service_s
    if section.pilot is not None:
        from doll.cli.calibrate import calibrate_run

        path = config.path(section.pilot) if config else section.pilot
        calibration = calibrate_run(path, section.measure, section.target_error)
        service_s = service_s or calibration.service_s
        if section.updates is None and section.target_error is not None:
            updates_to_target = calibration.updates_to_target
            assert updates_to_target is not None
            notes.append(
                f"J = {updates_to_target.point:g} (90 % interval {updates_to_target.low:g} .. {updates_to_target.high:g}) from {path}"
            )
            return updates_to_target.point, service_s
    if section.updates is not None:
        return float(section.updates), service_s
    if config is not None and section.target_error is None and config.stop.updates is not None:
        notes.append(
            f"J = {config.stop.updates} is the job's stop.updates, a cap: `doll calibrate` on a pilot run tells how "
            f"soon the error target is met"
        )
        return float(config.stop.updates), service_s
    raise ConfigError(HOW_TO_MEASURE)


def _checked(section: PlanConfig, changes: dict[str, Any]) -> PlanConfig:
    """The plan section with options in it, by the job file's own rules."""
    from pydantic import ValidationError

    from doll.config import PlanConfig
    from doll.errors import ConfigError

    try:
        return PlanConfig.model_validate({**section.model_dump(), **changes})
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"plan{'.' if key else ''}{key}: {first['msg']}, got {first['input']!r}") from error


def _rates(config: JobConfig | None, workers: int | None, given: list[float] | None) -> list[float]:
    """λ_n of every stream."""
    import math

    from doll.errors import ConfigError

    count = workers or (config.data.workers if config else None)
    if given is not None:
        rates = given
    elif config is not None:
        rates = config.rates_per_s() if workers is None else sorted(set(config.rates_per_s()))
        if not all(math.isfinite(value) for value in rates):
            raise ConfigError(
                "arrivals.process is asap, which states no rate: give --rate, samples per second of a stream"
            )
    else:
        raise usage("expected a job file, or --rate (and --workers, --group-size, --batch-size, --updates)")
    if len(rates) == 1:
        return rates * (count or 1)
    if count is not None and len(rates) != count:
        raise usage(f"--rate: expected one rate, or one for each of {count} workers, got {len(rates)}")
    return rates


def text(assessment: Assessment, notes: list[str]) -> str:
    """The answer for people."""
    request, static = assessment.request, assessment.static
    count = request.num_workers
    lines = []
    if assessment.problem is not None:
        lines += [f"NOT FEASIBLE: {assessment.problem}", "", "The best that can be done:"]
    else:
        what = {
            "none": "nothing binds: all workers may be on spot",
            "deadline": "the deadline binds: one more worker on spot would be late in expectation",
            "risk": "the risk binds: one more worker on spot would be late too often",
            "price": "the prices bind: more workers on spot would not be cheaper",
            "budget": "the budget binds: only by planning anew as the job goes it is expected to suffice",
        }[assessment.binding]
        lines.append(f"Feasible; {what}.")
    lines += [
        f"  spot {assessment.num_spot} of {count} workers, on-demand {count - assessment.num_spot}",
        *_which(assessment),
        f"  cost    {static.expected_cost_usd:.4f} +- {static.cost_sd_usd:.4f} USD, {assessment.savings:+.1%} saved of "
        f"{assessment.all_on_demand_usd:.4f} USD on-demand",
        f"  finish  {_time(static.expected_finish_s)} +- {_time(static.finish_sd_s)}"
        + (f", deadline {_time(request.deadline_s)}" if request.deadline_s else ", no deadline given"),
    ]
    if request.deadline_s is not None:
        lines.append(f"  P(late) {_chance(static.miss_prob)} if the mix is kept to the end")
    if assessment.adaptive is not None:
        kept = f", P(late) {_chance(assessment.adaptive.miss_prob)}" if request.deadline_s else ""
        lines.append(
            f"Adaptive planner with guard: about {assessment.adaptive.expected_cost_usd:.4f} +- "
            f"{assessment.adaptive.cost_sd_usd:.4f} USD{kept} while on-demand workers boot in {request.boot_s:g} s"
        )
    if assessment.bounds is not None:
        lines.append(
            f"Corollary 2: the best mix costs {assessment.bounds[0]:.2%} to {assessment.bounds[1]:.2%} of on-demand"
        )
    lines.append(f"All on spot: {assessment.all_spot_usd:.4f} USD, {_time(assessment.all_spot_s)} expected")
    if assessment.stability is not None:
        lines.append(
            f"Stability: {assessment.stability.verdict}; margin {assessment.stability.sufficient:.3g} (sufficient form), "
            f"{assessment.stability.necessary:.3g} (necessary form)"
        )
    lines += [f"- {line}" for line in (*assessment.advice, *notes)]
    return "\n".join(lines)


def _chance(probability: float) -> str:
    return "below 1e-6" if probability < 1e-6 else f"{probability:.3g}"


def _which(assessment: Assessment) -> list[str]:
    """Streams by market with the reason, as ranges."""
    from doll.provisioner.planning.planner import slot_ranges

    lines = []
    reasons = assessment.reasons()
    for market, spot in (("spot", True), ("on-demand", False)):
        slots = [slot for slot, on_spot in enumerate(assessment.mix) if bool(on_spot) is spot]
        if slots:
            why = reasons[slots[0]].split(": ", 1)[1]
            rates = assessment.request.rates_per_s[slots]
            span = f"{rates.min():g}" if rates.min() == rates.max() else f"{rates.min():g} .. {rates.max():g}"
            lines.append(f"    {market}: streams {slot_ranges(slots)} ({span} samples/s); {why}")
    return lines


def _time(seconds: float) -> str:
    if seconds < 600 or seconds == float("inf"):
        return f"{seconds:.4g} s"
    return f"{seconds:.0f} s ({seconds / 3600:.2f} h)"
