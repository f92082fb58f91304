"""Records that are gone before they were read: stop, skip, or start again where the durable model ends."""

from __future__ import annotations

from typing import Any

import pytest
from doll.config import parse
from doll.consumers.intake.batching import PartitionBatcher
from doll.consumers.intake.deleted_records import DeletedRecords
from doll.consumers.lifecycle.departure import ProcessExit
from doll.consumers.protocol.worker_core import WorkerCore
from doll.errors import ConfigError, DataLossError, ServiceUnavailableError
from doll.records.control import Durable, Join
from worker_fakes import FakeChannel
from worker_records import welcome

JOB = 'job: unit\ntask: {class: "examples.synthetic.task:Gaussian"}\ndata: {workers: 2, batch_size: 4}\n'


class Exit(ProcessExit):
    """Keeps the reason."""

    reason = ""

    def __init__(self) -> None:
        super().__init__(1.0, flush=lambda: None, stop=lambda: None, end_within=lambda seconds, code: None)

    def request(self, code: int, reason: str) -> None:
        self.reason = reason
        super().request(code, reason)


class Rig:
    """Worker 1, which begins at offset 120 (5 batches of 4 records from offset 100 are durable)."""

    def __init__(self, *overrides: str) -> None:
        self.now = 0.0
        self.channel = FakeChannel()
        self.core = WorkerCore(welcome(), max_pending=4, now=0.0)
        self.batcher: PartitionBatcher[Any] = PartitionBatcher(origin=100, records_per_batch=4, next_batch=5)
        self.exit = Exit()
        self.deleted = DeletedRecords(
            parse(JOB, overrides), self.core, self.channel, self.exit, sleep=self.sleep, clock=lambda: self.now
        )

    async def resume_offset(self, offset: int) -> int | None:
        return await self.deleted.resume_offset(1, offset, self.batcher)

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


async def test_kafka_away_or_a_log_that_holds_the_offset_means_ask_again() -> None:
    rig = Rig()
    rig.channel.bounds = ServiceUnavailableError("no answer")
    assert await rig.resume_offset(120) == 120
    rig.channel.bounds = (120, 400)
    assert await rig.resume_offset(120) == 120
    assert (rig.exit.is_requested, rig.channel.sent) == (False, [])


async def test_a_log_that_ends_before_the_offset_is_another_one() -> None:
    rig = Rig()
    rig.channel.bounds = (0, 119)
    assert await rig.resume_offset(120) is None
    assert (rig.exit.is_requested, rig.exit.code) == (True, ConfigError.exit_code)


async def test_a_log_that_was_truncated_and_is_as_long_as_before_is_another_one() -> None:
    rig = Rig()
    rig.channel.bounds = ServiceUnavailableError("no answer")
    rig.deleted.refuse_truncated(1, 120, "leader epoch 3")
    assert (rig.exit.is_requested, rig.exit.code) == (True, ConfigError.exit_code)
    parts = ("read up to offset 120", "truncated (leader epoch 3)", "doll up --fresh")
    assert all(part in rig.exit.reason for part in parts)


async def test_lost_records_end_the_worker_by_default() -> None:
    rig = Rig()
    rig.channel.bounds = (130, 400)
    assert await rig.resume_offset(120) is None
    assert rig.exit.code == DataLossError.exit_code
    assert rig.channel.lost == [(120, 130)]
    assert rig.now >= 10.0, "the server had time to answer"
    assert len(rig.channel.of(Join)) == 1


async def test_lost_records_are_skipped_where_the_job_file_allows_it() -> None:
    rig = Rig("data.on_data_loss=skip")
    rig.channel.bounds = (122, 400)
    assert await rig.resume_offset(120) == 122
    assert (rig.exit.is_requested, rig.channel.lost) == (False, [])
    (batch,) = rig.batcher.feed([122, 123], "ab")
    assert batch.lost == [(120, 122)]
    assert (batch.offsets, batch.values) == ([122, 123], ["a", "b"])


async def test_a_server_that_holds_the_records_by_now_makes_the_worker_start_again() -> None:
    rig = Rig()
    rig.channel.bounds = (130, 400)

    def answer(record: Any) -> None:
        rig.core.on_record(Durable(term=3, worker=1, until={1: 8}, batches=8), 1.0)

    rig.channel.on_send = answer
    assert await rig.resume_offset(120) == 120
    assert (rig.exit.is_requested, rig.exit.code, rig.channel.lost) == (True, 1, [])


@pytest.mark.parametrize(("until", "is_held"), [(5, False), (6, True)])
async def test_the_batch_of_the_offset_must_be_durable(until: int, is_held: bool) -> None:
    rig = Rig("data.on_data_loss=skip")
    rig.channel.bounds = (130, 400)
    rig.core.on_record(Durable(term=3, worker=1, until={1: until}, batches=until), 1.0)
    assert await rig.resume_offset(120) == (120 if is_held else 130)
    assert rig.exit.is_requested is is_held
