"""One end of a control link: what is a loss, what is silence, what is refused."""

from __future__ import annotations

import struct

import pytest
from doll.control.link_state import (
    MAX_FRAME_BYTES,
    PING_EVERY_S,
    SILENCE_S,
    TO_SERVER,
    TO_WORKER,
    LinkError,
    LinkState,
)
from doll.records.control import AnyRecord, Attach, Detach, Durable, Nack, NewVersion, Ping, encode
from hypothesis import given
from hypothesis import strategies as st

NACK = Nack(worker=0, session=1, batch=2, term=3, grant_id=4, reason="batch")


def ends() -> tuple[LinkState, LinkState]:
    """A worker's and a server's."""
    return LinkState(TO_WORKER, 0.0), LinkState(TO_SERVER, 0.0)


def test_records_arrive_in_order_and_pings_only_count() -> None:
    worker, server = ends()
    frames = [worker.pack(record, 0.0) for record in (Attach(worker=0, session=1, term=3), Ping(), NACK)]
    assert [server.unpack(frame, 0.0) for frame in frames] == [Attach(worker=0, session=1, term=3), None, NACK]


@pytest.mark.parametrize(("before", "wrong"), [((0,), 2), ((0,), 0), ((), 1)])
def test_a_missing_record_a_repeated_one_and_a_swapped_one_are_losses(before: tuple[int, ...], wrong: int) -> None:
    worker, server = ends()
    frames = [worker.pack(NACK, 0.0) for _ in range(3)]
    for at in before:
        server.unpack(frames[at], 0.0)
    with pytest.raises(LinkError, match="records were lost") as error:
        server.unpack(frames[wrong], 0.0)
    assert not error.value.is_refusal


@pytest.mark.parametrize(
    "record", [Durable(term=3, worker=0, until={0: 1}, batches=1), NewVersion(term=3, worker=0, version=1, key="")]
)
def test_a_record_for_the_other_end_or_for_kafka_is_refused(record: AnyRecord) -> None:
    worker, server = ends()
    with pytest.raises(LinkError, match="does not belong") as error:
        server.unpack(worker.pack(record, 0.0), 0.0)
    assert error.value.is_refusal


def test_a_detach_says_why_whatever_its_number() -> None:
    _, server = ends()
    with pytest.raises(LinkError, match="closed by the other end: enough"):
        server.unpack(struct.pack(">I", 99) + encode(Detach(reason="enough")), 0.0)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_record_or_refused(data: bytes) -> None:
    _, server = ends()
    with pytest.raises(LinkError):
        server.unpack(data, 0.0)


def test_silence_is_an_error_and_a_record_ends_it() -> None:
    worker, server = ends()
    server.check(SILENCE_S - 0.1)
    server.unpack(worker.pack(Ping(), 0.0), 1.0)
    server.check(SILENCE_S + 0.9)
    with pytest.raises(LinkError, match="silent"):
        server.check(SILENCE_S + 1.0)


def test_a_ping_is_due_only_where_nothing_else_was_sent() -> None:
    worker, _ = ends()
    assert not worker.ping_due(PING_EVERY_S - 0.1)
    assert worker.ping_due(PING_EVERY_S)
    worker.pack(NACK, PING_EVERY_S)
    assert not worker.ping_due(2 * PING_EVERY_S - 0.1)


def test_a_record_that_no_link_takes_is_told_to_its_sender() -> None:
    worker, _ = ends()
    with pytest.raises(LinkError, match="expected a record of at most"):
        worker.pack(Detach(reason="x" * MAX_FRAME_BYTES), 0.0)
