"""What a provisioner gets from outside its package: worker processes as machines."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from doll.config import JobConfig, ProcessesFleetConfig
from doll.local.forks import ForkServer
from doll.local.supervisor import RoleSpec
from doll.provisioner.billing import LOCAL
from doll.provisioner.fleets.port import Instance
from doll.provisioner.fleets.processes import ProcessFleet
from doll.provisioner.machines import Machines, open_machines
from doll.provisioner.traces.market import MarketClock, TracePrices, make_market
from doll.run.folder import RunFolder
from doll.services import Services


@contextmanager
def machines_of(config: JobConfig, services: Services, run_folder: Path) -> Iterator[Machines]:
    """The machines of the job.

    Raises:
        ConfigError: the fleet cannot be used as the job file describes it.
    """
    with ExitStack() as stack:
        if isinstance(config.fleet, ProcessesFleetConfig):
            yield _processes(config, config.fleet, services, RunFolder(run_folder), stack)
        else:
            yield stack.enter_context(open_machines(config, run_folder))


def _processes(
    config: JobConfig, fleet_config: ProcessesFleetConfig, services: Services, run: RunFolder, stack: ExitStack
) -> Machines:
    """Worker processes of this machine on a replayed market, which opens now. They end with this process."""
    market, _ = make_market(config, fleet_config, config.seed)
    run.logs.mkdir(parents=True, exist_ok=True)
    run.write_job(config)
    forks = stack.enter_context(ForkServer(run.logs / "forkserver.log"))
    clock = MarketClock()
    clock.open(time.time())

    def spec(instance: Instance) -> RoleSpec:
        arguments = [str(run.job), services.kafka, services.redis, str(run.path), instance.slot]
        return RoleSpec(instance.id, "doll.run.local.roles:worker_role", run.logs / f"{instance.id}.log", arguments)

    fleet = ProcessFleet(
        forks, spec, run.path, market=market, market_clock=clock, boot_s=fleet_config.boot_s,
        drain_s=config.worker.drain_s, job=config.job,
    )  # fmt: skip
    stack.callback(fleet.close)
    return Machines(
        fleet, TracePrices(market, clock), LOCAL, probe=lambda slot: market.is_up(slot, clock.since(time.time()))
    )


def pass_on(config: JobConfig, run_folder: Path) -> None:
    """Let workers that are launched from now on read this job file; on machines elsewhere the fleet's owner does so."""
    if isinstance(config.fleet, ProcessesFleetConfig):
        RunFolder(run_folder).write_job(config)
