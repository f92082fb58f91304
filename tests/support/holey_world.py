"""A world whose streams have holes: offsets without a record, which compacted topics and transactions leave."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from doll.config.policy import PolicyConfig
from doll.consumers.intake.batching import RawBatch
from doll.consumers.protocol.skipped_batches import SkippedRange
from doll.consumers.protocol.worker_core import Batch
from doll.ps.engine import events as ev
from engine_world import Applied, Process, World

RECORDS = 14  # between two holes
HOLE = 40  # offsets: 20 batches
LEAST = 6  # batches that are skipped as one; for `doll.consumers.intake.batching.MIN_RANGE`


class HoleyWorld(World):
    """Each stream has a hole of `HOLE` offsets behind every `RECORDS` records."""

    def __init__(self, policy: PolicyConfig, **world: Any) -> None:
        self.skipped = 0
        self.unread: dict[str, Iterator[RawBatch[int]]] = {}
        super().__init__(policy, **world)

    def serve(self, process: Process) -> None:
        self.unread.pop(process.name, None)
        super().serve(process)

    def read(self, process: Process) -> None:
        core, batcher = process.core, process.batcher
        if core is None or batcher is None or process.paused or process.is_dead:
            return
        batcher._align = self.policy.batches_per_push  # as `WorkerRuntime` makes it
        worker = process.worker
        if core.served[core.worker].skipped:
            if (one := core.next_of_skipped(core.worker, self.now, self.settings.records_per_batch)) is not None:
                self.do(
                    process,
                    core.batch_ready(
                        Batch(one.first, None, 0, self.now, (), one.gaps, one.lost, partition=process.worker)
                    ),
                )
            return
        while core.has_room:
            raw = next(self.unread.get(process.name, iter(())), None)
            if raw is not None:
                if raw.count > 1:
                    actions = core.skip(
                        core.worker, SkippedRange(raw.number, raw.number + raw.count, tuple(raw.gaps), tuple(raw.lost))
                    )
                else:
                    batch = Batch(
                        raw.number, None, len(raw.values), self.now, gaps=tuple(raw.gaps), partition=process.worker
                    )
                    actions = core.batch_ready(batch)
                self.do(process, actions)
                return
            offset = process.position
            if offset >= self.high[worker]:
                return
            at = (offset - self.origins[worker]) % (RECORDS + HOLE)
            if at < RECORDS:
                process.position += 1
                self.unread[process.name] = batcher.feed([offset], [offset])
            else:
                process.position += RECORDS + HOLE - at
                self.high[worker] = max(self.high[worker], process.position)
                self.unread[process.name] = batcher.skip_to(process.position)

    def perform(self, action: ev.EngineAction) -> ev.Event | None:
        more = super().perform(action)
        if isinstance(action, ev.ApplyUpdate) and action.sets and action.sets[0].batches[:1]:
            (first, *others) = (batch for item in action.sets for batch in item.batches)
            if first.count > 1:
                assert others == []
                size = self.settings.records_per_batch
                assert sum(hi - lo for lo, hi in first.pushed.gaps) == first.hi - first.lo == first.count * size
                (number, batch, base) = self.updates[-1].members[0]
                members = tuple((number, batch + i, base) for i in range(first.count))
                self.updates[-1] = Applied(self.term, action.version, members)
                self.skipped += 1
        return more

    def add_up(self, update: ev.ApplyUpdate) -> None:
        (item, *_) = update.sets
        if item.batches and not item.push.key:  # a skip, which may be left with one batch of its range
            first = item.batches[0].number
            self.whole[item.push.worker] |= set(range(first, first + item.batches[0].count))
            self.host.apply(update)
        else:
            super().add_up(update)

    def check_progress(self) -> None:
        """Only batches that make no group are left, although a hole may be between the batches of a group."""
        r, n = self.settings.records_per_batch, self.settings.num_workers
        complete = [(high - origin) // r for high, origin in zip(self.high, self.origins, strict=True)]
        applied = self.engine.snapshot(self.now).applied
        left = [c - a for c, a in zip(complete, applied, strict=True)]
        if self.policy.name == "doll":
            assert sum(left) < self.policy.batches_per_update(n)
        elif self.policy.name in ("asp", "vap"):
            assert sum(left) == 0
        else:
            assert any(count < self.policy.batches_per_push for count in left), left

    def check_prefixes(self) -> None:
        """Every batch of the lineage once, each stream a prefix."""
        applied = [0] * self.settings.num_workers
        for update in self.lineage():
            for worker, batch, base in update.members:
                assert batch == applied[worker]
                applied[worker] += 1
                assert base == update.version - 1 or not self.engine.policy.exact_version
        assert tuple(applied) == self.engine.snapshot(self.now).applied
