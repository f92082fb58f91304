"""Parts of a provisioner that are outside its package: worker processes as machines, and the provisioner of a run of
`doll up` whose workers are actors of Ray. That provisioner ends all actors with the run."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from doll.config import JobConfig, ProcessesFleetConfig, RayFleetConfig, load
from doll.errors import ConfigError
from doll.extras import is_installed, lacking
from doll.ledger.admission import AFTER_TERM_ENV
from doll.local.forks import ForkServer
from doll.local.supervisor import RoleSpec
from doll.monitor.state.pilot_run import with_pilot
from doll.process.signals import Interrupts
from doll.provisioner.billing import LOCAL
from doll.provisioner.fleets.port import Instance
from doll.provisioner.fleets.processes import ProcessFleet
from doll.provisioner.machines import Machines, check_machines, open_machines
from doll.provisioner.main import ProvisionerProcess, ProvisionerSetup
from doll.provisioner.prices.shipped import with_prices
from doll.provisioner.settings import ControllerSettings, controller_settings
from doll.provisioner.traces.market import MarketClock, TracePrices, make_market
from doll.run.folder import RunFolder
from doll.services import KAFKA_ENV, REDIS_ENV, Services, kafka_address, redis_address

SPOT_LABEL, ON_DEMAND_LABEL = "doll-spot", "doll-on-demand"
_YES: Final = "yes"
HEAD_LABELS: Final = (f"{SPOT_LABEL}={_YES}", f"{ON_DEMAND_LABEL}={_YES}")
"""The labels of the single node of a Ray cluster that `doll up` starts; the node represents both markets."""


def settings_of(config: JobConfig) -> tuple[ControllerSettings, list[str]]:
    """Return the settings of a job's provisioner, and notes on the sources of its numbers.

    Raises:
        ConfigError: the work or the rates are not known, or a number is out of its range.
        InfeasiblePlanError: the pilot run shows that the error target cannot be met.
    """
    section, notes = with_pilot(config, config.plan)
    settings, more = controller_settings(config.model_copy(update={"plan": section}))
    return settings, [*notes, *more]


def check_actors(config: JobConfig) -> None:
    """Check, from the job file, that `doll up` can run the workers of a job with `fleet.kind: ray`.

    Raises:
        ConfigError: Ray is not installed, the provisioner cannot plan the job, or nodes of the cluster could not reach
            the services that `doll up` starts on loopback.
    """
    fleet = config.fleet
    assert isinstance(fleet, RayFleetConfig)
    if not is_installed("ray"):
        raise ConfigError(f"{lacking('fleet.kind: ray', 'ray')}; or run the workers as processes: --fleet processes")
    check_machines(config)
    settings_of(config)
    if config.blobs.kind == "shm":
        raise ConfigError("blobs.kind: expected redis or auto with fleet.kind: ray, got shm: actors use Redis")
    if fleet.address != "auto" and not _is_here(fleet.address):
        missing = [
            name
            for name, address in (("kafka.address", kafka_address(config)), ("redis.address", redis_address(config)))
            if address is None
        ]
        if missing:
            raise ConfigError(
                f"{', '.join(missing)}: expected with fleet.address {fleet.address}: the nodes of that cluster do not "
                "reach a Kafka and a Redis that doll up starts on loopback; without fleet.address it starts a Ray, too"
            )


def _is_here(address: str) -> bool:
    """Return whether a host:port belongs to this machine, by binding a socket to the host."""
    try:
        infos = socket.getaddrinfo(address.rpartition(":")[0], 0, type=socket.SOCK_STREAM)
        with socket.socket(infos[0][0], socket.SOCK_STREAM) as probe:
            probe.bind(infos[0][4])
    except OSError:
        return False
    return True


@dataclass(frozen=True)
class ActorCluster:
    """The cluster of a run's actors.

    Attributes:
        address: address of the head, host:port.
        is_own: whether this run has started the cluster, on this machine and only for itself.
        after_term: terms up to this one belong to earlier runs on the same topics.
    """

    address: str
    is_own: bool
    after_term: int = 0


def job_on(config: JobConfig, cluster: ActorCluster, services: Services, run_folder: Path) -> JobConfig:
    """Return the job file for the provisioner, with the addresses of the cluster and of the workers' services.

    If the run has started the cluster, its single node serves as both markets; prices that the job file lacks are taken
    from the table that ships with DOLL.

    Raises:
        ConfigError: the price table does not contain the machine.
    """
    fleet = config.fleet
    assert isinstance(fleet, RayFleetConfig)
    env = {KAFKA_ENV: services.kafka, REDIS_ENV: services.redis, **fleet.env}
    if cluster.after_term:
        env |= {AFTER_TERM_ENV: str(cluster.after_term)}
    changes = {"address": cluster.address, "env": env}
    if not cluster.is_own:
        return config.model_copy(update={"fleet": fleet.model_copy(update=changes)})
    changes |= {"spot": {SPOT_LABEL: _YES}, "on_demand": {ON_DEMAND_LABEL: _YES}}
    if fleet.command == RayFleetConfig(kind="ray").command:
        changes |= {"command": [*fleet.command, "--run-folder", str(run_folder)]}
    plan = with_prices(None, config.plan, None, None, [])
    return config.model_copy(update={"fleet": fleet.model_copy(update=changes), "plan": plan})


def run_provisioner(job: Path, services: Services, run_folder: Path, cluster: ActorCluster) -> int:
    """Provision until the job has finished or a signal arrives, then end all actors; return the exit code.

    Raises:
        DollError: see `ProvisionerProcess`.
    """

    def read() -> JobConfig:
        return job_on(load(job), cluster, services, run_folder)

    setup = ProvisionerSetup(read(), lambda: services, run_folder, machines_of, settings_of, read, job)
    with Interrupts() as interrupts, ProvisionerProcess(setup) as provisioner:
        provisioner.read_history()
        interrupts.graceful = True
        decision = provisioner.run(lambda: interrupts.stop_requested) or provisioner.end_machines()
    if decision.phase == "failed":
        raise ConfigError("; ".join(decision.alarms) or "the provisioner cannot go on")
    return 0 if decision.finished else 1


def machines_of(config: JobConfig, services: Services, run_folder: Path) -> AbstractContextManager[Machines]:
    """Open the machines of the job.

    Raises:
        ConfigError: the fleet cannot be used with the settings of the job file.
    """
    if isinstance(config.fleet, ProcessesFleetConfig):
        return _open_processes(config, config.fleet, services, RunFolder(run_folder))
    return open_machines(config, run_folder)


@contextmanager
def _open_processes(
    config: JobConfig, fleet_config: ProcessesFleetConfig, services: Services, run: RunFolder
) -> Iterator[Machines]:
    """Yield worker processes as machines, on a replayed market that opens now. They end with this process."""
    market, _ = make_market(config, fleet_config, config.seed)
    run.logs.mkdir(parents=True, exist_ok=True)
    run.write_job(config)
    clock = MarketClock()
    clock.open(time.time())

    def spec(instance: Instance) -> RoleSpec:
        arguments = [str(run.job), services.kafka, services.redis, str(run.path), instance.slot]
        return RoleSpec(instance.id, "doll.run.local.roles:worker_role", run.logs / f"{instance.id}.log", arguments)

    def probe(slot: int) -> bool:
        return market.is_up(slot, clock.since(time.time()))

    with ForkServer(run.logs / "forkserver.log") as forks:
        fleet = ProcessFleet(
            forks, spec, run.path, market=market, market_clock=clock, boot_s=fleet_config.boot_s,
            drain_s=config.worker.drain_s, job=config.job,
        )  # fmt: skip
        with closing(fleet):
            yield Machines(fleet, TracePrices(market, clock), LOCAL, probe)


def pass_on(config: JobConfig, run_folder: Path) -> None:
    """Pass this job file to workers that are launched from now on. For other machines, the fleet does this."""
    if isinstance(config.fleet, ProcessesFleetConfig):
        RunFolder(run_folder).write_job(config)
