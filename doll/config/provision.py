"""The deadline, budget and prices of a job, and how machines are provisioned for its workers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AwareDatetime, Field, PositiveFloat, PositiveInt, model_validator

from doll.config.section import LONGEST_S, Section

MAX_MACHINES_PER_WORKER = 64
Service = Literal["kafka", "cache", "control_host", "network", "keys", "checkpoints", "egress", "storage"]


class ServicesConfig(Section):
    """The costs of a job beside its workers, for plans, reports, `doll bill` and the page.

    A price that is not set is that of DOLL's table (deploy/terraform/README.md, us-east-1).
    """

    run_anyway: list[Service] = Field(default_factory=list)
    """services that run without this job, too, such as a Kafka cluster of your own; their cost is not counted"""
    kafka_usd_per_h: float | None = Field(default=None, ge=0)
    """price of Kafka"""
    cache_usd_per_h: float | None = Field(default=None, ge=0)
    """price of Redis; in the table it runs on the control host"""
    control_host_usd_per_h: float | None = Field(default=None, ge=0)
    """price of the machine of the parameter server and the other roles"""
    network_usd_per_h: float | None = Field(default=None, ge=0)
    """price of NAT gateways and endpoints, without the data"""
    checkpoints_usd_per_h: float | None = Field(default=None, ge=0)
    """price of the requests to the bucket of the checkpoints; in the table a checkpoint is saved every 2 s"""
    egress_gb_per_h: float | None = Field(default=None, ge=0)
    """gigabytes that leave for the internet per hour; default: they are not priced"""
    storage_gb: float | None = Field(default=None, ge=0)
    """gigabytes of disks and buckets that exist for the job; default: they are not priced"""


class PlanConfig(Section):
    """Error target, deadline, budget and prices, for `doll plan` and the provisioner."""

    updates: PositiveInt | None = None
    """J: number of updates until the error target is reached"""
    target_error: PositiveFloat | None = None
    """error to reach, as `measure` defines it; if it is set, J is estimated from `pilot`"""
    measure: Literal["error_rate", "loss"] = "error_rate"
    """held-out error: 1 - accuracy, or the task's loss"""
    pilot: Path | None = None
    """run folder from which `doll plan` takes J, `service_s` and `mean_samples`"""
    deadline_s: PositiveFloat | None = Field(default=None, le=LONGEST_S)
    """deadline in seconds from the start of the job"""
    budget_usd: PositiveFloat | None = None
    """maximum cost of the workers"""
    machines_per_worker: Annotated[int, Field(ge=1, le=MAX_MACHINES_PER_WORKER)] | None = None
    """number of machines of a worker, which it gets and loses together; default: `worker.pipeline.stages`, or 1"""
    spot_usd_per_h: float | None = Field(default=None, ge=0)
    """price of a running spot machine"""
    on_demand_usd_per_h: PositiveFloat | None = None
    """price of a running on-demand machine"""
    alpha: float = Field(default=0.9, ge=0, le=1)
    """fraction of time for which a spot machine is available"""
    cycle_s: PositiveFloat = Field(default=36000.0, le=LONGEST_S)
    """mean time from the start of an available period of a spot machine to the start of its next one"""
    availability_of: Literal["machine", "worker"] = "machine"
    """which machines `alpha` and `cycle_s` describe. machine: each machine, available independently of the others (a
    worker runs while all of its machines are available); worker: all machines of a worker together, if they were
    measured so or are available and unavailable together"""
    risk: float | None = Field(default=None, gt=0, le=0.5)
    """accepted probability of missing the deadline; default: the plan uses mean values"""
    boot_s: float = Field(default=90.0, ge=0)
    """time from a launch until the worker is ready, with the last of its machines"""
    margin: float = Field(default=0.005, ge=0, lt=1)
    """fraction of the deadline that is kept as a reserve"""
    services: ServicesConfig = Field(default_factory=ServicesConfig)
    service_s: PositiveFloat | None = None
    """mean seconds to compute and upload the gradient of a batch; `doll calibrate` measures it"""
    mean_samples: PositiveFloat | None = None
    """mean number of samples that the task makes of one record, if it makes several (`Task.max_samples_per_record`) or
    omits some; `doll calibrate` measures it [as in `pilot`, else 1]"""

    @model_validator(mode="after")
    def _one_goal(self) -> Self:
        if self.updates is not None and self.target_error is not None:
            raise ValueError("expected updates or target_error, got both")
        return self


class ScaleInConfig(Section):
    """Remove workers when they hardly speed up the job, as MLLess's tuner does (docs/operations.md, "Scale-in").

    The other workers take over the streams of a removed worker.
    """

    enabled: bool = False
    """remove workers; if set to false, removed workers return"""
    every_s: PositiveFloat = 20.0
    """seconds between two decisions; T of MLLess"""
    horizon_s: PositiveFloat = 10.0
    """time ahead for which losses are predicted; Δ of MLLess"""
    threshold: float = Field(default=0.05, ge=0, le=1)
    """a worker is removed if its removal raises the predicted loss by less than this fraction; S of MLLess"""
    knee_slope: float = Field(default=-6e-4, lt=0)
    """no removal before the loss falls by less than this fraction per update; τ of MLLess, relative to the loss"""
    min_workers: PositiveInt = 1
    """minimum number of workers; it must be enough to hold the batches of an update"""
    evict: Literal["worst_replica", "slowest"] = "worst_replica"
    """which worker is removed. worst_replica: if workers hold back parts of their steps, the worker whose own weights
    have the highest loss on held-out samples, as in MLLess, if noise cannot explain it; otherwise the same as slowest.
    slowest: the worker of the slowest stream, else the slowest worker, else that of the newest machine"""
    fit_span: float = Field(default=5.0, ge=0)
    """losses are averaged over about this many updates before a curve is fitted to them, as in MLLess; 0: no
    averages"""
    elapsed_reference: bool = False
    """compare with the loss that all workers would have reached at the same time, instead of at the same update"""
    deadline_reserve: float = Field(default=0.05, ge=0, lt=1)
    """fraction of the deadline that must remain as a reserve after a removal; if less than half of it remains, removed
    workers return"""
    require_gain: bool = True
    """remove a worker only if 1 / (time x cost) rises according to the measured durations of updates, which are known
    from the second removal on"""


_HOURS = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")
_DAY_MIN = 24 * 60


def minutes_of(hours: str) -> tuple[int, int]:
    """Return begin and end of `HH:MM-HH:MM` in minutes of the day. Raises ValueError for another text.

    >>> minutes_of("22:00-06:30")
    (1320, 390)
    """
    match = _HOURS.fullmatch(hours)
    begin_h, begin, end_h, end = (0, 0, 0, 0) if match is None else map(int, match.groups())
    if match is None or (begin_h, begin) == (end_h, end):
        raise ValueError(f"expected hours of a day in UTC as HH:MM-HH:MM, such as 22:00-06:30, got {hours!r}")
    return 60 * begin_h + begin, 60 * end_h + end


class PauseConfig(Section):
    """Times and prices at which a job has no machines, as far as its deadline allows (docs/operations.md, "Pauses").

    The job continues from where it was. Its records wait in Kafka, whose retention must be longer than a pause.
    """

    start_after: AwareDatetime | None = None
    """no machine is launched before this time, such as 2026-12-01T22:00:00Z; the deadline counts from the first start
    of the provisioner"""
    not_between: list[str] = Field(default_factory=list)
    """hours of each day in UTC without machines, such as "08:00-18:00"; "22:00-06:00" ends on the next day"""
    max_spot_usd_per_h: PositiveFloat | None = None
    """price of a spot machine above which the job pauses, while the rest can be done on spot in time"""
    follow_prices: bool = False
    """pause in expensive hours, if cheaper hours suffice according to the prices of the last 7 days, of which the
    provisioner must have recorded 24 hours"""

    @model_validator(mode="after")
    def _leaves_time(self) -> Self:
        excluded = set[int]()
        for hours in self.not_between:
            begin, end = minutes_of(hours)
            excluded.update(minute % _DAY_MIN for minute in range(begin, end if begin < end else end + _DAY_MIN))
        if len(excluded) == _DAY_MIN:
            raise ValueError("not_between: expected hours that leave a part of the day, got the whole day")
        return self


class ProvisionConfig(Section):
    """How `doll provision` launches machines for the workers."""

    every_s: PositiveFloat | None = None
    """seconds between two iterations; default: 30, or 1/200 of the deadline if that is less, but at least 1"""
    rule: Literal["pace", "theorem", "mix"] = "pace"
    """pace: use on-demand machines only as far as the deadline needs them now; theorem: use the mix of Theorem 4/5,
    planned again in each iteration; mix: use the mix of Theorem 4/5, planned once at the start, unguarded, for
    comparison"""
    deadline_guard: bool = True
    """keep enough workers on on-demand machines to meet the deadline even if all spot machines were interrupted now"""
    spot_stable_s: float | None = Field(default=None, ge=0)
    """time for which spot must be available before a worker uses it again; default: 2 boot times, at least 5
    iterations"""
    re_estimate: bool = False
    """while the job runs, estimate the updates to `plan.target_error` again from its held-out errors"""
    launches_per_min: PositiveInt = 120
    """maximum number of launches of the whole fleet"""
    fallbacks_per_min: PositiveInt = 60
    """maximum number of launches, out of `launches_per_min`, that replace spot by on-demand while the deadline is
    safe"""
    pool_backoff_s: float | None = Field(default=None, ge=0)
    """time for which a pool is avoided after an interruption or without capacity; default: 180, processes: 0"""
    heartbeat_timeout_s: PositiveFloat = Field(default=30.0, ge=2)
    """a worker that is silent for this long, while other workers are not, is considered failed"""
    replace_after_s: PositiveFloat = 300.0
    """a machine whose worker is silent for this long is replaced"""
    boot_timeout_s: PositiveFloat = 900.0
    """a machine whose worker has not joined after this time is replaced"""
    max_failures: PositiveInt = 5
    """number of successive failures of a slot's machines, other than preemptions, after which no machine is launched
    for the slot any more; the pause after each failure doubles. When every slot is given up, the provisioner stops"""
    max_stall_s: PositiveFloat | None = None
    """time without an update, while machines run, after which all of them are terminated and the provisioner stops;
    also the time for which machines wait for a source that sends nothing. Default: a quarter of the deadline, at least
    15 min and 10 updates, at most 1 h or 10 updates"""
    lease_s: PositiveFloat = Field(default=30.0, ge=2)
    """a standby (`doll provision run --standby`) takes over from a provisioner that has not renewed its lease for this
    long"""
    scale_in: ScaleInConfig = Field(default_factory=ScaleInConfig)
    pause: PauseConfig = Field(default_factory=PauseConfig)
