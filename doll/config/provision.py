"""Deadline, budget and prices of a job, and how machines are provisioned for its workers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from doll.config.section import Section
from doll.config.units import LONGEST_S

MAX_MACHINES_PER_WORKER = 64


class PlanConfig(Section):
    """Error target, deadline, budget and prices, for `doll plan` and the provisioner."""

    updates: PositiveInt | None = Field(default=None, description="J: number of updates that reach the error target")
    target_error: PositiveFloat | None = Field(
        default=None, description="error to reach, as `measure` defines it; J is then estimated from `pilot`"
    )
    measure: Literal["error_rate", "loss"] = Field(
        default="error_rate", description="held-out error: 1 - accuracy, or the task's loss"
    )
    pilot: Path | None = Field(default=None, description="run folder from which `doll plan` takes J and `service_s`")
    deadline_s: PositiveFloat | None = Field(
        le=LONGEST_S, default=None, description="seconds from the start of the job"
    )
    budget_usd: PositiveFloat | None = Field(default=None, description="maximum cost of the workers")
    machines_per_worker: Annotated[int, Field(ge=1, le=MAX_MACHINES_PER_WORKER)] | None = Field(
        default=None,
        description="machines of a worker, which it gets and loses together; default: `worker.pipeline.stages`, or 1",
    )
    spot_usd_per_h: float | None = Field(default=None, ge=0, description="price of a running machine on spot")
    on_demand_usd_per_h: PositiveFloat | None = Field(default=None, description="price of a machine on on-demand")
    alpha: float = Field(default=0.9, ge=0, le=1, description="fraction of time for which a spot machine is available")
    cycle_s: PositiveFloat = Field(
        le=LONGEST_S,
        default=36000.0,
        description="mean length of an available and an unavailable period of a spot machine together",
    )
    availability_of: Literal["machine", "worker"] = Field(
        default="machine",
        description="what `alpha` and `cycle_s` describe. machine: each machine, which comes and goes on its own (a "
        "worker is up while all of its machines are); worker: all machines of a worker together, as measured, or where "
        "they come and go together",
    )
    risk: float | None = Field(
        default=None,
        gt=0,
        le=0.5,
        description="accepted probability of missing the deadline; default: plan with the mean",
    )
    boot_s: float = Field(
        default=90.0, ge=0, description="time from a launch to a worker that is ready, with the last of its machines"
    )
    margin: float = Field(default=0.005, ge=0, lt=1, description="fraction of the deadline that is kept in reserve")
    service_s: PositiveFloat | None = Field(
        default=None,
        description="mean seconds to compute and upload the gradient of a batch; `doll calibrate` measures it",
    )

    @model_validator(mode="after")
    def _one_goal(self) -> Self:
        if self.updates is not None and self.target_error is not None:
            raise ValueError("expected updates or target_error, got both")
        return self


class ScaleInConfig(Section):
    """Removes workers once they hardly speed the job up, as MLLess's tuner does (docs/operations.md, "Scale-in").

    The records of a removed worker's stream stay in Kafka and are not learned until the worker comes back.
    """

    enabled: bool = Field(default=False, description="remove workers; false brings removed workers back")
    every_s: PositiveFloat = Field(default=20.0, description="seconds between two decisions; T of MLLess")
    horizon_s: PositiveFloat = Field(default=10.0, description="how far ahead losses are predicted; Δ of MLLess")
    threshold: float = Field(
        default=0.05,
        ge=0,
        le=1,
        description="a worker is removed if the predicted loss is above that of all workers by less than this "
        "fraction; S of MLLess",
    )
    knee_slope: float = Field(
        default=-6e-4,
        lt=0,
        description="nothing is removed before the loss falls by less than this fraction per update; τ of MLLess, but "
        "relative to the loss",
    )
    min_workers: PositiveInt = Field(
        default=1, description="minimum number of workers; at least as many as can hold the batches of an update"
    )
    elapsed_reference: bool = Field(
        default=False,
        description="compare with the loss that all workers would have reached by now, and not at the same update",
    )
    deadline_reserve: float = Field(
        default=0.05,
        ge=0,
        lt=1,
        description="fraction of the deadline that must be left to spare after a removal; below half of it, workers "
        "come back",
    )
    require_gain: bool = Field(
        default=True,
        description="remove a worker only if 1 / (time x cost) rises by the measured durations of updates; they are "
        "known from the second removal on",
    )


class ProvisionConfig(Section):
    """How `doll provision` launches machines for the workers."""

    every_s: PositiveFloat | None = Field(
        default=None,
        description="seconds between two iterations; default: 30, or 1/200 of the deadline if that is less, but at "
        "least 1",
    )
    rule: Literal["pace", "theorem"] = Field(
        default="pace",
        description="pace: use on-demand only as far as the deadline needs it now; theorem: the fixed mix of Theorem "
        "4/5, "
        "planned again each time",
    )
    deadline_guard: bool = Field(
        default=True,
        description="keep enough workers on-demand to meet the deadline even if all spot machines were interrupted now",
    )
    spot_stable_s: float | None = Field(
        default=None,
        ge=0,
        description="time for which spot must have been available before a worker returns to it; default: 2 boot "
        "times, "
        "at least 5 iterations",
    )
    re_estimate: bool = Field(
        default=False,
        description="estimate the updates to `plan.target_error` again while the job runs, from its held-out errors",
    )
    launches_per_min: PositiveInt = Field(default=120, description="maximum number of launches of the whole fleet")
    fallbacks_per_min: PositiveInt = Field(
        default=60, description="of these, maximum number from spot to on-demand while the deadline is safe"
    )
    pool_backoff_s: float | None = Field(
        default=None,
        ge=0,
        description="time for which a pool without capacity, or with an interruption, is avoided; default: 180, "
        "processes: 0",
    )
    heartbeat_timeout_s: PositiveFloat = Field(
        ge=2,
        default=30.0,
        description="a worker that is silent for this long, while others are not, is considered failed",
    )
    replace_after_s: PositiveFloat = Field(
        default=300.0, description="a machine whose worker is silent for this long is replaced"
    )
    boot_timeout_s: PositiveFloat = Field(
        default=900.0, description="a machine whose worker has not joined after this time is replaced"
    )
    max_failures: PositiveInt = Field(
        default=5,
        description="machines of a slot that fail one after the other, not by preemption, before nothing more is "
        "launched for it; the pause after each doubles. When every slot is given up, the provisioner stops",
    )
    max_stall_s: PositiveFloat | None = Field(
        default=None,
        description="time for which machines run and no update is applied before all of them are ended and the "
        "provisioner stops; also how long machines wait for a source that sends nothing. Default: a quarter of the "
        "deadline, at least 15 min and 10 updates, at most 1 h or 10 updates",
    )
    scale_in: ScaleInConfig = Field(default_factory=ScaleInConfig)
