"""`doll drill`: `doll up` with a plan of faults, and a table of what came of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from doll.cli.runfolder import RunFolder, write_json
from doll.cli.up import PARAMETER_SERVERS, run_up
from doll.drill.conductor import Conductor
from doll.drill.wires import Wires
from doll.errors import ConfigError

if TYPE_CHECKING:
    from doll.cli.live import View
    from doll.config import JobConfig


class _Drill(Conductor):
    """Also keeps every fault in the run folder."""

    def __init__(self, config: JobConfig, run: RunFolder, view: View, **plan: Any) -> None:
        super().__init__(config, say=view.say, **plan)
        self._run = run

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
    as_json: bool = False,
    fresh: bool = False,
) -> int:
    """Run the job until `faults` faults are recovered from; the exit code, as of `run_up`.

    Args:
        standby: with a second parameter server that stands by, and takes over when the first is silent.

    Raises:
        ConfigError: the job cannot be run this way.
        ServiceUnavailableError: Kafka or Redis cannot be found or started.
    """
    from doll.config import StopConfig

    if config.source is None:
        raise ConfigError("source: expected one in the job file: a drill needs a stream that lasts")
    # Through Redis, whatever the job file says: a drill without a Redis that dies with all blobs would prove less.
    blobs = config.blobs.model_copy(update={"kind": "redis"})
    endless = config.model_copy(update={"stop": StopConfig(), "blobs": blobs})
    roles = [*PARAMETER_SERVERS, *(f"worker-{worker}" for worker in range(config.data.workers)), "producer"]
    with Wires(roles) as wires:
        return run_up(
            endless,
            runs_folder,
            as_json=as_json,
            fresh=fresh,
            companion=lambda run, view: _Drill(
                endless, run, view, faults=faults, seed=seed, wires=wires, standby=standby
            ),
        )
