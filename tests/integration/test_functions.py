"""A job whose workers are invocations of a function, on AWS's runtime interface emulator with a short time limit."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

import pytest
from forked_commands import environment
from function_world import NAME, FunctionWorld, unavailable_reason
from job_rig import MakePipeline
from paths import ROOT
from provision_program import journal_of
from waiting import WAIT_TIMEOUT_S

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason())),
]

PLAN = (
    "plan.deadline_s=6000", "plan.boot_s=5", "provision.every_s=1", "arrivals.process=poisson",
    "arrivals.rate_per_s=20", "stop.updates=1000000",
)  # fmt: skip


def test_workers_hand_their_places_on_before_the_limit_of_an_invocation(
    make_pipeline: MakePipeline, tmp_path: Path
) -> None:
    """Successors are warm first; each record is learned once; the bill has each invocation by the millisecond."""
    fleet = f"{{kind: lambda, function: {NAME}, region: us-east-1, timeout_s: 60, start_s: 15, folder: {ROOT}}}"
    job = make_pipeline(*PLAN, f"fleet={fleet}")
    python_path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    with FunctionWorld(tmp_path / "functions", {**environment(job.services), "PYTHONPATH": python_path}, 60) as world:
        aws = {"AWS_ENDPOINT_URL": world.url, "AWS_ACCESS_KEY_ID": "none", "AWS_SECRET_ACCESS_KEY": "none"}
        provisioner = job.doll("provision run", log="provision-0", **aws)

        def handed_on() -> int:
            return sum(each.answer["cause"] == "successor" for each in world.answered)

        try:
            job.start_ps()
            while handed_on() < 3:
                job.send(job.samples(160))
                job.until_version(job.version + 4)
            job.role("ps").send_signal(signal.SIGINT)
            job.until_finished()
            out, _ = provisioner.communicate(timeout=WAIT_TIMEOUT_S)
            assert provisioner.returncode == 0, job.log("provision-0")
            assert "done" in out
        finally:
            provisioner.kill()
            provisioner.wait()
        job.until(lambda: len(world.answered) == len(journal_of(job.run, job, "launched")), "the last invocations")
    causes = Counter(each.answer["cause"] for each in world.answered)
    assert set(causes) <= {"successor", "limit", "asked", "finished"}, "each has left before its owner ended it"
    ended = {entry["id"]: entry for entry in journal_of(job.run, job, "ended")}
    assert {entry["end_reason"] for entry in ended.values()} == {"limit", "terminated"}
    for each in world.answered:
        after_last_word_ms = each.answer["billed_ms"] - ended[each.name]["billed_s"] * 1000
        assert -1 <= after_last_word_ms < 1000, "its record ends with its last word, just before its answer"
        assert ended[each.name]["billed_s"] < 60
    assert len([each for each in world.answered if each.cold]) < len(world.answered), "environments are used again"
    assert journal_of(job.run, job, "interrupted") == []
    assert job.assert_audit_ok().lost == 0
