"""`doll plan` estimates, before a job runs, whether it can meet its goals, which workers run on spot, and the cost.
`doll calibrate` estimates the constants of a plan from the folder of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from doll import extensions
from doll.cli import options
from doll.cli.output import emit

if TYPE_CHECKING:
    from doll.config import JobConfig, PlanConfig
    from doll.provisioner.planning.assessment import Assessment
    from doll.provisioner.planning.functions import FunctionCost
    from doll.provisioner.planning.regions import RegionCosts


@dataclass(frozen=True, kw_only=True)
class GoalOptions:
    """Options for the goals of a job; each field has the name of the key of the plan section that it replaces."""

    updates: Annotated[float | None, typer.Option("--updates", "-J", help="Updates to the target error (J).")] = None
    target_error: Annotated[float | None, typer.Option(help="Target error; J is then estimated from --pilot.")] = None
    pilot: Annotated[
        Path | None,
        typer.Option(metavar="RUN", resolve_path=True, help="Folder of the pilot run from which J is estimated."),
    ] = None
    deadline_s: options.DeadlineOption = None
    budget_usd: Annotated[float | None, typer.Option("--budget", help="Budget for all workers, USD.")] = None
    risk: Annotated[float | None, typer.Option(help="Accepted probability of missing the deadline, at most 0.5.")] = (
        None
    )


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """Options of `--pipeline`."""

    pipeline: Annotated[
        Path | None,
        typer.Option(metavar="FLEET", help="Plan pipelines on the devices that this file lists (YAML or CSV)."),
    ] = None
    profile: Annotated[
        Path | None, typer.Option(help="With --pipeline: profile of doll profile [default: worker.pipeline.profile].")
    ] = None
    stages: Annotated[
        int | None,
        typer.Option(min=1, help="With --pipeline: devices per worker [default: worker.pipeline.stages]."),
    ] = None
    clock_distance: Annotated[
        int | None, typer.Option(min=0, help="With --pipeline: clock distance D, waves [default: job file, or 0].")
    ] = None
    in_flight: Annotated[
        int | None, typer.Option(min=1, help="With --pipeline: minibatches in flight (N_m) [default: the best].")
    ] = None
    optimizer_copies: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="With --pipeline: gradients and optimizer state, in multiples of the weights [default: as in DOLL].",
        ),
    ] = None
    within_node: Annotated[
        float | None, typer.Option(min=1e-6, help="With --pipeline: bandwidth inside a node, GB/s.")
    ] = None
    between_nodes: Annotated[float | None, typer.Option(min=1e-6, help="With --pipeline: GB/s between nodes.")] = None


@dataclass(frozen=True, kw_only=True)
class RegionsOptions:
    """Options for workers in several regions."""

    also_in: Annotated[
        list[str] | None,
        typer.Option(
            metavar="REGION[=TYPE]",
            help="Another region that workers may use, with its instance type if it differs; may be repeated.",
        ),
    ] = None
    price_table: Annotated[
        Path | None, typer.Option(metavar="CSV", help="With --also-in: prices by region [default: a table in DOLL].")
    ] = None
    egress: options.EgressOption = None
    model_mb: options.ModelMbOption = None
    record_bytes: Annotated[
        float | None, typer.Option(min=0, help="With --also-in: bytes of a sample in Kafka [default: not counted].")
    ] = None


def plan(
    job: options.JobOptions,
    stream: options.StreamOptions,
    goals: GoalOptions,
    market: options.MarketOptions,
    *,
    instance: options.InstanceOption = None,
    region: options.RegionOption = None,
    regions: RegionsOptions,
    stack: options.StackOption = "self_managed",
    functions_mb: Annotated[
        int | None,
        typer.Option(min=128, max=10_240, help="Compare with AWS Lambda functions of this memory [fleet.memory_mb]."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="HTML", help="Write charts of cost and risk by number of spot workers.")
    ] = None,
    pipeline: PipelineOptions,
    as_json: options.JsonOption = False,
) -> None:
    """Plan a job: whether it can meet target error, deadline and budget, and which workers run on spot machines.

    Values are taken from the options, otherwise from the job file's plan section. If no price is given, the price of
    --instance in --region is taken from a table in DOLL. Exit code 3 if no feasible plan exists. With --pipeline FLEET,
    the plan says which devices of the fleet form a worker, as stages of a pipeline, and how fast each worker is.

    With --also-in, workers may be in several regions, and their traffic with the home region (--region) is part of the
    prices. Live fleets launch workers in one region.

    Example: doll plan digits --instance c7g.large --region eu-west-1 --deadline 4m

    Example: doll plan -N 64 --rate 125 -K 20 -b 256 -J 10000 --alpha 0.9 --deadline 112m
    --spot-price 0.158 --on-demand-price 0.286
    """
    from doll.amounts import duration
    from doll.config import PlanConfig
    from doll.monitor.state.pilot_run import with_pilot
    from doll.provisioner.planning.assessment import assess, report_text
    from doll.provisioner.planning.plan_request import changed_plan, plan_request
    from doll.provisioner.prices.shipped import StackKind, cold_starts, cost_lines, service_costs, sum_of, with_prices

    config = job.config_if_named()
    if pipeline.pipeline is not None:
        plan_pipeline = extensions.need(extensions.PLANNERS, "pipeline", "doll plan --pipeline")
        plan_pipeline(pipeline.pipeline, config, pipeline, plot=plot, as_json=as_json)
        return
    if alone := [name for name, value in vars(pipeline).items() if value is not None]:
        raise typer.BadParameter(f"--{alone[0].replace('_', '-')}: expected --pipeline FLEET with it")
    section = changed_plan(config.plan if config is not None else PlanConfig(), **vars(goals), **vars(market))
    has_price = market.spot_usd_per_h is not None or market.on_demand_usd_per_h is not None
    if has_price and (instance is not None or region is not None or regions.also_in):
        raise typer.BadParameter(
            "expected --instance and --region (and --also-in), or --spot-price and --on-demand-price, got some of both"
        )
    section, pilot_notes = with_pilot(config, section)
    price_notes: list[str] = []
    in_regions = _regions(config, section, stream, instance, region, regions, price_notes)
    if in_regions is None:
        section = with_prices(config, section, instance, region, price_notes)
    else:
        section = section.model_copy(update=vars(in_regions.cheapest))
    request, notes = plan_request(config, section, stream.rates_per_s(config), stream.group_size, stream.batch_size)
    notes = [*price_notes, *pilot_notes, *notes]
    simulated = config is not None and getattr(config.fleet, "speed_up", 1) != 1  # no part of it runs on AWS
    kind: StackKind | None = None if stack == "none" or simulated else stack
    assessment = assess(request)
    if config is not None and config.ps.shards == "auto":  # otherwise torch is not imported
        from doll.model.auto_shards import shards_text
        from doll.run.local.preflight import check_model

        model = check_model(config, begins=False)
        notes.append(shards_text(config, model.shards, model.values))
    if plot is not None:
        _save_charts(assessment, plot)
        notes.append(f"plot: {plot}")
    further, lines, static = None, list[str](), assessment.static
    if kind is not None and math.isfinite(static.expected_finish_s):
        seconds, spot = static.expected_finish_s, assessment.num_spot
        boots = cold_starts(
            spot, request.num_workers - spot, seconds, boot_s=request.planner.boot_s, cycle_s=request.planner.cycle_s,
            prices=request.prices,
        )  # fmt: skip
        costs = [*service_costs(kind, section.services, seconds), boots]
        head = f"Costs for {duration(seconds)}, with AWS's services in us-east-1, kafka_mode {kind}"
        lines = cost_lines(head, static.expected_cost_usd, costs)
        further = {
            "kind": kind, "lines": [line._asdict() for line in costs],
            "sum_usd": static.expected_cost_usd + sum_of(costs),
        }  # fmt: skip
    functions = _functions(assessment, config, functions_mb)
    beside = lines if functions is None else [*functions.lines(), *lines]
    beside = beside if in_regions is None else [*in_regions.lines(), *beside]
    document = {**assessment.to_dict(), "notes": notes, "stack": further}
    document["functions"] = None if functions is None else functions.to_dict()
    document["regions"] = None if in_regions is None else in_regions.to_dict()
    emit(as_json, document, report_text(assessment, notes, beside))
    if assessment.problem is not None:
        raise typer.Exit(assessment.problem.exit_code)


def _regions(
    config: JobConfig | None, section: PlanConfig, stream: options.StreamOptions, instance: str | None,
    region: str | None, given: RegionsOptions, notes: list[str],
) -> RegionCosts | None:  # fmt: skip
    """Return the prices in all regions with traffic; None without --also-in."""
    from doll.config.policy import default_policy
    from doll.provisioner.planning.regions import RegionCosts, policy_traffic
    from doll.provisioner.prices.regions import region_prices
    from doll.provisioner.prices.shipped import machine_of

    if not given.also_in:
        if alone := [name for name, value in vars(given).items() if value is not None and name != "also_in"]:
            raise typer.BadParameter(f"--{alone[0].replace('_', '-')}: expected --also-in REGION with it")
        return None
    kind, home = machine_of(config, instance, region)
    machines = [(home, kind)]
    for text in given.also_in:
        name, _, other = text.partition("=")
        if not name or name in dict(machines):
            raise typer.BadParameter(f"--also-in: expected a region that is not named twice, got {text!r}")
        machines.append((name, other or kind))
    if given.model_mb is None and config is None:
        raise typer.BadParameter("--also-in: expected --model-mb or a job file, for the traffic between regions")
    rates, batch = stream.rates_per_s(config), stream.batch_size or (config.data.batch_size if config else None)
    if batch is None:
        raise typer.BadParameter("--also-in: expected --batch-size or a job file, for the traffic between regions")
    policy = default_policy() if config is None else config.training.policy
    traffic = policy_traffic(
        policy, model_bytes=_model_bytes(config) if given.model_mb is None else 1e6 * given.model_mb,
        batch_size=batch, num_workers=len(rates), record_bytes=given.record_bytes or 0.0,
    )  # fmt: skip
    egress = options.EGRESS_USD_PER_GB if given.egress is None else given.egress
    per_worker = section.machines_per_worker or (config.machines_per_worker if config else 1)
    mean_rate = sum(rates) / len(rates) / per_worker
    priced = region_prices(machines, egress, given.price_table, datetime.now(UTC).date(), notes)
    notes.append(
        f"alpha {section.alpha:g} is the availability of one region; workers that leave a region after an interruption "
        "have at least this. `doll provision` launches workers in one region: the plan is an estimate"
    )
    return RegionCosts(priced, traffic, mean_rate, policy.name)


def _model_bytes(config: JobConfig | None) -> float:
    """Return the bytes of the job's weights, as float32. Imports torch."""
    from doll.run.local.preflight import check_model

    assert config is not None
    return 4.0 * check_model(config, begins=False).values


def _functions(assessment: Assessment, config: JobConfig | None, memory_mb: int | None) -> FunctionCost | None:
    """Return the cost in functions, if the job's fleet consists of functions or `memory_mb` is given."""
    from doll.config import LambdaFleetConfig
    from doll.provisioner.planning.functions import function_cost

    if config is not None and isinstance(config.fleet, LambdaFleetConfig):
        settings = config.fleet
    elif memory_mb is not None:
        settings = LambdaFleetConfig(kind="lambda", function="worker")
    else:
        return None
    if (machines := assessment.request.machines_per_worker) > 1:
        raise typer.BadParameter(f"--functions-mb: expected workers of one machine, got {machines} machines per worker")
    return function_cost(assessment, settings.model_copy(update={} if memory_mb is None else {"memory_mb": memory_mb}))


def _save_charts(assessment: Assessment, path: Path) -> None:
    """Write a page with charts of the expected cost and the risk, by number of workers on spot.

    Raises:
        BadParameter: the name of the file does not end with .html.
        ConfigError: the file cannot be written.
    """
    from doll.dashboard.saved_page import save_panels
    from doll.monitor.views.panels import line, panel
    from doll.process.files import refuse_unwritable
    from doll.provisioner.planning.assessment import risk_curve

    if path.suffix != ".html":
        raise typer.BadParameter(f"--plot: expected a name that ends with .html, got {path.name}")
    request, chosen = assessment.request, assessment.num_spot
    costs, misses = risk_curve(request)
    spot, percent = range(len(costs)), costs / assessment.all_on_demand_usd * 100
    plan, x_label = f"plan: {chosen}", "workers on spot, slowest streams first"
    cost = line("cost", spot, percent), line(plan, [chosen], [percent[chosen]], "mark")
    panels = [panel("Expected cost", x_label, "% of all on-demand", *cost)]
    if request.deadline_s is not None:
        late = line("P(late)", spot, misses), line(plan, [chosen], [misses[chosen]], "mark")
        panels.append(panel("Risk of missing the deadline, if the mix is kept", x_label, "P(late)", *late))
    limit = f", deadline {request.deadline_s:g} s" if request.deadline_s else ""
    headline = f"{request.num_workers} workers, J = {request.updates:g}, availability {request.alpha:g}{limit}"
    with refuse_unwritable(path):
        save_panels("Plan", headline, panels, path)


def calibrate(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN|JOB.yaml", help="Folder of a run, or a job file (its newest run is used)."),
    ],
    target_error: Annotated[
        float | None, typer.Option(help="Target error [default: from the job's plan or stop section].")
    ] = None,
    measure: Annotated[
        str | None, typer.Option(help="error_rate (1 - accuracy) or loss [default: plan.measure].")
    ] = None,
    runs_folder: Annotated[Path, typer.Option("--parent-folder", help="Folder that contains the job's runs.")] = Path(
        "runs"
    ),
    as_json: options.JsonOption = False,
) -> None:
    """Estimate the inputs of `doll plan` from a run: the number J of updates to the target error, and the service time.

    Fits beta * rho^J + gamma (Eq. 10) to the held-out error of a run with at least a dozen evaluations.

    Example: doll calibrate runs/digits-20260101-120000 --target-error 0.03
    """
    from doll.monitor.state.pilot_run import calibrate_run

    if measure not in (None, "error_rate", "loss"):
        raise typer.BadParameter(f"--measure: expected error_rate or loss, got {measure!r}")
    folder = run if run.is_dir() else _newest_run(run, runs_folder)
    calibration = calibrate_run(folder, measure, target_error)  # type: ignore[arg-type]  # checked above
    emit(as_json, {"run": str(folder), **calibration.to_dict()}, f"{folder}\n{calibration.text()}")


def _newest_run(job: Path, runs_folder: Path) -> Path:
    """Return the folder of the newest run of the job file."""
    from doll.errors import ConfigError
    from doll.run.target import open_target

    name = open_target(job, []).config.job
    runs = [path.parent for path in runs_folder.glob(f"{name}-*/updates.csv")]
    if not runs:
        raise ConfigError(f"no run of {name} in {runs_folder}: make a pilot run with: doll up {job}")
    return max(runs, key=lambda path: path.name)
