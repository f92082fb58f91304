"""Control records with what a test cares for; the rest is plausible."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from doll.ledger.balance import Ledger, LedgerReport, Range
from doll.ledger.lineage import UpdatesRecord
from doll.ledger.valid_updates import DurableModel
from doll.records.control import (
    Announce,
    BatchRange,
    DeadLetter,
    Finished,
    Grant,
    Member,
    Served,
    TermStarted,
    Update,
    Welcome,
)


def announce(worker: int, session: int, first: int, until: int, *, partition: int | None = None) -> Announce:
    """Batches of a partition, by default the worker's own."""
    return Announce(
        worker=worker, session=session, runs=(BatchRange(worker if partition is None else partition, first, until),)
    )


def welcome(
    worker: int, *, origin: int = 0, next_batch: int = 0, included: int = 0, leader_epoch: int = -1, **more: Any
) -> Welcome:
    """The Welcome of a worker that serves the partition of its number."""
    served = Served(
        partition=worker, origin=origin, next_batch=next_batch, included=included, leader_epoch=leader_epoch
    )  # fmt: skip
    values: dict[str, Any] = {"term": 1, "process": "me", "session": 1, "fingerprint": ""} | more
    return Welcome(**values, worker=worker, served=(served,))


def grant_of(worker: int, first: int, grant_ids: Sequence[int], **more: Any) -> Grant:
    """A grant of the worker's batches from `first` on, which have the same numbers in the partition of its number."""
    values: dict[str, Any] = {"term": 1, "session": 1, "version": 0, "min_version": 0, "key": "w"} | more
    batches = tuple((worker, first + at) for at in range(len(grant_ids)))
    return Grant(**values, worker=worker, first=first, grant_ids=tuple(grant_ids), batches=batches)


def term_started(
    term: int,
    resumed: int = 0,
    *,
    generation: int = 0,
    origins: Sequence[int] = (0, 0),
    records_per_batch: int = 8,
    time_s: float = 0.0,
) -> TermStarted:
    """The beginning of a term that resumes from version `resumed`."""
    return TermStarted(
        term=term, resumed_version=resumed, origins=tuple(origins), records_per_batch=records_per_batch, time_s=time_s,
        generation=generation,
    )  # fmt: skip


def update(
    term: int,
    version: int,
    *batches: tuple[int, int],
    records_per_batch: int = 8,
    compute_s: float = 0.0,
    **more: Any,
) -> Update:
    """The update that made `version`, from `batches`: worker and number of each, all computed at the version before.

    Args:
        more: further fields of the record.
    """
    members = tuple(
        Member(
            worker=worker, partition=worker, batch=batch, lo=records_per_batch * batch,
            hi=records_per_batch * (batch + 1), n_samples=records_per_batch, base_version=version - 1,
            compute_s=compute_s,
        )
        for worker, batch in batches
    )  # fmt: skip
    values: dict[str, Any] = {"n_samples": records_per_batch * len(members), "loss": 1.0} | more
    return Update(term=term, version=version, members=members, **values)


def finished(term: int, version: int) -> Finished:
    """The end of a job by its stop rule."""
    return Finished(term=term, version=version, reason=f"updates: {version} reached", time_s=0.0)


def dead_letter(partition: int, offset: int, *, whole: bool = True) -> DeadLetter:
    """A refused sample of the record at `offset`; `whole`: the record itself was refused."""
    return DeadLetter(
        worker=partition,
        partition=partition,
        offset=offset,
        reason="no JSON",
        payload=b"x",
        payload_bytes=1,
        whole=whole,
    )


def balance(
    *,
    durable: DurableModel,
    ends: Sequence[int],
    records: Iterable[UpdatesRecord],
    dead_letters: Iterable[DeadLetter],
    present: Sequence[Range] = (),
    lows: Sequence[int] | None = None,
    loss_allowed: bool = False,
    is_whole: bool = False,
) -> LedgerReport:
    """The report of a `Ledger` with its letters."""
    ledger = Ledger(durable, records)
    for letter in dead_letters:
        ledger.add_dead_letter(letter)
    return ledger.report(ends, present=present, lows=lows, loss_allowed=loss_allowed, is_whole=is_whole)
