"""`doll plan --pipeline`: plans how the devices of a fleet train a model that is cut into stages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from doll.cli.output import emit

if TYPE_CHECKING:
    from doll.cli.plan import PipelineOptions
    from doll.config import JobConfig

    from doll_lab.pipelines.network import Network


def plan_pipeline(
    fleet_path: Path, config: JobConfig | None, given: PipelineOptions, *, plot: Path | None, as_json: bool
) -> None:
    """Compare the allocations of a fleet and print the best one. Exit code 3: no allocation fits the model.

    Raises:
        ConfigError: the fleet or the profile is invalid.
        BadParameter: the profile or the number of stages is missing.
    """
    from doll.config import SgdConfig
    from doll.errors import InfeasiblePlanError
    from doll.pipeline.planner.partition import MemoryRule
    from doll.pipeline.planner.profiled import live_rule
    from doll.pipeline.profiling.profile import Profile

    from doll_lab.pipelines.fleet import load_fleet
    from doll_lab.pipelines.fleet_plan import plan_fleet
    from doll_lab.pipelines.fleet_report import report_text, to_dict

    section = config.worker.pipeline if config is not None else None
    job_profile = config.path(section.profile) if config is not None and section and section.profile else None
    path = given.profile or job_profile
    if path is None:
        raise typer.BadParameter("--pipeline: expected --profile, or a job file with worker.pipeline.profile")
    k = given.stages or (section.stages if section is not None else None)
    if k is None:
        raise typer.BadParameter("--pipeline: expected --stages, or a job file with worker.pipeline.stages")
    policy = config.training.policy if config is not None else None
    distance = given.clock_distance
    if distance is None:
        distance = int(getattr(policy, "clock_distance", 0))
    fleet, network = load_fleet(fleet_path)
    network = _network(network, given.within_node, given.between_nodes)
    profile = Profile.load(path)

    def memory(number: int) -> MemoryRule:
        """Return DOLL's rule for the memory of a stage with `number` minibatches in flight."""
        if given.optimizer_copies is not None:
            return MemoryRule(given.optimizer_copies)
        return live_rule(config.training.optimizer if config is not None else SgdConfig())

    plan = plan_fleet(profile, fleet, network, memory, k=k, clock_distance=distance, in_flight=given.in_flight)
    notes = _notes(plan.best.in_flight if plan.best else None, getattr(policy, "wave_batches", None), network)
    if section is not None and section.remote:
        notes.append(
            f"on Kubernetes doll provision launches each virtual worker as a gang of {k + 1} pods: the {k} stages, and "
            "the worker itself, whose pod is not in these prices"
        )
    if plot is not None and plan.best is not None:
        from doll_lab.pipelines.plots import save_allocation

        save_allocation(plan.best, plan.profile.model, plot)
        notes.append(f"plot: {plot}")
    emit(as_json, {**to_dict(plan), "notes": notes}, report_text(plan, notes))
    if plan.best is None:
        raise typer.Exit(InfeasiblePlanError.exit_code)


def _network(network: Network, within_gb_per_s: float | None, between_gb_per_s: float | None) -> Network:
    given = {"within_node_bytes_per_s": within_gb_per_s, "between_nodes_bytes_per_s": between_gb_per_s}
    return replace(network, **{name: value * 1e9 for name, value in given.items() if value is not None})


def _notes(in_flight: int | None, wave_batches: int | None, network: Network) -> list[str]:
    notes = []
    if network.between_nodes_bytes_per_s == float("inf"):
        notes.append("transfers between nodes take no time: give network in the fleet's YAML, or --between-nodes")
    if in_flight is not None and wave_batches is not None and wave_batches != in_flight:
        notes.append(f"the job file has training.policy.wave_batches {wave_batches}; N_m here is {in_flight}")
    return notes
