"""Ending all machines of a job. It needs the fleet and the lease only: neither Kafka nor Redis, prices nor a plan.

What is known of the job is its provisioner's state file, where there is one: bills and launches continue in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from doll import telemetry
from doll.config import JobConfig
from doll.errors import CheckpointError, ConfigError, ServiceUnavailableError
from doll.provisioner.controller import Controller
from doll.provisioner.decision import Decision
from doll.provisioner.fleets.port import InstanceState
from doll.provisioner.lease import Lease
from doll.provisioner.machines import Machines
from doll.provisioner.planning.state import PlannerSettings
from doll.provisioner.settings import ControllerSettings
from doll.provisioner.state_store import StateStore

TURN_S: Final = 2.0
TIMEOUT_S: Final = 900.0

log = telemetry.get_logger(__name__)


def drain(
    config: JobConfig, machines: Machines, lease: Lease, state_store: StateStore, wait: Callable[[float], bool],
    *, clock: Callable[[], float] = time.time,
) -> Decision | None:  # fmt: skip
    """End all instances of the job and wait until they are gone.

    Args:
        lease: claimed already, so that a provisioner that runs launches nothing more.
        wait: waits for so many seconds; False: a stop was requested.
        clock: Unix seconds.

    Returns:
        The last decision; None: a stop was requested.

    Raises:
        FencedError: another provisioner has taken over.
        ServiceUnavailableError: some are still there, or the fleet has not answered, after `TIMEOUT_S`.
    """
    telemetry.configure(process="provisioner")
    controller = Controller(
        _no_plan(config), machines.fleet, machines.prices, machines.billing, _KnownState(state_store),
        check_lease=lease.check, job=config.job,
    )  # fmt: skip
    end_s = clock() + TIMEOUT_S
    while True:
        decision = controller.turn(clock(), draining=True)
        for result in decision.actions:
            log.info("action", what=result.text())
        if decision.finished:
            lease.end("ended")  # so that a standby ends too
            return decision
        if clock() > end_s:
            left = ", ".join(
                instance.id for instance in decision.instances if instance.state is not InstanceState.ENDED
            )
            raise ServiceUnavailableError(
                f"instances not terminated after {TIMEOUT_S:g} s: {left or '; '.join(decision.alarms)}; check them by "
                "hand"
            )
        if not wait(TURN_S):
            return None


def _no_plan(config: JobConfig) -> ControllerSettings:
    """Settings of a controller that plans nothing."""
    return ControllerSettings(
        planner=PlannerSettings(samples=1.0, batch_size=config.data.batch_size, deadline_s=1.0),
        rates_per_s=np.ones(config.data.workers),
        machines_per_worker=config.machines_per_worker,
    )


class _KnownState:
    """The state store of a provisioner that ran before. Without its state nothing is saved, since a drain has not read
    the topics: when the job's clock began, and what was spent, is in them. A full disk keeps no machine alive."""

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._is_known = store.load() is not None

    def load(self) -> dict[str, Any] | None:
        return self._store.load()

    def save(self, kept: Mapping[str, Any]) -> None:
        if self._is_known:
            self._try(self._store.save, kept)

    def append(self, entry: Mapping[str, Any]) -> None:
        self._try(self._store.append, entry)

    def _try(self, write: Callable[[Mapping[str, Any]], None], value: Mapping[str, Any]) -> None:
        try:
            write(value)
        except (ConfigError, CheckpointError) as error:
            log.warning("drain_not_noted", reason=str(error))
