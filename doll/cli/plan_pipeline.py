"""`doll plan --pipeline`: how a fleet of devices would train a model that is cut into stages."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from doll.cli.errors import usage
from doll.cli.output import emit

if TYPE_CHECKING:
    from doll.config import JobConfig
    from doll.pipeline.profiling.profile import Network


def plan_pipeline(
    fleet_path: Path,
    config: JobConfig | None,
    *,
    profile_path: Path | None,
    stages: int | None,
    clock_distance: int | None,
    in_flight: int | None,
    optimizer_copies: float | None,
    within_node_gb_per_s: float | None,
    between_nodes_gb_per_s: float | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Compare the allocations of a fleet and print the best one. Exit 3 if the model fits in no way.

    Raises:
        ConfigError: the fleet or the profile is invalid.
        BadParameter: there is no profile, or no number of stages.
    """
    from doll.config import SgdConfig
    from doll.errors import InfeasiblePlanError
    from doll.pipeline.planner.fleet import load_fleet
    from doll.pipeline.planner.fleet_plan import plan_fleet
    from doll.pipeline.planner.fleet_report import report_text, to_dict
    from doll.pipeline.planner.partition import MemoryRule
    from doll.pipeline.planner.profiled import live_rule
    from doll.pipeline.profiling.profile import Profile

    section = config.worker.pipeline if config is not None else None
    job_profile = config.path(section.profile) if config is not None and section and section.profile else None
    path = profile_path or job_profile
    if path is None:
        raise usage("--pipeline: expected --profile, or a job file with worker.pipeline.profile")
    k = stages or (section.stages if section is not None else None)
    if k is None:
        raise usage("--pipeline: expected --stages, or a job file with worker.pipeline.stages")
    policy = config.training.policy if config is not None else None
    distance = clock_distance if clock_distance is not None else int(getattr(policy, "clock_distance", 0))
    fleet, network = load_fleet(fleet_path)
    network = _network(network, within_node_gb_per_s, between_nodes_gb_per_s)
    profile = Profile.load(path)

    def memory(number: int) -> MemoryRule:
        """As DOLL runs it: the last stage keeps as many copies of its weights as the others."""
        rule = live_rule(config.training.optimizer if config is not None else SgdConfig(), number)
        return rule if optimizer_copies is None else MemoryRule(optimizer_copies, stash_last=number)

    plan = plan_fleet(profile, fleet, network, memory, k=k, clock_distance=distance, in_flight=in_flight)
    notes = _notes(plan.best.in_flight if plan.best else None, getattr(policy, "wave_batches", None), network)
    if plot is not None and plan.best is not None:
        from doll.pipeline.planner.plots import save_allocation

        save_allocation(plan.best, plan.profile.model, plot)
        notes.append(f"plot: {plot}")
    emit(as_json, {**to_dict(plan), "notes": notes}, report_text(plan, notes))
    if plan.best is None:
        raise typer.Exit(InfeasiblePlanError.exit_code)


def _network(network: Network, within_gb_per_s: float | None, between_gb_per_s: float | None) -> Network:
    from dataclasses import replace

    if within_gb_per_s is not None:
        network = replace(network, within_node_bytes_per_s=within_gb_per_s * 1e9)
    if between_gb_per_s is not None:
        network = replace(network, between_nodes_bytes_per_s=between_gb_per_s * 1e9)
    return network


def _notes(in_flight: int | None, wave_batches: int | None, network: Network) -> list[str]:
    notes = []
    if network.between_nodes_bytes_per_s == float("inf"):
        notes.append("transfers between nodes take no time: give network in the fleet's YAML, or --between-nodes")
    if in_flight is not None and wave_batches is not None and wave_batches != in_flight:
        notes.append(f"the job file has training.policy.wave_batches {wave_batches}; N_m here is {in_flight}")
    return notes
