"""What the fleet of pods does with what the API server lists, on one in a dict. The contract runs on a real one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from doll.config import KubernetesFleetConfig
from doll.provisioner.billing import LOCAL
from doll.provisioner.controller import Controller
from doll.provisioner.decision import Decision
from doll.provisioner.fleets.kubernetes import pods
from doll.provisioner.fleets.kubernetes.fleet import KubernetesFleet, PodApi
from doll.provisioner.fleets.port import EndReason, InstanceState, LaunchFailure, Order
from doll.provisioner.prices.port import StatedPrices
from fake_fleet import FakeFleet
from fleet_rigs import refused
from job_world import JobWorld, settings
from memory_state_store import MemoryStateStore
from pod_server import TEMPLATE, Server, listed, usd

WAITING = {"reason": "ImagePullBackOff", "message": "Back-off pulling image doll:nope"}


@pytest.fixture
def server() -> Server:
    return Server()


def fleet_of(server: Server, job: str = "clicks") -> KubernetesFleet:
    settings = KubernetesFleetConfig(kind="kubernetes", pod_template=Path("pod.yaml"))
    api = cast("PodApi", server)
    return KubernetesFleet(api, cluster="shared", job=job, template=TEMPLATE, settings=settings, clock=server.clock)


def stuck(server: Server, name: str) -> None:
    server.schedule(name, containerStatuses=[{"name": "worker", "state": {"waiting": WAITING}}])


def test_an_image_that_cannot_be_pulled_is_named_and_given_back_and_stops_the_launches(server: Server) -> None:
    fleet = fleet_of(server)
    made = [fleet.launch(Order(slot, 1, "spot")) for slot in range(2)]
    for instance in made:
        stuck(server, instance.id)
    server.clock.advance(60)
    seen = listed(fleet)
    assert {each.trouble for each in seen.values()} == {
        "container worker: ImagePullBackOff: Back-off pulling image doll:nope"
    }
    assert all(each.is_alive for each in seen.values()), "the registry may be back any moment"
    third = fleet.launch(Order(2, 1, "spot"))
    server.clock.advance(130)
    for each in (listed(fleet)[instance.id] for instance in made):
        assert (each.state, each.end_reason) == (InstanceState.ENDED, EndReason.FAILED)
        assert "ImagePullBackOff" in each.trouble
    for order in (Order(0, 2, "spot"), Order(0, 2, "on_demand")):
        error = refused(fleet, order)
        assert error.failure is LaunchFailure.REFUSED, "the provisioner stops where nothing else works"
        assert "doll:nope; correct pod.yaml" in str(error)
    fleet_of(server).launch(Order(0, 3, "spot"))  # a person has started the provisioner again
    server.schedule(third.id, phase="Running")
    listed(fleet)
    fleet.launch(Order(0, 2, "spot"))  # one runs, so the image is there


def test_one_node_without_the_image_stops_nothing(server: Server) -> None:
    fleet = fleet_of(server)
    runs, bad = (fleet.launch(Order(slot, 1, "spot")) for slot in range(2))
    server.schedule(runs.id, phase="Running")
    stuck(server, bad.id)
    fleet.launch(Order(2, 1, "spot"))
    server.clock.advance(181)
    assert [each.id for each in listed(fleet).values() if not each.is_alive] == [bad.id]
    listed(fleet)
    fleet.launch(Order(1, 2, "spot"))


def test_a_market_without_nodes_costs_nothing(server: Server) -> None:
    fleet = fleet_of(server)
    start_s = server.clock()
    made = fleet.launch(Order(0, 1, "spot"))
    server.refuse_node(made.id)
    server.clock.advance(100)
    assert usd(fleet, server.clock()) == 0.0
    server.clock.advance(100)
    listed(fleet)
    gone = listed(fleet)[made.id]
    assert (gone.state, gone.end_reason) == (InstanceState.ENDED, EndReason.TERMINATED), "no interruption, no failure"
    assert refused(fleet, Order(0, 1, "spot", attempt=1)).failure is LaunchFailure.CAPACITY
    waits = fleet.launch(Order(1, 1, "on_demand"))
    server.clock.advance(50)
    assert usd(fleet, server.clock()) == 0.0
    server.schedule(waits.id, phase="Running")
    server.clock.advance(40)
    assert usd(fleet, server.clock()) == pytest.approx(40.0)
    unplaced = fleet.launch(Order(2, 1, "on_demand"))
    server.clock.advance(40)
    fleet.terminate([unplaced.id])
    server.clock.advance(40)
    assert usd(fleet, server.clock()) == pytest.approx(120.0)
    assert server.clock() - start_s > 300


def test_a_node_that_does_not_answer_is_billed_until_its_pod_goes(server: Server) -> None:
    fleet = fleet_of(server)
    made = fleet.launch(Order(0, 1, "on_demand"))
    server.schedule(made.id, phase="Running")
    fleet.terminate([made.id])
    server.clock.advance(600)
    assert listed(fleet)[made.id].state is InstanceState.ENDING
    assert usd(fleet, server.clock()) == pytest.approx(600.0)
    del server.pods[made.id]  # its cloud has taken the node
    gone = listed(fleet)[made.id]
    assert (gone.state, gone.ended_s, gone.end_reason) == (InstanceState.ENDED, server.clock(), EndReason.TERMINATED)


def test_a_second_job_on_the_cluster_is_left_alone(server: Server) -> None:
    theirs = fleet_of(server).launch(Order(0, 1, "spot", run="r1"))
    other = fleet_of(server, "ads")
    assert listed(other) == {}
    other.terminate([theirs.id])
    made = other.launch(Order(0, 1, "spot", run="r2"))
    assert set(listed(other)) == {made.id}
    assert set(listed(fleet_of(server))) == {theirs.id}
    assert refused(other, Order(0, 1, "spot", run="r1")).failure is LaunchFailure.CONFIG, "their name"
    del server.pods[theirs.id]["metadata"]["labels"][pods.LABELS.job]  # an earlier release launched it
    assert set(listed(fleet_of(server))) == {theirs.id}


class Job:
    """A provisioner and a parameter server that no worker has joined."""

    def __init__(self, server: Server) -> None:
        job = settings(num_slots=3, deadline_s=20_000.0, replan_s=30.0)
        self.server = server
        self.world = JobWorld(server.clock, FakeFleet(server.clock), job)
        self.controller = Controller(
            job, fleet_of(server), StatedPrices(3600.0, 7200.0), LOCAL, MemoryStateStore(), job="clicks"
        )

    def turn(self, **more: Any) -> Decision:
        self.world.pass_time(30.0)
        self.world.tell(self.controller)
        decision = self.controller.turn(self.server.clock(), **more)
        self.server.clock.advance(30)
        return decision


def test_a_job_with_a_wrong_image_stops_and_says_so(server: Server) -> None:
    job, made = Job(server), set[str]()
    for _ in range(24 * 120):
        decision = job.turn()
        for name, pod in list(server.pods.items()):
            if "deletionTimestamp" in pod["metadata"]:
                del server.pods[name]
            elif name not in made:
                made.add(name)
                stuck(server, name)
        if decision.phase == "stopped":
            break
    assert decision.phase == "stopped"
    assert any("Back-off pulling image doll:nope; correct pod.yaml" in alarm for alarm in decision.alarms)
    assert len(made) == 3, "not one after the other for a day"
    assert server.pods == {}


def test_nothing_is_left_of_a_job_that_is_over(server: Server) -> None:
    job = Job(server)
    job.turn()
    assert len(server.pods) == 3
    for name in server.pods:
        server.schedule(name, phase="Failed")  # evicted, or ended with the job
    decision = job.turn(draining=True)
    assert decision.finished
    assert server.pods == {}
    assert decision.bill.instances == 3


def test_what_has_ended_is_deleted_when_it_is_asked_for_and_still_listed(server: Server) -> None:
    fleet = fleet_of(server)
    made = fleet.launch(Order(0, 1, "spot"))
    server.schedule(made.id, phase="Failed")
    ended = listed(fleet)[made.id]
    fleet.terminate([made.id])
    assert server.pods == {}
    assert listed(fleet)[made.id] == ended
