"""The fleet port on this machine: an instance is a worker process, forked from a process that has already loaded torch.

With a `SpotMarket` the fleet is a spot market on one machine. A spot launch is refused while the slot's market has no
machine. At the end of an up interval, the process gets SIGTERM and drains; at the end of the notice, it gets SIGKILL.
Without notice, it only gets SIGKILL. Processes belong to the fork server and end with it.

A worker of several machines is one process. It starts the processes of its stages, and ends if one of them ends. It is
billed as several machines, and ends when the market takes one of them. Launches are stored in a small file. After a
crash of the controller, a new fleet with the same fork server continues with these instances.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from doll.errors import ConfigError
from doll.local.forks import ForkServer, Role
from doll.local.supervisor import RoleSpec
from doll.process.files import write_atomically
from doll.provisioner.fleets.orders import identity
from doll.provisioner.fleets.port import EndReason, Instance, InstanceState, LaunchError, LaunchFailure, Order
from doll.provisioner.traces.market import MarketClock, SpotMarket
from doll.records.bounded import json_value, read_text, short

BOOT_ENV: Final = "DOLL_BOOT_DELAY_S"
_KEPT_S: Final = 3600.0
_MOST_BYTES: Final = 64_000_000
_GRACE_S: Final = 1.0  # after its time to drain


@dataclass
class Machine:
    """An instance and its process.

    Attributes:
        preempted: whether its owner has ended it or given notice.
        killed: whether SIGKILL ended it while it was alive.
        exit_code: exit code, negative for a signal; None while it runs, or if its end was not observed.
        bought_s: time of its launch, in wall seconds since the market's opening.
        kill_at_s: Unix time at which it will be killed; None if no kill is planned.
    """

    instance: Instance
    pid: int | None = None
    preempted: bool = False
    without_notice: bool = False
    killed: bool = False
    exit_code: int | None = None
    bought_s: float = 0.0
    kill_at_s: float | None = None


@dataclass(eq=False, repr=False)
class ProcessFleet:
    """A `Fleet` of forked workers. Raises ConfigError if its file of instances cannot be read.

    Args:
        forks: fork server that starts the processes; only the thread that calls this fleet may use it.
        spec: process to start for an instance. The identity is added to the environment of the process, whose name is
            the instance's id.
        market: market that states when spot is available. None: spot is always available.
        boot_s: wall seconds from a launch until the worker works. The process starts at once and joins the job after
            this time, so that a busy machine does not lengthen boots. No instance boots before the market has opened.
        drain_s: seconds from SIGTERM to SIGKILL if the provisioner ends an instance.
        name: prefix of the ids; fleets that share a fork server have different prefixes.
        clock: function that returns Unix seconds.
        job: job of the workers, if several jobs use the folder one after the other.
    """

    forks: ForkServer
    spec: Callable[[Instance], RoleSpec]
    folder: Path
    _: KW_ONLY
    market: SpotMarket | None = None
    market_clock: MarketClock = field(default_factory=MarketClock)
    boot_s: float = 0.0
    name: str = "p"
    drain_s: float = 8.0
    clock: Callable[[], float] = time.time
    job: str = ""

    def __post_init__(self) -> None:
        self._path = self.folder / "instances.json"
        self._machines: dict[str, Machine] = {}
        self._roles: dict[str, Role] = {}
        self._changed = False
        self._load()

    def launch(self, order: Order) -> Instance:
        self.poll()
        id_ = f"{self.name}-{order.slot}-{order.incarnation}-{order.market.replace('_', '-')}-{order.attempt}"
        id_ += f"-{order.run}" if order.run else ""
        if id_ not in self._machines:
            self._machines[id_] = self._buy(id_, order)
            self._changed = True
            self._save()  # written before the process starts, so that the file has every running process
            self.poll()
        return self._machines[id_].instance

    def instances(self) -> Sequence[Instance]:
        self.poll()
        now_s = self.clock()
        instances = [machine.instance for machine in self._machines.values()]
        return [instance for instance in instances if instance.ended_s is None or now_s - instance.ended_s <= _KEPT_S]

    def terminate(self, ids: Collection[str]) -> None:
        now_s = self.clock()
        for id_ in ids:
            machine = self._machines.get(id_)
            if machine is None or not machine.instance.is_alive:
                continue
            self._put(machine, state=InstanceState.ENDING)
            kill_at_s = now_s + self.drain_s + _GRACE_S
            machine.kill_at_s = min(kill_at_s, machine.kill_at_s or math.inf)
            if id_ in self._roles:
                self._roles[id_].terminate()
        self.poll()

    def close(self) -> None:
        self._save()

    def poll(self) -> None:
        """Carry out all events that are due: boots, notices, kills, ends. Call this several times a second. Raises
        ServiceUnavailableError if the fork server has ended."""
        now_s = self.clock()
        for id_, machine in self._machines.items():
            if machine.instance.state is not InstanceState.ENDED:
                self._advance(id_, machine, now_s)
        self._save()

    @property
    def machines(self) -> tuple[Machine, ...]:
        """All machines that have ever existed, in the order of their launches. Callers must not change them."""
        return tuple(self._machines.values())

    def wait_until_ended(self, timeout_s: float) -> bool:
        """Wait after `terminate`, and return whether all processes have ended within this time."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            self.poll()
            running = [role for id_, role in self._roles.items() if role.exitcode is None]
            if not running or time.monotonic() >= deadline_s:
                return not running
            running[0].wait(0.05)

    def _buy(self, id_: str, order: Order) -> Machine:
        now_s = self.clock()
        # Each slot has its own intervals, so each slot is a pool: one without capacity implies nothing for the others.
        pool = f"{'local' if self.market is None else self.market.name}/{order.slot}"
        bought_s = self.market_clock.since(now_s)
        no_capacity = order.market == "spot" and pool in order.avoid
        if order.market == "spot" and self.market is not None:
            if not 0 <= order.slot < self.market.num_slots:
                raise LaunchError(
                    f"expected a slot of 0 to {self.market.num_slots - 1}, got {order.slot}",
                    failure=LaunchFailure.CONFIG, code="NoSuchSlot",
                )  # fmt: skip
            no_capacity = no_capacity or not self.market.is_up(order.slot, bought_s)
        if no_capacity:
            raise LaunchError(
                f"worker {order.slot}, incarnation {order.incarnation}: pool {pool} has no machine on {order.market}",
                failure=LaunchFailure.CAPACITY, code="InsufficientInstanceCapacity", pools=[pool],
            )  # fmt: skip
        instance = Instance(
            id=id_, slot=order.slot, incarnation=order.incarnation, market=order.market, pool=pool,
            state=InstanceState.PENDING, launched_s=now_s, job=self.job, machines=order.machines,
        )  # fmt: skip
        return Machine(instance, bought_s=bought_s)

    def _advance(self, id_: str, machine: Machine, now_s: float) -> None:
        opened_s = self.market_clock.opened_s
        if opened_s is not None and machine.instance.market == "spot" and not machine.preempted:
            self._look_at_the_market(id_, machine, opened_s, now_s)
        instance = machine.instance
        if id_ in self._roles:
            self._see(id_, machine, now_s)
        elif machine.pid is None and instance.state is InstanceState.PENDING:
            self._start(id_, machine)
        else:
            self._end(machine, now_s)  # its end was not observed
            return
        booted = opened_s is None or now_s >= instance.launched_s + self.boot_s
        if booted and machine.instance.state is InstanceState.PENDING:
            self._put(machine, state=InstanceState.RUNNING)

    def _look_at_the_market(self, id_: str, machine: Machine, opened_s: float, now_s: float) -> None:
        """Preempt the machine, with or without notice, if the market has no machine for it now."""
        if self.market is None:
            return
        interval = self.market.interval(machine.instance.slot, machine.bought_s)
        if now_s < opened_s + interval.end_s:
            return
        machine.preempted, machine.without_notice, self._changed = True, interval.without_notice, True
        machine.kill_at_s = min(opened_s + interval.taken_s, machine.kill_at_s or math.inf)
        if not interval.without_notice:
            self._put(machine, notice_s=opened_s + interval.taken_s)
            if id_ in self._roles:
                self._roles[id_].terminate()

    def _start(self, id_: str, machine: Machine) -> None:
        instance = machine.instance
        spec = self.spec(instance)
        boot_s = 0.0 if self.market_clock.opened_s is None else self.boot_s
        env = {**spec.env, **identity(instance, id_), BOOT_ENV: f"{boot_s:g}"}
        role = self.forks.launch(dataclasses.replace(spec, name=id_, env=env))
        self._roles[id_] = role
        machine.pid = role.pid
        self._changed = True

    def _see(self, id_: str, machine: Machine, now_s: float) -> None:
        role = self._roles[id_]
        code = role.poll()
        if code is not None:
            machine.exit_code = code
            self._end(machine, now_s)
        elif machine.kill_at_s is not None and now_s >= machine.kill_at_s and not machine.killed:
            machine.killed = True
            role.kill()
            self._put(machine, state=InstanceState.ENDING)

    def _end(self, machine: Machine, now_s: float) -> None:
        terminated = machine.instance.state is InstanceState.ENDING and not (machine.preempted and machine.killed)
        end = EndReason.TERMINATED if terminated else EndReason.INTERRUPTED if machine.preempted else EndReason.FAILED
        self._put(machine, state=InstanceState.ENDED, ended_s=now_s, end_reason=end)

    def _put(self, machine: Machine, **changes: Any) -> None:
        machine.instance = dataclasses.replace(machine.instance, **changes)
        self._changed = True

    def _load(self) -> None:
        if not self._path.exists():
            return
        roles = {role.name: role for role in self.forks.running()}
        try:
            kept = msgspec.convert(json_value(read_text(self._path, max_bytes=_MOST_BYTES)), list[Machine])
            self._machines = {machine.instance.id: machine for machine in kept}
        except (OSError, ValueError) as exc:
            raise ConfigError(
                f"{self._path}: expected the instances of this run, cannot read them ({short(repr(exc))}); remove the "
                "file if nothing of the run is left"
            ) from exc
        now_s = self.clock()
        for id_, machine in self._machines.items():
            if id_ in roles:
                self._roles[id_] = roles[id_]
                machine.pid = roles[id_].pid  # it may have been started by a process that ended before it recorded this
            elif machine.pid is not None and machine.instance.state is not InstanceState.ENDED:
                self._end(machine, now_s)

    def _save(self) -> None:
        if not self._changed:
            return
        content = [dataclasses.asdict(machine) for machine in self._machines.values()]
        write_atomically(self._path, json.dumps(content) + "\n")
        self._changed = False
