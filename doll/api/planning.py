"""`doll.plan`, `doll.simulate` and `doll.compare`: what the commands of these names do, for programs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from doll.config import PlanConfig
from doll.errors import ConfigError
from doll.run.target import open_target

if TYPE_CHECKING:
    from doll.monitor.views.comparison import Comparison
    from doll.provisioner.planning.assessment import Assessment
    from doll.simulation.report import Summary


def plan(job: str | Path, *, instance: str | None = None, region: str | None = None, **goals: Any) -> Assessment:
    """Whether a job can meet its goals, with which workers on spot, at what cost (`doll plan`).

    Args:
        job: a job file, the folder of a run, or the name of a shipped example.
        instance, region: take their prices from the table that ships with DOLL.
        goals: keys of the job file's `plan` section: `deadline_s=240`, `budget_usd`, `updates`, ...

    Raises:
        ConfigError: the job or a goal is not what was expected.
    """
    from doll.monitor.state.pilot_run import with_pilot
    from doll.provisioner.planning.assessment import assess
    from doll.provisioner.planning.plan_request import changed_plan, plan_request
    from doll.provisioner.prices.shipped import with_prices

    config = open_target(Path(job), []).config
    if unknown := sorted(set(goals) - set(PlanConfig.model_fields)):
        raise ConfigError(
            f"plan: expected keys of the plan section ({', '.join(PlanConfig.model_fields)}), got {unknown}"
        )
    section, _ = with_pilot(config, changed_plan(config.plan, **goals))
    section = with_prices(config, section, instance, region, [])
    request, _ = plan_request(config, section, config.rates_per_s(), None, None)
    return assess(request)


def simulate(
    job: str | Path,
    *,
    updates: int | None = None,
    seconds: float | None = None,
    spot: int = 0,
    alpha: float = 0.9,
    cycle_s: float = 1000.0,
    service_s: float = 0.02,
    seed: int = 0,
    instance: str | None = None,
    region: str | None = None,
) -> Summary:
    """A job in virtual time, on the parameter server's own engine and policies (`doll simulate`).

    Args:
        job: a job file, the folder of a run, or the name of a shipped example.
        updates, seconds: where it stops; default: as the job file says.
        spot: workers on spot.
        alpha: share of the time for which spot is available.
        cycle_s: mean time from one loss of a spot machine to the next.
        service_s: mean time of a batch's gradient.
        instance, region: take their prices from the table that ships with DOLL, if the job file has none.

    Raises:
        ConfigError: the job or a number is not what was expected.
    """
    from doll.provisioner.prices.shipped import with_prices
    from doll.simulation import job as jobs
    from doll.simulation.report import summarise

    config = open_target(Path(job), []).config
    prices = with_prices(config, config.plan, instance, region, [])
    settings = jobs.simulation_settings(
        config, config.rates_per_s(), batch_size=None, group_size=None, updates=updates, seconds=seconds,
        compute_s=service_s, spot_usd_per_hour=prices.spot_usd_per_h or 0.0,
        on_demand_usd_per_hour=prices.on_demand_usd_per_h or 0.0, seed=seed,
        machines_per_worker=config.machines_per_worker,
    )  # fmt: skip
    if not 0 <= spot <= settings.num_workers:
        raise ConfigError(f"spot: expected 0 to {settings.num_workers} (the workers), got {spot}")
    preemption, availability = jobs.preemptions(settings, alpha, cycle_s, None, None)
    system = jobs.fixed_mix(settings, spot, preemption, boot_s=0.0, measure=True)
    system.run(lambda done, now_s: None)
    return summarise(system, availability)


def compare(
    job: str | Path, policies: Sequence[str] = (), *, runs_folder: str | Path = "runs", loss: float | None = None
) -> Comparison:
    """Run a job under several policies, in turn on the same stream (`doll compare`).

    Args:
        job: a job file or the name of a shipped example.
        policies: each as on the command line: "ssp", "essp:staleness=7"; default: all.
        loss: to reach; default: as the job file says.

    Raises:
        ConfigError: the job, or a policy's options, cannot be compared.
    """
    from doll.run.local.compare import compare_live
    from doll.run.policy_choice import parse_choices

    path = open_target(Path(job), []).path
    comparison, _ = compare_live(path, [], parse_choices(policies), Path(runs_folder), loss=loss, say=lambda text: None)
    return comparison
