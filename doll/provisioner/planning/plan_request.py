"""The plan request of a job, made from the job file's plan section, with notes on the origin of its numbers. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from pydantic import ValidationError

from doll.config import JobConfig, PlanConfig, ProcessesFleetConfig
from doll.errors import ConfigError
from doll.provisioner.planning.assessment import PlanRequest
from doll.provisioner.planning.state import PlannerSettings
from doll.theory import checks
from doll.theory.cost import Prices, work_samples
from doll.theory.preemption import gang_availability

HOW_TO_MEASURE: Final = (
    "J, the number of updates to the error target, is not known. Measure it with a pilot run:\n"
    "  doll up JOB.yaml                               until the error is low enough, or for a few minutes\n"
    "  doll calibrate runs/<run> --target-error 0.05  J with its interval, service_s, rates\n"
    "  doll plan JOB.yaml --pilot runs/<run> --target-error 0.05 ...\n"
    "or set it: --updates J (plan.updates in the job file)"
)


def plan_request(
    config: JobConfig | None,
    section: PlanConfig,
    rates_per_s: Sequence[float],
    group_size: int | None = None,
    batch_size: int | None = None,
) -> tuple[PlanRequest, list[str]]:
    """Return the request from the job file (or None) and options, and notes on the origin of its numbers.

    Args:
        section: the plan; a pilot run must be resolved already (`doll.monitor.state.pilot_run.with_pilot`).
        rates_per_s: λ_n of each stream per second, shape (N,), counted as in the job file: a record counts as one
            sample, a packed record as m samples.
        group_size, batch_size: K and b, counted as in the job file. None: the values of the job file.

    Raises:
        ConfigError: a value is missing; the message names its option and its key.
    """
    notes: list[str] = []
    section = apply_speed_up(config, section, notes)
    section, machines = of_workers(config, section, notes)
    size = group_size or (config.group_size if config else None)
    records = batch_size or (config.data.batch_size if config else None)
    spot, on_demand = section.spot_usd_per_h, section.on_demand_usd_per_h
    if size is None or records is None or spot is None or on_demand is None:
        missing = [
            f"{option} ({key})"
            for option, key, value in (
                ("--group-size", "training.policy.group_size", size),
                ("--batch-size", "data.batch_size", records),
                ("--spot-price", "plan.spot_usd_per_h", spot),
                ("--on-demand-price", "plan.on_demand_usd_per_h", on_demand),
            )
            if value is None
        ]
        raise ConfigError(f"plan: expected a value for {', '.join(missing)}")
    per_record = section.mean_samples or 1.0
    rates, batch = [per_record * rate for rate in rates_per_s], per_record * records
    if config is not None:
        policy = config.training.policy
        samples_per_s = policy.update_rate_per_s(rates_per_s, records) * size * records
        if group_size is None and not math.isclose(samples_per_s, sum(rates_per_s)):
            notes.append(f"policy {policy.name}: planned as groups of K = {size} batches of any workers")
    updates = updates_to_target(config, section, notes)
    planner = planner_settings(section, rates, updates, size, batch)
    try:
        request = PlanRequest(
            planner=planner, rates_per_s=np.asarray(rates, dtype=np.float64), prices=Prices(spot, on_demand),
            alpha=section.alpha, has_deadline=section.deadline_s is not None, service_s=section.service_s,
            machines_per_worker=machines, mean_samples=per_record,
        )  # fmt: skip
    except ValueError as error:
        raise ConfigError(f"plan: {error}") from error
    return request, notes


def planner_settings(
    section: PlanConfig, rates_per_s: Sequence[float], updates: float, group_size: int, batch_size: float
) -> PlannerSettings:
    """Return the planner's settings of a plan section, for `doll plan` and for a running job. The default deadline is
    long enough even for all workers on spot. Raises ConfigError if a number is out of its range."""
    samples = work_samples(updates, group_size, batch_size)
    deadline_s = section.deadline_s
    try:
        if deadline_s is None:
            deadline_s = 2 * samples / (max(section.alpha, 0.01) * float(checks.rates(rates_per_s).sum()))
        return PlannerSettings(
            samples=samples, group_size=group_size, batch_size=batch_size, deadline_s=deadline_s,
            budget_usd=section.budget_usd, boot_s=section.boot_s, cycle_s=section.cycle_s, margin=section.margin,
            risk=section.risk,
        )  # fmt: skip
    except ValueError as error:
        raise ConfigError(f"plan: {error}") from error


def changed_plan(section: PlanConfig, **changes: Any) -> PlanConfig:
    """Return the plan section with other values, validated like the job file. None keeps a value. J and an error target
    exclude each other, so the one that is given replaces the other. Raises ConfigError if a value is out of its
    range."""
    given = {name: value for name, value in changes.items() if value is not None}
    values = section.model_dump()
    if "updates" in given:
        values["target_error"] = None
    elif "target_error" in given:
        values["updates"] = None
    try:
        return PlanConfig.model_validate({**values, **given})
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"plan{'.' if key else ''}{key}: {first['msg']}, got {first['input']!r}") from error


def apply_speed_up(config: JobConfig | None, section: PlanConfig, notes: list[str]) -> PlanConfig:
    """Convert the section's prices and cycle to real time if the job's market is replayed faster. `notes` gets a
    line."""
    if config is None or not isinstance(config.fleet, ProcessesFleetConfig) or config.fleet.speed_up == 1:
        return section
    speed = config.fleet.speed_up
    notes.append(
        f"market time runs {speed:g} times faster than real time (fleet.speed_up): a second is billed as {speed:g}, "
        f"the mean time between two interruptions is {section.cycle_s / speed:g} s"
    )
    return section.model_copy(update={**_prices(section, speed), "cycle_s": section.cycle_s / speed})


def _prices(section: PlanConfig, factor: float) -> dict[str, float | None]:
    """Return the stated prices of the section times `factor`."""
    prices = {"spot_usd_per_h": section.spot_usd_per_h, "on_demand_usd_per_h": section.on_demand_usd_per_h}
    return {name: None if usd is None else usd * factor for name, usd in prices.items()}


def of_workers(config: JobConfig | None, section: PlanConfig, notes: list[str]) -> tuple[PlanConfig, int]:
    """Return the section with prices and availability of a worker instead of a machine, and the number of machines per
    worker. Call this function only once.

    A worker with k machines is up only if all of them are up, and its prices are k times those of a machine. Its
    availability is that of k independent machines (`doll.theory.preemption.gang_availability`), unless the section
    states the availability of a worker. `notes` gets a line if a value has changed.
    """
    machines = section.machines_per_worker
    if machines is None:
        machines = 1 if config is None else config.model_copy(update={"plan": section}).machines_per_worker
    if machines == 1:
        return section, 1
    prices = _prices(section, machines)
    if section.availability_of == "worker":
        notes.append(
            f"plan.availability_of is worker: alpha {section.alpha:g} and cycle {section.cycle_s:g} s are those of a "
            f"worker with all of its {machines} machines"
        )
        return section.model_copy(update=prices), machines
    alpha, cycle_s = gang_availability(machines, section.alpha, section.cycle_s)
    notes.append(
        f"a worker is up while all of its {machines} machines are: availability {section.alpha:g}^{machines} = "
        f"{alpha:.4g}, cycle {cycle_s:.4g} s instead of {section.cycle_s:.4g} s, for machines that come and go "
        "independently (plan.availability_of: worker states that of a worker)"
    )
    return section.model_copy(update={**prices, "alpha": alpha, "cycle_s": cycle_s}), machines


def updates_to_target(config: JobConfig | None, section: PlanConfig, notes: list[str]) -> float:
    """Return J (the number of updates) from the plan or the stop rule. `notes` gets a line on its origin, unless the
    plan states J. Raises ConfigError if J is not known."""
    if section.updates is not None:
        return float(section.updates)
    if config is not None and section.target_error is None and config.stop.updates is not None:
        notes.append(
            f"J = {config.stop.updates} is the job's stop.updates, a cap: `doll calibrate` on a pilot run shows how "
            f"soon the error target is met"
        )
        return float(config.stop.updates)
    if config is not None and section.target_error is None and config.stop.samples is not None:
        samples = config.group_size * config.data.batch_size * (section.mean_samples or 1.0)
        updates = math.ceil(config.stop.samples / samples)
        notes.append(f"J = {updates}, of {samples:g} samples each, is the job's stop.samples")
        return float(updates)
    raise ConfigError(HOW_TO_MEASURE)
