"""`doll resume`: go on with a run in its own folder: the same topics, the newest checkpoint, one ledger over all of it.

Order of effects: 1. the folder is ours alone; 2. what would make the ledger wrong is refused; 3. the job file with its
overrides and the old report's new name are written; 4. as `doll up` from its second effect on. A crash anywhere leaves
a run that can be resumed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from doll import fingerprint
from doll.config import JobConfig, load
from doll.errors import ConfigError, ServiceUnavailableError
from doll.kafka.clients import kafka_problem
from doll.ledger.admission import admit
from doll.local.stack import has_kafka_data
from doll.process.files import read_json
from doll.run.folder import RunFolder
from doll.run.job import check_runnable, run_in
from doll.run.target import open_target
from doll.services import Services, kafka_address
from doll.storage.stores import checkpoint_location, open_store

_REACHABLE_S = 5.0


def run_resume(folder: Path, overrides: list[str]) -> dict[str, Any]:
    """Go on with the run in `folder`; the report, as of `run_up`.

    Raises:
        ConfigError: no run, one that is still going, or a changed number of workers, batch size, task or optimizer.
        ServiceUnavailableError: the run's records are gone, or its services do not answer.
        CheckpointError: there are checkpoints and none is whole.
    """
    target = open_target(folder, overrides)
    run, config = target.run, target.config
    if not target.is_run_folder:
        raise ConfigError(f"{folder}: expected the folder of a run that had started (with a stack.json)")
    with run.locked():
        check_runnable(config)
        _check_same_ledger(run, config)
        config = _on_same_broker(run, config)
        _check_newest(run, config)
        run.write_job(config)
        if run.report.exists():
            run.report.replace(run.path / "report.previous.json")
        return run_in(run, config)


def _check_same_ledger(run: RunFolder, config: JobConfig) -> None:
    """Refuse what a checkpoint, or a topic, of this run could not be gone on with.

    Raises:
        ConfigError: says what differs.
    """
    checkpoint = open_store(config, run.path).load_newest(None)
    began_with = fingerprint.job_fields(load(run.job))
    if checkpoint is not None:
        saved = fingerprint.parse(checkpoint.fingerprint)
        began_with = {key: saved.get(key, "nothing") for key in began_with}
    if changed := fingerprint.differences(began_with, fingerprint.job_fields(config)):
        raise ConfigError(
            f"{run.path}: this run cannot go on with another ledger: {changed}; leave it as it was, or begin a new run "
            "with doll up"
        )


def _check_newest(run: RunFolder, config: JobConfig) -> None:
    """Refuse to go on with a run after which another one has begun on the same topics of a broker that is not ours.

    Raises:
        ConfigError: one has.
    """
    address = kafka_address(config)
    if read_json(run.stack).get("kafka_kind") == "local" or address is None:
        return
    services = Services(address, "")
    if kafka_problem(config, services, _REACHABLE_S) is None:  # else it is said when the services are looked for
        admit(config, services, open_store(config, run.path), checkpoint_location(config, run.path), 0)


def _on_same_broker(run: RunFolder, config: JobConfig) -> JobConfig:
    """`config` with the address of the broker that has the run's records, where that is not one of our own.

    Raises:
        ServiceUnavailableError: the records are gone.
    """
    recorded = read_json(run.stack)
    kind, address = recorded.get("kafka_kind"), recorded.get("kafka")
    if kind == "mock":
        raise ServiceUnavailableError(
            f"{run.path}: the run's Kafka was an imitation in memory, and its records are gone; its model is in the "
            "checkpoints: doll export reads them"
        )
    if kind == "local":
        if not has_kafka_data(run.path):
            raise ServiceUnavailableError(
                f"{run.path}: the data of the run's broker (services/kafka/data) is gone, and with it the samples that "
                "are not in the model yet; its model is in the checkpoints: doll export reads them"
            )
        return config
    if config.kafka.address or not address:
        return config
    return config.model_copy(update={"kafka": config.kafka.model_copy(update={"address": address})})
