"""What a job costs on a fleet whose nodes are drained and killed, beside what its provisioner expected.

`DOLL_FLEET_COST=1` runs it: five minutes on each fleet, because the stream flows as fast as the plan says.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
from fleet_worlds import NOTICE_S, WORLDS, World
from job_rig import MakePipeline
from provision_program import Provisioner
from waiting import WAIT_TIMEOUT_S

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not os.environ.get("DOLL_FLEET_COST"), reason="five minutes on each fleet: DOLL_FLEET_COST=1"),
]

RATE_PER_S: Final = 20.0  # of each stream
UPDATES: Final = 600
DEADLINE_S: Final = 420.0
MOST_POINTS: Final = 2.0  # between the bill and what was expected, in percent of all on-demand
LOSSES: Final = ((0.2, True), (0.45, False), (0.7, True))  # at which part of the work, and whether with a notice
# Two machines lose three of them in four minutes and a half: an interruption in 180 s of a machine's time.
PLAN: Final = (
    f"plan.deadline_s={DEADLINE_S:g}", "plan.spot_usd_per_h=0.158", "plan.on_demand_usd_per_h=0.286", "plan.boot_s=10",
    "plan.alpha=0.95", "plan.cycle_s=180", "provision.every_s=1", "arrivals.process=poisson",
    f"arrivals.rate_per_s={RATE_PER_S:g}", f"stop.updates={UPDATES}",
)  # fmt: skip


@pytest.mark.parametrize("make_world", WORLDS)
def test_the_bill_is_what_was_expected(
    make_pipeline: MakePipeline, tmp_path: Path, make_world: Callable[..., Any]
) -> None:
    """Of four nodes two go with a notice and one without, and each is replaced: by the deadline, 0 lost, 0 twice."""
    with make_world(make_pipeline, PLAN, tmp_path) as (job, world):
        provision = Provisioner(job)
        job.start_ps()
        try:
            for _ in range(4):
                world.add()
            process = provision("run")
            feed_with_losses(job, world, lambda: are_ready(provision))
            out, _ = process.communicate(timeout=WAIT_TIMEOUT_S)
            assert process.returncode == 0, job.log("provision-0")
            assert "done" in out
        finally:
            provision.close()
    journal = provision.journal()
    taken = [entry for entry in journal if entry["kind"] == "ended" and entry["end_reason"] == "interrupted"]
    decisions = [entry for entry in journal if entry["kind"] == "decision"]
    first, last = next(entry for entry in decisions if all(entry["running"])), decisions[-1]
    points = 100 * (last["spent_usd"] - first["expected_cost_usd"]) / last["all_on_demand_usd"]
    for name in ("elapsed_s", "spent_usd", "expected_cost_usd", "all_on_demand_usd", "expected_finish_s"):
        sys.stdout.write(f"{name}: {first[name]:.5g} when both were ready, {last[name]:.5g} at the end\n")
    for entry in taken:
        sys.stdout.write(f"{entry}\n")
    bill = f"the bill less what was expected: {points:+.1f} points of all on-demand"
    sys.stdout.write(f"interruptions: {len(taken)}, {bill}\n")
    assert last["finished"]
    assert len(taken) == len(LOSSES)
    assert job.assert_audit_ok().lost == 0
    assert last["elapsed_s"] < DEADLINE_S
    assert abs(points) <= MOST_POINTS


def are_ready(provision: Provisioner) -> bool:
    """Whether each slot has had its worker."""
    return any(entry["kind"] == "decision" and all(entry["running"]) for entry in provision.journal())


def feed_with_losses(job: Any, world: World, can_begin: Callable[[], bool]) -> None:
    """Feed the job as fast as the plan says, and take nodes, until it has finished."""
    job.until(can_begin, "both workers to be ready")
    losses = list(LOSSES)
    began_s, sent, take_at_s = time.monotonic(), 0, float("inf")
    while job.finished is None:
        job.poll()
        now_s = time.monotonic()
        due = int((now_s - began_s) * RATE_PER_S * job.config.data.workers) - sent
        job.send(job.samples(due))
        sent += due
        if now_s >= take_at_s:
            take_at_s = float("inf")
            world.take_drained()
            world.add()
        if losses and job.version >= losses[0][0] * UPDATES and (there := world.of_workers()):
            _, has_notice = losses.pop(0)
            if has_notice:
                world.drain(there[0])
                take_at_s = now_s + NOTICE_S
            else:
                world.kill(there[0])
                world.add()
        assert now_s < began_s + 2 * DEADLINE_S, f"version {job.version}"
    job.until_finished()
