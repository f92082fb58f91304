"""Workers that are pipelines of stages, on real processes: whoever dies or stops, each record is learned once."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest
from job_rig import MakePipeline

from doll_lab.drill.actions import children_of

pytestmark = pytest.mark.integration

FEATURES = 4
STAGES, WAVE = 3, 4
EACH = 5  # samples of each kind of poison
JOB = (
    f"task.args={{features: {FEATURES}, hidden: [16, 16]}}",
    f"training.policy={{name: wsp, wave_batches: {WAVE}, clock_distance: 1}}",
    f"worker.pipeline={{stages: {STAGES}, stage_timeout_s: 4}}",
    "training.optimizer={name: sgd, lr: 0.01, momentum: 0.9}",
)


def stages_of(job: Any, worker: int) -> list[int]:
    """Processes of a worker's stages, first stage first."""
    pids: list[int] = []

    def are_there() -> bool:
        role = job.supervisor.handles().get(f"worker-{worker}")
        pids[:] = [] if role is None else children_of(role.pid)
        return len(pids) == STAGES

    job.until(are_there, f"the stages of worker {worker}")
    return pids


def more(job: Any, updates: int) -> None:
    job.until_version(job.version + updates)


def test_virtual_workers_outlive_stages_workers_and_servers(make_pipeline: MakePipeline) -> None:
    job = make_pipeline(*JOB, "stop.updates=220")
    job.start()
    job.send(job.samples(16_000))  # one stream alone is enough for all updates: a worker that has left does not return
    job.until_version(10)
    for stage in (0, 2):
        os.kill(stages_of(job, 0)[stage], signal.SIGKILL)
        more(job, 12)
    job.kill("worker-1")
    more(job, 12)
    job.kill("ps")
    more(job, 12)
    os.kill(stages_of(job, 1)[1], signal.SIGSTOP)  # frozen: its worker ends it
    job.until(lambda: "has been silent" in job.log("worker-1"), "the end of a frozen stage")
    more(job, 12)
    os.kill(stages_of(job, 0)[1], signal.SIGTERM)  # the machine of one stage goes away
    job.until(lambda: "stage_leaves" in job.log("worker-0"), "the departure")
    more(job, 12)
    job.until_finished()
    report = job.assert_audit_ok()
    assert report.applied > 200 * WAVE * 8
    losses = [update.loss for update in job.updates]
    assert np.mean(losses[-50:]) < np.mean(losses[:20])
    assert {len(update.members) for update in job.updates} <= set(range(1, WAVE + 1))
    assert sum(len(update.members) == WAVE for update in job.updates) > 0.9 * len(job.updates)


def test_poison_among_the_records_is_refused_by_stages(make_pipeline: MakePipeline) -> None:
    """Records that no one can decode, that are not finite, and that would break the model, while a stage dies."""
    job = make_pipeline(*JOB, "stop.updates=60", f"worker.max_pending_batches={4 * WAVE}")
    job.start()
    values = job.samples(4_000)
    poison = {
        "garbage": b"garbage",
        "not a number": np.full(FEATURES + 1, np.nan, "<f4").tobytes(),
        "infinite": np.array([np.inf, 0, 0, 0, 1], "<f4").tobytes(),
        "extreme": np.array([1e30, -1e30, 1e30, -1e30, 1], "<f4").tobytes(),
    }
    places = [300 + 37 * at for at in range(20)]
    for place, value in zip(places, (value for value in poison.values() for _ in range(EACH)), strict=True):
        values[place] = value
    job.send(values)
    job.until_version(20)
    os.kill(stages_of(job, 1)[1], signal.SIGKILL)
    job.until_finished()
    report = job.assert_audit_ok()
    # Of the worker whose stage died less may be learned by the end, or nothing: the other one does not wait for it.
    reached = [place for place in places if place // 2 < report.partitions[place % 2].applied_until]
    # The extreme ones come last. One that the model happens to get right has no gradient, and is learned.
    certain = [place for place in reached if place < places[-EACH]]
    assert len(places) // 2 <= len(certain) <= report.dead <= len(reached), report.partitions
    assert np.isfinite(job.checkpoint().tensors["weights"]).all()
    losses = [update.loss for update in job.updates]
    assert np.mean(losses[-20:]) < np.mean(losses[:10])


def test_a_source_that_ends_is_learned_to_its_last_record_by_stages(make_pipeline: MakePipeline) -> None:
    """Its last wave is not full, and its last batches are cut."""
    samples = 2 * 8 * WAVE * 3 + 8 + 3
    job = make_pipeline(
        *JOB,
        f"source={{kind: python, of: examples.synthetic.source:gaussians, args: {{features: {FEATURES}}}}}",
        f"source.limit_samples={samples}",
        "arrivals={process: poisson, rate_per_s: 100}",
    )  # fmt: skip
    job.start()
    job.start_producer()
    job.until(lambda: bool(job.updates) and job.updates[-1].samples_total == samples, "all samples in the model")
    job.until_status(lambda status: status.durable_version == status.version, "a checkpoint of all")
    report = job.assert_audit_ok()
    assert (report.produced, report.applied, report.pending) == (samples, samples, 0)
