"""The worker process of `doll worker --any-slot`. Several identical processes run, and each takes a free slot."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

from doll import telemetry
from doll.config import JobConfig
from doll.consumers.lifecycle.redis_slots import lease_slot
from doll.kafka.reader import has_finished, on_finish
from doll.kafka.topics import cluster_id
from doll.process.signals import on_signal
from doll.services import Services
from doll.storage.redis_client import connect_redis


def run_any_worker(config: JobConfig, services: Services, run_folder: Path) -> int:
    """Wait for a free slot, then work in it like `run_worker`. Must be called in the main thread.

    Returns:
        0: the job has ended, or SIGTERM was received. A process without a slot also waits for the end of the job. 1:
        start this process again, for instance because another process has taken its slot.

    Raises:
        DollError: for the same reasons as `run_worker`.
    """
    stop = threading.Event()
    on_signal(signal.SIGTERM, stop.set)  # until the worker installs its own handler

    def leave() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    if has_finished(config, services, stop.is_set):
        telemetry.get_logger(__name__).info("job_finished", action="no slot is taken")
        return 0
    client, cluster = connect_redis(services), cluster_id(config, services)
    with on_finish(config, services, leave), lease_slot(config, client, stop, leave, cluster=cluster) as held:
        if held is None:
            return 0
        telemetry.configure(config.log.format, process=f"worker-{held.number}")
        import torch  # noqa: F401  # takes seconds and 300 MB, which a spare does not need

        from doll.consumers.main import run_worker

        if stop.is_set():
            return 0
        held.start_renewing()
        code = run_worker(config, services, held.number, run_folder)
        return code or int(held.lost)
