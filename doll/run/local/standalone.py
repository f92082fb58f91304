"""One role of a job as a process of its own, as `doll worker` and the like start it, also in containers.

Each function configures logging and checks that the services answer before it imports what its role needs: torch
takes seconds to load.
"""

from __future__ import annotations

import contextlib
import os

from doll import telemetry
from doll.config import JobConfig
from doll.consumers.any_slot import run_any_worker
from doll.consumers.lifecycle.spot_notices import Imds, set_identity_from_tags
from doll.errors import ConfigError
from doll.kafka import topics
from doll.monitor.views.prometheus import serve_metrics
from doll.producers.main import run_producer
from doll.ps.standby import LeaderCheck
from doll.run.target import Target
from doll.service_checks import require_kafka, require_services
from doll.services import Services

WORKER_ENV = "DOLL_WORKER"


def run_produce(target: Target, config: JobConfig, *, until_finished: bool) -> int:
    """Send the source of `config` to the samples topic; the exit code."""
    services = _start_on_kafka(target, "producer")
    return run_producer(config, services, target.run.path, until_finished=until_finished)


def run_worker(target: Target, slot: int | None, *, any_slot: bool) -> int:
    """Run a worker in its slot, or in any that is free; the exit code.

    Args:
        slot: None for `any_slot`, else slot 0.
    """
    if slot is None and any_slot:
        services = _start(target, "worker")
        topics.check(target.config, services)
        return run_any_worker(target.config, services, target.run.path)
    slot = slot or 0
    services = _start(target, f"worker-{slot}")
    topics.check(target.config, services)
    from doll.consumers.main import run_worker as run_worker_in_slot

    return run_worker_in_slot(target.config, services, slot, target.run.path)


def run_parameter_server(target: Target, *, standby: bool, takeover: bool, fresh: bool, check_only: bool) -> int:
    """Run the parameter server; the exit code.

    Args:
        standby: wait until the leader is silent, then take over.
        takeover: replace a leader.
        fresh: begin a new generation on topics that hold an earlier run.
        check_only: return 0 before anything is claimed, if the job may be served.

    Raises:
        FencedError: another parameter server leads, and neither `standby` nor `takeover` is set.
    """
    services = _start(target, "ps")
    topics.ensure(target.config, services)
    no_check = standby or takeover or check_only
    check = contextlib.nullcontext() if no_check else LeaderCheck(target.config, services)
    with check as leader_check:
        from doll.ps.main import run_ps

        return run_ps(
            target.config,
            services,
            target.run.path,
            standby=standby,
            leader_check=leader_check,
            fresh=fresh,
            check_only=check_only,
        )


def run_evaluate(target: Target) -> int:
    """Run the evaluator; the exit code."""
    services = _start_on_kafka(target, "evaluator", needs_redis=True)  # without Redis it reads the last checkpoint
    topics.check(target.config, services)
    from doll.evaluation.main import run_evaluator

    return run_evaluator(target.config, services, target.run.path)


def run_prometheus(target: Target) -> int:
    """Serve the job's metrics to Prometheus; the exit code."""
    services = _start_on_kafka(target, "prometheus")
    topics.check(target.config, services)
    return serve_metrics(target.config, services)


def slot_of_this_machine(slot: int | None) -> int:
    """The slot in the tags of this EC2 machine, or `slot`; the tags' other values go into the environment.

    Raises:
        ConfigError: the tags are missing, or name no slot.
        ServiceUnavailableError: this is no EC2 machine, or its metadata service is off.
    """
    if slot is not None:
        os.environ[WORKER_ENV] = str(slot)
    set_identity_from_tags(Imds())
    tag = os.environ[WORKER_ENV]
    if not tag.isdecimal():
        raise ConfigError(f"tag doll:worker: expected a slot, 0 or more, got {tag!r}")
    return int(tag)


def _start(target: Target, process: str) -> Services:
    """Configure logging, and require that the services answer."""
    telemetry.configure(target.config.log.format, process=process)
    services = target.services()
    require_services(target.config, services)
    return services


def _start_on_kafka(target: Target, process: str, *, needs_redis: bool = False) -> Services:
    """As `_start`, for a process that Redis does not keep from its work.

    Args:
        needs_redis: its address must be known.
    """
    telemetry.configure(process=process)
    services = target.services(needs_redis=needs_redis)
    require_kafka(target.config, services)
    return services
