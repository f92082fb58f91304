"""The provisioner's status as text: from the journal, and of a decision that was just made."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from doll.errors import ConfigError
from doll.provisioner.billing import LOCAL
from doll.provisioner.controller import Controller
from doll.provisioner.fleets.port import InstanceState
from doll.provisioner.planning.state import PlannerSettings
from doll.provisioner.prices.port import StatedPrices
from doll.provisioner.settings import ControllerSettings
from doll.provisioner.state_store import FileStateStore
from doll.provisioner.status import age_text, decision_text, instance_text, last_decision, status_text
from fake_fleet import FakeFleet, VirtualClock
from statuses import server_status


def controller(folder: Path, clock: VirtualClock) -> Controller:
    plan = PlannerSettings(
        samples=10_000.0, group_size=4, batch_size=25, deadline_s=500.0, replan_s=10.0, boot_s=20.0, cycle_s=2000.0
    )
    settings = ControllerSettings(planner=plan, rates_per_s=np.full(4, 10.0))
    return Controller(settings, FakeFleet(clock), StatedPrices(0.158, 0.286), LOCAL, FileStateStore(folder, "t"))


def test_the_journal_and_the_decision_give_the_same_text(tmp_path: Path) -> None:
    clock = VirtualClock()
    control = controller(tmp_path, clock)
    control.observed.feed(server_status(), clock())
    control.turn(clock())
    clock.advance(100.0)
    control.observed.feed(server_status(), clock())
    decision = control.turn(clock())
    text = decision_text(decision)
    assert "phase run; binding constraint: " in text
    assert f"samples 0 of 10000 (updates 0 of 100), expected end {decision.expected_finish_s:.0f} s" in text
    assert "  slot  wanted     machines" in text
    assert "#1 booting, 100 s old, " in text or "#1 worker not ready, 100 s old, " in text
    assert all(f", {instance.id}" in text for instance in decision.alive)
    stored = status_text(last_decision(FileStateStore(tmp_path, "t"), "doll provision run"), decision.now_s + 30.0)
    assert stored == f"last decision 30 s ago: {text}"


def test_without_a_decision_the_command_to_start_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no decision yet: start the provisioner with: doll provision run my\.yaml"):
        last_decision(FileStateStore(tmp_path, "t"), "doll provision run my.yaml")


def test_lines_that_a_crash_cut_off_are_skipped_and_scores_are_shown(tmp_path: Path) -> None:
    clock = VirtualClock()
    controller(tmp_path, clock).turn(clock())
    store = FileStateStore(tmp_path, "t")
    store.append({"kind": "placement", "time_s": clock(), "scores": {"us-east-1a": 7}})
    with store.journal.open("a", encoding="utf-8") as file:
        file.write('{"kind": "decision", "phase"')
    status = last_decision(FileStateStore(tmp_path, "t"), "")
    assert "of 10: us-east-1a 7" in status_text(status, clock())


def test_a_journal_of_another_release_is_refused(tmp_path: Path) -> None:
    FileStateStore(tmp_path, "t").append({"kind": "decision", "phase": "run"})
    status = last_decision(FileStateStore(tmp_path, "t"), "")
    with pytest.raises(ConfigError, match="expected a decision of this release"):
        status_text(status, 0.0)


@pytest.mark.parametrize(
    ("state", "is_ready", "has_notice", "shown"),
    [
        (InstanceState.PENDING, False, False, "on-demand #3 booting, 35 s old"),
        (InstanceState.RUNNING, False, False, "on-demand #3 worker not ready, 35 s old"),
        (InstanceState.RUNNING, True, False, "on-demand #3 ready, 35 s old"),
        (InstanceState.RUNNING, True, True, "on-demand #3 interruption notice, 35 s old"),
        (InstanceState.ENDING, True, False, "on-demand #3 terminating, 35 s old"),
    ],
)
def test_a_machine_says_its_state(state: InstanceState, is_ready: bool, has_notice: bool, shown: str) -> None:
    text = instance_text("on_demand", 3, state, is_ready=is_ready, has_notice=has_notice, age_s=35.0)
    assert text == shown


def test_ages_have_the_unit_that_fits() -> None:
    assert [age_text(seconds) for seconds in (-1.0, 119.0, 120.0, 7199.0, 7200.0)] == [
        "0 s", "119 s", "2 min", "120 min", "2.0 h",
    ]  # fmt: skip
