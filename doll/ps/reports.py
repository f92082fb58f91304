"""What the parameter server reports about its work: a record per update, and its status."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

from doll.ps.engine.engine import Engine
from doll.ps.engine.events import AppliedBatch, AppliedSet, ApplyUpdate
from doll.ps.engine.stuck import shortfall
from doll.records.control import Measures, Member, ServerStatus, Update, WorkerStatus


def update_record(update: ApplyUpdate, *, term: int, num_samples: int, apply_s: float, now: float) -> Update:
    """Lineage of one applied update.

    Args:
        num_samples: what it has learned from.
        apply_s: what it has cost the server.
        now: when it was applied, on the clock of the grants; monotonic seconds.
    """
    batches = [batch for item in update.sets for batch in item.push.batches]
    names = sorted({name for batch in batches for name in batch.metric_sums})
    return Update(
        term=term,
        version=update.version,
        members=tuple(_member(item, batch) for item in update.sets for batch in item.batches),
        n_samples=num_samples,
        loss=_mean((batch.loss_sum for batch in batches), num_samples),
        metrics={name: _mean((batch.metric_sums.get(name, 0.0) for batch in batches), num_samples) for name in names},
        samples_total=update.samples_total,
        batches_total=update.batches_total,
        apply_s=apply_s,
        grant_to_update_s=now
        - min((batch.granted_at_s for item in update.sets for batch in item.batches), default=now),
        time_s=time.time(),
        settled=update.settled,
    )


def server_status(
    engine: Engine, *, leader_since_s: float, stalled_s: float, now: float, measures: Measures
) -> ServerStatus:
    """The engine's state for other processes.

    Args:
        leader_since_s: when this server began its term, Unix seconds.
        stalled_s: for how long no update has been possible, in seconds.
        now: on the engine's clock, monotonic seconds.
    """
    time_s = time.time()
    return ServerStatus(
        term=engine.term, time_s=time_s, leader_since_s=leader_since_s, pid=os.getpid(), version=engine.version,
        durable_version=engine.durable_version, samples_total=engine.samples_total,
        batches_total=engine.batches_total, waiting_batches=engine.num_waiting,
        computing_batches=engine.num_computing, shortfall_batches=shortfall(engine), stalled_s=stalled_s,
        workers=tuple(
            WorkerStatus(
                worker=worker.number, is_live=worker.is_live, session=worker.session, incarnation=worker.incarnation,
                restarts=worker.restarts, market=worker.market, retained_batches=worker.retained,
                lag_records=worker.lag,
                live_since_s=time_s - (now - worker.live_since_s) if worker.is_live else 0.0,
                silent_s=max(0.0, now - worker.last_heard_s) if worker.is_live else 0.0,
                batch_s=worker.batch_s, time_limit_s=engine.time_limit_s(worker), is_stalled=worker.stalled,
            )
            for worker in engine.workers()
        ),
        counters=dict(engine.counters), measures=measures,
        dead_reasons=engine.refusals.reasons.in_order(),
        recent_records=engine.refusals.recent_records, recent_refused=engine.refusals.recent_refused,
    )  # fmt: skip


def _member(item: AppliedSet, batch: AppliedBatch) -> Member:
    push, pushed, size = item.push, batch.pushed, len(item.batches)
    return Member(
        worker=push.worker, batch=pushed.batch, lo=batch.lo, hi=batch.hi, n_samples=pushed.n_samples,
        base_version=push.version if pushed.version < 0 else pushed.version, dead=pushed.dead, gaps=pushed.gaps,
        lost=pushed.lost, dead_samples=pushed.dead_samples, compute_s=pushed.compute_s, fetch_s=push.fetch_s / size,
        store_s=push.store_s / size, wait_s=pushed.wait_s, grant_to_push_s=item.received_at_s - batch.granted_at_s,
        market=push.market, held_back=push.holds_back, set_grant_id=item.grant_id,
        batches=batch.count,
    )  # fmt: skip


def _mean(sums: Iterable[float], count: int) -> float:
    return float(sum(sums)) / count if count else 0.0
