"""SIGKILL between any two side effects, on the real broker: the successor goes on and the ledger balances.

docs/operations.md says what happens in each gap; a point that this test does not know fails it.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doll.local.forks import Role
from doll.process.fault_points import ENV, MARKER_ENV, POINTS, fault_point
from paths import DOCS

# The hit at which a process dies: late enough that the job is under way, and sure to come within the first ten updates,
# of which two checkpoints at least are made.
HITS = {
    "worker.after_dead_letter": 1,
    "worker.after_guard": 1,
    "worker.mid_set": 4,
    "worker.after_sum": 4,
    "worker.after_announce": 4,
    "worker.after_blob": 4,
    "worker.after_push": 4,
    "worker.after_durable": 1,
    "ps.after_claim": 1,
    "ps.after_first_checkpoint": 1,
    "ps.after_weights": 8,
    "ps.after_grant": 9,
    "ps.after_apply": 8,
    "ps.after_update": 8,
    "ps.mid_checkpoint": 7,  # five parts each: in the second checkpoint, which follows that of version 0
    "ps.after_checkpoint": 2,
    "ps.after_durable": 2,
}
# Of both classes: for whatever the model says, one of them is wrong, and its gradient far too long.
HUGE = [np.array([3e38, 3e38, 3e38, 3e38, y], "<f4").tobytes() for y in (0, 1)]
# Points inside a set of several batches: twice as many batches in a group as there are workers.
GROUP_SIZES = {"worker.mid_set": 4, "worker.after_sum": 4}
OPERATIONS = DOCS / "operations.md"


def test_every_point_is_tested_and_explained() -> None:
    # Those of a regrid and of a rollback: tests/e2e/test_regrid.py, test_rollback.py
    assert set(HITS) == {point for point in POINTS if not point.startswith(("regrid.", "rollback."))}
    rows = re.findall(r"^\| `((?:worker|ps|regrid|rollback)\.\w+)` \|", OPERATIONS.read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(POINTS)


def test_without_the_environment_a_point_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV, "")
    for point in POINTS:
        fault_point(point)


@pytest.mark.parametrize("wrong", ["ps.after_aply@1", "ps.after_apply", "ps.after_apply@x"])
def test_a_point_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    from doll.errors import ConfigError

    monkeypatch.setenv(ENV, wrong)
    with pytest.raises(ConfigError, match="expected point@count"):
        fault_point("ps.after_apply")


@pytest.mark.integration
@pytest.mark.parametrize("point", HITS)
def test_a_death_in_the_gap_costs_nothing(make_pipeline: Any, tmp_path: Path, point: str) -> None:
    group_size = GROUP_SIZES.get(point, 2)
    job = make_pipeline(
        "stop.updates=20", "checkpoint.every_updates=4", "checkpoint.every_s=1000",
        f"training.policy.group_size={group_size}",
    )  # fmt: skip
    marker = tmp_path / "died"
    victim = "ps" if point.startswith("ps.") else "worker-0"
    environment = {ENV: f"{point}@{HITS[point]}", MARKER_ENV: str(marker)}
    for name, role, *more in (("ps", "ps_role"), ("worker-0", "worker_role", 0), ("worker-1", "worker_role", 1)):
        spec = job.spec(name, role, *more)
        job.pids[name] = job.supervisor.start(
            dataclasses.replace(spec, env=environment) if name == victim else spec
        ).pid
    samples = job.samples(10 * group_size * 8)
    poison = {"worker.after_dead_letter": [b"poison"], "worker.after_guard": HUGE}.get(point, [])
    samples[: 2 * len(poison) : 2] = poison  # of worker 0
    job.send(samples)
    job.until(marker.exists, f"the death at {point}")
    # More than the stop rule needs of both streams: one of them may be ahead when its worker dies.
    job.send(job.samples(10 * group_size * 8 + 160))
    job.until(lambda: _runs_again(job, victim), f"the successor of {victim}")
    job.until_finished()
    report = job.assert_audit_ok()
    assert report.version == 20
    assert report.applied + report.dead == 20 * group_size * 8
    assert min(1, len(poison)) <= report.dead <= len(poison)
    assert report.term == (2 if victim == "ps" else 1)


def _runs_again(job: Any, name: str) -> bool:
    handle = job.supervisor.handles().get(name)
    return job.finished is not None or (isinstance(handle, Role) and handle.pid != job.pids[name])
