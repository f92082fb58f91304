"""`doll compare --simulate`: a comparison of policies in virtual time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

from doll.config import JobConfig
from doll.config.step_size import step_factor, step_samples
from doll.errors import ConfigError, DollError
from doll.monitor.state.policy_summary import PolicySummary
from doll.monitor.views.comparison import Comparison, PolicyRun
from doll.run.local.compare import notes_on, seeds_of
from doll.run.policy_choice import PolicyChoice, jobs_of

from doll_lab.simulation.job import PAPER_SERVICE_S
from doll_lab.simulation.settings import SimulationSettings
from doll_lab.simulation.system import System


def compare_simulated(
    path: Path,
    overrides: Sequence[str],
    choices: Sequence[PolicyChoice],
    *,
    rates_per_s: Callable[[JobConfig], Sequence[float]],
    service_s: float | None,
    say: Callable[[str], None],
    repetitions: int = 1,
) -> tuple[Comparison, int]:
    """Simulate the job under each policy in virtual time, on equal arrivals. Return the comparison and the exit code.

    Args:
        rates_per_s: function that returns the rates of the job's streams, shape (N,).
        service_s: mean seconds to compute a batch's gradient; None: the job's `plan.service_s`, otherwise 20 ms.
        repetitions: as in `compare_live`.

    Raises:
        ConfigError: the job, or a policy's options, cannot be compared.
    """
    configs = jobs_of(path, overrides, choices)
    rates = rates_per_s(configs[0])
    seconds = seconds_of(configs[0], rates)  # all policies get the same part of the stream
    runs, codes = [], []
    seeds = seeds_of(configs[0], repetitions)
    for seed, (choice, job) in product(seeds, zip(choices, configs, strict=True)):
        say(f"simulating {choice.label}" + (f", seed {seed}" if len(seeds) > 1 else ""))
        config = job.model_copy(update={"seed": seed})
        try:
            runs.append(simulate_policy(choice.label, config, rates, seconds=seconds, service_s=service_s))
        except DollError as error:
            runs.append(PolicyRun(choice.label, str(error), ok=False, seed=seed))
            codes.append(error.exit_code)
    notes = (*notes_on(configs[0]), "simulated: no gradients are computed, so there is no loss, and no bytes are sent")
    labels = [choice.label for choice in choices]
    return Comparison(configs[0].job, runs, None, labels, notes, seeds), max(codes, default=0)


def simulate_policy(
    label: str, config: JobConfig, rates_per_s: Sequence[float], *, seconds: float, service_s: float | None
) -> PolicyRun:
    """Simulate the job's streams under its policy, for `seconds` of virtual time.

    Args:
        rates_per_s: λ_n, shape (N,), counted as in the job file: a record is one sample, a packed record m samples.
        service_s: mean seconds for a batch's gradient; None: the job's value, otherwise the value of the DOLL paper.
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
        summary=PolicySummary.total([system.measures.report()]),
        step_factor=step_factor(config),
        step_samples=step_samples(config),
        seed=config.seed,
    )


def seconds_of(config: JobConfig, rates_per_s: Sequence[float]) -> float:
    """Return the seconds until the job's streams reach its first limit, at these rates.

    Raises:
        ConfigError: the job has no limit.
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
