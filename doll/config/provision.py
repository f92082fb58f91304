"""What the job may cost and by when it ends, and how machines are provisioned for its workers."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from doll.config.section import Section


class PlanConfig(Section):
    """What the job is worth: error target, deadline, budget and prices. Read by `doll plan` and the provisioner."""

    updates: PositiveInt | None = Field(default=None, description="J: updates that meet the error target")
    target_error: PositiveFloat | None = Field(
        default=None, description="error to reach, in the unit of `measure`; J then comes from `pilot`"
    )
    measure: Literal["error_rate", "loss"] = Field(
        default="error_rate", description="held-out error: 1 - accuracy, or the task's loss"
    )
    pilot: Path | None = Field(default=None, description="run folder from which `doll plan` takes J and `service_s`")
    deadline_s: PositiveFloat | None = Field(default=None, description="seconds from the start of the job")
    budget_usd: PositiveFloat | None = Field(default=None, description="most that the workers may cost")
    spot_usd_per_h: float | None = Field(default=None, ge=0, description="price of a worker on spot while it is up")
    on_demand_usd_per_h: PositiveFloat | None = Field(default=None, description="price of a worker on-demand")
    alpha: float = Field(default=0.9, ge=0, le=1, description="fraction of the time that a spot worker is up")
    cycle_s: PositiveFloat = Field(default=36000.0, description="mean up and down time of a spot worker together")
    risk: float | None = Field(
        default=None,
        gt=0,
        le=0.5,
        description="accepted probability of missing the deadline; default: plan on the mean",
    )
    boot_s: float = Field(default=90.0, ge=0, description="from a change of market to a worker that is ready")
    margin: float = Field(default=0.005, ge=0, lt=1, description="fraction of the deadline held back")
    service_s: PositiveFloat | None = Field(
        default=None,
        description="mean seconds to compute and upload one batch's gradient; `doll calibrate` measures it",
    )

    @model_validator(mode="after")
    def _one_goal(self) -> Self:
        if self.updates is not None and self.target_error is not None:
            raise ValueError("expected updates or target_error, got both")
        return self


class ProvisionConfig(Section):
    """How `doll provision` buys machines for the workers."""

    every_s: PositiveFloat | None = Field(
        default=None,
        description="seconds between two turns; default: 30, or a 200th of the deadline where that is less, but 1",
    )
    rule: Literal["pace", "theorem"] = Field(
        default="pace",
        description="pace: wait for spot while the slack allows; theorem: the mix of Theorem 4/5 on what is left",
    )
    deadline_guard: bool = Field(
        default=True, description="keep so much on-demand that the deadline holds even if all of spot went down now"
    )
    spot_stable_s: float | None = Field(
        default=None,
        ge=0,
        description="how long spot must have been available before a worker returns to it; "
        "default: 2 boots, at least 5 turns",
    )
    re_estimate: bool = Field(
        default=False,
        description="estimate the updates to `plan.target_error` anew from the job's own held-out errors as it runs",
    )
    launches_per_min: PositiveInt = Field(default=120, description="launches of the whole fleet, at most")
    fallbacks_per_min: PositiveInt = Field(
        default=60, description="of these, from spot to on-demand while the deadline is not in danger"
    )
    pool_backoff_s: float | None = Field(
        default=None,
        ge=0,
        description="a pool that was dry, or took a machine back, is avoided so long; default: 180, processes: 0",
    )
    heartbeat_timeout_s: PositiveFloat = Field(
        default=30.0, description="a worker that is not heard for so long, while others are, does not work"
    )
    replace_after_s: PositiveFloat = Field(
        default=300.0, description="a machine whose worker is silent for so long is replaced"
    )
    boot_timeout_s: PositiveFloat = Field(
        default=900.0, description="a machine whose worker has not joined by then is replaced"
    )
