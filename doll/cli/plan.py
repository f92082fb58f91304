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
    from doll.monitor.pilot_run import with_pilot
    from doll.provisioner.planning.assessment import assess
    from doll.provisioner.planning.assessment_report import report_text
    from doll.provisioner.planning.plan_request import plan_request

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
    section, notes = with_pilot(config, section)
    request, more = plan_request(config, section, _rates(config, workers, rates(rate)), group_size, batch_size)
    notes += more
    assessment = assess(request)
    if plot is not None:
        from doll.monitor.plan_plot import draw

        draw(assessment, plot)
        notes.append(f"plot: {plot}")
    emit(as_json, {**assessment.to_dict(), "notes": notes}, report_text(assessment, notes))
    if assessment.problem is not None:
        raise typer.Exit(assessment.problem.exit_code)


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
