"""`doll drill`: `doll up` with a plan of faults, and a table of what came of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from doll.drill.conductor import FaultInjector
from doll.drill.metadata_service import FakeMetadataService
from doll.drill.routes import RoleRelays
from doll.errors import AuditError, ConfigError
from doll.process.files import write_json
from doll.run.folder import RunFolder
from doll.run.job import PARAMETER_SERVERS, run_up

if TYPE_CHECKING:
    from doll.config import JobConfig
    from doll.monitor.display import Display


class _Drill(FaultInjector):
    """Also keeps every fault in the run folder."""

    def __init__(self, config: JobConfig, run: RunFolder, display: Display, **plan: Any) -> None:
        super().__init__(config, say=display.say, run_folder=run.path, **plan)
        self._run = run

    def problem(self) -> str | None:
        """What the run's audit does not say of the drill's own records; None where all is well, or nothing audited."""
        audit = json.loads(self._run.report.read_text(encoding="utf-8")).get("audit")
        if audit is None or audit["dead"] == len(self.poisoned):
            return None
        return (
            f"{len(self.poisoned)} records were put into the stream that cannot be learned from, and "
            f"{audit['dead']} are dead-lettered"
        )

    def facts(self) -> dict[str, Any]:
        write_json(self._run.path / "faults.json", self.log())
        return super().facts()


def run_drill(
    config: JobConfig,
    runs_folder: Path,
    *,
    faults: int,
    seed: int,
    standby: bool = False,
    brokers: int = 1,
    as_json: bool = False,
    fresh: bool = False,
) -> int:
    """Run the job until `faults` faults are recovered from; the exit code, as of `run_up`.

    Args:
        standby: with a second parameter server that stands by, and takes over when the first is silent.
        brokers: more than one: a cluster of our own, each topic on all of its brokers; one at a time is broken.

    Raises:
        ConfigError: the job cannot be run this way.
        ServiceUnavailableError: Kafka or Redis cannot be found or started.
    """
    from doll.config import StopConfig

    if config.source is None:
        raise ConfigError("source: expected one in the job file: a drill needs a stream that lasts")
    # Through Redis, whatever the job file says: a drill without a Redis that dies with all blobs would prove less.
    blobs = config.blobs.model_copy(update={"kind": "redis"})
    kafka = config.kafka.model_copy(update={"replication_factor": brokers} if brokers > 1 else {})
    endless = config.model_copy(update={"stop": StopConfig(), "blobs": blobs, "kafka": kafka})
    roles = [*PARAMETER_SERVERS, *(f"worker-{worker}" for worker in range(config.data.workers)), "producer"]
    drills: list[_Drill] = []
    with RoleRelays(roles, brokers) as wires, FakeMetadataService() as metadata:

        def hook(run: RunFolder, display: Display) -> _Drill:
            drills.append(
                _Drill(endless, run, display, faults=faults, seed=seed, wires=wires, metadata=metadata, standby=standby)
            )
            return drills[-1]

        code = run_up(endless, runs_folder, as_json=as_json, fresh=fresh, hook=hook)
    if code == 0 and (problem := drills[0].problem()) is not None:
        sys.stderr.write(f"doll: {problem}\n")
        return AuditError.exit_code
    return code
