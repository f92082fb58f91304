"""What a job asks of its provisioner."""

from __future__ import annotations

from dataclasses import dataclass, field

from doll.provisioner.launch_state import LaunchLimits
from doll.provisioner.planning.state import PlannerSettings
from doll.provisioner.progress import ALARM_S
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
        machines_per_worker: k: an instance of a slot is so many machines, all of them or none. Prices of the feed are
            the values of one machine.
        max_stall_s: time for which machines are paid and no update is applied before everything is ended.
        releases_idle: while the source sends nothing for so long, machines are ended, and launched again when it
            sends; False where the source waits for the workers.
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
    machines_per_worker: int = 1
    max_stall_s: float = 3600.0
    releases_idle: bool = True

    @property
    def num_slots(self) -> int:
        return len(self.rates_per_s)

    @property
    def stall_alarm_s(self) -> float:
        """Time without an update after which a person is told: several times what an update should take."""
        samples = self.planner.samples_per_update or self.planner.batch_size
        return min(self.max_stall_s / 2, max(ALARM_S, 3 * samples / float(self.rates_per_s.sum())))

    def check_change(self, new: ControllerSettings) -> None:
        """Whether a running job can go on with these settings.

        Raises:
            ValueError: another number of slots, another b, or other machines per worker: none changes within a job.
        """
        if new.num_slots != self.num_slots:
            raise ValueError(f"expected {self.num_slots} slots as before, got {new.num_slots}")
        before, after = self.planner.batch_size, new.planner.batch_size
        if after != before:
            raise ValueError(f"expected batches of {before} samples as before, got {after}: b stays within a job")
        before, after = self.machines_per_worker, new.machines_per_worker
        if after != before:
            raise ValueError(f"expected {before} machines per worker as before, got {after}: k stays within a job")
