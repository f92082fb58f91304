"""What the fleet of actors does with Ray's table, on a table in a dict. The contract runs on a real cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import pytest
from doll.config import RayFleetConfig
from doll.provisioner.billing import LOCAL, bill
from doll.provisioner.fleets.port import EndReason, Instance, InstanceState, LaunchFailure, Order
from doll.provisioner.fleets.ray.actors import Actor
from doll.provisioner.fleets.ray.fleet import RENEW_S, RayApi, RayFleet
from doll.provisioner.prices.port import StatedPrices
from fake_fleet import VirtualClock
from fleet_rigs import refused

DRAIN_S = 30.0


class Table:
    """Ray's table of actors. Dead rows stay, as they do there; actors start and end where the test says so."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.rows: dict[str, Actor] = {}
        self.killed: list[str] = []
        self.renewed: list[tuple[str, float]] = []
        self.dies_at_once = ""

    def create(
        self, name: str, identity: Mapping[str, str], labels: Mapping[str, str], placement: Mapping[str, str]
    ) -> None:
        self.rows.setdefault(name, Actor(name, labels, "PENDING_CREATION"))
        if self.dies_at_once:
            self.die(name, "start", self.dies_at_once)

    def start(self, name: str) -> None:
        self.put(name, state="ALIVE", started=True, node="n1", start_s=self.clock())

    def put(self, name: str, **changes: Any) -> None:
        self.rows[name] = replace(self.rows[name], **changes)

    def die(self, name: str, cause: str, detail: str = "") -> None:
        self.put(name, state="DEAD", cause=cause, end_s=self.clock(), detail=detail)

    def actors_of(self, cluster: str) -> list[Actor]:
        return [row for row in self.rows.values() if row.labels["doll-cluster"] == cluster]

    def draining(self) -> dict[str, float]:
        return {}

    def end(self, name: str, grace_s: float) -> None:
        """It is stuck, and does not hear it."""

    def kill(self, name: str) -> None:
        self.killed.append(name)
        self.die(name, "killed")

    def renew(self, key: str) -> None:
        self.renewed.append((key, self.clock()))

    def close(self) -> None:
        pass


@pytest.fixture
def table() -> Table:
    return Table()


def fleet_of(table: Table, job: str = "clicks") -> RayFleet:
    settings = RayFleetConfig(kind="ray")
    api = cast("RayApi", table)
    return RayFleet(api, cluster="shared", job=job, settings=settings, drain_s=DRAIN_S, clock=table.clock)


def listed(fleet: RayFleet) -> dict[str, Instance]:
    return {instance.id: instance for instance in fleet.instances()}


def test_an_actor_that_does_not_start_is_named_and_does_not_block_the_cluster_for_ever(table: Table) -> None:
    fleet = fleet_of(table)
    made = fleet.launch(Order(0, 1, "spot"))
    table.put(made.id, started=True)
    table.die(made.id, "start", "No module named 'doll'")
    failed = listed(fleet)[made.id]
    assert (failed.end_reason, failed.trouble) == (EndReason.FAILED, "No module named 'doll'")
    error = refused(fleet, Order(0, 2, "on_demand"))
    assert (error.failure, "No module named 'doll'; expected nodes" in str(error)) == (LaunchFailure.REFUSED, True)
    again = fleet_of(table)  # a person has corrected it; the dead row stays in the table
    second = again.launch(Order(0, 2, "spot"))
    table.start(second.id)
    assert listed(again)[second.id].state is InstanceState.RUNNING
    table.clock.advance(600)
    assert listed(fleet)[second.id].is_alive
    fleet.launch(Order(1, 1, "spot"))
    fleet_of(table, "ads").launch(Order(0, 1, "spot", run="r2"))


def test_an_actor_that_dies_before_it_is_ever_listed_is_named_too(table: Table) -> None:
    fleet = fleet_of(table)
    table.dies_at_once = "No space left on device"
    fleet.launch(Order(0, 1, "spot"))
    assert "No space left on device" in str(refused(fleet, Order(1, 1, "spot")))


def test_an_actor_that_does_not_end_is_killed_after_its_time(table: Table) -> None:
    fleet = fleet_of(table)
    made = fleet.launch(Order(0, 1, "on_demand"))
    table.start(made.id)
    fleet.terminate([made.id])
    table.clock.advance(DRAIN_S)
    assert (listed(fleet)[made.id].state, table.killed) == (InstanceState.ENDING, [])
    table.clock.advance(60.0)
    listed(fleet)
    assert table.killed == [made.id]
    ended = listed(fleet)[made.id]
    assert (ended.state, ended.end_reason, ended.ended_s) == (
        InstanceState.ENDED, EndReason.TERMINATED, table.clock(),
    )  # fmt: skip
    table.clock.advance(60.0)
    listed(fleet)
    assert table.killed == [made.id]


def test_a_market_without_nodes_costs_nothing(table: Table) -> None:
    fleet, prices = fleet_of(table), StatedPrices(3600.0, 3600.0)
    made = fleet.launch(Order(0, 1, "spot"))
    table.clock.advance(100)
    assert bill(fleet.instances(), prices.series, LOCAL, table.clock()).usd == 0.0
    table.clock.advance(100)
    listed(fleet)
    assert listed(fleet)[made.id].state is InstanceState.ENDED
    waits = fleet.launch(Order(1, 1, "on_demand"))
    table.clock.advance(50)
    table.start(waits.id)
    table.clock.advance(40)
    assert bill(fleet.instances(), prices.series, LOCAL, table.clock()).usd == pytest.approx(40.0)


def test_a_second_job_on_the_cluster_is_left_alone(table: Table) -> None:
    theirs = fleet_of(table).launch(Order(0, 1, "spot", run="r1"))
    other = fleet_of(table, "ads")
    assert listed(other) == {}
    other.terminate([theirs.id])
    made = other.launch(Order(0, 1, "spot", run="r2"))
    assert set(listed(other)) == {made.id}
    assert set(listed(fleet_of(table))) == {theirs.id}
    assert table.killed == []
    assert refused(other, Order(0, 1, "spot", run="r1")).failure is LaunchFailure.CONFIG, "their name"


def test_a_provisioner_shows_itself_to_its_actors(table: Table) -> None:
    fleet, start_s = fleet_of(table), table.clock()
    for _ in range(20):
        listed(fleet)
        table.clock.advance(RENEW_S / 4)
    assert {key for key, _ in table.renewed} == {"doll-provisioner/shared/clicks"}
    assert [at_s - start_s for _, at_s in table.renewed] == [RENEW_S * number for number in range(5)]
