"""The controller's settings from a job file: its work, rates, limits and how its machines are billed. Pure."""

from __future__ import annotations

import math

import numpy as np

from doll.config import JobConfig, ProcessesFleetConfig
from doll.errors import ConfigError
from doll.provisioner.launch_state import LaunchLimits
from doll.provisioner.planning.plan_request import apply_speed_up, of_workers, updates_to_target
from doll.provisioner.planning.release_guard import ErrorTarget
from doll.provisioner.planning.scale_in import TunerSettings
from doll.provisioner.planning.state import PlannerSettings
from doll.provisioner.scale_in import ScaleInSettings
from doll.provisioner.settings import ControllerSettings

_LEAST_STALL_S = 900.0
_MOST_STALL_S = 3600.0
_UPDATES_OF_A_STALL = 10


def controller_settings(config: JobConfig) -> tuple[ControllerSettings, list[str]]:
    """What the job file asks of its provisioner, and notes on where its numbers come from.

    Args:
        config: a pilot run in its plan is resolved already (`doll.monitor.state.pilot_run.with_pilot`).

    Raises:
        ConfigError: the work or the rates are not known, or a number is out of its range.
    """
    notes: list[str] = []
    plan, machines = of_workers(config, apply_speed_up(config, config.plan, notes), notes)
    own = config.provision
    rates = config.rates_per_s()
    if not all(math.isfinite(rate) for rate in rates):
        raise ConfigError(
            "arrivals.process is asap, which states no rate: expected poisson or deterministic, with "
            "arrivals.rate_per_s as the samples per second of each worker's stream"
        )
    updates = updates_to_target(config, plan, notes)
    samples = updates * config.group_size * config.data.batch_size
    deadline_s = plan.deadline_s
    if deadline_s is None:
        deadline_s = 2 * samples / (max(plan.alpha, 0.01) * sum(rates))
        notes.append(f"no plan.deadline_s: cost is minimized as if the deadline were {deadline_s:.0f} s")
    every_s = own.every_s if own.every_s is not None else max(1.0, min(30.0, deadline_s / 200))
    local = isinstance(config.fleet, ProcessesFleetConfig)
    pool_backoff_s = own.pool_backoff_s if own.pool_backoff_s is not None else 0.0 if local else 180.0
    try:
        planner = PlannerSettings(
            samples=samples, group_size=config.group_size, batch_size=config.data.batch_size, deadline_s=deadline_s,
            budget_usd=plan.budget_usd, replan_s=every_s, boot_s=plan.boot_s, cycle_s=plan.cycle_s, rule=own.rule,
            guard=own.deadline_guard, margin=plan.margin, risk=plan.risk, spot_stable_s=own.spot_stable_s,
        )  # fmt: skip
    except ValueError as error:
        raise ConfigError(f"plan: {error}") from error
    limits = LaunchLimits(
        launches_per_min=own.launches_per_min, fallbacks_per_min=own.fallbacks_per_min, retry_s=min(30.0, 2 * every_s),
        pool_backoff_s=pool_backoff_s, early_s=min(3600.0, plan.cycle_s / 10), backoff_s=2 * every_s,
        boot_timeout_s=own.boot_timeout_s, silence_timeout_s=own.replace_after_s,
        max_failures=own.max_failures,
    )  # fmt: skip
    settings = ControllerSettings(
        planner=planner, rates_per_s=np.asarray(rates), samples_per_record=config.data.samples_per_record,
        prior_alpha=plan.alpha, limits=limits,
        heartbeat_timeout_s=own.heartbeat_timeout_s, target_error=plan.target_error if own.re_estimate else None,
        measure=plan.measure, scale_in=_scale_in(config), machines_per_worker=machines,
        max_stall_s=own.max_stall_s if own.max_stall_s is not None else _max_stall_s(planner, sum(rates)),
        releases_idle=config.arrivals.while_down == "queue",
    )  # fmt: skip
    return settings, notes


def _max_stall_s(planner: PlannerSettings, rate_per_s: float) -> float:
    """How long a job may stand still: a part of its deadline, and long enough for slow updates."""
    update_s = (planner.samples_per_update or planner.batch_size) / rate_per_s
    return max(min(max(planner.deadline_s / 4, _LEAST_STALL_S), _MOST_STALL_S), _UPDATES_OF_A_STALL * update_s)


def _scale_in(config: JobConfig) -> ScaleInSettings | None:
    """When workers are removed; None: never."""
    own, workers = config.provision.scale_in, config.data.workers
    if not own.enabled:
        return None
    batches = [config.training.policy.batches_per_update(count) for count in range(1, workers + 1)]
    # Fewer workers must be able to hold the batches of an update.
    room = config.worker.max_pending_batches
    fewest = max((count for count in range(1, workers + 1) if batches[count - 1] > room * count), default=0) + 1
    tuner = TunerSettings(
        every_s=own.every_s, horizon_s=own.horizon_s, threshold=own.threshold, knee_slope=own.knee_slope,
        min_workers=max(own.min_workers, fewest), elapsed_reference=own.elapsed_reference,
    )  # fmt: skip
    return ScaleInSettings(
        tuner=tuner, deadline_reserve=own.deadline_reserve, require_gain=own.require_gain, target=_target(config),
        batches_of_update=(0, *batches),
    )  # fmt: skip


def _target(config: JobConfig) -> ErrorTarget | None:
    """The held-out error that the job is to reach, by its plan or its stop rule."""
    plan, stop = config.plan, config.stop
    if plan.target_error is not None:
        return ErrorTarget(plan.target_error, plan.measure)
    if stop.loss is not None and stop.loss > 0:
        return ErrorTarget(stop.loss, "loss")
    if stop.accuracy is not None and stop.accuracy < 1:
        return ErrorTarget(1 - stop.accuracy, "error_rate")
    return None
