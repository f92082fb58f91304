"""The provisioner as a process: its job file, and the machines that it is given."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from doll.config import JobConfig, load
from doll.provisioner import main
from doll.provisioner.billing import LOCAL
from doll.provisioner.machines import Machines
from doll.provisioner.main import JobFile, ProvisionerProcess, ProvisionerSetup
from doll.provisioner.prices.port import StatedPrices
from doll.services import Services
from fake_fleet import FakeFleet, VirtualClock
from job_world import settings
from statuses import server_status

JOB = "job: t\ntask: {{class: 'a:B'}}\nplan: {{deadline_s: {deadline}}}\n"


def test_a_job_file_is_read_again_once_per_change(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB.format(deadline=100))
    reads: list[JobConfig] = []

    def read() -> JobConfig:
        reads.append(load(path))
        return reads[-1]

    job_file = JobFile(path, read)
    assert job_file.changed() is None
    path.write_text(JOB.format(deadline=2000))
    changed = job_file.changed()
    assert changed is not None
    assert changed.plan.deadline_s == 2000
    assert job_file.changed() is None
    assert len(reads) == 1


def test_an_invalid_or_missing_job_file_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB.format(deadline=100))
    job_file = JobFile(path, lambda: load(path))
    path.write_text("job: [")
    assert job_file.changed() is None
    path.unlink()
    assert job_file.changed() is None, "an editor that replaces the file has removed it for a moment"
    path.write_text(JOB.format(deadline=300))
    os.utime(path, (1.0, 1.0))
    changed = job_file.changed()
    assert changed is not None
    assert changed.plan.deadline_s == 300


def test_the_bill_follows_the_billing_of_the_fleet_that_was_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fleet that bills whole hours, which no rule of DOLL's own fleets does."""
    path = tmp_path / "job.yaml"
    path.write_text(JOB.format(deadline=1000))
    clock = VirtualClock()
    hourly = replace(LOCAL, name="hourly", step_s=3600.0, minimum_s=3600.0)
    machines = Machines(FakeFleet(clock), StatedPrices(0.1, 0.3), hourly)
    for name in ("require_services", "heartbeat_of", "telemetry", "_publisher"):
        monkeypatch.setattr(main, name, MagicMock())
    monkeypatch.setattr(main, "topics", SimpleNamespace(ensure=MagicMock(), topic_id=lambda *_: "id"))
    records = SimpleNamespace(sample_ends=lambda: None, positions={}, named_positions=dict)
    monkeypatch.setattr(main, "JobRecords", lambda *_: nullcontext(records))
    monkeypatch.setattr("time.time", clock)
    setup = ProvisionerSetup(
        load(path), lambda: Services("kafka:1", "redis:1"), tmp_path, lambda *_: nullcontext(machines),
        lambda config: (settings(), []), lambda: load(path), path,
    )  # fmt: skip
    with ProvisionerProcess(setup) as provisioner:
        provisioner._controller.observed.feed(server_status(), clock())
        provisioner.run_once()
        clock.advance(60.0)
        bill = provisioner.run_once().bill
    assert bill.instances == 4
    assert bill.usd == pytest.approx(4 * 0.1), "a whole hour each"
