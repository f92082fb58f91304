"""Interruption notices from the queue: ours only, none lost by a crash, whatever else is in it."""

from __future__ import annotations

import json

import pytest
import structlog
from doll.errors import ServiceUnavailableError
from doll.provisioner.billing import EC2_LINUX
from doll.provisioner.controller import Controller
from doll.provisioner.decision import Decision
from doll.provisioner.fleets.ec2.notices import Ec2Notices
from doll.provisioner.prices.port import StatedPrices
from fleet_rigs import Ec2Rig
from job_world import settings
from memory_state_store import MemoryStateStore
from statuses import server_status

OURS, THEIRS = "i-0aaa", "i-0bbb"
WARNING = "EC2 Spot Instance Interruption Warning"


def notices(rig: Ec2Rig) -> Ec2Notices:
    return Ec2Notices(rig.sqs, rig.queue_url, clock=rig.clock)


def left(rig: Ec2Rig) -> int:
    names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
    attributes = rig.sqs.get_queue_attributes(QueueUrl=rig.queue_url, AttributeNames=names)["Attributes"]
    return sum(int(attributes[name]) for name in names)


def test_an_empty_queue_has_no_notices(rig: Ec2Rig) -> None:
    assert notices(rig).read([OURS]) == {}


def test_ours_are_told_with_their_time_until_the_instance_has_ended(rig: Ec2Rig) -> None:
    """A provisioner that dies after reading a notice has lost nothing: its successor reads the notice again."""
    at_s = rig.clock() // 1
    for id_ in (OURS, OURS):
        rig.market.event(WARNING, id_, at_s)
    assert notices(rig).read([OURS]) == {OURS: at_s + 120}
    assert notices(rig).read([OURS]) == {}, "hidden for a while"
    assert left(rig) == 2
    rig.market.expire_visibility_timeout()
    rig.advance(60.0)
    assert notices(rig).read([OURS]) == {OURS: at_s + 120}
    rig.market.expire_visibility_timeout()
    rig.advance(70.0)
    assert notices(rig).read([]) == {}
    assert left(rig) == 0


def test_a_strangers_notice_is_deleted_when_it_cannot_be_of_an_instance_that_is_not_listed_yet(rig: Ec2Rig) -> None:
    """A predecessor may have launched it and died: EC2 lists it some seconds later."""
    at_s = rig.clock() // 1
    rig.market.event(WARNING, THEIRS, at_s)
    assert notices(rig).read([OURS]) == {}
    rig.market.expire_visibility_timeout()
    assert notices(rig).read([OURS, THEIRS]) == {THEIRS: at_s + 120}
    rig.market.expire_visibility_timeout()
    rig.advance(61.0)
    assert notices(rig).read([OURS]) == {}
    assert left(rig) == 0


def test_more_than_one_answer_holds_is_read_at_once(rig: Ec2Rig) -> None:
    own = [f"i-{n:04d}" for n in range(35)]
    for id_ in own:
        rig.market.event(WARNING, id_, rig.clock())
    assert set(notices(rig).read(own)) == set(own)
    assert left(rig) == 35
    rig.market.expire_visibility_timeout()
    rig.advance(120.0)
    assert notices(rig).read(own[:3]).keys() == set(own[:3])
    assert left(rig) == 3


def test_a_rebalance_recommendation_is_told_and_not_acted_upon(rig: Ec2Rig) -> None:
    rig.market.event("EC2 Instance Rebalance Recommendation", OURS, rig.clock())
    rig.market.event("EC2 Instance State-change Notification", OURS, rig.clock())
    with structlog.testing.capture_logs() as logs:
        assert notices(rig).read([OURS]) == {}
    assert [entry["event"] for entry in logs] == ["rebalance_recommended"]
    assert left(rig) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    ["", "not json", "[]", "{}", '"text"', '{"detail-type": "x", "detail": null}',
     '{"detail-type": "x", "detail": {"instance-id": "i-0aaa"}, "time": "soon"}',
     f'{{"detail-type": "{WARNING}", "detail": {{"instance-id": []}}}}', "[" * 100_000],
)  # fmt: skip
def test_what_is_no_event_is_refused_and_deleted(rig: Ec2Rig, body: str) -> None:
    rig.sqs.send_message(QueueUrl=rig.queue_url, MessageBody=body or " ")
    rig.market.event(WARNING, OURS, rig.clock())
    with structlog.testing.capture_logs() as logs:
        assert list(notices(rig).read([OURS])) == [OURS]
    assert "message_refused" in [entry["event"] for entry in logs]
    assert left(rig) == 1, "the notice alone"


def test_an_event_without_a_time_is_of_now(rig: Ec2Rig) -> None:
    body = {"detail-type": WARNING, "detail": {"instance-id": OURS}}
    rig.sqs.send_message(QueueUrl=rig.queue_url, MessageBody=json.dumps(body))
    assert notices(rig).read([OURS]) == {OURS: rig.clock() + 120}


@pytest.mark.slow
def test_a_queue_that_is_not_there_is_an_error_and_the_fleet_lives_without(rig: Ec2Rig) -> None:
    gone = Ec2Notices(rig.sqs, rig.queue_url + "-gone")
    with pytest.raises(ServiceUnavailableError, match="reading interruption notices"):
        gone.read([OURS])
    assert list(rig.make(notices=gone).instances()) == []


class Scene:
    """A controller on EC2 that may die; its state_store survives."""

    def __init__(self, rig: Ec2Rig) -> None:
        self.rig, self.state_store = rig, MemoryStateStore()
        rig.market.boot_s = rig.market.lag_s = 0.0
        self.start()

    def start(self) -> None:
        self.rig.crash()
        self.controller = Controller(settings(2), self.rig.fleet, StatedPrices(0.1, 0.3), EC2_LINUX, self.state_store)

    def turn(self) -> Decision:
        self.rig.advance(10.0)
        self.controller.observed.feed(server_status(), self.rig.clock())
        return self.controller.turn(self.rig.clock())

    def check_replaced(self, decision: Decision, id_: str) -> None:
        """The instance has its notice, its slot has one more machine, and only EC2 ends the instance."""
        (instance,) = (instance for instance in decision.instances if instance.id == id_)
        assert instance.notice_s is not None
        assert decision.interruptions == 1
        beside = [other for other in decision.alive if other.slot == instance.slot and other.id != id_]
        assert len(beside) == 1
        self.turn()
        assert id_ not in self.rig.market.terminated
        assert len(self.rig.market.requests) == 3


def test_a_notice_that_was_read_by_a_provisioner_that_died_before_it_acted_is_acted_on(rig: Ec2Rig) -> None:
    scene = Scene(rig)
    taken = scene.turn().alive[0].id
    rig.market.interrupt(taken, 600.0)
    # It reads the queue and dies: nothing of it is in the state_store.
    assert [instance.id for instance in rig.fleet.instances() if instance.notice_s is not None] == [taken]
    scene.start()
    rig.market.expire_visibility_timeout()
    scene.check_replaced(scene.turn(), taken)


def test_a_notice_in_the_book_counts_while_the_queue_is_silent(rig: Ec2Rig) -> None:
    """The successor's fleet is new, and the message still hidden, or gone."""
    scene = Scene(rig)
    taken = scene.turn().alive[0].id
    rig.market.interrupt(taken, 600.0)
    scene.turn()
    rig.sqs.purge_queue(QueueUrl=rig.queue_url)
    scene.start()
    scene.check_replaced(scene.turn(), taken)
    rig.market.terminated.clear()
    scene.controller.turn(rig.clock(), draining=True)
    assert len(rig.market.terminated) == 2
    assert taken not in rig.market.terminated
