"""Transactions: all records of one can be read, or none; a later publisher of the same name fences the earlier one."""

from __future__ import annotations

import contextlib

import pytest
from doll.config import JobConfig
from doll.errors import FencedError
from doll.kafka import topics
from doll.kafka.group_stream import Output, TransactionalWriter
from doll.kafka.range_reader import RangeReader
from doll.services import Services
from job_files import job

pytestmark = pytest.mark.integration


@pytest.fixture
def config(services: Services, job_name: str) -> JobConfig:
    config = job(name=job_name, workers=2)
    topics.ensure(config, services)
    return config


def publisher(config: JobConfig, services: Services) -> TransactionalWriter:
    return TransactionalWriter(config, services, f"{config.job}-test", fenced="another one has begun")


def values(config: JobConfig, services: Services) -> list[bytes | None]:
    with RangeReader(config, services) as reader:
        samples = config.topic("samples")
        return [value for _, value in reader.read(samples, 0, *reader.bounds(samples, 0))]


def test_what_was_aborted_is_not_read_and_the_next_transaction_is(config: JobConfig, services: Services) -> None:
    samples = config.topic("samples")
    with contextlib.closing(publisher(config, services)) as sender:
        with contextlib.suppress(KeyError), sender.transaction():
            sender.deliver([Output(samples, 0, b"aborted")])
            raise KeyError
        with sender.transaction():
            assert sender.deliver([Output(samples, 0, b"a"), Output(samples, 1, b"b"), Output(samples, 0, b"c")]) == [
                2,
                0,
                3,
            ]
    assert values(config, services) == [b"a", b"c"]


def test_a_later_publisher_of_the_same_name_fences_the_earlier_one(config: JobConfig, services: Services) -> None:
    samples = config.topic("samples")
    fenced = pytest.raises(FencedError, match="another one has begun")
    with contextlib.closing(publisher(config, services)) as first, fenced, first.transaction():
        first.deliver([Output(samples, 0, b"first")])
        with contextlib.closing(publisher(config, services)) as second, second.transaction():
            second.deliver([Output(samples, 0, b"second")])
    assert values(config, services) == [b"second"]
