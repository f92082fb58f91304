"""The settings that a job gives its provisioner."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from doll.config import JobConfig, ProcessesFleetConfig
from doll.config.provision import PauseConfig, minutes_of
from doll.errors import ConfigError
from doll.extras import require
from doll.provisioner.launch_state import LaunchLimits
from doll.provisioner.planning.pauses import PauseSettings
from doll.provisioner.planning.plan_request import apply_speed_up, of_workers, planner_settings, updates_to_target
from doll.provisioner.planning.state import PlannerSettings
from doll.provisioner.planning.tuner import TunerSettings
from doll.provisioner.scale_in import ErrorTarget, ScaleInSettings
from doll.theory.checks import Floats

ALARM_S: Final = 300.0
"""Time without progress, or until a worker has joined, after which an alarm is raised."""
_LEAST_STALL_S = 900.0
_MOST_STALL_S = 3600.0
_UPDATES_OF_A_STALL = 10


@dataclass(frozen=True)
class ControllerSettings:
    """The settings of a job and of its provisioner.

    Attributes:
        planner: work, deadline (on the job's clock), budget and behaviour. `replan_s` is the longest time between two
            turns, which the caller must not exceed.
        rates_per_s: λ_n of the job file, samples per second, shape (N,); one rate per slot.
        samples_per_record: average number of samples that the task makes of one record, including the m samples of
            packed records.
        prior_alpha: assumed availability of spot before anything is observed.
        heartbeat_timeout_s: a worker that sends nothing for this time, while others do, counts as not working.
        target_error, measure: error target, and its measure, for new estimates of the work from the job's held-out
            errors. None: the work stays as planned.
        machines_per_worker: k, number of machines of an instance, which has either all of them or none. The feed has
            prices of one machine.
        max_stall_s: paid time without an update after which all machines are ended.
        releases_idle: whether machines are ended if the source sends nothing for `max_stall_s`, and launched again when
            it sends. False if the source waits for the workers.
    """

    planner: PlannerSettings
    rates_per_s: Floats
    samples_per_record: float = 1.0
    prior_alpha: float = 0.9
    limits: LaunchLimits = field(default_factory=LaunchLimits)
    heartbeat_timeout_s: float = 30.0
    target_error: float | None = None
    measure: str = "error_rate"
    scale_in: ScaleInSettings | None = None
    machines_per_worker: int = 1
    pauses: PauseSettings = field(default_factory=PauseSettings)
    max_stall_s: float = 3600.0
    releases_idle: bool = True

    @property
    def num_slots(self) -> int:
        return len(self.rates_per_s)

    @property
    def stall_alarm_s(self) -> float:
        """The time without an update after which an alarm is raised: several times the expected time of an update."""
        samples = self.planner.samples_per_update or self.planner.batch_size
        return min(self.max_stall_s / 2, max(ALARM_S, 3 * samples / float(self.rates_per_s.sum())))

    def check_change(self, new: ControllerSettings) -> None:
        """Raise ValueError if slots, b or machines per worker differ, because these never change within a job."""
        if new.num_slots != self.num_slots:
            raise ValueError(f"expected {self.num_slots} slots as before, got {new.num_slots}")
        before, after = self.planner.batch_size, new.planner.batch_size
        if after != before:
            raise ValueError(f"expected batches of {before:g} samples as before, got {after:g}: b stays within a job")
        before, after = self.machines_per_worker, new.machines_per_worker
        if after != before:
            raise ValueError(f"expected {before} machines per worker as before, got {after}: k stays within a job")


def controller_settings(config: JobConfig) -> tuple[ControllerSettings, list[str]]:
    """Return the settings of a job file's provisioner, and notes on the origin of the numbers. A pilot run in the plan
    must be resolved already (`doll.monitor.state.pilot_run.with_pilot`).

    Raises:
        ConfigError: the work or the rates are not known, a number is out of its range, or the extra is not installed.
    """
    require("the provisioner (doll provision, doll spot, fleet.kind: ray)", "provision")
    notes: list[str] = []
    plan, machines = of_workers(config, apply_speed_up(config, config.plan, notes), notes)
    own = config.provision
    mean_samples = plan.mean_samples or 1.0
    rates = [mean_samples * rate for rate in config.worker_rates_per_s()]
    if not all(math.isfinite(rate) for rate in rates):
        raise ConfigError(
            "arrivals.process is asap, which states no rate: expected poisson or deterministic, with "
            "arrivals.rate_per_s as the samples per second of each worker's stream"
        )
    updates = updates_to_target(config, plan, notes)
    planner = planner_settings(plan, rates, updates, config.group_size, mean_samples * config.data.batch_size)
    deadline_s = planner.deadline_s
    if plan.deadline_s is None:
        notes.append(f"no plan.deadline_s: cost is minimized as if the deadline were {deadline_s:.0f} s")
    every_s = own.every_s if own.every_s is not None else max(1.0, min(30.0, deadline_s / 200))
    local = isinstance(config.fleet, ProcessesFleetConfig)
    pool_backoff_s = own.pool_backoff_s if own.pool_backoff_s is not None else 0.0 if local else 180.0
    planner = replace(
        planner, replan_s=every_s, rule=own.rule, guard=own.deadline_guard, spot_stable_s=own.spot_stable_s
    )
    limits = LaunchLimits(
        launches_per_min=own.launches_per_min, fallbacks_per_min=own.fallbacks_per_min, retry_s=min(30.0, 2 * every_s),
        pool_backoff_s=pool_backoff_s, early_s=min(3600.0, plan.cycle_s / 10), backoff_s=2 * every_s,
        boot_timeout_s=own.boot_timeout_s, silence_timeout_s=own.replace_after_s,
        max_failures=own.max_failures,
    )  # fmt: skip
    settings = ControllerSettings(
        planner=planner, rates_per_s=np.asarray(rates),
        samples_per_record=mean_samples * config.data.samples_per_record, prior_alpha=plan.alpha, limits=limits,
        heartbeat_timeout_s=own.heartbeat_timeout_s, target_error=plan.target_error if own.re_estimate else None,
        measure=plan.measure, scale_in=_scale_in(config), machines_per_worker=machines,
        max_stall_s=own.max_stall_s if own.max_stall_s is not None else _max_stall_s(planner, sum(rates)),
        releases_idle=config.arrivals.while_down == "queue", pauses=_pauses(own.pause, machines),
    )  # fmt: skip
    return settings, notes


def _pauses(own: PauseConfig, machines: int) -> PauseSettings:
    windows = [minutes_of(hours) for hours in own.not_between]
    return PauseSettings(
        start_after_s=-math.inf if own.start_after is None else own.start_after.timestamp(),
        not_between=tuple((60.0 * begin, 60.0 * end) for begin, end in windows),
        max_spot_usd_per_h=math.inf if own.max_spot_usd_per_h is None else own.max_spot_usd_per_h * machines,
        follow_prices=own.follow_prices,
    )


def _max_stall_s(planner: PlannerSettings, rate_per_s: float) -> float:
    """Return the time for which a job may make no progress: a part of its deadline, but enough for slow updates."""
    update_s = (planner.samples_per_update or planner.batch_size) / rate_per_s
    return max(min(max(planner.deadline_s / 4, _LEAST_STALL_S), _MOST_STALL_S), _UPDATES_OF_A_STALL * update_s)


def _scale_in(config: JobConfig) -> ScaleInSettings | None:
    """Return the settings of scale-in; None if workers are never removed."""
    own, workers = config.provision.scale_in, config.data.workers
    if not own.enabled:
        return None
    batches = [config.training.policy.batches_per_update(count) for count in range(1, workers + 1)]
    # Fewer workers must still be able to compute the batches of an update.
    room = config.worker.max_pending_batches
    fewest = max((count for count in range(1, workers + 1) if batches[count - 1] > room * count), default=0) + 1
    tuner = TunerSettings(
        every_s=own.every_s, horizon_s=own.horizon_s, threshold=own.threshold, knee_slope=own.knee_slope,
        min_workers=max(own.min_workers, fewest), elapsed_reference=own.elapsed_reference, fit_span=own.fit_span,
    )  # fmt: skip
    return ScaleInSettings(
        tuner=tuner, deadline_reserve=own.deadline_reserve, require_gain=own.require_gain, target=_target(config),
        batches_of_update=(0, *batches), evict=own.evict,
    )  # fmt: skip


def _target(config: JobConfig) -> ErrorTarget | None:
    """Return the held-out error that the job must reach, from its plan or its stop rule."""
    plan, stop = config.plan, config.stop
    if plan.target_error is not None:
        return ErrorTarget(plan.target_error, plan.measure)
    if stop.loss is not None and stop.loss > 0:
        return ErrorTarget(stop.loss, "loss")
    if stop.accuracy is not None and stop.accuracy < 1:
        return ErrorTarget(1 - stop.accuracy, "error_rate")
    return None
