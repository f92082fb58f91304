"""Control records: every type comes back as it was; every other sequence of bytes is a `RecordError`, nothing else."""

from __future__ import annotations

import random
import struct
from typing import Any

import msgspec
import pytest
import record_builders
from any_record import ANY, TYPES, struct_of
from doll.errors import RecordError
from doll.records import control as records
from doll.records.control import decode, encode
from hypothesis import given


@pytest.mark.slow
@pytest.mark.parametrize("cls", TYPES)
def test_comes_back_as_it_was(cls: type) -> None:
    @given(struct_of(cls))
    def check(record: Any) -> None:
        data = encode(record)
        back = decode(data)
        assert type(back) is cls
        assert back == record
        assert decode(memoryview(data)) == record
        assert decode(memoryview(bytearray(data))) == record

    check()


def test_begins_with_magic_and_schema() -> None:
    """The layout is what other processes, perhaps of another release, rely on."""
    data = encode(records.Hello(term=3))
    assert data == b"\xd0\x0b" + msgspec.msgpack.encode({"type": "hello", "term": 3})


def test_records_of_the_schema_before_the_weights_of_samples_are_read() -> None:
    data = encode(records.Hello(term=3))
    assert decode(b"\xd0\x08" + data[2:]) == decode(data)


def test_type_names_are_distinct_and_short() -> None:
    names = [str(cls.__struct_config__.tag) for cls in TYPES]
    assert len(set(names)) == len(TYPES) == 34
    assert all(name.isalpha() and name.islower() for name in names)


def test_records_are_frozen() -> None:
    with pytest.raises(AttributeError, match="immutable"):
        records.Hello(term=1).term = 2  # type: ignore[misc]


def body(value: Any) -> bytes:
    return b"\xd0\x08" + msgspec.msgpack.encode(value)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (None, "expected a control record, got 0 bytes"),
        (b"", "expected a control record, got 0 bytes"),
        (b"\xd0\x08", "got 2 bytes"),
        (b"\xd1" + encode(records.Hello(term=1))[1:], "first byte 0xd0.*got first byte 0xd1"),
        (b"\xd0\x04" + encode(records.Hello(term=1))[2:], "expected control record schema 8 to 11, got 4: upgrade"),
        (body({"type": "nonsense", "term": 1}), "nonsense"),
        (body({"term": 1}), "type"),
        (body({"type": "hello"}), "term"),
        (body({"type": "hello", "term": "1"}), "Expected `int`, got `str`"),
        (body({"type": "hello", "term": 1, "extra": 1}), "extra"),
        (body({"type": "hello", "term": 2**64 - 1}) + b"\x00", "trailing"),
        (body([1, 2]), "Expected `object`, got `array`"),
        (body({"type": "nack", "worker": 0, "session": 1, "batch": 1, "term": 1, "grant_id": 1, "reason": "-"}), "'-'"),
        (b"\xd0\x08" + b"\x91" * 100_000, "does not fit"),
        (b"\xd0\x08\xdf\xff\xff\xff\xff", "does not fit"),
        (b"\xd0\x08\x82\xa4type\xa5hello\xa4term\xd9\xff", "does not fit"),
        (b"\xd0\x08\x82\xa4type\xa5hello\xa4term\xc7\x01\x05\x00", "does not fit"),
        (b"\xd0\x08\x82\xa4type\xa4stop\xa6reason\xa2\xff\xfe\xa4term\x01", "does not fit"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_the_reason(data: bytes | None, says: str) -> None:
    with pytest.raises(RecordError, match=says):
        decode(data)


def test_20000_random_inputs_raise_nothing_else() -> None:
    rng = random.Random(1)
    samples = [encode(record) for record in EXAMPLES]
    refused = 0
    for round_ in range(20_000):
        kind = round_ % 4
        good = rng.choice(samples)
        if kind == 0:
            data = rng.randbytes(rng.randrange(60))
        elif kind == 1:
            data = b"\xd0\x08" + rng.randbytes(rng.randrange(60))
        elif kind == 2:
            data = good[: rng.randrange(len(good))]
        else:
            changed = bytearray(good)
            for _ in range(rng.randint(1, 3)):
                changed[rng.randrange(len(changed))] = rng.randrange(256)
            data = bytes(changed)
        try:
            record = decode(data)
        except RecordError:
            refused += 1
        else:
            assert isinstance(record, TYPES)
    assert refused > 15_000


EXAMPLES = (
    records.Join(worker=1, process="i"),
    records.Push(
        worker=1,
        session=2,
        term=4,
        version=6,
        key="k",
        batches=(
            records.PushedBatch(
                batch=3,
                grant_id=5,
                n_samples=7,
                loss_sum=0.5,
                metric_sums={"accuracy": 0.5},
                dead=(1, 2),
                gaps=((3, 4),),
            ),
            records.PushedBatch(batch=4, grant_id=9, n_samples=7, loss_sum=0.25),
        ),
    ),
    record_builders.grant_of(term=1, worker=0, session=1, first=3, grant_ids=(5, 9), version=6, min_version=6, key="k"),
    records.TermStarted(term=1, resumed_version=0, origins=(0, 5), records_per_batch=8, time_s=1.0),
    records.Update(
        term=1,
        version=1,
        n_samples=8,
        loss=0.1,
        members=(records.Member(worker=0, partition=0, batch=0, lo=0, hi=8, n_samples=8, base_version=0, dead=(3,)),),
    ),
    records.DeadLetter(worker=0, partition=0, offset=1, reason="r", payload=b"\xff\x00", payload_bytes=2),
    records.Metric(source="ps", values={"x_s": 1.0}, time_s=2.0),
    records.ServerStatus(
        term=1,
        time_s=2.0,
        leader_since_s=1.0,
        pid=3,
        version=4,
        durable_version=2,
        samples_total=32,
        batches_total=4,
        waiting_batches=1,
        computing_batches=2,
        shortfall_batches=0,
        stalled_s=0.0,
        workers=(records.WorkerStatus(worker=0, is_live=True, session=1, market="spot"),),
        counters={"joined": 1},
    ),
)


@given(ANY)
def test_every_truncation_is_refused(record: Any) -> None:
    data = encode(record)
    for length in range(len(data)):
        with pytest.raises(RecordError):
            decode(data[:length])


def test_not_a_number_survives() -> None:
    """A diverged loss must reach the reader, not stop the record."""
    nan = struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000000))[0]
    back = decode(encode(records.Evaluated(term=1, version=1, loss=nan)))
    assert isinstance(back, records.Evaluated)
    assert back.loss != back.loss
