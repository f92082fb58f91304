"""Whether the topics of a broker hold an earlier run of the job; checked before `doll up` starts anything."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from doll.config import JobConfig, load
from doll.errors import ConfigError, FencedError
from doll.kafka.clients import kafka_problem
from doll.ledger.admission import admit, read_lineage, refuse_earlier_run
from doll.process.files import read_json
from doll.ps.standby import LeaderCheck
from doll.run.folder import STACK
from doll.services import Services, kafka_address
from doll.storage.stores import checkpoint_location, open_store

_REACHABLE_S: Final = 5.0


def check_topics(config: JobConfig, runs_folder: Path, *, fresh: bool) -> None:
    """Check that a new run of the job may begin on the given broker, if there is one.

    Raises:
        ConfigError: it holds an earlier run; with `fresh`: that run is still running, or its checkpoints exist.
        CheckpointError: the checkpoint store cannot be read.
        ServiceUnavailableError: Kafka stops answering.
    """
    address = kafka_address(config)
    services = Services(address or "", "")
    if address is None or kafka_problem(config, services, _REACHABLE_S) is not None:
        return  # `local_stack` reports that, or starts a broker
    given = config.checkpoint.folder is not None  # else the new run folder, which has no checkpoints
    store, place = open_store(config, runs_folder), checkpoint_location(config, runs_folder)
    existing = store.versions() if given else []
    if existing and not fresh:
        admit(config, services, store, place, 0)  # the run resumes from them
        return
    if existing:
        raise ConfigError(
            f"--fresh: {place} has {len(existing)} checkpoints of job {config.job}: expected none; set another "
            "checkpoint.folder, move them away, or resume from them without --fresh"
        )
    seen = read_lineage(config, services)
    if not fresh:
        resume = _newest_run(runs_folder, config.job, address)
        refuse_earlier_run(
            config, services, seen, 0, place if given else "the folder of a new run", resume=resume or "RUN"
        )
    elif seen.newest_term and not seen.finished:
        try:
            with LeaderCheck(config, services) as leader_check:
                leader_check.require_no_leader(lambda: False)
        except FencedError as exc:
            raise ConfigError(
                f"--fresh: the earlier run of job {config.job} on Kafka at {address} is still running ({seen}): stop "
                f"it first, or use another name (--set job={config.job}-2)"
            ) from exc


def _newest_run(runs_folder: Path, job: str, kafka: str) -> str:
    """The newest run of this job on this broker that has checkpoints; "" without such a run."""
    for path in sorted(runs_folder.glob(f"{job}-*/{STACK}"), key=lambda path: path.stat().st_mtime, reverse=True):
        run = path.parent
        if _recorded_kafka(path) == kafka and (run / "job.yaml").is_file() and _is_run_of(run, job):
            return str(run)
    return ""


def _recorded_kafka(path: Path) -> str:
    try:
        return str(read_json(path).get("kafka", ""))
    except (ConfigError, AttributeError):
        return ""


def _is_run_of(run: Path, job: str) -> bool:
    try:
        config = load(run / "job.yaml")
        return config.job == job and bool(open_store(config, run).versions())
    except Exception:  # any folder may have such a name
        return False
