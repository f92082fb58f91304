"""Entry points of the roles of a local run. Arguments are strings and numbers, as they are sent between processes."""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec

from doll import telemetry
from doll.config import JobConfig, load
from doll.errors import ConfigError, DollError
from doll.ledger.admission import AFTER_TERM_ENV
from doll.producers.main import run_producer
from doll.services import BLOBS_ENV, CONTROL_ENV, Services

P = ParamSpec("P")


def _role(entry: Callable[P, int]) -> Callable[P, int]:
    """An entry point that exits with the code of its `DollError`; after 2, the supervisor does not restart it."""

    @functools.wraps(entry)
    def run(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            return entry(*args, **kwargs)
        except DollError as error:
            if not isinstance(error, ConfigError) or error.__cause__ is not None:  # else the message says it all
                traceback.print_exc()
            sys.stderr.write(f"doll: {error}\n")
            return error.exit_code

    return run


@_role
def ps_role(job_path: str, kafka: str, redis: str, run_folder: str) -> int:
    """The parameter server. It replaces one that is running."""
    config = _load(job_path)
    telemetry.configure(config.log.format, process="ps")
    from doll.ps.main import run_ps

    return run_ps(config, _services(kafka, redis), Path(run_folder), after_term=_after_term())


@_role
def ps_standby_role(job_path: str, kafka: str, redis: str, run_folder: str) -> int:
    """A standby parameter server."""
    config = _load(job_path)
    telemetry.configure(config.log.format, process="ps-standby")
    from doll.ps.main import run_ps

    return run_ps(config, _services(kafka, redis), Path(run_folder), standby=True, after_term=_after_term())


@_role
def worker_role(job_path: str, kafka: str, redis: str, run_folder: str, worker: int) -> int:
    """Worker number `worker`."""
    config = _load(job_path)
    telemetry.configure(config.log.format, process=f"worker-{worker}")
    from doll.consumers.main import run_worker

    return run_worker(config, _services(kafka, redis), worker, Path(run_folder))


@_role
def evaluator_role(job_path: str, kafka: str, redis: str, run_folder: str) -> int:
    """The evaluator."""
    config = _load(job_path)
    telemetry.configure(config.log.format, process="evaluator")
    from doll.evaluation.main import run_evaluator

    return run_evaluator(config, _services(kafka, redis), Path(run_folder), after_term=_after_term())


@_role
def producer_role(job_path: str, kafka: str, redis: str, run_folder: str) -> int:
    """The producer of the job's source."""
    config = _load(job_path)
    telemetry.configure(config.log.format, process="producer")
    return run_producer(config, _services(kafka, redis), Path(run_folder))


@_role
def export_role(job_path: str, run_folder: str, out_folder: str) -> int:
    """Writes the newest checkpoint as a model, in a process that has already loaded torch."""
    config = _load(job_path)
    telemetry.configure(config.log.format, process="export")
    from doll.run.export import export_model

    export_model(config, Path(run_folder), Path(out_folder))
    return 0


@_role
def model_role(job_path: str) -> int:
    """Builds the model for a trial."""
    from doll.run.local.preflight import count_parameters

    count_parameters(_load(job_path))
    return 0


def _after_term() -> int:
    """Terms up to this one belong to earlier runs, as the parent process has seen."""
    return int(os.environ.get(AFTER_TERM_ENV) or 0)


def _services(kafka: str, redis: str) -> Services:
    return Services(kafka, redis, os.environ.get(BLOBS_ENV, ""), os.environ.get(CONTROL_ENV, ""))


def _load(job_path: str) -> JobConfig:
    return load(Path(job_path))
