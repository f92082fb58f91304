"""`doll.plan`, `doll.simulate` and `doll.compare`: the commands of these names as Python functions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from doll import extensions
from doll.config import PlanConfig
from doll.errors import ConfigError
from doll.run.target import open_target

if TYPE_CHECKING:
    from doll.monitor.views.comparison import Comparison
    from doll.provisioner.planning.assessment import Assessment


def plan(job: str | Path, *, instance: str | None = None, region: str | None = None, **goals: Any) -> Assessment:
    """Plan a job: determine whether it can meet its goals, which workers run on spot, and the cost (`doll plan`).

    Args:
        job: path of a job file or of a run folder, or the name of a shipped example.
        instance, region: EC2 instance type and AWS region; their prices are taken from the table that ships with DOLL.
        goals: keys of the job file's `plan` section: `deadline_s=240`, `budget_usd`, `updates`, ...

    Raises:
        ConfigError: the job or a goal is not valid.
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


def simulate(job: str | Path, **options: Any) -> Any:
    """Simulate a job in virtual time, with the engine and the policies of the parameter server (`doll simulate`).

    Args:
        job: path of a job file or of a run folder, or the name of a shipped example.
        options: `updates`, `seconds`, `spot`, `alpha` and others; `doll_lab.simulation.job.simulate` lists them.

    Returns:
        The `doll_lab.simulation.report.Summary`.

    Raises:
        ConfigError: doll-lab is not installed, or the job or an option is not valid.
    """
    return extensions.need(extensions.SIMULATIONS, "job", "doll.simulate")(job, **options)


def compare(
    job: str | Path, policies: Sequence[str] = (), *, runs_folder: str | Path = "runs", loss: float | None = None
) -> Comparison:
    """Run a job under several policies, one after the other, on the same stream (`doll compare`).

    Args:
        job: path of a job file, or the name of a shipped example.
        policies: policies in the form of the command line, such as "ssp" or "essp:staleness=7". Empty: all policies.
        loss: target loss. None: the value of the job file.

    Raises:
        ConfigError: the job, or a policy with its options, cannot be compared.
    """
    from doll.run.local.compare import compare_live
    from doll.run.policy_choice import parse_choices

    path = open_target(Path(job), []).path
    comparison, _ = compare_live(path, [], parse_choices(policies), Path(runs_folder), loss=loss, say=lambda text: None)
    return comparison
