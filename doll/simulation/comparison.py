"""One policy of a comparison in virtual time."""

from __future__ import annotations

import math
from collections.abc import Sequence

from doll.config import JobConfig
from doll.config.step_size import step_factor
from doll.errors import ConfigError
from doll.monitor.state.policy_summary import PolicySummary
from doll.monitor.views.comparison import PolicyRun
from doll.simulation.job import PAPER_SERVICE_S
from doll.simulation.settings import SimulationSettings
from doll.simulation.system import System


def simulate_policy(
    label: str, config: JobConfig, rates_per_s: Sequence[float], *, seconds: float, service_s: float | None
) -> PolicyRun:
    """The job's streams under its policy, for so many virtual seconds.

    Args:
        rates_per_s: λ_n, shape (N,), as the job file counts: a record is one sample, a packed one m.
        service_s: mean seconds for a batch's gradient; None: the job's, else that of the DOLL paper.
    """
    price = config.plan.on_demand_usd_per_h
    settings = SimulationSettings(
        rates_per_s=rates_per_s, batch_size=config.data.batch_size, policy=config.training.policy,
        arrival_scv=1.0 if config.arrivals.process == "poisson" else 0.0,
        compute_s=service_s or config.plan.service_s or PAPER_SERVICE_S, seconds=seconds,
        on_demand_usd_per_hour=price or 0.0, machines_per_worker=config.machines_per_worker, seed=config.seed,
    )  # fmt: skip
    system = System(settings, measure=True)
    system.run()
    assert system.measures is not None, "they were asked for"
    return PolicyRun(
        label,
        f"simulated {system.now:.0f} s",
        ok=True,
        seconds=system.now,
        samples=round(system.engine.samples_total * (config.plan.mean_samples or 1.0)),
        updates=system.version,
        usd=math.nan if price is None else system.usd,
        summary=PolicySummary.of([system.measures.report()]),
        step_factor=step_factor(config),
    )


def seconds_of(config: JobConfig, rates_per_s: Sequence[float]) -> float:
    """For how long the job's streams last until its first limit, at these rates.

    Raises:
        ConfigError: it has none.
    """
    stop, total = config.stop, sum(rates_per_s)
    limits = [] if stop.seconds is None else [stop.seconds]
    if stop.samples is not None:
        limits.append(stop.samples / (total * (config.plan.mean_samples or 1.0)))
    if stop.updates is not None:
        limits.append(stop.updates * config.group_size * config.data.batch_size / total)
    if not limits:
        raise ConfigError(
            "stop: expected a limit to simulate to (samples, updates or seconds), got none; as in "
            "--set stop.samples=20000"
        )
    return min(limits)
