"""Nodes of a `KubeCluster`: their kubelets are played, and run a pod's container as a process where a test asks."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.error import HTTPError

from doll.local import processes
from kube_cluster import KubeCluster

_STRATEGIC = "application/strategic-merge-patch+json"
_POLL_S = 0.2
_HEARTBEAT_S = 10.0


def container_status(state: Mapping[str, Any], *, ready: bool = False) -> dict[str, Any]:
    """What a kubelet says of the worker's container."""
    return {
        "name": "worker", "image": "doll:local", "imageID": "", "ready": ready, "restartCount": 0, "state": dict(state),
    }  # fmt: skip


class Nodes:
    """Nodes of four processors, told apart by Karpenter's label."""

    def __init__(self, cluster: KubeCluster, namespace: str = "default") -> None:
        self._cluster = cluster
        self._pods = f"/api/v1/namespaces/{namespace}/pods"
        self.names: set[str] = set()

    def add(self, name: str, market: str) -> None:
        labels = {"karpenter.sh/capacity-type": market, "kubernetes.io/hostname": name}
        self._cluster.call("POST", "/api/v1/nodes", {"metadata": {"name": name, "labels": labels}})
        room = {"cpu": "4", "memory": "8Gi", "pods": "20"}
        self._report_node(name, capacity=room, allocatable=room)
        self.names.add(name)

    def _report_node(self, name: str, **more: Any) -> None:
        """Say that a node is ready: the controllers of a cluster take one that is silent for 40 s for lost."""
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "lastHeartbeatTime": _now(),
                 "lastTransitionTime": _now()}  # fmt: skip
        status = {"status": {"conditions": [ready], **more}}
        self._cluster.call("PATCH", f"/api/v1/nodes/{name}/status", status, _STRATEGIC)

    def pods(self) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = self._cluster.call("GET", self._pods)["items"]
        return items

    def of(self, pod: str) -> str:
        """The node that the scheduler chose; "" so far."""
        return str(self._cluster.call("GET", f"{self._pods}/{pod}")["spec"].get("nodeName", ""))

    def bind(self, pod: str) -> None:
        """Put a pod on a node that nobody watches, unless a scheduler has found one."""
        binding = {"metadata": {"name": pod}, "target": {"kind": "Node", "name": "a-node"}}
        try:
            self._cluster.call("POST", f"{self._pods}/{pod}/binding", binding)
        except HTTPError as error:
            if error.code != 409:
                raise

    def drain(self, name: str) -> None:
        """Take no more pods, and evict those that are there: what precedes a spot instance's end."""
        self._cluster.call("PATCH", f"/api/v1/nodes/{name}", {"spec": {"unschedulable": True}}, _STRATEGIC)
        for pod in self.pods():
            if pod["spec"].get("nodeName") == name:
                self.evict(pod["metadata"]["name"])

    def evict(self, pod: str) -> None:
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}}
        self._cluster.call("POST", f"{self._pods}/{pod}/eviction", eviction)

    def report(self, pod: str, **status: Any) -> None:
        """The status that a kubelet writes."""
        self._cluster.call("PATCH", f"{self._pods}/{pod}/status", {"status": status}, _STRATEGIC)

    def forget(self, pod: str) -> None:
        """The pod's containers have ended after its deletion: it goes."""
        self._cluster.call("DELETE", f"{self._pods}/{pod}", {"gracePeriodSeconds": 0})

    def collect(self, pod: str) -> None:
        """What the collector of pods without a node does, without its quarantine of 40 s."""
        taken = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByPodGC"}
        self.report(pod, phase="Failed", conditions=[taken])
        self.forget(pod)


class Kubelets(Nodes):
    """The kubelets' work in a thread of its own: pods run as processes, with the template's command and environment.

    Args:
        folder: of the processes' logs.
        env: of all containers.
    """

    def __init__(self, cluster: KubeCluster, folder: Path, env: Mapping[str, str]) -> None:
        super().__init__(cluster)
        self._folder, self._env = folder, dict(env)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}  # by the pod's name
        self._node: dict[str, str] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kubelets")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        for process in self._processes.values():
            processes.end(process, 5.0)

    def kill(self, name: str) -> None:
        """The machine is gone without a notice, its node and its pods some time later."""
        with self._lock:
            self.names.discard(name)
            gone = [pod for pod, node in self._node.items() if node == name]
            for name_of_pod in gone:
                if (process := self._processes.pop(name_of_pod, None)) is not None:
                    process.kill()
                    process.wait()
        self._cluster.call("DELETE", f"/api/v1/nodes/{name}")
        for pod in self.pods():
            if pod["metadata"]["name"] in gone:
                self.collect(pod["metadata"]["name"])

    def _run(self) -> None:
        said_s = time.monotonic()
        while not self._stop.wait(_POLL_S):
            with self._lock:
                try:
                    if time.monotonic() - said_s > _HEARTBEAT_S:
                        said_s = time.monotonic()
                        for name in self.names:
                            self._report_node(name)
                    for pod in self.pods():
                        self._attend(pod)
                except HTTPError as error:
                    if error.code not in (404, 409):  # the pod has gone meanwhile
                        raise

    def _attend(self, pod: dict[str, Any]) -> None:
        name, node = pod["metadata"]["name"], pod["spec"].get("nodeName")
        if node not in self.names or pod["status"]["phase"] in ("Succeeded", "Failed"):
            return
        process = self._processes.get(name)
        is_deleted = "deletionTimestamp" in pod["metadata"]
        if process is None:
            if is_deleted:
                self.forget(name)
                return
            (container,) = pod["spec"]["containers"]
            env = {entry["name"]: entry.get("value", "127.0.0.1") for entry in container["env"]}  # or the pod's address
            env = {key: value.replace("$(DOLL_POD_IP)", "127.0.0.1") for key, value in env.items()}
            log = self._folder / f"{name}.log"
            self._processes[name] = processes.spawn(container["command"], log, {**self._env, **env})
            self._node[name] = node
            running = container_status({"running": {"startedAt": _now()}}, ready=True)
            self.report(name, phase="Running", startTime=_now(), containerStatuses=[running])
        elif (code := process.poll()) is not None:
            ended = container_status({"terminated": {"exitCode": code % 256, "finishedAt": _now()}})
            self.report(name, phase="Failed" if code else "Succeeded", containerStatuses=[ended])
            if is_deleted:
                self.forget(name)
        elif is_deleted:
            process.send_signal(signal.SIGTERM)


def _now() -> str:
    return datetime.now(UTC).isoformat()
