"""A stream that is far ahead of its workers: they read on as there is room, and their mail is never held up."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.integration


def test_a_backlog_above_all_buffers_is_learned(make_pipeline: Any) -> None:
    """32 batches that are not durable and 4096 buffered records leave no room for the rest of 10,000 in one fetch.

    Faust hands out all topics in one loop: were a sample to wait for room there, the durable watermark that makes room
    would wait behind it, for ever.
    """
    job = make_pipeline("data.batch_size=64", "stop.updates=156", "worker.stall_s=15")
    job.send(job.samples(20_000))
    job.start()
    job.until_finished()
    report = job.assert_sound()
    assert (report.version, report.applied, report.redone) == (156, 156 * 2 * 64, 0)
    assert job.supervisor.exit_codes()["worker-0"] == 0
    assert "exiting code=1" not in job.log("worker-0") + job.log("worker-1")
