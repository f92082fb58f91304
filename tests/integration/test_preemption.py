"""A machine is taken away: SIGTERM at any moment of a worker's life, from its first on, ends it within its budget."""

from __future__ import annotations

import time
from typing import Any

import pytest
from doll.local.roles import Role

pytestmark = pytest.mark.integration

DRAIN_S = 3.0
EXIT_S = DRAIN_S + 30.0  # and what a busy machine takes to notice the end of a process


@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.15, 0.3, 0.6])
def test_a_worker_that_has_just_joined_heeds_sigterm(make_pipeline: Any, delay_s: float) -> None:
    """Between its own start-up and Faust's there was a moment in which the signal was heard and forgotten."""
    job = make_pipeline(f"worker.drain_s={DRAIN_S}")
    job.start_ps()
    worker: Role = job.launch("worker-0", "worker_role", 0)
    job.until(lambda: "joined" in job.log("worker-0"), "the worker to join")
    told_s = time.monotonic() + delay_s
    job.until(lambda: time.monotonic() >= told_s, "the moment")
    worker.terminate()
    told_s = time.monotonic()
    job.until(lambda: worker.poll() is not None, "the end of the worker", EXIT_S)
    assert worker.exitcode == 0
    assert time.monotonic() - told_s < EXIT_S
