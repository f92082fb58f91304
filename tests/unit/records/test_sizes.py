"""The longest control records of a job with 1,000 workers and partitions fit into Kafka's default limit of 1 MB."""

from __future__ import annotations

import random

import pytest
from doll.records.control import (
    Announce,
    AnyRecord,
    BatchRange,
    DeadLetter,
    Durable,
    Limit,
    Measures,
    Member,
    ProvisionDecision,
    Push,
    PushedBatch,
    Served,
    ServerStatus,
    Skip,
    TermStarted,
    Update,
    Welcome,
    WorkerStatus,
    decode,
    encode,
)
from doll.records.event_times import EventTimes
from doll.records.record_sizes import STATUS_LIMIT_BYTES, fitted, status_bytes, update_bytes
from msgspec.structs import replace

LIMIT_BYTES = 1_048_588 - 100  # max.message.bytes of a record batch, and what surrounds a record in it
N = 1_000
OFFSET, BATCH, VERSION, COUNT = 2**40, 2**33, 10**6, 10**9
TIME_S = 1_700_000_000.123
TIMES = EventTimes(1_700_000_000_123, tuple(range(2**32, 2**32 + 8)), 64, 64)


def member(number: int, dead: tuple[int, ...] = ()) -> Member:
    return Member(
        worker=number, partition=number, batch=BATCH, lo=OFFSET, hi=OFFSET + 64, n_samples=64, base_version=VERSION,
        dead=dead, compute_s=0.0123, fetch_s=0.0123, store_s=0.0123, wait_s=0.0123, grant_to_push_s=0.0123,
        market="on_demand", set_grant_id=BATCH, loss_sum=123.456, shared_loss=0.123, times=TIMES,
    )  # fmt: skip


def worker(number: int) -> WorkerStatus:
    return WorkerStatus(
        worker=number, is_live=True, session=COUNT, incarnation=1000, restarts=1000, live_since_s=TIME_S,
        silent_s=0.123, market="on_demand", retained_batches=1000, lag_records=COUNT, control="redis", batch_s=0.0123,
        time_limit_s=30.0, is_stalled=True,
    )  # fmt: skip


STATUS = ServerStatus(
    term=3, time_s=TIME_S, leader_since_s=TIME_S, pid=99_999, version=VERSION, durable_version=VERSION,
    samples_total=COUNT, batches_total=COUNT, waiting_batches=COUNT, computing_batches=COUNT, shortfall_batches=0,
    stalled_s=0.0, workers=tuple(map(worker, range(N))), counters={f"counter_{n}_total": COUNT for n in range(50)},
    measures=Measures(staleness=dict.fromkeys(range(200), COUNT)),
    limit=Limit(
        kind="partition", worker=N, partitions=tuple(range(N, N + 8)), num_partitions=N, unread=OFFSET, share=0.9
    ),
)  # fmt: skip

RECORDS: dict[str, AnyRecord] = {
    "status": STATUS,
    "term": TermStarted(
        term=3, resumed_version=VERSION, origins=(OFFSET,) * N, records_per_batch=64, time_s=TIME_S, run_id="a" * 16
    ),
    "welcome to all partitions": Welcome(
        term=3, worker=0, process="x" * 100, session=3, fingerprint="x" * 10_000,
        served=tuple(
            Served(partition=n, origin=OFFSET, next_batch=BATCH, included=BATCH, leader_epoch=1000) for n in range(N)
        ),
    ),
    "durable": Durable(term=3, worker=0, until=dict.fromkeys(range(N), BATCH), batches=COUNT),
    "announce": Announce(worker=0, session=3, runs=tuple(BatchRange(n, BATCH, BATCH + 32) for n in range(N))),
    "update of a batch of each": Update(
        term=3, version=VERSION, members=tuple(map(member, range(N))), n_samples=COUNT, loss=0.5,
        settled=tuple((n, BATCH) for n in range(N)),
    ),
    "update of batches that are refused as a whole": Update(
        term=3, version=VERSION, n_samples=0, loss=0.5,
        members=tuple(member(n, tuple(range(OFFSET, OFFSET + 64))) for n in range(N)),
    ),
    "push of a set of 1,000": Push(
        worker=1, session=2, term=3, version=VERSION, key="k" * 100,
        batches=tuple(
            PushedBatch(batch=BATCH + n, grant_id=BATCH, n_samples=64, loss_sum=1.5, wait_s=0.1, times=TIMES)
            for n in range(N)
        ),
    ),
    "decision": ProvisionDecision(
        turn=1, time_s=TIME_S, started_s=TIME_S, phase="run", binding="none", feasible=True,
        markets=("on_demand",) * N, reason_of=(300,) * N, incarnations=(70_000,) * N,
        actions=("launched i-0123456789abcdef0, c7g.large in eu-west-1a, for slot 999",) * N,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_fits_into_a_brokers_default_limit(name: str) -> None:
    assert len(encode(RECORDS[name])) < LIMIT_BYTES


@pytest.mark.parametrize("workers", [1_000, 4_800, 10_000])
def test_a_status_and_an_update_take_no_more_than_is_reckoned_with(workers: int) -> None:
    status = replace(STATUS, workers=tuple(map(worker, range(workers))))
    assert len(encode(fitted(status))) <= status_bytes(workers)
    members = tuple(map(member, range(workers)))
    update = Update(term=3, version=VERSION, members=members, n_samples=COUNT, loss=0.5)
    assert len(encode(update)) <= update_bytes(workers)


@pytest.mark.parametrize("records", [64, 1_000, 100_000])
def test_an_update_takes_no_more_than_is_reckoned_with_whichever_records_are_refused_or_not_there(records: int) -> None:
    rng = random.Random(records)
    kinds = [rng.randrange(3) for _ in range(records)]
    dead = tuple(OFFSET + at for at, kind in enumerate(kinds) if kind == 1)
    gaps = tuple((OFFSET + at, OFFSET + at + 1) for at, kind in enumerate(kinds) if kind == 2)
    item = replace(member(1), hi=OFFSET + records, dead=dead, gaps=gaps)
    update = Update(term=3, version=VERSION, members=(item,) * 10, n_samples=COUNT, loss=0.5)
    # Bits at random do not become shorter by compression; the names beside them do.
    assert len(encode(update)) <= update_bytes(10, records)
    (read, *_) = decode(encode(update)).members  # type: ignore[union-attr]
    assert read.dead == dead
    assert [at for lo, hi in read.gaps for at in range(lo, hi)] == [lo for lo, _ in gaps]


def waiting(number: int, text: str) -> WorkerStatus:
    return replace(worker(number), waiting_for=text)


def test_a_status_that_fits_is_left_as_it_is() -> None:
    assert fitted(STATUS) is STATUS
    few = replace(STATUS, workers=tuple(waiting(n, "é" * 200) for n in range(700)))
    assert fitted(few) is few


def test_a_reason_for_which_all_wait_is_said_once() -> None:
    workers = tuple(waiting(n, ("the registry is away: " * 10)[:200] if n % 3 else "") for n in range(6_000))
    status = fitted(replace(STATUS, workers=workers))
    assert len(encode(status)) <= STATUS_LIMIT_BYTES
    said = [status.workers[n].waiting_for for n in (0, 1, 2, 4)]
    assert said == ["", workers[1].waiting_for, "as worker 1", "as worker 1"]
    assert replace(status, workers=workers) == replace(STATUS, workers=workers), "nothing else is changed"


def test_of_a_status_that_is_still_too_long_stays_what_others_decide_by() -> None:
    workers = tuple(waiting(n, f"reason {n} of its own: " * 8) for n in range(10_000))
    status = fitted(replace(STATUS, workers=workers))
    assert len(encode(status)) <= STATUS_LIMIT_BYTES
    for short, full in zip(status.workers, workers, strict=True):
        for name in ("worker", "is_live", "session", "incarnation", "silent_s", "market", "is_spare"):
            assert getattr(short, name) == getattr(full, name)
    assert status.workers[7].waiting_for == ""
    assert status.counters == STATUS.counters


def test_of_many_reasons_no_more_than_500_are_said() -> None:
    workers = tuple(waiting(n, f"reason {n} of its own: " * 8) for n in range(5_000))
    said = [item.waiting_for for item in fitted(replace(STATUS, workers=workers)).workers]
    assert said[499] == workers[499].waiting_for
    assert said[500:] == ["see its log"] * 4_500


def test_records_that_name_gaps_and_refused_offsets_have_a_bound_by_the_size_of_a_batch() -> None:
    """Every other offset of a batch without a record, or refused: 9 bytes and 19 for each."""
    for batch_size in (64, 10_000, 100_000):
        offsets = tuple(range(OFFSET, OFFSET + batch_size, 2))
        gaps = tuple((offset, offset + 1) for offset in offsets)
        batch = PushedBatch(batch=BATCH, grant_id=BATCH, n_samples=0, loss_sum=0.0, dead=offsets, gaps=gaps)
        push = Push(worker=1, session=2, term=3, version=VERSION, key="k" * 100, batches=(batch,))
        assert len(encode(push)) < 400 + 28 * len(offsets)
        skip = Skip(worker=1, session=2, partition=3, first=BATCH, until=BATCH + 1, gaps=gaps)
        assert len(encode(skip)) < 200 + 19 * len(gaps)


def test_a_dead_letter_keeps_a_beginning_of_a_long_record() -> None:
    from doll.consumers.intake.dead_letters import _MAX_PAYLOAD_BYTES
    from doll.consumers.intake.decoding import MAX_REASON_CHARS

    letter = DeadLetter(
        worker=N, partition=N, offset=OFFSET, reason="é" * MAX_REASON_CHARS, payload=bytes(_MAX_PAYLOAD_BYTES),
        payload_bytes=COUNT, time_s=TIME_S,
    )  # fmt: skip
    assert len(encode(letter)) < 70_000
