"""Checks for `doll doctor` whether a job's provisioner can work on a Ray cluster. A task on a node of each market
reports the packages that are installed there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from importlib.metadata import version
from typing import Any, Final

from doll.config import JobConfig, RayFleetConfig
from doll.errors import ConfigError, ServiceUnavailableError
from doll.provisioner.fleets.ray.fleet import connect
from doll.records.bounded import short
from doll.records.check import Check

_NAME: Final = "Ray"
_TASK_S: Final = 60.0


def ask_ray(config: JobConfig) -> list[Check]:
    """Check the cluster, versions, the nodes of each market, and the package on these nodes."""
    settings = config.fleet
    assert isinstance(settings, RayFleetConfig)
    try:
        fleet = connect(config)
    except (ConfigError, ServiceUnavailableError) as error:
        return [Check(_NAME, "failed", str(error))]
    import ray

    with closing(fleet):
        nodes: Sequence[Mapping[str, Any]] = [node for node in ray.nodes() if node["Alive"]]
        findings = [Check(_NAME, "ok", f"{len(nodes)} nodes, Ray {ray.__version__}")]
        for market, labels in (("spot", settings.spot), ("on-demand", settings.on_demand)):
            findings += _market(ray, settings, nodes, market, labels)
    return findings


def _market(
    ray: Any, settings: RayFleetConfig, nodes: Sequence[Mapping[str, Any]], market: str, labels: Mapping[str, str]
) -> Iterator[Check]:
    name, wanted = f"{_NAME}: nodes for {market}", ", ".join(f"{key}={value}" for key, value in labels.items())
    fitting = nodes_with(nodes, labels)
    if fitting is None:
        yield Check(name, "unknown", f"{wanted}: an expression, which Ray evaluates")
    elif not fitting:
        key = "fleet.spot" if market == "spot" else "fleet.on_demand"
        yield Check(
            name, "warning", f"none has {wanted}",
            f"start some with `ray start --labels {wanted.replace(', ', ',')}`, have an "
            f"autoscaler make them, or correct {key}",
        )  # fmt: skip
        return
    else:
        room = sum(node["Resources"].get("CPU", 0.0) for node in fitting)
        workers = int(room // settings.num_cpus)
        if not workers:
            yield Check(
                name, "failed", f"{len(fitting)} with {wanted} have {room:g} CPUs in all, a worker takes "
                f"{settings.num_cpus:g}", "set a smaller fleet.num_cpus, or start larger nodes",
            )  # fmt: skip
            return
        yield Check(name, "ok", f"{len(fitting)} with {wanted}, room for {workers} workers")
    task = ray.remote(num_cpus=0, max_retries=0, label_selector=dict(labels))(_version)
    name = f"{_NAME}: doll-online on a node for {market}"
    try:
        there = ray.get(task.remote(), timeout=_TASK_S)
    except Exception as error:  # of Ray, or of the node's Python
        why = short(str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__)
        yield Check(
            name, "failed", why, "install doll-online in the nodes' image, or set fleet.runtime_env or working_dir"
        )
        return
    if there != (here := _version()):
        yield Check(name, "failed", f"it has {there}, this machine {here}", f"pip install doll-online=={here} there")
    else:
        yield Check(name, "ok", there)


def nodes_with(nodes: Sequence[Mapping[str, Any]], labels: Mapping[str, str]) -> list[Mapping[str, Any]] | None:
    """Return the nodes that carry all of these labels; None if a value is an expression."""
    if any(value.startswith(("!", "in(")) for value in labels.values()):
        return None
    return [node for node in nodes if labels.items() <= dict(node.get("Labels", {})).items()]


def _version() -> str:
    return version("doll-online")
