"""An API server of pods in a dict; nobody schedules or runs them but the test."""

from __future__ import annotations

import copy
from datetime import UTC, datetime
from typing import Any

from doll.provisioner.billing import LOCAL, bill
from doll.provisioner.fleets.kubernetes.fleet import ApiError, KubernetesFleet
from doll.provisioner.fleets.port import Instance
from doll.provisioner.prices.port import StatedPrices
from fake_fleet import VirtualClock

TEMPLATE = {"apiVersion": "v1", "kind": "Pod", "spec": {"containers": [{"name": "worker", "image": "doll:nope"}]}}


class Server:
    """Pods by name; nobody schedules or runs them but the test."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.pods: dict[str, Any] = {}
        self.namespace = "default"

    def create(self, manifest: Any) -> Any:
        pod = copy.deepcopy(manifest)
        pod["metadata"]["creationTimestamp"] = self.stamp()
        pod["status"] = {"phase": "Pending"}
        self.pods[pod["metadata"]["name"]] = pod
        return pod

    def read(self, name: str) -> Any:
        if name not in self.pods:
            raise ApiError("read", 404, "not found")
        return self.pods[name]

    def list(self, selector: str) -> list[Any]:
        key, _, value = selector.partition("=")
        return [pod for pod in self.pods.values() if pod["metadata"]["labels"].get(key) == value]

    def delete(self, name: str) -> None:
        """With a node, its kubelet ends it 30 s later."""
        pod = self.pods[name]
        if not pod["spec"].get("nodeName") or pod["status"]["phase"] == "Failed":
            del self.pods[name]
        else:
            pod["metadata"].setdefault("deletionTimestamp", self.stamp(30))

    def stamp(self, after_s: float = 0.0) -> str:
        return datetime.fromtimestamp(self.clock() + after_s, UTC).isoformat()

    def schedule(self, name: str, **status: Any) -> None:
        scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": self.stamp()}
        self.pods[name]["spec"]["nodeName"] = "n1"
        self.pods[name]["status"] |= {"conditions": [scheduled], **status}

    def refuse_node(self, name: str) -> None:
        none = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes fit",
                "lastTransitionTime": self.stamp()}  # fmt: skip
        self.pods[name]["status"]["conditions"] = [none]


def listed(fleet: KubernetesFleet) -> dict[str, Instance]:
    return {instance.id: instance for instance in fleet.instances()}


def usd(fleet: KubernetesFleet, now_s: float) -> float:
    return bill(fleet.instances(), StatedPrices(3600.0, 3600.0).series, LOCAL, now_s).usd
