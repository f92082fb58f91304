"""Pods as machines: what an order makes of the template, and what a pod's state means."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from doll.config import KubernetesFleetConfig, PodPlacement
from doll.provisioner.fleets.kubernetes import pods
from doll.provisioner.fleets.port import EndReason, Instance, InstanceState, Order

SETTINGS = KubernetesFleetConfig(kind="kubernetes", pod_template="pod.yaml")
TEMPLATE: dict[str, Any] = {
    "apiVersion": "v1", "kind": "Pod",
    "metadata": {"generateName": "x-", "labels": {"team": "ads"}},
    "spec": {
        "restartPolicy": "Always", "nodeSelector": {"disk": "ssd"}, "tolerations": [{"key": "gpu"}],
        "containers": [
            {"name": "proxy", "image": "proxy"},
            {
                "name": "worker", "image": "doll",
                "env": [{"name": "DOLL_WORKER", "value": "9"}, {"name": "A", "value": "b"}],
            },
        ],
    },
}  # fmt: skip
START, LATER = "2026-11-27T04:00:00Z", "2026-11-27T04:10:30Z"
START_S = pods.unix_s(START)


def pod(phase: str = "Running", *, deleted: bool = False, taken: bool = False, node: str = "n1", **status: Any) -> Any:
    made = pods.manifest(Order(3, 2, "spot"), TEMPLATE, SETTINGS, "digits")
    made["metadata"]["creationTimestamp"] = START
    if deleted:
        made["metadata"]["deletionTimestamp"] = LATER
    if node:
        made["spec"]["nodeName"] = node
    conditions = [{"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}] if taken else []
    made["status"] = {"phase": phase, "conditions": conditions, **status}
    return made


def instance(made: Any, now_s: float = START_S + 600) -> Instance:
    instance = pods.instance_of(made, now_s)
    assert instance is not None
    return instance


def test_an_order_names_its_pod_and_each_part_of_it_counts() -> None:
    order = Order(3, 2, "spot")
    assert pods.name_of(order, "digits") == "doll-digits-3-2-spot"
    orders = [
        order,
        Order(3, 2, "on_demand"),
        Order(3, 2, "spot", attempt=1),
        Order(3, 2, "spot", run="r7"),
        Order(32, 2, "spot"),
    ]
    names = {pods.name_of(each, cluster) for each in orders for cluster in ("digits", "Digits", "digits.1", "d" * 63)}
    assert len(names) == 4 * len(orders)
    for name in names:
        assert len(name) <= 63
        assert name.replace("-", "").isalnum()
        assert name == name.lower()


def test_a_manifest_is_the_template_with_identity_and_placement() -> None:
    settings = SETTINGS.model_copy(
        update={"on_demand": PodPlacement(node_selector={"market": "od"}, tolerations=[{"key": "od"}])}
    )
    before = deepcopy(TEMPLATE)
    made = pods.manifest(Order(3, 2, "on_demand"), TEMPLATE, settings, "digits")
    assert before == TEMPLATE
    assert made["metadata"] == {
        "name": "doll-digits-3-2-on-demand",
        "labels": {
            "team": "ads", "doll/cluster": "digits", "doll/worker": "3", "doll/incarnation": "2",
            "doll/market": "on_demand",
        },
    }  # fmt: skip
    spec = made["spec"]
    assert spec["restartPolicy"] == "Never"
    assert spec["nodeSelector"] == {"disk": "ssd", "market": "od"}
    assert spec["tolerations"] == [{"key": "gpu"}, {"key": "od"}]
    proxy, worker = spec["containers"]
    assert "env" not in proxy
    owned = pods.manifest(
        Order(3, 2, "spot"), TEMPLATE, settings.model_copy(update={"owner": "my-job"}), "digits", "clicks", "u1"
    )
    assert owned["metadata"]["ownerReferences"] == [
        {"apiVersion": "v1", "kind": "ConfigMap", "name": "my-job", "uid": "u1"}
    ]
    assert owned["metadata"]["labels"]["doll/job"] == "clicks"
    assert {entry["name"]: entry["value"] for entry in worker["env"]} == {
        "A": "b", "DOLL_WORKER": "3", "DOLL_INCARNATION": "2", "DOLL_INSTANCE": "doll-digits-3-2-on-demand",
        "DOLL_MARKET": "on_demand",
    }  # fmt: skip


def test_a_pod_ends_though_nobody_ends_it_and_not_with_all_others() -> None:
    lives_s = [
        pods.manifest(Order(slot, 1, "spot"), TEMPLATE, SETTINGS, "digits")["spec"]["activeDeadlineSeconds"]
        for slot in range(24)
    ]
    assert max(lives_s) == 24 * 3600
    assert min(lives_s) >= 20 * 3600
    assert len(set(lives_s)) == 24
    own = {**TEMPLATE, "spec": {**TEMPLATE["spec"], "activeDeadlineSeconds": 900}}
    assert pods.manifest(Order(0, 1, "spot"), own, SETTINGS, "digits")["spec"]["activeDeadlineSeconds"] == 900
    ended = instance(pod("Failed", reason="DeadlineExceeded"))
    assert ended.end_reason is EndReason.TERMINATED, "neither the market nor the worker is at fault"


def test_a_pod_costs_from_when_it_has_a_node() -> None:
    scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": LATER}
    assert instance(pod(conditions=[scheduled]), START_S + 900).costs_from_s == START_S + 630
    assert instance(pod("Pending", node=""), START_S + 500).costs_from_s == START_S + 500
    gone = instance(pod("Pending", node="", deleted=True), START_S + 900)
    assert gone.costs_from_s == gone.ended_s == START_S + 630, "it has never cost anything"


def test_the_states_of_a_pod() -> None:
    waiting = instance(pod("Pending", node=""))
    assert (waiting.slot, waiting.incarnation, waiting.market, waiting.launched_s) == (3, 2, "spot", START_S)
    assert waiting.state is InstanceState.PENDING
    assert instance(pod()).state is InstanceState.RUNNING
    assert instance(pod("Unknown")).is_alive
    ours = instance(pod(deleted=True))
    assert (ours.state, ours.notice_s) == (InstanceState.ENDING, None)
    noticed = instance(pod(deleted=True, taken=True))
    assert (noticed.state, noticed.notice_s) == (InstanceState.RUNNING, START_S + 630)


@pytest.mark.parametrize(
    ("made", "ended_s", "reason"),
    [
        (pod("Failed"), START_S + 600, EndReason.FAILED),
        (pod("Succeeded", containerStatuses=[{"name": "worker", "state": {"terminated": {"finishedAt": LATER}}}]),
         START_S + 630, EndReason.FAILED),
        (pod("Failed", deleted=True), START_S + 630, EndReason.TERMINATED),
        (pod("Failed", deleted=True, taken=True), START_S + 630, EndReason.INTERRUPTED),
        (pod("Failed", taken=True, reason="Evicted"), START_S + 600, EndReason.INTERRUPTED),
        (pod("Pending", node="", deleted=True), START_S + 630, EndReason.TERMINATED),
    ],
)  # fmt: skip
def test_the_ends_of_a_pod(made: Any, ended_s: float, reason: EndReason) -> None:
    ended = instance(made)
    assert (ended.state, ended.ended_s, ended.end_reason) == (InstanceState.ENDED, ended_s, reason)


def test_a_pod_on_a_node_that_does_not_answer_is_replaced_and_costs_while_its_node_is_there() -> None:
    late_s = START_S + 630 + pods.LATE_S
    for taken, reason in ((True, EndReason.INTERRUPTED), (False, EndReason.TERMINATED)):
        made = pod(deleted=True, taken=taken)
        assert instance(made, late_s).is_alive is taken
        silent = instance(made, late_s + 1)
        assert (silent.state, silent.ended_s) == (InstanceState.ENDING, None)
        gone = pods.vanished(silent, late_s + 300)
        assert (gone.state, gone.ended_s, gone.end_reason) == (InstanceState.ENDED, late_s + 300, reason)
        for now_s in (START_S + 630 + pods.SILENT_S + 1, START_S + 1e6):
            ended = instance(made, now_s)
            assert (ended.state, ended.end_reason) == (InstanceState.ENDED, reason)
            assert ended.ended_s == START_S + 630 + pods.SILENT_S, "not for ever"


def test_what_has_vanished_ended_as_it_was_last_seen() -> None:
    now_s = START_S + 610
    running = pods.vanished(instance(pod()), now_s)
    assert (running.ended_s, running.end_reason) == (now_s, EndReason.INTERRUPTED), "its node was taken with it"
    on_demand = pod()
    on_demand["metadata"]["labels"]["doll/market"] = "on_demand"
    assert pods.vanished(instance(on_demand), now_s).end_reason is EndReason.FAILED
    assert pods.vanished(instance(pod(deleted=True)), now_s).end_reason is EndReason.TERMINATED
    noticed = pods.vanished(instance(pod(deleted=True, taken=True)), now_s + 600)
    assert (noticed.ended_s, noticed.end_reason) == (START_S + 630, EndReason.INTERRUPTED)
    ended = instance(pod("Failed"))
    assert pods.vanished(ended, now_s + 600) == ended


@pytest.mark.parametrize("label", ["doll/market", "doll/worker", "doll/incarnation"])
@pytest.mark.parametrize("value", [None, "", "cheap", "-1", "1.5"])
def test_labels_that_are_no_workers(label: str, value: str | None) -> None:
    made = pod()
    if value is None:
        del made["metadata"]["labels"][label]
    else:
        made["metadata"]["labels"][label] = value
    assert pods.instance_of(made, START_S) is None


def test_a_pod_that_no_node_takes() -> None:
    refused = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "lastTransitionTime": LATER}
    assert pods.unschedulable_since_s(pod("Pending", node="", conditions=[refused])) == START_S + 630
    assert pods.unschedulable_since_s(pod("Pending", node="", deleted=True, conditions=[refused])) is None
    gated = pod("Pending", node="", conditions=[{**refused, "reason": "SchedulingGated"}])
    gated["spec"]["schedulingGates"] = [{"name": "kueue.x-k8s.io/admission"}]
    assert pods.unschedulable_since_s(gated) == START_S + 630, "a queue without quota is a market without capacity"
    assert pods.why_it_waits(gated) == "held by its scheduling gates: kueue.x-k8s.io/admission"
    waits = pod("Pending", node="", conditions=[{**refused, "reason": "WaitingForGates"}])
    assert pods.unschedulable_since_s(waits) is None
    assert pods.unschedulable_since_s(pod("Pending")) is None


def test_a_container_that_cannot_start_until_somebody_corrects_the_template() -> None:
    waiting = {"reason": "ImagePullBackOff", "message": "Back-off pulling image doll:nope"}
    status = [{"name": "worker", "state": {"waiting": waiting}}]
    why = pods.never_starts(pod("Pending", containerStatuses=status))
    assert why == "container worker: ImagePullBackOff: Back-off pulling image doll:nope"
    assert pods.never_starts(pod("Pending", initContainerStatuses=status)) == why
    status[0]["state"] = {"waiting": {"reason": "ContainerCreating"}}
    assert pods.never_starts(pod("Pending", containerStatuses=status)) == ""
    assert pods.never_starts(pod()) == ""
