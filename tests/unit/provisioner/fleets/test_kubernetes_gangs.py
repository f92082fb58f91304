"""Gangs of pods: a worker and its stages are launched, seen, billed and ended as one, on an API server in a dict."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from doll.config import KubernetesFleetConfig, parse
from doll.errors import ConfigError, StageLostError
from doll.provisioner.fleets.kubernetes import gangs
from doll.provisioner.fleets.kubernetes.fleet import ApiError, KubernetesFleet, PodApi, stage_template
from doll.provisioner.fleets.port import EndReason, InstanceState, LaunchFailure, Order
from doll.provisioner.planning.state import Market
from fleet_rigs import refused
from pod_server import TEMPLATE, Server, listed, usd

QUEUED = {**TEMPLATE, "metadata": {"labels": {"kueue.x-k8s.io/queue-name": "spot"}}}
STAGE = {"apiVersion": "v1", "kind": "Pod", "spec": {"containers": [{"name": "worker", "args": ["stage"]}]}}


class FailingServer(Server):
    """A server that refuses what `refuse` tells, before or after it has created the pod."""

    refuse: Callable[[str], ApiError | None] = staticmethod(lambda _: None)
    is_answer_lost = False

    def create(self, manifest: Any) -> Any:
        name = manifest["metadata"]["name"]
        if name in self.pods:
            raise ApiError("create", 409, f'pods "{name}" already exists')
        error = self.refuse(name)
        if error is not None and not self.is_answer_lost:
            raise error
        made = super().create(manifest)
        if error is not None:
            raise error
        return made

    def delete(self, name: str) -> None:
        if name in self.pods:
            super().delete(name)

    def run(self, *names: str) -> None:
        for name in names or tuple(self.pods):
            self.schedule(name, phase="Running")

    def go(self, name: str) -> None:
        """The pod is gone, with its node or after its grace period."""
        del self.pods[name]


@pytest.fixture
def server() -> FailingServer:
    return FailingServer()


def fleet_of(server: Server, template: Any = TEMPLATE) -> KubernetesFleet:
    settings = KubernetesFleetConfig(kind="kubernetes", pod_template=Path("pod.yaml"))
    return KubernetesFleet(
        cast("PodApi", server), cluster="shared", job="clicks", template=template, settings=settings,
        stage_template=STAGE, clock=server.clock,
    )  # fmt: skip


def order(slot: int = 0, incarnation: int = 1, market: Market = "spot") -> Order:
    return Order(slot, incarnation, market, machines=3)


def env_of(server: Server, name: str) -> dict[str, Any]:
    entries = server.pods[name]["spec"]["containers"][0]["env"]
    assert len({entry["name"] for entry in entries}) == len(entries)
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in entries}


def test_a_gang_is_one_instance_of_a_worker_and_its_stages(server: FailingServer) -> None:
    fleet = fleet_of(server)
    made = fleet.launch(order())
    assert list(server.pods) == [f"{made.id}-s0", f"{made.id}-s1", made.id], "the worker's pod comes last"
    assert (made.slot, made.incarnation, made.machines, made.state) == (0, 1, 3, InstanceState.PENDING)
    assert listed(fleet) == {made.id: made}
    for number, name in enumerate(server.pods):
        env = env_of(server, name)
        assert (env["DOLL_WORKER"], env["DOLL_GANG"], env["DOLL_INSTANCE"]) == ("0", made.id, made.id)
        assert env.get("DOLL_STAGE") == (str(number) if name != made.id else None)
    names = list(env_of(server, f"{made.id}-s1"))
    assert env_of(server, f"{made.id}-s1")["DOLL_LISTEN"] == "$(DOLL_POD_IP):0"
    assert names.index("DOLL_POD_IP") < names.index("DOLL_LISTEN"), "only then it is replaced"
    assert server.pods[f"{made.id}-s0"]["spec"]["containers"][0]["args"] == ["stage"]
    server.run(made.id, f"{made.id}-s0")
    assert listed(fleet)[made.id].state is InstanceState.PENDING
    server.run()
    assert listed(fleet)[made.id].state is InstanceState.RUNNING


def test_kueue_admits_the_pods_of_a_gang_together(server: FailingServer) -> None:
    made = fleet_of(server, QUEUED).launch(order())
    metadata = server.pods[made.id]["metadata"]
    assert metadata["labels"]["kueue.x-k8s.io/pod-group-name"] == made.id
    assert metadata["annotations"]["kueue.x-k8s.io/pod-group-total-count"] == "3"
    alone = fleet_of(server, QUEUED).launch(Order(1, 1, "spot"))
    assert "kueue.x-k8s.io/pod-group-name" not in server.pods[alone.id]["metadata"]["labels"], "nobody waits for others"


def test_a_gang_costs_what_its_pods_cost(server: FailingServer) -> None:
    fleet = fleet_of(server)
    made = fleet.launch(order())
    start_s = server.clock()
    for name in list(server.pods):  # one after the other gets a node
        server.clock.advance(20)
        server.run(name)
    server.clock.advance(100)
    assert usd(fleet, server.clock()) == pytest.approx(140 + 120 + 100)
    fleet.terminate([made.id])
    assert server.clock() == start_s + 160
    assert listed(fleet)[made.id].state is InstanceState.ENDING
    for name in list(server.pods):
        server.go(name)
    assert listed(fleet)[made.id].end_reason is EndReason.TERMINATED
    assert usd(fleet, server.clock() + 1000) == pytest.approx(360)


@pytest.mark.parametrize("at", ["-s0", "-s1", ""])
def test_a_pod_that_cannot_be_created_takes_the_others_with_it(server: FailingServer, at: str) -> None:
    fleet = fleet_of(server)
    name = fleet_of(FailingServer()).launch(order()).id
    server.refuse = lambda made: ApiError("create", 403, "exceeded quota: pods") if made == name + at else None
    assert refused(fleet, order()).failure is LaunchFailure.SPOT_QUOTA
    assert server.pods == {}
    assert listed(fleet) == {}


@pytest.mark.parametrize("at", ["-s0", "-s1", ""])
@pytest.mark.parametrize("is_answer_lost", [False, True])
def test_after_a_lost_answer_the_same_order_completes_the_gang(
    server: FailingServer, at: str, *, is_answer_lost: bool
) -> None:
    name = fleet_of(FailingServer()).launch(order()).id
    server.is_answer_lost = is_answer_lost
    server.refuse = lambda made: ApiError("create", 0, "no answer") if made == name + at else None
    assert refused(fleet_of(server), order()).failure is LaunchFailure.THROTTLED
    server.refuse = lambda _: None
    fleet = fleet_of(server)  # by another process
    made = fleet.launch(order())
    assert (made.machines, made.is_alive, len(server.pods)) == (3, True, 3)
    assert listed(fleet) == {made.id: made}


def test_half_a_gang_of_a_provisioner_that_died_is_deleted_and_never_counts_as_failed(server: FailingServer) -> None:
    name = fleet_of(FailingServer()).launch(order()).id
    server.refuse = lambda made: ApiError("create", 0, "no answer") if made == name else None
    refused(fleet_of(server), order())
    server.run(f"{name}-s0")
    fleet = fleet_of(server)
    gone = listed(fleet)[name]
    assert (gone.slot, gone.incarnation, gone.is_alive) == (0, 1, False)
    assert list(server.pods) == [f"{name}-s0"], "it has a node, and 30 s to end"
    assert "deletionTimestamp" in server.pods[f"{name}-s0"]["metadata"]
    server.go(f"{name}-s0")
    assert listed(fleet)[name].end_reason is EndReason.TERMINATED


@pytest.mark.parametrize("of", ["", "-s0", "-s1"])
@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_gang_ends_with_its_first_pod(server: FailingServer, of: str, *, is_restarted: bool) -> None:
    fleet = fleet_of(server)
    made, other = fleet.launch(order()), fleet.launch(order(1))
    server.run()
    listed(fleet)
    server.clock.advance(50)
    server.pods[made.id + of]["status"] |= {"phase": "Failed"}
    if is_restarted:
        fleet = fleet_of(server)
    ended = listed(fleet)[made.id]
    assert (ended.state, ended.end_reason) == (InstanceState.ENDED, EndReason.FAILED)
    assert ended.ended_s == server.clock()
    left = [name for name, pod in server.pods.items() if "deletionTimestamp" not in pod["metadata"]]
    assert sorted(left) == sorted([made.id + of, other.id, f"{other.id}-s0", f"{other.id}-s1"]), "its logs stay"
    server.clock.advance(31)
    for name in [made.id, f"{made.id}-s0", f"{made.id}-s1"]:
        if name != made.id + of:
            server.go(name)
    assert listed(fleet)[made.id] == ended, "what has ended does not change"
    assert listed(fleet)[other.id].is_alive
    assert fleet.launch(order(incarnation=2)).id != made.id
    server.clock.advance(3700)
    assert made.id not in listed(fleet)
    assert made.id + of not in server.pods


@pytest.mark.parametrize(
    ("market", "stage_fails", "reason"),
    [
        ("spot", False, EndReason.INTERRUPTED),
        ("spot", True, EndReason.FAILED),
        ("on_demand", False, EndReason.FAILED),
    ],
)
def test_a_worker_on_spot_that_has_lost_a_stage_was_interrupted(
    server: FailingServer, market: Market, *, stage_fails: bool, reason: EndReason
) -> None:
    """The API server learns of a lost node later than the worker."""
    fleet = fleet_of(server)
    made = fleet.launch(order(market=market))
    server.run()
    listed(fleet)
    ended = {"name": "worker", "state": {"terminated": {"exitCode": StageLostError.exit_code}}}
    server.pods[made.id]["status"] |= {"phase": "Failed", "containerStatuses": [ended]}
    if stage_fails:
        server.pods[f"{made.id}-s1"]["status"] |= {"phase": "Failed"}
    assert listed(fleet)[made.id].end_reason is reason


@pytest.mark.parametrize(("market", "reason"), [("spot", EndReason.INTERRUPTED), ("on_demand", EndReason.FAILED)])
@pytest.mark.parametrize("of", ["", "-s1"])
@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_lost_node_ends_the_gang(
    server: FailingServer, market: Market, reason: EndReason, of: str, *, is_restarted: bool
) -> None:
    fleet = fleet_of(server)
    made = fleet.launch(order(market=market))
    server.run()
    listed(fleet)
    server.go(made.id + of)
    if is_restarted:
        fleet = fleet_of(server)
    ended = listed(fleet)[made.id]
    assert not ended.is_alive
    if not (is_restarted and not of):  # then it looks like one that was never complete; the controller remembers
        assert ended.end_reason is reason
    assert all("deletionTimestamp" in pod["metadata"] for pod in server.pods.values())


def test_a_notice_for_one_pod_is_one_for_the_gang(server: FailingServer) -> None:
    fleet = fleet_of(server)
    made = fleet.launch(order())
    server.run()
    drained = server.pods[f"{made.id}-s0"]
    drained["metadata"]["deletionTimestamp"] = server.stamp(120)
    drained["status"]["conditions"].append({"type": "DisruptionTarget", "status": "True"})
    noticed = listed(fleet)[made.id]
    assert (noticed.is_alive, noticed.notice_s) == (True, server.clock() + 120)
    assert "deletionTimestamp" not in server.pods[made.id]["metadata"], "worker and stages leave in order"
    server.clock.advance(60)
    server.go(f"{made.id}-s0")
    ended = listed(fleet)[made.id]
    assert (ended.end_reason, ended.ended_s) == (EndReason.INTERRUPTED, server.clock())


def test_a_gang_that_gets_nodes_for_a_part_only_is_given_back(server: FailingServer) -> None:
    fleet = fleet_of(server)
    made = fleet.launch(order())
    server.run(made.id, f"{made.id}-s0")
    server.refuse_node(f"{made.id}-s1")
    server.clock.advance(200)
    gone = listed(fleet)[made.id]
    assert (gone.state, gone.end_reason) == (InstanceState.ENDED, EndReason.TERMINATED)
    assert f"{made.id}-s1" not in server.pods
    assert all("deletionTimestamp" in pod["metadata"] for pod in server.pods.values())
    assert refused(fleet, order(1)).failure is LaunchFailure.CAPACITY


def test_the_pod_of_somebody_else_is_neither_taken_nor_deleted(server: FailingServer) -> None:
    name = fleet_of(FailingServer()).launch(order()).id
    theirs = {"metadata": {"name": f"{name}-s1", "labels": {}}, "spec": {"containers": []}}
    server.create(theirs)
    assert refused(fleet_of(server), order()).failure is LaunchFailure.CONFIG
    assert list(server.pods) == [f"{name}-s1"]


def test_labels_that_somebody_has_changed_are_no_gang(server: FailingServer) -> None:
    fleet = fleet_of(server)
    made = fleet.launch(order())
    server.pods[made.id]["metadata"]["labels"]["doll/worker"] = "x"
    assert listed(fleet_of(server)) == {}
    for pod in server.pods.values():
        pod["metadata"]["labels"] |= {"doll/worker": "0", gangs.MACHINES: "many"}
    with pytest.raises(Exception, match="expected a pod"):
        listed(fleet_of(server))


JOB = """
job: t
task: {class: 'a:B'}
training: {policy: {name: wsp, wave_batches: 2}}
worker: {pipeline: {stages: 2, remote: true}}
fleet: {kind: kubernetes, pod_template: p.yaml}
plan: {spot_usd_per_h: 0.1, on_demand_usd_per_h: 0.3}
"""


def test_a_job_of_gangs_names_the_pod_of_a_stage() -> None:
    config = parse(JOB)
    assert isinstance(config.fleet, KubernetesFleetConfig)
    with pytest.raises(ConfigError, match=r"fleet.stage_template: expected .* `doll stage`"):
        stage_template(config, config.fleet)
    alone = parse(JOB, ["plan.machines_per_worker=1"])
    assert stage_template(alone, config.fleet) is None, "a person starts the stages"
