"""The settings of a simulation: the job, the machines and how they are preempted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from doll.config.policy import PolicyConfig, default_policy
from doll.errors import ConfigError
from doll.theory.cost import Prices


@dataclass(frozen=True, kw_only=True)
class SimulationSettings:
    """The settings of one simulated job.

    Attributes:
        rates_per_s: λ_n, samples per second of each stream while its worker is up; the length is N.
        batch_size: b, samples per batch.
        policy: the consistency policy, with K for `doll`.
        arrival_scv: c_A², squared coefficient of variation of the time between samples: 1: Poisson, 0: regular.
        compute_s: μ_C, mean seconds per gradient of one batch.
        compute: distribution of the gradient time.
        updates: number of model updates after which the run ends; None: only `seconds` ends it.
        seconds: virtual time at which the run ends; None: only `updates` ends it.
        random_phase: whether each worker begins with a batch that is filled to a random degree. Without it, all batches
            of equal streams complete together and stay in step for hundreds of seconds.
        replacement: whether to report preemptions to the engine, so that it replaces lost batches. False: the group
            waits until the worker is back, as in the paper's Algorithm 4 as printed.
        arrivals_pause: whether no samples arrive at a worker that is down (the paper's model). False: samples
            accumulate in the log, and a returned worker announces all of them.
        spot_usd_per_hour, on_demand_usd_per_hour: price of a machine.
        machines_per_worker: k, number of machines that a worker gets, loses and pays together.
    """

    rates_per_s: Sequence[float]
    batch_size: int
    policy: PolicyConfig = field(default_factory=default_policy)
    arrival_scv: float = 1.0
    compute_s: float = 0.02
    compute: Literal["exponential", "constant"] = "exponential"
    updates: int | None = None
    seconds: float | None = None
    random_phase: bool = True
    replacement: bool = True
    arrivals_pause: bool = True
    spot_usd_per_hour: float = 0.158
    on_demand_usd_per_hour: float = 0.286
    machines_per_worker: int = 1
    checkpoint_every_updates: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.rates_per_s or min(self.rates_per_s) <= 0:
            raise ConfigError(f"expected one arrival rate above 0 per worker, got {list(self.rates_per_s)}")
        if self.batch_size < 1 or self.compute_s < 0 or self.arrival_scv < 0:
            raise ConfigError(
                f"expected batch_size >= 1, compute_s >= 0 and arrival_scv >= 0, got {self.batch_size}, "
                f"{self.compute_s} and {self.arrival_scv}"
            )
        if self.machines_per_worker < 1:
            raise ConfigError(f"expected machines_per_worker >= 1, got {self.machines_per_worker}")
        if self.updates is None and self.seconds is None:
            raise ConfigError("expected an end: a number of updates, or of seconds")

    @property
    def worker_prices(self) -> Prices:
        """The prices of a worker with all of its machines."""
        return Prices(self.spot_usd_per_hour, self.on_demand_usd_per_hour).times(self.machines_per_worker)

    @property
    def num_workers(self) -> int:
        """N: the number of streams and worker slots."""
        return len(self.rates_per_s)
