"""What the provisioner sends to `metrics`: decisions, heartbeats between them, and that it has left."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from doll.process.metric_names import HEARTBEAT_EVERY_S, LEFT
from doll.provisioner.billing import LOCAL
from doll.provisioner.controller import Controller
from doll.provisioner.decision import Decision
from doll.provisioner.main import DecisionPublisher
from doll.provisioner.planning.state import PlannerSettings
from doll.provisioner.prices.port import StatedPrices
from doll.provisioner.settings import ControllerSettings
from doll.provisioner.state_store import FileStateStore
from doll.records.control import Metric
from fake_fleet import FakeFleet, VirtualClock
from kept_records import KeptRecords


def decision(folder: Path) -> Decision:
    clock = VirtualClock()
    plan = PlannerSettings(
        samples=10_000.0, group_size=4, batch_size=25, deadline_s=500.0, replan_s=10.0, boot_s=20.0, cycle_s=2000.0
    )
    settings = ControllerSettings(planner=plan, rates_per_s=np.full(4, 10.0))
    return Controller(settings, FakeFleet(clock), StatedPrices(0.1, 0.3), LOCAL, FileStateStore(folder, "t")).turn(
        clock()
    )


def test_a_decision_is_a_record_and_measurements(tmp_path: Path) -> None:
    kept, made = KeptRecords(), decision(tmp_path)
    publisher = DecisionPublisher(kept.publisher, "metrics", "events")
    publisher.publish(made, last=False)
    publisher.publish(made, last=True)
    publisher.close()
    records = [record for topic, record in kept.sent if topic == "metrics"]
    assert (len(records), kept.closed) == (4, True)
    assert records[0] == records[2] == made.record()
    measured, last = records[1], records[3]
    assert isinstance(measured, Metric)
    assert isinstance(last, Metric)
    assert measured.values == made.measurements()
    assert last.values == {**made.measurements(), LEFT: 1.0}
    assert measured.source == last.source == "provisioner"


def test_heartbeats_fill_the_time_between_decisions(tmp_path: Path) -> None:
    kept, clock = KeptRecords(), VirtualClock()
    publisher = DecisionPublisher(kept.publisher, "metrics", "events", clock)
    clock.advance(HEARTBEAT_EVERY_S - 1)
    publisher.heartbeat()
    assert kept.sent == []
    clock.advance(1)
    publisher.heartbeat()
    publisher.heartbeat()
    ((_, record),) = kept.sent
    assert isinstance(record, Metric)
    assert record.values == {}
    publisher.publish(decision(tmp_path), last=False)
    kept.sent.clear()
    clock.advance(HEARTBEAT_EVERY_S - 1)
    publisher.heartbeat()
    assert kept.sent == [], "the decision was a heartbeat too"
