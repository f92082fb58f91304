"""The random world of the engine with the books that `doll audit` reads."""

from __future__ import annotations

import dataclasses
import random

from doll.config.policy import PolicyConfig
from doll.consumers.protocol.worker_core import Compute
from doll.ledger.balance import LedgerReport
from doll.ledger.second_audit import balanced, compared
from doll.ledger.valid_updates import DurableModel
from doll.ps.engine import events as ev
from doll.ps.regrid import regridded
from doll.ps.rollback import rolled_back
from doll.records.control import Member, TermStarted, Update, encode
from engine_world import POLICIES, Process, World
from record_builders import balance


class LedgerWorld(World):
    """A world whose batches know the offsets that they hold, and whose books are those of `doll audit`."""

    def __init__(self, policy: str | PolicyConfig, records_per_batch: int = 2) -> None:
        self.records: list[TermStarted | Update] = []
        self.held: dict[tuple[int, int], tuple[int, ...]] = {}  # offsets that a gradient was computed on, by grant
        # The same by worker and batch: a late push has the number of another grant.
        self.computed: dict[tuple[int, int, int], tuple[int, ...]] = {}
        super().__init__(policy, records_per_batch=records_per_batch)

    def work(self, rng: random.Random) -> None:
        """Let one worker do what it can, and at times let a checkpoint be stored, time pass, or the worker die."""
        worker = rng.randrange(self.settings.num_workers)
        for process in self.processes[worker][:1]:
            for _ in range(3):
                self.read(process)
                self.send(process)
                self.receive_next(process)
                self.compute(process)
        self.high[worker] += rng.randrange(3)
        if rng.random() < 0.1:
            self.store_checkpoint()
        if rng.random() < 0.05:
            self.tick(0.7)
        if rng.random() < 0.02:
            self.kill_worker(worker)
            self.start_process(worker)

    def start_server(self) -> None:
        super().start_server()
        self.records.append(
            TermStarted(
                term=self.term, resumed_version=self.engine.version, origins=tuple(self.origins),
                records_per_batch=self.settings.records_per_batch, time_s=self.now,
                grid=len(self.engine.start.earlier_grids), rolled_back_to=self.engine.start.rolled_back_to,
            )
        )  # fmt: skip

    def regrid(self, policy: str, records_per_batch: int) -> None:
        """`doll regrid` at the newest checkpoint, where there is one. Processes live on, and so do their messages."""
        self.kill_server()
        if self.stored is None:
            return
        self.policy = POLICIES[policy]
        self.settings = dataclasses.replace(self.settings, records_per_batch=records_per_batch)
        self.stored = regridded(self.stored, records_per_batch, self.policy.name)
        self.origins = list(self.stored.origins)
        self.whole_at = {self.stored.version: [set() for _ in self.origins]}

    def rollback(self, earlier: ev.EngineSnapshot, *, skip: bool) -> None:
        """`doll rollback` to a checkpoint that the newest one has gone through. Processes live on, as in a regrid."""
        self.kill_server()
        assert self.stored is not None
        self.term += 1
        size, policy = self.settings.records_per_batch, self.policy.name
        self.stored = rolled_back(earlier, self.stored, size, policy, term=self.term, skip=skip)
        self.origins = list(self.stored.origins)
        self.whole_at = {self.stored.version: [set() for _ in self.origins]}

    def acknowledge(self, process: Process, partition: int, until: int) -> None:
        """A process of an earlier grid may still acknowledge what is durable in that."""
        assert self.stored is not None
        grids = self.stored.earlier_grids
        if (grid := process.protocol.grid) >= len(grids):
            super().acknowledge(process, partition, until)
        elif not self.stored.rollbacks:  # else it may have been durable in what was left
            assert until <= grids[grid].applied[partition]

    def compute(self, process: Process, *, blob_lost: bool = False, end_set: bool = False) -> None:
        if process.orders and isinstance(order := process.orders[0], Compute):
            for number, batch in zip(order.grant.grant_ids, order.batches, strict=True):
                self.held[order.grant.term, number] = batch.data
                self.computed[order.grant.term, process.worker, batch.number] = batch.data
        super().compute(process, blob_lost=blob_lost, end_set=end_set)

    def perform(self, action: ev.EngineAction) -> ev.Event | None:
        if isinstance(action, ev.ApplyUpdate):
            members = []
            for item in action.sets:
                for batch in item.batches:
                    offsets = self.held.get((self.term, batch.pushed.grant_id), ())
                    offsets = offsets or self.computed[self.term, item.push.worker, batch.pushed.batch]
                    members.append(
                        Member(
                            worker=item.push.worker, partition=batch.partition, batch=batch.number, lo=offsets[0],
                            hi=offsets[-1] + 1, n_samples=len(offsets), base_version=item.push.version, cut=batch.cut,
                        )
                    )  # fmt: skip
            self.records.append(
                Update(
                    term=self.term, version=action.version, members=tuple(members),
                    n_samples=sum(member.n_samples for member in members), loss=1.0, metrics={},
                    samples_total=action.samples_total, batches_total=action.batches_total, time_s=self.now,
                )
            )  # fmt: skip
        return super().perform(action)

    def audit(self) -> LedgerReport:
        assert self.stored is not None
        durable = DurableModel(
            term=self.term, version=self.stored.version, applied=self.stored.applied,
            origins=tuple(self.origins), records_per_batch=self.settings.records_per_batch,
            left_out=self.stored.left_out, earlier_grids=self.stored.earlier_grids, rollbacks=self.stored.rollbacks,
        )  # fmt: skip
        report = balance(durable=durable, ends=self.high, records=self.records, dead_letters=[])
        # A checkpoint that a command has made is not in the topics before a server has begun with it.
        if report.ok and any(record.term >= self.term for record in self.records):
            assert isinstance(self.records[0], TermStarted)
            first = [*self.records[0].origins, *[0] * (len(self.high) - len(self.records[0].origins))]
            again = balanced(
                [encode(record) for record in self.records], [], list(zip(first, self.high, strict=True)),
                lambda partition, lo, hi: range(lo, hi), until=durable.version,
            )  # fmt: skip
            assert compared(again, report).problems == (), "the second audit"
        return report
