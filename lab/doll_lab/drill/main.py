"""`doll drill`: runs `doll up` with a plan of faults and reports the recovery times."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from doll.config import StopConfig
from doll.errors import ConfigError
from doll.kafka.foreign_topic import require_own_topic
from doll.process.files import write_json
from doll.run.folder import RunFolder
from doll.run.local.context import PARAMETER_SERVERS
from doll.run.local.up import run_up
from doll.storage.stores import open_store

from doll_lab.drill.fault_injector import FaultInjector
from doll_lab.drill.replay_check import check_replay
from doll_lab.drill.report_lines import drill_lines
from doll_lab.drill.routes import RoleRelays

if TYPE_CHECKING:
    from doll.config import JobConfig
    from doll.monitor.views.display import Display

    from doll_lab.drill.plan import FaultTarget


def _problem(report: Mapping[str, Any], poisoned: int) -> str | None:
    """Return how the audit differs from the sent poison records, or the replay from the run; None if it does not."""
    audit, replay = report["audit"], report.get("replay")
    if replay is not None and replay["differences"]:
        return f"expected a replay that is equal to the bit: {'; '.join(replay['differences'])}"
    if audit is None or audit["dead"] == poisoned:
        return None
    return (
        f"expected {poisoned} dead letters, one for each poison record that was sent; the audit counts {audit['dead']}"
    )


def run_drill(
    config: JobConfig,
    runs_folder: Path,
    *,
    faults: int,
    seed: int,
    standby: bool = False,
    brokers: int = 1,
    fresh: bool = False,
    replay: bool = False,
    every_s: float | None = None,
    only: FaultTarget | None = None,
) -> tuple[dict[str, Any], str | None]:
    """Run the job until it recovers from `faults` faults. Return the report of `run_up`, and a failure of the drill.

    Args:
        standby: whether to run a second parameter server, which takes over when the leader is silent.
        brokers: size of the local Kafka cluster. With more than one broker, each topic is replicated on all brokers,
            and one broker at a time fails.
        every_s: seconds from one fault to the next; None: the next fault follows the recovery, or comes a little
            earlier.
        only: target of the faults; None: all processes that the job runs.
        replay: whether to keep an event log of each parameter server, replay it after the run, and compare the results
            with the checkpoints.

    Raises:
        ConfigError: the job cannot be run this way, or learns from a topic of another owner.
        ServiceUnavailableError: Kafka or Redis is not reachable and cannot be started.
    """
    require_own_topic(config, "doll drill")
    if config.source is None:
        raise ConfigError("source: expected a section in the job file, got none: a drill needs a continuous stream")
    if config.ps.shards == "auto":
        raise ConfigError("ps.shards: expected a number for a drill, got auto: doll plan says the number")
    # Blobs go through Redis, whatever the job file sets, so that a crash of Redis loses all of them.
    blobs = config.blobs.model_copy(update={"kind": "redis"})
    kafka = config.kafka.model_copy(update={"replication_factor": brokers} if brokers > 1 else {})
    checkpoint = config.checkpoint.model_copy(update={"event_log": True} if replay else {})
    endless = config.model_copy(update={"stop": StopConfig(), "blobs": blobs, "kafka": kafka, "checkpoint": checkpoint})
    roles = [*PARAMETER_SERVERS, *(f"worker-{worker}" for worker in range(config.data.workers)), "producer"]
    roles += [f"shard-{number}" for number in range(config.ps.num_shards)]
    drills: list[tuple[RunFolder, FaultInjector]] = []
    with RoleRelays(roles, brokers) as relays:

        def hook(run: RunFolder, display: Display) -> FaultInjector:
            drill = FaultInjector(
                endless, say=display.say, run_folder=run.path, faults=faults, seed=seed, relays=relays,
                standby=standby, every_s=every_s, only=only,
            )  # fmt: skip
            drills.append((run, drill))
            return drill

        report = run_up(endless, runs_folder, fresh=fresh, hook=hook)
    ((run, drill),) = drills
    if replay:
        newest = open_store(endless, run.path).load_newest(None)
        report["replay"] = asdict(check_replay(endless, run.path / "events", newest))
    report["lines"] = drill_lines(report)
    with suppress(OSError):  # `run_up` has said so
        write_json(run.report, report)
    return report, _problem(report, len(drill.poisoned)) if report["exit_code"] == 0 else None
