"""A job on a cluster whose nodes a test adds and takes: a real API server whose kubelets are played, or a real Ray."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

import kube_cluster
import pytest
import ray_cluster
import yaml
from doll.services import KAFKA_ENV, REDIS_ENV
from job_rig import MakePipeline
from kube_nodes import Kubelets

NOTICE_S: Final = 30


class World(Protocol):
    """Nodes for spot, each of which takes one worker."""

    def add(self) -> None:
        """One more node."""

    def of_workers(self) -> list[str]:
        """The nodes on which workers run that nobody takes."""

    def drain(self, node: str) -> None:
        """The node gets a notice of `NOTICE_S`."""

    def take_drained(self) -> None:
        """The nodes that got a notice are gone."""

    def kill(self, node: str) -> None:
        """The node is gone without one."""


class _KubernetesWorld:
    def __init__(self, nodes: Kubelets) -> None:
        self._nodes = nodes
        self._drained: list[str] = []

    def node_of(self, pod: str) -> str:
        return self._nodes.of(pod)

    def add(self) -> None:
        self._nodes.add(f"node-{time.monotonic_ns()}", "spot")

    def of_workers(self) -> list[str]:
        running = [pod for pod in self._nodes.pods() if pod["status"]["phase"] == "Running"]
        nodes = [pod["spec"]["nodeName"] for pod in running if "deletionTimestamp" not in pod["metadata"]]
        return [node for node in nodes if node not in self._drained]

    def drain(self, node: str) -> None:
        self._nodes.drain(node)
        self._drained.append(node)

    def take_drained(self) -> None:
        while self._drained:
            self._nodes.kill(self._drained.pop())

    def kill(self, node: str) -> None:
        self._nodes.kill(node)


class _RayWorld:
    def __init__(self, cluster: ray_cluster.RayCluster) -> None:
        self._cluster = cluster
        self.take_drained = cluster.take_drained
        self.kill = cluster.kill
        self.of_workers = cluster.nodes_of_actors

    def add(self) -> None:
        self._cluster.add("spot")

    def drain(self, node: str) -> None:
        self._cluster.drain(node, NOTICE_S)


@contextmanager
def on_kubernetes(
    make_pipeline: MakePipeline, overrides: tuple[str, ...], folder: Path
) -> Iterator[tuple[Any, _KubernetesWorld]]:
    with kube_cluster.KubeCluster(folder / "cluster", controllers=True) as cluster:
        files = {role: folder / f"{role}.yaml" for role in ("worker", "stage")}
        templates = f"pod_template: {files['worker']}, stage_template: {files['stage']}"
        fleet = f"{{kind: kubernetes, {templates}, kubeconfig: {cluster.kubeconfig}}}"
        job = make_pipeline(*overrides, f"fleet={fleet}")
        room = {"requests": {"cpu": "3"}}  # most of a node
        for role, file in files.items():
            command = [sys.executable, "-m", "doll", role, "--job", str(job.job_path), "--run-folder", str(job.run)]
            spec = {
                "terminationGracePeriodSeconds": NOTICE_S,
                "containers": [{"name": "worker", "image": "doll:local", "command": command, "resources": room}],
            }
            file.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Pod", "spec": spec}))
        env = {KAFKA_ENV: job.services.kafka, REDIS_ENV: job.services.redis}
        with Kubelets(cluster, folder, env) as nodes:
            yield job, _KubernetesWorld(nodes)


@contextmanager
def _on_ray(make_pipeline: MakePipeline, overrides: tuple[str, ...], folder: Path) -> Iterator[tuple[Any, World]]:
    with ray_cluster.RayCluster() as cluster:
        job = make_pipeline(*overrides)
        env = {KAFKA_ENV: job.services.kafka, REDIS_ENV: job.services.redis}
        fleet = {"fleet": {"kind": "ray", "address": cluster.address, "env": env}}
        job.job_path.write_text(job.job_path.read_text() + yaml.safe_dump(fleet))
        yield job, _RayWorld(cluster)


WORLDS: Final = [
    pytest.param(make, id=name, marks=pytest.mark.skipif(reason is not None, reason=str(reason)))
    for make, name, reason in (
        (on_kubernetes, "kubernetes", kube_cluster.unavailable_reason()),
        (_on_ray, "ray", ray_cluster.unavailable_reason()),
    )
]
"""For a parameter `make_world` of a test: with a fixture `make_pipeline`, overrides and a folder, job and world."""
