"""What a job asks of its provisioner."""

from __future__ import annotations

from dataclasses import dataclass, field

from doll.provisioner.launch_state import LaunchLimits
from doll.provisioner.planning.state import PlannerSettings
from doll.provisioner.scale_in import ScaleInSettings
from doll.theory.checks import Floats


@dataclass(frozen=True)
class ControllerSettings:
    """The job and the behaviour of its provisioner.

    Attributes:
        planner: work, deadline (on the job's clock), budget and behaviour; `replan_s` is the longest time between two
            turns, which the caller keeps.
        rates_per_s: λ_n of the job file, samples per second, shape (N,): one slot each.
        samples_per_record: m of packed records.
        prior_alpha: assumed availability of spot before anything is observed.
        limits: rates and timeouts of launches.
        heartbeat_timeout_s: a worker that sent nothing for this long, while others did, does not work.
        target_error, measure: the work is re-estimated from the job's own held-out errors; None: it stays as planned.
        started_s: when the job's clock began, Unix seconds; None: at the first turn.
        scale_in: when workers are removed; None: never.
    """

    planner: PlannerSettings
    rates_per_s: Floats
    samples_per_record: int = 1
    prior_alpha: float = 0.9
    limits: LaunchLimits = field(default_factory=LaunchLimits)
    heartbeat_timeout_s: float = 30.0
    target_error: float | None = None
    measure: str = "error_rate"
    started_s: float | None = None
    scale_in: ScaleInSettings | None = None

    @property
    def num_slots(self) -> int:
        return len(self.rates_per_s)
