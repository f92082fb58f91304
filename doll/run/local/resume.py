"""`doll resume`: resumes a run in its folder, on the same topics and with the same ledger, from its newest checkpoint.

Order of effects: 1. the folder is locked; 2. changes that would invalidate the ledger are refused; 3. the job file is
written with its overrides, and the old report is renamed; 4. the run continues with the second effect of `doll up`.
After a crash at any point the run can be resumed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from doll.config import JobConfig, fingerprint, load
from doll.errors import ConfigError, ServiceUnavailableError
from doll.kafka.clients import kafka_problem
from doll.ledger.admission import admit
from doll.local.stack import has_kafka_data
from doll.monitor.views.display import Display
from doll.run.folder import RunFolder
from doll.run.local.up import check_runnable, run_in
from doll.run.target import open_target, refuse_shared_checkpoints
from doll.services import Services, kafka_address
from doll.storage.stores import checkpoint_location, open_store

_REACHABLE_S = 5.0


def run_resume(
    folder: Path, overrides: list[str], *, display: Display | None = None, page: bool = False
) -> dict[str, Any]:
    """Resume the run in `folder`; return the report, as `run_up`.

    Args:
        display, page: see `run_up`.

    Raises:
        ConfigError: there is no run, it is still running, or a setting was changed that must not change.
        ServiceUnavailableError: the records of the run are gone, or its services do not answer.
        CheckpointError: all checkpoints are damaged.
    """
    target = open_target(folder, overrides)
    run, config = target.run, target.config
    if not target.is_run_folder:
        raise ConfigError(f"{folder}: expected the folder of a run that has started (with a stack.json)")
    with run.locked():
        check_runnable(config, begins=False)
        check_same_ledger(run, config)
        config = on_same_broker(run, config)
        run.write_job(config)
        return resume_in(run, config, display=display, page=page)


def resume_in(
    run: RunFolder, config: JobConfig, *, display: Display | None = None, page: bool = False
) -> dict[str, Any]:
    """Continue in a folder that this process has locked and whose job file and checkpoints fit; return the report."""
    if run.report.exists():
        run.report.replace(run.path / "report.previous.json")
    return run_in(run, config, display=display, page=page)


def check_same_ledger(run: RunFolder, config: JobConfig) -> None:
    """Refuse a job file that does not fit the checkpoints or topics of this run.

    Raises:
        ConfigError: names the differences.
    """
    checkpoint = open_store(config, run.path).load_newest_state()
    original, wanted = fingerprint.job_fields(load(run.job)), fingerprint.job_fields(config)
    if checkpoint is not None:
        original = fingerprint.without_model(fingerprint.parse(checkpoint.fingerprint))
    if refused := fingerprint.resume_refusal(original, wanted):
        raise ConfigError(f"{run.path}: {refused}")
    if checkpoint is not None:
        refuse_new_weights(run, config)


def refuse_new_weights(run: RunFolder, config: JobConfig) -> None:
    """Refuse a changed `training.init_from` for a run that has begun.

    Raises:
        ConfigError: the value differs from the one of the run.
    """
    if config.training.init_from not in (None, load(run.job).training.init_from):
        raise ConfigError(
            f"{run.path}: training.init_from: expected none, or as before, since this run has begun and goes on with "
            "its own weights; begin a new one with doll up"
        )


def on_same_broker(run: RunFolder, config: JobConfig) -> JobConfig:
    """Return `config`. If the broker with the records of the run is external, set its address in the result.

    Raises:
        ConfigError: another run has begun on the same topics of an external broker, or this folder is a copy and shares
            records or checkpoints with the original.
        ServiceUnavailableError: the records are gone.
    """
    recorded = run.recorded()
    kind = recorded.get("kafka_kind")
    if kind != "local":
        run.refuse_copy(f"records, on Kafka at {recorded.get('kafka')}")
    refuse_shared_checkpoints(run, config)
    if kind == "local":
        if not has_kafka_data(run.path):
            raise ServiceUnavailableError(
                f"{run.path}: the data of the broker of this run (services/kafka/data) is gone, with the samples that "
                "are not in the model yet; its model is in the checkpoints: doll export reads them"
            )
        return config
    if not config.kafka.address and recorded.get("kafka"):
        kafka = config.kafka.model_copy(update={"address": recorded["kafka"]})
        config = config.model_copy(update={"kafka": kafka})
    services = Services(kafka_address(config) or "", "")
    if services.kafka and kafka_problem(config, services, _REACHABLE_S) is None:  # else `local_stack` reports it
        admit(config, services, open_store(config, run.path), checkpoint_location(config, run.path), 0)
    return config
