"""The machines of a spot run: a controller with a fleet of worker processes and a replayed market.

This module uses one clock, which stands still until the market opens, because the time that a laptop takes to start its
processes is not part of the market. Times are times of this machine. Market time runs `fleet.speed_up` times faster,
and is the time that is billed (see `doll.provisioner.traces.market`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

from doll.kafka.publisher import Publisher
from doll.kafka.reader import JobRecords
from doll.provisioner.billing import LOCAL, bill
from doll.provisioner.controller import Controller
from doll.provisioner.decision import Decision
from doll.provisioner.fleets.processes import Machine, ProcessFleet
from doll.provisioner.state_store import FileStateStore
from doll.provisioner.status import instance_text
from doll.provisioner.traces.market import MarketClock, TracePrices
from doll.records.control import AnyRecord, Leave, Welcome
from doll.run.local.context import LocalRun

from doll_lab.spot.preparation import SpotRun
from doll_lab.spot.spot_history import MarketTimeline


class PausedClock:
    """Unix seconds that stand still until `start` is called, then advance at the pace of the real clock."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._begin_s = clock()
        self._started_s: float | None = None

    def start(self, ago_s: float = 0.0) -> None:
        """Start now, or as if started `ago_s` seconds ago. Only the first call has an effect."""
        if self._started_s is None:
            self._started_s = self._clock() - ago_s

    @property
    def runs(self) -> bool:
        return self._started_s is not None

    def __call__(self) -> float:
        return self.at(self._clock())

    def at(self, real_s: float) -> float:
        """Return the time of this clock at a time of the real clock, in Unix seconds."""
        return self._begin_s if self._started_s is None else self._begin_s + max(0.0, real_s - self._started_s)


class LeaveReporter:
    """Sends Leave for workers whose machine was killed: the owner of the machine knows this before the lease ends."""

    def __init__(self, publisher: Publisher, topic: str) -> None:
        self._publisher = publisher
        self._topic = topic
        self._sessions: dict[str, tuple[int, int]] = {}  # worker and session, by the name of its machine
        self._reported: set[str] = set()

    def feed(self, record: AnyRecord) -> None:
        """Process a record of the job: Welcome names the worker of a machine."""
        if isinstance(record, Welcome):
            self._sessions[record.process.partition(":")[0]] = (record.worker, record.session)

    def report(self, machines: Sequence[Machine]) -> None:
        """Send Leave for machines that were killed since the last call."""
        for machine in machines:
            id_ = machine.instance.id
            if machine.killed and machine.instance.ended_s is not None and id_ not in self._reported:
                self._reported.add(id_)
                if id_ in self._sessions:
                    worker, session = self._sessions[id_]
                    leave = Leave(worker=worker, session=session, cause="machine taken")
                    self._publisher.send(self._topic, leave, key=str(worker).encode())
        self._publisher.poll()

    def close(self) -> None:
        self._publisher.close()


class SpotMachines:
    """The machines of a run: launches worker processes as machines, and terminates them at the end.

    Attributes:
        clock: clock of the run; it starts when the market opens.
        timeline: moves and points since the market opened.
        decision: last decision of the controller; None before the first turn.

    Raises:
        ServiceUnavailableError: Kafka does not answer.
    """

    def __init__(self, run: LocalRun, spot_run: SpotRun) -> None:
        config, folder, services = run.config, run.folder.path, run.stack.services
        self.clock = PausedClock()
        self.timeline = MarketTimeline()
        self.decision: Decision | None = None
        self._spot_run = spot_run
        self._market = spot_run.market
        self._market_clock = MarketClock()
        self._prices = TracePrices(self._market, self._market_clock)
        self._drain_s = config.worker.drain_s
        self._fleet = ProcessFleet(
            run.forks, run.instance, folder, market=self._market, market_clock=self._market_clock,
            boot_s=spot_run.fleet.boot_s, drain_s=self._drain_s, clock=self.clock,
        )  # fmt: skip
        self._controller = Controller(
            spot_run.settings, self._fleet, self._prices, LOCAL, FileStateStore(folder, config.job),
            probe=lambda slot: self._market.is_up(slot, self._market_clock.since(self.clock())),
        )  # fmt: skip
        self._job_records = JobRecords(config, services, {})
        self._job_records.read_history()  # skip the records of an earlier run on the same topics
        self._leave_reporter = LeaveReporter(Publisher(config, services, linger_ms=0), config.topic("events"))

    def poll(self) -> None:
        """Apply preemptions and ends of processes, and read the job's records. Call it several times per second."""
        self._fleet.poll()
        for timed_record in self._job_records.poll(0.0):
            self._controller.observed.feed(timed_record.record, self.clock.at(timed_record.at_s))
            self._leave_reporter.feed(timed_record.record)
        self._leave_reporter.report(self._fleet.machines)

    def turn(self, *, draining: bool = False) -> Decision:
        """Run one turn of the controller."""
        self.decision = self._controller.turn(self.clock(), draining=draining)
        if self.clock.runs:
            self.timeline.feed(self.decision)
        return self.decision

    def open_market(self, delivered: float) -> None:
        """Open the market and start the clock at the time of the first of the `delivered` samples of the source."""
        rates = self._spot_run.settings.rates_per_s
        ready_rate = sum(float(rates[slot]) for slot in self.ready_slots)
        self._market_clock.open(self.clock())
        self.clock.start(ago_s=delivered / max(ready_rate, float(rates.min())))

    def close(self) -> None:
        """Terminate all machines and compute the last bill."""
        if not self.clock.runs:
            self.clock.start()  # by this clock, the fleet kills processes that ignore SIGTERM
        self.turn(draining=True)
        self._fleet.wait_until_ended(self._drain_s + 5.0)
        self.turn(draining=True)  # the last bill
        self._fleet.close()
        self._job_records.close()
        self._leave_reporter.close()

    @property
    def machines(self) -> tuple[Machine, ...]:
        """All machines of the run, in the order of their launches."""
        return self._fleet.machines

    @property
    def preemptions(self) -> int:
        return sum(machine.preempted for machine in self._fleet.machines)

    @property
    def opened_s(self) -> float | None:
        """The time on the run's clock when the market opened; None before."""
        return self._market_clock.opened_s

    @property
    def ready_slots(self) -> set[int]:
        """Return the slots whose worker is ready."""
        if self.decision is None:
            return set()
        return {instance.slot for instance in self.decision.alive if instance.id in self.decision.ready}

    @property
    def all_ready(self) -> bool:
        """Return whether every slot has a ready worker, or waits for spot as planned."""
        if self.decision is None or self.decision.phase != "run":
            return False
        waiting = {
            slot
            for slot, wanted in enumerate(self.decision.markets)
            if wanted == "spot" and not self._market.is_up(slot, 0.0)
        }
        return self.ready_slots | waiting == set(range(self._market.num_slots))

    def pids(self) -> dict[str, int]:
        """Return the running processes, by the names of their workers."""
        return {
            f"worker-{machine.instance.slot}.{machine.instance.incarnation}": machine.pid
            for machine in self._fleet.machines
            if machine.pid is not None and machine.instance.ended_s is None
        }

    def text(self, slot: int) -> str:
        """Describe the machines of a slot in words, and whether spot is available to it."""
        now_s = self.clock()
        ready = self.decision.ready if self.decision is not None else ()
        texts = [
            instance_text(
                instance.market, instance.incarnation, instance.state, is_ready=instance.id in ready,
                has_notice=instance.notice_s is not None, age_s=now_s - instance.launched_s,
            )
            for instance in (machine.instance for machine in self._fleet.machines)
            if instance.slot == slot and instance.ended_s is None
        ]  # fmt: skip
        available = self._market.is_up(slot, self._market_clock.since(now_s))
        return f"{' + '.join(texts) or 'none'}{'' if available else ' (no spot available)'}"

    def usd_until(self, end_s: float) -> float:
        """Return the cost of all machines until a time of the run's clock, computed as in predictions and Eq. (16)."""
        instances = [machine.instance for machine in self._fleet.machines if machine.instance.launched_s < end_s]
        ended = [dataclasses.replace(instance, ended_s=min(instance.ended_s or end_s, end_s)) for instance in instances]
        return bill(ended, self._prices.series, LOCAL, end_s).usd
