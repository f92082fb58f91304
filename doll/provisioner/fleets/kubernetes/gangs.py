"""Gangs of pods: the worker and the stages of a pipeline over machines, which are one instance (ADR 0143).

The id of the instance is the name of the worker's pod. This pod is created last, so where it exists, all pods of the
gang were created.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

from doll.errors import StageLostError
from doll.provisioner.fleets.kubernetes.pods import Pod
from doll.provisioner.fleets.port import EndReason, Instance, InstanceState

GANG: Final = "doll/gang"
STAGE: Final = "doll/stage"
MACHINES: Final = "doll/machines"
_QUEUE: Final = "kueue.x-k8s.io/queue-name"


def stage_name(gang: str, stage: int) -> str:
    """Return the name of the pod of a stage. It is longer than a host name where the gang's name is the longest one:
    then Kubernetes cuts the host name, which nothing uses."""
    return f"{gang}-s{stage}"


def add_to_gang(pod: dict[str, Any], gang: str, machines: int, container: str, stage: int | None = None) -> None:
    """Mark a manifest as a pod of a gang of `machines` pods: of a stage, or of the worker if `stage` is None. The
    container of this name gets the variables that let worker and stages find each other.

    Kueue admits the pods of a gang together if the template names a queue, and does not wait for replacements of single
    pods, because the provisioner replaces gangs.
    """
    metadata = pod["metadata"]
    labels = metadata["labels"]
    labels |= {GANG: gang, MACHINES: str(machines)}
    if _QUEUE in labels:
        labels["kueue.x-k8s.io/pod-group-name"] = gang
        metadata["annotations"] = {
            **(metadata.get("annotations") or {}),
            "kueue.x-k8s.io/pod-group-total-count": str(machines), "kueue.x-k8s.io/retriable-in-group": "false",
        }  # fmt: skip
    given: list[dict[str, Any]] = [{"name": "DOLL_GANG", "value": gang}]
    if stage is not None:
        metadata["name"] = stage_name(gang, stage)
        labels[STAGE] = str(stage)
        given += [
            {"name": "DOLL_STAGE", "value": str(stage)},
            {"name": "DOLL_POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "DOLL_LISTEN", "value": "$(DOLL_POD_IP):0"},  # the kubelet writes the address
        ]
    names = {entry["name"] for entry in given}
    runs = next(each for each in pod["spec"]["containers"] if each["name"] == container)
    runs["env"] = [*(each for each in runs["env"] if each["name"] not in names), *given]


def gang_name(pod: Pod) -> str:
    """Return the id of the instance of which this pod is a part: a pod that is in no gang is alone."""
    return str(pod["metadata"].get("labels", {}).get(GANG) or pod["metadata"]["name"])


def machines_of(pod: Pod) -> int:
    """Return the number of pods of this pod's instance. Raise ValueError if the label is not a number."""
    return int(pod["metadata"].get("labels", {}).get(MACHINES, "1"))


def has_lost_stage(pods: Iterable[Pod]) -> bool:
    """Return whether a container of these pods has ended because its worker has lost a stage (`StageLostError`)."""
    return any(
        container.get("state", {}).get("terminated", {}).get("exitCode") == StageLostError.exit_code
        for pod in pods
        for container in pod.get("status", {}).get("containerStatuses") or ()
    )


def as_one(
    name: str, machines: int, pods: Sequence[Instance], known: Instance | None, now_s: float, *,
    lost_stage: bool = False,
) -> Instance:  # fmt: skip
    """Return the instance of a gang from those of its pods that are listed.

    The gang is alive while all of its pods are. It costs the sum of what its pods cost, so its costs begin at the mean
    of their times.

    Args:
        known: the instance when it was last listed, or launched; None: not by this process.
        lost_stage: see `has_lost_stage`. A worker notices seconds before the API server that the node of a stage is
            lost. On spot this is an interruption, unless the pod of a stage has failed as well.
    """
    live = [each for each in pods if each.is_alive]
    running = all(each.state is InstanceState.RUNNING for each in pods)
    whole = replace(
        pods[0], id=name, machines=machines, state=InstanceState.RUNNING if running else InstanceState.PENDING,
        launched_s=min(each.launched_s for each in pods), ended_s=None, end_reason=EndReason.NONE,
        costs_from_s=statistics.fmean(each.costs_from_s or each.launched_s for each in pods),
        notice_s=min((each.notice_s for each in pods if each.notice_s is not None), default=None),
        trouble=next((f"pod {each.id}: {each.trouble}" for each in pods if each.trouble), ""),
    )  # fmt: skip
    if len(live) == machines:
        return whole
    reason = _cause(name, whole, pods, known, lost_stage=lost_stage)
    ends = [each.ended_s for each in pods if each.ended_s is not None]
    if reason is EndReason.TERMINATED and len(ends) < len(pods):
        return replace(whole, state=InstanceState.ENDING)
    return whole.ended(max(ends, default=now_s), reason)


def _cause(
    name: str, whole: Instance, pods: Sequence[Instance], known: Instance | None, *, lost_stage: bool
) -> EndReason:  # fmt: skip
    """Return the reason for the end of a gang. Its other pods are ended by the provisioner as soon as one has ended, so
    a reason of the provisioner's counts least."""
    noticed_s = whole.notice_s if known is None else known.notice_s or whole.notice_s
    if known is not None and known.state is InstanceState.ENDING and noticed_s is None:
        return EndReason.TERMINATED
    reasons = {each.end_reason for each in pods}
    if EndReason.INTERRUPTED in reasons or noticed_s is not None:
        return EndReason.INTERRUPTED
    failed = [each.id for each in pods if each.end_reason is EndReason.FAILED]
    if failed == [name] and lost_stage and whole.market == "spot":
        return EndReason.INTERRUPTED
    if failed:
        return EndReason.FAILED
    was_undone = known is None and name not in {each.id for each in pods}  # the launch was not completed
    if was_undone or any(not each.is_alive for each in pods):
        return EndReason.TERMINATED
    return EndReason.INTERRUPTED if whole.market == "spot" else EndReason.FAILED  # as in `pods.vanished`
