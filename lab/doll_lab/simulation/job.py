"""A simulated job from a job file and options. The default is the setting of the DOLL paper."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from doll.config import JobConfig
from doll.config.policy import PolicyConfig
from doll.errors import ConfigError
from doll.provisioner.planning.state import PlannerSettings
from doll.provisioner.prices.shipped import with_prices
from doll.provisioner.traces.availability import Markov, Preemption, pool_of_workers
from doll.provisioner.traces.recordings import pool_of
from doll.ps.policies.doll import DollPolicyConfig
from doll.run.target import open_target
from doll.theory.preemption import gang_availability

from doll_lab.simulation.availability import RecordedAvailability, WholeWorkers
from doll_lab.simulation.provisioning import PlannerProvisioner
from doll_lab.simulation.report import Summary, group_size, summarise
from doll_lab.simulation.settings import SimulationSettings
from doll_lab.simulation.system import System

PAPER_RATE_PER_S: Final = 125.0
PAPER_WORKERS: Final = 64
PAPER_ALPHA: Final = 0.9
PAPER_CYCLE_S: Final = 1000.0
PAPER_SERVICE_S: Final = 0.02
PAPER_SPOT_USD_PER_H: Final = 0.158
PAPER_ON_DEMAND_USD_PER_H: Final = 0.286
_PAPER_BATCH_SIZE: Final = 256
_PAPER_GROUP_SIZE: Final = 20
_PAPER_UPDATES: Final = 10_000


def simulate(
    job: str | Path,
    *,
    updates: int | None = None,
    seconds: float | None = None,
    spot: int = 0,
    alpha: float = PAPER_ALPHA,
    cycle_s: float = PAPER_CYCLE_S,
    service_s: float = PAPER_SERVICE_S,
    seed: int = 0,
    instance: str | None = None,
    region: str | None = None,
) -> Summary:
    """Simulate a job in virtual time: `doll.simulate`.

    Args:
        job: a job file, the folder of a run, or the name of a shipped example.
        updates, seconds: end of the simulation; None: the stop rule of the job file.
        spot: number of workers on spot.
        alpha: share of the time for which spot is available.
        cycle_s: mean time from one loss of a spot machine to the next, in seconds.
        service_s: mean time of a batch's gradient, in seconds.
        seed: seed of the random numbers.
        instance, region: instance type and region whose shipped prices are used if the job file has no prices.

    Raises:
        ConfigError: the job or a number is not valid.
    """
    config = open_target(Path(job), []).config
    prices = with_prices(config, config.plan, instance, region, [])
    settings = simulation_settings(
        config, config.rates_per_s(), batch_size=None, group_size=None, updates=updates, seconds=seconds,
        compute_s=service_s, spot_usd_per_hour=prices.spot_usd_per_h or 0.0,
        on_demand_usd_per_hour=prices.on_demand_usd_per_h or 0.0, seed=seed,
        machines_per_worker=config.machines_per_worker,
    )  # fmt: skip
    if not 0 <= spot <= settings.num_workers:
        raise ConfigError(f"spot: expected 0 to {settings.num_workers} (the workers), got {spot}")
    preemption, availability = preemptions(settings, alpha, cycle_s, None, None)
    system = fixed_mix(settings, spot, preemption, boot_s=0.0, measure=True)
    system.run()
    return summarise(system, availability)


def simulation_settings(
    config: JobConfig | None,
    rates_per_s: Sequence[float],
    *,
    batch_size: int | None,
    group_size: int | None,
    updates: int | None,
    seconds: float | None,
    **more: Any,
) -> SimulationSettings:
    """Return the settings of the simulation: from the options, otherwise the job file, otherwise the paper.

    Args:
        rates_per_s: λ_n, shape (N,), counted as in the job file: a record is one sample, a packed record m samples.
        group_size: size of groups; replaces the job's policy.
        more: other settings, with their names in `SimulationSettings`.

    Raises:
        ConfigError: a number is out of its range.
    """
    policy: PolicyConfig | None = None if group_size is None else DollPolicyConfig(group_size=group_size)
    if config is not None:
        batch_size = batch_size or config.data.batch_size
        policy = policy or config.training.policy
        if updates is None and seconds is None:
            updates, seconds = _updates_of(config, len(rates_per_s), batch_size, policy), config.stop.seconds
    if updates is None and seconds is None:
        updates = _PAPER_UPDATES
    return SimulationSettings(
        rates_per_s=rates_per_s,
        batch_size=batch_size or _PAPER_BATCH_SIZE,
        policy=policy or DollPolicyConfig(group_size=_PAPER_GROUP_SIZE),
        updates=updates,
        seconds=seconds,
        **more,
    )


def _updates_of(config: JobConfig, workers: int, batch_size: int, policy: PolicyConfig) -> int | None:
    """Return the number of updates after which the job's stop rule ends it; None: it has no such limit."""
    stop = config.stop
    limits = [] if stop.updates is None else [stop.updates]
    if stop.samples is not None:
        batches = policy.batches_per_update(workers)
        limits.append(math.ceil(stop.samples / (batches * batch_size * (config.plan.mean_samples or 1.0))))
    return min(limits, default=None)


def preemptions(
    settings: SimulationSettings, alpha: float, cycle_s: float, trace: Path | None, pool: str | None,
    *, one_by_one: bool = True,
) -> tuple[Preemption, float]:  # fmt: skip
    """Return the preemptions of the slots and their availability: a Markov chain, or a recorded pool.

    Args:
        alpha, cycle_s: availability and cycle of a machine.
        one_by_one: whether the machines of a worker come and go independently; False: together.

    Raises:
        ConfigError: a number is out of its range, or the trace or the pool does not exist.
    """
    machines = settings.machines_per_worker
    if trace is None:
        # A separate random stream, so that arrivals do not depend on preemptions.
        chain = Markov(alpha, cycle_s, np.random.default_rng((settings.seed, 1)))
        if machines == 1 or not one_by_one:
            return chain, alpha
        return WholeWorkers(chain, machines), gang_availability(machines, alpha, cycle_s).alpha
    recorded = pool_of_workers(pool_of(trace, pool, "--pool"), machines, settings.num_workers)
    return RecordedAvailability.from_pool(recorded, settings.num_workers), recorded.alpha


def fixed_mix(
    settings: SimulationSettings, num_spot: int, preemption: Preemption, *, boot_s: float, measure: bool = False
) -> System:
    """Return the job with its `num_spot` slowest streams on spot, from the beginning to the end."""
    n = settings.num_workers
    slowest = sorted(range(n), key=lambda slot: settings.rates_per_s[slot])[:num_spot]
    spot = [slot in set(slowest) for slot in range(n)]
    return System(settings, spot=spot, preemption=preemption, boot_s=boot_s, measure=measure)


def planned(
    settings: SimulationSettings, preemption: Preemption, *, deadline_s: float, replan_s: float, boot_s: float,
    measure: bool = False,
) -> System:  # fmt: skip
    """Return the job with the planner, which chooses the market of every slot; all slots start on spot.

    Raises:
        ConfigError: the settings have no number of updates, which is the work to do by the deadline.
    """
    if settings.updates is None:
        raise ConfigError("--deadline: expected --updates too, the work that is to be done by then")
    size = group_size(settings)
    planner = PlannerSettings(
        samples=settings.updates * size * settings.batch_size, group_size=size, batch_size=settings.batch_size,
        deadline_s=deadline_s, replan_s=replan_s, boot_s=boot_s,
    )  # fmt: skip
    return System(
        settings, spot=[True] * settings.num_workers, preemption=preemption,
        provisioner=PlannerProvisioner(planner), boot_s=boot_s, measure=measure,
    )  # fmt: skip
