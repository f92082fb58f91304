"""Interruption notices from the queue: ours only, each once, whatever else is in it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from doll.errors import ServiceUnavailableError
from doll.provisioner.ec2_notices import Ec2Notices

sys.path.insert(0, str(Path(__file__).parents[2] / "contract"))
from fleet_rigs import Ec2Rig, ec2

OURS, THEIRS = "i-0aaa", "i-0bbb"
WARNING = "EC2 Spot Instance Interruption Warning"


@pytest.fixture
def rig() -> Iterator[Ec2Rig]:
    with ec2() as made:
        assert isinstance(made, Ec2Rig)
        yield made


def notices(rig: Ec2Rig) -> Ec2Notices:
    return Ec2Notices(rig.sqs, rig.queue_url, clock=rig.clock)


def left(rig: Ec2Rig) -> int:
    names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
    found = rig.sqs.get_queue_attributes(QueueUrl=rig.queue_url, AttributeNames=names)["Attributes"]
    return sum(int(found[name]) for name in names)


def test_an_empty_queue_has_no_notices(rig: Ec2Rig) -> None:
    assert notices(rig).take([OURS]) == {}


def test_ours_are_told_with_their_time_and_all_are_deleted(rig: Ec2Rig) -> None:
    at_s = rig.clock() // 1
    for id_ in (OURS, THEIRS, OURS):
        rig.market.event(WARNING, id_, at_s)
    assert notices(rig).take([OURS]) == {OURS: at_s + 120}
    assert left(rig) == 0
    assert notices(rig).take([OURS, THEIRS]) == {}


def test_more_than_one_answer_holds_is_read_at_once(rig: Ec2Rig) -> None:
    own = [f"i-{n:04d}" for n in range(35)]
    for id_ in own:
        rig.market.event(WARNING, id_, rig.clock())
    assert set(notices(rig).take(own)) == set(own)
    assert left(rig) == 0


def test_a_rebalance_recommendation_is_told_and_not_acted_upon(rig: Ec2Rig) -> None:
    rig.market.event("EC2 Instance Rebalance Recommendation", OURS, rig.clock())
    rig.market.event("EC2 Instance State-change Notification", OURS, rig.clock())
    with structlog.testing.capture_logs() as logs:
        assert notices(rig).take([OURS]) == {}
    assert [entry["event"] for entry in logs] == ["rebalance_recommended"]


@pytest.mark.parametrize(
    "body",
    ["", "not json", "[]", "{}", '"text"', '{"detail-type": "x", "detail": null}',
     '{"detail-type": "x", "detail": {"instance-id": "i-0aaa"}, "time": "soon"}'],
)  # fmt: skip
def test_what_is_no_event_is_refused_and_deleted(rig: Ec2Rig, body: str) -> None:
    rig.sqs.send_message(QueueUrl=rig.queue_url, MessageBody=body or " ")
    rig.market.event(WARNING, OURS, rig.clock())
    with structlog.testing.capture_logs() as logs:
        assert list(notices(rig).take([OURS])) == [OURS]
    assert "message_refused" in [entry["event"] for entry in logs]
    assert left(rig) == 0


def test_an_event_without_a_time_is_of_now(rig: Ec2Rig) -> None:
    body = {"detail-type": WARNING, "detail": {"instance-id": OURS}}
    rig.sqs.send_message(QueueUrl=rig.queue_url, MessageBody=json.dumps(body))
    assert notices(rig).take([OURS]) == {OURS: rig.clock() + 120}


def test_a_queue_that_is_not_there_is_an_error_and_the_fleet_lives_without(rig: Ec2Rig) -> None:
    gone = Ec2Notices(rig.sqs, rig.queue_url + "-gone")
    with pytest.raises(ServiceUnavailableError, match="reading interruption notices"):
        gone.take([OURS])
    assert list(rig.make(notices=gone).instances()) == []
