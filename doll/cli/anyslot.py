"""`doll worker --any`: one of several processes that were all started alike."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from doll import telemetry

if TYPE_CHECKING:
    from doll.config import JobConfig
    from doll.services import Services


def run_any_worker(config: JobConfig, services: Services, run_folder: Path) -> int:
    """Wait for a free slot and work in it, as `run_worker` does; 1 where another process has taken it meanwhile.

    Raises:
        DollError: as `run_worker`.
    """
    from doll.consumers.redis_slots import held_slot
    from doll.services import connect_redis

    with held_slot(config, connect_redis(services)) as held:
        if held is None:
            return 0
        telemetry.configure(process=f"worker-{held.number}")
        from doll.consumers.main import run_worker  # imports torch, for seconds and 300 MB: a spare has no use for it

        code = run_worker(config, services, held.number, run_folder)
        return code or int(held.lost)
