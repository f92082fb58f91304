"""A worker's pod: its name and manifest from an order, and the instance that it represents.

An instance is a pod, not a Job, because the provisioner decides on replacement, and a Job would replace pods by its own
rules. Reference: Kubernetes' "Pod Lifecycle", "Disruptions" (the condition `DisruptionTarget`) and "API-initiated
Eviction".
"""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

from doll.config import KubernetesFleetConfig, PodPlacement
from doll.provisioner.fleets.orders import WorkerLabels, identity, order_name
from doll.provisioner.fleets.port import EndReason, Instance, InstanceState, Order

POOL: Final = "pod/cluster"
LABELS: Final = WorkerLabels("doll/")
LATE_S: Final = 30.0
"""If a pod should have ended this long ago and is not reported as ended, its node does not answer."""
SILENT_S: Final = 1800.0
"""A pod on a node that does not answer counts as ended this long after it should have ended. Such a node costs money
until its cloud or its owner removes it together with its pods, but nobody does this on a private cluster."""
LIFE_S: Final = 24 * 3600
"""A pod ends after this time, also if no provisioner runs any more. The template may set another time."""
_APART_S: Final = 600  # from the end of one slot's pod to the next one's: not all workers are replaced at once
_APART: Final = 24
_LONGEST_NAME: Final = 63  # a pod's host name
_WAITS: Final = ("Unschedulable", "SchedulingGated")
_NEVER_STARTS: Final = frozenset({
    "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName", "CreateContainerConfigError", "CreateContainerError",
    "RunContainerError",
})  # fmt: skip
"""Reasons of a waiting container for which a person must correct the template. `ErrImagePull` alone may disappear."""

Pod = Mapping[str, Any]
"""A v1 Pod as the API server writes it in JSON."""


def name_of(order: Order, cluster: str) -> str:
    """Return the pod's name. Equal orders have the same name, so that an order is launched only once. A name that is
    not in lower case, or too long for the API server, is replaced by one with a checksum of the whole name."""
    whole = order_name(order, cluster)
    name = re.sub(r"[^a-z0-9-]+", "-", whole.lower())
    if name == whole and len(name) <= _LONGEST_NAME:
        return name
    return f"{name[: _LONGEST_NAME - 11].rstrip('-')}-{hashlib.sha256(whole.encode()).hexdigest()[:10]}"


def manifest(
    order: Order, template: Pod, settings: KubernetesFleetConfig, cluster: str, job: str = "", owner_uid: str = ""
) -> dict[str, Any]:
    """Return the pod for an order: the template with the order's identity, the nodes of its market, a time limit, and
    no restarts. If `owner_uid` is given, the pod ends together with the ConfigMap `settings.owner` with this uid."""
    pod = copy.deepcopy(dict(template))
    placement: PodPlacement = settings.spot if order.market == "spot" else settings.on_demand
    name = name_of(order, cluster)
    metadata = pod.setdefault("metadata", {})
    metadata["name"] = name
    metadata.pop("generateName", None)
    metadata.setdefault("labels", {}).update(LABELS.write(order, cluster, job))
    if owner_uid:
        metadata["ownerReferences"] = [
            {"apiVersion": "v1", "kind": "ConfigMap", "name": settings.owner, "uid": owner_uid}
        ]
    spec = pod["spec"]
    spec["restartPolicy"] = "Never"  # who dies is replaced by the provisioner, under a new incarnation
    spec.setdefault("activeDeadlineSeconds", LIFE_S - order.slot % _APART * _APART_S)
    spec["nodeSelector"] = {**spec.get("nodeSelector", {}), **placement.node_selector}
    spec["tolerations"] = [*spec.get("tolerations", []), *placement.tolerations]
    given = identity(order, name)
    container = next(each for each in spec["containers"] if each["name"] == settings.container)
    others = [entry for entry in container.get("env", []) if entry.get("name") not in given]
    container["env"] = [*others, *({"name": key, "value": value} for key, value in given.items())]
    return pod


def instance_of(pod: Pod, now_s: float) -> Instance | None:
    """Return the instance that a pod represents; None if its labels are not a worker's.

    A deletion with the condition `DisruptionTarget` was requested by the owner of the nodes (a drain, an eviction, a
    preemption, a node that is not ready). Such a deletion counts as an interruption notice until `deletionTimestamp`.
    Any other deletion counts as requested by the provisioner, and so does the end of a pod whose time limit is over.
    Raises KeyError, TypeError or ValueError if `pod` is not a pod.
    """
    metadata, spec, status = pod["metadata"], pod["spec"], pod.get("status", {})
    worker = LABELS.read(metadata.get("labels", {}))
    if worker is None:
        return None
    phase = status.get("phase", "Pending")
    deleted = metadata.get("deletionTimestamp")
    end_s = unix_s(deleted) if deleted else None
    has_ended = phase in ("Succeeded", "Failed")
    ended_s = (_finished_s(status) or end_s or now_s) if has_ended else end_s
    has_node = bool(spec.get("nodeName"))
    placed_s = _since_s(condition(pod, "PodScheduled", "True")) if has_node else ended_s or now_s
    instance = Instance(
        id=metadata["name"], pool=POOL, state=InstanceState.RUNNING if phase == "Running" else InstanceState.PENDING,
        launched_s=unix_s(metadata["creationTimestamp"]), costs_from_s=placed_s,
        trouble="" if has_ended else never_starts(pod), **worker,
    )  # fmt: skip
    taken = condition(pod, "DisruptionTarget", "True") is not None
    is_ours = bool(deleted) or status.get("reason") == "DeadlineExceeded"
    reason = EndReason.INTERRUPTED if taken else EndReason.TERMINATED if is_ours else EndReason.FAILED
    if has_ended or (end_s is not None and not has_node):
        return instance.ended(now_s if ended_s is None else ended_s, reason)
    if end_s is None:
        return instance
    if now_s > end_s + SILENT_S:
        return instance.ended(end_s + SILENT_S, reason)
    noticed = replace(instance, notice_s=end_s if taken else None)
    return noticed if taken and now_s <= end_s + LATE_S else replace(noticed, state=InstanceState.ENDING)


def vanished(instance: Instance, now_s: float) -> Instance:
    """Return the instance of a pod that is not listed any more, after its end.

    The garbage collection marks and deletes pods of a lost node in one step, so the mark is never visible. A spot
    instance that disappears without an orderly deletion therefore counts as interrupted.
    """
    if instance.state is InstanceState.ENDED:
        return instance
    is_ending = instance.state is InstanceState.ENDING  # it was listed until now, also after its notice
    is_taken = instance.notice_s is not None or (instance.market == "spot" and not is_ending)
    reason = EndReason.INTERRUPTED if is_taken else EndReason.TERMINATED if is_ending else EndReason.FAILED
    ended_s = now_s if instance.notice_s is None or is_ending else min(now_s, instance.notice_s)
    return instance.ended(ended_s, reason)


def condition(pod: Pod, kind: str, status: str) -> Mapping[str, Any] | None:
    """Return the pod's condition of this type if it has this status; otherwise None."""
    conditions: Sequence[Mapping[str, Any]] = pod.get("status", {}).get("conditions") or ()
    return next((each for each in conditions if each.get("type") == kind and each.get("status") == status), None)


def why_it_waits(pod: Pod) -> str:
    """Return the scheduler's message on a pod without a node, or the names of the scheduling gates of the pod."""
    gates = ", ".join(str(gate.get("name")) for gate in pod["spec"].get("schedulingGates") or ())
    said = str((condition(pod, "PodScheduled", "False") or {}).get("message", ""))
    return f"held by its scheduling gates: {gates}" if gates else said


def unschedulable_since_s(pod: Pod) -> float | None:
    """Return the time since which no node accepts the pod or a queue (Kueue) keeps it waiting; None if not known."""
    scheduled = condition(pod, "PodScheduled", "False")
    if scheduled is None or scheduled.get("reason") not in _WAITS or pod["metadata"].get("deletionTimestamp"):
        return None
    return _since_s(scheduled) or unix_s(pod["metadata"]["creationTimestamp"])


def never_starts(pod: Pod) -> str:
    """Return the reason why a container of the pod cannot start until a person corrects its template; "" otherwise."""
    status = pod.get("status", {})
    for container in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
        waiting = container.get("state", {}).get("waiting") or {}
        if waiting.get("reason") in _NEVER_STARTS:
            return f"container {container['name']}: {waiting['reason']}: {waiting.get('message', 'without a message')}"
    return ""


def unix_s(text: str) -> float:
    """Convert a time in the format of the API server to Unix seconds."""
    return datetime.fromisoformat(text).timestamp()


def _since_s(condition: Mapping[str, Any] | None) -> float | None:
    at = condition.get("lastTransitionTime") if condition is not None else None
    return unix_s(at) if at else None


def _finished_s(status: Mapping[str, Any]) -> float | None:
    ends = [
        unix_s(ended["finishedAt"])
        for container in status.get("containerStatuses") or ()
        if (ended := container.get("state", {}).get("terminated")) and ended.get("finishedAt")
    ]
    return max(ends, default=None)
